"""Rules of every format's codes and scales, in plain torch: the definition that the GPU kernels must equal.

All arithmetic is float32, one rounding per operation written, none of them contracted. Where torch on CUDA would do
something else (it divides by a Python number by multiplying with its reciprocal) the operand is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat, ceil_div

# Smallest amax an FP8_BLOCK block is scaled for, so that an all-zero block has a finite reciprocal.
AMAX_FLOOR = 1e-4

FLOAT32_MAX = torch.finfo(torch.float32).max
E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_NAN = 0x7F  # in e4m3 and in e5m2
E8M0_NAN = 0xFF

# The exponent of the largest power of two that each MX element holds.
ELEMENT_EMAX = {MXFP8: 8, MXFP8_E5M2: 15, MXFP4: 2}

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000

# --- blocks ----------------------------------------------------------------------------------------------


def block_amax(values: torch.Tensor, block_rows: int, block_k: int) -> torch.Tensor:
    """max |value| of each block, (.., row blocks, column blocks); NaN where the block has one.

    Which NaN is unspecified: that of torch's vectorised maximum on x86 has all bits set, the sign too.
    """
    *batch, rows, columns = values.shape
    row_blocks, column_blocks = ceil_div(rows, block_rows), ceil_div(columns, block_k)
    padding = (0, column_blocks * block_k - columns, 0, row_blocks * block_rows - rows)
    padded = torch.nn.functional.pad(values.abs(), padding)
    return padded.view(*batch, row_blocks, block_rows, column_blocks, block_k).amax(dim=(-3, -1))


def expand_blocks(scale: torch.Tensor, block_rows: int, block_k: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Block scales (.., row blocks, column blocks), one per block, as one per element of `shape`."""
    if block_rows > 1:
        scale = scale.repeat_interleave(block_rows, dim=-2)
    return scale.repeat_interleave(block_k, dim=-1)[..., : shape[-2], : shape[-1]]


def magnitude_bits(values: torch.Tensor) -> torch.Tensor:
    """Bit patterns of |values|, float32: as int32 these order as the magnitudes do, and every NaN is above Inf."""
    return values.view(torch.int32) & 0x7FFFFFFF


# --- casts of elements -----------------------------------------------------------------------------------


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32 to e4m3 codes (uint8): nearest even, magnitudes above 448 to 448, every NaN to 0x7F."""
    # Clamped first: a finite overflow becomes NaN in some torch versions and 448 in others.
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(values.isnan(), FP8_NAN)


def to_e5m2(values: torch.Tensor) -> torch.Tensor:
    """float32 to e5m2 codes (uint8): nearest even, magnitudes above 57344 (and Inf) to 57344, NaN to 0x7F."""
    codes = values.clamp(-57344.0, 57344.0).to(torch.float8_e5m2).view(torch.uint8)
    return codes.masked_fill(values.isnan(), FP8_NAN)


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """float32 to e2m1 codes (uint8, 0..15): nearest even, magnitudes above 5 to 6, NaN to 0."""
    magnitude = values.abs()
    # The seven decision points in order. A tie goes to the even code, so every other one belongs to the code
    # above.
    code = torch.zeros_like(values, dtype=torch.uint8)
    for point, tie_goes_up in zip((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0, 1, 0, 1, 0, 1, 0), strict=True):
        code += magnitude >= point if tie_goes_up else magnitude > point
    code |= values.signbit().to(torch.uint8) << 3
    return code.masked_fill(values.isnan(), 0)  # e2m1 has no NaN; the scale says it


def from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of e2m1 codes (uint8, 0..15)."""
    magnitude = (codes & 7).to(torch.float32)  # no table, which would come from the host
    values = torch.where(magnitude < 4, magnitude * 0.5, magnitude - 2 + (magnitude == 7))
    return torch.where(codes > 7, -values, values)


TO_ELEMENT: dict[BlockScaledFormat, Callable[[torch.Tensor], torch.Tensor]] = {
    FP8_BLOCK: to_e4m3,
    MXFP8: to_e4m3,
    MXFP8_E5M2: to_e5m2,
    MXFP4: to_e2m1,
    NVFP4: to_e2m1,
}

# --- FP8_BLOCK -------------------------------------------------------------------------------------------


def fp8_block(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, scale float32): scale = max(amax, 1e-4) / 448, code = e4m3(x * (1 / scale))."""
    block_rows, block_k = FP8_BLOCK.block(kind)
    values = x.to(torch.float32)
    amax = block_amax(values, block_rows, block_k)
    scale, inverse = fp8_block_scale(amax)
    return to_e4m3(values * expand_blocks(inverse, block_rows, block_k, tuple(x.shape))), scale


def fp8_block_scale(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, 1 / scale), float32, of blocks with these largest magnitudes: scale = max(amax, 1e-4) / 448."""
    scale = amax.clamp(min=AMAX_FLOOR) / _number(E4M3_MAX, amax)
    return scale.masked_fill(scale.isnan(), float("nan")), _number(1.0, amax) / scale  # one NaN bit pattern


# --- MX --------------------------------------------------------------------------------------------------


def mx_scale_floor(amax: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """E8M0 byte (int32) of 2^(floor(log2 amax) - emax), at least 2^-127; 255 for Inf and NaN.

    Float32-subnormal amax counts as 2^-127. Elements up to twice the largest code can occur and saturate.
    """
    bits = magnitude_bits(amax)
    scale = ((bits >> 23) - ELEMENT_EMAX[format]).clamp(min=0)
    return scale.masked_fill(bits >= _INF_BITS, E8M0_NAN)


def mx_scale_rceil(amax: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """E8M0 byte (int32) of amax / max_value rounded up to a power of two; 255 for Inf and NaN.

    The quotient is rounded to float32 first. No element saturates.
    """
    quotient = magnitude_bits(amax / _number(format.max_value, amax))
    exponent, mantissa = quotient >> 23, quotient & 0x7FFFFF
    # Byte 0 is 2^-127, which as a float32 is subnormal: exponent 0 and mantissa 0x400000.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + above).masked_fill(magnitude_bits(amax) >= _INF_BITS, E8M0_NAN)


MX_SCALE_RULES = {"floor": mx_scale_floor, "rceil": mx_scale_rceil}


def mx(x: torch.Tensor, format: BlockScaledFormat, scale_rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, one per element; scale bytes uint8): code = element(x * 2^(127 - byte)), saturating."""
    values = x.to(torch.float32)
    scale = MX_SCALE_RULES[scale_rule](block_amax(values, 1, format.block_k), format)
    # 2^(127 - byte) as float32 bits. No finite amax has byte 254 (253 is the largest), whose 2^-127 is
    # subnormal.
    inverse = ((0xFE - scale) << 23).masked_fill(scale == E8M0_NAN, _NAN_BITS)
    scaled = values * expand_blocks(inverse.view(torch.float32), 1, format.block_k, tuple(x.shape))
    return TO_ELEMENT[format](scaled), scale.to(torch.uint8)


# --- NVFP4 -----------------------------------------------------------------------------------------------

NVFP4_FULL_SCALE = E4M3_MAX * E2M1_MAX  # 2688: the amax that a global scale of 1 is made for
_ONE_SIXTH = 1.0 / 6.0  # rounded to float32 when used


def finite_amax(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """max |x| over `dim`, leaving Inf and NaN out, in float32; 0 where nothing is left."""
    values = x.to(torch.float32).abs()
    values = values.masked_fill(~values.isfinite(), 0.0)
    shape = [1 if d in dim else n for d, n in enumerate(values.shape)]
    if values.numel() == 0:
        return values.new_zeros([n for d, n in enumerate(shape) if d not in dim])
    return values.amax(dim=dim)


def nvfp4_global_scale(amax: torch.Tensor) -> torch.Tensor:
    """Decode scale amax / 2688, at least 2^-128 so that its reciprocal is finite; 1 for amax 0."""
    scale = (amax / _number(NVFP4_FULL_SCALE, amax)).clamp(min=2.0**-128)
    return scale.masked_fill(amax == 0, 1.0)


def nvfp4_encode_scale(amax: torch.Tensor) -> torch.Tensor:
    """The factor of rule "te": S = min(2688 / amax, largest float32), 1 for amax 0."""
    scale = (_number(NVFP4_FULL_SCALE, amax) / amax).clamp(max=FLOAT32_MAX)
    return scale.masked_fill(amax == 0, 1.0)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """min(1 / scale, largest float32), by a correctly rounded division."""
    return (_number(1.0, scale) / scale).clamp(max=FLOAT32_MAX)


def nvfp4_factors(scale_rule: str, global_scale: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """(.., 2) float32: the two numbers derived from the global scale that a block needs.

    "te": S * fl(1/6) and 1 / S, with S from amax, or 1 / global_scale where the global scale was given.
    "torchao": the global scale and its reciprocal.
    """
    if scale_rule == "torchao":
        return torch.stack([global_scale, reciprocal(global_scale)], dim=-1)
    encode = reciprocal(global_scale) if amax is None else nvfp4_encode_scale(amax)
    return torch.stack([encode * _number(_ONE_SIXTH, encode), reciprocal(encode)], dim=-1)


def nvfp4_block_te(amax: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale bytes uint8, multiplier) of blocks in TransformerEngine's order of operations."""
    scale = to_e4m3((amax * factors[..., 0]).clamp(max=FLOAT32_MAX))
    return scale, reciprocal(scale.view(torch.float8_e4m3fn).to(torch.float32) * factors[..., 1])


def nvfp4_block_torchao(amax: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale bytes uint8, multiplier) of blocks in torchao's order: no scale below 2^-6."""
    wanted = amax / _number(E2M1_MAX, amax) / factors[..., 0]
    scale = to_e4m3(wanted.clamp(2.0**-6, E4M3_MAX))
    multiplier = factors[..., 1] / scale.view(torch.float8_e4m3fn).to(torch.float32)
    return scale, multiplier.clamp(max=FLOAT32_MAX)


NVFP4_SCALE_RULES = {"te": nvfp4_block_te, "torchao": nvfp4_block_torchao}


def nvfp4(x: torch.Tensor, scale_rule: str, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes uint8, one per element; scale bytes uint8); factors: nvfp4_factors for every row, (.., rows, 1,
    2).
    """
    values = x.to(torch.float32)
    amax = block_amax(values, 1, NVFP4.block_k)
    scale, multiplier = NVFP4_SCALE_RULES[scale_rule](amax, factors)
    broken = ~amax.isfinite()
    scale = scale.masked_fill(broken, FP8_NAN)
    multiplier = multiplier.masked_fill(broken, float("nan"))
    scaled = values * expand_blocks(multiplier, 1, NVFP4.block_k, tuple(x.shape))
    return to_e2m1(scaled), scale


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A float32 scalar on like's device."""
    return torch.full((), value, dtype=torch.float32, device=like.device)
