"""Points of the benchmark of weight gradients, and their operands: transposed copies of dY and X with block scales."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from padless.bench.group_sizes import draw_group_sizes
from padless.layouts import GroupedColumns
from padless.testing.gradients import random_columns, values_of


@dataclass(frozen=True)
class WgradPoint:
    """sizes: "equal", or "drawn" as in the paper's Appendix C.1. alignment: of the groups in the transposed copies.

    every_tile: whether the tile that is not picked is measured in both modes, and not in 1d2d alone.
    """

    sizes: str
    M: int
    N: int
    K: int
    groups: int
    alignment: int = 128
    every_tile: bool = False


def equal(groups: int, tokens: int, n: int, k: int) -> WgradPoint:
    """Groups of as many tokens each."""
    return WgradPoint("equal", groups * tokens, n, k, groups)


DRAWN = (
    WgradPoint("drawn", 8192, 4096, 7168, 8),
    WgradPoint("drawn", 16384, 4096, 7168, 32),
    WgradPoint("drawn", 32768, 4096, 7168, 32),
    WgradPoint("drawn", 32768, 2048, 2048, 64),
    WgradPoint("drawn", 65536, 7168, 2048, 32),
)
EQUAL = (
    equal(8, 1024, 4096, 7168),
    equal(8, 4096, 4096, 7168),
    equal(32, 256, 4096, 7168),
    equal(32, 512, 4096, 7168),
    equal(32, 1024, 4096, 7168),
    equal(64, 512, 2048, 2048),
    equal(64, 1024, 2816, 2048),
    equal(32, 2048, 7168, 2048),
    equal(128, 512, 1536, 2048),
    equal(512, 160, 1024, 2048),
    equal(512, 160, 2048, 512),
)


def grid(*, full: bool) -> list[WgradPoint]:
    """16 points; full, with every tile and with the drawn ones in copies of the closer alignment too, 21."""
    if not full:
        return [*DRAWN, *EQUAL]
    closer = [replace(point, alignment=32) for point in DRAWN]
    return [replace(point, every_tile=True) for point in (*DRAWN, *EQUAL, *closer)]


def sizes_of(point: WgradPoint, seed: int) -> list[int]:
    """Tokens of each group; the same for both alignments."""
    if point.sizes == "equal":
        return [point.M // point.groups] * point.groups
    if point.sizes != "drawn":
        raise ValueError(f"sizes is {point.sizes!r}; allowed: 'equal', 'drawn'")
    rng = random.Random(f"{seed}:{point.M}:{point.N}:{point.K}:{point.groups}")
    return draw_group_sizes(point.groups, point.M, rng)


# ----------------------------------------------------------------------------------------------- operands


def make_columns(
    sizes: Sequence[int], features: int, block: tuple[int, int], alignment: int, seed: int, device: str
) -> GroupedColumns:
    """A transposed copy made where it is used, whose values are of about one."""
    return random_columns(sizes, features, block, alignment, torch.Generator(device).manual_seed(seed), powers=(-8, -6))


def rows_of(operand: GroupedColumns, sizes: Sequence[int]) -> torch.Tensor:
    """(M, features) bf16, as they were before the copy: what a bf16 product reads."""
    return torch.cat([values_of(operand, sizes, g, torch.float32).t().bfloat16() for g in range(len(sizes))])


@dataclass(frozen=True)
class WgradOperands:
    """Operands: dY, and X in both modes with the same codes; sizes on the host."""

    dy: GroupedColumns
    x: dict[str, GroupedColumns]
    sizes: list[int]


def make_operands(point: WgradPoint, seed: int, device: str) -> WgradOperands:
    """Operands of a point. X's scales per feature are those of its blocks, so that all contenders multiply one thing."""
    sizes = sizes_of(point, seed)
    dy = make_columns(sizes, point.N, (1, 128), point.alignment, seed, device)
    blocks = make_columns(sizes, point.K, (128, 128), point.alignment, seed + 1, device)
    columns = blocks.scale.repeat_interleave(128, 1)[:, : point.K].contiguous()
    return WgradOperands(dy, {"1d2d": blocks, "1d1d": replace(blocks, scale=columns, block=(1, 128))}, sizes)
