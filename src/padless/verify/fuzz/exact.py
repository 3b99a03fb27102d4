"""Codes and scales from their bits, and back by the rules of every format, in float64: written for this judge alone.

Nothing here is shared with what it judges: not the quantizers, nor `padless.reference`. It runs where the tensors are
and waits for nothing.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat

FLT_MAX = torch.finfo(torch.float32).max
_ELEMENT = {"FP8_BLOCK": "e4m3", "MXFP8": "e4m3", "MXFP8_E5M2": "e5m2", "MXFP4": "e2m1", "NVFP4": "e2m1"}
_BITS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m1": (2, 1, 1)}  # exponent, mantissa, bias
_COUNT = {"e4m3": 0x7F, "e5m2": 0x7C, "e2m1": 8}  # finite codes that are not negative
_EMAX = {MXFP8: 8, MXFP8_E5M2: 15, MXFP4: 2}
# By cuDNN's rule and format, what the largest magnitude of a block becomes.
_SCALED_TO = {
    (rule, format): number
    for rule, e5m2 in (("cudnn", 128.0), ("cudnn_documented", 57344.0))
    for format, number in ((MXFP8, 448.0), (MXFP8_E5M2, e5m2), (MXFP4, 6.0))
}


def _magnitude(element: str, code: int) -> float:
    _, mantissa_bits, bias = _BITS[element]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    hidden = 0 if exponent == 0 else 1 << mantissa_bits
    return float((hidden + mantissa) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))


@cache
def _decoded(element: str, device: torch.device) -> torch.Tensor:
    """Values of all bytes: (256,), for e2m1 (256, 2), the low half first."""
    values: list[float] | list[tuple[float, float]]
    if element == "e8m0":
        values = [2.0 ** (byte - 127) for byte in range(255)] + [float("nan")]
    elif element == "e2m1":
        signed = [(-1.0 if c & 8 else 1.0) * _magnitude("e2m1", c & 7) for c in range(16)]
        values = [(signed[byte & 15], signed[byte >> 4]) for byte in range(256)]
    else:
        finite = _COUNT[element]
        infinity = finite if element == "e5m2" else -1

        def value(code: int) -> float:
            if code >= finite:
                return float("inf") if code == infinity else float("nan")
            return _magnitude(element, code)

        values = [(-1.0 if byte & 128 else 1.0) * value(byte & 127) for byte in range(256)]
    return torch.tensor(values, dtype=torch.float64, device=device)


def decoded(data: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """(.., K) float64 values of codes, without scales."""
    found = _decoded(_ELEMENT[format.name], data.device)[data.view(torch.uint8).long()]
    return found.flatten(-2) if format.codes_per_byte == 2 else found


def scales(scale: torch.Tensor) -> torch.Tensor:
    """float64 values of scales, float32 or one byte each."""
    if scale.dtype == torch.float32:
        return scale.double()
    element = "e8m0" if scale.dtype == torch.float8_e8m0fnu else "e4m3"
    return _decoded(element, scale.device)[scale.contiguous().view(torch.uint8).long()]


def spread(scale: torch.Tensor, format: BlockScaledFormat, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
    """One scale per block as one per value of ``shape``."""
    rows, columns = format.block(kind)
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=-2)
    return scale.repeat_interleave(columns, dim=-1)[..., : shape[-2], : shape[-1]]


# --- quantizing ------------------------------------------------------------------------------------------


@cache
def _codes(element: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(values of the codes that are finite and not negative, midpoints of neighbours)."""
    values = torch.tensor([_magnitude(element, c) for c in range(_COUNT[element])], dtype=torch.float64)
    return values.to(device), ((values[1:] + values[:-1]) / 2).to(device)


def encoded(x: torch.Tensor, element: str) -> torch.Tensor:
    """uint8 codes nearest to x, the even one of two, saturating; NaN is 0x7F, in e2m1 0."""
    _, middle = _codes(element, x.device)
    magnitude = x.abs().double().nan_to_num(nan=0.0, posinf=1e300)
    below = torch.searchsorted(middle, magnitude.contiguous())  # a tie counts as below
    tie = magnitude == middle[below.clamp(max=middle.numel() - 1)]
    code = below + (tie & (below % 2 == 1) & (below < middle.numel()))
    code = code + torch.where(x.signbit(), 8 if element == "e2m1" else 128, 0)
    return torch.where(x.isnan(), 0 if element == "e2m1" else 0x7F, code).to(torch.uint8)


def _divided(x: torch.Tensor | float, y: torch.Tensor | float) -> torch.Tensor:
    """x / y of float32 numbers, rounded once to float32: float64's own rounding of a quotient never shows there."""
    a, b = (t.double() if isinstance(t, torch.Tensor) else t for t in (x, y))
    quotient = a / b
    assert isinstance(quotient, torch.Tensor)
    return quotient.float()


def fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of float32 numbers, rounded once: the sum in float64 is rounded to odd, which float32 does not see."""
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    odd = torch.nextafter(total, torch.where(lost > 0, math.inf, -math.inf).to(total))
    return torch.where((lost.abs() > 0) & (total.view(torch.int64) % 2 == 0), odd, total).float()


def _number(value: float) -> float:
    """value rounded to float32."""
    return float(torch.tensor(value, dtype=torch.float32))


def _ceil_log2(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x.double())
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _block_amax(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest finite magnitude, whether there is an Inf or NaN) of every block."""
    rows, columns = x.shape[-2:]
    padded = torch.nn.functional.pad(x.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    split = padded.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    broken = ~split.isfinite()
    return split.masked_fill(broken, 0.0).amax((-3, -1)), broken.any(-1).any(-2)


def nvfp4_global(amax: torch.Tensor) -> torch.Tensor:
    """The decode scale that NVFP4 gets for a tensor, or a group, of largest finite magnitude amax (float32)."""
    scale = _divided(amax, 2688.0).clamp(min=2.0**-128)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def nvfp4_factors(rule: str, decode: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """(.., 2) float32; amax None where the decode scale was given."""
    if rule == "torchao":
        return torch.stack([decode, _divided(1.0, decode).clamp(max=FLT_MAX)], -1)
    if amax is None:
        encode = _divided(1.0, decode).clamp(max=FLT_MAX)
    else:
        encode = torch.where(amax == 0, torch.ones_like(amax), _divided(2688.0, amax.double()).clamp(max=FLT_MAX))
    sixth = _number(1.0 / 6.0)
    return torch.stack([(encode.double() * sixth).float(), _divided(1.0, encode).clamp(max=FLT_MAX)], -1)


def quantized(
    x: torch.Tensor,
    format: BlockScaledFormat,
    kind: str = "activation",
    rule: str = "",
    factors: torch.Tensor | None = None,
    norm_const: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, one a value; scales float32 or uint8) of x by the format's rules.

    factors: NVFP4's, (2,) or, to broadcast against rows, (.., rows, 1, 2). norm_const: (1,), of cuDNN's rules.
    """
    values = x.float()
    block = format.block(kind)
    amax, broken = _block_amax(values, block)
    if format == FP8_BLOCK:
        # Inf has the scale Inf and the multiplier 0; a NaN makes both NaN.
        nan = _block_amax(values.isnan().float(), block)[0] > 0
        top = torch.where(broken, torch.where(nan, float("nan"), float("inf")), amax)
        stored = _divided(top.clamp(min=_number(1e-4)), 448.0)
        multiplier = _divided(1.0, stored)
    elif format == NVFP4:
        assert factors is not None
        stored, multiplier = _nvfp4(amax, rule, factors)
        stored = stored.masked_fill(broken, 0x7F)
        multiplier = multiplier.masked_fill(broken, float("nan"))
    else:
        if rule == "floor":
            exponent = torch.frexp(amax.double()).exponent - 1 - _EMAX[format]
            exponent = torch.where(amax < 2.0**-126, -127, exponent)
        else:
            wanted = _divided(amax, format.max_value)
            if norm_const is not None:
                inverse = _number(1.0 / _SCALED_TO[rule, format])
                wanted = amax * inverse * norm_const if rule == "cudnn" else amax * norm_const * inverse
                broken = broken | ~wanted.isfinite()
            exponent = torch.where(wanted == 0, -127, _ceil_log2(wanted))
        exponent = exponent.clamp(-127, 127)
        stored = torch.where(broken, 255, exponent + 127).to(torch.uint8)
        multiplier = torch.exp2(-exponent.double())
        if norm_const is not None:
            multiplier = (multiplier * norm_const.double()).clamp(max=FLT_MAX)
        multiplier = multiplier.float().masked_fill(broken, float("nan"))
    scaled = values * spread(multiplier, format, kind, tuple(x.shape))
    return encoded(scaled, _ELEMENT[format.name]), stored


def _nvfp4(amax: torch.Tensor, rule: str, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = factors[..., 0], factors[..., 1]
    if rule == "torchao":
        wanted = _divided(_divided(amax, 6.0), first).clamp(2.0**-6, 448.0)
        stored = encoded(wanted, "e4m3")
        value = _decoded("e4m3", amax.device)[stored.long()]
        return stored, _divided(second, value).clamp(max=FLT_MAX)
    wanted = (amax.double() * first.double()).float().clamp(max=FLT_MAX)
    stored = encoded(wanted, "e4m3")
    value = _decoded("e4m3", amax.device)[stored.long()]
    return stored, _divided(1.0, (value * second.double()).float()).clamp(max=FLT_MAX)


def packed(codes: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """Bytes as a tensor holds them: two FP4 codes each, the even one low."""
    return codes[..., 0::2] + 16 * codes[..., 1::2] if format.codes_per_byte == 2 else codes


def tile_places(rows: torch.Tensor, columns: torch.Tensor, width: int) -> torch.Tensor:
    """(rows, columns): byte of each in 32x4x4 tiles, ``width`` of them side by side, by the layout's formula."""
    r, c = rows[:, None], columns[None, :]
    return ((r // 128) * width + c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """(R, C) bytes in 32x4x4 tiles, (bytes,); zeros where there is no scale."""
    (rows, columns), device = scale.shape, scale.device
    width = -(-columns // 4)
    where = tile_places(torch.arange(rows, device=device), torch.arange(columns, device=device), width)
    out = torch.zeros(-(-rows // 128) * width * 512, dtype=torch.uint8, device=device)
    out[where.flatten()] = scale.contiguous().view(torch.uint8).flatten()
    return out
