"""Loss parity of adapters: LoRA over frozen codes against LoRA over the same weights dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LIMIT = 0.005  # of the mean over seeds of |last loss / last loss over dequantized weights - 1|, both ways
SEED_LIMIT = 0.01  # of one seed's
LEAST_LEARNED = 0.05  # nats a byte that adapters must take off the frozen model's loss, or equal losses say nothing


@dataclass(frozen=True)
class Verdict:
    """Last losses of adapters over codes against those over dequantized weights, by seed.

    over_codes, dequantized: mean losses of the last fifth of the steps, nats a byte. frozen: losses without adapters, on
    the same batches.
    """

    name: str
    over_codes: Sequence[float]
    dequantized: Sequence[float]
    frozen: Sequence[float]

    @property
    def by_seed(self) -> list[float]:
        """Of each seed, the loss over codes relative to the other, minus 1."""
        return [mine / other - 1 for mine, other in zip(self.over_codes, self.dequantized, strict=True)]

    @property
    def difference(self) -> float:
        """Mean over seeds of `by_seed`."""
        return sum(self.by_seed) / len(self.by_seed)

    @property
    def learned(self) -> float:
        """The least over seeds of what adapters over dequantized weights took off the frozen model's loss."""
        return min(before - after for before, after in zip(self.frozen, self.dequantized, strict=True))

    @property
    def holds(self) -> bool:
        """Whether three seeds or more end at the same loss; a NaN does not."""
        near = abs(self.difference) <= LIMIT and all(abs(d) <= SEED_LIMIT for d in self.by_seed)
        return len(self.by_seed) >= 3 and near and self.learned >= LEAST_LEARNED
