"""What asynchronous operations ask of the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Processor(Protocol):
    """Where an operation runs: the CTA, of which a clock needs the multiprocessor."""

    slot: int


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation asks of the hardware, for a clock; functional runs do not read it.

    unit: "load", "store", "remote", "small_load", "wgmma", "mma", "cp", "commit", "tmem_ld", "tmem_st" or "other".
    cta: whose multiprocessor does it, for a load the one that receives. size: bytes. detail: the unit's own description.
    source: the CTA that issued a load. first: False for the further receivers of one multicast.
    """

    unit: str
    cta: Processor
    size: int = 0
    detail: Any = None
    source: Processor | None = None
    first: bool = True
