"""Gradients of MXFP8 along a training run, next to those of exact products, and planted faults that they have to show.

    python tools/gradient_parity.py [--steps 120] [--every 10]

Trains a model of one layer in MXFP8 throughout. Every so many steps the same weights and the same batch get their
gradients again: with weight gradients in bfloat16, of operands that are the same to the bit, and with each fault. The
expert weights' gradients are compared expert by expert, added up over the steps: the error in dB, and the factor along
the exact gradient. A loss at the end tells less: batches differ by as much as the gradients are, so that a fault of 15
dB is lost in the spread of seeds. Prints Markdown; fails where MXFP8 is not within its limits or a fault is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from padless.demo.train import run as demo
from padless.demo.train.model import ModelSize
from padless.demo.train.text import draw_batch, help_topics
from padless.formats import BlockScaledTensor
from padless.nn import RECIPES, Recipe, experts_function, linear_function, weight_gradient
from padless.nn.quantizers import quantized

# About 128 rows an expert: four blocks along the tokens, and sizes on both sides of a tile. N and K differ.
SIZE = ModelSize(layers=1, hidden=128, heads=2, experts=4, top_k=2, intermediate=96, length=64, batch=4)


@dataclass(frozen=True)
class Limits:
    """The bounds of every expert's gradient of either weight.

    db: the least signal over error. factor: the most that the factor along the exact gradient may differ from 1.
    """

    db: float
    factor: float


# From the format, before anything was run. An e4m3 code is off by at most 1/16 of the value, evenly: 7.0e-4 of its
# square on average over a binade, 31.5 dB; a product of two codes has twice that error, 28.5 dB, and a sum of products
# no more. 2.5 dB are left for terms that cancel. Values are denser at the lower end of a step, which lengthens a product
# by 0.15%.
LIMITS = Limits(26.0, 0.005)


# --- faults ----------------------------------------------------------------------------------------------


@contextmanager
def of_columns(change: Callable[[Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Weight gradients are multiplied with other scales: change((codes, scale) of dY, those of X)."""
    right = weight_gradient.wgrad

    def wrong(dy: Any, x: Any, *others: Any) -> torch.Tensor:
        return right(*(change(dy, x) if isinstance(dy, tuple) else (dy, x)), *others)

    with patch.object(weight_gradient, "wgrad", wrong):
        yield


def rolled(by: int, dim: int, dy: Any, x: Any) -> tuple[Any, Any]:
    """The scales of dY moved on."""
    return (dy[0], _bytes(dy[1]).roll(by, dim).view(dy[1].dtype)), x


def exchanged(dy: Any, x: Any) -> tuple[Any, Any]:
    """dY with the scales of X and X with those of dY, feature by feature, from the first one again where they end."""
    scales = [
        _bytes(other[1])[:, torch.arange(of[0].shape[1]) % other[0].shape[1]].contiguous()
        for of, other in ((dy, x), (x, dy))
    ]
    return (dy[0], scales[0].view(dy[1].dtype)), (x[0], scales[1].view(dy[1].dtype))


@contextmanager
def columns_of_other_rows(by: int) -> Iterator[None]:
    """Groups end by so many rows elsewhere when values are quantized along the tokens."""
    right = linear_function.mx_rows_and_columns

    def wrong(x: torch.Tensor, offs: torch.Tensor, rows: bool) -> Any:
        return right(x, (offs + by).clamp(0, x.shape[0]), rows)

    with patch.object(linear_function, "mx_rows_and_columns", wrong):
        yield


@contextmanager
def of_products(of_weight: bool, dim: int) -> Iterator[None]:
    """Rows or weights of forward and input-gradient products have the scales of the neighbour along a dimension."""
    right = experts_function.product

    def moved(t: Any) -> Any:
        return quantized(t.data, _bytes(t.scale).roll(1, dim).view(t.scale.dtype), format=t.format)

    def wrong(a: Any, w: Any, *others: Any, **options: Any) -> torch.Tensor:
        if isinstance(a, BlockScaledTensor):
            a, w = (a, moved(w)) if of_weight else (moved(a), w)
        return right(a, w, *others, **options)

    with patch.object(experts_function, "product", wrong):
        yield


FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "columns: scales of the block before": partial(of_columns, partial(rolled, 1, 0)),
    "columns: scales of the group before": partial(of_columns, partial(rolled, 4, 0)),  # a tile of 128 tokens
    "columns: scales of the feature before": partial(of_columns, partial(rolled, 1, 1)),
    "columns: scales of dY and X exchanged": partial(of_columns, exchanged),
    "columns: quantized with the row before the group": partial(columns_of_other_rows, -1),
    "columns: quantized with the row behind the group": partial(columns_of_other_rows, 1),
    "rows: scales of the row before": partial(of_products, False, 0),
    "rows: scales of the block before": partial(of_products, False, 1),
    "weights: scales of the group before": partial(of_products, True, 0),
    "weights: scales of the row before": partial(of_products, True, 1),
    "weights: scales of the block before": partial(of_products, True, 2),
}


def _bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.uint8)


# --- the run ---------------------------------------------------------------------------------------------


class Compared:
    """Gradients of experts next to exact ones, added up over steps."""

    def __init__(self) -> None:
        self.sums = torch.zeros(())

    def add(self, got: torch.Tensor, exact: torch.Tensor) -> None:
        """(experts, values) each."""
        got, exact = got.double(), exact.double()
        pairs = ((exact, exact), (got - exact, got - exact), (got, exact))
        self.sums = self.sums + torch.stack([(a * b).sum(1) for a, b in pairs])

    @property
    def db(self) -> float:
        """The worst expert's."""
        return float((10 * torch.log10(self.sums[0] / self.sums[1])).min())

    @property
    def off(self) -> float:
        """The largest difference from 1 of the factor along the exact gradient."""
        return float((self.sums[2] / self.sums[0] - 1).abs().max())

    def within(self, limits: Limits) -> bool:
        """NaN is not."""
        return self.db >= limits.db and self.off <= limits.factor


def gradients(model: Any, recipe: Recipe, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """(experts, values) of both weights of the layer in this recipe; the model's own gradients are gone."""
    experts = model.blocks[0].experts
    kept, experts.recipe = experts.recipe, recipe
    model.zero_grad(set_to_none=True)
    model.loss(*batch)[0].backward()
    experts.recipe = kept
    return {name: getattr(experts, name).grad.flatten(1).clone() for name in ("w13", "w2")}


def run(steps: int, every: int) -> dict[tuple[str, str], Compared]:
    """(fault or "", weight) to how the gradients compare with those of weight gradients in bfloat16."""
    contender = demo.Contender("mxfp8", RECIPES["mxfp8"], SIZE, 0, steps, "cpu")
    text, generator = help_topics(), torch.Generator().manual_seed(0)
    found: dict[tuple[str, str], Compared] = {}
    for step in range(steps):
        batch = draw_batch(text, SIZE.batch, SIZE.length, generator)
        if step % every == every - 1:
            exact = gradients(contender.model, RECIPES["mxfp8_bf16_wgrad"], batch)
            for fault in ("", *FAULTS):
                with FAULTS[fault]() if fault else nullcontext():
                    got = gradients(contender.model, RECIPES["mxfp8"], batch)
                for weight, gradient in exact.items():
                    found.setdefault((fault, weight), Compared()).add(got[weight], gradient)
        contender.step(*batch)
    return found


def holds(found: dict[tuple[str, str], Compared], fault: str = "") -> bool:
    """Whether both weights' gradients with a fault, or with none, are within the limits."""
    return all(compared.within(LIMITS) for (of, _), compared in found.items() if of == fault)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=10)
    options = parser.parse_args()
    found = run(options.steps, options.every)
    print("| | W13 | W2 | holds |\n|---|---|---|---|")
    for fault in ("", *FAULTS):
        cells = [found[fault, weight] for weight in ("w13", "w2")]
        shown = " | ".join(f"{c.db:.1f} dB, {c.off:.2%}" for c in cells)
        print(f"| {fault or 'MXFP8'} | {shown} | {'yes' if holds(found, fault) else 'no'} |")
    return int(any(holds(found, fault) == bool(fault) for fault in ("", *FAULTS)))


if __name__ == "__main__":
    sys.exit(main())
