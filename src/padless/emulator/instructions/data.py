"""Moving data: mov, ld, st, atom, red, prefetches and address-free no-ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.async_store import asynchronous_store
from padless.emulator.instructions.conversion import wide_source
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import HELPERS, helper, instruction
from padless.emulator.ptx.ast import Immediate, Register, Sink, Symbol, Vector
from padless.emulator.state import atomics, memory_access
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.memory import NUMPY
from padless.emulator.state.memory_access import PIECES, MemoryAccess, local_pieces
from padless.emulator.state.site import Site, lanes_of
from padless.emulator.state.warp import Warp

Array = np.ndarray[Any, Any]
DYNAMIC = {"%clock": "u32", "%clock_hi": "u32", "%clock64": "u64", "%globaltimer": "u64", "%globaltimer_lo": "u32",
           "%globaltimer_hi": "u32"}  # fmt: skip
# Qualifiers that steer caches or evictions and change no value.
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"}
SEMANTICS = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "cta", "cluster", "gpu", "sys"}


def cache_qualifier(modifier: str) -> bool:
    return modifier in CACHE or modifier.startswith(("L1::", "L2::"))


@instruction("mov")
def move(e: Emitter) -> None:
    d, a = e.operands
    if isinstance(d, Register) and isinstance(a, Register) and a.name in DYNAMIC:
        e.assign(e.destination(d, DYNAMIC[a.name]), f"w.launch.clock({a.name!r})")
        return
    if isinstance(a, Vector):
        total = sum(e.width(i) for i in a.items)
        if e.type == "b128":
            for k, item in enumerate(a.items):
                e.assign(e.half(d, k), e.source(item, "u64"))
            return
        each = total // len(a.items)
        parts = ", ".join(e.source(i, f"u{8 * each}") for i in a.items)
        e.assign(e.destination(d, f"u{8 * total}"), f"np.stack(({parts},), 1).view(np.uint{8 * total})[:, 0]")
        return
    if isinstance(d, Vector):
        widths = [e.width(i) for i in d.items if isinstance(i, Register)]
        each = max(widths)
        if e.type == "b128":
            for k, item in enumerate(d.items):
                e.assign(e.destination(item, "u64"), e.half(a, k, write=False))
            return
        total = each * len(d.items)
        temporary = f"t{e.instruction.index}"
        e.emit(f"{temporary} = {e.source(a, f'u{8 * total}')}.view(np.uint{8 * each}).reshape(32, -1).copy()")
        for k, item in enumerate(d.items):
            if not isinstance(item, Sink):
                e.assign(e.destination(item, f"u{8 * each}"), f"{temporary}[:, {k}]")
        return
    view = e.view if e.type != "b128" else "u64"
    if view in ("u8", "s8"):
        e.unsupported()
    e.assign(e.destination(d, view), e.source(a, view))
    if view in ("u32", "s32", "f32") and isinstance(a, Register | Immediate):
        e.batched("same", d, a)
    if isinstance(a, Symbol):
        e.preparation.uses.add("symbols")


@helper
def same(values: Array) -> Array:
    return values


@helper
def batch(w: Any, m: Any, function: Any, destinations: Array, *sources: Array) -> None:
    """Run one function for many instructions: rows of 32-bit registers, as float32."""
    rows = w.arrays["w"].view(np.float32)
    values = function(*(rows[s] for s in sources))
    rows[destinations] = values if m is True else np.where(m, values, rows[destinations])


def decoded(e: Emitter, address: Any, view: str, slots: list[int]) -> MemoryAccess:
    """The access to `address` in the space that the modifiers name; it may set the grain of the race shadow."""
    symbol = address.base.name if isinstance(address.base, Symbol) else ""
    a = MemoryAccess(e.instruction, space_of(e), *e.address(address), view, slots, symbol)
    if a.space in ("shared", "generic"):
        e.preparation.granule = min(e.preparation.granule, a.size)
    return a


def space_of(e: Emitter) -> str:
    for modifier in e.instruction.modifiers:
        name = modifier.split("::")[0]
        if name in ("global", "shared", "local", "param", "const"):
            return name
    return "generic"


def access(e: Emitter, address: Any, value: Any, store: bool) -> MemoryAccess:
    """Decode the address and register list; registers wider than the access are extended after a load."""
    for modifier in e.modifiers:
        if not (
            cache_qualifier(modifier)
            or modifier in SEMANTICS
            or modifier.split("::")[0] in ("global", "shared", "local", "param", "const")
            or modifier in ("v2", "v4", "v8", *e.types)
        ):
            e.unsupported(f"modifier .{modifier}")
    items = value.items if isinstance(value, Vector) else (value,)
    kind = e.type
    if kind == "b128":
        view = "u64"
        slots = []
        for item in items:
            assert isinstance(item, Register)
            for k in range(2):
                cls, row = e.preparation.row(item.name)
                slots.append(e.preparation.slot(cls, row + k, "u64"))
            (e.reads if store else e.writes).append(item.name)
        return decoded(e, address, view, slots)
    view = e.view
    size = int(view[1:]) // 8
    slots = []
    for item in items:
        if isinstance(item, Sink):
            slots.append(-1)
            continue
        width = e.width(item)
        if width in (-1, size):
            slots.append(e.source_slot(item, view) if store else e.destination_slot(item, view))
        elif width < size:
            e.unsupported(f"{item} is narrower than the access")
        elif store:
            slots.append(e.source_slot(item, f"u{8 * width}"))
        else:
            slots.append(e.destination_slot(item, f"{'s' if view[0] == 's' else 'u'}{8 * width}"))
    return decoded(e, address, view, slots)


@instruction("ld", "ldu")
def load(e: Emitter) -> None:
    d, address = e.operands[:2]
    a = access(e, address, d, store=False)
    pieces = PIECES[a.space]
    if a.symbol and a.space in ("param", "generic"):
        if any(p.name == a.symbol for p in e.preparation.function.parameters):
            e.call(load_parameter(a))
            return
        pieces = local_pieces  # a call's parameter variable
    e.call(memory_access.load(pieces, a))


def load_parameter(a: MemoryAccess) -> Any:
    """ld.param from the launch's parameter block, one value for all lanes."""

    def ld_param(w: Warp, v: Any, m: Any) -> None:
        start = w.launch.parameter_offsets[a.symbol] + a.offset
        raw = w.launch.parameters[start : start + a.bytes].view(NUMPY[a.view])
        for k, slot in enumerate(a.slots):
            if slot >= 0:
                np.copyto(v[slot], raw[k], where=m, casting="unsafe")

    return ld_param


@instruction("st")
def store(e: Emitter) -> None:
    if e.has("async"):
        asynchronous_store(e)
        return
    address, s = e.operands[:2]
    a = access(e, address, s, store=True)
    if a.space == "const":
        e.unsupported("constant memory cannot be written")
    e.call(memory_access.store(local_pieces if a.space == "param" else PIECES[a.space], a))


@instruction("atom", "red")
def atomic(e: Emitter) -> None:
    """Read-modify-write, lane after lane. red has no destination."""
    operations = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")
    if e.has("async"):
        asynchronous_store(e)
        return
    operation = next((m for m in e.instruction.modifiers if m in operations), "")
    for modifier in e.modifiers:
        if not (
            modifier in operations or modifier in SEMANTICS or cache_qualifier(modifier) or modifier in e.types
            or modifier.split("::")[0] in ("global", "shared") or modifier in ("noftz", "v2", "v4", "v8")
        ):  # fmt: skip
            e.unsupported(f"modifier .{modifier}")
    needed = 2 if operation == "cas" else 1
    operands = list(e.operands)
    destination = operands.pop(0) if e.opcode == "atom" else Sink()
    address, *values = operands
    if not operation or (e.type == "b128" and operation not in ("cas", "exch")):
        e.unsupported()

    def slots(operand: Any, store: bool) -> list[int]:
        """One slot per element; a 128-bit register is two of 64 bits."""
        if e.type == "b128" and isinstance(operand, Register):
            cls, row = e.preparation.row(operand.name)
            (e.reads if store else e.writes).append(operand.name)
            return [e.preparation.slot(cls, row + k, "u64") for k in range(2)]
        items = operand.items if isinstance(operand, Vector) else (operand,)
        return [e.source_slot(i, e.view) if store else e.destination_slot(i, e.view) for i in items]

    sources = [slots(o, True) for o in values[:needed]]
    count = len(sources[0])
    results = [-1] * count if isinstance(destination, Sink) else slots(destination, False)
    a = decoded(e, address, "u64" if e.type == "b128" else e.view, results)
    e.call(atomics.atomic(a, operation, e.type, sources))


@instruction("prefetch", "prefetchu", "applypriority")
def prefetch(e: Emitter) -> None:
    """No functional effect."""
    if "tensormap" in e.modifiers:
        e.preparation.uses.add("tensormap prefetch")


@instruction("discard")
def discard(e: Emitter) -> None:
    """The bytes become indeterminate; here they stay. It counts as a write of global memory (PTX ISA, "discard")."""
    ins = e.instruction

    def discarded(w: Warp, v: Any, m: Any) -> None:
        check_grids(w, lanes_of(m), ins)

    e.call(discarded)


@instruction("createpolicy")
def create_policy(e: Emitter) -> None:
    """A cache policy is opaque: zero."""
    e.assign(e.destination(e.operands[0], "u64"), "0")


@instruction("nanosleep", "pmevent", "nop")
def sleep(e: Emitter) -> None:
    """Time does not pass in the emulator."""


@instruction("call.external")
def external(e: Emitter) -> None:
    """vprintf prints nothing; __assertfail stops the kernel."""
    name = str(e.operands[0])
    if name == "__assertfail":
        e.call(assertion_failed, e.name(e.instruction, "i"))
    elif name != "vprintf":
        e.unsupported(f"external function {name}")


def assertion_failed(w: Warp, v: Any, m: Any, instruction: Any) -> None:
    if m is True or np.any(m):
        Site(w, instruction, int(lanes_of(m)[0])).fault("device-side assert")


@instruction("alloca", "stacksave", "stackrestore")
def stack(e: Emitter) -> None:
    e.unsupported("dynamic stack")


HELPERS["wide_source"] = wide_source
