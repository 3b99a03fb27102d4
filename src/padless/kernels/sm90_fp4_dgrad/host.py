"""Host side of sm90_fp4_dgrad.cu: picks a configuration, encodes tensor maps, packs the launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.formats import MXFP4, NVFP4, TILE_BYTES, TILE_COLUMNS, BlockScaledTensor
from padless.kernels.config import room_for_groups
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.maps import output_ragged, tiled_scale
from padless.kernels.sm90_fp4_dgrad.config import BLOCK_COLUMNS, BLOCK_N, Fp4DgradConfig, select_config
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_fp4_dgrad/sm90_fp4_dgrad.cu"
Config = Fp4DgradConfig


def can_read(dy: torch.Tensor, weights: BlockScaledTensor) -> bool:
    """Whether the kernel reads dy (M, N) and these weights (G, N, K): MXFP4 or NVFP4, rows of both whole 16 bytes."""
    if weights.format not in (MXFP4, NVFP4) or weights.scale_layout not in ("plain", "blocked"):
        return False
    data, scale = weights.data, weights.scale
    strides = [tensor_map.outer_stride(data, dim) for dim in (0, 1)]
    sizes = (*strides, data.data_ptr(), data.shape[2], tensor_map.outer_stride(dy, 0), dy.data_ptr(), 2 * dy.shape[1])
    has_scales = scale.stride(2) == 1 if weights.scale_layout == "plain" else scale.is_contiguous()
    return has_scales and dy.stride(1) == data.stride(2) == 1 and not any(size % 16 for size in sizes)


def prepare(
    driver: Driver,
    dy: torch.Tensor,
    weights: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Fp4DgradConfig | None,
) -> Prepared:
    """Packs the launch of out = dy @ weights of its group: dy (M, N), weights (G, N, K) that `can_read`, out (M, K).

    Row-major scales whose rows are no multiple of 16 bytes are copied into tiles first.
    """
    (m, k), (num_groups, n) = out.shape, weights.data.shape[:2]
    device = out.device.index or 0
    blocked = weights.scale_layout == "blocked" or not _has_whole_rows(weights.scale)
    scale = tiled_scale(weights) if blocked else weights.scale
    copies = () if scale is weights.scale else (scale,)
    if config is None:
        config = select_config(weights.format.name, m, num_groups, blocked=blocked)
    else:
        room = room_for_groups(num_groups)
        config = replace(config, format=weights.format.name, blocked=blocked, max_groups=room)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    rows = min(config.block_m, 64)  # of a copy
    specs = (_rows(dy, rows), _codes(weights.data), _scales(scale, config), output_ragged(out, rows))
    global_scale = weights.global_scale
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += [(0 if global_scale is None else global_scale.data_ptr(), 8)]
    arguments += [(0 if global_scale is None or global_scale.numel() == 1 else 1, 4)]
    arguments += [(0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(value, 4) for value in (m, n, k, num_groups)]
    arguments += [(tile_counter(config, device, out.data_ptr()), 4)]
    grid = persistent_grid(driver.num_sms(device), most_tiles(m, k, num_groups, config.block_m, BLOCK_COLUMNS))
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    tensors = [t for t in (dy, weights.data, scale, global_scale, offs, out) if t is not None]
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors), copies)


def _rows(dy: torch.Tensor, rows: int) -> tensor_map.TensorMapSpec:
    """(M, N), read ``rows`` rows of 64 of N at a time."""
    return replace(tensor_map.operand(dy, rows), box=(BLOCK_N, rows))


def _codes(data: torch.Tensor) -> tensor_map.TensorMapSpec:
    """(G, N, K / 2) bytes, read 64 rows of 256 codes at a time."""
    return tensor_map.operand(data.view(torch.uint8), BLOCK_N)


def _has_whole_rows(scale: torch.Tensor) -> bool:
    """Whether TMA can read row-major scales (G, N, columns) where they are."""
    return not any(size % 16 for size in (scale.stride(0), scale.stride(1), scale.data_ptr()))


def _scales(scale: torch.Tensor, config: Fp4DgradConfig) -> tensor_map.TensorMapSpec:
    """Row-major ones, read 16 columns of 64 rows at a time; blocked ones as half tiles, 4 columns of 64 rows."""
    scale = scale.view(torch.uint8)
    if not config.blocked:
        spec = tensor_map.operand(scale, BLOCK_N)
        return replace(spec, box=(16, *spec.box[1:]), swizzle=tensor_map.SWIZZLE_NONE)
    half, block = TILE_BYTES // 2, 16 if config.format == "NVFP4" else 32
    box = (half, 2 * (BLOCK_COLUMNS // block // TILE_COLUMNS))
    return tensor_map.TensorMapSpec(0, scale.data_ptr(), (half, scale.numel() // half), (half,), box)
