"""How a seed runs the machine."""

from __future__ import annotations

import random
from dataclasses import dataclass

RESIDENT = (1, 1, 2, 3)  # clusters on the machine at once, of which a seed draws


@dataclass
class Schedule:
    """How one seed runs the machine."""

    policy: str  # "late": asynchronous work finishes only when nothing else can run; "eager": at once; "random"
    preempt: float  # chance to give way at a synchronising instruction
    complete: float  # chance, under "random", that an operation finishes between two turns
    resident: int  # clusters on the machine at once
    elect: str  # which lane elect.sync picks: "lowest", "highest", "random"
    refuse: float  # chance that try_wait returns false though it might have waited
    order: str  # grid order: "forward", "backward", "shuffled"

    @staticmethod
    def draw(seed: int) -> Schedule:
        """Seeds 0, 1 and 2 are the three plain policies; later ones mix everything."""
        if seed < 3:
            policy = ("random", "late", "eager")[seed]
            return Schedule(policy, 0.2, 0.3, 1, "lowest", 0.0, "forward")
        rng = random.Random(seed * 7919 + 1)
        return Schedule(
            rng.choice(["random", "late", "late", "eager"]),
            rng.choice([0.0, 0.05, 0.3, 0.7]),
            rng.choice([0.05, 0.2, 0.5]),
            rng.choice(RESIDENT),
            rng.choice(["lowest", "highest", "random"]),
            rng.choice([0.0, 0.1]),
            rng.choice(["forward", "backward", "shuffled"]),
        )
