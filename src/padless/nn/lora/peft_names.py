"""Adapters of experts as PEFT's files have them: names, shapes and order of `LoraConfig(target_parameters=..)`.

For a parameter (E, N, K) PEFT keeps A as (E r, K), row e r + j being that of rank j of expert e, and B as (N, r E),
column j E + e: the expert is the innermost. Of two parameters of one module the one that the module has first is
wrapped inside the other, so that the names of w13's adapter, gate_up_proj's, have ``base_layer`` in them.
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
    check_adapter(module, adapter)
    found = {}
    for end, place in _PLACES:
        t = getattr(module, place)[adapter].detach()
        flat = t.flatten(0, 1) if place.startswith("a") else t.permute(1, 2, 0).flatten(1, 2)
        found[f"{prefix}.{end}"] = flat.clone(memory_format=torch.contiguous_format)
    return found


def from_peft(module: LoraExperts, adapter: str, prefix: str, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Writes an adapter of a PEFT file into the parameters of this name, converted to their dtype.

    The inverse of `to_peft`; returns the names that were read. Nothing is written where a tensor is missing or of
    another shape: ValueError.
    """
    check_adapter(module, adapter)
    check_tensors(module, adapter, prefix, tensors)
    with torch.no_grad():
        for end, place in _PLACES:
            parameter, t = getattr(module, place)[adapter], tensors[f"{prefix}.{end}"]
            experts, n, k = parameter.shape
            is_a = place.startswith("a")
            parameter.copy_(t.reshape(experts, n, k) if is_a else t.reshape(n, k, experts).permute(2, 0, 1))
    return {f"{prefix}.{end}" for end, _ in _PLACES}


def check_tensors(module: LoraExperts, adapter: str, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError where a tensor of the adapter is missing or of another shape."""
    for end, place in _PLACES:
        experts, n, k = getattr(module, place)[adapter].shape
        wanted = (experts * n, k) if place.startswith("a") else (n, k * experts)
        t = tensors.get(f"{prefix}.{end}")
        if t is None or tuple(t.shape) != wanted:
            found = "nothing" if t is None else tuple(t.shape)
            raise ValueError(f"tensors has {found} under {prefix}.{end}; it must be of shape {wanted}")


def check_adapter(module: LoraExperts, adapter: str) -> None:
    """Raises ValueError for an adapter that the module has not, and for one of which every rank has a part."""
    if adapter not in module.adapters:
        raise ValueError(f"adapter is {adapter!r}; allowed: {', '.join(map(repr, module.adapters))}")
    if any(hasattr(getattr(module, place)[adapter], "to_local") for _, place in _PLACES):
        raise ValueError(
            f"adapter {adapter!r} has DTensors, parts on every rank; read it ahead of fully_shard, and write or merge "
            "it behind unshard()"
        )
