"""Codes of experts modules: a trainer's written into a running engine, and MXFP4 ones in an order that is faster.

What an engine's plug-in keeps next to the parameters: FP4 scales in the tiles that kernels read, biases in float32,
scales that files have in 16 bits. CUDA graphs read these too, so they are written again where they lie.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from padless.formats import MXFP4, BlockScaledTensor
from padless.integrations.weights import block_scaled, refresh, refuse_offloaded
from padless.layouts import from_repacked, is_repackable, to_repacked
from padless.nn.codes import ExpertCodes

__all__ = ["load_codes", "refresh", "repack"]

# Codes and scales of both projections, by the names that experts modules have for them.
_NAMES = (
    ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"),  # transformers, gpt-oss
    ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv"),  # transformers
    ("w13_weight", "w13_weight_scale_inv", "w2_weight", "w2_weight_scale_inv"),  # vLLM and SGLang, FP8
    ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"),  # vLLM, gpt-oss
)


def load_codes(module: nn.Module, codes: ExpertCodes) -> None:
    """Writes codes and scales into the parameters of an experts module, in place, and what was made of them.

    module: quantized experts of transformers, `RoutedExperts` of vLLM, or SGLang's layer of FP8 experts, whose
        parameters have the sizes and the format of the codes: under tensor parallelism those of this rank's part, under
        expert parallelism those of this rank's experts.
    codes: of `padless.nn.Experts.codes`, on any device.

    The copies are made on the current stream: no request may be under way. Nothing moves, so that captured CUDA graphs
    compute with the new weights. Raises ValueError for a module or codes that do not fit; nothing is written then.
    """
    found = _names_of(module)
    if found is None:
        raise ValueError(
            f"module is {type(module).__name__}, which has none of the parameters that are known: quantized experts of "
            "transformers, vLLM's RoutedExperts or SGLang's FP8 experts"
        )
    refuse_offloaded("", module, "load_codes")
    wanted = _gate_up(module, codes.w13)
    if codes.gate_up != wanted:
        raise ValueError(f"gate_up of the codes is {codes.gate_up!r}, and {type(module).__name__} has {wanted!r} rows")
    writes = []
    for name, of_scale, t in ((*found[:2], codes.w13), (*found[2:], codes.w2)):
        parameter, scale = getattr(module, name), getattr(module, of_scale)
        data = to_repacked(t).data.view(torch.int32) if parameter.dtype == torch.int32 else t.data
        writes.append((parameter, _as(name, data, parameter)))
        writes.append((scale, _as(of_scale, t.scale, scale)))
    for parameter, values in writes:
        with torch.inference_mode(parameter.is_inference()), torch.no_grad():
            _bytes(parameter).copy_(values)
    refresh(*(parameter for parameter, _ in writes))


def repack(model: nn.Module) -> nn.Module:
    """Repacks the MXFP4 codes of all experts modules in a model, in place, an expert layer at a time; returns the model.

    model: of transformers or vLLM, gpt-oss from an MXFP4 file or after `quantize_experts`, for Hopper. Its codes become
        parameters (E, N, K / 8) int32 of `padless.layouts.to_repacked`, where N is a multiple of 16 and K of 64: outputs
        keep their bits and few tokens take less time. state_dict and files have the codes as they were; `load_codes`
        writes to repacked ones too, and an engine's own loader cannot. Adapters are not trained over them.

    Call it before CUDA graphs are captured. Raises ValueError where there are no such experts, or all are repacked
    already.
    """
    count, is_repacked = 0, False
    for path, module in model.named_modules():
        if _names_of(module) is not None:
            refuse_offloaded(path, module, "repack")
    for module in model.modules():
        names = _names_of(module)
        for name, of_scale in () if names is None else (names[:2], names[2:]):
            codes, scale = getattr(module, name), getattr(module, of_scale)
            is_repacked |= codes.dtype == torch.int32 and codes.shape[:-1] == scale.shape[:-1]  # Marlin's are not
            if codes.dtype not in (torch.int8, torch.uint8) or scale.dtype == torch.float8_e4m3fn:
                continue
            flat = codes.flatten(2) if codes.dim() == 4 else codes  # gpt-oss' blocks of 16 bytes
            weights = block_scaled(name, flat, scale, "")
            if not is_repackable(weights):
                continue
            words = to_repacked(weights).data.view(torch.int32)
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(words, requires_grad=False))
            module.register_state_dict_post_hook(partial(_as_they_were, name, of_scale, codes.dtype, codes.dim()))
            count += 1
    if count == 0 and is_repacked:
        raise ValueError(
            f"model is {type(model).__name__}, whose MXFP4 codes are already repacked: nothing needs to be done"
        )
    if count == 0:
        raise ValueError(
            f"model is {type(model).__name__}, which has no experts with MXFP4 codes of N a multiple of 16 and K of 64"
        )
    return model


def _as_they_were(
    name: str, of_scale: str, dtype: torch.dtype, dim: int, module: nn.Module, tensors: Any, prefix: str, _: Any
) -> None:
    """The codes in a state dict."""
    words = tensors.get(prefix + name)
    if words is not None and words.dtype == torch.int32:
        codes = from_repacked(block_scaled(name, words, getattr(module, of_scale), "")).data.view(dtype)
        tensors[prefix + name] = codes.unflatten(2, (-1, 16)) if dim == 4 else codes


def _names_of(module: nn.Module) -> tuple[str, str, str, str] | None:
    """Codes and scales of both projections of an experts module; None for another module."""
    return next((names for names in _NAMES if all(hasattr(module, name) for name in names)), None)


def _gate_up(module: Any, w13: BlockScaledTensor) -> str:
    """The order of gate and up that a module's rows have; engines keep MXFP4 as gpt-oss' files have it."""
    named = getattr(module, "padless_activation", None)
    if named is not None:
        return str(named.get("gate_up", "concatenated"))
    return "alternating" if w13.format == MXFP4 and hasattr(module, "w13_weight") else "concatenated"


def _as(name: str, values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """values as they are written to a parameter. Raises ValueError where they do not fit."""
    if values.dtype.itemsize == parameter.dtype.itemsize == 1:
        right = not {values.dtype, parameter.dtype} & {torch.float8_e4m3fn} or values.dtype == parameter.dtype
        values = values.view(torch.uint8)
    elif parameter.dtype == torch.int32:
        right = values.dtype == torch.int32
    else:  # scales: powers of two are float32, too
        right = parameter.dtype == torch.float32
        values = values.to(torch.float32)
    if values.shape != parameter.shape and values.numel() == parameter.numel():  # gpt-oss' blocks of 16 bytes
        values = values.reshape(parameter.shape)
    if not right or values.shape != parameter.shape:
        raise ValueError(
            f"{name} is {parameter.dtype} {tuple(parameter.shape)} and the codes' is {tuple(values.shape)}: export "
            "codes of the module's format, for this rank's experts and its part of the columns"
        )
    return values


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.view(torch.uint8) if parameter.dtype.itemsize == 1 else parameter
