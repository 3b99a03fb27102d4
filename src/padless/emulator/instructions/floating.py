"""Floating-point instructions: f32, f64, f16, bf16 and their packed forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..ast import Immediate
from .registry import helper, instruction

if TYPE_CHECKING:
    from ..ast import Operand
    from ..emitter import Emitter

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
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


@helper
def canonical(value: Array) -> Array:
    """float32 results: every NaN is 0x7FFFFFFF, whatever the operands' payloads (PTX ISA, floating point)."""
    wrong = value != value
    return np.where(wrong, NAN, value) if wrong.any() else value


@helper
def canonicalise(row: Array, m: Any) -> None:
    """The same for a register that has just been written in the lanes `m`."""
    wrong = row != row
    if wrong.any():
        row[wrong & m] = NAN


@helper
def add_f32(a: Array, b: Array) -> Array:
    return canonical(a + b)


@helper
def sub_f32(a: Array, b: Array) -> Array:
    return canonical(a - b)


@helper
def mul_f32(a: Array, b: Array) -> Array:
    return canonical(a * b)


def arithmetic(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat")
    kind, mode = e.types[0], rounding(e)
    d, a, b = e.operands
    if len(e.types) == 2:  # f32 = f16 or bf16 (op) f32
        x = f"{widen(e, a, e.type)}.astype(np.float32)"
        finish(
            e, d, f"fused_multiply_add({x}, np.float32(1), {negated(e)}{e.source(b, 'f32')}, {mode!r})", kind
        )
    elif kind in ("f32", "f64"):
        x, y = e.source(a, kind), e.source(b, kind)
        if mode == "rn" and not e.has("ftz") and not e.has("sat"):
            name = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}[e.opcode]
            row = e.destination(d, kind)
            e.ufunc(name, row, x, y)
            if kind == "f32":
                e.emit(f"canonicalise({row}, {e.mask})")
                e.batched(f"{e.opcode}_f32", d, a, b)
            return
        if e.has("ftz"):
            x, y = f"flush({x})", f"flush({y})"
        fused = "fused_multiply_add" if kind == "f32" else "fused_multiply_add_f64"
        one = "np.float32(1)" if kind == "f32" else "np.ones(32)"
        if mode == "rn":
            value = f"({x} {SIMPLE[e.opcode]} {y})"
        elif e.opcode == "mul":
            value = f"{fused}({x}, {y}, {one} * -0.0, {mode!r})"
        else:
            value = f"{fused}({x}, {one}, {negated(e)}{y}, {mode!r})"
        finish(e, d, value, kind)
    elif kind == "f32x2":
        x, y = (f"{e.source(o, 'u64')}.view(np.float32)" for o in (a, b))
        if e.has("ftz"):
            x, y = f"flush({x})", f"flush({y})"
        if e.opcode == "mul":
            value = f"fused_multiply_add({x}, {y}, np.float32(-0.0), {mode!r})"
        else:
            value = f"fused_multiply_add({x}, np.float32(1), {negated(e)}{y}, {mode!r})"
        value = f"flush({value})" if e.has("ftz") else value
        e.assign(e.destination(d, "u64"), f"{value}.view(np.uint64)")
    else:
        x, y = sixteen_sources(e, (a, b), kind)
        finish_sixteen(e, d, f"({x} {SIMPLE[e.opcode]} {y})", kind)


def negated(e: Emitter) -> str:
    return "-" if e.opcode == "sub" else ""


def sixteen_sources(e: Emitter, operands: tuple[Operand, ...], kind: str) -> list[str]:
    """Wide values of 16-bit operands, subnormals flushed where the instruction says so."""
    texts = [widen(e, o, kind) for o in operands]
    return [f"flush_sixteen({t})" for t in texts] if e.has("ftz") else texts


def finish_sixteen(e: Emitter, d: Operand, value: str, kind: str) -> None:
    if e.has("sat"):
        value = f"saturate({value})"
    if e.has("relu"):
        value = f"rectify({value})"
    if e.has("ftz"):
        value = f"flush_sixteen(widen_f16(narrow_f16({value})))"
    narrow(e, d, value, kind)


@helper
def flush_sixteen(value: Array) -> Array:
    """Subnormal f16 numbers, held as float64, to zero of the same sign."""
    return np.where(np.abs(value) < 2.0**-14, np.copysign(0.0, value), value)


@helper
def rectify(value: Array) -> Array:
    """Negative values to +0; NaN stays."""
    return np.where((value < 0) | (value == 0), np.zeros_like(value), value)


def finish(e: Emitter, d: Operand, value: str, kind: str) -> None:
    if kind == "f32":
        value = f"canonical({value})"
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
    e.only(*ROUNDINGS, "ftz", "sat", "relu", "oob")
    kind, mode = e.types[0], rounding(e)
    d, a, b, c = e.operands
    if len(e.types) == 2:  # f32 = f16 or bf16 products + f32
        x, y = (f"{widen(e, o, e.type)}.astype(np.float32)" for o in (a, b))
        finish(e, d, f"fused_multiply_add({x}, {y}, {e.source(c, 'f32')}, {mode!r})", kind)
    elif kind in ("f32", "f64"):
        x, y, z = (e.source(o, kind) for o in (a, b, c))
        if e.has("ftz"):
            x, y, z = f"flush({x})", f"flush({y})", f"flush({z})"
        finish(e, d, f"fused_multiply_add{'' if kind == 'f32' else '_f64'}({x}, {y}, {z}, {mode!r})", kind)
        if kind == "f32" and mode == "rn" and not e.has("ftz") and not e.has("sat"):
            e.batched("fused_multiply_add", d, a, b, c)
    elif kind == "f32x2":
        x, y, z = (f"{e.source(o, 'u64')}.view(np.float32)" for o in (a, b, c))
        if e.has("ftz"):
            x, y, z = f"flush({x})", f"flush({y})", f"flush({z})"
        value = f"fused_multiply_add({x}, {y}, {z}, {mode!r})"
        value = f"flush({value})" if e.has("ftz") else value
        e.assign(e.destination(d, "u64"), f"{value}.view(np.uint64)")
    else:
        x, y, z = sixteen_sources(e, (a, b, c), kind)
        value = f"fused_sixteen({x}, {y}, {z})"
        if e.has("oob"):  # an operand that stands for "out of bounds" makes the result 0
            marks = [f"out_of_bounds({e.source(o, view16(kind))})" for o in (a, b)]
            value = f"np.where({marks[0]} | {marks[1]}, 0.0, {value})"
        finish_sixteen(e, d, value, kind)


def view16(kind: str) -> str:
    return "u32" if kind.endswith("x2") else "u16"


@helper
def out_of_bounds(bits: Array) -> Array:
    """The NaN that copies fill with (PTX ISA, "fma": OOB-NaN is 0xFFFF)."""
    return np.asarray(bits.view(np.uint16) == 0xFFFF)


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
            return canonical(total.astype(np.float32))
        return canonical(sum_to_odd(product, np.broadcast_to(wide_c, product.shape)).astype(np.float32))
    return canonical(round_directed(sum_to_odd(product, np.broadcast_to(wide_c, product.shape)), mode))


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
def fused_multiply_add_f64(a: Array, b: Array, c: Array, mode: str = "rn") -> Array:
    from fractions import Fraction

    out = np.empty(a.shape, np.float64)
    for i, (x, y, z) in enumerate(zip(a.tolist(), b.tolist(), c.tolist(), strict=True)):
        if np.isfinite(x) and np.isfinite(y) and np.isfinite(z):
            exact = Fraction(x) * Fraction(y) + Fraction(z)
            out[i] = round_fraction(exact, mode) if exact else exact_zero(x * y, z, mode)
        else:
            out[i] = x * y + z
    return out


def round_fraction(exact: Any, mode: str) -> float:
    """A rational number to float64."""
    try:
        near = float(exact)
    except OverflowError:
        near = float("inf") if exact > 0 else float("-inf")
    if mode == "rn":
        return near
    infinite = np.isinf(near)
    above = near > 0 if infinite else near > exact
    below = near < 0 if infinite else near < exact
    if (above and (mode == "rm" or (mode == "rz" and near > 0))) or (
        below and (mode == "rp" or (mode == "rz" and near < 0))
    ):
        return float(np.nextafter(near, -np.inf if above else np.inf))
    return near


def exact_zero(x: float, z: float, mode: str) -> float:
    """The sign of a sum that is exactly zero: that of both terms, else minus only when rounding down."""
    if np.signbit(x) == np.signbit(z) and x == 0 and z == 0:
        return x
    return -0.0 if mode == "rm" else 0.0


def division(e: Emitter) -> None:
    e.only(*ROUNDINGS, "approx", "full", "ftz")
    kind, mode = e.type, rounding(e)
    if kind not in ("f32", "f64"):
        e.unsupported()
    d, a, b = e.operands
    x, y = e.source(a, kind), e.source(b, kind)
    if e.has("ftz"):
        x, y = f"flush({x})", f"flush({y})"
    finish(e, d, f"({x} / {y})" if mode == "rn" else f"directed_quotient({x}, {y}, {mode!r})", kind)


@helper
def directed_quotient(a: Array, b: Array, mode: str) -> Array:
    return directed_by_fractions(a / b, mode, lambda i: (a[i], b[i]), lambda x, y: x / y)


@helper
def directed_root(a: Array, mode: str) -> Array:
    """The neighbours of the rounded root are judged by their exact squares."""
    near = np.sqrt(a)
    out = near.copy()
    from fractions import Fraction

    for i in np.flatnonzero(np.isfinite(near) & (near > 0)).tolist():
        exact, square = Fraction(float(a[i])), Fraction(float(near[i])) ** 2
        if square > exact and mode in ("rz", "rm"):
            out[i] = np.nextafter(near[i], near.dtype.type(0))
        elif square < exact and mode == "rp":
            out[i] = np.nextafter(near[i], near.dtype.type(np.inf))
    return out


def directed_by_fractions(near: Array, mode: str, operands: Any, function: Any) -> Array:
    """Move a correctly rounded result to its neighbour where the exact value lies on the other side."""
    from fractions import Fraction

    out = near.copy()
    for i in range(len(near)):
        values = operands(i)
        if not all(np.isfinite(x) for x in values) or values[-1] == 0 or np.isnan(near[i]):
            continue
        exact = function(*(Fraction(float(x)) for x in values))
        infinite = np.isinf(near[i])
        above = near[i] > 0 if infinite else Fraction(float(near[i])) > exact
        below = near[i] < 0 if infinite else Fraction(float(near[i])) < exact
        if above and (mode == "rm" or (mode == "rz" and exact > 0)):
            out[i] = np.nextafter(near[i], near.dtype.type(-np.inf))
        elif below and (mode == "rp" or (mode == "rz" and exact < 0)):
            out[i] = np.nextafter(near[i], near.dtype.type(np.inf))
    return out


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
        mode = rounding(e)
        if mode != "rn" and e.opcode in ("rcp", "sqrt"):
            name = f"directed_quotient(np.ones(32, {x}.dtype), " if e.opcode == "rcp" else "directed_root("
            finish(e, d, f"{name}{x}, {mode!r})", kind)
            return
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
    if e.has("ftz"):
        narrow(e, d, f"{'np.abs' if e.opcode == 'abs' else '-'}(flush_sixteen({widen(e, a, kind)}))", kind)
        return
    view, bits = ("u32", 0x80008000) if kind.endswith("x2") else ("u16", 0x8000)
    x = e.source(a, view)
    expression = (
        f"{x} & {bits ^ (0xFFFFFFFF if view == 'u32' else 0xFFFF)}" if e.opcode == "abs" else f"{x} ^ {bits}"
    )
    e.assign(e.destination(d, view), expression)


def minimum_maximum(e: Emitter) -> None:
    """NaN loses against a number unless .NaN; -0 is below +0; .xorsign.abs compares magnitudes and multiplies signs."""
    e.only("ftz", "NaN", "xorsign", "abs", "relu")
    kind = e.type
    d, *sources = e.operands
    if kind in ("f32", "f64"):
        texts = [e.source(o, kind) for o in sources]
        if e.has("ftz"):
            texts = [f"flush({t})" for t in texts]
    else:
        texts = sixteen_sources(e, tuple(sources), kind)
    signs = texts
    if e.has("abs"):
        texts = [f"np.abs({t})" for t in texts]
    value = texts[0]
    for text in texts[1:]:
        value = f"extreme({value}, {text}, {e.opcode == 'max'}, {e.has('NaN')})"
    if e.has("xorsign"):
        value = f"multiply_signs({value}, {signs[0]}, {signs[1]})"
    if kind in ("f32", "f64"):
        finish(e, d, value, kind)
    else:
        finish_sixteen(e, d, value, kind)


@helper
def extreme(a: Array, b: Array, largest: bool, keep_nan: bool) -> Array:
    if keep_nan:
        value = np.maximum(a, b) if largest else np.minimum(a, b)
    else:
        value = np.fmax(a, b) if largest else np.fmin(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = np.signbit(a) & np.signbit(b) if largest else np.signbit(a) | np.signbit(b)
        zero = np.zeros_like(value)
        value = np.where(zeros, np.where(negative, -zero, zero), value)
    return np.asarray(value)


@helper
def multiply_signs(value: Array, a: Array, b: Array) -> Array:
    one = np.ones_like(value)
    return np.copysign(value, np.where(np.signbit(a) != np.signbit(b), -one, one))


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
        "subnormal": f"(({x} != 0) & (np.abs({x}) < np.finfo({x}.dtype).tiny))",
        "normal": f"(np.isfinite({x}) & (np.abs({x}) >= np.finfo({x}.dtype).tiny))",
    }
    name = next((m for m in e.instruction.modifiers if m in tests), "")
    if not name:
        e.unsupported()
    e.assign(e.destination(d, "pred"), tests[name])
