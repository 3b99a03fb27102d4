"""Host side of sm100_nvfp4_wgrad.cu: encodes tensor maps, packs the launch.

Verified by emulation; its speed has never been measured.
"""

from __future__ import annotations

import torch

from padless.formats import BlockScaledTensor, ceil_div
from padless.kernels.launch import Prepared, load_kernel
from padless.kernels.maps import scale_tiles
from padless.kernels.sm100_wgrad import TILE, Sm100WgradConfig
from padless.runtime.driver import Argument, Driver, LaunchShape
from padless.runtime.tensor_map import operand

KERNEL = "sm100_nvfp4_wgrad/sm100_nvfp4_wgrad.cu"
Config = Sm100WgradConfig
_STEPS = 4  # atoms of scales in a stage


def prepare(
    driver: Driver,
    dy: BlockScaledTensor,
    x: BlockScaledTensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    config: Sm100WgradConfig,
) -> Prepared:
    """Packs the launch of out[g] (+)= dy[:, tokens of g] x[:, tokens of g]^T; out (G, N, K), G > 0.

    dy: NVFP4 (N, T) with blocked scales and one global scale, T a multiple of 64. x: (K, T). ends: (G,) int32, multiples
    of 64.
    """
    assert dy.global_scale is not None
    assert x.global_scale is not None
    num_groups, n, k = out.shape
    device = out.device.index or 0
    kernel, function = load_kernel(driver, KERNEL, config, device)
    specs = [spec for t in (dy, x) for spec in (operand(t.data.view(torch.uint8), TILE), scale_tiles(t, _STEPS, 1))]
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += [(t.data_ptr(), 8) for t in (dy.global_scale, x.global_scale, ends, out)]
    arguments += [(out.stride(0), 8), (out.stride(1), 8), (n, 4), (k, 4), (dy.logical_shape[1], 4)]
    shape = LaunchShape(num_groups * ceil_div(n, TILE) * ceil_div(k, TILE), kernel.num_threads, 1)
    tensors = [t for of in (dy, x) for t in (of.data, of.scale, of.global_scale) if t is not None]
    return Prepared(driver.prepare(function, kernel, shape, arguments, [*tensors, ends, out]))
