"""tensormap.replace and tensormap.cp_fenceproxy: tensor maps that the kernel changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.instructions.operands import GenericOperand, SharedOperand, locate
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state import grid_dependency

if TYPE_CHECKING:
    from padless.emulator.prepare.emitter import Emitter


def blank_tensor_map() -> bytes:
    """A legal map of rank 5 whose every field is about to be replaced."""
    from padless.emulator.units import tensor_map

    return tensor_map.encode_tiled(0, 16, (16, 1, 1, 1, 1), (16,) * 4, (16, 1, 1, 1, 1))


@instruction("tensormap")
def tensor_map_update(e: Emitter) -> None:
    """tensormap.replace: one field of a map in shared or global memory. tensormap.cp_fenceproxy: copy and fence."""
    ins = e.instruction
    if e.has("cp_fenceproxy"):
        destination, source, _ = e.operands
        target, origin = GenericOperand(e, destination), SharedOperand(e, source)

        def cp_fenceproxy(w: Any, v: Any, m: Any) -> None:
            lane = 0 if m is True else int(np.argmax(m))
            cta, offset = locate(w, origin.one(w, lane), ins, lane)
            machine = w.cta.machine
            found = machine.memory.find(target.one(w, lane))
            if found is None:
                machine.fault(w, ins, "tensormap copy to an unregistered address", m)
            at = target.one(w, lane) - found.address
            grid_dependency.check(w, [lane], ins)
            found.bytes[at : at + 128] = cta.shared.bytes[offset : offset + 128]

        e.call(cp_fenceproxy)
        return
    fields = ("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
              "interleave_layout", "swizzle_mode", "fill_mode", "swizzle_atomicity")  # fmt: skip
    field = next((m for m in ins.modifiers if m in fields), "")
    if not field:
        e.unsupported()
    address, *values = e.operands
    in_shared = any(m.startswith("shared") for m in e.modifiers)
    where: Any = SharedOperand(e, address) if in_shared else GenericOperand(e, address)
    kind = "u64" if field in ("global_address", "global_stride") else "u32"
    ordinal = 0
    if len(values) == 2:
        assert isinstance(values[0], Immediate)
        ordinal = values[0].value
    value_slot = e.source_slot(values[-1], kind)

    def replace(w: Any, v: Any, m: Any) -> None:
        from padless.emulator.units import tensor_map

        for lane in range(32) if m is True else np.flatnonzero(m).tolist():
            machine = w.cta.machine
            if in_shared:
                cta, offset = locate(w, where.one(w, lane), ins, lane)
                buffer = cta.shared.bytes
            else:
                found = machine.memory.find(where.one(w, lane))
                if found is None:
                    machine.fault(w, ins, "tensormap.replace at an unregistered address", m)
                grid_dependency.check(w, [lane], ins)
                buffer, offset = found.bytes, where.one(w, lane) - found.address
            raw = buffer[offset : offset + 128].tobytes()
            if not any(raw):  # kernels may build a map from nothing, field by field
                raw = blank_tensor_map()
            try:
                new = tensor_map.replace(raw, field, int(v[value_slot][lane]), ordinal)
            except ValueError as error:
                machine.fault(w, ins, f"tensormap.replace: {error}", np.arange(32) == lane)
            buffer[offset : offset + 128] = np.frombuffer(new, np.uint8)

    e.call(replace)
