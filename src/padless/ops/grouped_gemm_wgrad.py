"""The weight gradient of grouped layers: check, choose a configuration, encode tensor maps, launch."""

from __future__ import annotations

from typing import Any, cast

import torch

from padless.arguments import check_flag, refuse_gradients, refuse_kinds
from padless.formats import ceil_div
from padless.kernels.config import MAX_GROUPS
from padless.kernels.remembered import facts_of, known, launch_remembered
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.kernels.sm90_fp8_wgrad import host
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.layouts import ALIGNMENTS, SCALE_BLOCK, GroupedColumns
from padless.ops import traced
from padless.ops.checks import describe
from padless.ops.grouped_gemm_wgrad_rows import grouped_gemm_wgrad_rows
from padless.ops.outputs import check_outputs
from padless.ops.wgrad_output import driver_of_gradient, gradient_output
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.row_groups import is_traced
from padless.runtime.architecture import HOPPER
from padless.runtime.devices import BackendName
from padless.runtime.driver import stream_of

_FEATURES_MULTIPLE = 16  # rows of float32 scales, and of the output, start at multiples of 16 bytes


def grouped_gemm_wgrad(
    dy: GroupedColumns | torch.Tensor,
    x: GroupedColumns | torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: BackendName | None = None,
    config: WgradConfig | Bf16WgradConfig | None = None,
) -> torch.Tensor:
    """Multiplies along each group's tokens: out[g] (+)= dY[rows of g]^T @ X[rows of g].

    Args:
        dy: gradients of the outputs: plain bfloat16 rows (M, N), or a token-contiguous FP8 copy of N features with a
            scale per feature and 128 tokens (`padless.quantize_rows_columns`).
        x: inputs of the layer, of the same kind and groups: rows (M, K), or a copy of K features with a scale per 128
            features and 128 tokens ("1d2d", the faster) or per feature and 128 tokens ("1d1d"). N and K are multiples of
            16, of rows multiples of 8 and at least 16. The two copies may have different alignments; where groups end is
            taken from ``dy``.
        offs: (G,) int32 or int64, for rows alone: cumulative END row of each group, starting anywhere. Rows at or past
            offs[-1] belong to no group.
        out: (G, N, K) bfloat16 or float32 to write into, or None for a new tensor. The innermost dimension is
            contiguous, the others have strides of a multiple of 16 bytes. It shares no memory with what the call reads.
        accumulate: adds to what ``out`` holds instead, in float32; ``out`` has to be given, as float32.
        out_dtype: torch.bfloat16 or float32, when ``out`` is None.
        backend: "cuda", "reference", "emulator", or None: the GPU's kernel for tensors on a GPU, else the reference.
        config: the kernel to use in place of the one that is picked (WgradConfig for copies, Bf16WgradConfig for rows);
            mode, output dtype and room for groups are taken from the operands.

    Returns:
        ``out``, (G, N, K). A group without a token gets zeros; with ``accumulate`` not a byte of it is touched.

    Arithmetic: of copies, for each 128 tokens of a group in order, counted from its start, d = fma(sum of products,
    scale of dY * scale of X, d) in float32, where the product of the scales is rounded to float32 and the tensor core
    sums the products 32 tokens at a time with 13 fractional bits of the largest term; of rows, the tensor core adds 16
    tokens at a time to d, with 25 fractional bits. Then one rounding to ``out``'s type, or one float32 addition to it.
    The reference sums in float64 (128 tokens of a copy, all of a group's rows) and rounds to float32. The sum over a
    group's tokens is never split, and nothing of other groups takes part: a group's bits do not depend on them, on the
    tile or on the order of work.

    One kernel launch, no synchronization, no other pass over ``out``; safe in CUDA graphs. Wrong offsets or starts give
    a wrong result and no access outside the tensors.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    if isinstance(dy, torch.Tensor) and isinstance(x, torch.Tensor):
        return grouped_gemm_wgrad_rows(
            dy, x, offs, out=out, accumulate=accumulate, out_dtype=out_dtype, backend=backend, config=config
        )
    if offs is not None:
        raise ValueError("offs is given and dy and x are copies, which have their own; leave it out")
    copies = cast("tuple[GroupedColumns, GroupedColumns]", (dy, x))
    return _of_copies(*copies, out, accumulate, out_dtype, backend, config)


def _of_copies(
    dy: GroupedColumns,
    x: GroupedColumns,
    out: torch.Tensor | None,
    accumulate: bool,
    out_dtype: torch.dtype,
    backend: BackendName | None,
    config: object,
) -> torch.Tensor:
    refuse_gradients(dy=dy, x=x, out=out)
    if config is not None and not isinstance(config, WgradConfig):
        raise ValueError(f"config is a {type(config).__name__}; copies of grouped columns take a WgradConfig")
    on_gpu = type(dy) is GroupedColumns and dy.data.is_cuda and backend in (None, "cuda")
    if out is not None and on_gpu and (launch := known(_facts_of(dy, x, out, accumulate, config))) is not None:
        launch(stream_of(out))
        return out
    refuse_kinds(dy=dy, x=x, out=out)
    check_flag("accumulate", accumulate)
    _check_operands(dy, x)
    shape = (dy.num_groups, dy.features, x.features)
    result = gradient_output(shape, dy.data.device, out, out_dtype, accumulate)
    if is_traced(result):
        return traced.wgrad_of_columns(dy, x, result, accumulate, backend, config)
    inputs = [(f"{n}.{part}", getattr(o, part)) for n, o in (("dy", dy), ("x", x)) for part in _TENSORS]
    check_outputs([("out", result)], inputs)
    driver = driver_of_gradient(result, backend, HOPPER.name, "grouped_gemm_wgrad")
    if driver is None:
        return grouped_gemm_wgrad_reference(dy, x, out=result, accumulate=accumulate)
    if dy.num_groups == 0:
        return result
    launch_remembered(
        _facts_of(dy, x, result, accumulate, config) if on_gpu else None,
        lambda: host.prepare(driver, dy, x, result, accumulate, config),
        result,
    )
    return result


# ------------------------------------------------------------------------------------------------- checks


def _check_operands(dy: GroupedColumns, x: GroupedColumns) -> None:
    """Raises ValueError for what can be checked without reading values."""
    for name, operand in (("dy", dy), ("x", x)):
        if not isinstance(operand, GroupedColumns):
            raise ValueError(
                f"{name} must be GroupedColumns, got {describe(operand)}; dy and x are both copies, or both rows"
            )
    blocks = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
    if dy.block != blocks[0]:
        raise ValueError(f"dy has scales per {dy.block} features and tokens; allowed: {blocks[0]}")
    if x.block not in blocks:
        raise ValueError(f"x has scales per {x.block} features and tokens; allowed: {blocks[1]} or {blocks[0]}")
    for name, operand in (("dy", dy), ("x", x)):
        _check_columns(name, operand, dy)
    if x.scale.shape[0] != dy.scale.shape[0]:
        raise ValueError(
            f"x.scale has {x.scale.shape[0]} rows and dy.scale {dy.scale.shape[0]}; copies of the same groups have "
            "equal numbers of them"
        )


def _check_columns(name: str, operand: GroupedColumns, dy: GroupedColumns) -> None:
    data, scale = operand.data, operand.scale
    if data.dim() != 2 or data.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name}.data must be (features, tokens) float8_e4m3fn, got {describe(data)}")
    features, tokens = data.shape
    if features == 0 or features % _FEATURES_MULTIPLE != 0:
        raise ValueError(f"{name} has {features} features; they must be a positive multiple of {_FEATURES_MULTIPLE}")
    if tokens % SCALE_BLOCK != 0 or data.stride(1) != 1 or (features > 1 and data.stride(0) % 16 != 0):
        raise ValueError(
            f"{name}.data must be row-major with a multiple of {SCALE_BLOCK} tokens, got {describe(data)} with strides "
            f"{data.stride()}"
        )
    if operand.alignment not in ALIGNMENTS:
        raise ValueError(f"{name}.alignment is {operand.alignment}; allowed: {ALIGNMENTS}")
    columns = features if operand.block[0] == 1 else ceil_div(features, SCALE_BLOCK)
    if scale.dim() != 2 or scale.shape[1] != columns or scale.dtype != torch.float32:
        raise ValueError(f"{name}.scale must be (rows, {columns}) float32, got {describe(scale)}")
    if not scale.is_contiguous():
        raise ValueError(f"{name}.scale must be contiguous, got strides {scale.stride()}")
    groups = dy.offs.shape[0] if dy.offs.dim() == 1 else -1
    for part in ("offs", "starts", "block_starts"):
        tensor = getattr(operand, part)
        if tensor.shape != (groups,) or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name}.{part} must be a contiguous int32 tensor with an entry for each group of dy.offs, got "
                f"{describe(tensor)}"
            )
        if tensor.device != dy.data.device:
            raise ValueError(f"{name}.{part} is on {tensor.device} and dy.data on {dy.data.device}; move one of them")
    if groups > MAX_GROUPS:
        raise ValueError(f"dy has {groups} groups; at most {MAX_GROUPS} are supported")
    for part in ("data", "scale"):
        tensor = getattr(operand, part)
        if tensor.device != dy.data.device:
            raise ValueError(f"{name}.{part} is on {tensor.device} and dy.data on {dy.data.device}; move one of them")
        if not is_traced(tensor) and tensor.data_ptr() % 16 != 0:
            raise ValueError(f"{name}.{part} starts at an address that is no multiple of 16 bytes; copy it")
    if groups > 0 and (tokens == 0 or scale.shape[0] == 0):
        raise ValueError(
            f"{name}.data is {describe(data)} and {name}.scale {describe(scale)}; with {groups} groups neither may be "
            "empty"
        )


# ------------------------------------------------------------------------------------- launches remembered


def _facts_of(
    dy: GroupedColumns, x: GroupedColumns, out: torch.Tensor, accumulate: bool, config: object
) -> tuple[Any, ...] | None:
    """Everything that a launch depends on; None for what is no operand."""
    if type(dy) is not GroupedColumns or type(x) is not GroupedColumns:
        return None
    settings = ("wgrad of columns", accumulate, config, dy.block, x.block, dy.alignment, x.alignment)
    return facts_of(settings, out, *(getattr(o, part) for o in (dy, x) for part in _TENSORS))


_TENSORS = ("data", "scale", "offs", "starts", "block_starts")
