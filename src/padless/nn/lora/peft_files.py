"""Adapters of experts as PEFT's folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

Two layouts. "parameters" is PEFT's own of `LoraConfig(target_parameters=..)`, which PEFT and vLLM's models of 3D
expert weights read. "modules" has A and B of every expert's gate_proj, up_proj and down_proj, as if experts were
linear layers: SGLang and the rest of vLLM's models read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import torch

from padless.arguments import is_one_of, shown
from padless.moe.activation import split_gate_up
from padless.nn.lora.base import scaling_of
from padless.nn.lora.experts import LoraExperts
from padless.nn.lora.peft_names import check_adapter, check_tensors, from_peft, to_peft
from padless.runtime.choices import AdapterLayout

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
LAYOUTS: tuple[AdapterLayout, ...] = get_args(AdapterLayout)
_PREFIX = "base_model.model."
_PARAMETERS = ("gate_up_proj", "down_proj")
# What a file may ask for beyond r, lora_alpha and use_rslora, and the values that ask for nothing.
_NOTHING = {
    "alpha_pattern": {}, "bias": "none", "fan_in_fan_out": False, "lora_bias": False, "rank_pattern": {},
    "use_bdlora": None, "use_dora": False, "use_qalora": False,
}  # fmt: skip


def save_adapter(
    folder: str | PathLike[str],
    layers: Mapping[str, LoraExperts],
    adapter: str,
    *,
    base_model: str | None = None,
    layout: AdapterLayout = "parameters",
) -> None:
    """Writes one adapter of a model's experts as a folder of PEFT; files of these names are replaced.

    layers: experts by their names in the base model, such as "model.layers.0.mlp.experts"; all have the rank, alpha
        and rslora of the first.
    base_model: the base model's folder or name on the Hub, for ``base_model_name_or_path``.
    layout: "parameters", or "modules", which needs a gate; see `padless.nn.lora.peft_files`.

    Tensors keep their dtype; dropout is not written. In "parameters" rows of gate and up stay in w13's order. Raises
    ValueError, and ImportError without safetensors.
    """
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError as error:
        raise ImportError("writing adapters needs safetensors: pip install safetensors") from error
    if not is_one_of(layout, LAYOUTS):
        raise ValueError(f"layout is {shown(layout)}; allowed: {', '.join(map(repr, LAYOUTS))}")
    if not layers:
        raise ValueError("layers is empty; it must have experts by name")
    settings = {(m.rank, m.alpha, m.rslora) for m in layers.values()}
    if len(settings) != 1:
        raise ValueError(f"layers differ in (rank, alpha, rslora): {sorted(settings)}; a file has one of each")
    ((rank, alpha, rslora),) = settings
    tensors: dict[str, torch.Tensor] = {}
    for name, module in layers.items():
        tensors |= (to_peft if layout == "parameters" else _by_expert)(module, adapter, _PREFIX + name)
    config: dict[str, Any] = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,  # PEFT refuses any other for parameters
        "peft_type": "LORA",
        "r": rank,
        "target_modules": [] if layout == "parameters" else ["gate_proj", "up_proj", "down_proj"],
        "task_type": None,
        "use_rslora": rslora,
    }
    if layout == "parameters":
        config["target_parameters"] = [f"{name}.{parameter}" for name in layers for parameter in _PARAMETERS]
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    on_host = {name: t.contiguous().cpu() for name, t in tensors.items()}
    save_file(on_host, str(folder / _TENSORS), metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load_adapter(folder: str | PathLike[str], layers: Mapping[str, LoraExperts], adapter: str) -> tuple[str, ...]:
    """Reads a folder of PEFT in the layout "parameters" into the adapter of this name; returns the names left unread.

    layers: as in `save_adapter`; each one must be in the file. The names left are those of other modules' adapters,
    attention's for example. Parameters keep their dtype.

    Raises ValueError, before anything is written, for a file of another rank, of another scaling, with what
    `LoraExperts` does not compute (DoRA, patterns of ranks, biases) or with tensors missing or of another shape.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError as error:
        raise ImportError("reading adapters needs safetensors: pip install safetensors") from error
    config_path, tensors_path = (Path(folder) / name for name in (_CONFIG, _TENSORS))
    for path in (config_path, tensors_path):
        if not path.is_file():
            raise ValueError(f"folder has no {path.name}: {str(folder)!r}")
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
        tensors = load_file(str(tensors_path))
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"folder has an adapter that cannot be read: {error}") from None
    _check_config(config, layers)
    for name, module in layers.items():
        check_adapter(module, adapter)
        check_tensors(module, adapter, _PREFIX + name, tensors)
    read: set[str] = set()
    for name, module in layers.items():
        read |= from_peft(module, adapter, _PREFIX + name, tensors)
    return tuple(sorted(tensors.keys() - read))


def _check_config(config: Any, layers: Mapping[str, LoraExperts]) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{_CONFIG} is no LoRA of PEFT")
    for name, nothing in _NOTHING.items():
        if (value := config.get(name, nothing)) not in (nothing, None):
            raise ValueError(f"{_CONFIG} has {name} = {shown(value)}; only {shown(nothing)} is computed")
    rank, alpha, rslora = config.get("r"), config.get("lora_alpha"), bool(config.get("use_rslora", False))
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise ValueError(f"{_CONFIG} has r = {shown(rank)} and lora_alpha = {shown(alpha)}; they must be numbers")
    scaling = scaling_of(rank, alpha, rslora)
    for name, module in layers.items():
        if module.rank != rank or abs(module.scaling - scaling) > 1e-9 * abs(scaling):
            raise ValueError(
                f"{_CONFIG} has rank {rank} and scaling {scaling}; {name} has {module.rank} and {module.scaling}"
            )


def _by_expert(module: LoraExperts, adapter: str, prefix: str) -> dict[str, torch.Tensor]:
    """A and B of every expert's linear layers: A (r, K), B (N, r); gate_proj and up_proj have the same A."""
    check_adapter(module, adapter)
    if not module.activation.is_gated:
        raise ValueError(f"layout 'modules' needs gate and up; activation {module.activation.kind!r} has no gate")
    b13 = module.b13[adapter].detach()
    gate, up = (half.transpose(1, 2) for half in split_gate_up(b13.transpose(1, 2), module.activation))
    a13, a2, b2 = (t[adapter].detach() for t in (module.a13, module.a2, module.b2))
    return {
        f"{prefix}.{expert}.{name}.lora_{side}.weight": t[expert].clone(memory_format=torch.contiguous_format)
        for expert in range(module.num_experts)
        for name, a, b in (("gate_proj", a13, gate), ("up_proj", a13, up), ("down_proj", a2, b2))
        for side, t in (("A", a), ("B", b))
    }
