"""Table, record and picture of a training run."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from padless.demo.train.curves import Training
from padless.demo.train.parity import verdicts

COLOURS = ("#33658a", "#c0392b", "#2f9c95", "#c99a1b", "#7a5195", "#6b8e23", "#d45087", "#555555")
SMOOTHED = 20  # steps whose mean a drawn point is


def print_training(console: Console, training: Training) -> None:
    """One line a recipe: loss at the end, difference from the first recipe, and what a step took."""
    size = training.size
    where = torch.cuda.get_device_name() if training.device == "cuda" else "the CPU, with the reference backend"
    steps = len(training.curves[0].losses)
    console.print(
        f"\n{size.layers} layers of {size.experts} experts, {size.top_k} a token, hidden {size.hidden}; "
        f"{size.tokens:,} bytes a step of {training.source}; {steps} steps on {where}. "
        f"The experts do {size.expert_share:.0%} of the multiplications."
    )
    first = training.curves[0].recipe
    table = Table(box=None, pad_edge=False)
    for column in ("recipe", "loss, last fifth", f"against {first}", "step", "bytes/s", "a step takes"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for recipe in dict.fromkeys(c.recipe for c in training.curves):
        curves = training.of(recipe)
        last = sum(c.last for c in curves) / len(curves)
        seconds = sorted(c.step_seconds for c in curves)[len(curves) // 2]
        difference = "" if recipe == first else f"{training.difference(recipe, first):+.2%}"
        memory = "" if curves[0].step_bytes is None else f"{curves[0].step_bytes / 2**30:.1f} GiB"
        speed = f"{size.tokens / seconds:,.0f}"
        table.add_row(recipe, f"{last:.4f}", difference, f"{seconds * 1e3:.1f} ms", speed, memory)
    console.print(table)
    if len(training.of(first)) > 1:
        console.print(f"Over seeds, {first}'s last losses spread by {training.spread(first):.2%} (standard deviation).")
        for verdict in verdicts(training):
            seeds = ", ".join(f"{d:+.2%}" for d in verdict.by_seed)
            says = "learns as well" if verdict.holds else "does not learn as well"
            console.print(f"{verdict.recipe} {says}: {seeds}; at most {verdict.limit:.2%}, and the spread, is allowed.")
    if training.device == "cpu":
        console.print("Step times of the reference on a CPU say nothing about a GPU.")


def save_training(console: Console, training: Training, out: Path) -> None:
    """out/train-demo.json, and out/train-demo.png where matplotlib is installed."""
    path = save_record(
        out / "train-demo.json", "train_demo", training.device,
        source=training.source, size=asdict(training.size), curves=[asdict(c) for c in training.curves],
        verdicts=[asdict(v) | {"holds": v.holds} for v in verdicts(training) if len(v.by_seed) > 1],
    )  # fmt: skip
    try:
        draw_losses(training, out / "train-demo.png")
    except ModuleNotFoundError as error:
        console.print(f"No picture: {error.name} is not installed. Losses: {path}")
    else:
        console.print(f"Losses: {path}, picture: {out / 'train-demo.png'}")


def save_record(path: Path, kind: str, device: str, **fields: Any) -> Path:
    """Writes a run's fields as one JSON object, with what it ran on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "kind": kind, "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None, "torch": torch.__version__,
    }  # fmt: skip
    path.write_text(json.dumps(record | fields) + "\n")
    return path


def draw_losses(training: Training, path: Path) -> None:
    """Write a PNG: losses over steps, and below their difference from the first recipe's on the same batches."""
    import matplotlib

    matplotlib.use("Agg")  # files only: a screen is never needed
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6.5), dpi=140, sharex=True, height_ratios=[2, 1], layout="constrained"
    )
    names = list(dict.fromkeys(c.recipe for c in training.curves))
    base = training.of(names[0])
    for name, colour in zip(names, COLOURS, strict=False):
        for number, (curve, other) in enumerate(zip(training.of(name), base, strict=True)):
            losses, others = _smooth(curve.losses), _smooth(other.losses)
            steps = range(len(curve.losses) - len(losses) + 1, len(curve.losses) + 1)
            above.plot(steps, losses, color=colour, linewidth=1.4, label=name if number == 0 else None)
            if name != names[0]:
                ratios = [100 * (a / b - 1) for a, b in zip(losses, others, strict=True)]
                below.plot(steps, ratios, color=colour, linewidth=1.2)
    above.set_ylabel("loss, nats a byte")
    above.legend(frameon=False)
    size = training.size
    above.set_title(
        f"{size.layers} layers x {size.experts} experts, hidden {size.hidden}, the same batches and seeds",
        loc="left", fontsize=10.5,
    )  # fmt: skip
    below.axhline(0, color="#888888", linewidth=0.8)
    below.set_ylabel(f"against {names[0]}, %")
    below.set_xlabel(f"step (means of {min(SMOOTHED, len(training.curves[0].losses))})")
    for axes in (above, below):
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _smooth(losses: list[float]) -> list[float]:
    window = min(SMOOTHED, len(losses))
    sums = torch.tensor(losses, dtype=torch.float64).cumsum(0)
    sums = torch.cat([sums.new_zeros(1), sums])
    smoothed: list[float] = ((sums[window:] - sums[:-window]) / window).tolist()
    return smoothed
