"""The quantising call in padless's own words: a grouped GEMM, and everything that an `Epilogue` does to its sums.

Top to bottom: check, allocate, find, prepare, launch. The arithmetic is defined in padless.epilogue.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from padless import layouts
from padless.epilogue import Epilogue, EpilogueTensors, column_scale_shape, column_tiles, row_scale_shape
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.gradients import detached, refuse_gradients
from padless.kernels.launch import KernelChoice, Prepared, tile_of
from padless.kernels.table import QUANT, check_config, find_route, format_name
from padless.ops import launch_cache
from padless.ops.checks import (
    Activation,
    as_int32,
    check_alignment,
    check_offs_aligned,
    check_offs_values,
    check_operands,
    check_operands_of_kernel,
    data_of,
)
from padless.ops.epilogue_checks import check_columns, check_m_aligned, check_tensors
from padless.reference.epilogue import epilogue_reference
from padless.reference.gemm import grouped_gemm_reference
from padless.runtime.devices import chosen_backend, device_of


def grouped_gemm_epilogue(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors | None = None,
    *,
    m_aligned: int = 1,
    backend: str | None = None,
    config: KernelChoice | None = None,
    stream: int | None = None,
    check_offs: bool = False,
) -> EpilogueTensors:
    """Multiplies as grouped_gemm does, and stores what ``epilogue`` makes of the float32 sums, in one launch.

    Args:
        a: (M, K) activations, as in grouped_gemm.
        b: (G, N, K) weights, as in grouped_gemm.
        offs: (G,) int32 or int64 end rows, as in grouped_gemm.
        epilogue: what is done, see padless.epilogue for the arithmetic, and which operands and outputs it has.
        tensors: the operands of the epilogue (alpha, bias, prob, norm_const, global_scale) and outputs to write into;
            outputs that are None are allocated. What an ``amax`` given holds joins in: fill it with -inf first.
        m_aligned: what every end offset is a multiple of; decides the tiles that column scales need (``column_tiles``).
        backend: as in grouped_gemm.
        config: as in grouped_gemm.
        stream: handle of the CUDA stream to launch on, None for torch's current one.
        check_offs: look at the values of offs first, and whether they are multiples of m_aligned. This synchronises.

    Returns:
        ``tensors`` with every output of ``epilogue``. Rows at or past offs[-1] are left as they are; new scales in
        32x4x4 tiles start as zeros, a new amax as -inf, other new outputs hold whatever was in memory.

    Raises:
        ValueError: an argument is not allowed, or no kernel does all of it in one launch for these formats on this
            device. Nothing is done in several launches instead: for that, call
            grouped_gemm(out_dtype=torch.float32) and quantize.
    """
    refuse_gradients(a=a, b=b)
    given = EpilogueTensors() if tensors is None else _detached(tensors)
    a, offs = as_int32(a, offs)
    check_operands("grouped_gemm", a, b, offs)
    (num_groups, n), m = b.data.shape[:2], a.shape[0]
    check_columns(epilogue, n)
    check_m_aligned(m_aligned)
    check_tensors(epilogue, given, m, n, num_groups, data_of(a).device, m_aligned)
    if check_offs:
        check_offs_values(offs, m)
        check_offs_aligned(offs, m_aligned)
    complete = with_outputs(epilogue, given, m, n, num_groups, data_of(a).device, m_aligned)
    compute(a, b, offs, epilogue, complete, backend, config, stream)
    return complete


def _detached(tensors: EpilogueTensors) -> EpilogueTensors:
    """``tensors`` cut off from their graphs; a ValueError where one requires grad with grad mode on."""
    given = {name: t for name, t in vars(tensors).items() if isinstance(t, torch.Tensor)}
    cut = {name: detached(f"tensors.{name}", t) for name, t in given.items()}
    return replace(tensors, **cut)  # type: ignore[arg-type]  # none of them is column_tiles


# --- outputs -------------------------------------------------------------------------------------------------


def with_outputs(
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    m: int,
    n: int,
    num_groups: int,
    device: torch.device,
    m_aligned: int = 1,
) -> EpilogueTensors:
    """``tensors`` with new outputs for those that ``epilogue`` has and ``tensors`` has not.

    New scales in tiles start as zeros, a new amax as -inf, the rest unset.
    """
    n_out, t = epilogue.out_columns(n), tensors
    if epilogue.d_dtype is not None and t.d is None:
        t = replace(t, d=torch.empty((m, n_out), dtype=epilogue.d_dtype, device=device))
    if epilogue.amax and t.amax is None:
        t = replace(t, amax=torch.full((num_groups,), -math.inf, device=device))
    if epilogue.row_format is not None:
        if t.row_codes is None:
            t = replace(t, row_codes=_codes(epilogue.row_format, m, n_out, device))
        if t.row_scale is None:
            shape = row_scale_shape(epilogue, m, n_out, num_groups)
            t = replace(t, row_scale=_scales(epilogue.row_format, epilogue.row_layout, shape, device))
    if epilogue.column_format is not None:
        if t.column_codes is None:
            t = replace(t, column_codes=_codes(epilogue.column_format, m, n_out, device))
        if t.column_scale is None:
            tiles = column_tiles(m, num_groups, m_aligned)
            shape = column_scale_shape(epilogue, n_out, tiles)
            scale = _scales(epilogue.column_format, epilogue.column_layout, shape, device)
            t = replace(t, column_scale=scale, column_tiles=tiles)
    return t


def _codes(format: BlockScaledFormat, m: int, n_out: int, device: torch.device) -> torch.Tensor:
    return torch.empty((m, n_out // format.codes_per_byte), dtype=torch.uint8, device=device).view(format.data_dtype)


def _scales(format: BlockScaledFormat, layout: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if layout == "plain_mn":
        return layouts.empty_mn_major(shape[0], shape[1], device)
    if layout == "plain":
        return torch.empty(shape, dtype=format.scale_dtype, device=device)
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(format.scale_dtype)


def default_row_layout(format: BlockScaledFormat) -> str:
    """The layout that the next GEMM reads: MN-major float32 scales, or cuDNN's 32x4x4 tiles over all rows."""
    return "plain_mn" if format == FP8_BLOCK else "blocked"


def row_tensor(
    epilogue: Epilogue, tensors: EpilogueTensors, offs: torch.Tensor | None = None
) -> BlockScaledTensor | None:
    """The row-quantised output as the activations of the next grouped_gemm, None where there is none.

    offs: the groups that its scales were made for, which are remembered where scales of groups lie apart.
    """
    if epilogue.row_format is None:
        return None
    assert tensors.row_codes is not None
    assert tensors.row_scale is not None
    layout = "plain" if epilogue.row_layout == "plain_mn" else epilogue.row_layout
    return BlockScaledTensor(
        tensors.row_codes, tensors.row_scale, epilogue.row_format, tensors.global_scale, layout, offs
    )


# --- running -------------------------------------------------------------------------------------------------


def prepare(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    backend: str | None,
    config: KernelChoice | None,
) -> Prepared | None:
    """The packed launch of the fused kernel; None for the reference and where there is nothing to compute.

    Operands and ``tensors``, outputs included, have been checked but for what a kernel alone needs. Raises ValueError,
    naming what is supported, where no fused kernel exists. There is no silent second way.
    """
    backend = chosen_backend(backend, data_of(a))
    if backend == "reference":
        return None
    driver = device_of(backend, data_of(a))
    route = find_route(QUANT, driver.arch, format_name(a), b.format.name, config)
    check_operands_of_kernel(a, b)
    for name, t in (("d", tensors.d), ("row_codes", tensors.row_codes), ("column_codes", tensors.column_codes)):
        if t is not None:
            check_alignment(name, t)
    if a.shape[0] == 0 or b.data.shape[0] == 0:
        return None
    return route.load_quant().prepare(driver, a, b, offs, tensors, tile_of(config), epilogue=epilogue)


def compute(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    backend: str | None,
    config: KernelChoice | None,
    stream: int | None = None,
) -> None:
    """Computes every output of ``epilogue`` into ``tensors``, which has them all; operands as ``prepare`` takes them."""
    prepared = prepare(a, b, offs, epilogue, tensors, backend, config)
    if prepared is not None:
        prepared.launch(launch_cache.stream_of(data_of(a)) if stream is None else stream)
    elif chosen_backend(backend, data_of(a)) == "reference":
        check_config(QUANT, format_name(a), b.format.name, config)
        check_offs_values(offs, a.shape[0])
        if a.shape[0] == 0:
            return
        acc = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32)
        epilogue_reference(acc, offs, epilogue, tensors)
