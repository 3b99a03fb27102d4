"""Single modules of the transformers plug-in: weights and their cache, gates, sentinels, FP8 products, gradients."""

from __future__ import annotations

import copy
import gc
import inspect
import runpy
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import (
    FP8Experts,
    FP8ExpertsInterface,
    FP8Linear,
    load_finegrained_fp8_kernel,
)
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, dequantize, quantize
from padless.integrations.transformers import experts_forward, quantize_experts, register, set_activations, weights
from padless.integrations.transformers.experts import fused_activation
from padless.integrations.transformers.weights import expert_weights
from padless.integrations.weights import refresh
from padless.moe import moe, ops, route
from support.hub_checkpoints import dequantized, error, reference_experts

E, H, I, T, K = 5, 256, 128, 29, 2  # noqa: E741  the layer's sizes by their usual names
EXAMPLE = Path(__file__).parents[2] / "examples" / "generate_qwen3_moe.py"


def config(**more: Any) -> SimpleNamespace:
    given = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "hidden_act": "silu"}
    return SimpleNamespace(**(given | {"_experts_implementation": "padless"} | more))


def fp8_experts(**more: Any) -> Any:
    """transformers' FP8 experts with random weights, dispatched as from_pretrained dispatches them."""
    arguments = {name: more.pop(name) for name in ("scale_fmt", "expert_dtype", "block_size") if name in more}
    kind = use_experts_implementation(type("Experts", (FP8Experts,), {}), experts_interface=FP8ExpertsInterface())
    fp4 = arguments.get("expert_dtype") == "fp4"
    if fp4 and "expert_dtype" not in inspect.signature(FP8Experts.__init__).parameters:
        more["expert_dtype"] = arguments.pop("expert_dtype")  # where transformers 5.17 looks for it
    module = kind(config(**more), **({"block_size": (128, 128)} | arguments))
    ue8m0 = arguments.get("scale_fmt") == "ue8m0"
    mx = fp4 or arguments.get("block_size") == (1, 32)
    module.originals = {}
    for name, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        module.originals[name] = torch.randn(E, n, k) / k**0.5
        t = quantize(
            module.originals[name], MXFP4 if fp4 else MXFP8 if mx else FP8_BLOCK, kind="weight", scale_layout="plain"
        )
        scale = t.scale
        if ue8m0 and not mx:
            scale = torch.exp2(torch.round(torch.log2(scale))).to(torch.float8_e8m0fnu)
        if mx and not ue8m0:
            scale = scale.float()
        with torch.no_grad():
            getattr(module, name).copy_(t.data.view(torch.int8) if fp4 else t.data)
            getattr(module, f"{name}_scale_inv").copy_(scale)
    return module.eval()


def inputs(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids of which some are E, and weights."""
    ids = torch.rand(T, E + 1).argsort(-1)[:, :K]
    return (4 * torch.randn(T, H)).to(dtype), ids, torch.rand(T, K)


def values_of(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights in float64, decoded by padless."""
    built = expert_weights(module)
    return dequantize(built.w13, torch.float32).double(), dequantize(built.w2, torch.float32).double()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


# --- formats ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "bound"),
    [
        ({}, 0.06),
        ({"scale_fmt": "ue8m0"}, 0.06),
        ({"scale_fmt": "ue8m0", "block_size": (1, 32)}, 0.06),
        ({"scale_fmt": "ue8m0", "expert_dtype": "fp4"}, 0.01),  # bfloat16 activations
        ({"scale_fmt": "float", "expert_dtype": "fp4"}, 0.01),
    ],
)
def test_formats(given: dict[str, Any], bound: float) -> None:
    module = fp8_experts(**given)
    x, ids, top_k_weights = inputs()
    with torch.no_grad():
        got = module(x, ids, top_k_weights)
    w13, w2 = values_of(module)
    assert error(got, reference_experts(x, ids, top_k_weights, w13, w2)) < bound
    if given == {"scale_fmt": "ue8m0"}:  # the fixture rounds its scales
        assert torch.equal(w13, dequantized(module.gate_up_proj, module.gate_up_proj_scale_inv))
        return
    for values, name in ((w13, "gate_up_proj"), (w2, "down_proj")):
        assert error(values, module.originals[name]) < (0.15 if "expert_dtype" in given else 0.04)


def test_fp4_experts_multiply_fp8_rows() -> None:
    """On request, as such checkpoints were made for: the bits of moe() with FP8_BLOCK activations."""
    module = fp8_experts(scale_fmt="ue8m0", expert_dtype="fp4")
    x, ids, top_k_weights = inputs()
    built = expert_weights(module)
    assert (built.w13.format, built.activations) == (MXFP4, "BF16")
    want = reference_experts(x, ids, top_k_weights, *values_of(module))
    errors = {}
    for format in (None, FP8_BLOCK, torch.bfloat16, MXFP8):
        assert set_activations(module, format) is module
        with torch.no_grad():
            got = module(x, ids, top_k_weights)
        assert torch.equal(got, moe(x, ids, top_k_weights, built.w13, built.w2, activations=format or torch.bfloat16))
        errors[format] = error(got, want)
    assert errors[None] == errors[torch.bfloat16]
    assert errors[torch.bfloat16] < 0.01 < errors[FP8_BLOCK] < 0.06
    with pytest.raises(
        ValueError, match="format is NVFP4 and the experts' weights are MXFP4; allowed beside these: BF16"
    ):
        set_activations(module, NVFP4)
    with pytest.raises(ValueError, match=r"format is torch\.float16; allowed: None, torch\.bfloat16, FP8_BLOCK"):
        set_activations(module, torch.float16)
    with pytest.raises(ValueError, match="model has no quantized experts"):
        set_activations(nn.Linear(4, 4), FP8_BLOCK)


@pytest.mark.gpu
def test_fp4_experts_on_hopper() -> None:
    """FP8_BLOCK x MXFP4 on the GPU, near the CPU's layer."""
    module = set_activations(fp8_experts(scale_fmt="ue8m0", expert_dtype="fp4"), FP8_BLOCK)
    given = inputs()
    with torch.no_grad():
        want = module(*given)
        got = module.to("cuda")(*(t.to("cuda") for t in given))
    assert expert_weights(module).activations == "FP8_BLOCK"
    assert error(got.cpu(), want) < 0.006


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    module = fp8_experts()
    x, ids, top_k_weights = inputs(dtype)
    with torch.no_grad():
        got = module(x, ids, top_k_weights.to(dtype))
    assert got.dtype == dtype
    assert error(got, reference_experts(x, ids, top_k_weights, *values_of(module))) < 0.06


def test_refused_formats() -> None:
    module = fp8_experts()
    module.activation_scheme = "static"
    with torch.no_grad(), pytest.raises(ValueError, match="activation_scheme is 'static'"):
        module(*inputs())
    module = fp8_experts()
    module.gate_up_proj_scale_inv = nn.Parameter(torch.ones(E, 1, 1))
    with torch.no_grad(), pytest.raises(ValueError, match=r"scales of gate_up_proj of Experts have shape \(5, 1, 1\)"):
        module(*inputs())


# --- sentinels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_gate", [False, True])
def test_ids_of_other_ranks_add_nothing(own_gate: bool) -> None:
    """A slot of id num_experts gives the bits of a layer without the slot, whatever its weight is."""
    module = fp8_experts(**({"mlp_gate_softcap": 3.0, "mlp_up_softcap": 2.0} if own_gate else {}))
    if own_gate:
        module.gate_softcap, module.up_softcap = 3.0, 2.0
        type(module)._apply_gate = softcapped
    x, ids, top_k_weights = inputs()
    ids[:, 1] = E
    top_k_weights[:, 1] = float("nan")
    with torch.no_grad():
        got = module(x, ids, top_k_weights)
        alone = module(x, ids[:, :1].contiguous(), top_k_weights[:, :1].contiguous())
    assert torch.equal(got, alone)
    assert got.isfinite().all()


def softcapped(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (3 * torch.tanh(gate / 3) * torch.sigmoid(gate) * 2 * torch.tanh(up / 2)).to(gate_up.dtype)


# --- gates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "fused"),
    [
        ({}, {}),
        ({"swiglu_limit": 0.5}, {"limit": 0.5}),
        ({"swiglu_alpha": 1.702, "swiglu_limit": 0.5}, {"limit": 0.5, "alpha": 1.702, "up_offset": 1.0}),
        ({"hidden_act": "gelu_pytorch_tanh"}, None),
        ({"own": True}, None),
    ],
)
def test_gates(given: dict[str, Any], fused: dict[str, Any] | None) -> None:
    """The layer computes the module's own gate, fused or not."""
    own = given.pop("own", False)
    module = fp8_experts(scale_fmt="ue8m0", expert_dtype="fp4", **given)
    if own:
        type(module)._apply_gate = softcapped
    assert fused_activation(module) == fused
    x, ids, top_k_weights = inputs()
    with torch.no_grad():
        got = module(x, ids, top_k_weights)
        want = reference_experts(x, ids, top_k_weights, *values_of(module), act=module._apply_gate)
        plain = reference_experts(x, ids, top_k_weights, *values_of(module))
    assert error(got, want) < 0.01
    if given or own:
        assert error(got, plain) > 0.02, "the gate must count"


class Relu2Experts(nn.Module):
    """Experts without a gate, transposed, with biases and a norm behind."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = E
        self.up_proj = nn.Parameter(torch.randn(E, H, I) / H**0.5)
        self.up_proj_bias = nn.Parameter(torch.randn(E, I))
        self.down_proj = nn.Parameter(torch.randn(E, I, H) / I**0.5)
        self.down_proj_bias = nn.Parameter(torch.randn(E, H))
        self.act_fn = lambda t: torch.relu(t) ** 2

    def forward(self, *arguments: Any) -> torch.Tensor:
        raise AssertionError("the registered function is called")


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP4])
def test_experts_without_a_gate(format: Any) -> None:
    kind = use_experts_implementation(Relu2Experts, has_gate=False, has_bias=True, is_transposed=True)
    module = quantize_experts(kind(config()).bfloat16(), format)
    x, ids, top_k_weights = inputs()
    bias13, bias2 = module.up_proj_bias.detach().double(), module.down_proj_bias.detach().double()
    w13, w2 = values_of(module)
    want = torch.zeros(T, H, dtype=torch.float64)
    for token in range(T):
        for slot, expert in enumerate(ids[token].tolist()):
            if expert < E:
                h = torch.relu(x[token].double() @ w13[expert].T + bias13[expert]) ** 2
                y = h @ w2[expert].T + bias2[expert]
                want[token] += top_k_weights[token, slot].double() * y
    with torch.no_grad():
        assert error(module(x, ids, top_k_weights), want) < 0.06


# --- the cache -------------------------------------------------------------------------------------------


def test_weights_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fp8_experts(scale_fmt="ue8m0")
    calls: list[Any] = []
    build = weights._build
    monkeypatch.setattr(weights, "_build", lambda m: calls.append(m) or build(m))
    x, ids, top_k_weights = inputs()
    with torch.no_grad():
        before = module(x, ids, top_k_weights)
        module(x, ids, top_k_weights)
        assert len(calls) == 1
        assert expert_weights(module).w13.data.data_ptr() == module.gate_up_proj.data_ptr(), "no copy of codes"
        module.down_proj_scale_inv.copy_((2 * module.down_proj_scale_inv.float()).to(torch.float8_e8m0fnu))
        assert torch.equal(module(x, ids, top_k_weights).float(), 2 * before.float())
        assert len(calls) == 2
        # No copy of the scale may decide by an address that is free again.
        assert any(t.data_ptr() == module.gate_up_proj_scale_inv.data_ptr() for t in weights._BUILT[module].sources)
        scale = (module.gate_up_proj_scale_inv.float() / 4).to(torch.float8_e8m0fnu)
        module.gate_up_proj_scale_inv = nn.Parameter(scale, requires_grad=False)
        assert not torch.equal(module(x, ids, top_k_weights).float(), 2 * before.float())
        assert len(calls) == 3
        other = copy.deepcopy(module)
        other.down_proj.zero_()
        assert not other(x, ids, top_k_weights).any()
        assert module(x, ids, top_k_weights).any()


def test_what_was_built_is_written_again_from_data_that_was_assigned() -> None:
    """A CUDA graph may read it, which knows nothing of the parameter's new memory."""
    module = fp8_experts()
    built = expert_weights(module)
    module.down_proj.data = torch.randn(E, H, I).to(torch.float8_e4m3fn)
    refresh(module.down_proj)
    assert expert_weights(module) is built
    assert torch.equal(built.w2.data.view(torch.uint8), module.down_proj.view(torch.uint8))


def test_the_cache_keeps_no_module_alive() -> None:
    module = fp8_experts()
    with torch.no_grad():
        module(*inputs())
    gone, memory = weakref.ref(module), weakref.ref(expert_weights(module))
    del module
    gc.collect()
    assert gone() is None
    assert memory() is None


@pytest.mark.parametrize("offset", [1, 4, 15])
def test_weights_at_any_address(offset: int) -> None:
    """As tensors of a memory-mapped file lie."""
    module, x = fp8_experts(), inputs()
    with torch.no_grad():
        before = module(*x)
        for name in ("gate_up_proj", "down_proj"):
            codes = getattr(module, name).detach()
            memory = torch.zeros(codes.numel() + 32, dtype=torch.uint8)
            start = (-memory.data_ptr()) % 16 + offset
            moved = memory[start : start + codes.numel()].view(torch.float8_e4m3fn).view(codes.shape)
            assert moved.data_ptr() % 16 == offset
            moved.view(torch.uint8).copy_(codes.view(torch.uint8))
            setattr(module, name, nn.Parameter(moved, requires_grad=False))
        assert torch.equal(module(*x), before)


# --- gradients -------------------------------------------------------------------------------------------


def test_backward_raises_and_forward_does_not() -> None:
    module = fp8_experts(scale_fmt="ue8m0", block_size=(1, 32))
    x, ids, top_k_weights = inputs()
    with torch.no_grad():
        want = module(x, ids, top_k_weights)
    for needs in (x, top_k_weights):
        got = module(*(t.clone().requires_grad_(t is needs) if t.is_floating_point() else t
                       for t in (x, ids, top_k_weights)))  # fmt: skip
        assert torch.equal(got.detach(), want)
        with pytest.raises(NotImplementedError, match="no gradients of quantized layers"):
            got.sum().backward()


def test_experts_of_blocks_are_differentiable() -> None:
    """Against float64: to the tokens and to the router, as an adapter or the layers below need them."""
    module = fp8_experts()
    given = inputs()
    x, top_k_weights = (t.clone().requires_grad_() for t in given[::2])
    dout = torch.randn(T, H)
    out = module(x, given[1], top_k_weights)
    out.backward(dout.to(out))
    exact_x, exact_weights = (t.double().requires_grad_() for t in given[::2])
    w13, w2 = values_of(module)
    rows = exact_x[:, None].expand(T, K, H)
    ids = given[1].clamp(max=E - 1)
    gate, up = torch.einsum("tknh,tkh->tkn", w13[ids], rows).chunk(2, dim=-1)
    y = torch.einsum("tkhi,tki->tkh", w2[ids], nn.functional.silu(gate) * up)
    (torch.where(given[1] < E, exact_weights, 0.0)[..., None] * y).sum(1).backward(dout.double())
    assert error(x.grad, exact_x.grad) < 0.08
    assert error(top_k_weights.grad, exact_weights.grad) < 0.08


# --- FP8 products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("n", [384, 200, 130])
def test_linear(n: int, scale_fmt: str) -> None:
    layer = FP8Linear(H, n, block_size=(128, 128), scale_fmt=scale_fmt, has_bias=True)
    t = quantize(torch.randn(n, H), FP8_BLOCK, kind="weight")
    with torch.no_grad():
        layer.weight.copy_(t.data)
        layer.weight_scale_inv.copy_(t.scale.to(layer.weight_scale_inv.dtype))
        layer.bias.normal_()
        x = torch.randn(2, 13, H).bfloat16()
        got = layer(x)
    want = x.double() @ dequantized(layer.weight, layer.weight_scale_inv).T + layer.bias.detach().double()
    assert got.shape == (2, 13, n)
    assert error(got, want) < 0.04
    assert error(got, want - layer.bias.detach().double()) > 0.04
    rounded = dequantize(quantize(x.reshape(-1, H), FP8_BLOCK), torch.float32).double()
    weight = dequantized(layer.weight, layer.weight_scale_inv)
    exact = (rounded @ weight.T + layer.bias.detach().double()).reshape(2, 13, n)
    assert error(got, exact) < 0.005


def test_operators() -> None:
    """Products that quantize their rows keep torch.library's rules, fakes included."""
    x, ids, _ = inputs()
    routing = route(ids.clamp(max=E - 1), E)  # rows behind the last group hold anything
    w = quantize(torch.randn(E, I, H), FP8_BLOCK, kind="weight")
    for rows, bias in ((routing.tokens, torch.randn(E, I)), (None, None)):
        arguments = (x if rows is not None else x[routing.tokens], rows, routing.offs, *ops.packed(w), bias)
        for activations in ("FP8_BLOCK", "BF16"):
            torch.library.opcheck(torch.ops.padless.transformers_project.default, (*arguments, activations))
    one = quantize(torch.randn(130, H), FP8_BLOCK, kind="weight")
    given = (x, one.data, one.scale, torch.bfloat16)
    fakes = ("test_faketensor", "test_aot_dispatch_dynamic")  # torch compares no e4m3 codes with the schema
    torch.library.opcheck(torch.ops.padless.transformers_dense.default, given, test_utils=fakes)


def test_products_of_other_blocks_are_refused() -> None:
    kernel = load_finegrained_fp8_kernel()
    x, w = torch.randn(3, H).bfloat16(), torch.zeros(128, H).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="weight_block_size is None with dynamic"):
        kernel.matmul(x, w, torch.ones(()), None, x.dtype)
    with pytest.raises(ValueError, match=r"\(128, 128\) with static"):
        kernel.matmul(x, w, torch.ones(1, 2), (128, 128), x.dtype, activation_scale=torch.ones(()))


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm", "eager"])
def test_own_implementations_of_transformers(name: str) -> None:
    module = fp8_experts(_experts_implementation=name)
    module._is_expert_parallel = True
    x, ids, top_k_weights = inputs()
    with torch.no_grad():
        got = module(x, ids, top_k_weights)
    assert error(got, reference_experts(x, ids, top_k_weights, *values_of(module))) < 0.06


# --- registering -----------------------------------------------------------------------------------------


def test_registered_in_both_registries() -> None:
    register()
    for registry in (ExpertsInterface(), FP8ExpertsInterface()):
        assert registry["padless"] is experts_forward
    before = dict(AUTO_QUANTIZER_MAPPING)
    register()
    assert before == AUTO_QUANTIZER_MAPPING


# --- the example -----------------------------------------------------------------------------------------


def test_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--new-tokens", "5"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert "5 new tokens" in printed
    assert "experts: FP8_BLOCK" in printed
