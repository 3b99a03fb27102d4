"""The layer's functions in plain torch: their definition, and what runs on a CPU. Nothing here waits for a GPU."""

from __future__ import annotations

import torch

from padless.moe.activation import Activation, activate, sigmoid
from padless.moe.router import ID_BITS, Router
from padless.quantization.swiglu_rules import LARGEST, exp_minus
from padless.reference.gemm import round_to

LANES = 256  # partial sums of a dot product
_LAST_ID = (1 << ID_BITS) - 1
LEAST_SUM = 1e-20  # added to the sum of sigmoids that others are divided by


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


def topk(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of `padless.moe.topk` of checked arguments."""
    values = logits.to(torch.float32)
    groups = router.num_expert_groups
    choice = values
    if correction_bias is not None or router.top_groups < groups:
        choice = _sigmoid(values) if router.scoring == "sigmoid" else _softmax(values, values)
        if correction_bias is not None:
            choice = choice + correction_bias.to(torch.float32)
    ranks = _ranked(choice)
    if router.top_groups < groups:
        by_group = ranks.unflatten(1, (groups, -1))
        best = _value_of(by_group.topk(2).values)
        kept = _ids_of(_ranked(best[..., 0] + best[..., 1]).topk(router.top_groups).values)
        by_group = by_group.gather(1, kept[..., None].expand(-1, -1, by_group.shape[2]))
        ranks = by_group.flatten(1)
    ids = _ids_of(ranks.topk(router.k).values)
    chosen = values.gather(1, ids)
    if router.scoring == "softmax":
        weights = _softmax(chosen, chosen if router.renormalize else values)
    else:
        weights = _sigmoid(chosen)
        if router.renormalize:
            weights = weights / (_sum_of_pairs(weights) + LEAST_SUM)
    by_nan = choice.gather(1, ids).isnan()
    return torch.where(by_nan, float("nan"), weights * router.scaling_factor), ids


def _softmax(values: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """e^values over the sum of e^among, both less the largest of among."""
    largest = among.amax(1, keepdim=True)
    return _decayed(values - largest) / _sum_of_pairs(_decayed(among - largest))


def _decayed(x: torch.Tensor) -> torch.Tensor:
    """e^x of float32 x up to 0; 0 where the exponential ends, NaN for NaN."""
    return torch.where(x.isnan(), x, torch.where(x < -LARGEST, 0.0, exp_minus(-x)))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x) of float32 x; NaN for NaN."""
    return torch.where(x.isnan(), x, sigmoid(x))


def _sum_of_pairs(x: torch.Tensor) -> torch.Tensor:
    """(T, 1), the sums of rows: of columns 2 c and 2 c + 1, then of two such sums next to each other, and so on."""
    while x.shape[1] > 1:
        x = torch.nn.functional.pad(x, (0, x.shape[1] % 2))
        x = x[:, 0::2] + x[:, 1::2]
    return x


def _ranked(x: torch.Tensor) -> torch.Tensor:
    """int64 in the order of float32 x (.., C), -0 as 0, NaN last, and of two equal ones the column that comes first."""
    bits = torch.where(x == 0.0, 0.0, x).view(torch.int32)
    order = torch.where(x.isnan(), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return order << ID_BITS | torch.arange(x.shape[-1], device=x.device) ^ _LAST_ID


def _value_of(ranks: torch.Tensor) -> torch.Tensor:
    order = (ranks >> ID_BITS).to(torch.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _ids_of(ranks: torch.Tensor) -> torch.Tensor:
    return ranks & _LAST_ID ^ _LAST_ID


def tokens_of(inverse: torch.Tensor) -> torch.Tensor:
    """(T * k,) int64 token of every row, from (T, k) inverse."""
    flat = inverse.reshape(-1).to(torch.int64)
    rows = torch.where(flat < 0, -1 - flat, flat)
    tokens = torch.empty_like(rows)
    tokens[rows] = torch.arange(rows.shape[0], device=rows.device) // inverse.shape[1]
    return tokens


def activated(
    x: torch.Tensor, activation: Activation, row_weights: torch.Tensor | None = None, *, in_bfloat16: bool
) -> torch.Tensor:
    """The activation of x (M, N), times row_weights (M,) float32 if given; float32 or rounded to bfloat16."""
    values = activate(x, activation)
    if row_weights is not None:
        values = values * row_weights[:, None]
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
