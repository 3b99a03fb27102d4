"""PTX kernels of one instruction on the values of a warp, and references in exact Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from padless.emulator import Emulator

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
SIZES = {"b8": 1, "u8": 1, "u16": 2, "s16": 2, "b16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "b32": 4, "f32": 4,
         "f16x2": 4, "bf16x2": 4, "u64": 8, "s64": 8, "b64": 8, "f64": 8, "b128": 16}  # fmt: skip
NUMPY = {"u16": np.uint16, "s16": np.int16, "b16": np.uint16, "u32": np.uint32, "s32": np.int32, "b32": np.uint32,
         "u64": np.uint64, "s64": np.int64, "b64": np.uint64, "f32": np.float32, "f64": np.float64}  # fmt: skip


def register_type(kind: str) -> str:
    return f"b{8 * SIZES[kind]}"


def kernel(body: str, inputs: list[str], output: str, declarations: str = "") -> str:
    """A kernel of one warp: lane i loads element i of each input into %a, %b, %c, runs the body and stores %d."""
    names = "abc"
    lines = [HEADER, declarations, ".visible .entry k(.param .u64 out"]
    lines[-1] += "".join(f", .param .u64 in{i}" for i in range(len(inputs))) + ") {"
    lines.append(
        f".reg .b64 %p, %o; .reg .b32 %t, %x<9>; .reg .b64 %y<9>; .reg .{register_type(output)} %d; .reg .pred %q<4>;"
    )
    lines += [f".reg .{register_type(kind)} %{names[i]};" for i, kind in enumerate(inputs)]
    lines.append("mov.u32 %t, %tid.x;")
    for i, kind in enumerate(inputs):
        size = SIZES[kind]
        lines += [f"ld.param.u64 %p, [in{i}];", f"mul.wide.u32 %o, %t, {size};", "add.s64 %p, %p, %o;",
                  f"ld.global.b{8 * size} %{names[i]}, [%p];"]  # fmt: skip
    lines.append(body)
    size = SIZES[output]
    lines += ["ld.param.u64 %p, [out];", f"mul.wide.u32 %o, %t, {size};", "add.s64 %p, %p, %o;",
              f"st.global.b{8 * size} [%p], %d;", "ret; }"]  # fmt: skip
    return "\n".join(lines)


def run(text: str, inputs: list[np.ndarray], output: Any, count: int = 32) -> np.ndarray:
    emulator = Emulator(text)
    out = np.full(count, 0xA5, np.uint8).repeat(np.dtype(output).itemsize).view(output)[:count].copy()
    arguments = [emulator.memory.register(out)] + [emulator.memory.register(x) for x in inputs]
    emulator.launch("k", 1, count, arguments).raise_on_reports()
    return out


EDGES = {"u": [0, 1, 2, 3, 7, 31, 32, 33, 0x7F, 0x80, 0xFF], "s": [0, 1, -1, 2, -2, 7, -8, 31, -32]}


def values(kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    dtype = np.dtype(NUMPY[kind])
    if dtype.kind == "f":
        bits = 8 * dtype.itemsize
        raw = rng.integers(0, 1 << bits, 32, dtype=f"u{dtype.itemsize}").view(dtype)
        moderate = rng.standard_normal(32).astype(dtype)
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, np.finfo(dtype).tiny / 4], dtype)
        return np.concatenate([special, raw[:12], moderate[:12]])
    info = np.iinfo(dtype)
    random = rng.integers(info.min, info.max, 32, dtype=dtype, endpoint=True)
    edges = np.array([info.min, info.max, *EDGES["s" if info.min else "u"]], dtype)
    rng.shuffle(edges)
    random[: len(edges)] = edges
    rng.shuffle(random)
    return random


def wrap(kind: str, value: int) -> int:
    bits = 8 * SIZES[kind]
    value &= (1 << bits) - 1
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def u(kind: str, x: int) -> int:
    return x & ((1 << 8 * SIZES[kind]) - 1)


def bfe(kind: str) -> Callable[..., int]:
    bits = 8 * SIZES[kind]

    def reference(a: int, b: int, c: int) -> int:
        pos, length = b & 0xFF, c & 0xFF
        if not length:
            return 0
        signed = kind[0] == "s"
        bit = a >> min(pos + length - 1, bits - 1) & 1 if signed else 0
        out = 0
        for i in range(bits):
            source = (u(kind, a) >> (pos + i) & 1) if i < length and pos + i < bits else bit
            out |= source << i
        return out

    return reference


def round_float32(exact: Fraction, mode: str = "rn") -> float:
    """A rational to float32 in one rounding."""
    if exact == 0:
        return 0.0
    sign, magnitude = (-1 if exact < 0 else 1), abs(exact)
    exponent = math.floor(math.log2(magnitude)) if magnitude < 2**1000 else 999
    while Fraction(2) ** exponent > magnitude:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    scaled = magnitude / unit
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1 == 1),
        "rz": False,
        "rp": rest > 0 and sign > 0,
        "rm": rest > 0 and sign < 0,
    }[mode]
    value = (whole + up) * unit
    limit = Fraction(2) ** 128
    if value >= limit:
        toward_zero = mode == "rz" or (mode == "rp" and sign < 0) or (mode == "rm" and sign > 0)
        return sign * (float(np.finfo(np.float32).max) if toward_zero else math.inf)
    return sign * float(value)
