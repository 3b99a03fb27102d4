"""Operands of a benchmark problem, and rows of its result in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from padless.bench.group_sizes import DecodePoint, DenseShape, Point, decode_sizes, padded_rows
from padless.bench.pad import PaddedGroups, empty_padded, pad_groups
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div, round_up
from padless.layouts import to_mn_major
from padless.testing.judge import SampledReference, float64_rows


@dataclass
class GroupedProblem:
    """Operands of a grouped product on one device.

    a: (M, K) activations with MN-major scales; b: (groups, N, K) weights; offs: (groups,) int32 ends of the groups.
    seed: of the values; None when the operands are uninitialised memory (to compile kernels, never to measure).
    bf16_rows: the values of a, where b is in a format whose product takes these.
    """

    point: Point
    sizes: list[int]
    a: BlockScaledTensor
    b: BlockScaledTensor
    offs: torch.Tensor
    seed: int | None
    bf16_rows: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.a.device

    @cached_property
    def a_row_major(self) -> BlockScaledTensor:
        """a with row-major scales."""
        return BlockScaledTensor(self.a.data, self.a.scale.contiguous(), self.a.format)

    @property
    def padded_rows(self) -> int:
        return padded_rows(self.sizes)

    @cached_property
    def padded(self) -> PaddedGroups:
        """a with every group padded to a multiple of 128: exact rows, MN-major scales, group index."""
        return pad_groups(self.a, self.offs, rows=self.padded_rows)

    def empty_padded(self, *, row_major: bool) -> PaddedGroups:
        """Buffers to pad a into, `padded_rows` rows."""
        a = self.a_row_major if row_major else self.a
        return empty_padded(a, self.offs, self.padded_rows)

    def empty_out(self, rows: int | None = None) -> torch.Tensor:
        """A bf16 (rows, N) result full of NaN; rows is M unless given."""
        rows = self.point.M if rows is None else rows
        return torch.full((rows, self.point.N), float("nan"), dtype=torch.bfloat16, device=self.device)

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The bf16 (M, K) and (groups, N, K) values that a and b were quantised from (drawn again)."""
        if self.seed is None:
            raise ValueError("values of a problem with uninitialised operands do not exist")
        return _values(self.point, self.seed, self.device)


def _values(point: Point, seed: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(point.M, point.K, dtype=torch.bfloat16, device=device, generator=generator)
    w = torch.randn(point.groups, point.N, point.K, dtype=torch.bfloat16, device=device, generator=generator)
    return x, w


def make_grouped(point: Point, sizes: list[int], seed: int | None, device: str | torch.device) -> GroupedProblem:
    """Standard normal operands, drawn on the device and quantised to FP8_BLOCK; seed None: uninitialised memory."""
    from padless.ops.grouped_gemm import group_offsets
    from padless.quantization.quantize import quantize

    if sum(sizes) != point.M or len(sizes) != point.groups:
        raise ValueError(
            f"sizes must be {point.groups} values with sum {point.M}, got {len(sizes)} with sum {sum(sizes)}"
        )
    device = torch.device(device)
    offs = group_offsets(torch.tensor(sizes, device=device))
    if seed is None:
        a, b = _uninitialised(point, device)
    else:
        x, w = _values(point, seed, device)
        a = quantize(x, FP8_BLOCK, kind="activation", scale_major="mn")
        b = quantize(w, FP8_BLOCK, kind="weight")
    return GroupedProblem(point, sizes, a, b, offs, seed)


def _uninitialised(point: Point, device: torch.device) -> tuple[BlockScaledTensor, BlockScaledTensor]:
    k_blocks = ceil_div(point.K, 128)
    data = torch.empty(point.M, point.K, dtype=torch.float8_e4m3fn, device=device)
    scale = to_mn_major(torch.empty(point.M, k_blocks, device=device))
    weights = torch.empty(point.groups, point.N, point.K, dtype=torch.float8_e4m3fn, device=device)
    weight_scale = torch.empty(point.groups, ceil_div(point.N, 128), k_blocks, device=device)
    return BlockScaledTensor(data, scale, FP8_BLOCK), BlockScaledTensor(weights, weight_scale, FP8_BLOCK)


def make_decode(decode: DecodePoint, seed: int, device: str | torch.device, *, values: bool = True) -> GroupedProblem:
    """Groups of few rows, their sizes drawn; without ``values`` uninitialised memory."""
    sizes = decode_sizes(decode, seed)
    point = Point(sum(sizes), decode.N, decode.K, decode.groups)
    return make_grouped(point, sizes, seed if values else None, device)


def make_dense(shape: DenseShape, seed: int, device: str | torch.device) -> GroupedProblem:
    """A dense product: one group, whose weights are b[0]."""
    return make_grouped(Point(shape.M, shape.N, shape.K, 1), [shape.M], seed, device)


def sample_reference(problem: GroupedProblem) -> SampledReference:
    """Rows of up to three groups (first and last that are not empty, and the largest), in float64 on the device."""
    sizes = problem.sizes
    nonempty = [group for group, size in enumerate(sizes) if size] or [0]
    largest = max(nonempty, key=lambda group: sizes[group])
    a = problem.a if problem.bf16_rows is None else problem.bf16_rows
    return float64_rows(a, problem.b, sizes, (nonempty[0], largest, nonempty[-1]))


def masked_operand(problem: GroupedProblem, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a in the masked layout: codes (groups, rows, K) and scales (groups, rows, k_blocks), MN-major, unused rows zero.

    rows: a multiple of 4, at least the largest group.
    """
    if rows < max(problem.sizes) or rows != round_up(rows, 4):
        raise ValueError(f"rows must be a multiple of 4 and at least {max(problem.sizes)}, got {rows}")
    groups, k_blocks = problem.point.groups, problem.a.scale.shape[1]
    data = torch.zeros(groups, rows, problem.point.K, dtype=torch.uint8, device=problem.device)
    scale = torch.zeros(groups, k_blocks, rows, device=problem.device).transpose(1, 2)
    start = 0
    for group, size in enumerate(problem.sizes):
        data[group, :size] = problem.a.data[start : start + size].view(torch.uint8)
        scale[group, :size] = problem.a.scale[start : start + size]
        start += size
    return data.view(torch.float8_e4m3fn), scale
