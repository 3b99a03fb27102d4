"""padless bench blackwell on the CPU, the reference in the kernels' place: data, rules, records, tables."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench import commands
from padless.bench.case import CASES
from padless.bench.cases import blackwell
from padless.bench.cases.blackwell import (
    NEW,
    OWN,
    TORCH,
    BlackwellPoint,
    enough,
    make_dataset,
    measure_competition,
    measure_dense_mxfp8,
    wrong_elements,
)
from padless.bench.results import BenchResult
from padless.bench.run import show_records
from padless.bench.session import RunSettings
from padless.formats import MXFP8
from support.bench_records import StandInTimer

lists = importlib.import_module("padless.ops.grouped_gemm_list")  # the package has the function of this name
TINY = BlackwellPoint("T", 17, 128, 256)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A small shape in the competition's place, three repeats; the list grows by the calls of every repeat."""
    monkeypatch.setitem(blackwell.COMPETITION, "T", ((5, 12), 128, 256))
    monkeypatch.setattr(blackwell, "enough", lambda means, seconds: len(means) >= 3)
    return []


def counting_clock(counts: list[int]) -> Callable[[Sequence[Callable[[], Any]]], float]:
    def clock(calls: Sequence[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        counts.append(len(calls))
        return 10.0 * len(calls)

    return clock


def test_the_points_are_the_papers_and_the_competitions() -> None:
    points = blackwell.grid()
    assert [p.M for p in points if p.case == "dense"] == [2048, 4096, 8192, 16384]
    assert all(p.M == p.N == p.K for p in points if p.case == "dense")
    assert [(p.case, p.M) for p in points if p.case != "dense"] == [("A", 1024), ("B", 1024), ("C", 512), ("D", 512)]


def test_the_data_is_the_competitions() -> None:
    data = make_dataset((5, 12), 128, 256, 1, "cpu")
    codes = data.a[0].data.view(torch.uint8)
    assert codes.unique().numel() > 30
    assert ((codes & 0x44) == 0).all()
    assert data.a[1].logical_shape == (12, 256)
    assert data.expected[1].shape == (12, 128)
    assert data.expected[0].abs().max() < 9 * 256
    other = make_dataset((5, 12), 128, 256, 43, "cpu")
    assert not torch.equal(other.expected[0], data.expected[0])


def test_wrong_and_missing_outputs_are_counted() -> None:
    data = make_dataset((3,), 128, 256, 1, "cpu")
    right = data.expected[0].half()
    assert wrong_elements([right], data) == 0
    wrong = right.clone()
    wrong[1, 5] += 1 + wrong[1, 5].abs()
    wrong[2, 6] = float("nan")
    assert wrong_elements([wrong], data) == 2


def test_every_call_has_its_own_operands_and_is_checked(tiny: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = lists.grouped_gemm_list

    def spy(a: Any, b: Any, **options: Any) -> Any:
        seen.append(a[0].data.data_ptr())
        return real(a, b, **options)

    monkeypatch.setattr(lists, "grouped_gemm_list", spy)
    record = measure_competition(TINY, 0, counting_clock(tiny), "cpu", calls=4)
    assert tiny == [4] * 6  # new tensors and again, three repeats
    assert record["gpu"][OWN] == {"us": 10.0, "spread_percent": 0.0, "samples_us": [10.0] * 3}
    assert set(record["gpu"]) == {OWN, NEW}
    repeat = seen[1:9]
    assert sorted(repeat[:4]) == sorted(repeat[4:])
    assert len(set(repeat)) == 4
    assert repeat[:4] != repeat[4:] or seen[9:13] != seen[13:17]
    json.dumps(record, allow_nan=False)


def test_a_kernel_that_answers_from_memory_is_found(tiny: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Right once for every place it is called from, and after that the first call's outputs again."""
    real, kept = lists.grouped_gemm_list, []

    def remembering(a: Any, b: Any, *, out: Any) -> Any:
        if not kept:
            kept.extend(d.clone() for d in real(a, b, out=out))
        for d, known in zip(out, kept, strict=True):
            d.copy_(known)
        return out

    monkeypatch.setattr(lists, "grouped_gemm_list", remembering)
    record = measure_competition(TINY, 0, counting_clock(tiny), "cpu", calls=2)
    assert "outside the competition's tolerance" in record["wrong"][NEW]
    assert record["gpu"] == {}


def test_when_to_stop() -> None:
    assert not enough([10.0] * 2, 5.0)
    assert enough([10.0] * 3, 5.0)
    assert not enough([10.0] * 3, 0.05)
    assert not enough([10.0, 11.0, 12.0], 5.0)
    assert enough([10.0, 11.0, 12.0], 120.0)
    assert enough([10.0, 12.0] * 50, 5.0)
    assert enough([1e6, 2e6], 5.0)


def test_dense_on_the_same_codes_and_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {}

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.update(options, a=a, b=b)
        raise RuntimeError("not on this device")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    record = measure_dense_mxfp8(BlackwellPoint("dense", 70, 48, 160), 0, StandInTimer(), "cpu")
    assert (record["errors"], record["wrong"]) == ({}, {})
    assert "not on this device" in record["missing"][TORCH]
    assert set(record["gpu"]) == {OWN}
    assert record["row_error"][OWN] < 0.01
    assert calls["a"].dtype == MXFP8.data_dtype
    assert calls["b"].shape == (160, 48)
    assert calls["b"].stride(0) == 1
    assert calls["scale_a"].numel() == 128 * 8  # rows to 128, columns to 4
    assert calls["scale_b"].is_contiguous()


def test_wrong_dense_products_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: torch.zeros(a.shape[0], b.shape[1]))
    record = measure_dense_mxfp8(BlackwellPoint("dense", 70, 48, 160), 0, StandInTimer(), "cpu")
    assert "is wrong" in record["wrong"][TORCH]
    assert set(record["gpu"]) == {OWN}


def test_the_tables_show_all_of_it(tiny: list[int]) -> None:
    points = [BlackwellPoint("dense", 64, 64, 64), TINY]
    records = [measure_dense_mxfp8(points[0], 0, StandInTimer(), "cpu")]
    records.append(measure_competition(TINY, 0, counting_clock(tiny), "cpu", calls=2))
    for record, point in zip(records, points, strict=True):
        record["point"] = {"case": point.case, "M": point.M, "N": point.N, "K": point.K}
    text = io.StringIO()
    show_records(CASES["blackwell"], records, {}, Console(file=text, width=160))
    shown = text.getvalue()
    assert "10.00" in shown
    assert f"{TORCH} does not run here" in shown


def test_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    got: list[Any] = []

    def run(name: str, points: Any, peers: Any, out: Path, settings: RunSettings) -> BenchResult:
        got.extend((name, points, peers, out, settings.seed))
        return BenchResult([], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    assert commands.bench("blackwell", out=tmp_path, seed=3) == 0
    assert got == ["blackwell", "full", None, tmp_path, 3]
