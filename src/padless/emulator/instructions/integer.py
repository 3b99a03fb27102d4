"""Integer arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import expressions, helper, instruction
from padless.emulator.units.number_formats import Array

PACKED = {"u16x2": "uint16", "s16x2": "int16"}
LOW, HIGH = "np.minimum({0}, {1})", "np.maximum({0}, {1})"


def halves(value: str, kind: str) -> tuple[str, str]:
    """A row on the two 16-bit numbers of every lane."""
    return "u32 u32 u32", f"({value.replace('}', f'}}.view(np.{kind})')}).view(np.uint32)"


PACKED_VALUES = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "min.relu": f"np.maximum({LOW}, 0)", "max.relu": f"np.maximum({HIGH}, 0)",
    "min": LOW, "max": HIGH,
}  # fmt: skip
expressions(
    {
        **{f"{key}.{k}": halves(value, kind) for key, value in PACKED_VALUES.items() for k, kind in PACKED.items()},
        "abs": ("* *", "np.abs"),
        "neg": ("* *", "np.negative"),
        "sad": ("* * * *", "np.where({0} < {1}, {1} - {0}, {0} - {1}) + {2}"),
        "div": ("* * *", "divide_integers({0}, {1})"),
        "rem": ("* * *", "remainder_integers({0}, {1})"),
        "add.cc": ("u* u* u*", "add_carry(w, {m}, {0}, {1}, None, True, False)"),
        "add.sat.s32": ("s32 s32 s32", "clamp_s32({0}.astype(np.int64) + {1})"),
        "add": ("* * *", "np.add"),
        "sub.cc": ("u* u* u*", "add_carry(w, {m}, {0}, {1}, None, True, True)"),
        "sub.sat.s32": ("s32 s32 s32", "clamp_s32({0}.astype(np.int64) - {1})"),
        "sub": ("* * *", "np.subtract"),
        "addc": ("u* u* u*", "add_carry(w, {m}, {0}, {1}, w.carry, {cc}, False)", "cc"),
        "subc": ("u* u* u*", "add_carry(w, {m}, {0}, {1}, w.carry, {cc}, True)", "cc"),
        "mul.wide": ("2* * *", "np.multiply"),
        "mul.hi": ("* * *", "multiply_high({0}, {1})"),
        "mul": ("* * *", "np.multiply", "lo"),
        "mad.hi.cc": ("u* * * u*", "add_carry(w, {m}, multiply_high({0}, {1}).view({2}.dtype), {2}, None, True, False)"),
        "mad.cc": ("u* * * u*", "add_carry(w, {m}, ({0} * {1}).view({2}.dtype), {2}, None, True, False)", "lo"),
        "madc.hi": (
            "u* * * u*", "add_carry(w, {m}, multiply_high({0}, {1}).view({2}.dtype), {2}, w.carry, {cc}, False)", "cc",
        ),
        "madc": ("u* * * u*", "add_carry(w, {m}, ({0} * {1}).view({2}.dtype), {2}, w.carry, {cc}, False)", "lo cc"),
        "mad.wide": ("2* * * 2*", "np.multiply({0}, {1}, dtype={2}.dtype) + {2}"),
        "mad.hi.sat.s32": ("s32 s32 s32 s32", "clamp_s32(multiply_high({0}, {1}).astype(np.int64) + {2})"),
        "mad.hi": ("* * * *", "multiply_high({0}, {1}) + {2}"),
        "mad": ("* * * *", "{0} * {1} + {2}", "lo"),
        "mul24": ("* * *", "multiply_24({0}, {1}, {hi})", "lo hi"),
        "mad24.sat": ("* * * *", "clamp_s32(multiply_24({0}, {1}, {hi}).astype(np.int64) + {2})", "lo hi"),
        "mad24": ("* * * *", "multiply_24({0}, {1}, {hi}) + {2}", "lo hi"),
        "min.relu": ("* * *", f"np.maximum({LOW}, 0)"),
        "min": ("* * *", "np.minimum"),
        "max.relu": ("* * *", f"np.maximum({HIGH}, 0)"),
        "max": ("* * *", "np.maximum"),
    }
)  # fmt: skip


@helper
def clamp_s32(value: Array) -> Array:
    return np.clip(value, -(1 << 31), (1 << 31) - 1).astype(np.int32)


@helper
def add_carry(w: Any, m: Any, a: Array, b: Array, carry: Any, keep: bool, subtract: bool) -> Array:
    """a + b + carry, or a - b - carry; with `keep` the carry (or borrow) out goes to the warp's condition-code row."""
    one = np.zeros(32, a.dtype) if carry is None else carry.astype(a.dtype)
    if subtract:
        total = a - b - one
        out = (a < b) | ((a == b) & (one != 0))
    else:
        total = a + b + one
        out = (total < a) | ((total == a) & (one != 0))
    if keep:
        np.copyto(w.carry, out, where=m)
    return total


@helper
def multiply_high(a: Array, b: Array) -> Array:
    """The upper half of the double-width product, signed or unsigned by the arrays' type."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        high: Array = (a.astype(wide) * b.astype(wide)) >> wide(bits)
        return high.astype(a.dtype)
    return np.array([(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)], dtype=object).astype(a.dtype)


@helper
def multiply_24(a: Array, b: Array, high: bool) -> Array:
    """Products of the low 24 bits; `high`: bits 16 to 47 of the 48."""
    x, y = ((v << 8 >> 8).astype(np.int64) for v in (a, b))
    return ((x * y) >> (16 if high else 0)).astype(a.dtype)


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
