"""padless' experts inside vLLM's modular kernel: values, expert maps, sentinels, batch invariance, and the seam itself.

Where vLLM can be imported its own files are the other side of the seam, layers and loaders included; elsewhere it is
`support.vllm_seam`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4
from padless.testing.guarded import GuardedOutput
from support import vllm_seam
from support.moe_layer_problem import Layer, dense, draw_layer, on_device

HAS_VLLM = find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="needs vLLM's Python files on PYTHONPATH")
_MOE = "vllm.model_executor.layers.fused_moe"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FORMATS = {"fp8": (FP8_BLOCK, None), "mxfp4": (MXFP4, torch.bfloat16)}


@pytest.fixture(scope="module", autouse=True)
def _seam() -> Iterator[None]:
    with vllm_seam.in_place():
        yield


def plugin(name: str = "experts") -> Any:
    return importlib.import_module(f"padless.integrations.vllm.{name}")


def vllm(name: str) -> Any:
    return importlib.import_module(f"{_MOE}.{name}")


def experts_of(layer: Layer, activation: str = "SILU", limit: float | None = None) -> Any:
    """PadlessExperts with the layer's scales and biases, made as vLLM makes experts."""
    config = vllm("config")
    o = layer.options
    named = {
        "w1_scale": layer.w13.scale,
        "w2_scale": layer.w2.scale,
        "w1_bias": o.get("bias13"),
        "w2_bias": o.get("bias2"),
        "gemm1_clamp_limit": limit,
    }
    if layer.w13.format == FP8_BLOCK:
        quant = config.fp8_w8a8_moe_quant_config(block_shape=[128, 128], **named)
    else:
        named |= {name: named[name].view(torch.uint8) for name in ("w1_scale", "w2_scale")}
        quant = config.mxfp4_w4a16_moe_quant_config(gemm1_alpha=1.5, gemm1_beta=1.0, **named)
    # vLLM makes no configuration without a gate on a CPU; the experts take the activation from the call.
    made_for = "SILU" if activation.endswith("NO_MUL") else activation
    return plugin().PadlessExperts(vllm_seam.moe_config(layer, made_for), quant)


def codes(t: Any) -> torch.Tensor:
    return t.data.view(torch.uint8) if t.format == MXFP4 else t.data


def run(experts: Any, layer: Layer, activation: str = "SILU", **more: Any) -> torch.Tensor:
    """`apply` into an output full of NaN with guard rows around it."""
    out = GuardedOutput(*layer.x.shape, torch.bfloat16, layer.x.device)
    apply(experts, layer, activation, output=out.out, **more)
    out.check(layer.x.shape[0])
    return out.out


def apply(experts: Any, layer: Layer, activation: str = "SILU", **more: Any) -> None:
    """`apply` with the arguments that vLLM gives."""
    experts.apply(
        **(
            {
                "hidden_states": layer.x,
                "w1": codes(layer.w13),
                "w2": codes(layer.w2),
                "topk_weights": layer.weights,
                "topk_ids": layer.ids,
                "activation": vllm("activation").MoEActivation[activation],
                "global_num_experts": layer.w13.data.shape[0],
                "expert_map": None,
                "a1q_scale": None,
                "a2_scale": None,
                "workspace13": None,
                "workspace2": None,
                "expert_tokens_meta": None,
                "apply_router_weight_on_input": False,
            }
            | more
        )
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.cpu()).norm() / want.norm())


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("activation", "limit", "options"),
    [
        ("SILU", None, {}),
        ("SILU", 0.5, {"limit": 0.5}),
        ("GELU_TANH", None, {"activation": "geglu"}),
        ("SWIGLUOAI", None, {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}),
        ("RELU2_NO_MUL", None, {"activation": "relu2", "gated": False}),
    ],
)
def test_values(kind: str, activation: str, limit: float | None, options: dict[str, Any], device: str) -> None:
    """Against float64 with unquantized activations, by token; ids of no expert add nothing."""
    layer = draw_layer(FORMATS[kind], tokens=37, h=256, i=128, bias=activation == "SWIGLUOAI", **options)
    want, layer = dense(layer), on_device(layer, device)
    got = run(experts_of(layer, activation, limit), layer, activation).cpu()
    bound = 0.07 if kind == "fp8" else 0.01
    assert error(got, want) < bound
    rows = (got.double() - want).norm(dim=1) / want.norm(dim=1).clamp(min=want.norm() / 37)
    assert rows.max() < 1.5 * bound
    other = "GELU_TANH" if activation == "SILU" else "SILU"  # gate and up, or no gate
    if layer.options.get("activation") != "relu2":
        assert error(run(experts_of(layer, other), layer, other), want) > 1.5 * bound


def test_a_kernel_goes_on_with_the_copies_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes another one when it reloads; CUDA graphs read scales in tiles and biases of the first."""
    monkeypatch.setattr("padless.integrations.weights.is_on_gpu", lambda t: True)
    how = {"bias": True, "gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    first, second = (draw_layer(FORMATS["mxfp4"], h=256, i=128, seed=seed, **how) for seed in (0, 1))
    before, after, fresh = (experts_of(layer, "SWIGLUOAI") for layer in (first, second, second))
    run(before, first, "SWIGLUOAI")
    kept = before._cache._built.weights
    after.take_over(before, codes(second.w13), codes(second.w2))
    want = run(fresh, second, "SWIGLUOAI")
    for name in ("w13", "w2"):
        tiles = getattr(fresh._cache._built.weights, name).scale
        assert torch.equal(getattr(kept, name).scale.view(torch.uint8), tiles.view(torch.uint8))
    for mine, values in zip(
        before._sources(codes(first.w13), codes(first.w2)),
        after._sources(codes(second.w13), codes(second.w2)),
        strict=True,
    ):
        mine.data.copy_(values)
    after.quant_config = before.quant_config
    assert torch.equal(run(after, replace(second, w13=first.w13, w2=first.w2), "SWIGLUOAI"), want)
    assert after._cache._built.weights is kept


def test_packed_swiglu_of_gpt_oss() -> None:
    """SWIGLUOAI_UNINTERLEAVE takes alpha, limit and the offset from the configuration."""
    how = {"alpha": 1.5, "limit": 0.75, "up_offset": 1.0}
    layer = draw_layer(FORMATS["mxfp4"], h=256, i=128, **how)
    name = "SWIGLUOAI_UNINTERLEAVE"
    assert error(run(experts_of(layer, name, 0.75), layer, name), dense(layer)) < 0.01


def test_activations_that_padless_does_not_have() -> None:
    experts = plugin()
    activations = vllm("activation").MoEActivation
    known = {name for name in activations.__members__ if experts.PadlessExperts._supports_activation(activations[name])}
    assert known == {
        *("SILU", "GELU_TANH", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE"),
        *("SILU_NO_MUL", "GELU_TANH_NO_MUL", "RELU2_NO_MUL"),
    }
    with pytest.raises(ValueError, match="activation is 'situ'; padless"):
        experts.activation_arguments(activations.SITU, vllm("activation").ApplyMoEActivationConfig())


@pytest.mark.parametrize("kind", FORMATS)
def test_other_ranks_experts_add_nothing(kind: str) -> None:
    """The sum over two ranks, each with an expert map, is the whole layer; sentinels of a dispatch add nothing."""
    layer = draw_layer(FORMATS[kind], tokens=29, experts=5, h=256, i=128)
    whole = run(experts_of(layer), layer).double()
    parts = []
    for owned in ([0, 3], [1, 2, 4]):
        expert_map = torch.full((5,), -1, dtype=torch.int32)
        expert_map[owned] = torch.arange(len(owned), dtype=torch.int32)
        local = replace(layer, w13=pick(layer.w13, owned), w2=pick(layer.w2, owned))
        parts.append(run(experts_of(local), local, expert_map=expert_map, global_num_experts=5).double())
    assert ((layer.ids < 0) | (layer.ids >= 5)).any()
    assert (parts[0] != 0).any()
    assert (parts[1] != 0).any()
    assert error(parts[0] + parts[1], whole) < 0.006  # three roundings to bfloat16
    assert error(parts[0], whole) > 0.3


def pick(t: Any, experts: list[int]) -> Any:
    """The weights of some experts; indexing goes by bytes, which torch has for every dtype."""
    data = t.data.view(torch.uint8)[experts].view(t.data.dtype)
    scale = t.scale.view(torch.uint8)[experts].view(t.scale.dtype)
    return replace(t, data=data, scale=scale)


def test_weights_on_the_input() -> None:
    """Rows that were weighted before are not weighted again."""
    layer = draw_layer(FORMATS["fp8"], tokens=19, top_k=1, h=256, i=128)
    ones = replace(layer, weights=torch.ones_like(layer.weights))
    got = run(experts_of(layer), layer, apply_router_weight_on_input=True)
    assert torch.equal(got, run(experts_of(layer), ones))
    assert not torch.equal(got, run(experts_of(layer), layer))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", FORMATS)
def test_batch_invariance(kind: str, device: str) -> None:
    """What `_supports_batch_invariance` promises: a token's bits do not depend on the others."""
    layer = on_device(draw_layer(FORMATS[kind], tokens=67, h=256, i=128), device)
    experts = experts_of(layer)
    assert experts._supports_batch_invariance()
    whole = run(experts, layer)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(experts, layer.only(order)), whole[order])
    for tokens in (torch.tensor([7]), torch.arange(40, 49)):
        assert torch.equal(run(experts, layer.only(tokens)), whole[tokens])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_in_a_cuda_graph(kind: str) -> None:
    """Captured with one batch and an expert map, replayed with another: the bits of an eager call."""
    layer = on_device(draw_layer(FORMATS[kind], tokens=33, h=256, i=128), "cuda")
    expert_map = torch.tensor([2, -1, 0, 1, -1], dtype=torch.int32, device="cuda")
    local = replace(layer, w13=pick(layer.w13, [2, 3, 0]), w2=pick(layer.w2, [2, 3, 0]))
    experts, out = experts_of(local), torch.empty_like(layer.x)
    more = {"output": out, "expert_map": expert_map, "global_num_experts": 5}
    run(experts, local, expert_map=expert_map, global_num_experts=5)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply(experts, local, **more)
    for t in (local.x, local.weights):
        t.copy_(t.flip(0))
    local.ids.copy_(local.ids.roll(1, 0))
    graph.replay()
    assert torch.equal(out, run(experts, local, expert_map=expert_map, global_num_experts=5))


def test_weights_are_wrapped_once_and_again_when_written_to() -> None:
    layer = draw_layer(FORMATS["mxfp4"], h=256, i=128, bias=True)
    experts = experts_of(layer)
    first = run(experts, layer)
    built = experts._cache._built.weights
    assert built.w13.data.data_ptr() == layer.w13.data.data_ptr()
    assert torch.equal(run(experts, layer), first)
    assert experts._cache._built.weights is built
    experts.w1_bias.add_(1.0)  # a reload in place
    assert not torch.equal(run(experts, layer), first)
    assert experts._cache._built.weights is not built


def test_quantized_rows_are_refused() -> None:
    layer = draw_layer(FORMATS["fp8"], h=256, i=128)
    with pytest.raises(ValueError, match=r"hidden_states are quantized .* choose another all2all backend"):
        run(experts_of(layer), layer, a1q_scale=torch.ones(21, 2))


# --- the seam --------------------------------------------------------------------------------------------


def test_methods_have_the_parameters_that_vllm_passes() -> None:
    cls = plugin().PadlessExperts
    assert not cls.__abstractmethods__
    for name, parameters in vllm_seam.PARAMETERS.items():
        assert list(inspect.signature(getattr(cls, name)).parameters) == parameters, name


def test_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = plugin()
    cls, keys = (
        experts.PadlessExperts,
        importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils"),
    )
    fp8 = (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym)
    mxfp4 = (keys.kMxfp4Static, None)
    assert cls.activation_format() is vllm("modular_kernel").FusedMoEActivationFormat.Standard
    assert cls._supports_current_device()
    assert cls._supports_quant_scheme(*fp8)
    assert cls._supports_quant_scheme(*mxfp4)
    assert not cls._supports_quant_scheme(keys.kMxfp4Static, keys.kMxfp4Dynamic)
    for capability, allowed in (((9, 0), (True, True)), ((10, 0), (True, True)), ((12, 0), (False, False))):
        monkeypatch.setattr(experts, "current_platform", cuda(capability))
        assert (cls._supports_quant_scheme(*fp8), cls._supports_quant_scheme(*mxfp4)) == allowed
        assert cls._supports_current_device() == any(allowed)


def cuda(capability: tuple[int, int]) -> Any:
    platform = vllm_seam.Platform()
    platform.capability = capability
    return platform


@pytest.mark.parametrize(
    ("backend", "taken"),
    [(None, True), ("use_ag_rs_all2all_kernels", True), ("use_deepep_ht_kernels", True), ("other", False)],
)
def test_parallel_configurations(backend: str | None, taken: bool) -> None:
    flags = dict.fromkeys(vllm_seam.ALL2ALL, False)
    if backend is not None:
        flags["use_all2all_kernels"] = True
    if backend in flags:
        flags[backend] = True
    config = type("Config", (), flags)
    assert plugin().PadlessExperts._supports_parallel_config(config) is taken


def test_the_entry_point() -> None:
    """The name in pyproject.toml leads to `register`; it is not called by importing padless."""
    import tomllib
    from pathlib import Path

    root = Path(__file__).parents[2]
    points = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = points["vllm.general_plugins"]["padless"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
