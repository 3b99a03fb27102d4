"""mbarrier instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand, locate
from padless.emulator.order.race import STRONG, pack
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Sink
from padless.emulator.state.mbarrier import Mbarrier
from padless.emulator.state.spaces import SHARED_WINDOW
from padless.emulator.state.warp import Wait

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.ptx.ast import Instruction
    from padless.emulator.state.warp import Cta, Fragment, Warp

Array = np.ndarray[Any, Any]


def find_mbarrier(
    w: Warp,
    address: int,
    instruction: Instruction,
    lane: int,
    remote: bool = True,
    asynchronous: bool = False,
    later: bool = False,
) -> Mbarrier | None:
    """The barrier at an address, checked to be initialised, published and alive.

    `asynchronous`: it is the async proxy that will use it, `later`: whoever will, does so after the instruction. The
    barrier's own CTA must then have seen the end of that before it exits, and not the thread that asked for it.
    """
    cta, offset = locate(w, address, instruction, lane)
    report = w.cta.machine.report
    bar = cta.mbarriers.get(offset)
    if bar is None or not bar.valid:
        what = "was invalidated" if bar is not None else "was never initialised"
        report(
            "mbarrier",
            f"the mbarrier {cta.symbol_at(offset)} of CTA {cta.index} {what}",
            instruction,
            w,
            lane,
        )
        return None
    if cta is not w.cta:
        if not remote:
            report("mbarrier", f"waits on {bar.name}, which is in another CTA", instruction, w, lane)
            return None
        if cta.exited:
            report("exit", f"signals {bar.name} after that CTA has exited", instruction, w, lane)
    clocks = w.cta.cluster.clocks
    if clocks is not None:
        if cta is not w.cta and not asynchronous and not later:
            touch_remote(w, cta, lane, instruction)
        column, event = bar.init_stamp
        row = w.first_row + lane
        if not bar.published and clocks.time[0, row, column] < event:
            report(
                "mbarrier", f"{bar.name} is used, but nothing orders its initialisation before", instruction, w, lane,
                bar.instruction,
            )  # fmt: skip
        elif (
            (asynchronous or cta is not w.cta) and not bar.init_fenced and clocks.time[1, row, column] < event
        ):
            report(
                "mbarrier",
                f"{bar.name} is used by the async proxy or another CTA with no fence.mbarrier_init or fence.proxy.async "
                "after its initialisation",
                instruction, w, lane, bar.instruction,
            )  # fmt: skip
    return bar


def touch_remote(w: Warp, cta: Cta, lane: int, instruction: Instruction) -> None:
    """Remember that a lane of another CTA has used this one's shared memory: it must not exit before."""
    row = w.first_row + lane
    cta.remote[row] = (int(w.cta.cluster.clocks.time[0, row, row]), instruction, w)


def published(w: Warp, rows: Any) -> Any:
    clocks = w.cta.cluster.clocks
    if clocks is None:
        return None
    clock = clocks.join(rows)
    clocks.tick(rows)
    return clock


def by_address(where: Array, lanes: Array) -> list[tuple[int, Array]]:
    first = int(where[lanes[0]])
    if len(lanes) == 1 or (where[lanes] == first).all():
        return [(first, lanes)]
    return [(int(a), lanes[where[lanes] == a]) for a in np.unique(where[lanes])]


@instruction("mbarrier")
def mbarrier(e: Emitter) -> None:
    known = (
        "init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "parity",
        "pending_count", "shared", "shared::cta", "shared::cluster", "release", "acquire", "relaxed", "cta", "cluster",
        "noComplete",
    )  # fmt: skip
    e.only(*known)
    if e.has("init"):
        initialise(e)
    elif e.has("inval"):
        invalidate(e)
    elif e.has("test_wait") or e.has("try_wait"):
        wait(e)
    elif e.has("arrive") or e.has("arrive_drop"):
        arrive(e)
    elif e.has("expect_tx") or e.has("complete_tx"):
        transaction(e)
    elif e.has("pending_count"):
        d, state = e.operands
        e.assign(e.destination(d, "u32"), f"({e.source(state, 'u64')} >> np.uint64(32))")
    else:
        e.unsupported()


def initialise(e: Emitter) -> None:
    where, count_slot = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")
    ins = e.instruction

    def mbarrier_init(w: Any, v: Any, m: Any) -> None:
        for lane in range(32) if m is True else np.flatnonzero(m).tolist():
            cta, offset = locate(w, where.one(w, lane), ins, lane)
            count = int(v[count_slot][lane])
            if offset % 8:
                w.cta.machine.fault(
                    w, ins, f"mbarrier address {offset:#x} is not a multiple of 8", np.arange(32) == lane
                )
            if not 1 <= count < 1 << 20:
                w.cta.machine.report(
                    "mbarrier", f"mbarrier.init with count {count}, allowed is 1 to 2^20-1", ins, w, lane
                )
            old = cta.mbarriers.get(offset)
            if old is not None and old.valid:
                w.cta.machine.report(
                    "mbarrier",
                    f"{old.name} is initialised again without mbarrier.inval",
                    ins,
                    w,
                    lane,
                    old.instruction,
                )
            bar = cta.machine.mbarrier(cta, offset, count, ins)
            cta.mbarriers[offset] = bar
            cta.shared.bytes[offset : offset + 8] = 0
            clocks = cta.cluster.clocks
            if clocks is not None:
                row = w.first_row + lane
                event = int(clocks.time[0, row, row])
                bar.init_stamp = (row, event)
                bar.column = clocks.new_column()
                cells = slice(
                    offset >> cta.granule_shift,
                    max((offset + 8) >> cta.granule_shift, (offset >> cta.granule_shift) + 1),
                )
                cta.shared.shadow.written[cells] = pack(row, event, STRONG)
                cta.shared.shadow.write_site[cells] = ins.index
                clocks.tick(np.array([row]))
            cta.machine.progress += 1

    e.call(mbarrier_init)


def invalidate(e: Emitter) -> None:
    where = SharedOperand(e, e.operands[0])
    ins = e.instruction

    def mbarrier_inval(w: Any, v: Any, m: Any) -> None:
        for lane in range(32) if m is True else np.flatnonzero(m).tolist():
            bar = find_mbarrier(w, where.one(w, lane), ins, lane)
            if bar is not None:
                bar.valid = False

    e.call(mbarrier_inval)


def state_of(bar: Mbarrier) -> int:
    """The opaque state that an arrival returns: the phase, and above it how many arrivals were pending."""
    return bar.phase | bar.pending << 32


def arrive(e: Emitter) -> None:
    operands = list(e.operands)
    state_slot = -1
    from padless.emulator.ptx.ast import Address

    if not isinstance(operands[0], Address):
        state = operands.pop(0)
        if not isinstance(state, Sink):
            state_slot = e.destination_slot(state, "u64")
    where = SharedOperand(e, operands[0])
    number = e.source_slot(operands[1], "u32") if len(operands) > 1 else -1
    expect = e.has("expect_tx")
    drop = e.has("arrive_drop")
    ins = e.instruction

    def mbarrier_arrive(w: Any, v: Any, m: Any) -> None:
        lanes = np.arange(32) if m is True else np.flatnonzero(m)
        if not len(lanes):
            return
        for address, group in by_address(where.values(w), lanes):
            lane = int(group[0])
            bar = find_mbarrier(w, address, ins, lane)
            if bar is None:
                continue
            clock = published(w, w.first_row + group)
            if state_slot >= 0:
                v[state_slot][group] = state_of(bar)
            count = len(group)
            if expect:
                bar.expect(int(v[number][group].sum()), ins, w, lane)
            elif number >= 0:
                count = int(v[number][group].sum())
            if drop:
                bar.expected -= count
            bar.arrive(count, clock, ins, w, lane)

    e.call(mbarrier_arrive)


def transaction(e: Emitter) -> None:
    where, number = SharedOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u32")
    sign = 1 if e.has("expect_tx") else -1
    ins = e.instruction

    def mbarrier_tx(w: Any, v: Any, m: Any) -> None:
        for lane in range(32) if m is True else np.flatnonzero(m).tolist():
            bar = find_mbarrier(w, where.one(w, lane), ins, lane)
            if bar is not None:
                size = int(v[number][lane])
                if sign > 0:
                    bar.expect(size, ins, w, lane)
                else:
                    bar.complete_tx(size, ins, w)

    e.call(mbarrier_tx)


class MbarrierWait(Wait):
    """try_wait on one or more barriers, one per group of lanes."""

    def __init__(
        self, fragment: Fragment, groups: list[tuple[Mbarrier, int, Array]], out: int, by_parity: bool
    ) -> None:
        self.fragment = fragment
        self.groups = groups
        self.out = out
        self.by_parity = by_parity

    def done(self, bar: Mbarrier, value: int) -> bool:
        return bar.complete(value) if self.by_parity else bar.phase > value

    def ready(self) -> bool:
        return all(self.done(bar, value) for bar, value, _ in self.groups)

    def finish(self, fragment: Fragment) -> Wait | None:
        for bar, _, lanes in self.groups:
            succeed(fragment.warp, bar, lanes, self.out)
        return None

    def give_up(self, fragment: Fragment) -> bool:
        for bar, value, lanes in self.groups:
            if self.done(bar, value):
                succeed(fragment.warp, bar, lanes, self.out)
            else:
                fragment.warp.v[self.out][lanes] = False
        return True

    def describe(self) -> str:
        texts = []
        for bar, value, _ in self.groups:
            kind = f"parity {value}" if self.by_parity else f"phase {value}"
            last = (
                f"; last arrival at {bar.last_arrival.source or bar.last_arrival.line}"
                if bar.last_arrival
                else ""
            )
            texts.append(f"waits for {kind} of {bar.name}, which is in {bar.state()}{last}")
        return "; ".join(texts)


def succeed(w: Warp, bar: Mbarrier, lanes: Array, out: int) -> None:
    """The wait is over: the lanes acquire what the phase's arrivals released and its copies wrote."""
    w.v[out][lanes] = True
    bar.waited_phase = max(bar.waited_phase, bar.phase - 1)
    clocks = w.cta.cluster.clocks
    if clocks is None or bar.phase == 0:
        return
    rows: Any = w.rows if len(lanes) == 32 else w.first_row + lanes
    if bar.done_clock is not None:
        clocks.acquire(rows, bar.done_clock)
    clocks.observe(rows, bar.column, bar.phase)


def wait(e: Emitter) -> None:
    d, address, state, *_ = e.operands
    out = e.destination_slot(d, "pred")
    where = SharedOperand(e, address)
    by_parity = e.has("parity")
    value_slot = e.source_slot(state, "u32" if by_parity else "u64")
    blocking = e.has("try_wait")
    ins = e.instruction

    def mbarrier_wait(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        lanes = f.lanes(m)
        groups = []
        values = w.v[value_slot]
        for address, group in by_address(where.values(w), lanes):
            bar = find_mbarrier(w, address, ins, int(group[0]), remote=False)
            if bar is None:
                w.v[out][group] = True
                continue
            groups += [
                (bar, int(value) & (1 if by_parity else 0xFFFFFFFF), group[values[group] == value])
                for value in np.unique(values[group]).tolist()
            ]
        waiting = MbarrierWait(f, groups, out, by_parity)
        machine = w.cta.machine
        if waiting.ready():
            waiting.finish(f)
            return None
        if len(groups) > 1 or not blocking or machine.random.random() < machine.schedule.refuse:
            waiting.give_up(f)
            f.yielded = True
            return None
        return waiting

    e.synchronise(mbarrier_wait)


@instruction("mapa")
def map_address(e: Emitter) -> None:
    """The same offset in another CTA of the cluster."""
    e.only("shared::cluster")
    d, a, rank = e.operands
    view = e.view
    source, target = e.source(a, view), e.source(rank, "u32")
    kind = f"np.uint{view[1:]}"
    if e.has("shared::cluster"):
        e.assign(
            e.destination(d, view),
            f"(({source} & {kind}(0xFFFFFF)) | ({target}.astype({kind}) << {kind}(24)))",
        )
    else:
        e.assign(
            e.destination(d, view),
            f"(({source} & {kind}(0xFFFFFF)) | ({target}.astype({kind}) << {kind}(24)) | {kind}({SHARED_WINDOW}))",
        )


@instruction("getctarank")
def cta_rank(e: Emitter) -> None:
    d, a = e.operands
    e.assign(e.destination(d, "u32"), f"(({e.source(a, e.view)} >> 24) & 0xFF)")
