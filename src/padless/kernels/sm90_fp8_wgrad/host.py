"""Host side of sm90_fp8_wgrad.cu: picks a configuration, encodes tensor maps, packs the launch."""

from __future__ import annotations

import torch

from padless.kernels.launch import Prepared, load_kernel, persistent_grid, tile_counter
from padless.kernels.sm90_fp8_wgrad.config import (
    BLOCK_N,
    WgradConfig,
    WgradProblem,
    fit_config,
    select_config,
    tiles_of,
)
from padless.kernels.wgrad import gradient_output
from padless.layouts import GroupedColumns
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.tensor_map import TensorMapSpec, outer_stride

KERNEL = "sm90_fp8_wgrad/sm90_fp8_wgrad.cu"
Config = WgradConfig


def mode_of(x: GroupedColumns) -> str:
    """ "1d2d" or "1d1d", by how many features of X share a scale."""
    return "1d1d" if x.block[0] == 1 else "1d2d"


def prepare(
    driver: Driver,
    dy: GroupedColumns,
    x: GroupedColumns,
    out: torch.Tensor,
    accumulate: bool,
    config: WgradConfig | None,
) -> Prepared:
    """Packs the launch of out[g] (+)= dY[tokens of g]^T X[tokens of g]; out (G, N, K), G > 0."""
    num_groups, n, k = out.shape
    device = out.device.index or 0
    tokens = min(dy.data.shape[1], x.data.shape[1])
    problem = WgradProblem(n, k, tokens, num_groups, mode_of(x), out.dtype, driver.num_sms(device), accumulate)
    config = select_config(problem) if config is None else fit_config(config, problem)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    arguments: list[Argument] = [driver.encode(spec) for spec in _tensor_maps(dy, x, out, config)]
    pointers = (x.scale, dy.offs, dy.starts, x.starts, dy.block_starts)
    arguments += [(tensor.data_ptr(), 8) for tensor in pointers]
    counter = tile_counter(config, device, out.data_ptr())
    integers = (n, k, num_groups, dy.data.shape[1], x.data.shape[1], x.scale.shape[0], counter)
    arguments += [(value, 4) for value in integers]
    tiles = tiles_of(problem, config.block_m, config.cluster_n)
    ctas = persistent_grid(problem.num_sms, tiles, config.cluster_n)
    shape = LaunchShape(ctas, kernel.num_threads, config.cluster_n, programmatic=True)
    tensors = [dy.data, dy.scale, x.data, *pointers, out]
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors))


def _tensor_maps(
    dy: GroupedColumns, x: GroupedColumns, out: torch.Tensor, config: WgradConfig
) -> tuple[TensorMapSpec, ...]:
    """The kernel's tensor maps, in its order: A, B, scales of A, scales of B, D."""
    sfa = _scale_rows(dy.scale, config.block_m)
    return (
        tensor_map.operand(dy.data, config.block_m // config.cluster_n),
        tensor_map.operand(x.data, BLOCK_N),
        sfa,
        _scale_rows(x.scale, BLOCK_N) if config.mode == "1d1d" else sfa,  # 128 x 128 scales are fetched without
        gradient_output(out),
    )


def _scale_rows(scale: torch.Tensor, features: int) -> TensorMapSpec:
    """Scales (S, features of the operand), read ``features`` at a time out of one row."""
    return TensorMapSpec(
        7,  # FLOAT32
        scale.data_ptr(),
        (scale.shape[1], scale.shape[0]),
        (outer_stride(scale, 0),),
        (features, 1),
    )
