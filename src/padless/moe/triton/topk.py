"""Choice of every token's experts by its logits, as a Triton kernel: a program a token."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from padless.formats import ceil_div
from padless.moe.router import ID_BITS, Router
from padless.moe.triton import arithmetic
from padless.moe.twins import LEAST_SUM
from padless.quantization.swiglu_rules import LARGEST
from padless.quantization.triton import casts, swiglu_arithmetic
from padless.quantization.triton.launches import begin, launch, programmatic

_LOGITS_A_WARP = 1024
_LOWEST = tl.constexpr(-LARGEST)
_LEAST_SUM = tl.constexpr(LEAST_SUM)
_ID_BITS = tl.constexpr(ID_BITS)
_LAST_ID = tl.constexpr((1 << ID_BITS) - 1)
_ABSENT = tl.constexpr(-(1 << 62))  # below every rank


def topk(
    logits: torch.Tensor, correction_bias: torch.Tensor | None, router: Router
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, ids) of `padless.moe.topk` of checked arguments with at least one token."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, router.k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, router.k), dtype=torch.int64, device=logits.device)
    # Where all groups are chosen there are none.
    groups = router.num_expert_groups if router.top_groups < router.num_expert_groups else 1
    launch(_topk, tokens)(
        logits,
        None if correction_bias is None else correction_bias.contiguous(),
        weights,
        ids,
        logits.stride(0),
        logits.stride(1),
        float(router.scaling_factor),
        EXPERTS=experts,
        TOP_K=router.k,
        SIGMOID=router.scoring == "sigmoid",
        RENORMALIZE=router.renormalize,
        GROUPS=groups,
        TOP_GROUPS=min(router.top_groups, groups),
        HARDWARE=casts.casts_in_hardware(logits.device),
        **programmatic(logits.device),
        num_warps=min(max(ceil_div(triton.next_power_of_2(experts), _LOGITS_A_WARP), 1), 4),
        enable_fp_fusion=False,
    )
    return weights, ids


@triton.jit
def _topk(
    logits_ptr,  # (T, EXPERTS)
    bias_ptr,  # (EXPERTS,), or None
    weights_ptr,  # (T, TOP_K) float32
    ids_ptr,  # (T, TOP_K) int64
    row_stride,
    column_stride,
    scaling_factor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    begin(PROGRAMMATIC)
    BY_SCORE: tl.constexpr = (bias_ptr is not None) or (GROUPS > 1)  # rather than by logit
    token = tl.program_id(0).to(tl.int64)
    row = logits_ptr + token * row_stride

    if not SIGMOID and (BY_SCORE or not RENORMALIZE):
        expert = tl.arange(0, triton.next_power_of_2(EXPERTS))
        largest, total = _softmax_sum(_load(row, expert, column_stride, expert < EXPERTS), expert < EXPERTS, HARDWARE)

    # Ranks of a group's experts are a row; without groups all of them are one.
    SIZE: tl.constexpr = EXPERTS // GROUPS
    ROWS: tl.constexpr = triton.next_power_of_2(GROUPS)
    COLUMNS: tl.constexpr = triton.next_power_of_2(SIZE)
    group = tl.arange(0, ROWS)
    member = tl.arange(0, COLUMNS)
    expert = group[:, None] * SIZE + member[None, :]
    there = (group[:, None] < GROUPS) & (member[None, :] < SIZE)
    choice = _load(row, expert, column_stride, there)
    if BY_SCORE:
        choice = _sigmoid(choice, HARDWARE) if SIGMOID else _quotient(_decayed(choice - largest, HARDWARE), total)
        if bias_ptr is not None:
            choice += casts.to_float32(tl.load(bias_ptr + expert, mask=there, other=0.0))
    ranks = tl.where(there, _ranked(choice, expert), _ABSENT)
    if GROUPS > 1:
        best = tl.max(ranks, axis=1)
        second = tl.max(tl.where(ranks == best[:, None], _ABSENT, ranks), axis=1)
        groups = tl.where(group < GROUPS, _ranked(_value_of(best) + _value_of(second), group), _ABSENT)
        for _ in range(TOP_GROUPS):  # those that are chosen become absent
            groups = tl.where(groups == tl.max(groups, axis=0), _ABSENT, groups)
        ranks = tl.where((groups == _ABSENT)[:, None], ranks, _ABSENT)

    ranks = tl.reshape(ranks, (ROWS * COLUMNS,), can_reorder=True)  # the id is in the rank
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros(slot.shape, tl.int64)
    for j in range(TOP_K):
        first = tl.max(ranks, axis=0)
        chosen = tl.where(slot == j, first, chosen)
        ranks = tl.where(ranks == first, _ABSENT, ranks)

    ids, chosen_by, there = _id_of(chosen), _value_of(chosen), slot < TOP_K
    logits = _load(row, ids, column_stride, there)
    if SIGMOID:
        weights = tl.where(there, _sigmoid(logits, HARDWARE), 0.0)
        if RENORMALIZE:
            weights = _quotient(weights, _sum_of_pairs(weights) + _LEAST_SUM)
    else:
        if RENORMALIZE:
            largest, total = _softmax_sum(logits, there, HARDWARE)
        weights = _quotient(_decayed(logits - largest, HARDWARE), total)
    weights = tl.where(chosen_by == chosen_by, weights * scaling_factor, chosen_by)
    at = token * TOP_K + slot
    tl.store(weights_ptr + at, weights, mask=there)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=there)


@triton.jit
def _load(row, expert, column_stride, there):
    """Logits in float32, -inf where there are none."""
    values = casts.to_float32(tl.load(row + expert.to(tl.int64) * column_stride, mask=there, other=0.0))
    return tl.where(there, values, float("-inf"))


@triton.jit
def _softmax_sum(values, there, HARDWARE: tl.constexpr):
    """(the largest value, the sum of e^(value - largest) of those that are there)."""
    largest = tl.max(values, axis=0)
    return largest, _sum_of_pairs(tl.where(there, _decayed(values - largest, HARDWARE), 0.0))


@triton.jit
def _decayed(x, HARDWARE: tl.constexpr):
    """e^x of x up to 0; 0 where the exponential ends, NaN for NaN."""
    return tl.where(x < _LOWEST, 0.0, tl.where(x == x, swiglu_arithmetic.exp_minus(-x, HARDWARE), x))


@triton.jit
def _sigmoid(x, HARDWARE: tl.constexpr):
    """1 / (1 + e^-x); NaN for NaN."""
    return tl.where(x == x, arithmetic.sigmoid(x, HARDWARE), x)


@triton.jit
def _quotient(x, total):
    """x / total, correctly rounded; total is a number."""
    return tl.math.div_rn(x, tl.zeros(x.shape, tl.float32) + total)


@triton.jit
def _sum_of_pairs(x):
    """The sum of x (C,), C a power of two: of 2 c and 2 c + 1, then of two such sums next to each other, and so on."""
    for _ in tl.static_range(12 if x.shape[0] > 1 else 0):
        if x.shape[0] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2)), axis=1)
    return tl.sum(x, axis=0)


@triton.jit
def _ranked(x, column):
    """int64 in the order of float32 x, -0 as 0, NaN last, and of two equal ones the smaller column."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    order = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return (order.to(tl.int64) << _ID_BITS) | (column ^ _LAST_ID)


@triton.jit
def _value_of(rank):
    order = (rank >> _ID_BITS).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _id_of(rank):
    return ((rank & _LAST_ID) ^ _LAST_ID).to(tl.int32)
