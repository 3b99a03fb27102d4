"""Fuzz checks of quantizers: quantize, dequantize, quantize_weight_both, quantize_rows_columns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FORMAT_NAMES, FP8_BLOCK, NVFP4, BlockScaledTensor
from padless.layouts import GroupedColumns, unpack_fp4
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.quantization.quantize import SCALE_RULES, dequantize, quantize
from padless.quantization.rows_columns import quantize_rows_columns
from padless.quantization.weight_both import quantize_weight_both
from padless.row_groups import clamped_ends
from padless.testing.operands import spans
from padless.verify.fuzz import exact
from padless.verify.fuzz.case import judge_case
from padless.verify.fuzz.defined import Defined
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import DTYPES, Draw, Options

STRIDES = ("contiguous", "contiguous", "gap", "transposed", "every second")


def values(
    place: Place, shape: tuple[int, ...], dtype: torch.dtype, seed: int, special: bool, strides: str
) -> torch.Tensor:
    """Normal values, rows of which differ by up to 2^20; special: with zeros, -0, NaN, Inf and subnormals; strided."""
    generator = place.generator(seed)
    x = torch.randn(shape, device=place.device, generator=generator)
    x *= torch.exp2(torch.randint(-12, 9, (*shape[:-1], 1), device=place.device, generator=generator).float())
    if special:
        chance = torch.rand(shape, device=place.device, generator=generator)
        row = torch.rand((*shape[:-1], 1), device=place.device, generator=generator)
        x = torch.where(row < 0.1, 0.0, x)
        x = torch.where((row > 0.1) & (row < 0.2), x * 2.0**-120, x)
        for low, number in ((0.2, math.nan), (0.25, math.inf), (0.3, -math.inf), (0.35, 1e-42), (0.4, -0.0)):
            x = torch.where((row > low) & (row < low + 0.05) & (chance > 0.98), number, x)
    return strided(place, x.to(dtype), strides)


def strided(place: Place, x: torch.Tensor, strides: str) -> torch.Tensor:
    """The same values with other strides; NaN in between."""
    if strides == "transposed":
        return x.transpose(-2, -1).contiguous().transpose(-2, -1)
    if strides == "gap":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype, device=place.device)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if strides == "every second":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan, dtype=x.dtype, device=place.device)
        wide[..., ::2] = x
        return wide[..., ::2]
    return x


# --- quantize --------------------------------------------------------------------------------------------


def constants(draw: Draw) -> Options:
    name = draw.one(FORMAT_NAMES)
    format = FORMAT_BY_NAME[name]
    kind = draw.one(("activation", "activation", "weight"))
    layouts = ["plain"] if format == FP8_BLOCK else ["plain", "blocked"]
    layouts += ["blocked_groups"] if kind == "activation" and format != FP8_BLOCK else []
    return {
        "format": name,
        "kind": kind,
        "dtype": draw.one(tuple(DTYPES)),
        "rule": draw.one(SCALE_RULES[format] or (None,)),
        "layout": draw.one(layouts),
        "major": draw.one(("mn", "k")) if (format, kind) == (FP8_BLOCK, "activation") else None,
        "strides": draw.one(STRIDES),
    }


def rest(draw: Draw, fixed: Options) -> Options:
    sizes = draw.sizes()
    groups = len(sizes)
    many = groups > 20
    weight = fixed["kind"] == "weight"
    even = FORMAT_BY_NAME[fixed["format"]].codes_per_byte
    grouped = not weight and (fixed["layout"] == "blocked_groups" or draw.maybe(0.5))
    k = draw.randint(1, max(1, (256 if many else draw.limits.k) // even)) * even
    return {
        "sizes": sizes,
        "past": draw.past(),
        "matrices": draw.one((0, 0, 1, 2, 5)) if weight else 0,
        "n": draw.randint(1, draw.limits.n // (2 if draw.backend == "cuda" else 1)) if weight else 0,
        "k": draw.multiple(32, draw.limits.k) if draw.maybe(0.5) and not many else k,
        "grouped": (grouped and fixed["format"] == "NVFP4") or fixed["layout"] == "blocked_groups",
        "given": draw.one(("no", "one", "each")),
        "hostile": draw.hostile_ends(groups, sum(sizes)) if draw.maybe(0.05) else [],
        "special": draw.maybe(0.4),
        "beside": draw.one(("alone", "gathered", "dequantized")),
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


def lines(arch: str) -> Iterator[Options]:
    """FP8_BLOCK: tails and outliers. Of weights sizes are those of one matrix, or of three."""
    one: Options = {"format": "FP8_BLOCK", "rule": None, "layout": "plain", "strides": "contiguous", "grouped": False}
    one |= {"given": "no", "hostile": [], "past": 0, "beside": "dequantized"}
    shapes: list[Options] = [
        {"kind": "activation", "sizes": [m], "matrices": 0, "n": 0, "k": k, "major": major}
        for m, k, major in ((1, 16, "mn"), (777, 1040, "mn"), (777, 1040, "k"), (129, 4112, "mn"))
    ] + [
        {"kind": "weight", "sizes": [0], "matrices": matrices, "n": n, "k": k, "major": None}
        for matrices, n, k in ((3, 200, 1040), (0, 136, 144))
    ]
    for (seed, shape), dtype, special in itertools.product(enumerate(shapes), DTYPES, (False, True)):
        yield one | shape | {"dtype": dtype, "special": special, "seed": seed, "properties": ["near", "bits"]}


class Quantized(Defined):
    """`quantize` of a problem's options, and the scale factors that NVFP4 has for every row."""

    def __init__(self, o: Options, place: Place) -> None:
        self.o, self.place = o, place
        self.format = FORMAT_BY_NAME[o["format"]]
        self.rows = sum(o["sizes"]) + o["past"]
        weight = o["kind"] == "weight"
        if weight:
            shape: tuple[int, ...] = (o["n"], o["k"])
            shape = (o["matrices"], *shape) if o["matrices"] else shape
        else:
            shape = (self.rows, o["k"])
        self.x = values(place, shape, DTYPES[o["dtype"]], o["seed"], o["special"], o["strides"])
        ends = o["hostile"] or [sum(o["sizes"][: i + 1]) for i in range(len(o["sizes"]))]
        self.ends = ends
        self.offs = place.ends(ends) if o["grouped"] else None
        self.shared = self._given(place.generator(o["seed"] + 1))
        self.options: dict[str, Any] = {
            "kind": o["kind"],
            "scale_rule": o["rule"],
            "scale_layout": o["layout"],
            "scale_major": o["major"],
        }
        super().__init__(o, place, x=self.x, global_scale=self.shared, offs=self.offs)

    def call(self, x: torch.Tensor, **given: Any) -> BlockScaledTensor:
        return quantize(x, self.format, **self.options, **given)

    def near(self, t: BlockScaledTensor) -> None:
        """Codes and scales by the rules; what `dequantize` makes of them, or rows by themselves."""
        o, judge = self.o, self.place.judge
        codes, scale, decode = self.exact()
        judge.same("codes by the rules", t.data.view(torch.uint8), exact.packed(codes, self.format))
        _judge_scales(self, t, scale)
        if decode is not None and self.shared is None:
            assert t.global_scale is not None
            judge.same("global scale", t.global_scale.reshape(-1), decode.reshape(-1))
        if o["beside"] == "dequantized":
            _judge_dequantized(self, t, codes, scale, decode)
            return
        shared = self.format != NVFP4 or (self.shared is not None and self.shared.numel() == 1)
        if o["kind"] == "weight" or self.rows == 0 or not shared:
            return
        first = o["seed"] % self.rows
        rows = torch.arange(self.rows, device=self.place.device)[first : first + 3]
        options = self.options | {"global_scale": self.shared, "scale_layout": "plain"}
        if o["beside"] == "gathered":
            generator = self.place.generator(o["seed"] + 2)
            rows = torch.randint(0, self.rows, (self.rows // 2 + 1,), device=self.place.device, generator=generator)
            some = quantize(self.x, self.format, rows=rows, **options)
        else:
            some = quantize(self.x[first : first + 3], self.format, **options)
        judge.same(f"rows {o['beside']}", some.data.view(torch.uint8), exact.packed(codes, self.format)[rows])
        judge.same(f"scales of rows {o['beside']}", _plain(some), scale[rows].view(_plain(some).dtype))

    def _given(self, generator: torch.Generator) -> torch.Tensor | None:
        if self.format != NVFP4 or self.o["given"] == "no":
            return None
        count = 1
        if self.o["given"] == "each":
            count = self.x.shape[0] if self.x.dim() == 3 else len(self.ends) if self.offs is not None else 1
        return torch.exp2(torch.rand(count, device=self.place.device, generator=generator) * 12 - 10)

    def group_of_row(self) -> torch.Tensor:
        """(rows,) int64, rows past the last group in it."""
        sizes = [end - start for start, end in spans(self.ends, self.rows)]
        sizes[-1] += self.rows - sum(sizes)
        counts = self.place.ends(sizes).long()
        groups = torch.arange(len(sizes), device=self.place.device)
        return torch.repeat_interleave(groups, counts, output_size=self.rows)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(codes, scales as their logical shape says, NVFP4's decode scale)."""
        factors = decode = None
        if self.format == NVFP4:
            decode, factors = self._factors()
        codes, scale = exact.quantized(self.x, self.format, self.o["kind"], self.o["rule"] or "", factors)
        return codes, scale, decode

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        rule = self.o["rule"]
        magnitude = self.x.float().abs()
        magnitude = torch.where(magnitude.isfinite(), magnitude, 0.0)
        amax: torch.Tensor | None = None
        if self.shared is not None:
            decode = self.shared
        else:
            if self.x.dim() == 3:
                amax = magnitude.amax((1, 2))
            elif self.offs is not None:
                row_amax = magnitude.amax(1)
                amax = row_amax.new_zeros(len(self.ends))
                amax = amax.scatter_reduce(0, self.group_of_row(), row_amax, "amax") if self.rows else amax
            elif magnitude.numel() == 0:
                amax = magnitude.new_zeros(())
            else:
                amax = magnitude.amax((0, 1))
            decode = exact.nvfp4_global(amax)
        factors = exact.nvfp4_factors(rule, decode, amax)
        if factors.dim() == 1 or factors.shape[0] == 1:
            return decode, factors.reshape(2)
        if self.x.dim() == 3:
            return decode, factors[:, None, None, :]
        return decode, factors[self.group_of_row()][:, None, :]


def _plain(t: BlockScaledTensor) -> torch.Tensor:
    return t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)


def _judge_scales(q: Quantized, t: BlockScaledTensor, scale: torch.Tensor) -> None:
    judge, layout = q.place.judge, q.o["layout"]
    if layout == "plain":
        judge.same("scales by the rules", _plain(t), scale)
        judge.wrong("scale_major is another", q.o["major"] == "mn" and t.scale_major != "mn")
        return
    stored = t.scale.view(torch.uint8)
    if layout == "blocked":
        matrices = scale if scale.dim() == 3 else scale[None]
        for i, matrix in enumerate(matrices):
            got = stored[i] if stored.dim() == 2 else stored
            judge.same("scales in tiles", got, exact.tiled(matrix))
        return
    first, width = 0, -(-scale.shape[1] // 4) * 512
    for start, end in spans(q.ends, q.rows):
        wanted = exact.tiled(scale[start:end])
        judge.same("scales in groups' tiles", stored[first : first + wanted.numel()], wanted)
        first += -(-(end - start) // 128) * width
    judge.wrong("scales behind the groups' tiles are not zero", (stored[first:] != 0).any())


def _judge_dequantized(
    q: Quantized, t: BlockScaledTensor, codes: torch.Tensor, scale: torch.Tensor, decode: torch.Tensor | None
) -> None:
    """dequantize gives code * scale (* global scale), each product rounded to float32."""
    if q.format.codes_per_byte == 2 and codes.shape[-1] % 2:
        return
    got = dequantize(t, torch.float32, offs=q.offs)
    data = exact.packed(codes, q.format)
    numbers = exact.scales(scale.view(q.format.scale_dtype) if scale.dtype == torch.uint8 else scale)
    shape = tuple(q.x.shape)
    wanted = (exact.decoded(data, q.format) * exact.spread(numbers, q.format, q.o["kind"], shape)).float()
    if decode is not None:
        each = decode.reshape(-1)
        if each.numel() == 1:
            wanted = wanted * each[0]
        elif q.x.dim() == 3:
            wanted = wanted * each.view(-1, 1, 1)
        else:
            wanted = wanted * each[q.group_of_row()][:, None]
    if q.o["layout"] == "blocked_groups":  # rows of no group have no scale there
        valid = clamped_ends(q.ends, q.rows)[-1]
        got, wanted = got[:valid], wanted[:valid]
    q.place.judge.same("dequantized", got, wanted)


judge_quantize = partial(judge_case, Quantized)


# --- a weight and its transpose --------------------------------------------------------------------------


def both_constants(draw: Draw) -> Options:
    return {"dtype": draw.one(tuple(DTYPES)), "strides": draw.one(STRIDES)}


def both_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    return {
        "matrices": draw.one((0, 1, 2, 3)),
        "n": draw.randint(1, draw.limits.n),
        "k": draw.one((draw.randint(1, draw.limits.k // 2), draw.multiple(32, draw.limits.k // 2))),
        "special": draw.maybe(0.4),
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


def both_lines(arch: str) -> Iterator[Options]:
    one: Options = {"strides": "contiguous", "special": True, "properties": ["near", "bits"]}
    for dtype, (matrices, n, k) in itertools.product(DTYPES, ((3, 200, 1040), (0, 136, 144), (2, 127, 257), (0, 1, 1))):
        yield one | {"dtype": dtype, "matrices": matrices, "n": n, "k": k, "seed": n + k}


class WeightBoth(Defined):
    """`quantize_weight_both`."""

    def __init__(self, o: Options, place: Place) -> None:
        shape = (o["n"], o["k"]) if o["matrices"] == 0 else (o["matrices"], o["n"], o["k"])
        w = values(place, shape, DTYPES[o["dtype"]], o["seed"], o["special"], o["strides"])
        super().__init__(o, place, w=w)

    def call(self, w: torch.Tensor) -> Any:
        return quantize_weight_both(w)

    def near(self, out: Any) -> None:
        first, second = out
        codes, scale = exact.quantized(self.operands["w"], FP8_BLOCK, "weight")
        judge = self.place.judge
        judge.same("codes by the rules", first.data.view(torch.uint8), codes)
        judge.same("scales by the rules", first.scale, scale)
        judge.same("codes of the transpose", second.data.view(torch.uint8), codes.mT.contiguous())
        judge.same("scales of the transpose", second.scale, scale.mT.contiguous())
        again = quantize(self.operands["w"], FP8_BLOCK, kind="weight")
        judge.same("quantize's codes", first.data.view(torch.uint8), again.data.view(torch.uint8))


judge_weight_both = partial(judge_case, WeightBoth)


# --- rows and columns ------------------------------------------------------------------------------------


def columns_constants(draw: Draw) -> Options:
    return {
        "dtype": draw.one(tuple(DTYPES)),
        "strides": draw.one(STRIDES),
        "block": draw.one(((1, 128), (128, 128))),
        "alignment": draw.one((None, 32, 128)),
        "rows": draw.maybe(0.7),
        "tokens": draw.maybe(0.2),
    }


def columns_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    sizes = draw.sizes(6)
    return {
        "sizes": sizes,
        "past": draw.past(),
        "k": draw.one((draw.randint(1, draw.limits.n), draw.multiple(16, draw.limits.n))),
        "hostile": draw.hostile_ends(len(sizes), sum(sizes)) if draw.maybe(0.05) else [],
        "special": draw.maybe(0.4),
        "seed": draw.data_seed(),
        "properties": ["near"],
    }


# Sizes of groups, rows past the last one, columns.
ROWS: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((0, 1, 15, 16, 17, 31, 32, 33, 0), 2, 144),
    ((127, 128, 129, 0, 255, 257), 140, 1040),
    ((0, 700, 0), 0, 256),
    ((0, 0), 5, 272),
    ((0, 0, 0), 0, 16),
    (tuple((37 * g) % 53 for g in range(70)), 7, 2064),
)
BLOCKS, ALIGNMENTS = ((1, 128), (128, 128)), (32, 128)


def columns_lines(arch: str) -> Iterator[Options]:
    one: Options = {"strides": "contiguous", "rows": True, "hostile": [], "special": True, "tokens": False}
    for (seed, (sizes, past, k)), dtype in itertools.product(enumerate(ROWS), DTYPES):
        shape = {"sizes": [*sizes], "past": past, "k": k, "dtype": dtype, "seed": seed, "properties": ["near", "bits"]}
        for block, alignment, tokens in itertools.product(BLOCKS, ALIGNMENTS, (False, True)):
            yield one | shape | {"block": block, "alignment": alignment, "tokens": tokens}
    shape = {"sizes": [100, 0, 57, 99], "past": 44, "k": 256, "dtype": "bfloat16", "seed": 7}
    yield one | shape | {"block": (1, 128), "alignment": 32, "properties": ["replay"]}


class RowsColumns(Defined):
    """`quantize_rows_columns`. tokens: of rows in another order, some more than once."""

    def __init__(self, o: Options, place: Place) -> None:
        rows = sum(o["sizes"]) + o["past"]
        x = values(place, (rows, o["k"]), DTYPES[o["dtype"]], o["seed"], o["special"], o["strides"])
        self.ends = o["hostile"] or [sum(o["sizes"][: i + 1]) for i in range(len(o["sizes"]))]
        generator = place.generator(o["seed"] + 1)
        tokens = torch.randint(max(rows, 1), (rows,), device=place.device, generator=generator)
        super().__init__(o, place, x=x, offs=place.ends(self.ends), tokens=tokens if o["tokens"] else None)

    def call(self, x: torch.Tensor, offs: torch.Tensor, tokens: torch.Tensor | None) -> Any:
        o = self.o
        return quantize_rows_columns(
            x, offs, column_block=o["block"], alignment=o["alignment"], rows=o["rows"], tokens=tokens
        )

    def near(self, out: Any) -> None:
        (by_rows, by_columns), judge = out, self.place.judge
        x, tokens = self.operands["x"], self.operands["tokens"]
        x = x if tokens is None else x[tokens]
        judge.wrong("rows are there, or not, against the call", (by_rows is None) == self.o["rows"])
        if by_rows is not None:
            codes, scale = exact.quantized(x, FP8_BLOCK)
            judge.same("row codes", by_rows.data.view(torch.uint8), codes)
            judge.same("row scales", by_rows.scale, scale)
        judge_columns(self.place, by_columns, x, self.ends)


def judge_columns(place: Place, c: GroupedColumns, x: torch.Tensor, ends: list[int]) -> None:
    """Columns of the groups of x (M, features), with slack of zeros, by the rules."""
    judge, alignment = place.judge, c.alignment
    codes = c.data.view(torch.uint8)
    wanted = torch.zeros_like(codes)
    wanted_scale = torch.zeros_like(c.scale)
    column = block = 0
    starts, blocks = [], []
    kind = "activation" if c.block[0] == 1 else "weight"
    for start, end in spans(ends, x.shape[0]):
        starts.append(column)
        blocks.append(block)
        size = end - start
        if size:
            own, scale = exact.quantized(x[start:end].t(), FP8_BLOCK, kind)
            wanted[:, column : column + size] = own
            wanted_scale[block : block + scale.shape[1]] = scale.t()
        column += -(-size // alignment) * alignment
        block += -(-size // 128)
    judge.same("column codes", codes, wanted)
    judge.same("column scales", c.scale, wanted_scale)
    judge.same("starts", c.starts, place.ends(starts))
    judge.same("block starts", c.block_starts, place.ends(blocks))


judge_rows_columns = partial(judge_case, RowsColumns)


# --- random roundings ------------------------------------------------------------------------------------


def random_constants(draw: Draw) -> Options:
    return {"dtype": draw.one(tuple(DTYPES)), "strides": draw.one(STRIDES)}


def random_rest(draw: Draw, fixed: Options) -> Options:
    del fixed
    rows, k = draw.randint(1, draw.limits.rows), draw.multiple(16, draw.limits.n)
    return {"rows": rows, "k": k, "seed": draw.data_seed(), "properties": ["near"]}


def random_lines(arch: str) -> Iterator[Options]:
    for dtype, (rows, k) in itertools.product(DTYPES, ((1, 16), (129, 1040), (300, 272))):
        one: Options = {"dtype": dtype, "strides": "contiguous", "rows": rows, "k": k, "seed": 12345678901234567 + rows}
        yield one | {"properties": ["near", "bits"]}


class Random(Defined):
    """`quantize_nvfp4_stochastic`, and `random_hadamard` of the same values."""

    def __init__(self, o: Options, place: Place) -> None:
        super().__init__(
            o, place, x=values(place, (o["rows"], o["k"]), DTYPES[o["dtype"]], o["seed"], False, o["strides"])
        )
        self.signs = o["seed"] % 2**16

    def call(self, x: torch.Tensor) -> dict[str, Any]:
        return {"rotated": random_hadamard(x, self.signs), "rounded": quantize_nvfp4_stochastic(x, seed=self.o["seed"])}

    def near(self, out: dict[str, Any]) -> None:
        """A code is the nearest one or its neighbour."""
        x, judge, t = self.operands["x"], self.place.judge, out["rounded"]
        amax = x.float().abs().amax()
        factors = exact.nvfp4_factors("te", exact.nvfp4_global(amax), amax)
        nearest, scale = exact.quantized(x, NVFP4, "activation", "te", factors)
        judge.same("scales by the rules", t.scale.view(torch.uint8), scale)
        codes = unpack_fp4(t.data).view(torch.uint8)
        judge.same("signs", codes & 8, nearest & 8)
        judge.wrong("codes are far", ((codes & 7).int() - (nearest & 7).int()).abs().amax() > 1)
        signed = x.double().unflatten(1, (-1, 16)) * (1 - 2 * self.place.ends([self.signs >> i & 1 for i in range(16)]))
        matrix = [[(-1.0) ** (i & j).bit_count() / 4 for i in range(16)] for j in range(16)]
        wanted = (signed @ torch.tensor(matrix, dtype=torch.float64).to(x.device)).flatten(1)
        size = signed.abs().sum(2).repeat_interleave(16, dim=1)
        judge.near("rotated values' float64", out["rotated"], wanted, size * 2.0**-22, math.inf)


judge_random = partial(judge_case, Random)
