"""Configuration of the weight-gradient kernels of Blackwell."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import OUT_DTYPES
from padless.kernels.config import cpp_constants, fields_of, requirement_of
from padless.kernels.wgrad import GRADIENT_DTYPES

TILE = 128  # rows and columns of a tile


@dataclass(frozen=True)
class Sm100WgradConfig:
    """One compiled kernel. Neither N, K nor the number of tokens or groups is among its fields.

    Attributes:
        num_stages: depth of the pipeline, of 128 tokens of MXFP8 or 256 of NVFP4 a stage; 0 means as many as fit.
        out_dtype: bfloat16 or float32.
        accumulate: adds to what the output holds, float32 alone.
    """

    num_stages: int = 0
    out_dtype: torch.dtype = torch.bfloat16
    accumulate: bool = False

    def __post_init__(self) -> None:
        require = requirement_of(self)
        require(self.num_stages == 0 or 2 <= self.num_stages <= 6, "num_stages", "0 (as many as fit) or 2 to 6")
        require(self.out_dtype in GRADIENT_DTYPES, "out_dtype", "torch.bfloat16 or torch.float32")
        is_right = not self.accumulate or self.out_dtype == torch.float32
        require(is_right, "accumulate", "False unless out_dtype is float32")

    def prelude(self) -> str:
        """The C++ constants that the kernel source is compiled behind."""
        constants, flags = fields_of(self, "num_stages"), fields_of(self, "accumulate")
        return cpp_constants(constants, flags, {"OUT_TYPE": OUT_DTYPES[self.out_dtype]})
