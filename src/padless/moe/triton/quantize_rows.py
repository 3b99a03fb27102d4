"""Quantizes rows that are activated first, or written more than once, as one Triton kernel for all formats.

The arithmetic is that of `padless.quantize`, bit for bit. Beside it the kernel can apply an activation to what it reads,
and write every quantized row to several rows (inverse): a token is then read and quantized once however many experts it
goes to. For few slots it can also sort them itself (`route_quantize`).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from padless import layouts
from padless.formats import FP8_BLOCK, BlockScaledFormat, blocked_size, ceil_div
from padless.moe.activation import Activation
from padless.moe.triton import arithmetic, place_scales, route
from padless.quantization import rules as quantize_rules
from padless.quantization.triton import casts, row_blocks
from padless.quantization.triton import fp8_block as fp8
from padless.quantization.triton.launches import begin, launch, programmatic

_ELEMENTS = {**row_blocks.ELEMENTS, FP8_BLOCK: "e4m3"}
_NO_ACTIVATION = Activation(kind="silu")
_ARRANGEMENTS = {"concatenated": 0, "interleaved": 1, "alternating": 2}
_PROGRAMS = 512  # fewer than so many large tiles leave a GPU idle
ROUTED_SLOTS = 1024  # up to here every program sorts the slots for itself
# From so many scales on a launch that places them (`place_scales`) costs less than it saves: on an H200 2 us and 1.3
# a million, against 9 a million; not where tokens go to two experts alone.
PLACED_SCALES = 1 << 18


class Tile(NamedTuple):
    """The part that one program quantizes: rows x columns of values, by how many warps."""

    rows: int
    columns: int
    num_warps: int


def routed_tile(rows: int, columns: int) -> Tile:
    """The tile where every program sorts the slots: wider where there are enough programs."""
    if rows >= 64:
        return Tile(1, 2048 if columns > 1024 else 1024, 8)
    return Tile(1, 1024 if rows * ceil_div(columns, 512) >= _PROGRAMS else 512, 4)


def choose_tile(
    rows: int, columns: int, *, has_activation: bool, is_gathered: bool = False, is_placed: bool = False
) -> Tile:
    """The tile for (rows, columns) values: 32 x 256, fewer rows where that makes too few programs.

    An activation needs twice the registers and gets half the rows. Gathered rows are written many times: tiles of half
    the values, twice as many at once on a multiprocessor, read while others write, and wide ones need fewer addresses;
    wider still where scales are placed by another launch, and not stored by this one, each to a line of its own.
    """
    for height, wide in ((4, 1024), (8, 512))[0 if is_placed else 1 :] if is_gathered else ():
        chunks = ceil_div(columns, wide)
        if chunks * wide <= 1.125 * columns and ceil_div(rows, height) * chunks >= _PROGRAMS:
            return Tile(height, wide, 4)
    width = 256 if columns > 128 else 128
    for height, num_warps in ((16 if has_activation or is_gathered else 32, 4), (8, 2)):
        if ceil_div(rows, height) * ceil_div(columns, width) >= _PROGRAMS:
            return Tile(height, width, num_warps)
    return Tile(1, width, 1) if rows <= 2 else Tile(2, width, 1)


def quantize_rows(
    x: torch.Tensor,
    format: BlockScaledFormat | None,
    *,
    inverse: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    activation: Activation | None = None,
    row_weights: torch.Tensor | None = None,
    scale_rule: str = "",
    scale_layout: str = "plain",
    offs: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(data, scale) of checked arguments; format None: (bfloat16 values, None). FP8_BLOCK's scales are MN-major.

    inverse: (rows of x, k) which rows of the result each row of x is; complements of rows count as the rows.
    tokens: (rows,) int32, the row of x of each row of the result, where it is known.
    row_weights: (rows of x,) float32, contiguous, that rows are multiplied by after the activation.
    factors: NVFP4's `quantize_rules.nvfp4_factors`, (2,) or with offs (groups, 2).
    values: (rows, K) bfloat16, contiguous, that what is quantized is written to as well; without inverse.
    """
    given = (x, format, inverse, None, tokens, activation, scale_rule, scale_layout, offs, factors, row_weights, values)
    return _launch(*given)


def route_quantize(
    x: torch.Tensor,
    ids: torch.Tensor,
    num_experts: int,
    format: BlockScaledFormat,
    *,
    scale_rule: str,
    scale_layout: str,
    factors: torch.Tensor | None,
) -> tuple[route.Sorted, torch.Tensor, torch.Tensor]:
    """(sorted slots, data, scale) of contiguous ids (T, k), one to `ROUTED_SLOTS` of them, in one launch."""
    slots = route.empty(ids, num_experts)
    data, scale = _launch(x, format, ids, slots, None, None, scale_rule, scale_layout, None, factors)
    assert scale is not None
    return slots, data, scale


def route_gather(x: torch.Tensor, ids: torch.Tensor, num_experts: int) -> tuple[route.Sorted, torch.Tensor]:
    """(sorted slots, their rows of x in bfloat16), of as many slots, in one launch."""
    slots = route.empty(ids, num_experts)
    return slots, _launch(x, None, ids, slots, None, None, "", "plain", None, None)[0]


def _launch(
    x: torch.Tensor,
    format: BlockScaledFormat | None,
    inverse: torch.Tensor | None,  # with slots: the ids
    slots: route.Sorted | None,
    tokens: torch.Tensor | None,
    activation: Activation | None,
    scale_rule: str,
    scale_layout: str,
    offs: torch.Tensor | None,
    factors: torch.Tensor | None,
    row_weights: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    items, K = x.shape
    if activation is not None:
        K = activation.out_columns(K)
    top_k = 0 if inverse is None else inverse.shape[1]
    out_rows = items if inverse is None else items * top_k
    data, scale = _empty(x.device, format, out_rows, K, scale_layout)
    group = None
    if factors is not None and factors.numel() > 2:
        assert offs is not None
        group = layouts.group_of_rows(offs, out_rows).clamp(max=len(offs) - 1)
    if out_rows == 0 or K == 0:
        return data, scale
    placed = None
    if format == FP8_BLOCK and slots is None and top_k > 2 and out_rows * ceil_div(K, 128) >= PLACED_SCALES:
        placed = place_scales.empty(items, K, out_rows, x.device, tokens)
    if slots is not None:
        tile = routed_tile(items, K)
    else:
        is_gathered, has_activation = inverse is not None, activation is not None
        tile = choose_tile(
            items, K, has_activation=has_activation, is_gathered=is_gathered, is_placed=placed is not None
        )
    ids_offs, ids_tokens, ids_inverse = (None, None, None) if slots is None else slots
    columns = 0 if format is None else ceil_div(K, format.block_k)
    given = activation or _NO_ACTIVATION
    launch(_quantize_rows, ceil_div(K, tile.columns) * ceil_div(items, tile.rows))(
        x,
        data if format is None else data.view(torch.uint8),
        scale if format in (None, FP8_BLOCK) or scale is None else scale.view(torch.uint8),
        inverse,
        row_weights,
        factors,
        group,
        ids_offs,
        ids_tokens,
        ids_inverse,
        None if placed is None else placed.scale,
        None if placed is None or tokens is not None else placed.items,
        values,
        items,
        K,
        x.stride(0),
        columns,
        0 if scale is None or format != FP8_BLOCK else scale.stride(1),
        out_rows,
        0 if placed is None else placed.scale.stride(0),
        given.alpha,
        given.up_offset,
        0.0 if given.limit is None else given.limit,
        0 if ids_offs is None else ids_offs.shape[0],
        ELEMENT="bf16" if format is None else _ELEMENTS[format],
        BLOCK=128 if format is None else format.block_k,
        RULE="fp8_block" if format == FP8_BLOCK else scale_rule,
        EMAX=0 if format is None else quantize_rules.ELEMENT_EMAX.get(format, 0),
        MAX_MANTISSA=0 if format is None else row_blocks.MAX_MANTISSAS.get(format, 0),
        FACTORS_BY_ROW=group is not None,
        BLOCKED=scale_layout == "blocked",
        ACTIVATION="" if activation is None else activation.kind,
        GATED=activation is not None and activation.is_gated,
        ARRANGEMENT=_ARRANGEMENTS[given.gate_up],
        HAS_LIMIT=given.limit is not None,
        TOP_K=top_k,
        ROUTED=0 if slots is None else max(triton.next_power_of_2(items * top_k), 16),
        HARDWARE_CAST=casts.casts_in_hardware(x.device),
        **programmatic(x.device, early=activation is None, releases=placed is not None or out_rows <= ROUTED_SLOTS),
        BLOCK_M=tile.rows,
        BLOCK_K=tile.columns,
        num_warps=tile.num_warps,
        enable_fp_fusion=False,
    )
    if placed is not None:
        assert scale is not None
        place_scales.place(placed, scale, are_known=tokens is not None)
    return data, scale


def _empty(
    device: torch.device, format: BlockScaledFormat | None, rows: int, K: int, scale_layout: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes and scales to be filled."""
    if format is None:
        return torch.empty((rows, K), dtype=torch.bfloat16, device=device), None
    data = torch.empty((rows, K // format.codes_per_byte), dtype=torch.uint8, device=device).view(format.data_dtype)
    columns = ceil_div(K, format.block_k)
    if format == FP8_BLOCK:
        if rows == 0:  # no kernel runs, so this zeroes what is then all padding
            return data, layouts.to_mn_major(torch.empty((0, columns), dtype=torch.float32, device=device))
        return data, layouts.empty_mn_major(rows, columns, device)
    if scale_layout == "plain":
        scale = torch.empty((rows, columns), dtype=torch.uint8, device=device)
    else:
        scale = torch.zeros(blocked_size(rows, columns), dtype=torch.uint8, device=device)
    return data, scale.view(format.scale_dtype)


# What the number of rows decides is not compiled in.
@triton.jit(do_not_specialize=["items", "scale_ld", "out_rows"])
def _quantize_rows(
    x_ptr,  # (items, K), or (items, 2 K) with a gate; bf16, fp16 or fp32, strides (x_stride, 1)
    codes_ptr,  # (out_rows, K) uint8 or bf16, or (out_rows, K / 2) with two codes a byte, contiguous
    scale_ptr,  # FP8_BLOCK: float32, strides (1, scale_ld); else uint8, row-major or BLOCKED
    inverse_ptr,  # (items, TOP_K) int32 or None; ROUTED: the ids, int32 or int64
    row_weights_ptr,  # (items,) float32 or None
    factors_ptr,  # NVFP4: (groups, 2) float32
    group_ptr,  # FACTORS_BY_ROW: (out_rows,) int64
    offs_ptr,  # ROUTED: what `route` makes of the ids
    tokens_ptr,
    new_inverse_ptr,
    placed_scale_ptr,  # (items, ceil(K / BLOCK)) float32 of `place_scales`, strides (placed_ld, 1), or None
    placed_items_ptr,  # (out_rows,) int32 of `place_scales`, or None
    values_ptr,  # (items, K) bf16 that gets what is quantized, or None
    items,
    K,
    x_stride,
    scale_columns,  # ceil(K / BLOCK)
    scale_ld,  # FP8_BLOCK: elements from one column of scales to the next
    out_rows,
    placed_ld,
    alpha,
    up_offset,
    limit,
    num_experts,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    EMAX: tl.constexpr,
    MAX_MANTISSA: tl.constexpr,
    FACTORS_BY_ROW: tl.constexpr,
    BLOCKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,
    ROUTED: tl.constexpr,  # 0, or a power of two: at least the number of slots
    HARDWARE_CAST: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    begin(PROGRAMMATIC)
    num_chunks = tl.cdiv(K, BLOCK_K)
    pid = tl.program_id(0)
    chunk = pid % num_chunks  # neighbours in time are neighbours in memory
    item = (pid // num_chunks) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = item < items
    column = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = there[:, None] & (column[None, :] < K)
    x_ptrs = x_ptr + item.to(tl.int64) * x_stride
    # Rows are loaded ahead of the stores before theirs, which no compiler moves them across.
    if TOP_K > 0 and ROUTED == 0:
        next_row = tl.load(inverse_ptr + item * TOP_K, mask=there, other=0)
    if ROUTED > 0:  # BLOCK_M is 1. Slots are sorted while the token is on its way.
        values = tl.load(x_ptrs[:, None] + column[None, :], mask=inside, other=0.0)
        token = pid // num_chunks
        sorted_rows, lane = route.sort_few(
            inverse_ptr, offs_ptr, tokens_ptr, new_inverse_ptr, token, items, num_experts, chunk == 0, TOP_K, ROUTED
        )
        x = casts.to_float32(values)
    else:
        x = _load(x_ptrs, column, inside, K, chunk, ACTIVATION, GATED, ARRANGEMENT, BLOCK_M, BLOCK_K,
                  alpha, up_offset, limit, HAS_LIMIT, HARDWARE_CAST)  # fmt: skip
    if row_weights_ptr is not None:
        x = x * tl.load(row_weights_ptr + item, mask=there, other=0.0)[:, None]
    if values_ptr is not None:
        of_values = item.to(tl.int64)[:, None] * K + column[None, :]
        tl.store(values_ptr + of_values, arithmetic.rounded(x, tl.bfloat16), mask=inside)

    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    # Codes that are stored together, and how many there are in a row.
    WIDTH: tl.constexpr = BLOCK_K // 2 if ELEMENT == "e2m1" else BLOCK_K
    row_width = K // 2 if ELEMENT == "e2m1" else K
    place = chunk * WIDTH + tl.arange(0, WIDTH)
    scale = 0
    if ELEMENT == "bf16":
        codes = arithmetic.rounded(x, tl.bfloat16)
    else:
        x = tl.reshape(x, (BLOCK_M, BLOCKS, BLOCK))
        amax_bits = tl.max(casts.magnitude_bits(x), axis=2)
        if RULE == "fp8_block":
            scale, multiplier = fp8._fp8_block_scale(amax_bits)
        elif RULE == "te" or RULE == "torchao":
            if FACTORS_BY_ROW:
                group = tl.load(group_ptr + item, mask=there, other=0)
            else:
                group = tl.zeros((BLOCK_M,), tl.int64)
            first = tl.load(factors_ptr + group * 2, mask=there, other=1.0)[:, None]
            second = tl.load(factors_ptr + group * 2 + 1, mask=there, other=1.0)[:, None]
            unusual = tl.max(row_blocks._far_from_one(second).to(tl.int32)) > 0
            scale, multiplier = row_blocks._nvfp4_scale(amax_bits, first, second, unusual, RULE, HARDWARE_CAST)
        else:
            scale, multiplier = row_blocks.mx_scale(amax_bits, RULE, EMAX, MAX_MANTISSA)
        if ELEMENT == "e2m1":
            low, high = tl.split(tl.reshape(x, (BLOCK_M, WIDTH, 2)))
            half = row_blocks._for_pairs(multiplier, BLOCK_M, BLOCKS, BLOCK) * 0.5
            codes = casts.halves_to_e2m1(low * half, high * half, HARDWARE_CAST)
        else:
            y = tl.reshape(x * multiplier[:, :, None], (BLOCK_M, BLOCK_K))
            codes = casts.to_e4m3(y, HARDWARE_CAST) if ELEMENT == "e4m3" else casts.to_e5m2(y, HARDWARE_CAST)

    scale_column = chunk * BLOCKS + tl.arange(0, BLOCKS)
    codes_inside = there[:, None] & (place[None, :] < row_width)
    scale_inside = there[:, None] & (scale_column[None, :] < scale_columns)
    exists = there  # a routing that `route` did not make may name other rows
    for j in tl.static_range(1 if TOP_K == 0 else TOP_K):
        if TOP_K == 0:
            row = item.to(tl.int64)
        elif ROUTED > 0:
            row = tl.zeros((BLOCK_M,), tl.int64) + tl.sum(tl.where(lane == j, sorted_rows, 0), axis=0)
        else:
            row = next_row.to(tl.int64)
            row = tl.where(row < 0, -1 - row, row)
            exists = there & (row < out_rows)
            if j + 1 < TOP_K:
                next_row = tl.load(inverse_ptr + item * TOP_K + j + 1, mask=there, other=0)
        tl.store(codes_ptr + row[:, None] * row_width + place[None, :], codes, mask=codes_inside & exists[:, None])
        if placed_scale_ptr is not None:
            if placed_items_ptr is not None:
                tl.store(placed_items_ptr + row, item, mask=exists & (chunk == 0))
        elif ELEMENT != "bf16":
            if RULE == "fp8_block":
                offset = row[:, None] + scale_column.to(tl.int64)[None, :] * scale_ld
            elif BLOCKED:
                tile = (row // 128)[:, None] * tl.cdiv(scale_columns, 4) + (scale_column // 4)[None, :]
                in_tile = (row % 32 * 16 + row % 128 // 32 * 4)[:, None] + (scale_column % 4)[None, :]
                offset = tile * 512 + in_tile
            else:
                offset = row[:, None] * scale_columns + scale_column[None, :]
            tl.store(scale_ptr + offset, scale, mask=scale_inside & exists[:, None])
    if placed_scale_ptr is not None:
        of_item = item.to(tl.int64)[:, None] * placed_ld + scale_column[None, :]
        tl.store(placed_scale_ptr + of_item, scale, mask=scale_inside, eviction_policy="evict_last")  # soon read again
    elif RULE == "fp8_block":  # the padding below MN-major scales
        padded = out_rows + tl.arange(0, 4)
        place_in_padding = padded.to(tl.int64)[:, None] + scale_column.to(tl.int64)[None, :] * scale_ld
        padding = (padded[:, None] < scale_ld) & (scale_column[None, :] < scale_columns) & (pid < num_chunks)
        tl.store(scale_ptr + place_in_padding, tl.zeros((4, BLOCKS), tl.float32), mask=padding)


@triton.jit
def _load(x_ptrs, column, inside, K, chunk, ACTIVATION: tl.constexpr, GATED: tl.constexpr, ARRANGEMENT: tl.constexpr,
          BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, alpha, up_offset, limit, HAS_LIMIT: tl.constexpr,
          HARDWARE: tl.constexpr):  # fmt: skip
    """float32 (BLOCK_M, BLOCK_K) of the rows at x_ptrs, activated; 0 outside."""
    if not GATED:
        x = casts.to_float32(tl.load(x_ptrs[:, None] + column[None, :], mask=inside, other=0.0))
        if ACTIVATION == "":
            values = x
        else:
            values = arithmetic.activated(x, x, ACTIVATION, alpha, up_offset, limit, HAS_LIMIT, HARDWARE)
    else:
        if ARRANGEMENT == 2:
            wide = chunk * (2 * BLOCK_K) + tl.arange(0, 2 * BLOCK_K)
            both_inside = tl.max(inside.to(tl.int32), axis=1)[:, None] > 0
            both = tl.load(x_ptrs[:, None] + wide[None, :], mask=both_inside & (wide[None, :] < 2 * K), other=0.0)
            gate, up = tl.split(tl.reshape(casts.to_float32(both), (BLOCK_M, BLOCK_K, 2)))
        else:
            of_gate, of_up = arithmetic.gate_up_columns(column, K, ARRANGEMENT)
            gate = casts.to_float32(tl.load(x_ptrs[:, None] + of_gate[None, :], mask=inside, other=0.0))
            up = casts.to_float32(tl.load(x_ptrs[:, None] + of_up[None, :], mask=inside, other=0.0))
        values = arithmetic.activated(gate, up, ACTIVATION, alpha, up_offset, limit, HAS_LIMIT, HARDWARE)
        values = tl.where(inside, values, 0.0)
    return values
