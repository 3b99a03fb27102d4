"""Predictions of the clock for whole expert layers on a B200, at problems that others published times of.

    python tools/clock_layers.py            the table of docs/timing_b200.md
    python tools/clock_layers.py --write    the same, put into the page and a record

A layer is its launches in a row: routing, gather and quantization; two grouped products; the sum. Products are
extrapolated from emulated tiles as those of clock_sm100.py are; passes take their bytes at memory's rate; programmatic
launches overlap what stands between two kernels, as far as that was inferred.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass

from clock_h200 import MEASURED
from clock_page import Tables, model_digest, write_block
from clock_sm100 import FORMATS, Problem, chosen, predict, row_bytes_of
from padless.emulator.timing import B200

RECORD = MEASURED / "clock" / "2026-11-24-sm100-layers.json"
TOOLS = ("clock_sm100.py", "clock_layers.py")
SORTED_ALONE = 1024  # slots; another launch sorts more than these
# us of a hand-written kernel and of trtllm-gen on a B200, https://github.com/flashinfer-ai/flashinfer/issues/3218
PUBLISHED = {
    1: (55.7, 190), 8: (112, 238), 32: (223, 329), 128: (255, 387), 1024: (289, 461), 4096: (466, 885),
}  # fmt: skip


@dataclass(frozen=True)
class Model:
    """An expert layer on one GPU, which has ``local`` of the ``experts`` among which each token chooses ``top_k``.
    hidden, intermediate: H and I. activates_apart: between the products a separate launch activates and quantizes."""

    experts: int
    local: int
    top_k: int
    hidden: int
    intermediate: int
    activates_apart: bool = False


DEEPSEEK = Model(256, 32, 8, 7168, 2048)  # DeepSeek-V3's layer, one of eight ranks


@dataclass(frozen=True)
class Layer:
    """Microseconds at the highest and at the lowest clock: of the two products without their launches, of the passes,
    and of all launches; the last is programmatic in the former, in the latter not."""

    products: tuple[tuple[float, float], tuple[float, float]]
    passes: float
    launches: tuple[float, float]

    @property
    def total(self) -> tuple[float, float]:
        """The layer from event to event."""
        fast, slow = (self.passes + self.launches[i] + sum(us[i] for us in self.products) for i in range(2))
        return fast, slow


def sizes_of(model: Model, tokens: int) -> tuple[int, ...]:
    """Rows of the rank's experts that have any: tokens choose among all experts evenly, by expectation."""
    rows = max(round(tokens * model.top_k * model.local / model.experts), 1)
    hit = min(max(round(model.local * (1 - (1 - model.top_k / model.experts) ** tokens)), 1), rows)
    return tuple(rows // hit + (i < rows % hit) for i in range(hit))


def pass_us(model: Model, tokens: int, fmt: str) -> float:
    """Passes at memory's rate: tokens are read and their codes written, rows are read and the sum written; and with an
    activation apart the first product's rows are read and their codes written."""
    h, i, rows, element = model.hidden, model.intermediate, sum(sizes_of(model, tokens)), FORMATS[fmt][0]
    read = tokens * h * 2 + rows * h * 2
    written = rows * row_bytes_of(element, "activation", h) + tokens * h * 2
    if model.activates_apart:
        read += rows * 2 * i * 2
        written += rows * row_bytes_of(element, "activation", i)
    return (read / B200["memory_gb_per_s"] + written / B200["memory_write_gb_per_s"]) / 1e3


def layer_of(model: Model, tokens: int, fmt: str) -> Layer:
    """The layer's launches in a row; the first one is paid from event to event."""
    launch, row = B200["launch_ns"] / 1e3, B200["row_ns"] / 1e3
    products = []
    for n, k in ((2 * model.intermediate, model.hidden), (model.hidden, model.intermediate)):
        problem = Problem(f"{tokens} tokens", fmt, sizes_of(model, tokens), n, k)
        fast, slow = predict(problem, chosen(problem))
        products.append((fast - launch, slow - launch))
    others = 3 + (tokens * model.top_k > SORTED_ALONE) + model.activates_apart
    programmatic = launch + others * row
    return Layer((products[0], products[1]), pass_us(model, tokens, fmt), (programmatic, programmatic + launch - row))


def layers_table() -> Iterator[str]:
    """Predictions beside what was published, as Markdown."""
    parts = "launches | passes | first product | second | layer, predicted"
    yield f"| T | rows, experts with any | format | {parts} | hand-written, published | trtllm-gen, published |"
    yield "|---" * 10 + "|"
    for tokens, published in PUBLISHED.items():
        sizes = sizes_of(DEEPSEEK, tokens)
        for fmt in ("FP8_BLOCK", "MXFP8"):
            layer = layer_of(DEEPSEEK, tokens, fmt)
            first, second = layer.products
            cells = (layer.launches[0], layer.passes, first[0], second[0])
            yield (
                f"| {tokens} | {sum(sizes)}, {len(sizes)} | {fmt} | " + " | ".join(f"{cell:.1f}" for cell in cells)
                + f" | {layer.total[0]:.0f} to {layer.total[1]:.0f} | {published[0]:g} | {published[1]:g} |"
            )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    arguments, say = parser.parse_args(), Tables()
    for line in layers_table():
        say(line)
    if arguments.write:
        write_block("layers", say.lines)
        RECORD.write_text(json.dumps({"model": model_digest(*TOOLS), "lines": say.lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
