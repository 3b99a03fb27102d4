"""Configuration of sm100_grouped_gemm.cu: its constants, and the tile that a problem gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import OUT_DTYPES, ceil_div, round_up
from padless.kernels.config import FEW_GROUPS, check_common_fields, cpp_constants, fields_of, requirement_of
from padless.kernels.cost_model import expected_m_tiles, expected_rounds

KINDS = ("MXFP8", "NVFP4", "MXFP4", "FP8_BLOCK")
SCALE_SOURCES = ("tiled", "window", "plain")


@dataclass(frozen=True)
class Sm100GroupedConfig:
    """One compiled kernel. Each field becomes a constant of the device code; M is not here.

    Attributes:
        cta_group: CTAs that multiply as one: 1, or 2 (a pair: twice the rows on the left, the right operand shared).
        tokens_on_n: the rows of A are the columns of the product (tiles of mma_n tokens x 128 * cta_group columns of
            D), not its lanes (tiles of 128 * cta_group tokens x mma_n columns). For small groups.
        mma_n: columns of a product, 32, 64, 128 or 256.
        multicast: CTAs, or pairs, of a cluster that multiply the same tokens, each by columns of its own: each loads a
            share of the tokens and multicasts it to all. 1, 2 or 4; a share is whole groups of 8 rows.
        num_stages: depth of the shared-memory pipeline; 0 means as many as fit.
        raster_m: m-tiles to a band of the tile order (see ``schedule.py``).
        keep: the operand that L2 is asked to keep while the other streams through: "a", "b" or "" (neither).

    The rest follows from the operands (``fit``):
        kind: "MXFP8" (8-bit elements), "NVFP4" (block 16), "MXFP4" (block 32) or "FP8_BLOCK" (float32 scales).
        a_e5m2, b_e5m2: whether 8-bit elements are e5m2 instead of e4m3.
        b_e2m1: whether B is FP4 beside 8-bit A (kind "MXFP8").
        scales_a, scales_b: "tiled" (every 128 rows of a tile are 512-byte atoms in memory: copied), "window" (32x4x4
            tiles in which the rows may start anywhere: gathered) or "plain" (rows x columns: gathered).
        groups_on_tiles: whether the scales of every group of A start on a 128-row tile of their own.
        column_major: whether D's columns are contiguous instead of its rows.
        wide_stores: whether D and its rows (columns) start on 32-byte boundaries.
        problem_list: whether every group is a problem of its own, with its own M, N, K and tensors.
        max_groups: room in the table of groups.
        out_dtype: bfloat16, float16 or float32.
    """

    cta_group: int = 1
    tokens_on_n: bool = False
    mma_n: int = 128
    multicast: int = 1
    num_stages: int = 0
    raster_m: int = 8
    keep: str = ""
    kind: str = "MXFP8"
    a_e5m2: bool = False
    b_e5m2: bool = False
    b_e2m1: bool = False
    scales_a: str = "window"
    scales_b: str = "window"
    groups_on_tiles: bool = False
    column_major: bool = False
    wide_stores: bool = False
    problem_list: bool = False
    max_groups: int = FEW_GROUPS
    out_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.cta_group in (1, 2), "cta_group", "1 or 2")
        require(self.mma_n in (32, 64, 128, 256), "mma_n", "32, 64, 128 or 256")
        require(
            self.multicast in (1, 2, 4) and self.token_rows % (8 * self.multicast) == 0, "multicast",
            f"1, 2 or 4 where that leaves multiples of 8 of the {self.token_rows} tokens of a CTA",
        )  # fmt: skip
        require(self.keep in ("", "a", "b"), "keep", "'', 'a' or 'b'")
        require(self.kind in KINDS, "kind", ", ".join(KINDS))
        require(
            not self.b_e2m1 or (self.kind == "MXFP8" and not self.b_e5m2), "b_e2m1", "False but for B of kind MXFP8"
        )
        require(self.scales_a in SCALE_SOURCES, "scales_a", ", ".join(SCALE_SOURCES))
        require(self.scales_b in SCALE_SOURCES, "scales_b", ", ".join(SCALE_SOURCES))
        require(
            self.scales_a != "tiled" or ((self.groups_on_tiles or self.problem_list) and self.tile_m % 128 == 0),
            "scales_a", "'tiled' only where every group and every tile starts on 128 rows",
        )  # fmt: skip
        require(
            self.scales_b != "tiled" or self.tile_n % 128 == 0, "scales_b",
            "'tiled' only where every tile is a multiple of 128 columns wide",
        )  # fmt: skip
        check_common_fields(self, require, most_stages=24)

    @property
    def tile_m(self) -> int:
        """Rows of D in a tile: tokens."""
        return self.mma_n if self.tokens_on_n else 128 * self.cta_group

    @property
    def tile_n(self) -> int:
        """Columns of D in a tile, of both CTAs where two work as one."""
        return 128 * self.cta_group if self.tokens_on_n else self.mma_n

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cta_group * self.multicast

    @property
    def cluster_n(self) -> int:
        """Columns of D that a cluster makes at a time."""
        return self.tile_n * self.multicast

    @property
    def shortens_tiles(self) -> bool:
        """Whether a tile of few tokens loads and multiplies no more than they need, by ``column_step``."""
        return self.tokens_on_n and self.multicast == 1 and self.kind != "FP8_BLOCK"

    @property
    def column_step(self) -> int:
        """Of the columns of products of tiles that are shortened."""
        return 32 if self.mma_n < 128 else 64

    def columns(self, rows: int) -> int:
        """Columns of the products of a tile of ``rows`` rows of D."""
        return round_up(rows, self.column_step) if self.shortens_tiles else self.mma_n

    @property
    def token_rows(self) -> int:
        """Rows of A that one CTA multiplies, or brings into a pair's product."""
        return self.right_rows if self.tokens_on_n else 128

    @property
    def token_box(self) -> int:
        """Rows of A that one copy brings."""
        if self.shortens_tiles:
            return self.column_step // self.cta_group
        by_units = self.units if self.tokens_on_n and self.cta_group == 2 else 1
        return self.token_rows // self.multicast // by_units

    @property
    def right_rows(self) -> int:
        """Rows of the right operand that one CTA loads."""
        return self.mma_n // self.cta_group

    @property
    def units(self) -> int:
        """Products that a stage takes one after the other, each of as many of the tile's columns."""
        return 2 if self.kind == "FP8_BLOCK" and self.mma_n > 128 else 1

    @property
    def weight_box(self) -> int:
        """Rows of B that one copy brings, where they are neighbours."""
        if self.tokens_on_n:
            return 128
        return self.right_rows // (self.units if self.cta_group == 2 else 1)

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants = fields_of(self, "cta_group", "multicast", "mma_n", "num_stages", "raster_m", "max_groups")
        flags = fields_of(self, "tokens_on_n", "groups_on_tiles", "column_major", "wide_stores")
        names = {
            "PROBLEM_LIST": int(self.problem_list),
            "KIND": f"KIND_{self.kind}",
            "A_CODE": "MMA_E5M2" if self.a_e5m2 else "MMA_E4M3",
            "B_CODE": "MMA_E2M1" if self.b_e2m1 else "MMA_E5M2" if self.b_e5m2 else "MMA_E4M3",
            "SCALES_A": f"SCALES_{self.scales_a.upper()}",
            "SCALES_B": f"SCALES_{self.scales_b.upper()}",
            "OUT": OUT_DTYPES[self.out_dtype],
            "POLICY_A": _policy(self.keep, "a"),
            "POLICY_B": _policy(self.keep, "b"),
        }
        return cpp_constants(constants, flags, names)


def _policy(keep: str, operand: str) -> str:
    if keep == "":
        return "L2_EVICT_NORMAL"
    return "L2_EVICT_LAST" if keep == operand else "L2_EVICT_FIRST"


# By operands (MXFP4's are NVFP4's): (tokens_on_n, mma_n, cta_group): cycles of a stage of 128 bytes of K, between two
# tiles, of a tile at least, of start and end together, and of a stage of the shortest tile. Predicted for a B200, on
# which it has not run: `python tools/clock_sm100.py --tiles`.
TILE_CYCLES: dict[str, dict[tuple[bool, int, int], tuple[int, int, int, int, int]]] = {
    "NVFP4": {
        (True, 32, 2): (328, 249, 2410, 3180, 328), (True, 64, 1): (375, 57, 2582, 3527, 327),
        (True, 64, 2): (328, 249, 2698, 3778, 328), (True, 128, 1): (519, 57, 3462, 4342, 404),
        (True, 128, 2): (404, 57, 3484, 4457, 340), (True, 256, 1): (779, 403, 5050, 6165, 427),
        (True, 256, 2): (560, 1504, 5044, 7005, 344), (False, 128, 1): (519, 57, 3310, 4227, 519),
        (False, 128, 2): (404, 57, 3337, 4338, 404), (False, 256, 2): (560, 1501, 4587, 6061, 560),
        (False, 256, 1): (779, 423, 4882, 5964, 779),
    },
    "MXFP8": {
        (True, 32, 2): (267, 57, 2249, 3102, 267), (True, 64, 1): (353, 57, 2467, 3409, 296),
        (True, 64, 2): (296, 56, 2578, 3498, 267), (True, 128, 1): (476, 57, 3310, 4225, 361),
        (True, 128, 2): (361, 57, 3288, 4339, 303), (True, 256, 1): (714, 57, 4780, 6021, 390),
        (True, 256, 2): (524, 806, 4792, 6759, 303), (False, 128, 1): (476, 57, 3149, 4079, 476),
        (False, 128, 2): (361, 57, 3206, 4190, 361), (False, 256, 2): (524, 772, 4479, 5861, 524),
        (False, 256, 1): (714, 57, 4656, 5777, 714),
    },
    "MXFP8 x MXFP4": {
        (True, 32, 2): (251, 252, 2242, 3155, 251), (True, 64, 1): (304, 57, 2424, 3494, 254),
        (True, 64, 2): (251, 252, 2518, 4012, 251), (True, 128, 1): (409, 57, 3193, 4326, 310),
        (True, 128, 2): (303, 362, 3224, 4622, 251), (True, 256, 1): (614, 295, 4702, 6347, 390),
        (True, 256, 2): (524, 819, 4707, 6546, 260), (False, 128, 1): (409, 57, 3094, 4136, 409),
        (False, 128, 2): (310, 74, 3115, 4239, 310), (False, 256, 2): (524, 781, 4482, 5868, 524),
        (False, 256, 1): (614, 180, 4502, 5852, 614),
    },
    "FP8_BLOCK": {
        (True, 32, 2): (481, 795, 2769, 2920, 481), (True, 64, 1): (481, 776, 2806, 3408, 481),
        (True, 64, 2): (480, 855, 2977, 3396, 480),
        (False, 128, 1): (462, 448, 3344, 4416, 462), (False, 128, 2): (403, 1812, 3405, 3729, 403),
        (False, 256, 2): (943, 2778, 6706, 5859, 943), (False, 256, 1): (851, 3341, 6425, 6293, 851),
    },
}  # fmt: skip


def select_grouped_config(
    m: int,
    n: int,
    num_groups: int,
    row_bytes: int = 4096,
    kind: str = "MXFP8",
    num_sms: int = 148,
    mma_n: int | None = None,
) -> Sm100GroupedConfig:
    """The tile for a problem: a pure function, by predictions. ``row_bytes``: of K. ``kind``: the format, or "MXFP8 x
    MXFP4". ``mma_n``: columns of a tile whose lanes are tokens, where it has to be one.

    The tile with the least cycles at the mean over groups of 0 to twice the average rows. Where a group has one m-tile
    each weight is read once, so the tokens are what L2 should keep; else the operand of fewer rows. No multicast: by the
    clock what reaches an SM binds, which it does not lessen.
    """
    groups = max(min(num_groups, m), 1)
    rows = ceil_div(m, groups)
    table = TILE_CYCLES.get(kind, TILE_CYCLES["NVFP4" if kind == "MXFP4" else "MXFP8"])
    tiles = (t for t in table if t[2] <= num_sms and (mma_n is None or t[:2] == (False, mma_n)))

    def cycles(tile: tuple[bool, int, int]) -> float:
        tokens_on_n, columns, cta_group = tile
        stage, between, least, ends, short = table[tile]
        tile_m, tile_n = (columns, 128 * cta_group) if tokens_on_n else (128 * cta_group, columns)
        rounds = expected_rounds(m, num_groups, tile_m, ceil_div(n, tile_n) / max(num_sms // cta_group, 1))
        step = Sm100GroupedConfig(tokens_on_n=tokens_on_n, mma_n=columns).column_step
        if tile_m > step:  # a stage takes what lies between the shortest tile's and a whole one's, by the mean tile
            mean = (m + groups * step / 2) / max(sum(expected_m_tiles(m, groups, tile_m)), 1)
            share = min(max(mean - step, 0) / (tile_m - step), 1)
            products = ceil_div(row_bytes, 128) * (short + (stage - short) * share) + between
        else:
            products = ceil_div(row_bytes, 128) * stage + between
        return ends + (rounds - 1) * max(products, least) + products

    tokens_on_n, columns, cta_group = min(tiles, key=cycles)
    keep = "a" if rows <= columns or rows < n else "b"
    return Sm100GroupedConfig(cta_group=cta_group, tokens_on_n=tokens_on_n, mma_n=columns, keep=keep)
