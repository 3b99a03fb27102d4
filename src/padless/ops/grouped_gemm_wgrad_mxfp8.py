"""The weight gradient of grouped layers from MXFP8 outputs along the tokens: check, launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.arguments import MOST_ROWS, check_flag, check_readable
from padless.kernels.config import MAX_GROUPS
from padless.kernels.sm100_mxfp8_wgrad import host
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig, select_config
from padless.ops.checks import check_alignment, check_ends, check_rows, describe
from padless.ops.outputs import check_outputs
from padless.ops.wgrad_output import driver_of_gradient, gradient_output, is_without_tokens
from padless.reference.wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8_reference
from padless.runtime.architecture import BLACKWELL
from padless.runtime.devices import BackendName
from padless.runtime.driver import stream_of

_PARTS = ("codes", "scale")
Operand = tuple[torch.Tensor, torch.Tensor]
_MULTIPLE = 16  # of features: rows of codes and of the output start at multiples of 16 bytes


def grouped_gemm_wgrad_mxfp8(
    dy: Operand,
    x: Operand,
    offs: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: BackendName | None = None,
    config: Mxfp8WgradConfig | None = None,
) -> torch.Tensor:
    """out[g] (+)= dY[rows of g]^T @ X[rows of g], (G, N, K), of MXFP8 operands with scales along the tokens.

    dy: (codes, scale) as the quantizing epilogues leave them along M with column_layout "plain": codes (M, N)
        float8_e4m3fn, N contiguous, and scales (4 * T, N) float8_e8m0fnu. Blocks of 32 tokens count from a group's
        first; block i of group g has row 4 * t(g) + i, where t(g) is the sum of ceil(M_h / 128) over h < g.
    x: the same of K features. N and K are multiples of 16.
    offs: (G,) int32 cumulative END rows, starting anywhere. Rows at or past offs[-1] belong to no group.
    out: (G, N, K) bfloat16 or float32 to write into, innermost dimension contiguous; None makes it in out_dtype.
    accumulate: adds to what ``out`` holds, in float32; ``out`` has to be given, as float32.
    backend: "cuda" (Blackwell), "reference", "emulator:sm_100a", or None: the kernel on a GPU, else the reference.
    config: the kernel's, None to choose by shape; output dtype and accumulation are taken from the call.

    A group without a token gets zeros; with ``accumulate`` none of it is touched. The sum of a group runs over its
    tokens in order, 32 at a time, and nothing of other groups takes part. One launch, no synchronization, no copy of
    an operand: the tensor core reads both with features contiguous.

    The kernel is verified by emulation; its speed has never been measured. Raises ValueError.
    """
    check_readable(dy=dy[0], x=x[0], out=out)
    check_flag("accumulate", accumulate)
    check_ends(offs, None, "dy", dy[0].device)
    if offs.shape[0] > MAX_GROUPS:
        raise ValueError(f"offs has {offs.shape[0]} groups; at most {MAX_GROUPS} are supported")
    for name, operand in (("dy", dy), ("x", x)):
        _check_operand(name, operand, dy, offs.shape[0])
    shape = (offs.shape[0], dy[0].shape[1], x[0].shape[1])
    result = gradient_output(shape, dy[0].device, out, out_dtype, accumulate)
    inputs = [(f"{name}'s {what}", t) for name, o in (("dy", dy), ("x", x)) for what, t in zip(_PARTS, o, strict=True)]
    check_outputs([("out", result)], [*inputs, ("offs", offs)])
    driver = driver_of_gradient(result, backend, BLACKWELL.name, "grouped_gemm_wgrad_mxfp8")
    if driver is None:
        return grouped_gemm_wgrad_mxfp8_reference(dy, x, offs, out=result, accumulate=accumulate)
    if is_without_tokens(result, accumulate, dy[0].shape[0]):
        return result
    if config is None:
        num_groups, n, k = shape
        config = select_config(dy[0].shape[0], n, k, num_groups, driver.num_sms(result.device.index or 0))
    used = replace(config, out_dtype=result.dtype, accumulate=accumulate)
    host.prepare(driver, dy, x, offs, result, used).launch(stream_of(result))
    return result


def _check_operand(name: str, operand: Operand, dy: Operand, num_groups: int) -> None:
    codes, scale = operand
    if codes.dim() != 2 or codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}'s codes must be (M, features) float8_e4m3fn, got {describe(codes)}")
    m, features = codes.shape
    if features == 0 or features % _MULTIPLE:
        raise ValueError(f"{name} has {features} features; they must be a positive multiple of {_MULTIPLE}")
    if m != dy[0].shape[0] or codes.device != dy[0].device or m >= MOST_ROWS:
        raise ValueError(
            f"{name}'s codes are {describe(codes)} and dy's {describe(dy[0])}; they must have the same rows, fewer than "
            "2^30, on one device"
        )
    check_rows(name, codes)
    check_alignment(name, codes)
    least = 4 * (m // 128 + num_groups)
    if scale.dtype != torch.float8_e8m0fnu or scale.dim() != 2 or scale.shape[1] != features or scale.shape[0] < least:
        raise ValueError(
            f"{name}'s scale must be ({least} or more, {features}) float8_e8m0fnu, got {describe(scale)}; "
            "see column_tiles"
        )
    if not scale.is_contiguous() or scale.device != codes.device:
        raise ValueError(f"{name}'s scale has strides {scale.stride()} on {scale.device}; it must be contiguous there")
