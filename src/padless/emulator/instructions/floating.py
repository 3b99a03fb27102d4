"""Floating-point instructions: f32, f64, f16, bf16 and their packed forms. What they compute is in `floating_values`."""

from __future__ import annotations

from collections.abc import Iterable

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import FLOATING, expressions, instruction
from padless.emulator.ptx.ast import Immediate, Operand

ROUNDINGS = ("rn", "rz", "rm", "rp")


def rounding(e: Emitter) -> str:
    return e.either(*ROUNDINGS, default="rn")


# ---- values: f32 and f64 in their own type, 16-bit types in float64, which are rounded once on the way back
def widen(e: Emitter, operand: Operand, kind: str) -> str:
    """A float64 expression for an f16 / bf16 operand (32 lanes), or for a packed one (64 values, low half first)."""
    packed = kind.endswith("x2")
    if isinstance(operand, Immediate):
        bits = operand.value & (0xFFFFFFFF if packed else 0xFFFF)
        text = f"v[{e.preparation.constant(bits, 'u32' if packed else 'u16')}]"
    else:
        text = e.source(operand, "u32" if packed else "u16")
    return f"widen_{kind.removesuffix('x2')}({text}.view(np.uint16))"


def values(e: Emitter, operands: Iterable[Operand], kind: str) -> list[str]:
    """Expressions for operands of any type, subnormals flushed where the instruction says so."""
    if kind in ("f32", "f64"):
        texts = [e.source(o, kind) for o in operands]
    elif kind == "f32x2":
        texts = [f"{e.source(o, 'u64')}.view(np.float32)" for o in operands]
    else:
        texts = [widen(e, o, kind) for o in operands]
    return [f"{flush(kind)}({t})" for t in texts] if e.has("ftz") else texts


def flush(kind: str) -> str:
    return "flush_sixteen" if kind in ("f16", "f16x2") else "flush"


def finish(e: Emitter, d: Operand, value: str, kind: str) -> None:
    """Saturate, flush and round a result, and assign it."""
    wide, base = kind.startswith("f32") or kind == "f64", kind.removesuffix("x2")
    if kind == "f32":
        value = f"canonical({value})"
    if e.has("sat"):
        value = f"saturate({value})"
    if e.has("relu") and not wide:
        value = f"rectify({value})"
    if e.has("ftz"):
        value = f"{flush(kind)}({value if wide else f'widen_{base}(narrow_{base}({value}))'})"
    if kind == "f32x2":
        e.assign(e.destination(d, "u64"), f"{value}.view(np.uint64)")
    elif wide:
        e.assign(e.destination(d, kind), value)
    else:
        bits = "32" if kind.endswith("x2") else "16"
        e.assign(e.destination(d, f"u{bits}"), f"narrow_{base}({value}).view(np.uint{bits})")


# ---- instructions
SIGNS = {"add": "+", "sub": "-", "mul": "*"}
AS_FUSED = {"add": "{}, 1.0, {}", "sub": "{}, 1.0, -{}", "mul": "{}, {}, -0.0"}
UFUNCS = {"add": "np.add", "sub": "np.subtract", "mul": "np.multiply"}


def fused_call(e: Emitter, kind: str, arguments: str) -> str:
    return f"fused_multiply_add{'_f64' if kind == 'f64' else ''}({arguments}, {rounding(e)!r})"


@instruction("add", "sub", "mul", table=FLOATING)
def arithmetic(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat")
    kind = e.types[0]
    d, a, b = e.operands
    if kind in ("f32", "f64") and len(e.types) == 1 and rounding(e) == "rn" and not e.has("ftz") and not e.has("sat"):
        row = e.destination(d, kind)
        e.ufunc(UFUNCS[e.opcode], row, e.source(a, kind), e.source(b, kind))
        if kind == "f32":
            e.emit(f"canonicalise({row}, {e.mask})")
            e.batched(f"{e.opcode}_f32", d, a, b)
    elif len(e.types) == 2:  # f32 = f16 or bf16 (op) f32
        x = f"{widen(e, a, e.type)}.astype(np.float32)"
        finish(e, d, fused_call(e, kind, AS_FUSED[e.opcode].format(x, e.source(b, "f32"))), kind)
    elif kind in ("f32", "f64", "f32x2"):
        finish(e, d, fused_call(e, kind, AS_FUSED[e.opcode].format(*values(e, (a, b), kind))), kind)
    else:
        finish(e, d, f"({f' {SIGNS[e.opcode]} '.join(values(e, (a, b), kind))})", kind)


@instruction("mad", table=FLOATING)
@instruction("fma")
def fused(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat", "relu", "oob")
    kind = e.types[0]
    d, a, b, c = e.operands
    if len(e.types) == 2:  # f32 = f16 or bf16 products + f32
        x, y = (f"{widen(e, o, e.type)}.astype(np.float32)" for o in (a, b))
        finish(e, d, fused_call(e, kind, f"{x}, {y}, {e.source(c, 'f32')}"), kind)
        return
    x, y, z = values(e, (a, b, c), kind)
    if kind in ("f32", "f64", "f32x2"):
        finish(e, d, fused_call(e, kind, f"{x}, {y}, {z}"), kind)
        if kind == "f32" and rounding(e) == "rn" and not e.has("ftz") and not e.has("sat"):
            e.batched("fused_multiply_add", d, a, b, c)
        return
    value = f"sum_to_odd({x} * {y}, {z})"
    if e.has("oob"):  # an operand that stands for "out of bounds" makes the result 0
        marks = [f"out_of_bounds({e.source(o, 'u32' if kind.endswith('x2') else 'u16')})" for o in (a, b)]
        value = f"np.where({marks[0]} | {marks[1]}, 0.0, {value})"
    finish(e, d, value, kind)


@instruction("div", table=FLOATING)
def division(e: Emitter) -> None:
    e.only(*ROUNDINGS, "approx", "full", "ftz")
    kind, mode = e.type, rounding(e)
    if kind not in ("f32", "f64"):
        e.unsupported()
    d, *sources = e.operands
    x, y = values(e, sources, kind)
    finish(e, d, f"({x} / {y})" if mode == "rn" else f"directed_quotient({x}, {y}, {mode!r})", kind)


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh")
def transcendental(e: Emitter) -> None:
    """Correctly rounded where PTX says .rn; where it says .approx the float64 result rounded to the type, which lies
    within every bound the ISA gives but is not bit-identical to any hardware."""
    e.only(*ROUNDINGS, "approx", "ftz")
    kind, mode = e.type, rounding(e)
    d, a = e.operands
    (x,) = values(e, (a,), kind)
    value = f"transcendental_{e.opcode}({x}.astype(np.float64))"
    if kind in ("f32", "f64"):
        value += f".astype(np.float{kind[1:]})"
    if mode != "rn" and e.opcode == "rcp":
        value = f"directed_quotient(np.ones(32, {x}.dtype), {x}, {mode!r})"
    elif mode != "rn" and e.opcode == "sqrt":
        value = f"directed_root({x}, {mode!r})"
    finish(e, d, value, kind)


@instruction("abs", "neg", table=FLOATING)
def sign_operation(e: Emitter) -> None:
    e.only("ftz")
    kind = e.type
    d, a = e.operands
    name = "np.abs" if e.opcode == "abs" else "np.negative"
    if kind in ("f32", "f64"):
        e.ufunc(name, e.destination(d, kind), *values(e, (a,), kind))
    elif e.has("ftz"):
        finish(e, d, f"{name}({values(e, (a,), kind)[0]})", kind)
    else:
        view, bits = ("u32", 0x80008000) if kind.endswith("x2") else ("u16", 0x8000)
        change = f"& {bits ^ (0xFFFFFFFF if view == 'u32' else 0xFFFF)}" if e.opcode == "abs" else f"^ {bits}"
        e.assign(e.destination(d, view), f"{e.source(a, view)} {change}")


@instruction("min", "max", table=FLOATING)
def minimum_maximum(e: Emitter) -> None:
    """NaN loses against a number unless .NaN; -0 is below +0; .xorsign.abs compares magnitudes and multiplies signs."""
    e.only("ftz", "NaN", "xorsign", "abs", "relu")
    d, *sources = e.operands
    signs = values(e, sources, e.type)
    first, *others = [f"np.abs({t})" for t in signs] if e.has("abs") else signs
    for text in others:
        first = f"extreme({first}, {text}, {e.opcode == 'max'}, {e.has('NaN')})"
    if e.has("xorsign"):
        first = f"multiply_signs({first}, {signs[0]}, {signs[1]})"
    finish(e, d, first, e.type)


expressions({"copysign": ("* * *", "np.copysign({1}, {0})")})
PROPERTIES = {
    "finite": "np.isfinite({0})",
    "infinite": "np.isinf({0})",
    "number": "~np.isnan({0})",
    "notanumber": "np.isnan({0})",
    "subnormal": "(({0} != 0) & (np.abs({0}) < np.finfo({0}.dtype).tiny))",
    "normal": "(np.isfinite({0}) & (np.abs({0}) >= np.finfo({0}.dtype).tiny))",
}
expressions({f"testp.{name}": ("pred *", value) for name, value in PROPERTIES.items()})
