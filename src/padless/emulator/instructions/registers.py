"""setmaxnreg: warps give registers to their CTA's pool and wait for others to do so."""

from __future__ import annotations

from typing import Any

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state.register_pool import GRANULE, LEAST, MOST, RegisterPool, registers_at_launch
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cta, Fragment, Wait
from padless.emulator.state.warp_sync import whole_warp


class RegisterWait(Wait):
    """setmaxnreg.inc waits for registers that other warps give up."""

    def __init__(self, pool: RegisterPool, warp: int, count: int) -> None:
        self.pool = pool
        self.warp = warp
        self.count = count
        pool.wanted[warp] = count

    def ready(self) -> bool:
        return self.pool.missing(self.warp, self.count) <= self.pool.free

    def finish(self, fragment: Fragment) -> Wait | None:
        self.pool.give(self.warp, self.count)
        return None

    def describe(self) -> str:
        return self.pool.describe(self.warp)


def pool_of(cta: Cta) -> RegisterPool | None:
    """The CTA's pool; None where nothing in the PTX says how many registers a thread has at launch."""
    if cta.registers is None:
        program = cta.launch.program
        at_launch = registers_at_launch(program.function, program.instructions)
        if at_launch is not None:
            cta.registers = RegisterPool(len(cta.warps), at_launch)
    return cta.registers


@instruction("setmaxnreg")
def set_registers(e: Emitter) -> None:
    e.only("inc", "dec", "sync", "aligned")
    operand = e.operands[0]
    if not isinstance(operand, Immediate) or operand.value % GRANULE or not LEAST <= operand.value <= MOST:
        e.unsupported(f"the count must be a multiple of {GRANULE} in {LEAST}..{MOST}")
        return
    count = operand.value
    increase = e.has("inc")
    ins = e.instruction

    @whole_warp
    def setmaxnreg(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        site = Site(w, ins)
        group = w.cta.warps[w.index & ~3 : (w.index & ~3) + 4]
        if len(group) < 4:
            site.report("registers", "setmaxnreg in a warpgroup of fewer than four warps")
        pool = pool_of(w.cta)
        if pool is None:
            return None
        held = pool.held[w.index]
        if count < held if increase else count > held:
            site.report("registers", f"the warp holds {held} registers a thread", key=held)
            return None
        if increase:
            waiting = RegisterWait(pool, w.index, count)
            return waiting.finish(f) if waiting.ready() else waiting
        pool.give(w.index, count)
        w.launch.progress += 1
        return None

    e.synchronise(setmaxnreg)
