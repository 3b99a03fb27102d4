"""Instructions in which the lanes of a warp exchange values: shfl, vote, match, redux, elect, activemask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Not, Operand, Pair, Sink
from padless.emulator.state.site import Site
from padless.emulator.state.warp import Fragment, Wait, Warp
from padless.emulator.state.warp_sync import gather_members
from padless.emulator.units.number_formats import Array

LANE = np.arange(32)


def with_members(e: Emitter, members: Operand, run: Callable[[Warp, Array], None]) -> None:
    """This instruction is `run` for the lanes of a membermask, once all of them are here."""
    slot = e.source_slot(members, "u32")
    ins = e.instruction

    def synchronised(f: Fragment, m: Any) -> Wait | None:
        wait = gather_members(f, m, slot, synchronised, ins)
        if wait is None:
            run(f.warp, f.mask.copy())
        return wait

    e.synchronise(synchronised)


def write(v: Any, slot: int, values: Any, lanes: Array) -> None:
    if slot >= 0:
        np.copyto(v[slot], values, where=lanes, casting="unsafe")


def bits(lanes: Array) -> int:
    """Lanes as a mask."""
    return sum(1 << int(i) for i in np.flatnonzero(lanes))


def predicate_source(e: Emitter, operand: Operand) -> tuple[int, bool]:
    if isinstance(operand, Not):
        return e.source_slot(operand.operand, "pred"), True
    return e.source_slot(operand, "pred"), False


def value_and_flag(e: Emitter, destination: Operand) -> tuple[int, int]:
    """Slots of a destination `value` or `value|predicate`; -1 for what is not wanted."""
    if isinstance(destination, Pair):
        first, second = destination.first, destination.second
    else:
        first, second = destination, Sink()
    out = -1 if isinstance(first, Sink) else e.destination_slot(first, "u32")
    return out, -1 if isinstance(second, Sink) else e.destination_slot(second, "pred")


@instruction("shfl")
def shuffle(e: Emitter) -> None:
    e.only("sync", "up", "down", "bfly", "idx")
    if not e.has("sync"):
        e.unsupported("shfl without .sync")
    d, a, b, c, members = e.operands
    mode = e.either("up", "down", "bfly", "idx")
    source, lane_slot, control = e.source_slot(a, "u32"), e.source_slot(b, "u32"), e.source_slot(c, "u32")
    out, flag = value_and_flag(e, d)
    ins = e.instruction

    def shfl(w: Warp, lanes: Array) -> None:
        v = w.v
        b_, c_ = (v[lane_slot] & 31).astype(int), v[control].astype(int)
        segment, clamp = (c_ >> 8) & 31, c_ & 31
        top = (LANE & segment) | (clamp & ~segment)
        from_index = (LANE & segment) | (b_ & ~segment)
        j = {"up": LANE - b_, "down": LANE + b_, "bfly": LANE ^ b_, "idx": from_index}[mode]
        ok = j >= top if mode == "up" else j <= top
        j = np.where(ok, j, LANE) & 31
        silent = lanes & ~lanes[j]
        if silent.any():
            lane = int(np.argmax(silent))
            message = f"lane {lane} reads lane {int(j[lane])}, which does not take part"
            Site(w, ins, lane).report("divergence", message)
        write(v, out, v[source][j], lanes)
        write(v, flag, ok, lanes)

    with_members(e, members, shfl)


@instruction("vote")
def vote(e: Emitter) -> None:
    e.only("sync", "all", "any", "uni", "ballot")
    d, a, members = e.operands
    source, negated = predicate_source(e, a)
    mode = e.either("all", "any", "uni", "ballot")
    out = e.destination_slot(d, "u32" if mode == "ballot" else "pred")

    def vote_sync(w: Warp, lanes: Array) -> None:
        p = ~w.v[source] if negated else w.v[source]
        held = p[lanes]
        results = {"all": held.all(), "any": held.any(), "uni": held.all() or not held.any(), "ballot": bits(p & lanes)}
        write(w.v, out, results[mode], lanes)

    with_members(e, members, vote_sync)


@instruction("match")
def match(e: Emitter) -> None:
    e.only("sync", "any", "all")
    d, a, members = e.operands
    source = e.source_slot(a, e.view)
    out, flag = value_and_flag(e, d)
    every = e.has("all")

    def match_sync(w: Warp, lanes: Array) -> None:
        values = w.v[source]
        same = len(np.unique(values[lanes])) == 1
        found = [bits(lanes & (values == value)) if same or not every else 0 for value in values]
        write(w.v, out, np.array(found), lanes)
        write(w.v, flag, same, lanes)

    with_members(e, members, match_sync)


@instruction("redux")
def redux(e: Emitter) -> None:
    operations: dict[str, Any] = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    e.only("sync", "NaN", "abs", *operations)
    magnitude = e.has("abs")
    d, a, members = e.operands
    operation = operations[e.either(*operations)]
    source = e.source_slot(a, e.view)
    out = e.destination_slot(d, e.view)
    if e.type == "f32" and not e.has("NaN"):
        operation = np.fmin if e.has("min") else np.fmax

    def redux_sync(w: Warp, lanes: Array) -> None:
        values = w.v[source][lanes]
        values = np.abs(values) if magnitude else values
        write(w.v, out, operation.reduce(values).astype(values.dtype), lanes)

    with_members(e, members, redux_sync)


@instruction("elect")
def elect(e: Emitter) -> None:
    """One leader among the members; the schedule says which, since the ISA does not."""
    e.only("sync")
    d, members = e.operands
    out, flag = value_and_flag(e, d)

    def elect_sync(w: Warp, lanes: Array) -> None:
        launch = w.launch
        ids = np.flatnonzero(lanes)
        how = launch.schedule.elect
        if how == "random":  # the same lane each time for one mask, as the ISA asks
            leader = int(ids[(launch.seed * 2654435761 + int(ids.sum())) % len(ids)])
        else:
            leader = int(ids[0] if how == "lowest" else ids[-1])
        write(w.v, out, leader, lanes)
        write(w.v, flag, leader == LANE, lanes)

    with_members(e, members, elect_sync)


@instruction("activemask")
def active_mask(e: Emitter) -> None:
    e.call(set_active_mask, e.destination(e.operands[0], "u32"))


def set_active_mask(w: Warp, v: Any, m: Any, d: Array) -> None:
    np.copyto(d, bits(np.full(32, m)), where=m, casting="unsafe")
