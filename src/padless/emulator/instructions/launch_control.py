"""clusterlaunchcontrol: a running cluster takes over the work of one that has not started yet.

The 16 bytes of a response are opaque to kernels. Here: the first CTA of the cancelled cluster as three words, and a word
that says whether there was one (PTX ISA, "clusterlaunchcontrol").
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.bulk_transfer import Landing
from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Register, Sink
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import find_mbarrier
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import OFFSET_MASK
from padless.emulator.state.warp import Warp
from padless.emulator.state.work import Work
from padless.emulator.units.number_formats import Array

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
    e.only("try_cancel", "async", "shared::cta", "mbarrier::complete_tx::bytes", "multicast::cluster::all")
    response, barrier = SharedOperand(e, e.operands[0]), SharedOperand(e, e.operands[1])
    multicast = e.has("multicast::cluster::all")

    def issue(site: Site) -> None:
        own = site.warp.cta
        _, offset = site.locate(response.at(site))
        signal = barrier.at(site) & OFFSET_MASK
        if offset % BYTES:
            site.fault(f"response address {offset:#x} is not a multiple of 16")
        if own.cluster.cancel_failed:
            site.report("launch-control", "asks again after a response that said that no cluster is left")
        landings = []
        for cta in own.cluster.ctas if multicast else [own]:
            bar = find_mbarrier(site, cta.rank << 24 | signal, asynchronous=True)
            if bar is not None:
                landings.append(Landing(site, cta, bar, np.array([offset]), BYTES))

        def answer() -> None:
            first = own.launch.cancel_cluster()
            words = np.array([*(first or (0, 0, 0)), FAILED if first is None else CANCELLED], np.uint32)
            for landing in landings:
                landing.cta.shared.bytes[offset : offset + BYTES] = words.view(np.uint8)
                landing.complete(BYTES)

        own.launch.enqueue(None, AsyncOperation(site.instruction.name, answer, work=Work("other", own)))

    e.synchronise_lanes(issue)


def query_cancel(e: Emitter) -> None:
    e.only("query_cancel", "is_canceled", "get_first_ctaid", "v4", *(f"get_first_ctaid::{a}" for a in AXES))
    d, handle = e.operands
    assert isinstance(handle, Register)
    low, high = e.half(handle, 0, write=False), e.half(handle, 1, write=False)
    cancelled, instruction = e.has("is_canceled"), e.name(e.instruction, "i")
    e.call(is_cancelled, high, instruction, e.destination(d, "pred") if cancelled else "None")
    if cancelled:
        return
    first = next((i for i, a in enumerate(AXES) if f"get_first_ctaid::{a}" in e.modifiers), 0)
    for axis, item in enumerate(e.items(d)[:3], first):
        if not isinstance(item, Sink):
            word = high if axis == 2 else low
            e.assign(e.destination(item, "u32"), f"({word} >> np.uint64({32 * (axis % 2)})) & np.uint64(0xFFFFFFFF)")


def is_cancelled(w: Warp, v: Any, m: Any, high: Array, instruction: Any, d: Array | None) -> None:
    """Whether each lane's response names a cluster, into `d`; without it the instruction takes the cluster's CTA."""
    flags = high >> np.uint64(32)
    lanes = np.full(32, m)
    strange = lanes & (flags != FAILED) & (flags != CANCELLED)
    if strange.any():
        site = Site(w, instruction, int(np.argmax(strange)))
        site.report("launch-control", "queries 16 bytes that are no response")
    missing = lanes & (flags != CANCELLED)
    if d is not None:
        np.copyto(d, flags == CANCELLED, where=m)
        w.cta.cluster.cancel_failed |= bool(missing[int(np.argmax(lanes))])
    elif missing.any():
        site = Site(w, instruction, int(np.argmax(missing)))
        site.report("launch-control-refused", "takes the CTA of a response that names none")
