"""Configurations of sm90_bf16_grouped_gemm.cu, and the one that a problem gets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, BlockScaledTensor, ceil_div
from padless.kernels.config import (
    BF16,
    FEW_GROUPS,
    MANY_GROUPS,
    check_common_fields,
    cpp_constants,
    fields_of,
    format_name,
    requirement_of,
    room_for_groups,
)
from padless.kernels.cost_model import routed_rounds

# Formats by the numbers of kernels/sm90_bf16/dequantize.cuh.
FORMATS = {BF16: 0, "FP8_BLOCK": 1, "MXFP8": 2, "MXFP8_E5M2": 3, "MXFP4": 4, "NVFP4": 5, "MXFP4_REPACKED": 4}
_MXFP8 = ("MXFP8", "MXFP8_E5M2")
# (activations, weights) that the kernel multiplies: every value, code times block scale, is a bf16 number; FP8_BLOCK's
# codes are, and its float32 scales are applied outside.
PAIRS: tuple[tuple[str, str], ...] = (
    *itertools.product(_MXFP8, _MXFP8),
    ("MXFP4", "MXFP4"),
    ("NVFP4", "NVFP4"),
    *itertools.product(_MXFP8, ("MXFP4",)),
    (BF16, "FP8_BLOCK"),
    *itertools.product((BF16, "FP8_BLOCK"), ("MXFP4", "NVFP4")),
    (BF16, "MXFP4_REPACKED"),
)
# Those that have a quantizing epilogue: it takes runs of gate and up, which blocks of 128 rows of weights do not fit.
QUANT_PAIRS = tuple(pair for pair in PAIRS if pair[1] != "FP8_BLOCK")
_LARGEST = (BF16, "FP8_BLOCK", torch.float32)  # of 128 tokens two stages exceed the shared memory


@dataclass(frozen=True)
class Sm90Bf16Config:
    """One compiled kernel. Each field becomes a constant of the device code; M is not here, and must never be.

    Attributes:
        a_format, b_format: names of the formats of activations and weights; "BF16" for plain activations.
        block_m: tokens of the output tile: 8, 16, 32, 64 or 128.
        block_n: weight rows of the output tile: 128 or 256, shared out to the consumer warpgroups 64 at a time.
        num_warpgroups: consumer warpgroups, 2 or 4. With 4 a thread has fewer registers: at most 64 tokens.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        stage_blocks: blocks of 128 of K to a stage, 1 or 2; 2 needs FP4 weights and activations other than FP8_BLOCK.
            0 chooses: 2 with at most 16 tokens, where that can be.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        blocked: whether the scales of the weights are in the 32x4x4 layout, else row-major.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    a_format: str
    b_format: str
    block_m: int = 128
    block_n: int = 128
    num_warpgroups: int = 2
    num_stages: int = 0
    stage_blocks: int = 0
    raster_m: int = 8
    blocked: bool = False
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.a_format in {a for a, _ in PAIRS}, "a_format", ", ".join(dict(PAIRS)))
        with_a = [b for a, b in PAIRS if a == self.a_format]
        require(self.b_format in with_a, "b_format", f"{', '.join(with_a)} with {self.a_format}")
        require(self.block_m in (8, 16, 32, 64, 128), "block_m", "8, 16, 32, 64 or 128")
        require(self.block_n in (128, 256), "block_n", "128 or 256")
        require(self.num_warpgroups in (2, 4), "num_warpgroups", "2 or 4")
        if self.num_warpgroups == 4:
            require(self.block_n == 256, "block_n", "256 with 4 warpgroups")
            require(self.block_m <= 64, "block_m", "at most 64 with 4 warpgroups")
        if "FP8_BLOCK" in (self.a_format, self.b_format) and self.block_m >= 64:
            require(self.block_n == 128, "block_n", "128 with 64 or more tokens where an operand is FP8_BLOCK")
        if (self.a_format, self.b_format, self.out_dtype) == _LARGEST:
            require(self.block_m <= 64, "block_m", "at most 64 with float32 output of BF16 x FP8_BLOCK")
        require(self.stage_blocks in (0, 1, 2), "stage_blocks", "0 (chosen), 1 or 2")
        if self.stage_blocks == 2:
            require(self.can_pair_blocks, "stage_blocks", "0 or 1 with weights of FP8 or FP8_BLOCK activations")
        check_common_fields(self, require)

    @property
    def blocks_of_stage(self) -> int:
        """``stage_blocks``, chosen."""
        return self.stage_blocks or (2 if self.can_pair_blocks and self.block_m <= 16 else 1)

    @property
    def can_pair_blocks(self) -> bool:
        """Whether a stage can have two blocks of 128 of K."""
        return self.b_format in _FP4 and self.a_format != "FP8_BLOCK"

    @property
    def box_rows(self) -> int:
        """Tokens of one copy: 64 where a tile of 128 with at most 64 of them (the end of a group) is copied, dequantised
        and multiplied as one of 64, else all of a tile.

        That takes a second loop, for which some have no registers: with 256 weight rows MXFP8 activations and NVFP4 x
        NVFP4, with 128 FP8_BLOCK x NVFP4, one of whose epilogues takes the most.
        """
        if self.block_n == 256:
            fits = self.a_format not in (*_MXFP8, "NVFP4")
        else:
            fits = (self.a_format, self.b_format) != ("FP8_BLOCK", "NVFP4")
        return 64 if self.block_m == 128 and fits else self.block_m

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = {
            **fields_of(self, "block_m", "box_rows", "block_n"),
            "NUM_MMA_WARPGROUPS": self.num_warpgroups,
            "NUM_STAGES": self.num_stages,
            "STAGE_BLOCKS": self.blocks_of_stage,
            **fields_of(self, "raster_m", "max_groups"),
            "A_FORMAT": FORMATS[self.a_format],
            "B_FORMAT": FORMATS[self.b_format],
        }
        macros = {"OUT_TYPE": OUT_DTYPES[self.out_dtype]}
        return cpp_constants(
            constants, {"SFB_IS_BLOCKED": self.blocked, "B_IS_REPACKED": self.b_format == "MXFP4_REPACKED"}, macros
        )


def select_config(
    a_format: str,
    b_format: str,
    m: int,
    n: int,
    num_groups: int,
    *,
    blocked: bool = False,
    out_dtype: torch.dtype = torch.bfloat16,
    num_sms: int = 132,
) -> Sm90Bf16Config:
    """The kernel for a problem: a pure function of the formats, M, N, G and the number of multiprocessors, since the
    groups' sizes are on the device.

    Takes the tile of the least rounds times cost. Where its registers or shared memory allow, a tile of 256 weight rows
    has four warpgroups, which hide latencies that two leave open, and a stage of FP4 weights two blocks of K.
    """
    is_large_table = num_groups > MANY_GROUPS
    is_float = out_dtype == torch.float32
    # With FP8_BLOCK's second set of sums 256 rows of many tokens exceed the registers; 256 rows of 128 tokens and
    # their float32 output, or of 64 and a large table of groups, the shared memory.
    widest = 32 if is_large_table or "FP8_BLOCK" in (a_format, b_format) else 64 if is_float else 128
    most = 64 if is_large_table or (a_format, b_format, out_dtype) == _LARGEST else 128
    fp4 = b_format in _FP4
    costs, cost_of_half = _COSTS["FP4" if fp4 else "FP8"]

    def time(tile: tuple[int, int]) -> float:
        block_m, block_n = tile
        short = _SHORT if block_m == 128 and a_format == BF16 and fp4 else 1.0
        rounds = routed_rounds(m, num_groups, block_m, ceil_div(n, block_n) / num_sms, short)
        return rounds * costs[block_m] * (cost_of_half if block_n == 128 else 1)

    least = min(m, most) if num_groups == 1 else 0  # a group alone is not cut: its weights would be read twice
    sizes = [size for size in costs if least <= size <= most]
    tiles = [(size, rows) for size in sizes for rows in (256, 128) if rows == 128 or size <= widest]
    block_m, block_n = min(tiles, key=time)
    # 32 tokens of FP4 leave room for three stages of two blocks, of bf16 for two, and 64 of FP4 for two beside an output
    # of 16 bits and the smallest table of groups; beside the largest one no more than 16 do.
    roomy = num_groups <= FEW_GROUPS and not is_float
    two_blocks = fp4 and (
        (block_m == 32 and not is_large_table and (a_format in _FP4 or (a_format == BF16 and roomy)))
        or (block_m == 64 and roomy and a_format in _FP4)
    )
    return Sm90Bf16Config(
        a_format,
        b_format,
        block_m=block_m,
        block_n=block_n,
        num_warpgroups=4 if block_n == 256 and block_m <= (64 if fp4 else 32 if a_format == BF16 else 0) else 2,
        stage_blocks=2 if two_blocks else 0,
        blocked=blocked,
        max_groups=room_for_groups(num_groups),
        out_dtype=out_dtype,
    )


_FP4 = ("MXFP4", "NVFP4", "MXFP4_REPACKED")
# By the weights' bits: what a tile costs by its tokens, over one of 8 of as many weight rows, which are dequantised
# whatever the tokens are; and one of 128 weight rows over one of 256. Fitted to records of picks.
_COSTS = {
    "FP4": ({8: 1.0, 16: 1.07, 32: 1.22, 64: 1.56, 128: 2.4}, 0.63),
    "FP8": ({8: 1.0, 16: 1.05, 32: 1.11, 64: 1.35, 128: 2.15}, 0.6),
}
# What a tile of 128 tokens with at most 64 of them takes of a full one (``box_rows``), measured of bf16 activations and
# FP4 weights. Of other formats it counts as a full one.
_SHORT = 0.71


def fit(
    config: Sm90Bf16Config, a: BlockScaledTensor | torch.Tensor, b: BlockScaledTensor, out_dtype: torch.dtype
) -> Sm90Bf16Config:
    """``config`` with what has to follow from the operands and the output."""
    return replace(
        config,
        a_format=format_name(a),
        b_format=b.format.name,
        blocked=b.scale_layout == "blocked",
        max_groups=room_for_groups(b.data.shape[0]),
        out_dtype=out_dtype,
    )
