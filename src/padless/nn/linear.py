"""A grouped linear layer with its weight: `GroupedLinear`; and what modules with quantized weights share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from padless.arguments import check_device, check_flag, check_integer, check_type, is_one_of, refuse_kinds, shown
from padless.kernels.config import MAX_GROUPS
from padless.nn.linear_function import check_sizes, grouped_linear
from padless.nn.recipe import Recipe, as_recipe
from padless.nn.weight_codes import WeightCodes, WeightOperands, has_backward, weight_operands
from padless.nn.weight_gradient import DelayedWgrad
from padless.quantization.quantize import INPUT_DTYPES


class QuantizedModule(nn.Module):
    """A module whose weights (G, N, K) are multiplied in the formats of a recipe.

    recipe: a `padless.nn.Recipe`; another one may be assigned, also by its name.
    delayed_wgrad: a `padless.nn.DelayedWgrad` that the weight gradients are left in, or None.
    keep_codes: False quantizes the weights in every forward pass. True keeps the codes for the following ones, and asks
        for this: call `forget_codes` after any change of a weight but a step of a torch.optim.Optimizer, an in-place
        operation of torch on the parameter itself, or another parameter in its place. May be assigned.
    """

    def __init__(self, recipe: Recipe | str, delayed_wgrad: DelayedWgrad | None, keep_codes: bool) -> None:
        super().__init__()
        self._codes: dict[str, WeightCodes] = {}
        self.recipe = as_recipe(recipe)
        check_type("delayed_wgrad", delayed_wgrad, DelayedWgrad)
        self.delayed_wgrad = delayed_wgrad
        self.keep_codes = keep_codes

    def __setattr__(self, name: str, value: Any) -> None:
        """As for any module; a weight that is replaced, also by FSDP2, leaves its codes."""
        codes = self.__dict__.get("_codes", {}).get(name)
        if codes is not None:
            codes.forget()
        elif name == "recipe":
            value = as_recipe(value)
            for weight in self._codes:
                check_sizes(weight, tuple(getattr(self, weight).shape), value)
        elif name == "keep_codes":
            check_flag("keep_codes", value)
            self.forget_codes()
        super().__setattr__(name, value)

    def forget_codes(self) -> None:
        """Lets the next call quantize the weights again where ``keep_codes`` is set; without it every call does."""
        for codes in self._codes.values():
            codes.forget()

    def _add_weight(self, name: str, shape: tuple[int, int, int], **factory: Any) -> None:
        """Registers a parameter (G, N, K). Raises ValueError for sizes and types that the recipe does not take."""
        check_sizes(name, shape, self.recipe)
        check_dtype(factory.get("dtype"))
        check_device(factory.get("device"))
        self.register_parameter(name, nn.Parameter(torch.empty(shape, **factory)))
        self._codes[name] = WeightCodes()

    def _operands(self, name: str, parameter: torch.Tensor, weight: torch.Tensor, backward: bool) -> WeightOperands:
        """Operands of the products that read a weight, which is this rank's part of the parameter of that name."""
        refuse_kinds(**{name: weight})
        codes = self._codes[name]
        if codes.pinned is not None:
            return codes.pinned
        if self.keep_codes:
            return codes.of(parameter, weight, self.recipe)
        return weight_operands(weight, self.recipe, backward=backward)

    def reset_parameters(self) -> None:
        """Draws the weights uniformly from +- 1 / sqrt(K), as torch.nn.Linear does."""
        for name in self._codes:
            weight: torch.Tensor = getattr(self, name)
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)


def check_dtype(dtype: object) -> None:
    """Raises ValueError for a type that no parameter of a layer has; float64 is for bfloat16 recipes on a CPU."""
    if not is_one_of(dtype, (None, *INPUT_DTYPES, torch.float64)):
        raise ValueError(f"dtype is {shown(dtype)}; allowed: torch.bfloat16, torch.float16 or torch.float32")


class GroupedLinear(QuantizedModule):
    """y[rows of g] = x[rows of g] @ weight[g].T, trained in the formats of a recipe.

    num_groups, in_features, out_features: G, K, N; the latter two multiples of 16.
    recipe: a `padless.nn.Recipe` or the name of one.
    delayed_wgrad: where weight gradients are left for later.
    dtype, device: of ``weight``, the parameter (G, N, K): bfloat16, float16 or float32.
    keep_codes: whether codes of the weight outlive a step, as for `QuantizedModule`.

    Raises ValueError.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        recipe: Recipe | str = "fp8",
        delayed_wgrad: DelayedWgrad | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        keep_codes: bool = False,
    ) -> None:
        super().__init__(recipe, delayed_wgrad, keep_codes)
        check_integer("num_groups", num_groups, 1, MAX_GROUPS)
        check_integer("in_features", in_features, 1)
        check_integer("out_features", out_features, 1)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self._add_weight("weight", (num_groups, out_features, in_features), dtype=dtype, device=device)
        self.reset_parameters()

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """`padless.autograd.grouped_linear` of x (M, K) and offs (G,) with the weight: (M, N)."""
        weight = self.weight
        operands = self._operands("weight", weight, weight, has_backward(x, weight))
        return grouped_linear(x, weight, offs, self.recipe, operands, delayed_wgrad=self.delayed_wgrad)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, recipe={self.recipe}"
