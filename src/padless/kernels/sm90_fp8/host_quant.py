"""Host side of sm90_fp8_grouped_gemm.cu with a quantising epilogue: FP8_BLOCK x FP8_BLOCK on Hopper.

What an epilogue does is in padless.epilogue; the kernel's side of it in kernels/device/sm90/quant_store.cuh.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import torch

from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK, BlockScaledTensor, ceil_div
from padless.kernels import epilogue_gate, epilogue_launch, maps
from padless.kernels.config import FEW_GROUPS, MANY_GROUPS
from padless.kernels.cost_model import Tile, best_tile, cost_table
from padless.kernels.launch import Prepared, load_kernel, tile_counter
from padless.kernels.sm90_fp8.config import QUANTIZED_TOKENS, Problem, Sm90Fp8Config, few_rows_tile, fit_config
from padless.kernels.sm90_fp8.host import few_rows_maps, packed, readable
from padless.runtime import tensor_map
from padless.runtime.driver import Argument, Driver

Config = Sm90Fp8Config
MAX_RANK = 64  # columns of bfloat16 in a stage


@dataclass(frozen=True, eq=False)
class LowRankProduct:
    """Addends of the sums of a launch: scaling * t @ factor[g].T.

    t: (M, at least r) bfloat16, zeros from column r on. factor: (G, N, r) bfloat16, r a multiple of 8; contiguous.
    """

    t: torch.Tensor
    factor: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class LowRankConfig(epilogue_launch.QuantConfig):
    """A kernel that adds a low-rank product, in steps of 16 columns."""

    steps: int

    def prelude(self) -> str:
        """The constants that the kernel source is compiled behind."""
        return super().prelude() + f"#define LOW_RANK_STEPS {self.steps}\n"


def prepare(
    driver: Driver,
    a: BlockScaledTensor,
    b: BlockScaledTensor,
    offs: torch.Tensor | None,
    tensors: EpilogueTensors,
    config: Sm90Fp8Config | None,
    *,
    epilogue: Epilogue,
    low: LowRankProduct | None = None,
) -> Prepared:
    """Packs the launch of a @ b of its group with all that ``epilogue`` does, as ``QuantHost`` has it.

    low: a product that is added to the sums first; it takes no tile with few_rows, whatever M is, so that a row's bits
        do not depend on it.

    config: the tile, None to choose one. It needs block_n = 128, store "ragged" and scales "mn"; block_m of 128 or
        256 for FP8_BLOCK columns; cluster_n = 2 for FP8_BLOCK rows of a SwiGLU. With few_rows: no column outputs, and
        block_n = 256 for FP8_BLOCK rows of a SwiGLU.
    """
    (m, k), (num_groups, n, _) = a.data.shape, b.data.shape
    epilogue_launch.check_outputs(n, tensors, epilogue, epilogue_gate.FP8_BLOCK_MULTIPLES_OF_N)
    device = a.data.device.index or 0
    dtype = epilogue.d_dtype or torch.bfloat16
    problem = Problem(m, n, k, num_groups, dtype, driver.num_sms(device))
    tile = select_tile(problem, epilogue, low is None) if config is None else fit_config(config, problem)
    check_tile(tile, epilogue)
    a, copies = readable(a, "mn")
    compiled = epilogue_launch.QuantConfig(tile, epilogue)
    others: list[Argument] = []
    if low is not None:
        rank = low.factor.shape[2]
        if tile.few_rows or rank > MAX_RANK:
            raise ValueError(f"rank is {rank} and few_rows {tile.few_rows}; at most {MAX_RANK}, and False, are allowed")
        compiled = LowRankConfig(tile, epilogue, ceil_div(rank, 16))
        of_factor = maps.interleaved_operand(low.factor, epilogue_launch.interleaved_rows(epilogue))
        bits = int.from_bytes(struct.pack("<f", low.scaling), "little")
        others = [*map(driver.encode, (maps.rows_operand(low.t, num_groups), of_factor)), (bits, 4)]
    loaded = load_kernel(driver, tile.source, compiled, device)
    counter = tile_counter(compiled, device, epilogue_launch.output_address(tensors))
    used = epilogue_launch.present(tensors) + ([] if low is None else [low.t, low.factor])
    if tile.few_rows:
        read = few_rows_maps(a, b, tile, epilogue.gate_and_up_apart)
        few: list[Argument] = [*map(driver.encode, read), epilogue_launch.direct_outputs(driver, tensors, epilogue, n)]
        return Prepared(packed(driver, loaded, a, b, offs, problem, tile, few, counter, used), copies)
    specs = [
        maps.rows_operand(a.data, num_groups),
        maps.interleaved_operand(b.data, epilogue_launch.interleaved_rows(epilogue)),
        tensor_map.mn_major_scales(a.scale, 96 if tile.block_m == 256 else tile.block_m + 4),
    ]
    encoded: list[Argument] = [
        *map(driver.encode, specs),
        epilogue_launch.outputs_argument(driver, tensors, epilogue, n),
    ]
    return Prepared(packed(driver, loaded, a, b, offs, problem, tile, encoded, counter, used, others), copies)


# --- tiles -----------------------------------------------------------------------------------------------


def shares_row_blocks(epilogue: Epilogue) -> bool:
    """Whether a row's block of scales is wider than a CTA's part of the output, so that two CTAs share it."""
    return epilogue.is_glu and epilogue.row_format == FP8_BLOCK


def _stages_fit(problem: Problem, epilogue: Epilogue) -> bool:
    """Whether a tile of 256 rows with its outputs leaves room for three stages; two are too few."""
    if problem.num_groups > MANY_GROUPS:
        return False
    plain = epilogue.d_dtype.itemsize if epilogue.d_dtype is not None else 0
    row = 1 / epilogue.row_format.codes_per_byte if epilogue.row_format is not None else 0
    column = 1 if epilogue.column_format is not None else 0
    staged = (plain + row + column) / (2 if epilogue.is_glu else 1)  # bytes an element of the sums
    if epilogue.column_format is None or epilogue.column_format == FP8_BLOCK:
        return staged < 2 or (staged == 2 and problem.num_groups <= FEW_GROUPS)  # beyond, the table of groups is larger
    return staged < 2  # 32-row blocks have more column scales to keep


def select_tile(problem: Problem, epilogue: Epilogue, takes_few_rows: bool = True) -> Sm90Fp8Config:
    """The tile of least estimated time among those that can do ``epilogue``, or one with few_rows where groups have few.

    A SwiGLU's rows of FP8_BLOCK take two CTAs with tokens on rows, and one with tokens on columns. Raises ValueError for
    more groups than leave room for the outputs.
    """
    if takes_few_rows and shares_row_blocks(epilogue) and epilogue.column_format is None:
        few = few_rows_tile(problem, QUANTIZED_TOKENS)
        if few is not None:
            return replace(few, block_n=256)
    epilogue_launch.check_groups(problem.num_groups, epilogue)
    cluster = 2 if shares_row_blocks(epilogue) else 1
    measured = cost_table("sm90_fp8_grouped_gemm").costs
    costs = {tile: cost for tile, cost in measured.items() if tile.block_n == epilogue_launch.TILE_COLUMNS}
    narrow = Tile(128, epilogue_launch.TILE_COLUMNS)
    if cluster == 2:  # a cluster's tile of 128 rows costs what two tiles do
        costs = {Tile(128, epilogue_launch.TILE_COLUMNS, 2): costs[narrow], **costs}
    room = _stages_fit(problem, epilogue)
    costs = {tile: cost for tile, cost in costs.items() if tile.cluster_n >= cluster and (tile.block_m <= 128 or room)}
    best = best_tile(costs, problem.m, problem.n, problem.k, problem.num_groups, problem.num_sms)
    chosen = Sm90Fp8Config(best.block_m, best.block_n, cluster_n=best.cluster_n, raster_m=best.raster_m)
    return fit_config(chosen, problem)


def check_tile(tile: Sm90Fp8Config, epilogue: Epilogue) -> None:
    """Raises ValueError for a tile that cannot do ``epilogue``."""
    require = epilogue_launch.requirement_of(tile)
    if tile.few_rows:
        require(epilogue.column_format is None, "few_rows", "False for column outputs")
        require(
            tile.block_n >= epilogue_launch.staged_columns(epilogue), "block_n", "256 for FP8_BLOCK rows of a SwiGLU"
        )
        return
    require(tile.block_n == epilogue_launch.TILE_COLUMNS, "block_n", str(epilogue_launch.TILE_COLUMNS))
    require(tile.store == "ragged", "store", "'ragged'")
    require(tile.scales == "mn", "scales", "'mn'")
    if epilogue.column_format == FP8_BLOCK:
        require(tile.block_m >= 128, "block_m", "128 or 256 for FP8_BLOCK columns")
    if shares_row_blocks(epilogue):
        require(tile.cluster_n == 2, "cluster_n", "2 for FP8_BLOCK rows of a SwiGLU")
