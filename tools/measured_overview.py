"""The README's six rows and its figure: padless against what people use today, from the newest records.

The figure carries its numbers as text, so that it is compared with the records without looking at pixels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from measured_layers import FP8, PREFILL
from measured_markdown import markdown
from measured_records import FOLDER, Measured, measured
from padless.bench.cases import layer, wgrad
from padless.bench.cases.decoding import compared_with
from padless.bench.cases.layer import BF16 as BF16_LAYER
from padless.bench.cases.train.contenders import BF16
from padless.bench.peers.monomoe import NAME as MONOMOE
from padless.bench.peers.triton_moe import NAME as TRITON
from padless.bench.report import table
from padless.bench.results import Record, ratios
from padless.testing.timing import geomean

FIGURE = "overview.png"
NUMBERS = "padless"  # of the figure's text: the rows as JSON
_DECODE = 64  # tokens up to which a layer's point is decoding
_TORCHAO = "torchao"
_EP_TOKENS = 4096  # of a rank
_LONGEST = 4.0  # times as long: a longer bar is cut


@dataclass(frozen=True)
class Row:
    """A workload, and how many times as long as padless each contender takes: geometric means over the points."""

    workload: str
    detail: str
    times: dict[str, float]
    record: str


def rows_of(folder: Path) -> list[Row]:
    """The rows that the records of a folder allow, in the README's order; the figure has the first four."""
    found = [*_layers(folder), *_training(folder), *_ranks(folder), *_grid(folder), *_weight_gradients(folder)]
    return [row for row in found if row.times]


def overview(folder: Path) -> str:
    """The rows as a Markdown table, with links of README.md."""
    cells = [
        [
            f"{row.workload}: {row.detail}",
            ", ".join(f"{value:.2f}x {name}" for name, value in row.times.items()),
            f"[record]({FOLDER}/{row.record})",
        ]
        for row in rows_of(folder)
    ]
    heads = table.labels("on an H200", "times as fast as", "")
    return markdown(table.Table("", heads, cells)) if cells else ""


def draw(folder: Path) -> Path:
    """Draws the first four workloads into the folder: a panel each, a bar for each contender."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = rows_of(folder)[:4]
    figure, panels = pyplot.subplots(1, len(rows), figsize=(11, 2.6), constrained_layout=True)
    for panel, row in zip(panels, rows, strict=True):
        names, values = ["padless", *row.times], [1.0, *row.times.values()]
        colors = ["#2f6f4f", *["#b9b9b4"] * len(row.times)]
        drawn = [min(value, _LONGEST) for value in values]
        bars = panel.barh(names[::-1], drawn[::-1], color=colors[::-1])
        labels = ["1", *(f"{value:.2f}" + (" (cut)" if value > _LONGEST else "") for value in values[1:])]
        panel.bar_label(bars, labels[::-1], padding=3, fontsize=9)
        panel.set_xlim(0, _LONGEST * 1.35)
        panel.set_title(f"{row.workload}\n{row.detail}", fontsize=9.5, loc="left")
        panel.tick_params(axis="y", length=0, labelsize=9)
        panel.xaxis.set_visible(False)
        panel.spines[:].set_visible(False)
    figure.supxlabel("time relative to padless on one H200 (the last: two), shorter is better", fontsize=9)
    path = folder / FIGURE
    figure.savefig(path, dpi=160, metadata={NUMBERS: numbers(folder), "Software": None})
    pyplot.close(figure)
    return path


def numbers(folder: Path) -> str:
    """The figure's rows as text."""
    rows = rows_of(folder)[:4]
    return json.dumps([[r.workload, r.detail, r.record, {k: round(v, 3) for k, v in r.times.items()}] for r in rows])


def figure_differs(folder: Path) -> bool:
    """Whether the folder's figure is absent or shows other numbers than its records."""
    from PIL import Image

    path = folder / FIGURE
    if not path.exists():
        return bool(rows_of(folder))
    with Image.open(path) as image:
        return image.info.get(NUMBERS) != numbers(folder)


# --- workloads -------------------------------------------------------------------------------------------


def _means(points: Sequence[Record], own: str, others: dict[str, str]) -> dict[str, float]:
    """Of each contender that was timed, by its name here: its time over that of ``own``."""
    found = {shown: ratios(points, "gpu", name, own) for shown, name in others.items()}
    return {shown: geomean(values) for shown, values in found.items() if values}


def _layers(folder: Path) -> list[Row]:
    found = measured(folder, "layer")
    if found is None:
        return []
    others = {"torch bf16": layer.BF16, "DeepGEMM": layer.DEEPGEMM}
    decode = [r for r in found.points if r["point"]["tokens"] <= _DECODE]
    prefill = [r for r in found.points if r["point"]["tokens"] >= PREFILL]
    return [
        _decoding(folder)
        or Row("MoE layer, decoding", _tokens(decode), _means(decode, layer.PADLESS, others), found.path.name),
        Row("MoE layer, prefill", _tokens(prefill), _means(prefill, layer.PADLESS, others), found.path.name),
    ]


def _decoding(folder: Path) -> Row | None:
    """Of `padless bench decoding`, where there is a record."""
    found = measured(folder, "decoding")
    if found is None:
        return None
    others = {"torch bf16": BF16_LAYER, "plain Triton's products alone": TRITON}
    times = _means(found.points, layer.PADLESS, others)
    times |= _means(found.points, compared_with(MONOMOE), {"MonoMoE, both from logits": MONOMOE})
    return Row("MoE layer, decoding", _tokens(found.points), times, found.path.name)


def _tokens(points: Sequence[Record]) -> str:
    counts = sorted({r["point"]["tokens"] for r in points})
    return f"{counts[0]} to {counts[-1]} tokens" if counts else ""


def _training(folder: Path) -> list[Row]:
    found = measured(folder, "train")
    if found is None:
        return []
    own = next((name for name in FP8 if any(name in r["gpu"] for r in found.points)), FP8[-1])
    times = _means(found.points, own, {"torch bf16": BF16, "torchao FP8": _TORCHAO})
    return [Row("Training step of experts", "FP8, weights quantized in it", times, found.path.name)]


def _ranks(folder: Path) -> list[Row]:
    found = measured(folder, "ep")
    if found is None:
        return []
    points = [r for r in found.points if r["point"]["tokens"] == _EP_TOKENS]
    times = {}
    for name, prefix in (("DeepEP V1", "deepep"), ("NCCL", "nccl")):
        both = [r for step in ("dispatch", "combine") for r in ratios(points, "gpu", f"{prefix} {step}", step)]
        if both:
            times[name] = geomean(both)
    number = {2: "Two", 4: "Four", 8: "Eight"}[max(r["point"]["ranks"] for r in points)]
    return [Row(f"{number} GPUs", f"dispatch + combine, T {_EP_TOKENS}", times, found.path.name)]


def _grid(folder: Path) -> list[Row]:
    found: Measured | None = measured(folder, "paper-full")
    if found is None:
        return []
    others = {"DeepGEMM after padding": "pad_then_deepgemm", "DeepGEMM on rows padded before": "deepgemm_on_padded"}
    times = _means(found.points, "padless", others)
    return [Row("Grouped FP8 product", f"{len(found.points)} shapes", times, found.path.name)]


def _weight_gradients(folder: Path) -> list[Row]:
    found = measured(folder, "wgrad")
    if found is None:
        return []
    times = _means(found.points, "padless 1d2d bfloat16", {"torch bf16": wgrad.TORCH})
    times |= _means(found.points, "padless 1d2d float32 +=", {"DeepGEMM, added in float32": wgrad.DEEPGEMM})
    return [Row("FP8 weight gradients", f"{len(found.points)} shapes", times, found.path.name)]
