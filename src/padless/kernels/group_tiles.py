"""Host side of the kernels on tiles of 128 tokens (device/token_tiles.cuh): ragged groups as launches are given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.kernels import remembered
from padless.kernels.config import MAX_GROUPS
from padless.kernels.launch import KernelConfig, Prepared, load_kernel, persistent_grid
from padless.runtime.driver import Argument, Driver, LaunchShape

_LINE = 16  # bytes of a copy
_MOST_APART = 2**29  # values from a row to the next: kernels step by two rows' bytes, which have 32 bits


@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Groups of rows, and where their columns are to begin.

    offs: (G,) int32 cumulative END rows. starts, block_starts: (G,) int32, which a kernel writes: the first column and
    the first tile of each group, as in `GroupedColumns`. alignment: 32 or 128 columns. num_tiles: enough tiles of 128
    tokens for all rows and columns, whatever the sizes of the groups are.
    """

    offs: torch.Tensor
    starts: torch.Tensor
    block_starts: torch.Tensor
    alignment: int
    num_tiles: int

    @property
    def num_groups(self) -> int:
        return self.offs.shape[0]

    def integers(self, codes: torch.Tensor, scale: torch.Tensor) -> tuple[int, ...]:
        """Arguments of kernels behind their own; codes (features, T') and scale (S, ..) of columns."""
        return self.num_groups, self.alignment, codes.shape[1], scale.shape[0], self.num_tiles


def fits(offs: torch.Tensor, *values: torch.Tensor) -> bool:
    """Whether the kernels take offs and values: at most MAX_GROUPS groups; bfloat16 rows at multiples of 16 bytes, less
    than ``_MOST_APART`` values from one to the next.
    """
    return 0 < offs.shape[0] <= MAX_GROUPS and all(
        t.dtype == torch.bfloat16
        and t.stride(1) == 1
        and t.data_ptr() % _LINE == 0
        and t.stride(0) * t.element_size() % _LINE == 0
        and t.stride(0) < _MOST_APART
        for t in values
    )


def prepared_before(
    driver: Driver,
    source: str,
    settings: tuple[Any, ...],
    config: Callable[[], KernelConfig],
    pointers: Sequence[torch.Tensor | None],
    integers: Sequence[int],
    ctas_per_sm: int,
    num_tiles: int,
) -> Prepared:
    """The launch of ``kernels/<source>``, packed anew, or before from the same settings, addresses and integers.

    settings: all that ``config`` is made from. pointers, integers: arguments in the kernel's order, the first pointer
    an operand. Only launches on a GPU are kept; others hold their tensors.
    """
    tensors = [t for t in pointers if t is not None]
    device = tensors[0].device.index or 0
    addresses = [0 if t is None else t.data_ptr() for t in pointers]
    facts = (source, device, *settings, *addresses, *integers)
    is_kept = tensors[0].is_cuda
    if is_kept and (found := remembered.known(facts)) is not None:
        return found  # type: ignore[no-any-return]
    kernel, function = load_kernel(driver, source, config(), device)
    grid = persistent_grid(driver.num_sms(device) * ctas_per_sm, num_tiles)
    arguments: list[Argument] = [*((address, 8) for address in addresses), *((value, 4) for value in integers)]
    shape = LaunchShape(grid, kernel.num_threads, 1)
    prepared = Prepared(driver.prepare(function, kernel, shape, arguments, tensors))
    return remembered.remember(facts, prepared) if is_kept else prepared
