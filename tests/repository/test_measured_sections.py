"""Sections and sentences of the measured pages, of records that are made up."""

from __future__ import annotations

import json
import re
from pathlib import Path

import measured_tested
import readme_measured as tool
from measured_comparisons import comparison_columns, comparison_table, won_sentence
from measured_layers import decoding_section
from measured_markdown import failure_sentence, markdown, paragraph, span
from measured_overview import overview
from measured_records import axis_span, measured
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
from support.measured_page_cases import found, point, rows_of, session, write

RECORDS = tool.ROOT / tool.FOLDER
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
        ["quantized", "K 2048", "K 4096", "than separate kernels"],
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
