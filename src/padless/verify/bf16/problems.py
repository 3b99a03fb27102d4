"""Operands of bf16 weight gradients, and changes that must not change their bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from padless.row_groups import clamped_ends

_STEP = 16  # tokens that the tensor core adds at once


@dataclass(frozen=True)
class Rows:
    """dY (M, N) and X (M, K) bfloat16, and where groups end."""

    dy: torch.Tensor
    x: torch.Tensor
    offs: torch.Tensor

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return groups_of(self.offs, self.dy.shape[0])


def groups_of(offs: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """[start, end) of each group's rows, of so many in all. Waits for the device."""
    return list(itertools.pairwise([0, *clamped_ends(offs.tolist(), rows)]))


def poisoned(rows: Rows, only: int | None = None) -> Rows:
    """NaN in every row of no group; with ``only`` in every row but that group's."""
    keep = torch.zeros(rows.dy.shape[0], dtype=torch.bool, device=rows.dy.device)
    for group, (start, end) in enumerate(rows.groups):
        keep[start:end] = only is None or group == only
    dy, x = (t.where(keep[:, None], float("nan")) for t in (rows.dy, rows.x))
    return Rows(dy, x, rows.offs)


def _gathered(rows: Rows, parts: Sequence[tuple[int, int]], before: int) -> Rows:
    """Groups with the rows [start, end) of ``rows``, one after the other, behind ``before`` rows of NaN's own group."""
    ends = list(itertools.accumulate((end - start for start, end in parts), initial=before))
    dy, x = (
        torch.cat([t.new_full((before, t.shape[1]), float("nan")), *(t[start:end] for start, end in parts)])
        for t in (rows.dy, rows.x)
    )
    return Rows(dy, x, torch.tensor(ends, dtype=torch.int32, device=rows.offs.device))


def permuted(rows: Rows, order: Sequence[int]) -> Rows:
    """The groups in another order, behind a first one of NaN that shifts them all by 3 rows."""
    return _gathered(rows, [rows.groups[g] for g in order], 3)


def padded(rows: Rows) -> Rows:
    """Every group filled up with rows of zeros to a multiple of 16, which the tensor core adds anyway."""

    def filled(t: torch.Tensor) -> torch.Tensor:
        parts = [t[:0]]
        for start, end in rows.groups:
            parts += [t[start:end], t.new_zeros((-(end - start) % _STEP, t.shape[1]))]
        return torch.cat(parts)

    sizes = [end - start + -(end - start) % _STEP for start, end in rows.groups]
    offs = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(rows.offs)
    return Rows(filled(rows.dy), filled(rows.x), offs)
