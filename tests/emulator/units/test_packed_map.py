"""Tensor maps as NVIDIA's host code packs them: recorded bytes give the fields that the arrays have, and no others."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from padless.emulator import Emulator
from padless.emulator.units import packed_map, tensor_map, tma

ADDRESS = 0x7F12_3456_7890
SWIZZLES = {name: code for code, name in enumerate(tensor_map.SWIZZLES)}
# Words 1 to 7 that the host code of cuDNN's grouped GEMM (frontend 1.32, CuTe DSL 4.8.1) wrote, and what it described:
# an element, dims, strides in bytes, box, swizzle.
RECORDED = {
    "A, e4m3 (512, 288)": (
        (0x1200246012, 0, 0, 0x1FF0000011F, 0, 0x7F00000000000000, 0x7F),
        ("u8", (288, 512), (288,), (128, 128), "128B"),
    ),
    "B, e4m3 (3, 384, 288), 256 rows a copy": (
        (0x1200246022, 0x1B00, 0, 0x17F0000011F, 2, 0x7F00000000000000, 0xFF),
        ("u8", (288, 384, 3), (288, 110592), (128, 256, 1), "128B"),
    ),
    "scales of A in tiles of 512 bytes, 4 by 3 of them": (
        (0x60000400A2, 0x20, 0, 0x3000000FF, 2, 0xFF00000000000000, 0),
        ("u16", (256, 4, 3), (1536, 512), (256, 1, 1), "none"),
    ),
    "scales of B, three groups of 3 by 3": (
        (0x6000040232, 0x12000000020, 0, 0x20000003F, 0x200000002, 0x3F00000000000000, 1),
        ("u64", (64, 3, 3, 3), (1536, 512, 4608), (64, 2, 1, 1), "none"),
    ),
    "B, e2m1 (3, 384, 288)": (
        (0x9002465A2, 0xD80, 0, 0x17F0000011F, 2, 0xFF00000000000000, 0x7F),
        ("b4x16", (288, 384, 3), (144, 55296), (256, 128, 1), "128B"),
    ),
    "D, bf16 (512, 384)": (
        (0x3000244512, 0, 0, 0x1FF0000017F, 0, 0x1F00000000000000, 0x7F),
        ("bf16", (384, 512), (768,), (32, 128), "64B"),
    ),
    "D, f16": (
        (0x3000244312, 0, 0, 0x1FF0000017F, 0, 0x1F00000000000000, 0x7F),
        ("f16", (384, 512), (768,), (32, 128), "64B"),
    ),
    "D, f32": (
        (0x6000246392, 0, 0, 0x1FF0000017F, 0, 0x1F00000000000000, 0x7F),
        ("f32", (384, 512), (1536,), (32, 128), "128B"),
    ),
    "D, e4m3": (
        (0x1800242012, 0, 0, 0x1FF0000017F, 0, 0x1F00000000000000, 0x7F),
        ("u8", (384, 512), (384,), (32, 128), "32B"),
    ),
}


# The same, of the CuTe DSL's dense GEMM in its default types: TF32 is float32 with bit 16.
RECORDED_TF32 = (0x10000563A2, 0x800, 0, 0x7F0000003F, 0, 0x1F00000000000000, 0x7F)


def raw_of(words: tuple[int, ...], rest: bytes = bytes(64)) -> bytes:
    return struct.pack("<8Q", ADDRESS, *words) + rest


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_bytes_give_the_fields_of_the_array(name: str) -> None:
    words, (element, dims, strides, box, swizzle) = RECORDED[name]
    m = packed_map.decode(raw_of(words, b"\xcd" * 64))  # the host code leaves the second half as the stack was
    assert (m.address, m.element, m.dims, m.strides, m.box, m.swizzle) == (
        ADDRESS,
        element,
        dims,
        strides,
        box,
        swizzle,
    )
    assert m.element_strides == (1,) * len(dims)
    data_type = [known for known, _ in tensor_map.DATA_TYPES].index(element)
    ours = tensor_map.encode_tiled(
        data_type, ADDRESS, dims, strides, box, swizzle=SWIZZLES[swizzle], l2_promotion=m.l2_promotion
    )
    assert tensor_map.decode(ours) == m
    assert packed_map.decode(ours) == m
    assert tensor_map.problems(m) == ()


def test_strides_and_dims_beyond_32_bits_keep_their_upper_halves() -> None:
    far = (1 << 39) + (1 << 37) + 4096
    low = [far >> 4 & 0xFFFFFFFF] * 4
    words = (
        2 | 4 << 4 | low[0] << 32, low[1] | low[2] << 32, low[3] | (far >> 36) * 0x1111 << 32, 0xFFFFFFFF | 8 << 32,
        9 | 10 << 32, 11 | 15 << 56, 1 | 2 << 8 | 3 << 16 | 4 << 24,
    )  # fmt: skip
    m = packed_map.decode(raw_of(words))
    assert m.dims == (1 << 32, 9, 10, 11, 12)
    assert m.strides == (far,) * 4
    assert m.box == (16, 2, 3, 4, 5)


@pytest.mark.parametrize("bit", [1, 11, 12, 15, 19, 20, 22, 31])
def test_a_bit_that_is_not_known_is_refused(bit: int) -> None:
    words = list(RECORDED["D, f32"][0])
    words[0] ^= 1 << bit
    with pytest.raises(ValueError, match=r"word 1 is 0x\w+, with bits that are not known"):
        packed_map.decode(raw_of(tuple(words)))


@pytest.mark.parametrize(("word", "bit"), [(3, 48), (6, 32), (7, 32)])
def test_so_is_one_of_another_word(word: int, bit: int) -> None:
    words = list(RECORDED["D, f32"][0])
    words[word - 1] ^= 1 << bit
    with pytest.raises(ValueError, match=f"word {word} is"):
        packed_map.decode(raw_of(tuple(words)))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (2 | 6 << 4, "rank 7 and element type 0"),
        (2 | 13 << 7, "rank 1 and element type 13"),
        (2 | 10 << 7 | 1 << 16, "rank 1 and element type 26"),  # bfloat16 with the bit that makes TF32 of float32
    ],
)
def test_ranks_and_elements_that_are_not_known(fields: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"{sentence}; known are ranks 1 to 5 and types 0, 1, 4"):
        packed_map.decode(raw_of((fields, 0, 0, 0, 0, 0, 0)))


def test_tf32_is_read() -> None:
    m = packed_map.decode(raw_of(RECORDED_TF32))
    assert (m.element, m.element_bits, m.dims, m.strides) == ("tf32", 32, (64, 128, 1), (256, 32768))
    assert (m.box, m.swizzle, m.l2_promotion) == ((32, 128, 1), "128B", 2)
    assert tensor_map.problems(m) == ()


# field, value, ordinal; those that this packing can say
REPLACEMENTS = [
    ("global_address", 0xDC_BA98_7654_3210, 0), ("rank", 2, 0), ("rank", 4, 0), ("rank", 0, 0),
    ("elemtype", 0, 0), ("elemtype", 6, 0), ("elemtype", 10, 0), ("elemtype", 11, 0), ("elemtype", 13, 0),
    ("swizzle_mode", 0, 0), ("swizzle_mode", 2, 0), ("swizzle_atomicity", 0, 0), ("interleave_layout", 0, 0),
    ("fill_mode", 0, 0), *(("element_stride", 1, i) for i in range(5)),
    *(("global_dim", (1 << 32) - 1 - 77 * i, i) for i in range(5)), *(("global_dim", 1 + i, i) for i in range(5)),
    *(("box_dim", 256 - 31 * i, i) for i in range(5)),
    *(("global_stride", (1 << 40) - 16 - (i << 34 | i << 9), i) for i in range(4)),
]  # fmt: skip


@pytest.mark.parametrize("words", [RECORDED["scales of B, three groups of 3 by 3"][0], RECORDED_TF32])
@pytest.mark.parametrize(("field", "value", "ordinal"), REPLACEMENTS)
def test_a_replaced_field_is_that_of_the_emulators_own_map(words, field: str, value: int, ordinal: int) -> None:
    """One field changes as in the emulator's packing, and every other field and byte stays."""
    rest = bytes(range(64))
    raw = raw_of(words, rest)
    m = packed_map.decode(raw)
    own = tensor_map.decode(tensor_map.replace(tensor_map.pack(m), field, value, ordinal))
    new = packed_map.replace(raw, field, value, ordinal)
    assert packed_map.decode(new) == own
    assert new[64:] == rest
    back = {"global_address": m.address, "rank": m.rank - 1, "swizzle_mode": m.swizzle_code}
    if field in back:
        assert packed_map.replace(new, field, back[field]) == raw
    # what lies beyond the rank is kept, and there when the rank grows
    if field != "rank":
        five = packed_map.replace(packed_map.replace(raw, "rank", 4), field, value, ordinal)
        assert packed_map.decode(packed_map.replace(new, "rank", 4)) == packed_map.decode(five)


def test_random_replacements_one_after_the_other() -> None:
    rng = np.random.default_rng(3)
    raw = raw_of(RECORDED["scales of B, three groups of 3 by 3"][0])
    raw = packed_map.replace(raw, "rank", 4)
    own = tensor_map.pack(packed_map.decode(raw))
    for _ in range(300):
        field, value, ordinal = REPLACEMENTS[rng.integers(len(REPLACEMENTS))]
        if field == "rank":
            continue
        if field.startswith("global") and field != "global_address":
            value = int(rng.integers(1, value + 1)) & -16 or 16
        raw, own = packed_map.replace(raw, field, value, ordinal), tensor_map.replace(own, field, value, ordinal)
        assert packed_map.decode(raw) == tensor_map.decode(own)


@pytest.mark.parametrize(
    ("field", "value", "ordinal", "sentence"),
    [
        ("element_stride", 2, 0, "element_stride: 2 has no known place in NVIDIA's packing"),
        ("fill_mode", 1, 0, "fill_mode: 1 has no known place"),
        ("swizzle_atomicity", 1, 0, "swizzle_atomicity: 1 has no known place"),
        ("elemtype", 2, 0, "elemtype: 2 has no known place"),
        ("interleave_layout", 1, 0, "interleave_layout: 1 is not a value"),
        ("box_dim", 257, 0, "box_dim: 257 is outside"),
        ("box_dim", 4, 5, "ordinal: 5"),
        ("global_stride", 24, 0, "not a multiple of 16"),
        ("rank", 5, 0, "rank: 5 is outside"),
    ],
)
def test_what_cannot_be_replaced(field: str, value: int, ordinal: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        packed_map.replace(raw_of(RECORDED_TF32), field, value, ordinal)


def test_bytes_of_no_map_are_refused() -> None:
    with pytest.raises(ValueError, match="word 1 is 0x0"):
        packed_map.decode(bytes(128))
    with pytest.raises(ValueError, match="32 bytes that begin with"):
        packed_map.decode(raw_of(RECORDED["D, f32"][0])[:32])


def test_what_the_driver_would_refuse_is_a_problem() -> None:
    words = list(RECORDED["D, f32"][0])
    words[5] = 0x3F << 56  # 64 floats are more than the swizzle spans
    found = tensor_map.problems(packed_map.decode(raw_of(tuple(words))))
    assert found == ("box[0]: 256 bytes are more than the 128 of swizzle 128B",)


COPY = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry copy(.param .align 64 .b8 map[128], .param .u64 at, .param .u64 out)
{
    .shared .align 128 .b8 tile[512]; .shared .align 8 .b8 full[8];
    .reg .pred %p<3>; .reg .b32 %r<8>; .reg .b64 %rd<8>;
    mov.b32 %r1, full; mov.b32 %r2, 1; mov.b32 %r3, tile;
    mbarrier.init.shared.b64 [%r1], %r2;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], 512;
    ld.param.u64 %rd2, [at];
    setp.ne.u64 %p1, %rd2, 0;
    @%p1 bra GIVEN;
    mov.b64 %rd3, map;
    cvta.param.u64 %rd2, %rd3;
GIVEN:
    mov.b32 %r4, 32; mov.b32 %r5, 2;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd2, {%r4, %r5}], [%r1];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
    @!%p2 bra WAIT;
    ld.param.u64 %rd4, [out];
    ld.shared.b32 %r6, [%r3+388];
    st.global.b32 [%rd4], %r6;
    ret;
}
"""


REPLACE = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry replace(.param .u64 map, .param .u64 to, .param .u32 rows)
{
    .reg .b64 %rd<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [map]; ld.param.u64 %rd2, [to]; ld.param.u32 %r1, [rows];
    tensormap.replace.tile.global_address.global.b1024.b64 [%rd1], %rd2;
    tensormap.replace.tile.global_dim.global.b1024.b32 [%rd1], 1, %r1;
    ret;
}
"""


@pytest.mark.parametrize("rows", [16, 5])
def test_a_kernel_replaces_fields_and_a_copy_uses_them(rows: int) -> None:
    """Another array, whose rows from 5 on may be out of bounds: row 2 + 3 of it is read, or zero."""
    first, second = np.random.default_rng(2).standard_normal((2, 16, 64)).astype(np.float32)
    out, held = np.full(1, np.nan, np.float32), np.zeros(192, np.uint8)
    emulator = Emulator(REPLACE, seed=1)
    words = (
        emulator.memory.register(first),
        2 | 1 << 4 | 7 << 7 | (256 >> 4) << 32,
        0,
        0,
        63 | 7 << 32,
        0,
        31 << 56,
        3,
    )
    at = emulator.memory.register(held)
    start = -at % 64
    held[start : start + 128] = np.frombuffer(struct.pack("<8Q", *words) + b"\xcd" * 64, np.uint8)
    target = emulator.memory.register(second)
    emulator.launch("replace", 1, 1, [at + start, target, rows]).raise_on_reports()
    copying = Emulator(COPY, seed=1, memory=emulator.memory)
    arguments = [bytes(128), at + start, emulator.memory.register(out)]
    copying.launch("copy", 1, 1, arguments).raise_on_reports()
    assert out[0] == (second[5, 33] if rows > 5 else 0)


@pytest.mark.parametrize("tf32", [False, True])
def test_copies_of_tf32_round_to_nearest_even(tf32: bool) -> None:
    """Every tie, infinity and NaN in reach: 10 bits of mantissa, infinities and NaN as they are."""
    bits = np.random.default_rng(4).integers(0, 1 << 32, (16, 64), dtype=np.uint32)
    bits[5, 32:48] = (
        0x3F801000, 0x3F803000, 0x3F801001, 0x3F800FFF, 0x7F7FF000, 0x7F7FEFFF, 0x7F800000, 0xFF800000, 0x7F801000,
        0x7FC00001, 0x80001000, 0x00000001, 0x007FF800, 0xBF801000, 0xBF807FFF, 0,
    )  # fmt: skip
    want = bits.copy()
    finite = np.isfinite(bits.view(np.float32))
    with np.errstate(invalid="ignore"):  # of signalling NaNs
        exact = bits.view(np.float32).astype(np.float64)
    step = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64) * 2.0**13
    with np.errstate(all="ignore"):
        rounded = np.where(np.abs(exact) < 2.0**128, np.round(exact / step) * step, 0).astype(np.float32)
    if tf32:
        want = np.where(finite, rounded.view(np.uint32) & 0x7FFFFFFF | bits & 0x80000000, bits)
    m = packed_map.decode(raw_of((2 | 1 << 4 | 7 << 7 | tf32 << 16 | 16 << 32, 0, 0, 63 | 15 << 32, 0, 31 << 56, 3)))
    plan = tma.plan(m, (32, 2), 128)
    shared, memory = np.zeros(1024, np.uint8), bits.view(np.uint8).reshape(-1)
    tma.load(plan, lambda a, n: memory[(a - np.uint64(ADDRESS)).astype(int)[:, None] + np.arange(n)], shared)
    assert shared[128:640].view(np.uint32).tolist() == want[2:6, 32:].reshape(-1).tolist()


@pytest.mark.parametrize("where", ["a parameter", "global memory"])
def test_a_copy_takes_such_a_map_from_a_parameter_and_from_memory(where: str) -> None:
    source = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    out = np.zeros(1, np.float32)
    emulator = Emulator(COPY, seed=1)
    address = emulator.memory.register(source)
    # 64 by 16 floats, boxes of 32 by 4 without a swizzle
    words = (address, 2 | 1 << 4 | 7 << 7 | (256 >> 4) << 32, 0, 0, 63 | 15 << 32, 0, 31 << 56, 3)
    raw = struct.pack("<8Q", *words) + b"\xcd" * 64
    at = 0
    if where == "global memory":
        held = np.zeros(192, np.uint8)
        at = emulator.memory.register(held)
        start = -at % 64
        held[start : start + 128] = np.frombuffer(raw, np.uint8)
        at, raw = at + start, bytes(128)
    emulator.launch("copy", 1, 1, [raw, at, emulator.memory.register(out)]).raise_on_reports()
    assert out[0] == source[2 + 3, 32 + 1]
