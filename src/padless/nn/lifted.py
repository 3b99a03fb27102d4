"""Operands that multiply lifted gradients: see `padless.quantization.lifting`."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import GroupedColumns
from padless.nn.products import Columns, Rows
from padless.nn.quantizers import quantized
from padless.quantization.lifting import lowered_by_lift

Operand = TypeVar("Operand", Rows, Columns)


def lowered(operand: Operand) -> Operand:
    """An FP8_BLOCK operand, of rows or along tokens, that is to be multiplied by a lifted one; any other as it is."""
    if isinstance(operand, GroupedColumns):
        return replace(operand, scale=lowered_by_lift(operand.scale))
    if isinstance(operand, BlockScaledTensor) and operand.format == FP8_BLOCK:
        return quantized(operand.data, lowered_by_lift(operand.scale))
    return operand
