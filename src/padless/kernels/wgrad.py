"""Common parts of the kernels of weight gradients: checks of their configurations, and the tensor map of the output."""

from __future__ import annotations

from typing import Any

import torch

from padless.kernels.config import Requirement, check_common_fields
from padless.runtime.tensor_map import DATA_TYPES, SWIZZLE_128B, TensorMapSpec, outer_stride

GRADIENT_DTYPES = (torch.bfloat16, torch.float32)

# Bands of row tiles. Tiles in flight of low ones lie side by side and write whole rows of the result, which memory takes
# faster, but each band reads all of a group's X: worth it while that stays in L2. Measured, on an H200
# (docs/kernels/sm90_fp8_wgrad/ladder.md).
_LOW_BAND, _HIGH_BAND, _KEPT_BYTES = 2, 8, 8 << 20


def band_height(tokens: int, num_groups: int, columns: int, itemsize: int) -> int:
    """Row tiles to a band of the tile order. ``columns``: features of X, of so many bytes; ``tokens``: of all groups."""
    return _LOW_BAND if tokens * columns * itemsize < _KEPT_BYTES * num_groups else _HIGH_BAND


def check_gradient_fields(config: Any, require: Requirement) -> None:
    """``check_common_fields`` of a weight gradient, which has two types of output and can be added to one."""
    check_common_fields(config, require)
    require(config.out_dtype in GRADIENT_DTYPES, "out_dtype", "torch.bfloat16 or torch.float32")
    is_right = not config.accumulate or config.out_dtype == torch.float32
    require(is_right, "accumulate", "False unless out_dtype is float32")


def gradient_output(out: torch.Tensor) -> TensorMapSpec:
    """A weight gradient (G, N, K), written in boxes of 128 bytes x 64 rows of one group, clipped to its N and K.

    FLOAT32 and not FLOAT32_FTZ: where the copy engine adds, it is not asked to flush subnormals.
    """
    data_type, size = DATA_TYPES[out.dtype]
    return TensorMapSpec(
        data_type,
        out.data_ptr(),
        (out.shape[2], out.shape[1], out.shape[0]),
        (outer_stride(out, 1), outer_stride(out, 0)),
        (128 // size, 64, 1),
        SWIZZLE_128B,
    )
