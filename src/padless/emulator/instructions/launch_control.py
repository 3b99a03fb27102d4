"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started yet.

The 16 bytes of a response are opaque to kernels. Here: the first CTA of the cancelled cluster as three words, and a word
that says whether there was one (PTX ISA, "clusterlaunchcontrol").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions import bulk_transfer
from padless.emulator.instructions.operands import SharedOperand, locate
from padless.emulator.instructions.synchronisation import find_mbarrier
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Register, Sink, Vector
from padless.emulator.state.asynchronous import AsyncOperation, Work
from padless.emulator.state.spaces import OFFSET_MASK

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter
    from padless.emulator.state.warp import Fragment, Wait, Warp

Array = np.ndarray[Any, Any]
BYTES = 16
FAILED, CANCELLED = 0x30434C43, 0x31434C43
AXES = ("x", "y", "z")


@instruction("clusterlaunchcontrol")
def cluster_launch_control(e: Emitter) -> None:
    if e.has("try_cancel"):
        try_cancel(e)
    elif e.has("query_cancel"):
        query_cancel(e)
    else:
        e.unsupported()


def try_cancel(e: Emitter) -> None:
    """Ask for a cluster; the response and 16 bytes of transaction reach the issuing CTA, or every CTA of its cluster."""
    e.only(
        "try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all",
    )  # fmt: skip
    response, barrier = SharedOperand(e, e.operands[0]), SharedOperand(e, e.operands[1])
    multicast = e.has("multicast::cluster::all")
    ins = e.instruction

    def request(f: Fragment, m: Any) -> Wait | None:
        for lane in f.lanes(m).tolist():
            issue(f.warp, lane, response.one(f.warp, lane), barrier.one(f.warp, lane))
        return None

    def issue(w: Warp, lane: int, to: int, signal: int) -> None:
        machine, cluster = w.cta.machine, w.cta.cluster
        _, offset = locate(w, to, ins, lane)
        if offset % BYTES:
            machine.fault(
                w, ins, f"response address {offset:#x} is not a multiple of 16", np.arange(32) == lane
            )
        if cluster.cancel_failed:
            machine.report(
                "launch-control",
                "asks again after a response that said that no cluster is left",
                ins,
                w,
                lane,
            )
        targets = []
        for cta in cluster.ctas if multicast else [w.cta]:
            address = cta.rank << 24 | (signal & OFFSET_MASK)
            bar = find_mbarrier(w, address, ins, lane, asynchronous=True)
            if bar is not None:
                cells = (
                    bulk_transfer.cells_of(np.array([offset]), BYTES, cta.granule_shift)
                    if cta.checks
                    else None
                )
                stamp = bulk_transfer.begin_write(w, lane, ins, cta, cells, bar.column)
                targets.append((cta, bar, cells, stamp))

        def answer() -> None:
            first = machine.cancel_cluster()
            words = np.array([*(first or (0, 0, 0)), FAILED if first is None else CANCELLED], np.uint32)
            for cta, bar, cells, stamp in targets:
                cta.shared.bytes[offset : offset + BYTES] = words.view(np.uint8)
                bulk_transfer.complete(w, ins, cta, bar, cells, stamp, BYTES)

        machine.enqueue(None, AsyncOperation(ins.name, answer, work=Work("other", w.cta)))

    e.synchronise(request)


def query_cancel(e: Emitter) -> None:
    e.only("query_cancel", "is_canceled", "get_first_ctaid", "v4", *(f"get_first_ctaid::{a}" for a in AXES))
    d, handle = e.operands
    assert isinstance(handle, Register)
    low, high = e.half(handle, 0, write=False), e.half(handle, 1, write=False)
    if e.has("is_canceled"):
        e.call(is_cancelled, e.destination(d, "pred"), high, e.name(e.instruction, "i"))
        return
    items: tuple[Any, ...] = d.items if isinstance(d, Vector) else (d,)
    first = next((i for i, a in enumerate(AXES) if f"get_first_ctaid::{a}" in e.modifiers), 0)
    e.call(check_cancelled, high, e.name(e.instruction, "i"))
    for axis, item in enumerate(items[:3], first):
        if not isinstance(item, Sink):
            word = high if axis == 2 else low
            e.assign(
                e.destination(item, "u32"),
                f"({word} >> np.uint64({32 * (axis % 2)})) & np.uint64(0xFFFFFFFF)",
            )


def state(w: Any, m: Any, high: Array, instruction: Any) -> Array:
    """Whether each lane's response names a cluster."""
    flags = high >> np.uint64(32)
    lanes = np.ones(32, bool) if m is True else np.asarray(m)
    strange = lanes & (flags != FAILED) & (flags != CANCELLED)
    if strange.any():
        w.cta.machine.report(
            "launch-control", "queries 16 bytes that are no response", instruction, w, int(np.argmax(strange))
        )
    return np.asarray(flags == CANCELLED)


def is_cancelled(w: Any, v: Any, m: Any, d: Array, high: Array, instruction: Any) -> None:
    found = state(w, m, high, instruction)
    np.copyto(d, found, where=m)
    if not found[0 if m is True else int(np.argmax(m))]:
        w.cta.cluster.cancel_failed = True


def check_cancelled(w: Any, v: Any, m: Any, high: Array, instruction: Any) -> None:
    lanes = ~state(w, m, high, instruction) & (True if m is True else m)
    if lanes.any():
        w.cta.machine.report(
            "launch-control",
            "takes the CTA of a response that names none",
            instruction,
            w,
            int(np.argmax(lanes)),
        )
