"""Random problems of `fp4_input_gradient`, gradients of rows through FP4 weights, and what must hold of each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter

import torch

from padless.kernels.launch import KernelChoice
from padless.kernels.sm90_fp4_dgrad.config import BLOCKS_M, FORMATS, Fp4DgradConfig
from padless.ops.checks import as_one_group
from padless.ops.fp4_input_gradient import fp4_input_gradient
from padless.reference.fp4_input_gradient import fp4_input_gradient_reference
from padless.testing.operands import BF16, in_layout
from padless.verify.fuzz import judge as judging
from padless.verify.fuzz import operands, products
from padless.verify.fuzz.case import Change, ends_of, judge_case, whole
from padless.verify.fuzz.operands import Operand
from padless.verify.fuzz.problem import Draw, Options

# Rows, rows past the last group, columns of the result, terms of a sum: tails of both, groups of 0, 1, 127, 129 rows,
# more tiles than CTAs.
_SHAPES: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 0, 32, 8),
    ((0, 0, 0), 3, 96, 144),
    ((5, 0, 130, 1), 3, 352, 136),
    ((127, 128, 129, 1), 0, 288, 400),
    ((0, 64, 65, 63, 0), 7, 544, 1032),
    ((300, 0, 7, 1029, 127), 11, 1024, 1048),
    (tuple((37 * g) % 53 for g in range(40)), 5, 224, 656),
    ((257, 0, 640), 1, 4128, 2064),
)


def constants(draw: Draw) -> Options:
    return {"b": draw.one((*FORMATS,)), "b_layout": draw.one(("plain", "blocked")), "tile": draw.randrange(4)}


def rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    sizes = draw.sizes()
    groups, few, rows = len(sizes), len(sizes) < 20, sum(sizes)
    found: Options = {
        "out": "bfloat16",
        "sizes": sizes,
        "past": draw.past(),
        "n": draw.multiple(32, draw.limits.n if few else 256),
        "k": draw.multiple(8, draw.limits.k if few else 64),
        "b_globals": draw.one((1, groups)),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_row": draw.randrange(min(rows, 64)) if rows and draw.maybe(0.1) else -1,
        "nan_group": draw.randrange(groups) if draw.maybe(0.05) else -1,
        "hostile": [],
        "seed": draw.data_seed(),
        "properties": ["near", draw.one(("change", "change", "change", "bits", "replay"))],
    }
    if draw.backend != "reference" and draw.maybe(0.04):
        found["hostile"] = draw.hostile_ends(groups, rows + found["past"])
    return found


class InputGradient(products.Product):
    """Rows (M, k) times weights (G, k, n), whose codes lie along n."""

    def drawn(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        o = self.o
        a = operands.activation(
            self.place, BF16, self.rows, o["k"], generator, ends=o["hostile"] or self.ends, offs=self.offs,
            gap=o["gaps"][0], nan_row=o["nan_row"],
        )  # fmt: skip
        b = operands.weight(
            self.place, o["b"], self.groups, o["k"], o["n"], generator, layout=o["b_layout"], gap=o["gaps"][1],
            globals_=o["b_globals"], nan_group=o["nan_group"],
        )  # fmt: skip
        return a, b

    def kernel_of(self, tile: int | None = None) -> KernelChoice | None:
        o = self.o
        if tile is not None or not o["tile"] or not self.place.has_kernels:
            return None
        return Fp4DgradConfig(o["b"], block_m=BLOCKS_M[o["tile"] - 1])

    def _made(self, out: torch.Tensor, p: products.Grouped) -> torch.Tensor:
        weights = as_one_group(p.b) if p.offs is None else p.b
        assert p.config is None or isinstance(p.config, Fp4DgradConfig)
        return fp4_input_gradient(p.a, weights, p.offs, out=out, backend=self.place.backend, config=p.config)

    def exact(self) -> judging.Product:
        return judging.exact_grouped(self.a.values, self.b.values.mT, self.spans)

    def near(self, out: torch.Tensor) -> None:
        self.place.judge.product("float64", out, self.exact, judging.BF16_PRECISION)

    def reference(self) -> torch.Tensor:
        """A kernel's float32, or sums in float64, which are rounded once."""
        how, dtype = ("tensor_core", torch.float32) if self.place.has_kernels else ("float64", self.dtype)
        a, b = self.a.plain, self.b.plain
        return fp4_input_gradient_reference(a, b, self.offs, out_dtype=dtype, accumulation=how)[: self.valid]

    def changes(self) -> Iterator[Change]:
        p, plain = self.operands, self.a.plain
        yield "plain operands", partial(self.run, replace(p, a=plain, b=self.b.plain)), whole, whole
        yield "scales blocked", partial(self.run, replace(p, b=in_layout(self.b.plain, "blocked"))), whole, whole
        for group in ends_of(self.sizes):
            its = slice(*self.spans[group])
            a = torch.full_like(plain, math.nan)
            a[its] = plain[its]
            yield "NaN in all other groups", partial(self.run, replace(p, a=a)), itemgetter(its), itemgetter(its)
        yield from self.surroundings()


def lines(arch: str) -> Iterator[Options]:
    """Fixed problems: every kernel on every shape."""
    every: list[Options] = [
        {"b": b, "b_layout": layout, "tile": tile, "out": "bfloat16", "gaps": [0, 0, 0], "seed": 1, "past": 0}
        | {"nan_row": -1, "nan_group": -1, "hostile": [], "b_globals": 1}
        for b, layout, tile in itertools.product(FORMATS, ("plain", "blocked"), range(1, 1 + len(BLOCKS_M)))
    ]
    for seed, (sizes, past, n, k) in enumerate(_SHAPES):
        shape = {"sizes": [*sizes], "past": past, "n": n, "k": k, "seed": seed, "b_globals": len(sizes)}
        yield from (one | shape | {"properties": ["near", "bits", "changes"]} for one in every)
    for one in every:
        for sizes, past, n, k in (((5, 0, 130, 1), 3, 288, 144), ((0, 64, 100), 7, 160, 712)):
            yield one | {"sizes": [*sizes], "past": past, "n": n, "k": k, "properties": []}
        yield one | {"sizes": [300, 0, 7, 1029, 127, 64, 1], "n": 1024, "k": 1040, "properties": ["repeats"]}
        yield one | {"sizes": [100, 0, 57, 99], "n": 288, "k": 400, "properties": ["replay"]}


judge = partial(judge_case, InputGradient)
