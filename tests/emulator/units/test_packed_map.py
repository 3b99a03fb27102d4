"""Tensor maps as NVIDIA's host code packs them: recorded bytes give the fields that the arrays have, and no others."""

from __future__ import annotations

import struct

import pytest

from padless.emulator.units import packed_map, tensor_map

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
    assert packed_map.translate(raw_of(words)) == ours
    assert tensor_map.decode(ours) == m


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


@pytest.mark.parametrize("bit", [1, 11, 12, 15, 16, 19, 20, 22, 31])
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
    ("fields", "sentence"), [(2 | 6 << 4, "rank 7 and element type 0"), (2 | 13 << 7, "rank 1 and element type 13")]
)
def test_ranks_and_elements_that_are_not_known(fields: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"{sentence}; known are ranks 1 to 5 and types 0, 1, 4"):
        packed_map.decode(raw_of((fields, 0, 0, 0, 0, 0, 0)))


def test_our_own_bytes_and_short_ones_are_no_packed_map() -> None:
    ours = tensor_map.encode_tiled(0, 4096, (64, 8), (64,), (64, 8))
    with pytest.raises(ValueError, match="not known of NVIDIA's packing"):
        packed_map.decode(ours)
    with pytest.raises(ValueError, match="64 bytes; a tensor map has 128"):
        packed_map.decode(raw_of(RECORDED["D, f32"][0], b""))


def test_what_the_driver_refuses_is_refused() -> None:
    words = list(RECORDED["D, f32"][0])
    words[5] = 0x3F << 56  # 64 floats are more than the swizzle spans
    with pytest.raises(ValueError, match=r"box\[0\]: 256 bytes are more than the 128 of swizzle 128B"):
        packed_map.translate(raw_of(tuple(words)))
