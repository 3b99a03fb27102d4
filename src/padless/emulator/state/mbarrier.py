"""The mbarrier object: phase, pending arrivals, transaction count; and the clocks that travel through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from padless.emulator.order import race

if TYPE_CHECKING:
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.warp import Cta

TX_LIMIT = (1 << 20) - 1


class Mbarrier:
    """One 8-byte barrier at `offset` in the shared memory of `cta` (PTX ISA, "mbarrier")."""

    def __init__(self, cta: Cta, offset: int, count: int, instruction: Instruction) -> None:
        self.cta = cta
        self.offset = offset
        self.expected = count
        self.pending = count
        self.tx = 0
        self.phase = 0  # completed phases; the parity of the current phase is phase & 1
        self.instruction = instruction
        self.column = -1  # of the copies that complete here
        self.clock: Any = None  # released by the arrivals so far
        self.done_clock: Any = None  # what a wait on the last completed phase acquires
        self.init_stamp: tuple[int, int] = (0, 0)
        self.init_fenced = False
        self.published = False  # by a fence and a relaxed cluster barrier, which order nothing else
        self.waited_phase = -1  # the latest phase that somebody has seen complete
        # the latest phase in which another CTA's asynchronous work arrived
        self.foreign: tuple[int, Any, Any] = (-1, None, None)
        self.valid = True
        self.last_arrival: Instruction | None = None

    @property
    def name(self) -> str:
        symbol = self.cta.symbol_at(self.offset)
        return f"mbarrier {symbol} of CTA {self.cta.index}"

    def state(self) -> str:
        text = f"phase {self.phase} (parity {self.phase & 1}), {self.pending} of {self.expected} arrivals pending"
        return text + (f", {self.tx} bytes outstanding" if self.tx else "")

    def complete(self, parity: int) -> bool:
        return self.phase & 1 != parity

    def _maybe_flip(self, instruction: Instruction | None, warp: Any, lane: int) -> None:
        """End the phase if nothing is pending. Two phases ending with no wait in between hide one from the waiters:
        they test a parity, and it is back where it was (PTX ISA, "Phase of the mbarrier object")."""
        if self.pending == 0 and self.tx == 0:
            if self.phase >= 1 and self.waited_phase < self.phase - 1 and self.cta.checks:
                self.cta.machine.report(
                    "mbarrier",
                    f"ends phase {self.phase} of {self.name}, but nobody has waited for phase {self.phase - 1}",
                    instruction, warp, lane, key="overrun",
                )  # fmt: skip
            self.phase += 1
            self.pending = self.expected
            self.done_clock = None if self.clock is None else self.clock.copy()
        self.cta.machine.progress += 1

    def arrive(self, count: int, clock: Any, instruction: Instruction | None, warp: Any, lane: int) -> None:
        report = self.cta.machine.report
        if count > self.pending:
            report(
                "mbarrier",
                f"{count} more arrivals on {self.name}, which expects {self.expected} a phase: {self.state()}",
                instruction, warp, lane,
            )  # fmt: skip
            count = self.pending
            if count == 0:
                return
        self.last_arrival = instruction
        self.pending -= count
        if clock is not None:
            self.clock = race.merge(self.clock, clock)
        self._maybe_flip(instruction, warp, lane)

    def arrive_from_outside(self, warp: Any, instruction: Instruction) -> None:
        """An asynchronous arrival is about to happen; remember it if it comes from another CTA."""
        if warp.cta is not self.cta:
            self.foreign = (self.phase, instruction, warp)
            if self.cta.exited:
                self.cta.machine.report(
                    "exit", f"signals {self.name} after that CTA has exited", instruction, warp, 0
                )

    def expect(self, size: int, instruction: Instruction | None, warp: Any, lane: int) -> None:
        self.tx += size
        if abs(self.tx) > TX_LIMIT:
            self.cta.machine.report(
                "mbarrier",
                f"the transaction count of {self.name} overflows: {self.tx}",
                instruction,
                warp,
                lane,
            )

    def complete_tx(self, size: int, instruction: Instruction | None, warp: Any, clock: Any = None) -> None:
        """`clock`: what is known to have happened before the operation that is over now, besides that itself."""
        if clock is not None:
            self.clock = race.merge(self.clock, clock)
        self.expect(-size, instruction, warp, -1)
        self._maybe_flip(instruction, warp, -1)
