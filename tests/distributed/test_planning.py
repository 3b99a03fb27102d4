"""The planning model: what follows from counting, and the measured times of two GPUs."""

from __future__ import annotations

import re
from math import comb
from pathlib import Path

import pytest

from padless.distributed.planning import Exchange, Machine, predict, table

# bfloat16 tokens to FP8 rows, and rows to sums, of two H200s (padless bench ep, 2026-11-22).
MEASURED = {4096: (138.6, 237.9)}


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 64, 8), (8, 256, 8), (8, 256, 6), (64, 256, 8)])
def test_copies_are_those_of_a_closed_form(ranks: int, experts: int, top_k: int) -> None:
    """D = R (1 - C(E - E/R, k) / C(E, k)) for distinct uniform experts."""
    p = predict(Exchange(ranks, 4096, 7168, experts, top_k))
    want = ranks * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))
    assert p.copies == pytest.approx(want, rel=0.01)
    assert p.rows == pytest.approx(4096 * top_k)
    hosts = max(ranks // 8, 1)
    want = hosts * (1 - comb(experts - experts // hosts, top_k) / comb(experts, top_k))
    assert p.hosts == pytest.approx(want, rel=0.01)


def test_rows_of_slots_in_the_documentation() -> None:
    """Every line of the page's table: distinct other ranks of a token, slots on other ranks, and their bytes."""
    text = (Path(__file__).parents[2] / "docs/expert_parallelism.md").read_text()
    lines = re.findall(
        r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \| (\d+) \|$", text, re.M
    )
    assert len(lines) == 5
    for line in lines:
        r, e, k = map(int, line[:3])
        by_rank = (r - 1) * (1 - comb(e - e // r, k) / comb(e, k))
        by_slot = k * (r - 1) / r
        megabytes = [4096 * rows * 2 * 7168 / 1e6 for rows in (by_rank, by_slot)]
        wanted = [f"{by_rank:.2f}", f"{by_slot:.2f}", f"{by_slot / by_rank:.2f}", *(f"{x:.0f}" for x in megabytes)]
        assert list(line[3:]) == wanted
        p = predict(Exchange(r, 4096, 7168, e, k))
        assert p.copies * (r - 1) / r == pytest.approx(by_rank, rel=0.01)


def test_two_gpus_as_measured() -> None:
    for tokens, (dispatch, combine) in MEASURED.items():
        p = predict(Exchange(2, tokens, 7168, 64, 8))
        assert p.dispatch == pytest.approx(dispatch, rel=0.1)
        assert p.combine == pytest.approx(combine, rel=0.1)


def test_what_slows_an_exchange() -> None:
    usual = predict(Exchange(8, 4096, 7168, 256, 8))
    assert predict(Exchange(8, 4096, 7168, 256, 8, skew=1.0)).dispatch > 1.3 * usual.dispatch
    assert predict(Exchange(8, 4096, 7168, 256, 8), Machine(link=175)).combine > 1.5 * usual.combine
    two_hosts = predict(Exchange(16, 4096, 7168, 256, 8))
    assert two_hosts.combine > 3 * usual.combine  # the network, a sum for each rank
    assert 1.5 * usual.dispatch < two_hosts.dispatch < 2 * usual.dispatch  # a row for each host
    with pytest.raises(ValueError, match="experts is 10 and ranks 4"):
        predict(Exchange(4, 1, 32, 10, 2))


def test_table() -> None:
    lines = table([2, 8], 128, 4096, 64, 6, 0.0, Machine()).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| 2 | 32 |")
