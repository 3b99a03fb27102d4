"""Few rows, in all or a group: Hopper's FP8 kernels then load boxes of fewer rows (kernels/device/sm90/row_box.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import padless
from padless import BlockScaledTensor, Sm90Fp8Config, grouped_gemm
from padless.formats import FP8_BLOCK, MXFP8, BlockScaledFormat
from padless.kernels.maps import row_box
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from support.ragged import GuardedOutput


@dataclass(frozen=True)
class Kernel:
    """A kernel that loads few rows in smaller boxes. ``looks_at_groups``: also where groups are small on average."""

    format: BlockScaledFormat
    configs: tuple[object, ...]
    scale_major: str | None = None
    looks_at_groups: bool = False

    def row_box(self, m: int, num_groups: int) -> int:
        return row_box(m, num_groups if self.looks_at_groups else None)


KERNELS = {
    "FP8_BLOCK": Kernel(
        FP8_BLOCK,
        (None, Sm90Fp8Config(block_m=256, cluster_n=2), Sm90Fp8Config(block_n=192), Sm90Fp8Config(block_m=64)),
        looks_at_groups=True,
    ),
    "FP8_BLOCK with row-major scales": Kernel(FP8_BLOCK, (Sm90Fp8Config(scales="k"),), scale_major="k"),
    "MXFP8": Kernel(MXFP8, (None, Sm90Mxfp8Config())),
}
FEW_IN_ALL = ((1,), (3, 0, 4), (8,), (5, 4), (1,) * 9, (30, 25))
FEW_A_GROUP = ((30, 33), (33, 0, 40, 2), (100, 3, 0, 17), (16, 48, 0))
N, K = 200, 288  # tails of both


def rows_of(a: BlockScaledTensor, count: int) -> BlockScaledTensor:
    """The first rows of ``a``, in memory of their own, so that nothing real follows them."""
    scale = a.scale[:count].clone(memory_format=torch.contiguous_format)
    return BlockScaledTensor(a.data[:count].clone(), scale, a.format)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [(name, sizes) for name in KERNELS for sizes in FEW_IN_ALL]
    + [(name, sizes) for name in KERNELS if KERNELS[name].looks_at_groups for sizes in FEW_A_GROUP],
    ids=str,
)
def test_a_row_is_what_it_is_among_many(name: str, sizes: tuple[int, ...]) -> None:
    """Bit for bit what the same rows give in front of another group, where whole boxes of 64 rows are loaded."""
    kernel = KERNELS[name]
    generator = torch.Generator().manual_seed(sum(sizes))
    m = sum(sizes)
    after = 48 * (len(sizes) + 1) + 1 - m
    assert kernel.row_box(m + after, len(sizes) + 1) == 64 > kernel.row_box(m, len(sizes))
    x = torch.randn(m + after, K, generator=generator).bfloat16() * torch.logspace(-3, 3, m + after)[:, None].bfloat16()
    a = padless.quantize(x, kernel.format, kind="activation", scale_major=kernel.scale_major)
    weights = torch.randn(len(sizes) + 1, N, K, generator=generator).bfloat16()
    b = padless.quantize(weights, kernel.format, kind="weight")
    some = BlockScaledTensor(b.data[:-1].clone(), b.scale[:-1].clone(), kernel.format)
    offs = padless.group_offsets([*sizes, after])
    many = grouped_gemm(a, b, offs, backend="emulator", config=kernel.configs[0])
    assert bool(many[:m].abs().sum(dim=1).gt(0).all())
    for config in kernel.configs:
        guarded = GuardedOutput(m, N, torch.bfloat16)
        grouped_gemm(rows_of(a, m), some, offs[:-1], out=guarded.out, backend="emulator", config=config)
        assert torch.equal(guarded.out.view(torch.int16), many[:m].view(torch.int16)), config
        guarded.check(m)


def test_the_box_is_as_tall_as_the_rows_need() -> None:
    boxes = {0: 8, 1: 8, 8: 8, 9: 16, 56: 56, 57: 64, 63: 64, 64: 64, 65: 64, 8192: 64}
    assert {m: row_box(m) for m in boxes} == boxes


def test_small_groups_take_boxes_of_16() -> None:
    boxes = {8: 8, 16: 16, 17: 16, 64: 16, 192: 16, 193: 64}  # of 4 groups
    assert {m: row_box(m, 4) for m in boxes} == boxes
    assert row_box(60, 1) == 64, "not a single group of 60 rows"
    assert row_box(192) == 64, "nor where the number of groups is not looked at"
