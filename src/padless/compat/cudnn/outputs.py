"""Outputs of the calls in cuDNN's names, order and views."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from padless.compat.cudnn.operands import Operands
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import BlockScaledTensor, ceil_div
from padless.layouts import cudnn_view
from padless.ops.epilogue_run import row_tensor

KEYS = ("d_tensor", "d_col_tensor", "amax_tensor", "sfd_row_tensor", "sfd_col_tensor")


class QuantOutputs(dict[str, Any]):
    """The five outputs, None where they were not asked for, by name, by number or unpacked in the order of `KEYS`.

    d_tensor: (M, N_out), or (M, N_out, 1) in calls with a (M, K, 1) of cuDNN's: values, or row-quantized codes.
    d_col_tensor: column-quantized codes, of the same shape. FP4 codes are two to a byte along N_out.
    amax_tensor: (G, 1) float32.
    sfd_row_tensor, sfd_col_tensor: scales. Where row_layout or column_layout is "blocked" or "blocked_groups" a 6-D view
        (32, 4, row tiles, 4, column tiles, 1) over the bytes of the 32x4x4 tiles, in calls with a (M, K) of cuDNN's the
        bytes as (1, row tiles, column tiles, 32, 4, 4); else 2-D.
    row: the row-quantized output as a BlockScaledTensor, ready to be the activations of the next grouped_gemm; None
        where it was not asked for.
    column_tiles: tiles of 128 rows that sfd_col_tensor has room for.
    """

    # Values are torch.Tensor | None, by the call's arguments; typed as Any so that a caller that knows which need not
    # say so at every use.

    def __init__(self, values: dict[str, torch.Tensor | None], row: BlockScaledTensor | None, tiles: int) -> None:
        super().__init__((key, values[key]) for key in KEYS)
        self.row = row
        self.column_tiles = tiles

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())

    def __getitem__(self, key: str | int) -> Any:
        return super().__getitem__(KEYS[key] if isinstance(key, int) else key)


def pack(epilogue: Epilogue, t: EpilogueTensors, operands: Operands) -> QuantOutputs:
    """The outputs in `t` as the caller of these operands sees them."""
    as_cudnn, offs = operands.as_cudnn and not operands.flat, operands.offs
    row = row_tensor(epilogue, t, offs)
    d, d_col = t.d, t.column_codes
    sfd_row, sfd_col = t.row_scale, t.column_scale
    if row is not None:
        d = row.data if d is None else d
        if row.scale_layout != "plain":
            columns = row.scale_columns
            rows = row.scale.numel() // (512 * ceil_div(columns, 4)) * 128
            sfd_row = cudnn_view(row.scale, rows, columns)
    if t.column_scale is not None and epilogue.column_layout != "plain":
        assert t.column_codes is not None
        sfd_col = cudnn_view(t.column_scale, t.column_codes.shape[1], 4 * t.column_tiles)
    if operands.flat:  # 6-D scales as their bytes lie
        sfd_row, sfd_col = (
            view.permute(5, 2, 4, 0, 1, 3) if view is not None and view.dim() == 6 else view
            for view in (sfd_row, sfd_col)
        )
    values = {
        "d_tensor": three_d(d) if as_cudnn else d,
        "d_col_tensor": three_d(d_col) if as_cudnn else d_col,
        "amax_tensor": None if t.amax is None else t.amax[:, None],
        "sfd_row_tensor": sfd_row,
        "sfd_col_tensor": sfd_col,
    }
    return QuantOutputs(values, row, t.column_tiles)


def three_d(t: torch.Tensor | None) -> torch.Tensor | None:
    """(M, N) as (M, N, 1) with cuDNN's strides (N, 1, M * N)."""
    if t is None:
        return None
    m, n = t.shape
    return t.as_strided((m, n, 1), (n, 1, m * n))
