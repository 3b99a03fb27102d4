"""Comparison and selection: setp, set, selp, slct."""

from __future__ import annotations

from typing import Any

from padless.emulator.instructions import floating
from padless.emulator.prepare.emitter import Emitter, view_of
from padless.emulator.prepare.registry import expressions, instruction
from padless.emulator.ptx.ast import Pair, Sink

COMPARE = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
UNORDERED = {"equ": "==", "neu": "!=", "ltu": "<", "leu": "<=", "gtu": ">", "geu": ">="}


def comparison(e: Emitter, a: Any, b: Any, kind: str) -> str:
    """A boolean expression of one comparison modifier; 64 values for packed types, low half first."""
    relation = e.either(*COMPARE, *UNORDERED, "num", "nan")
    if kind[0] == "f" or kind.startswith("bf"):
        x, y = floating.values(e, (a, b), kind)
    else:
        x, y = (e.source(o, view_of(kind)) for o in (a, b))
    if relation in ("num", "nan"):
        value = f"(np.isnan({x}) | np.isnan({y}))"
        return value if relation == "nan" else f"(~{value})"
    if relation in UNORDERED:
        return f"(({x} {UNORDERED[relation]} {y}) | np.isnan({x}) | np.isnan({y}))"
    if relation == "ne" and (kind[0] == "f" or kind.startswith("bf")):
        return f"(({x} != {y}) & ~np.isnan({x}) & ~np.isnan({y}))"
    if relation not in COMPARE:
        e.unsupported("comparison")
    return f"({x} {COMPARE[relation]} {y})"


COMBINE = {"and": "&", "or": "|", "xor": "^"}


def combined(e: Emitter, value: str, c: list[Any]) -> str:
    """`value` combined with the predicate operand, where there is one."""
    combine = e.either(*COMBINE)
    if not combine:
        return value
    third = e.source(c[0], "pred")
    return f"({value} {COMBINE[combine]} {f'np.repeat({third}, 2)' if e.types[-1].endswith('x2') else third})"


ALLOWED = (*COMPARE, *UNORDERED, "num", "nan", "ftz", *COMBINE)


@instruction("setp")
def set_predicate(e: Emitter) -> None:
    """Two destinations: the relation and its opposite; for packed types the low and the high half."""
    e.only(*ALLOWED)
    d, a, b, *c = e.operands
    value = comparison(e, a, b, e.type)
    if not isinstance(d, Pair):
        e.assign(e.destination(d, "pred"), combined(e, value, c))
        return
    temporary = f"t{e.instruction.index}"
    if e.type.endswith("x2"):
        e.emit(f"{temporary} = {combined(e, value, c)}.reshape(32, 2).T")
    else:
        e.emit(f"{temporary} = {combined(e, value, c)}, {combined(e, f'(~{value})', c)}")
    for k, item in enumerate((d.first, d.second)):
        if not isinstance(item, Sink):
            e.assign(e.destination(item, "pred"), f"{temporary}[{k}]")


# type of the result of set -> its view, and the bits that stand for true
TRUE = {
    "u32": ("u32", 0xFFFFFFFF), "s32": ("u32", 0xFFFFFFFF), "f32": ("u32", 0x3F800000), "u16": ("u16", 0xFFFF),
    "s16": ("u16", 0xFFFF), "f16": ("u16", 0x3C00), "bf16": ("u16", 0x3F80), "f16x2": ("u32", 0x3C00),
    "bf16x2": ("u32", 0x3F80),
}  # fmt: skip


@instruction("set")
def set_value(e: Emitter) -> None:
    e.only(*ALLOWED)
    d, a, b, *c = e.operands
    to, of = e.types
    packed = of.endswith("x2")
    if to not in TRUE or to not in ((of, "u32", "s32") if packed else TRUE.keys() - {"f16x2", "bf16x2"}):
        e.unsupported(f"a result of type .{to} for operands of type .{of}")
    view, true = TRUE[to]
    if packed:  # each half of an integer is 0xFFFF or 0
        true &= 0xFFFF
    value = f"np.where({combined(e, comparison(e, a, b, of), c)}, {true}, 0)"
    if packed:
        value += ".astype(np.uint16).view(np.uint32)"
    e.assign(e.destination(d, view), value)


expressions({"selp": ("* * * pred", "np.where({2}, {0}, {1})")})


@instruction("slct")
def select_sign(e: Emitter) -> None:
    view, by = view_of(e.types[0]), view_of(e.types[1])
    d, a, b, c = e.operands
    sign = f"flush({e.source(c, by)})" if e.has("ftz") else e.source(c, by)
    e.assign(e.destination(d, view), f"np.where({sign} >= 0, {e.source(a, view)}, {e.source(b, view)})")
