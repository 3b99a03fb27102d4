"""Layouts of scales and packed codes in memory, byte by byte, from the published index formulas."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless import layouts
from padless.formats import MXFP8, BlockScaledTensor, blocked_size

DTYPES = (torch.uint8, torch.float8_e8m0fnu, torch.float8_e4m3fn)


def random_bytes(*shape: int, seed: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Bytes from 1 to 255: zero is what padding is."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def offset(r: int, c: int, columns: int) -> int:
    """Byte of scale (r, c) in 32x4x4 tiles, as NVIDIA's documentation gives it."""
    tiles = (columns + 3) // 4
    return ((r // 128) * tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


# --- MN-major --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 129])
@pytest.mark.parametrize("columns", [1, 3])
def test_mn_major_places_every_scale(rows: int, columns: int) -> None:
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    moved = layouts.to_mn_major(scale)
    ld = max(4, (rows + 3) // 4 * 4)
    assert torch.equal(moved, scale)
    flat = torch.as_strided(moved, (columns * ld,), (1,)).tolist()
    for c in range(columns):
        for r in range(ld):
            assert flat[c * ld + r] == (scale[r, c].item() if r < rows else 0.0)


def test_mn_major_scales_are_not_copied_again() -> None:
    moved = layouts.to_mn_major(torch.rand(5, 2))
    assert layouts.to_mn_major(moved) is moved


# --- FP4 -------------------------------------------------------------------------------------------------


def test_the_first_code_is_the_low_nibble() -> None:
    packed = layouts.pack_fp4(torch.tensor([[0x1, 0xF, 0x0, 0x7]], dtype=torch.uint8))
    assert packed.dtype == torch.float4_e2m1fn_x2
    assert packed.view(torch.uint8).tolist() == [[0xF1, 0x70]]


@given(rows=st.integers(0, 5), pairs=st.integers(0, 9), seed=st.integers(0, 2**31))
def test_unpack_is_the_inverse_of_pack(rows: int, pairs: int, seed: int) -> None:
    codes = random_bytes(rows, 2 * pairs, seed=seed) & 0xF
    assert torch.equal(layouts.unpack_fp4(layouts.pack_fp4(codes)), codes)


def test_pack_wants_an_even_number_of_byte_codes() -> None:
    with pytest.raises(ValueError, match="codes must be uint8 with an even last size"):
        layouts.pack_fp4(torch.zeros(2, 3, dtype=torch.uint8))


# --- 32x4x4 tiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(0, 300), columns=st.integers(1, 11), seed=st.integers(0, 2**31))
def test_every_scale_is_where_the_formula_says(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    scale = random_bytes(rows, columns, seed=seed, dtype=dtype)
    blocked = layouts.to_blocked(scale)
    assert blocked.dtype == dtype
    assert blocked.shape == (blocked_size(rows, columns),)
    want = [0] * blocked.numel()
    for r, row in enumerate(scale.view(torch.uint8).tolist()):
        for c, byte in enumerate(row):
            want[offset(r, c, columns)] = byte
    assert blocked.view(torch.uint8).tolist() == want
    back = layouts.from_blocked(blocked, rows, columns)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))


def test_the_example_of_the_docstring() -> None:
    scale = torch.zeros(130, 5, dtype=torch.uint8)
    scale[129, 4] = 7
    assert layouts.to_blocked(scale).nonzero().tolist() == [[1552]]
    assert offset(129, 4, 5) == 1552


def test_matrices_of_a_batch_are_blocked_one_by_one() -> None:
    scale = random_bytes(3, 130, 6, dtype=torch.float8_e8m0fnu)
    blocked = layouts.to_blocked(scale)
    for g in range(3):
        assert torch.equal(blocked[g].view(torch.uint8), layouts.to_blocked(scale[g]).view(torch.uint8))
    assert torch.equal(layouts.from_blocked(blocked, 130, 6).view(torch.uint8), scale.view(torch.uint8))


def test_any_shape_of_the_same_bytes_is_read() -> None:
    """torchao keeps the tiles as (32 row tiles, 16 column tiles)."""
    scale = random_bytes(256, 8)
    assert torch.equal(layouts.from_blocked(layouts.to_blocked(scale).view(64, 32), 256, 8), scale)


@pytest.mark.parametrize(("rows", "columns", "matrices"), [(130, 5, 1), (128, 4, 3), (1, 1, 2), (300, 9, 2)])
def test_cudnn_view_has_its_strides_and_elements(rows: int, columns: int, matrices: int) -> None:
    scale = random_bytes(matrices, rows, columns)
    blocked = layouts.to_blocked(scale)
    view = layouts.cudnn_view(blocked, rows, columns)
    row_tiles, column_tiles = (rows + 127) // 128, (columns + 3) // 4
    assert view.shape == (32, 4, row_tiles, 4, column_tiles, matrices)
    assert view.stride() == (16, 4, 512 * column_tiles, 1, 512, 512 * column_tiles * row_tiles)
    assert view.data_ptr() == blocked.data_ptr()
    for r in range(0, rows, 7):
        for c in range(columns):
            for m in range(matrices):
                assert view[r % 32, (r % 128) // 32, r // 128, c % 4, c // 4, m] == scale[m, r, c]
    flat = layouts.from_cudnn_view(view)
    assert torch.equal(flat, blocked)
    assert flat.data_ptr() == blocked.data_ptr()
    # A tensor of that shape with other strides holds the same scales at other bytes.
    assert torch.equal(layouts.from_cudnn_view(view.contiguous()), blocked)


def test_wrong_blocked_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=re.escape("blocked must hold the 1024 bytes of 130 x 4 scales")):
        layouts.from_blocked(random_bytes(512), 130, 4)
    with pytest.raises(ValueError, match="blocked must be contiguous"):
        layouts.cudnn_view(random_bytes(512), 130, 4)
    with pytest.raises(ValueError, match="view must be"):
        layouts.from_cudnn_view(random_bytes(32, 4, 1, 4, 1))
    with pytest.raises(ValueError, match="scale must have a dtype of one byte"):
        layouts.to_blocked(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="scale must be"):
        layouts.to_blocked(random_bytes(4))


# --- groups of rows --------------------------------------------------------------------------------------

sizes_of_groups = st.lists(st.sampled_from([0, 1, 31, 127, 128, 129, 260]), min_size=1, max_size=5)


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@given(sizes=sizes_of_groups, columns=st.integers(1, 6), past=st.integers(0, 3), seed=st.integers(0, 2**31))
def test_every_group_starts_on_a_tile(sizes: list[int], columns: int, past: int, seed: int) -> None:
    """Each group's tiles are those of the group alone, one after the other; the rest is zero."""
    rows = sum(sizes) + past
    scale = random_bytes(rows, columns, seed=seed)
    offs = ends(sizes)
    blocked = layouts.to_blocked_groups(scale, offs)
    alone, start = [], 0
    for size in sizes:
        alone.append(layouts.to_blocked(scale[start : start + size]))
        start += size
    together = torch.cat(alone)
    assert blocked.numel() == blocked_size(layouts.blocked_groups_rows(rows, len(sizes)), columns)
    assert torch.equal(blocked[: together.numel()], together)
    assert not blocked[together.numel() :].any()
    back = layouts.from_blocked_groups(blocked, offs, rows, columns)
    assert torch.equal(back[:start], scale[:start])
    assert not back[start:].any()


@given(rows=st.integers(0, 600), sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6))
def test_there_is_room_for_any_split(rows: int, sizes: list[int]) -> None:
    sizes = [min(s, rows) for s in sizes]
    while sum(sizes) > rows:
        sizes[sizes.index(max(sizes))] -= 1
    needed = sum((s + 127) // 128 * 128 for s in sizes)
    assert needed <= layouts.blocked_groups_rows(rows, len(sizes)) < rows + 128 * len(sizes)


@given(offs=st.lists(st.integers(-300, 900), min_size=1, max_size=6), rows=st.integers(0, 400))
def test_wrong_offs_stay_inside(offs: list[int], rows: int) -> None:
    """The running maximum counts, and two rows never share a place."""
    ends_ = torch.tensor(offs, dtype=torch.int32)
    highest = [min(max(0, *offs[: g + 1]), rows) for g in range(len(offs))]
    groups = [next((g for g, end in enumerate(highest) if r < end), len(offs)) for r in range(rows)]
    assert layouts.group_of_rows(ends_, rows).tolist() == groups
    where = layouts.padded_rows(ends_, rows)
    capacity = layouts.blocked_groups_rows(rows, len(offs))
    assert ((where >= 0) & (where <= capacity)).all()
    kept = where[where < capacity]
    assert kept.unique().numel() == kept.numel()


def test_padded_rows_example() -> None:
    assert layouts.padded_rows(torch.tensor([2, 5], dtype=torch.int32), 6).tolist() == [0, 1, 128, 129, 130, 256]
    assert layouts.group_of_rows(torch.tensor([2, 2, 5], dtype=torch.int32), 6).tolist() == [0, 0, 2, 2, 2, 3]


def test_plain_scale_undoes_every_layout() -> None:
    scale = random_bytes(200, 3, dtype=torch.float8_e8m0fnu)
    data = torch.zeros(200, 96, dtype=torch.uint8).view(torch.float8_e4m3fn)
    offs = ends([70, 130])
    for t in (
        BlockScaledTensor(data, scale, MXFP8),
        BlockScaledTensor(data, layouts.to_blocked(scale), MXFP8, None, "blocked"),
        BlockScaledTensor(data, layouts.to_blocked_groups(scale, offs), MXFP8, None, "blocked_groups"),
    ):
        assert torch.equal(layouts.plain_scale(t, offs).view(torch.uint8), scale.view(torch.uint8))
    with pytest.raises(ValueError, match="offs must be given"):
        layouts.plain_scale(t)


def test_offs_must_be_a_list_of_ends() -> None:
    with pytest.raises(ValueError, match="offs must be a 1-D tensor of integers"):
        layouts.group_of_rows(torch.zeros(0, dtype=torch.int32), 3)
