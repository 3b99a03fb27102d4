"""Plan of an exchange: which row of which rank is which slot of which token."""

from __future__ import annotations

from typing import NamedTuple

import torch

from padless.moe import ops


class ExpertPlan(NamedTuple):
    """Result of a dispatch without the rows, and what a combine needs; tensors only.

    R ranks, at most Tmax tokens each with k slots, Eloc experts on this rank, C rows of capacity.

    offs: (Eloc,) int32, end row of each expert, at most C. Rows are in the order of (expert, source rank, token, slot).
    prob: (C,) float32, the weight of each row; undefined from offs[-1] on. Differentiable where the weights are.
    inverse: (R * Tmax, k) int32, the row of each slot of token ``source * Tmax + token``; negative where the slot's
        expert is not on this rank, C or more where the row did not fit.
    ids: (T, k) int32, this rank's own ids.
    overflow: () int32, rows that did not fit into the capacity. Where it is not 0 the next call of the object raises.
    weights: (T, k), this rank's own router weights as they were given, without their gradients; with sums of ranks the
        same memory.
    """

    offs: torch.Tensor
    prob: torch.Tensor
    inverse: torch.Tensor
    ids: torch.Tensor
    overflow: torch.Tensor
    weights: torch.Tensor | None = None


class Sorted(NamedTuple):
    """Slots of all ranks sorted by local expert: see `ExpertPlan`; offs are not cut at the capacity.

    tokens: (slots,) int32, the token ``source * Tmax + token`` of each row.
    """

    offs: torch.Tensor
    inverse: torch.Tensor
    tokens: torch.Tensor


def sort_slots(table: torch.Tensor, num_local_experts: int) -> Sorted:
    """table: (R * Tmax, k) int32 local experts, negative for none. A stable sort: no atomic decides an order."""
    offs, tokens, inverse = ops.call("route", table, num_local_experts)
    return Sorted(offs, inverse, tokens)
