"""cvt and cvta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from padless.emulator.instructions import floating
from padless.emulator.instructions.floating_values import narrow_bf16, narrow_f16, round_directed
from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import HELPERS, helper, instruction
from padless.emulator.ptx.ast import Operand
from padless.emulator.state.spaces import SHARED_WINDOW, VIEW_SIZE, WINDOW_OF
from padless.emulator.units import number_formats
from padless.emulator.units.number_formats import Array

INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
NARROW = ("u4", "s4", "u2", "s2")  # destinations of cvt.pack that no register has
SMALL = {"e4m3", "e5m2", "e2m1", "e2m3", "e3m2", "ue8m0"}


def wide_source(e: Emitter, operand: Operand, view: str) -> str:
    """A source whose register may be wider than its type: the low bytes count."""
    width = e.width(operand)
    if width in (-1, VIEW_SIZE[view]):
        return e.source(operand, view)
    if width < VIEW_SIZE[view]:
        e.unsupported(f"{operand} is narrower than .{view}")
    natural = e.source(operand, e.natural_view(operand))
    return f"{natural}.astype(np.{_name(view)})"


def wide_assign(e: Emitter, operand: Operand, value: str, view: str) -> None:
    """Assign to a register that may be wider than the type: integers are extended by their sign."""
    width = e.width(operand)
    if width == VIEW_SIZE[view]:
        e.assign(e.destination(operand, view), value)
        return
    natural = e.natural_view(operand, "s" if view[0] == "s" else "u")
    kind = view if view[0] in "su" else "u" + view[1:]
    e.assign(e.destination(operand, natural), f"np.asarray({value}).astype(np.{_name(kind)})")


def _name(view: str) -> str:
    return {"u": "uint", "s": "int", "f": "float"}[view[0]] + view[1:]


@instruction("cvt")
def convert(e: Emitter) -> None:
    known = "ftz", "sat", "satfinite", "relu", "rna", "rs", "pack", "scaled::n2::ue8m0"
    e.only(*floating.ROUNDINGS, *INTEGER_ROUNDINGS, *known, *NARROW)
    if len(e.types) < 2:
        e.unsupported()
    to, source = e.types[0], e.types[1]
    if e.has("pack"):
        pack_integers(e)
        return
    if to[:-2] in SMALL or source[:-2] in SMALL:
        small_formats(e, to, source)
        return
    if e.has("rs"):
        e.unsupported("stochastic rounding")
    if to in ("f16x2", "bf16x2"):
        d, high, low = e.operands
        base = to.removesuffix("x2")
        parts = [to_sixteen(e, e.source(o, "f32"), base) for o in (low, high)]
        e.assign(e.destination(d, "u32"), f"({parts[0]} | ({parts[1]}.astype(np.uint32) << 16))")
        if floating.rounding(e) == "rn" and not e.has("relu") and not e.has("satfinite"):
            e.batched(f"pack_{base}", d, high, low)
        return
    d, a = e.operands
    if to == "tf32":
        mode = "rna" if e.has("rna") else floating.rounding(e)
        value = f"encode({e.source(a, 'f32')}, 'tf32', rounding={mode!r}, saturate={e.has('satfinite')}"
        e.assign(e.destination(d, "u32"), f"{value}, relu={e.has('relu')})")
        return
    from_float = source[0] == "f" or source == "bf16"
    to_float = to[0] == "f" or to == "bf16"
    if source in ("f16", "bf16"):
        value = floating.widen(e, a, source)
    else:
        value = wide_source(e, a, source if source[0] != "b" else "u" + source[1:])
    if to_float:
        integer_rounding = e.either(*INTEGER_ROUNDINGS)
        if integer_rounding:
            value = f"round_integral({value}, {integer_rounding!r})"
        if to in ("f16", "bf16"):
            wide_assign(e, d, to_sixteen(e, value, to), "u16")
            return
        mode = floating.rounding(e)
        if to == "f32" and mode != "rn":
            value = f"round_directed(np.asarray({value}, np.float64), {mode!r})"
        else:
            value = f"{value}.astype(np.float{to[1:]})"
        floating.finish(e, d, value, to)
        return
    if from_float:
        mode = e.either(*INTEGER_ROUNDINGS, default="rzi")
        if e.has("ftz") and source == "f32":
            value = f"flush({value})"
        wide_assign(e, d, f"float_to_integer({value}, {mode!r}, np.{_name(to)})", to)
        return
    if e.has("sat"):
        value = f"saturate_integer({value}, np.{_name(to)})"
    else:
        value = f"{value}.astype(np.{_name(to)})"
    wide_assign(e, d, value, to)


def pack_by(narrow: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """Two float32 to the bits of a pair of 16-bit ones, as float32 for a register row."""
    return lambda high, low: (narrow(low) | (narrow(high).astype(np.uint32) << 16)).view(np.float32)


HELPERS |= {
    "pack_bf16": pack_by(narrow_bf16), "pack_f16": pack_by(narrow_f16), "encode": number_formats.encode,
    "round_directed": round_directed, "encode_pair": number_formats.encode_pair,
}  # fmt: skip


def to_sixteen(e: Emitter, value: str, base: str) -> str:
    mode = floating.rounding(e)
    if e.has("relu"):
        value = f"np.where({value} < 0, 0, {value})"
    return f"round_sixteen({value}, {base!r}, {mode!r}, {e.has('satfinite')})"


@helper
def round_sixteen(value: Array, base: str, mode: str, saturate: bool) -> Array:
    """float to the bits of f16 or bf16, nearest even or toward zero."""
    wide = value if mode == "rn" and base == "bf16" else np.asarray(value, np.float64)
    if mode == "rn":
        bits = narrow_f16(wide) if base == "f16" else narrow_bf16(wide)
    elif mode == "rz":
        if base == "bf16":
            bits = (round_directed(wide, "rz").view(np.uint32) >> 16).astype(np.uint16)
        else:
            near = wide.astype(np.float16)
            over = np.abs(near.astype(np.float64)) > np.abs(wide)
            bits = np.where(over, np.nextafter(near, np.float16(0)), near).view(np.uint16)
        bits = np.where(np.isnan(wide), 0x7FFF, bits).astype(np.uint16)
    else:
        return number_formats.encode(wide, base, rounding=mode, saturate=saturate)
    if saturate:
        largest = 0x7BFF if base == "f16" else 0x7F7F
        magnitude = bits & 0x7FFF
        infinite = magnitude == largest + 1
        bits = np.where(infinite, (bits & 0x8000) | largest, bits).astype(np.uint16)
    return bits


@helper
def round_integral(value: Array, mode: str) -> Array:
    return {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](value)


@helper
def float_to_integer(value: Array, mode: str, kind: Any) -> Array:
    """Clamped to the range of the type; NaN gives 0 (the top bit alone for 64-bit results)."""
    info = np.iinfo(kind)
    rounded = round_integral(np.asarray(value, np.float64), mode)
    low, high = float(info.min), float(info.max)
    inside = np.where((rounded > low) & (rounded < high), rounded, 0).astype(kind)
    out = np.where(rounded >= high, info.max, np.where(rounded <= low, info.min, inside))
    return np.where(np.isnan(rounded), 0 if info.bits < 64 else -(1 << 63) if info.min else 1 << 63, out).astype(kind)


@helper
def saturate_integer(value: Array, kind: Any) -> Array:
    info, have = np.iinfo(kind), np.iinfo(value.dtype)
    return np.clip(value, max(info.min, have.min), min(info.max, have.max)).astype(kind)


def pack_integers(e: Emitter) -> None:
    """cvt.pack.sat: two s32 saturated to 16, 8, 4 or 2 bits, a high and b low; c, shifted up, fills what is left."""
    kind = e.either(*NARROW, "u16", "s16", "u8", "s8")
    if not kind:
        e.unsupported()
    d, a, b, *c = e.operands
    n = int(kind[1:])
    low, high = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)
    parts = [f"(np.clip({e.source(o, 's32')}, {low}, {high}).view(np.uint32) & {(1 << n) - 1})" for o in (a, b)]
    value = f"(({parts[0]} << {n}) | {parts[1]})"
    if c:
        value = f"({value} | ({e.source(c[0], 'u32')} << {2 * n}))"
    e.assign(e.destination(d, "u32"), value)


def small_formats(e: Emitter, to: str, source: str) -> None:
    """fp8, fp6, fp4 and ue8m0 pairs: operand a goes to the high part."""
    small = to[:-2]
    if small in SMALL:
        if to.endswith("x4") or e.has("rs"):
            e.unsupported("four-element form")
        d, *sources = e.operands
        if source == "f32":
            high, low = (e.source(o, "f32") for o in sources)
        else:
            wide = floating.widen(e, sources[0], source)
            high, low = f"{wide}[1::2]", f"{wide}[0::2]"
        options = f"rounding={floating.rounding(e)!r}, saturate={e.has('satfinite')}, relu={e.has('relu')}"
        value = f"encode_pair({high}, {low}, {small!r}, {options})"
        wide_assign(e, d, value, "u8" if small == "e2m1" else "u16")
        return
    small = source[:-2]
    d, a = e.operands
    bits = wide_source(e, a, "u8" if small == "e2m1" else "u16")
    e.assign(e.destination(d, "u32"), f"decode_pair({bits}, {small!r}, {to!r}, {e.has('relu')})")


@helper
def decode_pair(bits: Array, name: str, to: str, relu: bool) -> Array:
    halves = [np.maximum(h, 0) if relu else h for h in number_formats.decode_pair(bits, name)]
    high, low = (round_sixteen(h, to.removesuffix("x2"), "rn", False).astype(np.uint32) for h in halves)
    return low | (high << 16)


def space_of(e: Emitter) -> str:
    found = next((m.split("::")[0] for m in e.instruction.modifiers if m.split("::")[0] in WINDOW_OF), "")
    return found or e.unsupported()


@instruction("cvta")
def convert_address(e: Emitter) -> None:
    """Generic addresses: each state space is a window; `to` subtracts its base."""
    space = space_of(e)
    d, a = e.operands
    view = e.view
    base = WINDOW_OF[space] if view == "u64" else 0
    sign = "-" if e.has("to") else "+"
    e.assign(e.destination(d, view), f"({e.source(a, view)} {sign} np.{_name(view)}({base}))")


@instruction("isspacep")
def is_space(e: Emitter) -> None:
    space = space_of(e)
    d, a = e.operands
    x = e.source(a, "u64")
    if space in ("global", "const"):
        e.assign(e.destination(d, "pred"), f"({x} < np.uint64({SHARED_WINDOW}))")
    else:
        e.assign(e.destination(d, "pred"), f"(({x} >> np.uint64(60)) == np.uint64({WINDOW_OF[space] >> 60}))")
