"""Products that quantize their left side, as torch.library operators: `project` of groups of rows and `dense`.

They have no derivative: `without_backward` says so when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.moe import ops
from padless.moe.layer import BF16, Projection
from padless.ops.grouped_gemm import gemm
from padless.quantization.quantize import quantize


def project(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    weights: BlockScaledTensor,
    bias: torch.Tensor | None,
    activations: str,
) -> torch.Tensor:
    """x[rows] @ weights of its group, plus bias, (R, N) bfloat16; rows from offs[-1] on hold anything.

    x: (T, K). rows: (R,) int32, or None for all of x. offs: (E,) int32 end rows. weights: (E, N, K). bias: (E, N).
    activations: name of the format that x is quantized to, "BF16" for none.
    """
    result: torch.Tensor = ops.call("transformers_project", x, rows, offs, *ops.packed(weights), bias, activations)
    return result


def dense(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x (M, K) quantized to FP8_BLOCK @ codes (N, K).T, (M, N); scale (ceil(N / 128), ceil(K / 128)) float32."""
    result: torch.Tensor = ops.call("transformers_dense", x, codes, scale, out_dtype)
    return result


def _project_fake(x: torch.Tensor, rows: Any, offs: Any, w: torch.Tensor, *arguments: Any) -> torch.Tensor:
    count = x.shape[0] if rows is None else rows.shape[0]
    return x.new_empty((count, w.shape[1]), dtype=torch.bfloat16)


@ops.operator(
    "transformers_project",
    "(Tensor x, Tensor? rows, Tensor offs, Tensor w, Tensor w_scale, Tensor? w_global_scale, str w_format, "
    "str w_layout, Tensor? bias, str activations) -> Tensor",
    _project_fake,
)
def _project(
    x: torch.Tensor, rows: torch.Tensor | None, offs: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor,
    w_global: torch.Tensor | None, w_format: str, w_layout: str, bias: torch.Tensor | None, activations: str,
) -> torch.Tensor:  # fmt: skip
    weights = ops.unpacked(w, w_scale, w_global, w_format, w_layout)
    a: BlockScaledTensor | torch.Tensor
    if activations == BF16:
        # A copy: operators may not return their input, and the kernels need rows on 16 bytes.
        a = x.to(torch.bfloat16) if rows is None else x.index_select(0, rows).to(torch.bfloat16)
        a = a.contiguous()
    else:
        a = quantize(x, FORMAT_BY_NAME[activations], rows=rows)
    return Projection(weights, bias, None).product(a, offs)


def _dense_fake(x: torch.Tensor, codes: torch.Tensor, scale: Any, out_dtype: torch.dtype) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=out_dtype)


@ops.operator(
    "transformers_dense", "(Tensor x, Tensor codes, Tensor scale, ScalarType out_dtype) -> Tensor", _dense_fake
)
def _dense(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    n = codes.shape[0]
    more = -n % 8  # the product's rows are whole pieces of 16 bytes; a block of 128 holds the rows added
    if more:
        codes = torch.nn.functional.pad(codes.view(torch.uint8), (0, 0, 0, more)).view(torch.float8_e4m3fn)
    b = BlockScaledTensor(aligned(codes), scale.contiguous(), FP8_BLOCK)
    out = gemm(quantize(x, FP8_BLOCK), b, out_dtype=out_dtype)
    return out[:, :n].contiguous() if more else out


def aligned(t: torch.Tensor) -> torch.Tensor:
    """t, contiguous and, on a GPU, at a multiple of 16 bytes, where the kernels read it: a copy where it is not."""
    t = t.contiguous()
    return t.clone() if t.is_cuda and t.data_ptr() % 16 != 0 else t


# --- gradients -------------------------------------------------------------------------------------------


def without_backward(run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """run(*arguments); where an argument requires grad, the result does too, and its backward raises."""
    needs_grad = torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in arguments)
    if not needs_grad or torch.compiler.is_compiling():
        return run(*arguments)
    result: torch.Tensor = _WithoutBackward.apply(run, *arguments)  # type: ignore[no-untyped-call]
    return result


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
        return run(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            "padless computes no gradients of quantized layers; train with another experts_implementation"
        )
