# mypy: disable-error-code="no-untyped-def"
"""The grouped product of frameworks' fused Mixture-of-Experts kernels, in plain Triton: one launch over sorted rows.

Rows are sorted by expert, every expert's share is filled up to a multiple of BLOCK_M with rows that do not exist, and a
program computes one tile: it gathers its rows of a, reads its expert's weights and writes rows of c.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fp8_block_product(
    a_ptr,  # (rows, K) e4m3, contiguous
    a_scale_ptr,  # (rows, K / 128) float32, contiguous
    b_ptr,  # (E, N, K) e4m3, contiguous
    b_scale_ptr,  # (E, N / 128, K / 128) float32, contiguous
    c_ptr,  # (rows, N) bfloat16, contiguous
    row_ptr,  # (blocks * BLOCK_M,) int32: a row, or `rows` where there is none
    expert_ptr,  # (blocks,) int32
    used_ptr,  # (1,) int32: rows in use, a multiple of BLOCK_M
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c[row] = a[row] @ b[expert].T. N and K are multiples of 128; BLOCK_K of 256 is two steps of 128 to a turn of the
    loop."""
    STEP: tl.constexpr = min(BLOCK_K, 128)
    block, column, row, there, expert = _place(row_ptr, expert_ptr, used_ptr, rows, N, BLOCK_M, BLOCK_N)
    if block >= 0:
        k = tl.arange(0, STEP)
        a_at = a_ptr + row[:, None] * K + k[None, :]
        b_at = b_ptr + (expert * N + column)[None, :] * K + k[:, None]
        a_scale_at = a_scale_ptr + row * (K // 128)
        b_scale_at = b_scale_ptr + (expert * (N // 128) + column // 128) * (K // 128)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            for step in tl.static_range(BLOCK_K // STEP):
                at = start + step * STEP
                inside = at < K  # K may be an odd multiple of 128
                a = tl.load(a_at + at, mask=there[:, None] & inside, other=0.0)
                b = tl.load(b_at + at, mask=(k < K - at)[:, None], other=0.0)
                a_scale = tl.load(a_scale_at + at // 128, mask=there & inside, other=0.0)
                b_scale = tl.load(b_scale_at + at // 128, mask=(column < N) & inside, other=0.0)
                total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        _store(c_ptr, total, row, there, column, N)


@triton.jit
def mxfp4_product(
    a_ptr,  # (rows, K) bfloat16, contiguous
    b_ptr,  # (E, N, K / 2) uint8, contiguous: two e2m1 codes a byte
    b_scale_ptr,  # (E, N, K / 32) uint8, contiguous: e8m0
    c_ptr,  # (rows, N) bfloat16, contiguous
    row_ptr,  # as of fp8_block_product
    expert_ptr,
    used_ptr,
    rows,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The same of bfloat16 rows and MXFP4 weights by `tl.dot_scaled`; K a multiple of 32."""
    block, column, row, there, expert = _place(row_ptr, expert_ptr, used_ptr, rows, N, BLOCK_M, BLOCK_N)
    if block >= 0:
        k, byte, run = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
        a_at = a_ptr + row[:, None] * K + k[None, :]
        b_at = b_ptr + (expert * N + column)[None, :] * (K // 2) + byte[:, None]
        scale_at = b_scale_ptr + (expert * N + column)[:, None] * (K // 32) + run[None, :]
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            a = tl.load(a_at + start, mask=there[:, None] & (start + k < K)[None, :], other=0.0)
            in_b = (column < N)[None, :] & (start // 2 + byte < K // 2)[:, None]
            in_scale = (column < N)[:, None] & (start // 32 + run < K // 32)[None, :]
            b = tl.load(b_at + start // 2, mask=in_b, other=0)
            scale = tl.load(scale_at + start // 32, mask=in_scale, other=0)
            total = tl.dot_scaled(a, None, "bf16", b, scale, "e2m1", acc=total)
        _store(c_ptr, total, row, there, column, N)


@triton.jit
def _place(row_ptr, expert_ptr, used_ptr, rows, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(block of rows or -1, columns, rows, whether each is there, expert) of a program; int64."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    column = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.load(row_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    expert = tl.load(expert_ptr + block).to(tl.int64)
    block = tl.where(block * BLOCK_M < tl.load(used_ptr), block, -1)
    return block, column.to(tl.int64), row.to(tl.int64), row < rows, expert


@triton.jit
def _store(c_ptr, total, row, there, column, N):
    at = c_ptr + row[:, None] * N + column[None, :]
    tl.store(at, total.to(tl.bfloat16), mask=there[:, None] & (column < N)[None, :])
