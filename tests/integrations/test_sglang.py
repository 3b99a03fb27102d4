"""padless' runner inside SGLang: values, sentinels, scaling, batch invariance, hooks, and the seam itself.

Where SGLang can be imported its own files are the other side of the seam, its FP8 method and runner included;
elsewhere it is `support.sglang_seam`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK
from support import sglang_seam
from support.absent_binaries import absent
from support.moe_layer_problem import Layer, dense, draw_layer, on_device

HAS_SGLANG = find_spec("sglang") is not None
needs_sglang = pytest.mark.skipif(not HAS_SGLANG, reason="needs SGLang's Python files on PYTHONPATH")
# Compiled packages that SGLang imports and these tests never reach.
BINARIES = ("torchvision", "sgl_kernel", "flashinfer")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _seam() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if HAS_SGLANG:
            # Before the empty torchvision is there: transformers asks for its version.
            importlib.import_module("transformers.models.auto.image_processing_auto")
            with absent(*BINARIES):
                importlib.import_module("sglang.srt.layers.quantization.fp8")
                yield
        else:
            sglang_seam.install(patch)
            yield
        for name in [name for name in sys.modules if name.startswith("padless.integrations.sglang")]:
            del sys.modules[name]


def plugin(name: str) -> Any:
    return importlib.import_module(f"padless.integrations.sglang.{name}")


def sglang(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.layers.moe.{name}")


def layer_of(**options: Any) -> Layer:
    drawn = draw_layer((FP8_BLOCK, None), **({"tokens": 37, "h": 256, "i": 128} | options))
    return replace(drawn, ids=drawn.ids.clamp(-1, 4).int())


def config_of(**more: Any) -> Any:
    return sglang("moe_runner.base").MoeRunnerConfig(**more)


def dispatched(layer: Layer, scale: Any = None) -> Any:
    top_k = sglang("topk").StandardTopKOutput(layer.weights, layer.ids, None)
    return sglang("token_dispatcher.standard").StandardDispatchOutput(layer.x, scale, top_k)


def quant_info(layer: Layer) -> Any:
    o = layer.options
    values = (layer.w13.data, layer.w2.data, layer.w13.scale, layer.w2.scale, o.get("bias13"), o.get("bias2"))
    return SimpleNamespace(**dict(zip(sglang_seam.QUANT_INFO, values, strict=True)))


def run(layer: Layer, **more: Any) -> torch.Tensor:
    config = config_of(**more)
    core = plugin("runner").PadlessRunnerCore(config)
    before = layer.x.clone()
    out: torch.Tensor = core.run_from_dispatch(dispatched(layer), quant_info(layer), config).hidden_states
    assert out.dtype == layer.x.dtype
    assert torch.equal(layer.x, before)
    return out


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double().cpu() - want.cpu()).norm() / want.norm())


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ({}, {}),
        ({"swiglu_limit": 0.5}, {"limit": 0.5}),
        ({"activation": "gelu_tanh"}, {"activation": "geglu"}),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.75},
            {"gate_up": "alternating", "alpha": 1.702, "limit": 0.75, "up_offset": 1.0, "bias": True},
        ),
        (
            {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.75, "gate_up_interleaved": False},
            {"alpha": 1.702, "limit": 0.75, "up_offset": 1.0},
        ),
        ({"activation": "relu2", "is_gated": False}, {"activation": "relu2", "gated": False}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_values(how: dict[str, Any], options: dict[str, Any], device: str) -> None:
    """Against float64 with unquantized activations; ids of no expert of this rank, -1, add nothing."""
    layer = layer_of(**options)
    assert (layer.ids < 0).any()
    want, layer = dense(layer), on_device(layer, device)
    got = run(layer, **how)
    assert error(got, want) < 0.07
    if how and how.get("is_gated", True):
        assert error(run(layer), want) > 0.1


def test_routed_scaling_factor() -> None:
    layer = layer_of()
    assert error(run(layer, routed_scaling_factor=2.5), 2.5 * dense(layer)) < 0.06


def test_weights_on_the_input() -> None:
    """Rows are weighted once, before the first product: silu makes that another sum than weighting after."""
    layer = layer_of(top_k=1)
    weighted = replace(layer, x=layer.x * layer.weights.to(torch.bfloat16), weights=torch.ones_like(layer.weights))
    got = run(layer, apply_router_weight_on_input=True)
    assert error(got, dense(weighted)) < 0.06
    assert error(got, dense(layer)) > 0.2


def test_batch_invariance() -> None:
    layer = layer_of(tokens=67)
    whole = run(layer)
    order = torch.randperm(67, generator=torch.Generator().manual_seed(1))
    assert torch.equal(run(layer.only(order)), whole[order])
    assert torch.equal(run(layer.only(torch.arange(40, 49))), whole[40:49])


@pytest.mark.parametrize(
    "how",
    [
        {"activation": "gelu"},
        {"activation": "situ"},
        {"gemm1_clamp_limit": 7.0},
        {"activation": "gelu", "is_gated": False},
    ],
)
def test_activations_that_padless_does_not_have(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"activation is .*choose another --moe-runner-backend"):
        plugin("runner").PadlessRunnerCore(config_of(**how))


def test_dispatches_that_are_refused() -> None:
    layer, config = layer_of(), config_of()
    core = plugin("runner").PadlessRunnerCore(config)
    with pytest.raises(ValueError, match="takes 'standard' with unquantized rows"):
        core.run_from_dispatch(dispatched(layer, scale=torch.ones(37, 2)), quant_info(layer), config)
    with pytest.raises(ValueError, match="LoRA hooks are set"):
        core.run_from_dispatch(dispatched(layer), quant_info(layer), config, hooks=object())


# --- hooks -----------------------------------------------------------------------------------------------


def method_of(**more: Any) -> Any:
    return SimpleNamespace(
        **({"use_mxfp8": False, "is_fp4_expert": False, "weight_block_size": [128, 128], "runner": None} | more)
    )


def test_other_backends_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks, calls = plugin("hooks"), []
    monkeypatch.setattr(hooks, "get_moe_runner_backend", lambda: SimpleNamespace(value="triton"))
    method = method_of()
    hooks.create_moe_runner(lambda *given, **named: calls.append((given, named)), method, "layer", config="c", more=1)
    assert calls == [((method, "layer"), {"config": "c", "more": 1})]
    assert method.runner is None
    method.runner = SimpleNamespace(runner_backend=SimpleNamespace(value="triton"))
    assert hooks.apply(lambda *arguments: arguments, method, "layer", "rows", 1) == (method, "layer", "rows", 1)
    assert hooks.apply(lambda *arguments: arguments, object(), "layer", "rows")[1:] == ("layer", "rows")


@pytest.mark.parametrize(
    ("more", "config", "a2a", "words"),
    [
        ({"use_mxfp8": True}, {}, "NONE", "MXFP8: True"),
        ({"weight_block_size": None}, {}, "NONE", "weight_block_size is None"),
        ({"is_fp4_expert": True}, {}, "NONE", "FP4: True"),
        ({}, {"no_combine": True}, "NONE", "no_combine is set"),
        ({}, {"activation": "gelu"}, "NONE", "activation is 'gelu'"),
        ({}, {}, "DEEPEP", "moe_a2a_backend is 'deepep'"),
    ],
)
def test_layers_that_are_refused(
    more: dict[str, Any], config: dict[str, Any], a2a: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = plugin("hooks")
    monkeypatch.setattr(hooks, "get_moe_runner_backend", lambda: SimpleNamespace(value="padless"))
    monkeypatch.setattr(hooks, "get_moe_a2a_backend", lambda: sglang_seam.A2ABackend[a2a])
    with pytest.raises(ValueError, match=words):
        hooks.create_moe_runner(lambda *arguments: None, method_of(**more), None, config_of(**config))


# --- the seam --------------------------------------------------------------------------------------------


def test_the_entry_point_and_the_parameters() -> None:
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, name = points["sglang.srt.plugins"]["padless"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    core = plugin("runner").PadlessRunnerCore
    assert not core.__abstractmethods__
    assert list(inspect.signature(core.run_from_dispatch).parameters) == sglang_seam.RUN


@needs_sglang
def test_the_stand_in_is_like_sglang() -> None:
    base = sglang("moe_runner.base")
    defaults = {field.name: field.default for field in fields(base.MoeRunnerConfig)}
    assert {name: defaults[name] for name in sglang_seam.CONFIG} == sglang_seam.CONFIG
    assert list(inspect.signature(base.DispatchMoeRunnerCore.run_from_dispatch).parameters) == sglang_seam.RUN
    info = {field.name for field in fields(sglang("moe_runner.triton").TritonMoeQuantInfo)}
    assert set(sglang_seam.QUANT_INFO) <= info
    dispatch = sglang("token_dispatcher.standard").StandardDispatchOutput
    assert dispatch._fields == sglang_seam.StandardDispatchOutput._fields
    assert sglang("topk").StandardTopKOutput._fields == sglang_seam.StandardTopKOutput._fields


@needs_sglang
def test_sglang_s_own_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered, hooks applied: SGLang's FP8 method creates weights and a runner and applies it, two layers at once."""
    import padless.integrations.sglang as integration

    integration.register()
    integration.register()
    registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
    registry.apply_hooks()
    choices = importlib.import_module("sglang.srt.arg_groups.choices").MOE_RUNNER_BACKEND_CHOICES
    assert choices.count("padless") == 1
    parser = argparse.ArgumentParser()
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(["--model-path", "model", "--moe-runner-backend", "padless"])
    assert arguments.moe_runner_backend == "padless"
    flags = importlib.import_module("sglang.srt.runtime_context").get_flags().moe
    monkeypatch.setattr(flags, "runner_backend", sglang("utils").resolve_moe_runner_backend("padless"))

    first = own_layer(layer_of(), routed_scaling_factor=2.5)
    second = own_layer(layer_of(seed=1))
    assert type(first[0].runner.runner_core) is plugin("runner").PadlessRunnerCore
    assert first[0].get_moe_runner_backend(first[1]).value == "padless"
    for (method, module, layer), factor in ((first, 2.5), (second, 1.0), (first, 2.5)):
        got = method.apply(module, dispatched(layer)).hidden_states
        assert error(got, factor * dense(layer)) < 0.06


def own_layer(layer: Layer, **config: Any) -> tuple[Any, Any, Layer]:
    fp8 = importlib.import_module("sglang.srt.layers.quantization.fp8")
    quantization = fp8.Fp8Config(
        is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128]
    )
    method = fp8.Fp8MoEMethod(quantization)
    sizes = {"num_experts": 5, "hidden_size": 256, "intermediate_size_per_partition": 128}
    module = torch.nn.Module()
    module.moe_tp_size = 1
    module.moe_runner_config = config_of(num_local_experts=5, top_k=3, **sizes, **config)
    method.create_weights(module, params_dtype=torch.bfloat16, weight_loader=None, **sizes)
    method.create_moe_runner(module, module.moe_runner_config)
    for name, values in (
        ("w13_weight", layer.w13.data),
        ("w2_weight", layer.w2.data),
        ("w13_weight_scale_inv", layer.w13.scale),
        ("w2_weight_scale_inv", layer.w2.scale),
    ):
        getattr(module, name).data.copy_(values)
    method.process_weights_after_loading(module)
    return method, module, layer
