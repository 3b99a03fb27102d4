"""Differentiable functions of grouped layers: `grouped_linear` and `experts`, for weights kept anywhere.

`padless.nn` has the modules around them.
"""

import padless.nn  # noqa: F401  The whole first: it needs its parts, which threads that import both would hold.
from padless.nn.experts_function import experts
from padless.nn.linear_function import grouped_linear
from padless.nn.weight_codes import WeightOperands, weight_operands

__all__ = ["WeightOperands", "experts", "grouped_linear", "weight_operands"]
