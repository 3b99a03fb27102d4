"""Host side of sm90_mxfp8_grouped_gemm.cu with a quantising epilogue: MXFP8 x MXFP8 on Hopper.

What an epilogue does is in padless.epilogue; the kernel's side of it in kernels/device/sm90/quant_store.cuh.
"""

from __future__ import annotations

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels import epilogue_launch, maps
from padless.kernels.launch import Prepared, load_kernel, tile_counter
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config, fit
from padless.kernels.sm90_mxfp8.host import KERNEL, packed
from padless.runtime.driver import Driver

Config = Sm90Mxfp8Config


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    tensors: EpilogueTensors,
    config: Sm90Mxfp8Config | None,
    *,
    epilogue: Epilogue,
) -> Prepared:
    """Packs the launch of a @ b of its group with all that ``epilogue`` does, as ``QuantHost`` has it.

    config: the tile, None for 128 x 128. It needs block_n = 128, and block_m = 128 for FP8_BLOCK columns.

    Raises ValueError for what this kernel cannot do: FP8_BLOCK rows of a SwiGLU, whose blocks are wider than the output
    of a tile; more groups than leave room for the outputs.
    """
    n = b.data.shape[1]
    epilogue_launch.check_outputs(n, tensors, epilogue)
    device = a.data.device.index or 0
    if config is None:
        epilogue_launch.check_groups(b.data.shape[0], epilogue)
        config = Sm90Mxfp8Config()
    tile = fit(config, a, b, epilogue.d_dtype or torch.bfloat16)
    check_tile(tile, epilogue)
    compiled = epilogue_launch.QuantConfig(tile, epilogue)
    loaded = load_kernel(driver, KERNEL, compiled, device)
    weights = maps.interleaved_operand(b.data.view(torch.uint8), epilogue_launch.interleaved_rows(epilogue))
    stores = epilogue_launch.outputs_argument(driver, tensors, epilogue, n)
    counter = tile_counter(compiled, device, epilogue_launch.output_address(tensors))
    return packed(driver, loaded, a, b, offs, tile, weights, stores, counter, epilogue_launch.present(tensors))


def check_tile(tile: Sm90Mxfp8Config, epilogue: Epilogue) -> None:
    """Raises ValueError for a tile, and an epilogue, that do not go together."""
    require = epilogue_launch.requirement_of(tile)
    require(tile.block_n == epilogue_launch.TILE_COLUMNS, "block_n", str(epilogue_launch.TILE_COLUMNS))
    if epilogue.column_format == FP8_BLOCK:
        require(tile.block_m == 128, "block_m", "128 for FP8_BLOCK columns")
    if epilogue.is_glu and epilogue.row_format == FP8_BLOCK:
        raise ValueError(
            "the row output is FP8_BLOCK, whose blocks of 128 columns are wider than a tile of a SwiGLU of MXFP8 "
            "operands; allowed: MXFP8, MXFP8_E5M2, MXFP4 or NVFP4 rows, FP8_BLOCK columns alone, or FP8_BLOCK operands"
        )
