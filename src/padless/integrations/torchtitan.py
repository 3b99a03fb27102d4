"""Experts of torchtitan trained in 128-block FP8: the override `fp8_experts` of its grouped experts.

    torchtitan's command line: --override.imports padless.integrations.torchtitan.fp8_experts

Parameters and sharding stay. GroupedExperts are computed by `padless.nn.experts_of_rows`; an experts module with
another forward (gpt-oss') keeps it, and its products are `padless.autograd.grouped_linear`. docs/frameworks.md
describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

try:
    import torchtitan as _torchtitan  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torchtitan":
        raise
    raise ImportError(
        "padless.integrations.torchtitan needs torchtitan 0.3: pip install 'padless[torchtitan]'"
    ) from error

from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts

from padless.autograd import grouped_linear
from padless.integrations.trainers import of_three
from padless.nn.recipe import as_recipe

__all__ = ["fp8_experts", "padless_experts"]


@override(
    target=GroupedExperts.Config,
    description="Products of grouped experts in FP8 with 128 x 128 blocks, forward and backward, without padding",
)
def fp8_experts(config: Any, recipe: str = "fp8") -> Any:
    """The configuration of `padless_experts` of config's module, with a recipe of `padless.nn.RECIPES`.

    On the command line: padless.integrations.torchtitan.fp8_experts={"recipe": "fp8_1d1d"}. Raises ValueError for a
    name that is no recipe.
    """
    as_recipe(recipe)
    return derive(config, padless_experts(type(config)._owner).Config, recipe=recipe)


@cache
def padless_experts(base: Any) -> Any:
    """The subclass of an experts module of torchtitan that padless computes. Raises ValueError without `_grouped_mm`.

    base: GroupedExperts, or a subclass of it that calls `_grouped_mm(A=, B_t=, offs=)` for its products.
    """
    if not hasattr(base, "_grouped_mm"):
        raise ValueError(
            f"base is {base.__name__}, which has no method _grouped_mm; allowed: torchtitan's GroupedExperts and "
            "classes made of it"
        )

    class PadlessGroupedExperts(base):
        """Grouped experts with products in the formats of config.recipe, the name of a `padless.nn.Recipe`."""

        @dataclass(kw_only=True, slots=True)
        class Config(base.Config):  # type: ignore[misc, name-defined]
            recipe: str = "fp8"

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.recipe = as_recipe(config.recipe)

        def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            """A (M, K) @ B_t (E, K, N) of the row's group; offs (E,) int32 end rows. Rows behind them are zeros."""
            return grouped_linear(A, B_t.transpose(-2, -1), offs, self.recipe)

    if base.forward is GroupedExperts.forward:

        def forward(self: Any, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
            """Rows x_RD (R, D) sorted by expert, and counts (E,); (R, D) in x_RD's dtype."""
            weights: Any = (self.w1_EFD, self.w2_EDF, self.w3_EFD)  # DTensors, where they are sharded
            w1, w2, w3 = (w.to_local() if hasattr(w, "to_local") else w for w in weights)
            return of_three(w1, w2, w3, x_RD.bfloat16(), num_tokens_per_expert_E, self.recipe).type_as(x_RD)

        PadlessGroupedExperts.forward = forward  # type: ignore[method-assign]
    PadlessGroupedExperts.__name__ = PadlessGroupedExperts.__qualname__ = f"Padless{base.__name__}"
    return PadlessGroupedExperts
