"""Experts of torchtitan trained in 128-block FP8: the override `fp8_experts` of its grouped experts.

    torchtitan's command line: --override.imports padless.integrations.torchtitan.fp8_experts

Every experts module that has torchtitan's `_grouped_mm` seam (GroupedExperts, gpt-oss') keeps its parameters, its
sharding and its forward; its three products are `padless.autograd.grouped_linear`. docs/frameworks.md describes it.
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

from padless.autograd import grouped_linear  # type: ignore[import-not-found]
from padless.nn.recipe import as_recipe  # type: ignore[import-not-found]

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
def padless_experts(base: type) -> Any:
    """The subclass of an experts module of torchtitan whose `_grouped_mm` is padless'. Raises ValueError without one.

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

    PadlessGroupedExperts.__name__ = PadlessGroupedExperts.__qualname__ = f"Padless{base.__name__}"
    return PadlessGroupedExperts
