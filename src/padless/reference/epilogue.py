"""Reference of the epilogue: float32 sums to every output of an `Epilogue` on the CPU, slow and obvious.

The arithmetic is the text at the top of epilogue.py. Shares nothing with the quantisers, the layouts or the kernels:
codes are found by comparing with every code's value, scales by logarithms, bytes by the formula of the 32x4x4 layout.
"""

from __future__ import annotations

from functools import cache

import torch

from padless.epilogue import SCALED_MAX, Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat
from padless.reference.activation import activated
from padless.reference.gemm import fma_float32, group_rows


def _float32(value: float) -> torch.Tensor:
    """A number, whatever torch makes by default."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


FLT_MAX = _float32(torch.finfo(torch.float32).max)
_EMAX = {MXFP8: 8, MXFP8_E5M2: 15, MXFP4: 2}


def epilogue_reference(acc: torch.Tensor, offs: torch.Tensor, epilogue: Epilogue, tensors: EpilogueTensors) -> None:
    """Writes every output of `epilogue` for acc (M, N) float32 into `tensors`; offs: (G,) int32 cumulative ends.

    Touches what belongs to rows of a group and nothing else.
    """
    t, tile = tensors, 0
    for group, (start, end) in enumerate(group_rows(offs, acc.shape[0])):
        if start == end:
            continue
        d = group_values(acc[start:end], group, start, epilogue, tensors)
        if t.amax is not None:
            t.amax[group] = _raised(t.amax[group].cpu(), d.abs().max()).to(t.amax.device)
        if t.d is not None:
            t.d[start:end] = d.to(t.d.dtype).to(t.d.device)
        if epilogue.row_format is not None:
            codes, scale = quantize_rows(d, epilogue, tensors, group)
            _store_codes(t.row_codes, start, codes, epilogue.row_format)
            _store_row_scales(epilogue, t, scale, start, tile)
        if epilogue.column_format is not None:
            codes, scale = quantize_rows(d.t(), epilogue, tensors, group)
            _store_codes(t.column_codes, start, codes.t(), epilogue.column_format)
            _store_column_scales(epilogue, t, scale, tile)
        tile += -(-(end - start) // 128)


def _given(t: torch.Tensor | None) -> torch.Tensor:
    """A tensor that the epilogue has, as its caller has checked."""
    assert t is not None
    return t


# --- D ---------------------------------------------------------------------------------------------------


def group_values(
    acc: torch.Tensor, group: int, start: int, epilogue: Epilogue, tensors: EpilogueTensors
) -> torch.Tensor:
    """D of one group, (rows, N_out) float32, from its sums (rows, N); its first row is `start`."""
    x = acc.cpu().to(torch.float32)
    prob = None
    if epilogue.prob:
        prob = _given(tensors.prob)[start : start + len(x)].cpu()[:, None]
    gates_bias = epilogue.bias and epilogue.bias_rule == "gated_bias"
    alpha = None
    if epilogue.alpha:
        alpha = _given(tensors.alpha)[group].cpu()
    if epilogue.bias:
        bias = _given(tensors.bias)[group].cpu()[None, :]
        bias = bias * prob if gates_bias and prob is not None else bias
        x = x + bias if alpha is None else fma_float32(x, alpha, bias)
    elif alpha is not None:
        x = x * alpha
    if epilogue.activation != "none":
        x = activated(x, epilogue)
    return x if prob is None or gates_bias else x * prob


def _raised(held: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """The larger of the two as bit patterns, where every NaN that was found is 0x7FC00000; both ()."""
    if largest.isnan():  # torch's own maximum may have the sign set, which would put it below every number
        largest = torch.tensor(0x7FC00000, dtype=torch.int32, device=largest.device).view(torch.float32)
    return torch.maximum(held.view(torch.int32), largest.view(torch.int32)).view(torch.float32)


# --- codes and scales ------------------------------------------------------------------------------------


def quantize_rows(
    d: torch.Tensor, epilogue: Epilogue, tensors: EpilogueTensors, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, one a value; scales (rows, blocks) float32 or uint8) of d with blocks along its rows."""
    format = epilogue.format
    assert format is not None
    block = format.block_k
    num_blocks = -(-d.shape[1] // block)
    codes = torch.empty(d.shape, dtype=torch.uint8, device=d.device)
    of_scales = torch.float32 if format == FP8_BLOCK else torch.uint8
    scales = torch.empty((d.shape[0], num_blocks), dtype=of_scales, device=d.device)
    for i in range(num_blocks):
        values = d[:, i * block : (i + 1) * block]
        largest = values.abs().max(dim=1).values  # NaN if there is one
        scale, multiplier = _scale(largest, epilogue, tensors, group)
        scales[:, i] = scale
        codes[:, i * block : (i + 1) * block] = nearest_code(values * multiplier[:, None], format)
    return codes, scales


def _scale(
    largest: torch.Tensor, epilogue: Epilogue, tensors: EpilogueTensors, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(stored scale, multiplier) of blocks with these largest magnitudes."""
    format, rule = epilogue.format, epilogue.scale_rule
    assert format is not None
    if format == FP8_BLOCK:
        scale = torch.maximum(largest, _float32(1e-4)) / _float32(448.0)
        scale[scale.isnan()] = float("nan")
        return scale, 1.0 / scale
    if format == NVFP4:
        return _nvfp4_scale(largest, tensors, group)
    norm_const = _float32(1.0)
    if rule in ("cudnn", "cudnn_documented"):
        norm_const = _given(tensors.norm_const).cpu()[0]
        inverse = _float32(1.0) / _float32(SCALED_MAX[rule, format])
        wanted = largest * inverse * norm_const if rule == "cudnn" else largest * norm_const * inverse  # left to right
        exponent = _ceil_log2(wanted)
    elif rule == "rceil":
        wanted = largest / _float32(format.max_value)
        exponent = _ceil_log2(wanted)
    else:
        wanted = largest
        exponent = torch.frexp(largest.to(torch.float64)).exponent - 1 - _EMAX[format]
    exponent = torch.where(largest == 0, -127, exponent).clamp(-127, 127)
    broken = ~(wanted.isfinite() & largest.isfinite())
    factor = (norm_const.to(torch.float64) * torch.exp2(-exponent.to(torch.float64))).to(torch.float32)
    multiplier = torch.minimum(factor, FLT_MAX)
    multiplier[broken] = float("nan")
    byte = torch.where(broken, 255, exponent + 127)
    return byte.to(torch.uint8), multiplier


def _ceil_log2(x: torch.Tensor) -> torch.Tensor:
    """The smallest e with x <= 2^e, for finite positive x."""
    mantissa, exponent = torch.frexp(x.to(torch.float64))  # x = mantissa 2^exponent, mantissa in [0.5, 1)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _nvfp4_scale(largest: torch.Tensor, tensors: EpilogueTensors, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    given = _given(tensors.global_scale).cpu().flatten()
    decode = given[group if given.numel() > 1 else 0]
    encode = torch.minimum(1.0 / decode, FLT_MAX)
    wanted = torch.minimum(largest * (encode * _float32(1.0 / 6.0)), FLT_MAX)
    byte = nearest_code(wanted, MXFP8)
    stored = _code_values(MXFP8)[byte.clamp(max=126).long()].to(torch.float32)
    multiplier = torch.minimum(1.0 / (stored * torch.minimum(1.0 / encode, FLT_MAX)), FLT_MAX)
    broken = ~largest.isfinite()
    multiplier[broken] = float("nan")
    byte[broken] = 0x7F
    return byte, multiplier


@cache
def _code_values(format: BlockScaledFormat) -> torch.Tensor:
    """float64 values of the finite codes that are not negative, in order."""
    if format in (MXFP4, NVFP4):
        mantissa_bits, bias, count = 1, 1, 8
    elif format == MXFP8_E5M2:
        mantissa_bits, bias, count = 2, 15, 0x7C
    else:
        mantissa_bits, bias, count = 3, 7, 0x7F
    values = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        significand = mantissa + (0 if exponent == 0 else 1 << mantissa_bits)
        values.append(significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def nearest_code(x: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """The nearest code to each x, the even one of two; the last for larger ones; NaN 0x7F, for e2m1 0."""
    values = _code_values(format)
    halfway = (values[:-1] + values[1:]) / 2  # exact
    magnitude = x.abs().to(torch.float64).nan_to_num(nan=0.0, posinf=float("inf"))
    below = torch.searchsorted(halfway, magnitude.contiguous())  # a tie counts as below
    tie = magnitude == halfway[below.clamp(max=len(halfway) - 1)]
    code = below + (tie & (below % 2 == 1) & (below < len(halfway))).long()
    is_fp4 = len(values) == 8
    code += torch.where(x.signbit(), 8 if is_fp4 else 128, 0)
    return torch.where(x.isnan(), 0 if is_fp4 else 0x7F, code).to(torch.uint8)


# --- where it goes ---------------------------------------------------------------------------------------


def _store_codes(out: torch.Tensor | None, start: int, codes: torch.Tensor, format: BlockScaledFormat) -> None:
    if format.codes_per_byte == 2:
        codes = codes[:, 0::2] + 16 * codes[:, 1::2]
    given = _given(out)
    given.view(torch.uint8)[start : start + len(codes)] = codes.to(given.device)


def _tiled(rows: torch.Tensor, columns: torch.Tensor, column_tiles: int) -> torch.Tensor:
    """Byte offsets of scales (row, column) in 32x4x4 tiles, `column_tiles` of them side by side."""
    r, c = rows[:, None], columns[None, :]
    return ((r // 128) * column_tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def _store_row_scales(epilogue: Epilogue, tensors: EpilogueTensors, scale: torch.Tensor, start: int, tile: int) -> None:
    out = _given(tensors.row_scale)
    if epilogue.row_layout in ("plain", "plain_mn"):
        out[start : start + len(scale)] = scale.view(out.dtype).to(out.device)
        return
    first = start if epilogue.row_layout == "blocked" else tile * 128
    rows, columns = (torch.arange(size, device=scale.device) for size in scale.shape)
    _scatter(out, _tiled(first + rows, columns, -(-scale.shape[1] // 4)), scale)


def _store_column_scales(epilogue: Epilogue, tensors: EpilogueTensors, scale: torch.Tensor, tile: int) -> None:
    """scale: (N_out, blocks of the group's rows)."""
    out, fmt = _given(tensors.column_scale), epilogue.column_format
    assert fmt is not None
    per_tile = 128 // fmt.block_k
    first = tile * per_tile
    room = max(tensors.column_tiles * per_tile - first, 0)
    group_tiles = -(-scale.shape[1] // per_tile)
    scale = scale[:, :room]
    if epilogue.column_layout == "plain":
        out[first : first + scale.shape[1]] = scale.t().contiguous().view(out.dtype).to(out.device)
        return
    rows, columns = (torch.arange(size, device=scale.device) for size in scale.shape)
    if epilogue.column_layout == "blocked":
        where = _tiled(rows, first + columns, tensors.column_tiles)
    else:
        where = tile * -(-len(rows) // 128) * 512 + _tiled(rows, columns, group_tiles)
        kept = where < out.numel()
        _scatter(out, where[kept], scale[kept])
        return
    _scatter(out, where, scale)


def _scatter(out: torch.Tensor, where: torch.Tensor, scale: torch.Tensor) -> None:
    out.view(torch.uint8)[where.to(out.device)] = scale.to(out.device)
