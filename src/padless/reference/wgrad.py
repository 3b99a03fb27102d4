"""Weight gradients on the CPU or GPU, slow and obvious: the oracle of the weight-gradient kernel.

Shares nothing with what it checks: it finds the groups' tokens and scales by itself.

Three accumulations:

"tensor_core"  what Hopper computes, bit for bit. For each block of 128 tokens of a group in order
               acc = fma(partial, fl32(scale of dY * scale of X), acc), all float32, where partial is the tensor core's
               sum, 32 tokens at a time (``multiply_accumulate``).
"fp8_block"    the same with an exact partial, rounded once to float32.
"float64"      every product and sum in float64 (products of codes and scales are exact there).
"""

from __future__ import annotations

import torch

from padless.layouts import GroupedColumns
from padless.reference.gemm import fma_float32, group_rows, power_of_two, round_to

ACCUMULATIONS = ("tensor_core", "fp8_block", "float64")
_BLOCK = 128  # tokens that share a scale
_STEP = 32  # tokens that the tensor core sums together
_FRACTION = 13  # fractional bits, of the largest term, that the tensor core keeps of every term and of a sum
_CHUNK = 1 << 24  # elements of a temporary tensor


def grouped_gemm_wgrad_reference(
    dy: GroupedColumns,
    x: GroupedColumns,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "fp8_block",
) -> torch.Tensor:
    """out[g] (+)= dY[tokens of g]^T X[tokens of g], (G, N, K); rounded to nearest even.

    dy: (N, T) codes, scales per (1, 128). x: (K, T') codes, scales per (1, 128) or (128, 128). out_dtype is bfloat16,
    float32 or float64 and ignored when ``out`` is given. accumulate: adds to ``out`` in its type; groups without tokens
    are left alone, which otherwise get zeros.
    """
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation is {accumulation!r}; allowed: {', '.join(map(repr, ACCUMULATIONS))}")
    if accumulate and out is None:
        raise ValueError("accumulate needs out, the tensor to add to; give one")
    shape = (dy.offs.shape[0], dy.data.shape[0], x.data.shape[0])
    if out is None:
        out = torch.empty(shape, dtype=out_dtype, device=dy.data.device)
    for group, (start, end) in enumerate(group_rows(dy.offs, min(dy.data.shape[1], x.data.shape[1]))):
        if start == end:
            if not accumulate:
                out[group] = 0
            continue
        product = group_product(dy, x, group, end - start, accumulation)
        if accumulate:
            out[group] += product.to(out.dtype)
        else:
            out[group] = round_to(product, out.dtype)
    return out


def group_product(dy: GroupedColumns, x: GroupedColumns, group: int, tokens: int, accumulation: str) -> torch.Tensor:
    """(N, K) of one group with ``tokens`` tokens: float32, or float64 for "float64"."""
    a_start, b_start = int(dy.starts[group]), int(x.starts[group])
    block_start = int(dy.block_starts[group])
    n, k = dy.data.shape[0], x.data.shape[0]
    exact = accumulation == "float64"
    dtype = torch.float64 if exact else torch.float32
    acc = torch.zeros((n, k), dtype=dtype, device=dy.data.device)
    for block in range(-(-tokens // _BLOCK)):
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, tokens)
        a = dy.data[:, a_start + first : a_start + last]
        b = x.data[:, b_start + first : b_start + last]
        sfa = dy.scale[block_start + block].to(dtype)
        sfb = x.scale[block_start + block].to(dtype).repeat_interleave(x.block[0])[:k]
        scale = sfa[:, None] * sfb[None, :]
        if accumulation == "tensor_core":
            partial = tensor_core_product(a, b)
        else:
            partial = (a.to(torch.float64) @ b.to(torch.float64).t()).to(dtype)  # exact before it is rounded
        acc = acc + partial * scale if exact else fma_float32(partial, scale, acc)
    return acc


def tensor_core_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (N, T) times b (K, T) transposed, e4m3 codes of at most 128 tokens: the sum that Hopper's FP8 wgmma leaves,
    float32 (N, K), when it multiplies 32 tokens at a time and adds each time to what it has.
    """
    rows = max(1, _CHUNK // (_STEP * b.shape[0]))
    parts = []
    for part in a.split(rows):
        acc = torch.zeros((part.shape[0], b.shape[0]), dtype=torch.float32, device=a.device)
        for t in range(0, a.shape[1], _STEP):
            acc = multiply_accumulate(part[:, t : t + _STEP], b[:, t : t + _STEP], acc)
        parts.append(acc)
    return torch.cat(parts)


def multiply_accumulate(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """c + a @ b.T as one instruction of Hopper's tensor core computes it: a (N, T), b (K, T) e4m3, T <= 32; c (N, K)
    float32 with at most 13 fractional bits, as the instruction itself leaves it.

    Products are exact. All terms, c among them, are cut toward zero to 13 fractional bits of the largest one's exponent
    (a product's is the sum of its factors'; one with a zero factor has none), added exactly, and the sum is cut to 13
    fractional bits. Source: the models of MMA-Sim (arXiv 2511.10909), checked on an H200.
    """
    a_significand, a_exponent = _split_e4m3(a)
    b_significand, b_exponent = _split_e4m3(b)
    significand = a_significand[:, None, :] * b_significand[None, :, :]  # (N, K, T), 6 fractional bits
    exponent = a_exponent[:, None, :] + b_exponent[None, :, :]
    least = torch.full_like(exponent, -1000)
    exponent = torch.where(significand == 0, least, exponent)
    c_fraction, c_exponent = torch.frexp(c.double())  # c = fraction * 2^exponent, 1/2 <= |fraction| < 1
    c_significand = (c_fraction * 2 ** (_FRACTION + 1)).long()
    c_exponent = torch.where(c == 0, least[..., 0], c_exponent.long() - 1)
    largest = torch.maximum(exponent.amax(-1), c_exponent)
    total = _cut(significand << (_FRACTION - 6), largest[..., None] - exponent).sum(-1)
    total += _cut(c_significand, largest - c_exponent)
    bits = torch.frexp(total.double())[1].long()  # |total| < 2^bits
    surplus = (bits - (_FRACTION + 1)).clamp(min=0)
    total = _cut(total, surplus) << surplus
    result = (total.double() * power_of_two((largest - _FRACTION).clamp(min=-200))).float()
    nan = a.float().isnan().any(1)[:, None] | b.float().isnan().any(1)[None, :] | c.isnan()
    return torch.where(nan, torch.full_like(result, float("nan")), result)


def _cut(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x / 2^bits, toward zero."""
    return x.sign() * (x.abs() >> bits.clamp(max=62))


def _split_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as integers: signed significands with 3 fractional bits, and exponents (subnormals have the least)."""
    code = x.view(torch.uint8).long()
    biased, mantissa = code >> 3 & 15, code & 7
    significand = torch.where(biased == 0, mantissa, mantissa + 8)
    return torch.where(code >= 128, -significand, significand), biased.clamp(min=1) - 7
