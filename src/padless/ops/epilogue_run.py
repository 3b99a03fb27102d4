"""A grouped GEMM with an epilogue in one launch: check sizes, make outputs, find a kernel, prepare, launch.

Common path of all fused calls. The arithmetic is defined in padless.epilogue.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from padless import layouts
from padless.arguments import check_integer
from padless.epilogue import INTERLEAVE, Epilogue, EpilogueTensors, column_scale_shape, column_tiles, row_scale_shape
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.kernels.launch import KernelChoice, Prepared, tile_of
from padless.kernels.table import QUANT, check_config, find_route, format_name
from padless.ops import traced
from padless.ops.checks import (
    Activation,
    check_alignment,
    check_offs_values,
    check_operands_of_kernel,
    data_of,
    describe,
)
from padless.reference.epilogue import epilogue_reference
from padless.reference.gemm import grouped_gemm_reference
from padless.row_groups import is_traced
from padless.runtime.devices import BackendName, chosen_backend, device_of
from padless.runtime.driver import stream_of

# --- sizes ---------------------------------------------------------------------------------------------------


def check_columns(epilogue: Epilogue, n: int, b: str = "b") -> None:
    """Raises ValueError for an N that no epilogue, or not this one, can have; b: a caller's name of the weights."""
    if epilogue.order == "interleaved" and n % (2 * INTERLEAVE) != 0:
        raise ValueError(
            f"{b} has N = {n}; gate_up='interleaved' takes {INTERLEAVE} columns of gate and {INTERLEAVE} of up in "
            f"turn, so N must be a multiple of {2 * INTERLEAVE}"
        )
    if epilogue.is_glu and n % 2 != 0:
        raise ValueError(f"{b} has N = {n}; gate and up are equally wide, so N must be even")
    n_out = epilogue.out_columns(n)
    wanted = {} if epilogue.d_dtype is None else {str(epilogue.d_dtype): 16 // epilogue.d_dtype.itemsize}
    if epilogue.format is not None:
        wanted[epilogue.format.name] = 16 * epilogue.format.codes_per_byte
    for name, multiple in wanted.items():
        if n_out % multiple != 0:
            raise ValueError(
                f"N of the output is {n_out}; it must be a multiple of {multiple} for {name} (16 bytes a row)"
            )


def check_m_aligned(m_aligned: object) -> None:
    """Raises ValueError for what no offset can be a multiple of."""
    check_integer("m_aligned", m_aligned, 1)


def check_tensor(
    name: str, t: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """`t` if it is a tensor of this shape, one of these dtypes and on this device; ValueError with `name` if not."""
    allowed = " or ".join(str(dtype) for dtype in dtypes)
    wanted = f"{name} must be {shape} {allowed} on {device}"
    if not isinstance(t, torch.Tensor) or tuple(t.shape) != shape or t.dtype not in dtypes or t.device != device:
        raise ValueError(f"{wanted}, got {describe(t)}")
    return t


# --- outputs -------------------------------------------------------------------------------------------------


def with_outputs(
    epilogue: Epilogue, tensors: EpilogueTensors, m: int, n: int, num_groups: int, device: torch.device,
    m_aligned: int = 1,
) -> EpilogueTensors:  # fmt: skip
    """``tensors`` with new outputs for those that ``epilogue`` has and ``tensors`` has not.

    New scales in tiles start as zeros, a new amax as -inf, the rest unset.
    """
    n_out, t = epilogue.out_columns(n), tensors
    new: dict[str, Any] = {}
    if epilogue.d_dtype is not None:
        new["d"] = t.d if t.d is not None else torch.empty((m, n_out), dtype=epilogue.d_dtype, device=device)
    if epilogue.amax:
        new["amax"] = t.amax
        if t.amax is None:
            new["amax"] = torch.full((num_groups,), -math.inf, dtype=torch.float32, device=device)
    for name, format in (("row_codes", epilogue.row_format), ("column_codes", epilogue.column_format)):
        if format is not None and getattr(t, name) is None:
            new[name] = _codes(format, m, n_out, device)
    if epilogue.row_format is not None and t.row_scale is None:
        shape = row_scale_shape(epilogue, m, n_out, num_groups)
        new["row_scale"] = _scales(epilogue.row_format, epilogue.row_layout, shape, device)
    if epilogue.column_format is not None and t.column_scale is None:
        tiles = new["column_tiles"] = column_tiles(m, num_groups, m_aligned)
        shape = column_scale_shape(epilogue, n_out, tiles)
        new["column_scale"] = _scales(epilogue.column_format, epilogue.column_layout, shape, device)
    return replace(t, **new)


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
    """The row-quantized output as the activations of the next grouped_gemm, None where there is none.

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
    a: Activation, b: BlockScaledTensor, offs: torch.Tensor, epilogue: Epilogue, tensors: EpilogueTensors,
    backend: BackendName | None, config: KernelChoice | None,
) -> Prepared | None:  # fmt: skip
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
    a: Activation, b: BlockScaledTensor, offs: torch.Tensor, epilogue: Epilogue, tensors: EpilogueTensors,
    backend: BackendName | None, config: KernelChoice | None, m_aligned: int = 1,
    check_offs: bool = False,
) -> None:  # fmt: skip
    """Computes every output of ``epilogue`` into ``tensors``, which has them all; operands as ``prepare`` takes them.
    m_aligned and check_offs are for a traced call, which reads values when it runs."""
    if is_traced(data_of(a)):
        traced.product_with_epilogue(a, b, offs, epilogue, tensors, backend, config, m_aligned, check_offs)
        return
    prepared = prepare(a, b, offs, epilogue, tensors, backend, config)
    if prepared is not None:
        prepared.launch(stream_of(data_of(a)))
    elif chosen_backend(backend, data_of(a)) == "reference":
        check_config(QUANT, format_name(a), b.format.name, config)
        check_offs_values(offs, a.shape[0])
        if a.shape[0] == 0:
            return
        acc = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32)
        epilogue_reference(acc, offs, epilogue, tensors)
