"""Experts that accelerate takes away behind every call, and files whose blocks of gate and up are no blocks of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.integrations.codes import load_codes
from padless.integrations.transformers import adapt_experts, quantize_experts
from padless.integrations.transformers.weights import _BUILT
from padless.nn import Experts
from support import hub_checkpoints
from support.hub_checkpoints import experts_of, load, logits

PLACES = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}


def offloaded(folder: Path, to: Path) -> Any:
    places = PLACES | {f"model.layers.{i}": "disk" for i in range(2)}
    return load(folder, experts_implementation="padless", device_map=places, offload_folder=str(to))


def test_nothing_is_kept(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = folder_of("qwen3_moe", "fp8")
    model = offloaded(folder, tmp_path)
    assert torch.equal(logits(model), logits(load(folder, experts_implementation="padless")))
    assert not any(module in _BUILT for module in experts_of(model))


def test_what_needs_them_in_memory(folder_of: Callable[..., Path], tmp_path: Path) -> None:
    model = offloaded(folder_of("qwen3_moe", "fp8"), tmp_path / "fp8")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts is offloaded .* adapt_experts"):
        adapt_experts(model, rank=4)
    with pytest.raises(ValueError, match=r"is offloaded .* load_codes"):
        load_codes(experts_of(model)[1], Experts(256, 384, num_experts=8).codes())
    with pytest.raises(ValueError, match=r"is offloaded .* quantize_experts"):
        quantize_experts(offloaded(folder_of("qwen3_moe", "bf16"), tmp_path / "bf16"))


def test_blocks_of_halves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = hub_checkpoints.MODELS["qwen3_moe"] | {"moe_intermediate_size": 96}
    monkeypatch.setitem(hub_checkpoints.MODELS, "qwen3_moe", sizes)
    source = hub_checkpoints.write_bf16("qwen3_moe", tmp_path / "bf16")
    model = load(hub_checkpoints.write_fp8(source, tmp_path / "fp8"), experts_implementation="padless")
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.gate_up_proj has 96 rows of gate"):
        logits(model)
    logits(quantize_experts(load(source, experts_implementation="padless")))  # blocks of both
