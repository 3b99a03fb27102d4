"""Weight gradients of NVFP4 operands along the tokens, in float64."""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor
from padless.layouts import from_blocked, unpack_fp4

_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1


def grouped_gemm_wgrad_nvfp4_reference(
    dy: BlockScaledTensor, x: BlockScaledTensor, ends: torch.Tensor, *, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """The gradient of checked arguments: float64 sums, rounded to float32, times both global scales; stored or added."""
    assert dy.global_scale is not None
    assert x.global_scale is not None
    factor = dy.global_scale.to(torch.float32) * x.global_scale.to(torch.float32)
    values = [decoded(t) for t in (dy, x)]
    start = 0
    for group, end in enumerate(ends.tolist()):
        end = max(min(end, values[0].shape[1]), start)
        total = (values[0][:, start:end] @ values[1][:, start:end].t()).to(torch.float32) * factor
        if not accumulate:
            out[group] = total
        elif end > start:
            out[group] += total
        start = end
    return out


def decoded(t: BlockScaledTensor) -> torch.Tensor:
    """Codes times the scales of their blocks, (features, tokens) float64, without the global scale."""
    codes = unpack_fp4(t.data).to(torch.int64)
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float64, device=codes.device)
    scale = from_blocked(t.scale, codes.shape[0], codes.shape[1] // 16).to(torch.float64)
    return table[codes] * scale.repeat_interleave(16, dim=1)
