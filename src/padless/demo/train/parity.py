"""Loss parity: whether recipes end where the first recipe of a run ends, over seeds."""

from __future__ import annotations

from dataclasses import dataclass

from padless.demo.train.curves import Training
from padless.testing.judge import LOSS_LIMIT

LIMIT = LOSS_LIMIT
LIMITS = {"nvfp4": 0.01}  # of a recipe's own; four bits are not eight


@dataclass(frozen=True)
class Verdict:
    """A comparison of a recipe's last losses with the first recipe's on the same batches.

    difference: mean over seeds of (last loss / the first recipe's - 1). by_seed: the same of each seed.
    limit: what it may be. spread: standard deviation of the first recipe's last losses over seeds, relative to their
        mean, which it may not exceed either; NaN for one seed, with which nothing holds.

    A lower loss than the first recipe's is no fault, however much lower.
    """

    recipe: str
    difference: float
    by_seed: list[float]
    limit: float
    spread: float

    @property
    def holds(self) -> bool:
        """Whether the recipe learns as well; a NaN does not."""
        return self.difference <= self.limit and self.difference <= self.spread


def verdicts(training: Training) -> list[Verdict]:
    """One of every recipe but the first, which the others are compared with."""
    first, *others = dict.fromkeys(c.recipe for c in training.curves)
    spread = training.spread(first)
    return [
        Verdict(r, training.difference(r, first), training.differences(r, first), LIMITS.get(r, LIMIT), spread)
        for r in others
    ]
