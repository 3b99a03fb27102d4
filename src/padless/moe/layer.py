"""The whole Mixture-of-Experts layer: `moe`.

route -> gather_quantize -> first projection with activation and quantization -> second projection -> combine. Its
gradients are in `padless.moe.backward`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from padless.arguments import check_integer, check_readable, check_tensor_type, is_one_of, refuse_kinds, shown
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import (
    FORMAT_BY_NAME,
    FORMAT_NAMES,
    FP8_BLOCK,
    MXFP4,
    MXFP4_REPACKED,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
)
from padless.kernels import ahead, replay
from padless.kernels.sm90_moe_decode.choice import ByLogits, Choice, Given
from padless.moe import backward, ops
from padless.moe.activation import Activation
from padless.moe.checks import check_matrix
from padless.moe.choosing import choice_of, given_of
from padless.moe.combining import combine
from padless.moe.decode import moe_in_one_launch
from padless.moe.fused import fuses, gate_rule_of, swiglu
from padless.moe.gather import activate_quantize, route_gather, route_quantize
from padless.moe.router import Router
from padless.moe.routing import Routing, route
from padless.ops.checks import check_pair, describe
from padless.ops.grouped_gemm import grouped_gemm
from padless.ops.grouped_gemm_epilogue import grouped_gemm_epilogue
from padless.quantization.quantize import INPUT_DTYPES, quantize
from padless.runtime.architecture import HOPPER
from padless.runtime.choices import ActivationKind, BackendName, GateUp
from padless.runtime.devices import kernels_for

if TYPE_CHECKING:
    from padless.distributed.expert_parallel import ExpertParallel

# What activations are quantized to where the caller does not say, by the weights' format.
ACTIVATIONS: dict[BlockScaledFormat, BlockScaledFormat] = {
    FP8_BLOCK: FP8_BLOCK,
    MXFP8: MXFP8,
    MXFP8_E5M2: MXFP8,
    MXFP4: FP8_BLOCK,
    NVFP4: NVFP4,
}
BF16 = "BF16"
# Activations, None for bfloat16, and weights whose products on Hopper let the next launch begin no sooner than
# `padless.kernels.ahead` asks for.
READS_AHEAD = ((FP8_BLOCK, FP8_BLOCK), (None, MXFP4), (None, MXFP4_REPACKED), (None, NVFP4))
# A product with a bias.
BIAS = Epilogue(bias=True, d_dtype=torch.bfloat16)


def moe(
    x: torch.Tensor,
    top_k_index: torch.Tensor | None,
    top_k_weights: torch.Tensor | None,
    w13: BlockScaledTensor,
    w2: BlockScaledTensor,
    *,
    router_logits: torch.Tensor | None = None,
    router: Router | None = None,
    correction_bias: torch.Tensor | None = None,
    activation: ActivationKind = "swiglu",
    gate_up: GateUp = "concatenated",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    shared: torch.Tensor | None = None,
    activations: BlockScaledFormat | torch.dtype | None = None,
    global_scale1: torch.Tensor | None = None,
    global_scale2: torch.Tensor | None = None,
    num_experts: int | None = None,
    out_dtype: torch.dtype | None = None,
    backend: BackendName | None = None,
    ep: ExpertParallel | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t]), plus shared[t]; (T, H).

    expert(e, x) = w2[e] @ act(w13[e] @ x + bias13[e]) + bias2[e].

    Args:
        x: (T, H) bfloat16, float16 or float32; T may be 0.
        top_k_index: (T, k) int32 or int64, k from 1 to 16. Ids that are no expert add nothing.
        top_k_weights: (T, k) bfloat16, float16 or float32.
        router_logits: (T, E), to be given with router, and with correction_bias where there is one, in the place of
            top_k_index and top_k_weights, which are None then: ids and weights are those of `padless.moe.topk`.
        w13: (E, 2 I, H) weights with a gate, (E, I, H) without, quantized with kind="weight".
        w2: (E, H, I) weights.
        activation: "swiglu" and others; with gate_up, alpha, limit and up_offset: see `padless.moe.Activation`. gpt-oss:
            "swiglu", "alternating", 1.702, 7.0, 1.0.
        bias13: (E, 2 I) or (E, I), float32; bfloat16 and float16 are converted every time.
        bias2: (E, H), the same.
        shared: (T, H), added to the result.
        activations: format that x and the activated rows are quantized to, or torch.bfloat16 for none (for FP4 weights
            on Hopper). None follows from w13: FP8_BLOCK for FP8_BLOCK and MXFP4 weights, MXFP8 for MXFP8, NVFP4 for
            NVFP4, bfloat16 for MXFP4_REPACKED.
        global_scale1: NVFP4's decode scale of x, float32, one value or (E,); None is 1, which is right for magnitudes
            from 0.1 to 2688. A checkpoint's input scale.
        global_scale2: the same for the activated rows.
        num_experts: E, to be held against the weights.
        out_dtype: of the result; None is x's dtype.
        backend: of the products, as in `padless.grouped_gemm`.
        ep: a `padless.distributed.ExpertParallel`: the experts are spread over its ranks. w13, w2, biases and global
            scales are then those of ep.local_experts alone, top_k_index is of all E experts, the call is collective, and
            `ExpertParallel.combine` states the sum, with rows in the type of x or quantized before they are sent. To
            it shared is added in float32, with one rounding to out_dtype. Where the layer is differentiable and grad
            mode is on, the result requires grad, since other ranks' x may.

    A token's row depends, bit for bit, on its own x, ids, weights and shared row and on the weights alone, not on the
    tokens around it. No synchronization; safe in CUDA graphs; memory is for T * k rows. With ep: memory is for its
    capacity, and its backend says whether it synchronizes and may be captured.

    Differentiable for x, top_k_weights or router_logits, and shared where weights and activations are FP8_BLOCK, scales
    plain, the activation is plain SwiGLU and there is no bias, and ep's rows are not quantized; else an argument that
    requires grad is refused. The weights are constants: `padless.nn.Experts` trains them. Raises ValueError.
    """
    options = (activation, gate_up, alpha, limit, up_offset, activations, num_experts, out_dtype, router)
    inputs = (x, top_k_index, top_k_weights, shared, router_logits, correction_bias)
    constants = (w13, w2, bias13, bias2, global_scale1, global_scale2)
    facts = None
    if ep is None and is_one_of(backend, (None, "cuda")):
        facts = replay.facts_of(("moe", *options), inputs, constants)
        if facts is not None and (again := replay.known(facts)) is not None:
            if (out := again(*inputs)) is not None:
                return out
            replay.forget(facts)
    with _checking(ep):
        act = Activation(activation, gate_up, alpha, limit, up_offset)
        _check(x, w13, w2, num_experts if ep is None else None, act)
        num_routed = w13.data.shape[0] if ep is None else ep.settings.num_experts
        choice = choice_of(x, top_k_index, top_k_weights, router_logits, router, correction_bias, num_routed)
        experts, n = w13.data.shape[:2]
        check_readable(
            bias13=bias13, bias2=bias2, global_scale1=global_scale1, global_scale2=global_scale2, w13=w13, w2=w2
        )
        _check_vector("bias13", bias13, [(experts, n)], INPUT_DTYPES, x.device)
        _check_vector("bias2", bias2, [(experts, x.shape[1])], INPUT_DTYPES, x.device)
        for name, scale in (("global_scale1", global_scale1), ("global_scale2", global_scale2)):
            _check_vector(name, scale, [(), (1,), (experts,)], (torch.float32,), x.device)
        if shared is not None:
            check_matrix("shared", shared, x.shape[0], x.shape[1], x.device)
        dtype = x.dtype if out_dtype is None else out_dtype
        if not is_one_of(dtype, INPUT_DTYPES):
            raise ValueError(f"out_dtype is {shown(dtype)}; allowed: torch.bfloat16, torch.float16, torch.float32")
        name = _activations(activations, w13, x)
        check_pair("grouped_gemm", activations=name, w13=w13.format.name)
        check_pair("grouped_gemm", activations=name, w2=w2.format.name)
        if name != NVFP4.name and (global_scale1 is not None or global_scale2 is not None):
            raise ValueError(f"global_scale1 and global_scale2 must be None for {name} activations; NVFP4 has them")
        trained = backward.wanted(x=x, top_k_weights=top_k_weights, router_logits=router_logits, shared=shared)
        if trained is not None:
            has_bias = bias13 is not None or bias2 is not None
            backward.check_differentiable(trained, w13, w2, act, name, has_bias)
    first, second = Projection(w13, bias13, backend), Projection(w2, bias2, backend)
    scales = (global_scale1, global_scale2)
    if ep is not None:
        format = FORMAT_BY_NAME.get(name)
        layer = (first, second, act, format, _scales(x, format, scales))
        given = given_of(choice)
        return ep._moe(x, given.ids, given.weights, layer, shared, dtype, num_experts)
    if trained is not None or ops.is_traced(x, *choice.tensors, w13.data, w2.data):
        given = given_of(choice)
        result: torch.Tensor = torch.ops.padless.moe(
            x, given.ids, given.weights, *ops.packed(w13), *ops.packed(w2), bias13, bias2, shared, global_scale1,
            global_scale2, name, activation, gate_up, alpha, limit, up_offset, dtype, backend,
        )  # fmt: skip
        return result

    def forward(x: Any, top_k_index: Any, top_k_weights: Any, shared: Any, logits: Any, bias: Any) -> torch.Tensor:
        moved = Given(top_k_index, top_k_weights) if router is None else ByLogits(logits, bias, router)
        return _forward(x, moved, first, second, act, name, scales, shared, dtype)

    return replay.run(facts, forward, inputs)


def _moe_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=arguments[-2])


@ops.operator(
    "moe",
    "(Tensor x, Tensor top_k_index, Tensor top_k_weights, "
    "Tensor w13, Tensor w13_scale, Tensor? w13_global_scale, str w13_format, str w13_layout, "
    "Tensor w2, Tensor w2_scale, Tensor? w2_global_scale, str w2_format, str w2_layout, "
    "Tensor? bias13, Tensor? bias2, Tensor? shared, Tensor? global_scale1, Tensor? global_scale2, str activations, "
    "str activation, str gate_up, float alpha, float? limit, float up_offset, ScalarType out_dtype, str? backend) "
    "-> Tensor",
    _moe_fake,
)
def _moe(
    x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor,
    w13: torch.Tensor, w13_scale: torch.Tensor, w13_global: torch.Tensor | None, w13_format: str, w13_layout: str,
    w2: torch.Tensor, w2_scale: torch.Tensor, w2_global: torch.Tensor | None, w2_format: str, w2_layout: str,
    bias13: torch.Tensor | None, bias2: torch.Tensor | None, shared: torch.Tensor | None,
    global_scale1: torch.Tensor | None, global_scale2: torch.Tensor | None, activations: str,
    activation: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
    out_dtype: torch.dtype, backend: BackendName | None,
) -> torch.Tensor:  # fmt: skip
    first = Projection(ops.unpacked(w13, w13_scale, w13_global, w13_format, w13_layout), bias13, backend)
    second = Projection(ops.unpacked(w2, w2_scale, w2_global, w2_format, w2_layout), bias2, backend)
    act = Activation(activation, gate_up, alpha, limit, up_offset)
    scales = (global_scale1, global_scale2)
    given = Given(top_k_index, top_k_weights)
    return _forward(x, given, first, second, act, activations, scales, shared, out_dtype)


backward.register()


def _forward(
    x: torch.Tensor,
    choice: Choice,
    first: Projection,
    second: Projection,
    activation: Activation,
    activations: str,
    global_scales: tuple[torch.Tensor | None, torch.Tensor | None],
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`moe` of checked arguments; activations: name of their format."""
    if x.shape[0] == 0:
        return torch.empty(x.shape, dtype=out_dtype, device=x.device)
    format = FORMAT_BY_NAME.get(activations)
    options = {"activation": activation, "format": format, "bias13": first.bias, "bias2": second.bias, "shared": shared}
    how: dict[str, Any] = options | {"out_dtype": out_dtype, "backend": first.backend}
    out = moe_in_one_launch(x, choice, first.weights, second.weights, **how)
    if out is None and isinstance(choice, ByLogits):  # a launch of `topk` ahead
        choice = given_of(choice)
        out = moe_in_one_launch(x, choice, first.weights, second.weights, **how)
    if out is not None:
        return out
    given = given_of(choice)
    of_x, of_hidden = _scales(x, format, global_scales)
    routing, rows = gathered(x, given.ids, first.weights.shape[0], format, of_x)
    is_ready = reads_ahead(first, second, activation, format, given.ids.numel())
    with ahead.ready(ahead.Ready(given.ids) if is_ready else None):
        hidden = first.activated(rows, routing.offs, activation, format, of_hidden)
    with ahead.ready(ahead.Ready() if is_ready else None):
        y = second.product(hidden, routing.offs)
        return combine(y, routing.inverse, given.weights, shared, out_dtype=out_dtype)


def reads_ahead(
    first: Projection, second: Projection, activation: Activation, format: BlockScaledFormat | None, slots: int
) -> bool:
    """Whether the products of so many slots gain by what they may read before the launch ahead has ended."""
    return (
        (format, first.weights.format) in READS_AHEAD
        and first.weights.format == second.weights.format
        and slots <= ahead.MOST_SLOTS
        and kernels_for(first.weights.data.device, first.backend) == HOPPER.name
        and fuses(first.weights, activation, format, first.backend)
    )


def gathered(
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    num_experts: int,
    format: BlockScaledFormat | None,
    global_scale: torch.Tensor | None,
) -> tuple[Routing, BlockScaledTensor | torch.Tensor]:
    """The routing, and rows of x sorted by expert, quantized to format; bfloat16 for None."""
    if format is None:
        return route_gather(x, top_k_index, num_experts)
    if global_scale is not None and global_scale.numel() > 1:  # a token's codes differ by expert
        routing = route(top_k_index, num_experts)
        return routing, quantize(x, format, rows=routing.tokens, global_scale=global_scale, offs=routing.offs)
    return route_quantize(x, top_k_index, num_experts, format, global_scale=global_scale)


@dataclass(frozen=True, eq=False)
class Projection:
    """Weights (E, N, K), their bias (E, N) or None, and what multiplies."""

    weights: BlockScaledTensor
    bias: torch.Tensor | None
    backend: BackendName | None

    def product(self, a: BlockScaledTensor | torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """a @ weights of its expert, plus bias, rounded once to bfloat16; (M, N)."""
        if self.bias is None:
            return grouped_gemm(a, self.weights, offs, backend=self.backend)
        tensors = EpilogueTensors(bias=self.bias.to(torch.float32).contiguous())
        found = grouped_gemm_epilogue(a, self.weights, offs, BIAS, tensors, backend=self.backend)
        assert found.d is not None
        return found.d

    def activated(
        self,
        a: BlockScaledTensor | torch.Tensor,
        offs: torch.Tensor,
        activation: Activation,
        format: BlockScaledFormat | None,
        global_scale: torch.Tensor | None,
    ) -> BlockScaledTensor | torch.Tensor:
        """The activation of the product, quantized to format or rounded to bfloat16: in one launch where `fuses`."""
        if not fuses(self.weights, activation, format, self.backend):
            h = self.product(a, offs)
            return activate_quantize(h, activation, format, global_scale=global_scale, offs=offs)
        return swiglu(
            a,
            self.weights,
            offs,
            gate_up=activation.gate_up,
            gate_rule=gate_rule_of(activation),
            bias=self.bias,
            format=format,
            global_scale=global_scale,
            backend=self.backend,
        )


# --- checks ----------------------------------------------------------------------------------------------


def _checking(ep: ExpertParallel | None) -> AbstractContextManager[None]:
    """A block of checks, whose error is told to ranks that wait for this one."""
    if ep is not None and not hasattr(ep, "_moe"):
        raise ValueError(f"ep must be a padless.distributed.ExpertParallel or None, got {shown(ep)}")
    return nullcontext() if ep is None else ep.checking()


def _check(
    x: torch.Tensor, w13: BlockScaledTensor, w2: BlockScaledTensor, num_experts: int | None, activation: Activation
) -> None:
    """Raises ValueError for x and weights that do not go together."""
    check_tensor_type("x", x)
    check_matrix("x", x, None, None, x.device)
    for name, w in (("w13", w13), ("w2", w2)):
        if not isinstance(w, BlockScaledTensor) or w.data.dim() != 3 or not w.is_weight:
            raise ValueError(
                f"{name} must be a (E, N, K) BlockScaledTensor of kind 'weight' (see padless.quantize), got "
                f"{describe(w)}"
            )
        if w.device != x.device:
            raise ValueError(f"{name} is on {w.device} and x on {x.device}; they must be on one device")
    experts, n, k = w13.logical_shape
    if k != x.shape[1]:
        remedy = "; w13 seems to be (E, K, N), of which .mT.contiguous() makes (E, N, K)" if n == x.shape[1] else ""
        raise ValueError(
            f"w13 is (E, N, K) = {w13.logical_shape} and x {tuple(x.shape)}: K must be x's columns{remedy}"
        )
    wanted = (experts, k, activation.out_columns(n))
    if w2.logical_shape != wanted:
        raise ValueError(
            f"w2 must be (E, H, I) = {wanted} where w13 has {n} rows and activation is {activation.kind!r}, "
            f"got {w2.logical_shape}"
        )
    if num_experts is not None:
        check_integer("num_experts", num_experts, 1)
    if num_experts is not None and num_experts != experts:
        raise ValueError(f"num_experts is {num_experts} and w13 has {experts} experts; leave it None")


def _activations(activations: object, w13: BlockScaledTensor, x: torch.Tensor) -> str:
    """Name of the format that activations are quantized to, "BF16" for none."""
    if activations is None and w13.format == MXFP4_REPACKED:  # nothing else is multiplied with it
        activations = torch.bfloat16
    if activations is None:
        return ACTIVATIONS[w13.format].name
    if activations is torch.bfloat16:
        if x.dtype != torch.bfloat16:
            raise ValueError(f"activations is torch.bfloat16 and x is {x.dtype}; convert x to bfloat16")
        return BF16
    if isinstance(activations, BlockScaledFormat) and activations.name in FORMAT_NAMES:
        return activations.name
    allowed = ", ".join(FORMAT_NAMES)
    raise ValueError(f"activations is {shown(activations)}; allowed: None, torch.bfloat16, {allowed}")


def _check_vector(
    name: str,
    t: torch.Tensor | None,
    shapes: list[tuple[int, ...]],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    if t is None:
        return
    if isinstance(t, torch.Tensor) and (t.layout is not torch.strided or t.is_nested):
        refuse_kinds(**{name: t})
    if not isinstance(t, torch.Tensor) or tuple(t.shape) not in shapes or t.dtype not in dtypes or t.device != device:
        allowed = " or ".join(map(str, shapes))
        kinds = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed} {kinds} on {device}, got {describe(t)}")


def _scales(
    x: torch.Tensor, format: BlockScaledFormat | None, given: tuple[torch.Tensor | None, torch.Tensor | None]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """NVFP4's global scales, 1 where none is given; None for other formats."""
    if format != NVFP4:
        return None, None
    first, second = (torch.ones((), dtype=torch.float32, device=x.device) if s is None else s for s in given)
    return first, second
