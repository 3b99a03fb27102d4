"""tcgen05.mma: operands and scales are put in place by formulas written here; results against scalar models."""

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator.units import instruction_descriptor, number_formats
from padless.emulator.units.tcgen05 import Mma, nibbles, six_bits
from support.instruction_descriptor import build
from support.scalar_dot import same_bits, scalar, scalar_dot, scalar_fp4, value_of

SPAN = {"32B": 32, "64B": 64, "128B": 128}
LAYOUT = {"none": 0, "128B": 2, "64B": 4, "32B": 6}


def xor(address: int, mode: str) -> int:
    line, chunk = address // 128, address // 16 % 8
    flip = {"none": 0, "32B": line % 2, "64B": line % 4, "128B": line % 8}[mode]
    return address - chunk * 16 + (chunk ^ flip) * 16


def put_k_major(shared: np.ndarray, rows: np.ndarray, start: int, mode: str = "128B") -> int:
    """Rows of 32 bytes; returns the tcgen05 descriptor."""
    leading, stride = (128 * len(rows) // 8 + 256, 128) if mode == "none" else (16, 8 * SPAN[mode])
    for r, row in enumerate(rows):
        for x, byte in enumerate(row):
            if mode == "none":
                at = start + r % 8 * 16 + r // 8 * stride + x % 16 + x // 16 * leading
            else:
                at = xor(start + r % 8 * SPAN[mode] + r // 8 * stride + x, mode)
            shared[at] = byte
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | LAYOUT[mode] << 61


def put_scales(tmem: np.ndarray, scales: np.ndarray, column: int, first: int) -> None:
    """Scale j of row r: byte first + j of lanes r % 32 + 32 w, column + r // 32."""
    octets = tmem.view(np.uint8).reshape(128, 512, 4)
    for r, row in enumerate(scales):
        for j, code in enumerate(row):
            for w in range(4):
                octets[r % 32 + 32 * w, column + r // 32, first + j] = code


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def pad_nibbles(codes: np.ndarray) -> np.ndarray:
    """16 elements in 8 bytes, then 8 bytes of anything."""
    packed = pack_nibbles(codes).reshape(len(codes), 2, 8)
    return np.concatenate([packed, np.full_like(packed, 0xA5)], axis=2).reshape(len(codes), 32)


def pad_six_bits(codes: np.ndarray) -> np.ndarray:
    out = np.full((len(codes), 32), 0x5A, np.uint8)
    for r, row in enumerate(codes):
        for half in range(2):
            word = sum(int(c) << 6 * i for i, c in enumerate(row[16 * half : 16 * half + 16]))
            out[r, 16 * half : 16 * half + 12] = np.frombuffer(word.to_bytes(12, "little"), np.uint8)
    return out


def memories(groups: int, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    shared = [rng.integers(0, 256, 96 * 1024).astype(np.uint8) for _ in range(groups)]
    tmem = [rng.integers(0, 1 << 32, (128, 512), dtype=np.uint32) | np.uint32(0x7FC00000) for _ in range(groups)]
    return shared, tmem


def test_instruction_descriptor_literals() -> None:
    """Literals found in the PTX of other people's kernels."""
    cases = {
        0x10B00000: ("mxf8f6f4", 256, 192, "e4m3", "e4m3"),
        0x10C00000: ("mxf8f6f4", 256, 256, "e4m3", "e4m3"),
        0x08A00000: ("mxf8f6f4", 128, 128, "e4m3", "e4m3"),
        0x10A01680: ("mxf8f6f4", 256, 128, "e2m1", "e2m1"),
        0x08200480: ("mxf4nvf4", 128, 128, "e2m1", "e2m1"),
        0x10400480: ("mxf4nvf4", 256, 256, "e2m1", "e2m1"),
        0x10100480: ("mxf4nvf4", 256, 64, "e2m1", "e2m1"),
        0x10C00480: ("mxf4", 256, 256, "e2m1", "e2m1"),
    }
    for bits, (kind, m, n, a, b) in cases.items():
        f = instruction_descriptor.decode(bits, kind)
        assert (f.m, f.n, f.a_type, f.b_type, f.sfa_id, f.sfb_id, f.faults, f.meaningless) == (m, n, a, b, 0, 0, (), ())
        assert f.scale_format == ("ue4m3" if bits in (0x08200480, 0x10400480, 0x10100480) else "ue8m0")
        assert build(kind, m, n, a, b, scale_format=f.scale_format) == bits
    for step, bits in enumerate((0x10B00000, 0x30B00010, 0x50B00020, 0x70B00030)):
        f = instruction_descriptor.decode(bits, "mxf8f6f4")
        assert (f.sfa_id, f.sfb_id, f.problems(2, 32)) == (step, step, ())
    f = instruction_descriptor.decode(0x08200490, "f16")  # M 128, N 128, bf16 x bf16, f32
    assert (f.m, f.n, f.a_type, f.b_type, f.d_type, f.k) == (128, 128, "bf16", "bf16", "f32", 16)


@pytest.mark.parametrize(
    ("bits", "kind", "group", "block", "words"),
    [
        (0x10B00000, "mxf8f6f4", 1, 32, "M = 256"),
        (0x08A00000 | 1 << 24, "mxf8f6f4", 1, 32, "reserved"),
        (0x08200000, "mxf8f6f4", 1, 32, "scale format"),
        (0x08A20000, "mxf8f6f4", 2, 32, "N = 136"),
        (0x08A00000, "mxf8f6f4", 1, 16, "one scale per 32"),
        (0x28200480, "mxf4nvf4", 1, 16, "SFA id 1"),
        (0x08A00490, "mxf4", 1, 32, "SFB id 1"),
        (0x08200480, "mxf4", 1, 32, "ue8m0"),
        (0x08200480, "mxf4nvf4", 1, 32, "ue8m0"),
        (0x05200010, "f16", 1, 0, "M = 80"),
        (0x08200010 | 1 << 29, "f16", 1, 0, "reserved"),
    ],
)
def test_bad_instruction_descriptors(bits: int, kind: str, group: int, block: int, words: str) -> None:
    problems = instruction_descriptor.decode(bits, kind).problems(group, block)
    assert any(words in p for p in problems), problems


@pytest.mark.parametrize(
    ("bits", "kind", "words"),
    [
        (0x08A00004, "mxf8f6f4", "sparse"),
        (0x08A00100, "mxf8f6f4", "A format 2"),
        (0x08200490, "tf32", "A format 1"),
        (0x08200490 & ~0x10, "f16", "D format 0"),
        (0x88A00480, "mxf4", "K = 96"),
    ],
)
def test_meaningless_instruction_descriptors(bits: int, kind: str, words: str) -> None:
    scaled = kind.startswith("mx")
    unit = Mma(
        kind, 1, bits, 0, 1 << 46, 1 << 46, sfa=0 if scaled else None, sfb=4 if scaled else None, block=32 * scaled
    )
    assert any(words in p for p in unit.problems())
    with pytest.raises(ValueError, match=words):
        unit.execute(*memories(1, 0))


def d_place(m: int, n: int, big_m: int, big_n: int, group: int) -> tuple[int, int, int]:
    """(CTA, lane, column) of D's element, by the tables."""
    if group == 1:
        return (0, m, n) if big_m == 128 else (0, m % 16 + 32 * (m // 16), n)
    if big_m == 256:
        return m // 128, m % 128, n
    return m // 64, m % 64 + 64 * (n >= big_n // 2), n % (big_n // 2)


CASES = [
    # kind, group, M, N, a, b, d
    ("f8f6f4", 1, 128, 24, "e4m3", "e5m2", "f32"),
    ("f8f6f4", 1, 64, 16, "e4m3", "e4m3", "f32"),
    ("f8f6f4", 1, 64, 16, "e4m3", "e4m3", "f16"),
    ("f8f6f4", 2, 256, 48, "e2m1", "e4m3", "f32"),
    ("f8f6f4", 2, 128, 32, "e3m2", "e2m3", "f32"),
    ("f16", 1, 128, 40, "bf16", "bf16", "f32"),
    ("f16", 2, 256, 32, "f16", "f16", "f16"),
    ("tf32", 1, 128, 8, "tf32", "tf32", "f32"),
    ("i8", 1, 128, 16, "s8", "u8", "s32"),
]
SMALL = {"e2m1": [0, 1, 2, 3, 4, 6], "e3m2": [0, 1, 2, 3], "e2m3": [0, 1, 2, 3]}


def integer_operand(rng: np.random.Generator, name: str, rows: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(values, the 32 bytes of each row)."""
    values = rng.choice(SMALL.get(name, [0, 1, 2, 3, 5, 7]), (rows, k)) * rng.choice([-1, 1], (rows, k))
    if name == "u8":
        values = np.abs(values)
    if name in ("u8", "s8"):
        return values, values.astype(np.int8).view(np.uint8)
    codes = number_formats.encode(values, name)
    if name == "e2m1":
        return values, pad_nibbles(codes)
    if name in ("e3m2", "e2m3"):
        return values, pad_six_bits(codes)
    return values, codes.view(np.uint8).reshape(rows, 32)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("enable_d", [False, True])
def test_every_layout_with_exact_data(case: tuple, enable_d: bool) -> None:  # type: ignore[type-arg]
    kind, group, m, n, a_type, b_type, d_type = case
    rng = np.random.default_rng([m, n, group])
    k = {"f16": 16, "tf32": 8}.get(kind, 32)
    a, a_bytes = integer_operand(rng, a_type, m, k)
    b, b_bytes = integer_operand(rng, b_type, n, k)
    c = rng.integers(-99, 99, (m, n))
    shared, tmem = memories(group, 1)
    for cta in range(group):
        da = put_k_major(shared[cta], a_bytes[cta * m // group : (cta + 1) * m // group], 4096 + 96)
        db = put_k_major(shared[cta], b_bytes[cta * n // group : (cta + 1) * n // group], 40960, "64B")
    column = 37
    kinds = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[d_type]
    for i in range(m):
        for j in range(n):
            cta, lane, x = d_place(i, j, m, n, group)
            raw = np.array([c[i, j]], kinds).view(np.uint16 if d_type == "f16" else np.uint32)[0]
            tmem[cta][lane, column + x] = raw
    before = [t.copy() for t in tmem]
    bits = build(kind, m, n, a_type, b_type, d_type)
    unit = Mma(kind, group, bits, column, db, da, enable_d=enable_d)
    assert unit.problems() == ()
    assert unit.execute(shared, tmem) == ()
    want = a @ b.T + (c if enable_d else 0)
    written = [np.zeros((128, 512), bool) for _ in tmem]
    for i in range(m):
        for j in range(n):
            cta, lane, x = d_place(i, j, m, n, group)
            word = tmem[cta][lane, column + x : column + x + 1].copy()
            assert word.view(kinds)[0] == want[i, j], (i, j)
            written[cta][lane, column + x] = True
    boxed = np.zeros((128, 512), bool)
    for first, end, left, right in unit.tmem_writes():
        boxed[first:end, left:right] = True
    for cta in range(group):
        np.testing.assert_array_equal(written[cta], boxed)
        np.testing.assert_array_equal(tmem[cta][~boxed], before[cta][~boxed])
    assert ("d" in unit.tmem_reads()) == enable_d
    sizes = {name: sum(y - x for x, y in r) for name, r in unit.shared_ranges().items()}
    assert sizes == {"a": 32 * m // group, "b": 32 * n // group}


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("a_type", "b_type"), [("e4m3", "e4m3"), ("e5m2", "e2m1"), ("e2m1", "e4m3")])
@pytest.mark.parametrize("first", [0, 3])
def test_mxf8f6f4_is_bit_accurate(group: int, a_type: str, b_type: str, first: int) -> None:
    """Random codes and scales that differ in every row; the scale only moves the exponents of its products."""
    rng = np.random.default_rng([group, first])
    m, n = 128 * group, 48
    top = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 7}
    operands = []
    for name, rows in ((a_type, m), (b_type, n)):
        codes = rng.integers(0, top[name] + 1, (rows, 32)) | rng.integers(0, 2, (rows, 32)) << (
            3 if name == "e2m1" else 7
        )
        operands.append((codes, pad_nibbles(codes) if name == "e2m1" else codes.astype(np.uint8)))
    (a, a_bytes), (b, b_bytes) = operands
    sfa, sfb = rng.integers(117, 137, (m, 1)), rng.integers(117, 137, (n, 1))
    c = (rng.standard_normal((m, n)) * 100).astype(np.float32)
    shared, tmem = memories(group, 2)
    d, sa, sb = 8, 300, 400
    for cta in range(group):
        da = put_k_major(shared[cta], a_bytes[cta * 128 : cta * 128 + 128], 4096)
        db = put_k_major(shared[cta], b_bytes[cta * n // group : (cta + 1) * n // group], 40960)
        put_scales(tmem[cta], sfa[cta * 128 : cta * 128 + 128], sa, first)
        put_scales(tmem[cta], sfb, sb, first)
        tmem[cta][:, d : d + n] = c.view(np.uint32)[cta * 128 : cta * 128 + 128]
    bits = build("mxf8f6f4", m, n, a_type, b_type, sfa_id=first, sfb_id=first)
    # CuTe leaves the ids in the top bits of the scales' addresses: they are no part of the address
    unit = Mma("mxf8f6f4", group, bits, d, db, da, sfa=sa | first << 30, sfb=sb | first << 30, block=32)
    assert unit.problems() == ()
    assert unit.tmem_reads()["sfa"] == [(0, 128, sa, sa + 4)]
    assert unit.tmem_reads()["sfb"] == [(0, 128, sb, sb + 2)]
    assert unit.execute(shared, tmem) == ()
    got = np.concatenate([t[:, d : d + n] for t in tmem]).view(np.float32)
    picked = [(int(rng.integers(m)), int(rng.integers(n))) for _ in range(60)]
    model = []
    for i, j in picked:
        # An exact power of two moves C the other way and the result back: then the unscaled scalar model applies.
        shift = int(sfa[i, 0] + sfb[j, 0] - 254)
        moved = np.float32(c[i, j] * 2.0**-shift)
        inner = scalar_dot(a[i].tolist(), b[j].tolist(), int(moved.view(np.uint32)), a_type, b_type, 25, 23)
        model.append(inner * 2.0**shift)
    same_bits(np.array([got[p] for p in picked]), np.array(model))


@pytest.mark.parametrize(
    ("kind", "block", "scale"), [("mxf4nvf4", 16, "ue4m3"), ("mxf4nvf4", 16, "ue8m0"), ("mxf4", 32, "ue8m0")]
)
@pytest.mark.parametrize("group", [1, 2])
def test_fp4_is_bit_accurate(kind: str, block: int, scale: str, group: int) -> None:
    """Different nibbles at even and odd K, different scales per 16: a swapped order or a shifted scale fails."""
    rng = np.random.default_rng([block, group])
    m, n, per = 128 * group, 32 + 16 * group, 64 // block
    first = 2 if block == 32 else 0
    a, b = rng.integers(0, 16, (m, 64)), rng.integers(0, 16, (n, 64))
    a[:, 1::2] &= 8 | 3  # the odd elements are smaller than the even ones
    low, high = (0x20, 0x50) if scale == "ue4m3" else (120, 134)
    sfa, sfb = rng.integers(low, high, (m, per)), rng.integers(low, high, (n, per))
    c = (rng.standard_normal((m, n)) * 2.0 ** rng.integers(-12, 12, (m, n))).astype(np.float32)
    shared, tmem = memories(group, 3)
    d, sa, sb = 0, 256, 300
    for cta in range(group):
        da = put_k_major(shared[cta], pack_nibbles(a[cta * 128 : cta * 128 + 128]), 4096)
        db = put_k_major(shared[cta], pack_nibbles(b[cta * n // group : (cta + 1) * n // group]), 40960)
        put_scales(tmem[cta], sfa[cta * 128 : cta * 128 + 128], sa, first)
        put_scales(tmem[cta], sfb, sb, first)
        tmem[cta][:, d : d + n] = c.view(np.uint32)[cta * 128 : cta * 128 + 128]
    bits = build(kind, m, n, "e2m1", "e2m1", scale_format=scale, sfa_id=first, sfb_id=first)
    unit = Mma(kind, group, bits, d, db, da, sfa=sa, sfb=sb, block=block)
    assert unit.problems() == ()
    assert unit.execute(shared, tmem) == ()
    got = np.concatenate([t[:, d : d + n] for t in tmem]).view(np.float32)
    value = (lambda s: value_of(int(s))) if scale == "ue4m3" else (lambda s: 2.0 ** (int(s) - 127))
    picked = [(int(rng.integers(m)), int(rng.integers(n))) for _ in range(60)]
    repeat = block // 16
    model = [
        scalar_fp4(
            a[i].tolist(), b[j].tolist(), [value(s) for s in sfa[i] for _ in range(repeat)],
            [value(s) for s in sfb[j] for _ in range(repeat)], float(c[i, j]),
        )
        for i, j in picked
    ]  # fmt: skip
    same_bits(np.array([got[p] for p in picked]), np.array(model))
    # the swapped order is a different answer
    swapped = a.reshape(m, 32, 2)[:, :, ::-1].reshape(m, 64)
    values = lambda x: number_formats.decode(x, "e2m1")  # noqa: E731
    assert (values(swapped) @ values(b).T != values(a) @ values(b).T).mean() > 0.9


def test_differing_scale_copies_are_reported() -> None:
    shared, tmem = memories(1, 4)
    rng = np.random.default_rng(5)
    da = put_k_major(shared[0], rng.integers(0, 16, (128, 32)), 4096)
    db = put_k_major(shared[0], rng.integers(0, 16, (16, 32)), 40960)
    put_scales(tmem[0], np.full((128, 4), 127), 300, 0)
    put_scales(tmem[0], np.full((16, 4), 127), 400, 0)
    unit = Mma("mxf8f6f4", 1, 0x08840000 | 1 << 23, 0, db, da, enable_d=False, sfa=300, sfb=400, block=32)
    assert instruction_descriptor.decode(0x08840000, "mxf8f6f4").n == 16
    assert unit.execute(shared, tmem) == ()
    tmem[0][37, 301] ^= np.uint32(0x0100)  # a byte that this instruction does not use
    assert unit.execute(shared, tmem) == ()
    tmem[0][37, 301] ^= np.uint32(0x0001)
    reports = unit.execute(shared, tmem)
    assert len(reports) == 1
    assert "SFA of row 37" in reports[0]
    assert "lane 37" in reports[0]


def test_a_from_tensor_memory() -> None:
    rng = np.random.default_rng(6)
    for kind, a_type, k in (("f16", "bf16", 16), ("f8f6f4", "e4m3", 32)):
        a, a_bytes = integer_operand(rng, a_type, 128, k)
        b, b_bytes = integer_operand(rng, a_type, 32, k)
        shared, tmem = memories(1, 7)
        tmem[0][:, 200:208] = a_bytes.view(np.uint32)
        db = put_k_major(shared[0], b_bytes, 4096, "32B")
        bits = build(kind, 128, 32, a_type, a_type)
        unit = Mma(kind, 1, bits, 64, db, a_tmem=200, enable_d=False)
        assert unit.problems() == ()
        assert unit.tmem_reads() == {"a": [(0, 128, 200, 208)]}
        unit.execute(shared, tmem)
        np.testing.assert_array_equal(tmem[0][:, 64:96].view(np.float32), a @ b.T)


@pytest.mark.parametrize(("a_type", "low", "mask"), [("e2m1", 2, 0x3C), ("e2m3", 1, 0x7E), ("e3m2", 1, 0x7E)])
def test_narrow_a_from_tensor_memory(a_type: str, low: int, mask: int) -> None:
    """A number lies in the middle of its byte, and what surrounds it does not count."""
    rng = np.random.default_rng(9)
    codes = rng.integers(0, 1 << (8 - 2 * low), (128, 32)).astype(np.uint8)
    b, b_bytes = integer_operand(rng, "e4m3", 32, 32)
    shared, tmem = memories(1, 7)
    octets = codes << low | rng.integers(0, 256, codes.shape).astype(np.uint8) & np.uint8(~mask & 255)
    tmem[0][:, 200:208] = np.ascontiguousarray(octets).view(np.uint32)
    db = put_k_major(shared[0], b_bytes, 4096, "32B")
    unit = Mma("f8f6f4", 1, build("f8f6f4", 128, 32, a_type, "e4m3"), 64, db, a_tmem=200, enable_d=False)
    assert unit.problems() == ()
    unit.execute(shared, tmem)
    exponent_bits, mantissa_bits = int(a_type[1]), int(a_type[3])
    exponent, mantissa = codes >> mantissa_bits & (1 << exponent_bits) - 1, codes & (1 << mantissa_bits) - 1
    bias = (1 << exponent_bits - 1) - 1
    size = np.where(exponent > 0, 1.0, 0.0) + mantissa / 2.0**mantissa_bits
    a = np.where(codes >> 7 - 2 * low, -1.0, 1.0) * size * 2.0 ** (np.maximum(exponent, 1).astype(float) - bias)
    np.testing.assert_array_equal(tmem[0][:, 64:96].view(np.float32), a @ b.T)


@pytest.mark.parametrize("first", [0, 16])
def test_a_of_64_rows_from_tensor_memory_lies_in_the_lanes_of_d(first: int) -> None:
    """16 rows in each quarter of the lanes; what the other lanes hold is not read."""
    rng = np.random.default_rng(7)
    a, a_bytes = integer_operand(rng, "bf16", 64, 16)
    b, b_bytes = integer_operand(rng, "bf16", 32, 16)
    shared, tmem = memories(1, 7)
    lanes = np.arange(64) % 16 + 32 * (np.arange(64) // 16) + first
    tmem[0][lanes, 200:208] = a_bytes.view(np.uint32)
    before = tmem[0].copy()
    db = put_k_major(shared[0], b_bytes, 4096, "32B")
    unit = Mma(
        "f16", 1, build("f16", 64, 32, "bf16", "bf16"), 64 | first << 16, db, a_tmem=200 | first << 16, enable_d=False
    )
    assert unit.problems() == ()
    assert unit.tmem_reads() == {"a": [(32 * q + first, 32 * q + first + 16, 200, 208) for q in range(4)]}
    unit.execute(shared, tmem)
    np.testing.assert_array_equal(tmem[0][lanes, 64:96].view(np.float32), a @ b.T)
    others = np.setdiff1d(np.arange(128), lanes)
    np.testing.assert_array_equal(tmem[0][others], before[others])


def test_mn_major_operands_and_negation() -> None:
    """B transposed, 128B swizzle: x = n bytes, rows of k; every address by the formula at hand."""
    rng = np.random.default_rng(8)
    a, a_bytes = integer_operand(rng, "bf16", 128, 16)
    b = rng.integers(-7, 8, (96, 16))
    shared, tmem = memories(1, 9)
    da = put_k_major(shared[0], a_bytes, 4096, "none")
    codes = number_formats.encode(b, "bf16")
    leading, stride, start = 4096, 1024, 65536
    for n in range(96):
        for k in range(16):
            for byte in range(2):
                x = 2 * n + byte
                at = xor(start + x % 128 + x // 128 * leading + k % 8 * 128 + k // 8 * stride, "128B")
                shared[0][at] = int(codes[n, k]) >> 8 * byte & 0xFF
    db = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | 2 << 61
    bits = build("f16", 128, 96, "bf16", "bf16", b_major="mn", negate_a=True)
    unit = Mma("f16", 1, bits, 0, db, da, enable_d=False)
    assert unit.problems() == ()
    unit.execute(shared, tmem)
    np.testing.assert_array_equal(tmem[0][:, :96].view(np.float32), -(a @ b.T))


def test_disabled_lanes_and_scaled_input() -> None:
    rng = np.random.default_rng(10)
    a, a_bytes = integer_operand(rng, "f16", 128, 16)
    b, b_bytes = integer_operand(rng, "f16", 8, 16)
    shared, tmem = memories(1, 11)
    da, db = put_k_major(shared[0], a_bytes, 4096), put_k_major(shared[0], b_bytes, 40960)
    c = rng.integers(-64, 64, (128, 8)) * 8
    tmem[0][:, :8] = c.astype(np.float32).view(np.uint32)
    bits = build("f16", 128, 8, "f16", "f16")
    lanes = (0x0000_0005, 0, 0x8000_0000, 0)
    Mma("f16", 1, bits, 0, db, da, disable_lanes=lanes, scale_d=3).execute(shared, tmem)
    want = a @ b.T + c / 8
    want[[0, 2, 95]] = c[[0, 2, 95]]
    np.testing.assert_array_equal(tmem[0][:, :8].view(np.float32), want)


def test_three_arithmetics_differ_where_derived_and_agree_on_exact_data() -> None:
    """2^13 from A * B, C just above a float32 tie: exact and separate_add round up, the fused model truncates."""
    shared, tmem = memories(1, 12)
    a_bytes, b_bytes = np.zeros((128, 32), np.uint8), np.zeros((8, 32), np.uint8)
    a_bytes[:, 0] = b_bytes[:, 0] = 0x38
    da, db = put_k_major(shared[0], a_bytes, 4096), put_k_major(shared[0], b_bytes, 40960)
    put_scales(tmem[0], np.full((128, 1), 140), 300, 0)
    put_scales(tmem[0], np.full((8, 1), 127), 400, 0)
    bits = build("mxf8f6f4", 128, 8, "e4m3", "e4m3")
    unit = Mma("mxf8f6f4", 1, bits, 0, db, da, sfa=300, sfb=400, block=32)
    got = {}
    for mode in ("exact", "truncate", "separate_add"):
        tmem[0][:, :8] = np.full((128, 8), 1.5 * 2.0**-10, np.float32).view(np.uint32)
        unit.execute(shared, tmem, mode)
        got[mode] = float(tmem[0].view(np.float32)[5, 3])
    assert got == {"exact": 8192 + 2.0**-9, "truncate": 8192 + 2.0**-10, "separate_add": 8192 + 2.0**-9}
    for mode in ("exact", "truncate", "separate_add", "fast"):
        tmem[0][:, :8] = np.full((128, 8), 3.0, np.float32).view(np.uint32)
        unit.execute(shared, tmem, mode)
        assert (tmem[0][:, :8].view(np.float32) == 8195).all()


def test_small_unpacking() -> None:
    assert nibbles(np.array([[0x21, 0x43]], np.uint8)).tolist() == [[1, 2, 3, 4]]
    word = 1 | 2 << 6 | 3 << 12 | 63 << 18
    assert six_bits(np.frombuffer(word.to_bytes(3, "little"), np.uint8)[None]).tolist() == [[1, 2, 3, 63]]
    assert scalar(0x1F, "e3m2")[0] == 28  # type: ignore[index]


def test_wrong_instructions() -> None:
    with pytest.raises(ValueError, match="cta_group"):
        Mma("f16", 3, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="exactly one"):
        Mma("f16", 1, 0, 0, 0)
    with pytest.raises(ValueError, match="needs all"):
        Mma("mxf4", 1, 0, 0, 0, 0, sfa=3)
    with pytest.raises(ValueError, match="4 are needed"):
        Mma("f16", 1, 0, 0, 0, 0, disable_lanes=(1,))
    bits = build("f16", 128, 256, "bf16", "bf16")
    assert any("leave the 128 x 512" in p for p in Mma("f16", 1, bits, 300, 1 << 46, 1 << 46).problems())
    assert any("lane 16" in p for p in Mma("f16", 1, bits, 16 << 16, 1 << 46, 1 << 46).problems())
    assert any("46-48" in p for p in Mma("f16", 1, bits, 0, 0, 1 << 46).problems())
