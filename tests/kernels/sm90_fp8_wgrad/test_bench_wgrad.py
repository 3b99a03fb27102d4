"""The benchmark of weight gradients: contenders compute what their names say, and wrong or failing ones show."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless.bench import wgrad
from padless.bench.report import KINDS
from padless.bench.results import failures
from padless.bench.wgrad import WgradPoint, grid, make_operands, measure_wgrad, rows_of, sizes_of
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from support.bench_records import StandInTimer

POINT = WgradPoint("drawn", 500, 48, 144, 4, 32)


def deepgemm(
    a: Any, b: Any, d: torch.Tensor, ks: list[int], ks_tensor: torch.Tensor, c: torch.Tensor
) -> None:
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


LIBRARY = SimpleNamespace(k_grouped_fp8_gemm_nt_contiguous=deepgemm)


def measured(**changes: Any) -> Any:
    arguments: dict[str, Any] = {"library": LIBRARY, "full": True, "device": "cpu", **changes}
    return measure_wgrad(POINT, 1, StandInTimer(), **arguments) | {"point": POINT.__dict__}


def test_every_contender_computes_the_gradient() -> None:
    record = measured()
    assert record["errors"] == {}
    assert record["wrong"] == {}
    names = set(record["gpu"])
    modes = {
        f"padless {mode} {out}" for mode in ("1d2d", "1d1d") for out in ("bfloat16", "float32", "float32 +=")
    }
    assert modes | {"torch_bf16", "deepgemm_k_grouped"} <= names
    assert any("tile" in name for name in names)
    assert record["flops"] == 2 * 500 * 48 * 144
    assert sum(record["sizes"]) == 500
    assert (
        record["bytes"]["padless 1d2d float32 +="] - record["bytes"]["padless 1d2d float32"]
        == 4 * 4 * 48 * 144
    )


def test_both_modes_and_the_rows_hold_the_same_values() -> None:
    operands = make_operands(POINT, 1, "cpu")
    products = [
        grouped_gemm_wgrad_reference(operands.dy, x, out_dtype=torch.float64, accumulation="float64")
        for x in operands.x.values()
    ]
    assert torch.equal(*products)
    dy, x = (
        rows_of(operands.dy, operands.sizes).double(),
        rows_of(operands.x["1d2d"], operands.sizes).double(),
    )
    ends = operands.dy.offs.tolist()
    start = 0
    for group, end in enumerate(ends):
        by_rows = dy[start:end].t() @ x[start:end]
        assert (by_rows - products[0][group]).norm() <= 0.01 * products[0][group].norm()
        start = end


def test_a_wrong_result_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(dy: Any, x: Any, *, out: torch.Tensor, accumulate: bool, config: Any) -> torch.Tensor:
        if out.dtype == torch.float32 and not accumulate:
            out.zero_()
            return out
        return grouped_gemm_wgrad_reference(dy, x, out=out, accumulate=accumulate)

    monkeypatch.setattr("padless.ops.grouped_gemm_wgrad.grouped_gemm_wgrad", wrong)
    record = measured()
    assert set(record["wrong"]) == {n for n in record["bytes"] if " float32" in n and "+=" not in n}
    assert not set(record["wrong"]) & set(record["gpu"])
    assert any("relative error of a row 1" in line for line in failures([record]))


def test_one_that_is_wrong_under_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def later(dy: Any, x: Any, *, out: torch.Tensor, accumulate: bool, config: Any) -> torch.Tensor:
        calls.append(1)
        result = grouped_gemm_wgrad_reference(dy, x, out=out, accumulate=accumulate)
        if len(calls) > 20:
            out[:, 0] = float("nan")
        return result

    monkeypatch.setattr("padless.ops.grouped_gemm_wgrad.grouped_gemm_wgrad", later)
    record = measured()
    assert any("after timing it is wrong" in text for text in record["wrong"].values())


def test_one_that_raises_is_named() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such\n layout")

    record = measured(library=SimpleNamespace(k_grouped_fp8_gemm_nt_contiguous=broken))
    assert record["errors"] == {"deepgemm_k_grouped": "RuntimeError: no such layout"}
    assert "torch_bf16" in record["gpu"]


def test_the_grid_is_that_of_the_tables() -> None:
    points = grid(full=False)
    assert len(set(points)) == 14
    assert len(set(grid(full=True))) == 19
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
    KINDS["wgrad"].show(console, [record], {})
    text = console.export_text()
    assert "padless 1d2d bfloat16" in text
    assert "0.48" in text  # "torch_bf16" has 10 letters, "padless 1d2d bfloat16" 21
    assert "is wrong: too much" in text


def test_the_command_runs_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from padless import cli
    from padless.bench import commands

    asked: list[Any] = []

    def run(points: Any, out: Any, settings: Any, *, full: bool) -> Any:
        asked.append((len(points), full, settings.repeats))
        return SimpleNamespace(file="nowhere", failures=[])

    monkeypatch.setattr(commands.wgrad_bench, "run_wgrad", run)
    result = CliRunner().invoke(cli.app, ["bench", "wgrad", "--full", "--repeats", "3"])
    assert result.exit_code == 0, result.output
    assert asked == [(19, True, 3)]
    assert wgrad.TORCH == "torch_bf16"
