"""Integer arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import expressions, helper, instruction
from padless.emulator.ptx.ast import Operand

Array = np.ndarray[Any, Any]


expressions(
    {
        "abs": ("* *", "np.abs"),
        "neg": ("* *", "np.negative"),
        "sad": ("* * * *", "np.where({0} < {1}, {1} - {0}, {0} - {1}) + {2}"),
        "div": ("* * *", "divide_integers({0}, {1})"),
        "rem": ("* * *", "remainder_integers({0}, {1})"),
    }
)

PACKED = {"u16x2": "np.uint16", "s16x2": "np.int16"}


def halves(e: Emitter, operand: Operand) -> str:
    """The two 16-bit numbers of every lane: 64 values."""
    return f"{e.source(operand, 'u32')}.view({PACKED[e.type]})"


@helper
def clamp_s32(value: Array) -> Array:
    return np.clip(value, -(1 << 31), (1 << 31) - 1).astype(np.int32)


@instruction("add", "sub")
def add_sub(e: Emitter) -> None:
    if e.has("cc"):
        carry_out(e)
        return
    e.only("sat")
    d, a, b = e.operands
    sign = "+" if e.opcode == "add" else "-"
    if e.type in PACKED:
        e.assign(e.destination(d, "u32"), f"({halves(e, a)} {sign} {halves(e, b)}).view(np.uint32)")
        return
    view = e.view
    if e.has("sat"):
        if view != "s32":
            e.unsupported("only .s32 saturates")
        wide = f"{e.source(a, view)}.astype(np.int64) {sign} {e.source(b, view)}"
        e.assign(e.destination(d, view), f"clamp_s32({wide})")
        return
    e.ufunc(
        "np.add" if e.opcode == "add" else "np.subtract", e.destination(d, view), e.source(a, view), e.source(b, view)
    )


def carry_out(e: Emitter) -> None:
    """add.cc / sub.cc: the carry (or borrow) goes to the warp's condition-code row."""
    view = "u" + e.view[1:]
    d, a, b = e.operands
    e.call(
        add_carry, e.destination(d, view), e.source(a, view), e.source(b, view), "None", "True", str(e.opcode == "sub")
    )


@instruction("madc")
def mad_with_carry(e: Emitter) -> None:
    multiply_carry(e, "w.carry")


def multiply_carry(e: Emitter, carry: str) -> None:
    """mad.cc, madc: the product's half plus c, with the carry in and out of the condition code."""
    e.only("lo", "hi", "cc")
    view = "u" + e.view[1:]
    d, a, b, c = e.operands
    x, y = e.source(a, e.view), e.source(b, e.view)
    product = f"multiply_high({x}, {y})" if e.has("hi") else f"({x} * {y})"
    e.call(
        add_carry, e.destination(d, view), f"{product}.view(np.{NAMES[view]})", e.source(c, view), carry,
        str(e.has("cc")), "False",
    )  # fmt: skip


@instruction("addc", "subc")
def add_with_carry(e: Emitter) -> None:
    view = "u" + e.view[1:]
    d, a, b = e.operands
    e.call(
        add_carry, e.destination(d, view), e.source(a, view), e.source(b, view), "w.carry", str(e.has("cc")),
        str(e.opcode == "subc"),
    )  # fmt: skip


def add_carry(w: Any, v: Any, m: Any, d: Array, a: Array, b: Array, carry: Any, keep: bool, subtract: bool) -> None:
    one = np.zeros(32, d.dtype) if carry is None else carry.astype(d.dtype)
    if subtract:
        total = a - b - one
        out = (a < b) | ((a == b) & (one != 0))
    else:
        total = a + b + one
        out = (total < a) | ((total == a) & (one != 0))
    np.copyto(d, total, where=m)
    if keep:
        np.copyto(w.carry, out, where=m)


@instruction("mul")
def mul(e: Emitter) -> None:
    e.only("lo", "hi", "wide")
    d, a, b = e.operands
    view = e.view
    size = int(view[1:])
    if e.has("wide"):
        wide = f"{view[0]}{2 * size}"
        e.ufunc("np.multiply", e.destination(d, wide), e.source(a, view), e.source(b, view), dtype=f"np.{NAMES[wide]}")
    elif e.has("hi"):
        e.assign(e.destination(d, view), f"multiply_high({e.source(a, view)}, {e.source(b, view)})")
    else:
        e.ufunc("np.multiply", e.destination(d, view), e.source(a, view), e.source(b, view))


NAMES = {"u16": "uint16", "s16": "int16", "u32": "uint32", "s32": "int32", "u64": "uint64", "s64": "int64"}


@helper
def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the double-width product, signed or unsigned by the arrays' type."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        high: Array = (a.astype(wide) * b.astype(wide)) >> wide(bits)
        return high.astype(a.dtype)
    return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)], dtype=object).astype(a.dtype)


@instruction("mad")
def mad(e: Emitter) -> None:
    if e.has("cc"):
        multiply_carry(e, "None")
        return
    e.only("lo", "hi", "wide", "sat")
    d, a, b, c = e.operands
    view = e.view
    if e.has("sat"):
        if not e.has("hi") or view != "s32":
            e.unsupported("only .hi.s32 saturates")
        product = f"multiply_high({e.source(a, view)}, {e.source(b, view)}).astype(np.int64)"
        e.assign(e.destination(d, view), f"clamp_s32({product} + {e.source(c, view)})")
        return
    if e.has("wide"):
        wide = f"{view[0]}{2 * int(view[1:])}"
        kind = f"np.{NAMES[wide]}"
        e.assign(
            e.destination(d, wide),
            f"np.multiply({e.source(a, view)}, {e.source(b, view)}, dtype={kind}) + {e.source(c, wide)}",
        )
    elif e.has("hi"):
        e.assign(
            e.destination(d, view), f"multiply_high({e.source(a, view)}, {e.source(b, view)}) + {e.source(c, view)}"
        )
    else:
        e.assign(e.destination(d, view), f"{e.source(a, view)} * {e.source(b, view)} + {e.source(c, view)}")


@instruction("mul24", "mad24")
def mul24(e: Emitter) -> None:
    """Products of the low 24 bits; .hi takes bits 16 to 47 of the 48."""
    e.only("lo", "hi", "sat")
    view = e.view
    d, a, b, *c = e.operands
    x, y = (f"({e.source(o, view)} << 8 >> 8).astype(np.int64)" for o in (a, b))
    value = f"(({x} * {y}) >> {16 if e.has('hi') else 0}).astype(np.{NAMES[view]})"
    if c and e.has("sat"):
        value = f"clamp_s32({value}.astype(np.int64) + {e.source(c[0], view)})"
    elif c:
        value = f"{value} + {e.source(c[0], view)}"
    e.assign(e.destination(d, view), value)


@helper
def divide_integers(a: Array, b: Array) -> Array:
    """Truncating division. Division by zero is unspecified in PTX: all ones here."""
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0))).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(a), quotient)


@helper
def remainder_integers(a: Array, b: Array) -> Array:
    safe = np.where(b == 0, 1, b).astype(a.dtype)
    return np.where(b == 0, a, a - divide_integers(a, safe) * safe)


@instruction("min", "max")
def min_max(e: Emitter) -> None:
    e.only("relu")
    d, *sources = e.operands
    name = "np.minimum" if e.opcode == "min" else "np.maximum"
    if e.type in PACKED:
        value = f"{name}({halves(e, sources[0])}, {halves(e, sources[1])})"
        value = f"np.maximum({value}, 0)" if e.has("relu") else value
        e.assign(e.destination(d, "u32"), f"{value}.view(np.uint32)")
        return
    view = e.view
    value = e.source(sources[0], view)
    for source in sources[1:]:
        value = f"{name}({value}, {e.source(source, view)})"
    if e.has("relu"):
        value = f"np.maximum({value}, 0)"
    e.assign(e.destination(d, view), value)


@instruction("dp4a", "dp2a")
def dot_bytes(e: Emitter) -> None:
    """Four products of bytes, or two of a's 16-bit halves with b's low (.lo) or high (.hi) two bytes, added to c."""
    e.only("lo", "hi")
    d, a, b, c = e.operands
    signs = ["np.int" if k[0] == "s" else "np.uint" for k in e.types[:2]]
    kind = "s32" if "np.int" in signs else "u32"
    if e.opcode == "dp4a":
        x = f"{e.source(a, 'u32')}.view({signs[0]}8).reshape(32, 4)"
        y = f"{e.source(b, 'u32')}.view({signs[1]}8).reshape(32, 4)"
    else:
        x = f"{e.source(a, 'u32')}.view({signs[0]}16).reshape(32, 2)"
        y = f"{e.source(b, 'u32')}.view({signs[1]}8).reshape(32, 4)[:, {'2:' if e.has('hi') else ':2'}]"
    e.assign(e.destination(d, kind), f"({x}.astype(np.int64) * {y}).sum(1) + {e.source(c, kind)}")
