"""Values to block-scaled codes and back.

The torch implementation here is the definition; `padless.quantize_triton` is the same arithmetic for a GPU
and equal to it bit for bit.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from padless import layouts
from padless.formats import FP8_BLOCK, KINDS, BlockScaledFormat, BlockScaledTensor, ceil_div

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SCALE_MAJORS = ("mn", "k")

# Smallest amax a block is scaled for, so that an all-zero block has a finite reciprocal.
AMAX_FLOOR = 1e-4
E4M3_NAN = 0x7F


def quantize(
    x: torch.Tensor,
    format: BlockScaledFormat,
    *,
    kind: str = "activation",
    scale_major: str = "mn",
) -> BlockScaledTensor:
    """Codes and decode scales of x, all arithmetic in float32.

    x: (M, K) for kind "activation"; (N, K) or (G, N, K) for "weight"; bf16, fp16 or fp32; any strides.
        Blocks at the end of K (and of N, for weights) are short when the sizes are not multiples of theirs.
    scale_major: layout of activations' scales, "mn" (MN-major, ld rounded up to 4; padding is zero) or "k"
        (row-major).

    FP8_BLOCK: scale = max(amax, 1e-4) / 448 and code = e4m3(clamp(x * (1 / scale), -448, 448)), to nearest
    even. A block with a NaN has scale NaN and codes 0x7F; one with an Inf and no NaN has scale Inf and codes
    +-0 (0x7F for the Inf), so it decodes to NaN: non-finite values never turn into finite ones.
    """
    _check(x, format, kind, scale_major)
    if x.is_cuda and has_triton():
        from padless import quantize_triton

        return quantize_triton.fp8_block(x, kind, scale_major)
    return _fp8_block_torch(x, format, kind, scale_major)


@cache
def has_triton() -> bool:
    """Whether Triton can be imported; it is a dependency of torch's CUDA builds only."""
    return importlib.util.find_spec("triton") is not None


def dequantize(t: BlockScaledTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of t in its logical shape: code * scale in float32, then rounded to dtype."""
    if not isinstance(t, BlockScaledTensor):
        raise ValueError(f"t must be a BlockScaledTensor, got {type(t).__name__}")
    kind = "activation" if t.is_activation else "weight"
    block_rows, block_k = t.format.block(kind)
    scale = expand_blocks(t.scale, block_rows, block_k, t.logical_shape)
    return (t.data.to(torch.float32) * scale).to(dtype)


def expand_blocks(scale: torch.Tensor, block_rows: int, block_k: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Block scales (.., row blocks, column blocks), one per block, as one per element of `shape`."""
    if block_rows > 1:
        scale = scale.repeat_interleave(block_rows, dim=-2)
    return scale.repeat_interleave(block_k, dim=-1)[..., : shape[-2], : shape[-1]]


def _check(x: torch.Tensor, format: BlockScaledFormat, kind: str, scale_major: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in INPUT_DTYPES:
        raise ValueError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if not isinstance(format, BlockScaledFormat):
        raise ValueError(f"format must be a BlockScaledFormat such as padless.FP8_BLOCK, got {format!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    if scale_major not in SCALE_MAJORS:
        raise ValueError(f"scale_major must be one of {SCALE_MAJORS}, got {scale_major!r}")
    ranks = (2,) if kind == "activation" else (2, 3)
    if x.dim() not in ranks:
        wanted = "(M, K)" if kind == "activation" else "(N, K) or (num_groups, N, K)"
        raise ValueError(f"x must be {wanted} for kind={kind!r}, got shape {tuple(x.shape)}")
    if x.shape[-1] == 0:
        raise ValueError(f"x must have K > 0, got shape {tuple(x.shape)}")
    if format is not FP8_BLOCK:
        raise ValueError(f"format must be FP8_BLOCK, got {format.name}")


def _fp8_block_torch(
    x: torch.Tensor, format: BlockScaledFormat, kind: str, scale_major: str
) -> BlockScaledTensor:
    block_rows, block_k = format.block(kind)
    values = x.to(torch.float32)
    # Tensors and not Python numbers: torch on CUDA divides by a number by multiplying with its reciprocal.
    max_value = torch.full((), format.max_value, device=x.device)
    one = torch.ones((), device=x.device)
    scale = block_amax(values, block_rows, block_k).clamp(min=AMAX_FLOOR) / max_value
    inverse = expand_blocks(one / scale, block_rows, block_k, tuple(x.shape))
    codes = to_e4m3(values * inverse)
    scale = torch.where(scale.isnan(), torch.full_like(scale, float("nan")), scale)  # one NaN bit pattern
    if kind == "activation" and scale_major == "mn":
        scale = layouts.to_mn_major(scale)
    return BlockScaledTensor(codes, scale, format)


def block_amax(values: torch.Tensor, block_rows: int, block_k: int) -> torch.Tensor:
    """max |value| of each block, (.., row blocks, column blocks); NaN where the block has one."""
    *batch, rows, columns = values.shape
    row_blocks, column_blocks = ceil_div(rows, block_rows), ceil_div(columns, block_k)
    padding = (0, column_blocks * block_k - columns, 0, row_blocks * block_rows - rows)
    padded = torch.nn.functional.pad(values.abs(), padding)
    return padded.view(*batch, row_blocks, block_rows, column_blocks, block_k).amax(dim=(-3, -1))


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float32 to e4m3: nearest even, magnitudes above 448 (and Inf) to 448, every NaN to 0x7F."""
    # Clamped first: a finite overflow becomes NaN in some torch versions and 448 in others.
    codes = values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.masked_fill(values.isnan(), E4M3_NAN).view(torch.float8_e4m3fn)
