"""Calls of plain bfloat16 tensors under judgement: `grouped_gemm`, `gemm` and `grouped_gemm_wgrad`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.reference.bf16 import grouped_gemm_plain_reference, grouped_gemm_wgrad_rows_reference
from padless.verify.bf16.problems import Rows, padded, permuted, poisoned
from padless.verify.fuzz.case import Change, ends_of, judge_case, turned, whole
from padless.verify.fuzz.judge import FLOAT32_PRECISION, exact_grouped
from padless.verify.fuzz.operands import among_nan, spans
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.training import Gradient, gradient_properties

# The tensor core keeps 25 fractional bits of the largest of 16 products, the reference float64.
_PRECISION = FLOAT32_PRECISION._replace(floor=2.0**-126)
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


@dataclass(frozen=True)
class Plain:
    """a (M, K) and b (G, N, K), and where groups end. offs None: b (N, K) of a dense product."""

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor | None
    valid: int


class Product:
    """`grouped_gemm` of a problem's options, among NaN. hostile: with offsets that are no partition."""

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place, self.sizes = o, place, o["sizes"]
        self.ends, self.dtype = _ends(self.sizes), DTYPES[o["out"]]
        valid, rows = self.ends[-1], self.ends[-1] + o["past"]
        self._spans = spans(self.ends, rows)
        generator = place.generator(o["seed"])
        self.a = _normal(place, (rows, o["k"]), generator, o["wide"])
        self.a[valid:] = math.nan
        self.b = _normal(place, (len(self.sizes), o["n"], o["k"]), generator, o["wide"])
        if 0 <= o["nan_row"] < rows:
            self.a[o["nan_row"], o["k"] // 2].fill_(math.nan)
        if 0 <= o["nan_group"] < len(self.sizes):
            self.b[o["nan_group"], o["n"] // 2, o["k"] // 2].fill_(math.nan)
        stored = self.b.mT.contiguous() if o["n_major"] else self.b
        given_a, given_b = (
            among_nan(place, t, gap // 2, math.nan) for t, gap in zip((self.a, stored), o["gaps"], strict=False)
        )
        self.operands = Plain(given_a, given_b.mT if o["n_major"] else given_b, self._offs(self.ends), valid)
        config = None
        if o["tile"] and place.has_kernels:
            block_n, slabs = _TILES[o["tile"] - 1]
            slabs = 1 if self.dtype != torch.float32 and block_n == 128 else slabs
            config = Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=self.dtype)
        self.how: dict[str, Any] = {"backend": place.backend, "config": config}

    def _offs(self, ends: list[int]) -> torch.Tensor:
        made = self.place.ends(ends)
        return made.long() if self.o["offs64"] else made

    def run(self, operands: Plain) -> torch.Tensor:
        p, judge = operands, self.place.judge
        guarded = self.place.output(p.a.shape[0], self.o["n"], self.dtype, self.o["gaps"][2])
        out = self._made(guarded.out, p)
        judge.wrong("the result is not out", out is not guarded.out)
        judge.written("fences", guarded, p.valid)
        return out[: p.valid]

    def hostile(self) -> None:
        """Wrong offsets: nothing outside of the output is written."""
        guarded = self.place.output(self.a.shape[0], self.o["n"], self.dtype, self.o["gaps"][2])
        self._made(guarded.out, replace(self.operands, offs=self._offs(self.o["hostile"])))
        self.place.judge.written("fences with wrong offsets", guarded, anything=True)

    def _made(self, out: torch.Tensor, p: Plain) -> torch.Tensor:
        if p.offs is None:
            return gemm(p.a, p.b, out=out, **self.how)
        return grouped_gemm(p.a, p.b, p.offs, out=out, **self.how)

    def make(self, out: torch.Tensor) -> None:
        self._made(out, self.operands)

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        """Rows past the last group are as `run` found them."""
        past = fresh.new_full((self.o["past"], self.o["n"]), math.nan)
        return torch.cat([fresh, past])

    def near(self, out: torch.Tensor) -> None:
        exact = partial(exact_grouped, self.a.double(), self.b.double(), self._spans)
        self.place.judge.product("float64", out, exact, _PRECISION)

    def reference(self) -> torch.Tensor:
        how = "tensor_core" if self.place.has_kernels else "float64"
        p = self.operands
        assert p.offs is not None
        return grouped_gemm_plain_reference(p.a, p.b, p.offs, out_dtype=torch.float32, accumulation=how)[: p.valid]

    def changes(self) -> Iterator[Change]:
        p, valid = self.operands, self.operands.valid
        yield "contiguous operands", partial(self.run, replace(p, a=self.a, b=self.b)), whole, whole
        yield "weights in the other order", partial(self.run, replace(p, b=_other_order(p.b))), whole, whole
        order = Plain(self.a[:valid].flip(0), self.b.flip(0), self._offs(_ends(self.sizes[::-1])), valid)
        yield "groups in reverse", partial(self.run, order), turned, whole
        for group in ends_of(self.sizes):
            start, end = self._spans[group]
            rows = itemgetter(slice(start, end))
            a = torch.full_like(self.a, math.nan)
            a[start:end] = self.a[start:end]
            yield "NaN in all other groups", partial(self.run, replace(p, a=a)), rows, rows
            for first in sorted({start, max(start, end - 9), end - 1}):
                own, some = a[first:end].clone(), itemgetter(slice(first, end))
                alone = Plain(own, p.b[group][None], self._offs([end - first]), end - first)
                yield "rows alone", partial(self.run, alone), whole, some
                yield "as a dense product", partial(self.run, replace(alone, b=p.b[group], offs=None)), whole, some


def _other_order(b: torch.Tensor) -> torch.Tensor:
    """The same weights, of which the other of N and K is contiguous."""
    return b.contiguous() if b.stride(2) != 1 else b.mT.contiguous().mT


def product_lines(arch: str) -> Iterator[Options]:
    """Fixed problems: every kernel on every shape, normal values and values over forty powers of two."""
    for out, tile in itertools.product(DTYPES, range(1, 1 + len(_TILES))):
        one: Options = {"out": out, "tile": tile, "n_major": False, "gaps": [0, 0, 0], "seed": tile, "past": 0}
        one |= {"nan_row": -1, "nan_group": -1, "offs64": False, "wide": False, "hostile": []}
        for (sizes, past, n, k), wide in itertools.product(_PRODUCTS, (False, True)):
            checked = ["bits", "changes"] if wide else ["near", "bits", "changes"]
            yield one | {"sizes": [*sizes], "past": past, "n": n, "k": k, "wide": wide, "properties": checked}
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
    for out, tile in itertools.product(("bfloat16", "float32"), range(1, 1 + len(_WGRAD_TILES))):
        one: Options = {"out": out, "tile": tile, "accumulate": out == "float32", "gaps": [0, 0, 0], "seed": tile}
        one |= {"nan_group": -1, "offs64": False, "wide": False, "past": 0}
        for (sizes, past, n, k), wide in itertools.product(_WGRADS, (False, True)):
            checked = ["bits"] if wide else ["near", "bits", "changes"]
            yield one | {"sizes": [*sizes], "past": past, "n": n, "k": k, "wide": wide, "properties": checked}
        for sizes, past, n, k in (((5, 0, 130, 1), 3, 272, 144), ((0, 64, 700), 7, 144, 208)):
            yield one | {"sizes": [*sizes], "past": past, "n": n, "k": k, "properties": []}
        yield one | {"sizes": [300, 0, 7, 1029, 127, 64, 1], "n": 1008, "k": 1040, "properties": ["repeats"]}
        for four in ([100, 0, 57, 99], [0, 0, 256, 0]):
            properties = ["replay", "microbatches"] if out == "float32" else ["replay"]
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
            self.near_product(out[group], rows.dy[start:end].double().t(), rows.x[start:end].double(), _PRECISION)

    def reference(self) -> torch.Tensor:
        (rows,) = self.operands
        how = "tensor_core" if self.place.has_kernels else "float64"
        return grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=torch.float32, accumulation=how)

    def changes(self) -> Iterator[Change]:
        (rows,) = self.operands
        order = range(self.shape[0])[::-1]
        yield "padded groups", partial(self.run, (padded(rows),)), whole, whole
        yield "groups in reverse behind one of NaN", partial(self.run, (permuted(rows, order),)), _behind_one, turned
        for group in ends_of(self.o["sizes"]):
            others, its = (poisoned(rows, group),), itemgetter(group)
            yield "NaN in all other groups", partial(self.run, others), its, its


def _behind_one(t: torch.Tensor) -> torch.Tensor:
    return t[1:]


judge_wgrad = partial(judge_case, Wgrad)
