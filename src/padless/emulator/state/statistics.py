"""What a launch counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counts of one launch. Times are host seconds."""

    warp_instructions: int = 0
    async_operations: int = 0
    shared_accesses: int = 0
    bank_conflicts: int = 0
    ctas: int = 0
    seconds: float = 0.0
    tensor_seconds: float = 0.0  # of which in matrix products

    @property
    def warp_instructions_per_second(self) -> float:
        return self.warp_instructions / self.seconds if self.seconds else 0.0
