"""Logic, shifts, bit fields, byte permutations and counting of bits."""

from __future__ import annotations

import numpy as np

from padless.emulator.prepare.emitter import Emitter
from padless.emulator.prepare.registry import expressions, helper, instruction
from padless.emulator.ptx.ast import Immediate, Pair, Sink
from padless.emulator.units.number_formats import Array

expressions(
    {
        "and": ("* * *", "np.bitwise_and"),
        "or": ("* * *", "np.bitwise_or"),
        "xor": ("* * *", "np.bitwise_xor"),
        "not": ("* *", "np.invert"),
        "cnot": ("* *", "({0} == 0)"),
        "shf": ("u32 u32 u32 u32", "funnel({0}, {1}, {2}, {l}, {clamp})", "l r wrap clamp"),
        "bfe": ("* * u32 u32", "bit_field_extract({0}, {1}, {2})"),
        "bfi": ("* * * u32 u32", "bit_field_insert({0}, {1}, {2}, {3})"),
        "bmsk": ("u32 u32 u32", "field_mask({0}, {1}, {wrap})", "clamp wrap"),
        "szext": ("* * u32", "extend_low_bits({0}, {1}, {wrap})", "clamp wrap"),
        "brev": ("* *", "reverse_bits({0})"),
        "fns": ("u32 u32 u32 s32", "nth_set({0}, {1}, {2})"),
        "popc": ("u32 *", "count_bits({0}, 'popc', False)"),
        "clz": ("u32 *", "count_bits({0}, 'clz', False)"),
        "bfind": ("u32 *", "count_bits({0}, 'bfind', {shiftamt})", "shiftamt"),
    }
)


@instruction("shl", "shr")
def shift(e: Emitter) -> None:
    """Amounts are unsigned 32-bit and clamp at the width."""
    name = "left" if e.opcode == "shl" else "right"
    amount = e.operands[2]
    if isinstance(amount, Immediate) and 0 <= amount.value < int(e.view[1:]):
        e.compute("* * *", f"np.{name}_shift")
    else:
        e.compute("* * u32", f"shift_{name}({{0}}, {{1}})")


@helper
def shift_left(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(amount < bits, a << np.minimum(amount, bits - 1).astype(a.dtype), 0)


@helper
def shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(amount < bits, shifted, 0)


@helper
def funnel(low: Array, high: Array, amount: Array, left: bool, clamp: bool) -> Array:
    n = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    return (((both << n) >> np.uint64(32)) if left else (both >> n)) & np.uint64(0xFFFFFFFF)


@instruction("prmt")
def permute(e: Emitter) -> None:
    e.only(*PERMUTATIONS)
    d, a, b, c = e.operands
    mode = e.either(*PERMUTATIONS)
    if isinstance(c, Immediate) and not mode and not c.value & 0x8888:
        chosen = e.name(np.array([c.value >> 4 * i & 7 for i in range(4)]), "bytes")
        e.assign(e.destination(d, "u32"), f"choose_bytes({e.source(a, 'u32')}, {e.source(b, 'u32')}, {chosen})")
        return
    selector = e.source(c, "u32")
    if mode:
        table = e.name(np.array(PERMUTATIONS[mode], np.uint32), "table")
        selector = f"{table}[{selector} & 3]"
    e.assign(e.destination(d, "u32"), f"permute_bytes({e.source(a, 'u32')}, {e.source(b, 'u32')}, {selector})")


# mode -> the selector that it stands for, by the low two bits of c (PTX ISA, "prmt")
PERMUTATIONS = {
    "f4e": [0x3210, 0x4321, 0x5432, 0x6543],
    "b4e": [0x5670, 0x6701, 0x7012, 0x0123],
    "rc8": [0x0000, 0x1111, 0x2222, 0x3333],
    "ecl": [0x3210, 0x3211, 0x3222, 0x3333],
    "ecr": [0x0000, 0x1110, 0x2210, 0x3210],
    "rc16": [0x1010, 0x3232, 0x1010, 0x3232],
}


@helper
def choose_bytes(a: Array, b: Array, chosen: Array) -> Array:
    """What `permute_bytes` gives for one selector of all lanes that repeats no sign."""
    return np.stack([a, b], axis=1).view(np.uint8).reshape(-1, 8).take(chosen, axis=1).view(np.uint32)[:, 0]


@helper
def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    source = np.stack([a, b], axis=1).view(np.uint8).reshape(-1, 8)
    nibbles = (selector[:, None] >> np.array([0, 4, 8, 12], np.uint32)) & 15
    picked = np.take_along_axis(source, (nibbles & 7).astype(np.int64), axis=1)
    signs = np.where(picked & 0x80, 0xFF, 0).astype(np.uint8)
    return np.ascontiguousarray(np.where(nibbles & 8, signs, picked).astype(np.uint8)).view(np.uint32)[:, 0]


@instruction("lop3")
def three_input_logic(e: Emitter) -> None:
    """A function of three bits by its table; with .and, .or or .xor also whether any bit is set, combined with q."""
    e.only("and", "or", "xor")
    d, a, b, c, table, *q = e.operands
    if not isinstance(table, Immediate):
        e.unsupported()
    x, y, z = (e.source(o, "u32") for o in (a, b, c))
    value = logic_expression(table.value, x, y, z)
    if not isinstance(d, Pair):
        e.assign(e.destination(d, "u32"), value)
        return
    sign = {"and": "&", "or": "|", "xor": "^"}[e.either("and", "or", "xor")]
    temporary = f"t{e.instruction.index}"
    e.emit(f"{temporary} = {value}, {e.source(q[0], 'pred')}.copy()")
    if not isinstance(d.first, Sink):
        e.assign(e.destination(d.first, "u32"), f"{temporary}[0]")
    e.assign(e.destination(d.second, "pred"), f"(({temporary}[0] != 0) {sign} {temporary}[1])")


def logic_expression(table: int, x: str, y: str, z: str) -> str:
    terms = []
    for i in range(8):
        if table >> i & 1:
            factors = [name if i >> bit & 1 else f"~{name}" for name, bit in ((x, 2), (y, 1), (z, 0))]
            terms.append("(" + " & ".join(factors) + ")")
    return " | ".join(terms) if terms else f"({x} & 0)"


@helper
def bit_field_extract(a: Array, start: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    whole = (1 << bits) - 1
    out = []
    for x, p, k in zip(a.tolist(), (start & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True):
        field = ((x & whole) >> p) & ((1 << k) - 1)
        if a.dtype.kind == "i" and k and (x & whole) >> min(p + k - 1, bits - 1) & 1:
            field |= -1 << max(min(k, bits - p), 0)
        out.append(field & whole)
    return np.array(out, dtype=f"u{bits // 8}").view(a.dtype)


@helper
def extend_low_bits(a: Array, length: Array, wrap: bool) -> Array:
    """Its low bits, extended by their sign or by zeros; as many as ``length`` modulo 32, or limited to 32."""
    return bit_field_extract(a, np.zeros(32, np.uint32), np.minimum(length & 31 if wrap else length, 32))


@helper
def bit_field_insert(a: Array, b: Array, start: Array, length: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    whole = (1 << bits) - 1
    out = []
    for x, y, p, n in zip(a.tolist(), b.tolist(), (start & 0xFF).tolist(), (length & 0xFF).tolist(), strict=True):
        mask = (((1 << n) - 1) << p) & whole
        out.append((y & ~mask) | ((x << p) & mask))
    return np.array(out, dtype=a.dtype)


@helper
def field_mask(start: Array, length: Array, wrap: bool) -> Array:
    """Ones from bit ``start``, ``length`` of them, both modulo 32 or limited to 32."""
    first, count = ((x & 31 if wrap else np.minimum(x, 32)).tolist() for x in (start, length))
    return np.array([(((1 << n) - 1) << p) & 0xFFFFFFFF for p, n in zip(first, count, strict=True)], np.uint32)


@helper
def reverse_bits(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.array([int(f"{x:0{bits}b}"[::-1], 2) for x in a.tolist()], dtype=a.dtype)


@helper
def nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """The position of the n-th set bit of a mask, counted from a base upwards or, for a negative n, downwards."""
    out = []
    for bits, start, n in zip(mask.tolist(), base.tolist(), offset.tolist(), strict=True):
        path = range(start, -1, -1) if n < 0 else range(start, 32)
        if n == 0:
            found = [start] if bits >> start & 1 else []
        else:
            found = [p for p in path if bits >> p & 1][abs(n) - 1 : abs(n)]
        out.append(found[0] if found else 0xFFFFFFFF)
    return np.array(out, np.uint32)


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
