"""Measured parts of README.md, docs/tested.md and docs/measured/README.md, as tools/readme_measured.py makes them."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

import measured_tested
import readme_measured as tool
from measured_comparisons import comparison_columns, comparison_table, won_sentence
from measured_layers import decoding_section
from measured_markdown import failure_sentence, markdown, paragraph, span
from measured_overview import overview
from measured_records import axis_span, command, measured, newest, peers
from measured_sections import (
    chain_section,
    checks_section,
    copy_share,
    decode_section,
    epilogue_section,
    formats_section,
    fuzz_section,
    paper_section,
)
from padless.bench.report.table import Table, labels
from support.bench_records import timing

RECORDS = tool.ROOT / tool.FOLDER
PAGES = ("README.md", f"{tool.FOLDER}/README.md", "docs/tested.md")


def session(**changes) -> dict:
    about = {
        "date": "2031-02-03T04:05:06+00:00",
        "cuda": "13.0",
        "versions": {"torch": "2.11.0"},
        "gpu": "NVIDIA H200",
        "driver": "600.1",
        "power_limit_w": 700.0,
        "max_sm_mhz": 1234.0,
        "max_mem_mhz": 3201.0,
    }
    ceilings = {"dense_tflops": 1000.0, "copy_gb_per_s": 4000.0}
    known = {"deepgemm": {"version": "9.8"}, "mslk": {"missing": "no module"}, "torch": {"version": "2.11.0"}}
    return {
        "kind": "session",
        "id": "then",
        "what": "paper",
        "machine": about,
        "peers": known,
        "ceilings": ceilings,
        "repeats": 4,
    } | changes


def point(kind: str, at: dict, times: dict[str, float], **more) -> dict:
    return {
        "kind": kind,
        "session": "then",
        "point": at,
        "wrong": {},
        "errors": {},
        "gpu": {name: timing(us) for name, us in times.items()},
    } | more


def write(folder: Path, name: str, *records: dict) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(folder: Path, kind: str, *points: dict):
    write(folder, f"2031-02-03-h200-{kind}.jsonl", session(what=kind.split("-")[0]), *points)
    return measured(folder, kind)


def rows_of(text: str) -> list[list[str]]:
    """Cells of a Markdown table, without the rule under its heading."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [lines[0], *lines[2:]]


# --- the pages and their records ----------------------------------------------------------------------------


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


# --- tables -------------------------------------------------------------------------------------------------

TWO = [
    point("paper", {"M": 128, "groups": 4}, {"padless": 10.0, "mslk": 20.0, "pad_then_deepgemm": 5.0}, floor_us=8.0),
    point("paper", {"M": 64, "groups": 4}, {"padless": 10.0, "pad_then_deepgemm": 20.0}, floor_us=2.0),
]


def test_comparisons_by_hand():
    shown = rows_of(markdown(comparison_table(TWO, ("M", "groups"), comparison_columns(TWO))))
    assert shown == [
        ["M", "groups", "pad + DeepGEMM", "MSLK (1 of 2)", "of floor"],
        ["64", "4", "2.00x", "-", "0.20"],
        ["128", "4", "0.50x", "2.00x", "0.80"],
        ["all 2", "", "1.000x", "2.000x", "0.400"],
        ["least", "", "0.500x", "2.000x", "0.200"],
    ]


def test_points_won_are_counted():
    assert won_sentence(TWO) == "Faster on 1 of 2 points than pad + DeepGEMM; on all 1 points than MSLK."
    assert won_sentence(TWO[:1]) == "Faster on none of 1 points than pad + DeepGEMM; on all 1 points than MSLK."
    same = [point("paper", {"M": 1}, {"padless": 3.0, "deepgemm": 3.0})]
    assert won_sentence(same) == "Faster on none of 1 points than DeepGEMM.", "as fast is not faster"
    assert won_sentence([]) == ""


def test_what_went_wrong_is_said():
    assert failure_sentence(TWO) == ""
    bad = point("paper", {"M": 7}, {}, wrong={"mslk": "is off | by 1"}, bitwise_identical=False)
    assert failure_sentence([*TWO, bad]).startswith("**2 went wrong**, the first: M=7: valid rows differ")
    assert "|" not in failure_sentence([bad | {"bitwise_identical": True}])


def test_spans_and_alignment():
    assert span([3.0, 1.0, 2.0], ".1f") == "1.0 to 3.0"
    assert span([1.001, 1.002], ".2f") == "1.00"
    assert span([]) == "-"
    assert axis_span(TWO, "M") == "64 to 128"
    assert (
        markdown(Table("", labels("a", "bcde"), [["long", "1"]])) == "| a    | bcde |\n| ---- | ---: |\n| long |    1 |"
    )


def test_no_line_becomes_a_list():
    for width in range(90, 125):
        text = paragraph("x" * width + " + padless", "and more")
        assert not re.search(r"^\s*\+", text, re.MULTILINE), text
        assert " ".join(text.split()) == "x" * width + " + padless and more"


# --- sections -----------------------------------------------------------------------------------------------


def grid_point(n: int, padless_us: float, *, same: bool) -> dict:
    at = {"M": 8192, "N": n, "K": 3072, "groups": 4}
    more = {"memory_saving_percent": n / 1024, "flops": 1e9, "bitwise_identical": same, "floor_us": 1.0}
    return point("paper", at, {"padless": padless_us, "tma_adaptive_kernel": 3.0}, **more)


def test_the_papers_grid_by_hand(tmp_path):
    points = grid_point(3072, 1.0, same=True), grid_point(8192, 4.0, same=False)
    text, shown = paper_section(found(tmp_path, "paper-full", *points))
    text = " ".join(text.split())
    for sentence in (
        "2 of 576 points",
        "Faster on 1 of 2 points than paper's GEMM.",
        "+ the same GEMM on 1 of 2 points.",
        "**1 went wrong**",
        "medians of 4",
        "Floor: at 1000 TFLOP/s or 4000 GB/s",
    ):
        assert sentence in text
    assert "To repeat it" not in text, "the command measures other points"
    # saved: (3 + 8) / 2; rates 1000 and 250, whose geometric mean is 500; 3 and 3/4: 1.5; floor 1 and 1/4: 0.5
    assert rows_of(shown)[1] == ["8192", "4", "5.5%", "500", "1.50x", "0.50"]
    (tmp_path / "2031-02-03-h200-paper-full.png").write_bytes(b"")
    assert paper_section(measured(tmp_path, "paper-full"))[2].endswith("2031-02-03-h200-paper-full.png)")


def test_decoding_by_hand(tmp_path):
    points = [
        point(
            "decode",
            {"groups": groups, "rows": 4, "N": 64, "K": 32},
            {"padless": 10.0, "deepgemm_masked": masked, "copy of as many bytes": 9.0},
            floor_us=5.0,
        )
        for groups, masked in ((8, 9.0), (256, 12.0))
    ]
    text, shown = decode_section(found(tmp_path, "decode", *points))
    assert "at most 4 rows a group, N 64, K 32" in " ".join(text.split())
    assert rows_of(shown)[0] == ["groups", "DeepGEMM masked", "of floor", "of a copy"]
    assert rows_of(shown)[1:3] == [["8", "0.90x", "0.50", "0.90"], ["256", "1.20x", "0.50", "0.90"]]


def test_chains_by_hand(tmp_path):
    def at(groups: int, ordinary: float, masked: float) -> dict:
        times = {"padless": 10.0, "padless, ordinary launches": ordinary, "mlp": 20.0, "deepgemm_masked": masked}
        times |= {"mlp, ordinary launches": 21.0, "deepgemm_masked, programmatic": 12.5}
        return point("chain", {"groups": groups, "rows": 4, "N": 64, "K": 32}, times, calls=groups)

    text, shown = chain_section(found(tmp_path, "chain", at(8, 11.0, 12.0), at(9, 10.5, 15.0)))
    assert "a CUDA graph of 8 to 9 calls" in " ".join(text.split())
    head = ["us a call", "ordinary launches", "DeepGEMM masked", "the same, programmatic", "MLP, ordinary launches"]
    assert rows_of(shown)[0] == ["groups", "N", "K", *head]
    assert rows_of(shown)[1] == ["8", "64", "32", "10.0", "1.100x", "1.200x", "1.250x", "1.050x"]
    assert rows_of(shown)[-1] == ["least", "", "", "", "1.050x", "1.200x", "1.250x", "1.050x"]


def test_formats_by_hand(tmp_path):
    fp8, mx = "FP8_BLOCK x FP8_BLOCK", "MXFP8 x MXFP8"
    others = {"torch_bf16": 20.0, f"{mx}, another_kernel": 1.0, "dequantize MXFP8, torch_bf16": 2.0}

    def at(case: str, m: int, fp8_us: float, mx_us: float) -> dict:
        where = {"case": case, "M": m, "N": 1, "K": 1, "groups": 1, "rows": m}
        return point("formats", where, {fp8: fp8_us, mx: mx_us} | others, floors_us={fp8: 4.0, mx: 6.0}, missing=[])

    points = at("prefill", 512, 10.0, 20.0), at("prefill", 256, 5.0, 20.0), at("decode", 2, 5.0, 8.0)
    text, shown = formats_section(found(tmp_path, "formats", *points))
    assert "(M 256 to 512) and decoding (at most 2 rows a group)" in " ".join(text.split())
    assert rows_of(shown)[1:] == [
        [fp8, "2.00 to 4.00", "1.00", "4.00", "0.80"],
        [mx, "1.00", "0.25 to 0.50", "2.50", "0.75"],
    ]


def test_epilogues_by_hand(tmp_path):
    def at(m: int, k: int, fused: float) -> dict:
        times = {"gemm bf16": 100.0, "fused rows": fused, "gemm bf16, quantize": 220.0}
        return point("epilogue", {"M": m, "N": 64, "K": k, "groups": 8}, times)

    points = at(8192, 2048, 110.0), at(8192, 2048, 99.0), at(8192, 4096, 100.0), at(1024, 4096, 500.0)
    text, shown = epilogue_section(found(tmp_path, "epilogue", *points))
    assert "M 8192, N 64" in text
    assert rows_of(shown) == [
        ["quantised", "K 2048", "K 4096", "than separate kernels"],
        ["rows", "-1.0 to +10.0%", "+0.0%", "2.00 to 2.22x"],
    ]
    only_small = found(tmp_path, "epilogue", at(1024, 4096, 500.0))
    assert epilogue_section(only_small) == []


def test_share_of_a_copy_by_hand():
    record = point("quantize", {"M": 1, "K": 1}, {"quantize": 2.0}, bytes={"quantize": 4_000_000}, copy_gb_per_s=4000.0)
    assert copy_share(record, "quantize") == 0.5  # 4 MB in 2 us are 2 TB/s


def checks(tmp_path: Path, *results: tuple[str, bool, str], **about: str) -> str:
    machine = {"command": "padless verify --against-emulator --out /elsewhere", "date": "2031-02-03"}
    machine |= {"gpu, driver, power limit": "NVIDIA H200, 600.1, 700.00 W"} | about
    some = [{"check": name, "passed": good, "detail": detail, "seconds": 1.0} for name, good, detail in results]
    path = tmp_path / "2031-02-03-h200-verify.json"
    path.write_text(json.dumps({"machine": machine, "checks": some}))
    return " ".join("\n\n".join(checks_section(path)).split())


def test_checks_by_hand(tmp_path):
    results = [
        ("accuracy", True, "worst 1e-3"),
        ("compute-sanitizer memcheck of a", True, "fine"),
        ("compute-sanitizer racecheck of a", False, "a race\nof 100 lines"),
        ("compute-sanitizer racecheck of b", True, "fine"),
        ("emulator agrees", True, "7 problems, 8 elements"),
    ]
    text = checks(tmp_path, *results)
    assert ": 4 of 5 pass, `compute-sanitizer racecheck of a` fails. - on the GPU alone: 1 of 1 pass" in text
    assert "memcheck: 1 of 1 pass - compute-sanitizer racecheck: 1 of 2 pass - emulator agrees: 7 problems, 8" in text
    assert "elsewhere" not in text
    assert "100 lines" not in text
    text = checks(tmp_path, *results[:1], ("emulator agrees", False, "AssertionError: x"), **{"not run yet": "3"})
    assert "1 of 2 pass, `emulator agrees` fails; the run ended before 3 more." in text
    assert "- emulator agrees: fails" in text
    assert "compute-sanitizer" not in text, "it did not run"


def test_fuzzed_problems_are_added_up_by_what_computed_them(tmp_path):
    def run(backend: str, problems: int, wrong: int = 0, gpu: str = "NVIDIA H200", sequences: bool = False) -> dict:
        calls = {"states.moe": problems} if sequences else {"gemm": problems}
        about = {"backend": backend, "machine": {"gpu": gpu}, "problems": problems, "by_call": calls}
        return about | {"wrong": [{}] * wrong, "ended": []}

    states = run("reference", 5, sequences=True)
    path = write(tmp_path, "fuzz.jsonl", run("cuda", 1000), run("reference", 7), run("cuda", 234, 2), states)
    (text,) = fuzz_section(path)
    text = " ".join(text.split())
    on_cpu = "backend `reference` on a CPU"
    assert text.endswith(
        f"1,234 on NVIDIA H200 in 2 runs, 7 on {on_cpu} in 1 run and 5 on {on_cpu} (sequences of operations) in 1 run; "
        "2 wrong."
    )
    runs = [json.loads(line) for line in (RECORDS / "fuzz.jsonl").read_text().splitlines()]
    drawn = [
        run for run in runs if run["backend"] == "cuda" and not any(c.startswith("states.") for c in run["by_call"])
    ]
    on_gpus = sum(run["problems"] for run in drawn)
    assert f"{on_gpus:,}" in (RECORDS / "README.md").read_text()


def test_layers_of_few_tokens_have_a_section_and_the_readmes_row(tmp_path):
    at = {"model": "Qwen3-30B", "tokens": 1, "top_k": 8}
    few = point("decoding", at, {"padless": 20.0, "torch bf16": 60.0, "triton": 22.0}, floor_us=10.0)
    layers = point("layer", at | {"tokens": 64}, {"padless": 30.0, "torch bf16": 45.0}, floor_us=1.0, copy_gb_per_s=1.0)
    write(tmp_path, "2031-02-03-h200-layer.jsonl", session(what="layer"), layers)
    assert "1.50x torch bf16" in overview(tmp_path)
    assert "from 16 tokens" in tool.readme_block(tmp_path)
    text, shown = decoding_section(found(tmp_path, "decoding", few))
    assert "1 models, 1 points" in text
    assert rows_of(shown)[1][:4] == ["Qwen3-30B", "1", "10.0", "20.0"]
    assert "3.00x torch bf16, 1.10x plain Triton" in overview(tmp_path)
    assert "from 16 tokens" not in tool.readme_block(tmp_path)


# --- how it is tested ------------------------------------------------------------------------------------


def test_what_failed_in_a_record_is_on_the_page_of_tests(tmp_path):
    bad = {"name": "a", "passed": False}
    contents = {
        "2031-01-01-h200-tests.json": {
            "tests": 9,
            "passed": 5,
            "failed": {"a": "", "b": ""},
            "mended": {"b": "", "c": ""},
            "skipped": {"x": 1},
            "not reached": ["y"],
        },
        "2031-01-01-h200-verify.json": {"machine": {"date": "2031-01-01"}, "checks": [bad]},
        "2031-01-02-h200-verify.json": {"machine": {"date": "2031-01-02"}, "checks": [bad, bad | {"passed": True}]},
        "fuzz.jsonl": {"backend": "cuda", "problems": 1500, "wrong": ["p"], "ended": ["q"]},
        "mutants.json": {"kernels": {"k": {"judged": 7, "survivors": 3}, "l": {"judged": 2, "survivors": 0}}},
        "2031-01-01-cudnn-emulator.json": {
            "cases": [{"error": "", "differing": {"d": d}} for d in (0, 4)] + [{"error": "x", "differing": {}}]
        },
    }
    assert len(measured_tested.tested_block(tmp_path).splitlines()) == 4, "without records a row of kernels alone"
    for name, content in contents.items():
        (tmp_path / name).write_text(json.dumps(content) + "\n")
    rows = [row.split(" | ")[1] for row in measured_tested.tested_block(tmp_path).splitlines()[2:-1]]
    assert rows == [
        "9: 5 passed, 2 failed (1 of them passed in a later tree), 1 skipped, 1 not reached",
        "2031-01-02: 1 of 2 checks passed",
        "1,500, of which 2 were wrong",
        "6 of 9 noticed; the other 3 are [explained one by one](mutants.md)",
        "1 of 3 cases equal",
        "`sm100_dense`, `sm100_grouped`, `sm100_mxfp8_wgrad`, `sm100_nvfp4_wgrad`",
    ]
