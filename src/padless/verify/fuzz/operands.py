"""Operands of random products: codes of any bits in wider memory full of NaN, scales in any layout, exact values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from padless.formats import (
    FORMAT_BY_NAME,
    FP8_BLOCK,
    MXFP4,
    MXFP4_REPACKED,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
)
from padless.layouts import to_blocked, to_blocked_groups, to_repacked
from padless.runtime.choices import Kind
from padless.testing.operands import BF16, Activation, mn_major_in_nan, picked, quantized, spans
from padless.verify.fuzz import exact
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options

Spans = Sequence[tuple[int, int]]
_NAN = 0x7F  # e4m3 and e5m2; two e2m1 codes of 6
_MARGIN = 2  # rows of NaN before and behind
NAN_SCALE = {torch.float32: math.nan, torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fn: 0x7F}


@dataclass(frozen=True, eq=False)
class Operand:
    """Activations (M, K), or weights (G, N, K). plain: contiguous scales (float32 ones MN-major for activations); given:
    the same as a call gets it. groups: [start, end) of each group's rows, of activations.
    """

    plain: Any
    given: Any
    groups: Sequence[tuple[int, int]] = ()

    @cached_property
    def values(self) -> torch.Tensor:
        """float64, with global scales."""
        t = self.plain
        if isinstance(t, torch.Tensor):
            return t.double()
        kind = "activation" if t.data.dim() == 2 else "weight"
        found = exact.decoded(t.data, t.format)
        found = found * exact.spread(exact.scales(t.scale), t.format, kind, tuple(found.shape))
        if t.global_scale is None:
            return found
        shared = t.global_scale.double()
        if kind == "weight" or shared.numel() == 1:
            return found * shared.view(-1, *[1] * (found.dim() - 1))
        for group, (start, end) in enumerate(self.groups):
            found[start:end] *= shared[group]
        return found


# --- drawing ---------------------------------------------------------------------------------------------

# How codes and scales are drawn: any codes, scales over 16 powers of two ("codes"; "anywhere" are the same on every
# device); FP8_BLOCK's with scales over 20 ("wide", "wide normal"); of small integers, whose products nothing rounds
# ("exact"). Of normal values, whose rows differ by up to 2^8 ("normal"); with rows that take a tile of MXFP4 out of
# float16's range in the middle of K ("loud"), or rows of zeros, of sums below every scale and beyond the exponential's
# range ("extreme"); with sums of about 2 ("gates").
Drawing = Literal["codes", "anywhere", "wide", "wide normal", "exact", "normal", "loud", "extreme", "gates"]
_NORMAL = ("normal", "loud", "extreme", "gates")


def generator_of(place: Place, o: Options) -> torch.Generator:
    """Source of the problem's codes: on the CPU for those that are the same everywhere."""
    return place.generator(o["seed"]) if _drawing(o) == "codes" else torch.Generator().manual_seed(o["seed"])


def _drawing(o: Options) -> Drawing:
    found: Drawing = o.get("drawn", "codes")
    return found


def _drawn(
    format: BlockScaledFormat, shape: tuple[int, ...], drawing: Drawing, groups: Spans, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (.., K / codes a byte) uint8, and scales in bytes or float32."""
    kind: Kind = "activation" if len(shape) == 2 else "weight"
    if drawing in _NORMAL:
        values = _normal(shape, "normal" if format == NVFP4 and drawing == "loud" else drawing, groups, generator)
        t = quantized(values, format.name, kind, **({"scale_major": "k"} if format == FP8_BLOCK and groups else {}))
        return t.data.view(torch.uint8), t.scale if t.scale.dtype == torch.float32 else t.scale.view(torch.uint8)
    blocks = format.scale_shape(shape, kind)
    if drawing == "exact":
        codes = _bytes((*shape[:-1], shape[-1] // format.codes_per_byte), format, generator)
        if format.codes_per_byte == 1:
            small = torch.randint(-4, 5, shape, generator=generator).float()
            codes = small.to(format.data_dtype).view(torch.uint8)
        power = torch.randint(-1, 2, blocks, generator=generator)
        if format.scale_dtype == torch.float32:
            return codes, torch.exp2(power.float())
        return codes, (power + 7 << 3 if format == NVFP4 else power + 127).to(torch.uint8)
    codes = _bytes((*shape[:-1], shape[-1] // format.codes_per_byte), format, generator)
    scale = _scales(blocks, format, generator, wide=drawing.startswith("wide"))
    if drawing == "wide normal":
        codes = torch.randn(shape, generator=generator).to(format.data_dtype).view(torch.uint8)
    return codes, scale


def _normal(shape: tuple[int, ...], drawing: Drawing, groups: Spans, generator: torch.Generator) -> torch.Tensor:
    """In groups of two rows and more of loud ones the second row is 2^20 times as large and the last 2^-40 times."""
    x = torch.randn(shape, generator=generator)
    if drawing == "gates":
        return x * 2 if len(shape) == 2 else x / shape[-1] ** 0.5
    if len(shape) == 2:
        x *= torch.exp2(torch.randint(-4, 5, (shape[0], 1), generator=generator).float())
    if drawing == "extreme" and len(shape) == 2 and shape[0] > 3:
        for part, factor in ((2, 0.0), (3, 2.0**-100), (4, 30.0)):
            x[shape[0] // part] *= factor
    for start, end in groups if drawing == "loud" else ():
        if end - start > 1:
            x[start + 1, shape[1] // 2 :] *= 2.0**20
            x[end - 1, shape[1] // 2 :] *= 2.0**-40
    return x


def _bytes(shape: tuple[int, ...], format: BlockScaledFormat, generator: torch.Generator) -> torch.Tensor:
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=generator.device, generator=generator)
    if format.data_dtype == torch.float8_e4m3fn:
        return torch.where((data & 0x7F) == 0x7F, data & 0xF0, data)
    if format.data_dtype == torch.float8_e5m2:
        return data & 0xBF  # below 2, so that sums stay inside of float16
    return data


def among_nan(place: Place, values: torch.Tensor, gap: int, nan: float | int) -> torch.Tensor:
    """values (.., rows, columns) in memory with ``gap`` elements between the rows, NaN there, before and behind."""
    *outer, rows, columns = values.shape
    groups = math.prod(outer)
    shape = (groups * rows + 2 * _MARGIN, columns + gap)
    whole = torch.full(shape, nan, dtype=values.dtype, device=place.device)
    inside = (
        whole[_MARGIN : _MARGIN + groups * rows, :columns].unflatten(0, (*outer, rows))
        if outer
        else (whole[_MARGIN : _MARGIN + rows, :columns])
    )
    return inside.copy_(values)


def _scales(
    shape: tuple[int, ...], format: BlockScaledFormat, generator: torch.Generator, *, wide: bool = False
) -> torch.Tensor:
    if format.scale_dtype == torch.float32:
        span, low = (20, -10) if wide else (8, -12)
        return torch.exp2(torch.rand(shape, device=generator.device, generator=generator) * span + low)
    first, end = (127 - 12, 127 + 4) if format.scale_dtype == torch.float8_e8m0fnu else (1, 0x7F)
    return torch.randint(first, end, shape, dtype=torch.uint8, device=generator.device, generator=generator)


def _contiguous_among_nan(place: Place, scale: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """The scales in the middle of memory of NaN; on a multiple of 16 bytes."""
    margin = 64
    scale = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    flat = torch.full(
        (scale.numel() + 2 * margin,), NAN_SCALE[format.scale_dtype], dtype=scale.dtype, device=place.device
    )
    flat[margin : margin + scale.numel()] = scale.flatten()
    return flat[margin : margin + scale.numel()].view(scale.shape).view(format.scale_dtype)


def global_scales(place: Place, count: int, generator: torch.Generator) -> torch.Tensor | None:
    """count 0: None."""
    if count == 0:
        return None
    random = torch.rand(count, device=generator.device, generator=generator)
    return torch.exp2(random * 4 - 10).to(place.device)


def activation(
    place: Place,
    name: str,
    rows: int,
    k: int,
    generator: torch.Generator,
    *,
    ends: Sequence[int],
    offs: torch.Tensor,
    layout: str = "plain",
    gap: int = 0,
    globals_: int = 0,
    nan_row: int = -1,
    drawing: Drawing = "codes",
) -> Operand:
    """Activations of a format by its name. Rows past the last group are NaN, and row ``nan_row`` has one.

    layout: "plain", "k" (row-major float32), "blocked" or "blocked_groups". gap: bytes between the rows.
    globals_: NVFP4's global scales, 0, 1 or as many as groups.
    """
    groups = spans(ends, rows)
    valid = groups[-1][1] if groups else 0
    if name == BF16:
        values = torch.randn((rows, k), device=generator.device, generator=generator)
        if drawing == "exact":
            values = torch.randint(-4, 5, (rows, k), generator=generator).float()
        elif drawing in _NORMAL:
            values = _normal((rows, k), drawing, groups, generator)
        x = values.bfloat16().to(place.device)
        x[valid:] = math.nan
        if 0 <= nan_row < rows:
            x[nan_row, k // 2].fill_(math.nan)
        return Operand(x, among_nan(place, x, gap // 2, math.nan), groups)
    format = FORMAT_BY_NAME[name]
    codes, scale = (t.to(place.device) for t in _drawn(format, (rows, k), drawing, groups, generator))
    nan = NAN_SCALE[format.scale_dtype]
    scale[valid:] = nan
    if 0 <= nan_row < rows:
        scale[nan_row, scale.shape[1] // 2].fill_(nan)
    scale = scale.view(format.scale_dtype)
    shared = global_scales(place, globals_ if format.has_global_scale else 0, generator)
    of_groups = offs if shared is not None and shared.numel() > 1 else None
    mn_major = mn_major_in_nan(scale) if format == FP8_BLOCK else scale
    plain = BlockScaledTensor(codes.view(format.data_dtype), mn_major, format, shared, offs=of_groups)
    if layout == "blocked":
        stored = to_blocked(scale)
    elif layout == "blocked_groups":
        stored, of_groups = to_blocked_groups(scale, offs), offs
    elif format == FP8_BLOCK and layout != "k":
        stored = mn_major
    else:
        stored = _contiguous_among_nan(place, scale, format)
    tiles = layout if layout.startswith("blocked") else "plain"
    data = among_nan(place, codes, gap, _NAN).view(format.data_dtype)
    return Operand(plain, BlockScaledTensor(data, stored, format, shared, tiles, of_groups), groups)


def weight(
    place: Place,
    name: str,
    groups: int,
    n: int,
    k: int,
    generator: torch.Generator,
    *,
    layout: str = "plain",
    gap: int = 0,
    globals_: int = 0,
    nan_group: int = -1,
    drawing: Drawing = "codes",
) -> Operand:
    """Weights (G, N, K). One block of group ``nan_group`` has the scale NaN."""
    stored = FORMAT_BY_NAME[name]
    format = MXFP4 if stored == MXFP4_REPACKED else stored  # that a check reads
    codes, scale = (t.to(place.device) for t in _drawn(format, (groups, n, k), drawing, (), generator))
    if 0 <= nan_group < groups:
        scale[nan_group, scale.shape[1] // 2, scale.shape[2] // 2].fill_(NAN_SCALE[format.scale_dtype])
    scale = scale.view(format.scale_dtype)
    shared = global_scales(place, globals_ if format.has_global_scale else 0, generator)
    plain = BlockScaledTensor(codes.view(format.data_dtype), scale, format, shared)
    if stored != format:
        codes, gap = to_repacked(plain).data.view(torch.uint8), 0  # its rows lie one after the other
    data = among_nan(place, codes, gap, _NAN).view(format.data_dtype)
    if layout == "blocked" and format != FP8_BLOCK:
        return Operand(plain, BlockScaledTensor(data, to_blocked(scale), stored, shared, "blocked"))
    return Operand(plain, BlockScaledTensor(data, _contiguous_among_nan(place, scale, format), stored, shared))


# --- parts -----------------------------------------------------------------------------------------------


def rows_alone(a: Activation, index: torch.Tensor, groups: Sequence[int], offs: torch.Tensor) -> Activation:
    """These rows, of an operand with plain scales, in memory of their own. groups: whose they are; offs: their ends."""
    if isinstance(a, torch.Tensor):
        return picked(a, index)
    scale = picked(a.scale.contiguous(), index)
    scale = mn_major_in_nan(scale) if a.format == FP8_BLOCK else scale
    shared = _shared_of(a, groups)
    of_groups = offs if shared is not None and shared.numel() > 1 else None
    return BlockScaledTensor(picked(a.data, index), scale, a.format, shared, offs=of_groups)


def groups_alone(b: Any, groups: Sequence[int]) -> Any:
    """The weights of these groups, (len(groups), N, K); of several in other memory."""
    if isinstance(b, BlockScaledTensor):
        data, scale = groups_alone(b.data, groups), groups_alone(b.scale, groups)
        return BlockScaledTensor(data, scale, b.format, _shared_of(b, groups), b.scale_layout)
    if len(groups) == 1:
        return b[groups[0]][None]
    raw = b.view(torch.uint8) if b.element_size() == 1 else b
    return torch.stack([raw[group] for group in groups]).view(b.dtype)


def _shared_of(t: BlockScaledTensor, groups: Sequence[int]) -> torch.Tensor | None:
    shared = t.global_scale
    return shared if shared is None or shared.numel() == 1 else torch.stack([shared[g] for g in groups])


def dense(b: Any) -> Any:
    """(1, N, K) weights as (N, K)."""
    if isinstance(b, torch.Tensor):
        return b[0]
    shared = None if b.global_scale is None else b.global_scale.reshape(-1)[:1]
    return BlockScaledTensor(b.data[0], b.scale[0], b.format, shared, b.scale_layout)


def without_groups(a: Activation) -> Activation:
    """The operand as one that remembers no groups; its scales must not depend on any."""
    return a if isinstance(a, torch.Tensor) or a.offs is None else replace(a, offs=None)
