"""Experts of transformers trained in FP8: `train_forward`, registered as "padless_train", and `set_recipe`.

Parameters stay bfloat16 or float32 under transformers' own names; products forward and backward are those of a
`padless.nn.Recipe`. Weights are quantized in every forward pass, for it and its backward pass.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import nn

from padless.integrations.transformers.experts import fused_activation
from padless.integrations.transformers.weights import is_dispatched

TRAIN_NAME = "padless_train"
_PARAMETERS = ("gate_up_proj", "down_proj")


def train_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of each token's experts, (T, H), differentiable for rows, weights of the router and of experts.

    self: an experts module of transformers with gate_up_proj (E, 2 I, H) and down_proj (E, H, I) in bfloat16, float16
        or float32, plain SwiGLU and no biases; its recipe is that of `set_recipe`, else "fp8".
    The other arguments are those of `padless.integrations.transformers.experts_forward`.

    Raises ValueError for other experts.
    """
    from padless.autograd import experts
    from padless.nn.recipe import as_recipe

    w13, w2 = _trainable(self)
    recipe = as_recipe(getattr(self, "padless_recipe", "fp8"))
    out: torch.Tensor = experts(hidden_states, top_k_index, top_k_weights, w13, w2, recipe)
    return out


def set_recipe(model: nn.Module, recipe: Any) -> nn.Module:
    """Sets the recipe that a model's experts train with; returns the model.

    recipe: a `padless.nn.Recipe` or the name of one. Raises ValueError for another, and where no experts are found.
    """
    from padless.nn.recipe import as_recipe

    recipe = as_recipe(recipe)
    found: list[Any] = [module for module in model.modules() if is_dispatched(module)]
    if not found:
        raise ValueError(
            "model has no experts that transformers dispatches by experts_implementation: nothing to train by padless"
        )
    for module in found:
        module.padless_recipe = recipe
    return model


def _trainable(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up_proj and down_proj. Raises ValueError where padless does not train them."""
    w13, w2 = (getattr(module, name, None) for name in _PARAMETERS)
    if not getattr(module, "has_gate", True):
        reason = "no gate"
    elif not (_is_plain(w13) and _is_plain(w2)):
        reason = "quantized weights"
    elif getattr(module, "is_transposed", False):
        reason = "transposed weights, (E, K, N)"
    elif getattr(module, "has_bias", False):
        reason = "biases"
    elif fused_activation(module) == {}:
        return w13, w2
    else:
        reason = "an activation or a norm of its own"
    raise ValueError(
        f"{type(module).__name__} has {reason}; experts_implementation 'padless_train' trains plain SwiGLU experts in "
        "bfloat16, float16 or float32: choose another one"
    )


def _is_plain(weight: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(weight, torch.Tensor) and weight.dim() == 3 and weight.dtype.itemsize > 1
