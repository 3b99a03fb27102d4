"""tcgen05.cp, ld and st: every word's place against tables written out here."""

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator.units import tensor_memory
from padless.emulator.units.tcgen05 import Mma
from padless.emulator.units.tensor_memory import Copy

NO_SWIZZLE = 1 << 46 | 8 << 32  # SBO 128: 8 rows of 16 bytes follow each other


def numbered_tmem() -> np.ndarray:
    """Word at (lane, column) is 1000 lane + column, so that no two agree."""
    return (1000 * np.arange(128)[:, None] + np.arange(512)[None, :]).astype(np.uint32)


def test_scale_factor_copy() -> None:
    """One 512-byte atom (row r's four scales at 16 (r % 32) + 4 (r // 32)) becomes four columns, in four copies."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 256, 8192).astype(np.uint8)
    tmem = numbered_tmem()
    unit = Copy("32x128b", "warpx4", NO_SWIZZLE | 0x1000 >> 4, 100)
    assert unit.problems() == ()
    assert unit.shared_ranges() == {"source": [(0x1000, 0x1200)]}
    assert unit.tmem_writes() == [(0, 128, 100, 104)]
    unit.execute(shared, tmem)
    for r in range(128):
        for kb in range(4):
            want = shared[0x1000 + r % 32 * 16 + r // 32 * 4 + kb]
            for w in range(4):
                assert tmem[r % 32 + 32 * w, 100 + r // 32] >> 8 * kb & 0xFF == want
    untouched = np.ones((128, 512), bool)
    untouched[:, 100:104] = False
    np.testing.assert_array_equal(tmem[untouched], numbered_tmem()[untouched])


@pytest.mark.parametrize(
    ("shape", "multicast", "row_of_lane", "width"),
    [
        ("64x128b", "warpx2::02_13", lambda x: x % 64, 16),
        ("64x128b", "warpx2::01_23", lambda x: x % 32 + 32 * (x // 64), 16),
        ("128x128b", "", lambda x: x, 16),
        ("128x256b", "", lambda x: x, 32),
    ],
)
@pytest.mark.parametrize("pitch", [128, 384])
def test_other_copies(shape: str, multicast: str, row_of_lane, width: int, pitch: int) -> None:  # type: ignore[no-untyped-def]
    """Groups of 8 rows ``pitch`` apart, the second 16 bytes of a row one LBO further."""
    shared = np.random.default_rng(2).integers(0, 256, 32768).astype(np.uint8)
    tmem = numbered_tmem()
    leading = 8192
    unit = Copy(shape, multicast, 1 << 46 | pitch >> 4 << 32 | leading >> 4 << 16 | 0x800 >> 4, 40)
    assert unit.problems() == ()
    unit.execute(shared, tmem)
    for lane in range(128):
        row = row_of_lane(lane)
        at = 0x800 + row % 8 * 16 + row // 8 * pitch
        want = np.concatenate([shared[at + leading * half : at + leading * half + 16] for half in range(width // 16)])
        np.testing.assert_array_equal(tmem[lane, 40 : 40 + width // 4], want.view(np.uint32))
    assert (tmem[:, 40 + width // 4] == numbered_tmem()[:, 40 + width // 4]).all()


def test_unmodelled_and_bad_copies() -> None:
    with pytest.raises(ValueError, match="4x256b"):
        Copy("4x256b", "", NO_SWIZZLE, 0)
    with pytest.raises(ValueError, match="32x128b"):
        Copy("32x128b", "", NO_SWIZZLE, 0)
    assert "lane 5" in Copy("32x128b", "warpx4", NO_SWIZZLE, 5 << 16).problems()[0]
    assert "leave the 128 x 512" in Copy("32x128b", "warpx4", NO_SWIZZLE, 510).problems()[0]
    assert "46-48" in Copy("32x128b", "warpx4", 8 << 32, 0).problems()[0]


def expected(shape: str, t: int, i: int) -> tuple[int, int]:
    """(lane, column) of thread t's register i, from the instruction's tables."""
    return {
        "32x32b": (t, i),
        "16x64b": (t // 4 + 8 * (t % 2), (t // 2) % 2 + 2 * i),
        "16x128b": (t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)),
        "16x256b": (t // 4 + 8 * ((i // 2) % 2), 2 * (t % 4) + i % 2 + 8 * (i // 4)),
        "16x32bx2": (t % 16, i if t < 16 else i + 24),
    }[shape]


@pytest.mark.parametrize(
    ("shape", "repeat", "registers"),
    [("32x32b", 1, 1), ("32x32b", 32, 32), ("16x64b", 4, 4), ("16x128b", 2, 4), ("16x256b", 1, 4), ("16x256b", 8, 32),
     ("16x32bx2", 8, 8)],
)  # fmt: skip
@pytest.mark.parametrize("quarter", [0, 3])
@pytest.mark.parametrize("upper", [0, 16])
def test_loads_and_stores(shape: str, repeat: int, registers: int, quarter: int, upper: int) -> None:
    if shape == "32x32b":
        upper = 0
    for named in (0, 32 * quarter):  # the address may name the quarter or leave it out
        address = (named + upper) << 16 | 50
        assert tensor_memory.access_problems(shape, address, quarter) == ()
        where = tensor_memory.register_map(shape, repeat, address, quarter, 24)
        got = tensor_memory.load(numbered_tmem(), where)
        assert got.shape == (32, registers)
        for t in range(32):
            for i in range(registers):
                lane, column = expected(shape, t, i)
                assert got[t, i] == 1000 * (32 * quarter + upper + lane) + 50 + column
        tmem = np.zeros((128, 512), np.uint32)
        tensor_memory.store(tmem, where, got)
        written = tmem != 0
        assert written.sum() == len({(int(x), int(y)) for x, y in zip(where[0].flat, where[1].flat, strict=True)})
        np.testing.assert_array_equal(tmem[written], numbered_tmem()[written])


@pytest.mark.parametrize(("shape", "repeat"), [("32x32b", 8), ("16x256b", 2), ("16x128b", 1), ("16x64b", 2)])
def test_sixteen_bit_packing(shape: str, repeat: int) -> None:
    """A register stands for the low halves of columns 2c and 2c + 1, where c is its column without packing."""
    tmem = numbered_tmem()
    where = tensor_memory.register_map(shape, repeat, 30, 1, packed=True)
    got = tensor_memory.load(tmem, where, packed=True)
    for t in range(32):
        for i in range(got.shape[1]):
            lane, column = expected(shape, t, i)
            low, high = (int(tmem[32 + lane, 30 + 2 * column + half]) & 0xFFFF for half in (0, 1))
            assert got[t, i] == low | high << 16
    back = np.full((128, 512), 0xEEEEEEEE, np.uint32)
    tensor_memory.store(back, where, got, packed=True)
    written = back != 0xEEEEEEEE
    np.testing.assert_array_equal(back[written], tmem[written] & 0xFFFF)
    assert written.sum() == 2 * got.size


def test_access_rules() -> None:
    problems = tensor_memory.access_problems
    assert "quarter 2" in problems("32x32b", 64 << 16, 1)[0]
    assert "begin at lane 16" in problems("32x32b", 16 << 16, 0)[0]
    assert "begin at lane 8" in problems("16x256b", 8 << 16, 0)[0]
    for bad in (("8x8b", 1), ("32x32b", 3), ("16x256b", 64)):
        with pytest.raises(ValueError):
            tensor_memory.register_map(*bad, 0, 0)


def test_copy_then_multiply_reads_the_scales_of_its_rows() -> None:
    """The atom of 128 rows through cp and mma: row r of D is scaled by scale r alone."""
    rng = np.random.default_rng(3)
    shared = np.zeros(65536, np.uint8)
    tmem = numbered_tmem()
    scales = rng.integers(120, 134, (128, 4))
    for r in range(128):
        for kb in range(4):
            shared[r % 32 * 16 + r // 32 * 4 + kb] = scales[r, kb]
    shared[512:1024] = 127
    for r in range(128):
        shared[2048 + r % 8 * 16 + r // 8 * 256] = 0x38  # A: element 0 of each row is 1
    for n in range(8):
        shared[40960 + n * 16] = 0x38
    Copy("32x128b", "warpx4", NO_SWIZZLE, 256).execute(shared, tmem)
    Copy("32x128b", "warpx4", NO_SWIZZLE | 512 >> 4, 260).execute(shared, tmem)
    a = 1 << 46 | 16 << 32 | 8 << 16 | 2048 >> 4  # rows of 16 bytes, groups of 8 rows 256 apart, K halves 128 apart
    b = 1 << 46 | 16 << 32 | 8 << 16 | 40960 >> 4
    for step in range(4):
        idesc = 0x08000000 | 1 << 17 | 1 << 23 | step << 29 | step << 4
        unit = Mma("mxf8f6f4", 1, idesc, 0, b, a, enable_d=False, sfa=256, sfb=260, block=32)
        assert unit.problems() == ()
        assert unit.execute([shared], [tmem]) == ()
        want = np.repeat(2.0 ** (scales[:, step] - 127.0)[:, None], 8, axis=1)
        np.testing.assert_array_equal(tmem[:, :8].view(np.float32), want)


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize(("shape", "width"), [("128x128b", 16), ("128x256b", 32)])
def test_copies_that_widen_small_numbers(source: str, bits: int, shape: str, width: int) -> None:
    """Number i of a row is bits i * b and up of the 16 bytes that hold it, and lies in the middle of a byte then; the
    padding behind goes nowhere."""
    shared = np.random.default_rng(5).integers(0, 256, 16384).astype(np.uint8)
    tmem = numbered_tmem()
    Copy(shape, "", 1 << 46 | 128 >> 4 << 32 | 4096 >> 4 << 16 | 0x800 >> 4, 24, source).execute(shared, tmem)
    for row in (0, 1, 37, 127):
        got = tmem[row, 24 : 24 + width // 4].copy().view(np.uint8)
        for i in range(width):
            at = 0x800 + row % 8 * 16 + row // 8 * 128 + i // 16 * 4096
            packed = int.from_bytes(shared[at : at + 16].tobytes(), "little")
            assert got[i] == (packed >> i % 16 * bits & (1 << bits) - 1) << (4 - bits // 2)
    assert (tmem[:, 24 + width // 4 :] == numbered_tmem()[:, 24 + width // 4 :]).all()
    with pytest.raises(ValueError, match="b5x16"):
        Copy(shape, "", 1 << 46, 0, "b5x16")
