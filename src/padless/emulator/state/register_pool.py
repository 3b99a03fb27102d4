"""A CTA's registers: how many a thread has at launch, and the pool through which setmaxnreg moves them between warps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from padless.emulator.ptx.ast import Function, Immediate, Instruction

REGISTERS_PER_SM = 64 * 1024
WARPS_PER_SM = 64
PARTITIONS = 4  # of an SM, each with a quarter of its registers and of its warps
GRANULE = 8  # registers a thread in which a warp's share is allocated
LEAST, MOST = 24, 256  # what setmaxnreg takes; at launch, too: 255 that an instruction can name take 256


def registers_at_launch(function: Function, body: Iterable[Instruction]) -> int | None:
    """Registers that ptxas gives each thread of a kernel with setmaxnreg; None where it does not know and drops it.

    As ptxas of CUDA 12.8 and 13.1 does for sm_90a and sm_100a: .minnctapersm CTAs of .maxntid (.reqntid) threads share
    the SM, whose warps come in fours; .maxnreg is a second bound, and the largest setmaxnreg.inc a third. Without
    .maxnreg and without one of the others it says "'setmaxnreg' ignored" (C7508).
    """
    bounds = []
    if function.max_threads is not None and function.min_ctas is not None:
        x, y, z = function.max_threads
        warps = -(-x * y * z // 32) * function.min_ctas
        if warps <= WARPS_PER_SM:
            warps = -(-warps // PARTITIONS) * PARTITIONS
            bounds.append(REGISTERS_PER_SM // (32 * warps) // GRANULE * GRANULE)
    if function.max_registers is not None:
        bounds.append(max(-(-function.max_registers // GRANULE) * GRANULE, LEAST))
    if not bounds:
        return None
    increases = [
        operand.value
        for instruction in body
        if instruction.opcode == "setmaxnreg" and "inc" in instruction.modifiers
        for operand in instruction.operands
        if isinstance(operand, Immediate)
    ]
    return min(*bounds, MOST, max(increases, default=MOST))


class RegisterPool:
    """The registers that one CTA was given at launch. Counts are registers a thread; a warp holds 32 times as many.

    Warps that have ended keep theirs: only setmaxnreg.dec returns registers.
    """

    def __init__(self, warps: int, at_launch: int) -> None:
        self.at_launch = at_launch
        self.held = [at_launch] * warps  # by warp
        self.wanted = list(self.held)  # the same, with what waiting warps ask for
        self.free = 0  # registers

    @property
    def given(self) -> int:
        """Registers of the CTA: what launch gave its threads."""
        return 32 * len(self.held) * self.at_launch

    def missing(self, warp: int, count: int) -> int:
        """Registers that a warp lacks to hold `count` a thread."""
        return 32 * (count - self.held[warp])

    def available(self, _warp: int) -> int:
        """Registers that a warp may take."""
        return self.free

    def give(self, warp: int, count: int) -> None:
        self.free -= self.missing(warp, count)
        self.held[warp] = self.wanted[warp] = count

    def describe(self, warp: int) -> str:
        """Why a warp waits: what is asked for, what launch gave, and which count would fit."""
        count = self.wanted[warp]
        asked = Counter(self.wanted)
        terms = " + ".join(f"{warps} warps x 32 x {each}" for each, warps in sorted(asked.items(), reverse=True))
        others = 32 * (sum(self.wanted) - count * asked[count])
        fits = min((self.given - others) // (32 * asked[count]) // GRANULE * GRANULE, MOST)
        remedy = f"{fits} for these {asked[count]} warps" if fits >= LEAST else "no count for these warps"
        return (
            f"setmaxnreg.inc {count} waits for {self.missing(warp, count)} registers, the CTA's pool has {self.free}: "
            f"{32 * sum(self.wanted)} are asked for ({terms}), {self.given} were given to the CTA at launch "
            f"({32 * len(self.held)} threads x {self.at_launch}); {remedy} would fit"
        )


class PartitionedPool(RegisterPool):
    """The same, where every quarter of the SM has registers of its own: a warp takes what warps of its quarter gave."""

    def available(self, warp: int) -> int:
        quarter = slice(warp % PARTITIONS, None, PARTITIONS)
        return 32 * (self.at_launch * len(self.held[quarter]) - sum(self.held[quarter]))
