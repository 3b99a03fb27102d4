"""The weight gradient of grouped layers: check, choose a configuration, encode tensor maps, launch."""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import ceil_div
from padless.gradients import refuse_gradients
from padless.grouped_columns import ALIGNMENTS, SCALE_BLOCK, GroupedColumns
from padless.kernels.config import MAX_GROUPS
from padless.kernels.sm90_fp8_wgrad import host
from padless.kernels.sm90_fp8_wgrad.config import WGRAD_OUT_DTYPES, WgradConfig
from padless.ops.checks import describe
from padless.ops.launch_cache import current_stream
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.runtime.devices import device_of
from padless.runtime.driver import PreparedLaunch

_FEATURES_MULTIPLE = 16  # rows of float32 scales, and of the output, start at multiples of 16 bytes


def grouped_gemm_wgrad(
    dy: GroupedColumns,
    x: GroupedColumns,
    *,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
    config: WgradConfig | None = None,
) -> torch.Tensor:
    """Multiplies along each group's tokens: out[g] (+)= dY[rows of g]^T @ X[rows of g].

    Args:
        dy: gradients of the outputs, a token-contiguous copy of N features with a scale per feature and 128 tokens.
        x: inputs of the layer, a copy of K features of the same groups, with a scale per 128 features and 128 tokens
            ("1d2d", the faster) or per feature and 128 tokens ("1d1d"). N and K are multiples of 16. The two may have
            different alignments; where groups end is taken from ``dy``.
        out: (G, N, K) bfloat16 or float32 to write into, or None for a new tensor. The innermost dimension is
            contiguous, the others have strides of a multiple of 16 bytes.
        accumulate: adds to what ``out`` holds instead, in float32; ``out`` has to be given, as float32.
        out_dtype: torch.bfloat16 or float32, when ``out`` is None.
        backend: "cuda", "reference", "emulator", or None: the GPU's kernel for tensors on a GPU, else the reference.
        config: the kernel to use in place of the one that is picked; mode, output dtype and room for groups are taken
            from the operands.

    Returns:
        ``out``, (G, N, K). A group without a token gets zeros; with ``accumulate`` not a byte of it is touched.

    Arithmetic: for each 128 tokens of a group in order, counted from its start, d = fma(sum of products, scale of dY *
    scale of X, d) in float32, where the product of the scales is rounded to float32 and the tensor core sums the
    products 32 tokens at a time with 13 fractional bits of the largest term; then one rounding to ``out``'s type, or one
    float32 addition to it. The sum over a group's tokens is never split, and nothing of other groups takes part: a
    group's bits do not depend on them, on the tile or on the order of work. What is added to a subnormal number, or
    gives one, may be flushed to zero where ``accumulate`` is set.

    One kernel launch, no synchronization, no other pass over ``out``; safe in CUDA graphs. Wrong offsets or starts give
    a wrong result and no access outside the tensors.

    Raises:
        ValueError: an argument is not allowed; the message names it, what it was and what is allowed.
    """
    refuse_gradients(dy=dy, x=x, out=out)
    facts = _facts_of(dy, x, out, accumulate, config) if out is not None and out.is_cuda else None
    if facts is not None and backend in (None, "cuda") and (known := _LAUNCHES.get(facts)) is not None:
        known(current_stream(out.device.index or 0))  # type: ignore[union-attr]
        return out  # type: ignore[return-value]
    _check_operands(dy, x)
    if config is not None and not isinstance(config, WgradConfig):
        raise ValueError(f"config is a {type(config).__name__}; grouped_gemm_wgrad takes a WgradConfig")
    result = _output(dy, x, out, out_dtype, accumulate)
    if backend is None:
        backend = "cuda" if result.is_cuda else "reference"
    if backend == "reference":
        return grouped_gemm_wgrad_reference(dy, x, out=result, accumulate=accumulate)
    driver = device_of(backend, result)
    if driver.arch != "sm_90a":
        raise ValueError(f"backend {backend!r} is {driver.arch}; grouped_gemm_wgrad has a kernel for sm_90a")
    _check_rows_of_kernel(result)
    if dy.num_groups == 0:
        return result
    launch = host.prepare(driver, dy, x, result, accumulate, config).launch
    if facts is not None:
        _remember(facts, launch)
    launch(current_stream(result.device.index or 0) if result.is_cuda else 0)
    return result


# ------------------------------------------------------------------------------------------------- checks


def _check_operands(dy: GroupedColumns, x: GroupedColumns) -> None:
    """Raises ValueError for what can be seen without looking at values."""
    for name, operand in (("dy", dy), ("x", x)):
        if not isinstance(operand, GroupedColumns):
            raise ValueError(f"{name} must be GroupedColumns, got {describe(operand)}")
    blocks = ((1, SCALE_BLOCK), (SCALE_BLOCK, SCALE_BLOCK))
    if dy.block != blocks[0]:
        raise ValueError(f"dy has scales per {dy.block} features and tokens; allowed: {blocks[0]}")
    if x.block not in blocks:
        raise ValueError(
            f"x has scales per {x.block} features and tokens; allowed: {blocks[1]} or {blocks[0]}"
        )
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
        raise ValueError(
            f"{name} has {features} features; they must be a positive multiple of {_FEATURES_MULTIPLE}"
        )
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
            raise ValueError(
                f"{name}.{part} is on {tensor.device} and dy.data on {dy.data.device}; move one of them"
            )
    if groups > MAX_GROUPS:
        raise ValueError(f"dy has {groups} groups; at most {MAX_GROUPS} are supported")
    for part in ("data", "scale"):
        tensor = getattr(operand, part)
        if tensor.device != dy.data.device:
            raise ValueError(
                f"{name}.{part} is on {tensor.device} and dy.data on {dy.data.device}; move one of them"
            )
        if tensor.data_ptr() % 16 != 0:
            raise ValueError(f"{name}.{part} starts at an address that is no multiple of 16 bytes; copy it")
    if groups > 0 and (tokens == 0 or scale.shape[0] == 0):
        raise ValueError(
            f"{name}.data is {describe(data)} and {name}.scale {describe(scale)}; with {groups} groups neither may be "
            "empty"
        )


def _output(
    dy: GroupedColumns, x: GroupedColumns, out: torch.Tensor | None, out_dtype: torch.dtype, accumulate: bool
) -> torch.Tensor:
    """``out`` when it is allowed, or a new tensor."""
    shape = (dy.num_groups, dy.features, x.features)
    dtype = out_dtype if out is None else out.dtype
    if dtype not in WGRAD_OUT_DTYPES:
        name = "out_dtype" if out is None else "out.dtype"
        raise ValueError(f"{name} is {dtype}; allowed: torch.bfloat16 or torch.float32")
    if accumulate and (out is None or dtype != torch.float32):
        given = "None" if out is None else str(out.dtype)
        raise ValueError(f"accumulate adds to float32 and out is {given}; give a float32 tensor as out")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=dy.data.device)
    if tuple(out.shape) != shape or out.device != dy.data.device:
        raise ValueError(f"out must be (G, N, K) = {shape} on {dy.data.device}, got {describe(out)}")
    if out.stride(2) != 1:
        raise ValueError(f"out must be contiguous along K, got strides {out.stride()}; call .contiguous()")
    if any(stride < size for stride, size in _overlapping(out)):
        raise ValueError(
            f"out has rows that overlap, with strides {out.stride()}; give a tensor of distinct elements"
        )
    return out


def _overlapping(out: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, elements that it has to leave room for) of the outer dimensions."""
    groups, n, k = out.shape
    rows = [(out.stride(1), k)] if n > 1 else []
    return rows + ([(out.stride(0), (n - 1) * out.stride(1) + k if n > 1 else k)] if groups > 1 else [])


# ------------------------------------------------------------------------------------- launches remembered

# A packed launch depends on addresses, shapes and strides alone; all of them are compared again at every call, and no
# operand is kept alive.
_LAUNCHES: dict[tuple[Any, ...], PreparedLaunch] = {}
_MOST_LAUNCHES = 4096


def _facts_of(
    dy: GroupedColumns, x: GroupedColumns, out: torch.Tensor, accumulate: bool, config: WgradConfig | None
) -> tuple[Any, ...] | None:
    """Everything that a launch depends on; None for what is no operand."""
    if type(dy) is not GroupedColumns or type(x) is not GroupedColumns:
        return None
    facts: list[Any] = [accumulate, config, dy.block, x.block, dy.alignment, x.alignment, out.device]
    for tensor in (out, *(getattr(o, part) for o in (dy, x) for part in _TENSORS)):
        facts += [tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype]
    return tuple(facts)


_TENSORS = ("data", "scale", "offs", "starts", "block_starts")


def _remember(facts: tuple[Any, ...], launch: PreparedLaunch) -> None:
    if len(_LAUNCHES) >= _MOST_LAUNCHES:
        _LAUNCHES.clear()
    _LAUNCHES[facts] = launch


def _check_rows_of_kernel(out: torch.Tensor) -> None:
    """Raises ValueError unless the copy engine can store the rows of ``out``."""
    strides = [out.stride(i) * out.element_size() for i in (0, 1) if out.shape[i] > 1]
    if any(stride % 16 for stride in strides) or out.data_ptr() % 16 != 0:
        raise ValueError(
            f"out must have rows that start at multiples of 16 bytes, got strides {out.stride()} of "
            f"{out.element_size()} bytes at address {out.data_ptr():#x}"
        )
