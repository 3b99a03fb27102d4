"""Transposes matrices of bytes as a Triton kernel: tiles of 128 x 128, read and written in runs."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.runtime.driver import is_made

_TILE = 128


def transpose(x: torch.Tensor) -> torch.Tensor:
    """(G, K, N) of x (G, N, K), both uint8 and contiguous."""
    groups, n, k = x.shape
    out = torch.empty((groups, k, n), dtype=torch.uint8, device=x.device)
    if x.numel() > 0 and is_made(None):
        grid = (ceil_div(k, _TILE) * ceil_div(n, _TILE), groups)
        _transpose[grid](x, out, n, k, TILE=_TILE, num_warps=4)
    return out


@triton.jit
def _transpose(x_ptr, out_ptr, N, K, TILE: tl.constexpr):
    columns = tl.cdiv(K, TILE)
    first = tl.program_id(1).to(tl.int64) * N * K
    n = (tl.program_id(0) // columns * TILE + tl.arange(0, TILE)).to(tl.int64)
    k = (tl.program_id(0) % columns * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (n < N)[:, None] & (k < K)[None, :]
    tile = tl.load(x_ptr + first + n[:, None] * K + k[None, :], mask=inside, other=0)
    tl.store(out_ptr + first + k[:, None] * N + n[None, :], tl.trans(tile), mask=tl.trans(inside))
