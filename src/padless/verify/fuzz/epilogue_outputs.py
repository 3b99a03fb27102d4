"""Outputs of the quantising calls: where each of their elements lies, in memory that shows what else was written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import ceil_div
from padless.ops.epilogue_run import with_outputs
from padless.verify.fuzz import exact
from padless.verify.fuzz.place import Place

GUARD = 4096  # bytes before and behind every output
_TILE_BYTES = 512  # of the 32x4x4 layout
Parts = dict[str, torch.Tensor]


@dataclass
class Layout:
    """Outputs of an epilogue of (rows, n) sums, by names in `EpilogueTensors`. spans: [start, end) of the groups."""

    epilogue: Epilogue
    place: Place
    rows: int
    n: int
    spans: Sequence[tuple[int, int]]
    m_aligned: int
    like: EpilogueTensors = field(init=False)  # as a call allocates them, without memory

    def __post_init__(self) -> None:
        sizes = (self.rows, self.n, len(self.spans), torch.device("meta"), self.m_aligned)
        self.like = with_outputs(self.epilogue, EpilogueTensors(), *sizes)

    @property
    def likes(self) -> Parts:
        return {name: t for name, t in vars(self.like).items() if isinstance(t, torch.Tensor)}

    def part(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """Of an output the elements of groups' rows, (rows, columns), (blocks of rows, columns), or (groups,).

        Every NaN of values is the same one.
        """
        t = t.view(torch.uint8) if t.element_size() == 1 else t
        if name == "column_scale" or (name == "row_scale" and self.epilogue.row_layout.startswith("blocked")):
            t = t[getattr(self, f"_{name}s").to(t.device)]
        elif name != "amax":
            t = t[: self.spans[-1][1]]
        t = t.nan_to_num(math.nan, math.inf, -math.inf) if name == "d" and t.is_floating_point() else t
        return t.clone(memory_format=torch.contiguous_format)

    @cached_property
    def _row_scales(self) -> torch.Tensor:
        """Of scales in tiles the byte of each, (rows, blocks)."""
        assert self.epilogue.row_format is not None
        columns = ceil_div(self.epilogue.out_columns(self.n), self.epilogue.row_format.block_k)
        rows: list[int] = []
        for first, (start, end) in zip(self._tiles, self.spans, strict=True):
            first_row = 128 * first if self.epilogue.row_layout == "blocked_groups" else start
            rows += range(first_row, first_row + end - start)
        return exact.tile_places(self._on_device(rows), self._count(columns), ceil_div(columns, 4))

    @cached_property
    def _column_scales(self) -> torch.Tensor:
        """Of scales in tiles the byte of each, (blocks, columns); of plain ones the rows that exist."""
        epilogue, n_out = self.epilogue, self.epilogue.out_columns(self.n)
        assert epilogue.column_format is not None
        block, places = epilogue.column_format.block_k, []
        blocks: list[int] = []
        for first, (start, end) in zip(self._tiles, self.spans, strict=True):
            count = ceil_div(end - start, block)
            blocks += range(first * 128 // block, first * 128 // block + count)
            own = exact.tile_places(self._count(n_out), self._count(count), ceil_div(end - start, 128))
            places.append(first * ceil_div(n_out, 128) * _TILE_BYTES + own.t())
        if epilogue.column_layout == "blocked_groups":
            return torch.cat(places)
        if epilogue.column_layout == "plain":
            return self._on_device(blocks)
        return exact.tile_places(self._count(n_out), self._on_device(blocks), self.like.column_tiles).t()

    @property
    def _tiles(self) -> list[int]:
        """The first tile of 128 rows of each group."""
        found = [0]
        for start, end in self.spans:
            found.append(found[-1] + ceil_div(end - start, 128))
        return found[:-1]

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return self.place.ends(numbers).long()

    def _count(self, end: int) -> torch.Tensor:
        return torch.arange(end, device=self.place.device)


def _pattern(size: int, device: torch.device) -> torch.Tensor:
    """Bytes that are the same everywhere, of which no number is a NaN."""
    return (torch.arange(size, device=device) * 37 % 61 + 0x21).to(torch.uint8)


class Outputs:
    """Outputs, each among bytes of a pattern. tensors: as a call takes them, codes and values with ``gap`` bytes between
    their rows, and column_tiles.
    """

    def __init__(self, layout: Layout, device: torch.device, gap: int = 0) -> None:
        self._layout = layout
        self._bytes: Parts = {}
        self.tensors: dict[str, Any] = {"column_tiles": layout.like.column_tiles}
        for name, t in layout.likes.items():
            stride, size = t.stride(), t.untyped_storage().nbytes()
            if name in ("d", "row_codes", "column_codes"):
                stride = (t.shape[1] + gap // t.element_size(), 1)
                size = t.shape[0] * stride[0] * t.element_size()
            self._bytes[name] = _pattern(GUARD + size + GUARD, device)
            inside = self._bytes[name][GUARD : GUARD + size].view(t.dtype)
            self.tensors[name] = inside.as_strided(t.shape, stride, inside.storage_offset())
        if "amax" in self.tensors:
            self.tensors["amax"].fill_(-math.inf)

    def parts(self) -> Parts:
        """The elements that exist."""
        return {name: self._layout.part(name, self.tensors[name]) for name in self._bytes}

    def strays(self, *, anywhere: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Outputs, each with a () bool tensor: whether bytes that are no element of it were written.

        Zeros may be where a 32x4x4 tile also has scales. anywhere: all that is between the guards may be.
        """
        for name, stored in self._bytes.items():
            t, stray = self.tensors[name], stored != _pattern(stored.numel(), stored.device)
            inside = stray[GUARD:-GUARD]
            places = torch.arange(inside.numel() // t.element_size(), device=t.device).as_strided(t.shape, t.stride())
            exists = torch.zeros(inside.numel() // t.element_size(), dtype=torch.bool, device=t.device)
            exists[self._layout.part(name, places).flatten()] = True
            if t.dim() == 1 and t.element_size() == 1:
                tiles = exists.view(-1, _TILE_BYTES)
                zeros = (stored[GUARD:-GUARD] == 0).view_as(tiles)
                exists = (tiles | (tiles.any(1, keepdim=True) & zeros)).flatten()
            inside &= ~(exists.repeat_interleave(t.element_size()) | anywhere)
            yield name, stray.any()
