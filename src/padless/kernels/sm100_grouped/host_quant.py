"""Host side of sm100_grouped_gemm.cu with a quantising epilogue: MXFP8, NVFP4, MXFP4, MXFP8 x MXFP4 on Blackwell.

What an epilogue does is in padless.epilogue; the kernel's side of it in kernels/sm100_grouped/quant_store.cuh.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.epilogue_launch import (
    QuantConfig,
    check_outputs,
    output_address,
    outputs_bytes,
    present,
    requirement_of,
)
from padless.kernels.launch import Prepared, load_kernel, most_tiles, tile_counter
from padless.kernels.sm100_grouped import host
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.runtime.driver import Driver

Config = Sm100GroupedConfig


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    tensors: EpilogueTensors,
    config: Sm100GroupedConfig | None,
    *,
    epilogue: Epilogue,
) -> Prepared:
    """Packs the launch of a @ b of its group with all that ``epilogue`` does, as ``QuantHost`` has it.

    config: the tile, None to choose one. Tokens are lanes (tokens_on_n False) and mma_n is 128 or 256; 256 for
        gate and up in halves, and for FP8_BLOCK output of a SwiGLU.
    """
    host.check_operands(a, b)
    (m, _), (num_groups, n, _) = a.data.shape, b.data.shape
    check_outputs(n, tensors, epilogue, alignments={"bias": 16, "row_scale": 4})
    a, b, copies = host.readable(a, b)
    device = a.data.device.index or 0
    if config is None:
        row_bytes = a.data.shape[1] * a.data.element_size()
        config = select_tile(m, n, num_groups, epilogue, row_bytes, host.kind_of(a, b), driver.num_sms(device))
    check_tile(config, epilogue)
    tile = fit(config, a, b, tensors, epilogue)
    compiled = QuantConfig(tile, epilogue)
    kernel, function = load_kernel(driver, host.KERNEL, compiled, device)
    tiles = most_tiles(m, n, num_groups, tile.tile_m, tile.cluster_n)

    counter = tile_counter(compiled, device, output_address(tensors))
    apart = epilogue.gate_and_up_apart
    operands = host.operand_bytes(driver, a, b, None, None, tile, apart)
    problem = host.problem_bytes(operands, 0, 0, 0 if offs is None else offs.data_ptr(), num_groups, counter)
    optional = (t for t in (a.global_scale, b.global_scale, offs) if t is not None)
    used = [a.data, a.scale, b.data, b.scale, *optional, *copies, *present(tensors)]
    shape = host.launch_shape(driver, device, tile, tiles, kernel.num_threads)
    arguments = [problem + target_bytes(tensors, epilogue, n)]
    return Prepared(driver.prepare(function, kernel, shape, arguments, used), copies)


# --- tiles -----------------------------------------------------------------------------------------------


def select_tile(
    m: int, n: int, num_groups: int, epilogue: Epilogue, row_bytes: int = 4096, kind: str = "MXFP8", num_sms: int = 148
) -> Sm100GroupedConfig:
    """The tile for a problem: a pure function, by predicted cycles (``select_grouped_config``, arguments as there).

    256 columns unless B has at most 128; for FP8_BLOCK 128, whose sums stay in registers, unless only 256 can do it.
    """
    wide = epilogue.gate_and_up_apart or _wide_glu(epilogue) or (n > 128 and kind != "FP8_BLOCK")
    return select_grouped_config(m, n, num_groups, row_bytes, kind, num_sms, 256 if wide else 128)


def check_tile(tile: Sm100GroupedConfig, epilogue: Epilogue) -> None:
    """Raises ValueError for a tile that cannot do ``epilogue``."""
    require = requirement_of(tile)
    require(not tile.tokens_on_n, "tokens_on_n", "False")
    require(tile.mma_n >= 128, "mma_n", "128 or 256")
    if epilogue.gate_and_up_apart:
        require(tile.mma_n == 256, "mma_n", "256 for gate and up in halves")
    if _wide_glu(epilogue):
        require(tile.mma_n == 256, "mma_n", "256 for FP8_BLOCK output of a SwiGLU")


def fit(
    tile: Sm100GroupedConfig, a: BlockScaledTensor, b: BlockScaledTensor, tensors: EpilogueTensors, epilogue: Epilogue
) -> Sm100GroupedConfig:
    """``tile`` with what has to follow from the operands and the outputs."""
    d = tensors.d
    row_bytes = 0 if d is None else d.stride(0) * d.element_size()
    return replace(
        host.fit_operands(tile, a, b, epilogue.gate_and_up_apart),
        column_major=False,
        wide_stores=d is not None and d.data_ptr() % 32 == 0 and (d.shape[0] == 1 or row_bytes % 32 == 0),
        out_dtype=epilogue.d_dtype or torch.bfloat16,
    )


def _wide_glu(epilogue: Epilogue) -> bool:
    """Whether a block of a row is 128 columns of the output, 256 of B."""
    return epilogue.is_glu and epilogue.format == FP8_BLOCK


# --- what the kernel is given ----------------------------------------------------------------------------


def target_bytes(tensors: EpilogueTensors, epilogue: Epilogue, n: int) -> bytes:
    """struct QuantTargets."""
    t = tensors
    outputs = host.padded(outputs_bytes(tensors, epilogue, n))
    plain = bytes(16) if t.d is None else host.output_bytes(t.d, False)
    codes = [(0, 0) if c is None else (c.data_ptr(), c.stride(0)) for c in (t.row_codes, t.column_codes)]
    (row, row_pitch), (column, column_pitch) = codes
    return host.padded(outputs + plain + struct.pack("=2Q2q", row, column, row_pitch, column_pitch))
