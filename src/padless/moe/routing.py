"""Routing: from every token's experts to rows sorted by expert, on the device and without waiting for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from padless.arguments import check_integer, refuse_kinds
from padless.moe import ops
from padless.moe.checks import MAX_EXPERTS, MAX_TOP_K, SORT_TILE, sort_bins
from padless.ops.checks import describe


class Routing(NamedTuple):
    """The slots (t, j) of T tokens sorted by expert, then by token and slot; S = T * k.

    offs: (E,) int32, end row of each expert. Rows from offs[-1] on, the tail, are slots of ids that are no expert.
    tokens: (S,) int32, the token of each row.
    inverse: (T, k) int32, the row of each slot; -1 - row where the id is no expert.

    Example: ids [[2, 0], [0, 9]] of 3 experts: slots (0, 1), (1, 0) are rows 0, 1 of expert 0, slot (0, 0) is row 2 of
    expert 2, and slot (1, 1) is row 3, the tail. offs [2, 2, 3], tokens [0, 1, 0, 1], inverse [[2, 0], [1, -4]].
    """

    offs: torch.Tensor
    tokens: torch.Tensor
    inverse: torch.Tensor


def route(top_k_index: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the slots of tokens by expert, stably.

    top_k_index: (T, k) int32 or int64 expert ids, k from 1 to 16; T may be 0. Ids below 0 or from num_experts on are no
        expert: their slots come last and take part in nothing.
    num_experts: E, from 1 to 4096.

    One launch up to 4096 slots, else three. No synchronization; safe in CUDA graphs. Raises ValueError.
    """
    check_ids(top_k_index, num_experts)
    return Routing(*ops.call("route", top_k_index, num_experts))


def check_ids(top_k_index: object, num_experts: int) -> None:
    """Raises ValueError for ids that cannot be sorted."""
    refuse_kinds(top_k_index=top_k_index)
    if (
        not isinstance(top_k_index, torch.Tensor)
        or top_k_index.dtype not in (torch.int32, torch.int64)
        or top_k_index.dim() != 2
    ):
        raise ValueError(f"top_k_index must be (T, k) int32 or int64, got {describe(top_k_index)}")
    if not 1 <= top_k_index.shape[1] <= MAX_TOP_K:
        raise ValueError(f"top_k_index must be (T, k) with k from 1 to {MAX_TOP_K}, got {describe(top_k_index)}")
    check_integer("num_experts", num_experts, 1, MAX_EXPERTS)
    slots: Any = top_k_index.numel()
    if torch.compiler.is_compiling() or isinstance(slots, torch.SymInt):
        return  # it would become a guard
    if slots > (most := most_slots(num_experts)):
        raise ValueError(
            f"top_k_index is (T, k) = {tuple(top_k_index.shape)}; of {num_experts} experts {most} slots can be sorted "
            "at most: give fewer tokens a call"
        )


def most_slots(num_experts: int) -> int:
    """Slots that can be sorted: the table of counts, a row for each tile and one for all, has 32-bit offsets."""
    return SORT_TILE * (2**31 // sort_bins(num_experts) - 1)
