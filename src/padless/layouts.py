"""Layouts of scales and codes in memory, in plain torch. Nothing here waits for the GPU.

The 32x4x4 layout of one-byte scales, which Blackwell's tensor cores read: tiles of 128 rows x 4 columns, 512
contiguous bytes each, row-major over the tiles; inside a tile row r, column c is byte (r % 32) * 16 + (r //
32) * 4 + c.
"""

from __future__ import annotations

from typing import Literal

import torch

from padless.arguments import check_device, check_integer, check_readable, check_tensor_type, detached, shown
from padless.formats import (
    MN_MAJOR_ALIGNMENT,
    MXFP4,
    MXFP4_REPACKED,
    TILE_COLUMNS,
    TILE_ROWS,
    BlockScaledFormat,
    BlockScaledTensor,
    blocked_size,
    ceil_div,
    is_mn_major,
    round_up,
)
from padless.row_groups import ALIGNMENTS as ALIGNMENTS
from padless.row_groups import SCALE_BLOCK as SCALE_BLOCK
from padless.row_groups import GroupedColumns as GroupedColumns
from padless.row_groups import MaskedRows as MaskedRows
from padless.row_groups import from_masked as from_masked
from padless.row_groups import is_integers
from padless.row_groups import offs_from_indices as offs_from_indices
from padless.row_groups import offs_from_indptr as offs_from_indptr

# --- MN-major float32 scales -----------------------------------------------------------------------------


def empty_mn_major(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised float32 (rows, columns) with strides (1, ld), ld = rows rounded up to 4 and at least 4.

    Example: rows 5, columns 3 -> strides (1, 8); element (4, 2) is float 2 * 8 + 4 = 20 of the storage.
    """
    _check_sizes(rows=rows, columns=columns)
    check_device(device)
    ld = max(round_up(rows, MN_MAJOR_ALIGNMENT), MN_MAJOR_ALIGNMENT)
    padded = torch.empty((columns, ld), dtype=torch.float32, device=device)
    return padded.as_strided((rows, columns), (1, ld))  # slicing would ask whether rows <= ld, of a size that is traced


def to_mn_major(scale: torch.Tensor) -> torch.Tensor:
    """The (rows, columns) float32 scales, MN-major with zero padding; as they are if they already have it."""
    scale = detached("scale", scale)
    if scale.dim() != 2 or scale.dtype != torch.float32:
        raise ValueError(f"scale must be (rows, columns) float32, got {tuple(scale.shape)} {scale.dtype}")
    if is_mn_major(scale):
        return scale
    rows, columns = scale.shape
    padded = empty_mn_major(round_up(max(rows, 1), MN_MAJOR_ALIGNMENT), columns, scale.device)
    padded[rows:].zero_()
    padded[:rows].copy_(scale)
    return padded[:rows]


# --- two FP4 codes a byte --------------------------------------------------------------------------------


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """(.., K) uint8 codes 0..15 as (.., K / 2) float4_e2m1fn_x2: code 2i in bits 3:0, 2i + 1 in bits 7:4.

    Example: codes [0x1, 0xF] -> byte 0xF1.
    """
    check_tensor_type("codes", codes)
    if codes.dtype != torch.uint8 or codes.dim() == 0 or codes.shape[-1] % 2 != 0:
        raise ValueError(f"codes must be uint8 with an even last size, got {codes.dtype} {tuple(codes.shape)}")
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.float4_e2m1fn_x2)


def unpack_fp4(data: torch.Tensor) -> torch.Tensor:
    """(.., K / 2) float4_e2m1fn_x2 or uint8 as (.., K) uint8 codes 0..15."""
    packed = _checked_bytes(data, "data").view(torch.uint8)
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


# Where a repacked word has the bits of code i of 8, for i < 4: sign, upper and lower exponent bit, mantissa. Those of
# code i + 4 are 16 further on. Four rotations of the word have codes i and i + 4 in bits 15, 8, 7 and 6 of its halves,
# where a bf16 has them, but for the mantissas of the first two (sm90_bf16/dequantize.cuh).
_REPACKED = ((15, 8, 7, 14), (13, 6, 5, 4), (9, 2, 1, 0), (3, 28, 27, 26))
_TURNED = [row ^ 3 for row in range(16)]
_REPACKED_AT_A_TIME = 1 << 26  # bytes


def is_repackable(weights: BlockScaledTensor) -> bool:
    """Whether `to_repacked` takes them: MXFP4 weights, contiguous, N a multiple of 16 and K of 64. Raises ValueError."""
    if not isinstance(weights, BlockScaledTensor):
        raise ValueError(f"weights must be a BlockScaledTensor, got {shown(weights)}")
    check_readable(weights=weights)
    return weights.format == MXFP4 and weights.is_weight and _has_code_tiles(weights)


def _has_code_tiles(weights: BlockScaledTensor) -> bool:
    return weights.shape[-2] % 16 == 0 and weights.shape[-1] % 32 == 0 and weights.data.is_contiguous()


def to_repacked(weights: BlockScaledTensor) -> BlockScaledTensor:
    """MXFP4 weights with their codes in the order in which Hopper multiplies them, MXFP4_REPACKED, of as many bytes.

    8 codes become bf16 in 13 instructions in place of 17, and 16 rows x 64 of K lie together, so that copies bring whole
    lines of memory: few tokens wait for both. Values, and the bits of products with bfloat16 activations, stay; nothing
    else takes them, and `from_repacked` undoes it. N is a multiple of 16 and K of 64, data contiguous; the scales are
    shared. Raises ValueError.
    """
    _check_repacked(weights, MXFP4)
    data = _moved_bits(_in_code_tiles(weights.data), _MOVES)
    return BlockScaledTensor(data, weights.scale, MXFP4_REPACKED, None, weights.scale_layout)


def from_repacked(weights: BlockScaledTensor) -> BlockScaledTensor:
    """MXFP4 weights of MXFP4_REPACKED ones: `to_repacked` undone."""
    _check_repacked(weights, MXFP4_REPACKED)
    back = {-shift % 32: _rotated(mask, shift) for shift, mask in _MOVES.items()}
    data = _in_rows(_moved_bits(weights.data, back))
    return BlockScaledTensor(data, weights.scale, MXFP4, None, weights.scale_layout)


def _check_repacked(weights: BlockScaledTensor, format: BlockScaledFormat) -> None:
    if not isinstance(weights, BlockScaledTensor) or weights.format != format or not weights.is_weight:
        raise ValueError(f"weights must be {format.name} of kind 'weight', got {shown(weights)}")
    check_readable(weights=weights)
    if not _has_code_tiles(weights):
        raise ValueError(f"weights must be contiguous with N a multiple of 16 and K of 64, got {weights}")


def _in_code_tiles(data: torch.Tensor) -> torch.Tensor:
    """Tiles of 16 rows x 64 of K, [row][32 bytes], along K and then along N; rows of every second one by _TURNED."""
    *groups, n, row_bytes = data.shape
    rows = data.view(torch.uint8).view(*groups, n // 16, 16, row_bytes // 32, 32)
    tiles = rows.transpose(-3, -2).contiguous()
    tiles[..., 1::2, :, :] = tiles[..., 1::2, _TURNED, :]
    return tiles.view(data.shape).view(data.dtype)


def _in_rows(data: torch.Tensor) -> torch.Tensor:
    """`_in_code_tiles` undone."""
    *groups, n, row_bytes = data.shape
    tiles = data.view(torch.uint8).view(*groups, n // 16, row_bytes // 32, 16, 32).clone()
    tiles[..., 1::2, :, :] = tiles[..., 1::2, _TURNED, :]
    return tiles.transpose(-3, -2).reshape(data.shape).view(data.dtype)


def _rotated(bits: int, shift: int) -> int:
    """32 bits, to the left."""
    return (bits << shift | bits >> (32 - shift)) & 0xFFFFFFFF


def _moves() -> dict[int, int]:
    """Rotations to the left, and the bits of a word of 8 codes that take each to their place in a repacked one."""
    found: dict[int, int] = {}
    for code in range(8):
        for bit, place in zip((3, 2, 1, 0), _REPACKED[code % 4], strict=True):
            source, to = 4 * code + bit, place + 16 * (code // 4)
            found[(to - source) % 32] = found.get((to - source) % 32, 0) | 1 << source
    return found


_MOVES = _moves()


def _moved_bits(data: torch.Tensor, moves: dict[int, int]) -> torch.Tensor:
    """Codes with the bits of every 32 moved, in little memory next to the result."""
    codes = data.view(torch.uint8).flatten()
    out = torch.empty_like(codes)
    for part, to in zip(codes.split(_REPACKED_AT_A_TIME), out.split(_REPACKED_AT_A_TIME), strict=True):
        # The copy begins at a whole word wherever `data` begins.
        wide = part.clone().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        twice, found = wide | wide << 32, torch.zeros_like(wide)
        for shift, mask in moves.items():
            found |= twice >> (32 - shift) & _rotated(mask, shift)
        to.view(torch.int32).copy_(found)  # the lower 32 bits
    return out.view(data.shape).view(data.dtype)


# --- 32x4x4 tiles ----------------------------------------------------------------------------------------


def to_blocked(scale: torch.Tensor) -> torch.Tensor:
    """One-byte scales (R, C) in 32x4x4 tiles, (blocked_size(R, C),); (G, R, C) to (G, blocked_size(R, C)).

    Padding rows and columns are zero bytes. Example: R = 130, C = 5: element (129, 4) is in tile row 1, tile
    column 1, at byte (1 * 2 + 1) * 512 + (1 % 32) * 16 + 0 * 4 + 0 = 1552.
    """
    scale = _checked_bytes(scale, "scale")
    if scale.dim() not in (2, 3):
        raise ValueError(f"scale must be (R, C) or (G, R, C), got shape {tuple(scale.shape)}")
    *batch, rows, columns = scale.shape
    padding = (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), padding)
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    split = padded.view(*batch, row_tiles, 4, 32, column_tiles, TILE_COLUMNS)
    tiled = split.movedim((-2, -3, -4), (-4, -3, -2))  # -> row tile, column tile, 32, 4, 4
    return tiled.reshape(*batch, blocked_size(rows, columns)).view(scale.dtype)


def from_blocked(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The (rows, columns) scales in 32x4x4 tiles `blocked`, of any shape with their bytes in order.

    A (G, blocked_size(rows, columns)) `blocked` gives (G, rows, columns).
    """
    blocked = _checked_bytes(blocked, "blocked")
    _check_sizes(rows=rows, columns=columns)
    size = blocked_size(rows, columns)
    batched = blocked.dim() == 2 and blocked.shape[-1] == size
    if not batched and blocked.numel() != size:
        raise ValueError(
            f"blocked must hold the {size} bytes of {rows} x {columns} scales in 32x4x4 tiles, "
            f"got {tuple(blocked.shape)}"
        )
    batch = blocked.shape[:1] if batched else ()
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    tiled = blocked.contiguous().view(torch.uint8).view(*batch, row_tiles, column_tiles, 32, 4, TILE_COLUMNS)
    split = tiled.movedim((-4, -3, -2), (-2, -3, -4))  # -> row tile, 4, 32, column tile, 4
    padded = split.reshape(*batch, row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS)
    return padded[..., :rows, :columns].contiguous().view(blocked.dtype)


def cudnn_view(blocked: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The same bytes as cuDNN describes them: (32, 4, row tiles, 4, column tiles, L), no copy.

    blocked: (blocked_size(rows, columns),), then L = 1, or (L, blocked_size(rows, columns)).
    Element [r % 32, (r % 128) // 32, r // 128, c % 4, c // 4, l] is scale (r, c) of matrix l.
    """
    blocked = _checked_bytes(blocked, "blocked")
    _check_sizes(rows=rows, columns=columns)
    size = blocked_size(rows, columns)
    if blocked.dim() not in (1, 2) or blocked.shape[-1] != size or not blocked.is_contiguous():
        raise ValueError(f"blocked must be contiguous, ({size},) or (L, {size}), got shape {tuple(blocked.shape)}")
    row_tiles, column_tiles = ceil_div(rows, TILE_ROWS), ceil_div(columns, TILE_COLUMNS)
    matrices = blocked.shape[0] if blocked.dim() == 2 else 1  # there may be no rows
    return blocked.view(matrices, row_tiles, column_tiles, 32, 4, TILE_COLUMNS).permute(3, 4, 1, 5, 2, 0)


def from_cudnn_view(view: torch.Tensor) -> torch.Tensor:
    """(L, bytes) of a (32, 4, row tiles, 4, column tiles, L) view; no copy of what cudnn_view made."""
    view = _checked_bytes(view, "view")
    if view.dim() != 6 or tuple(view.shape[i] for i in (0, 1, 3)) != (32, 4, TILE_COLUMNS):
        raise ValueError(f"view must be (32, 4, row tiles, 4, column tiles, L), got shape {tuple(view.shape)}")
    return view.permute(5, 2, 4, 0, 1, 3).reshape(view.shape[5], -1)


# --- groups of rows --------------------------------------------------------------------------------------


def group_of_rows(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows,) int64 group of every row, len(offs) for rows past the last group.

    offs: (G,) int32 cumulative END offsets; their running maximum counts, as for the GEMM.
    """
    ends = _group_ends(offs, rows)
    return torch.bucketize(torch.arange(rows, device=offs.device), ends, right=True)


def group_max(row_amax: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """(G,) largest of each group's row_amax (M,), none negative; rows past the last group join it."""
    row_amax = detached("row_amax", row_amax)
    if row_amax.dim() != 1 or not row_amax.is_floating_point():
        raise ValueError(f"row_amax must be (M,) of floating point, got {tuple(row_amax.shape)} {row_amax.dtype}")
    group = group_of_rows(offs, row_amax.shape[0]).clamp(max=offs.shape[0] - 1)
    return row_amax.new_zeros(offs.shape[0]).scatter_reduce(0, group, row_amax, "amax")


def blocked_groups_rows(rows: int, num_groups: int) -> int:
    """Rows that any split of `rows` into groups can need when every group is padded to 128."""
    return (rows + (TILE_ROWS - 1) * num_groups) // TILE_ROWS * TILE_ROWS


def padded_rows(offs: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows,) int64: where each row's scales go when every group starts on a fresh tile of 128 rows.

    Example: offs [2, 5] -> rows 0, 1 of group 0 stay, rows 2, 3, 4 go to 128, 129, 130. Rows past the last
        group go to blocked_groups_rows(rows, len(offs)), one past all that is kept.
    """
    ends = _group_ends(offs, rows)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    tiles = (ends - starts + TILE_ROWS - 1) // TILE_ROWS
    shift = (tiles.cumsum(0) - tiles) * TILE_ROWS - starts
    outside = torch.full_like(ends[:1], blocked_groups_rows(rows, offs.shape[0]))
    row = torch.arange(rows, device=offs.device)
    group = torch.bucketize(row, ends, right=True)
    inside = group < offs.shape[0]
    return torch.where(inside, row + torch.cat([shift, outside])[group], outside)


def to_blocked_groups(scale: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """(M, C) one-byte scales in 32x4x4 tiles with each group's rows on tiles of their own, (bytes,).

    offs: (G,) int32 cumulative END offsets. Group g starts at tile row sum over i < g of ceil(M_i / 128);
        empty groups take no tile. The result has room for any offs, blocked_size(blocked_groups_rows(M, G),
        C) bytes, zero where no group lies. Rows past the last group are left out.
    """
    scale = _checked_bytes(scale, "scale")
    if scale.dim() != 2:
        raise ValueError(f"scale must be (M, C), got shape {tuple(scale.shape)}")
    _check_offs(offs)
    rows, columns = scale.shape
    capacity = blocked_groups_rows(rows, offs.shape[0])
    padded = torch.zeros((capacity + 1, columns), dtype=torch.uint8, device=scale.device)
    padded[padded_rows(offs, rows)] = scale.view(torch.uint8)  # the last row collects what is in no group
    return to_blocked(padded[:capacity]).view(scale.dtype)


def from_blocked_groups(blocked: torch.Tensor, offs: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The (rows, columns) scales of to_blocked_groups; zero bytes for rows past the last group."""
    blocked = _checked_bytes(blocked, "blocked")
    _check_sizes(rows=rows, columns=columns)
    _check_offs(offs)
    if columns == 0 or blocked.dim() != 1 or blocked.numel() % blocked_size(1, columns):
        raise ValueError(f"blocked must hold whole tiles of 128 rows x {columns} columns, got {tuple(blocked.shape)}")
    capacity = blocked.numel() // blocked_size(1, columns) * TILE_ROWS
    padded = from_blocked(blocked, capacity, columns).view(torch.uint8)
    padded = torch.nn.functional.pad(padded, (0, 0, 0, 1))
    return padded[padded_rows(offs, rows).clamp(max=capacity)].view(blocked.dtype)


def of_weight_scales(format: BlockScaledFormat, k: int) -> Literal["plain", "blocked"]:
    """The scale_layout in which kernels read scales of weights with k columns where they are.

    "blocked" for MXFP4 and NVFP4 whose rows of plain scales are no multiple of 16 bytes, as TMA wants them (K of 2880
    has 90 of MXFP4): plain ones are copied at every product. Else "plain", which all products read.
    """
    is_read = format.codes_per_byte == 1 or ceil_div(k, format.block_k) % 16 == 0
    return "plain" if is_read else "blocked"


def _with_kernel_scales(t: BlockScaledTensor) -> BlockScaledTensor:
    """Weights with their scales in the layout of `of_weight_scales`; t itself where they are."""
    layout = of_weight_scales(t.format, t.shape[-1])
    if t.scale_layout == layout or layout == "plain":
        return t
    return BlockScaledTensor(t.data, to_blocked(t.scale), t.format, t.global_scale, layout)


def plain_scale(t: BlockScaledTensor, offs: torch.Tensor | None = None) -> torch.Tensor:
    """The scales of t in their logical shape, whatever its scale_layout; "blocked_groups" needs offs."""
    if not isinstance(t, BlockScaledTensor):
        raise ValueError(f"t must be a BlockScaledTensor, got {shown(t)}")
    check_readable(t=t)
    if offs is not None:
        _check_offs(offs, least=0)
    if t.scale_layout == "plain":
        return detached("t.scale", t.scale)
    rows, columns = t.data.shape[-2], t.scale_columns
    if t.scale_layout == "blocked":
        return from_blocked(t.scale, rows, columns)
    if offs is None:
        raise ValueError("offs must be given for scales in layout 'blocked_groups', got None")
    return from_blocked_groups(t.scale, offs, rows, columns)


# --- checks -----------------------------------------------------------------------------------------------


def _group_ends(offs: torch.Tensor, rows: int) -> torch.Tensor:
    _check_offs(offs)
    _check_sizes(rows=rows)
    return offs.to(torch.int64).clamp(0, rows).cummax(0).values


def _check_offs(offs: object, least: int = 1) -> None:
    check_tensor_type("offs", offs)
    if not is_integers(offs) or offs.shape[0] < least:
        of_rows = "of at least one end row, " if least else ""
        raise ValueError(f"offs must be a 1-D tensor of integers, int32 or int64, {of_rows}got {shown(offs)}")


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        check_integer(name, size, 0)


def _checked_bytes(t: torch.Tensor, name: str) -> torch.Tensor:
    check_tensor_type(name, t)
    if t.dtype.itemsize != 1:
        raise ValueError(f"{name} must have a dtype of one byte, got {t.dtype}")
    return detached(name, t)
