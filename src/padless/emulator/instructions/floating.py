"""Floating-point instructions: f32, f64, f16, bf16 and their packed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ast import Immediate
from .registry import helper, instruction

if TYPE_CHECKING:
    from ..ast import Operand
    from ..program import Emitter

Array = np.ndarray[Any, Any]
ROUNDINGS = ("rn", "rz", "rm", "rp")


def rounding(e: Emitter) -> str:
    return next((m for m in e.instruction.modifiers if m in ROUNDINGS), "rn")


# ---- 16-bit types: computed in float64 and rounded once on the way back
def widen(e: Emitter, operand: Operand, kind: str) -> str:
    """A float64 expression for an f16 / bf16 operand (32 lanes), or for a packed one (64 values, low half first)."""
    packed = kind.endswith("x2")
    base = kind.removesuffix("x2")
    if isinstance(operand, Immediate):
        bits = operand.value & (0xFFFFFFFF if packed else 0xFFFF)
        text = f"v[{e.preparation.constant(bits, 'u32' if packed else 'u16')}]"
    else:
        text = e.source(operand, "u32" if packed else "u16")
    return f"widen_{base}({text}.view(np.uint16))"


def narrow(e: Emitter, destination: Operand, value: str, kind: str) -> None:
    packed = kind.endswith("x2")
    base = kind.removesuffix("x2")
    view = "u32" if packed else "u16"
    e.assign(
        e.destination(destination, view),
        f"narrow_{base}({value}).view(np.{'uint32' if packed else 'uint16'})",
    )


@helper
def widen_f16(bits: Array) -> Array:
    return bits.view(np.float16).astype(np.float64)


@helper
def widen_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


@helper
def narrow_f16(value: Array) -> Array:
    return np.where(np.isnan(value), np.uint16(0x7FFF), value.astype(np.float16).view(np.uint16)).astype(
        np.uint16
    )


@helper
def narrow_bf16(value: Array) -> Array:
    """Nearest even from float64 in one rounding: to odd into float32 first, then to bf16."""
    single = round_to_odd(np.asarray(value, np.float64))
    bits = single.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint16)


def round_to_odd(value: Array) -> Array:
    """float64 to float32, inexact results forced to an odd last bit, so that a second rounding is still correct."""
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    # `toward` is the neighbour on the other side of `value`; of the two, one is odd.
    inexact = (back != value) & np.isfinite(value) & (bits & 1 == 0)
    away = (np.abs(back) < np.abs(value)).astype(np.int32) * 2 - 1
    return np.where(inexact, bits + away, bits).view(np.float32)


SIMPLE = {"add": "+", "sub": "-", "mul": "*"}


def arithmetic(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat")
    kind = e.type
    d, a, b = e.operands
    if kind in ("f32", "f64"):
        mode = rounding(e)
        x, y = e.source(a, kind), e.source(b, kind)
        if mode == "rn" and not e.has("ftz") and not e.has("sat"):
            name = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}[e.opcode]
            e.ufunc(name, e.destination(d, kind), x, y)
            if kind == "f32":
                e.batched(name, d, a, b)
            return
        if kind == "f64" and mode != "rn":
            e.unsupported("f64 with a rounding mode")
        if e.has("ftz"):
            x, y = f"flush({x})", f"flush({y})"
        if mode == "rn":
            value = f"({x} {SIMPLE[e.opcode]} {y})"
        elif e.opcode == "mul":
            value = f"fused_multiply_add({x}, {y}, np.float32(-0.0), {mode!r})"
        else:
            sign = "" if e.opcode == "add" else "-"
            value = f"fused_multiply_add({x}, np.float32(1), {sign}{y}, {mode!r})"
        finish(e, d, value, kind)
    elif kind == "f32x2":
        d_, x, y = e.destination(d, "u64"), e.source(a, "u64"), e.source(b, "u64")
        e.assign(d_, f"({x}.view(np.float32) {SIMPLE[e.opcode]} {y}.view(np.float32)).view(np.uint64)")
    else:
        narrow(e, d, f"({widen(e, a, kind)} {SIMPLE[e.opcode]} {widen(e, b, kind)})", kind)


def finish(e: Emitter, d: Operand, value: str, kind: str) -> None:
    if e.has("sat"):
        value = f"saturate({value})"
    if e.has("ftz"):
        value = f"flush({value})"
    e.assign(e.destination(d, kind), value)


@helper
def saturate(value: Array) -> Array:
    return np.where(np.isnan(value), 0, np.clip(value, 0, 1)).astype(value.dtype)


@helper
def flush(value: Array) -> Array:
    """Subnormal float32 to zero of the same sign."""
    tiny = np.abs(value) < np.float32(1.17549435e-38)
    return np.where(tiny, np.copysign(np.float32(0), value), value)


@instruction("fma")
def fused(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat", "relu")
    kind = e.type
    d, a, b, c = e.operands
    if kind == "f32":
        x, y, z = (e.source(o, "f32") for o in (a, b, c))
        if e.has("ftz"):
            x, y, z = f"flush({x})", f"flush({y})", f"flush({z})"
        finish(e, d, f"fused_multiply_add({x}, {y}, {z}, {rounding(e)!r})", "f32")
        if rounding(e) == "rn" and not e.has("ftz") and not e.has("sat"):
            e.batched("fused_multiply_add", d, a, b, c)
    elif kind == "f32x2":
        x, y, z = (f"{e.source(o, 'u64')}.view(np.float32)" for o in (a, b, c))
        e.assign(
            e.destination(d, "u64"), f"fused_multiply_add({x}, {y}, {z}, {rounding(e)!r}).view(np.uint64)"
        )
    elif kind == "f64":
        x, y, z = (e.source(o, "f64") for o in (a, b, c))
        e.assign(e.destination(d, "f64"), f"fused_multiply_add_f64({x}, {y}, {z})")
    else:
        if e.has("relu"):
            e.unsupported("relu")
        narrow(e, d, f"fused_sixteen({widen(e, a, kind)}, {widen(e, b, kind)}, {widen(e, c, kind)})", kind)


@helper
def fused_sixteen(a: Array, b: Array, c: Array) -> Array:
    """a*b + c of 16-bit values in float64, rounded to odd so that the final rounding is the only one."""
    return sum_to_odd(a * b, c)


def sum_to_odd(product: Array, c: Array) -> Array:
    """product + c in float64, an inexact sum forced to an odd last bit (Boldo and Melquiond)."""
    total = product + c
    virtual = total - product
    error = (product - (total - virtual)) + (c - virtual)
    bits = total.view(np.int64)
    fix = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    if not np.any(fix):
        return total
    direction = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(fix, bits + direction, bits).view(np.float64)


@helper
def fused_multiply_add(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    """float32 a*b + c with one rounding. The product is exact in float64; the sum is rounded twice only where that
    can matter, and there to odd first."""
    product = np.multiply(a, b, dtype=np.float64)
    wide_c = np.asarray(c, np.float64)
    total = product + wide_c
    if mode == "rn":
        low = total.view(np.int64) & 0x1FFFFFFF
        # A float64 sum on the midpoint of two float32, or in the subnormal range, may have been rounded onto it.
        doubtful = (low == 0x10000000) | (np.abs(total) < 1.2e-38)
        if not doubtful.any():
            return total.astype(np.float32)
        return sum_to_odd(product, np.broadcast_to(wide_c, product.shape)).astype(np.float32)
    return round_directed(sum_to_odd(product, np.broadcast_to(wide_c, product.shape)), mode)


def round_directed(value: Array, mode: str) -> Array:
    near = value.astype(np.float32)
    back = near.astype(np.float64)
    if mode == "rz":
        wrong, to = np.abs(back) > np.abs(value), np.float32(0)
    elif mode == "rm":
        wrong, to = back > value, np.float32(-np.inf)
    else:
        wrong, to = back < value, np.float32(np.inf)
    return np.where(wrong & ~np.isnan(value), np.nextafter(near, to), near)


@helper
def fused_multiply_add_f64(a: Array, b: Array, c: Array) -> Array:
    from fractions import Fraction

    out = np.empty(a.shape, np.float64)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        if np.isfinite(x) and np.isfinite(y) and np.isfinite(z):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            out[i] = float(exact) if exact else x * y + z
        else:
            out[i] = x * y + z
    return out


def division(e: Emitter) -> None:
    e.only(*ROUNDINGS, "approx", "full", "ftz")
    kind = e.type
    if kind not in ("f32", "f64") or rounding(e) != "rn":
        e.unsupported()
    d, a, b = e.operands
    finish(e, d, f"({e.source(a, kind)} / {e.source(b, kind)})", kind)


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def transcendental(e: Emitter) -> None:
    """Correctly rounded where PTX says .rn; where it says .approx the float64 result rounded to the type, which lies
    within every bound the ISA gives but is not bit-identical to any hardware."""
    e.only(*ROUNDINGS, "approx", "ftz")
    kind = e.type
    d, a = e.operands
    if kind in ("f32", "f64"):
        x = e.source(a, kind)
        if e.has("ftz"):
            x = f"flush({x})"
        finish(e, d, f"transcendental_{e.opcode}({x}.astype(np.float64)).astype(np.float{kind[1:]})", kind)
    else:
        narrow(e, d, f"transcendental_{e.opcode}({widen(e, a, kind)})", kind)


for _name, _function in {
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}.items():
    from .registry import HELPERS

    HELPERS[f"transcendental_{_name}"] = _function


def sign_operation(e: Emitter) -> None:
    e.only("ftz")
    kind = e.type
    d, a = e.operands
    if kind in ("f32", "f64"):
        x = e.source(a, kind)
        if e.has("ftz"):
            x = f"flush({x})"
        e.ufunc("np.abs" if e.opcode == "abs" else "np.negative", e.destination(d, kind), x)
        return
    view, bits = ("u32", 0x80008000) if kind.endswith("x2") else ("u16", 0x8000)
    x = e.source(a, view)
    expression = (
        f"{x} & {bits ^ (0xFFFFFFFF if view == 'u32' else 0xFFFF)}" if e.opcode == "abs" else f"{x} ^ {bits}"
    )
    e.assign(e.destination(d, view), expression)


def minimum_maximum(e: Emitter) -> None:
    e.only("ftz", "NaN", "xorsign", "abs", "relu")
    if e.has("xorsign"):
        e.unsupported()
    kind = e.type
    name = ("np.minimum" if e.opcode == "min" else "np.maximum") if e.has("NaN") else f"np.f{e.opcode}"
    d, *sources = e.operands
    if kind in ("f32", "f64"):
        texts = [e.source(o, kind) for o in sources]
    else:
        texts = [widen(e, o, kind) for o in sources]
    if e.has("ftz"):
        texts = [f"flush({t})" for t in texts]
    value = texts[0]
    for text in texts[1:]:
        value = f"{name}({value}, {text})"
    if kind in ("f32", "f64"):
        e.assign(e.destination(d, kind), value)
    else:
        narrow(e, d, value, kind)


@instruction("copysign")
def copy_sign(e: Emitter) -> None:
    kind = e.type
    d, a, b = e.operands
    e.ufunc("np.copysign", e.destination(d, kind), e.source(b, kind), e.source(a, kind))


@instruction("testp")
def test_property(e: Emitter) -> None:
    kind = e.type
    d, a = e.operands
    x = e.source(a, kind)
    tests = {
        "finite": f"np.isfinite({x})",
        "infinite": f"np.isinf({x})",
        "number": f"~np.isnan({x})",
        "notanumber": f"np.isnan({x})",
    }
    name = next((m for m in e.instruction.modifiers if m in tests), "")
    if not name:
        e.unsupported()
    e.assign(e.destination(d, "pred"), tests[name])
