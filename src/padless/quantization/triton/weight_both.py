"""FP8_BLOCK weights and their transposes as a Triton kernel: one read, codes and scales of both written.

A block of 128 x 128 is the same values in both, so the transpose has the same codes and scales, transposed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.quantization.triton import casts, tiles
from padless.quantization.triton.launches import launch

# Four programs of 256 threads fit on a multiprocessor of Hopper, so that some load while others compute.
NUM_WARPS = 8
MAX_REGISTERS = 64
MAX_REGISTERS_OF_FLOAT32 = 128


def weight_both(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8, scale, transposed codes uint8, transposed scale) of checked weights (.., N, K)."""
    w = w if w.stride(-1) == 1 else w.contiguous()
    *batch, N, K = w.shape
    blocks = (ceil_div(N, 128), ceil_div(K, 128))
    codes = torch.empty((*batch, N, K), dtype=torch.uint8, device=w.device)
    transposed = torch.empty((*batch, K, N), dtype=torch.uint8, device=w.device)
    scale = torch.empty((*batch, *blocks), dtype=torch.float32, device=w.device)
    transposed_scale = torch.empty((*batch, *reversed(blocks)), dtype=torch.float32, device=w.device)
    if w.numel() > 0:
        words = N % 4 == 0
        dtype = tiles.word_type(w)
        launch(_weight_both, scale.numel())(
            w,
            codes,
            scale,
            transposed.view(torch.int32) if words else transposed,
            transposed_scale,
            N,
            K,
            w.stride(0) if w.dim() == 3 else 0,
            w.stride(-2),
            WORDS=words,
            HARDWARE_CAST=casts.casts_in_hardware(w.device),
            DTYPE=dtype,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS if dtype else MAX_REGISTERS_OF_FLOAT32,
        )
    return codes, scale, transposed, transposed_scale


@triton.jit
def _weight_both(
    w_ptr,  # (G, N, K) bf16, fp16 or fp32, strides (w_stride_g, w_stride_n, 1)
    codes_ptr,  # (G, N, K) uint8, contiguous
    scale_ptr,  # (G, ceil(N / 128), ceil(K / 128)) float32, contiguous
    transposed_ptr,  # (G, K, N) uint8, or with WORDS (G, K, N / 4) int32 of four codes each, contiguous
    transposed_scale_ptr,  # (G, ceil(K / 128), ceil(N / 128)) float32, contiguous
    N,
    K,
    w_stride_g,
    w_stride_n,
    WORDS: tl.constexpr,
    HARDWARE_CAST: tl.constexpr,
    DTYPE: tl.constexpr,  # "bf16" or "fp16": K and the strides are even, and w is read in words of two; or ""
):
    num_k_blocks = tl.cdiv(K, tiles.TILE)
    num_n_blocks = tl.cdiv(N, tiles.TILE)
    pid = tl.program_id(0)  # also the position of this block's scale
    k_block = pid % num_k_blocks
    n_block = (pid // num_k_blocks) % num_n_blocks
    group = (pid // (num_k_blocks * num_n_blocks)).to(tl.int64)
    k = k_block * tiles.TILE + tl.arange(0, tiles.TILE)
    n = n_block * tiles.TILE + 4 * tl.arange(0, tiles.QUADS)

    if DTYPE != "":
        pair = k_block * tiles.PAIRS + tl.arange(0, tiles.PAIRS)
        words_ptr = (w_ptr + group * w_stride_g).to(tl.pointer_type(tl.int32))
        x = tiles.load_words(words_ptr, n, N, pair, K // 2, w_stride_n // 2)
        low, high = tiles.words_columns_amax(x, DTYPE)
        amax = tl.max(tl.maximum(low, high), axis=0)
    else:
        x = tiles.load(w_ptr + group * w_stride_g, n, N, k, K, w_stride_n)
        amax = tl.max(tiles.columns_amax(x), axis=0)
    scale, inverse = tiles.scale_of(amax, HARDWARE_CAST)
    tl.store(scale_ptr + pid, scale)
    transposed_block = (group * num_k_blocks + k_block) * num_n_blocks + n_block
    tl.store(transposed_scale_ptr + transposed_block, scale)
    if DTYPE != "":
        pairs_ptr = (codes_ptr + group * N * K).to(tl.pointer_type(tl.int16))
        for j in tl.static_range(4):
            tiles.store_codes_of_words(x, inverse, j, n, N, pair, K // 2, pairs_ptr, DTYPE)
        words = tiles.code_words_of_words(x, inverse, inverse, DTYPE)
    else:
        for j in tl.static_range(4):
            tiles.store_codes(x, inverse, j, n, N, k, K, codes_ptr + group * N * K, K, HARDWARE_CAST)
        words = tiles.code_words(x, inverse, HARDWARE_CAST)
    if WORDS:
        first = n_block * tiles.QUADS
        target = transposed_ptr + group * K * (N // 4)
        tiles.store_transposed(words, target, k, K, N // 4, first, N // 4 - first)
    else:  # no word of four codes is aligned: byte by byte
        byte = tl.trans(words)
        for i in tl.static_range(4):
            target = transposed_ptr + (group * K + k.to(tl.int64)[:, None]) * N + (n + i)[None, :]
            mask = (k[:, None] < K) & ((n + i)[None, :] < N)
            tl.store(target, ((byte >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)
