"""`quantize_rows_columns` on the CPU: its codes, scales and starts against a slow and obvious reading of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import padless
from padless import FP8_BLOCK, GroupedColumns, group_offsets, quantize, quantize_rows_columns
from padless.quantization import columns_rules
from padless.quantization.columns_rules import num_scale_rows, padded_tokens
from padless.quantization.rows_columns import ALIGN_TO_LINES_FROM
from padless.reference.gemm import group_rows
from support import triton_cases
from support.columns_judge import judge
from support.triton_cases import awkward, bits

BLOCKS = ((1, 128), (128, 128))
ALIGNMENTS = (32, 128)
# Sizes, and rows past the last group.
PROBLEMS = {
    "around_a_step": ((0, 1, 15, 16, 17, 0, 31, 32, 33), 0),
    "around_a_block": ((127, 128, 129, 0, 1), 5),
    "around_two_blocks": ((255, 256, 257), 0),
    "all_in_one": ((0, 0, 200, 0), 3),
    "all_empty": ((0, 0, 0), 7),
    "no_rows": ((0, 0), 0),
    "one_row": ((1,), 0),
}
FEATURES = 144  # a block of 128 and a short one


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def same_columns(a: GroupedColumns, b: GroupedColumns) -> bool:
    names = ("data", "scale", "starts", "block_starts")
    return all(torch.equal(bits(getattr(a, name)), bits(getattr(b, name))) for name in names)


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_columns_and_rows(name: str, block: tuple[int, int], alignment: int) -> None:
    sizes, past = PROBLEMS[name]
    offs = group_offsets(list(sizes))
    for seed, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        x = awkward((sum(sizes) + past, FEATURES), dtype, seed)
        rows, columns = quantize_rows_columns(x, offs, column_block=block, alignment=alignment)
        judge(columns, x, offs)
        triton_cases.assert_same(rows, quantize(x, FP8_BLOCK))
        assert columns.offs is offs
        assert (columns.block, columns.alignment) == (block, alignment)
        none, again = quantize_rows_columns(x, offs, column_block=block, alignment=alignment, rows=False)
        assert none is None
        assert same_columns(columns, again)


@pytest.mark.parametrize("features", [1, 16, 128, 272])
def test_features(features: int) -> None:
    offs = group_offsets([5, 0, 130])
    x = awkward((140, features), torch.bfloat16, features)
    for block in BLOCKS:
        rows, columns = quantize_rows_columns(x, offs, column_block=block)
        judge(columns, x, offs)
        triton_cases.assert_same(rows, quantize(x, FP8_BLOCK))


def test_strides() -> None:
    offs = group_offsets([5, 7])
    wide = awkward((13, 320), torch.bfloat16, 5)
    for x in (wide[:, :144], wide.t()[:13, :12], wide[:, ::2]):
        rows, columns = quantize_rows_columns(x, offs)
        judge(columns, x.contiguous(), offs)
        triton_cases.assert_same(rows, quantize(x.contiguous(), FP8_BLOCK))


@pytest.mark.parametrize("ends", [[300, 10, -5, 200], [-1, -1, -1, -1], [2**31 - 1] * 4, [200, 128, 64, 0]])
def test_wrong_offs_are_made_ascending_and_in_range(ends: list[int]) -> None:
    x = awkward((201, 48), torch.bfloat16, 9)
    offs = torch.tensor(ends, dtype=torch.int32)
    judge(quantize_rows_columns(x, offs)[1], x, offs)


def test_the_alignment_follows_from_rows_and_groups() -> None:
    for groups, m, wanted in ((2, 2 * ALIGN_TO_LINES_FROM, 128), (2, 2 * ALIGN_TO_LINES_FROM - 1, 32), (3, 0, 32)):
        offs = torch.zeros(groups, dtype=torch.int32)
        assert quantize_rows_columns(torch.zeros(m, 16), offs)[1].alignment == wanted


# --- what groups may not notice of each other ------------------------------------------------------------


def parts(columns: GroupedColumns, x: torch.Tensor, g: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, slack included, and scales of group g."""
    row, end = group_rows(columns.offs, len(x))[g]
    start, first = int(columns.starts[g]), int(columns.block_starts[g])
    codes = columns.data.view(torch.uint8)[:, start : start + round_up(end - row, columns.alignment)]
    return codes, columns.scale[first : first + -(-(end - row) // 128)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_group_is_the_same_whatever_the_others_are(block: tuple[int, int]) -> None:
    sizes = (33, 130, 0, 200)
    x = awkward((sum(sizes), 144), torch.bfloat16, 21)
    before = quantize_rows_columns(x, group_offsets(list(sizes)), column_block=block)[1]
    pieces = x.split(sizes)
    for order in ((3, 1, 0, 2), (2, 0, 3, 1)):
        moved = torch.cat([pieces[g] for g in order])
        after = quantize_rows_columns(moved, group_offsets([sizes[g] for g in order]), column_block=block)[1]
        for place, g in enumerate(order):
            for a, b in zip(parts(before, x, g), parts(after, moved, place), strict=True):
                assert torch.equal(bits(a), bits(b)), (order, g)
    for g in range(len(sizes)):
        broken = x.clone()
        for h, (row, end) in enumerate(group_rows(before.offs, len(x))):
            broken[row:end] = x[row:end] if h == g else float("nan")
        after = quantize_rows_columns(broken, before.offs, column_block=block)[1]
        for a, b in zip(parts(before, x, g), parts(after, x, g), strict=True):
            assert torch.equal(bits(a), bits(b)), g


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_one_broken_element_stays_in_its_blocks(block: tuple[int, int], value: float) -> None:
    sizes = (40, 150)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(190, 272, generator=generator)
    offs = group_offsets(list(sizes))
    rows, columns = quantize_rows_columns(x, offs, column_block=block)
    x[40 + 130, 200] = value  # group 1, its second block of tokens
    broken_rows, broken = quantize_rows_columns(x, offs, column_block=block)
    judge(broken, x, offs)
    row_of_scales, column = 1 + 1, 200 // block[0]
    differing = torch.nonzero(
        bits(broken.scale).view(*broken.scale.shape, 4) != bits(columns.scale).view(*columns.scale.shape, 4)
    )
    assert {tuple(d[:2].tolist()) for d in differing} == {(row_of_scales, column)}
    assert not broken.scale[row_of_scales, column].isfinite()
    differing = torch.nonzero(bits(broken.data) != bits(columns.data))
    first = int(columns.starts[1]) + 128
    assert set(differing[:, 1].tolist()) <= set(range(first, first + 22))
    assert set(differing[:, 0].tolist()) <= set(range(column * block[0], (column + 1) * block[0]))
    assert (bits(broken.data)[200, first + 2]) == 0x7F
    differing = torch.nonzero(bits(broken_rows.data) != bits(rows.data))
    assert set(differing[:, 0].tolist()) == {170}
    assert differing[:, 1].min() >= 128


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_error_of_every_block(block: tuple[int, int]) -> None:
    """Half a step of e4m3, 2^-4 of a value or 2^-10 of the scale where codes are subnormal; no block saturates."""
    sizes = (129, 0, 40, 300)
    offs = group_offsets(list(sizes))
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(sum(sizes), 160, generator=generator)
    x *= torch.exp2(torch.randint(-9, 9, (sum(sizes), 1), generator=generator).float())
    columns = quantize_rows_columns(x, offs, column_block=block)[1]
    for g, (row, end) in enumerate(group_rows(offs, len(x))):
        start, first = int(columns.starts[g]), int(columns.block_starts[g])
        codes = columns.data[:, start : start + end - row].t().double()
        token = torch.arange(end - row)
        scale = columns.scale.double()[first + token // 128].repeat_interleave(block[0], 1)[:, :160]
        values = x[row:end].double()
        limit = torch.maximum(values.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20)
        assert bool(((codes * scale - values).abs() <= limit).all()), g
        assert bool((codes.abs().amax() == 448) if end > row else True)


# --- the judge sees planted errors -----------------------------------------------------------------------


def right() -> tuple[torch.Tensor, torch.Tensor, GroupedColumns]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(200, 48, generator=generator)
    x *= torch.exp2(torch.arange(200)[:, None] / 16.0)  # every row larger than the one before
    offs = group_offsets([50, 0, 140])
    return x, offs, quantize_rows_columns(x, offs)[1]


def slack_not_zeroed(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    codes = good.data.view(torch.uint8).clone()
    codes[:, 50] = 0x38
    return replace(good, data=codes.view(torch.float8_e4m3fn))


def end_not_zeroed(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    codes = good.data.view(torch.uint8).clone()
    codes[7, -1] = 1
    return replace(good, data=codes.view(torch.float8_e4m3fn))


def unused_scale(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    scale = good.scale.clone()
    scale[-1, 3] = float("nan")
    return replace(good, scale=scale)


def blocks_of_absolute_rows(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    shifted = torch.cat([x[:50], x[50:190].roll(-50 % 128, 0), x[190:]])
    return replace(good, scale=quantize_rows_columns(shifted, offs)[1].scale)


def amax_over_a_neighbours_row(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    seen = x.clone()
    seen[49] = x[50]
    return replace(good, scale=quantize_rows_columns(seen, offs)[1].scale)


def rows_past_the_end_counted(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    return quantize_rows_columns(x, group_offsets([50, 0, 150]))[1]


def starts_not_aligned(x: torch.Tensor, offs: torch.Tensor, good: GroupedColumns) -> GroupedColumns:
    return replace(good, starts=torch.tensor([0, 50, 50], dtype=torch.int32))


PLANTED: tuple[Callable[..., GroupedColumns], ...] = (
    slack_not_zeroed,
    end_not_zeroed,
    unused_scale,
    blocks_of_absolute_rows,
    amax_over_a_neighbours_row,
    rows_past_the_end_counted,
    starts_not_aligned,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_judge_sees(plant: Callable[..., GroupedColumns]) -> None:
    x, offs, good = right()
    judge(good, x, offs)
    with pytest.raises(AssertionError):
        judge(plant(x, offs, good), x, offs)


def test_sizes_of_buffers_suffice_for_any_groups() -> None:
    """The largest column and block that any sizes lead to are inside, and worst cases use them up."""
    for m, alignment in itertools.product((0, 1, 127, 128, 300), ALIGNMENTS):
        for sizes in ((1,) * m or (0,), (m,), (m // 2, 0, m - m // 2), (min(m, 1), max(m - 1, 0))):
            starts = columns_rules.group_starts(group_offsets(list(sizes)), m, alignment)
            assert int(starts.columns[-1]) <= padded_tokens(m, len(sizes), alignment)
            assert int(starts.blocks[-1]) <= num_scale_rows(m, len(sizes))


# --- as an operator of torch -----------------------------------------------------------------------------


def test_operator() -> None:
    x, offs = awkward((70, 48), torch.bfloat16, 3), group_offsets([33, 0, 30])
    for block, rows in itertools.product(BLOCKS, (True, False)):
        operator = torch.ops.padless.quantize_rows_columns.default
        for tokens in (None, torch.arange(69, -1, -1, dtype=torch.int32)):
            torch.library.opcheck(operator, (x.nan_to_num(0, 0, 0), offs, list(block), 32, rows, tokens))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    def step(x: torch.Tensor, offs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, columns = quantize_rows_columns(x * 2, offs, column_block=(128, 128))
        assert rows is not None
        return (rows.data.view(torch.uint8), rows.scale, columns.data.view(torch.uint8), columns.scale, columns.starts)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for m, sizes in ((70, (33, 0, 30)), (150, (1, 140, 9)), (129, (64, 64, 0))):
        x, offs = awkward((m, 48), torch.bfloat16, m), group_offsets(list(sizes))
        for got, want in zip(compiled(x, offs), step(x, offs), strict=True):
            assert got.stride() == want.stride()
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 16, dtype=torch.int8)}, "x must be bfloat16"),
        ({"x": torch.zeros(4)}, r"x must be \(M, features\)"),
        ({"x": torch.zeros(4, 0)}, "at least one column"),
        ({"x": None}, "x must be a torch.Tensor"),
        ({"offs": torch.tensor([4.0])}, "offs must be a 1-D int32 or int64"),
        ({"offs": torch.zeros(0, dtype=torch.int32)}, "at least one end row"),
        ({"offs": torch.zeros(2, dtype=torch.int32, device="meta")}, "offs must be on x's device"),
        ({"column_block": (128, 1)}, "column_block must be one of"),
        ({"alignment": 16}, "alignment must be one of"),
        ({"tokens": [0, 1]}, "tokens must be a 1-D int32 or int64 tensor, got list"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int32)}, r"tokens must be .* got torch.int32 \(2, 2\)"),
        ({"tokens": torch.zeros(2, dtype=torch.int32, device="meta")}, "tokens must be on x's device"),
    ],
)
def test_errors(change: dict[str, object], message: str) -> None:
    given = {"x": torch.zeros(4, 16), "offs": torch.tensor([2, 4], dtype=torch.int32)} | change
    with pytest.raises(ValueError, match=message):
        quantize_rows_columns(given.pop("x"), given.pop("offs"), **given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chosen_rows_are_those_of_the_gathered_tensor(dtype: torch.dtype) -> None:
    """Some of them more than once, strided; the number of rows, and so the alignment, is that of the list."""
    x, offs = awkward((70, 48), torch.bfloat16, 3), group_offsets([1500, 900])
    tokens = torch.randint(0, 70, (2500, 2), generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1]
    rows, columns = quantize_rows_columns(x, offs, tokens=tokens)
    want_rows, want = quantize_rows_columns(x[tokens.long()], offs)
    assert columns.alignment == want.alignment == 128
    pairs = [(getattr(columns, part), getattr(want, part)) for part in ("data", "scale", "starts", "block_starts")]
    for got, expected in (*pairs, (rows.data, want_rows.data), (rows.scale, want_rows.scale)):
        assert got.stride() == expected.stride()
        assert torch.equal(bits(got), bits(expected))


def test_public_names() -> None:
    assert padless.quantize_rows_columns is quantize_rows_columns
    assert padless.GroupedColumns is GroupedColumns
