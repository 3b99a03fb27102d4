"""A layer's experts out of a checkpoint, in whatever layout they are stored: `load_experts`.

    with Checkpoint("Qwen3-30B-A3B-FP8/") as checkpoint:
        experts = load_experts(checkpoint, "model.layers.3.mlp.experts")
    y = padless.moe.moe(x, top_k_index, top_k_weights, experts.w13, experts.w2, **experts.options)

Layouts under a prefix P (all that `padless.checkpoints.Checkpoint` knows, and FP4 and MXFP8 under DeepSeek's names):

one by one   P.{i}.gate_proj, P.{i}.up_proj, P.{i}.down_proj; Mixtral's and MiniMax' P.{i}.w1 (gate), w3 (up), w2; a
             layer without a gate has no gate_proj. Each in FP8 blocks (.weight, .weight_scale_inv or .scale), FP4 or
             MXFP8 with a power of two for each 32 values (the same names), compressed-tensors, ModelOpt or torchao.
at once      P.gate_up_proj and P.down_proj with .._scale_inv next to them, (E, 2 I, H) gate above up, as transformers
             saves; P.up_proj where there is no gate.
gpt-oss      P.gate_up_proj_blocks, _scales and _bias, P.down_proj_..; rows of gate and up alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from padless.checkpoints import Checkpoint, concatenate_rows, stack_experts
from padless.formats import NVFP4, BlockScaledTensor
from padless.integrations.weights import block_scaled
from padless.layouts import _with_kernel_scales

# (gate, up, down)
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# What a quantized weight's tensors end with; the first in each is the codes'.
_ENDINGS = (
    (".weight", ".weight_scale_inv"),
    (".weight", ".scale"),
    ("", "_scale_inv"),
    (".weight", ".weight_scale"),
    (".weight_packed", ".weight_scale"),
    ("._weight_qdata", "._weight_scale"),
    ("_blocks", "_scales"),
)
_REMEDY = "see padless.integrations.checkpoints for the layouts that are known"


@dataclass(frozen=True, eq=False)
class LayerExperts:
    """Both projections of E experts, as `padless.moe.moe` takes them.

    w13: (E, 2 I, H), or (E, I, H) without a gate. w2: (E, H, I).
    options: further arguments of the call that the checkpoint decides: ``gate_up``, ``bias13``, ``bias2``, and NVFP4's
        ``global_scale1`` and ``global_scale2``. Which activation function it is, the model's configuration says.
    """

    w13: BlockScaledTensor
    w2: BlockScaledTensor
    options: dict[str, Any] = field(default_factory=dict)


def load_experts(checkpoint: Checkpoint, prefix: str, experts: Sequence[int] | None = None) -> LayerExperts:
    """The experts of one layer. Nothing is requantized.

    checkpoint: a `padless.checkpoints.Checkpoint`.
    prefix: what their names begin with, such as "model.layers.3.mlp.experts".
    experts: which ones, in this order, such as those of one rank; None is all.

    Raises ValueError for a layout that is not known, experts that are not there, and NVFP4 gate and up projections
    with different global scales, which cannot be one weight.
    """
    for names in NAMES:
        if is_quantized(checkpoint, f"{prefix}.0.{names[1]}"):
            return _one_by_one(checkpoint, prefix, names, experts)
    for first in ("gate_up_proj", "up_proj"):
        if is_quantized(checkpoint, f"{prefix}.{first}"):
            return _at_once(checkpoint, prefix, first, experts)
    raise ValueError(f"prefix is {prefix!r}, and the checkpoint has no quantized experts there: {_REMEDY}")


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    """Whether a weight of this name is there with scales."""
    return any(f"{name}{codes}" in checkpoint and f"{name}{scale}" in checkpoint for codes, scale in _ENDINGS)


# --- one weight an expert and projection -----------------------------------------------------------------


def _one_by_one(
    checkpoint: Checkpoint, prefix: str, names: tuple[str, str, str], experts: Sequence[int] | None
) -> LayerExperts:
    gate, up, down = names
    count = 0
    while is_quantized(checkpoint, f"{prefix}.{count}.{up}"):
        count += 1
    chosen = _chosen(experts, count, prefix)
    firsts = (gate, up) if is_quantized(checkpoint, f"{prefix}.0.{gate}") else (up,)
    w13 = stack_experts(
        [
            concatenate_rows([_weight(checkpoint, f"{prefix}.{e}.{name}") for name in firsts])
            if len(firsts) > 1
            else _weight(checkpoint, f"{prefix}.{e}.{up}")
            for e in chosen
        ]
    )
    w2 = stack_experts([_weight(checkpoint, f"{prefix}.{e}.{down}") for e in chosen])
    options: dict[str, Any] = {}
    for argument, projections in (("bias13", firsts), ("bias2", (down,))):
        if f"{prefix}.0.{projections[0]}.bias" in checkpoint:
            rows = [[checkpoint.tensor(f"{prefix}.{e}.{name}.bias") for name in projections] for e in chosen]
            options[argument] = torch.stack([torch.cat(row) for row in rows]).float()
    if w13.format == NVFP4:
        for argument, projections in (("global_scale1", firsts), ("global_scale2", (down,))):
            scales = [[_input_scale(checkpoint, f"{prefix}.{e}.{n}") for n in projections] for e in chosen]
            found = _common(scales)
            if found is not None:
                options[argument] = found.to(w13.device)
    if len(firsts) > 1:
        options["gate_up"] = "concatenated"
    return LayerExperts(w13, w2, options)


def _weight(checkpoint: Checkpoint, name: str) -> BlockScaledTensor:
    """One weight, (N, K)."""
    for codes, scale in _ENDINGS[:3]:
        if f"{name}{codes}" in checkpoint and f"{name}{scale}" in checkpoint:
            values = checkpoint.tensor(f"{name}{codes}")
            return block_scaled(name, values, checkpoint.tensor(f"{name}{scale}"), _REMEDY)
    return checkpoint.weight(name)


def _input_scale(checkpoint: Checkpoint, name: str) -> float | None:
    """The decode scale of an NVFP4 product's activations: ModelOpt's multiplies, compressed-tensors' divides."""
    if f"{name}.input_scale" in checkpoint:
        return float(checkpoint.tensor(f"{name}.input_scale"))
    if f"{name}.input_global_scale" in checkpoint:
        return 1.0 / float(checkpoint.tensor(f"{name}.input_global_scale"))
    return None


def _common(scales: list[list[float | None]]) -> torch.Tensor | None:
    """One scale for all experts where they agree, else one for each; the larger where gate and up differ."""
    largest = [max((s for s in row if s is not None), default=None) for row in scales]
    known = [s for s in largest if s is not None]
    if len(known) != len(largest):
        return None
    values = torch.tensor(known, dtype=torch.float32)
    return values[0].clone() if bool((values == values[0]).all()) else values


# --- all experts in one tensor ---------------------------------------------------------------------------


def _at_once(checkpoint: Checkpoint, prefix: str, first: str, experts: Sequence[int] | None) -> LayerExperts:
    weights = [_weight(checkpoint, f"{prefix}.{name}") for name in (first, "down_proj")]
    chosen = _chosen(experts, weights[0].data.shape[0], prefix)
    if experts is not None:
        weights = [_picked(t, chosen) for t in weights]
    options: dict[str, Any] = {}
    for argument, name in (("bias13", first), ("bias2", "down_proj")):
        if f"{prefix}.{name}_bias" in checkpoint:
            options[argument] = checkpoint.tensor(f"{prefix}.{name}_bias")[chosen].float()
    if first == "gate_up_proj":
        alternating = f"{prefix}.{first}_blocks" in checkpoint
        options["gate_up"] = "alternating" if alternating else "concatenated"
    w13, w2 = (_with_kernel_scales(t) for t in weights)
    return LayerExperts(w13, w2, options)


def _picked(t: BlockScaledTensor, chosen: list[int]) -> BlockScaledTensor:
    data = t.data.view(torch.uint8)[chosen].view(t.data.dtype)
    scale = t.scale.contiguous().view(torch.uint8)[chosen].view(t.scale.dtype)
    shared = t.global_scale if t.global_scale is None or t.global_scale.numel() == 1 else t.global_scale[chosen]
    return BlockScaledTensor(data, scale, t.format, shared, t.scale_layout)


def _chosen(experts: Sequence[int] | None, count: int, prefix: str) -> list[int]:
    """The experts to read. Raises ValueError for ones that are not there."""
    chosen = list(range(count)) if experts is None else list(experts)
    if not chosen or min(chosen) < 0 or max(chosen) >= count:
        raise ValueError(f"experts is {chosen} and {prefix!r} has {count}; they must be from 0 to {count - 1}")
    return chosen
