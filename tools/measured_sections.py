"""Sections of README.md for each kind of record: a caption that links it, and a table or list right after it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from measured_comparisons import comparison_columns, comparison_table, of_all, won_sentence
from measured_markdown import bullets, failure_sentence, listed, markdown, paragraph, span
from measured_records import FOLDER, Measured, axis_span, command, peers
from padless.bench.cases.chain import DEEPGEMM, MLP, MLP_ORDINARY, ORDINARY, PADLESS, PROGRAMMATIC
from padless.bench.cases.epilogue import PAIRS, cost
from padless.bench.cases.formats import TORCH, by_case, contenders_of, floor_shares, speedups
from padless.bench.group_sizes import full_grid
from padless.bench.report import table
from padless.bench.results import Record, point_key, ratios, time_us

SANITIZER = re.compile(r"(compute-sanitizer \w+) of ")
EPILOGUE_M = 8192
FP8_BLOCK = "FP8_BLOCK x FP8_BLOCK"


def paper_section(found: Measured) -> list[str]:
    points = found.points
    grid = {point_key(vars(point)) for point in full_grid()}
    there = of_all(len(grid & {point_key(r["point"]) for r in points}), len(grid))
    same = [bool(r["bitwise_identical"]) for r in points if "bitwise_identical" in r]
    text = paragraph(
        f"**The paper's grid**, {there} points ({found.link}; {peers(found)}; {found.medians}).",
        f"To repeat it: `{command(found, '--full')}`." if there.startswith("all") else "",
        won_sentence(points),
        f"Valid rows are bit for bit those of padding + the same GEMM on {of_all(sum(same), len(same))} points."
        if same
        else "",
        "Saved is padding's share of the padded rows. DeepGEMM (padded) runs on data that was padded for it "
        "before; the paper's GEMM is its kernel alone, its call everything from Python to the result.",
        table.caption(points, found.sessions),
        failure_sentence(points),
    )
    columns = [table.SAVED, table.TFLOPS, *comparison_columns(points)]
    picture = found.path.with_suffix(".png")
    drawn = f"![Acceleration and memory saving over the paper's grid]({FOLDER}/{picture.name})"
    shown = markdown(comparison_table(points, ("M", "groups"), columns))
    return [text, shown, *([drawn] if picture.exists() else [])]


def decode_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**Decoding**, {len(found.points)} points with at most {axis_span(found.points, 'rows')} rows a "
        f"group, N {axis_span(found.points, 'N')}, K {axis_span(found.points, 'K')} ({found.link}; "
        f"{peers(found)}; {found.medians}).",
        won_sentence(found.points),
        table.caption(found.points, found.sessions),
        failure_sentence(found.points),
    )
    columns = comparison_columns(found.points)
    return [text, markdown(comparison_table(found.points, ("groups",), columns))]


def chain_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**Calls in a row**, {len(found.points)} points with at most {axis_span(found.points, 'rows')} rows a group: a "
        f"CUDA graph of {axis_span(found.points, 'calls')} calls, each with weights of its own ({found.link}; "
        f"{peers(found)}; {found.medians}). A kernel begins while the one ahead is ending; with ordinary launches it "
        "waits. MLP: pairs of a quantizing SwiGLU call and a call that reads its rows.",
        table.caption(found.points, found.sessions),
        failure_sentence(found.points),
    )

    columns = [
        table.time(PADLESS, "us a call", totals=False),
        table.ratio("ordinary launches", ORDINARY, unit="x"),
        table.ratio("DeepGEMM masked", DEEPGEMM, unit="x"),
        table.ratio("the same, programmatic", DEEPGEMM + PROGRAMMATIC, unit="x"),
        table.ratio("MLP, ordinary launches", MLP_ORDINARY, MLP, unit="x"),
    ]
    return [text, markdown(comparison_table(found.points, ("groups", "N", "K"), columns))]


def dense_section(found: Measured) -> list[str]:
    text = paragraph(
        f"**Dense products** ({found.link}; {peers(found)}; {found.medians}).",
        won_sentence(found.points),
        table.caption(found.points, found.sessions),
        failure_sentence(found.points),
    )
    columns = [table.TFLOPS, *comparison_columns(found.points)]
    return [text, markdown(comparison_table(found.points, ("M", "N", "K"), columns))]


def formats_section(found: Measured) -> list[str]:
    cases = by_case(found.points)
    prefill, decode = cases.get("prefill", []), cases.get("decode", [])
    text = paragraph(
        f"**Formats on Hopper**, least to most ({found.link}; {found.medians}). Prefill (M {axis_span(prefill, 'M')}) "
        f"and decoding (at most {axis_span(decode, 'rows')} rows a group): how many times faster than torch's bf16 "
        "grouped product of dequantized operands. Of FP8_BLOCK: the rate at prefill over that of FP8_BLOCK x FP8_BLOCK. "
        "Of floor: decoding, the time that the pair's own bytes take at the rate of a copy, over its time.",
        failure_sentence(found.points),
    )
    header = ("a x b", "prefill", "of FP8_BLOCK", "decoding", "of floor")
    rows = []
    for pair in contenders_of(found.points):
        if TORCH not in pair and "," not in pair:  # a comma: a second kernel for the same pair
            shares = (
                speedups(prefill, pair),
                ratios(prefill, "gpu", FP8_BLOCK, pair),
                speedups(decode, pair),
                floor_shares(decode, pair),
            )
            rows.append([pair, *(span(values, ".2f") for values in shares)])
    return [text, markdown(table.Table("", table.labels(*header), rows))]


def epilogue_section(found: Measured) -> list[str]:
    points = [point for point in found.points if point["point"]["M"] == EPILOGUE_M]
    depths = sorted({point["point"]["K"] for point in points})
    text = paragraph(
        f"**Quantizing in the GEMM's launch**, FP8_BLOCK, M {EPILOGUE_M}, N {axis_span(points, 'N')} ({found.link}; "
        f"{found.medians}): what a call costs over the same GEMM writing bf16, and how many times faster it is than "
        "that GEMM and separate kernels.",
        failure_sentence(found.points),
    )
    rows = []
    for fused, separate in PAIRS:
        costs = [cost(fused, "").values(of_depth(points, depth)) for depth in depths]
        gains = ratios(points, "gpu", separate, fused)
        if gains:
            cells = [span(values, "+.1f") + ("%" if values else "") for values in costs]
            rows.append([fused.removeprefix("fused "), *cells, span(gains, ".2f") + "x"])
    header = ("quantized", *(f"K {depth}" for depth in depths), "than separate kernels")
    return [text, markdown(table.Table("", table.labels(*header), rows))] if rows else []


def of_depth(records: Sequence[Record], depth: int) -> list[Record]:
    return [record for record in records if record["point"]["K"] == depth]


def quantize_section(found: Measured) -> list[str]:
    sentences = []
    for record in found.points:
        shares = [
            f"{name.removeprefix('quantize ')} {100 * copy_share(record, name):.0f}%"
            for name in record["gpu"]
            if name.startswith("quantize")
        ]
        sentences.append(f"M {record['point']['M']}, K {record['point']['K']}: {'; '.join(shares)}.")
    text = paragraph(
        f"**Quantizing alone**, FP8_BLOCK where no format is named, bytes per second over those of a device copy "
        f"({found.link}; {found.medians}).",
        *sentences,
        failure_sentence(found.points),
    )
    return [text]


def copy_share(record: Record, name: str) -> float:
    """Bytes per second of a kernel over those of the copy of the same run."""
    us = time_us(record, "gpu", name)
    return record["bytes"][name] / us * 1e-3 / record["copy_gb_per_s"] if us else float("nan")


def checks_section(path: Path) -> list[str]:
    """Passes and failures, by tool of the sanitizer, and the emulator's counts in the checks' own words."""
    verify = json.loads(path.read_text(encoding="utf-8"))
    about, checks = verify["machine"], verify["checks"]
    failed = [f"`{check['check']}`" for check in checks if not check["passed"]]
    call = about["command"].partition(" --out ")[0]
    left = int(about.get("not run yet", 0))
    text = paragraph(
        f"**Checks** of `{call}` ([record]({FOLDER}/{path.name}); {about['gpu, driver, power limit']}; "
        f"{about['date']}; [what they are](docs/verify.md)): {passed(checks)}"
        + (f", {listed(failed)} {'fails' if len(failed) == 1 else 'fail'}" if failed else "")
        + (f"; the run ended before {left} more" if left else "")
        + "."
    )
    emulated = [check for check in checks if check["check"].startswith("emulator")]
    tools: dict[str, list[Record]] = {}
    for check in checks:
        if match := SANITIZER.match(check["check"]):
            tools.setdefault(match[1], []).append(check)
    own = [c for c in checks if c not in emulated and not SANITIZER.match(c["check"])]
    items = [f"on the GPU alone: {passed(own)}"] if own else []
    items += [f"{tool}: {passed(runs)}" for tool, runs in tools.items()]
    items += [f"{check['check']}: {check['detail'] if check['passed'] else 'fails'}" for check in emulated]
    return [text, bullets(items)]


def fuzz_section(path: Path) -> list[str]:
    """Problems of all runs of `padless fuzz`, and sequences of its option --states, by what computed them; how many
    were wrong.
    """
    runs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    sums: dict[str, list[int]] = {}
    for run in runs:
        where = run["machine"]["gpu"] if run["backend"] == "cuda" else f"backend `{run['backend']}` on a CPU"
        if run["by_call"] and all(call.startswith("states.") for call in run["by_call"]):
            where += " (sequences of operations)"
        of = sums.setdefault(where, [0, 0])
        of[0] += run["problems"]
        of[1] += 1
    parts = [f"{n:,} on {at} in {count} run{'s' * (count > 1)}" for at, (n, count) in sorted(sums.items())]
    wrong = sum(len(run["wrong"]) + len(run["ended"]) for run in runs)
    text = paragraph(
        f"**Random problems** of `padless fuzz` over every public call ([record]({FOLDER}/{path.name}); [what is drawn "
        f"and judged](docs/fuzz.md)): {listed(parts)}; {wrong} wrong."
    )
    return [text] if runs else []


def passed(checks: Sequence[Record]) -> str:
    """Such as "22 of 23 pass"."""
    return f"{sum(check['passed'] for check in checks)} of {len(checks)} pass"
