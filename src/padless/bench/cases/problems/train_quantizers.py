"""The quantizers of training, as `padless bench quantize` times them."""

from __future__ import annotations

from functools import partial

import torch

from padless.formats import ceil_div
from padless.quantization.rows_columns import quantize_rows_columns
from padless.quantization.swiglu_backward import swiglu_backward_quantize
from padless.quantization.weight_both import quantize_weight_both
from padless.testing.timing import Call


def training_calls(
    x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, generator: torch.Generator
) -> tuple[dict[str, Call], dict[str, int]]:
    """The quantizers of training on x (M, K), weights w and the groups of x: calls, and the fewest bytes each must move.

    Slack between groups is not counted. SwiGLU's backward is of M x K / 4 gradients, so that it moves about as much.
    """
    m, k = x.shape
    hidden = k // 4
    dh = torch.randn(m, hidden, dtype=x.dtype, device=x.device, generator=generator)
    z = torch.randn(m, 2 * hidden, dtype=x.dtype, device=x.device, generator=generator)
    chosen = torch.randperm(m, device=x.device, generator=generator).int()
    prob = torch.rand(m, device=x.device, generator=generator)
    row_scales, column_scales = 4 * m * ceil_div(k, 128), 4 * ceil_div(m, 128) * k
    square_scales = 4 * ceil_div(m, 128) * ceil_div(k, 128)
    calls: dict[str, Call] = {
        "rows and columns, 1x128": lambda: quantize_rows_columns(x, offs),
        "rows and columns, 128x128": lambda: quantize_rows_columns(x, offs, column_block=(128, 128)),
        "rows and columns, 128x128, of chosen rows": lambda: quantize_rows_columns(
            x, offs, column_block=(128, 128), tokens=chosen
        ),
        "columns alone, 1x128": lambda: quantize_rows_columns(x, offs, rows=False),
        "weights and transposes": lambda: quantize_weight_both(w),
    }
    moved = {
        "rows and columns, 1x128": 4 * m * k + row_scales + column_scales,
        "rows and columns, 128x128": 4 * m * k + row_scales + square_scales,
        "rows and columns, 128x128, of chosen rows": 4 * m * k + 4 * m + row_scales + square_scales,
        "columns alone, 1x128": 3 * m * k + column_scales,
        "weights and transposes": 4 * w.numel() + 8 * w.shape[0] * ceil_div(k, 128) ** 2,
    }
    for gate_up in ("concatenated", "interleaved"):
        name = f"swiglu backward, {gate_up}"
        calls[name] = partial(swiglu_backward_quantize, dh, z, offs, prob, gate_up=gate_up)
        scales = m * ceil_div(2 * hidden, 128) + ceil_div(m, 128) * 3 * hidden
        moved[name] = 11 * m * hidden + 8 * m + 4 * scales
    return calls, moved
