"""Result files, ratios, correlations, tables and the figure, from records whose answers are known."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from padless.bench import results
from padless.bench.case import CASES
from padless.bench.group_sizes import Point, quick_grid
from padless.bench.run import show_records
from support.bench_records import full_records, record, timing

POINT = Point(8192, 3072, 8192, 32)


def printed(kind: str, records: Any, sessions: Any = None, width: int = 240) -> str:
    text = io.StringIO()
    show_records(CASES[kind], records, sessions or {}, Console(file=text, width=width))
    return text.getvalue()


# --- files -----------------------------------------------------------------------------------------------


def test_records_survive_the_file(tmp_path: Path) -> None:
    file = results.ResultFile(tmp_path / "deep" / "paper.jsonl")
    file.append({"kind": "session", "id": "x", "value": np.float32(1.5)})
    file.append(record(POINT))
    again = results.ResultFile(tmp_path / "deep" / "paper.jsonl")
    assert again.records == [{"kind": "session", "id": "x", "value": 1.5}, record(POINT)]
    assert again.measured("paper", 0) == {results.point_key(vars(POINT))}
    assert again.measured("paper", 1) == again.measured("dense", 0) == set()


def test_a_cut_last_line_is_dropped_and_appending_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    whole = json.dumps(record(POINT))
    path.write_text(whole + "\n" + whole[:100])
    assert len(results.read_records(path)) == 1
    file = results.ResultFile(path)
    assert len(file.records) == 1
    file.append({"kind": "session", "id": "y"})
    assert [r["kind"] for r in results.read_records(path)] == ["paper", "session"]


def test_a_last_line_that_lacks_its_end_alone_is_kept(tmp_path: Path) -> None:
    """It was taken for measured and removed from the file."""
    path = tmp_path / "paper.jsonl"
    path.write_text(json.dumps({"kind": "session", "id": "x"}) + "\n" + json.dumps(record(POINT)))
    file = results.ResultFile(path)
    file.append({"kind": "session", "id": "y"})
    assert results.read_records(path) == file.records
    assert [r["kind"] for r in file.records] == ["session", "paper", "session"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    path.write_text('{"kind": "session"}\n{oops\n{"kind": "session"}\n')
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        results.read_records(path)


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    file = results.ResultFile(tmp_path / "r.jsonl")
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        file.append({"value": math.nan})
    assert results.finite(math.nan) is None
    assert results.finite(math.inf) is None
    assert results.finite(2.5) == 2.5


def test_point_key_ignores_the_order_of_fields() -> None:
    assert results.point_key({"M": 1, "N": 2}) == results.point_key({"N": 2, "M": 1})
    assert results.point_key({"M": 1, "N": 2}) != results.point_key({"M": 2, "N": 1})


# --- numbers ---------------------------------------------------------------------------------------------


def test_summary_of_known_ratios() -> None:
    two = [
        record(POINT, gpu={"padless": timing(100.0), "pad_then_deepgemm": timing(110.0)}, floor_us=90.0),
        record(POINT, gpu={"padless": timing(100.0), "pad_then_deepgemm": timing(130.0)}, floor_us=80.0),
        record(POINT, gpu={"padless": timing(50.0)}, end_to_end={}, floor_us=None),
    ]
    lines = results.summarise(two)
    deepgemm = lines["pad + DeepGEMM / padless"]
    assert (deepgemm.points, deepgemm.smallest, deepgemm.largest) == (2, 1.1, 1.3)
    assert deepgemm.geomean == pytest.approx(math.sqrt(1.1 * 1.3))
    assert lines["floor / padless"].geomean == pytest.approx(math.sqrt(0.9 * 0.8))
    assert lines["paper's code / padless, end to end"].points == 2
    assert "MSLK / padless" not in lines


def test_accelerations_and_their_baseline() -> None:
    records = [record(POINT), record(Point(8192, 8192, 8192, 32))]
    assert results.baseline_of(records) == "pad_then_padless"
    assert results.accelerations(records, "pad_then_padless") == pytest.approx([24.0, 14.0])
    assert all(math.isnan(value) for value in results.accelerations(records, "pad_then_deepgemm"))
    with_peer = [record(POINT, baseline="pad_then_deepgemm")]
    assert results.baseline_of(with_peer) == "pad_then_deepgemm"
    assert results.baseline_of(with_peer + records) == "pad_then_padless"
    assert results.baseline_of([]) == "pad_then_padless"


def test_correlations_on_the_full_grid() -> None:
    """The axes of a full grid are uncorrelated; the synthetic acceleration is an exact line in N."""
    records = full_records()
    table = results.correlation_table(records, results.accelerations(records, "pad_then_padless"))
    assert table.shape == (5, 5)
    assert np.allclose(np.diag(table), 1.0)
    assert np.allclose(table, table.T)
    off_diagonal = table[:4, :4] - np.eye(4)
    assert np.abs(off_diagonal).max() < 1e-12
    assert table[4, :4] == pytest.approx([0.0, -1.0, 0.0, 0.0], abs=1e-12)


def test_memory_saving_correlates_as_the_paper_reports() -> None:
    """Its Table 3, from the group sizes alone: -0.546 with M, 0.636 with groups, nothing with N and K."""
    records = full_records()
    table = results.correlation_table(records, results.memory_savings(records))
    assert table[4, 0] == pytest.approx(-0.546, abs=0.03)
    assert table[4, 3] == pytest.approx(0.636, abs=0.03)
    assert abs(table[4, 1]) < 0.05
    assert abs(table[4, 2]) < 0.05
    assert max(results.memory_savings(records)) == pytest.approx(23.8, abs=2.5)


def test_correlation_agrees_with_numpy_and_marks_what_is_undefined() -> None:
    rng = np.random.default_rng(3)
    records = [record(point) for point in quick_grid()]
    values = rng.normal(size=len(records))
    columns = [[r["point"][axis] for r in records] for axis in results.AXES]
    assert np.allclose(results.correlation_table(records, values), np.corrcoef([*columns, values]))
    holed = [math.nan, *values[1:]]
    without_first = np.corrcoef([*(column[1:] for column in columns), values[1:]])
    assert np.allclose(results.correlation_table(records, holed), without_first)
    constant_m = [record(Point(8192, n, 3072, 4)) for n in (3072, 4096)]
    table = results.correlation_table(constant_m, [1.0, 2.0])
    assert math.isnan(table[0, 4])
    assert table[1, 4] == pytest.approx(1.0)
    assert np.isnan(results.correlation_table([record(POINT)], [1.0])).all()


def test_failures_name_the_point_and_the_contender() -> None:
    bad = record(
        POINT,
        bitwise_identical=False,
        wrong={"mslk": "is wrong: a row's relative error is 0.5, allowed 0.01"},
        errors={"deepgemm": "RuntimeError: no"},
    )
    found = results.failures([record(POINT), bad])
    assert len(found) == 3
    assert all(line.startswith("M=8192 N=3072 K=8192 groups=32: ") for line in found)
    assert any("mslk is wrong" in line for line in found)
    assert any("deepgemm failed: RuntimeError: no" in line for line in found)


def test_tflops_counts_valid_rows() -> None:
    own = record(POINT)
    assert results.tflops(own) == pytest.approx(1300, rel=1e-3)
    assert results.tflops(own, "mslk") is None


# --- what is shown ---------------------------------------------------------------------------------------


def test_the_quick_table_has_a_line_per_point() -> None:
    records = [record(point) for point in quick_grid()]
    text = printed("paper", records)
    assert text.count("same") >= len(records)
    assert "24.0" in text
    assert "Valid rows bitwise identical to pad + the same GEMM: 14 of 14" in text
    assert "Table 2" in text
    assert "Table 3" in text
    assert "DIFFER" not in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_times_are_whole_at_any_width(width: int) -> None:
    extra = {name: timing(1234.5) for name in ("tma_adaptive", "tma_adaptive_kernel", "torch_rowwise", "mslk")}
    records = [record(point) for point in quick_grid()]
    for one in records:
        one["gpu"] |= extra
    text = printed("paper", records, width=width)
    assert text.count("1234.5") == 4 * len(records)
    assert "…" not in text


def test_the_full_table_is_aggregated_and_failures_are_cut() -> None:
    records = full_records()
    for broken in records[:30]:
        broken["bitwise_identical"] = False
    text = printed("paper", records)
    assert "By M and groups" in text
    assert "546 of 576" in text
    assert "and 20 more" in text


def test_tables_of_nothing_and_of_one_point() -> None:
    assert "nothing measured" in printed("paper", [])
    assert "-" in printed("paper", [record(POINT)])


def test_dense_and_bandwidth_tables() -> None:
    dense = record(POINT, point={"M": 4096, "N": 4096, "K": 4096}, gpu={"padless": timing(100.0)}, floor_us=91.0)
    text = printed("dense", [dense])
    assert "padless" in text
    assert "deepgemm" not in text
    assert "0.91" in text
    moved = {"kind": "quantize", "point": {"M": 10, "K": 20}, "gpu": {"pad": timing(2.0)}}
    moved |= {"bytes": {"pad": 4_000_000}, "copy_gb_per_s": 4000.0}
    text = printed("quantize", [moved])
    assert "2000" in text
    assert "50%" in text


def decode_record(groups: int, **times: float) -> dict[str, Any]:
    point = {"groups": groups, "rows": 4, "N": 2048, "K": 2048}
    gpu = {name.replace("__", " "): timing(us) for name, us in times.items()}
    return record(POINT, kind="decode", point=point, gpu=gpu, floor_us=10.0)


def cells_of(text: str, title: str, row: str) -> list[str]:
    """The cells of the first line that begins with `row` in the table of this title."""
    lines = text[text.index(title) :].splitlines()
    return next(line.split() for line in lines if line.split()[:1] == [row])


def test_decode_tables_set_padless_beside_a_copy_and_a_read_of_as_many_bytes() -> None:
    copy_, read = "copy__of__as__many__bytes", "read__of__as__many__bytes"
    records = [
        decode_record(8, padless=20.0, deepgemm_masked=22.0, **{copy_: 12.0, read: 16.0}),
        decode_record(8, padless=40.0, deepgemm_masked=36.0, **{copy_: 30.0, read: 20.0}),
    ]
    text = printed("decode", records, width=100)
    first = "8 4 2048 2048 20.0 22.0 10.0 12.0 16.0 0.50 0.60 0.80"
    assert " ".join(cells_of(text, "Decode sizes", "8")) == first
    # Geomeans of 0.5 and 0.25, of 0.6 and 0.75, of 0.8 and 0.5, each with the smallest.
    shares = "8 2 20.0 40.0 0.354 0.250 0.671 0.600 0.632 0.500"
    assert " ".join(cells_of(text, "By groups: share", "8")) == shares
    assert " ".join(cells_of(text, "By groups: peers", "8")) == "8 2 20.0 40.0 0.995 0.900"
    for heading in ("of a copy", "of a read", "of as many"):
        assert heading in text


def test_records_without_a_copy_show_what_they_have() -> None:
    """Decode records of before the copy was measured, and of runs whose copy did not fit."""
    text = printed("decode", [decode_record(8, padless=20.0)], width=100)
    assert " ".join(cells_of(text, "Decode sizes", "8")) == "8 4 2048 2048 20.0 10.0 0.50"
    assert "of a copy" not in text
    mixed = [decode_record(8, padless=20.0), decode_record(8, padless=20.0, copy__of__as__many__bytes=15.0)]
    text = printed("decode", mixed, width=100)
    assert " ".join(cells_of(text, "Decode sizes", "8")) == "8 4 2048 2048 20.0 10.0 - 0.50 -"


def test_a_copy_is_no_peer() -> None:
    only = decode_record(8, padless=20.0, copy__of__as__many__bytes=15.0, read__of__as__many__bytes=15.0)
    text = printed("decode", [only], width=100)
    assert "copy of as many bytes / padless" in text
    assert "What the peers' times allow" not in text
    assert "By groups: peers" not in text


@pytest.mark.parametrize("show", ["paper", "decode", "dense"])
def test_captions_say_how_l2_was_flushed(show: Any) -> None:
    records = [record(POINT), record(POINT, session="later")]
    old = {"kind": "session", "id": "then", "ceilings": {"dense_tflops": 1400.0, "copy_gb_per_s": 4000.0}}
    new = old | {"id": "later", "flush": "7 MB written, 5 MB read", "ceilings": {"dense_tflops": 1500.0}}

    def words(*sessions: dict[str, Any], of: list[dict[str, Any]] = records) -> str:
        return " ".join(printed(show, of, results.sessions_of(sessions), width=100).split())

    assert "L2 flushed before every call: 7 MB written, 5 MB read. Floor: at 1500 TFLOP/s," in words(
        new, of=records[1:]
    )
    assert "512 MB written, nothing read (record without flush). Floor: at 1400 TFLOP/s or 4000 GB/s" in words(
        old, of=records[:1]
    )
    both = words(old, new)
    assert "nothing read (record without flush) / 7 MB written, 5 MB read. " in both
    assert "1400 to 1500 TFLOP/s" in both
    assert "L2 flushed before every call: unknown (no session record)." in words(of=records[:1])


@pytest.mark.parametrize("full", [False, True], ids=["quick", "full"])
def test_figure_draws_both_panels(tmp_path: Path, full: bool) -> None:
    figures = pytest.importorskip("padless.bench.report.figures")
    pytest.importorskip("matplotlib")
    records = full_records() if full else [record(point) for point in quick_grid()]
    path = figures.draw_figure2(records, tmp_path / "sub" / "figure2.png")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    height, width = pixels.shape[:2]
    assert width > 1000
    for half in (pixels[:, : width // 2], pixels[:, width // 2 :]):  # coloured marks in each panel
        saturation = half.max(axis=-1) - half.min(axis=-1)
        assert (saturation > 0.3).sum() > 500
    assert height > 400


def test_figure_of_nothing_is_refused(tmp_path: Path) -> None:
    figures = pytest.importorskip("padless.bench.report.figures")
    with pytest.raises(ValueError, match="at least one measured point"):
        figures.draw_figure2([], tmp_path / "x.png")
