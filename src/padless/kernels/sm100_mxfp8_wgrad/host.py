"""Host side of sm100_mxfp8_wgrad.cu: encodes tensor maps, packs the launch.

Verified by emulation; its speed has never been measured.
"""

from __future__ import annotations

import torch

from padless.formats import ceil_div
from padless.kernels.launch import Prepared, load_kernel
from padless.kernels.maps import output_ragged
from padless.kernels.sm100_mxfp8_wgrad.config import Mxfp8WgradConfig
from padless.kernels.sm100_wgrad import TILE
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_128B, TensorMapSpec, outer_stride

KERNEL = "sm100_mxfp8_wgrad/sm100_mxfp8_wgrad.cu"
Config = Mxfp8WgradConfig
_TOKENS = 128  # of a stage


def prepare(
    driver: Driver,
    dy: tuple[torch.Tensor, torch.Tensor],
    x: tuple[torch.Tensor, torch.Tensor],
    offs: torch.Tensor,
    out: torch.Tensor,
    config: Mxfp8WgradConfig,
) -> Prepared:
    """Packs the launch of out[g] (+)= dy[rows of g]^T x[rows of g]; out (G, N, K), G > 0.

    dy: codes (M, N), M > 0, and scales (4 * T, N), a row to 32 tokens. x: the same of K features.
    """
    num_groups, n, k = out.shape
    device = out.device.index or 0
    kernel, function = load_kernel(driver, KERNEL, config, device)
    specs = [spec for codes, _ in (dy, x) for spec in (_rows(codes), output_ragged(codes, _TOKENS))]
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += [(t.data_ptr(), 8) for t in (dy[1], x[1], offs, out)]
    arguments += [(out.stride(0), 8), (out.stride(1), 8), (n, 4), (k, 4), (dy[0].shape[0], 4)]
    arguments.append((min(dy[1].shape[0], x[1].shape[0]), 4))
    tiles = num_groups * ceil_div(n, config.tile) * ceil_div(k, config.tile)
    shape = LaunchShape(tiles * config.cta_group, kernel.num_threads, config.cta_group)
    return Prepared(driver.prepare(function, kernel, shape, arguments, [*dy, *x, offs, out]))


def _rows(codes: torch.Tensor) -> TensorMapSpec:
    """(M, features), read 128 rows of 128 features at a time."""
    data_type, _ = DATA_TYPES[codes.dtype]
    m, features = codes.shape
    stride = (outer_stride(codes, 0),)
    return TensorMapSpec(data_type, codes.data_ptr(), (features, m), stride, (TILE, _TOKENS), SWIZZLE_128B)
