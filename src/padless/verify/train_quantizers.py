"""Checks on a GPU that the quantizers of training give the bits of their definitions in torch, from poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from padless.ops.grouped_gemm import group_offsets
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.quantization.rows_columns import quantize_rows_columns, rows_columns_torch
from padless.quantization.swiglu_backward import swiglu_backward_quantize, swiglu_backward_torch
from padless.quantization.weight_both import quantize_weight_both, weight_both_torch
from padless.runtime.choices import SwigluGateUp
from padless.testing.timing import capture

DEVICE = "cuda"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = ((1, 128), (128, 128))
_ALIGNMENTS = (32, 128)


class _Rows(NamedTuple):
    """Sizes of groups, rows past the last one, columns."""

    sizes: tuple[int, ...]
    past: int
    columns: int


_PROBLEMS = (
    _Rows((0, 1, 15, 16, 17, 31, 32, 33, 0), 3, 144),
    _Rows((127, 128, 129, 0, 255, 257), 140, 1040),
    _Rows((0, 700, 0), 0, 256),
    _Rows((0, 0), 5, 272),
    _Rows((0, 0, 0), 0, 16),
    _Rows(tuple((37 * g) % 53 for g in range(70)), 7, 2064),
)
# Columns of dH for each layout of gate and up: whole blocks, short ones, and blocks that both share.
_SWIGLU: tuple[tuple[SwigluGateUp, int], ...] = (
    ("concatenated", 384),
    ("concatenated", 208),
    ("interleaved", 384),
    ("interleaved", 96),
)
_WEIGHTS = ((3, 200, 1040), (136, 144), (2, 127, 257), (1, 1))
_BY_CHANCE = ((1, 16), (129, 1040), (300, 272))


def check_train_quantizers() -> str:
    """Codes, scales, starts and sums as torch has them on the CPU, every byte written; captured in a CUDA graph too."""
    count = 0
    with _poisoned_memory():
        for seed, rows in enumerate(_PROBLEMS):
            for dtype in _DTYPES:
                for block, alignment in zip((*_BLOCKS, *_BLOCKS), (*_ALIGNMENTS, *reversed(_ALIGNMENTS)), strict=True):
                    _check_rows_columns(rows, dtype, block, alignment, seed)
                    count += 1
        for seed, rows in enumerate(_PROBLEMS[:3]):
            for gate_up, columns in _SWIGLU:
                for dtype, block, with_prob in zip(_DTYPES, (*_BLOCKS, (1, 128)), (True, True, False), strict=True):
                    problem = rows._replace(columns=columns)
                    _check_swiglu(problem, dtype, gate_up, block, _ALIGNMENTS[seed % 2], with_prob, seed)
                    count += 1
        for shape in _WEIGHTS:
            for dtype in _DTYPES:
                _check_weight(shape, dtype)
                count += 1
        for shape in _BY_CHANCE:
            for dtype in _DTYPES:
                _check_by_chance(shape, dtype)
                count += 1
    if torch.cuda.is_available():
        _check_graph()
    return f"{count} problems, bit for bit the same; a graph's replay sees new values and new group sizes"


def _values(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows of very different sizes, with zeros, NaN and Inf here and there, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    rows = (*shape[:-1], 1)
    x = torch.randn(*shape, generator=generator)
    x *= torch.exp2(torch.randint(-12, 9, rows, generator=generator).float())
    chance = torch.rand(*shape, generator=generator)
    special = torch.rand(*rows, generator=generator) < 0.1
    x[(chance < 0.002) & special] = float("nan")
    x[(chance > 0.998) & special] = float("inf")
    x[(chance > 0.4) & (chance < 0.41)] = 0.0
    return x.to(dtype)


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fills what torch.empty allocates with NaN, or with 0x7F."""
    original = torch.empty

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        t = original(*args, **options)
        return t.fill_(float("nan") if t.is_floating_point() else 0x7F)

    with mock.patch.object(torch, "empty", empty):
        yield


def _require_same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], what: str) -> None:
    """Raise AssertionError unless all have the same bits, in MN-major scales the padding too."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), f"{what}: output {index}"
        if a.dtype == torch.float32 and a.dim() == 2 and a.stride(0) == 1 < a.stride(1):
            a, b = (t.as_strided((t.stride(1), t.shape[1]), t.stride()) for t in (a, b))
        a, b = (t.cpu().contiguous() for t in (a, b))
        if a.dtype == torch.float32:
            a, b = a.view(torch.int32), b.view(torch.int32)
        assert torch.equal(a, b), f"{what}: output {index} differs in {int((a != b).sum())} places"


def _check_rows_columns(rows: _Rows, dtype: torch.dtype, block: tuple[int, int], alignment: int, seed: int) -> None:
    x = _values((sum(rows.sizes) + rows.past, rows.columns), dtype, seed)
    tokens = torch.randint(len(x), (len(x),), generator=torch.Generator().manual_seed(seed)) if len(x) else None
    offs = group_offsets(list(rows.sizes))
    for chosen in (None, tokens):
        want = rows_columns_torch(x if chosen is None else x[chosen], offs, block, alignment, True)
        found, columns = quantize_rows_columns(
            x.to(DEVICE),
            offs.to(DEVICE),
            column_block=block,
            alignment=alignment,
            tokens=None if chosen is None else chosen.to(DEVICE),
        )
        assert found is not None
        of_columns = (columns.data.view(torch.uint8), columns.scale, columns.starts, columns.block_starts)
        got = (found.data.view(torch.uint8), found.scale, *of_columns)
        what = "rows" if chosen is None else "chosen rows"
        _require_same(got, want, f"{what} and columns {rows} {dtype} {block} {alignment}")


def _check_swiglu(
    rows: _Rows,
    dtype: torch.dtype,
    gate_up: SwigluGateUp,
    block: tuple[int, int],
    alignment: int,
    with_prob: bool,
    seed: int,
) -> None:
    m = sum(rows.sizes) + rows.past
    dh, z = _values((m, rows.columns), dtype, seed), _values((m, 2 * rows.columns), dtype, seed + 1)
    prob = torch.rand(m, generator=torch.Generator().manual_seed(seed)) if with_prob else None
    offs = group_offsets(list(rows.sizes))
    want = swiglu_backward_torch(dh, z, offs, prob, gate_up, block, alignment)
    found = swiglu_backward_quantize(
        dh.to(DEVICE),
        z.to(DEVICE),
        offs.to(DEVICE),
        None if prob is None else prob.to(DEVICE),
        gate_up=gate_up,
        hidden_block=block,
        alignment=alignment,
    )
    tensors = [found.dz_rows.data.view(torch.uint8), found.dz_rows.scale]
    for columns in (found.dz_columns, found.hidden_columns):
        tensors += [columns.data.view(torch.uint8), columns.scale]
    tensors += [found.dz_columns.starts, found.dz_columns.block_starts]
    tensors += [] if found.dprob is None else [found.dprob]
    _require_same(tensors, want[: len(tensors)], f"swiglu {rows} {dtype} {gate_up} {block} {alignment}")


def _check_weight(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = _values(shape, dtype, sum(shape))
    got = [t for weight in quantize_weight_both(w.to(DEVICE)) for t in (weight.data.view(torch.uint8), weight.scale)]
    _require_same(got, weight_both_torch(w), f"weight {shape} {dtype}")


def _check_by_chance(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _values(shape, dtype, sum(shape)).nan_to_num(0.0, 0.0, 0.0)  # a NaN has other bits on a GPU
    moved, signs, seed = x.to(DEVICE), 0x5A3C, 12345678901234567
    _require_same((random_hadamard(moved, signs),), (random_hadamard(x, signs),), f"Hadamard {shape} {dtype}")
    got, want = (quantize_nvfp4_stochastic(t, seed=seed) for t in (moved, x))
    for a, b in ((got.data, want.data), (got.scale, want.scale)):
        _require_same((a.view(torch.uint8),), (b.view(torch.uint8),), f"by chance {shape} {dtype}")


def _check_graph() -> None:
    """Both quantizers of rows in one graph: a wait for the GPU would fail the capture."""
    m, columns = 300, 256
    dh, z, prob = (
        _values((m, columns), torch.bfloat16, 1),
        _values((m, 2 * columns), torch.bfloat16, 2),
        torch.rand(m),
    )
    offs = group_offsets([100, 0, 57, 99])
    given = [t.to(DEVICE) for t in (dh, z, prob, offs)]

    def step() -> list[torch.Tensor]:
        rows, of_rows = quantize_rows_columns(given[0], given[3], alignment=32)
        gradients = swiglu_backward_quantize(
            given[0], given[1], given[3], given[2], gate_up="concatenated", alignment=32
        )
        assert rows is not None
        assert gradients.dprob is not None
        found = (of_rows, gradients.dz_columns, gradients.hidden_columns)
        tensors = [t for c in found for t in (c.data.view(torch.uint8), c.scale, c.starts)]
        return [*tensors, rows.data.view(torch.uint8), gradients.dz_rows.data.view(torch.uint8), gradients.dprob]

    captured: list[torch.Tensor] = []
    graph = capture(lambda: captured.__setitem__(slice(None), step()))
    for target, source in zip(
        given, (dh.flip(0), z.flip(1), prob.flip(0), group_offsets([0, 199, 1, 56])), strict=True
    ):
        target.copy_(source)
    for t in captured:
        t.fill_(1)
    graph.replay()
    torch.cuda.synchronize()
    _require_same(captured, [t.cpu() for t in step()], "a graph's replay")
