"""Weights of an experts module as BlockScaledTensors, built once a module.

A module keeps codes under the name of the weight and decode scales next to them, as transformers' FP8 experts do:
gate_up_proj (E, 2 I, H) e4m3 and gate_up_proj_scale_inv. The shapes and dtypes say which format it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts

from padless.formats import FP8_BLOCK, BlockScaledFormat, BlockScaledTensor
from padless.integrations.operators import aligned
from padless.integrations.weights import (
    ExpertWeights,
    KeptWeights,
    Sources,
    activations_for,
    block_scaled,
    in_float32,
    in_tiles,
    is_offloaded,
)

_HOW_TO_QUANTIZE = (
    "load an FP8 checkpoint, or call padless.integrations.transformers.quantize_experts(model) after from_pretrained"
)

ADAPTERS = "padless_adapters"  # the attribute of a module that `adapt_experts` writes
CHOSEN = "padless_activations"  # the attribute of a module that `set_activations` writes
_PATH = "padless_path"  # the attribute of a module that `keep_codes` writes, for errors


class Codes(nn.Parameter):
    """Codes or scales of quantized weights: casts of a model leave them alone, as they leave integers alone."""

    def is_floating_point(self) -> bool:
        """False: what `nn.Module.half` and its like ask before they cast."""
        return False


def is_dispatched(module: nn.Module) -> bool:
    """Whether a module is experts that transformers dispatches by experts_implementation."""
    return hasattr(module, "is_transposed") and hasattr(module, "_apply_gate")


def is_quantized(module: nn.Module) -> bool:
    """Whether a module is experts with codes and scales."""
    return hasattr(module, f"{first_projection(module)}_scale_inv")


def keep_codes(model: nn.Module) -> None:
    """Makes codes and scales of a model's quantized experts `Codes`, and notes where in the model the experts are."""
    for path, module in model.named_modules():
        if is_quantized(module):
            setattr(module, _PATH, path)
            _keep(module)
            module.register_load_state_dict_post_hook(_keep)  # which may have put other parameters there: assign=True


def _keep(module: nn.Module, *_: Any) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        is_codes = name.startswith((first_projection(module), "down_proj")) and not name.endswith("_bias")
        if is_codes and not isinstance(parameter, Codes):
            module.register_parameter(name, Codes(parameter.detach(), requires_grad=parameter.requires_grad))


def label(module: nn.Module, name: str) -> str:
    """A parameter of an experts module in the words of an error."""
    path = getattr(module, _PATH, None)
    return f"{name} of {type(module).__name__}" if path is None else f"{path}.{name}"


def refuse_parametrized(module: Any, path: str | None = None) -> None:
    """Raises ValueError where a parameter of an experts module is computed from others: padless reads the codes."""
    for name, chain in getattr(module, "parametrizations", {}).items():
        by = ", ".join(type(each).__name__ for each in chain)
        raise ValueError(
            f"{label(module, name) if path is None else f'{path}.{name}'} is parametrized ({by}), which quantized "
            "experts would ignore, with no gradient: adapt other modules, or merge it into bfloat16 weights before "
            "they are quantized"
        )


class _OfModule(KeptWeights):
    """ExpertWeights of one module, which this does not keep alive."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = ref(module)

    def write_again(self) -> None:
        """Writes what was built anew, where it lies, of the parameters that the module has now."""
        if (module := self._module()) is not None:
            self._rewrite(*_origin(module))


_BUILT: WeakKeyDictionary[nn.Module, _OfModule] = WeakKeyDictionary()


def _origin(module: Any) -> tuple[Sources, Callable[[], ExpertWeights], object]:
    """The arguments of `KeptWeights`."""
    return tuple(module._parameters.values()), partial(_build, module), getattr(module, CHOSEN, None)


def expert_weights(module: Any) -> ExpertWeights:
    """The weights of an experts module; built at the first call and again when a parameter is another or was written to.

    A write through `.data` is not counted by torch; codes and float32 scales are shared with the parameters, so it
    shows all the same, and other scales and biases have to be replaced. Raises ValueError for weights that are not
    quantized, or not in a known format.
    """
    if torch.compiler.is_compiling():  # addresses cannot be traced; what is built is a few nodes of the graph
        return _build(module)
    if is_offloaded(module):  # what is kept here would keep every layer's codes in memory
        return _build(module)
    if (known := _BUILT.get(module)) is None:
        known = _BUILT[module] = _OfModule(module)
    return known.of(*_origin(module))


def first_projection(module: Any) -> str:
    """Name of the weights of the first projection."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _build(module: Any) -> ExpertWeights:
    refuse_parametrized(module)
    if getattr(module, "activation_scheme", "dynamic") != "dynamic":
        raise ValueError(
            f"activation_scheme is {module.activation_scheme!r}; padless quantizes activations by 'dynamic' "
            "scales alone: choose another experts_implementation"
        )
    first = first_projection(module)
    w13, w2 = _weight(module, first), in_tiles(_weight(module, "down_proj"))
    _check_blocks_of_halves(module, first, w13)
    if getattr(module, "padless_activation", {}).get("gate_up") == "alternating":  # the epilogue reads tiles too
        w13 = in_tiles(w13)
    bias13, bias2 = (in_float32(getattr(module, f"{name}_bias", None)) for name in (first, "down_proj"))
    return ExpertWeights(w13, w2, bias13, bias2, getattr(module, CHOSEN, None) or activations_for(w13))


def _weight(module: Any, name: str) -> BlockScaledTensor:
    """Codes `name` with scales `name`_scale_inv, detached."""
    codes, scale = getattr(module, name), getattr(module, f"{name}_scale_inv", None)
    if scale is None or codes.dtype not in (torch.float8_e4m3fn, torch.int8, torch.int32):
        raise ValueError(f"{label(module, name)} is {codes.dtype}{_why_not(module, codes, scale)}")
    if getattr(module, "is_transposed", False):
        raise ValueError(
            f"{label(module, name)} is (E, K, N) and quantized; padless takes (E, N, K): {_HOW_TO_QUANTIZE}"
        )
    weight = block_scaled(
        label(module, name),
        aligned_parameter(codes),
        scale,
        "choose another experts_implementation",
        getattr(module, f"{name}_global_scale", None),
    )
    check_width(label(module, name), weight.logical_shape[-1], weight.format)
    return weight


def _check_blocks_of_halves(module: Any, name: str, w13: BlockScaledTensor) -> None:
    """Raises ValueError where up's blocks begin with up's rows in the file, and inside of a block of both.

    In files each of gate and up has its scales; transformers puts one under the other, as many as for blocks of both.
    """
    rows = w13.logical_shape[-2] // 2
    if isinstance(module, FP8Experts) and w13.format == FP8_BLOCK and name == "gate_up_proj" and rows % 128 > 64:
        raise ValueError(
            f"{label(module, name)} has {rows} rows of gate and as many of up, in separate blocks of 128 rows, which "
            "cannot be one weight: convert the checkpoint to bfloat16 by those blocks, then call quantize_experts"
        )


def check_width(name: str, width: int, format: BlockScaledFormat) -> None:
    """Raises ValueError for a weight whose K no product takes."""
    multiple = 16 if format == FP8_BLOCK else 32
    if width % multiple != 0:
        raise ValueError(
            f"{name} has {width} columns; {format.name} experts need a multiple of {multiple}: leave this model to "
            "another experts_implementation"
        )


def _why_not(module: Any, codes: torch.Tensor, scale: torch.Tensor | None) -> str:
    """The end of the sentence about weights that are not codes with scales."""
    if scale is not None:
        return (
            " although it has scales: something cast the codes to numbers, which cannot be undone; load or quantize the "
            "model again, and cast it before"
        )
    if codes.element_size() == 1:
        return (
            " without scales: codes were loaded as values; give experts_implementation='padless' to from_pretrained, "
            "which keeps codes and scales"
        )
    settings = getattr(getattr(module, "config", None), "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    if method is not None and getattr(method, "value", method) not in ("fp8", "mxfp4"):
        return (
            f", values that transformers made of a {getattr(method, 'value', method)} checkpoint, whose codes it does "
            "not keep for experts: padless.integrations.checkpoints.load_experts reads those, for padless.moe"
        )
    return f", and experts_implementation='padless' needs quantized experts: {_HOW_TO_QUANTIZE}"


def aligned_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, detached; on a GPU a copy where the kernels could not read it."""
    if torch.compiler.is_compiling():
        return parameter.detach().contiguous()
    return aligned(parameter.detach())
