"""Tensor maps and tensor copies against a slow element-by-element copy written from the rules."""

from __future__ import annotations

import itertools
import struct

import numpy as np
import pytest

from padless.emulator.units import tensor_map, tma
from padless.emulator.units.swizzle import swizzle

U8, U16, F32, BF16, B4, B4_P64 = 0, 1, 7, 9, 13, 14
BASE = 0x7F00_0000_1000


class Memory:
    """Global memory of one allocation: anything outside it is an error."""

    def __init__(self, size: int, seed: int) -> None:
        self.bytes = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)

    def gather(self, addresses: np.ndarray, granule: int) -> np.ndarray:
        offsets = addresses.astype(np.int64) - BASE
        assert (offsets >= 0).all()
        assert (offsets + granule <= len(self.bytes)).all()
        return self.bytes[offsets[:, None] + np.arange(granule)]

    def scatter(self, addresses: np.ndarray, data: np.ndarray) -> None:
        offsets = addresses.astype(np.int64) - BASE
        assert (offsets >= 0).all()
        self.bytes[offsets[:, None] + np.arange(data.shape[1])] = data


def slow_swizzle(address: int, mode: int) -> int:
    """Chunk index XOR line index, as in the ISA's pictures; mode 4 moves 32-byte chunks."""
    line, chunk, rest = address // 128, address // 16 % 8, address % 16
    flip = [0, line % 2, line % 4, line % 8, line % 4 * 2][mode]
    return line * 128 + (chunk ^ flip) * 16 + rest


def slow_copy(memory: Memory, size: int, dims, strides, box, steps, coordinates, start, mode, shared, *, store):  # type: ignore[no-untyped-def]
    """One element at a time; returns the bytes moved into shared memory or out of it."""
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    for linear, index in enumerate(itertools.product(*(range(c) for c in reversed(counts)))):
        index = index[::-1]
        at = [c + i * s for c, i, s in zip(coordinates, index, [1, *steps[1:]], strict=True)]
        inside = all(0 <= x < d for x, d in zip(at, dims, strict=True))
        address = sum(x * s for x, s in zip(at, [size, *strides], strict=True)) % 2**64
        for byte in range(size):
            place = slow_swizzle(start + linear * size + byte, mode)
            if not store:
                shared[place] = memory.bytes[address + byte] if inside else 0
            elif inside:
                memory.bytes[address + byte] = shared[place]


CASES = [
    # type, bytes, dims, strides, box, steps, swizzle, coordinates
    (U8, 1, (200, 37), (208,), (128, 16), (1, 1), 3, (128, 30)),
    (U8, 1, (200, 37), (208,), (32, 16), (1, 1), 1, (176, -5)),
    (BF16, 2, (100, 37), (208,), (32, 8), (1, 1), 2, (80, 33)),
    (BF16, 2, (100, 37), (208,), (64, 8), (1, 1), 4, (40, 33)),
    (F32, 4, (50, 7), (208,), (4, 5), (1, 1), 0, (48, 4)),
    (F32, 4, (132,), (), (132,), (1,), 0, (128,)),
    (BF16, 2, (24, 9, 5), (64, 640), (16, 4, 3), (1, 1, 1), 0, (16, 7, 3)),
    (BF16, 2, (24, 9, 5), (64, 640), (16, 7, 3), (1, 3, 2), 1, (8, 2, 1)),
    (U16, 2, (16, 3, 4, 2, 3), (32, 96, 400, 800), (8, 2, 3, 2, 2), (1, 1, 1, 1, 1), 0, (8, 1, 2, 1, 2)),
    (U8, 1, (64, 20), (64,), (64, 4), (1, 1), 2, (-16, 18)),
]


# Stores have no negative coordinates.
DIRECTED = [(case, store) for case in CASES for store in (False, True) if not (store and min(case[-1]) < 0)]


@pytest.mark.parametrize(("case", "store"), DIRECTED)
@pytest.mark.parametrize("offset", [0, 128])
def test_against_the_slow_copy(case: tuple, store: bool, offset: int) -> None:  # type: ignore[type-arg]
    kind, size, dims, strides, box, steps, mode, coordinates = case
    raw = tensor_map.encode_tiled(kind, BASE, dims, strides, box, steps, swizzle=mode)
    assert len(raw) == 128
    m = tensor_map.decode(raw[:64])
    assert (m.dims, m.strides, m.box, m.element_strides, m.swizzle_code) == (dims, strides, box, steps, mode)
    extent = 16384
    ours, theirs, slow = Memory(extent, 1), Memory(extent, 1), Memory(extent, 1)
    shared = np.random.default_rng(2).integers(0, 256, 32768).astype(np.uint8)
    wanted = shared.copy()
    start = 2048 + offset
    plan = tma.plan(m, coordinates, start, store=store)
    assert plan.problems == ()
    slow_copy(slow, size, dims, strides, box, steps, coordinates, start, mode, wanted, store=store)
    if store:
        tma.store(plan, shared, ours.scatter)
        np.testing.assert_array_equal(ours.bytes, slow.bytes)
        assert (ours.bytes != theirs.bytes).any()
    else:
        tma.load(plan, ours.gather, shared)
        np.testing.assert_array_equal(shared, wanted)
    counts = [box[0]] + [-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True)]
    assert plan.transaction_bytes == int(np.prod(counts)) * size
    assert len(np.unique(plan.shared_address)) * plan.granule == plan.transaction_bytes
    touched = plan.granule * len(np.unique(plan.global_address[plan.in_bounds]))
    assert touched == int(plan.in_bounds.sum()) * plan.granule


def test_swizzle_literals() -> None:
    assert swizzle(np.array([0x1230]), "128B")[0] == 0x1270
    assert swizzle(0x1F8, "128B") == 0x1F8 ^ 0x30
    assert swizzle(0x1F8, "64B") == 0x1F8 ^ 0x30
    assert swizzle(0x380, "64B") == 0x3B0
    assert swizzle(0x380, "32B") == 0x390
    assert swizzle(0x380, "128B") == 0x3F0
    assert swizzle(0x380, "128B_32B") == 0x3E0
    assert swizzle(0x380, "none") == 0x380
    with pytest.raises(ValueError, match="mode"):
        swizzle(0, "256B")


def test_ragged_descriptor_clips_at_the_group() -> None:
    """Four dimensions whose addresses wrap modulo 2^64 (the ragged trick): rows 7..11 of 12, and none after."""
    b, columns, pitch, end, left = 1 << 30, 100, 208, 12, 5
    raw = tensor_map.encode_tiled(
        BF16, BASE, (columns, b, 0x7FFF0000, 0x7FFF0000), (pitch, pitch, 2**35 - pitch), (64, 32, 1, 1), swizzle=3
    )
    m = tensor_map.decode(raw)
    assert m.strides == (pitch, pitch, 2**35 - pitch)
    memory, before = Memory(40 * pitch, 3), Memory(40 * pitch, 3)
    shared = np.random.default_rng(4).integers(0, 256, 8192).astype(np.uint8)
    plan = tma.plan(m, (64, b - left, end, b), 1024, store=True)
    assert plan.problems == ()
    tma.store(plan, shared, memory.scatter)
    for row in range(40):
        inside = slice(row * pitch + 128, row * pitch + 200)
        if 7 <= row < 12:
            line = 1024 + (row - 7) * 128
            want = [shared[slow_swizzle(line + x, 3)] for x in range(72)]
            np.testing.assert_array_equal(memory.bytes[inside], want)
            memory.bytes[inside] = before.bytes[inside]
    np.testing.assert_array_equal(memory.bytes, before.bytes)
    loaded = np.full(8192, 0xEE, np.uint8)
    tma.load(tma.plan(m, (64, b - left, end, b), 1024), before.gather, loaded)
    assert loaded[slow_swizzle(1024 + 4 * 128, 3)] == before.bytes[11 * pitch + 128]
    assert not loaded[1024 + 5 * 128 : 1024 + 32 * 128].any()


def test_padded_four_bit_elements() -> None:
    """16 nibbles, 8 bytes, take 16 bytes of shared memory and count 8 on the barrier; the padding is a NaN."""
    raw = tensor_map.encode_tiled(B4_P64, BASE, (256, 10), (128,), (128, 4), swizzle=3)
    memory = Memory(1280, 5)
    shared = np.full(4096, 0xEE, np.uint8)
    plan = tma.plan(tensor_map.decode(raw), (128, 8), 1024)
    assert plan.transaction_bytes == 4 * 64
    tma.load(plan, memory.gather, shared)
    for row, x in itertools.product(range(4), range(64)):
        place = slow_swizzle(1024 + row * 128 + x // 8 * 16 + x % 8, 3)
        assert shared[place] == (memory.bytes[(8 + row) * 128 + 64 + x] if row < 2 else 0)
        assert shared[place ^ 8] == 0x7F
    assert "multiple of 128" in " ".join(tma.plan(tensor_map.decode(raw), (64, 8), 1024).problems)


def test_packed_four_bit_elements() -> None:
    raw = tensor_map.encode_tiled(B4, BASE, (70, 10), (48,), (64, 4))
    memory, shared = Memory(480, 6), np.full(4096, 0xEE, np.uint8)
    plan = tma.plan(tensor_map.decode(raw), (32, 8), 1024)
    assert plan.transaction_bytes == 4 * 32
    tma.load(plan, memory.gather, shared)
    for row, x in itertools.product(range(4), range(32)):
        want = memory.bytes[(8 + row) * 48 + 16 + x] if row < 2 and 16 + x < 35 else 0
        assert shared[1024 + row * 32 + x] == want


@pytest.mark.parametrize("mode", ["gather4", "scatter4"])
def test_four_rows(mode: str) -> None:
    raw = tensor_map.encode_tiled(BF16, BASE, (100, 37), (208,), (64, 1), swizzle=3)
    memory, before = Memory(37 * 208, 7), Memory(37 * 208, 7)
    shared = np.random.default_rng(8).integers(0, 256, 4096).astype(np.uint8)
    rows = (30, 2, 40, 2 if mode == "gather4" else 5)
    plan = tma.plan(tensor_map.decode(raw), (64, *rows), 1024, store=mode == "scatter4", mode=mode)
    assert (plan.problems, plan.transaction_bytes) == ((), 512)
    original = shared.copy()
    if mode == "gather4":
        tma.load(plan, memory.gather, shared)
    else:
        tma.store(plan, shared, memory.scatter)
    for i, row in enumerate(rows):
        for x in range(128):
            place = slow_swizzle(1024 + 128 * i + x, 3)
            inside = row < 37 and x < 72
            if mode == "gather4":
                assert shared[place] == (before.bytes[row * 208 + 128 + x] if inside else 0)
            elif inside:
                assert memory.bytes[row * 208 + 128 + x] == original[place]
    tall = tensor_map.decode(tensor_map.encode_tiled(BF16, BASE, (100, 37), (208,), (64, 2)))
    assert "box[1]" in tma.plan(tall, (64, *rows), 1024, mode="gather4").problems[0]


@pytest.mark.parametrize(
    ("kind", "size", "start", "legal"),
    [(F32, 4, 1, False), (F32, 4, 3, False), (F32, 4, 4, True), (BF16, 2, 3, False), (BF16, 2, 8, True),
     (U8, 1, 5, False), (U8, 1, 16, True)],
)  # fmt: skip
def test_innermost_start_of_a_load(kind: int, size: int, start: int, legal: bool) -> None:
    """Measured on an H200: a load that starts off a 16-byte boundary is an illegal instruction."""
    m = tensor_map.decode(tensor_map.encode_tiled(kind, BASE, (64, 16), (256,), (16, 4)))
    problems = tma.plan(m, (start, 3), 1024).problems
    assert bool(problems) != legal
    assert legal or "illegal instruction" in problems[0]


def test_other_problems() -> None:
    m = tensor_map.decode(tensor_map.encode_tiled(F32, BASE, (64, 16), (256,), (16, 4)))
    assert "multiple of 128" in tma.plan(m, (0, 0), 1040).problems[0]
    assert "negative" in tma.plan(m, (0, -1), 1024, store=True).problems[0]
    assert tma.plan(m, (0, -1), 1024).problems == ()
    assert tma.plan(m, (0, 0xFFFFFFFF), 1024).in_bounds.sum() == tma.plan(m, (0, -1), 1024).in_bounds.sum() == 12
    with pytest.raises(ValueError, match="rank 2"):
        tma.plan(m, (0,), 1024)


def test_nan_fill() -> None:
    m = tensor_map.decode(tensor_map.encode_tiled(BF16, BASE, (64, 16), (256,), (16, 4), oob_fill=1))
    shared = np.zeros(4096, np.uint8)
    tma.load(tma.plan(m, (48, 14), 1024), Memory(4096, 9).gather, shared)
    assert np.isnan((shared[1024:1152].view(np.uint16).astype(np.uint32) << 16).view(np.float32)[32:]).all()


GOOD = {"data_type": BF16, "address": BASE, "dims": (100, 37), "strides": (208,), "box": (64, 8), "swizzle": 3}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"address": BASE + 8}, "address"),
        ({"data_type": 16}, "data_type"),
        ({"data_type": B4_P64, "address": BASE + 16}, "32 bytes"),
        ({"data_type": B4_P64, "dims": (100, 37), "box": (128, 8), "strides": (224,)}, "multiple of 128"),
        ({"data_type": B4, "dims": (101, 37), "box": (64, 8)}, "even"),
        ({"dims": (), "strides": (), "box": ()}, "rank"),
        ({"dims": (8,) * 6, "strides": (208,) * 5, "box": (8,) * 6}, "rank"),
        ({"dims": (0, 37)}, "dims[0]"),
        ({"dims": (100, 2**32 + 1)}, "dims[1]"),
        ({"strides": (200,)}, "strides[0]"),
        ({"strides": (2**40,)}, "strides[0]"),
        ({"strides": (208, 208)}, "strides"),
        ({"box": (64, 257)}, "box[1]"),
        ({"box": (64, 0)}, "box[1]"),
        ({"box": (72, 8)}, "box[0]"),
        ({"box": (60, 8)}, "multiple of 16"),
        ({"box": (64, 8), "swizzle": 2}, "swizzle 64B"),
        ({"element_strides": (1, 9)}, "element_strides[1]"),
        ({"element_strides": (0, 1)}, "element_strides[0]"),
        ({"swizzle": 7}, "swizzle"),
        ({"swizzle": 5}, "does not model"),
        ({"interleave": 1}, "does not model"),
        ({"oob_fill": 1, "data_type": U16}, "floating"),
        ({"object_address": 0x1010}, "object_address"),
    ],
)
def test_what_the_driver_refuses(change: dict, words: str) -> None:  # type: ignore[type-arg]
    tensor_map.encode_tiled(**GOOD)
    with pytest.raises(ValueError) as caught:
        tensor_map.encode_tiled(**{**GOOD, **change})
    assert words in str(caught.value)


def test_extremes_survive_the_encoding() -> None:
    arguments = ((2**32, 1, 2**32, 7, 2**32 - 1), (2**40 - 16, 16, 2**39, 0), (256, 1, 256, 3, 255))
    raw = tensor_map.encode_tiled(U8, 2**64 - 16, *arguments, (1, 8, 2, 3, 5), l2_promotion=3)
    m = tensor_map.decode(raw)
    assert (m.dims, m.strides, m.box, m.element_strides) == (*arguments, (1, 8, 2, 3, 5))
    assert (m.address, m.l2_promotion, raw[64:]) == (2**64 - 16, 3, bytes(64))
    with pytest.raises(ValueError, match="tensor map"):
        tensor_map.decode(struct.pack("<16Q", *range(16)))


def test_replacement_on_the_device() -> None:
    raw = tensor_map.encode_tiled(**GOOD)
    for field, value, ordinal in (
        ("global_address", BASE + 0x1000, 0), ("global_dim", 50, 0), ("global_dim", 0, 1), ("global_stride", 112, 0),
        ("box_dim", 32, 0), ("element_stride", 2, 1), ("elemtype", 10, 0), ("swizzle_mode", 2, 0), ("fill_mode", 1, 0),
    ):  # fmt: skip
        raw = tensor_map.replace(raw, field, value, ordinal)
    m = tensor_map.decode(raw)
    assert (m.address, m.dims, m.strides, m.box, m.element_strides) == (BASE + 0x1000, (50, 0), (112,), (32, 8), (1, 2))
    assert (m.element, m.swizzle, m.nan_fill) == ("bf16", "64B", True)
    # An empty group: every element is out of bounds, and using the map is reported.
    plan = tma.plan(m, (0, 0), 1024)
    assert not plan.in_bounds.any()
    assert "dims[1]" in plan.problems[0]
    assert tensor_map.decode(tensor_map.replace(raw, "rank", 0)).dims == (50,)
    assert tensor_map.decode(tensor_map.replace(raw, "rank", 2)).box == (32, 8, 1)
    with pytest.raises(ValueError, match="ordinal"):
        tensor_map.replace(raw, "global_stride", 112, 4)
    with pytest.raises(ValueError, match="ordinal"):
        tensor_map.replace(raw, "box_dim", 4, 5)
    for ordinal in (2, 3, 4):  # dimensions that this map does not have: written in vain
        assert tensor_map.replace(raw, "global_dim", 7, ordinal) == raw
    with pytest.raises(ValueError, match="multiple of 16"):
        tensor_map.replace(raw, "global_stride", 120, 0)
    with pytest.raises(ValueError, match="interleave_layout"):
        tensor_map.replace(raw, "interleave_layout", 1)


@pytest.mark.parametrize(
    ("element", "kind", "operation", "old", "new", "want"),
    [
        ("f32", np.float32, "add", 1.5, 2.25, 3.75),
        ("f16", np.float16, "add", 2048.0, 1.0, 2048.0),
        ("f16", np.float16, "add", 2048.0, 3.0, 2052.0),
        ("u32", np.uint32, "add", 2**32 - 1, 2, 1),
        ("s32", np.int32, "min", -5, 3, -5),
        ("u32", np.uint32, "inc", 7, 7, 0),
        ("u32", np.uint32, "dec", 0, 7, 7),
        ("u32", np.uint32, "xor", 12, 10, 6),
        ("b32", np.uint32, "and", 12, 10, 8),
        ("u64", np.uint64, "max", 3, 9, 9),
    ],
)
def test_reductions(element: str, kind: type, operation: str, old: float, new: float, want: float) -> None:
    a, b = np.array([old] * 4, kind), np.array([new] * 4, kind)
    out = tma.reduce_values(a.view(np.uint8).reshape(1, -1), b.view(np.uint8).reshape(1, -1), element, operation)
    assert (out.reshape(-1).view(kind) == kind(want)).all()
    assert out.shape == (1, a.nbytes)
    with pytest.raises(ValueError, match="operation"):
        tma.reduce_values(a.view(np.uint8), b.view(np.uint8), element, "mul")
