"""setmaxnreg: warps give registers to their CTA's pool and wait for others to do so."""

from __future__ import annotations

from functools import partial
from typing import Any

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state.register_pool import GRANULE, LEAST, MOST, RegisterPool, registers_at_launch
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Cta, Fragment, Until, Wait
from padless.emulator.state.warp_sync import whole_warp


def pool_of(cta: Cta) -> RegisterPool | None:
    """The CTA's pool; None where nothing in the PTX says how many registers a thread has at launch."""
    if cta.registers is None:
        program = cta.launch.program
        at_launch = registers_at_launch(program.function, program.instructions)
        if at_launch is not None:
            cta.registers = cta.launch.make_register_pool(len(cta.warps), at_launch)
    return cta.registers


@instruction("setmaxnreg")
def set_registers(e: Emitter) -> None:
    e.only("inc", "dec", "sync", "aligned")
    operand = e.operands[0]
    if not isinstance(operand, Immediate) or operand.value % GRANULE or not LEAST <= operand.value <= MOST:
        e.unsupported(f"the count must be a multiple of {GRANULE} in {LEAST}..{MOST}")
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
        pool.wanted[w.index] = count
        give = partial(pool.give, w.index, count)
        if increase:
            missing = pool.missing(w.index, count)
            return Until(lambda: missing <= pool.available(w.index), give, lambda: pool.describe(w.index)).begin(f)
        give()
        w.launch.progress += 1
        return None

    e.synchronise(setmaxnreg)
