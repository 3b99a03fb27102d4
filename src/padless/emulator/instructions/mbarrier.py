"""mbarrier instructions, and the addresses of other CTAs' shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand, scope_of
from padless.emulator.order.memory_order import CLUSTER, CTA
from padless.emulator.order.race import STRONG, merge, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Address, Sink
from padless.emulator.state.mbarrier import Mbarrier, MbarrierWait, find_mbarrier
from padless.emulator.state.site import Site, lanes_of
from padless.emulator.state.spaces import SHARED_WINDOW
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.units.number_formats import Array


def by_address(where: Array, lanes: Array) -> list[tuple[int, Array]]:
    first = int(where[lanes[0]])
    if len(lanes) == 1 or (where[lanes] == first).all():
        return [(first, lanes)]
    return [(int(a), lanes[where[lanes] == a]) for a in np.unique(where[lanes])]


@instruction("mbarrier")
def mbarrier(e: Emitter) -> None:
    e.only(
        *FORMS, "parity", "shared", "shared::cta", "shared::cluster", "release", "acquire",
        "relaxed", "cta", "cluster", "noComplete",
    )  # fmt: skip
    form = e.either(*FORMS)
    if not form:
        e.unsupported()
    FORMS[form](e)


def pending_count(e: Emitter) -> None:
    d, state = e.operands
    e.assign(e.destination(d, "u32"), f"({e.source(state, 'u64')} >> np.uint64(32))")


def initialise(e: Emitter) -> None:
    where, count_slot = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")

    def mbarrier_init(site: Site) -> None:
        w = site.warp
        cta, offset = site.locate(where.at(site))
        count = site.value(count_slot)
        if offset % 8:
            site.fault(f"mbarrier address {offset:#x} is not a multiple of 8")
        if not 1 <= count < 1 << 20:
            site.report("mbarrier", f"mbarrier.init with count {count}, allowed is 1 to 2^20-1")
        old = cta.mbarriers.get(offset)
        if old is not None and old.valid:
            idle = old.is_fresh(site.instruction, count) or old.idle(site.row, w.clocks)
            kind = "mbarrier-init" if idle else "mbarrier"
            site.report(kind, f"{old.name} is initialised again without mbarrier.inval: {old.state()}", old.instruction)
        bar = w.launch.make_mbarrier(cta, offset, count, site.instruction)
        cta.mbarriers[offset] = bar
        cta.shared.bytes[offset : offset + 8] = 0
        clocks = w.clocks
        if clocks is not None:
            event = int(clocks.time[0, site.row, site.row])
            bar.init_stamp = (site.row, event)
            bar.column = clocks.new_column()
            first = offset >> cta.granule_shift
            cells = slice(first, max((offset + 8) >> cta.granule_shift, first + 1))
            cta.shared.shadow.written[cells] = pack(site.row, event, STRONG)
            cta.shared.shadow.write_site[cells] = site.instruction.index
            clocks.tick(np.array([site.row]))
        w.launch.progress += 1

    e.call_lanes(mbarrier_init)


def invalidate(e: Emitter) -> None:
    where = SharedOperand(e, e.operands[0])

    def mbarrier_inval(site: Site) -> None:
        bar = find_mbarrier(site, where.at(site))
        if bar is not None:
            bar.valid = False

    e.call_lanes(mbarrier_inval)


def state_of(bar: Mbarrier) -> int:
    """The opaque state that an arrival returns: the phase, and above it how many arrivals were pending."""
    return bar.phase | bar.pending << 32


def published(w: Warp, bar: Mbarrier, rows: Array, release: bool, scope: int) -> tuple[Any, Any]:
    """What an arrival tells every wait that acquires, and what only those that do so at cluster scope."""
    clocks = w.clocks
    if clocks is None:
        return None, None
    own = bar.cta is w.cta
    if own and release:
        return clocks.release(rows), None
    clock, wide = clocks.completed(rows), None
    for found, reach in clocks.published(rows, release, scope):
        if own:
            clock = merge(clock, found)
        elif reach >= CLUSTER:
            wide = merge(wide, found)
    clocks.tick(rows)
    return clock, wide


def arrive(e: Emitter) -> None:
    operands = list(e.operands)
    state_slot = -1
    if not isinstance(operands[0], Address):
        state = operands.pop(0)
        if not isinstance(state, Sink):
            state_slot = e.destination_slot(state, "u64")
    where = SharedOperand(e, operands[0])
    number = e.source_slot(operands[1], "u32") if len(operands) > 1 else -1
    expect = e.has("expect_tx")
    drop = e.has("arrive_drop")
    release, scope = not e.has("relaxed"), scope_of(e, CTA)
    ins = e.instruction

    def mbarrier_arrive(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        for address, group in by_address(where.values(w), lanes):
            site = Site(w, ins, int(group[0]))
            bar = find_mbarrier(site, address)
            if bar is None:
                continue
            clock, wide = published(w, bar, w.first_row + group, release, scope)
            if state_slot >= 0:
                v[state_slot][group] = state_of(bar)
            count = len(group)
            if expect:
                bar.expect(int(v[number][group].sum()), site)
            elif number >= 0:
                count = int(v[number][group].sum())
            if drop:
                bar.expected -= count
            bar.arrive(count, clock, site, wide)

    e.call(mbarrier_arrive)


def transaction(e: Emitter) -> None:
    where, number = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")
    expect = e.has("expect_tx")

    def mbarrier_tx(site: Site) -> None:
        bar = find_mbarrier(site, where.at(site))
        if bar is not None:
            (bar.expect if expect else bar.complete_tx)(site.value(number), site)

    e.call_lanes(mbarrier_tx)


def wait(e: Emitter) -> None:
    d, address, state, *_ = e.operands
    out = e.destination_slot(d, "pred")
    where = SharedOperand(e, address)
    by_parity = e.has("parity")
    value_slot = e.source_slot(state, "u32" if by_parity else "u64")
    blocking = e.has("try_wait")
    acquire, scope = not e.has("relaxed"), scope_of(e, CTA)
    ins = e.instruction

    def mbarrier_wait(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        groups = []
        values = w.v[value_slot]
        for address, group in by_address(where.values(w), f.lanes(m)):
            bar = find_mbarrier(Site(w, ins, int(group[0])), address, remote=False)
            if bar is None:
                w.v[out][group] = True
                continue
            groups += [
                (bar, int(value) & (1 if by_parity else 0xFFFFFFFF), group[values[group] == value])
                for value in np.unique(values[group]).tolist()
            ]
        waiting = MbarrierWait(groups, out, by_parity, acquire, scope)
        if waiting.ready():
            return waiting.finish(f)
        if len(groups) > 1 or not blocking or w.launch.random.random() < w.launch.schedule.refuse:
            waiting.give_up(f)
            f.yielded = True
            return None
        return waiting

    e.synchronise(mbarrier_wait)


# the first of these modifiers is the form: mbarrier.arrive.expect_tx is an arrival
FORMS = {
    "init": initialise, "inval": invalidate, "test_wait": wait, "try_wait": wait, "arrive": arrive,
    "arrive_drop": arrive, "expect_tx": transaction, "complete_tx": transaction, "pending_count": pending_count,
}  # fmt: skip


@instruction("mapa")
def map_address(e: Emitter) -> None:
    """The same offset in another CTA of the cluster; a generic address unless .shared::cluster is asked for."""
    e.only("shared::cluster")
    d, a, rank = e.operands
    view = e.view
    source, target = e.source(a, view), e.source(rank, "u32")
    kind = f"np.uint{view[1:]}"
    window = "" if e.has("shared::cluster") else f" | {kind}({SHARED_WINDOW})"
    value = f"(({source} & {kind}(0xFFFFFF)) | ({target}.astype({kind}) << {kind}(24)){window})"
    e.assign(e.destination(d, view), value)


@instruction("getctarank")
def cta_rank(e: Emitter) -> None:
    d, a = e.operands
    e.assign(e.destination(d, "u32"), f"(({e.source(a, e.view)} >> 24) & 0xFF)")
