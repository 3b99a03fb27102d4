"""A grouped problem on the CPU, of any formats."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import BlockScaledTensor

Activation = BlockScaledTensor | torch.Tensor


@dataclass
class Problem:
    """Operands on the CPU. Groups may leave rows at the end to nobody."""

    a: Activation
    b: BlockScaledTensor
    offs: torch.Tensor

    @property
    def valid_rows(self) -> int:
        return int(self.offs[-1]) if len(self.offs) else 0


def offsets(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
