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
