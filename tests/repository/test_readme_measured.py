"""Measured parts of README.md, docs/tested.md and docs/measured/README.md, as tools/readme_measured.py makes them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import readme_measured as tool
from measured_records import command, measured, newest, peers
from measured_sections import paper_section
from support.measured_page_cases import found, point, rows_of, session, write

RECORDS = tool.ROOT / tool.FOLDER
PAGES = ("README.md", f"{tool.FOLDER}/README.md", "docs/tested.md")


def test_readme_says_what_the_records_say(capsys):
    assert tool.main(["--check"]) == 0, "run make readme"
    assert capsys.readouterr().err == ""


def test_training_pages_quote_the_newest_steps():
    """Codes made in a step, the default, and codes kept, of the first two points, DeepSeek-V3's."""
    table, page = ((tool.ROOT / f"docs/{name}.md").read_text() for name in ("training_measured", "training"))
    times = [
        {name: timing["us"] for name, timing in step["gpu"].items()} for step in measured(RECORDS, "train").points[:2]
    ]
    for name, sentence in {
        "padless fp8": "step is {:.2f} times as fast as torch's in bf16 with 8 experts and {:.2f} times with 32",
        "padless fp8, codes kept": "codes is {:.2f} and {:.2f} times as fast",
    }.items():
        ratios = [us["torch bf16"] / us[name] for us in times]
        assert sentence.format(*ratios) in page
        for us, ratio in zip(times, ratios, strict=True):
            assert f"| {us[name]:.0f}, {ratio:.2f}x |" in table, name


@pytest.fixture
def copy(tmp_path) -> Path:
    """A tree with pages of its own and the records."""
    folder = tmp_path / tool.FOLDER
    folder.mkdir(parents=True)
    for record in RECORDS.iterdir():
        if record.suffix != ".md":
            (folder / record.name).symlink_to(record)
    for page in PAGES:
        (tmp_path / page).write_text((tool.ROOT / page).read_text())
    return tmp_path


@pytest.mark.parametrize(("page", "least"), [(PAGES[0], 10), (PAGES[1], 200), (PAGES[2], 3)])
def test_a_figure_edited_by_hand_is_seen_and_put_right(copy, capsys, page, least):
    edited_page = copy / page
    right = edited_page.read_text()
    start, end = (right.index(f"<!-- measured:{mark} -->") for mark in ("begin", "end"))
    figures = list(re.compile(r"\d\.\d+|\d+%|\d+ of \d+").finditer(right, start, end))
    assert len(figures) > least
    for figure in figures[:: len(figures) // 4]:
        digit = str((int(figure[0][0]) + 1) % 10)
        edited = right[: figure.start()] + digit + right[figure.start() + 1 :]
        edited_page.write_text(edited)
        assert tool.main(["--check"], root=copy) == 1, figure[0]
        assert capsys.readouterr().err.startswith(f"{page} differ from the records")
        assert edited_page.read_text() == edited, "--check writes nothing"
    assert tool.main([], root=copy) == 0
    assert edited_page.read_text() == right
    assert tool.main(["--check"], root=copy) == 0


def test_links_of_the_pages_lead_somewhere():
    links = re.compile(r"\]\(([^)]+)\)")
    for page, text in tool.pages(RECORDS).items():
        targets = links.findall(text)
        assert targets
        assert all(((tool.ROOT / page).parent / target).exists() for target in targets), page


def test_the_figure_shows_what_the_records_say(copy):
    """Of another record another figure, drawn by the same command."""
    folder = copy / tool.FOLDER
    assert not tool.figure_differs(folder)
    path = newest(RECORDS, "layer.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == "layer":
            record["gpu"]["padless"]["us"] /= 2
    (folder / path.name).unlink()
    (folder / tool.FIGURE).unlink()
    (folder / tool.FIGURE).write_bytes((RECORDS / tool.FIGURE).read_bytes())
    write(folder, path.name, *records)
    assert tool.figure_differs(folder)
    assert tool.main(["--check"], root=copy) == 1
    tool.main([], root=copy)
    assert not tool.figure_differs(folder)


def test_the_readmes_rows_are_those_of_the_raw_records():
    """Once more without a function of padless or of the tool."""

    def points_of(kind):
        path = max(RECORDS.glob(f"????-??-??-h200-{kind}.jsonl"))
        return [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == kind]

    for heading, chosen in (
        ("MoE layer, decoding", points_of("decoding")),
        ("MoE layer, prefill", [p for p in points_of("layer") if p["point"]["tokens"] >= 2048]),
    ):
        quotients = [p["gpu"]["torch bf16"]["us"] / p["gpu"]["padless"]["us"] for p in chosen]
        mean = math.exp(math.fsum(map(math.log, quotients)) / len(quotients))
        (line,) = [row for row in (tool.ROOT / "README.md").read_text().splitlines() if row.startswith(f"| {heading}")]
        assert f"{mean:.2f}x torch bf16" in line


def test_another_record_makes_another_readme(tmp_path):
    """Half the time of padless doubles the rate: the figures are read and not remembered."""
    path = newest(RECORDS, "paper-full.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == "paper":
            record["gpu"]["padless"]["us"] /= 2
    write(tmp_path, path.name, *records)
    rates = []
    for folder in (RECORDS, tmp_path):
        _, shown, *_ = paper_section(measured(folder, "paper-full"))
        header, *rows = rows_of(shown)
        rates.append([float(row[header.index("TFLOP/s")]) for row in rows[:-2]])
    assert rates[1] == pytest.approx([2 * rate for rate in rates[0]], abs=1.1)


def test_the_pages_averages_are_those_of_the_raw_records():
    """Once more without a function of padless or of the tool."""
    path = max(RECORDS.glob("????-??-??-h200-paper-full.jsonl"))
    points = [r for r in map(json.loads, path.read_text().splitlines()) if r["kind"] == "paper"]
    own = [p["gpu"]["padless"]["us"] for p in points]
    readme = (RECORDS / "README.md").read_text()
    (shown,) = re.findall(r"(?:^\| M .*groups .*saved.*\n)(?:\|.*\n)+", readme, re.MULTILINE)
    header, *rows = rows_of(shown.strip())
    average, least = rows[-2:]
    assert average[0] == f"all {len(points)}"
    for heading, times in (
        ("pad + DeepGEMM", [p["gpu"]["pad_then_deepgemm"]["us"] for p in points]),
        ("of floor", [p["floor_us"] for p in points]),
    ):
        quotients = [time / us for time, us in zip(times, own, strict=True)]
        at = header.index(heading)
        mean = math.exp(math.fsum(map(math.log, quotients)) / len(quotients))
        assert float(average[at].rstrip("x")) == pytest.approx(mean, abs=0.0006)
        assert float(least[at].rstrip("x")) == pytest.approx(min(quotients), abs=0.0006)


def test_marks_are_demanded():
    with pytest.raises(ValueError, match="one pair of marks"):
        tool.with_block("no marks", "text")
    marked = "before\n<!-- measured:begin -->\nold\n<!-- measured:end -->\nafter"
    assert tool.with_block(marked, r"\1 new" + "\n") == marked.replace("old", r"\1 new")


# --- which records count ------------------------------------------------------------------------------------


def test_the_newest_record_of_a_kind_counts(tmp_path):
    names = ("2031-02-03-h200-formats.jsonl", "2031-11-03-h200-formats.jsonl", "2030-12-31-h200-formats.jsonl")
    others = (
        "2032-01-01-h200-formats-competition.jsonl",
        "2032-01-01-h200-formats.png",
        "2032-01-01-b200-formats.jsonl",
    )
    for name in (*names, *others):
        (tmp_path / name).write_text("")
    assert newest(tmp_path, "formats.jsonl") == tmp_path / "2031-11-03-h200-formats.jsonl"
    assert newest(tmp_path, "decode.jsonl") is None
    assert measured(tmp_path, "formats") is None, "a file without a point"


def test_what_was_not_measured_is_left_out(tmp_path):
    assert tool.measured_block(tmp_path).strip() == ""
    found(tmp_path, "decode", point("decode", {"groups": 8, "rows": 1, "N": 64, "K": 32}, {"padless": 10.0}))
    block = tool.measured_block(tmp_path)
    assert "**Decoding**" in block
    for absent in ("**Dense", "**Checks", "DeepGEMM", "MSLK", "nan", "None", " - "):
        assert absent not in block
    machine = "driver 600.1, 700 W, clocks of up to 1234 MHz and memory at 3201, CUDA 13.0, torch 2.11.0"
    assert f"One NVIDIA H200 ({machine}), 2031-02-03" in block.replace("\n", " ")


def test_sessions_of_other_points_do_not_count(tmp_path):
    """A file of two runs has the repeats of both; a session whose run measured nothing says nothing."""
    one = point("dense", {"M": 1, "N": 2, "K": 3}, {"padless": 1.0, "deepgemm": 2.0})
    sessions = (session(), session(id="later", repeats=10), session(id="idle", repeats=99))
    write(tmp_path, "2031-02-03-h200-dense.jsonl", *sessions, one, one | {"session": "later"})
    dense = measured(tmp_path, "dense")
    assert dense.medians == "medians of 4 and 10"
    assert peers(dense) == "deepgemm 9.8 under MIT"
    assert command(dense, "--full") == "padless bench paper --full --only deepgemm --only torch --repeats 4"
