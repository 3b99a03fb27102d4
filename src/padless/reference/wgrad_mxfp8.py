"""Weight gradients of MXFP8 operands with scales along the tokens, in float64."""

from __future__ import annotations

import torch

from padless.formats import ceil_div


def grouped_gemm_wgrad_mxfp8_reference(
    dy: tuple[torch.Tensor, torch.Tensor],
    x: tuple[torch.Tensor, torch.Tensor],
    offs: torch.Tensor,
    *,
    out: torch.Tensor,
    accumulate: bool,
) -> torch.Tensor:
    """The gradient of checked arguments: float64 sums, rounded to float32, then stored or added."""
    start = first = 0
    for group, end in enumerate(offs.tolist()):
        end = max(min(end, dy[0].shape[0]), start)
        values = [decoded(operand, start, end, first) for operand in (dy, x)]
        total = (values[0].t() @ values[1]).to(torch.float32)
        if not accumulate:
            out[group] = total
        elif end > start:
            out[group] += total
        first += 4 * ceil_div(end - start, 128)
        start = end
    return out


def decoded(operand: tuple[torch.Tensor, torch.Tensor], start: int, end: int, first: int) -> torch.Tensor:
    """Rows start .. end of an operand in float64; `first`: the row of the scales of the first 32."""
    codes, scale = operand
    blocks = torch.arange(end - start, device=codes.device) // 32 + first
    return codes[start:end].to(torch.float64) * scale[blocks].to(torch.float64)
