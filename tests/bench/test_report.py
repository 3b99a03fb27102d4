"""Tables and figures again from files: every committed record, files of several kinds, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from rich.console import Console

from padless.bench import commands, report_file
from padless.bench.case import CASES
from padless.bench.group_sizes import Point
from padless.bench.results import ResultFile, read_records
from support.bench_records import record
from support.ragged import ROOT

MEASURED = ROOT / "docs" / "measured"
COMMITTED = sorted(path for path in MEASURED.glob("*.jsonl") if path.stem != "fuzz")  # of `padless fuzz`
FULL_GRID = MEASURED / "2026-11-21-h200-paper-full.jsonl"
POINT = Point(8192, 3072, 8192, 32)


def shown(file: Path, figure: Path | None = None, width: int = 100) -> tuple[str, Any]:
    text = io.StringIO()
    result = report_file(file, figure, Console(file=text, width=width))
    return text.getvalue(), result


def test_there_are_committed_records_of_the_usual_kinds() -> None:
    kinds = {line["kind"] for path in COMMITTED for line in read_records(path)} - {"session"}
    assert kinds >= {"paper", "decode", "dense", "formats", "epilogue", "quantize"}
    assert kinds <= set(CASES)


# What names a point in its line, where that is not all of it.
AXES = {
    "adapters": ("model", "tokens"),
    "ep": ("model", "ranks", "tokens"),
    "layer": ("model", "tokens"),
    "decoding": ("model", "tokens"),
    "generate": ("model", "sequences"),
    "pretrain": ("model", "microbatches"),
    "train": ("model", "tokens", "top_k", "experts"),
    "wgrad": ("sizes", "M", "groups", "N", "K"),
}

# What went wrong in a record, by the number of it: one call of a tile that nothing picks there gave other bits
# (docs/kernels/sm90_bf16/index.md); DeepGEMM's weight gradient of 64 groups of drawn sizes, in some runs.
FAILURES = {"2026-11-23-h200-picks.jsonl": 1, "2026-11-28-h200-wgrad.jsonl": 1, "2026-11-29-h200-wgrad.jsonl": 1}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_committed_record_is_shown_within_100_columns(path: Path) -> None:
    text, result = shown(path)
    points = [line for line in read_records(path) if line["kind"] != "session"]
    assert result.records == points
    assert result.figure is None
    assert len(result.failures) == FAILURES.get(path.name, 0), result.failures
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in text, "a number that is cut says nothing"
    kind = points[0]["kind"]
    if kind in ("paper", "decode", "dense"):
        assert "L2 flushed before every call: " in text
    if kind not in ("paper", "picks"):  # every point has its line, with the time of a contender that it holds
        for point in points:
            shown_axes = AXES.get(kind, point["point"])
            axes = [str(point["point"][axis]) for axis in shown_axes]
            digits = 0 if kind in ("adapters", "layer", "train") else 1
            unit = 1e-3 if kind in ("model", "pretrain") else 1.0  # milliseconds
            times = point["step"] if kind == "pretrain" else point["gpu"]
            shown_as = [(t["us"] * unit, digits) for t in times.values()]
            if kind == "generate":  # tokens a second
                shown_as = [(1e6 * point["point"]["sequences"] / us, 0) for us, _ in shown_as]
            own = next(f"{value:.{places}f}" for value, places in shown_as)
            assert any(own in line and all(axis in line for axis in axes if kind != "quantize") for line in lines)


def test_the_summary_of_the_grid_says_what_its_peers_allow() -> None:
    """Geomean and least of what was measured, then of what the floor would have been, by hand."""
    lines = [" ".join(line.split()) for line in shown(FULL_GRID)[0].splitlines()]
    raw = [line for line in map(json.loads, FULL_GRID.read_text().splitlines()) if line["kind"] == "paper"]
    assert len(raw) > 500
    for title, peer in (
        ("pad + DeepGEMM", "pad_then_deepgemm"),
        ("DeepGEMM on padded data", "deepgemm_on_padded"),
        ("paper's code, its GEMM alone", "tma_adaptive_kernel"),
    ):
        took = [line["gpu"][peer]["us"] / line["gpu"]["padless"]["us"] for line in raw]
        could = [line["gpu"][peer]["us"] / line["floor_us"] for line in raw]
        numbers = [value for ratios in (took, could) for value in (geometric_mean(ratios), min(ratios))]
        wanted = f"{title} {' '.join(f'{value:.3f}' for value in numbers)} "
        assert any(line.startswith(wanted) for line in lines), wanted


def test_a_file_of_several_kinds_and_sessions(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "all.jsonl")
    file.append({"kind": "session", "id": "then", "flush": "9 MB written, 4 MB read"})
    file.append(record(POINT))
    file.append(record(POINT, kind="decode", point={"groups": 8, "rows": 1, "N": 3072, "K": 8192}))
    file.append(record(POINT, kind="dense", point={"M": 8192, "N": 3072, "K": 8192}))
    text, result = shown(file.path)
    assert len(result.records) == 3
    for heading in ("Points, valid rows", "Decode sizes", "Dense products"):
        assert heading in text
    assert " ".join(text.split()).count("9 MB written, 4 MB read") == 3


@pytest.mark.parametrize("name", ["2026-11-21-h200-formats", "2026-11-21-h200-paper-full"])
def test_figures_are_drawn_where_they_are_asked_for(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    before = sorted(MEASURED.iterdir())
    path = tmp_path / "deep" / "x.png"
    text, result = shown(MEASURED / f"{name}.jsonl", path)
    assert result.figure == path
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "figure: " in text
    assert sorted(MEASURED.iterdir()) == before


def test_failures_are_found_in_files(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "paper.jsonl")
    file.append(record(POINT, bitwise_identical=False))
    text, result = shown(file.path)
    assert len(result.failures) == 1
    assert "valid rows differ" in text


def test_a_session_without_points_is_nothing(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "x.jsonl")
    file.append({"kind": "session", "id": "then"})
    text, result = shown(file.path)
    assert "nothing measured" in text
    assert result.records == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "nothing measured"),
        (b"\n\n", "nothing measured"),
        (b'{"kind": "paper", "poi', "nothing measured"),  # a run that was cut in its first record
        (b"padless\nis no JSON\n", "line 1 is not JSON"),
        (b"[1]\n[2]\n", "line 1 is not a JSON object"),
        (b"\xff\xfe\x00 a picture", "codec can't decode"),
        (b'{"point": {}, "gpu": {}}\n', "a record has no 'kind'"),
        (b'{"kind": "paper", "point": {}}\n', "a record has no 'gpu'"),
        (b'{"kind": "session"}\n', "a record has no 'id'"),
        (b'{"kind": "ep", "point": {}, "gpu": {}}\n', "of kind 'ep' are not as this version writes them: no field '"),
        (b'{"kind": "ep", "point": null, "gpu": {}}\n', "a record has no 'point', or a strange one"),
        (b'{"kind": "session", "id": []}\n', "a record has no 'id', or a strange one"),
        (
            b'{"kind": "train", "point": {}, "gpu": {"a": {}}}\n',
            "of kind 'train' are not as this version writes them: no ",
        ),
        (
            b'{"kind": "pretrain", "point": {"odd": 1}, "gpu": {}, "step": {"a": {}}}\n',
            "of kind 'pretrain' are not as this version writes them: PretrainPoint.__init__() got an unexpected",
        ),
    ],
)
def test_an_empty_or_broken_file_is_said_and_is_an_exit_code(
    tmp_path: Path, content: bytes, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert commands.report(files=[path]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert said in out
    assert "x.jsonl" in out
    text, result = shown(path)
    assert len(text.splitlines()) == 1
    assert text.count(str(path)) == 1
    assert len(result.failures) == 1


@pytest.mark.parametrize("bug", [lambda *_: {}["model"], lambda *_: len(1), lambda *_: [][0]])
def test_a_mistake_of_the_tables_is_not_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    file = ResultFile(tmp_path / "paper.jsonl")
    file.append(record(POINT))
    monkeypatch.setattr(CASES["paper"].load(), "tables", bug)
    with pytest.raises((KeyError, TypeError, IndexError)):
        shown(file.path)


def test_what_cannot_be_shown_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file must be a result file of padless bench, got .*absent"):
        shown(tmp_path / "absent.jsonl")
    file = ResultFile(tmp_path / "x.jsonl")
    file.append({"kind": "weather", "point": {}})
    with pytest.raises(
        ValueError, match=r"records of kind \['weather'\]; those that can be shown: \['adapters', 'black"
    ):
        shown(file.path)
    path = tmp_path / "list.jsonl"
    path.write_text('{"kind": ["paper"], "point": {}, "gpu": {}}\n')
    with pytest.raises(ValueError, match=r"records of kind \[\"\['paper'\]\"\]"):
        shown(path)
    decode = MEASURED / "2026-11-21-h200-decode.jsonl"
    with pytest.raises(ValueError, match=r"one kind of records, paper or formats or decoding; .* holds \['decode'\]"):
        shown(decode, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
