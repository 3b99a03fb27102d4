"""Low-rank adapters of groups of rows: what they add to a product, and its gradients.

Groups are pairs (expert, adapter), the adapters of an expert one after the other, and behind them, where rows may have
none, those rows. Products are computed in bfloat16 and added in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from padless.formats import round_up
from padless.moe import ops
from padless.moe.activation import Activation
from padless.moe.checks import on_device_of, runs_triton
from padless.nn.calls import call
from padless.runtime.choices import ActivationKind, GateUp

_RANK_MULTIPLE, _LEAST_RANK = 8, 16  # columns of bfloat16 rows that the kernels of weight gradients read
_FACTORS, _MOST_RANK = 8, 64  # of a launch that activates what it adds to


class Factors(NamedTuple):
    """a: (E, r, K) of each adapter, b: (E, N, r); bfloat16 or float32, any strides. per_expert: groups of an expert."""

    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    per_expert: int
    scaling: float


class LowRank(NamedTuple):
    """scaling * B (A x), to be added to the product of each row.

    offs: ends of the groups, (E * per_expert,) int32. dropout: of the rows that A reads, 0 for none.
    """

    factors: Factors
    offs: torch.Tensor
    dropout: float = 0.0


def width_of(rank: int) -> int:
    """Columns of the rows between both products."""
    return max(_LEAST_RANK, round_up(rank, _RANK_MULTIPLE))


@ops.operator(
    "adapter_pairs",
    "(Tensor ids, Tensor adapter_ids, int num_experts, int num_adapters) -> Tensor",
    lambda ids, *others: torch.empty_like(ids, memory_format=torch.contiguous_format),
)
def adapter_pairs(ids: torch.Tensor, adapter_ids: torch.Tensor, num_experts: int, num_adapters: int) -> torch.Tensor:
    """The group (expert, adapter) of each slot of ids (T, k) for adapter_ids (T,); -1 for ids that are no expert."""
    if runs_triton(ids) and ids.numel() > 0:
        from padless.nn.triton import low_rank as kernels

        with on_device_of(ids):
            return kernels.adapter_pairs(ids.contiguous(), adapter_ids.contiguous(), num_experts, num_adapters)
    chosen = torch.where((adapter_ids >= 0) & (adapter_ids < num_adapters), adapter_ids, num_adapters)
    pairs = ids * (num_adapters + 1) + chosen[:, None].to(ids.dtype)
    return torch.where((ids >= 0) & (ids < num_experts), pairs, -1)


def _down_fake(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], offs: Any, per_expert: int, scaling: float, tokens: Any = None
) -> torch.Tensor:
    return rows.new_empty(((rows if tokens is None else tokens).shape[0], width_of(factors[0].shape[1])))


@ops.operator(
    "low_rank_down",
    "(Tensor rows, Tensor[] factors, Tensor offs, int per_expert, float scaling, Tensor? tokens=None) -> Tensor",
    _down_fake,
)
def down(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """scaling * rows @ factor.T of each row's expert and adapter, rounded to bfloat16; (M, `width_of` (r)).

    rows: (M, K) bfloat16, or with tokens, (M,) int32, (T, K), whose rows[tokens] are meant. factors: (E, r, K), one by
    adapter. Columns from r on are 0. Rows that have no adapter or no group hold anything.
    """
    width = width_of(factors[0].shape[1])
    if runs_triton(rows) and rows.numel() > 0:
        from padless.nn.triton import low_rank as kernels

        with on_device_of(rows):
            rows = rows if rows.stride(1) == 1 else rows.contiguous()
            return kernels.low_rank_down(rows, factors, offs, per_expert, scaling, width, tokens)
    rows = rows if tokens is None else rows[tokens]
    t = rows.new_zeros((rows.shape[0], width))
    for some, factor in _rows_of_factors(rows.shape[0], factors, offs, per_expert):
        t[some, : factor.shape[0]] = (rows[some].float() @ as_read(factor).T * scaling).to(rows.dtype)
    return t


def applied(rows: torch.Tensor, low: LowRank, tokens: torch.Tensor | None = None) -> torch.Tensor:
    """A x of `down`, without dropout."""
    t: torch.Tensor = call("low_rank_down", rows, list(low.factors.a), low.offs, low.factors.per_expert, 1.0, tokens)
    return t


def _up_fake(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: Any, per_expert: int, scaling: float, added: Any
) -> torch.Tensor:
    return t.new_empty((t.shape[0], factors[0].shape[1]))


@ops.operator(
    "low_rank_up",
    "(Tensor t, Tensor[] factors, Tensor offs, int per_expert, float scaling, Tensor? added) -> Tensor",
    _up_fake,
)
def up(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """added + scaling * t @ factor.T of each row's expert and adapter, rounded once to bfloat16; (M, N).

    t: (M, `width_of` (r)) bfloat16. factors: (E, N, r), one by adapter. added: (M, N) bfloat16, None for zeros; what
    rows that have no adapter or no group are.
    """
    if runs_triton(t) and t.numel() > 0 and factors[0].shape[1] > 0:
        from padless.nn.triton import low_rank as kernels

        with on_device_of(t):
            added = None if added is None else added.contiguous()
            return kernels.low_rank_up(t.contiguous(), factors, offs, per_expert, scaling, added)
    out = t.new_zeros((t.shape[0], factors[0].shape[1])) if added is None else added.clone()
    for some, factor in _rows_of_factors(t.shape[0], factors, offs, per_expert):
        found = t[some, : factor.shape[1]].float() @ as_read(factor).T * scaling
        out[some] = (out[some].float() + found).to(t.dtype)
    return out


def up_activated_fake(added: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Empty results of `up_activated` of added, an activation and a format."""
    *activation, format = how
    rows, columns = added.shape[0], Activation(*activation).out_columns(added.shape[1])
    values = added.new_empty((rows, columns))
    if format == "BF16":
        return values, values.new_empty(0, dtype=torch.uint8), values.new_empty(0, dtype=torch.uint8)
    return values, *ops._quantized_fake(rows, columns, format, "plain", added)


@ops.operator(
    "low_rank_up_activated",
    "(Tensor t, Tensor[] factors, Tensor offs, int per_expert, float scaling, Tensor added, str kind, str gate_up, "
    "float alpha, float? limit, float up_offset, str format) -> (Tensor, Tensor, Tensor)",
    lambda t, factors, offs, per_expert, scaling, added, *how: up_activated_fake(added, *how),
)
def up_activated(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor, kind: ActivationKind, gate_up: GateUp, alpha: float, limit: float | None, up_offset: float,
    format: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The activation of `up`, in bfloat16, and quantized from its float32 values to format; the last two are empty for
    "BF16". format: also "FP8_BLOCK", and then `activates_up` says what is one pass.
    """
    activation, is_quantized = Activation(kind, gate_up, alpha, limit, up_offset), format != "BF16"
    nothing, no_scale = (torch.empty(0, dtype=torch.uint8, device=t.device) for _ in range(2))
    if runs_triton(t) and added.numel() > 0 and activates_up(activation, factors):
        from padless.nn.triton import low_rank as kernels

        with on_device_of(t):
            given = (t.contiguous(), factors, offs, per_expert, scaling, added.contiguous())
            values, codes, scale = kernels.low_rank_up_activated(*given, activation, is_quantized)
        return values, nothing if codes is None else codes, no_scale if scale is None else scale
    how = (kind, gate_up, alpha, limit, up_offset)
    h = up(t, factors, offs, per_expert, scaling, added)
    if not is_quantized:
        return ops.call("activate_quantize", h, *how, format, "", "plain", None, None)[0], nothing, no_scale
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    found = ops.call("activate_and_quantize", h, *how, format, "", "plain", None, None)
    return found


def activates_up(activation: Activation, factors: Sequence[torch.Tensor]) -> bool:
    """Whether what `up` adds to is activated in the same pass."""
    return activation.is_gated and len(factors) <= _FACTORS and factors[0].shape[2] <= _MOST_RANK


def _rows_of_factors(
    rows: int, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int
) -> list[tuple[slice, torch.Tensor]]:
    """The rows of each group that has some and an adapter, and its factor."""
    found = []
    start = 0
    for group, end in enumerate(offs.tolist()):
        end = min(end, rows)
        expert, adapter = divmod(group, per_expert)
        if end > start and adapter < len(factors):
            found.append((slice(start, end), factors[adapter][expert]))
        start = max(start, end)
    return found


def as_read(factor: torch.Tensor) -> torch.Tensor:
    """A factor's values as the products read them: float32 of bfloat16."""
    return factor.to(torch.bfloat16).float()


def factor_gradients(
    dy: torch.Tensor, rows: torch.Tensor, t: torch.Tensor, dt: torch.Tensor | None, offs: torch.Tensor, of: Factors,
    needs_b: bool,
) -> list[torch.Tensor | None]:  # fmt: skip
    """The gradients of a, where dt is given, and of b, for the gradient dy (M, N) bfloat16 of what is added.

    rows: (M, K) bfloat16 that A read, t: what `down` made of them with scaling 1. dt: (M, `width_of` (r)), t's gradient.
    """
    da, db = [None] * len(of.a), [None] * len(of.b)
    if dt is not None:
        found = call("bf16_grouped_gemm_wgrad", dt, rows, offs, torch.float32)
        da = [found[i :: of.per_expert, : a.shape[1]].to(a.dtype) for i, a in enumerate(of.a)]
    if needs_b:
        found = call("bf16_grouped_gemm_wgrad", dy, t, offs, torch.float32)
        db = [(found[i :: of.per_expert, :, : b.shape[2]] * of.scaling).to(b.dtype) for i, b in enumerate(of.b)]
    return [*da, *db]
