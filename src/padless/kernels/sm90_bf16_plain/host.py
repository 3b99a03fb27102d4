"""Host side of sm90_bf16_plain_grouped_gemm.cu: picks a configuration, encodes tensor maps, packs the launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.kernels import maps
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_bf16_plain.config import BLOCK_M, Bf16PlainConfig, fit_config, select_config
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.tensor_map import TensorMapSpec

KERNEL = "sm90_bf16_plain/sm90_bf16_plain_grouped_gemm.cu"
Config = Bf16PlainConfig
_BLOCK = 64  # of K, or rows of weights where N is contiguous: 128 bytes


def is_n_major(b: torch.Tensor) -> bool:
    """Whether N is contiguous in the weights (G, N, K), and K is not."""
    return b.stride(2) != 1 and b.stride(1) == 1


def prepare(
    driver: Driver,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None,
    out: torch.Tensor,
    config: Bf16PlainConfig | None,
) -> Prepared:
    """Packs the launch of out = a @ b of its group: a (M, K), b (G, N, K) with K or N contiguous, out (M, N)."""
    (m, n), (num_groups, _, k) = out.shape, b.shape
    device = out.device.index or 0
    num_sms = driver.num_sms(device)
    n_major = is_n_major(b)
    if config is None:
        config = select_config(m, n, k, num_groups, n_major=n_major, out_dtype=out.dtype, num_sms=num_sms)
    else:
        config = fit_config(config, num_groups, n_major, out.dtype)
    kernel, function = load_kernel(driver, KERNEL, config, device)
    specs = (_operand(a, 64), _weights(b, config), maps.output_ragged(out, 64))
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += [(0 if offs is None else offs.data_ptr(), 8)]
    arguments += [(value, 4) for value in (m, n, k, num_groups, tile_counter(config, device, out.data_ptr()))]
    grid = persistent_grid(num_sms, most_tiles(m, n, num_groups, BLOCK_M, config.block_n))
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    tensors = [t for t in (a, b, offs, out) if t is not None]
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors))


def _operand(tensor: torch.Tensor, rows: int) -> TensorMapSpec:
    """A K-major operand, read ``rows`` rows of 64 of K at a time."""
    spec = tensor_map.operand(tensor, rows)
    return replace(spec, box=(_BLOCK, *spec.box[1:]))


def _weights(b: torch.Tensor, config: Bf16PlainConfig) -> TensorMapSpec:
    """(G, N, K), read ``block_n`` rows of 64 of K at a time, or, N-major, 64 rows at 64 of K."""
    return _operand(b.transpose(1, 2), _BLOCK) if config.n_major else _operand(b, config.block_n)
