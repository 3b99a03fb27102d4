"""Host side of sm90_bf16_grouped_gemm.cu with a quantising epilogue: FP4 and every other pair of it on Hopper.

What an epilogue does is in padless.epilogue; the kernel's side of it in kernels/device/sm90/transposed_quant.cuh.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from padless.epilogue import INTERLEAVE, Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.kernels.config import MANY_GROUPS, format_name, room_for_groups
from padless.kernels.epilogue_gate import SM90_BF16_MULTIPLES_OF_N
from padless.kernels.epilogue_launch import (
    QuantConfig,
    check_outputs,
    direct_outputs,
    output_address,
    present,
    staged_columns,
)
from padless.kernels.launch import Prepared, load_kernel, most_tiles, persistent_grid, tile_counter
from padless.kernels.sm90_bf16.config import Sm90Bf16Config, fit
from padless.kernels.sm90_bf16.host import KERNEL, operands
from padless.layouts import plain_scale
from padless.runtime.architecture import HOPPER
from padless.runtime.driver import Argument, Driver, LaunchShape

Config = Sm90Bf16Config

_ROW_BYTES = {"BF16": 256, "MXFP4": 64, "NVFP4": 64, "MXFP4_REPACKED": 64}  # 128 of K; other formats have 128


def prepare(
    driver: Driver,
    a: BlockScaledTensor | torch.Tensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    tensors: EpilogueTensors,
    config: Sm90Bf16Config | None,
    *,
    epilogue: Epilogue,
) -> Prepared:
    """Packs the launch of the grouped GEMM a @ b of its group with everything that ``epilogue`` asks for.

    Args:
        a, b, offs: as for grouped_gemm; offs None is one group of all rows.
        tensors: operands and outputs of the epilogue; amax holds -inf.
        config: the tile, None to choose one. block_m: at least 32 for column outputs, 128 for FP8_BLOCK columns;
            block_n: 256 for FP8_BLOCK rows of a SwiGLU.

    Scales of the weights in the 32x4x4 layout are copied where gate and up are halves. Raises ValueError for what this
    kernel cannot do: FP8_BLOCK rows and columns of a SwiGLU together.
    """
    m, (num_groups, n) = a.shape[0], b.data.shape[:2]
    check_outputs(n, tensors, epilogue, SM90_BF16_MULTIPLES_OF_N)
    copies: tuple[torch.Tensor, ...] = ()
    if epilogue.gate_and_up_apart and b.scale_layout == "blocked":
        # Tiles hold the scales of 128 rows together, and this launch takes runs of 32 rows of gate and of up.
        b = BlockScaledTensor(b.data, plain_scale(b).contiguous(), b.format, b.global_scale)
        copies = (b.scale,)
    device = (a.data if isinstance(a, BlockScaledTensor) else a).device.index or 0
    if config is None:
        blocked = b.scale_layout == "blocked"
        tile = select_tile(format_name(a), b.format.name, m, num_groups, epilogue, blocked=blocked)
    else:
        tile = fit(config, a, b, epilogue.d_dtype or torch.bfloat16)
    check_tile(tile, epilogue)
    compiled = QuantConfig(tile, epilogue)
    kernel, function = load_kernel(driver, KERNEL, compiled, device)

    rows = INTERLEAVE if epilogue.gate_and_up_apart else None
    read = operands(a, b, offs, tile, weight_rows=rows, are_copies=bool(copies))
    arguments: list[Argument] = [driver.encode(spec) for spec in read.maps]
    arguments += [direct_outputs(driver, tensors, epilogue, n), *read.numbers]
    arguments += [(tile_counter(compiled, device, output_address(tensors)), 4), read.early.arguments()[0]]
    tiles = most_tiles(m, n, num_groups, tile.block_m, tile.block_n)
    grid = persistent_grid(driver.num_sms(device), tiles)
    shape = LaunchShape(grid, kernel.num_threads, 1, programmatic=True, ready=read.early.addresses())
    used = [*read.tensors, *present(tensors)]
    return Prepared(driver.prepare(function, kernel, shape, arguments, used), (*copies, *read.copies))


# --- tiles -----------------------------------------------------------------------------------------------


def least_rows(epilogue: Epilogue) -> int:
    """Tokens that a tile needs at least: those that share a column scale."""
    return 8 if epilogue.column_format is None else 128 if epilogue.column_format == FP8_BLOCK else 32


# Tokens of a tile, and how many a group has then at most on average. A group of more takes several tiles, each of which
# dequantises the weights anew; one of fewer leaves a part of every instruction idle. Routers that prefer some experts
# give those many more than the average: of even, drawn and skewed routing these are the tiles whose worst case is best.
_TOKENS_OF_TILE = ((8, 1.5), (16, 10), (32, 32), (64, 64))


def tokens_of_tile(m: int, num_groups: int) -> int:
    """block_m of a problem, as far as the epilogue can have it: 8 to 128."""
    if num_groups == 1:
        return next((size for size, _ in _TOKENS_OF_TILE if m <= size), 128)
    per_group = m / max(min(num_groups, m), 1)
    return next((size for size, most in _TOKENS_OF_TILE if per_group <= most), 128)


def select_tile(
    a_format: str, b_format: str, m: int, num_groups: int, epilogue: Epilogue, *, blocked: bool = False
) -> Sm90Bf16Config:
    """The tile of as many tokens as a group may have, or the nearest one that can do ``epilogue`` and leaves three
    stages, or two."""
    dtype = epilogue.d_dtype or torch.bfloat16
    wanted = max(tokens_of_tile(m, num_groups), least_rows(epilogue))
    plain = Sm90Bf16Config(a_format, b_format, blocked=blocked, max_groups=room_for_groups(num_groups), out_dtype=dtype)
    found = []
    for block_m in [wanted, *(size for size in (64, 32) if least_rows(epilogue) <= size < wanted)]:
        few = block_m <= 32
        for block_n in (256, 128):
            if a_format == "FP8_BLOCK" and block_m >= 64 and block_n == 256:
                continue
            found.append(
                replace(plain, block_m=block_m, block_n=block_n, num_warpgroups=4 if few and block_n == 256 else 2)
            )
    able = [tile for tile in found if _problem_with(tile, epilogue) is None]
    for stages in (3, 2):
        for tile in able:
            if shared_bytes(tile, epilogue, stages) <= HOPPER.shared_bytes:
                return tile
    check_tile(found[0], epilogue)
    raise ValueError(
        f"{a_format} x {b_format} in {num_groups} groups leaves no shared memory for this epilogue's sums; allowed: "
        "at most 256 groups, or no FP8_BLOCK columns"
    )


def shared_bytes(tile: Sm90Bf16Config, epilogue: Epilogue, stages: int) -> int:
    """Shared memory of a kernel, at most: operands of ``stages`` stages, two stages of bf16 tokens, staged sums."""
    rows_a, rows_b = (_ROW_BYTES.get(name, 128) for name in (tile.a_format, tile.b_format))
    stage = tile.block_m * (rows_a + 16) + tile.block_n * (rows_b + 16)
    tokens = (2 if tile.block_m == 128 else 4) * tile.block_m * 256
    columns = staged_columns(epilogue)
    teams = tile.num_warpgroups // max(1, columns * tile.num_warpgroups // tile.block_n)
    staged = teams * tile.block_m * (columns + 4) * 4
    a_group = (
        24 if tile.max_groups <= MANY_GROUPS else 17
    )  # 24 is more than the table has, and keeps tiles as they were
    return (stages * stage + tokens) * tile.blocks_of_stage + staged + a_group * tile.max_groups + 1024


def _problem_with(tile: Sm90Bf16Config, epilogue: Epilogue) -> str | None:
    if tile.block_m < least_rows(epilogue):
        allowed = "128 for FP8_BLOCK" if epilogue.column_format == FP8_BLOCK else "at least 32 for MX"
        return f"config.block_m is {tile.block_m}; a quantising epilogue needs {allowed} columns"
    if tile.block_n < staged_columns(epilogue):
        return f"config.block_n is {tile.block_n}; a quantising epilogue needs 256 for FP8_BLOCK rows of a SwiGLU"
    return None


def check_tile(tile: Sm90Bf16Config, epilogue: Epilogue) -> None:
    """Raises ValueError for a tile, and an epilogue, that do not go together."""
    if epilogue.is_glu and epilogue.row_format == FP8_BLOCK and epilogue.column_format == FP8_BLOCK:
        raise ValueError(
            "the output is FP8_BLOCK along rows and columns, of a SwiGLU: its blocks of 128 columns and 128 rows take "
            "more shared memory than there is; allowed: one of the two, or MXFP8 along both"
        )
    if (problem := _problem_with(tile, epilogue)) is not None:
        raise ValueError(problem)
