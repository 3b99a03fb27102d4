"""Whole layers of vLLM: its loaders fill RoutedExperts under "padless", its kernel runs them. Needs vLLM's Python files.

`import vllm` needs no binaries for this. Of torch one function is replaced, `torch.accelerator.empty_cache`, which has
nothing to empty without a GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4
from padless.integrations.codes import refresh
from support import vllm_seam
from support.moe_layer_problem import Layer, dense, draw_layer

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's Python files on PYTHONPATH")
GPT_OSS: dict[str, Any] = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
FP8_CHECKPOINT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module", autouse=True)
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One rank's groups and workspace, and the plug-in registered twice, as several entry points would."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    import padless.integrations.vllm as plugin

    plugin.register()
    plugin.register()
    store = tmp_path_factory.mktemp("vllm") / "store"
    with (
        pytest.MonkeyPatch.context() as patch,
        set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))),
    ):
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cpu"))
        yield


def config_of(checkpoint: dict[str, Any]) -> Any:
    from vllm.model_executor.layers.quantization import get_quantization_config

    return get_quantization_config("padless").from_config(checkpoint)


def routed_experts(layer: Layer, quant_config: Any, activation: str = "SILU", ranks: int = 1, **more: Any) -> Any:
    """vLLM's layer for `layer`'s sizes; of several expert-parallel ranks the last."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    parallel = FusedMoEParallelConfig.make_no_parallel()
    if ranks > 1:
        parallel = replace(parallel, use_ep=True, ep_size=ranks, ep_rank=ranks - 1)
    experts = layer.w13.data.shape[0]
    manager = ExpertMapManager(64, layer.ids.shape[1], experts, 0, None, parallel, "linear", False)
    config = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=layer.ids.shape[1],
        hidden_dim=layer.x.shape[1],
        intermediate_size=layer.w2.logical_shape[2],
        num_local_experts=manager.local_num_experts,
        num_logical_experts=experts,
        activation=MoEActivation[activation],
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
        **more,
    )
    return RoutedExperts("model.layers.0.mlp.experts", torch.bfloat16, config, quant_config, manager)


def load_fp8(module: Any, layer: Layer) -> None:
    """As a model's load_weights does: one tensor of one expert at a time, by the hub's names."""
    fill_fp8(module, layer)
    module.quant_method.process_weights_after_loading(module)


def fill_fp8(module: Any, layer: Layer) -> None:
    half = layer.w13.data.shape[1] // 2
    for expert in range(layer.w13.data.shape[0]):
        for shard, w, rows in (
            ("w1", layer.w13, slice(0, half)),
            ("w3", layer.w13, slice(half, 2 * half)),
            ("w2", layer.w2, slice(None)),
        ):
            blocks = slice(None) if rows.start is None else slice(rows.start // 128, rows.stop // 128)
            name = "w2" if shard == "w2" else "w13"
            for kind, values in (("weight", w.data[expert, rows]), ("weight_scale_inv", w.scale[expert, blocks])):
                parameter = getattr(module, f"{name}_{kind}")
                parameter.weight_loader(parameter, values.clone(), f"experts.{name}_{kind}", shard, expert)


def load_gpt_oss(module: Any, layer: Layer) -> None:
    """All experts at once, as vLLM's gpt-oss does."""
    fill_gpt_oss(module, layer)
    module.quant_method.process_weights_after_loading(module)


def fill_gpt_oss(module: Any, layer: Layer) -> None:
    for name, w, bias in (("w13", layer.w13, "bias13"), ("w2", layer.w2, "bias2")):
        for kind, values in (
            ("weight", w.data.view(torch.uint8)),
            ("weight_scale", w.scale.view(torch.uint8)),
            ("bias", layer.options[bias]),
        ):
            parameter = getattr(module, f"{name}_{kind}")
            parameter.weight_loader(parameter, values, f"experts.{name}_{kind}", None, None)


def run(module: Any, layer: Layer) -> torch.Tensor:
    result: torch.Tensor = module.quant_method.apply(module, layer.x, layer.weights, layer.ids, None, None)
    return result


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def only_valid(layer: Layer) -> Layer:
    return replace(layer, ids=layer.ids.clamp(0, layer.w13.data.shape[0] - 1))


def test_fp8_layer() -> None:
    from padless.integrations.vllm.experts import PadlessExperts

    layer = only_valid(draw_layer((FP8_BLOCK, None), tokens=37, top_k=2, experts=6, h=256, i=384))
    module = routed_experts(layer, config_of(FP8_CHECKPOINT))
    load_fp8(module, layer)
    assert type(module.quant_method.moe_kernel.fused_experts) is PadlessExperts
    got = run(module, layer)
    assert got.dtype == torch.bfloat16
    assert error(got, dense(layer)) < 0.06
    module.w13_weight.data.copy_(module.w13_weight.data.roll(384, 1))  # gate and up exchanged, in place
    assert error(run(module, layer), dense(layer)) > 0.3


def test_one_rank_of_three() -> None:
    """vLLM's expert map and loader leave other ranks' experts out; their tokens' sums are 0."""
    layer = only_valid(draw_layer((FP8_BLOCK, None), tokens=37, top_k=2, experts=8, h=256, i=128))
    module = routed_experts(layer, config_of(FP8_CHECKPOINT), ranks=3)
    load_fp8(module, layer)
    assert module.w13_weight.shape[0] == 2
    here = torch.where(layer.ids >= 6, layer.ids, -1)
    got = run(module, layer)
    assert error(got, dense(replace(layer, ids=here))) < 0.06
    elsewhere = (here < 0).all(1)
    assert elsewhere.any()
    assert not got[elsewhere].any()


def test_gpt_oss_layer() -> None:
    """96 = 3 x 32 of I stays 96: nothing is rounded up to a tile."""
    layer = only_valid(draw_layer((MXFP4, torch.bfloat16), tokens=29, top_k=2, h=192, i=96, bias=True, **GPT_OSS))
    module = routed_experts(layer, config_of({"quant_method": "mxfp4"}), "SWIGLUOAI", has_bias=True)
    load_gpt_oss(module, layer)
    assert tuple(module.w13_weight.shape) == (5, 192, 96)
    assert error(run(module, layer), dense(layer)) < 0.01


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_a_reload(kind: str) -> None:
    """vLLM's own, twice: new values, in the layer's parameters and in the copies that graphs read."""
    from vllm.model_executor.model_loader import reload

    sizes: dict[str, Any] = {"tokens": 29, "top_k": 2, "h": 256, "i": 128}
    if kind == "fp8":
        layers = [only_valid(draw_layer((FP8_BLOCK, None), seed=seed, **sizes)) for seed in range(3)]
        module, fill = routed_experts(layers[0], config_of(FP8_CHECKPOINT)), fill_fp8
    else:
        pair = (MXFP4, torch.bfloat16)
        layers = [only_valid(draw_layer(pair, seed=seed, bias=True, **sizes, **GPT_OSS)) for seed in range(3)]
        module = routed_experts(layers[0], config_of({"quant_method": "mxfp4"}), "SWIGLUOAI", has_bias=True)
        fill = fill_gpt_oss
    reload.record_metadata_for_reloading(module)
    fill(module, layers[0])
    module.quant_method.process_weights_after_loading(module)
    run(module, layers[0])
    kept = module.quant_method.moe_kernel.fused_experts._cache._built.weights
    places = [t.data_ptr() for t in module.parameters()]
    for layer in layers[1:]:
        before = run(module, layer)
        reload.initialize_layerwise_reload(module)
        fill(module, layer)
        reload.finalize_layerwise_reload(module, None)
        got = run(module, layer)
        assert error(got, dense(layer)) < 0.06
        assert error(before, dense(layer)) > 0.3
        assert [t.data_ptr() for t in module.parameters()] == places
        now = module.quant_method.moe_kernel.fused_experts._cache._built.weights
        assert now is kept
        if kind == "mxfp4":
            assert torch.equal(kept.bias13, layer.options["bias13"].bfloat16().float())
    for name, t in module.named_parameters():  # what torch does not count, as a trainer's transfer
        if "weight_scale" in name:
            t.data.copy_(t / 2 if t.is_floating_point() else t - 1)
    refresh()
    assert error(run(module, layer), dense(layer)) > 0.1, "the layer's scales are read"


def test_checkpoints_that_are_claimed() -> None:
    from padless.integrations.vllm.config import PadlessConfig

    claim = PadlessConfig.override_quantization_method
    for method in ("fp8", "mxfp4", "gpt_oss_mxfp4"):
        assert claim({"quant_method": method}, "padless") == "padless"
        assert claim({"quant_method": method}, None) is None
    assert claim({"quant_method": "awq"}, "padless") is None
    assert claim(None, "padless") is None
    with pytest.raises(ValueError, match="quant_method is 'awq'"):
        config_of({"quant_method": "awq"})
    with pytest.raises(ValueError, match=r"weight_block_size is None; .* takes \[128, 128\]"):
        config_of({"quant_method": "fp8", "activation_scheme": "dynamic"})


def test_layers_that_are_refused() -> None:
    layer = only_valid(draw_layer((FP8_BLOCK, None), h=256, i=128))
    with pytest.raises(ValueError, match=r"does not compute this layer's experts \(.*SITU activation\)"):
        routed_experts(layer, config_of(FP8_CHECKPOINT), "SITU")
    with pytest.raises(ValueError, match=r"experts in MXFP4 have the activation 'silu'; .* takes gpt-oss'"):
        routed_experts(layer, config_of({"quant_method": "mxfp4"}), "SILU")


def test_skipped_layers_are_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization import fp8

    layer = only_valid(draw_layer((FP8_BLOCK, None), h=256, i=128))
    monkeypatch.setattr(fp8, "UnquantizedFusedMoEMethod", lambda config: "vLLM's")
    config = config_of(FP8_CHECKPOINT)
    module = routed_experts(layer, config)
    config.ignored_layers = ["model.layers.0.mlp.experts"]
    assert config.get_quant_method(module, "model.layers.0.mlp.experts") == "vLLM's"


def test_the_stand_in_is_like_vllm() -> None:
    from vllm.model_executor.layers.fused_moe import activation, config
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk

    for name, parameters in vllm_seam.PARAMETERS.items():
        assert list(inspect.signature(getattr(mk.FusedMoEExpertsModular, name)).parameters) == parameters, name
    abstract = mk.FusedMoEExpertsModular.__abstractmethods__
    assert abstract <= set(vllm_seam.PARAMETERS)
    assert {each.name: each.value for each in activation.MoEActivation} == vllm_seam.ACTIVATIONS
    for name in vllm_seam.ALL2ALL:
        assert isinstance(getattr(config.FusedMoEParallelConfig, name), property)
    made = activation.ApplyMoEActivationConfig()
    assert (made.clamp_limit, made.alpha, made.beta) == (None, 1.0, 0.0)
    no_situ = {"activation_situ_beta": None, "activation_situ_linear_beta": None}
    model = SimpleNamespace(swiglu_limit=7.0, swiglu_alpha=1.5, swiglu_beta=None, **no_situ)
    quant = SimpleNamespace(gemm1_clamp_limit=None, gemm1_alpha=1.25, gemm1_beta=None)
    theirs = activation.ApplyMoEActivationConfig.from_configs(model, quant)
    ours = vllm_seam.ApplyMoEActivationConfig.from_configs(model, quant)
    assert (ours.clamp_limit, ours.alpha, ours.beta) == (theirs.clamp_limit, theirs.alpha, theirs.beta)


def test_vllm_finds_the_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM looks for it, with the metadata that a wheel carries."""
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    import padless.integrations.vllm as plugin

    info = tmp_path / "padless-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: padless-here\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\npadless = padless.integrations.vllm:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_plugins_by_group(DEFAULT_PLUGINS_GROUP)["padless"] is plugin.register
