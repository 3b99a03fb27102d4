"""Operands of any pair of formats: drawn, moved to a device, and parts of them.

For tests, verification, benchmarks and tuning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.layouts import empty_mn_major, to_blocked, to_blocked_groups, to_mn_major
from padless.row_groups import clamped_ends
from padless.runtime.choices import Kind

BF16 = "BF16"  # plain bfloat16 activations, as in padless.kernels.table
Activation = BlockScaledTensor | torch.Tensor


@dataclass(frozen=True)
class Operands:
    """a: (M, K) activations; b: (G, N, K) weights; offs: (G,) int32 end rows of the groups."""

    a: Activation
    b: BlockScaledTensor
    offs: torch.Tensor

    @property
    def bytes(self) -> int:
        return bytes_of(self.a) + bytes_of(self.b)


def bytes_of(t: Activation) -> int:
    """Bytes of codes, scales and global scales, or of a plain tensor."""
    parts = (t,) if isinstance(t, torch.Tensor) else (t.data, t.scale, t.global_scale)
    return sum(part.nbytes for part in parts if part is not None)


def make_operands(
    a_format: str, b_format: str, sizes: list[int], n: int, k: int, *, seed: int, device: str | torch.device
) -> Operands:
    """Standard normal values of ``sizes`` rows a group, the same for every format; MN-major scales for FP8_BLOCK.

    a_format: a format's name or "BF16". The weights are quantised expert by expert, so that no bf16 copy of all of them
    is needed next to them. Raises ValueError for an unknown format.
    """
    from padless.ops.grouped_gemm import group_offsets

    for name, allowed in ((a_format, {BF16, *FORMAT_BY_NAME}), (b_format, set(FORMAT_BY_NAME))):
        if name not in allowed:
            raise ValueError(f"format is {name!r}; allowed: {', '.join(sorted(allowed))}")
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(sum(sizes), k, dtype=torch.bfloat16, device=device, generator=generator)
    offs = group_offsets(torch.tensor(sizes, device=device))
    a = quantized(x, a_format, "activation", scale_major="mn" if a_format == FP8_BLOCK.name else None)
    experts: list[Any] = []
    for _ in sizes:
        w = torch.randn(1, n, k, dtype=torch.bfloat16, device=device, generator=generator)
        experts.append(quantized(w, b_format, "weight"))
    return Operands(a, _stacked(experts), offs)


def _stacked(experts: list[BlockScaledTensor]) -> BlockScaledTensor:
    """Experts (1, N, K) as one (G, N, K)."""

    def joined(parts: list[torch.Tensor]) -> torch.Tensor:
        # Codes of less than a byte, and one-byte scales, are moved as bytes: torch.cat does not know every type.
        dtype = parts[0].dtype
        narrow = dtype.itemsize == 1
        whole = torch.cat([part.view(torch.uint8) if narrow else part for part in parts])
        return whole.view(dtype) if narrow else whole

    first = experts[0]
    scales = [e.global_scale.reshape(1) for e in experts if e.global_scale is not None]
    return BlockScaledTensor(
        joined([e.data for e in experts]),
        joined([e.scale for e in experts]),
        first.format,
        torch.cat(scales) if scales else None,
        first.scale_layout,
    )


def quantized(values: torch.Tensor, format: str, kind: Kind, **options: Any) -> Any:
    """Values in a format by its name, "BF16" for plain bfloat16 activations. kind: "activation" or "weight"."""
    from padless.quantization.quantize import quantize

    if format == BF16:
        return values.to(torch.bfloat16)
    return quantize(values, FORMAT_BY_NAME[format], kind=kind, **{"scale_layout": "plain"} | options)


def any_codes(
    fmt: BlockScaledFormat, shape: tuple[int, ...], kind: str, groups: int, generator: torch.Generator
) -> BlockScaledTensor:
    """Codes of any finite bits, and scales over 16 powers of two (NVFP4's: any positive e4m3), plain.

    Sums of products stay inside float16. groups: NVFP4 has one global scale or one for each group.
    """
    stored = (*shape[:-1], shape[-1] // fmt.codes_per_byte)
    byte = torch.randint(0, 256, stored, generator=generator, dtype=torch.uint8)
    if fmt.codes_per_byte == 1:
        finite = byte.view(fmt.data_dtype).float().isfinite()
        byte = torch.where(finite, byte, torch.zeros_like(byte))
        if fmt.data_dtype == torch.float8_e5m2:
            byte &= 0xBF
    scale_shape = fmt.scale_shape(shape, kind)
    global_scale = None
    if fmt.scale_dtype == torch.float32:
        scale = torch.exp2(torch.rand(scale_shape, generator=generator) * 8 - 12)
    elif fmt.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.randint(127 - 12, 127 + 4, scale_shape, generator=generator, dtype=torch.uint8)
        scale = scale.view(torch.float8_e8m0fnu)
    else:
        scale = torch.randint(1, 0x7F, scale_shape, generator=generator, dtype=torch.uint8)
        scale = scale.view(torch.float8_e4m3fn)
        count = (1, groups)[int(torch.randint(0, 2, (), generator=generator))]
        global_scale = torch.exp2(torch.rand(count, generator=generator) * 4 - 10)
    return BlockScaledTensor(byte.view(fmt.data_dtype), scale, fmt, global_scale)


# --- the same operands elsewhere -------------------------------------------------------------------------


def in_layout(t: BlockScaledTensor, layout: str, offs: torch.Tensor | None = None) -> BlockScaledTensor:
    """The operand, of plain scales, with them in another layout. offs: for "blocked_groups"."""
    if layout == "plain":
        return t
    if layout == "blocked":
        scale = to_blocked(t.scale)
    else:
        assert offs is not None, "blocked_groups needs offs"
        scale = to_blocked_groups(t.scale, offs)
    return BlockScaledTensor(t.data, scale, t.format, t.global_scale, layout)


def spans(ends: Iterable[int], rows: int) -> list[tuple[int, int]]:
    """[start, end) of every group of rows that ends so."""
    return list(itertools.pairwise([0, *clamped_ends(ends, rows)]))


def moved(t: Any, device: str | torch.device) -> Any:
    """Tensors and BlockScaledTensors on the device, all else as it is. MN-major scales stay MN-major, and what lies
    between their columns is NaN.
    """
    if isinstance(t, torch.Tensor):
        return t.to(device)
    if isinstance(t, BlockScaledTensor) and t.scale.dtype == torch.float32 and t.scale_major == "mn":
        return BlockScaledTensor(t.data.to(device), mn_major_in_nan(t.scale.to(device)), t.format)
    return t.to(device) if isinstance(t, BlockScaledTensor) else t


def mn_major_in_nan(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales of activations (M, blocks) MN-major, NaN in what lies between the columns."""
    rows, columns = scale.shape
    padded = empty_mn_major(rows, columns, scale.device)
    padded.as_strided((columns, padded.stride(1)), (padded.stride(1), 1)).fill_(math.nan)
    return padded.copy_(scale)


# --- parts of operands -----------------------------------------------------------------------------------


def picked(t: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows or groups in separate memory; narrow types are moved as bytes, which is all torch can do with them."""
    narrow = t.element_size() == 1
    return (t.contiguous().view(torch.uint8) if narrow else t)[index].contiguous().view(t.dtype)


def rows_of(a: Activation, index: torch.Tensor) -> Activation:
    """These rows of activations with plain scales."""
    if isinstance(a, torch.Tensor):
        return picked(a, index)
    scale = picked(a.scale, index)
    if a.format == FP8_BLOCK:
        scale = to_mn_major(scale)
    return BlockScaledTensor(picked(a.data, index), scale, a.format, a.global_scale)


def groups_of(b: BlockScaledTensor, groups: Sequence[int]) -> BlockScaledTensor:
    """The weights of these groups, (len(groups), N, K), with plain scales."""
    index = torch.tensor(groups, device=b.device)
    scale = b.global_scale
    if scale is not None and scale.numel() > 1:
        scale = picked(scale, index)
    return BlockScaledTensor(picked(b.data, index), picked(b.scale, index), b.format, scale, b.scale_layout)
