"""Grouped and dense GEMM on the CPU, slow, obvious and exact where it can be: the oracle of the kernels.

Shares nothing with what it checks: it decodes the operands and works out the groups by itself. Operands of
any two formats, of the same K.

Two accumulations:

"fp8_block"  what the kernels do, with exact arithmetic inside a block. For each K block kb in order
             acc = fma(partial, fl32(sfa * sfb), acc), all three float32, where partial is the block's sum of
             code products, computed in float64 and rounded once to float32. A block is the largest run of K
             that has one scale in both operands: 128 for FP8_BLOCK, 32 for MX, 16 for NVFP4. Global scales
             are applied at the end: fl32(acc * fl32(global a * global b)).
"float64"    every product and sum in float64 (products of codes and scales are exact there).
"""

from __future__ import annotations

import math

import torch

from padless.formats import MXFP4_REPACKED, BlockScaledFormat, BlockScaledTensor
from padless.layouts import plain_scale

ACCUMULATIONS = ("fp8_block", "float64")
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def group_rows(offs: torch.Tensor, num_rows: int) -> list[tuple[int, int]]:
    """[start, end) of each group's rows from cumulative END offsets, safe for any values in offs.

    An end is the running maximum of offs so far, clamped into [0, num_rows]; a group starts where the last one ended.
    Example: offs [3, 2, 9], 7 rows -> [(0, 3), (3, 3), (3, 7)].
    """
    rows, start = [], 0
    for end in offs.tolist():
        end = min(max(end, start), num_rows)
        rows.append((start, end))
        start = end
    return rows


def grouped_gemm_reference(
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "fp8_block",
) -> torch.Tensor:
    """out[m, n] = sum over k of a[m, k] * b[g, n, k] for the rows m of each group g; (M, N).

    a: (M, K) activations, or a plain bfloat16 tensor; b: (G, N, K) weights; offs: (G,) int32 cumulative END
    offsets. Rows in no group are left as they are in `out`; in a fresh result they are NaN. Rounds to nearest
    even. out_dtype is ignored when out is given.
    """
    if b.data.dim() != 3 or offs.shape != (b.shape[0],):
        raise ValueError(f"offs must have one end per group of b {tuple(b.shape)}, got shape {tuple(offs.shape)}")
    if isinstance(a, torch.Tensor):
        a = _with_scales_of_one(a)
    if accumulate not in ACCUMULATIONS:
        raise ValueError(f"accumulate must be one of {ACCUMULATIONS}, got {accumulate!r}")
    if a.data.dim() != 2 or a.logical_shape[-1] != b.logical_shape[-1]:
        raise ValueError(f"a (M, K) and b (.., N, K) must share K, got {a.logical_shape} and {b.logical_shape}")
    if not a.is_activation or not b.is_weight:
        raise ValueError("a must be quantized as an activation and b as a weight")
    shape = (a.shape[0], b.shape[-2])
    dtype = out_dtype if out is None else out.dtype
    if dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be one of {OUT_DTYPES}, got {dtype}")
    if out is None:
        out = torch.full(shape, float("nan"), dtype=dtype, device=a.device)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    a_scale, b_scale = plain_scale(a, offs), plain_scale(b)
    for group, (start, end) in enumerate(group_rows(offs, a.shape[0])):
        if start < end:
            acc = _multiply(
                (a.data[start:end], a_scale[start:end], a.format),
                (b.data[group], b_scale[group], b.format),
                (_of_group(a.global_scale, group), _of_group(b.global_scale, group)),
                accumulate,
            )
            out[start:end] = round_to(acc, out.dtype).to(out.device)
    return out


def _with_scales_of_one(a: torch.Tensor) -> BlockScaledTensor:
    """A plain tensor as a block-scaled one: its values are the codes."""
    plain = BlockScaledFormat("plain", a.dtype, torch.float32, (1, 128), (1, 128), float("inf"))
    shape = plain.scale_shape(tuple(a.shape), "activation")
    return BlockScaledTensor(a, torch.ones(shape, dtype=torch.float32, device=a.device), plain)


def gemm_reference(
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulate: str = "fp8_block",
) -> torch.Tensor:
    """out[m, n] = sum over k of a[m, k] * b[n, k]; a: (M, K) activations, b: (N, K) weights; (M, N)."""
    if b.data.dim() != 2:
        raise ValueError(f"b must be (N, K), got shape {tuple(b.shape)}")
    one_group = BlockScaledTensor(b.data[None], b.scale[None], b.format, b.global_scale, b.scale_layout)
    return grouped_gemm_reference(a, one_group, torch.tensor([a.shape[0]], device="cpu"), out, out_dtype, accumulate)


Operand = tuple[torch.Tensor, torch.Tensor, BlockScaledFormat]  # (rows, K) codes, their plain scales, format


def _multiply(a: Operand, b: Operand, global_scales: tuple[float, float], accumulate: str) -> torch.Tensor:
    """a times b transposed, float32 for "fp8_block" and float64 for "float64"."""
    a_codes, b_codes = _decode_codes(a[0], a[2]), _decode_codes(b[0], b[2])
    # Every scale is a float32 number: exact in float64, whatever its format.
    a_scale, b_scale = a[1].cpu().to(torch.float32), b[1].cpu().to(torch.float32)
    b_rows = b[2].weight_block[0]
    K, n = a_codes.shape[1], b_codes.shape[0]
    step = math.gcd(a[2].block_k, b[2].block_k)
    compute_dtype = torch.float64 if accumulate == "float64" else torch.float32
    acc = torch.zeros((a_codes.shape[0], n), dtype=compute_dtype, device="cpu")
    for k in range(0, K, step):
        # Exact but for e5m2: an e4m3 code product is a multiple of 2^-18, 128 of them stay below 2^25, and
        # float64 never rounds.
        partial = a_codes[:, k : k + step] @ b_codes[:, k : k + step].t()
        sfa = a_scale[:, k // a[2].block_k].to(compute_dtype)
        sfb = b_scale[:, k // b[2].block_k].to(compute_dtype).repeat_interleave(b_rows)[:n]
        scale = sfa[:, None] * sfb[None, :]
        if accumulate == "float64":
            acc += partial * scale
        else:
            acc = fma_float32(partial.to(torch.float32), scale, acc)
    for_both = torch.tensor(global_scales, dtype=compute_dtype, device="cpu").prod()
    return acc * for_both


E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _decode_codes(data: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    """(rows, K) float64 values of codes, before scaling."""
    data = data.cpu()
    if format.codes_per_byte == 1:
        return data.to(torch.float64)
    packed = data.view(torch.uint8).long()
    if format == MXFP4_REPACKED:
        packed = _linear(packed)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device="cpu")
    return torch.stack([table[packed % 16], table[packed // 16]], dim=-1).flatten(-2)


# Where bits 0 .. 3 of the codes 0 .. 3 lie in 32 repacked bits; those of the codes 4 .. 7 lie 16 further on, or less.
_REPACKED = (14, 7, 8, 15, 4, 5, 6, 13, 0, 1, 2, 9, 26, 27, 28, 3)


def _linear(packed: torch.Tensor) -> torch.Tensor:
    """(rows, K / 2) bytes of MXFP4_REPACKED codes as those of MXFP4: bits of words, then tiles of 16 rows x 64 of K."""
    places = torch.tensor([*_REPACKED, *((place + 16) % 32 for place in _REPACKED)], device="cpu")
    bits = packed.reshape(-1, 4)[:, places // 8] >> places % 8 & 1
    codes = (bits.reshape(-1, 4, 8) << torch.arange(8, device="cpu")).sum(-1).reshape(-1, packed.shape[1] // 32, 16, 32)
    codes[:, 1::2] = codes[:, 1::2, torch.arange(16, device="cpu") ^ 3]  # rows of every other tile
    return codes.transpose(1, 2).reshape(packed.shape)


def _of_group(global_scale: torch.Tensor | None, group: int) -> float:
    """The global scale of one group: 1 where there is none."""
    if global_scale is None:
        return 1.0
    return global_scale.flatten()[group if global_scale.numel() > 1 else 0].item()


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float64, of int64 from -1022 to 1023, made of its bits.

    `torch.ldexp` of torch 2.11 reads memory that is not its own where its tensors' GPU is not the current one.
    """
    return ((exponent + 1023) << 52).view(torch.float64)


def fma_float32(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of float32 tensors with a single rounding, as the hardware's fused multiply-add.

    The product is exact in float64 but its sum with z is not: rounding to float64 and then to float32 rounds
    twice and differs from fma when the first rounding lands on a float32 tie. So the float64 sum is rounded
    to odd, which keeps the lost part visible to the second rounding (53 bits >= 24 + 2; Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    product = x.to(torch.float64) * y.to(torch.float64)
    addend = z.to(torch.float64)
    total = product + addend
    # TwoSum: total + lost is the exact sum.
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    return _step_to_odd(total, lost).to(torch.float32)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x rounded once, to nearest even.

    torch narrows float64 to 16 bits through float32, which would round twice.
    """
    if x.dtype == torch.float64 and dtype in (torch.bfloat16, torch.float16):
        nearest = x.to(torch.float32)
        lost = x - nearest.to(torch.float64)  # exact: they are neighbours
        x = _step_to_odd(nearest, lost)
    return x.to(dtype)


def _step_to_odd(rounded: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """The odd one of the two floats around rounded + lost, rounded being the nearest; exact values stay."""
    mantissa = rounded.view(torch.int64 if rounded.dtype == torch.float64 else torch.int32)
    inexact = rounded.isfinite() & lost.isfinite() & (lost != 0)
    neighbour = torch.nextafter(rounded, torch.copysign(torch.full_like(rounded, float("inf")), lost.to(rounded.dtype)))
    return torch.where(inexact & (mantissa & 1 == 0), neighbour, rounded)
