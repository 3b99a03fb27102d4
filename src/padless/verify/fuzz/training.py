"""Calls of training under judgement: swiglu_backward_quantize and grouped_gemm_wgrad."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import itemgetter
from typing import Any

import torch

from padless.formats import FP8_BLOCK, round_up
from padless.kernels.sm90_fp8_wgrad.config import MODES, WgradConfig, blocks_m
from padless.layouts import GroupedColumns
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.swiglu_backward import swiglu_backward_quantize
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.testing.bits import bits
from padless.testing.gradients import NAN_CODE, block_of, padded, permuted, poisoned, random_columns, values_of
from padless.testing.operands import spans
from padless.verify.fuzz import exact
from padless.verify.fuzz.case import Change, ends_of, judge_case, turned, whole
from padless.verify.fuzz.defined import Defined
from padless.verify.fuzz.judge import Precision, exact_product, precision_of
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options
from padless.verify.fuzz.quantizers import ALIGNMENTS, BLOCKS, ROWS, STRIDES, strided

_E4M3_STEP = 2.0**-4  # half of the distance of neighbours, relative


# --- SwiGLU's backward -----------------------------------------------------------------------------------


def swiglu_constants(draw: Draw) -> Options:
    return {
        "dtype": draw.one(tuple(DTYPES)),
        "z_dtype": draw.one(tuple(DTYPES)),
        "strides": draw.one(STRIDES),
        "gate_up": draw.one(("concatenated", "interleaved")),
        "block": draw.one(((1, 128), (128, 128))),
        "alignment": draw.one((None, 32, 128)),
        "prob": draw.maybe(0.6),
    }


def swiglu_rest(draw: Draw, fixed: Options) -> Options:
    sizes = draw.sizes(3)
    step = 32 if fixed["gate_up"] == "interleaved" else draw.one((1, 16, 128))
    return {
        "sizes": sizes,
        "past": draw.past(),
        "i": draw.multiple(step, draw.limits.n),
        "hostile": draw.hostile_ends(len(sizes), sum(sizes)) if draw.maybe(0.05) else [],
        "special": False,
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


def swiglu_lines(arch: str) -> Iterator[Options]:
    """Whole blocks of columns, short ones, and those that gate and up share; rows of very different sizes, NaN, Inf."""
    both = (("concatenated", 384), ("concatenated", 208), ("interleaved", 384), ("interleaved", 96))
    one: Options = {"strides": "contiguous", "hostile": [], "special": True}
    for (seed, (sizes, past, _)), (gate_up, i), dtype in itertools.product(enumerate(ROWS[:3]), both, DTYPES):
        shape = {"sizes": [*sizes], "past": past, "i": i, "gate_up": gate_up, "dtype": dtype, "z_dtype": dtype}
        how = {"block": BLOCKS[dtype == "float16"], "alignment": ALIGNMENTS[seed % 2], "prob": dtype != "float32"}
        yield one | shape | how | {"seed": seed, "properties": ["bits"]}
    shape = {"sizes": [100, 0, 57, 99], "past": 44, "i": 256, "dtype": "bfloat16", "z_dtype": "bfloat16", "seed": 7}
    how = {"gate_up": "concatenated", "block": (1, 128), "alignment": 32, "prob": True, "special": False}
    yield one | shape | how | {"properties": ["near", "replay"]}


class SwigluBackward(Defined):
    """`swiglu_backward_quantize`. special: rows of very different sizes; zeros, NaN and Inf in some."""

    def __init__(self, o: Options, place: Place) -> None:
        rows, i, special = sum(o["sizes"]) + o["past"], o["i"], o["special"]
        generator = place.generator(o["seed"])

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=place.device, generator=generator)

        dh, z = normal(rows, i), normal(rows, 2 * i) * 3
        dh, z = (_with_odd(x, place, generator) if special else x for x in (dh, z))
        dh, z = (strided(place, x.to(DTYPES[o[name]]), o["strides"]) for x, name in ((dh, "dtype"), (z, "z_dtype")))
        self.ends = o["hostile"] or [sum(o["sizes"][: g + 1]) for g in range(len(o["sizes"]))]
        prob = normal(rows) if o["prob"] else None
        super().__init__(o, place, dh=dh, z=z, offs=place.ends(self.ends), prob=prob)

    def call(self, dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor | None) -> Any:
        how = {"gate_up": self.o["gate_up"], "hidden_block": self.o["block"], "alignment": self.o["alignment"]}
        return swiglu_backward_quantize(dh, z, offs, prob, **how)

    def near(self, got: Any) -> None:
        place, gate_up, ends = self.place, self.o["gate_up"], self.ends
        dh, z, prob = (self.operands[name] for name in ("dh", "z", "prob"))
        dz, dz_size, hidden, dprob = _exact_backward(dh.double(), z.double(), prob, gate_up)
        codes, scale = got.dz_rows.data.view(torch.uint8), got.dz_rows.scale
        _near_codes(place, "dZ's rows", codes, scale, dz, dz_size, "activation")
        _near_columns(place, "dZ's columns", got.dz_columns, dz, dz_size, ends)
        _near_columns(place, "H's columns", got.hidden_columns, hidden, hidden.abs(), ends)
        place.judge.wrong("dprob is there, or not, against the call", (got.dprob is None) == self.o["prob"])
        if got.dprob is not None:
            valid = max((end for _, end in spans(ends, dh.shape[0])), default=0)
            wanted = dprob.clone()
            wanted[valid:] = 0
            sums = _sums_of_dprob(dh.double(), z.double(), gate_up)
            place.judge.near("dprob's float64", got.dprob, wanted, sums * 2.0**-17 + 2.0**-120, math.inf)


judge_swiglu_backward = partial(judge_case, SwigluBackward)


def _with_odd(x: torch.Tensor, place: Place, generator: torch.Generator) -> torch.Tensor:
    """Rows times different powers of two; zeros in all rows, NaN and Inf in a tenth of them."""
    row = (*x.shape[:-1], 1)
    x = x * torch.exp2(torch.randint(-12, 9, row, device=place.device, generator=generator).float())
    chance = torch.rand(x.shape, device=place.device, generator=generator)
    odd = torch.rand(row, device=place.device, generator=generator) < 0.1
    x = torch.where((chance < 0.002) & odd, math.nan, torch.where((chance > 0.998) & odd, math.inf, x))
    return torch.where((chance > 0.4) & (chance < 0.41), 0.0, x)


def _halves(z: torch.Tensor, gate_up: str) -> tuple[torch.Tensor, torch.Tensor]:
    if gate_up == "concatenated":
        half = z.shape[1] // 2
        return z[:, :half], z[:, half:]
    runs = z.unflatten(1, (-1, 2, 32))
    return runs[:, :, 0].flatten(1), runs[:, :, 1].flatten(1)


def _exact_backward(
    dh: torch.Tensor, z: torch.Tensor, prob: torch.Tensor | None, gate_up: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dZ, sums of the magnitudes that dZ is the sum of, H, dprob) in float64."""
    gate, up = _halves(z, gate_up)
    s = torch.sigmoid(gate)
    silu = gate * s
    weight = 1.0 if prob is None else prob.double()[:, None]
    d_up = dh * weight * silu
    d_gate = dh * weight * up * (s + silu * (1 - s))
    gate_size = (dh * weight * up).abs() * (s + (silu * (1 - s)).abs())
    hidden = silu * up
    dz, size = (_merged(x, y, gate_up) for x, y in ((d_gate, d_up), (gate_size, d_up.abs())))
    return dz, size, hidden * weight, (hidden * dh).sum(1)


def _merged(gate: torch.Tensor, up: torch.Tensor, gate_up: str) -> torch.Tensor:
    if gate_up == "concatenated":
        return torch.cat([gate, up], 1)
    return torch.stack([t.unflatten(1, (-1, 32)) for t in (gate, up)], 2).flatten(1)


def _sums_of_dprob(dh: torch.Tensor, z: torch.Tensor, gate_up: str) -> torch.Tensor:
    gate, up = _halves(z, gate_up)
    return (gate * torch.sigmoid(gate) * up * dh).abs().sum(1)


def _near_codes(
    place: Place,
    name: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    wanted: torch.Tensor,
    size: torch.Tensor,
    kind: str,
) -> None:
    """FP8_BLOCK codes and scales are nearest to ``wanted`` (float64), but for float32's roundings, of ``size``."""
    if wanted.numel() == 0:
        return
    _, exact_scale = exact.quantized(wanted.float(), FP8_BLOCK, kind)
    _, largest_size = exact.quantized(size.float(), FP8_BLOCK, kind)
    judge, shape = place.judge, tuple(wanted.shape)
    judge.near(f"{name}: scales", scale, exact_scale.double(), largest_size.double() * 2.0**-17, math.inf)
    each = exact.spread(scale.double(), FP8_BLOCK, kind, shape)
    values = exact.decoded(codes, FP8_BLOCK) * each
    tolerance = wanted.abs() * (_E4M3_STEP + 2.0**-12) + each * 2.0**-9 + size * 2.0**-17
    judge.near(f"{name}: float64", values, wanted, tolerance, math.inf)


def _near_columns(
    place: Place, name: str, c: GroupedColumns, wanted: torch.Tensor, sizes: torch.Tensor, ends: list[int]
) -> None:
    codes = c.data.view(torch.uint8)
    kind = "activation" if c.block[0] == 1 else "weight"
    slack = torch.ones_like(codes, dtype=torch.bool)
    column = block = 0
    for start, end in spans(ends, wanted.shape[0]):
        tokens = end - start
        if tokens:
            blocks = -(-tokens // 128)
            part = codes[:, column : column + tokens]
            scale = c.scale[block : block + blocks].t()
            _near_codes(place, name, part, scale, wanted[start:end].t(), sizes[start:end].t(), kind)
            slack[:, column : column + tokens] = False
        column += -(-tokens // c.alignment) * c.alignment
        block += -(-tokens // 128)
    place.judge.wrong(f"{name}: slack is not zero", (slack & (codes != 0)).any())
    place.judge.wrong(f"{name}: scales of no block are not zero", (c.scale[block:] != 0).any())


# --- weight gradients ------------------------------------------------------------------------------------


# M, N and K differ everywhere; every length of a last block; groups of 0, 1, 127, 129 tokens; more tiles than CTAs.
_WGRADS: tuple[tuple[tuple[int, ...], int, int, int, tuple[int, int]], ...] = (
    ((1,), 0, 16, 48, (32, 32)),
    ((0, 0, 0), 3, 80, 144, (32, 32)),
    ((5, 0, 130, 1), 3, 272, 144, (32, 32)),
    ((127, 128, 129, 1), 0, 272, 400, (128, 32)),
    ((0, 64, 65, 63, 0), 7, 528, 384, (32, 128)),
    ((15, 16, 17, 31, 32, 33), 0, 160, 208, (32, 32)),
    ((300, 0, 7, 1029, 127), 11, 1008, 1040, (128, 128)),
    ((4112,), 0, 528, 656, (32, 32)),
    (tuple((37 * g) % 53 for g in range(40)), 5, 208, 656, (32, 32)),
    ((257, 0, 640), 1, 2064, 4112, (32, 32)),
)
_KERNELS = [
    {"mode": mode, "out": out, "tile": tile, "cluster": 1, "pieces": 0}
    for mode, out in itertools.product(MODES, ("bfloat16", "float32"))
    for tile in blocks_m(mode, DTYPES[out])
] + [{"mode": mode, "out": "bfloat16", "tile": 0, "cluster": 2, "pieces": 0} for mode in MODES]
# What is added by the multiprocessor and by the copy engine, in clusters too.
_ADDING = [
    {"mode": mode, "out": "float32", "tile": 256, "cluster": cluster, "pieces": 2}
    for cluster, mode in ((1, "1d2d"), (2, "1d2d"), (2, "1d1d"))
] + [{"mode": "1d2d", "out": "float32", "tile": 128, "cluster": 1, "pieces": 1}]


_LARGE = 1 << 22  # elements of a result, of which one kind of codes is enough: the reference on the GPU is slow
_OTHERS: Options = {"past": 0, "alignments": [32, 32], "gap": 0, "nan_group": -1, "tiny": False, "normal": False}


def wgrad_lines(arch: str) -> Iterator[Options]:
    """Fixed problems: every kernel on every shape, stored and accumulated."""
    storing = [_OTHERS | kernel | {"accumulate": False} for kernel in _KERNELS]
    adding = [_OTHERS | k | {"accumulate": True} for k in (*_KERNELS, *_ADDING) if k["out"] == "float32"]
    for seed, (sizes, past, n, k, alignments) in enumerate(_WGRADS):
        shape = {"sizes": [*sizes], "past": past, "n": n, "k": k, "alignments": [*alignments], "seed": seed}
        for normal, kernel in itertools.product((True, False), sorted(storing, key=itemgetter("mode"))):
            if normal or len(sizes) * n * k <= _LARGE:
                properties = ["near", "bits", "changes"] if normal else ["bits"]
                yield kernel | shape | {"normal": normal, "properties": properties}

    def line(kernel: Options, sizes: list[int], n: int, k: int, *properties: str) -> Options:
        return kernel | {"sizes": sizes, "n": n, "k": k, "seed": 77, "properties": [*properties]}

    for kernel in adding:
        yield line(kernel, [0, 199, 1, 56], 272, 400, "near", "repeats")
        yield line(kernel, [100, 0, 57, 99], 272, 400, "microbatches")
        yield line(kernel, [0, 0, 256, 0], 272, 400, "microbatches")
        yield line(kernel | {"tiny": True}, [5, 0, 130, 1], 272, 144, "bits")
    for kernel in (_OTHERS | kernel | {"accumulate": kernel["out"] == "float32"} for kernel in _KERNELS):
        yield line(kernel | {"past": 3}, [5, 0, 130, 1], 272, 144)
        yield line(kernel | {"past": 7}, [0, 64, 700], 272, 144)
    for kernel in storing:
        yield line(kernel, [300, 0, 7, 1029, 127, 64, 1], 1008, 1040, "repeats")
    for kernel in (*storing[:1], *adding):
        yield line(kernel, [100, 0, 57, 99], 272, 400, "replay")


def wgrad_constants(draw: Draw) -> Options:
    mode, out = draw.one(MODES), draw.one(("bfloat16", "float32"))
    return {
        "mode": mode,
        "out": out,
        "accumulate": out == "float32" and draw.maybe(0.5),
        "tile": draw.one((0, *blocks_m(mode, DTYPES[out]))),
        "cluster": 1,
        "pieces": 0,
    }


def gradient_properties(draw: Draw, constants: Options) -> list[str]:
    """Properties of a random weight gradient, its values always."""
    some = ("", "bits", "change", "change", "replay", *(["microbatches"] if constants["accumulate"] else []))
    return ["near", *filter(None, [draw.one(some)])]


def wgrad_rest(draw: Draw, fixed: Options) -> Options:
    return {
        "sizes": draw.sizes(5),
        "past": draw.past(),
        "n": draw.multiple(16, draw.limits.n),
        "k": draw.multiple(16, min(draw.limits.k, 2 * draw.limits.n)),
        "alignments": [draw.one((32, 128)), draw.one((32, 128))],
        "gap": 16 * draw.one((0, 0, 1, 3)),
        "nan_group": draw.randrange(5) if draw.maybe(0.1) else -1,
        "tiny": False,
        "normal": draw.maybe(0.3),
        "seed": draw.data_seed(),
        "properties": gradient_properties(draw, fixed),
    }


class Gradient:
    """A weight gradient, stored, or added to random values; to a NaN of its own in groups without tokens."""

    operands: Any
    config: Any = None
    adds_only = False  # the kernel that adds stores nothing: what is stored is the default's
    ways: tuple[Callable[..., Any], ...] = (padded, permuted, poisoned)  # an operand, changed

    def __init__(self, o: Options, place: Place, generator: torch.Generator) -> None:
        self.o, self.place, self.dtype = o, place, DTYPES[o["out"]]
        self.shape = (len(o["sizes"]), o["n"], o["k"])
        self._filled = place.ends([int(size > 0) for size in o["sizes"]])[:, None, None] > 0
        self._before = None
        if o["accumulate"]:
            random = torch.randn(self.shape, device=place.device, generator=generator)
            random = random * 2.0**-130 if o.get("tiny") else random
            empty = torch.full_like(random, 0, dtype=torch.int32).fill_(0x7FABCDEF)  # an addition would not keep it
            self._before = torch.where(self._filled, random, empty.view(torch.float32))

    def call(self, operands: Any, **how: Any) -> torch.Tensor:
        """grouped_gemm_wgrad of these operands."""
        raise NotImplementedError

    def _made(self, out: torch.Tensor, operands: Any, *, accumulate: bool = False) -> torch.Tensor:
        config = None if self.adds_only and not accumulate else self.config
        return self.call(operands, out=out, accumulate=accumulate, backend=self.place.backend, config=config)

    def make(self, out: torch.Tensor) -> None:
        self._made(out, self.operands)
        if self.o["accumulate"]:  # one behind the other
            self._made(out, self.operands, accumulate=True)

    def made(self, fresh: torch.Tensor) -> torch.Tensor:
        return fresh + fresh if self.o["accumulate"] else fresh

    def run(self, operands: Any) -> torch.Tensor:
        """The stored gradient. Added, it is one addition to each group that has tokens, of no group another bit."""
        (groups, n, k), judge = (operands[0].offs.shape[0], *self.shape[1:]), self.place.judge
        gap = self.o["gap"]
        guarded = self.place.output(groups * n, k, self.dtype, gap, guard=16)
        fresh = self._made(guarded.out.unflatten(0, (groups, n)), operands)
        judge.written("fences", guarded, groups * n)
        if self._before is not None and operands is self.operands:
            onto = self.place.output(groups * n, k, self.dtype, gap, guard=16)
            out = onto.out.unflatten(0, (groups, n))
            out.copy_(self._before)
            self._made(out, self.operands, accumulate=True)
            judge.written("fences where it accumulates", onto, groups * n)
            want = torch.where(self._filled, self._before + fresh, self._before)
            judge.same("accumulated is one addition", bits(out.contiguous()), bits(want))
        if self.o.get("tiny"):
            least = torch.finfo(torch.float32).tiny
            judge.wrong("no product is subnormal", ~((fresh != 0) & (fresh.abs() < least)).any())
        return fresh

    def added_to(self, total: torch.Tensor) -> torch.Tensor:
        """``total`` and the exact bits of the gradient; groups without tokens keep theirs."""
        return torch.where(self._filled, total + self.reference(), total)

    def microbatches(self, others: Sequence[Gradient]) -> None:
        """Stores, with an addition for each of the others, in one stream."""
        out = torch.full(self.shape, math.nan, dtype=self.dtype, device=self.place.device)
        self._made(out, self.operands)
        for other in others:
            self._made(out, other.operands, accumulate=True)

        def total() -> torch.Tensor:
            return reduce(lambda sums, other: other.added_to(sums), others, self.reference())

        self.place.judge.same("microbatches are additions", out, total)

    def reference(self) -> torch.Tensor:
        """The bits of the product, of float32."""
        raise NotImplementedError

    def changes(self) -> Iterator[Change]:
        is_padded, is_permuted, is_poisoned = self.ways

        def changed(how: Callable[..., Any], *which: Any) -> Callable[[], torch.Tensor]:
            return partial(self.run, tuple(how(t, *which) for t in self.operands))

        yield "padded groups", changed(is_padded), whole, whole
        order = range(self.shape[0])[::-1]
        yield "groups in reverse behind one of NaN", changed(is_permuted, order), itemgetter(slice(1, None)), turned
        for group in ends_of(self.o["sizes"]):
            yield "NaN in all other groups", changed(is_poisoned, group), itemgetter(group), itemgetter(group)

    def near_product(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, precision: Precision) -> None:
        """``out`` is a @ b, of float64."""
        self.place.judge.product("float64", out, partial(exact_product, a, b), precision)


class Wgrad(Gradient):
    """Of FP8 columns."""

    def __init__(self, o: Options, place: Place) -> None:
        generator = place.generator(o["seed"])
        sizes, any_code = o["sizes"], not o["normal"]
        dy, x = (
            random_columns(
                sizes, features, block, alignment, generator, past=o["past"], any_code=any_code, slack=NAN_CODE,
                powers=(-12, -4),
            )
            for features, block, alignment in zip(
                (o["n"], o["k"]), ((1, 128), block_of(o["mode"])), o["alignments"], strict=True
            )
        )  # fmt: skip
        group = o["nan_group"]
        if 0 <= group < len(sizes) and sizes[group]:
            column = sum(round_up(size, dy.alignment) for size in sizes[:group]) + sizes[group] // 2
            dy.data.view(torch.uint8)[o["n"] // 2, column].fill_(NAN_CODE)
        super().__init__(o, place, generator)
        if o["tiny"]:
            dy, x = replace(dy, scale=dy.scale * 2.0**-94), replace(x, scale=x.scale * 2.0**-40)
        self.operands, self.adds_only = (dy, x), o["pieces"] > 0
        if place.has_kernels and (o["tile"] or o["cluster"] > 1):
            tile = {"block_m": o["tile"]} if o["tile"] else {}
            self.config = WgradConfig(
                **tile, cluster_n=o["cluster"], mode=o["mode"], out_dtype=self.dtype,
                accumulate=o["pieces"] > 0, reduced_pieces=o["pieces"],
            )  # fmt: skip

    def call(self, operands: Any, **how: Any) -> torch.Tensor:
        return grouped_gemm_wgrad(*operands, **how)

    def near(self, out: torch.Tensor) -> None:
        precision, sizes = precision_of(self.place.has_kernels)._replace(floor=2.0**-126), self.o["sizes"]
        for group in range(len(sizes)):
            dy, x = (values_of(t, sizes, group, torch.float64) for t in self.operands)
            self.near_product(out[group], dy, x.t(), precision)

    def reference(self) -> torch.Tensor:
        how = "tensor_core" if self.place.has_kernels else "fp8_block"
        return grouped_gemm_wgrad_reference(*self.operands, out_dtype=torch.float32, accumulation=how)


judge_wgrad = partial(judge_case, Wgrad)
