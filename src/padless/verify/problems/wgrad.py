"""Random problems of weight gradients, and changes that must not change their bits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.formats import ceil_div, round_up
from padless.layouts import GroupedColumns
from padless.quantization.columns_rules import num_scale_rows, padded_tokens, scale_columns

NAN_CODE = 0x7F
_STEP = 32  # tokens; groups' slack is zero up to a multiple


@dataclass(frozen=True)
class WgradShape:
    """Tokens of each group, rows of the source past the last group, N, K, alignments of the two copies."""

    sizes: tuple[int, ...]
    past: int
    n: int
    k: int
    alignments: tuple[int, int] = (32, 32)


def block_of(mode: str) -> tuple[int, int]:
    """Features and tokens that share a scale of X."""
    return (1, 128) if mode == "1d1d" else (128, 128)


def random_columns(
    sizes: Sequence[int],
    past: int,
    features: int,
    block: tuple[int, int],
    alignment: int,
    generator: torch.Generator,
    *,
    any_code: bool = False,
) -> GroupedColumns:
    """A transposed copy on the CPU: normal codes, or any but NaN, and scales over ten powers of two."""
    rows, groups = sum(sizes) + past, len(sizes)
    tokens = padded_tokens(rows, groups, alignment)
    data = torch.zeros((features, tokens), dtype=torch.uint8)
    starts = [0, *itertools.accumulate(round_up(size, alignment) for size in sizes)][:groups]
    block_starts = [0, *itertools.accumulate(ceil_div(size, 128) for size in sizes)][:groups]
    for start, size in zip(starts, sizes, strict=True):
        if any_code:
            codes = torch.randint(0, 256, (features, size), generator=generator, dtype=torch.uint8)
            codes[(codes & 0x7F) == NAN_CODE] = 0
        else:
            values = torch.randn((features, size), generator=generator) * 112
            codes = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        data[:, start : start + size] = codes
    scale_shape = (num_scale_rows(rows, groups), scale_columns(features, block))
    scale = torch.exp2(torch.rand(scale_shape, generator=generator) * 10 - 5)
    ends = torch.tensor(sizes, dtype=torch.int64).cumsum(0).to(torch.int32)
    starts_, block_starts_ = (torch.tensor(values, dtype=torch.int32) for values in (starts, block_starts))
    return GroupedColumns(data.view(torch.float8_e4m3fn), scale, ends, starts_, block_starts_, block, alignment)


def random_operands(
    shape: WgradShape, mode: str, seed: int = 0, *, any_code: bool = False
) -> tuple[GroupedColumns, GroupedColumns]:
    """dY and X of a problem, on the CPU: a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed + 7919 * shape.n + shape.k)
    dy, x = (
        random_columns(shape.sizes, shape.past, features, block, alignment, generator, any_code=any_code)
        for features, block, alignment in (
            (shape.n, (1, 128), shape.alignments[0]),
            (shape.k, block_of(mode), shape.alignments[1]),
        )
    )
    return dy, x


def moved(operand: GroupedColumns, device: str) -> GroupedColumns:
    """The same on another device."""
    parts = ("data", "scale", "offs", "starts", "block_starts")
    return replace(operand, **{part: getattr(operand, part).to(device) for part in parts})


def with_data(operand: GroupedColumns, data: torch.Tensor) -> GroupedColumns:
    """The same with other codes, given as bytes."""
    return replace(operand, data=data.view(torch.float8_e4m3fn))


def sizes_of(operand: GroupedColumns) -> list[int]:
    """Tokens of each group."""
    return [end - start for start, end in itertools.pairwise([0, *operand.offs.tolist()])]


def strangers(operand: GroupedColumns, only: int | None = None) -> torch.Tensor:
    """(T',) bool: columns that no product of a group may use, ``only`` that of one group. Slack up to a multiple of 32
    tokens is the group's own.
    """
    mask = torch.ones(operand.data.shape[1], dtype=torch.bool)
    for group, (start, size) in enumerate(zip(operand.starts.tolist(), sizes_of(operand), strict=True)):
        if only is None or group == only:
            mask[start : start + round_up(size, _STEP)] = False
    return mask


def poisoned(operand: GroupedColumns, only: int | None = None) -> GroupedColumns:
    """The same with NaN in every column of ``strangers``."""
    data = operand.data.view(torch.uint8).clone()
    data[:, strangers(operand, only).to(data.device)] = NAN_CODE
    return with_data(operand, data)


def padded_to_blocks(operand: GroupedColumns) -> GroupedColumns:
    """Every group made a whole number of 128 tokens long, with zeros: a copy that says so in its offsets."""
    sizes = [round_up(size, 128) for size in sizes_of(operand)]
    starts = [0, *itertools.accumulate(sizes)][: len(sizes)]
    data = torch.zeros((operand.features, max(sum(sizes), 128)), dtype=torch.uint8, device=operand.data.device)
    for start, old, size in zip(starts, operand.starts.tolist(), sizes_of(operand), strict=True):
        data[:, start : start + size] = operand.data.view(torch.uint8)[:, old : old + size]
    device = operand.data.device
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).to(device)
    moved_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    return replace(with_data(operand, data), offs=ends, starts=moved_starts, alignment=128)


def permuted(operand: GroupedColumns, order: Sequence[int]) -> GroupedColumns:
    """The same groups in another order, group i being the old ``order[i]``."""
    sizes = [sizes_of(operand)[g] for g in order]
    starts = [0, *itertools.accumulate(round_up(size, operand.alignment) for size in sizes)][: len(sizes)]
    block_starts = [0, *itertools.accumulate(ceil_div(size, 128) for size in sizes)][: len(sizes)]
    data = torch.zeros_like(operand.data.view(torch.uint8))
    scale = torch.ones_like(operand.scale)
    for start, block_start, size, g in zip(starts, block_starts, sizes, order, strict=True):
        old, old_block, blocks = int(operand.starts[g]), int(operand.block_starts[g]), ceil_div(size, 128)
        data[:, start : start + size] = operand.data.view(torch.uint8)[:, old : old + size]
        scale[block_start : block_start + blocks] = operand.scale[old_block : old_block + blocks]
    offs, starts_, block_starts_ = (
        torch.tensor(values, dtype=torch.int32, device=data.device)
        for values in (list(itertools.accumulate(sizes)), starts, block_starts)
    )
    moved = with_data(operand, data)
    return replace(moved, scale=scale, offs=offs, starts=starts_, block_starts=block_starts_)
