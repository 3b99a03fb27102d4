"""The layer's functions in plain torch: their definition, and what runs on a CPU. Nothing here waits for a GPU."""

from __future__ import annotations

import torch

from padless.moe.activation import Activation, activate
from padless.reference.gemm import round_to

LANES = 256  # partial sums of a dot product


def route(top_k_index: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(offs, tokens, inverse (T, k)) of `padless.moe.route`."""
    top_k = top_k_index.shape[1]
    ids = top_k_index.reshape(-1).to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    order = torch.argsort(ids, stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    counts = counts.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.int32))
    offs = counts[:num_experts].cumsum(0).to(torch.int32)
    row = torch.empty_like(order)
    row[order] = torch.arange(order.shape[0], device=order.device)
    inverse = torch.where(ids == num_experts, -1 - row, row)
    return offs, (order // top_k).to(torch.int32), inverse.to(torch.int32).view(top_k_index.shape)


def tokens_of(inverse: torch.Tensor) -> torch.Tensor:
    """(T * k,) int64 token of every row, from (T, k) inverse."""
    flat = inverse.reshape(-1).to(torch.int64)
    rows = torch.where(flat < 0, -1 - flat, flat)
    tokens = torch.empty_like(rows)
    tokens[rows] = torch.arange(rows.shape[0], device=rows.device) // inverse.shape[1]
    return tokens


def activated(x: torch.Tensor, activation: Activation, *, in_bfloat16: bool) -> torch.Tensor:
    """The activation of x, float32 or rounded to bfloat16."""
    values = activate(x, activation)
    return values.to(torch.bfloat16) if in_bfloat16 else values


def combine(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """`padless.moe.combine` of checked arguments."""
    tokens, top_k = inverse.shape
    total = torch.zeros((tokens, y.shape[1]), dtype=torch.float32, device=y.device)
    for j in range(top_k if y.shape[0] > 0 else 0):
        kept = (inverse[:, j] >= 0)[:, None]
        values = y[inverse[:, j].clamp(min=0).long()].to(torch.float32)
        if weights is not None:
            values = values * weights[:, j, None].to(torch.float32)
        total = torch.where(kept, total + values, total)
    if shared is not None:
        total = total + shared.to(torch.float32)
    return round_to(total, out_dtype)


def combine_backward(
    dout: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`padless.moe.combine_backward` of checked arguments."""
    tokens, n = dout.shape
    top_k = inverse.shape[1]
    d = dout.to(torch.float32)
    dy = torch.zeros(y.shape, dtype=y.dtype, device=y.device)
    dweights = torch.zeros((tokens, top_k), dtype=torch.float32, device=y.device)
    if y.numel() == 0:
        return dy, dweights
    padding = (0, -n % LANES)
    for j in range(top_k):
        kept = (inverse[:, j] >= 0)[:, None]
        row = torch.where(kept[:, 0], inverse[:, j], -1 - inverse[:, j]).long()
        dy[row] = torch.where(kept, weights[:, j, None].to(torch.float32) * d, 0.0).to(y.dtype)
        products = torch.where(kept, y[row].to(torch.float32) * d, 0.0)
        lanes = torch.zeros((tokens, LANES), dtype=torch.float32, device=y.device)
        for part in torch.nn.functional.pad(products, padding).split(LANES, dim=1):
            lanes = lanes + part
        while lanes.shape[1] > 1:
            half = lanes.shape[1] // 2
            lanes = lanes[:, :half] + lanes[:, half:]
        dweights[:, j] = lanes[:, 0]
    return dy, dweights
