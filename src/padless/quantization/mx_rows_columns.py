"""Quantizes rows of ragged groups to MXFP8 twice in one read: along their features, and along each group's tokens."""

from __future__ import annotations

import torch

from padless.arguments import check_flag, check_readable, is_one_of, shown
from padless.formats import MXFP8, BlockScaledTensor, blocked_size, ceil_div
from padless.layouts import blocked_groups_rows, group_of_rows, to_blocked_groups
from padless.quantization import columns_rules, rules
from padless.quantization.quantize import has_triton
from padless.quantization.rows_columns import check_values, checked_offs
from padless.row_groups import is_traced
from padless.runtime.choices import ScaleLayout
from padless.runtime.devices import on_device_of
from padless.runtime.operators import register_operator

LAYOUTS = ("plain", "blocked_groups")
Columns = tuple[torch.Tensor, torch.Tensor]
_Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_TILE, _BLOCK = 128, 32  # tokens


def quantize_mx_rows_columns(
    x: torch.Tensor, offs: torch.Tensor, *, rows: bool = True, scale_layout: ScaleLayout = "plain"
) -> tuple[BlockScaledTensor | None, Columns]:
    """MXFP8 codes of x along its features, and along the tokens of every group for a product along the tokens.

    x: (M, F) bfloat16, float16 or float32, any strides; read once.
    offs: (G,) int32 or int64 cumulative END rows of the groups, on x's device, never read by the host.
    rows: False leaves the first of the two out, which is None then.
    scale_layout: of the rows' scales, "plain" or "blocked_groups": 32x4x4 tiles, a group beginning a tile.

    Returns (rows, (codes, scale)). rows: `padless.quantize` of x to MXFP8 to the bit. codes: (M, F) float8_e4m3fn, zeros
        in rows of no group. scale: (4 * (M // 128 + G), F) float8_e8m0fnu, one to 32 tokens counted from the group's
        first; every group starts at a multiple of four rows, as `grouped_gemm_wgrad_mxfp8` reads them. Scales of
        blocks without a token are zero bytes.

    Two launches on a GPU, no synchronization. Raises ValueError for what is not allowed above.
    """
    check_readable(x=x, offs=offs)
    check_flag("rows", rows)
    check_values("x", x, "(M, F)")
    offs = checked_offs(offs, x, "x")
    if not is_one_of(scale_layout, LAYOUTS):
        raise ValueError(f"scale_layout is {shown(scale_layout)}; allowed: {', '.join(map(repr, LAYOUTS))}")
    run = _operator if is_traced(x) else _run
    row_codes, row_scale, codes, scale = run(x, offs, rows, scale_layout)
    columns = codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu)
    if not rows:
        return None, columns
    of_groups = offs if scale_layout == "blocked_groups" else None
    data = row_codes.view(torch.float8_e4m3fn), row_scale.view(torch.float8_e8m0fnu)
    return BlockScaledTensor(*data, MXFP8, None, scale_layout, of_groups), columns


def empty(x: torch.Tensor, num_groups: int, rows: bool, scale_layout: str) -> _Four:
    """Uninitialised outputs, all uint8: codes and scale of the rows, codes and scale of the columns."""
    m, features = x.shape
    kept, blocks = m if rows else 0, ceil_div(features, _BLOCK)
    tiled = blocked_size(blocked_groups_rows(m, num_groups) if rows else 0, blocks)
    shapes = (
        (kept, features),
        (tiled,) if scale_layout == "blocked_groups" else (kept, blocks),
        (m, features),
        (4 * columns_rules.num_scale_rows(m, num_groups), features),
    )
    made = tuple(x.new_empty(shape, dtype=torch.uint8) for shape in shapes)
    return made[0], made[1], made[2], made[3]


def by_torch(x: torch.Tensor, offs: torch.Tensor, rows: bool, scale_layout: str) -> _Four:
    """The Triton kernel's outputs, in plain torch."""
    m, features = x.shape
    row_codes, row_scale = rules.mx(x if rows else x[:0], MXFP8, "rceil")
    if scale_layout == "blocked_groups":
        row_scale = to_blocked_groups(row_scale, offs) if rows else row_scale.new_empty(0)
    num_tiles = columns_rules.num_scale_rows(m, offs.shape[0])
    inside, to = _places(offs, m)
    to = torch.where(inside, to, num_tiles * _TILE)
    padded = x.new_zeros((num_tiles * _TILE + 1, features), dtype=torch.float32)
    padded[to] = x.to(torch.float32)  # the last row collects what is in no group
    codes, scale = rules.mx(padded[:-1].t().contiguous(), MXFP8, "rceil")
    found = torch.cat([codes.t(), codes.new_zeros((1, features))])[to]
    return row_codes, row_scale, found, scale.t().contiguous()


def values_of_columns(columns: Columns, offs: torch.Tensor) -> torch.Tensor:
    """(M, F) bfloat16 that codes along the tokens stand for: exact from 2^-126 on. Zeros in rows of no group."""
    codes, scale = columns
    inside, to = _places(offs, codes.shape[0])
    factors = scale.to(torch.float32)[torch.where(inside, to // _BLOCK, 0)]
    return torch.where(inside[:, None], codes.to(torch.float32) * factors, 0.0).to(torch.bfloat16)


def _places(offs: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether a row is in a group, its place where every group starts at a multiple of 128 rows), (M,) each."""
    starts = columns_rules.group_starts(offs, num_rows, _TILE)
    group = group_of_rows(offs, num_rows)
    token = torch.arange(num_rows, device=offs.device) - starts.rows[group]
    return group < offs.shape[0], starts.columns[group] + token


def _run(x: torch.Tensor, offs: torch.Tensor, rows: bool, scale_layout: str) -> _Four:
    if not (x.is_cuda and has_triton()):
        return by_torch(x, offs, rows, scale_layout)
    from padless.quantization.triton import mx_rows_columns

    made = empty(x, offs.shape[0], rows, scale_layout)
    with on_device_of(x):
        mx_rows_columns.mx_rows_columns(x, offs, *made, rows=rows, tiled=scale_layout == "blocked_groups")
    return made


def _fake(x: torch.Tensor, offs: torch.Tensor, rows: bool, scale_layout: str) -> _Four:
    return empty(x, offs.shape[0], rows, scale_layout)


_operator = register_operator(
    "quantize_mx_rows_columns(Tensor x, Tensor offs, bool rows, str scale_layout) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
