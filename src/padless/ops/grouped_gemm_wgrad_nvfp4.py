"""The weight gradient of grouped layers from NVFP4 operands along the tokens: check, launch."""

from __future__ import annotations

import torch

from padless.arguments import check_flag, check_readable
from padless.formats import NVFP4, BlockScaledTensor
from padless.kernels.config import MAX_GROUPS
from padless.kernels.sm100_nvfp4_wgrad import host
from padless.kernels.sm100_wgrad import Sm100WgradConfig
from padless.ops.checks import check_alignment, check_ends, describe
from padless.ops.outputs import check_outputs
from padless.ops.wgrad_output import driver_of_gradient, gradient_output, is_without_tokens
from padless.reference.wgrad_nvfp4 import grouped_gemm_wgrad_nvfp4_reference
from padless.runtime.architecture import BLACKWELL
from padless.runtime.devices import BackendName
from padless.runtime.driver import stream_of

ALIGNMENT = 64  # tokens that groups start at multiples of: an instruction's, and an atom's of scales
_FEATURES = 16  # rows of the output start at multiples of 16 bytes


def grouped_gemm_wgrad_nvfp4(
    dy: BlockScaledTensor,
    x: BlockScaledTensor,
    ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: BackendName | None = None,
    config: Sm100WgradConfig | None = None,
) -> torch.Tensor:
    """out[g] (+)= dY[:, tokens of g] @ X[:, tokens of g]^T, (G, N, K), of NVFP4 operands with scales along the tokens.

    dy: (N, T) NVFP4, tokens innermost, scales "blocked" and one global scale. T is a multiple of 64, N of 16.
    x: (K, T), the same.
    ends: (G,) int32 cumulative END columns of the groups, multiples of 64: a group that is shorter is filled up with
        zero codes, and scales that are numbers. What is behind the last group takes part in nothing.
    out: (G, N, K) bfloat16 or float32 to write into, innermost dimension contiguous; None makes it in out_dtype.
    accumulate: adds to what ``out`` holds, in float32; ``out`` has to be given, as float32.
    backend: "cuda" (Blackwell), "reference", "emulator:sm_100a", or None: the kernel on a GPU, else the reference.
    config: the kernel's; output dtype and accumulation are taken from the call.

    A sum is rounded to float32 and multiplied by the product of both global scales. A group without a token gets zeros;
    with ``accumulate`` none of it is touched. One launch, no synchronization. The kernel is verified by emulation; its
    speed has never been measured. Raises ValueError.
    """
    check_readable(dy=dy, x=x, out=out)
    check_flag("accumulate", accumulate)
    for name, operand in (("dy", dy), ("x", x)):
        _check_operand(name, operand, dy)
    check_ends(ends, None, "dy", dy.device)
    if ends.shape[0] > MAX_GROUPS:
        raise ValueError(f"ends has {ends.shape[0]} groups; at most {MAX_GROUPS} are supported")
    shape = (ends.shape[0], dy.shape[0], x.shape[0])
    result = gradient_output(shape, dy.device, out, out_dtype, accumulate)
    inputs = [(f"{name}.{part}", getattr(t, part)) for name, t in (("dy", dy), ("x", x)) for part in ("data", "scale")]
    check_outputs([("out", result)], [*inputs, ("ends", ends)])
    driver = driver_of_gradient(result, backend, BLACKWELL.name, "grouped_gemm_wgrad_nvfp4")
    if driver is None:
        return grouped_gemm_wgrad_nvfp4_reference(dy, x, ends, out=result, accumulate=accumulate)
    if is_without_tokens(result, accumulate, dy.shape[1]):
        return result
    stages = 0 if config is None else config.num_stages
    used = Sm100WgradConfig(stages, result.dtype, accumulate)
    host.prepare(driver, dy, x, ends, result, used).launch(stream_of(result))
    return result


def _check_operand(name: str, operand: object, dy: BlockScaledTensor) -> None:
    is_right = isinstance(operand, BlockScaledTensor) and operand.format == NVFP4 and operand.data.dim() == 2
    if not isinstance(operand, BlockScaledTensor) or not is_right or operand.scale_layout != "blocked":
        raise ValueError(f"{name} must be (features, tokens) NVFP4 with blocked scales, got {describe(operand)}")
    features, tokens = operand.logical_shape
    if features == 0 or features % _FEATURES or tokens % ALIGNMENT:
        raise ValueError(
            f"{name} is {features} features x {tokens} tokens; they must be multiples of {_FEATURES} and {ALIGNMENT}"
        )
    if operand.global_scale is None or operand.global_scale.numel() != 1:
        raise ValueError(f"{name} has no global scale, or several; it must have one")
    if tokens != dy.logical_shape[1] or operand.device != dy.device:
        raise ValueError(
            f"{name} is {describe(operand)} and dy {describe(dy)}; they must have the same tokens on one device"
        )
    if not operand.data.is_contiguous():
        raise ValueError(f"{name} has strides {operand.data.stride()}; its codes must be contiguous")
    check_alignment(name, operand.data)
    check_alignment(f"{name}.scale", operand.scale)
