"""Differentiable functions of grouped layers: `grouped_linear` and `experts`, for weights kept anywhere.

`padless.nn` has the modules around them.
"""

from padless.nn.experts_function import experts
from padless.nn.linear_function import grouped_linear
from padless.nn.weight_codes import WeightOperands, weight_operands

__all__ = ["WeightOperands", "experts", "grouped_linear", "weight_operands"]
