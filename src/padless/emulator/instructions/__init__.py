"""One place per PTX instruction. Each module registers emitters; an emitter turns one instruction into Python lines."""

from . import (
    barriers,
    bulk,
    conversion,
    data,
    floating,
    integer,
    matrix,
    synchronisation,
    tensor_memory,
    warp_wide,
)
from .registry import EMITTERS, HELPERS, SPECIAL_REGISTERS, TYPES

__all__ = ["EMITTERS", "HELPERS", "SPECIAL_REGISTERS", "TYPES"]
_ = (
    barriers, bulk, conversion, data, floating, integer, matrix, synchronisation, tensor_memory, warp_wide,
)  # fmt: skip
