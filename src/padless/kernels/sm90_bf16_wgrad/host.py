"""Host side of sm90_bf16_wgrad.cu: picks a configuration, encodes tensor maps, packs the launch."""

from __future__ import annotations

import torch

from padless.kernels.launch import Prepared, load_kernel, tile_counter
from padless.kernels.maps import output_ragged
from padless.kernels.sm90_bf16_wgrad.config import (
    Bf16WgradConfig,
    Bf16WgradProblem,
    fit_config,
    select_config,
    tiles_of,
)
from padless.kernels.wgrad import gradient_output
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_128B, TensorMapSpec, outer_stride

KERNEL = "sm90_bf16_wgrad/sm90_bf16_wgrad.cu"
Config = Bf16WgradConfig
_CHUNK = 64  # features, 128 bytes, that one copy brings of every token


def prepare(
    driver: Driver,
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
    accumulate: bool,
    config: Bf16WgradConfig | None,
) -> Prepared:
    """Packs the launch of out[g] (+)= dy[rows of g]^T x[rows of g]; dy (M, N), x (M, K), out (G, N, K), M and G > 0."""
    num_groups, n, k = out.shape
    tokens = dy.shape[0]
    device = out.device.index or 0
    problem = Bf16WgradProblem(n, k, tokens, num_groups, out.dtype, driver.num_sms(device), accumulate)
    config = select_config(problem) if config is None else fit_config(config, problem)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    specs = [spec for rows in (dy, x) for spec in (_rows(rows, config.block_t), _ragged(rows, config.block_t))]
    arguments: list[Argument] = [driver.encode(spec) for spec in (*specs, gradient_output(out))]
    arguments += [(offs.data_ptr(), 8)]
    counter = tile_counter(config, device, out.data_ptr())
    arguments += [(value, 4) for value in (n, k, num_groups, tokens, counter)]
    ctas = min(problem.num_sms, tiles_of(problem, config.block_n))
    shape = LaunchShape(ctas, kernel.num_threads, 1, programmatic=True)
    return Prepared(driver.prepare(function, kernel, shape, arguments, [dy, x, offs, out]))


def _rows(rows: torch.Tensor, tokens: int) -> TensorMapSpec:
    """(M, features), read ``tokens`` rows of 64 features at a time."""
    data_type, _ = DATA_TYPES[rows.dtype]
    m, features = rows.shape
    return TensorMapSpec(
        data_type, rows.data_ptr(), (features, m), (outer_stride(rows, 0),), (_CHUNK, tokens), SWIZZLE_128B
    )


def _ragged(rows: torch.Tensor, tokens: int) -> TensorMapSpec:
    """The same with an end at any row, behind which zeros are read: what bounds a store bounds a load."""
    return output_ragged(rows, tokens)
