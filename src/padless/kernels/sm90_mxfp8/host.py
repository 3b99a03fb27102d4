"""Host side of sm90_mxfp8_grouped_gemm.cu: MXFP8 x MXFP8 on Hopper's FP8 tensor cores, e4m3 or e5m2."""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor
from padless.kernels import maps
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config, fit, select_config
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_mxfp8/sm90_mxfp8_grouped_gemm.cu"

_LAYOUTS = {"plain": 0, "blocked": 1, "blocked_groups": 2}  # as in kernels/sm90_mxfp8/scale_products.cuh
_SCALE_ALIGNMENT = 4  # the kernel reads the scales of 128 of K as one word


Config = Sm90Mxfp8Config


def readable_scales(a: BlockScaledTensor, b: BlockScaledTensor) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """The scales of a and of b as the kernel reads them, and those among them that are copies."""
    scales = [t.scale.clone() if t.scale.data_ptr() % _SCALE_ALIGNMENT else t.scale for t in (a, b)]
    return scales, tuple(s for s, t in zip(scales, (a, b), strict=True) if s is not t.scale)


def problem_arguments(
    a: BlockScaledTensor, b: BlockScaledTensor, scales: list[torch.Tensor], offs: torch.Tensor | None
) -> list[Argument]:
    """The kernel's arguments between the tensor maps and the tile counter."""
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    arguments: list[Argument] = [(s.data_ptr(), 8) for s in scales]
    arguments += [(0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(_LAYOUTS[t.scale_layout], 4) for t in (a, b)]
    return arguments + [(value, 4) for value in (m, n, k, num_groups)]


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
    m, (num_groups, n) = a.shape[0], b.data.shape[:2]
    device = out.device.index or 0
    if config is None:
        config = select_config(m, n, num_groups, driver.num_sms(device))
    config = fit(config, a, b, out.dtype)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    scales, copies = readable_scales(a, b)
    specs = (
        maps.rows_operand(a.data.view(torch.uint8)),
        tensor_map.operand(b.data.view(torch.uint8), config.block_n),
        maps.output_ragged(out, 64),
    )
    tiles = most_tiles(m, n, num_groups, config.block_m, config.block_n)
    grid = persistent_grid(driver.num_sms(device), tiles)
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += problem_arguments(a, b, scales, offs)
    arguments += [(tile_counter(config, device, out.data_ptr()), 4)]
    tensors = [a.data, scales[0], b.data, scales[1], out] + ([] if offs is None else [offs])
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors), copies)
