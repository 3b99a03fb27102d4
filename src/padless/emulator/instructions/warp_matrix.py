"""Matrix instructions of a warp: ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.state.memory_access import MemoryAccess
from padless.emulator.state.shared_access import check_access, shared_groups
from padless.emulator.state.warp import Fragment, Wait
from padless.emulator.state.warp_sync import whole_warp
from padless.emulator.units import mma_sync
from padless.emulator.units.wgmma import TYPES


def matrix_shape(e: Emitter) -> int:
    """How many matrices; of m8n8 of 16 bits, or of m16n8 bytes for a transposing stmatrix."""
    e.only("sync", "aligned", "m8n8", "m16n8", "x1", "x2", "x4", "trans", "shared", "shared::cta", "b16", "b8")
    of_bytes = e.opcode == "stmatrix" and e.has("m16n8", "trans") and e.type == "b8"
    if not of_bytes and (not e.has("m8n8") or e.type != "b16"):
        e.unsupported("only .m8n8 of .b16, and stmatrix.m16n8.trans of .b8")
    return int(next((m for m in e.instruction.modifiers if m in ("x1", "x2", "x4")), "x1")[1])


@instruction("ldmatrix", "stmatrix")
def matrix_move(e: Emitter) -> None:
    """Lane l gives the address of row l % 8 of matrix l / 8; lane t holds row t / 4, columns 2 (t % 4) and the next."""
    count = matrix_shape(e)
    load = e.opcode == "ldmatrix"
    registers, address = (e.operands[0], e.operands[1]) if load else (e.operands[1], e.operands[0])
    slots = [e.destination_slot(i, "u32") if load else e.source_slot(i, "u32") for i in e.items(registers)]
    where = SharedOperand(e, address)
    transpose, shape = e.has("trans"), e.either("m8n8", "m16n8")
    ins = e.instruction
    row = MemoryAccess(ins, "shared", -1, 0, "u16", [-1] * 8)
    e.limit_granule(16)

    @whole_warp
    def matrix_sync(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        lanes = np.arange(8 * count)
        groups = shared_groups(ins, w, where.values(w)[: len(lanes)], lanes, 16)
        if sum(len(g[2]) for g in groups) != len(lanes):
            return None
        octets = np.zeros((len(lanes), 16), np.uint8)
        if not load:
            octets = mma_sync.stmatrix(np.stack([w.v[s] for s in slots], axis=1), shape, transpose)
        for cta, offsets, who in groups:
            index = offsets[:, None] + np.arange(16)
            if cta.shared.shadow is not None:
                there, own = cta.shared.bytes[index], octets[who]

                def equal(picked: Any, there: Any = there, own: Any = own) -> bool:
                    return not load and bool((there[picked] == own[picked]).all())

                check_access(w, cta, who, offsets, row, not load, equal)
            if load:
                octets[who] = cta.shared.bytes[index]
            else:
                cta.shared.bytes[index] = octets[who]
                w.launch.progress += 1
        if load:
            for slot, values in zip(slots, mma_sync.ldmatrix(octets, shape, count, transpose).T, strict=True):
                w.v[slot][:] = values
        return None

    e.synchronise(matrix_sync)


@instruction("movmatrix")
def move_matrix(e: Emitter) -> None:
    d, a = e.operands
    out, source = e.destination_slot(d, "u32"), e.source_slot(a, "u32")

    @whole_warp
    def movmatrix(f: Fragment, m: Any) -> Wait | None:
        rows = mma_sync.stmatrix(f.warp.v[source][:, None], "m8n8", False)
        f.warp.v[out][:] = mma_sync.ldmatrix(rows, "m8n8", 1, True)[:, 0]
        return None

    e.synchronise(movmatrix)


# ---- mma.sync
@instruction("mma")
def mma(e: Emitter) -> None:
    """mma.sync m16n8kK with 16-bit, 8-bit float, 8-bit integer or tf32 operands, row.col."""
    shape = next((m for m in e.instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    kinds = [m for m in e.instruction.modifiers if m in TYPES]
    e.only("sync", "aligned", "row", "col", shape, "satfinite", *TYPES)
    found = re.fullmatch(r"m16n8k(\d+)", shape)
    if not found or len(kinds) not in (3, 4):
        e.unsupported("shape")
    k, saturate = int(found[1]), e.has("satfinite")
    d_type, a_type, b_type = kinds[:3]
    d, *sources = e.operands
    view = {"f32": "f32", "s32": "s32"}.get(d_type, "u32")
    slots = [
        [e.source_slot(i, kind) for i in e.items(o)] for o, kind in zip(sources, ("u32", "u32", view), strict=True)
    ]
    results = [e.destination_slot(i, view) for i in e.items(d)]

    @whole_warp
    def multiply(f: Fragment, m: Any) -> Wait | None:
        v, launch = f.warp.v, f.warp.launch
        a, b, c = (np.stack([v[s].view(np.uint32) for s in part], axis=1) for part in slots)
        if launch.arithmetic != "none":  # that of a clock, which needs no values
            options: Any = {"mode": launch.arithmetic, "target": launch.target, "saturate": saturate}
            c = mma_sync.mma(k, d_type, a_type, b_type, a, b, c, **options)
        for i, slot in enumerate(results):
            v[slot].view(np.uint32)[:] = c[:, i]
        return None

    e.synchronise(multiply)
