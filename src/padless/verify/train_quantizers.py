"""The quantizers of training give the bits of their definitions in torch, from poisoned memory, in a CUDA graph too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from padless.formats import FP8_BLOCK
from padless.ops.grouped_gemm import group_offsets
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.quantization.quantize import quantize
from padless.quantization.rows_columns import quantize_rows_columns, rows_columns_torch
from padless.quantization.swiglu_backward import swiglu_backward_quantize, swiglu_backward_torch
from padless.quantization.weight_both import quantize_weight_both, weight_both_torch
from padless.runtime.choices import Kind, ScaleMajor, SwigluGateUp
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = ((1, 128), (128, 128))
_ALIGNMENTS = (32, 128)
Rows = tuple[tuple[int, ...], int, int]  # sizes of groups, rows past the last one, columns
_PROBLEMS: tuple[Rows, ...] = (
    ((0, 1, 15, 16, 17, 31, 32, 33, 0), 3, 144),
    ((127, 128, 129, 0, 255, 257), 140, 1040),
    ((0, 700, 0), 0, 256),
    ((0, 0), 5, 272),
    ((0, 0, 0), 0, 16),
    (tuple((37 * g) % 53 for g in range(70)), 7, 2064),
)
# Columns of dH for each layout of gate and up: whole blocks, short ones, and blocks that both share.
_SWIGLU: dict[SwigluGateUp, tuple[int, int]] = {"concatenated": (384, 208), "interleaved": (384, 96)}
_WEIGHTS = ((3, 200, 1040), (136, 144), (2, 127, 257), (1, 1))
_STOCHASTIC = ((1, 16), (129, 1040), (300, 272))


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


def _bytes(*parts: Any) -> list[torch.Tensor]:
    """Codes and scales of quantized tensors."""
    return [t for part in parts for t in (part.data.view(torch.uint8), part.scale)]


def _same(place: Place, what: str, got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    """All have the same strides and bits, in MN-major scales the padding too."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        name = f"{what}: output {index}"
        place.judge.wrong(f"{name}: strides {a.stride()}, not {b.stride()}", a.stride() != b.stride())
        if a.dtype == torch.float32 and a.dim() == 2 and a.stride(0) == 1 < a.stride(1):
            a, b = (t.as_strided((t.stride(1), t.shape[1]), t.stride()) for t in (a, b))
        place.judge.same(name, a.contiguous(), place.put(b.contiguous()))


def _rows_columns(place: Place, rows: Rows, dtype: torch.dtype, block: tuple[int, int], alignment: int) -> None:
    (sizes, past, columns), seed = rows, _PROBLEMS.index(rows)
    m, offs = sum(sizes) + past, group_offsets(sizes)
    x = _values((m, columns), dtype, seed)
    tokens = torch.randint(m, (m,), generator=torch.Generator().manual_seed(seed)) if m else None
    there, ends, chosen = (place.put(t) for t in (x, offs, tokens))
    for some, picked in ((None, x), (chosen, x if tokens is None else x[tokens])):
        found, c = quantize_rows_columns(there, ends, column_block=block, alignment=alignment, tokens=some)
        want = rows_columns_torch(picked, offs, block, alignment, True)
        got = [*_bytes(found, c), c.starts, c.block_starts]
        _same(place, f"rows and columns {rows} {dtype} {block} {alignment}, chosen: {some is not None}", got, want)


def _swiglu(place: Place, seed: int, gate_up: SwigluGateUp, columns: int, dtype: torch.dtype) -> None:
    sizes, past, _ = _PROBLEMS[seed]
    m, alignment, block = sum(sizes) + past, _ALIGNMENTS[seed % 2], _BLOCKS[dtype == torch.float16]
    dh, z = _values((m, columns), dtype, seed), _values((m, 2 * columns), dtype, seed + 1)
    prob = torch.rand(m, generator=torch.Generator().manual_seed(seed)) if dtype != torch.float32 else None
    given = (dh, z, group_offsets(sizes), prob)
    there = (place.put(t) for t in given)
    found = swiglu_backward_quantize(*there, gate_up=gate_up, hidden_block=block, alignment=alignment)
    c = found.dz_columns
    got = [*_bytes(found.dz_rows, c, found.hidden_columns), c.starts, c.block_starts]
    got += [] if found.dprob is None else [found.dprob]
    want = swiglu_backward_torch(*given, gate_up, block, alignment)[: len(got)]
    _same(place, f"swiglu {sizes} {columns} {dtype} {gate_up} {block} {alignment}", got, want)


def _weight(place: Place, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = _values(shape, dtype, sum(shape))
    _same(place, f"weight {shape} {dtype}", _bytes(*quantize_weight_both(place.put(w))), weight_both_torch(w))


def _stochastic(place: Place, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _values(shape, dtype, sum(shape)).nan_to_num(0.0, 0.0, 0.0)  # a NaN has other bits on a GPU
    there, signs = place.put(x), 0x5A3C
    _same(place, f"Hadamard {shape} {dtype}", [random_hadamard(there, signs)], [random_hadamard(x, signs)])
    got, want = (_bytes(quantize_nvfp4_stochastic(t, seed=12345678901234567)) for t in (there, x))
    _same(place, f"stochastic rounding {shape} {dtype}", got, want)


def _replayed(place: Place) -> None:
    """Both quantizers of rows in one graph, which sees new values and new sizes of groups."""
    m, columns = 300, 256
    dh, z = (_values((m, size), torch.bfloat16, size) for size in (columns, 2 * columns))
    first = [dh, z, group_offsets([100, 0, 57, 99]), torch.rand(m, generator=torch.Generator().manual_seed(1))]
    second = [dh.flip(0), z.flip(1), group_offsets([0, 199, 1, 56]), first[3].flip(0)]
    given, others = ([place.put(t) for t in tensors] for tensors in (first, second))

    def step(dh: torch.Tensor, z: torch.Tensor, offs: torch.Tensor, prob: torch.Tensor) -> list[torch.Tensor]:
        rows, c = quantize_rows_columns(dh, offs, alignment=32)
        found = swiglu_backward_quantize(dh, z, offs, prob, gate_up="concatenated", alignment=32)
        assert found.dprob is not None
        starts = [c.starts, found.dz_columns.starts, found.hidden_columns.starts]
        return [*_bytes(rows, c, found.dz_rows, found.dz_columns, found.hidden_columns), *starts, found.dprob]

    want = step(*others)
    outs = [torch.empty_like(t) for t in want]
    place.replayed(
        lambda: [out.copy_(t) for out, t in zip(outs, step(*given), strict=True)],
        [*given, *outs],
        [*others, *(torch.ones_like(t) for t in outs)],
    )
    _same(place, "a graph's replay", outs, want)


def train_quantizers(place: Place) -> None:
    """Codes, scales, starts and sums as torch has them on the CPU, every byte written."""
    with _poisoned_memory():
        for rows, dtype, layout in itertools.product(_PROBLEMS, _DTYPES, itertools.product(_BLOCKS, _ALIGNMENTS)):
            _rows_columns(place, rows, dtype, *layout)
        for seed, (gate_up, both), dtype in itertools.product(range(3), _SWIGLU.items(), _DTYPES):
            for columns in both:
                _swiglu(place, seed, gate_up, columns, dtype)
        for dtype in _DTYPES:
            for shape in _WEIGHTS:
                _weight(place, shape, dtype)
            for shape in _STOCHASTIC:
                _stochastic(place, shape, dtype)
    _replayed(place)


def check_quantizers_agree(place: Place) -> None:
    """The GPU's quantisers give torch's bits, tails and outliers included."""
    cases: tuple[tuple[Kind, tuple[int, ...], ScaleMajor], ...] = (
        ("activation", (1, 16), "mn"),
        ("activation", (777, 1040), "mn"),
        ("activation", (777, 1040), "k"),
        ("activation", (129, 4112), "mn"),
        ("weight", (3, 200, 1040), "mn"),
        ("weight", (136, 144), "mn"),
    )
    for (kind, shape, major), dtype in itertools.product(cases, _DTYPES):
        x = (torch.randn(shape) * torch.exp2(torch.randint(-6, 7, shape).float())).to(dtype)
        want = quantize(x, FP8_BLOCK, kind=kind, scale_major=major)
        got = quantize(place.put(x), FP8_BLOCK, kind=kind, scale_major=major)
        place.judge.same(f"scales of {kind} {shape} {dtype}", got.scale, place.put(want.scale))
        place.judge.same(f"codes of {kind} {shape} {dtype}", got.data, place.put(want.data))


CHECKS = {"quantizers agree": Check(check_quantizers_agree, 0), "training quantizers agree": Check(train_quantizers, 0)}
