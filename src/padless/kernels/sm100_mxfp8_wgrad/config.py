"""Configuration of sm100_mxfp8_wgrad.cu: its constants, and the tile that a problem gets."""

from __future__ import annotations

from dataclasses import dataclass

from padless.formats import ceil_div
from padless.kernels.config import cpp_constants, fields_of, requirement_of
from padless.kernels.sm100_wgrad import TILE, Sm100WgradConfig


@dataclass(frozen=True)
class Mxfp8WgradConfig(Sm100WgradConfig):
    """One compiled kernel.

    Attributes:
        cta_group: CTAs that multiply as one: 1 (tiles of 128 x 128), or 2 (a pair: 256 x 256).
    """

    cta_group: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        requirement_of(self)(self.cta_group in (1, 2), "cta_group", "1 or 2")

    @property
    def tile(self) -> int:
        """Features of either operand in a tile."""
        return TILE * self.cta_group

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        return cpp_constants(fields_of(self, "cta_group")) + super().prelude()


# By cta_group: cycles of a stage of 128 tokens, and between two tiles. Predicted for a B200, on which it has not run
# (tests/emulator/timing/test_clock_training.py).
TILE_CYCLES = {1: (462, 3972), 2: (524, 5612)}


def select_config(m: int, n: int, k: int, num_groups: int, num_sms: int) -> Mxfp8WgradConfig:
    """The tile for a problem: a pure function, by predictions, for groups of the average number of tokens.

    A pair takes a third of the time that a CTA does for as many products, so a CTA wins where there are too few
    tiles for all pairs.
    """
    stages = ceil_div(m, 128 * num_groups)

    def cycles(config: Mxfp8WgradConfig) -> int:
        stage, between = TILE_CYCLES[config.cta_group]
        tiles = num_groups * ceil_div(n, config.tile) * ceil_div(k, config.tile)
        return ceil_div(tiles, num_sms // config.cta_group) * (stages * stage + between)

    return min((Mxfp8WgradConfig(cta_group=c) for c in TILE_CYCLES if c <= num_sms), key=cycles)
