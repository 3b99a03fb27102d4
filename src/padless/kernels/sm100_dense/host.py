"""Host side of sm100_mxfp8_gemm.cu: the dense product of two MXFP8 operands on Blackwell.

Verified by emulation; its speed has never been measured.
"""

from __future__ import annotations

import torch

from padless.formats import TILE_BYTES, TILE_COLUMNS, TILE_ROWS, BlockScaledTensor, ceil_div
from padless.kernels.launch import Prepared, load_kernel, persistent_grid
from padless.kernels.maps import tiled_scale
from padless.kernels.sm100_dense.config import BLOCK_M, HALF_N, DenseProblem, Sm100DenseConfig, fit, select_config
from padless.runtime.driver import TENSOR_MAP_BYTES, Argument, Driver, LaunchShape
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_64B, SWIZZLE_128B, TensorMapSpec, operand

KERNEL = "sm100_dense/sm100_mxfp8_gemm.cu"
_UINT16 = 1  # CUtensorMapDataType


Config = Sm100DenseConfig


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm100DenseConfig | None,
) -> Prepared:
    """Packs the launch of out = a @ b.T; a (M, K), b (1, N, K), out (M, N), rows of any pitch, none of them empty.

    Plain scales are copied into 32x4x4 tiles first. Of ``config`` the dtypes are taken from the operands.
    """
    if offs is not None or b.data.shape[0] != 1:
        raise ValueError(f"b has {b.data.shape[0]} groups; the dense product takes one, and no offs")
    (m, k), n = a.data.shape, b.data.shape[1]
    if k == 0 or k % 32 != 0:
        raise ValueError(f"K is {k}; it must be a positive multiple of 32 (quantize a zero-filled tail)")
    device = out.device.index or 0
    row_bytes = out.stride(0) * out.element_size() if m > 1 else 0
    can_stage = (out.data_ptr() | row_bytes) % 16 == 0
    problem = DenseProblem(m, n, k, out.dtype, a.data.dtype, b.data.dtype, driver.num_sms(device), can_stage)
    config = select_config(problem) if config is None else fit(config, problem)
    if config.cta_group > problem.num_sms:
        raise ValueError(f"config has cta_group={config.cta_group}; the device has {problem.num_sms} SM")
    sfa, sfb = tiled_scale(a), tiled_scale(b)
    copies = tuple(new for new, old in ((sfa, a.scale), (sfb, b.scale)) if new is not old)

    kernel, function = load_kernel(driver, KERNEL, config, device)
    rows, columns = config.tile
    tiles = ceil_div(m, rows) * ceil_div(n, columns) * (columns // HALF_N)  # if all are cut
    grid = persistent_grid(problem.num_sms, tiles, config.cta_group)
    maps = [
        operand(a.data.view(torch.uint8), BLOCK_M),
        operand(b.data[0].view(torch.uint8), HALF_N // config.cta_group),
        _scale_map(sfa, m, k, config.block_k),
        _scale_map(sfb, n, k, config.block_k),
    ]
    arguments: list[Argument] = [driver.encode(spec) for spec in maps]
    staged = config.store == "staged"
    arguments.append(driver.encode(_output_map(out, config)) if staged else bytes(TENSOR_MAP_BYTES))
    arguments += [(out.data_ptr(), 8), (out.stride(0), 8), (m, 4), (n, 4), (k, 4)]
    arguments.append((int((out.data_ptr() | row_bytes) % 32 == 0), 4))
    shape = LaunchShape(grid, kernel.num_threads, config.cta_group)
    return Prepared(driver.prepare(function, kernel, shape, arguments, [a.data, sfa, b.data, sfb, out]), copies)


def _scale_map(scale: torch.Tensor, rows: int, k: int, block_k: int) -> TensorMapSpec:
    """Scales as (row of tiles, tile, 256 pairs of bytes), read a stage's tiles of one row of tiles at a time."""
    across = ceil_div(k, 32 * TILE_COLUMNS)
    dims = (TILE_BYTES // 2, across, ceil_div(rows, TILE_ROWS))
    box = (TILE_BYTES // 2, block_k // (32 * TILE_COLUMNS), 1)
    return TensorMapSpec(_UINT16, scale.data_ptr(), dims, (TILE_BYTES, TILE_BYTES * across), box)


def _output_map(out: torch.Tensor, config: Sm100DenseConfig) -> TensorMapSpec:
    """(M, N) output, written 32 rows x store_bytes at a time."""
    size = out.element_size()
    m, n = out.shape
    stride = out.stride(0) * size if m > 1 else -(-n * size // 16) * 16
    swizzle = SWIZZLE_64B if config.store_bytes == 64 else SWIZZLE_128B
    box = (config.store_bytes // size, 32)
    return TensorMapSpec(DATA_TYPES[out.dtype][0], out.data_ptr(), (n, m), (stride,), box, swizzle)
