"""The benchmark of weight gradients: contenders compute what their names say, and wrong or failing ones show."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench.case import CASES
from padless.bench.cases import wgrad
from padless.bench.cases.problems.wgrad import WgradPoint, make_operands, rows_of, sizes_of
from padless.bench.cases.wgrad import grid, measure_wgrad
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.results import BenchResult, failures
from padless.bench.run import resolve_grid, resolve_peers, show_records
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from support.bench_records import StandInTimer

POINT = WgradPoint("drawn", 500, 48, 144, 4, 32, every_tile=True)


def deepgemm(a: Any, b: Any, d: torch.Tensor, ks: list[int], ks_tensor: torch.Tensor, c: torch.Tensor) -> None:
    """What the library does, by its contract: D += A B^T for every group, out of its layout."""
    assert c is d
    assert ks_tensor.tolist() == ks
    assert all(k % 128 == 0 for k in ks)
    start = 0
    for g, k in enumerate(ks):
        values = []
        for (codes, scale), features in ((a, d.shape[1]), (b, d.shape[2])):
            part = codes[features * start : features * (start + k)].view(features, k).float()
            values.append(part * scale[:, start // 128 : (start + k) // 128].repeat_interleave(128, 1))
        d[g] += values[0] @ values[1].t()
        start += k


def measured(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"point": POINT, "k_grouped": deepgemm, "device": "cpu", **changes}
    record = measure_wgrad(seed=1, timer=StandInTimer(), **arguments)
    return record | {"point": asdict(arguments["point"])}


def test_the_other_tile_of_both_modes_is_measured_where_it_is_asked_for() -> None:
    every, few = (
        {name for name in measured(point=replace(POINT, every_tile=asked))["gpu"] if "tile" in name}
        for asked in (True, False)
    )
    assert few < every
    assert all("1d1d" in name for name in every - few)


def test_every_contender_computes_the_gradient() -> None:
    record = measured()
    assert record["errors"] == {}
    assert record["wrong"] == {}
    names = set(record["gpu"])
    modes = {
        f"padless {mode} {out}" for mode in ("1d2d", "1d1d", "bf16") for out in ("bfloat16", "float32", "float32 +=")
    }
    assert modes | {"torch_bf16", "deepgemm_k_grouped"} <= names
    assert any("tile" in name for name in names)
    assert record["flops"] == 2 * 500 * 48 * 144
    assert sum(record["sizes"]) == 500
    assert record["bytes"]["padless 1d2d float32 +="] - record["bytes"]["padless 1d2d float32"] == 4 * 4 * 48 * 144


def test_what_is_stored_stands_next_to_a_fill_of_the_output() -> None:
    """The fill is no contender: it is compared with no product, and has neither a table nor a floor."""
    record = measured()
    assert {"fill bfloat16", "fill float32"} <= set(record["gpu"])
    assert not any("fill" in name for name in (*record["bytes"], *record["row_error"], *record["wrong"]))
    record["floors_us"] = dict.fromkeys(record["bytes"], 11.0)
    shown = {table.title.partition(": ")[2]: table for table in wgrad.tables([record], {}, 200)}
    assert not any("fill" in name for name in shown)
    of_stored = {"padless 1d2d float32": True, "padless bf16 bfloat16": True, "padless 1d2d float32 +=": False}
    for name, has_fill in of_stored.items():
        headings = [column.heading for column in shown[name].columns]
        assert ("fill /" in headings) == has_fill, name


def test_both_modes_and_the_rows_hold_the_same_values() -> None:
    operands = make_operands(POINT, 1, "cpu")
    products = [
        grouped_gemm_wgrad_reference(operands.dy, x, out_dtype=torch.float64, accumulation="float64")
        for x in operands.x.values()
    ]
    assert torch.equal(*products)
    dy, x = (rows_of(operands.dy, operands.sizes).double(), rows_of(operands.x["1d2d"], operands.sizes).double())
    ends = operands.dy.offs.tolist()
    start = 0
    for group, end in enumerate(ends):
        by_rows = dy[start:end].t() @ x[start:end]
        assert (by_rows - products[0][group]).norm() <= 0.01 * products[0][group].norm()
        start = end


def right(dy: Any, x: Any, out: torch.Tensor, accumulate: bool, offs: torch.Tensor | None) -> torch.Tensor:
    """The reference's result, of copies or of rows."""
    if offs is not None:
        return grouped_gemm_wgrad_rows_reference(dy, x, offs, out=out, accumulate=accumulate)
    return grouped_gemm_wgrad_reference(dy, x, out=out, accumulate=accumulate)


def test_a_wrong_result_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(dy: Any, x: Any, *, out: torch.Tensor, accumulate: bool, **rest: Any) -> torch.Tensor:
        if out.dtype == torch.float32 and not accumulate:
            out.zero_()
            return out
        return right(dy, x, out, accumulate, rest.get("offs"))

    monkeypatch.setattr("padless.ops.grouped_gemm_wgrad.grouped_gemm_wgrad", wrong)
    record = measured()
    assert set(record["wrong"]) == {n for n in record["bytes"] if " float32" in n and "+=" not in n}
    assert not set(record["wrong"]) & set(record["gpu"])
    assert any("relative error of a row 1" in line for line in failures([record]))


def test_one_that_is_wrong_under_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def later(dy: Any, x: Any, *, out: torch.Tensor, accumulate: bool, **rest: Any) -> torch.Tensor:
        calls.append(1)
        result = right(dy, x, out, accumulate, rest.get("offs"))
        if len(calls) > 20:
            out[:, 0] = float("nan")
        return result

    monkeypatch.setattr("padless.ops.grouped_gemm_wgrad.grouped_gemm_wgrad", later)
    record = measured()
    assert any("after timing it is wrong" in text for text in record["wrong"].values())


def test_one_that_raises_is_named() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such\n layout")

    record = measured(k_grouped=broken)
    assert record["errors"] == {"deepgemm_k_grouped": "RuntimeError: no such layout"}
    assert "torch_bf16" in record["gpu"]


def test_the_grid_is_that_of_the_tables() -> None:
    points, full = grid("quick", 0), grid("full", 0)
    assert len(set(points)) == 16
    assert len(set(full)) == 21
    assert [replace(point, every_tile=False) for point in full[:16]] == points
    assert max(point.groups for point in points) == 512
    assert all(point.every_tile for point in full)
    assert WgradPoint("equal", 32768, 4096, 7168, 32) in points
    for point in points:
        sizes = sizes_of(point, 0)
        assert (len(sizes), sum(sizes)) == (point.groups, point.M)
        assert sizes == sizes_of(replace(point, alignment=32), 0)
    with pytest.raises(ValueError, match="sizes is 'other'; allowed: 'equal', 'drawn'"):
        sizes_of(replace(points[0], sizes="other"), 0)


def test_the_tables_show_times_ratios_and_failures() -> None:
    record = measured()
    record["floors_us"] = dict.fromkeys(record["bytes"], 11.0)
    record["wrong"] = {"padless 1d2d float32": "is wrong: too much"}
    console = Console(width=200, record=True)
    show_records(CASES["wgrad"], [record], {}, console)
    text = console.export_text()
    assert "padless 1d2d bfloat16" in text
    assert "0.48" in text  # "torch_bf16" has 10 letters, "padless 1d2d bfloat16" 21
    assert "is wrong: too much" in text


def test_a_mean_of_points_without_a_peer() -> None:
    """What a column's points lack is a dash, and the mean is of those that have it."""
    names = {"padless": 10.0, "torch_bf16": 20.0, "deepgemm_k_grouped": 5.0}
    record = measured()
    both = record | {"gpu": {n: {"us": us} for n, us in names.items()}, "floors_us": {"padless": 2.0}}
    alone = record | {"gpu": {"padless": {"us": 2.5}, "torch_bf16": {"us": 20.0}}, "floors_us": {"padless": 2.0}}
    first = wgrad.tables([both, alone], {}, 100)[0]
    cells = [row[-3:] for row in first.rows]
    assert cells == [["2.00", "0.50", "0.20"], ["8.00", "-", "0.80"], ["4.00", "0.50", "0.40"]]
    assert [row[-4] for row in first.rows[:2]] == [f"{500 * 48 * 144 * 2 / us / 1e6:.0f}" for us in (10, 2.5)]


@pytest.mark.parametrize("there", [True, False])
def test_a_run_takes_the_peers_product(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = DeepGemm(None)
    peer._library = SimpleNamespace(**({"k_grouped_fp8_gemm_nt_contiguous": deepgemm} if there else {}))
    seen: list[Any] = []

    def measure(point: Any, seed: int, timer: Any, k_grouped: Any) -> dict[str, Any]:
        seen.append((point, seed, k_grouped))
        return {"flops": 3, "bytes": {"x": 4, "y": 5}}

    monkeypatch.setattr(wgrad, "measure_wgrad", measure)
    session: Any = SimpleNamespace(
        peers=[peer], timer=None, settings=SimpleNamespace(seed=7), floor_us=lambda flops, bytes_: 10 * flops + bytes_
    )
    record = wgrad.start(session)(POINT)
    assert seen == [(POINT, 7, deepgemm if there else None)]
    assert record["floors_us"] == {"x": 34, "y": 35}


def test_the_command_runs_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from padless import cli
    from padless.bench import commands

    asked: list[Any] = []

    def run(name: str, points: Any, peers: Any, out: Any, settings: Any) -> BenchResult:
        asked.append((name, len(resolve_grid(CASES[name], points)), peers, settings.repeats))
        return BenchResult([], tmp_path / "wgrad.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    result = CliRunner().invoke(cli.app, ["bench", "wgrad", "--full", "--repeats", "3"])
    assert result.exit_code == 0, result.output
    assert asked == [("wgrad", 21, None, 3)]
    assert [peer.name for peer in resolve_peers(CASES["wgrad"].peers, None)] == ["deepgemm"]
    assert wgrad.TORCH == "torch_bf16"
