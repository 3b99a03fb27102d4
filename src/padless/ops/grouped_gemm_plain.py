"""The grouped and dense product of plain bfloat16 tensors: check, choose a configuration, launch."""

from __future__ import annotations

from typing import Any

import torch

from padless.arguments import check_flag, refuse_gradients, refuse_kinds
from padless.kernels.config import MAX_GROUPS
from padless.kernels.launch import tile_of
from padless.kernels.remembered import facts_of, known, launch_remembered
from padless.kernels.sm90_bf16_plain import host
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.ops import traced
from padless.ops.checks import (
    about_k,
    check_alignment,
    check_counts,
    check_ends,
    check_offs_values,
    check_output_of_kernel,
    check_rows,
    describe,
    output,
)
from padless.ops.outputs import check_outputs
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.row_groups import is_traced
from padless.runtime.architecture import HOPPER
from padless.runtime.devices import BackendName, chosen_backend, device_of
from padless.runtime.driver import stream_of

_K_MULTIPLE = 8  # rows start at multiples of 16 bytes


def grouped_gemm_plain(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    *,
    dense: bool,
    out: torch.Tensor | None,
    out_dtype: torch.dtype,
    backend: BackendName | None,
    check_offs: bool,
    config: Any,
) -> torch.Tensor:
    """out[rows of g] = a[rows of g] @ b[g].T: ``grouped_gemm`` for bfloat16 a (M, K) and b (G, N, K), K or N contiguous.
    dense: ``gemm`` for b (N, K), without offs.
    """
    refuse_gradients(a=a, b=b, out=out)
    if config is not None and config is not Bf16PlainConfig and not isinstance(config, Bf16PlainConfig):
        name = config.__name__ if isinstance(config, type) else type(config).__name__
        raise ValueError(f"config is a {name}; plain tensors take a Bf16PlainConfig")
    settings, inputs = ("plain", dense, config), (a, b, offs)
    on_gpu = a.is_cuda and backend in (None, "cuda")
    if out is not None and on_gpu and not check_offs:
        launch = known(facts_of(settings, out, *inputs))
        if launch is not None:
            launch(stream_of(out))
            return out
    refuse_kinds(a=a, b=b, offs=offs, out=out)
    check_flag("check_offs", check_offs)
    weights = b[None] if dense else b
    _check_operands(a, weights)
    if not dense:
        check_ends(offs, weights.shape[0], "a", a.device)
    if check_offs and offs is not None:
        check_offs_values(offs, a.shape[0])
    result = output(a, weights, out, out_dtype)
    if is_traced(a):
        return traced.product(a, b, offs, result, backend, check_offs, config)
    check_outputs([("out", result)], [("a", a), ("b", b), ("offs", offs)])
    backend = chosen_backend(backend, a)
    if backend == "reference":
        if offs is not None:
            check_offs_values(offs, a.shape[0])
        ends = torch.tensor([a.shape[0]], dtype=torch.int32, device="cpu") if offs is None else offs
        return grouped_gemm_plain_reference(a, weights, ends, out=result)
    driver = device_of(backend, a)
    if driver.arch != HOPPER.name:
        raise ValueError(
            f"backend {backend!r} is {driver.arch}; plain bfloat16 tensors have a kernel for {HOPPER.name}"
        )
    check_alignment("a", a)
    check_alignment("b", weights.transpose(1, 2) if host.is_n_major(weights) else weights)
    check_output_of_kernel(result)
    if result.numel() == 0 or weights.shape[0] == 0:
        return result
    launch_remembered(
        facts_of(settings, result, *inputs) if on_gpu else None,
        lambda: host.prepare(driver, a, weights, offs, result, tile_of(config)),  # type: ignore[arg-type]
        result,
    )
    return result


def _check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Raises ValueError for what can be checked without reading values; b (G, N, K)."""
    for name, tensor, rank, shape in (("a", a, 2, "(M, K)"), ("b", b, 3, "(G, N, K)")):
        if tensor.dtype != torch.bfloat16:
            raise ValueError(
                f"{name} is {describe(tensor)}; plain operands are both bfloat16 (see padless.quantize for others)"
            )
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have rank {rank}, {shape}, got {describe(tensor)}")
    (m, k), (num_groups, n, b_k) = a.shape, b.shape
    if k != b_k:
        raise ValueError(about_k((m, k), (num_groups, n, b_k)))
    if k == 0 or k % _K_MULTIPLE != 0:
        raise ValueError(f"K is {k}; it must be a positive multiple of {_K_MULTIPLE}")
    if b.device != a.device:
        raise ValueError(f"b is on {b.device} and a on {a.device}; they must be on one device")
    if num_groups > MAX_GROUPS:
        raise ValueError(f"b has {num_groups} groups; at most {MAX_GROUPS} are supported")
    check_counts(m, n, k)
    check_rows("a", a)
    if b.numel() > 0 and not any(
        b.stride(inner) == 1 and (b.shape[outer] == 1 or b.stride(outer) >= b.shape[inner])
        for outer, inner in ((1, 2), (2, 1))
    ):
        raise ValueError(
            f"b has strides {b.stride()}; K or N must be contiguous and rows lie apart; call .contiguous()"
        )
