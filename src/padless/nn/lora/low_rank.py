"""The low-rank product under autograd: rows @ A[g].T @ B[g].T for groups of rows, and its three gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad

from padless.gradients import once_differentiable
from padless.nn.calls import call

_RANK_MULTIPLE, _LEAST_RANK = 8, 16  # columns of bfloat16 rows that the kernels of weight gradients read


def low_rank_product(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """(rows @ a[g].T) @ b[g].T for the rows of each group, both products rounded to bfloat16; (M, N).

    rows: (M, K) bfloat16. a: (G, r, K) and b: (G, N, r), bfloat16, any r from 1. offs: (G,) int32. Rows from offs[-1] on
    hold anything. A rank that no kernel takes is filled up with zeros in a and b, never in the rows.
    """
    rank = a.shape[1]
    more = max(_LEAST_RANK, -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE) - rank
    if more:
        a, b = pad(a, (0, 0, 0, more)), pad(b, (0, more))
    out: torch.Tensor = _LowRank.apply(rows, a, b, offs)  # type: ignore[no-untyped-call]
    return out


class _LowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        a, b = a.contiguous(), b.contiguous()
        t = call("bf16_grouped_gemm", rows, a, offs, False, False)
        ctx.save_for_backward(rows, t, a, b, offs)
        out: torch.Tensor = call("bf16_grouped_gemm", t, b, offs, False, False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, t, a, b, offs = ctx.saved_tensors
        needs_rows, needs_a, needs_b = ctx.needs_input_grad[:3]
        dout = dout.contiguous()
        drows = da = db = None
        if needs_rows or needs_a:
            dt = call("bf16_grouped_gemm", dout, b, offs, True, False)
            if needs_rows:
                drows = call("bf16_grouped_gemm", dt, a, offs, True, False)
            if needs_a:
                da = call("bf16_grouped_gemm_wgrad", dt, rows, offs, torch.float32).to(a.dtype)
        if needs_b:
            db = call("bf16_grouped_gemm_wgrad", dout, t, offs, torch.float32).to(b.dtype)
        return drows, da, db, None
