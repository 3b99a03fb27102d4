"""tcgen05.alloc, dealloc and relinquish_alloc_permit: a warp takes columns of tensor memory and gives them back."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.order.race import BASE, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.state.memory_access import MemoryAccess
from padless.emulator.state.shared_access import check_access
from padless.emulator.state.site import Site
from padless.emulator.state.tensor_memory import LANES, cells, targets_of, tensor_memory
from padless.emulator.state.warp import Fragment, Until, Wait
from padless.emulator.state.warp_sync import whole_warp


def allocate(e: Emitter) -> None:
    e.only("alloc", "cta_group::1", "cta_group::2", "sync", "aligned", "shared::cta")
    where, count_slot = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")
    ins = e.instruction
    word = MemoryAccess(ins, "shared", -1, 0, "u32", [-1])
    pair = e.has("cta_group::2")

    @whole_warp
    def alloc(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        site = Site(w, ins, int(np.argmax(f.mask)))
        count = site.value(count_slot)
        memory = tensor_memory(w.cta)
        if count not in (32, 64, 128, 256, 512):
            site.report("tensor-memory", f"tcgen05.alloc of {count} columns; allowed are 32, 64, 128, 256, 512")
            return None
        if memory.relinquished:
            site.report("tensor-memory", "tcgen05.alloc after relinquish_alloc_permit")
        if count > memory.smallest:
            site.report("tensor-memory", f"tcgen05.alloc of {count} columns after one of {memory.smallest}")
        memory.smallest = min(memory.smallest, count)
        ctas = targets_of(site, pair)
        peer = tensor_memory(ctas[1 - w.cta.rank % 2]) if pair else memory
        memory.requested += 1
        number, start = memory.requested, -1

        def granted() -> bool:
            nonlocal start
            if start < 0 and (start := memory.free_start(count)) >= 0:
                take()
            return start >= 0 and peer.granted >= number

        def take() -> None:
            memory.granted += 1
            memory.allocated[start] = (count, site)
            memory.words[:, start : start + count] = 0x7FFFFFFF
            if memory.shadow is not None:
                memory.shadow.forget(cells((0, LANES, start, start + count)))
            w.launch.progress += 1

        def tell() -> None:
            cta, offset = site.locate(where.at(site))
            if cta.shared.shadow is not None:
                check_access(w, cta, np.array([site.lane]), np.array([offset]), word, write=True)
            cta.shared.bytes[offset : offset + 4].view(np.uint32)[0] = start
            w.launch.progress += 1

        def describe() -> str:
            text = f"tcgen05.alloc of {count} columns; allocated are {sorted(memory.allocated)}"
            return text if start < 0 else f"{text}; CTA {peer.cta.index}, the other of its pair, is yet to do the same"

        return Until(granted, tell, describe).begin(f)

    e.limit_granule(4)
    e.synchronise(alloc)


def deallocate(e: Emitter) -> None:
    e.only("dealloc", "cta_group::1", "cta_group::2", "sync", "aligned")
    address_slot, count_slot = e.source_slot(e.operands[0], "u32"), e.source_slot(e.operands[1], "u32")
    ins = e.instruction

    @whole_warp
    def dealloc(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        site = Site(w, ins, int(np.argmax(f.mask)))
        start, count = site.value(address_slot) & 0xFFFF, site.value(count_slot)
        memory = tensor_memory(w.cta)
        found = memory.allocated.get(start)
        if found is None or found[0] != count:
            have = f"{found[0]} columns are allocated there" if found else "nothing is allocated there"
            site.report("tensor-memory", f"tcgen05.dealloc of {count} columns at {start}: {have}")
            return None
        if memory.shadow is not None:
            freed = cells((0, LANES, start, start + count))
            stamp = int(pack(site.row, w.clocks.now[site.row], 0))
            memory.shadow.bulk(freed, site.clock(), stamp, site, write=True, generic_plane=BASE)
        del memory.allocated[start]
        w.launch.progress += 1
        return None

    e.synchronise(dealloc)


def relinquish(e: Emitter) -> None:
    @whole_warp
    def relinquish_permit(f: Fragment, m: Any) -> Wait | None:
        tensor_memory(f.warp.cta).relinquished = True
        return None

    e.synchronise(relinquish_permit)
