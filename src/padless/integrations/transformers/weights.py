"""Weights of an experts module as BlockScaledTensors, built once a module, and `quantize_experts` for bfloat16 models.

A module keeps codes under the name of the weight and decode scales beside them, as transformers' FP8 experts do:
gate_up_proj (E, 2 I, H) e4m3 and gate_up_proj_scale_inv. The shapes and dtypes say which format it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.integrations.transformers.operators import aligned
from padless.integrations.weights import ExpertWeights, activations_for, block_scaled, in_tiles
from padless.quantization.quantize import quantize

FORMATS = (FP8_BLOCK, MXFP8, MXFP4, NVFP4)
_HOW_TO_QUANTIZE = (
    "load an FP8 checkpoint, or call padless.integrations.transformers.quantize_experts(model) after from_pretrained"
)

CHOSEN = "padless_activations"  # the attribute of a module that `set_activations` writes


@dataclass(frozen=True, eq=False)
class _Built:
    """Weights, and the parameters that they were built from: alive, so that no new one can be at an old address."""

    key: tuple[Any, ...]
    weights: ExpertWeights
    sources: tuple[torch.Tensor, ...]


_BUILT: WeakKeyDictionary[nn.Module, _Built] = WeakKeyDictionary()


def expert_weights(module: Any) -> ExpertWeights:
    """The weights of an experts module; built at the first call and again when a parameter is another or was written to.

    A write through `.data` is not counted by torch; codes and float32 scales are shared with the parameters, so it
    shows all the same, and other scales have to be replaced. Raises ValueError for weights that are not quantized, or
    not in a known format.
    """
    if torch.compiler.is_compiling():  # addresses cannot be traced; what is built is a few nodes of the graph
        return _build(module)
    key = _key(module)
    known = _BUILT.get(module)
    if known is None or known.key != key:
        sources = tuple(t.detach() for t in module._parameters.values() if t is not None)
        known = _Built(key, _build(module), sources)
        _BUILT[module] = known
    return known.weights


def first_projection(module: Any) -> str:
    """Name of the weights of the first projection."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _key(module: Any) -> tuple[Any, ...]:
    """The key of the sources of weights: addresses, versions, dtypes and shapes; and the activations' format."""
    key: list[Any] = [getattr(module, CHOSEN, None)]
    for t in module._parameters.values():
        if t is not None:
            key += (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.shape)
    return tuple(key)


def _build(module: Any) -> ExpertWeights:
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"activation_scheme is {module.activation_scheme!r}; padless quantizes activations by 'dynamic' "
            "scales alone: choose another experts_implementation"
        )
    first = first_projection(module)
    w13, w2 = _weight(module, first), in_tiles(_weight(module, "down_proj"))
    if getattr(module, "padless_activation", {}).get("gate_up") == "alternating":  # the epilogue reads tiles too
        w13 = in_tiles(w13)
    bias13, bias2 = (_detached(getattr(module, f"{name}_bias", None)) for name in (first, "down_proj"))
    return ExpertWeights(w13, w2, bias13, bias2, getattr(module, CHOSEN, None) or activations_for(w13))


def _detached(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.detach()


def _weight(module: Any, name: str) -> BlockScaledTensor:
    """Codes `name` with scales `name`_scale_inv, detached."""
    codes, scale = getattr(module, name), getattr(module, f"{name}_scale_inv", None)
    if scale is None or codes.dtype not in (torch.float8_e4m3fn, torch.int8):
        raise ValueError(
            f"{name} of {type(module).__name__} is {codes.dtype}, and experts_implementation='padless' needs quantized "
            f"experts: {_HOW_TO_QUANTIZE}"
        )
    if getattr(module, "is_transposed", False):
        raise ValueError(
            f"{name} of {type(module).__name__} is (E, K, N) and quantized; padless takes (E, N, K): {_HOW_TO_QUANTIZE}"
        )
    return block_scaled(
        name,
        aligned_parameter(codes),
        scale,
        "choose another experts_implementation",
        getattr(module, f"{name}_global_scale", None),
    )


def aligned_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, detached; on a GPU a copy where the kernels could not read it."""
    if torch.compiler.is_compiling():
        return parameter.detach().contiguous()
    return aligned(parameter.detach())


# --- quantizing ------------------------------------------------------------------------------------------


def quantize_experts(model: nn.Module, format: BlockScaledFormat = FP8_BLOCK) -> nn.Module:
    """Quantizes the experts of a bfloat16, float16 or float32 model in place, module by module; returns the model.

    format: FP8_BLOCK, MXFP8, MXFP4 (4.25 bits a weight) or NVFP4 (4.5). Weights become (E, N, K) codes with scales
    beside them, and with NVFP4 a global scale an expert; the originals are freed, and gradients with them. Save the
    model before: transformers does not know what to do with these parameters in a file. Other experts implementations
    cannot compute with them.

    Raises ValueError for another format and where no experts are found.
    """
    if format not in FORMATS:
        allowed = ", ".join(each.name for each in FORMATS)
        raise ValueError(f"format is {getattr(format, 'name', format)!r}; allowed: {allowed}")
    experts: list[Any] = [module for module in model.modules() if _is_unquantized(module)]
    if not experts:
        raise ValueError(
            "model has no experts in bfloat16, float16 or float32 that transformers dispatches by "
            "experts_implementation; a quantized model needs no quantize_experts"
        )
    with torch.no_grad():
        for module in experts:
            for name in (first_projection(module), "down_proj"):
                _quantize_parameter(module, name, format)
            module.is_transposed = False
    return model


def _is_unquantized(module: Any) -> bool:
    if not (hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")):
        return False
    weights = [module._parameters.get(name) for name in (first_projection(module), "down_proj")]
    return all(t is not None and t.dim() == 3 and t.element_size() > 1 for t in weights)


def _quantize_parameter(module: Any, name: str, format: BlockScaledFormat) -> None:
    values = getattr(module, name).detach()
    if module.is_transposed:
        values = values.transpose(1, 2).contiguous()
    t = quantize(values, format, kind="weight")
    codes = t.data.view(torch.int8) if format.codes_per_byte == 2 else t.data
    delattr(module, name)
    module.register_parameter(name, nn.Parameter(codes, requires_grad=False))
    module.register_parameter(f"{name}_scale_inv", nn.Parameter(t.scale.contiguous(), requires_grad=False))
    if t.global_scale is not None:
        module.register_parameter(f"{name}_global_scale", nn.Parameter(t.global_scale, requires_grad=False))
