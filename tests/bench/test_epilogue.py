"""The benchmark of the fused epilogue: contenders compute what their names say, and wrong or missing ones show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from padless import FP8_BLOCK, dequantize, grouped_gemm
from padless.bench import commands
from padless.bench.case import CASES
from padless.bench.cases import epilogue
from padless.bench.group_sizes import Point
from padless.bench.problem import make_grouped
from padless.bench.results import BenchResult, failures
from padless.bench.run import show_records
from padless.testing.timing import Call
from support.bench_records import StandInTimer

POINT = Point(70, 256, 128, 3)
SIZES = [40, 0, 30]


@pytest.fixture(scope="module")
def problem():  # type: ignore[no-untyped-def]
    return make_grouped(POINT, SIZES, 5, "cpu")


def test_contenders_compute_what_they_are_compared_for(problem) -> None:  # type: ignore[no-untyped-def]
    calls = epilogue.calls(problem)
    assert set(calls) == {epilogue.GEMM, *(name for pair in epilogue.PAIRS for name in pair)}
    d = grouped_gemm(problem.a, problem.b, problem.offs, out_dtype=torch.float32)
    gate, up = d[:, :128], d[:, 128:]
    wanted = {"fused rows": d, "fused swiglu rows": gate * torch.sigmoid(gate) * up}
    for fused, separate in epilogue.PAIRS:
        if fused == "fused rows and columns":
            assert calls[fused]()["d_col_tensor"] is not None
            continue
        one, two = dequantize(calls[fused]().row), dequantize(calls[separate]())
        limit = 0.07 * wanted[fused].abs() + 1e-3 * wanted[fused].abs().max()
        assert ((one - wanted[fused]).abs() <= limit).all()
        assert ((two - wanted[fused]).abs() <= 1.2 * limit).all()
    assert calls["fused rows"]().row.format == FP8_BLOCK


@pytest.mark.parametrize("full", [False, True])
def test_the_grid_has_every_k_that_the_cost_is_predicted_for(full: bool) -> None:
    points = epilogue.grid("full" if full else "quick", 0)
    wanted = {Point(8192, n, k, g) for n in (4096, 7168) for k in (2048, 4096, 7168) for g in (8, 32)}
    assert wanted <= set(points)
    assert len(set(points)) == len(points) == (20 if full else 12)


@pytest.mark.slow
def test_the_kernels_are_what_is_measured(problem) -> None:  # type: ignore[no-untyped-def]
    """The same contenders with the kernels' own code, by the emulator: all run, and fused rows are quantize's."""
    record = epilogue.measure(problem, StandInTimer(), "emulator")
    assert record["errors"] == {}
    assert len(record["gpu"]) == 7
    assert record["equality"] == {"codes": 70 * 256, "wrong_codes": 0, "wrong_scales": 0}


def test_a_right_point_has_every_time_and_no_failure(problem) -> None:  # type: ignore[no-untyped-def]
    record = epilogue.measure(problem, StandInTimer()) | {"point": vars(POINT)}
    assert len(record["gpu"]) == 7
    assert record["equality"] == {"codes": 70 * 256, "wrong_codes": 0, "wrong_scales": 0}
    assert failures([record]) == []
    console = Console(width=200, record=True)
    show_records(CASES["epilogue"], [record], {}, console)
    text = console.export_text()
    assert "70" in text
    assert "+11.1%" in text  # "fused rows" has ten letters, the GEMM nine


def test_a_wrong_fused_output_is_noticed_and_not_timed(problem, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    right = epilogue.calls

    def broken(*args: Any) -> dict[str, Call]:
        calls = right(*args)
        outputs = calls["fused rows"]()
        outputs.row.data.view(torch.uint8)[3, 7] ^= 1
        return calls | {"fused rows": lambda: outputs}

    monkeypatch.setattr(epilogue, "calls", broken)
    record = epilogue.measure(problem, StandInTimer()) | {"point": vars(POINT)}
    assert record["equality"]["wrong_codes"] == 1
    assert "fused rows" not in record["gpu"]
    assert any("fused rows" in line for line in failures([record]))


def test_a_missing_kernel_is_a_failure_and_the_others_are_measured(problem, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    right = epilogue.calls

    def missing() -> None:
        raise ValueError("grouped_gemm_quant has no kernel")

    monkeypatch.setattr(epilogue, "calls", lambda *args: right(*args) | {"fused rows": missing})
    record = epilogue.measure(problem, StandInTimer()) | {"point": vars(POINT)}
    assert len(record["gpu"]) == 6
    assert failures([record]) == ["M=70 N=256 K=128 groups=3: fused rows failed: grouped_gemm_quant has no kernel"]
    show_records(CASES["epilogue"], [record], {}, Console(width=200, quiet=True))


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*args: Any) -> BenchResult:
        calls.append(args)
        return BenchResult([], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    assert commands.bench("epilogue", full=True, out=tmp_path, seed=3, time_limit=9.0) == 0
    ((name, points, peers, out, settings),) = calls
    assert (name, points, peers) == ("epilogue", "full", None)
    assert (out, settings.seed, settings.time_limit_s) == (tmp_path, 3, 9.0)
    assert set(CASES["epilogue"].options) == {"full", "out", "time_limit"}
