"""Operands of a benchmark problem, and whether a result of it is right."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from padless.bench.group_sizes import DenseShape, Point, padded_rows
from padless.bench.pad import PaddedGroups, empty_padded, pad_groups
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div, round_up
from padless.layouts import to_mn_major

# Rows compared with float64 in each of at most three groups: the group's first and last, and some between.
_CHECKED_ROWS = 16
_ROWS_AT_ONCE = 8192


@dataclass
class GroupedProblem:
    """Operands of a grouped product on one device.

    a: (M, K) activations with MN-major scales; b: (groups, N, K) weights; offs: (groups,) int32 ends of the
        groups.
    seed: of the values; None when the operands are uninitialised memory (to compile kernels, never to
        measure).
    """

    point: Point
    sizes: list[int]
    a: BlockScaledTensor
    b: BlockScaledTensor
    offs: torch.Tensor
    seed: int | None
    _reference: dict[str, Any] = field(default_factory=dict, repr=False)

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
        return pad_groups(self.a, self.offs, rows=self.padded_rows, group_index=True)

    def empty_padded(self, *, row_major: bool) -> PaddedGroups:
        """Buffers to pad a into, `padded_rows` rows."""
        a = self.a_row_major if row_major else self.a
        return empty_padded(a, self.offs, self.padded_rows, group_index=True)

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


def make_grouped(
    point: Point, sizes: list[int], seed: int | None, device: str | torch.device
) -> GroupedProblem:
    """Standard normal operands, drawn on the device and quantised to FP8_BLOCK; seed None: uninitialised
    memory.
    """
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


@dataclass
class DenseProblem:
    """Operands of a dense product: a (M, K) with MN-major scales, b (N, K)."""

    shape: DenseShape
    a: BlockScaledTensor
    b: BlockScaledTensor

    @property
    def device(self) -> torch.device:
        return self.a.device

    def empty_out(self) -> torch.Tensor:
        """A bf16 (M, N) result full of NaN."""
        shape = (self.shape.M, self.shape.N)
        return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=self.device)


def make_dense(shape: DenseShape, seed: int, device: str | torch.device) -> DenseProblem:
    """Standard normal operands, quantised to FP8_BLOCK."""
    point = Point(shape.M, shape.N, shape.K, 1)
    grouped = make_grouped(point, [shape.M], seed, device)
    b = BlockScaledTensor(grouped.b.data[0], grouped.b.scale[0], FP8_BLOCK)
    return DenseProblem(shape, grouped.a, b)


# --- is a result right? ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampledReference:
    """float64 products of some rows of the quantised operands: `values[i]` is row `rows[i]`."""

    rows: torch.Tensor
    values: torch.Tensor

    def row_error(self, out: torch.Tensor) -> float:
        """Largest relative error |out - ref| / |ref| of a sampled row (Euclidean norms); inf for NaN."""
        if self.rows.numel() == 0:
            return 0.0
        got = out[self.rows].to(torch.float64)
        error = (got - self.values).norm(dim=1) / self.values.norm(dim=1)
        worst = error.nan_to_num(nan=math.inf, posinf=math.inf).max()
        return float(worst)


def sample_reference(problem: GroupedProblem | DenseProblem) -> SampledReference:
    """Rows of up to three groups (first and last that are not empty, and the largest), in float64 on the
    device.

    Codes and scales are dequantised here with plain torch, so this shares no code with what it judges.
    """
    if isinstance(problem, DenseProblem):
        sizes, weights, scales = [problem.shape.M], problem.b.data[None], problem.b.scale[None]
    else:
        sizes, weights, scales = problem.sizes, problem.b.data, problem.b.scale
    nonempty = [group for group, size in enumerate(sizes) if size]
    if not nonempty:
        empty = torch.zeros(0, dtype=torch.int64, device=problem.device)
        return SampledReference(empty, torch.zeros(0, weights.shape[1], device=problem.device))
    largest = max(nonempty, key=lambda group: sizes[group])
    rows, values = [], []
    for group in sorted({nonempty[0], largest, nonempty[-1]}):
        start, size = sum(sizes[:group]), sizes[group]
        count = min(size, _CHECKED_ROWS)
        picked = torch.linspace(start, start + size - 1, count).round().to(torch.int64).to(problem.device)
        a = _expand(problem.a.data[picked], problem.a.scale[picked], 1)
        b = _expand(weights[group], scales[group], 128)
        rows.append(picked)
        values.append(a @ b.t())
    return SampledReference(torch.cat(rows), torch.cat(values))


def _expand(data: torch.Tensor, scale: torch.Tensor, block_rows: int) -> torch.Tensor:
    """float64 values of (rows, K) codes with one scale per block_rows x 128."""
    rows, columns = data.shape
    wide = scale.to(torch.float64).repeat_interleave(128, dim=1)[:, :columns]
    if block_rows > 1:
        wide = wide.repeat_interleave(block_rows, dim=0)[:rows]
    return data.to(torch.float32).to(torch.float64) * wide


def largest_row_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest |x - y| / |y| of a row (Euclidean norms) over all rows; inf for NaN, 0 where both are zero."""
    worst = 0.0
    for first in range(0, x.shape[0], _ROWS_AT_ONCE):  # in parts: float32 copies of all rows would be large
        a = x[first : first + _ROWS_AT_ONCE].to(torch.float32)
        b = y[first : first + _ROWS_AT_ONCE].to(torch.float32)
        apart, size = (a - b).norm(dim=1), b.norm(dim=1)
        relative = torch.where(apart == 0, apart, apart / size).nan_to_num(nan=math.inf, posinf=math.inf)
        worst = max(worst, float(relative.max()))
    return worst


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two bf16 tensors hold the same bits, NaN and the sign of zero included."""
    return x.shape == y.shape and torch.equal(
        x.contiguous().view(torch.int16), y.contiguous().view(torch.int16)
    )


def masked_operand(problem: GroupedProblem, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """a in the masked layout: codes (groups, rows, K) and scales (groups, rows, k_blocks), MN-major, unused
    rows zero.

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
