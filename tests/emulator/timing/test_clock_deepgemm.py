"""DeepGEMM's kernel by the clock: the page is the record's, the record's times follow from its tiles, errors are inside
what is claimed. Its sources are not here, so tiles are those of the record."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clock_deepgemm
import deepgemm_kernel
from clock_b200 import Error
from clock_page import model_digest, read_block
from deepgemm_kernel import FULL, SORTS, Config, Problem, ceil_div, select_config
from padless.emulator.launch_file import make_argument, make_buffer, read_description
from padless.emulator.timing import H200
from padless.emulator.timing.chip import TileTimes

ROWS = [json.loads(line) for line in clock_deepgemm.RECORD.read_text().splitlines()]
REMEDY = "run tools/clock_deepgemm.py --sources FOLDER --write"
GROUPED, DENSE = Config(128, 192, 2, 1, 4, True), Config(256, 128, 1, 2, 3, False)


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["kind"] == kind]


def recorded_times() -> dict[Config, TileTimes]:
    times = {}
    for row in of_kind("tile"):
        parts = {
            name: {int(sort): cycles for sort, cycles in part.items()} if isinstance(part, dict) else part
            for name, part in row["times"].items()
        }
        times[Config(**row["config"])] = TileTimes(**parts)
    return times


def test_page_and_record_are_of_today() -> None:
    assert read_block("deepgemm") == "\n".join(of_kind("page")[0]["lines"]).strip("\n").split("\n"), REMEDY
    assert ROWS[0]["model"] == model_digest(*clock_deepgemm.TOOLS), REMEDY


def test_recorded_times_follow_from_the_tiles() -> None:
    """Every 24th call of the grid and all of the dense ones; measured times are those of the records of calls."""
    times = recorded_times()
    assert set(times) == {GROUPED, DENSE}
    for (name, points), every in zip(clock_deepgemm.SETS.items(), (24, 1), strict=True):
        rows = [row for row in of_kind("call") if row["set"] == name]
        found = points()
        assert [row["measured_us"] for row in rows] == [p.us for p in found]
        for p, row in list(zip(found, rows, strict=True))[::every]:
            assert round(p.predicted_us(times[p.config], H200), 2) == row["predicted_us"]
        p, slower = found[0], times[found[0].config]
        slower = replace(slower, period={sort: 1.05 * cycles for sort, cycles in slower.period.items()})
        assert p.predicted_us(slower, H200) > 1.02 * rows[0]["predicted_us"]


def test_counted_calls_follow_from_the_tiles() -> None:
    assert clock_deepgemm.counted_calls(recorded_times()[GROUPED], H200) == of_kind("counted")


def test_errors_are_inside_the_targets_and_on_the_page() -> None:
    page = "\n".join(read_block("deepgemm"))
    for name in clock_deepgemm.SETS:
        error = Error(tuple(r["predicted_us"] / r["measured_us"] - 1 for r in of_kind("call") if r["set"] == name))
        assert error.mape < 0.05
        assert error.largest < 0.12
        assert f"| {len(error.values)} | {error.mape:.1%} |" in page


def test_recorded_products_were_right() -> None:
    for row in of_kind("product"):
        assert 0.001 < row["row_error"] < 0.003  # an output of 16 bits has no less
        assert all(report.startswith("exit: ") for report in row["reports"])


@pytest.mark.parametrize("change", ["nothing", "one column", "a scale", "another group", "nan"])
def test_the_check_of_a_product_can_fail(change: str) -> None:
    problem = Problem([60, 129], 384, 256)
    blank = problem.d.copy()
    assert np.isnan(problem.row_errors()[:60]).all()  # the poison
    exact = np.zeros((problem.m, problem.n))
    problem.d = np.zeros_like(blank)
    lookup = np.array([(-1.0) ** (x >> 7) * e4m3(x & 127) for x in range(256)])
    for row in np.flatnonzero(problem.index >= 0):
        group = problem.index[row]
        for block in range(2):
            k = slice(128 * block, 128 * block + 128)
            b = lookup[problem.b[group * 384 : group * 384 + 384, k]] @ lookup[problem.a[row, k]]
            exact[row] += b * np.repeat(problem.sfb[group, :, block].astype(float), 128) * problem.sfa[block, row]
    problem.d = (exact.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # cut, not rounded
    if change == "one column":
        problem.d[:, 7] = problem.d[:, 8]
    elif change == "a scale":
        problem.sfb[1, 2, 1] *= 1.5
    elif change == "another group":
        problem.index[128:160] = 0
    elif change == "nan":
        problem.d[130, 3] = blank[130, 3]
    worst = problem.row_errors().max()
    assert worst < 0.005 if change == "nothing" else not worst < 0.01


def e4m3(bits: int) -> float:
    exponent, mantissa = bits >> 3, bits & 7
    return mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)


@pytest.mark.parametrize("along_n", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (2, 5), (33, 7), (48, 16), (17, 32), (19, 33)])
def test_order_is_that_of_its_scheduler(rows: int, columns: int, along_n: bool) -> None:
    """By the formula of a tile's number, as a cluster of two computes it."""

    def place(number: int) -> tuple[int, int]:
        first_count, second_count = (columns, rows) if along_n else (rows, columns)
        band, inside = divmod(number, second_count * 16)
        first, width = band * 16, min(16, first_count - band * 16)
        if width % 2:
            even = width - 1
            if inside < even * second_count:
                width = even
            else:
                inside, first, width = inside - even * second_count, first + even, 1
        a, b = first + inside % width, inside // width
        return (b, a) if along_n else (a, b)

    found = [tile for pair in clock_deepgemm.pairs_of_tiles(rows, columns, along_n) for tile in pair]
    assert found == [place(number) for number in range(rows * columns)]
    assert set(found) == {(r, c) for r in range(rows) for c in range(columns)}


def test_work_of_a_call() -> None:
    """Groups of 300, 60 and 129 rows: six tiles of rows, halves 2 2 1, 1, 2 1."""
    n, k = 384, 1024
    call = clock_deepgemm.call_of([300, 60, 129], n, k, GROUPED)
    sorts = [list(SORTS)[i] for i in call.tiles]
    assert sorts == [(2, 2, True), (1, 1, False), (2, 1, True)] * 2
    assert call.products == (5 + 1 + 3) * 64 * n * k
    assert sum(call.stores) == 2 * 6 * 128 * n
    a, b = 6 * 128 * k * (1 + 4 / 128), 3 * n * k * (1 + 4 / 128**2)
    assert sum(call.loads) == pytest.approx(a + b)
    dense = clock_deepgemm.call_of([512], 256, k, DENSE)
    assert [list(SORTS)[i] for i in dense.tiles] == [FULL] * 2
    assert dense.products == 512 * 256 * k


def test_choice_of_tiles() -> None:
    assert {p.config for p in clock_deepgemm.padded_points()} == {GROUPED}
    assert {p.config for p in clock_deepgemm.dense_points()} == {DENSE}
    assert select_config(128, 1536, 4096, True).cluster_m == 1  # one wave shares nothing
    for config in (GROUPED, DENSE):
        assert config.shared_bytes(8192) <= deepgemm_kernel.SHARED_BYTES
        assert replace(config, stages=config.stages + 1).shared_bytes(8192) > deepgemm_kernel.SHARED_BYTES
    assert ceil_div(129, 128) == 2


def test_launch_files_are_read(tmp_path: Path) -> None:
    """By what reads them for `padless emulate`: buffers, scalars and the 128 bytes of each tensor map."""
    problem = Problem([60, 129], 384, 256)
    problem.leave(tmp_path, ("// the kernel's PTX", "kernel"), GROUPED)
    found = read_description(tmp_path / "launch.toml")
    arrays = {name: make_buffer(name, spec, tmp_path) for name, spec in found["buffers"].items()}
    assert all(np.array_equal(array, getattr(problem, name)) for name, array in arrays.items())
    places = {name: 4096 * (i + 1) for i, name in enumerate(arrays)}
    made = [make_argument(argument, places, arrays) for argument in found["args"]]
    assert made[:5] == [places["sfb"], places["index"], 384, 384, 256]
    assert [len(a) for a in made[5:]] == [128] * 4
    assert found["shared_bytes"] == GROUPED.shared_bytes(256)
    assert found["cluster"] == found["grid"] == [2, 1, 1]


def test_without_sources_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = clock_deepgemm.RECORD.read_bytes()
    monkeypatch.setattr(sys, "argv", ["clock_deepgemm.py", "--sources", str(tmp_path), "--write"])
    clock_deepgemm.main()
    assert capsys.readouterr().out.startswith("not examined: this needs ")
    assert clock_deepgemm.RECORD.read_bytes() == before
