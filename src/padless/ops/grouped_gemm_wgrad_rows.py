"""The weight gradient of grouped layers from plain bfloat16 rows: check, choose a configuration, launch."""

from __future__ import annotations

import torch

from padless.arguments import MOST_ROWS, check_flag, refuse_gradients, refuse_kinds
from padless.kernels.config import MAX_GROUPS
from padless.kernels.remembered import facts_of, known, launch_remembered
from padless.kernels.sm90_bf16_wgrad import host
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.ops import traced
from padless.ops.checks import as_int32, check_alignment, check_ends, check_offs_values, check_rows, describe
from padless.ops.outputs import check_outputs
from padless.ops.wgrad_output import driver_of_gradient, gradient_output, is_without_tokens
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.row_groups import is_readable, is_traced
from padless.runtime.architecture import HOPPER
from padless.runtime.devices import BackendName
from padless.runtime.driver import stream_of

_FEATURES_MULTIPLE, _LEAST_FEATURES = 8, 16  # rows start at multiples of 16 bytes


def grouped_gemm_wgrad_rows(
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor | None,
    *,
    out: torch.Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
    backend: BackendName | None,
    config: object,
) -> torch.Tensor:
    """out[g] (+)= dy[rows of g]^T @ x[rows of g], (G, N, K): ``grouped_gemm_wgrad`` for dy (M, N) and x (M, K)."""
    refuse_gradients(dy=dy, x=x, out=out)
    if config is not None and not isinstance(config, Bf16WgradConfig):
        raise ValueError(f"config is a {type(config).__name__}; rows take a Bf16WgradConfig")
    if isinstance(offs, torch.Tensor) and offs.dtype is torch.int64:
        _, offs = as_int32(x, offs)
    settings, inputs = ("wgrad of rows", accumulate, config), (dy, x, offs)
    on_gpu = dy.is_cuda and backend in (None, "cuda")
    if out is not None and on_gpu and (launch := known(facts_of(settings, out, *inputs))) is not None:
        launch(stream_of(out))
        return out
    refuse_kinds(dy=dy, x=x, offs=offs, out=out)
    check_flag("accumulate", accumulate)
    ends = _check_operands(dy, x, offs)
    if backend is None and is_readable(ends):
        check_offs_values(ends, dy.shape[0])
    shape = (ends.shape[0], dy.shape[1], x.shape[1])
    result = gradient_output(shape, dy.device, out, out_dtype, accumulate)
    if is_traced(result):
        return traced.wgrad_of_rows(dy, x, ends, result, accumulate, backend, config)
    check_outputs([("out", result)], [("dy", dy), ("x", x), ("offs", ends)])
    driver = driver_of_gradient(result, backend, HOPPER.name, "grouped_gemm_wgrad")
    if driver is None:
        return grouped_gemm_wgrad_rows_reference(dy, x, ends, out=result, accumulate=accumulate)
    check_alignment("dy", dy)
    check_alignment("x", x)
    if is_without_tokens(result, accumulate, dy.shape[0]):
        return result
    launch_remembered(
        facts_of(settings, result, *inputs) if on_gpu else None,
        lambda: host.prepare(driver, dy, x, ends, result, accumulate, config),
        result,
    )
    return result


def _check_operands(dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor | None) -> torch.Tensor:
    """``offs``. Raises ValueError for what can be checked without reading values."""
    for name, rows in (("dy", dy), ("x", x)):
        if rows.dim() != 2 or rows.dtype != torch.bfloat16:
            raise ValueError(f"{name} must be (M, features) bfloat16, or GroupedColumns, got {describe(rows)}")
        features = rows.shape[1]
        if features < _LEAST_FEATURES or features % _FEATURES_MULTIPLE != 0:
            raise ValueError(
                f"{name} has {features} features; they must be a multiple of {_FEATURES_MULTIPLE} and at least "
                f"{_LEAST_FEATURES}"
            )
        check_rows(name, rows)
    if x.shape[0] != dy.shape[0] or x.device != dy.device:
        raise ValueError(f"x is {describe(x)} and dy {describe(dy)}; they must have the same rows on one device")
    if dy.shape[0] >= MOST_ROWS:
        raise ValueError(f"dy has {dy.shape[0]} rows; they must be fewer than 2^30")
    check_ends(offs, None, "dy", dy.device)
    assert offs is not None
    if offs.shape[0] > MAX_GROUPS:
        raise ValueError(f"offs has {offs.shape[0]} groups; at most {MAX_GROUPS} are supported")
    return offs
