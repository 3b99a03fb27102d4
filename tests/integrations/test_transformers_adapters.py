"""Adapters over a model's quantized experts, against transformers itself with W + delta in its dequantized weights.

A sceptic wants to see that logits with adapters are those of W + delta, far from those of W; that every adapter of every
layer gets a gradient and a few steps of transformers' loss lower it while codes keep their bits; that switched off, the
model has the bits it had; and that a file of PEFT carries an adapter from one model to another to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from padless import FP8_BLOCK, MXFP4, NVFP4, dequantize
from padless.integrations.transformers import adapt_experts, quantize_experts, set_activations
from padless.integrations.transformers.weights import expert_weights
from padless.nn.lora import LoraExperts, load_adapter, save_adapter
from support.hub_checkpoints import error, experts_of, load, logits, tokens

KINDS = [("qwen3_moe", "bf16", MXFP4), ("qwen3_moe", "bf16", NVFP4), ("qwen3_moe", "fp8", None)]
KINDS += [("gpt_oss", "mxfp4", None), ("gpt_oss", "bf16", FP8_BLOCK)]
PARAMETERS = pytest.mark.parametrize(("name", "kind", "format"), KINDS)


def quantized(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> Any:
    model = load(folder_of(name, kind), experts_implementation="padless")
    return model if format is None else quantize_experts(model, format)


def adapted(model: Any, seed: int = 0, **options: Any) -> dict[str, LoraExperts]:
    """Adapters of random A and B whose deltas are about as large as the weights."""
    found = adapt_experts(model, **({"rank": 4, "alpha": 4.0, "adapters": ("one", "two")} | options))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for m in found.values():
            for name in m.adapters:
                for w, a, b in ((m.w13, m.a13, m.b13), (m.w2, m.a2, m.b2)):
                    a[name].copy_(torch.randn(a[name].shape, generator=g))
                    size = dequantize(w).std() / m.rank**0.5
                    b[name].copy_(torch.randn(b[name].shape, generator=g) * size)
    return found


def with_deltas(name: str, model: Any, lora: dict[str, LoraExperts], adapter: str | None, folder_of: Any) -> Any:
    """A model of transformers alone with W + delta in bfloat16 for the experts' weights."""
    found = load(folder_of(name, "bf16"), experts_implementation="eager")
    for theirs, ours, m in zip(experts_of(found), experts_of(model), lora.values(), strict=True):
        weights = expert_weights(ours)
        for parameter, w, a, b in (
            (theirs.gate_up_proj, weights.w13, m.a13, m.b13),
            (theirs.down_proj, weights.w2, m.a2, m.b2),
        ):
            value = dequantize(w)
            if adapter is not None:
                value = value + m.scaling * b[adapter].detach().float() @ a[adapter].detach().float()
            with torch.no_grad():
                parameter.copy_(value.transpose(1, 2) if theirs.is_transposed else value)
    return found


@PARAMETERS
def test_logits_are_those_of_the_sum(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> None:
    model = quantized(name, kind, format, folder_of)
    set_activations(model, torch.bfloat16 if format in (MXFP4, NVFP4) or kind == "mxfp4" else None)
    before = logits(model)
    lora = adapted(model)
    plain = logits(with_deltas(name, model, lora, None, folder_of))
    for adapter in ("one", "two"):
        for m in lora.values():
            m.active = adapter
        want, got = logits(with_deltas(name, model, lora, adapter, folder_of)), logits(model)
        # The bound: twice what the same experts lose without adapters, but at least bfloat16's part.
        assert error(got, want) < max(2 * error(before, plain), 0.03)
        assert error(plain, want) > 5 * error(got, want), "the adapter is seen"
    for m in lora.values():
        m.active = None
    assert torch.equal(logits(model), before)


@PARAMETERS
def test_steps_lower_the_loss(name: str, kind: str, format: Any, folder_of: Callable[..., Path]) -> None:
    model = quantized(name, kind, format, folder_of)
    codes = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.requires_grad_(False)
    lora = adapt_experts(model, rank=4, alpha=16.0, dtype=torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trained} == {id(p) for m in lora.values() for p in m.parameters()}
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    ids, losses = tokens(), []
    for step in range(6):
        optimizer.zero_grad()
        loss = model.train()(ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss))
        if step == 1:  # B is zero in the first step, and so is A's gradient
            assert all(bool(p.grad.any()) and bool(p.grad.isfinite().all()) for p in trained)
        optimizer.step()
    assert losses[-1] < losses[0] - 0.02, losses
    for n, p in model.named_parameters():
        if n in codes:
            assert torch.equal(p.detach().view(torch.uint8), codes[n].view(torch.uint8)), n


def test_a_file_carries_an_adapter(tmp_path: Path, folder_of: Callable[..., Path]) -> None:
    """Under the names that the model's modules have, which are PEFT's after its prefix."""
    first, second = (quantized("gpt_oss", "mxfp4", None, folder_of) for _ in range(2))
    saved, loaded = adapted(first, 0), adapted(second, 1)
    assert list(saved) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert not torch.equal(logits(first), logits(second))
    save_adapter(tmp_path, saved, "one")
    assert load_adapter(tmp_path, loaded, "one") == ()
    assert torch.equal(logits(first), logits(second))


@pytest.mark.parametrize(("name", "kind", "format"), [KINDS[0], KINDS[2], KINDS[3]])
def test_trainer_trains_adapters(
    name: str, kind: str, format: Any, folder_of: Callable[..., Path], tmp_path: Path
) -> None:
    """A quantized model without adapters it refuses; with checkpointing losses are the same to the bit."""
    pytest.importorskip("accelerate")
    losses = []
    for again in (None, False, True):
        model = quantized(name, kind, format, folder_of)
        for p in model.parameters():
            p.requires_grad_(False)
        if again is not None:
            torch.manual_seed(0)
            lora = adapt_experts(model, rank=4, dtype=torch.float32)
        settings = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, use_cpu=True, save_strategy="no",
            gradient_checkpointing=bool(again), learning_rate=1e-2, lr_scheduler_type="constant", logging_steps=1,
            report_to=[], disable_tqdm=True,
        )  # fmt: skip
        rows = [{"input_ids": row, "labels": row} for row in tokens()]
        if again is None:
            if format is None:
                with pytest.raises(ValueError, match="purely quantized"):
                    Trainer(model, settings, train_dataset=rows)
            continue
        trainer = Trainer(model, settings, train_dataset=rows)
        trainer.train()
        assert all(bool(m.b13["default"].any()) and bool(m.b2["default"].any()) for m in lora.values())
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def test_codes_of_a_moved_or_written_model(folder_of: Callable[..., Path]) -> None:
    """Adapters use the codes that the model has now, and no copy of them."""
    model = quantized("qwen3_moe", "bf16", MXFP4, folder_of)
    lora = adapted(model)
    want = logits(model)
    experts = experts_of(model)[0]
    experts.down_proj = nn.Parameter(experts.down_proj.detach().roll(1, 0), requires_grad=False)
    assert not torch.equal(logits(model), want)
    weights = expert_weights(experts)
    assert next(iter(lora.values())).w2.data.data_ptr() == weights.w2.data.data_ptr()


def test_refusals(folder_of: Callable[..., Path]) -> None:
    model = load(folder_of("qwen3_moe", "bf16"), experts_implementation="padless")
    with pytest.raises(ValueError, match="no quantized experts"):
        adapt_experts(model)
    quantize_experts(model, MXFP4)
    with pytest.raises(ValueError, match="rank"):
        adapt_experts(model, rank=0)
    adapt_experts(model)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts has adapters"):
        adapt_experts(model)
