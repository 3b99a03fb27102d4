"""Floating-point instructions: f32, f64, f16, bf16 and their packed forms. What they compute is in `floating_values`."""

from __future__ import annotations

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import FLOATING, expressions, instruction
from padless.emulator.ptx.ast import Immediate, Operand

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
    e.assign(e.destination(destination, view), f"narrow_{base}({value}).view(np.{'uint32' if packed else 'uint16'})")


SIMPLE = {"add": "+", "sub": "-", "mul": "*"}


@instruction("add", "sub", "mul", table=FLOATING)
def arithmetic(e: Emitter) -> None:
    e.only(*ROUNDINGS, "ftz", "sat")
    kind, mode = e.types[0], rounding(e)
    d, a, b = e.operands
    if len(e.types) == 2:  # f32 = f16 or bf16 (op) f32
        x = f"{widen(e, a, e.type)}.astype(np.float32)"
        finish(e, d, f"fused_multiply_add({x}, np.float32(1), {negated(e)}{e.source(b, 'f32')}, {mode!r})", kind)
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


def finish(e: Emitter, d: Operand, value: str, kind: str) -> None:
    if kind == "f32":
        value = f"canonical({value})"
    if e.has("sat"):
        value = f"saturate({value})"
    if e.has("ftz"):
        value = f"flush({value})"
    e.assign(e.destination(d, kind), value)


@instruction("mad", table=FLOATING)
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


@instruction("div", table=FLOATING)
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


@instruction("abs", "neg", table=FLOATING)
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
    expression = f"{x} & {bits ^ (0xFFFFFFFF if view == 'u32' else 0xFFFF)}" if e.opcode == "abs" else f"{x} ^ {bits}"
    e.assign(e.destination(d, view), expression)


@instruction("min", "max", table=FLOATING)
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


expressions({"copysign": ("* * *", "np.copysign({1}, {0})")})


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
