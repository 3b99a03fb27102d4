"""The two products of low-rank adapters on a GPU: launches of the kernels in low_rank_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton

from padless.formats import ceil_div
from padless.layouts import empty_mn_major
from padless.moe.activation import Activation
from padless.nn.triton import low_rank_kernels
from padless.nn.triton.activation import ARRANGEMENTS
from padless.quantization.triton import casts
from padless.quantization.triton.launches import launch, programmatic

FACTORS = 8  # of a launch, which are parameters of the kernel
LEAST_ROWS, _MOST_ROWS = 16, 32  # of a tile: no fewer than tensor cores take, nor so many that programs are few
_PROGRAMS = 512
_FEW_ROWS = 1024
COLUMNS = 128
_NEAR = 2**31  # elements: the kernels' offsets inside of a tile of rows, and of a factor, have 32 bits


class Slots(NamedTuple):
    """ids: (T, k) experts of the slots. adapter_ids: (T,). inverse: (T, k), the rows of slots; all contiguous.

    Launches of slots begin before the kernels ahead have ended. What they read before they wait, ids, adapter_ids,
    factors and rows of tokens, is therefore older than the launch that sorts the slots, which waits before it lets
    another begin.
    """

    ids: torch.Tensor
    adapter_ids: torch.Tensor
    inverse: torch.Tensor | None = None


def low_rank_down(
    rows: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float, width: int,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.low_rank.down`, of rows whose last stride is 1; neither M nor K is 0."""
    m = rows.shape[0] if tokens is None else tokens.shape[0]
    rows = rows if tokens is not None or _MOST_ROWS * rows.stride(0) < _NEAR else rows.contiguous()
    t = torch.empty((m, width), dtype=torch.bfloat16, device=rows.device)
    tiles = _tiles_of(m, 1, offs.shape[0])
    for given in launches_of(factors, offs.shape[0], per_expert):
        launch_down(rows, tokens, t, offs, given, scaling, tiles, _programmatic(m, offs.device))
    return t


def low_rank_up(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`padless.nn.lora.low_rank.up`, of contiguous t and added; neither M nor N is 0."""
    _, columns, rank = factors[0].shape
    out = torch.empty((t.shape[0], columns), dtype=torch.bfloat16, device=t.device)
    block_r = max(16, triton.next_power_of_2(rank))
    block_n = min(COLUMNS, 8192 // block_r)
    blocks = ceil_div(columns, block_n)
    tiles = _tiles_of(t.shape[0], blocks, offs.shape[0])
    for given in launches_of(factors, offs.shape[0], per_expert):
        launch(low_rank_kernels.up, tiles.programs * blocks)(
            t, out, offs, *given.factors, added, t.shape[0], columns, blocks, *given.numbers, scaling, RANK=rank,
            WIDTH=t.shape[1], BLOCK_R=block_r, BLOCK_N=block_n, num_warps=tiles.num_warps, **tiles.constants,
            **given.options, **_programmatic(t.shape[0], t.device),
        )  # fmt: skip
        added = out
    return out


def low_rank_up_activated(
    t: torch.Tensor, factors: Sequence[torch.Tensor], offs: torch.Tensor, per_expert: int, scaling: float,
    added: torch.Tensor, activation: Activation, is_quantized: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """`padless.nn.lora.low_rank.up_activated` of contiguous t and added, neither M nor N 0, and of factors that
    `activates_up`: values, and codes as bytes and scales in FP8_BLOCK or None.
    """
    (given,) = launches_of(factors, offs.shape[0], per_expert)
    tiles = _tiles_of(added.shape[0], ceil_div(added.shape[1] // 2, COLUMNS), offs.shape[0])
    how = _programmatic(added.shape[0], offs.device)
    return launch_up_activated(t, offs, given, scaling, added, activation, is_quantized, tiles, how)


def adapter_pairs(ids: torch.Tensor, adapter_ids: torch.Tensor, num_experts: int, num_adapters: int) -> torch.Tensor:
    """`padless.nn.lora.low_rank.adapter_pairs`, of contiguous tensors; ids is not empty."""
    out = torch.empty_like(ids)
    launch(low_rank_kernels.pairs, ceil_div(ids.numel(), 256))(
        ids, adapter_ids, out, ids.numel(), ids.shape[1], num_experts, num_adapters, SLOTS=256, num_warps=4,
        **_programmatic(ids.numel(), ids.device),
    )  # fmt: skip
    return out


def launch_down(
    rows: torch.Tensor, tokens: torch.Tensor | None, t: torch.Tensor, places: torch.Tensor | Slots, given: Given,
    scaling: float, tiles: Tiles, how: dict[str, int],
) -> None:  # fmt: skip
    """places: ends of groups, or slots."""
    _, rank, columns = given.factors[0].shape
    block_r = max(16, triton.next_power_of_2(t.shape[1]))
    top_k, of_places = _arguments(places)
    steps = _steps_down(block_r, of_slots=top_k > 0)
    launch(low_rank_kernels.down, tiles.programs)(
        rows, tokens, t, *of_places, *given.factors, t.shape[0], rows.shape[0], rows.stride(0), *given.numbers, scaling,
        TOP_K=top_k, K=columns, RANK=rank, WIDTH=t.shape[1], BLOCK_R=block_r, BLOCK_K=steps.columns, STAGES=steps.stages,
        num_warps=steps.num_warps, **tiles.constants, **given.options, **how,
    )  # fmt: skip


def launch_up_activated(
    t: torch.Tensor, places: torch.Tensor | Slots, given: Given, scaling: float, added: torch.Tensor,
    activation: Activation, is_quantized: bool, tiles: Tiles, how: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    rows, columns = added.shape[0], added.shape[1] // 2
    blocks = ceil_div(columns, COLUMNS)
    values = torch.empty((rows, columns), dtype=torch.bfloat16, device=t.device)
    codes = scale = None
    if is_quantized:
        codes = torch.empty((rows, columns), dtype=torch.uint8, device=t.device)
        scale = empty_mn_major(rows, blocks, t.device)
    rank = given.factors[0].shape[2]
    top_k, of_places = _arguments(places)
    launch(low_rank_kernels.up_activated, tiles.programs * blocks)(
        t, added, values, codes, scale, *of_places, *given.factors, rows, columns, blocks, *given.numbers, scaling,
        0 if scale is None else scale.stride(1), activation.alpha, activation.up_offset, activation.limit or 0.0,
        KIND=activation.kind, ARRANGEMENT=ARRANGEMENTS[activation.gate_up], HAS_LIMIT=activation.limit is not None,
        TOP_K=top_k, RANK=rank, WIDTH=t.shape[1], BLOCK_R=max(16, triton.next_power_of_2(rank)), BLOCK_N=COLUMNS,
        num_warps=tiles.num_warps, **tiles.constants, **given.options, **how,
    )  # fmt: skip
    return values, codes, scale


class Given(NamedTuple):
    """Factors of a launch, filled up with their first; strides and numbers, and options.

    is_known: whether factors are where the caller had them, and not in copies that a launch has just made.
    """

    factors: tuple[torch.Tensor, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]
    is_known: bool


def launches_of(factors: Sequence[torch.Tensor], groups: int, per_expert: int) -> list[Given]:
    """The arguments of each launch."""
    (_, height, columns), (_, *strides) = factors[0].shape, factors[0].stride()
    is_near = height * strides[0] + columns * strides[1] < _NEAR
    is_known = is_near and len({(t.stride(), t.dtype) for t in factors}) == 1
    if not is_known:
        factors = [t.contiguous() for t in factors]
    hardware = casts.casts_in_hardware(factors[0].device)
    found = []
    for first in range(0, len(factors), FACTORS):
        some = tuple(factors[first : first + FACTORS])
        aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 for t in some)
        numbers = (*some[0].stride(), groups, per_expert, first, len(some))
        options = {"ALIGNED": aligned, "HARDWARE": hardware, "enable_fp_fusion": False}
        found.append(Given(some + some[:1] * (FACTORS - len(some)), numbers, options, is_known))
    return found


class Tiles(NamedTuple):
    """Tiles of so many rows, a power of two, and how many: of so many groups, or of slots, which have a row each."""

    rows: int
    programs: int
    groups: int

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "GROUPS": triton.next_power_of_2(self.groups)}

    @property
    def num_warps(self) -> int:
        """Of a program that has `COLUMNS` columns of a tile."""
        return 8 if self.rows > LEAST_ROWS else 4


def _tiles_of(rows: int, blocks: int, groups: int) -> Tiles:
    """Tiles of rows, of which blocks programs have columns each: large ones where those make enough programs."""
    are_many = rows * blocks >= _PROGRAMS * _MOST_ROWS and rows >= groups * _MOST_ROWS
    size = _MOST_ROWS if are_many else LEAST_ROWS
    runs = min(rows, groups + 1)  # of rows of a group or of none, of which each may have a tile that is not full
    return Tiles(size, runs + (rows - runs) // size, groups)


class _Steps(NamedTuple):
    """Columns at a time, warps, and steps that are on their way."""

    columns: int
    num_warps: int
    stages: int


def _steps_down(block_r: int, *, of_slots: bool) -> _Steps:
    """Of a slot more are on their way: its program has few others beside it."""
    if of_slots:
        return _Steps(min(2 * COLUMNS, 8192 // block_r), 4, 6)
    return _Steps(min(COLUMNS, 8192 // block_r), 2 if block_r == 16 else 4, 4)


def _arguments(places: torch.Tensor | Slots) -> tuple[int, tuple[torch.Tensor | None, ...]]:
    """The kernels' TOP_K, and where rows or slots are."""
    if isinstance(places, torch.Tensor):
        return 0, (places, None, None, None)
    return places.ids.shape[1], (None, *places)


def _programmatic(rows: int, device: torch.device) -> dict[str, int]:
    """Options of a launch, which begins before the kernel ahead has ended where it is one of many short ones."""
    return programmatic(device) if rows <= _FEW_ROWS else {"PROGRAMMATIC": 0}
