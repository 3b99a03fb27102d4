"""Adapters of experts as PEFT's files have them: names, shapes and order of `LoraConfig(target_parameters=..)`.

For a parameter (E, N, K) PEFT keeps A as (E r, K), row e r + j being that of rank j of expert e, and B as (N, r E),
column j E + e: the expert is the innermost. Of two parameters of one module the first is wrapped inside the second, so
that the names of w13's adapter have ``base_layer`` in them where the targets are, in this order, gate_up_proj and
down_proj.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from padless.nn.lora.experts import LoraExperts

# Ends of names, and the parameter dicts that they are of.
_PLACES = (
    ("base_layer.lora_A.weight", "a13"),
    ("base_layer.lora_B.weight", "b13"),
    ("lora_A.weight", "a2"),
    ("lora_B.weight", "b2"),
)


def to_peft(module: LoraExperts, adapter: str, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one adapter under PEFT's names; they share no memory with the parameters.

    prefix: the experts' name in the file, such as "base_model.model.model.layers.0.mlp.experts".
    Rows of w13's B are in w13's order of gate and up. Raises ValueError for an adapter that the module has not.
    """
    _check_adapter(module, adapter)
    found = {}
    for end, place in _PLACES:
        t = getattr(module, place)[adapter].detach()
        flat = t.flatten(0, 1) if place.startswith("a") else t.permute(1, 2, 0).flatten(1, 2)
        found[f"{prefix}.{end}"] = flat.clone(memory_format=torch.contiguous_format)
    return found


def from_peft(module: LoraExperts, adapter: str, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes an adapter of a PEFT file into the parameters of this name, converted to their dtype.

    The inverse of `to_peft`. Nothing is written where a tensor is missing or of another shape: ValueError.
    """
    _check_adapter(module, adapter)
    values = []
    for end, place in _PLACES:
        parameter = getattr(module, place)[adapter]
        experts, n, k = parameter.shape
        wanted = (experts * n, k) if place.startswith("a") else (n, k * experts)
        t = tensors.get(f"{prefix}.{end}")
        if t is None or tuple(t.shape) != wanted:
            found = "nothing" if t is None else tuple(t.shape)
            raise ValueError(f"tensors has {found} under {prefix}.{end}; it must be of shape {wanted}")
        values.append(
            (
                parameter,
                t.reshape(experts, n, k) if place.startswith("a") else t.reshape(n, k, experts).permute(2, 0, 1),
            )
        )
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)


def _check_adapter(module: LoraExperts, adapter: str) -> None:
    if adapter not in module.adapters:
        raise ValueError(f"adapter is {adapter!r}; allowed: {', '.join(map(repr, module.adapters))}")
