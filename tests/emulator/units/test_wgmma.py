"""wgmma and its descriptors: operands are put into shared memory by formulas written here, at literal addresses."""

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator.units import arithmetic, matrix_descriptor, number_formats
from padless.emulator.units.wgmma import Wgmma, pack_d, unpack_d
from support.scalar_dot import same_bits, scalar_dot

BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "tf32": 4, "s8": 1, "u8": 1}
LAYOUT = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPAN = {"32B": 32, "64B": 64, "128B": 128}


def xor(address: int, mode: str) -> int:
    """The swizzles as the ISA's pictures show them: chunk index XOR row-in-pattern."""
    chunk = address // 16 % 8
    line = address // 128
    flip = {"none": 0, "32B": line % 2, "64B": line % 4, "128B": line % 8}[mode]
    return address - chunk * 16 + (chunk ^ flip) * 16


def descriptor(start: int, leading: int, stride: int, mode: str) -> int:
    return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | LAYOUT[mode] << 62


def fill_k_major(shared: np.ndarray, rows: np.ndarray, start: int, mode: str) -> int:
    """Write rows of 32 bytes K-major and return the descriptor, with strides that are no natural ones."""
    leading, stride = 16 * 200, 0
    if mode == "none":
        leading, stride = 128 * (len(rows) // 8) + 128, 128
    else:
        stride = 8 * SPAN[mode] + (1024 if mode == "128B" else 8 * SPAN[mode])
    for r, row in enumerate(rows):
        for x, byte in enumerate(row):
            if mode == "none":
                at = start + r % 8 * 16 + r // 8 * stride + x % 16 + x // 16 * leading
            else:
                at = xor(start + r % 8 * SPAN[mode] + r // 8 * stride + x, mode)
            shared[at] = byte
    return descriptor(start, leading if mode == "none" else 16, stride, mode)


def fill_mn_major(shared: np.ndarray, values: np.ndarray, start: int, mode: str) -> int:
    """Write (mn, k) 16-bit codes MN-major."""
    mn, k = values.shape
    if mode == "none":
        stride, leading = 256, 256 * (mn // 8)
    else:
        leading, stride = 8 * SPAN[mode] * 2, 8 * SPAN[mode] * 2 * -(-mn * 2 // SPAN[mode])
    for r in range(mn):
        for c in range(k):
            for byte in range(2):
                x = 2 * r + byte
                if mode == "none":
                    at = start + x % 16 + x // 16 * stride + c % 8 * 16 + c // 8 * leading
                else:
                    span = SPAN[mode]
                    at = xor(start + x % span + x // span * leading + c % 8 * span + c // 8 * stride, mode)
                shared[at] = int(values[r, c]) >> 8 * byte & 0xFF
    return descriptor(start, leading, stride, mode)


def fragment_rows(n: int) -> list[tuple[int, int, int, int]]:
    """(thread, register, row, column) of every 32-bit element of D."""
    return [
        (thread, i, 16 * (thread // 32) + t // 4 + 8 * ((i % 4) // 2), 8 * (i // 4) + 2 * (t % 4) + i % 2)
        for thread, t in ((thread, thread % 32) for thread in range(128))
        for i in range(n // 2)
    ]


def test_descriptor_literals() -> None:
    d = matrix_descriptor.decode_wgmma(0x4000_0040_0000_0240)
    assert (d.start, d.leading, d.stride, d.swizzle, d.problems) == (0x2400, 0, 1024, "128B", ())
    d = matrix_descriptor.decode_wgmma(0x4000_0040_0000_0242)  # two steps of 16 bytes along K
    assert (d.start, d.problems) == (0x2420, ())
    d = matrix_descriptor.decode_wgmma(0x8000_0020_0001_0240)
    assert (d.leading, d.stride, d.swizzle) == (16, 512, "64B")
    d = matrix_descriptor.decode_wgmma(0xC000_0010_0000_0000)
    assert (d.stride, d.swizzle) == (256, "32B")
    d = matrix_descriptor.decode_tcgen05(0x4000_4040_0001_0240)
    assert (d.start, d.leading, d.stride, d.swizzle, d.problems) == (0x2400, 16, 1024, "128B", ())
    d = matrix_descriptor.decode_tcgen05(0x0000_4008_0000_0010)
    assert (d.start, d.stride, d.swizzle, d.problems) == (0x100, 128, "none", ())
    for code, mode in ((1, "128B_32B"), (4, "64B"), (6, "32B")):
        assert matrix_descriptor.decode_tcgen05(code << 61 | 1 << 46).swizzle == mode


@pytest.mark.parametrize(
    ("decode", "bits", "words"),
    [
        ("wgmma", 0x4000_4040_0000_0240, "46-48"),
        ("tcgen05", 0x4000_0040_0000_0240, "46-48"),
        ("tcgen05", 0x6000_4040_0000_0240, "layout code 3"),
        ("tcgen05", 0x4020_4040_0000_0240, "reserved"),
        ("tcgen05", 0x4010_4040_0000_0240, "bit 52"),
        ("wgmma", 0x4002_0040_0000_0240, "base offset 1"),
        ("wgmma", 0x4000_0040_0000_4240, "reserved"),
        ("wgmma", 0x4000_0040_0000_0248, "first row"),
    ],
)
def test_bad_descriptors_are_reported(decode: str, bits: int, words: str) -> None:
    problems = getattr(matrix_descriptor, f"decode_{decode}")(bits).problems
    assert any(words in p for p in problems), problems


def test_element_addresses_at_literals() -> None:
    """128B swizzle, K-major, start 0x2400: row 3, byte 80 -> 0x2400 + 3 * 128 + ((5 ^ 3) * 16)."""
    d = matrix_descriptor.decode_wgmma(0x4000_0040_0000_0240)
    at = matrix_descriptor.SharedMatrix(d, 64, 128, 1).addresses()
    assert at[3, 80] == 0x2400 + 480
    # 0x2400 has address bits 7-9 = 0, row 8 starts one SBO later
    assert at[8, 0] == 0x2800
    assert at[9, 5] == 0x2800 + 128 + 16 + 5
    # the XOR is on absolute addresses: a start in the second row of a pattern keeps its phase
    d = matrix_descriptor.decode_wgmma(0x4000_0040_0000_0248)
    assert matrix_descriptor.SharedMatrix(d, 8, 16, 1).addresses()[0, 3] == 0x2480 + 16 + 3
    d = matrix_descriptor.decode_wgmma(0x8000_0020_0000_0010)  # 64B swizzle
    at = matrix_descriptor.SharedMatrix(d, 16, 32, 2).addresses()
    assert at[5, 9] == 0x100 + 5 * 64 + (18 & 15) + ((16 + 64) ^ (((0x100 + 320 + 18) >> 7 & 3) << 4)) % 64 // 16 * 16
    d = matrix_descriptor.decode_wgmma(0x0000_0008_0040_0010)  # no swizzle: LBO 1024, SBO 128
    at = matrix_descriptor.SharedMatrix(d, 16, 16, 2).addresses()
    assert at[9, 11] == 0x100 + 16 + 128 + 6 + 1024


def test_ranges_and_out_of_range() -> None:
    unit = Wgmma(16, "f32", "e4m3", "e4m3", 0x4000_0040_0000_0240, 0x4000_0040_0000_0440)
    ranges = unit.shared_ranges()
    # 64 rows, 32 bytes of each 128-byte row; two rows of a swizzle pair can touch
    assert sum(b - a for a, b in ranges["a"]) == 64 * 32
    assert (ranges["a"][0][0], max(b for _, b in ranges["b"])) == (0x2400, 0x4400 + 2048 - 0)  # row 15: chunks 6, 7
    with pytest.raises(ValueError, match="reaches byte"):
        unit.execute(np.zeros(0x4400 + 1024, np.uint8), np.zeros((128, 8), np.float32))


@pytest.mark.parametrize("swizzle_a", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("swizzle_b", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize("n", [8, 24, 192])
def test_fp8_is_bit_accurate(swizzle_a: str, swizzle_b: str, n: int) -> None:
    """Against the scalar fraction model on a sample of outputs, and a float64 product on all, with random codes."""
    rng = np.random.default_rng([n, LAYOUT[swizzle_a], LAYOUT[swizzle_b]])
    a, b = rng.integers(0, 0x7F, (64, 32)), rng.integers(0, 0x7F, (n, 32))
    a, b = (x | rng.integers(0, 2, x.shape) << 7 for x in (a, b))
    shared = rng.integers(0, 256, 160 * 1024).astype(np.uint8)
    step = {"none": 0, "32B": 0, "64B": 32, "128B": 96}  # somewhere along K in the row
    da = fill_k_major(shared, a.astype(np.uint8), 1024 + step[swizzle_a], swizzle_a)
    db = fill_k_major(shared, b.astype(np.uint8), 64 * 1024 + step[swizzle_b], swizzle_b)
    c = (rng.standard_normal((64, n)) * 300).astype(np.float32)
    d = np.zeros((128, n // 2), np.float32)
    for thread, i, row, column in fragment_rows(n):
        d[thread, i] = c[row, column]
    unit = Wgmma(n, "f32", "e4m3", "e4m3", da, db)
    assert unit.problems() == ()
    out = unit.execute(shared, d)
    assert out.dtype == np.float32
    matrix = np.full((64, n), np.nan, np.float32)
    for thread, i, row, column in fragment_rows(n):
        matrix[row, column] = out[thread, i]
    plain = number_formats.decode(a, "e4m3") @ number_formats.decode(b, "e4m3").T + c
    size = np.abs(number_formats.decode(a, "e4m3")) @ np.abs(number_formats.decode(b, "e4m3")).T + np.abs(c)
    assert (np.abs(matrix - plain) <= size * 34 * 2.0**-12).all()
    picked = [(int(rng.integers(64)), int(rng.integers(n))) for _ in range(40)]
    ours = np.array([matrix[p] for p in picked])
    model = np.array(
        [
            scalar_dot(a[i].tolist(), b[j].tolist(), int(c.view(np.uint32)[i, j]), "e4m3", "e4m3", 13, 13)
            for i, j in picked
        ]
    )
    same_bits(ours, model)
    assert not (matrix.view(np.uint32) & 0x3FF).any()


@pytest.mark.parametrize("a_major", ["k", "mn"])
@pytest.mark.parametrize("b_major", ["k", "mn"])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_sixteen_bit_operands_of_both_majors(a_major: str, b_major: str, swizzle: str) -> None:
    """Integer data: the float64 product exactly."""
    rng = np.random.default_rng(5)
    n = 40
    a, b = rng.integers(-9, 10, (64, 16)), rng.integers(-9, 10, (n, 16))
    shared = rng.integers(0, 256, 160 * 1024).astype(np.uint8)
    places = []
    for values, major, start in ((a, a_major, 2048), (b, b_major, 80 * 1024)):
        codes = number_formats.encode(values, "bf16")
        if major == "k":
            places.append(fill_k_major(shared, codes.view(np.uint8).reshape(len(values), 32), start, swizzle))
        else:
            places.append(fill_mn_major(shared, codes, start, swizzle))
    unit = Wgmma(n, "f32", "bf16", "bf16", places[0], places[1], False, True, False, a_major, b_major)
    assert unit.problems() == ()
    out = unit.execute(shared, np.full((128, n // 2), 7, np.uint32))
    want = -(a @ b.T)
    for thread, i, row, column in fragment_rows(n):
        assert out.view(np.float32)[thread, i] == want[row, column]
    sizes = {name: sum(y - x for x, y in r) for name, r in unit.shared_ranges().items()}
    assert sizes == {"a": 64 * 32, "b": n * 32}


@pytest.mark.parametrize(
    ("d_type", "a_type", "b_type"),
    [("f32", "e5m2", "e4m3"), ("f32", "f16", "f16"), ("f32", "tf32", "tf32"), ("f16", "f16", "f16"),
     ("f16", "e4m3", "e5m2"), ("s32", "s8", "u8"), ("s32", "u8", "s8")],
)  # fmt: skip
def test_a_from_registers_of_every_type(d_type: str, a_type: str, b_type: str) -> None:
    rng = np.random.default_rng(6)
    n, size = 24, BYTES[a_type]
    k = 32 // size
    low = lambda t: 0 if t == "u8" else -8  # noqa: E731
    a, b = rng.integers(low(a_type), 9, (64, k)), rng.integers(low(b_type), 9, (n, k))
    codes = []
    for values, name in ((a, a_type), (b, b_type)):
        if name in ("s8", "u8"):
            codes.append(values.astype(np.int8).view(np.uint8))
        else:
            codes.append(number_formats.encode(values, name))
    octets = codes[0].view(np.uint8).reshape(64, 32)
    registers = np.zeros((128, 4), np.uint32)
    for thread in range(128):
        warp, t = divmod(thread, 32)
        for i in range(4):
            row, x = 16 * warp + t // 4 + 8 * (i % 2), 4 * (t % 4) + 16 * (i // 2)
            registers[thread, i] = octets[row, x : x + 4].copy().view(np.uint32)[0]
    shared = np.full(8192, 0xFF, np.uint8)
    db = fill_k_major(shared, codes[1].view(np.uint8).reshape(n, 32), 1024, "128B")
    c = rng.integers(-50, 50, (64, n))
    unit = Wgmma(n, d_type, a_type, b_type, None, db)
    assert unit.k == k
    assert unit.shared_ranges()["a"] == []
    if d_type == "f16":
        d = np.zeros((128, n // 4), np.uint32)
        for thread in range(128):
            warp, t = divmod(thread, 32)
            for i in range(n // 4):
                row, column = 16 * warp + t // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (t % 4)
                pair = number_formats.encode(c[row, column : column + 2], "f16").astype(np.uint32)
                d[thread, i] = pair[0] | pair[1] << 16
        out = unpack_d(unit.execute(shared, d, registers), "f16")
        np.testing.assert_array_equal(out, a @ b.T + c)
        return
    words = c.astype(np.int32 if d_type == "s32" else np.float32)
    d = np.zeros((128, n // 2), words.dtype)
    for thread, i, row, column in fragment_rows(n):
        d[thread, i] = words[row, column]
    out = unit.execute(shared, d, registers)
    for thread, i, row, column in fragment_rows(n):
        assert out[thread, i] == (a @ b.T + c)[row, column]


def test_fragments_come_back() -> None:
    rng = np.random.default_rng(7)
    bits = rng.integers(0, 1 << 32, (128, 20), dtype=np.uint32) & 0x3FFFFFFF
    assert (pack_d(unpack_d(bits, "f32"), "f32") == bits).all()


def test_wrong_instructions_are_refused() -> None:
    with pytest.raises(ValueError, match="n: 12"):
        Wgmma(12, "f32", "e4m3", "e4m3", 0, 0)
    with pytest.raises(ValueError, match="differ in width"):
        Wgmma(8, "f32", "e4m3", "bf16", 0, 0)
    with pytest.raises(ValueError, match="d_type"):
        Wgmma(8, "f32", "s8", "s8", 0, 0)
    assert "MN-major" in Wgmma(8, "f32", "e4m3", "e4m3", 0, 0, a_major="mn").problems()[0]
    leaving = Wgmma(8, "f32", "e4m3", "e4m3", 0x4000_0040_0000_0247, 0x4000_0040_0000_0400)
    assert "leave the 128-byte row" in leaving.problems()[0]


def test_modes_differ_only_where_they_should() -> None:
    """The fast mode keeps what truncation drops."""
    shared = np.zeros(8192, np.uint8)
    shared[1024] = shared[4096] = 0x7E
    unit = Wgmma(8, "f32", "e4m3", "e4m3", descriptor(1024, 16, 256, "none"), descriptor(4096, 16, 256, "none"))
    d = np.full((128, 4), 0.5, np.float32)
    assert unit.execute(shared, d)[0, 0] == 448.0 * 448.0
    assert unit.execute(shared, d, mode="fast")[0, 0] == 448.0 * 448.0 + 0.5
    assert set(arithmetic.MODES) == {"truncate", "exact", "separate_add", "fast"}
