"""Operands of quantising grouped GEMMs as a caller has them, and what their results are compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, dequantize, group_offsets, layouts, quantize
from padless.reference.gemm import group_rows

SIZES = [70, 0, 130, 33]


def operands(format, sizes=SIZES, n=192, k=160, extra=0, seed=0, a_format=None):  # type: ignore[no-untyped-def]
    """(a, b, offs) as BlockScaledTensors; `extra` rows belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    m, groups = sum(sizes) + extra, len(sizes)
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(groups, n, k, generator=generator)
    tiled = {} if format == FP8_BLOCK else {"scale_layout": "blocked"}
    a = quantize(x, a_format or format, **tiled)
    return a, quantize(w, format, kind="weight", **tiled), group_offsets(sizes)


def as_cudnn(a, b) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """The same bytes as cuDNN's tensors."""
    m, k = a.data.shape
    return {
        "a_tensor": a.data.as_strided((m, k, 1), (k, 1, m * k)),
        "b_tensor": b.data.permute(1, 2, 0),
        "sfa_tensor": layouts.cudnn_view(a.scale, m, a.scale_columns),
        "sfb_tensor": layouts.cudnn_view(b.scale, b.data.shape[1], b.scale_columns),
    }


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def exact_d(a, b, offs, alpha=None, prob=None, bias=None, prob_on_bias=True):  # type: ignore[no-untyped-def]
    """float64 D; rows of no group are NaN."""
    x, w = dequantize(a).double(), dequantize(b).double()
    d = torch.full((x.shape[0], w.shape[1]), float("nan"), dtype=torch.float64)
    for g, (start, end) in enumerate(group_rows(offs, x.shape[0])):
        own = x[start:end] @ w[g].t()
        own = own if alpha is None else own * alpha[g].double()
        p = 1.0 if prob is None else prob.flatten()[start:end, None].double()
        if bias is None:
            d[start:end] = own * p
        else:
            d[start:end] = own + bias[g].double() * p if prob_on_bias else (own + bias[g].double()) * p
    return d


def check_groups(got: torch.Tensor, wanted: torch.Tensor, offs: torch.Tensor, atol: float, rtol: float) -> None:
    """Every element of every group within atol + rtol * |wanted|; the message says which group."""
    for g, (start, end) in enumerate(group_rows(offs, got.shape[0])):
        error = (got[start:end].double() - wanted[start:end]).abs()
        allowed = atol + rtol * wanted[start:end].abs()
        assert (error <= allowed).all(), f"group {g}: {(error - allowed).max()} too much"


def refused(call, match: str, **change: Any) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=match):
        call(**change)
