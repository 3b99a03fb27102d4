"""What an access to shared memory is checked for: bounds, alignment, a CTA that still runs, races, mbarriers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from padless.emulator.ptx.ast import Instruction
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import OFFSET_MASK
from padless.emulator.state.strong_access import synchronise
from padless.emulator.state.warp import Cta, Warp
from padless.emulator.units.number_formats import Array


def shared_groups(ins: Instruction, w: Warp, where: Array, lanes: Array, size: int) -> list[tuple[Cta, Array, Array]]:
    """Split an access by the CTA whose shared memory it addresses: (cta, byte offsets, lanes); checks bounds."""
    ranks = where >> 24
    offsets = where & OFFSET_MASK
    cluster = w.cta.cluster
    groups = []
    first = int(ranks[0])
    parts = [(first, offsets, lanes)] if (ranks == first).all() else [
        (int(r), offsets[ranks == r], lanes[ranks == r]) for r in np.unique(ranks)
    ]  # fmt: skip
    for rank, part, who in parts:
        cta = cluster.ctas[rank] if 0 <= rank < len(cluster.ctas) else None
        if cta is None or int(part.max()) + size > cta.shared.size or int(part.min()) < 0:
            limit = cta.shared.size if cta is not None else 0
            message = f"shared address {int(where.max()):#x} is outside the CTA's {limit} bytes of shared memory"
            Site(w, ins, int(who[0])).report("out-of-bounds", message)
            continue
        if size > 1 and (part % min(size, 16)).any():
            Site(w, ins).fault(f"misaligned shared address {int(part[0]):#x}, {size} bytes", "misaligned")
        if cta is not w.cta:
            for site in [Site(w, ins, lane) for lane in who.tolist()]:
                if cta.exited:
                    site.report("exit", f"accesses shared memory of CTA {cta.index}, which has exited")
                if w.clocks is not None:
                    cta.remote[site.row, -1] = (int(w.clocks.time[0, site.row, site.row]), site, None, 0)
        groups.append((cta, part, who))
    return groups


def shared_cells(cta: Cta, offsets: Array, size: int) -> Array:
    """Shadow cells of `size` bytes at each offset, a row per offset."""
    shift = cta.granule_shift
    count = max(size >> shift, 1)
    base = offsets >> shift
    return base[:, None] + np.arange(count) if count > 1 else base[:, None]


@lru_cache(maxsize=8192)
def cells_read(unit: Any, shift: int) -> tuple[Any, int]:
    """(shadow cells, end in bytes) of what a product or copy reads: a slice of cells where they are contiguous."""
    ranges = sorted({r for part in unit.shared_ranges().values() for r in part})
    if len(ranges) < 2:
        low, end = ranges[0] if ranges else (0, 0)
        return slice(low >> shift, -(-end >> shift)), end
    return np.concatenate([np.arange(a >> shift, -(-b >> shift)) for a, b in ranges]), max(b for _, b in ranges)


def check_access(
    w: Warp,
    cta: Cta,
    lanes: Array,
    offsets: Array,
    a: Any,
    write: bool,
    equal: Callable[[Array], bool] = lambda picked: False,
) -> None:
    """A MemoryAccess of some lanes to a CTA's shared memory, under checks: races, order, mbarriers written over. equal:
    as of `MemoryAccess.equals`."""
    strong = a.strong
    cta.shared.shadow.access(w, lanes, shared_cells(cta, offsets, a.bytes), a.instruction, write, strong, equal)
    if strong:
        synchronise(w, lanes, cta.words, offsets, a)
    if write and cta.mbarriers:
        for offset in np.unique(offsets >> 3).tolist():
            bar = cta.mbarriers.get(8 * offset)
            if bar is not None and bar.valid:
                Site(w, a.instruction, int(lanes[0])).report("mbarrier", f"writes into {bar.name}")


def bank_conflicts(w: Warp, offsets: Array, size: int) -> None:
    """Count the extra passes of one access: words of one bank at different addresses, per 128 bytes moved."""
    statistics = w.launch.statistics
    words = (offsets[:, None] + np.arange(0, max(size, 4), 4)).reshape(len(offsets), -1) >> 2
    per_pass = max(1, 32 // words.shape[1])
    extra = 0
    for start in range(0, len(offsets), per_pass):
        distinct = np.unique(words[start : start + per_pass])
        extra += int(np.bincount(distinct & 31).max()) - 1
    statistics.shared_accesses += 1
    statistics.bank_conflicts += extra
