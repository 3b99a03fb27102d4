"""Operands of random products: codes of any bits in wider memory full of NaN, scales in any layout, exact values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.layouts import empty_mn_major, to_blocked, to_blocked_groups
from padless.testing.operands import BF16, picked
from padless.verify.fuzz import exact
from padless.verify.fuzz.place import Place

Activation = BlockScaledTensor | torch.Tensor
_NAN = 0x7F  # e4m3 and e5m2; two e2m1 codes of 6
_MARGIN = 2  # rows of NaN before and behind
NAN_SCALE = {torch.float32: math.nan, torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fn: 0x7F}


def clamped(ends: Sequence[int], rows: int) -> list[int]:
    """The ends that count: ascending and within the rows."""
    found, last = [], 0
    for end in ends:
        last = min(max(end, last), rows)
        found.append(last)
    return found


def spans(ends: Sequence[int], rows: int) -> list[tuple[int, int]]:
    """[start, end) of every group."""
    last, found = 0, []
    for end in clamped(ends, rows):
        found.append((last, end))
        last = end
    return found


@dataclass(frozen=True, eq=False)
class Operand:
    """plain: contiguous scales (float32 ones MN-major for activations); given: the same as a call gets it; values:
    float64, without a global scale per group."""

    plain: Activation
    given: Activation
    values: torch.Tensor


@dataclass(frozen=True, eq=False)
class Weight:
    """The same of weights (G, N, K); values have the global scales."""

    plain: BlockScaledTensor
    given: BlockScaledTensor
    values: torch.Tensor


def _bytes(place: Place, shape: tuple[int, ...], format: BlockScaledFormat, generator: torch.Generator) -> torch.Tensor:
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=place.device, generator=generator)
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
    place: Place, shape: tuple[int, ...], format: BlockScaledFormat, generator: torch.Generator
) -> torch.Tensor:
    if format.scale_dtype == torch.float32:
        return torch.exp2(torch.rand(shape, device=place.device, generator=generator) * 8 - 12)
    low, high = (127 - 12, 127 + 4) if format.scale_dtype == torch.float8_e8m0fnu else (1, 0x7F)
    return torch.randint(low, high, shape, dtype=torch.uint8, device=place.device, generator=generator)


def _contiguous_among_nan(place: Place, scale: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """The scales in the middle of memory of NaN; on a multiple of 16 bytes."""
    margin = 64
    flat = torch.full(
        (scale.numel() + 2 * margin,), NAN_SCALE[format.scale_dtype], dtype=scale.dtype, device=place.device
    )
    flat[margin : margin + scale.numel()] = scale.flatten()
    return flat[margin : margin + scale.numel()].view(scale.shape).view(format.scale_dtype)


def _mn_major(scale: torch.Tensor) -> torch.Tensor:
    rows, columns = scale.shape
    padded = empty_mn_major(rows, columns, scale.device)
    padded.as_strided((columns, padded.stride(1)), (padded.stride(1), 1)).fill_(math.nan)
    return padded.copy_(scale)


def global_scales(place: Place, count: int, generator: torch.Generator) -> torch.Tensor | None:
    """count 0: None."""
    if count == 0:
        return None
    return torch.exp2(torch.rand(count, device=place.device, generator=generator) * 4 - 10)


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
) -> Operand:
    """Activations of a format by its name. Rows past the last group are NaN, and row ``nan_row`` has one.

    layout: "plain", "k" (row-major float32), "blocked" or "blocked_groups". gap: bytes between the rows.
    globals_: NVFP4's global scales, 0, 1 or as many as groups.
    """
    valid = clamped(ends, rows)[-1] if ends else 0
    if name == BF16:
        x = torch.randn((rows, k), dtype=torch.bfloat16, device=place.device, generator=generator)
        x[valid:] = math.nan
        if 0 <= nan_row < rows:
            x[nan_row, k // 2].fill_(math.nan)
        given = among_nan(place, x, gap // 2, math.nan)
        return Operand(x, given, x.double())
    format = FORMAT_BY_NAME[name]
    codes = _bytes(place, (rows, k // format.codes_per_byte), format, generator)
    scale = _scales(place, format.scale_shape((rows, k), "activation"), format, generator)
    nan = NAN_SCALE[format.scale_dtype]
    scale[valid:] = nan
    if 0 <= nan_row < rows:
        scale[nan_row, scale.shape[1] // 2].fill_(nan)
    scale = scale.view(format.scale_dtype)
    shared = global_scales(place, globals_ if format.has_global_scale else 0, generator)
    values = exact.decoded(codes, format) * exact.spread(exact.scales(scale), format, "activation", (rows, k))
    if shared is not None and shared.numel() == 1:
        values = values * shared.double()
    elif shared is not None:
        for group, (start, end) in enumerate(spans(ends, rows)):
            values[start:end] *= shared[group].double()
    data = among_nan(place, codes, gap, _NAN).view(format.data_dtype)
    mn_major = _mn_major(scale) if format == FP8_BLOCK else scale
    of_groups = offs if shared is not None and shared.numel() > 1 else None
    plain = BlockScaledTensor(codes.view(format.data_dtype), mn_major, format, shared, offs=of_groups)
    if format == FP8_BLOCK:
        stored = _contiguous_among_nan(place, scale, format) if layout == "k" else mn_major
        return Operand(plain, BlockScaledTensor(data, stored, format), values)
    if layout == "blocked":
        return Operand(plain, BlockScaledTensor(data, to_blocked(scale), format, shared, layout, of_groups), values)
    if layout == "blocked_groups":
        tiles = to_blocked_groups(scale, offs)
        return Operand(plain, BlockScaledTensor(data, tiles, format, shared, layout, offs), values)
    stored = _contiguous_among_nan(place, scale.view(torch.uint8), format)
    return Operand(plain, BlockScaledTensor(data, stored, format, shared, offs=of_groups), values)


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
) -> Weight:
    """Weights (G, N, K). One block of group ``nan_group`` has the scale NaN."""
    format = FORMAT_BY_NAME[name]
    codes = _bytes(place, (groups, n, k // format.codes_per_byte), format, generator)
    scale = _scales(place, format.scale_shape((groups, n, k), "weight"), format, generator)
    if 0 <= nan_group < groups:
        scale[nan_group, scale.shape[1] // 2, scale.shape[2] // 2].fill_(NAN_SCALE[format.scale_dtype])
    scale = scale.view(format.scale_dtype)
    shared = global_scales(place, globals_ if format.has_global_scale else 0, generator)
    values = exact.decoded(codes, format) * exact.spread(exact.scales(scale), format, "weight", (groups, n, k))
    if shared is not None:
        values = values * shared.double().view(-1, 1, 1)
    data = among_nan(place, codes, gap, _NAN).view(format.data_dtype)
    plain = BlockScaledTensor(codes.view(format.data_dtype), scale, format, shared)
    if layout == "blocked" and format != FP8_BLOCK:
        return Weight(plain, BlockScaledTensor(data, to_blocked(scale), format, shared, "blocked"), values)
    raw = scale if format.scale_dtype == torch.float32 else scale.view(torch.uint8)
    return Weight(plain, BlockScaledTensor(data, _contiguous_among_nan(place, raw, format), format, shared), values)


# --- parts -----------------------------------------------------------------------------------------------


def rows_alone(a: Activation, index: torch.Tensor, group: int) -> Activation:
    """These rows of one group, of an operand with plain scales, in memory of their own."""
    if isinstance(a, torch.Tensor):
        return picked(a, index)
    scale = picked(a.scale.contiguous(), index)
    if a.format == FP8_BLOCK:
        scale = _mn_major(scale)
    shared = a.global_scale
    if shared is not None and shared.numel() > 1:
        shared = shared[group : group + 1]
    return BlockScaledTensor(picked(a.data, index), scale, a.format, shared)


def weights_alone(b: BlockScaledTensor, group: int) -> BlockScaledTensor:
    """The weights of one group, (1, N, K)."""
    shared = b.global_scale
    if shared is not None and shared.numel() > 1:
        shared = shared[group : group + 1]
    part = slice(group, group + 1)
    return BlockScaledTensor(b.data[part], b.scale[part], b.format, shared, b.scale_layout)


def dense(b: BlockScaledTensor) -> BlockScaledTensor:
    """(1, N, K) weights as (N, K)."""
    shared = None if b.global_scale is None else b.global_scale.reshape(-1)[:1]
    return BlockScaledTensor(b.data[0], b.scale[0], b.format, shared, b.scale_layout)


def without_groups(a: Activation) -> Activation:
    """The operand as one that remembers no groups; its scales must not depend on any."""
    return a if isinstance(a, torch.Tensor) or a.offs is None else replace(a, offs=None)
