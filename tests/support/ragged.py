"""Ragged problems that many tests share, guarded outputs, and where the repository is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from padless.testing.guarded import GUARD_ROWS as GUARD_ROWS
from padless.testing.guarded import POISON as POISON
from padless.testing.guarded import GuardedOutput as GuardedOutput

ROOT = Path(__file__).parents[2]


def missing_gpu(present: tuple[int, int] | None, wanted: tuple[int, int] | None) -> str | None:
    """Why a test marked gpu cannot run on a device of capability `present`, or None where it can.

    sm_90a code runs on 9.0 and on nothing else, newer devices included, so `wanted` is matched exactly.
    """
    if present is None:
        return "needs a CUDA GPU and this machine has none"
    if wanted is not None and present != wanted:
        return f"needs a CUDA GPU of compute capability {wanted[0]}.{wanted[1]}, found {present[0]}.{present[1]}"
    return None


@dataclass(frozen=True)
class RaggedCase:
    """One grouped problem. Rows past the last group belong to nobody (sum(sizes) <= M). M, N and K differ."""

    name: str
    sizes: tuple[int, ...]
    M: int
    N: int
    K: int

    @property
    def num_groups(self) -> int:
        return len(self.sizes)

    @property
    def valid_rows(self) -> int:
        return sum(self.sizes)

    def offs(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """int32 cumulative ends, computed here so that group_offsets() has something to be compared with."""
        ends = torch.tensor(self.sizes, dtype=torch.int64).cumsum(0)
        return ends.to(dtype=torch.int32, device=device)


# Sizes around one 128-row tile, tails in N (not a multiple of 128) and in K (not a multiple of 128, of 64).
RAGGED_CASES = (
    RaggedCase("one_group", (192,), 192, 256, 384),
    RaggedCase("one_row_groups", (1, 1, 1, 1), 4, 136, 272),
    RaggedCase("around_a_tile", (127, 128, 129, 1), 385, 256, 144),
    RaggedCase("empty_first_and_last", (0, 65, 63, 0), 128, 72, 400),
    RaggedCase("empty_in_the_middle", (3, 0, 0, 126), 129, 384, 256),
    RaggedCase("all_in_one_group", (0, 0, 257, 0, 0), 257, 136, 128),
    RaggedCase("all_empty", (0, 0, 0), 5, 64, 128),
    RaggedCase("no_rows", (0, 0), 0, 64, 128),
    RaggedCase("rows_past_the_end", (31, 0, 97, 33), 200, 264, 176),
    RaggedCase("tiny_n_and_k", (2, 5, 0, 130), 137, 8, 16),
    RaggedCase("many_groups", tuple((7 * g) % 23 for g in range(33)), 368, 152, 304),
)
