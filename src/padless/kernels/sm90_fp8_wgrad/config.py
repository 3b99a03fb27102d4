"""Configuration of the weight-gradient kernel, and which one a problem gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from padless.formats import OUT_DTYPES, ceil_div
from padless.kernels.config import MANY_GROUPS, cpp_constants, fields_of, requirement_of, room_for_groups
from padless.kernels.wgrad import band_height, check_gradient_fields

BLOCK_N = 128  # columns of a tile, and tokens of a block
MODES = ("1d2d", "1d1d")


@dataclass(frozen=True)
class WgradConfig:
    """One compiled kernel. Each field becomes a constant in the device code. The number of tokens is not among them.

    Attributes:
        block_m: rows of the output tile (features of dY), 128 or 256, shared out to two consumer warpgroups 64 at a
            time. A tile has 128 columns.
        num_stages: depth of the shared-memory pipeline, a stage being 128 tokens; 0 means as many as fit.
        cluster_n: CTAs that share (multicast) the rows of a tile, side by side along its columns: 1 or 2.
        raster_m: row tiles to a band of the tile order (see ``schedule.py``).
        mode: "1d2d" (scales of X per 128 features and 128 tokens) or "1d1d" (per feature and 128 tokens).
        max_groups: room in the table of groups.
        out_dtype: bfloat16 or float32.
        accumulate: adds to what the output holds, float32 alone.
        reduced_pieces: where ``accumulate``, how many of the four pieces (two with 128 rows) in which a warpgroup hands
            out its tile, the last ones, are added by the copy engine; the others by the multiprocessor.
    """

    block_m: int = 256
    num_stages: int = 0
    cluster_n: int = 1
    raster_m: int = 8
    mode: str = "1d2d"
    max_groups: int = 256
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False
    reduced_pieces: int = 0

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.mode in MODES, "mode", " or ".join(MODES))
        check_gradient_fields(self, require)
        require(self.cluster_n in (1, 2), "cluster_n", "1 or 2")
        most = self.block_m // 64 - 1 if self.accumulate else 0
        require(0 <= self.reduced_pieces <= most, "reduced_pieces", f"0 to {most}")
        allowed = "128, or 256 unless mode is '1d1d' and float32 is stored"
        require(self.block_m in blocks_m(self.mode, self.out_dtype, self.accumulate), "block_m", allowed)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "block_m", "num_stages", "cluster_n", "raster_m", "max_groups", "reduced_pieces")
        flags = {"X_SCALES_ARE_BLOCKS": self.mode == "1d2d", "ACCUMULATE": self.accumulate}
        return cpp_constants(constants, flags, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})


def blocks_m(mode: str, out_dtype: torch.dtype, accumulate: bool = False) -> tuple[int, ...]:
    """Rows a tile can have. With 256, scales a column and float32 that is stored the sums do not fit in registers."""
    return (128,) if mode == "1d1d" and out_dtype == torch.float32 and not accumulate else (128, 256)


@dataclass(frozen=True)
class WgradProblem:
    """Inputs of ``select_config``. The tokens of each group stay on the device, so they are not here.

    tokens: columns of the transposed copies, an upper bound of the tokens in all.
    """

    n: int
    k: int
    tokens: int
    num_groups: int
    mode: str
    out_dtype: torch.dtype
    num_sms: int = 132
    accumulate: bool = False


def tiles_of(problem: WgradProblem, block_m: int, cluster_n: int = 1) -> int:
    """Tiles of all groups, as many as there are to a cluster counting as one."""
    return problem.num_groups * ceil_div(problem.n, block_m) * ceil_div(problem.k, BLOCK_N * cluster_n)


# Cycles of shared memory for a block of 128 tokens by rows of the tile, counted: what TMA writes, what wgmma
# reads, scales. For the output: what is staged, and what TMA reads. They bound a tile's time more tightly
# than its products do (docs/kernels/sm90_fp8_wgrad/ladder.md). Counted, not fitted to times.
_BLOCK_CYCLES = {
    "1d2d": {256: 384 + 768 + 40, 128: 256 + 384 + 24},
    "1d1d": {256: 388 + 768 + 544, 128: 260 + 384 + 272},
}
_OUTPUT_CYCLES_PER_BYTE = 2 / 128
# What a tile that is added to takes beside its blocks, measured.
_ADDING_CYCLES = {"1d2d": {256: 9900, 128: 4700}, "1d1d": {256: 5100, 128: 3050}}
# Tokens a group. From LONG on, what CTAs of a cluster wait for each other is less than what they save, and adding is not
# bound by bytes; below LONGER TMA adds less of a tile in 1d2d. Below FEW bytes bind what stores float32.
_FEW, _LONG, _LONGER = 448, 1024, 2048


def estimated_cycles(problem: WgradProblem, block_m: int) -> float:
    """Cycles of the CTA that works longest, if all groups have as many tokens as each other."""
    blocks = ceil_div(ceil_div(problem.tokens, max(problem.num_groups, 1)), 128)
    output = block_m * BLOCK_N * problem.out_dtype.itemsize * _OUTPUT_CYCLES_PER_BYTE
    if problem.accumulate:
        output = _ADDING_CYCLES[problem.mode][block_m]
    rounds = ceil_div(tiles_of(problem, block_m), problem.num_sms)
    return rounds * (blocks * _BLOCK_CYCLES[problem.mode][block_m] + output)


def select_config(problem: WgradProblem) -> WgradConfig:
    """The kernel for a problem: the tile of least estimated time, the larger of equals; for few tokens the smaller."""
    allowed = sorted(blocks_m(problem.mode, problem.out_dtype, problem.accumulate), reverse=True)
    is_long = problem.tokens >= _LONG * problem.num_groups
    is_longer = problem.mode == "1d1d" or problem.tokens >= _LONGER * problem.num_groups
    is_float = problem.out_dtype == torch.float32
    is_short = is_float and problem.tokens < _FEW * problem.num_groups
    if (problem.accumulate and not is_long) or is_short or problem.num_groups > MANY_GROUPS:
        allowed = [128]  # 256 rows and a large table of groups leave two stages
    block_m = min(allowed, key=lambda block_m: estimated_cycles(problem, block_m))
    reduced = (block_m // 128 if is_longer else 1) if problem.accumulate else 0
    fits = ceil_div(problem.k, BLOCK_N) % 2 == 0 and problem.num_sms > 1  # else a CTA has a tile without columns
    in_pairs = is_long and fits and block_m == 256
    tile = WgradConfig(
        block_m,
        cluster_n=1 + in_pairs,
        raster_m=band_height(problem.tokens, problem.num_groups, problem.k, 1),
        mode=problem.mode,
        out_dtype=problem.out_dtype,
        accumulate=problem.accumulate,
        reduced_pieces=reduced,
    )
    return fit_config(tile, problem)


def fit_config(config: WgradConfig, problem: WgradProblem) -> WgradConfig:
    """``config`` with what has to follow from the call: mode, room for groups, output dtype, accumulation."""
    return replace(
        config,
        mode=problem.mode,
        max_groups=room_for_groups(problem.num_groups),
        out_dtype=problem.out_dtype,
        accumulate=problem.accumulate,
        reduced_pieces=config.reduced_pieces if problem.accumulate else 0,
    )
