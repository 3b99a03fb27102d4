"""What the copy engine does with one copy: check, queue, move the bytes later, and signal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from padless.emulator.order.race import ASYNC, IN_FLIGHT, pack
from padless.emulator.state.global_access import by_allocation, check_copy
from padless.emulator.state.groups import Groups, Operation
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import Mbarrier, find_mbarrier
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import OFFSET_MASK
from padless.emulator.state.warp import Cta
from padless.emulator.state.work import Work
from padless.emulator.units import tma
from padless.emulator.units.number_formats import Array


def cells_of(addresses: Array, granule: int, shift: int) -> Any:
    """Shadow cells of `granule`-byte pieces at CTA offsets; a slice where they fill one range."""
    low, high = int(addresses.min()), int(addresses.max()) + granule
    if high - low == len(addresses) * granule:
        return slice(low >> shift, -(-high >> shift))
    per = max(granule >> shift, 1)
    cells = (addresses >> shift)[:, None] + np.arange(per)
    return np.unique(cells) if granule >> shift == 0 else cells.reshape(-1)


# ---- global memory
def pieces(site: Site, addresses: Array, granule: int, verb: str) -> Iterator[tuple[Any, Any, Array]]:
    """`granule`-byte pieces by the allocation that they lie in: (allocation, which pieces, offsets in it). What lies
    outside every allocation is reported and left out."""
    where = addresses.astype(np.int64)

    def outside(at: int) -> None:
        message = f"a bulk copy {verb} global address {int(where[at]):#x}, outside every registered array"
        site.report("out-of-bounds", message)

    for found, inside in by_allocation(site.warp.launch.memory, where, granule, outside):
        yield found, inside, where[inside] - found.address


def gather(site: Site, addresses: Array, granule: int) -> Array:
    """Read pieces of global memory; what lies outside every allocation reads as 0xFF."""
    out = np.full((len(addresses), granule), 0xFF, np.uint8)
    for found, inside, offsets in pieces(site, addresses, granule, "reads"):
        if granule in (2, 4, 8, 16) and not (offsets % granule).any():
            kind = np.dtype(f"u{granule}" if granule < 16 else "u8,u8")
            out[inside] = found.view(kind)[offsets // granule].view(np.uint8).reshape(-1, granule)
        else:
            out[inside] = found.bytes[offsets[:, None] + np.arange(granule)]
    return out


def scatter(site: Site, addresses: Array, data: Array) -> None:
    for found, inside, offsets in pieces(site, addresses, data.shape[1], "writes"):
        found.bytes[offsets[:, None] + np.arange(data.shape[1])] = data[inside]


# ---- shared memory
def check_bounds(site: Site, cta: Cta, where: Array, granule: int) -> None:
    if int(where.max()) + granule > cta.shared.size:
        site.fault("a bulk copy reaches past the CTA's shared memory")


def receivers(site: Site, start: int, barrier: int, mask: int | None, pair: bool) -> list[tuple[Cta, Mbarrier]]:
    """The CTAs that receive a copy, each with the barrier it completes on."""
    cta, _ = site.locate(start)
    ctas = site.warp.cta.cluster.ctas
    out = []
    bar_rank = barrier >> 24
    for rank in [cta.rank] if mask is None else [r for r in range(16) if mask >> r & 1]:
        if rank >= len(ctas):
            site.report("tma", f"multicast to CTA {rank} of a cluster of {len(ctas)}")
            continue
        signalled = rank
        if pair:
            signalled = (rank & ~1) | (bar_rank & 1)
        elif mask is None and bar_rank != rank:
            where = f"data goes to CTA {rank}, the mbarrier is in CTA {bar_rank}"
            site.report("tma", f"{where}; only .cta_group::2 allows it")
            signalled = bar_rank
        bar = find_mbarrier(site, (signalled << 24) | (barrier & OFFSET_MASK), asynchronous=True)
        if ctas[rank].exited:
            site.report("exit", f"copies into shared memory of CTA {ctas[rank].index}, which has exited")
        if bar is not None:
            out.append((ctas[rank], bar))
    return out


class Landing:
    """A write to a CTA's shared memory that completes on an mbarrier: checked at issue, in flight until it is over."""

    def __init__(self, site: Site, cta: Cta, bar: Mbarrier, where: Array, granule: int) -> None:
        self.site, self.cta, self.bar = site, cta, bar
        self.ahead = site.carried()
        if site.warp.clocks is not None:
            self.cells = cells_of(where, granule, cta.granule_shift)
            self.stamp = pack(bar.column, IN_FLIGHT, ASYNC)
            cta.shared.shadow.bulk(self.cells, site.clock(), self.stamp, site, write=True)

    def complete(self, size: int) -> None:
        """The bytes have landed: they belong to the barrier's current phase, and count down its transactions."""
        if self.site.warp.clocks is not None:
            over = pack(self.bar.column, self.bar.phase + 1, ASYNC)
            self.cta.shared.shadow.restamp(self.cells, self.stamp, over)
        self.bar.complete_tx(size, self.site, self.ahead)


def load(
    site: Site, targets: Iterable[tuple[Cta, Mbarrier]], where: Array, granule: int, size: int,
    fill: Callable[[Array], None], detail: Any = None, unit: str = "load",
) -> None:  # fmt: skip
    """Queue one copy into the shared memory of each target: `fill` writes the bytes, of which `where` are the offsets,
    in pieces of `granule` bytes; `size` of them count on the target's mbarrier."""
    first = True
    for cta, bar in targets:
        landing = Landing(site, cta, bar, where, granule)

        def land(landing: Landing = landing) -> None:
            fill(landing.cta.shared.bytes)
            landing.complete(size)

        work = Work(unit, cta, size, detail, site.warp.cta, first)
        site.warp.launch.enqueue(None, AsyncOperation(site.description, land, work=work))
        first = False


def store(
    site: Site, cta: Cta, groups: Groups, where: Array, granule: int, take: Callable[[], list[Any]],
    reduce: tuple[str, str] | None, detail: Any = None,
) -> None:  # fmt: skip
    """Queue one copy out of shared memory, of a thread's bulk group: `take` reads it as (addresses, data), to be written
    or, with `reduce` (element type, operation), combined with what is there."""
    operation = Operation(site.instruction)
    if site.warp.clocks is not None:  # the read ends with the thread's bulk group
        stamp = int(pack(groups.column, groups.event, ASYNC))
        cells = cells_of(where, granule, cta.granule_shift)
        cta.shared.shadow.bulk(cells, site.clock(), stamp, site, write=False)
    groups.open.append(operation)
    taken: list[Any] = []

    def read() -> None:
        taken.extend(take())
        operation.read = True

    def write() -> None:
        for addresses, data in taken:
            if reduce is not None:
                data = tma.reduce_values(gather(site, addresses, data.shape[1]), data, *reduce)
            scatter(site, addresses, np.asarray(data))
        operation.finish()

    work = Work("store", cta, len(where) * granule, detail)
    site.warp.launch.enqueue(None, AsyncOperation(site.description, read, write, work=work))


# ---- copies with a tensor map
def planned(site: Site, cta: Cta, *where: Any, store: bool, mode: str) -> Any:
    """The plan of a copy, checked; None where it moves nothing."""
    plan = tma.plan(*where, store=store, mode=mode)
    for problem in plan.problems:
        site.report("tma", problem)
    if not len(plan.shared_address):
        return None
    check_bounds(site, cta, plan.shared_address, plan.granule)
    return plan


def tensor_load(
    site: Site, tensor_map: Any, coordinates: tuple[int, ...], start: int, barrier: int, mask: int | None, pair: bool,
    mode: str,
) -> None:  # fmt: skip
    plan = planned(site, site.warp.cta, tensor_map, coordinates, start & OFFSET_MASK, store=False, mode=mode)
    if plan is None:
        return
    written = plan.shared_address, plan.granule
    if tensor_map.shared_bits != tensor_map.element_bits:
        # 16 bytes of which some are padding: written as a whole
        written = np.unique(plan.shared_address & ~15), 16

    def fill(shared: Array) -> None:
        tma.load(plan, lambda addresses, granule: gather(site, addresses, granule), shared)

    check_copy(site, plan.global_address[plan.in_bounds], plan.granule)
    targets = receivers(site, start, barrier, mask, pair)
    load(site, targets, *written, plan.transaction_bytes, fill, tensor_map)


def tensor_store(
    site: Site, tensor_map: Any, coordinates: tuple[int, ...], start: int, operation: str, mode: str, groups: Groups
) -> None:
    cta, offset = site.locate(start)
    plan = planned(site, cta, tensor_map, coordinates, offset, store=True, mode=mode)
    if plan is None:
        return

    def take() -> list[Any]:
        taken: list[Any] = []
        tma.store(plan, cta.shared.bytes, lambda a, data: taken.append((a, np.array(data, copy=True))))
        return taken

    reduce = (tensor_map.element, operation) if operation else None
    store(site, cta, groups, plan.shared_address, plan.granule, take, reduce, tensor_map)


# ---- copies of a run of bytes
def plain_load(site: Site, to: int, source: int, count: int, barrier: int, mask: int | None) -> None:
    where = (to & OFFSET_MASK) + np.arange(0, count, 16)
    check_bounds(site, site.warp.cta, where, 16)
    pieces = source + np.arange(0, count, 16)
    check_copy(site, pieces, 16)

    def fill(shared: Array) -> None:
        data = gather(site, pieces, 16)
        shared[where[0] : where[0] + count] = data.reshape(-1)

    load(site, receivers(site, to, barrier, mask, False), where, 16, count, fill)


def plain_store(site: Site, to: int, source: int, count: int, reduce: tuple[str, str] | None, groups: Groups) -> None:
    cta, offset = site.locate(source)
    where = offset + np.arange(0, count, 16)
    check_bounds(site, cta, where, 16)

    def take() -> list[Any]:
        data = cta.shared.bytes[offset : offset + count].copy().reshape(-1, 16)
        return [(to + np.arange(0, count, 16), data)]

    store(site, cta, groups, where, 16, take, reduce)


def shared_to_shared(
    site: Site, to: int, source: int, count: int, barrier: int, reduce: tuple[str, str] | None
) -> None:
    """Distributed shared memory: own shared memory to another CTA's, completing on a barrier there."""
    origin, offset = site.locate(source)
    target, start = site.locate(to)
    bar = find_mbarrier(site, barrier, asynchronous=True)
    if bar is None:
        return
    step = np.arange(0, count, 16)
    if site.warp.clocks is not None:  # the source is free again when the barrier completes
        stamp = int(pack(bar.column, bar.phase + 1, ASYNC))
        cells = cells_of(offset + step, 16, origin.granule_shift)
        origin.shared.shadow.bulk(cells, site.clock(), stamp, site, write=False)

    def fill(shared: Array) -> None:
        data = origin.shared.bytes[offset : offset + count].copy()
        if reduce is not None:
            old = shared[start : start + count].reshape(-1, 16)
            data = np.asarray(tma.reduce_values(old, data.reshape(-1, 16), *reduce)).reshape(-1)
        shared[start : start + count] = data

    load(site, [(target, bar)], start + step, 16, count, fill, unit="remote")
