"""st.async and red.async: a store or reduction into a CTA of the cluster that counts down an mbarrier when it is done.

They are not operations of the async proxy: no proxy fence stands between them and ordinary accesses (PTX ISA, "Async
proxy").
"""

from __future__ import annotations

import numpy as np

from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.order.race import IN_FLIGHT, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Vector
from padless.emulator.state.atomics import OPERATIONS as FUNCTIONS
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import find_mbarrier
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import OFFSET_MASK, VIEWS
from padless.emulator.state.work import Work

OPERATIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def asynchronous_store(e: Emitter) -> None:
    """[address], value, [mbarrier]; a vector for st.async only."""
    known = "async", "weak", "relaxed", "cluster", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4"
    e.only(*known, *OPERATIONS)
    if "mbarrier::complete_tx::bytes" not in e.modifiers:
        e.unsupported("only with an mbarrier")
    address, value, barrier = e.operands
    where, signal = SharedOperand(e, address), SharedOperand(e, barrier)
    view = e.view
    items = value.items if isinstance(value, Vector) else (value,)
    slots = [e.source_slot(item, view) for item in items]
    size = int(view[1:]) // 8
    total = size * len(slots)
    function = FUNCTIONS[e.either(*OPERATIONS)] if e.opcode == "red" else None
    e.limit_granule(size)

    def issue(site: Site) -> None:
        w = site.warp
        cta, offset = site.locate(where.at(site))
        if offset % total:
            site.fault(f"address {offset:#x} is not a multiple of {total}")
        to = signal.at(site)
        if to >> 24 != cta.rank:
            site.report("mbarrier", "the data and the mbarrier are in different CTAs")
        bar = find_mbarrier(site, cta.rank << 24 | (to & OFFSET_MASK), later=True)
        if bar is None:
            return
        values = np.array([w.v[s][site.lane] for s in slots])
        cells = slice(offset >> cta.granule_shift, (offset + total) >> cta.granule_shift)
        shadow = cta.shared.shadow if function is None else None
        if shadow is not None:
            stamp = pack(bar.column, IN_FLIGHT)
            shadow.bulk(cells, site.clock(), stamp, site, write=True, generic_plane=0)
        ahead = site.carried()

        def land() -> None:
            memory = cta.shared.views[VIEWS[view]]
            at = offset // size
            if function is None:
                memory[at : at + len(slots)] = values
            else:
                memory[at] = function(memory[at], values[0])
            if shadow is not None:
                shadow.restamp(cells, stamp, pack(bar.column, bar.phase + 1))
            bar.arrive_from_outside(site)
            bar.complete_tx(total, site, ahead)

        work = Work("remote", cta, total, None, w.cta)
        w.launch.enqueue(None, AsyncOperation(site.instruction.name, land, work=work))

    e.synchronise_lanes(issue)


@instruction("multimem")
def multimem(e: Emitter) -> None:
    e.unsupported("an address of several devices: the emulator has one")
