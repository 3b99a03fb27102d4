# mypy: disable-error-code="no-untyped-def"
"""The Triton kernel behind `padless.bench.cases.ep.deepep`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def expand_codes(codes: torch.Tensor, inverse: torch.Tensor, out: torch.Tensor) -> None:
    """Copies received tokens (W, H) of one byte a value to their rows of out (rows, H); H a multiple of 16."""
    words = codes.shape[1] // 4
    _expand[(codes.shape[0],)](
        codes.view(torch.int32), inverse, out.view(torch.int32), words, out.shape[0],
        TOP_K=inverse.shape[1], BLOCK=triton.next_power_of_2(words), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _expand(codes_ptr, inverse_ptr, out_ptr, words, rows, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """A program reads a token once and stores it to all of its rows."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(codes_ptr + token * words + column, mask=column < words)
    for j in tl.static_range(TOP_K):
        row = tl.load(inverse_ptr + token * TOP_K + j).to(tl.int64)
        if (row >= 0) & (row < rows):
            tl.store(out_ptr + row * words + column, values, mask=column < words)
