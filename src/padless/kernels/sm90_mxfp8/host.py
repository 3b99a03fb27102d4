"""Host side of sm90_mxfp8_grouped_gemm.cu: MXFP8 x MXFP8 on Hopper's FP8 tensor cores, e4m3 or e5m2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import MXFP8_E5M2, OUT_DTYPES, BlockScaledTensor
from padless.kernels.config import (
    FEW_GROUPS,
    check_common_fields,
    cpp_constants,
    requirement_of,
    room_for_groups,
)
from padless.kernels.launch import Prepared, load_kernel, tile_counter
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver, LaunchShape

KERNEL = "sm90_mxfp8/sm90_mxfp8_grouped_gemm.cu"

_LAYOUTS = {"plain": 0, "blocked": 1, "blocked_groups": 2}  # as in kernels/sm90_mxfp8/scale_products.cuh
_SCALE_ALIGNMENT = 4  # the kernel reads the scales of 128 of K as one word


@dataclass(frozen=True)
class Sm90Mxfp8Config:
    """One compiled kernel. Each field becomes a constant of the same name in the device code.

    M is not here, and must never be: a server meets a new M at every call.

    Attributes:
        block_m: rows of the output tile, 64 or 128: one consumer warpgroup for each 64.
        block_n: columns of the output tile, 64 or 128.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        a_e5m2, b_e5m2: whether the codes of activations and weights are e5m2, else e4m3.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    block_m: int = 128
    block_n: int = 128
    num_stages: int = 0
    raster_m: int = 8
    a_e5m2: bool = False
    b_e5m2: bool = False
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.block_m in (64, 128), "block_m", "64 or 128")
        require(self.block_n in (64, 128), "block_n", "64 or 128")
        check_common_fields(self, require)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "NUM_STAGES": self.num_stages,
            "RASTER_M": self.raster_m,
            "MAX_GROUPS": self.max_groups,
        }
        flags = {"A_E5M2": self.a_e5m2, "B_E5M2": self.b_e5m2}
        return cpp_constants(constants, flags, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


Config = Sm90Mxfp8Config


def select_config(m: int, n: int, num_groups: int, num_sms: int) -> Sm90Mxfp8Config:
    """The kernel for a problem: a pure function of M, N, G and the number of multiprocessors.

    128 x 128 unless that leaves multiprocessors idle: half as wide then, and half as high too where no group can have
    more than 64 rows on average.
    """
    groups = max(1, min(num_groups, m))
    block_m = 64 if m <= 64 * groups else 128
    m_tiles = max(groups, -(-m // block_m))
    block_n = 128 if m_tiles * -(-n // 128) >= num_sms else 64
    if block_m == 64 and block_n == 128:  # one warpgroup alone does not keep the tensor core busy
        block_m = 128
    return Sm90Mxfp8Config(block_m=block_m, block_n=block_n)


def fit(
    config: Sm90Mxfp8Config, a: BlockScaledTensor, b: BlockScaledTensor, out_dtype: torch.dtype
) -> Sm90Mxfp8Config:
    """``config`` with what has to follow from the operands and the output."""
    return replace(
        config,
        a_e5m2=a.format == MXFP8_E5M2,
        b_e5m2=b.format == MXFP8_E5M2,
        max_groups=room_for_groups(b.data.shape[0]),
        out_dtype=out_dtype,
    )


def readable_scales(
    a: BlockScaledTensor, b: BlockScaledTensor
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]:
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
        tensor_map.rows_operand(a.data.view(torch.uint8)),
        tensor_map.operand(b.data.view(torch.uint8), config.block_n),
        tensor_map.output_ragged(out, 64),
    )
    # As many CTAs as multiprocessors: a tile costs far more than finding the next one. No more than there can be tiles.
    most_tiles = (-(-m // config.block_m) + num_groups) * -(-n // config.block_n)
    grid = min(driver.num_sms(device), most_tiles)
    arguments: list[Argument] = [driver.encode(spec) for spec in specs]
    arguments += problem_arguments(a, b, scales, offs)
    arguments += [(tile_counter(config, device, out.data_ptr()), 4)]
    tensors = [a.data, scales[0], b.data, scales[1], out] + ([] if offs is None else [offs])
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True)
    return Prepared(driver.prepare(function, kernel, shape, arguments, tensors), copies)
