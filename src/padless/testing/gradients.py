"""Operands of weight gradients, drawn, and changes that keep the bits of a result: FP8 columns, and bf16 rows.

Changes read the groups from the operands, and so wait for their device; what is drawn waits for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from padless.formats import ceil_div, round_up
from padless.layouts import GroupedColumns
from padless.quantization.columns_rules import num_scale_rows, padded_tokens, scale_columns
from padless.testing.operands import spans

NAN_CODE = 0x7F
_COLUMNS, _ROWS = 32, 16  # tokens of a step of the tensor core
_BEHIND = 3  # tokens of a group of NaN that shifts all others


# --- FP8 columns -------------------------------------------------------------------------------------------


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


def _starts(sizes: Sequence[int], unit: int) -> list[int]:
    return [0, *itertools.accumulate(round_up(size, unit) for size in sizes)][: len(sizes)]


def columns_of(
    codes: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    block: tuple[int, int],
    alignment: int,
    past: int = 0,
    slack: int = 0,
) -> GroupedColumns:
    """A transposed copy of groups' codes, (features, tokens) bytes each, with a row of scales for each 128 tokens.

    past: rows of the source behind all groups. slack: the code in columns that no product may read; scales of no
    block are NaN.
    """
    sizes, device = [t.shape[1] for t in codes], codes[0].device
    rows = sum(sizes) + past
    starts, blocks = _starts(sizes, alignment), [start // 128 for start in _starts(sizes, 128)]
    tokens = padded_tokens(rows, len(sizes), alignment)
    data = torch.full((codes[0].shape[0], tokens), slack, dtype=torch.uint8, device=device)
    for start, code, size in zip(starts, codes, sizes, strict=True):
        data[:, start : start + round_up(size, _COLUMNS)] = 0
        data[:, start : start + size] = code
    stored = torch.cat([*scales])
    stored = pad(stored, (0, 0, 0, num_scale_rows(rows, len(sizes)) - stored.shape[0]), value=torch.nan)
    numbers = torch.tensor([[*itertools.accumulate(sizes)], starts, blocks], dtype=torch.int32)
    # From pinned memory: any other copy would wait for all that was launched.
    numbers = numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers
    offs, first, first_block = numbers.unbind()
    return GroupedColumns(data.view(torch.float8_e4m3fn), stored, offs, first, first_block, block, alignment)


def random_columns(
    sizes: Sequence[int],
    features: int,
    block: tuple[int, int],
    alignment: int,
    generator: torch.Generator,
    *,
    past: int = 0,
    any_code: bool = False,
    slack: int = 0,
    powers: tuple[int, int] = (-5, 5),
) -> GroupedColumns:
    """A transposed copy on the generator's device: normal codes, or any but NaN; scales between powers of two."""
    device, low, span = generator.device, powers[0], powers[1] - powers[0]

    def codes(size: int) -> torch.Tensor:
        if any_code:
            found = torch.randint(0, 256, (features, size), dtype=torch.uint8, device=device, generator=generator)
            return torch.where((found & 0x7F) == NAN_CODE, found & 0xF0, found)
        values = torch.randn((features, size), device=device, generator=generator) * 112
        return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)

    blocks = [ceil_div(size, 128) for size in sizes]
    scale = torch.rand((sum(blocks), scale_columns(features, block)), device=device, generator=generator)
    scales = torch.exp2(scale * span + low).split(blocks)
    return columns_of([codes(size) for size in sizes], scales, block, alignment, past, slack)


def random_operands(
    shape: WgradShape, mode: str, seed: int = 0, *, any_code: bool = False
) -> tuple[GroupedColumns, GroupedColumns]:
    """dY and X of a problem, on the CPU: a function of the arguments alone."""
    generator = torch.Generator().manual_seed(seed + 7919 * shape.n + shape.k)
    each = ((shape.n, (1, 128), shape.alignments[0]), (shape.k, block_of(mode), shape.alignments[1]))
    dy, x = (random_columns(shape.sizes, *one, generator, past=shape.past, any_code=any_code) for one in each)
    return dy, x


def values_of(operand: GroupedColumns, sizes: Sequence[int], group: int, dtype: torch.dtype) -> torch.Tensor:
    """(features, tokens) values of a group, of groups of these sizes."""
    start, block, size = (_starts(sizes, operand.alignment)[group], _starts(sizes, 128)[group] // 128, sizes[group])
    scale = operand.scale[block : block + ceil_div(size, 128)].to(dtype)
    scale = scale.repeat_interleave(128, 0)[:size].repeat_interleave(operand.block[0], 1)
    return operand.data[:, start : start + size].to(dtype) * scale[:, : operand.features].t()


def sizes_of(operand: GroupedColumns) -> list[int]:
    """Tokens of each group."""
    return [end - start for start, end in itertools.pairwise([0, *operand.offs.tolist()])]


def with_data(operand: GroupedColumns, data: torch.Tensor) -> GroupedColumns:
    """The same with other codes, given as bytes."""
    return replace(operand, data=data.view(torch.float8_e4m3fn))


def _parts(operand: GroupedColumns) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Codes and scales of each group."""
    sizes, data = sizes_of(operand), operand.data.view(torch.uint8)
    codes = [data[:, start : start + size] for start, size in zip(operand.starts.tolist(), sizes, strict=True)]
    blocks = zip(operand.block_starts.tolist(), sizes, strict=True)
    return codes, [operand.scale[start : start + ceil_div(size, 128)] for start, size in blocks]


def poisoned(operand: GroupedColumns, only: int | None = None) -> GroupedColumns:
    """The same with NaN in every column that no product of a group may use, ``only`` that of one group. Slack up to a
    multiple of 32 tokens is the group's own."""
    data = operand.data.view(torch.uint8)
    kept = torch.zeros(data.shape[1], dtype=torch.bool)
    for group, (start, size) in enumerate(zip(operand.starts.tolist(), sizes_of(operand), strict=True)):
        kept[start : start + round_up(size, _COLUMNS)] = only is None or group == only
    return with_data(operand, data.where(kept.to(data.device), NAN_CODE))


def padded(operand: GroupedColumns) -> GroupedColumns:
    """Every group made a whole number of 128 tokens long, with zeros: a copy that says so in its offsets."""
    codes, scales = _parts(operand)
    return columns_of([pad(t, (0, -t.shape[1] % 128)) for t in codes], scales, operand.block, 128)


def permuted(operand: GroupedColumns, order: Sequence[int]) -> GroupedColumns:
    """The same groups in another order, group i + 1 being the old ``order[i]``, behind a first one of NaN."""
    codes, scales = _parts(operand)
    behind = codes[0].new_full((operand.features, _BEHIND), NAN_CODE)
    ones = operand.scale.new_ones((1, operand.scale.shape[1]))
    codes, scales = [behind, *(codes[g] for g in order)], [ones, *(scales[g] for g in order)]
    return columns_of(codes, scales, operand.block, operand.alignment)


# --- bf16 rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """dY (M, N) and X (M, K) bfloat16, and where groups end."""

    dy: torch.Tensor
    x: torch.Tensor
    offs: torch.Tensor

    @property
    def groups(self) -> list[tuple[int, int]]:
        """[start, end) of each group's rows."""
        return spans(self.offs.tolist(), self.dy.shape[0])


def poisoned_rows(rows: Rows, only: int | None = None) -> Rows:
    """NaN in every row of no group; with ``only`` in every row but that group's."""
    kept = torch.zeros(rows.dy.shape[0], dtype=torch.bool, device=rows.dy.device)
    for group, (start, end) in enumerate(rows.groups):
        kept[start:end] = only is None or group == only
    dy, x = (t.where(kept[:, None], torch.nan) for t in (rows.dy, rows.x))
    return Rows(dy, x, rows.offs)


def _regrouped(rows: Rows, ends: Sequence[int], change: Callable[[torch.Tensor], list[torch.Tensor]]) -> Rows:
    """Groups that end so, of what a change makes of dY and of X."""
    dy, x = (torch.cat(change(t)) for t in (rows.dy, rows.x))
    return Rows(dy, x, torch.tensor(ends, dtype=torch.int32, device=rows.offs.device))


def permuted_rows(rows: Rows, order: Sequence[int]) -> Rows:
    """The groups in another order, behind a first one of NaN."""
    groups = [rows.groups[g] for g in order]
    ends = [*itertools.accumulate((end - start for start, end in groups), initial=_BEHIND)]
    return _regrouped(
        rows, ends, lambda t: [t.new_full((_BEHIND, t.shape[1]), torch.nan), *(t[s:e] for s, e in groups)]
    )


def padded_rows(rows: Rows) -> Rows:
    """Every group filled up with rows of zeros to a multiple of 16, which the tensor core adds anyway."""
    groups = rows.groups
    ends = [*itertools.accumulate(round_up(end - start, _ROWS) for start, end in groups)]
    return _regrouped(rows, ends, lambda t: [pad(t[s:e], (0, 0, 0, (s - e) % _ROWS)) for s, e in groups])
