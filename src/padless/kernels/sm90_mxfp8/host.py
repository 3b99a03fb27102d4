"""Host side of sm90_mxfp8_grouped_gemm.cu: MXFP8 x MXFP8 on Hopper's FP8 tensor cores, e4m3 or e5m2."""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import BlockScaledTensor
from padless.kernels import maps
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config, fit, select_config
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.jit import CompiledKernel
from padless.runtime.tensor_map import TensorMapSpec

KERNEL = "sm90_mxfp8/sm90_mxfp8_grouped_gemm.cu"

_LAYOUTS = {"plain": 0, "blocked": 1, "blocked_groups": 2}  # as in kernels/sm90_mxfp8/scale_products.cuh
_SCALE_ALIGNMENT = 4  # the kernel reads the scales of 128 of K as one word
Config = Sm90Mxfp8Config


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm90Mxfp8Config | None,
) -> Prepared:
    """Packs the launch of out = a @ b of its group.

    a: (M, K); b: (G, N, K); offs: (G,) int32 end rows or None for one group of all rows; out: (M, N). Scales are read as
    they are, in any layout; those that do not start on a multiple of 4 bytes are copied first.
    """
    device = out.device.index or 0
    if config is None:
        config = select_config(a.shape[0], out.shape[1], b.data.shape[0], driver.num_sms(device))
    config = fit(config, a, b, out.dtype)
    loaded = load_kernel(driver, KERNEL, config, device)
    weights = tensor_map.operand(b.data.view(torch.uint8), config.block_n)
    stores = driver.encode(maps.output_ragged(out, 64))
    counter = tile_counter(config, device, out.data_ptr())
    return packed(driver, loaded, a, b, offs, config, weights, stores, counter, [out])


def packed(
    driver: Driver,
    loaded: tuple[CompiledKernel, Any],
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    tile: Sm90Mxfp8Config,
    weights: TensorMapSpec,
    stores: bytes,
    counter: int,
    written: list[torch.Tensor],
) -> Prepared:
    """The launch of a kernel that reads b as ``weights`` says; stores: the argument for the tensors that are written."""
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    scales = [t.scale.clone() if t.scale.data_ptr() % _SCALE_ALIGNMENT else t.scale for t in (a, b)]
    copies = tuple(s for s, t in zip(scales, (a, b), strict=True) if s is not t.scale)
    rows = maps.rows_operand(a.data.view(torch.uint8))
    arguments: list[Argument] = [driver.encode(rows), driver.encode(weights), stores]
    arguments += [(s.data_ptr(), 8) for s in scales]
    arguments += [(0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(_LAYOUTS[t.scale_layout], 4) for t in (a, b)]
    arguments += [(value, 4) for value in (m, n, k, num_groups, counter)]
    tensors = [a.data, b.data, *scales, *written] + ([] if offs is None else [offs])
    tiles = most_tiles(m, n, num_groups, tile.block_m, tile.block_n)
    kernel, function = loaded
    grid = persistent_grid(driver.num_sms(a.data.device.index or 0), tiles)
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors), copies)
