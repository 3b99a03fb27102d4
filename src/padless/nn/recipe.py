"""Choice of formats for training a grouped layer: which products are FP8, and what is kept for the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import torch

from padless.arguments import is_one_of, shown
from padless.formats import FP8_BLOCK, MXFP8, NVFP4, BlockScaledFormat
from padless.runtime.choices import Saved, WgradMode

Format = BlockScaledFormat | torch.dtype
ALONG_FEATURES: tuple[Format, ...] = (FP8_BLOCK, MXFP8, NVFP4, torch.bfloat16)
FORMATS = {"forward": ALONG_FEATURES, "dgrad": ALONG_FEATURES, "wgrad": (FP8_BLOCK, MXFP8, NVFP4, torch.bfloat16)}
RULES = {"FP8_BLOCK": "", "MXFP8": "rceil"}  # for scales, of formats that passes over rows quantize to
WGRAD_MODES = {"1d2d": (128, 128), "1d1d": (1, 128)}  # (features, tokens) that share a scale of the inputs' columns
SAVED = ("bf16", "fp8", "recompute")


@dataclass(frozen=True, repr=False)
class Recipe:
    """Formats of a layer's three products, and what its forward pass keeps.

    forward: of y = x @ w.T, `padless.FP8_BLOCK`, MXFP8, NVFP4 or torch.bfloat16. In FP8_BLOCK x has a scale per 128
        columns of a row and w one per 128 x 128, as in DeepSeek-V3 (arXiv 2412.19437). With MXFP8 N and K are multiples
        of 32. With NVFP4, too; x has a scale per 16 of a row and w one per 16 x 16 (`padless.nn.nvfp4`).
    dgrad: of dx = dy @ w, the same. In FP8_BLOCK the weights' codes are those of the forward product, transposed,
        bit for bit, and dy has a scale per 128 columns of a row: never one per 128 x 128, with which DeepSeek-V3's
        authors saw training diverge. In MXFP8 the weights are quantized once more, along N. In NVFP4 they are those of
        the forward product, and dy is rounded stochastically.
    wgrad: of dw = dy.T @ x, FP8_BLOCK, MXFP8, NVFP4 or torch.bfloat16. In FP8_BLOCK dy has a scale per feature and 128
        tokens of a group. In MXFP8 dy and x have one per feature and 32 tokens of a group; tensor cores of Blackwell
        multiply the codes, elsewhere their values are multiplied in bfloat16, which has all of them. In NVFP4, too, with
        one per feature and 16 tokens; both are Hadamard-transformed along the tokens, and dy is rounded stochastically.
    wgrad_mode: scales of x in an FP8_BLOCK wgrad: "1d2d", one per 128 features and 128 tokens; "1d1d", one per
        feature and 128 tokens.
    save: how `Experts` keep the values before their activation for the backward pass: "bf16"; "fp8", in FP8_BLOCK, half
        of that; or "recompute", which keeps the first product's operand and multiplies again.

    Raises ValueError for other values.

    Example: Recipe(wgrad=torch.bfloat16) has FP8 products for the outputs and for the inputs' gradients, and weight
        gradients in bfloat16.
    """

    forward: Format = FP8_BLOCK
    dgrad: Format = FP8_BLOCK
    wgrad: Format = FP8_BLOCK
    wgrad_mode: WgradMode = "1d2d"
    save: Saved = "bf16"

    def __post_init__(self) -> None:
        for name, allowed in FORMATS.items():
            format = getattr(self, name)
            if not is_one_of(format, allowed):
                raise ValueError(f"{name} is {shown(format)}; allowed: {', '.join(map(format_name, allowed))}")
        if not is_one_of(self.wgrad_mode, WGRAD_MODES):
            raise ValueError(f"wgrad_mode is {shown(self.wgrad_mode)}; allowed: {', '.join(map(repr, WGRAD_MODES))}")
        if not is_one_of(self.save, SAVED):
            raise ValueError(f"save is {shown(self.save)}; allowed: {', '.join(map(repr, SAVED))}")

    def __repr__(self) -> str:
        names = (f"{part}={format_name(getattr(self, part))}" for part in ("forward", "dgrad", "wgrad"))
        return f"Recipe({', '.join(names)}, wgrad_mode={self.wgrad_mode!r}, save={self.save!r})"

    @property
    def fp8_forward(self) -> bool:
        """Whether the forward product is FP8_BLOCK."""
        return self.forward == FP8_BLOCK

    @property
    def fp8_dgrad(self) -> bool:
        """Whether the product for the inputs' gradients is FP8_BLOCK."""
        return self.dgrad == FP8_BLOCK

    @property
    def fp8_wgrad(self) -> bool:
        """Whether the product for the weights' gradients is FP8_BLOCK."""
        return self.wgrad == FP8_BLOCK

    @property
    def column_block(self) -> tuple[int, int]:
        """(features, tokens) that share a scale of the inputs' columns."""
        return WGRAD_MODES[self.wgrad_mode]


def is_block_scaled(format: Format) -> TypeGuard[BlockScaledFormat]:
    """Whether operands of a product along features are codes and scales."""
    return format in (FP8_BLOCK, MXFP8, NVFP4)


def format_name(format: Format) -> str:
    """As messages have it."""
    return format.name if isinstance(format, BlockScaledFormat) else str(format)


RECIPES = {
    "fp8": Recipe(),
    "fp8_compact": Recipe(save="fp8"),
    "fp8_1d1d": Recipe(wgrad_mode="1d1d"),
    "fp8_bf16_wgrad": Recipe(wgrad=torch.bfloat16),
    "mxfp8": Recipe(MXFP8, MXFP8, MXFP8),
    "mxfp8_bf16_wgrad": Recipe(MXFP8, MXFP8, torch.bfloat16),
    "nvfp4": Recipe(NVFP4, NVFP4, NVFP4),
    "bf16": Recipe(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}


def as_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe, or the preset of that name. Raises ValueError."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe is {shown(recipe)}; allowed: a padless.nn.Recipe or {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]
