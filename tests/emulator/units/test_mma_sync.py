"""mma.sync fragments by the ISA's formulas, written out per lane, and the ldmatrix and stmatrix maps."""

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator.units import mma_sync, number_formats
from support.scalar_dot import same_bits, scalar_dot

BYTES = {"e4m3": 1, "e5m2": 1, "bf16": 2, "f16": 2, "tf32": 4, "s8": 1, "u8": 1}


def a_fragment(octets: np.ndarray) -> np.ndarray:
    """Bytes (16, w) to registers, from the ISA's per-type row and column formulas for the 16-bit case."""
    width = octets.shape[1]
    registers = np.zeros((32, width // 8), np.uint32)
    for lane in range(32):
        for i in range(width // 8):
            row = lane // 4 + (8 if i in (1, 3) else 0)
            start = lane % 4 * 4 + (16 if i >= 2 else 0)
            for byte in range(4):
                registers[lane, i] |= np.uint32(int(octets[row, start + byte]) << 8 * byte)
    return registers


def b_fragment(octets: np.ndarray) -> np.ndarray:
    """Bytes (8, w) of B's columns to registers."""
    width = octets.shape[1]
    registers = np.zeros((32, width // 16), np.uint32)
    for lane in range(32):
        for i in range(width // 16):
            start = lane % 4 * 4 + 16 * i
            registers[lane, i] = octets[lane // 4, start : start + 4].copy().view(np.uint32)[0]
    return registers


@pytest.mark.parametrize(
    ("d_type", "a_type", "b_type", "k"),
    [
        ("f32", "bf16", "bf16", 16), ("f32", "bf16", "bf16", 8), ("f32", "f16", "f16", 16), ("f16", "f16", "f16", 16),
        ("f32", "tf32", "tf32", 8), ("f32", "tf32", "tf32", 4), ("f32", "e4m3", "e5m2", 32), ("f32", "e5m2", "e4m3", 16),
        ("s32", "s8", "u8", 32), ("s32", "u8", "s8", 16),
    ],
)  # fmt: skip
def test_integer_data_is_exact(d_type: str, a_type: str, b_type: str, k: int) -> None:
    rng = np.random.default_rng(k)
    low = lambda t: 0 if t == "u8" else -8  # noqa: E731
    a, b = rng.integers(low(a_type), 9, (16, k)), rng.integers(low(b_type), 9, (8, k))
    c = rng.integers(-60, 60, (16, 8))
    octets = []
    for values, name in ((a, a_type), (b, b_type)):
        codes = values.astype(np.int8) if name in ("s8", "u8") else number_formats.encode(values, name)
        octets.append(codes.view(np.uint8).reshape(len(values), -1))
    c_bits = np.zeros((32, 2 if d_type == "f16" else 4), np.uint32)
    kind = {"f32": np.float32, "s32": np.int32, "f16": np.float16}[d_type]
    for lane in range(32):
        for i in range(4):
            value = c[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
            raw = int(np.array([value], kind).view(np.uint16 if d_type == "f16" else np.uint32)[0])
            if d_type == "f16":
                c_bits[lane, i // 2] |= np.uint32(raw << 16 * (i % 2))
            else:
                c_bits[lane, i] = raw
    d = mma_sync.mma(k, d_type, a_type, b_type, a_fragment(octets[0]), b_fragment(octets[1]), c_bits)
    want = a @ b.T + c
    for lane in range(32):
        for i in range(4):
            expected = want[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2]
            if d_type == "f16":
                got = d[lane : lane + 1, i // 2].copy().view(np.float16)[i % 2]
            else:
                got = d[lane : lane + 1, i].copy().view(kind)[0]
            assert got == expected


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_fp8_adds_the_accumulator_as_its_chip_does(target: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 0x7F, (16, 32)), rng.integers(0, 0x7F, (8, 32))
    c = (rng.standard_normal((16, 8)) * 2.0 ** rng.integers(0, 24, (16, 8))).astype(np.float32)
    c_bits = np.array(
        [[c.view(np.uint32)[t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2] for i in range(4)] for t in range(32)]
    )
    d = mma_sync.mma(
        32, "f32", "e4m3", "e4m3", a_fragment(a.astype(np.uint8)), b_fragment(b.astype(np.uint8)), c_bits,
        target=target,
    )  # fmt: skip
    model = np.zeros((32, 4), np.float32)
    for t in range(32):
        for i in range(4):
            row, column = t // 4 + 8 * (i // 2), 2 * (t % 4) + i % 2
            x, y = a[row].tolist(), b[column].tolist()
            if target == "sm_90a":
                model[t, i] = scalar_dot(x, y, int(c_bits[t, i]), "e4m3", "e4m3", 25, 23)
            else:
                model[t, i] = np.float32(scalar_dot(x, y, None, "e4m3", "e4m3", 25, 23)) + c[row, column]
    same_bits(d.view(np.float32), model)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix_of_halves(count: int, transpose: bool) -> None:
    """Rows at scattered addresses; lane t holds row t / 4, columns 2 (t % 4) and the next, of each 8 x 8 matrix."""
    rng = np.random.default_rng(count)
    shared = rng.integers(0, 256, 4096).astype(np.uint8)
    addresses = rng.permutation(256)[: 8 * count] * 16
    rows = shared[addresses[:, None] + np.arange(16)]
    got = mma_sync.ldmatrix(rows, "m8n8", count, transpose)
    for lane in range(32):
        for i in range(count):
            tile = np.array([shared[at : at + 16].copy().view(np.uint16) for at in addresses[8 * i : 8 * i + 8]])
            tile = tile.T if transpose else tile
            pair = tile[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2].astype(np.uint32)
            assert got[lane, i] == pair[0] | pair[1] << 16
    np.testing.assert_array_equal(mma_sync.stmatrix(got, "m8n8", transpose), rows)


def test_byte_matrices_cover_their_rows() -> None:
    rows, columns = mma_sync.matrix_map("m16n8", 2, True)
    # byte 3 of lane 13's second register: row 2 * 1 + 1 of matrix 1, byte 3 + 8
    assert (rows[13, 1, 3], columns[13, 1, 3]) == (8 + 3, 11)
    assert len({(int(r), int(c)) for r, c in zip(rows.flat, columns.flat, strict=True)}) == 256
    with pytest.raises(ValueError, match="not modelled"):
        mma_sync.matrix_map("m16n16", 1, False)


def test_wrong_forms_are_refused() -> None:
    one = np.zeros((32, 4), np.uint32)
    with pytest.raises(ValueError, match="m16n8k64"):
        mma_sync.mma(64, "f32", "e4m3", "e4m3", one, one[:, :2], one)
    with pytest.raises(ValueError, match="b: shape"):
        mma_sync.mma(32, "f32", "e4m3", "e4m3", one, one, one)
