"""Host side of sm90_fp8_swapped_grouped_gemm.cu: FP8_BLOCK x FP8_BLOCK on Hopper tokens as columns."""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor
from padless.kernels import maps
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_fp8_swapped.config import BLOCK_N, Sm90Fp8SwappedConfig, fit_config
from padless.layouts import to_mn_major
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_fp8_swapped/sm90_fp8_swapped_grouped_gemm.cu"
Config = Sm90Fp8SwappedConfig


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Sm90Fp8SwappedConfig,
) -> Prepared:
    """Packs the launch of out = a @ b of its group; out is bfloat16 or float16. Row-major scales of ``a`` are copied."""
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    device = out.device.index or 0
    config = fit_config(config, num_groups, out.dtype)
    copies: tuple[torch.Tensor, ...] = ()
    sfa = a.scale
    if a.scale_major != "mn":
        sfa = to_mn_major(a.scale)
        copies = (sfa,)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    specs = [
        tensor_map.operand(a.data, 64),
        tensor_map.operand(a.data, config.step_m),
        tensor_map.operand(b.data, 64),
        tensor_map.mn_major_scales(sfa, config.block_m + 4),
        maps.output_ragged(out, 64),
        maps.output_ragged(out, config.step_m),
    ]
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += [(b.scale.data_ptr(), 8), (0 if offs is None else offs.data_ptr(), 8)]
    counter = tile_counter(config, device, out.data_ptr())
    arguments += [(value, 4) for value in (m, n, k, num_groups, counter)]
    tensors = [a.data, sfa, b.data, b.scale, out] + ([] if offs is None else [offs])
    grid = persistent_grid(driver.num_sms(device), most_tiles(m, n, num_groups, config.block_m, BLOCK_N))
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors), copies)
