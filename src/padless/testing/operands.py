"""Operands of any pair of formats for a benchmark: random values, quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import FORMATS, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor

BF16 = "BF16"  # plain bfloat16 activations, as in padless.kernels.table
FORMAT_BY_NAME: dict[str, BlockScaledFormat] = {format.name: format for format in FORMATS}


@dataclass(frozen=True)
class Operands:
    """a: (M, K) activations; b: (G, N, K) weights; offs: (G,) int32 end rows of the groups."""

    a: BlockScaledTensor | torch.Tensor
    b: BlockScaledTensor
    offs: torch.Tensor

    @property
    def bytes(self) -> int:
        """Bytes of codes, scales and global scales, or of the plain activations."""
        return sum(_bytes(t) for t in (self.a, self.b))


def _bytes(t: BlockScaledTensor | torch.Tensor) -> int:
    parts = (t,) if isinstance(t, torch.Tensor) else (t.data, t.scale, t.global_scale)
    return sum(part.nbytes for part in parts if part is not None)


def make_operands(
    a_format: str, b_format: str, sizes: list[int], n: int, k: int, *, seed: int, device: str | torch.device
) -> Operands:
    """Standard normal values of ``sizes`` rows a group, the same for every format; MN-major scales for FP8_BLOCK.

    a_format: a format's name or "BF16". The weights are quantised expert by expert, so that no bf16 copy of all of them
    is needed beside them. Raises ValueError for an unknown format.
    """
    from padless.ops.grouped_gemm import group_offsets
    from padless.quantization.quantize import quantize

    for name, allowed in ((a_format, {BF16, *FORMAT_BY_NAME}), (b_format, set(FORMAT_BY_NAME))):
        if name not in allowed:
            raise ValueError(f"format is {name!r}; allowed: {', '.join(sorted(allowed))}")
    device = torch.device(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(sum(sizes), k, dtype=torch.bfloat16, device=device, generator=generator)
    offs = group_offsets(torch.tensor(sizes, device=device))
    a: BlockScaledTensor | torch.Tensor = x
    if a_format != BF16:
        major = "mn" if FORMAT_BY_NAME[a_format] == FP8_BLOCK else None
        a = quantize(x, FORMAT_BY_NAME[a_format], kind="activation", scale_major=major)
    experts = []
    for _ in sizes:
        w = torch.randn(1, n, k, dtype=torch.bfloat16, device=device, generator=generator)
        experts.append(quantize(w, FORMAT_BY_NAME[b_format], kind="weight"))
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
