"""The expert-parallel benchmark without GPUs: its contenders agree on gloo, its tables show a record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from padless.bench.cases import ep
from padless.bench.cases.ep import async_ep, deepep
from padless.bench.cases.ep.problem import EpPoint, EpProblem, NcclExchange, points
from padless.distributed import planning
from padless.testing.judge import row_errors, worst
from padless.testing.ranks import Rank, RankError, RankPool, raise_first, run_ranks
from support import deepep_first

POINT = EpPoint("tiny", 2, 9, 128, 64, 6, 3)


def contenders(rank: Rank) -> tuple[float, int, list[int]]:
    """(worst difference of a token between both layers, rows over the link, rows here)."""
    p = EpProblem(rank, POINT, 1)
    nccl = NcclExchange(p)
    rows, plan = p.ep.dispatch(p.x, p.ids, p.weights)
    mine = p.ep.combine(p.products(rows, plan.offs), plan, weighted=True)
    theirs, offs = nccl.dispatch()
    assert torch.equal(offs, plan.offs)
    used = int(offs[-1])
    assert torch.equal(theirs.data.view(torch.uint8), rows.data[:used].view(torch.uint8))
    assert torch.equal(theirs.scale, rows.scale[:used])
    assert torch.equal(nccl.layer(), nccl.combine(p.products(theirs, offs)))
    y = p.products(rows, plan.offs)
    assert torch.equal(ep.slots_calls(p, y, mine)["combine of slots"](), nccl.layer())  # it sends slots' rows, too
    assert p.link_slots() == int((p.ids // 3 != rank.rank).sum())
    steps = ep.step_calls(p)  # which compares them
    assert torch.equal(steps["step"]()[4], steps["nccl step"]()[4])
    return worst(row_errors(mine, nccl.layer().double())), p.link_rows(), plan.offs.tolist()


@pytest.mark.slow
def test_contenders_agree() -> None:
    """NCCL's path, on gloo here, hands over the same rows in the same order; sums differ by bfloat16's rounding."""
    found = raise_first(run_ranks(contenders, 2, cuda=False, backend="collective", timeout_s=60))
    assert all(0 < error < 0.02 for error, _, _ in found)
    assert all(0 < rows <= POINT.tokens for _, rows, _ in found)
    assert sum(offs[-1] for _, _, offs in found) == 2 * POINT.tokens * POINT.top_k


def test_grid() -> None:
    assert {p.ranks for p in points(4, full=True)} == {4}
    assert len(points(2, full=True)) == 18
    assert all(p.experts % p.ranks == 0 for p in points(8, full=True))


def test_prediction_is_by_the_rates_of_the_machine() -> None:
    point = points(4, full=True)[4]
    usual = ep.predicted(point, planning.Machine())
    assert list(usual) == ["dispatch", "combine", "layer", "step"]
    slower = ep.predicted(point, planning.Machine(memory=2100.0, products=730.0))
    assert all(slower[name] > usual[name] for name in usual)
    assert slower["layer"] > 1.7 * usual["layer"]


class Pool:
    """Calls of which those with DeepEP fail, as a rank says it."""

    def __init__(self) -> None:
        self.names: list[tuple[str, ...]] = []

    def call(self, function: object, *arguments: object, timeout_s: float) -> list[object]:
        assert function is ep.measure_point
        self.names.append(arguments[-1])
        return [{"gpu": {}}, RankError("no kernel") if "deepep" in arguments[-1] else {"gpu": {}}]


def test_a_library_that_fails_leaves_the_others(tmp_path: Path) -> None:
    """On any rank. It is tried where it is there, once, at a small point."""
    for name in (async_ep.FOLDER, deepep.FOLDER):
        (tmp_path / name).mkdir()
    pool = Pool()
    assert ep.probed(pool, tmp_path) == (["titan"], {"deepep": "no kernel"})
    assert pool.names == [("titan",), ("deepep",)]
    (tmp_path / async_ep.FOLDER).rmdir()
    assert ep.probed(pool, tmp_path)[0] == []
    assert ep.probed(pool, None) == ([], {})
    assert len(pool.names) == 3


def test_the_slowest_rank_against_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [{"layer": [100.0, 102.0, 101.0]}, {"layer": [103.0, 107.0, 104.0]}]
    monkeypatch.setattr(ep, "gathered", lambda rank, value: every)
    found = ep.slowest(Rank(0, 2, torch.device("cpu"), "collective"), every[0])["layer"]
    assert found["us"] == 104.0  # the median of 103, 107 and 104
    assert found["over_mean_percent"] == round(100 * (104 / 102.5 - 1), 1)


def test_tables() -> None:
    times = {name: {"us": 100.0} for name in ("dispatch", "combine", "layer", *ep.STEPS)}
    times |= {f"nccl {name}": {"us": 350.0} for name in ("dispatch", "combine", "layer")}
    record = {
        "kind": "ep",
        "point": vars(points(2, full=False)[2]),
        "gpu": times,
        "link_bytes": {"fan_out": 32_000_000, "send_back": 60_000_000},
    }
    *directions, _, sent = ep.tables([record], {}, 120)
    assert [table.rows[0][3:] for table in directions] == [["100.0", "350.0", "3.5x"]] * 3
    assert sent.rows[0][-2:] == ["320", "600"]
    with_slots = record | {"gpu": times | {"combine of slots": {"us": 250.0}}}
    with_slots["link_bytes"] = record["link_bytes"] | {"combine of slots": 75_000_000}
    assert ep.tables([with_slots], {}, 120)[-1].rows[0][-5:] == ["250.0", "2.50", "320", "600", "300"]
    said = record | {"predicted": {"dispatch": 110.0, "combine": 95.0, "layer": 100.0, "step": 300.0}}
    said["gpu"] = {name: time | {"over_mean_percent": 2.5} for name, time in times.items()}
    columns = ["110.0 +10%", "+2.5", "95.0 -5%", "+2.5", "100.0 +0%", "+2.5"]
    assert ep.tables([said], {}, 120)[3].rows[0][3:] == columns
    said["gpu"]["step"] = {"us": 400.0}
    assert ep.tables([said], {}, 120)[4].rows[0][3:] == [*columns, "300.0 -25%", "-"]
    record["gpu"] |= {
        f"{who} {name}": {"us": 321.0} for name in ("dispatch", "combine", "layer") for who in ("titan", "deepep")
    }
    assert ep.tables([record], {}, 120)[0].rows[0][3:] == ["100.0", "350.0", "3.5x", *["321.0", "3.2x"] * 2]


def with_deepep(rank: Rank, planted: str = "") -> str:
    """What the checks of DeepEP's contenders say, on every rank: its first assertion, "" where all agrees."""
    deepep_first.Buffer.planted = planted
    p = EpProblem(rank, POINT, 2)
    rows, plan = p.ep.dispatch(p.x, p.ids, p.weights)
    used = int(plan.offs[-1])
    y = torch.randn(plan.prob.shape[0], POINT.hidden, generator=torch.Generator().manual_seed(rank.rank)).bfloat16()
    peer = deepep.DeepEpExchange(p, deepep_first)
    peer.sms = 64
    try:
        calls = ep.deepep_calls(peer, rows, plan, y)
    except AssertionError as error:
        return str(error)
    assert peer.dispatch()[0].data.shape[0] == used
    layer = p.ep.combine(p.products(rows, plan.offs), plan, weighted=True)
    return "" if worst(row_errors(calls["deepep layer"](), layer.double())) < ep.SUM_TOLERANCE else "layer"


@pytest.mark.slow
def test_deepep_hands_over_the_same_rows() -> None:
    """Over a DeepEP on gloo: rows, scales, sums; a slot that is lost and a sum taken twice are found."""
    with RankPool(2, cuda=False, backend="collective") as pool:
        assert raise_first(pool.call(with_deepep, timeout_s=60)) == ["", ""]
        assert raise_first(pool.call(with_deepep, "lost", timeout_s=60)) == ["offs of DeepEP"] * 2
        found = raise_first(pool.call(with_deepep, "again", timeout_s=60))
        assert all("DeepEP's combine is off" in said for said in found)
