"""Calls of plain bfloat16 tensors under judgement: `grouped_gemm`, `gemm` and `grouped_gemm_wgrad`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from padless.kernels.launch import KernelChoice
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.bf16 import grouped_gemm_plain_reference, grouped_gemm_wgrad_rows_reference
from padless.testing.gradients import Rows, padded_rows, permuted_rows, poisoned_rows
from padless.verify.fuzz import products
from padless.verify.fuzz.case import Change, ends_of, judge_case, whole
from padless.verify.fuzz.judge import BF16_PRECISION
from padless.verify.fuzz.operands import Operand, among_nan
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.training import Gradient, gradient_properties

_TILES = ((256, 1), (128, 1), (256, 2))  # block_n and piece_slabs
# M, N and K differ everywhere; K of every length of a last step; groups of 0, 1, 127, 129 rows; more tiles than CTAs.
_PRODUCTS: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 0, 16, 8),
    ((0, 0, 0), 3, 80, 144),
    ((5, 0, 130, 1), 3, 264, 136),
    ((127, 128, 129, 1), 0, 272, 400),
    ((0, 64, 65, 63, 0), 7, 520, 1032),
    ((300, 0, 7, 1029, 127), 11, 1008, 1048),
    ((4112,), 0, 528, 656),
    (tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
    ((257, 0, 640), 1, 4104, 2064),
)


def product_constants(draw: Draw) -> Options:
    return {"out": draw.one(tuple(DTYPES)), "n_major": draw.maybe(0.4), "tile": draw.randrange(4)}


def product_rest(draw: Draw, constants: Options) -> Options:
    sizes = draw.sizes()
    groups, few = len(sizes), len(sizes) < 20
    rows, past = sum(sizes), draw.past()
    step = max(8 if constants["n_major"] else 1, 16 // DTYPES[constants["out"]].itemsize)
    found: Options = {
        "sizes": sizes,
        "past": past,
        "n": draw.multiple(step, draw.limits.n if few else 64),
        "k": draw.multiple(8, draw.limits.k if few else 256),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_row": draw.randrange(min(rows, 64)) if rows and draw.maybe(0.1) else -1,
        "nan_group": draw.randrange(groups) if draw.maybe(0.05) else -1,
        "offs64": draw.maybe(0.1),
        "wide": False,
        "hostile": [],
        "seed": draw.data_seed(),
        "properties": ["near", draw.one(("change", "change", "change", "bits", "replay"))],
    }
    if draw.backend != "reference" and draw.maybe(0.04):
        found["hostile"] = draw.hostile_ends(groups, rows + past)
    return found


def _normal(place: Place, shape: tuple[int, ...], generator: torch.Generator, wide: bool = False) -> torch.Tensor:
    """bfloat16 numbers, every row of them times a power of two of its own; every number over forty of them (wide)."""
    span, each = (20, shape) if wide else (6, (*shape[:-1], 1))
    powers = torch.randint(-span, span + 1, each, device=place.device, generator=generator)
    return (torch.randn(shape, device=place.device, generator=generator) * torch.exp2(powers.float())).bfloat16()


def _ends(sizes: list[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


class Product(products.Product):
    """`grouped_gemm` of plain tensors."""

    def drawn(self, generator: torch.Generator) -> tuple[Operand, Operand]:
        o, place = self.o, self.place
        a = _normal(place, (self.rows, o["k"]), generator, o["wide"])
        a[self.valid :] = math.nan
        b = _normal(place, (self.groups, o["n"], o["k"]), generator, o["wide"])
        if 0 <= o["nan_row"] < self.rows:
            a[o["nan_row"], o["k"] // 2].fill_(math.nan)
        if 0 <= o["nan_group"] < self.groups:
            b[o["nan_group"], o["n"] // 2, o["k"] // 2].fill_(math.nan)
        stored = b.mT.contiguous() if o["n_major"] else b
        given_a, given_b = (
            among_nan(place, t, gap // 2, math.nan) for t, gap in zip((a, stored), o["gaps"], strict=False)
        )
        return Operand(a, given_a), Operand(b, given_b.mT if o["n_major"] else given_b)

    def kernel_of(self, tile: int | None = None) -> KernelChoice | None:
        o = self.o
        if not o["tile"] or not self.place.has_kernels:
            return None
        block_n, slabs = _TILES[o["tile"] - 1]
        slabs = 1 if self.dtype != torch.float32 and block_n == 128 else slabs
        return Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=self.dtype)

    def near(self, out: torch.Tensor) -> None:
        self.place.judge.product("float64", out, self.exact, BF16_PRECISION)

    def reference(self) -> torch.Tensor:
        how, p = "tensor_core" if self.place.has_kernels else "float64", self.operands
        return grouped_gemm_plain_reference(p.a, p.b, self.offs, out_dtype=torch.float32, accumulation=how)[: p.valid]

    def changes(self) -> Iterator[Change]:
        p, plain = self.operands, self.a.plain
        yield "contiguous operands", partial(self.run, replace(p, a=plain, b=self.b.plain)), whole, whole
        yield "weights in the other order", partial(self.run, replace(p, b=_other_order(p.b))), whole, whole
        for group in ends_of(self.sizes):
            its = slice(*self.spans[group])
            a = torch.full_like(plain, math.nan)
            a[its] = plain[its]
            yield "NaN in all other groups", partial(self.run, replace(p, a=a)), itemgetter(its), itemgetter(its)
        yield from self.surroundings()


def _other_order(b: torch.Tensor) -> torch.Tensor:
    """The same weights, of which the other of N and K is contiguous."""
    return b.contiguous() if b.stride(2) != 1 else b.mT.contiguous().mT


def product_lines(arch: str) -> Iterator[Options]:
    """Fixed problems: every kernel on every shape, normal values and values over forty powers of two."""
    every: list[Options] = [
        {"out": out, "tile": tile, "n_major": False, "gaps": [0, 0, 0], "seed": 1, "past": 0, "nan_row": -1}
        | {"nan_group": -1, "offs64": False, "wide": False, "hostile": []}
        for out, tile in itertools.product(DTYPES, range(1, 1 + len(_TILES)))
    ]
    for (seed, (sizes, past, n, k)), wide in itertools.product(enumerate(_PRODUCTS), (False, True)):
        shape = {"sizes": [*sizes], "past": past, "n": n, "k": k, "wide": wide, "seed": seed}
        properties = ["bits", "changes"] if wide else ["near", "bits", "changes"]
        yield from (one | shape | {"properties": properties} for one in every)
    for one in every:
        for major in (False, True):
            small = one | {"n_major": major, "properties": []}
            yield small | {"sizes": [5, 0, 130, 1], "past": 3, "n": 272, "k": 144}
            yield small | {"sizes": [0, 64, 100], "past": 7, "n": 144, "k": 712}
        yield one | {"sizes": [300, 0, 7, 1029, 127, 64, 1], "n": 1008, "k": 1040, "properties": ["repeats"]}
        yield one | {"sizes": [100, 0, 57, 99], "n": 272, "k": 400, "properties": ["replay"]}


judge_product = partial(judge_case, Product)


# --- weight gradients --------------------------------------------------------------------------------------


# M, N and K differ everywhere; every length of a last block; groups of 0, 1, 127, 129 rows; more tiles than CTAs; rows
# of 16 bytes and more, and K that no tile divides.
_WGRADS: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 0, 16, 48),
    ((0, 0, 0), 3, 80, 144),
    ((5, 0, 130, 1), 3, 264, 136),
    ((127, 128, 129, 1), 0, 272, 400),
    ((0, 64, 65, 63, 0), 7, 520, 384),
    ((15, 16, 17, 31, 32, 33, 47, 48, 49), 0, 152, 208),
    ((300, 0, 7, 1029, 127), 11, 1008, 1048),
    ((4112,), 0, 528, 656),
    (tuple((37 * g) % 53 for g in range(40)), 5, 200, 656),
    ((257, 0, 640), 1, 2064, 4104),
)


_WGRAD_TILES = ((256, 32, 2), (256, 32, 1), (128, 32, 1), (256, 64, 1))  # block_n, block_t, piece_slabs


def wgrad_lines(arch: str) -> Iterator[Options]:
    """Fixed problems: every kernel on every shape, stored and accumulated."""
    every: list[Options] = [
        {"out": out, "tile": tile, "accumulate": out == "float32", "gaps": [0, 0, 0], "seed": 1, "past": 0}
        | {"nan_group": -1, "offs64": False, "wide": False}
        for out, tile in itertools.product(("bfloat16", "float32"), range(1, 1 + len(_WGRAD_TILES)))
    ]
    for (seed, (sizes, past, n, k)), wide in itertools.product(enumerate(_WGRADS), (False, True)):
        shape = {"sizes": [*sizes], "past": past, "n": n, "k": k, "wide": wide, "seed": seed}
        properties = ["bits"] if wide else ["near", "bits", "changes"]
        yield from (one | shape | {"properties": properties} for one in every)
    for one in every:
        for sizes, past, n, k in (((5, 0, 130, 1), 3, 272, 144), ((0, 64, 700), 7, 144, 208)):
            yield one | {"sizes": [*sizes], "past": past, "n": n, "k": k, "properties": []}
        yield one | {"sizes": [300, 0, 7, 1029, 127, 64, 1], "n": 1008, "k": 1040, "properties": ["repeats"]}
        for four in ([100, 0, 57, 99], [0, 0, 256, 0]):
            properties = ["replay", "microbatches"] if one["accumulate"] else ["replay"]
            yield one | {"sizes": four, "n": 272, "k": 400, "properties": properties}


def wgrad_constants(draw: Draw) -> Options:
    accumulate = draw.maybe(0.4)
    out = "float32" if accumulate else draw.one(("bfloat16", "float32"))
    return {"out": out, "accumulate": accumulate, "tile": draw.one((0, 0, 1, 2, 3, 4))}


def wgrad_rest(draw: Draw, constants: Options) -> Options:
    sizes = draw.sizes(5)
    return {
        "sizes": sizes,
        "past": draw.past(),
        "n": max(16, draw.multiple(8, draw.limits.n)),
        "k": max(16, draw.multiple(8, min(draw.limits.k, 2 * draw.limits.n))),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_group": draw.randrange(len(sizes)) if draw.maybe(0.1) else -1,
        "offs64": draw.maybe(0.1),
        "wide": False,
        "seed": draw.data_seed(),
        "properties": gradient_properties(draw, constants),
    }


class Wgrad(Gradient):
    """Of bf16 rows."""

    ways = (padded_rows, permuted_rows, poisoned_rows)

    def __init__(self, o: Options, place: Place) -> None:
        sizes, ends, generator = o["sizes"], _ends(o["sizes"]), place.generator(o["seed"])
        dy, x = (_normal(place, (ends[-1] + o["past"], size), generator, o["wide"]) for size in (o["n"], o["k"]))
        for operand in (dy, x):
            operand[ends[-1] :] = math.nan
        if 0 <= o["nan_group"] < len(sizes) and sizes[o["nan_group"]]:
            dy[ends[o["nan_group"]] - 1, o["n"] // 2].fill_(math.nan)
        super().__init__(o | {"gap": o["gaps"][2]}, place, generator)
        dy, x = (among_nan(place, t, gap // 2, math.nan) for t, gap in zip((dy, x), o["gaps"], strict=False))
        self.operands = (Rows(dy, x, place.ends(ends).long() if o["offs64"] else place.ends(ends)),)
        if o["tile"] and place.has_kernels:
            n, t, slabs = _WGRAD_TILES[o["tile"] - 1]
            self.config = Bf16WgradConfig(block_n=n, block_t=t, piece_slabs=slabs, out_dtype=self.dtype)

    def call(self, operands: Any, **how: Any) -> torch.Tensor:
        (rows,) = operands
        return grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, **how)

    def near(self, out: torch.Tensor) -> None:
        (rows,) = self.operands
        for group, (start, end) in enumerate(rows.groups):
            self.near_product(out[group], rows.dy[start:end].double().t(), rows.x[start:end].double(), BF16_PRECISION)

    def reference(self) -> torch.Tensor:
        (rows,) = self.operands
        how = "tensor_core" if self.place.has_kernels else "float64"
        return grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=torch.float32, accumulation=how)


judge_wgrad = partial(judge_case, Wgrad)
