"""vLLM's own models, loading checkpoints in the hub's form with `--quantization padless`. Needs vLLM's Python files.

Attention is an empty module: its backends are compiled. Nothing of the experts is replaced.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from padless.checkpoints import Checkpoint
from padless.integrations.checkpoints import load_experts
from padless.moe import moe

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM's Python files on PYTHONPATH")
# (transformers' name, vLLM's module, experts of layer 1 in the checkpoint, further arguments of the layer)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", "model.layers.1.mlp.experts", {}),
    "mixtral": ("mixtral", "model.layers.1.block_sparse_moe.experts", {}),
    "gpt_oss": (
        "gpt_oss",
        "model.layers.1.mlp.experts",
        {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0, "activations": torch.bfloat16},
    ),
}


class NoAttention(torch.nn.Module):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__()


@pytest.fixture(scope="module", autouse=True)
def _rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    import padless.integrations.vllm as plugin

    plugin.register()
    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            store = tmp_path_factory.mktemp("vllm") / "store"
            init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
            initialize_model_parallel(1, 1)
            init_workspace_manager(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        yield


def write(name: str, root: Path) -> Path:
    from support.hub_checkpoints import write_bf16, write_fp8, write_mxfp4

    source = write_bf16(name, root / "bf16")
    return (write_mxfp4 if name == "gpt_oss" else write_fp8)(source, root / "quantized")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_its_checkpoint(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ModelConfig takes the name, the model's loader fills every parameter, and a layer has the checkpoint's bits."""
    from vllm.config import DeviceConfig, LoadConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.model_loader.utils import initialize_model

    module, prefix, more = MODELS[name]
    folder = write(name, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(importlib.import_module(f"vllm.model_executor.models.{module}"), "Attention", NoAttention)
    model_config = ModelConfig(
        model=str(folder),
        tokenizer=str(folder),
        skip_tokenizer_init=True,
        quantization="padless",
        dtype="bfloat16",
        enforce_eager=True,
    )
    assert model_config.quantization == "padless"
    config = VllmConfig(model_config=model_config, device_config=DeviceConfig(device="cpu"), load_config=LoadConfig())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with set_current_vllm_config(config):
            model = initialize_model(config, model_config=model_config)
            loaded = model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    finally:
        torch.set_default_dtype(before)
    absent = {n for n, _ in model.named_parameters()} - set(loaded)
    assert all("attn" in n for n in absent), absent

    layer = [m for m in model.modules() if isinstance(m, RoutedExperts)][-1]
    assert type(layer.quant_method).__module__ == "padless.integrations.vllm.quantization"
    layer.quant_method.process_weights_after_loading(layer)
    experts = layer.global_num_experts
    x = torch.randn(19, layer.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.rand(19, experts, generator=torch.Generator().manual_seed(2)).argsort(1)[:, :2]
    weights = torch.rand(19, 2, generator=torch.Generator().manual_seed(3))
    got = layer.quant_method.apply(layer, x, weights, ids, None, None)
    with Checkpoint(folder) as checkpoint:
        stored = load_experts(checkpoint, prefix)
    want = moe(x, ids, weights, stored.w13, stored.w2, **stored.options, **more)
    assert want.isfinite().all()
    assert torch.equal(got, want)
