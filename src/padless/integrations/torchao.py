"""torchao's training conversion with padless' products: `PadlessTrainingOpConfig` for `quantize_`.

    quantize_(model, PadlessTrainingOpConfig(recipe="fp8"), filter_fn=lambda m, fqn: fqn.endswith(".experts"))

Parameters (E, N, K) of the modules chosen become wrappers with the same values; `torch._grouped_mm` of rows and a
transposed wrapper is `padless.autograd.grouped_linear`. All else, optimizers and FSDP2 included, sees the values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

try:
    import torchao as _torchao  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torchao":
        raise
    raise ImportError("padless.integrations.torchao needs torchao 0.18: pip install 'padless[torchao]'") from error

from torchao.prototype.moe_training.config import TrainingOpBaseConfig
from torchao.prototype.moe_training.tensor import TrainingWeightWrapperBaseTensor
from torchao.prototype.moe_training.utils import unwrap_weight
from torchao.quantization.transform_module import register_quantize_module_handler
from torchao.utils import register_as_pytree_constant

from padless.autograd import grouped_linear
from padless.nn.recipe import as_recipe

__all__ = ["PadlessTrainingOpConfig", "PadlessWeight"]
_GROUPED_MM = ("_grouped_mm", "grouped_mm")


@register_as_pytree_constant
@dataclass(frozen=True)
class PadlessTrainingOpConfig(TrainingOpBaseConfig):
    """Configuration for torchao's `quantize_`: grouped products of experts in the formats of a recipe.

    recipe: a name of `padless.nn.RECIPES`, "fp8" for FP8 with 128 x 128 blocks. Groups are not padded. Raises
        ValueError for another name.
    """

    recipe: str = "fp8"

    def __post_init__(self) -> None:
        as_recipe(self.recipe)


class PadlessWeight(TrainingWeightWrapperBaseTensor):
    """A parameter's values, with padless' product where torch multiplies groups of rows by them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Grouped products of rows (M, K) and weights (E, K, N) by padless; everything else as without a wrapper.

        Raises ValueError for a grouped product of another form.
        """
        kwargs = kwargs or {}
        if func.__name__ not in _GROUPED_MM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        a, b = args[:2]
        offs = kwargs.get("offs", args[2] if len(args) > 2 else None)
        bias, out_dtype = kwargs.get("bias"), kwargs.get("out_dtype")
        if isinstance(a, cls) or not isinstance(b, cls) or a.dim() != 2 or b.dim() != 3 or offs is None:
            raise ValueError(
                "the grouped product has other operands than rows (M, K), a wrapped weight (E, K, N) and offs; "
                "padless computes this one alone: leave the module out of quantize_"
            )
        if bias is not None:
            raise ValueError("the grouped product has a bias; padless' has none: add it to the result")
        out = grouped_linear(a, unwrap_weight(b).transpose(-2, -1), offs, b.config.recipe)
        return out if out_dtype is None else out.to(out_dtype)


# What a saved state is made of: torch.load takes classes that are named to it, and so do distributed checkpoints.
torch.serialization.add_safe_globals([PadlessTrainingOpConfig, PadlessWeight])


@register_quantize_module_handler(PadlessTrainingOpConfig)
def _wrap_parameters(module: nn.Module, config: PadlessTrainingOpConfig) -> nn.Module:
    """Wraps the module's own parameters of three dimensions; biases and what is wrapped already stay."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.dim() == 3 and not isinstance(parameter.data, TrainingWeightWrapperBaseTensor):
            wrapped = PadlessWeight(parameter.data, config)
            setattr(module, name, nn.Parameter(wrapped, requires_grad=parameter.requires_grad))
    return module
