"""Weighted sum of what a token's experts gave, and its gradients. No atomics: one order, one result."""

from __future__ import annotations

import torch

from padless.arguments import check_readable, is_one_of, shown
from padless.moe import ops
from padless.moe.checks import check_inverse, check_matrix
from padless.quantization.quantize import INPUT_DTYPES


def combine(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor | None,
    shared: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """out[t] = sum over j of weights[t, j] * y[inverse[t, j]], plus shared[t]; (T, N).

    y: (S, N), S at least T * k, the experts' rows; bfloat16, float16 or float32, as all the others.
    inverse: (T, k) int32 of `route`; a slot with a negative entry adds nothing, whatever its row and weight hold.
    weights: (T, k), or None for ones.
    shared: (T, N), the shared expert's output.
    out_dtype: of the result; None is y's.

    In float32: total = 0; for j in order, total = fl(total + fl(weight * y)); then total = fl(total + shared), and one
    rounding to out_dtype. No fused multiply-add. One launch. Raises ValueError.
    """
    check_inverse(inverse, None, None)
    check_matrix("y", y, None, None, inverse.device)
    check_inverse(inverse, None, y.shape[0])
    tokens, top_k = inverse.shape
    if weights is not None:
        check_matrix("weights", weights, tokens, top_k, y.device)
    if shared is not None:
        check_matrix("shared", shared, tokens, y.shape[1], y.device)
    check_readable(y=y, weights=weights, shared=shared)
    dtype = y.dtype if out_dtype is None else out_dtype
    if not is_one_of(dtype, INPUT_DTYPES):
        raise ValueError(f"out_dtype is {shown(dtype)}; allowed: torch.bfloat16, torch.float16, torch.float32")
    out: torch.Tensor = ops.call("combine", y, inverse, weights, shared, dtype)
    return out


def combine_backward(
    dout: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dy (S, N) in y's dtype, dweights (T, k) float32) of `combine`, in one pass over y and dout.

    dout: (T, N), the gradient of the result; that of shared is dout itself. y, inverse, weights: as in `combine`; y has
        exactly T * k rows.

    dy[inverse[t, j]] = fl(weights[t, j] * dout[t]), rounded once more to y's dtype; rows of the tail are 0.
    dweights[t, j] = y[inverse[t, j]] . dout[t], and 0 where inverse is negative. In float32, in one order whatever the
    batch: lane l of 256 adds fl(y * dout) of columns l, l + 256, ..; then lanes c and c + 128 are added, c and c + 64,
    and so on. Raises ValueError.
    """
    check_inverse(inverse, None, None)
    check_matrix("y", y, inverse.numel(), None, inverse.device)
    check_matrix("dout", dout, inverse.shape[0], y.shape[1], y.device)
    check_matrix("weights", weights, inverse.shape[0], inverse.shape[1], y.device)
    check_readable(dout=dout, y=y, weights=weights)
    dy, dweights = ops.call("combine_backward", dout, y, inverse, weights)
    return dy, dweights
