"""The benchmark of whole models' training steps: one model for all contenders, and a wrong or broken one shows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench.cases import pretrain
from padless.bench.cases.pretrain.decoder import CONTENDERS, FP8, Decoder, DecoderSize, Layer
from padless.bench.cases.pretrain.sequences import sequences
from padless.bench.cases.train.contenders import BF16, KEPT
from padless.bench.report.terminal import show
from padless.bench.results import failures
from padless.nn import Experts
from support.bench_records import StandInTimer

TINY = DecoderSize(layers=2, hidden=128, heads=4, groups=2, width=32, experts=8, top_k=3, intermediate=64, vocab=101)
POINT = pretrain.PretrainPoint("tiny", 2, 4, 31, 2, 6)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> pretrain.Training:
    monkeypatch.setattr(pretrain, "LEARNING_RATE", 3e-3)
    return pretrain.Training(TINY, POINT, 0, "cpu", compiled=False)


def measured(training: pretrain.Training) -> dict[str, Any]:
    found = pretrain.measure_pretrain(training, StandInTimer(), lambda: 7, lambda text: None)
    return found | {"point": asdict(POINT)}


def test_contenders_train_one_model(training: pretrain.Training) -> None:
    record = measured(training)
    assert failures([record]) == []
    losses = record["losses"]
    assert set(losses) == set(record["step"]) == set(record["peak_bytes"]) == set(CONTENDERS)
    assert losses[FP8] == losses[FP8 + KEPT]  # codes that outlive a step would show in the second loss
    assert losses[BF16] != losses[FP8]  # the experts are others, and not by much
    assert all(abs(a / b - 1) < 2e-3 for a, b in zip(losses[BF16], losses[FP8], strict=True))
    assert losses[BF16][-1] < 0.98 * losses[BF16][0]
    parts = pretrain.part_us(record, FP8)
    assert tuple(parts) == pretrain.PARTS
    assert parts["experts"] == 4 * record["gpu"][f"experts: {FP8}"]["us"]
    assert parts["head and loss"] == 2 * record["gpu"]["head and loss"]["us"]
    assert parts["optimizer"] == record["gpu"]["optimizer"]["us"]
    assert parts["experts"] != pretrain.part_us(record, BF16)["experts"]
    console = Console(width=200, record=True)
    show(console, *pretrain.tables([record], {}, 200))
    text = console.export_text()
    assert "bf16 /" in text
    assert text.count("tiny") == 2 * 3  # steps, and their parts


def test_the_model_is_qwen3s(training: pretrain.Training) -> None:
    """Loss and gradients of transformers' model with the same weights, in float32 there."""
    transformers = pytest.importorskip("transformers")
    s = TINY
    config = transformers.Qwen3MoeConfig(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        moe_intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.groups,
        head_dim=s.width,
        num_experts=s.experts,
        num_experts_per_tok=s.top_k,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
    )
    model, theirs = training.model, transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():  # norms that are 1 would hide a wrong one; larger weights a wrong attention
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * (0.3 if p.dim() == 1 else 0.06) + (p.dim() == 1))
        theirs.model.embed_tokens.weight.copy_(model.embedding)
        theirs.lm_head.weight.copy_(model.head)
        theirs.model.norm.weight.copy_(model.norm)
        for ours, layer in zip(model.layers, theirs.model.layers, strict=True):
            q, k, v = ours.qkv.split([s.heads * s.width, s.groups * s.width, s.groups * s.width])
            attention, mlp = layer.self_attn, layer.mlp
            for target, source in (
                (attention.q_proj.weight, q),
                (attention.k_proj.weight, k),
                (attention.v_proj.weight, v),
                (attention.o_proj.weight, ours.project),
                (attention.q_norm.weight, ours.q_norm),
                (attention.k_norm.weight, ours.k_norm),
                (layer.input_layernorm.weight, ours.attention_norm),
                (layer.post_attention_layernorm.weight, ours.experts_norm),
                (mlp.gate.weight, ours.router),
                (mlp.experts.gate_up_proj, ours.w13),
                (mlp.experts.down_proj, ours.w2),
            ):
                target.copy_(source)
    batch = training.data[0, 0]
    logits = theirs(batch[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    got = model(batch, BF16)
    assert abs(got.item() / want.item() - 1) < 5e-3
    got.backward()
    want.backward()
    pairs = (
        (model.embedding, theirs.model.embed_tokens.weight),
        (model.layers[0].project, theirs.model.layers[0].self_attn.o_proj.weight),
        (model.layers[1].k_norm, theirs.model.layers[1].self_attn.k_norm.weight),
        (model.layers[0].w13, theirs.model.layers[0].mlp.experts.gate_up_proj),
        (model.layers[1].router, theirs.model.layers[1].mlp.gate.weight),
    )
    for ours, other in pairs:
        similar = torch.nn.functional.cosine_similarity(ours.grad.double().flatten(), other.grad.double().flatten(), 0)
        assert similar > 0.98


@pytest.mark.parametrize("fault", ["negative", "stale"])
def test_experts_that_are_wrong_are_noticed_and_not_timed(
    training: pretrain.Training, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "negative":  # ascends where the gradient says descend
        right = Layer.experts

        def negated(self: Layer, contender: str, x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
            out = right(self, contender, x, *args)
            return out if contender == BF16 else out - out.detach() * 40

        monkeypatch.setattr(Layer, "experts", negated)
        wrong = {FP8, FP8 + KEPT}
    else:  # nothing is learned
        step = pretrain.Training.step

        def stuck(self: pretrain.Training, contender: str) -> torch.Tensor:
            if contender == FP8:
                self.optimizer.param_groups[0]["lr"] = 0.0
            return step(self, contender)

        monkeypatch.setattr(pretrain.Training, "step", stuck)
        wrong = {FP8}
    record = measured(training)
    assert set(record["wrong"]) == wrong
    assert set(record["step"]) == set(CONTENDERS) - wrong
    assert len(failures([record])) == len(wrong)


def test_a_contender_that_raises_leaves_the_others(
    training: pretrain.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Experts.forward

    def broken(self: Experts, *args: torch.Tensor) -> torch.Tensor:
        if self.keep_codes:
            raise RuntimeError("no such kernel")
        return forward(self, *args)

    monkeypatch.setattr(Experts, "forward", broken)
    record = measured(training)
    assert set(record["errors"]) == {FP8 + KEPT}
    assert "no such kernel" in record["errors"][FP8 + KEPT]
    assert set(record["step"]) == {BF16, FP8}
    assert "attention" in record["gpu"]


def test_every_contender_begins_with_the_same_parameters(training: pretrain.Training) -> None:
    first = [p.detach().clone() for p in training.model.parameters()]
    training.losses(FP8 + KEPT)
    assert not all(torch.equal(a, b) for a, b in zip(first, training.model.parameters(), strict=True))
    training.reset()
    assert all(torch.equal(a, b) for a, b in zip(first, training.model.parameters(), strict=True))
    assert training.losses(FP8) == training.losses(FP8)
    assert len({id(p) for p in training.model.parameters()}) == len(first) == 3 + 2 * 9


def test_half_of_the_tokens_follow_from_the_one_before() -> None:
    found = sequences(20, 400, 50, 3)
    assert torch.equal(found, sequences(20, 400, 50, 3))
    assert not torch.equal(found, sequences(20, 400, 50, 4))
    assert found.shape == (20, 400)
    pairs = torch.zeros(50, 50).index_put_((found[:, :-1].flatten(), found[:, 1:].flatten()), torch.ones(()), True)
    share = pairs.amax(1) / pairs.sum(1)
    assert 0.5 < share.mean() < 0.6


def test_grids() -> None:
    (point,) = pretrain.grid("quick", 0)
    assert point.step_tokens == 2 * 4 * 4096
    assert pretrain.QUARTER.vocab * 4 == 151936
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(pretrain.QUARTER, device="meta", compiled=False).parameters())
    assert 7.5e9 < count < 7.8e9
