"""Moving data: mov, ld, st, atom, red, prefetches and address-free no-ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.instructions.async_store import asynchronous_store
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import helper, instruction
from padless.emulator.ptx.ast import Immediate, Register, Sink, Symbol, Vector
from padless.emulator.ptx.types import type_size
from padless.emulator.state import atomics, memory_access
from padless.emulator.state.global_access import check_grids
from padless.emulator.state.memory_access import PIECES, MemoryAccess, local_pieces, parameter_pieces
from padless.emulator.state.spaces import VIEW_SIZE
from padless.emulator.units.number_formats import Array

DYNAMIC = {"%clock": "u32", "%clock_hi": "u32", "%clock64": "u64", "%globaltimer": "u64", "%globaltimer_lo": "u32",
           "%globaltimer_hi": "u32"}  # fmt: skip
# Qualifiers that steer caches or evictions and change no value.
CACHE = {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"}
SPACES = ("global", "shared", "local", "param", "const")
SEMANTICS = {"weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio", "cta", "cluster", "gpu", "sys"}


def cache_qualifier(modifier: str) -> bool:
    return modifier in CACHE or modifier.startswith(("L1::", "L2::"))


@instruction("mov")
def move(e: Emitter) -> None:
    d, a = e.operands
    if isinstance(d, Register) and isinstance(a, Register) and a.name in DYNAMIC:
        e.assign(e.destination(d, DYNAMIC[a.name]), f"w.launch.clock({a.name!r})")
    elif isinstance(a, Vector) and e.type == "b128":
        part_bits(e, a)
        for k, item in enumerate(a.items):
            e.assign(e.half(d, k), e.source(item, "u64"))
    elif isinstance(a, Vector):
        each, total = part_bits(e, a), 8 * type_size(e.type)
        parts = ", ".join(e.source(i, f"u{each}") for i in a.items)
        e.assign(e.destination(d, f"u{total}"), f"np.stack(({parts},), 1).view(np.uint{total})[:, 0]")
    elif isinstance(d, Vector) and e.type == "b128":
        part_bits(e, d)
        for k, item in enumerate(d.items):
            if not isinstance(item, Sink):
                e.assign(e.destination(item, "u64"), e.half(a, k, write=False))
    elif isinstance(d, Vector):
        each = part_bits(e, d)
        temporary, source = f"t{e.instruction.index}", e.source(a, f"u{each * len(d.items)}")
        e.emit(f"{temporary} = {source}.view(np.uint{each}).reshape(32, -1).copy()")
        for k, item in enumerate(d.items):
            if not isinstance(item, Sink):
                e.assign(e.destination(item, f"u{each}"), f"{temporary}[:, {k}]")
    else:
        view = e.view if e.type != "b128" else "u64"
        if view in ("u8", "s8"):
            e.unsupported()
        e.assign(e.destination(d, view), e.source(a, view))
        if view in ("u32", "s32", "f32") and isinstance(a, Register | Immediate):
            e.batched("same", d, a)
        if isinstance(a, Symbol):
            e.preparation.uses.add("symbols")


def part_bits(e: Emitter, vector: Vector) -> int:
    """Bits of an element of a vector that a mov packs or unpacks: literals have no width of their own."""
    size, count = 8 * type_size(e.type), len(vector.items)
    if count not in (2, 4) or size // count not in ((64,) if size == 128 else (8, 16, 32)):
        e.unsupported(f"{count} elements in {size} bits")
    return size // count


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
    space = next((m.split("::")[0] for m in e.instruction.modifiers if m.split("::")[0] in SPACES), "generic")
    a = MemoryAccess(e.instruction, space, *e.address(address), view, slots, symbol)
    if a.space in ("shared", "generic"):
        e.limit_granule(a.size)
    if a.space in ("global", "generic"):
        e.limit_global_granule(a.size)
    return a


def check_modifiers(e: Emitter, *known: str) -> None:
    free = (m for m in e.modifiers if cache_qualifier(m) or m in SEMANTICS or m.split("::")[0] in SPACES)
    e.only(*free, *known, "v2", "v4", "v8")


def element_slots(e: Emitter, operand: Any, store: bool) -> tuple[str, list[int]]:
    """The view of an access and its slots, one per element, -1 for `_`; a 128-bit register is two of 64 bits. Registers
    wider than the access are extended after a load."""
    view = "u64" if e.type == "b128" else e.view
    slots = []
    for item in e.items(operand):
        width = e.width(item)
        if isinstance(item, Sink):
            slots.append(-1)
        elif e.type == "b128" and isinstance(item, Register):
            cls, row = e.preparation.row(item.name)
            slots += [e.preparation.slot(cls, row + k, "u64") for k in range(2)]
            (e.reads if store else e.writes).append(item.name)
        elif -1 < width < VIEW_SIZE[view]:
            e.unsupported(f"{item} is narrower than the access")
        else:
            sign = "s" if view[0] == "s" and not store else "u"
            kind = view if width in (-1, VIEW_SIZE[view]) else f"{sign}{8 * width}"
            slots.append(e.source_slot(item, kind) if store else e.destination_slot(item, kind))
    return view, slots


@instruction("ld", "ldu")
def load(e: Emitter) -> None:
    d, address = e.operands[:2]
    check_modifiers(e)
    a = decoded(e, address, *element_slots(e, d, store=False))
    pieces = PIECES[a.space]
    if a.symbol and a.space in ("param", "generic"):  # of the kernel, or a call's parameter variable
        known = any(p.name == a.symbol for p in e.preparation.function.parameters)
        pieces = parameter_pieces if known else local_pieces
    e.call(memory_access.load(pieces, a))


@instruction("st")
def store(e: Emitter) -> None:
    if e.has("async"):
        asynchronous_store(e)
        return
    address, source = e.operands[:2]
    check_modifiers(e)
    a = decoded(e, address, *element_slots(e, source, store=True))
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
    operation = e.either(*operations)
    check_modifiers(e, *operations, "noftz")
    operands = list(e.operands)
    destination = operands.pop(0) if e.opcode == "atom" else Sink()
    address, *values = operands
    if not operation or (e.type == "b128" and operation not in ("cas", "exch")):
        e.unsupported()
    sources = [element_slots(e, o, store=True)[1] for o in values[: 2 if operation == "cas" else 1]]
    view, results = element_slots(e, destination, store=False)
    if isinstance(destination, Sink):
        results = [-1] * len(sources[0])
    e.call(atomics.atomic(decoded(e, address, view, results), operation, e.type, sources))


@instruction("prefetch", "prefetchu", "applypriority")
def prefetch(e: Emitter) -> None:
    """No functional effect."""
    if "tensormap" in e.modifiers:
        e.preparation.uses.add("tensormap prefetch")


@instruction("discard")
def discard(e: Emitter) -> None:
    """The bytes become indeterminate; here they stay. It counts as a write of global memory (PTX ISA, "discard")."""
    e.call_lanes(lambda site: check_grids(site.warp, [site.lane], site.instruction))


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
        e.call_lanes(lambda site: site.fault("device-side assert"))
    elif name != "vprintf":
        e.unsupported(f"external function {name}")


@instruction("alloca", "stacksave", "stackrestore")
def stack(e: Emitter) -> None:
    e.unsupported("dynamic stack")
