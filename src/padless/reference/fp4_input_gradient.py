"""The gradient of rows through FP4 weights on the CPU or GPU, slow and obvious: the oracle of Hopper's kernel.

Accumulations as in `padless.reference.bf16`. "tensor_core" is what Hopper computes, bit for bit: code times scale is a
bfloat16 number, the tensor core adds, and the float32 sum is multiplied by the global scale.
"""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor
from padless.layouts import plain_scale, unpack_fp4
from padless.reference.bf16 import product
from padless.reference.gemm import E2M1_VALUES, group_rows, round_to


def fp4_input_gradient_reference(
    dy: torch.Tensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor | None,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "float64",
) -> torch.Tensor:
    """out[m, k] = sum over n of dy[m, n] * weights[g, n, k] for the rows m of each group g, (M, K), rounded once.

    dy: (M, N) bfloat16. weights: (G, N, K) MXFP4 or NVFP4. offs: (G,) cumulative END rows, None for one group of all.
    Rows in no group are left as they are in ``out``; in a new result they are NaN. out_dtype is ignored when ``out`` is
    given.
    """
    rows, shared = dy.shape[0], weights.global_scale
    if out is None:
        shape = (rows, weights.logical_shape[2])
        out = torch.full(shape, float("nan"), dtype=out_dtype, device=dy.device)
    scale = plain_scale(weights)
    for group, (start, end) in enumerate([(0, rows)] if offs is None else group_rows(offs, rows)):
        if start < end:
            values = _decoded(weights.data[group], scale[group], weights.format.block_k)
            sums = product(dy[start:end], values.to(torch.bfloat16).t(), accumulation)
            if shared is not None:
                sums *= shared[group if shared.numel() > 1 else 0]
            out[start:end] = round_to(sums, out.dtype)
    return out


def _decoded(data: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """(N, K) float64 values of codes times the scales of their blocks."""
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64, device=data.device)
    return table[unpack_fp4(data).long()] * scale.to(torch.float64).repeat_interleave(block, 1)
