"""Calls of plain bfloat16 tensors under judgement: `grouped_gemm`, `gemm` and `grouped_gemm_wgrad`."""

from __future__ import annotations

import math
import random
from typing import Any

import torch

from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.verify.fuzz.operands import among_nan, spans
from padless.verify.fuzz.place import Guarded, Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

# Part of the sum of |a * b| that a sum may be off by: the tensor core keeps 25 fractional bits of the largest of 16
# products, the reference float64.
_SUM = 2.0**-17
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
_TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-126}
BESIDE = ("alone", "alone", "reversed", "gemm", "layout", "dense")
_TILES = ((256, 1), (128, 1), (256, 2))  # block_n and piece_slabs


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
        "beside": draw.one(BESIDE),
        "offs64": draw.maybe(0.1),
        "hostile": [],
        "seed": draw.data_seed(),
    }
    if draw.backend != "reference" and draw.maybe(0.04):
        found["hostile"] = draw.hostile_ends(groups, rows + past)
    return found


def _normal(place: Place, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 numbers, every row of them times a power of two of its own."""
    powers = torch.randint(-6, 7, (*shape[:-1], 1), device=place.device, generator=generator)
    return (torch.randn(shape, device=place.device, generator=generator) * torch.exp2(powers.float())).bfloat16()


def _ends(sizes: list[int]) -> list[int]:
    return [sum(sizes[: i + 1]) for i in range(len(sizes))]


class _Product:
    """Operands of a problem's options: as they are, as a call gets them among NaN, and where groups end."""

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place, self.sizes = o, place, o["sizes"]
        self.ends = _ends(self.sizes)
        self.valid, self.rows = self.ends[-1], self.ends[-1] + o["past"]
        generator = place.generator(o["seed"])
        self.a = _normal(place, (self.rows, o["k"]), generator)
        self.a[self.valid :] = math.nan
        self.b = _normal(place, (len(self.sizes), o["n"], o["k"]), generator)
        if 0 <= o["nan_row"] < self.rows:
            self.a[o["nan_row"], o["k"] // 2].fill_(math.nan)
        if 0 <= o["nan_group"] < len(self.sizes):
            self.b[o["nan_group"], o["n"] // 2, o["k"] // 2].fill_(math.nan)
        self.given_a = among_nan(place, self.a, o["gaps"][0] // 2, math.nan)
        stored = self.b.mT.contiguous() if o["n_major"] else self.b
        given_b = among_nan(place, stored, o["gaps"][1] // 2, math.nan)
        self.given_b = given_b.mT if o["n_major"] else given_b
        self.dtype = DTYPES[o["out"]]
        config = None
        if o["tile"] and place.has_kernels:
            block_n, slabs = _TILES[o["tile"] - 1]
            slabs = 1 if self.dtype != torch.float32 and block_n == 128 else slabs
            config = Bf16PlainConfig(block_n=block_n, piece_slabs=slabs, out_dtype=self.dtype)
        self.how: dict[str, Any] = {"backend": place.backend, "config": config}

    def offs(self, ends: list[int]) -> torch.Tensor:
        made = self.place.ends(ends)
        return made.long() if self.o["offs64"] else made

    def near(self, out: torch.Tensor) -> None:
        """The valid rows of ``out`` against float64."""
        for group, (start, end) in enumerate(spans(self.ends, self.rows)):
            if start < end:
                _near(self.place, out[start:end], self.a[start:end].double(), self.b[group].double().t())


def _near(place: Place, got: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``got`` against a @ b in float64."""
    wanted, sums = a @ b, a.abs() @ b.abs()
    tolerance = wanted.abs() * _UNIT[got.dtype] * 1.01 + _SUM * sums + _TINY[got.dtype]
    place.judge.near("float64", got, wanted, tolerance.nan_to_num(0.0), 0.98 * torch.finfo(got.dtype).max)


def judge_product(o: Options, place: Place) -> None:
    p, judge = _Product(o, place), place.judge
    guarded = Guarded(place, p.rows, o["n"], p.dtype, o["gaps"][2])
    out = grouped_gemm(p.given_a, p.given_b, p.offs(o["hostile"] or p.ends), out=guarded.out, **p.how)
    judge.wrong("the result is not out", out is not guarded.out)
    if o["hostile"]:
        guarded.check(judge, "fences with wrong offsets", p.rows, anything=True)
        return
    guarded.check(judge, "fences", p.valid)
    p.near(out)
    _judge_beside(p, out)


def _judge_beside(p: _Product, out: torch.Tensor) -> None:
    """The bits of the same rows in other surroundings, and by another call."""
    o, judge, new = p.o, p.place.judge, {"out_dtype": p.dtype, **p.how}
    if o["beside"] == "layout":
        again = grouped_gemm(p.a, p.b, p.offs(p.ends), **new)
        judge.same("contiguous operands", again[: p.valid], out[: p.valid])
        return
    if o["beside"] == "reversed":
        a, b = p.a[: p.valid].flip(0), p.b.flip(0)
        judge.same("groups in reverse", grouped_gemm(a, b, p.offs(_ends(p.sizes[::-1])), **new).flip(0), out[: p.valid])
        return
    draw = random.Random(o["seed"])
    filled = [g for g, size in enumerate(p.sizes) if size]
    if not filled:
        return
    group = draw.choice(filled)
    start, end = spans(p.ends, p.rows)[group]
    if o["beside"] == "alone":
        start = draw.randrange(start, end)
        end = min(end, start + draw.choice((1, 1, 2, 9, 70)))
    a, b = p.a[start:end].clone(), p.given_b[group]
    if o["beside"] == "alone":
        judge.same("rows alone", grouped_gemm(a, b[None], p.offs([end - start]), **new), out[start:end])
    elif o["beside"] == "gemm":
        judge.same("as a dense product", gemm(a, b, **new), out[start:end])
    else:
        guarded = Guarded(p.place, end - start, o["n"], p.dtype, o["gaps"][2])
        judge.same("a dense product into out", gemm(a, b, out=guarded.out, **p.how), out[start:end])
        guarded.check(judge, "fences of a dense product", end - start)


# --- weight gradients --------------------------------------------------------------------------------------


def wgrad_constants(draw: Draw) -> Options:
    accumulate = draw.maybe(0.4)
    out = "float32" if accumulate else draw.one(("bfloat16", "float32"))
    return {"out": out, "accumulate": accumulate, "tile": draw.one((0, 0, 128, 256))}


def wgrad_rest(draw: Draw, constants: Options) -> Options:
    del constants
    sizes = draw.sizes(5)
    return {
        "sizes": sizes,
        "past": draw.past(),
        "n": max(16, draw.multiple(8, draw.limits.n)),
        "k": max(16, draw.multiple(8, min(draw.limits.k, 2 * draw.limits.n))),
        "gaps": [16 * draw.one((0, 0, 1, 3)) for _ in range(3)],
        "nan_group": draw.randrange(len(sizes)) if draw.maybe(0.1) else -1,
        "offs64": draw.maybe(0.1),
        "seed": draw.data_seed(),
    }


def judge_wgrad(o: Options, place: Place) -> None:
    sizes, n, k, judge = o["sizes"], o["n"], o["k"], place.judge
    ends, groups, dtype = _ends(sizes), len(sizes), DTYPES[o["out"]]
    generator = place.generator(o["seed"])
    dy, x = (_normal(place, (ends[-1] + o["past"], size), generator) for size in (n, k))
    for operand in (dy, x):
        operand[ends[-1] :] = math.nan
    if 0 <= o["nan_group"] < groups and sizes[o["nan_group"]]:
        dy[ends[o["nan_group"]] - 1, n // 2].fill_(math.nan)
    given = [among_nan(place, t, gap // 2, math.nan) for t, gap in zip((dy, x), o["gaps"], strict=False)]
    offs = place.ends(ends).long() if o["offs64"] else place.ends(ends)
    config = Bf16WgradConfig(block_n=o["tile"]) if o["tile"] and place.has_kernels else None
    call: dict[str, Any] = {"backend": place.backend, "config": config}
    guarded = Guarded(place, groups * n, k, dtype, o["gaps"][2], guard=16)
    out = guarded.out.unflatten(0, (groups, n))
    before = torch.randn((groups, n, k), device=place.device, generator=generator) if o["accumulate"] else None
    if before is not None:
        out.copy_(before)
    grouped_gemm_wgrad(given[0], given[1], offs=offs, out=out, accumulate=o["accumulate"], **call)
    guarded.check(judge, "fences", groups * n)
    fresh = out
    if before is not None:
        fresh = grouped_gemm_wgrad(dy, x, offs=offs, out_dtype=torch.float32, **call)
        filled = place.ends([int(size > 0) for size in sizes])[:, None, None] > 0
        judge.same("accumulated is one addition", out, torch.where(filled, before + fresh, before))
    for group, (start, end) in enumerate(spans(ends, dy.shape[0])):
        _near(place, fresh[group], dy[start:end].double().t(), x[start:end].double())
    group = random.Random(o["seed"]).randrange(groups)
    start, end = spans(ends, dy.shape[0])[group]
    own = place.ends([end - start])
    alone = grouped_gemm_wgrad(dy[start:end].clone(), x[start:end].clone(), offs=own, out_dtype=fresh.dtype, **call)
    judge.same("a group alone", alone[0], fresh[group])
