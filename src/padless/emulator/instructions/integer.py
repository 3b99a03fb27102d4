"""Integer and bit instructions, comparison and selection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ast import Immediate, Pair, Sink
from .registry import helper, instruction

if TYPE_CHECKING:
    from ..program import Emitter

Array = np.ndarray[Any, Any]


def is_float(e: Emitter) -> bool:
    return e.type[0] == "f" or e.type.startswith("bf")


@instruction("add", "sub")
def add_sub(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.arithmetic(e)
        return
    if e.has("cc"):
        carry_out(e)
        return
    e.only("sat")
    if e.has("sat"):
        e.unsupported("integer .sat")
    view = e.view
    d, a, b = e.operands
    e.ufunc(
        "np.add" if e.opcode == "add" else "np.subtract",
        e.destination(d, view),
        e.source(a, view),
        e.source(b, view),
    )


def carry_out(e: Emitter) -> None:
    """add.cc / sub.cc: the carry (or borrow) goes to the warp's condition-code row."""
    view = "u" + e.view[1:]
    d, a, b = e.operands
    e.call(
        add_carry,
        e.destination(d, view),
        e.source(a, view),
        e.source(b, view),
        "None",
        "True",
        str(e.opcode == "sub"),
    )


@instruction("addc", "subc")
def add_with_carry(e: Emitter) -> None:
    view = "u" + e.view[1:]
    d, a, b = e.operands
    e.call(
        add_carry, e.destination(d, view), e.source(a, view), e.source(b, view), "w.carry", str(e.has("cc")),
        str(e.opcode == "subc"),
    )  # fmt: skip


def add_carry(
    w: Any, v: Any, m: Any, d: Array, a: Array, b: Array, carry: Any, keep: bool, subtract: bool
) -> None:
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
    from . import floating

    if is_float(e):
        floating.arithmetic(e)
        return
    e.only("lo", "hi", "wide")
    d, a, b = e.operands
    view = e.view
    size = int(view[1:])
    if e.has("wide"):
        wide = f"{view[0]}{2 * size}"
        e.ufunc(
            "np.multiply",
            e.destination(d, wide),
            e.source(a, view),
            e.source(b, view),
            dtype=f"np.{NAMES[wide]}",
        )
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
    return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)], dtype=object).astype(
        a.dtype
    )


@instruction("mad")
def mad(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.fused(e)
        return
    e.only("lo", "hi", "wide")
    d, a, b, c = e.operands
    view = e.view
    if e.has("wide"):
        wide = f"{view[0]}{2 * int(view[1:])}"
        kind = f"np.{NAMES[wide]}"
        e.assign(
            e.destination(d, wide),
            f"np.multiply({e.source(a, view)}, {e.source(b, view)}, dtype={kind}) + {e.source(c, wide)}",
        )
    elif e.has("hi"):
        e.assign(
            e.destination(d, view),
            f"multiply_high({e.source(a, view)}, {e.source(b, view)}) + {e.source(c, view)}",
        )
    else:
        e.assign(e.destination(d, view), f"{e.source(a, view)} * {e.source(b, view)} + {e.source(c, view)}")


@instruction("mul24", "mad24")
def mul24(e: Emitter) -> None:
    e.only("lo")
    view = e.view
    d, a, b, *c = e.operands
    shift = "<< 8 >> 8"
    product = f"({e.source(a, view)} {shift}) * ({e.source(b, view)} {shift})"
    e.assign(e.destination(d, view), product + (f" + {e.source(c[0], view)}" if c else ""))


@instruction("sad")
def sad(e: Emitter) -> None:
    view = e.view
    d, a, b, c = e.operands
    x, y = e.source(a, view), e.source(b, view)
    e.assign(e.destination(d, view), f"np.where({x} < {y}, {y} - {x}, {x} - {y}) + {e.source(c, view)}")


@instruction("div", "rem")
def div_rem(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.division(e)
        return
    view = e.view
    d, a, b = e.operands
    name = "divide_integers" if e.opcode == "div" else "remainder_integers"
    e.assign(e.destination(d, view), f"{name}({e.source(a, view)}, {e.source(b, view)})")


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


@instruction("abs")
def absolute(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.sign_operation(e)
        return
    view = e.view
    e.ufunc("np.abs", e.destination(e.operands[0], view), e.source(e.operands[1], view))


@instruction("neg")
def negate(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.sign_operation(e)
        return
    view = e.view
    e.ufunc("np.negative", e.destination(e.operands[0], view), e.source(e.operands[1], view))


@instruction("min", "max")
def min_max(e: Emitter) -> None:
    from . import floating

    if is_float(e):
        floating.minimum_maximum(e)
        return
    e.only("relu")
    view = e.view
    if e.type in ("u16x2", "s16x2"):
        e.unsupported("packed")
    d, *sources = e.operands
    name = "np.minimum" if e.opcode == "min" else "np.maximum"
    value = e.source(sources[0], view)
    for source in sources[1:]:
        value = f"{name}({value}, {e.source(source, view)})"
    if e.has("relu"):
        value = f"np.maximum({value}, 0)"
    e.assign(e.destination(d, view), value)


@instruction("and", "or", "xor")
def bitwise(e: Emitter) -> None:
    view = e.view
    d, a, b = e.operands
    name = f"np.bitwise_{e.opcode}"
    e.ufunc(name, e.destination(d, view), e.source(a, view), e.source(b, view))


@instruction("not")
def bitwise_not(e: Emitter) -> None:
    view = e.view
    e.ufunc("np.invert", e.destination(e.operands[0], view), e.source(e.operands[1], view))


@instruction("cnot")
def logical_not(e: Emitter) -> None:
    view = e.view
    e.assign(e.destination(e.operands[0], view), f"({e.source(e.operands[1], view)} == 0)")


@instruction("shl", "shr")
def shift(e: Emitter) -> None:
    """Amounts are unsigned 32-bit and clamp at the width."""
    view = e.view
    d, a, b = e.operands
    name = "shift_left" if e.opcode == "shl" else "shift_right"
    if isinstance(b, Immediate) and 0 <= b.value < 8 * int(view[1:]) // 8:
        name = "np.left_shift" if e.opcode == "shl" else "np.right_shift"
        e.ufunc(name, e.destination(d, view), e.source(a, view), e.source(b, view))
        return
    amount = e.source(b, "u32")
    e.assign(e.destination(d, view), f"{name}({e.source(a, view)}, {amount})")


@helper
def shift_left(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(amount < bits, a << np.minimum(amount, bits - 1).astype(a.dtype), 0)


@helper
def shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if a.dtype.kind == "i":
        return a >> np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount < bits, a >> np.minimum(amount, bits - 1).astype(a.dtype), 0)


@instruction("shf")
def funnel_shift(e: Emitter) -> None:
    d, a, b, c = e.operands
    left, clamp = e.has("l"), e.has("clamp")
    e.assign(
        e.destination(d, "u32"),
        f"funnel({e.source(a, 'u32')}, {e.source(b, 'u32')}, {e.source(c, 'u32')}, {left}, {clamp})",
    )


@helper
def funnel(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    n = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (((both << n) >> np.uint64(32)) if left else (both >> n)) & np.uint64(0xFFFFFFFF)


@instruction("prmt")
def permute(e: Emitter) -> None:
    e.only("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
    mode = next((m for m in e.instruction.modifiers if m != "b32"), "")
    if mode:
        e.unsupported(f"prmt mode .{mode}")
    d, a, b, c = e.operands
    e.assign(
        e.destination(d, "u32"),
        f"permute_bytes({e.source(a, 'u32')}, {e.source(b, 'u32')}, {e.source(c, 'u32')})",
    )


@helper
def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    source = np.stack([a, b], axis=1).view(np.uint8).reshape(-1, 8)
    nibbles = (selector[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & 15
    picked = np.take_along_axis(source, (nibbles & 7).astype(np.int64), axis=1)
    signs = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
    return np.ascontiguousarray(np.where(nibbles & 8, signs, picked).astype(np.uint8)).view(np.uint32)[:, 0]


@instruction("lop3")
def three_input_logic(e: Emitter) -> None:
    d, a, b, c, table = e.operands[:5]
    if not isinstance(table, Immediate) or isinstance(d, Pair):
        e.unsupported()
        return
    x, y, z = (e.source(o, "u32") for o in (a, b, c))
    e.assign(e.destination(d, "u32"), logic_expression(table.value, x, y, z))


def logic_expression(table: int, x: str, y: str, z: str) -> str:
    terms = []
    for i in range(8):
        if table >> i & 1:
            factors = [name if i >> bit & 1 else f"~{name}" for name, bit in ((x, 2), (y, 1), (z, 0))]
            terms.append("(" + " & ".join(factors) + ")")
    return " | ".join(terms) if terms else f"({x} & 0)"


@instruction("bfe")
def extract_field(e: Emitter) -> None:
    view = e.view
    d, a, b, c = e.operands
    e.assign(
        e.destination(d, view),
        f"bit_field_extract({e.source(a, view)}, {e.source(b, 'u32')}, {e.source(c, 'u32')})",
    )


@helper
def bit_field_extract(a: Array, start: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    pos, n = start & 0xFF, length & 0xFF
    out = []
    signed = a.dtype.kind == "i"
    for x, p, k in zip(a.tolist(), pos.tolist(), n.tolist(), strict=True):
        u = x & ((1 << bits) - 1)
        field = (u >> p) & ((1 << k) - 1)
        if signed and k:
            sign = (u >> min(p + k - 1, bits - 1)) & 1
            if sign:
                valid = max(min(k, bits - p), 0)
                field |= -1 << valid
        out.append(field & ((1 << bits) - 1))
    return np.array(out, dtype=f"u{bits // 8}").view(a.dtype)


@instruction("bfi")
def insert_field(e: Emitter) -> None:
    view = e.view
    f, a, b, c, d = e.operands
    e.assign(
        e.destination(f, view),
        f"bit_field_insert({e.source(a, view)}, {e.source(b, view)}, {e.source(c, 'u32')}, {e.source(d, 'u32')})",
    )


@helper
def bit_field_insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    whole = (1 << bits) - 1
    out = []
    for x, y, p, n in zip(
        a.tolist(), b.tolist(), (start & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True
    ):
        mask = (((1 << n) - 1) << p) & whole
        out.append((y & ~mask) | ((x << p) & mask))
    return np.array(out, dtype=a.dtype)


@instruction("bmsk")
def bit_mask(e: Emitter) -> None:
    d, a, b = e.operands
    e.assign(
        e.destination(d, "u32"),
        f"bit_field_insert(v[{e.preparation.constant(0xFFFFFFFF, 'u32')}], v[{e.preparation.constant(0, 'u32')}], "
        f"{e.source(a, 'u32')}, {e.source(b, 'u32')})",
    )


@instruction("brev")
def bit_reverse(e: Emitter) -> None:
    view = e.view
    e.assign(e.destination(e.operands[0], view), f"reverse_bits({e.source(e.operands[1], view)})")


@helper
def reverse_bits(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.array([int(f"{x:0{bits}b}"[::-1], 2) for x in a.tolist()], dtype=a.dtype)


@instruction("popc", "clz", "bfind", "fns")
def bit_count(e: Emitter) -> None:
    if e.opcode == "fns":
        e.unsupported()
    view = e.view
    e.assign(
        e.destination(e.operands[0], "u32"),
        f"count_bits({e.source(e.operands[1], view)}, {e.opcode!r}, {e.has('shiftamt')})",
    )


@helper
def count_bits(a: Array, what: str, shift_amount: bool) -> Array:
    bits = 8 * a.dtype.itemsize
    mask = (1 << bits) - 1
    out = []
    for x in a.tolist():
        u = x & mask
        if what == "popc":
            out.append(u.bit_count())
        elif what == "clz":
            out.append(bits - u.bit_length())
        else:
            if a.dtype.kind == "i" and x < 0:
                u = ~x & mask
            found = u.bit_length() - 1
            out.append(0xFFFFFFFF if found < 0 else (bits - 1 - found if shift_amount else found))
    return np.array(out, dtype=np.uint32)


COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}


def comparison(e: Emitter, a: Any, b: Any, kind: str) -> str:
    """A boolean expression of one comparison modifier."""
    from . import floating

    relation = next(
        (m for m in e.instruction.modifiers if m in COMPARE or m in UNORDERED or m in ("num", "nan")), ""
    )
    if kind in ("f16", "bf16"):
        x, y = (floating.widen(e, o, kind) for o in (a, b))
    elif kind.endswith("x2"):
        e.unsupported("packed comparison")
        raise AssertionError
    else:
        from ..program import view_of

        view = view_of(kind)
        x, y = e.source(a, view), e.source(b, view)
    if relation in ("num", "nan"):
        value = f"(np.isnan({x}) | np.isnan({y}))"
        return value if relation == "nan" else f"~{value}"
    if relation in UNORDERED:
        return f"(({x} {UNORDERED[relation]} {y}) | np.isnan({x}) | np.isnan({y}))"
    if relation == "ne" and (kind[0] == "f" or kind.startswith("bf")):
        return f"(({x} != {y}) & ~np.isnan({x}) & ~np.isnan({y}))"
    if relation not in COMPARE:
        e.unsupported("comparison")
    return f"({x} {COMPARE[relation]} {y})"


@instruction("setp")
def set_predicate(e: Emitter) -> None:
    d, a, b, *c = e.operands
    value = comparison(e, a, b, e.type)
    inverse = f"~{value}"
    combine = next((m for m in e.instruction.modifiers if m in ("and", "or", "xor")), "")
    if combine:
        sign = {"and": "&", "or": "|", "xor": "^"}[combine]
        third = e.source(c[0], "pred")
        value, inverse = f"{value} {sign} {third}", f"{inverse} {sign} {third}"
    if isinstance(d, Pair):
        temporary = f"t{e.instruction.index}"
        e.emit(f"{temporary} = {inverse}")
        if not isinstance(d.first, Sink):
            e.assign(e.destination(d.first, "pred"), value)
        if not isinstance(d.second, Sink):
            e.assign(e.destination(d.second, "pred"), temporary)
    else:
        e.assign(e.destination(d, "pred"), value)


@instruction("set")
def set_value(e: Emitter) -> None:
    d, a, b, *c = e.operands
    kinds = e.types
    value = comparison(e, a, b, kinds[-1])
    combine = next((m for m in e.instruction.modifiers if m in ("and", "or", "xor")), "")
    if combine:
        value = f"({value} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[combine]} {e.source(c[0], 'pred')})"
    if kinds[0] == "f32":
        e.assign(e.destination(d, "f32"), value)
    else:
        e.assign(e.destination(d, "u32"), f"np.where({value}, 0xFFFFFFFF, 0)")


@instruction("selp")
def select(e: Emitter) -> None:
    view = e.view
    d, a, b, c = e.operands
    e.assign(
        e.destination(d, view), f"np.where({e.source(c, 'pred')}, {e.source(a, view)}, {e.source(b, view)})"
    )


@instruction("slct")
def select_sign(e: Emitter) -> None:
    from ..program import view_of

    view, by = view_of(e.types[0]), view_of(e.types[1])
    d, a, b, c = e.operands
    e.assign(
        e.destination(d, view), f"np.where({e.source(c, by)} >= 0, {e.source(a, view)}, {e.source(b, view)})"
    )


@instruction("dp4a", "dp2a")
def dot_bytes(e: Emitter) -> None:
    if e.opcode == "dp2a":
        e.unsupported()
    d, a, b, c = e.operands
    kinds = e.types
    views = ["np.int8" if k[0] == "s" else "np.uint8" for k in kinds[:2]]
    parts = [
        f"{e.source(o, 'u32')}.view({t}).reshape(32, 4).astype(np.int64)"
        for o, t in zip((a, b), views, strict=True)
    ]
    e.assign(e.destination(d, "s32"), f"({parts[0]} * {parts[1]}).sum(1) + {e.source(c, 's32')}")
