"""The eleven steps of a published MXFP8 GEMM for B200 (Daniel Vega-Myhre, "MXFP8 GEMM: up to 99% of cuBLAS performance
using CUDA + PTX"), as designs for the clock, beside the published rates."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

from padless.emulator.timing import Chip
from padless.emulator.timing.roles import Design, gemm_cycles

SIZES = (2048, 4096, 8192, 16384)
# TFLOP/s at each size, by step; 1000 W.
PUBLISHED = (
    (478.49, 877.78, 1171.53, 1235.61), (797.73, 1443.69, 1900.74, 1933.43), (798.92, 1543.29, 1955.59, 1990.72),
    (837.55, 1789.57, 2126.22, 2104.80), (802.50, 1789.57, 2134.28, 2143.80), (883.01, 2199.16, 2370.29, 2181.83),
    (882, 2159, 2503, 2412), (885.93, 2201.42, 2537.46, 2432.80), (979.69, 2206.51, 2526.08, 2447.84),
    (884, 2203, 2550, 2478), (986.90, 2200.29, 2599.07, 2487.72), (981.48, 2202.55, 2550.27, 2425.23),
)  # fmt: skip
NAMES = (
    "first", "256 columns, two accumulators share 128", "stores of 32 bytes", "256 of K a stage", "scales of B to both",
    "no arrays in local memory", "Hilbert order", "stores bypass L1", "Hilbert from 8192", "stores by the copy engine",
    "stores chosen by size", "accumulators share 64",
)  # fmt: skip
FIXED_NS = 5000  # of a call besides its tiles: launch, events
GHZ = 1.25  # one clock for all rows: what fits their TFLOP/s best, at a limit of 1000 W
FITTED_SIZES = (2048, 8192)  # to which two rates of stores and GHZ were fitted


def design_of(step: int, size: int) -> Design:
    """Work of the kernel of a step at a size. What L1 keeps of stores is not modelled: step 7 is step 6."""
    design = Design(128, 128, 0, 16, False, True)
    if step >= 1:
        design = replace(design, n=256, shared_columns=128)
    if step >= 2:
        design = replace(design, store_bytes=32)
    if step >= 3:
        design = replace(design, block_k=256)
    if step >= 4:
        design = replace(design, scales_shared=True)
    if step >= 5:
        design = replace(design, local_arrays=False)
    if step >= 6 and (step < 8 or size >= 8192):
        design = replace(design, compact_order=True)
    if step == 9 or (step >= 10 and size >= 8192):
        design = replace(design, store_bytes=0)
    if step >= 11:
        design = replace(design, shared_columns=64)
    return design


def ladder_rows(chip: Chip) -> list[dict[str, Any]]:
    """For every step and size: published and predicted TFLOP/s, at GHZ, and both ratios to the step before."""
    rows: list[dict[str, Any]] = []
    before: dict[int, tuple[float, float]] = {}
    for step, published in enumerate(PUBLISHED):
        for size, measured in zip(SIZES, published, strict=True):
            ns = gemm_cycles(chip, design_of(step, size), size) / GHZ + FIXED_NS
            predicted = 2.0 * size**3 / ns / 1e3
            row: dict[str, Any] = {
                "step": step, "name": NAMES[step], "size": size, "published": measured, "predicted": round(predicted, 1),
            }  # fmt: skip
            if size in before:
                row["published_ratio"] = round(measured / before[size][0], 4)
                row["predicted_ratio"] = round(predicted / before[size][1], 4)
            before[size] = measured, predicted
            rows.append(row)
    return rows


@dataclass(frozen=True)
class LadderErrors:
    """Mean errors of the ratios from step to step and of TFLOP/s; of pairs of steps at one size that differ by more than
    3%, how many are in the right order, and how many there are."""

    ratio: float
    absolute: float
    right: int
    pairs: int


def ladder_errors(rows: list[dict[str, Any]], sizes: tuple[int, ...] = SIZES) -> LadderErrors:
    """Errors at some sizes."""
    rows = [row for row in rows if row["size"] in sizes]
    ratios = [abs(row["predicted_ratio"] / row["published_ratio"] - 1) for row in rows if "published_ratio" in row]
    absolute = [abs(row["predicted"] / row["published"] - 1) for row in rows]
    right = pairs = 0
    for one, other in itertools.combinations(rows, 2):
        ratio = one["published"] / other["published"]
        if one["size"] == other["size"] and abs(ratio - 1) > 0.03:
            pairs += 1
            right += (ratio > 1) == (one["predicted"] > other["predicted"])
    return LadderErrors(sum(ratios) / len(ratios), sum(absolute) / len(absolute), right, pairs)


def ladder_table(rows: list[dict[str, Any]]) -> str:
    """As Markdown."""
    lines = ["| step, TFLOP/s published and predicted | " + " | ".join(map(str, SIZES)) + " |", "|---" * 5 + "|"]
    for step, name in enumerate(NAMES):
        cells = [f"{r['published']:.0f}, {r['predicted']:.0f}" for r in rows if r["step"] == step]
        lines.append(f"| {step} {name} | " + " | ".join(cells) + " |")
    lines.append("")
    test = tuple(size for size in SIZES if size not in FITTED_SIZES)
    for name, sizes in (("2048 and 8192 (fitted to)", FITTED_SIZES), ("4096 and 16384 (test)", test)):
        e = ladder_errors(rows, sizes)
        lines.append(
            f"{name}: ratios from step to step {e.ratio:.1%} off on average, TFLOP/s {e.absolute:.1%}; two steps that "
            f"differ by more than 3% are in the right order in {e.right} of {e.pairs} pairs ({e.right / e.pairs:.0%})."
        )
    return "\n".join(lines)
