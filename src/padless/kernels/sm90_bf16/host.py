"""Host side of sm90_bf16_grouped_gemm.cu: pairs of formats whose values, or codes, are exact in bf16, on Hopper."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import MXFP4_REPACKED, TILE_BYTES, BlockScaledTensor, round_up
from padless.kernels import ahead, maps
from padless.kernels.config import format_name
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_bf16.config import Sm90Bf16Config, fit, select_config
from padless.layouts import plain_scale
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_bf16/sm90_bf16_grouped_gemm.cu"

_SCALE_ROW_BYTES = 16  # what one copy brings of a row of row-major scales


Config = Sm90Bf16Config


def prepare(
    driver: Driver,
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm90Bf16Config | None,
) -> Prepared:
    """Packs the launch of out = a @ b of its group.

    Scales that TMA cannot read in place are copied first: row-major ones whose rows are not a multiple of 16
    bytes, and blocked ones of activations.
    """
    (m, n), num_groups = out.shape, b.data.shape[0]
    device = out.device.index or 0
    if config is None:
        blocked = b.scale_layout == "blocked"
        config = select_config(
            format_name(a), b.format.name, m, n, num_groups, blocked=blocked, out_dtype=out.dtype,
            num_sms=driver.num_sms(device),
        )  # fmt: skip
    else:
        config = fit(config, a, b, out.dtype)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    read = operands(a, b, offs, config)
    arguments: list[Argument] = [driver.encode(spec) for spec in read.maps]
    arguments += [driver.encode(maps.output_ragged(out, config.block_m)), *read.numbers]
    arguments += [(tile_counter(config, device, out.data_ptr()), 4), read.early.arguments()[0]]
    tiles = most_tiles(m, n, num_groups, config.block_m, config.block_n)
    grid = persistent_grid(driver.num_sms(device), tiles)
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True, ready=read.early.addresses())
    prepared = driver.prepare(function, kernel, shape, arguments, [*read.tensors, out])
    return Prepared(prepared, read.copies)


@dataclass(frozen=True)
class Operands:
    """Arguments of the kernel from its operands: the maps before the output's, the numbers between it and the tile
    counter, the tensors that are read, those among them that are copies, and those that are read ahead."""

    maps: tuple[tensor_map.TensorMapSpec, ...]
    numbers: tuple[tuple[int, int], ...]
    tensors: tuple[torch.Tensor, ...]
    copies: tuple[torch.Tensor, ...]
    early: ahead.Use


def operands(
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    config: Sm90Bf16Config,
    *,
    weight_rows: int | None = None,
    are_copies: bool = False,
) -> Operands:
    """The operands as the kernel reads them; weight_rows: rows of weights that come together, None for a tile's;
    are_copies: whether some of them have just been made."""
    (num_groups, n), m, k = b.data.shape[:2], a.shape[0], b.logical_shape[-1]
    box_rows = config.block_n if weight_rows is None else weight_rows
    copies: list[torch.Tensor] = []
    a_data = a.data if isinstance(a, BlockScaledTensor) else a
    sfa, sfa_map = _activation_scales(a, offs, config, copies)
    sfb, sfb_map = _weight_scales(b, config, box_rows, copies)
    repacked = config.b_format == MXFP4_REPACKED.name
    of_b = tensor_map.code_tiles(b.data, box_rows, 128) if repacked else _rows_of_codes(b.data, box_rows)
    codes = (_rows_of_codes(a_data, config.box_rows), of_b)
    maps = (*codes, sfa_map or codes[0], sfb_map or codes[1])  # not looked at without one-byte scales
    promoted = sfa if config.a_format == "FP8_BLOCK" else sfb if config.b_format == "FP8_BLOCK" else None
    global_a = a.global_scale if isinstance(a, BlockScaledTensor) else None
    numbers = [(0 if promoted is None else promoted.data_ptr(), 8)]
    numbers += [(stride, 8) for stride in ((0, 0) if promoted is None else promoted.stride()[-2:])]
    numbers += [(0 if s is None else s.data_ptr(), 8) for s in (global_a, b.global_scale)]
    numbers += [(0 if s is None or s.numel() == 1 else 1, 4) for s in (global_a, b.global_scale)]
    numbers += [(0 if offs is None else offs.data_ptr(), 8)]
    numbers += [(value, 4) for value in (m, n, k, num_groups)]
    # What a launch right ahead copies is not ready.
    early = ahead.Use() if copies or are_copies else ahead.usable(offs, m, [b.data, sfb])
    tensors = [a_data, sfa, b.data, sfb, global_a, b.global_scale, offs]
    return Operands(maps, tuple(numbers), tuple(t for t in tensors if t is not None), tuple(copies), early)


def _rows_of_codes(data: torch.Tensor, block_rows: int) -> tensor_map.TensorMapSpec:
    """Codes read 128 of K at a time (bf16: 64): FP8 and bf16 rows of 128 swizzled bytes, FP4 rows of 64 plain ones."""
    if data.dtype == torch.bfloat16:
        spec = tensor_map.operand(data, block_rows)
        return replace(spec, box=(64, *spec.box[1:]))
    if data.dtype == torch.float4_e2m1fn_x2:
        spec = tensor_map.operand(data.view(torch.uint8), block_rows)
        return replace(spec, box=(64, *spec.box[1:]), swizzle=tensor_map.SWIZZLE_NONE)
    return tensor_map.operand(data.view(torch.uint8), block_rows)


def _row_major(
    scale: torch.Tensor, block_rows: int, copies: list[torch.Tensor]
) -> tuple[torch.Tensor, tensor_map.TensorMapSpec]:
    """One-byte scales (.., rows, columns) for copies of 16 bytes a row; the tensor that is read, and its map."""
    columns = scale.shape[-1]
    scale = scale.view(torch.uint8)
    strides = [s for s, size in zip(scale.stride()[:-1], scale.shape[:-1], strict=True) if size > 1]
    if any(stride % 16 for stride in strides) or scale.data_ptr() % 16:
        padded = scale.new_empty((*scale.shape[:-1], round_up(columns, 16)))
        copies.append(padded)
        padded[..., :columns].copy_(scale)
        scale = padded[..., :columns]
    dims = tuple(reversed(scale.shape))
    steps = []
    for dim in range(scale.dim() - 2, -1, -1):
        wanted = scale.stride(dim) if scale.shape[dim] > 1 else round_up(columns, 16)
        steps.append(wanted)
    box = (_SCALE_ROW_BYTES, block_rows) + (1,) * (len(dims) - 2)
    return scale, tensor_map.TensorMapSpec(0, scale.data_ptr(), dims, tuple(steps), box)


def _activation_scales(
    a: BlockScaledTensor | torch.Tensor, offs: torch.Tensor | None, config: Sm90Bf16Config, copies: list[torch.Tensor]
) -> tuple[torch.Tensor | None, tensor_map.TensorMapSpec | None]:
    """The scales that the kernel reads and their map, where it reads them with TMA."""
    if not isinstance(a, BlockScaledTensor):
        return None, None
    if config.a_format == "FP8_BLOCK":
        return a.scale, None
    scale = a.scale
    if a.scale_layout != "plain":
        ends = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device) if offs is None else offs
        scale = plain_scale(a, ends).contiguous()
        copies.append(scale)
    return _row_major(scale, config.box_rows, copies)


def _weight_scales(
    b: BlockScaledTensor, config: Sm90Bf16Config, box_rows: int, copies: list[torch.Tensor]
) -> tuple[torch.Tensor, tensor_map.TensorMapSpec | None]:
    if config.b_format == "FP8_BLOCK":
        return b.scale, None
    if not config.blocked:
        return _row_major(b.scale, box_rows, copies)
    scale = b.scale.view(torch.uint8)
    # Half tiles, in the order they lie in: two or four of them, one after the other, are 128 rows' scales of 128 of K.
    tiles = 2 if config.b_format == "NVFP4" else 1
    halves = scale.numel() // (TILE_BYTES // 2)
    return scale, tensor_map.TensorMapSpec(
        0, scale.data_ptr(), (TILE_BYTES // 2, halves), (TILE_BYTES // 2,), (TILE_BYTES // 2, 2 * tiles)
    )
