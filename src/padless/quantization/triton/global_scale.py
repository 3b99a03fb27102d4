"""NVFP4's global scales as Triton kernels: the largest finite magnitude of a tensor, and what is derived from it.

The same as `padless.quantization.rules.finite_amax`, `.nvfp4_global_scale` and `.nvfp4_factors`, bit for bit. One kernel
reads the values once and leaves a number for every tile or row, one small kernel does all the rest.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.layouts import group_max
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch
from padless.quantization.triton.row_blocks import WORD_INPUTS, as_rows, is_word_aligned

# The tile whose largest value one program looks for: a row of a warp, eight 16-byte loads a thread.
_ROWS = 32
_COLUMNS = 256

_FULL_SCALE = tl.constexpr(2688.0)  # quantize_rules.NVFP4_FULL_SCALE
_ONE_SIXTH_BITS = tl.constexpr(0x3E2AAAAB)  # float32 nearest to 1 / 6
_SMALLEST_BITS = tl.constexpr(0x00200000)  # 2^-128


def global_scale(x: torch.Tensor, scale_rule: str, offs: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(decode scale, factors) of all of x, () and (2,), or of each group of its rows or each weight, (G,) and (G, 2)."""
    amax = partial_amax(x, offs)
    groups, count = amax.shape
    decode = torch.empty(groups, dtype=torch.float32, device=x.device)
    factors = torch.empty((groups, 2), dtype=torch.float32, device=x.device)
    if groups > 0:
        block = min(max(triton.next_power_of_2(count), 16), 4096)
        launch(_derive, groups)(
            amax, decode, factors, count, RULE=scale_rule, BLOCK=block, num_warps=8 if count > 64 else 1
        )
    return (decode, factors) if x.dim() == 3 or offs is not None else (decode[0], factors[0])


def given_factors(decode: torch.Tensor, scale_rule: str) -> torch.Tensor:
    """(2,) or (groups, 2) factors of decode scales that are known, () or (groups,) float32: one small kernel."""
    given = decode.contiguous()
    factors = torch.empty((*given.shape, 2), dtype=torch.float32, device=given.device)
    count = given.numel()
    if count > 0:
        block = min(triton.next_power_of_2(count), 1024)
        launch(_factors_of_given, ceil_div(count, block))(
            given, factors, count, RULE=scale_rule, BLOCK=block, num_warps=1
        )
    return factors


def partial_amax(x: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """(1, n), or (groups, n) for groups of rows and weights, float32: what the largest finite |x| are the largest of."""
    flat = as_rows(x)
    rows, K = flat.shape
    # A number for each row and chunk of it, or for each tile: no atomics, so nothing depends on an order.
    by_row = offs is not None or (x.dim() == 3 and x.shape[1] % _ROWS != 0)
    chunks, tiles = ceil_div(K, _COLUMNS), ceil_div(rows, _ROWS)
    amax = torch.empty((rows if by_row else tiles, chunks), dtype=torch.float32, device=x.device)
    if x.numel() > 0:
        words = WORD_INPUTS.get(x.dtype, "none") if is_word_aligned(flat) else "none"
        values = flat if words == "none" else flat.view(torch.int32)
        sizes, tile = (rows, K, values.stride(0)), {"BLOCK_M": _ROWS, "BLOCK_K": _COLUMNS}
        launch(_chunk_amax, chunks * tiles)(values, amax, *sizes, WORDS=words, BY_ROW=by_row, **tile, num_warps=4)
    if offs is not None:
        return group_max(amax.amax(1), offs)[:, None]
    groups = x.shape[0] if x.dim() == 3 else 1
    return amax.view(groups, amax.numel() // groups) if groups > 0 else amax.view(0, 1)


@triton.jit
def _finite_order(words, DTYPE: tl.constexpr):
    """int32 that order as the larger finite magnitude of the two "bf16" or "fp16" in each int32; not finite: lowest.

    The magnitude is in the upper 16 bits, moved up so that Inf and NaN overflow to negative numbers; the lower 16 are
    anything.
    """
    if DTYPE == "bf16":
        moved = (words & 0x7FFF7FFF) + 0x00800080
    else:
        moved = (words & 0x7FFF7FFF) + 0x04000400
    return tl.maximum(moved, moved << 16)


@triton.jit
def _magnitude(order, DTYPE: tl.constexpr):
    """float32 magnitude of what _finite_order made; 0 for what is not finite."""
    if DTYPE == "bf16":
        return ((tl.maximum(order >> 16, 0x0080) - 0x0080) << 16).to(tl.float32, bitcast=True)
    half = tl.maximum(order >> 16, 0x0400) - 0x0400
    return half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _chunk_amax(
    x_ptr,  # (rows, K) bf16, fp16 or fp32, strides (x_stride, 1)
    amax_ptr,  # BY_ROW: (rows, ceil(K / BLOCK_K)) float32, contiguous; or (ceil(rows / BLOCK_M), ceil(K / BLOCK_K))
    rows,
    K,
    x_stride,
    WORDS: tl.constexpr,  # as in _row_blocks
    BY_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Largest finite magnitude in every chunk of BLOCK_K columns of every row or of BLOCK_M rows."""
    num_chunks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    chunk = pid % num_chunks
    row = (pid // num_chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    row64 = row.to(tl.int64)
    if WORDS == "none":
        column = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (row[:, None] < rows) & (column[None, :] < K)
        x = tl.load(x_ptr + row64[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
        bits = casts.magnitude_bits(casts.to_float32(x))
        bits = tl.where(bits < casts.INF_BITS, bits, 0)
    else:
        pair = chunk * (BLOCK_K // 2) + tl.arange(0, BLOCK_K // 2)
        inside = (row[:, None] < rows) & (pair[None, :] < K // 2)
        words = tl.load(x_ptr + row64[:, None] * x_stride + pair[None, :], mask=inside, other=0)
        bits = _finite_order(words, WORDS)
    largest = tl.max(bits, axis=1)
    if not BY_ROW:
        largest = tl.max(largest, axis=0)
    if WORDS == "none":
        amax = largest.to(tl.float32, bitcast=True)
    else:
        amax = _magnitude(largest, WORDS)
    if BY_ROW:
        tl.store(amax_ptr + row64 * num_chunks + chunk, amax, mask=row < rows)
    else:
        tl.store(amax_ptr + pid, amax)


@triton.jit
def _factors(decode, encode, RULE: tl.constexpr):
    """`quantize_rules.nvfp4_factors` of a decode scale and the encode scale that goes with it."""
    if RULE == "te":
        first = encode * tl.full(encode.shape, _ONE_SIXTH_BITS, tl.int32).to(tl.float32, bitcast=True)
        second = tl.minimum(casts.quotient(1.0, encode), casts.FLOAT32_MAX)
    else:
        first = decode
        second = tl.minimum(casts.quotient(1.0, decode), casts.FLOAT32_MAX)
    return first, second


@triton.jit(do_not_specialize=["count"])
def _factors_of_given(
    decode_ptr,  # (count,) float32
    factors_ptr,  # (count, 2) float32, contiguous
    count,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The two factors of decode scales that are known."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    decode = tl.load(decode_ptr + index, mask=index < count, other=1.0)
    encode = tl.minimum(casts.quotient(1.0, decode), casts.FLOAT32_MAX)
    first, second = _factors(decode, encode, RULE)
    tl.store(factors_ptr + index * 2, first, mask=index < count)
    tl.store(factors_ptr + index * 2 + 1, second, mask=index < count)


@triton.jit(do_not_specialize=["count"])
def _derive(
    amax_ptr,  # (groups, count) float32, contiguous
    decode_ptr,  # (groups,) float32
    factors_ptr,  # (groups, 2) float32, contiguous
    count,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The global scale of a group's largest amax, and the two factors of `quantize_rules.nvfp4_factors`."""
    group = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.float32)
    start = group * 0
    while start < count:  # range does not take count in the interpreter of Triton 3.6
        index = start + tl.arange(0, BLOCK)
        some = tl.load(amax_ptr + group.to(tl.int64) * count + index, mask=index < count, other=0.0)
        largest = tl.maximum(largest, some)
        start += BLOCK
    amax = tl.max(largest, axis=0, keep_dims=True)
    one = tl.full(amax.shape, 1.0, tl.float32)
    nothing = amax == 0.0
    amax = tl.where(nothing, one, amax)
    smallest = tl.full(amax.shape, _SMALLEST_BITS, tl.int32).to(tl.float32, bitcast=True)
    decode = tl.where(nothing, one, tl.maximum(casts.divided_by(amax, _FULL_SCALE), smallest))
    encode = tl.minimum(casts.quotient(_FULL_SCALE, amax), casts.FLOAT32_MAX)
    first, second = _factors(decode, tl.where(nothing, one, encode), RULE)
    only = tl.arange(0, 1)
    tl.store(decode_ptr + group + only, decode)
    tl.store(factors_ptr + group * 2 + only, first)
    tl.store(factors_ptr + group * 2 + 1 + only, second)
