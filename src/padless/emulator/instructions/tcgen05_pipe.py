"""tcgen05.cp, mma and commit: the pipe of a CTA.

The operations that a CTA's threads issue run in order, at moments that the schedule picks. An operation is event
number n of the pipe's `done` column once a commit after it has been waited for, and of its `issued` column for the
thread that issued it and whoever that thread hands over to.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.errors import refusal
from padless.emulator.instructions.operands import SharedOperand, TensorOperand
from padless.emulator.order.race import ASYNC, BASE, BEFORE, READS, TENSOR, pack
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.ptx.ast import Address, Immediate, Vector
from padless.emulator.state.launch import AsyncOperation
from padless.emulator.state.mbarrier import find_mbarrier
from padless.emulator.state.shared_access import cells_read
from padless.emulator.state.site import Site
from padless.emulator.state.spaces import OFFSET_MASK
from padless.emulator.state.tensor_memory import COLUMNS, cells, targets_of, tensor_memory
from padless.emulator.state.warp import Cta
from padless.emulator.state.work import Work
from padless.emulator.units.matrix_descriptor import kind_of
from padless.emulator.units.tcgen05 import Mma
from padless.emulator.units.tensor_memory import Copy


def issue(site: Site, ctas: list[Cta], unit: Any, run: Any) -> None:
    """Check an operation's reads and writes at issue, stamp them, and queue it behind the pipe's earlier ones."""
    cta = site.warp.cta
    pipe = tensor_memory(cta)
    pipe.sequence += 1
    pipe.last = site.instruction
    pipe.issuers[site.row] = pipe.sequence
    for problem in unit.problems():
        site.report(kind_of(problem), problem)
    reads, writes = [r for part in unit.tmem_reads().values() for r in part], unit.tmem_writes()
    for target in ctas:
        if target.exited:
            site.report("exit", f"uses memory of CTA {target.index}, which has exited")
        for _, _, first, end in (*reads, *writes):
            if not tensor_memory(target).owns(first, end):
                missing = f"columns {first} to {end - 1} are not allocated in CTA {target.index}"
                site.report("tensor-memory", missing)
                if end > COLUMNS:
                    return
        _, end = cells_read(unit, target.granule_shift)
        if end > target.shared.size:
            site.fault(f"a descriptor reaches byte {end} of {target.shared.size} of shared memory")
    clocks = cta.cluster.clocks
    if clocks is not None:
        clock = site.clock()
        # Of this pipe's operations it is enough that they were issued before: it runs in order.
        for target in ctas:
            other = tensor_memory(target)
            clock[TENSOR, other.done] = max(clock[TENSOR, other.done], clock[TENSOR, other.issued])
        clock[TENSOR, pipe.done] = max(clock[TENSOR, pipe.done], clocks.time[TENSOR, site.row, pipe.issued])
        stamp = int(pack(pipe.done, pipe.sequence, ASYNC))
        for target in ctas:
            shadow = tensor_memory(target).shadow
            part, _ = cells_read(unit, target.granule_shift)
            target.shared.shadow.bulk(part, clock, stamp, site, write=False)
            for rectangle in reads:
                shadow.bulk(cells(rectangle), clock, stamp, site, write=False, generic_plane=TENSOR)
            for rectangle in writes:
                shadow.bulk(cells(rectangle), clock, stamp, site, write=True, own=stamp, generic_plane=TENSOR)
        clocks.time[[BASE, TENSOR], site.row, pipe.issued] = pipe.sequence

    def execute() -> None:
        for finding in run() or ():
            site.report("tensor-memory", str(finding))

    work = Work(site.instruction.modifiers[0], cta, 0, unit)
    cta.launch.enqueue(("tcgen05", id(pipe)), AsyncOperation(site.instruction.name, execute, work=work))


def multiply(e: Emitter) -> None:
    ins = e.instruction
    known = "kind::", "collector::", "scale_vec::", "block16", "block32"
    e.only("mma", "cta_group::1", "cta_group::2", "block_scale", *(m for m in e.modifiers if m.startswith(known)))
    kind = next((m[6:] for m in ins.modifiers if m.startswith("kind::")), "")
    block = next((m for m in ins.modifiers if m in ("block16", "block32") or m.startswith("scale_vec::")), "")
    pair = e.has("cta_group::2")
    d, a, b, idesc, *rest = e.operands
    d_place = TensorOperand(e, d)
    a_place = TensorOperand(e, a) if isinstance(a, Address) else None
    a_slot = -1 if isinstance(a, Address) else e.source_slot(a, "u64")
    b_slot, i_slot = e.source_slot(b, "u64"), e.source_slot(idesc, "u32")
    scales = [TensorOperand(e, rest.pop(0)) for _ in range(2 if e.has("block_scale") else 0)]
    size = (16 if block in ("block16", "scale_vec::4X") else 32) if block or scales else 0
    disable = [e.source_slot(i, "u32") for i in e.items(rest.pop(0))] if isinstance(rest[0], Vector) else []
    enable, *more = rest
    enable_slot = e.source_slot(enable, "pred")
    scale_input = more[0].value if more and isinstance(more[0], Immediate) else 0

    def mma(site: Site) -> None:
        ctas = targets_of(site, pair)
        sfa, sfb = [place.at(site) for place in scales] or (None, None)
        disabled = tuple(site.value(s) for s in disable)
        try:
            unit = Mma(
                kind, 2 if pair else 1, site.value(i_slot), d_place.at(site), site.value(b_slot),
                None if a_place else site.value(a_slot), a_place.at(site) if a_place else None,
                bool(site.value(enable_slot)), sfa, sfb, size, disabled if any(disabled) else (), scale_input,
            )  # fmt: skip
        except ValueError as error:
            site.fault(f"tcgen05.mma: {error}")
        if unit.unsupported():
            raise refusal(site.warp.launch.program.module, ins, "; ".join(unit.unsupported()))
        mode = site.warp.launch.arithmetic

        def run() -> Any:
            if mode == "none":  # that of a clock, which needs no values
                return ()
            return unit.execute([c.shared.bytes for c in ctas], [c.tensor_memory.words for c in ctas], mode)

        issue(site, ctas, unit, run)

    e.synchronise_lanes(mma)


def copy(e: Emitter) -> None:
    shape = next((m for m in e.instruction.modifiers if m[0].isdigit()), "")
    multicast = next((m for m in e.instruction.modifiers if m.startswith("warpx")), "")
    e.only("cp", "cta_group::1", "cta_group::2", shape, multicast, "b8x16", "b4x16_p64", "b6x16_p32")
    source = e.either("b4x16_p64", "b6x16_p32")
    if bool(source) != e.has("b8x16"):
        e.unsupported("formats")
    pair = e.has("cta_group::2")
    place, descriptor = TensorOperand(e, e.operands[0]), e.source_slot(e.operands[1], "u64")

    def cp(site: Site) -> None:
        ctas = targets_of(site, pair)
        unit = Copy(shape, multicast, site.value(descriptor), place.at(site), source)

        def run() -> None:
            for cta in ctas:
                unit.execute(cta.shared.bytes, cta.tensor_memory.words)

        issue(site, ctas, unit, run)

    e.synchronise_lanes(cp)


def commit(e: Emitter) -> None:
    e.only("commit", "cta_group::1", "cta_group::2", "mbarrier::arrive::one", "shared::cluster", "multicast::cluster")
    where = SharedOperand(e, e.operands[0])
    mask_slot = e.source_slot(e.operands[1], "u16") if len(e.operands) > 1 else -1

    def commit_pipe(site: Site) -> None:
        w = site.warp
        pipe = tensor_memory(w.cta)
        if site.row not in pipe.issuers:
            site.report("tensor-memory", "commit by a thread that has issued no tcgen05 operation: it covers none")
        addresses = [where.at(site)]
        if mask_slot >= 0:
            mask = site.value(mask_slot)
            addresses = [(r << 24) | (addresses[0] & OFFSET_MASK) for r in range(16) if mask >> r & 1]
        # A generic-proxy arrival (PTX ISA).
        bars = [find_mbarrier(site, a, later=True) for a in addresses]
        pipe.commits += 1
        number, clock = pipe.commits, None
        if w.clocks is not None:
            # What the thread knew to have happened when it issued the operations has happened when they are over;
            # but nothing is said of its own ordinary accesses, which it has not released.
            clock = w.clocks.join(np.array([site.row]))
            clock[:, site.row] = 0
            clock[[BASE, BEFORE, READS], pipe.done] = pipe.issuers.get(site.row, 0)

        def arrive() -> None:
            for bar in bars:
                if bar is not None:
                    bar.arrive_from_outside(site, pipe, number)
                    bar.arrive(1, clock, site)

        operation = AsyncOperation(site.instruction.name, arrive, work=Work("commit", w.cta))
        w.launch.enqueue(("tcgen05", id(pipe)), operation)

    e.synchronise_lanes(commit_pipe)
