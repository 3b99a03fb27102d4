"""The codes that a layer's forward pass multiplied with, to be sent to who samples from it: `ExpertCodes`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, BlockScaledTensor
from padless.nn.recipe import Recipe, as_recipe
from padless.nn.weight_codes import weight_operands
from padless.ops.checks import describe
from padless.runtime.choices import GateUp


@dataclass(frozen=True, eq=False)
class ExpertCodes:
    """Both projections of E experts as codes with plain scales: what `padless.moe.moe` multiplies with the same bits.

    w13: (E, 2 I, H). w2: (E, H, I). gate_up: which rows of w13 make gate and up, as in `padless.moe.Activation`.
    """

    w13: BlockScaledTensor
    w2: BlockScaledTensor
    gate_up: GateUp = "concatenated"

    def __post_init__(self) -> None:
        for name, t in (("w13", self.w13), ("w2", self.w2)):
            plain = isinstance(t, BlockScaledTensor) and t.scale_layout == "plain" and t.global_scale is None
            if not plain or t.data.dim() != 3 or not t.is_weight:
                raise ValueError(
                    f"{name} must be a (E, N, K) BlockScaledTensor of kind 'weight' with plain scales and no global "
                    f"one, got {describe(t)}"
                )

    def tensors(self, prefix: str, *, first: int = 0, joined: bool = False) -> dict[str, torch.Tensor]:
        """The hub's form: tensors by name, as engines' weight loaders and `padless.checkpoints` read. Nothing is copied.

        prefix: what the names begin with, such as "model.layers.3.mlp.experts".
        first: the id of the first of these experts, where they are one rank's.
        joined: False gives DeepSeek's names, PREFIX.7.gate_proj.weight and .weight_scale_inv, up_proj and down_proj, for
            which I is a multiple of 128 with FP8_BLOCK; True those of transformers, PREFIX.gate_up_proj (E, 2 I, H) and
            PREFIX.gate_up_proj_scale_inv, and down_proj. gpt-oss' alternating MXFP4 has its own, gate_up_proj_blocks and
            gate_up_proj_scales.

        Raises ValueError for an order of gate and up that the form does not have.
        """
        if self.w13.format == MXFP4 and self.gate_up == "alternating":
            found: dict[str, torch.Tensor] = {}
            for name, t in (("gate_up_proj", self.w13), ("down_proj", self.w2)):
                experts, n, stored = t.data.shape
                found[f"{prefix}.{name}_blocks"] = t.data.view(torch.uint8).view(experts, n, stored // 16, 16)
                found[f"{prefix}.{name}_scales"] = t.scale.view(torch.uint8)
            return found
        if self.gate_up != "concatenated":
            raise ValueError(f"gate_up is {self.gate_up!r}, and in files gate lies above up: train with 'concatenated'")
        if joined:
            return {
                f"{prefix}.{name}{ending}": part
                for name, t in (("gate_up_proj", self.w13), ("down_proj", self.w2))
                for ending, part in (("", _stored(t)), ("_scale_inv", t.scale))
            }
        half = self.w2.logical_shape[2]
        rows = 128 if self.w13.format == FP8_BLOCK else 1  # that share a scale
        if half % rows:
            raise ValueError(f"I is {half}, and gate and up share scales; give joined=True, or take an I of 128s")
        parts = {
            "gate_proj": (_stored(self.w13)[:, :half], self.w13.scale[:, : half // rows]),
            "up_proj": (_stored(self.w13)[:, half:], self.w13.scale[:, half // rows :]),
            "down_proj": (_stored(self.w2), self.w2.scale),
        }
        return {
            f"{prefix}.{first + e}.{name}.{ending}": part[e]
            for e in range(len(self.w13.data))
            for name, pair in parts.items()
            for ending, part in zip(("weight", "weight_scale_inv"), pair, strict=True)
        }


def _stored(t: BlockScaledTensor) -> torch.Tensor:
    """Codes as files have them: FP4 as bytes of two."""
    return t.data.view(torch.uint8) if t.format.codes_per_byte == 2 else t.data


def expert_codes(
    w13: torch.Tensor,
    w2: torch.Tensor,
    recipe: Recipe | str,
    *,
    gate_up: GateUp = "concatenated",
    input_major: bool = False,
) -> ExpertCodes:
    """The codes of weights (E, 2 I, H) and (E, H, I), or with input_major (E, H, 2 I) and (E, I, H), in a recipe's
    forward product: bit for bit what that multiplies with. Raises ValueError for a recipe without codes.
    """
    recipe = as_recipe(recipe)
    if recipe.forward not in (FP8_BLOCK, MXFP8):
        raise ValueError(f"recipe is {recipe}; its forward product has no codes to export, FP8_BLOCK and MXFP8 have")
    made = (weight_operands(w, recipe, backward=False, input_major=input_major).forward for w in (w13, w2))
    first, second = (t for t in made if isinstance(t, BlockScaledTensor))
    return ExpertCodes(first, second, gate_up)
