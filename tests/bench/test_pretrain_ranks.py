"""Whole models' training steps over ranks, on gloo: one process' losses and gradients, and a record that is shown."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench.cases import pretrain
from padless.bench.cases.pretrain import spread
from padless.bench.cases.pretrain.decoder import FP8, OVER_RANKS, OWN_BF16, Decoder, DecoderSize
from padless.bench.cases.train.contenders import BF16
from padless.bench.report.terminal import show
from padless.bench.results import failures
from padless.bench.session import RunSettings
from padless.testing.ranks import Rank, RankError, RankPool, raise_first, run_ranks
from support.bench_records import StandInTimer

TINY = DecoderSize(layers=2, hidden=128, heads=4, groups=2, width=32, experts=8, top_k=3, intermediate=64, vocab=101)
POINT = pretrain.PretrainPoint("tiny", 2, 2, 31, 2, 6, ranks=2, drawn=True)


def over_ranks(rank: Rank) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """(by contender the largest relative difference of a gradient from one process', and of the loss; the record)."""
    pretrain.LEARNING_RATE = 3e-3
    spread_over = pretrain.Training(TINY, POINT, 0, "cpu", compiled=False, rank=rank)
    whole = Decoder(TINY, device="cpu", compiled=False, drawn=0)
    whole.reset(0)
    batches = pretrain.sequences(48, POINT.tokens + 1, TINY.vocab, 0).view(6, 2, 4, -1)
    off: dict[str, dict[str, float]] = {}
    experts = {id(weight) for weight in spread_over.model.weights_of_experts()}
    for name in OVER_RANKS:
        want = whole(batches[0, 0], BF16)
        want.backward()
        loss = spread_over.model(spread_over.data[0, 0], name)
        (loss / 2).backward()
        torch.distributed.all_reduce(mean := loss.detach() / 2)
        off[name] = {"loss": abs(mean.item() / want.item() - 1)}
        for (what, mine), theirs in zip(spread_over.model.named_parameters(), whole.parameters(), strict=True):
            own = mine.grad if id(mine) in experts else mine.grad.full_tensor()
            wanted = theirs.grad.chunk(2)[rank.rank] if id(mine) in experts else theirs.grad
            off[name][what] = float((own - wanted).float().norm() / wanted.float().norm())
            mine.grad = theirs.grad = None
    record = pretrain.measure_over_ranks(rank, TINY, POINT, 0, 3, StandInTimer())
    return off, record


@pytest.mark.slow
def test_ranks_train_the_model_of_one_process() -> None:
    found = raise_first(run_ranks(over_ranks, 2, cuda=False, backend="collective", timeout_s=240))
    for off, _ in found:
        assert set(off) == set(OVER_RANKS)
        for name, values in off.items():
            assert values.pop("loss") < 1e-3, name
            limit = 0.12 if name == FP8 else 0.03  # bfloat16 gradients, and FP8's
            assert max(values.values()) < limit, (name, values)
    record = found[0][1] | {"point": asdict(POINT)}
    assert failures([record]) == []
    losses = record["losses"]
    assert losses == found[1][1]["losses"]  # means over ranks
    assert set(losses) == set(record["step"]) == set(record["peak_bytes"]) == {BF16, FP8, OWN_BF16}
    assert losses[BF16] != losses[FP8] != losses[OWN_BF16]
    for name in (FP8, OWN_BF16):
        assert all(abs(a / b - 1) < 2e-3 for a, b in zip(losses[BF16], losses[name], strict=True))
    assert losses[BF16][-1] < 0.98 * losses[BF16][0]
    assert set(record["gpu"]) == {*(f"experts: {name}" for name in OVER_RANKS), "optimizer"}
    console = Console(width=100, record=True)
    show(console, *pretrain.tables([record], {}, 100))
    text = console.export_text()
    assert text.count("tiny") == 2 * 3
    us = record["step"][FP8]["us"]
    assert f"{POINT.step_tokens / us * 1e6:.0f}" in text
    assert POINT.step_tokens == 2 * 2 * 31 * 2


def test_layers_are_those_that_fit() -> None:
    h100, h200 = 80 << 30, 140 << 30
    tokens = 4 * 4096
    assert [spread.layers_that_fit(pretrain.QUARTER, r, tokens, h100) for r in (2, 4)] == [12, 16]
    assert [spread.layers_that_fit(pretrain.QUARTER, r, tokens, h200) for r in (2, 4)] == [23, 31]
    # The run of 2026-11-28 on one GPU took 91 GB for 12 layers.
    assert spread.layers_that_fit(pretrain.QUARTER, 1, tokens, int(91e9 / 0.85)) in (10, 11, 12)


def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, words in ((1, "it must be 2 or more and divide 128"), (3, "it must be 2 or more and divide 128")):
        with pytest.raises(ValueError, match=words):
            pretrain.grid_over_ranks("quick", ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="torch sees 2 GPUs here"):
        pretrain.grid_over_ranks("quick", 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (139 << 30, 140 << 30))
    quick, full = (pretrain.grid_over_ranks(name, 2) for name in ("quick", "full"))
    assert quick == full[:1]
    assert [(p.ranks, p.layers, p.microbatches) for p in full] == [(2, 23, 1), (2, 23, 2)]


def test_a_rank_that_fails_is_the_points_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def called(self: RankPool, function: Any, *arguments: Any, timeout_s: float) -> list[Any]:
        given.append((function, *arguments))
        return [{"step": {}}, RankError("no memory")]

    monkeypatch.setattr(RankPool, "call", called)
    measure = pretrain.start(SimpleNamespace(settings=RunSettings(seed=4, repeats=2)))  # type: ignore[arg-type]
    record = measure(POINT) | {"point": asdict(POINT)}
    assert given == [(pretrain.measure_over_ranks, pretrain.QUARTER, POINT, 4, 2)]
    assert len(failures([record])) == 1
    assert "no memory" in failures([record])[0]
    assert all(not table.rows for table in pretrain.tables([record], {}, 100))
