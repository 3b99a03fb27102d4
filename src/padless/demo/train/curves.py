"""Losses of a run of the training demo: `Curve` of a recipe and seed, `Training` of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from padless.demo.train.model import ModelSize

LAST = 0.2  # fraction of steps at the end whose mean loss is compared


@dataclass
class Curve:
    """Losses of one recipe and seed, and what its steps took.

    losses: cross entropy of each step, nats a byte. step_seconds: median of the steps after the first tenth.
    step_bytes: most memory of a GPU that a step took beyond what it found; None on a CPU.
    """

    recipe: str
    seed: int
    losses: list[float] = field(default_factory=list)
    step_seconds: float = 0.0
    step_bytes: int | None = None

    @property
    def last(self) -> float:
        """Mean loss of the last fifth of the steps."""
        tail = self.losses[-max(1, round(LAST * len(self.losses))) :]
        return sum(tail) / len(tail)


@dataclass(frozen=True)
class Training:
    """Curves of a run, those of one seed side by side, and what was trained on what."""

    size: ModelSize
    source: str
    device: str
    curves: list[Curve]
    seconds: float

    def of(self, recipe: str) -> list[Curve]:
        """Curves of one recipe, by seed."""
        return [c for c in self.curves if c.recipe == recipe]

    def differences(self, recipe: str, against: str) -> list[float]:
        """Of each seed, last / last of the other recipe - 1."""
        return [mine.last / other.last - 1 for mine, other in zip(self.of(recipe), self.of(against), strict=True)]

    def difference(self, recipe: str, against: str) -> float:
        """Mean over seeds of `differences`."""
        ratios = self.differences(recipe, against)
        return sum(ratios) / len(ratios)

    def spread(self, recipe: str) -> float:
        """Standard deviation of a recipe's last losses over seeds, relative to their mean; NaN for one seed."""
        lasts = torch.tensor([c.last for c in self.of(recipe)], dtype=torch.float64)
        return float(lasts.std() / lasts.mean()) if lasts.numel() > 1 else float("nan")
