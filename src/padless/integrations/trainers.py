"""Experts of prime-rl, DeepSpeed AutoEP and NeMo Automodel trained by padless: `replace_experts`.

    replace_experts("deepspeed", recipe="fp8")  # in every rank's process, before the first step

All three sort rows by expert themselves and multiply them in one function of rows, counts and weights. That function is
replaced by `padless.nn.experts_of_rows`; modules, parameters and checkpoints stay. docs/trainers.md has the recipes.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from padless.arguments import shown
from padless.nn.recipe import Recipe, as_recipe
from padless.nn.rows_function import experts_of_rows

__all__ = ["replace_experts"]
Function = Callable[..., torch.Tensor]


def replace_experts(framework: str, recipe: Recipe | str = "fp8") -> None:
    """Lets a trainer's experts run by `padless.nn.experts_of_rows`, forward and backward, in this process.

    framework: "prime_rl", "deepspeed" or "nemo_automodel", the name that is imported.
    recipe: a `padless.nn.Recipe` or the name of one; another one may be given later.

    Plain SwiGLU without biases is computed, in the dtype of the rows; calls for another activation raise ValueError.
    Raises ValueError for another framework, and where its function has other arguments than padless was written for;
    ImportError where it is not installed.
    """
    recipe = as_recipe(recipe)
    if framework not in _SEAMS:
        raise ValueError(f"framework is {shown(framework)}; allowed: {', '.join(map(repr, _SEAMS))}")
    place, names, read_at, make = _SEAMS[framework]
    module = import_module(place)
    new = make(recipe, module)
    for name in names:
        found = getattr(module, name, None)
        if found is None or list(signature(found).parameters) != list(signature(new).parameters):
            what = "no such function" if found is None else f"{name}{signature(found)}"
            raise ValueError(
                f"{place} has {what} in the place of {name}{signature(new)}; padless was written for {read_at}: use "
                "this version, or padless.integrations.torchao"
            )
    for name in names:
        setattr(module, name, new)


def _prime_rl(recipe: Recipe, _: ModuleType) -> Function:
    def run(w1: Any, w2: Any, w3: Any, x: Any, num_tokens_per_expert: Any, fp8: bool = False) -> torch.Tensor:
        return of_three(w1, w2, w3, x, num_tokens_per_expert, recipe)

    return run


def _deepspeed(recipe: Recipe, _: ModuleType) -> Function:
    def run(
        w1: Any,
        w2: Any,
        w3: Any,
        x: Any,
        num_tokens_per_expert: Any,
        activation: str = "swiglu",
        alpha: float = 1.702,
        limit: float = 7.0,
    ) -> torch.Tensor:
        if activation != "swiglu":
            raise _other_activation(activation)
        return of_three(w1, w2, w3, x, num_tokens_per_expert, recipe)

    return run


def _nemo_automodel(recipe: Recipe, module: ModuleType) -> Function:
    def run(
        hidden_states: Any,
        gate_and_up_projs: Any,
        down_projs: Any,
        tokens_per_expert: Any,
        permuted_probs: Any,
        activation_fn: Any,
        use_mxfp8: bool = False,
    ) -> torch.Tensor:
        if activation_fn is not module.weighted_bias_swiglu_impl:
            raise _other_activation(activation_fn)
        offs, probs = _ends(tokens_per_expert), permuted_probs.reshape(-1)
        return experts_of_rows(hidden_states, offs, gate_and_up_projs, down_projs, probs, recipe, input_major=True)

    return run


def of_three(
    w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, x: torch.Tensor, counts: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """`experts_of_rows` of x (R, H): gate w1 (E, I, H), up w3, w2 (E, H, I); gate and up are copied into one weight."""
    w13 = torch.cat((w1.to(x.dtype), w3.to(x.dtype)), dim=1)
    return experts_of_rows(x, _ends(counts), w13, w2.to(x.dtype), None, recipe)


def _ends(counts: torch.Tensor) -> torch.Tensor:
    """End rows (E,) of groups; counts may be floats, as a histogram's are."""
    return counts.cumsum(0).to(torch.int32)


def _other_activation(activation: object) -> ValueError:
    return ValueError(
        f"the experts' activation is {shown(activation)}; replace_experts computes plain SwiGLU: take "
        "padless.integrations.torchao for these experts"
    )


# The module, its functions, the version whose source was read, and what makes the function that takes their place.
_SEAMS: dict[str, tuple[str, tuple[str, ...], str, Callable[[Recipe, ModuleType], Function]]] = {
    "prime_rl": (
        "prime_rl.trainer.models.layers.moe",
        ("_run_experts_grouped_mm_impl",),
        "prime-rl at 559b447",
        _prime_rl,
    ),
    "deepspeed": (
        "deepspeed.moe.ep_experts",
        ("_run_experts_grouped_mm", "_run_experts_grouped_mm_fused_gate_up"),
        "DeepSpeed 0.19.8",
        _deepspeed,
    ),
    "nemo_automodel": (
        "nemo_automodel.components.moe.experts",
        ("_torch_mm_experts_fwd",),
        "NeMo Automodel 0.7.0",
        _nemo_automodel,
    ),
}
