"""Exactness of FP8 weight gradients of a model in training, with a scale per 128 x 128 of the inputs and per 1 x 128.

    python tools/wgrad_sqnr.py [--steps 60] [--every 20]

Trains the small model of `padless train-demo` in bf16 and, every so many steps, takes the operands of every weight
gradient: what the two modes of `grouped_gemm_wgrad` make of them, against float64, in dB (signal to quantization noise).
The sums are float64's, so that only the quantization is judged. Prints Markdown.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from typing import Any

import torch

from padless.demo.train import run as demo
from padless.demo.train.text import draw_batch, help_topics
from padless.layouts import GroupedColumns
from padless.nn import RECIPES, weight_gradient
from padless.quantization.rows_columns import quantize_rows_columns
from padless.reference.wgrad import grouped_gemm_wgrad_reference

MODES = {"1d2d": (128, 128), "1d1d": (1, 128)}
OUTLIER, EVERY_FEATURE = 1024.0, 50


def columns_of(x: torch.Tensor, offs: torch.Tensor, block: tuple[int, int]) -> GroupedColumns:
    """x (M, features) quantized along the tokens of each group."""
    return quantize_rows_columns(x, offs, column_block=block, rows=False)[1]


def gradient(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """(G, N, K) float64."""
    ends = [0, *offs.tolist()]
    return torch.stack([dy[s:e].double().t() @ x[s:e].double() for s, e in itertools.pairwise(ends)])


def sqnr(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal to noise in dB."""
    return float(10 * torch.log10(exact.square().sum() / (got - exact).square().sum()))


def judged(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor) -> dict[str, float]:
    """dB by mode, and with some features of x made much larger, of the features that were left."""
    found = {}
    large = x.clone()
    large[:, ::EVERY_FEATURE] *= OUTLIER
    ordinary = torch.ones(x.shape[1], dtype=torch.bool)
    ordinary[::EVERY_FEATURE] = False
    exact = gradient(dy, x, offs)
    dy_columns = columns_of(dy, offs, (1, 128))
    for mode, block in MODES.items():
        for name, of in ((mode, x), (f"{mode}, outliers", large)):
            got = grouped_gemm_wgrad_reference(
                dy_columns, columns_of(of, offs, block), out_dtype=torch.float64, accumulation="float64"
            )
            found[name] = sqnr(got, exact) if of is x else sqnr(got[..., ordinary], exact[..., ordinary])
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    options = parser.parse_args()
    collected: dict[str, list[dict[str, float]]] = defaultdict(list)
    looking = [False]
    original = weight_gradient.wgrad

    def watched(dy: Any, x: Any, offs: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if looking[0]:
            name = "W2" if dy.shape[1] == demo.SMALL.hidden else "W13"
            collected[name].append(judged(dy.detach(), x.detach(), offs))
        return original(dy, x, offs, dtype)

    weight_gradient.wgrad = watched  # type: ignore[assignment]
    contender = demo.Contender("bf16", RECIPES["bf16"], demo.SMALL, 0, options.steps, "cpu")
    text, generator = help_topics(), torch.Generator().manual_seed(0)
    for step in range(options.steps):
        looking[0] = step % options.every == options.every - 1
        contender.step(*draw_batch(text, demo.SMALL.batch, demo.SMALL.length, generator))
    names = list(next(iter(collected.values()))[0])
    print(f"| weight | gradients | {' | '.join(names)} |\n|---|---|{'---|' * len(names)}")
    for weight, found in sorted(collected.items()):
        cells = [f"{sum(f[n] for f in found) / len(found):.2f}" for n in names]
        print(f"| {weight} | {len(found)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
