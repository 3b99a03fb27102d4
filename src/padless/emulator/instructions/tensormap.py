"""tensormap.replace and tensormap.cp_fenceproxy: tensor maps that the kernel changes."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.operands import GenericOperand, SharedOperand
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import instruction
from padless.emulator.ptx.ast import Immediate
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.site import Site, lanes_of
from padless.emulator.state.warp import Warp
from padless.emulator.units import packed_map, tensor_map

BYTES = 128


def blank_tensor_map() -> bytes:
    """A legal map of rank 5 whose every field is about to be replaced."""
    return tensor_map.encode_tiled(0, 16, (16, 1, 1, 1, 1), (16,) * 4, (16, 1, 1, 1, 1))


def map_bytes(site: Site, address: int, verb: str) -> Any:
    """The 128 bytes of a map in global memory, to be written."""
    found = site.warp.launch.memory.find(address)
    if found is None or address + BYTES > found.end:
        site.fault(f"{verb} an unregistered address, {address:#x}")
    check_grids(site.warp, [site.lane], site.instruction)
    return found.bytes[address - found.address :][:BYTES]


@instruction("tensormap")
def tensor_map_update(e: Emitter) -> None:
    """tensormap.replace: one field of a map in shared or global memory. tensormap.cp_fenceproxy: copy and fence."""
    if e.has("cp_fenceproxy"):
        copy_map(e)
    else:
        replace_field(e)


def copy_map(e: Emitter) -> None:
    destination, source, _ = e.operands
    target, origin = GenericOperand(e, destination), SharedOperand(e, source)
    ins = e.instruction

    def cp_fenceproxy(w: Warp, v: Any, m: Any) -> None:
        lanes = lanes_of(m)
        if not len(lanes):
            return
        site = Site(w, ins, int(lanes[0]))
        cta, offset = site.locate(origin.at(site))
        into = map_bytes(site, target.at(site), "tensormap copy to")
        into[:] = cta.shared.bytes[offset : offset + BYTES]

    e.call(cp_fenceproxy)


def replace_field(e: Emitter) -> None:
    fields = ("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
              "interleave_layout", "swizzle_mode", "fill_mode", "swizzle_atomicity")  # fmt: skip
    field = e.either(*fields)
    if not field:
        e.unsupported()
    address, *values = e.operands
    in_shared = any(m.startswith("shared") for m in e.modifiers)
    where = (SharedOperand if in_shared else GenericOperand)(e, address)
    kind = "u64" if field in ("global_address", "global_stride") else "u32"
    ordinal = 0
    if len(values) == 2:
        assert isinstance(values[0], Immediate)
        ordinal = values[0].value
    value_slot = e.source_slot(values[-1], kind)

    def replace(site: Site) -> None:
        if in_shared:
            cta, offset = site.locate(where.at(site))
            buffer = cta.shared.bytes[offset : offset + BYTES]
        else:
            buffer = map_bytes(site, where.at(site), "tensormap.replace at")
        raw = buffer.tobytes()
        if not any(raw):  # kernels may build a map from nothing, field by field
            raw = blank_tensor_map()
        try:
            new = packed_map.replace(raw, field, site.value(value_slot), ordinal)
        except ValueError as error:
            site.fault(f"tensormap.replace: {error}")
        buffer[:] = np.frombuffer(new, np.uint8)

    e.call_lanes(replace)
