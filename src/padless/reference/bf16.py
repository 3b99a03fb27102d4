"""Products of plain bfloat16 operands on the CPU or GPU, slow and obvious: the oracle of Hopper's bf16 kernels.

Shares nothing with what it checks. Three accumulations:

"tensor_core"  what Hopper computes, bit for bit: the tensor core adds 16 products at a time to a float32 sum, in order
               (``multiply_accumulate``).
"float32"      every product and sum in float64, rounded once to float32.
"float64"      the same, not rounded.
"""

from __future__ import annotations

import torch

from padless.reference.gemm import group_rows, power_of_two, round_to

ACCUMULATIONS = ("tensor_core", "float32", "float64")
STEP = 16  # products that the tensor core adds together
_FRACTION = 25  # fractional bits, of the largest term, that it keeps of every term
_SIGNIFICANT = 24  # bits that it keeps of a sum
_LEAST = -149  # exponent of the smallest float32 number
_NONE = -1000  # in place of zero's exponent
_CHUNK = 1 << 24  # elements of a temporary tensor


def grouped_gemm_wgrad_rows_reference(
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "float32",
) -> torch.Tensor:
    """out[g] (+)= dy[rows of g]^T x[rows of g], (G, N, K); rounded to nearest even.

    dy: (M, N), x: (M, K), bfloat16. offs: (G,) cumulative END rows. out_dtype is ignored when ``out`` is given.
    accumulate: adds to ``out`` in its type; groups without rows are left alone, which otherwise get zeros.
    """
    _check(accumulation)
    if accumulate and out is None:
        raise ValueError("accumulate needs out, the tensor to add to; give one")
    if out is None:
        shape = (offs.shape[0], dy.shape[1], x.shape[1])
        out = torch.empty(shape, dtype=out_dtype, device=dy.device)
    for group, (start, end) in enumerate(group_rows(offs, dy.shape[0])):
        if start == end:
            if not accumulate:
                out[group] = 0
            continue
        total = product(dy[start:end].t(), x[start:end].t(), accumulation)
        if accumulate:
            out[group] += total.to(out.dtype)
        else:
            out[group] = round_to(total, out.dtype)
    return out


def grouped_gemm_plain_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "float32",
) -> torch.Tensor:
    """out[m, n] = sum over k of a[m, k] * b[g, n, k] for the rows m of each group g, (M, N); rounded to nearest even.

    a: (M, K), b: (G, N, K), bfloat16, any strides. offs: (G,) cumulative END rows. Rows in no group are left as they are
    in ``out``; in a new result they are NaN. out_dtype is ignored when ``out`` is given.
    """
    _check(accumulation)
    if out is None:
        out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=out_dtype, device=a.device)
    for group, (start, end) in enumerate(group_rows(offs, a.shape[0])):
        if start < end:
            out[start:end] = round_to(product(a[start:end], b[group], accumulation), out.dtype)
    return out


def _check(accumulation: str) -> None:
    if accumulation not in ACCUMULATIONS:
        raise ValueError(f"accumulation is {accumulation!r}; allowed: {', '.join(map(repr, ACCUMULATIONS))}")


def product(a: torch.Tensor, b: torch.Tensor, accumulation: str) -> torch.Tensor:
    """a (N, T) times b (K, T) transposed: (N, K) float32, or float64 for "float64"."""
    if accumulation != "tensor_core":
        total = a.to(torch.float64) @ b.to(torch.float64).t()
        return total if accumulation == "float64" else total.to(torch.float32)
    rows = max(1, _CHUNK // (STEP * b.shape[0]))
    parts = []
    for part in a.split(rows):
        sums = torch.zeros((part.shape[0], b.shape[0]), dtype=torch.float32, device=a.device)
        for t in range(0, a.shape[1], STEP):
            sums = multiply_accumulate(part[:, t : t + STEP], b[:, t : t + STEP], sums)
        parts.append(sums)
    return torch.cat(parts)


def multiply_accumulate(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """c + a @ b.T as one instruction of Hopper's tensor core computes it: a (N, T), b (K, T) bfloat16, T <= 16; c (N, K)
    float32.

    Products are exact. All terms, c among them, are cut toward zero to 25 fractional bits of the largest one's exponent
    (a product's is the sum of its factors'; zero has none), added exactly, and the sum is cut toward zero to
    float32. What is not finite comes out as infinity or NaN, as in any arithmetic. Source: the models of MMA-Sim (arXiv
    2511.10909), checked on an H200.
    """
    a_significand, a_exponent = _split(a.float(), 8)
    b_significand, b_exponent = _split(b.float(), 8)
    c_significand, c_exponent = _split(c, _SIGNIFICANT)
    significand = a_significand[:, None, :] * b_significand[None, :, :]  # (N, K, T), 14 fractional bits
    exponent = a_exponent[:, None, :] + b_exponent[None, :, :]
    exponent = exponent.masked_fill(significand == 0, _NONE)
    largest = torch.maximum(exponent.amax(-1), c_exponent.masked_fill(c == 0, _NONE))
    total = _cut(significand << (_FRACTION - 14), largest[..., None] - exponent).sum(-1)
    total += _cut(c_significand << (_FRACTION - 23), largest - c_exponent)
    unit = largest - _FRACTION  # the exponent of the total's last bit
    bits = torch.frexp(total.double())[1].long()  # |total| < 2^bits
    surplus = torch.maximum(bits - _SIGNIFICANT, _LEAST - unit).clamp(min=0)
    total = _cut(total, surplus) << surplus.clamp(max=62)
    result = (total.double() * power_of_two(unit.clamp(min=-400))).float()
    plain = a.double() @ b.double().t() + c.double()
    return torch.where(plain.isfinite(), result, plain.float())


def _cut(x: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """x / 2^bits, toward zero."""
    return x.sign() * (x.abs() >> bits.clamp(max=62))


def _split(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 numbers of at most ``bits`` significant bits as integers: signed significands of that many bits, and the
    exponents of their first bits. Subnormal numbers and zero have the least exponent, -126, and shorter significands.
    """
    code = x.view(torch.int32).long() & 0xFFFFFFFF
    biased, mantissa = code >> 23 & 0xFF, code & 0x7FFFFF
    significand = torch.where(biased == 0, mantissa, mantissa | 0x800000) >> (_SIGNIFICANT - bits)
    return torch.where(x.signbit(), -significand, significand), biased.clamp(min=1) - 127
