"""What the quantising calls return, how their outputs are allocated, and the one place that runs an `Epilogue`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from padless import layouts
from padless.epilogue import (
    INTERLEAVE,
    Epilogue,
    EpilogueTensors,
    column_scale_shape,
    column_tiles,
    row_scale_shape,
)
from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor, ceil_div
from padless.kernels.launch import KernelChoice, Prepared, tile_of
from padless.kernels.table import find_route, format_name
from padless.ops import launch_cache
from padless.ops.checks import (
    Activation,
    check_alignment,
    check_operands,
    check_operands_of_kernel,
    describe,
)
from padless.ops.grouped_gemm import _driver
from padless.reference.epilogue import epilogue_reference
from padless.reference.gemm import grouped_gemm_reference

OPERATION = "grouped_gemm_quant"
KEYS = ("d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")


class QuantOutputs(dict[str, Any]):
    """The five outputs, None where they were not asked for, by name, by number or unpacked in the order of `KEYS`.

    d_tensor: (M, N_out), or (M, N_out, 1) in calls with cuDNN's 3-D tensors: values, or row-quantised codes.
    d_col_tensor: column-quantised codes, of the same shape. FP4 codes are two to a byte along N_out.
    amax_tensor: (G, 1) float32.
    sfd_row_tensor, sfd_col_tensor: scales. Where row_layout or column_layout is "blocked" or "blocked_groups" a 6-D view
        (32, 4, row tiles, 4, column tiles, 1) over the bytes of the 32x4x4 tiles; else 2-D.
    row: the row-quantised output as a BlockScaledTensor, ready to be the activations of the next grouped_gemm; None
        where it was not asked for.
    column_tiles: tiles of 128 rows that sfd_col_tensor has room for.
    """

    def __init__(self, values: dict[str, Any], row: BlockScaledTensor | None, tiles: int) -> None:
        super().__init__((key, values[key]) for key in KEYS)
        self.row = row
        self.column_tiles = tiles

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(KEYS[key] if isinstance(key, int) else key)


# --- outputs -------------------------------------------------------------------------------------------------


def allocate(
    epilogue: Epilogue, m: int, n: int, num_groups: int, device: torch.device, m_aligned: int
) -> dict[str, Any]:
    """New outputs, as keywords of EpilogueTensors. Scales in tiles start as zeros, amax as -inf, the rest unset."""
    n_out = epilogue.out_columns(n)
    new: dict[str, Any] = {}
    if epilogue.d_dtype is not None:
        new["d"] = torch.empty((m, n_out), dtype=epilogue.d_dtype, device=device)
    if epilogue.amax:
        new["amax"] = torch.full((num_groups,), -math.inf, device=device)
    if epilogue.row_format is not None:
        new["row_codes"] = _codes(epilogue.row_format, m, n_out, device)
        shape = row_scale_shape(epilogue, m, n_out, num_groups)
        if epilogue.row_layout == "plain_mn":
            new["row_scale"] = layouts.empty_mn_major(m, shape[1], device)
        else:
            new["row_scale"] = _scales(epilogue.row_format, epilogue.row_layout, shape, device)
    if epilogue.column_format is not None:
        new["column_codes"] = _codes(epilogue.column_format, m, n_out, device)
        new["column_tiles"] = column_tiles(m, num_groups, m_aligned)
        shape = column_scale_shape(epilogue, n_out, new["column_tiles"])
        new["column_scale"] = _scales(epilogue.column_format, epilogue.column_layout, shape, device)
    return new


def _codes(format: BlockScaledFormat, m: int, n_out: int, device: torch.device) -> torch.Tensor:
    return torch.empty((m, n_out // format.codes_per_byte), dtype=torch.uint8, device=device).view(
        format.data_dtype
    )


def _scales(
    format: BlockScaledFormat, layout: str, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    if layout == "plain":
        return torch.empty(shape, dtype=format.scale_dtype, device=device)
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(format.scale_dtype)


def pack(
    epilogue: Epilogue, t: EpilogueTensors, as_cudnn: bool, offs: torch.Tensor | None = None
) -> QuantOutputs:
    """The outputs in `t` as the caller sees them; as_cudnn: with a third dimension of 1; offs: what `row` remembers."""
    row = None
    d, d_col = t.d, t.column_codes
    sfd_row, sfd_col = t.row_scale, t.column_scale
    if epilogue.row_format is not None:
        assert t.row_codes is not None
        assert t.row_scale is not None
        layout = "plain" if epilogue.row_layout == "plain_mn" else epilogue.row_layout
        row = BlockScaledTensor(t.row_codes, t.row_scale, epilogue.row_format, t.global_scale, layout, offs)
        d = t.row_codes if d is None else d
        if layout != "plain":
            columns = row.scale_columns
            rows = t.row_scale.numel() // (512 * ceil_div(columns, 4)) * 128
            sfd_row = _six_d(t.row_scale, rows, columns)
    if t.column_scale is not None and epilogue.column_layout != "plain":
        assert t.column_codes is not None
        sfd_col = _six_d(t.column_scale, t.column_codes.shape[1], 4 * t.column_tiles)
    values = {
        "d_tensor": _three_d(d) if as_cudnn else d,
        "d_col_tensor": _three_d(d_col) if as_cudnn else d_col,
        "amax_tensor": None if t.amax is None else t.amax[:, None],
        "sfd_row_tensor": sfd_row,
        "sfd_col_tensor": sfd_col,
    }
    return QuantOutputs(values, row, t.column_tiles)


def _three_d(t: torch.Tensor | None) -> torch.Tensor | None:
    """(M, N) as (M, N, 1) with cuDNN's strides (N, 1, M * N)."""
    if t is None:
        return None
    m, n = t.shape
    return t.as_strided((m, n, 1), (n, 1, m * n))


def _six_d(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`padless.layouts.cudnn_view` of one matrix, which here may have no rows."""
    return blocked.view(1, ceil_div(rows, 128), ceil_div(columns, 4), 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


# --- running -------------------------------------------------------------------------------------------------


def check(a: Activation, b: BlockScaledTensor, offs: torch.Tensor, epilogue: Epilogue) -> None:
    """Raises ValueError for operands and sizes that no epilogue, or not this one, can have."""
    if offs is None:
        raise ValueError("padded_offsets is None; it must be (G,) int32 end rows (see padless.group_offsets)")
    check_operands("grouped_gemm", a, b, offs)
    n = b.data.shape[1]
    if epilogue.activation == "swiglu_interleaved" and n % (2 * INTERLEAVE) != 0:
        raise ValueError(
            f"b_tensor has N = {n}; gate_up='interleaved' takes {INTERLEAVE} columns of gate and {INTERLEAVE} of up in "
            f"turn, so N must be a multiple of {2 * INTERLEAVE}"
        )
    if epilogue.is_glu and n % 2 != 0:
        raise ValueError(f"b_tensor has N = {n}; gate and up are equally wide, so N must be even")
    n_out = epilogue.out_columns(n)
    wanted = {} if epilogue.d_dtype is None else {str(epilogue.d_dtype): 16 // epilogue.d_dtype.itemsize}
    if epilogue.format is not None:
        wanted[epilogue.format.name] = 16 * epilogue.format.codes_per_byte
    for name, multiple in wanted.items():
        if n_out % multiple != 0:
            raise ValueError(
                f"N of the output is {n_out}; it must be a multiple of {multiple} for {name} (16 bytes a row)"
            )


def check_tensor(
    name: str, t: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> torch.Tensor:
    """`t` if it is a tensor of this shape, one of these dtypes and on this device; ValueError with `name` if not."""
    allowed = " or ".join(str(dtype) for dtype in dtypes)
    wanted = f"{name} must be {shape} {allowed} on {device}"
    if (
        not isinstance(t, torch.Tensor)
        or tuple(t.shape) != shape
        or t.dtype not in dtypes
        or t.device != device
    ):
        raise ValueError(f"{wanted}, got {describe(t)}")
    return t


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

    Raises ValueError, naming what is supported, where no fused kernel exists. There is no silent second way:
    grouped_gemm(out_dtype=torch.float32) and then quantize is a call of the caller's own.
    """
    if backend is None:
        backend = "cuda" if a.device.type == "cuda" else "reference"
    if backend == "reference":
        return None
    driver = _driver(backend, a.data if isinstance(a, BlockScaledTensor) else a)
    path = find_route(OPERATION, driver.arch, format_name(a), b.format.name, config)
    check_operands_of_kernel(a, b)
    for name in ("d", "row_codes", "column_codes"):
        t = getattr(tensors, name)
        if t is not None:
            check_alignment(name, t)
    if a.shape[0] == 0 or b.data.shape[0] == 0:
        return None
    prepared: Prepared = path.load().prepare(driver, a, b, offs, tensors, tile_of(config), epilogue=epilogue)
    return prepared


def run(
    a: Activation,
    b: BlockScaledTensor,
    offs: torch.Tensor,
    epilogue: Epilogue,
    tensors: EpilogueTensors,
    backend: str | None,
    config: KernelChoice | None,
    stream: int | None = None,
) -> None:
    """Computes every output of `epilogue` into `tensors`. What `check` looks at has been checked."""
    prepared = prepare(a, b, offs, epilogue, tensors, backend, config)
    if prepared is not None:
        index = a.device.index or 0
        on_gpu = a.device.type == "cuda"
        current = launch_cache.current_stream(index) if on_gpu else 0
        prepared.launch(current if stream is None else stream)
    elif a.shape[0] != 0 and (backend == "reference" or (backend is None and a.device.type != "cuda")):
        acc = grouped_gemm_reference(a, b, offs, out_dtype=torch.float32)
        epilogue_reference(acc, offs, epilogue, tensors)


def default_row_layout(format: BlockScaledFormat) -> str:
    """What the next GEMM reads: MN-major float32 scales, or cuDNN's 32x4x4 tiles over all rows."""
    return "plain_mn" if format == FP8_BLOCK else "blocked"
