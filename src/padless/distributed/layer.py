"""Mixture-of-Experts layers over ranks: dispatch, this rank's experts, combine, and their gradients.

`expert_parallel_moe` has any function for its experts; `moe_over_ranks` is `padless.moe.moe` with a dispatch for
its gather and a combine for its sum.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from padless.arguments import check_type, refuse_gradients, refuse_tangents, shown
from padless.distributed.checks import check_tokens
from padless.distributed.functions import gradients_of_dispatch, gradients_of_rows, summed, tracked
from padless.distributed.plan import ExpertPlan
from padless.formats import FP8_BLOCK, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.gradients import once_differentiable
from padless.kernels import ahead
from padless.moe import backward
from padless.moe.activation import Activation
from padless.moe.layer import Projection, moe, reads_ahead
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.lifting import lowered_by_lift, quantize_lifted
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.runtime.devices import chosen_backend, device_of

if TYPE_CHECKING:
    from padless.distributed.expert_parallel import ExpertParallel

Rows = BlockScaledTensor | torch.Tensor
ExpertsFunction = Callable[[Rows, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class QuantizedExperts:
    """This rank's experts: both projections, the activation between them, and what rows are quantized to.

    format: None is bfloat16. global_scales: NVFP4's, of rows and of activated rows, one value or one for each expert
    here; None elsewhere.
    """

    first: Projection
    second: Projection
    activation: Activation
    format: BlockScaledFormat | None
    global_scales: tuple[torch.Tensor | None, torch.Tensor | None]

    @property
    def is_differentiable(self) -> bool:
        """Whether `padless.moe.moe` has a backward pass for them."""
        has_bias = self.first.bias is not None or self.second.bias is not None
        name = "" if self.format is None else self.format.name
        return backward.is_differentiable(self.first.weights, self.second.weights, self.activation, name, has_bias)

    def quantized(self, rows: Rows, offs: torch.Tensor) -> Rows:
        """Rows for the first projection: as they came, or quantized here, to the same codes."""
        if self.format is None or isinstance(rows, BlockScaledTensor):
            return rows
        scale = self.global_scales[0]
        by_group = offs if scale is not None and scale.numel() > 1 else None
        return quantize(rows, self.format, global_scale=scale, offs=by_group)

    def ready(self, slots: int) -> ahead.Ready | None:
        """The operands of the second projection that are there before the first, with so many slots of all ranks."""
        parts = self.first, self.second, self.activation, self.format
        return ahead.Ready() if reads_ahead(*parts, slots) else None

    def activated(self, rows: Rows, offs: torch.Tensor) -> Rows:
        """The first projection's activated rows."""
        return self.first.activated(rows, offs, self.activation, self.format, self.global_scales[1])

    def product(self, rows: Rows, offs: torch.Tensor) -> torch.Tensor:
        """The experts' results for their rows: (C, H) bfloat16."""
        return self.second.product(self.activated(rows, offs), offs)


def expert_parallel_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    ep: ExpertParallel,
    *,
    experts_fn: ExpertsFunction | None = None,
    w13: BlockScaledTensor | None = None,
    w2: BlockScaledTensor | None = None,
    activation: Activation | None = None,
    global_scale1: torch.Tensor | None = None,
    global_scale2: torch.Tensor | None = None,
    backend: BackendName | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * expert(ids[t, j], x[t]), the experts being spread over ranks; (T, H).

    Args:
        x: (T, H) this rank's tokens, as `ExpertParallel.dispatch` takes them; T up to max_tokens.
        ids: (T, k) experts.
        weights: (T, k) router weights.
        ep: the exchange.
        experts_fn: (rows, offs) -> (C, H) in bfloat16 (float32 where ep's format is): this rank's experts, rows of
            group g by its expert ep.local_experts[g]. With it the layer is differentiable where ep's format is bfloat16
            or float32 and the function is.
        w13: instead of it, with w2, this rank's (Eloc, 2 I, H) weights, for inference: the products and the activation
            of `padless.moe.moe`, rows of ep's format.
        w2: (Eloc, H, I).
        activation: of the layer with w13 and w2; None is SwiGLU, gate above up.
        global_scale1: NVFP4's decode scale of x, one float32 value.
        global_scale2: the same for the activated rows.
        backend: of the products, as in `padless.grouped_gemm`.

    Rows are weighted when they are summed, see `ExpertParallel.combine`. A collective call. Raises ValueError.
    """
    if not hasattr(ep, "_moe"):
        raise ValueError(f"ep must be a padless.distributed.ExpertParallel, got {shown(ep)}")
    with ep.checking():
        given = [name for name, value in (("experts_fn", experts_fn), ("w13", w13), ("w2", w2)) if value is not None]
        if given not in (["experts_fn"], ["w13", "w2"]):
            raise ValueError("experts_fn or both w13 and w2 must be given, and not both; give one of them")
        if experts_fn is None:
            check_tokens(ep.settings, ep.device, x, ids, weights, global_scale1)
            refuse_gradients(x=x, weights=weights)
            check_type("activation", activation, Activation)
        elif not callable(experts_fn):
            raise ValueError(f"experts_fn must be a function of rows and offs, got {shown(experts_fn)}")
    if experts_fn is not None:
        rows, plan = ep.dispatch(x, ids, weights, global_scale=global_scale1)
        return ep.combine(experts_fn(rows, plan.offs), plan, weighted=True)
    assert w13 is not None
    assert w2 is not None
    act, fmt = activation or Activation(), ep.settings.row_format.format
    with torch.no_grad():
        return moe(
            x.to(fmt) if isinstance(fmt, torch.dtype) else x, ids, weights, w13, w2, activation=act.kind,
            gate_up=act.gate_up, alpha=act.alpha, limit=act.limit, up_offset=act.up_offset, activations=fmt,
            global_scale1=global_scale1, global_scale2=global_scale2, out_dtype=ep.settings.partial, backend=backend,
            ep=ep,
        )  # fmt: skip


def moe_over_ranks(
    ep: ExpertParallel,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    experts: QuantizedExperts,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
    num_experts: int | None,
) -> torch.Tensor:
    """`padless.moe.moe` of arguments that it has checked, but for what ``ep`` is for. A collective call. ValueError."""
    with ep.checking():
        wanted = (t is not None and t.requires_grad for t in (x, top_k_weights, shared))
        check(ep, x, top_k_index, experts, num_experts, torch.is_grad_enabled() and any(wanted))
    if torch.is_grad_enabled() and ep.settings.row_format.is_plain and experts.is_differentiable:
        given = ep, experts, tracked(x), top_k_weights, top_k_index, shared, out_dtype
        return _MoeOverRanks.apply(*given)  # type: ignore[no-untyped-call, no-any-return]
    with torch.no_grad():
        rows, plan = ep._dispatch(x, top_k_index, top_k_weights, global_scale=_sent_scale(ep, experts))
        hidden = experts.activated(experts.quantized(rows, plan.offs), plan.offs)
        with ahead.ready(experts.ready(ep.settings.num_slots)):
            y = experts.second.product(hidden, plan.offs)
            return summed(ep, y.to(ep.settings.partial), plan, shared, out_dtype)


def check(
    ep: ExpertParallel,
    x: torch.Tensor,
    top_k_index: torch.Tensor,
    experts: QuantizedExperts,
    num_experts: int | None,
    trains: bool,
) -> None:
    """Raises ValueError for a layer that ``ep`` is not for."""
    refuse_tangents(x=x)
    s, here, given = ep.settings, len(ep.local_experts), experts.first.weights.data.shape[0]
    if given != here:
        raise ValueError(
            f"w13 has {given} experts and rank {ep.rank} has {here}; with ep give those of ep.local_experts alone"
        )
    if num_experts not in (None, s.num_experts):
        raise ValueError(f"num_experts is {num_experts} and ep's {s.num_experts}; leave it None")
    if (x.shape[1], top_k_index.shape[1]) != (s.hidden, s.top_k):
        raise ValueError(
            f"x has {x.shape[1]} columns and top_k_index {top_k_index.shape[1]}, and ep is for {s.hidden} and "
            f"{s.top_k}; make it with hidden= and top_k= of the layer"
        )
    if (backend := chosen_backend(experts.first.backend, x)) != "reference":
        device_of(backend, x)
    sent, scale = s.row_format.format, experts.global_scales[0]
    if isinstance(sent, BlockScaledFormat):
        if sent != experts.format:
            wanted = "bfloat16" if experts.format is None else experts.format.name
            raise ValueError(
                f"ep's rows are {sent.name} and activations {wanted}; make ep with fmt= of the activations, or of x"
            )
        if trains:
            raise ValueError(
                f"x, top_k_weights or shared requires grad and ep's rows in {sent.name} carry none; make ep with "
                "fmt=torch.bfloat16, or call under torch.no_grad()"
            )
        if scale is not None and scale.numel() > 1:
            raise ValueError(
                f"global_scale1 has {scale.numel()} values and ep's rows have one; give one, or make ep with "
                "fmt=torch.bfloat16"
            )
    elif x.dtype != sent:
        raise ValueError(f"x is {x.dtype} and ep's rows are {sent}; convert x, or make ep with fmt= of x")


def _sent_scale(ep: ExpertParallel, experts: QuantizedExperts) -> torch.Tensor | None:
    """NVFP4's scale of rows that are quantized before they are sent."""
    return experts.global_scales[0] if ep.settings.row_format.format == NVFP4 else None


class _MoeOverRanks(torch.autograd.Function):
    """Keeps the rows' FP8 codes, and multiplies them again in the backward pass: see `padless.moe.backward`."""

    @staticmethod
    def forward(
        ctx: Any, ep: ExpertParallel, experts: QuantizedExperts, x, top_k_weights, top_k_index, shared, out_dtype
    ):
        received, plan = ep._dispatch(x, top_k_index, top_k_weights)
        rows = experts.quantized(received, plan.offs)
        assert isinstance(rows, BlockScaledTensor)
        out = summed(ep, experts.product(rows, plan.offs).to(ep.settings.partial), plan, shared, out_dtype)
        ctx.ep, ctx.experts = ep, experts
        ctx.dtypes = x.dtype, top_k_weights.dtype, None if shared is None else shared.dtype
        ctx.save_for_backward(*plan[:5], rows.data, rows.scale)  # the router weights may be inference mode's
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor):
        ep, experts = ctx.ep, ctx.experts
        *parts, codes, scale = ctx.saved_tensors
        plan, w13 = ExpertPlan(*parts), experts.first
        rows = BlockScaledTensor(codes, scale, FP8_BLOCK)
        dy = quantize_lifted(gradients_of_rows(ep, dout, plan))
        found = backward.gradients_of_experts(
            rows, dy, plan.prob, plan.offs, w13.weights, experts.second.weights, experts.activation.gate_up, w13.backend
        )
        turned = backward.transposed(w13.weights.data, lowered_by_lift(w13.weights.scale))
        assert found.dprob is not None
        dx_rows = grouped_gemm(found.dz_rows, turned, plan.offs, backend=w13.backend)
        dx, dweights = gradients_of_dispatch(ep, dx_rows.to(ep.settings.partial), found.dprob, plan)
        dshared = dout.to(ctx.dtypes[2]) if ctx.needs_input_grad[5] else None
        return None, None, dx.to(ctx.dtypes[0]), dweights.to(ctx.dtypes[1]), None, dshared, None
