"""Matrix instructions of a warp: ldmatrix, stmatrix, movmatrix, mma.sync."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from padless.emulator.instructions.operands import SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Vector
from padless.emulator.state import tensor_core
from padless.emulator.state.memory_access import MemoryAccess
from padless.emulator.state.shared_access import check_access, shared_groups
from padless.emulator.state.warp import Fragment, Wait
from padless.emulator.state.warp_sync import whole_warp


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
    of_bytes = e.type == "b8"
    registers, address = (e.operands[0], e.operands[1]) if load else (e.operands[1], e.operands[0])
    items = registers.items if isinstance(registers, Vector) else (registers,)
    slots = [e.destination_slot(i, "u32") if load else e.source_slot(i, "u32") for i in items]
    where = SharedOperand(e, address)
    transpose = e.has("trans")
    ins = e.instruction
    shape = MemoryAccess(ins, "shared", -1, 0, "u16", [-1] * 8)
    e.preparation.granule = min(e.preparation.granule, 16)

    @whole_warp
    def matrix_sync(f: Fragment, m: Any) -> Wait | None:
        w = f.warp
        v = w.v
        rows = 8 * count
        lanes = np.arange(rows)
        groups = shared_groups(ins, w, where.values(w)[:rows], lanes, 16)
        if sum(len(g[2]) for g in groups) != rows:
            return None
        halves = np.zeros((rows, 8), np.uint16)
        if not load:
            for k, slot in enumerate(slots):
                if of_bytes:
                    # Byte b of lane t is row t/4 + 8 (b/2), column 2 (t%4) + b%2 of m16n8; a stored row is a column.
                    octets = v[slot].view(np.uint8).reshape(8, 4, 2, 2).transpose(1, 3, 2, 0)
                    halves[8 * k : 8 * k + 8] = np.ascontiguousarray(octets).reshape(8, 16).view(np.uint16)
                    continue
                tile = v[slot].view(np.uint16).reshape(8, 8)  # [row t/4, columns 2(t%4) + half]
                halves[8 * k : 8 * k + 8] = tile.T if transpose else tile
        for cta, offsets, who in groups:
            if cta.shared.shadow is not None:
                check_access(w, cta, who, offsets, shape, write=not load)
            index = (offsets >> 1)[:, None] + np.arange(8)
            if load:
                halves[who] = cta.shared.views[np.uint16][index]
            else:
                cta.shared.views[np.uint16][index] = halves[who]
                w.launch.progress += 1
        if load:
            for k, slot in enumerate(slots):
                tile = halves[8 * k : 8 * k + 8]
                v[slot][:] = np.ascontiguousarray(tile.T if transpose else tile).reshape(32, 2).view(np.uint32)[:, 0]
        return None

    e.synchronise(matrix_sync)


@instruction("movmatrix")
def move_matrix(e: Emitter) -> None:
    d, a = e.operands
    out, source = e.destination_slot(d, "u32"), e.source_slot(a, "u32")

    @whole_warp
    def movmatrix(f: Fragment, m: Any) -> Wait | None:
        v = f.warp.v
        tile = v[source].view(np.uint16).reshape(8, 8)
        v[out][:] = np.ascontiguousarray(tile.T).reshape(32, 2).view(np.uint32)[:, 0]
        return None

    e.synchronise(movmatrix)


# ---- mma.sync
@instruction("mma")
def mma(e: Emitter) -> None:
    """mma.sync m16n8kK with 16-bit, 8-bit float, 8-bit integer or tf32 operands, row.col."""
    shape = next((m for m in e.instruction.modifiers if re.fullmatch(r"m\d+n\d+k\d+", m)), "")
    kinds = [m for m in e.instruction.modifiers if m in tensor_core.MMA_TYPES]
    e.only("sync", "aligned", "row", "col", shape, "satfinite", *tensor_core.MMA_TYPES)
    if len(kinds) == 3:
        kinds.append(kinds[0])
    found = re.fullmatch(r"m16n8k(\d+)", shape)
    if not found or len(kinds) != 4:
        e.unsupported("shape")
        return
    k = int(found[1])
    d, a, b, c = e.operands
    view = "f32" if kinds[0] == "f32" else ("s32" if kinds[0] == "s32" else "u32")

    def slots(operand: Any, kind: str, destination: bool = False) -> list[int]:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [e.destination_slot(i, kind) if destination else e.source_slot(i, kind) for i in items]

    sa, sb = slots(a, "u32"), slots(b, "u32")
    sc = slots(c, "f32" if kinds[3] == "f32" else view)
    sd = slots(d, view, True)

    @whole_warp
    def mma_sync(f: Fragment, m: Any) -> Wait | None:
        v = f.warp.v
        launch = f.warp.launch
        parts = [[v[s] for s in part] for part in (sa, sb, sc)]
        results = tensor_core.mma_sync(parts, k, kinds, launch.arithmetic, launch.target)
        for slot, values in zip(sd, results, strict=True):
            v[slot][:] = values
        return None

    e.synchronise(mma_sync)
