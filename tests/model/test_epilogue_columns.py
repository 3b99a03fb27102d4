"""The epilogue's blocks along columns: rows of different groups are never in one, and a planted mistake is noticed."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless import FP8_BLOCK, MXFP8, group_offsets, layouts, quantize
from padless.epilogue import (
    COLUMN_FORMATS,
    COLUMN_LAYOUTS,
    SCALE_RULES,
    Epilogue,
    EpilogueTensors,
    column_scale_shape,
    column_tiles,
)
from padless.ops.epilogue_run import with_outputs
from padless.reference import epilogue as reference_epilogue
from padless.reference.epilogue import epilogue_reference
from support.epilogue_cases import POISON_BYTE, poisoned, sums


def column_scales(epilogue: Epilogue, t: EpilogueTensors, sizes: list[int], n: int) -> list[torch.Tensor]:
    """Each group's (blocks, N) column scales, found by the layouts' own description."""
    per_tile = 128 // epilogue.column_format.block_k
    tiles = [math.ceil(size / 128) for size in sizes]
    result = []
    for g, size in enumerate(sizes):
        first, blocks = sum(tiles[:g]), math.ceil(size / epilogue.column_format.block_k)
        if epilogue.column_layout == "plain":
            scale = t.column_scale[first * per_tile : first * per_tile + blocks]
        elif epilogue.column_layout == "blocked":
            whole = layouts.from_blocked(t.column_scale, n, 4 * t.column_tiles)
            scale = whole.view(torch.uint8)[:, 4 * first : 4 * first + blocks].t()
        else:
            bytes_of_tile = math.ceil(n / 128) * 512
            own = t.column_scale[first * bytes_of_tile : (first + tiles[g]) * bytes_of_tile]
            scale = layouts.from_blocked(own, n, 4 * tiles[g]).view(torch.uint8)[:, :blocks].t()
        result.append(scale)
    return result


def check_columns(epilogue: Epilogue, sizes: list[int], m: int, n: int) -> EpilogueTensors:
    """Column codes and scales of every group are those of the group alone, transposed and quantised along its rows."""
    acc, offs = sums(m, n, seed=sum(sizes)), group_offsets(sizes)
    t = poisoned(epilogue, m, n, len(sizes))
    epilogue_reference(acc, offs, epilogue, t)
    start = 0
    for size, scale in zip(sizes, column_scales(epilogue, t, sizes, n), strict=True):
        if size:
            alone = acc[start : start + size].t().contiguous()
            keywords = {"scale_major": "k"} if epilogue.column_format == FP8_BLOCK else {"scale_rule": "rceil"}
            q = quantize(alone, epilogue.column_format, **keywords)
            codes = t.column_codes[start : start + size].view(torch.uint8)
            assert torch.equal(codes, q.data.view(torch.uint8).t()), "codes"
            bits = scale.contiguous().view(torch.uint8)
            assert torch.equal(bits, q.scale.t().contiguous().view(torch.uint8)), "scales"
        start += size
    return t


RAGGED = ([130, 0, 40], [1, 1, 1], [127, 129, 128, 32], [0, 300, 0], [31, 33, 64, 96, 5])


@pytest.mark.parametrize("sizes", RAGGED, ids=str)
@pytest.mark.parametrize(
    ("format", "layout"),
    [
        (f, layout)
        for f, layout in itertools.product(COLUMN_FORMATS, COLUMN_LAYOUTS)
        if f != FP8_BLOCK or layout == "plain"
    ],
    ids=lambda p: getattr(p, "name", p),
)
def test_columns_of_ragged_groups(format, layout: str, sizes: list[int]) -> None:  # type: ignore[no-untyped-def]
    epilogue = Epilogue(column_format=format, column_layout=layout, scale_rule=SCALE_RULES[format][0])
    check_columns(epilogue, sizes, sum(sizes) + 7, 80)


def test_the_column_check_notices_blocks_counted_from_row_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN counts them, who has no ragged groups: block m // 32, shared by the rows of two groups."""
    right = reference_epilogue.group_rows
    monkeypatch.setattr(reference_epilogue, "group_rows", lambda offs, rows: [(0, right(offs, rows)[-1][1])])
    epilogue = Epilogue(column_format=MXFP8, scale_rule="rceil")
    with pytest.raises(AssertionError):
        check_columns(epilogue, [130, 0, 40], 170, 80)


def test_one_groups_rows_change_no_byte_of_another() -> None:
    """The witness: a value 2^20 times larger in the first row of the second group."""
    sizes, n = [130, 40], 32
    acc = torch.randn(170, n)
    louder = acc.clone()
    louder[130] *= 2.0**20
    epilogue = Epilogue(column_format=MXFP8, scale_rule="rceil")
    quiet_t, loud_t = (poisoned(epilogue, 170, n, 2) for _ in range(2))
    epilogue_reference(acc, group_offsets(sizes), epilogue, quiet_t)
    epilogue_reference(louder, group_offsets(sizes), epilogue, loud_t)
    changed_rows = (quiet_t.column_codes.view(torch.uint8) != loud_t.column_codes.view(torch.uint8)).any(1)
    assert not changed_rows[:130].any()
    assert changed_rows[130:162].any()
    assert not changed_rows[162:].any()
    changed = (quiet_t.column_scale.view(torch.uint8) != loud_t.column_scale.view(torch.uint8)).any(1)
    assert changed.nonzero().flatten().tolist() == [8]  # the first block of tile 2


def test_the_literal_example_of_the_blocks() -> None:
    """Groups of 130, 0 and 40 rows: blocks 0-3, 4, then 8, 9; 5, 6, 7, 10, 11 are nobody's."""
    epilogue = Epilogue(column_format=MXFP8, scale_rule="rceil")
    t = poisoned(epilogue, 170, 16, 3)
    epilogue_reference(torch.randn(170, 16), group_offsets([130, 0, 40]), epilogue, t)
    written = (t.column_scale.view(torch.uint8) != POISON_BYTE).any(1).nonzero().flatten().tolist()
    assert written == [0, 1, 2, 3, 4, 8, 9]


@pytest.mark.parametrize("sizes", [[256, 0, 512], [128, 384]], ids=str)
def test_aligned_groups_have_cudnns_layout(sizes: list[int]) -> None:
    """Not discrete: the scales of D transposed, (N, M / 32), in plain tiles. Discrete: a matrix an expert, in order."""
    m, n = sum(sizes), 80
    acc, offs = sums(m, n), group_offsets(sizes)
    whole = quantize(acc.t().contiguous(), MXFP8, scale_rule="rceil").scale
    discrete = [
        layouts.to_blocked(own.contiguous())
        for own in whole.view(torch.uint8).split([s // 32 for s in sizes], 1)
        if own.numel()
    ]
    wanted = {"blocked": layouts.to_blocked(whole).view(torch.uint8), "blocked_groups": torch.cat(discrete)}
    for layout, expected in wanted.items():
        epilogue = Epilogue(column_format=MXFP8, column_layout=layout, scale_rule="rceil")
        t = with_outputs(epilogue, EpilogueTensors(), m, n, len(sizes), torch.device("cpu"), 128)
        epilogue_reference(acc, offs, epilogue, t)
        assert torch.equal(t.column_scale.view(torch.uint8), expected), layout


@given(st.lists(st.integers(0, 400), min_size=1, max_size=12))
def test_column_tiles_are_enough_for_any_groups(sizes: list[int]) -> None:
    needed = sum(math.ceil(size / 128) for size in sizes)
    assert needed <= column_tiles(sum(sizes), len(sizes))
    aligned = [size // 2 * 256 for size in sizes]
    assert column_tiles(sum(aligned), len(sizes), 256) == sum(aligned) // 128


def test_column_tiles_are_no_more_than_somebody_needs() -> None:
    assert column_tiles(300, 4) == 6  # 1, 1, 129, 169 rows
    assert sum(math.ceil(s / 128) for s in (1, 1, 129, 169)) == 6
    assert column_tiles(0, 3) == 2


def test_a_broken_promise_of_alignment_stays_inside_the_buffer() -> None:
    for layout in COLUMN_LAYOUTS:
        epilogue = Epilogue(column_format=MXFP8, column_layout=layout, scale_rule="rceil")
        shape = column_scale_shape(epilogue, 16, 2)
        memory = torch.full((3 * math.prod(shape),), POISON_BYTE, dtype=torch.uint8)
        inside = memory[math.prod(shape) : 2 * math.prod(shape)].view(shape).view(torch.float8_e8m0fnu)
        codes = torch.empty(256, 16, dtype=torch.float8_e4m3fn)
        t = EpilogueTensors(column_codes=codes, column_scale=inside, column_tiles=2)
        epilogue_reference(torch.randn(256, 16), group_offsets([1, 1, 254]), epilogue, t)
        outside = torch.cat([memory[: math.prod(shape)], memory[2 * math.prod(shape) :]])
        assert (outside == POISON_BYTE).all(), layout
