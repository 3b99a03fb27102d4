"""Files of models after `quantize_experts`, by save_pretrained: the hub's FP8 or MXFP4 form, or a sentence.

save_pretrained asks the model's quantizer for tensors and settings; a model that was loaded in bfloat16 has none, so
quantize_experts gives it one. Whether there is a form is decided when a file is to be written: until then any is good.
"""

from __future__ import annotations

import inspect
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import FineGrainedFP8Config, Mxfp4Config, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers.quantizers_utils import should_convert_module

from padless.formats import FP8_BLOCK, MXFP4, MXFP4_REPACKED, MXFP8, BlockScaledFormat
from padless.integrations.transformers.quantizers import Fp8Quantizer, is_gpt_oss
from padless.integrations.transformers.weights import expert_weights, first_projection, is_quantized

# Arguments of FineGrainedFP8Config by the format of the experts.
_SETTINGS: dict[BlockScaledFormat, dict[str, Any]] = {
    FP8_BLOCK: {"weight_block_size": (128, 128), "scale_fmt": "float"},
    MXFP8: {"weight_block_size": (1, 32), "scale_fmt": "ue8m0"},
    MXFP4: {"weight_block_size": (1, 32), "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
}


def give_quantizer(model: nn.Module) -> None:
    """Makes save_pretrained of a model, and of the models in it, write the experts' codes with their scales."""
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or not _experts(part):
            continue
        before = getattr(part, "hf_quantizer", None)
        if before is None:
            part.hf_quantizer = ExpertsQuantizer(FineGrainedFP8Config())
        elif not isinstance(before, ExpertsQuantizer):
            method = before.quantization_config.quant_method
            before.get_state_dict_and_metadata = partial(
                _refuse, f"the rest of the model is {getattr(method, 'value', method)}"
            )


class ExpertsQuantizer(Fp8Quantizer):
    """The quantizer of a model whose experts, and nothing else, are quantized."""

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """(None, {}) or tensors by name, the settings being in the model's configuration. Raises ValueError."""
        if getattr(model, "_hf_peft_config_loaded", False):  # a file of adapters alone
            return None, {}
        experts = _experts(model)
        # State dicts have repacked codes as they were.
        formats = {MXFP4 if w.format == MXFP4_REPACKED else w.format for _, m in experts for w in _weights(m)}
        if len(formats) != 1:
            names = sorted(format.name for format in formats)
            _refuse(f"experts in {' and '.join(names)} have no common form")
        (format,) = formats
        if format == MXFP4 and all(is_gpt_oss(module) for _, module in experts):
            model.config.quantization_config = Mxfp4Config(modules_to_not_convert=_kept(model, experts))
            return _in_blocks(model.state_dict(), [path for path, _ in experts]), {}
        self.quantization_config = _fp8_settings(model, experts, format)
        model.config.quantization_config = self.quantization_config
        return super().get_state_dict_and_metadata(model)


def _refuse(reason: str, model: Any = None) -> Any:
    raise ValueError(
        f"{reason}, which save_pretrained could not write so that it loads: save the model before quantize_experts"
    )


def _experts(model: nn.Module) -> list[tuple[str, Any]]:
    return [(path, module) for path, module in model.named_modules() if is_quantized(module)]


def _weights(module: Any) -> tuple[Any, Any]:
    built = expert_weights(module)
    return built.w13, built.w2


def _replaceable(model: nn.Module, experts: list[tuple[str, Any]]) -> list[str]:
    """Names of the modules but the experts that transformers would replace when it loads a quantized file."""
    ours = {path for path, _ in experts}
    return [
        path for path, m in model.named_modules() if path not in ours and (path.endswith(".experts") or _is_linear(m))
    ]


def _is_linear(module: nn.Module) -> bool:
    """As transformers tells layers that have an FP8 form: not by their class, but for two."""
    return type(module) is nn.Linear or (isinstance(module, nn.Linear) and "GroupedLinear" in type(module).__name__)


def _kept(model: Any, experts: list[tuple[str, Any]]) -> list[str]:
    """The settings' modules_to_not_convert: those names, and what the file calls them, which the loader translates.

    lm_head: of a backbone without it, which loads into a model that has one.
    """
    ours = tuple(f"{path}." for path, _ in experts)
    rest = {name: t.to("meta") for name, t in model.state_dict().items() if not name.startswith(ours)}
    written = [name for name, t in revert_weight_conversion(model, rest).items() if t.dim() == 2]
    names = ["lm_head", *_replaceable(model, experts), *(name.removesuffix(".weight") for name in written)]
    return list(dict.fromkeys(names))


# --- gpt-oss in MXFP4 ------------------------------------------------------------------------------------


def _in_blocks(tensors: dict[str, torch.Tensor], paths: list[str]) -> dict[str, torch.Tensor]:
    """The tensors with those of the experts under gpt-oss' names: blocks of 16 bytes, and scales as bytes."""
    for path in paths:
        for name in ("gate_up_proj", "down_proj"):
            codes, scale = tensors.pop(f"{path}.{name}"), tensors.pop(f"{path}.{name}_scale_inv")
            tensors[f"{path}.{name}_blocks"] = codes.view(torch.uint8).unflatten(-1, (-1, 16))
            tensors[f"{path}.{name}_scales"] = scale.view(torch.uint8)
    return tensors


# --- FP8 files -------------------------------------------------------------------------------------------


def _fp8_settings(model: Any, experts: list[tuple[str, Any]], format: BlockScaledFormat) -> FineGrainedFP8Config:
    """Settings with which transformers builds FP8 experts that compute what these do. Raises ValueError for none."""
    arguments = _SETTINGS.get(format, {})
    if not arguments or not arguments.keys() <= inspect.signature(FineGrainedFP8Config.__init__).parameters.keys():
        _refuse(f"{format.name} experts have no form that transformers loads")
    settings = FineGrainedFP8Config(**arguments, modules_to_not_convert=_kept(model, experts))
    loader = Fp8Quantizer(copy(settings))
    loader._normalize_modules_to_not_convert(model)
    translated = loader.quantization_config.modules_to_not_convert
    for path in _replaceable(model, experts):
        if should_convert_module(path, translated):
            _refuse(f"{path} has a name by which transformers would not leave it in bfloat16")
    for path, module in experts:
        if not path.endswith(".experts") or not should_convert_module(path, translated):
            _refuse(f"{path} has a name by which transformers finds no FP8 experts")
        if getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False):
            _refuse(f"{path} has biases or a norm, and transformers' FP8 experts have none")
        _check_sizes(path, module, format)
        _check_twin(path, module, settings)
    return settings


def _check_sizes(path: str, module: Any, format: BlockScaledFormat) -> None:
    """transformers splits gate and up, and takes blocks to be equal parts of a weight."""
    rows, columns = format.weight_block
    w13, w2 = (tuple(w.logical_shape[-2:]) for w in _weights(module))
    gated = 2 if getattr(module, "has_gate", True) else 1
    if w13[0] % (gated * rows) or w13[1] % columns or w2[0] % rows or w2[1] % columns:
        _refuse(f"{path} has weights of {w13} and {w2}, for {format.name} no multiples of {max(rows, columns)}")


def _check_twin(path: str, module: Any, settings: FineGrainedFP8Config) -> None:
    """Compares with the experts that transformers builds for the file."""
    gated = getattr(module, "has_gate", True)
    more = {"expert_dtype": settings.expert_dtype} if hasattr(settings, "expert_dtype") else {}
    try:
        with torch.device("meta"):
            twin = FP8Experts(
                module.config, settings.weight_block_size, "dynamic", settings.scale_fmt, has_gate=gated, **more
            )
    except (AttributeError, AssertionError, KeyError, TypeError) as error:
        _refuse(f"{path} has a configuration of which transformers makes no FP8 experts ({error})")
    for name in (first_projection(module), "down_proj"):
        for each in (name, f"{name}_scale_inv"):
            got, want = getattr(module, each), getattr(twin, each)
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                expected = f"{tuple(want.shape)} {want.dtype}"
                _refuse(f"{path}.{each} is {tuple(got.shape)} {got.dtype} and transformers expects {expected}")
    if not _same_activation(module, twin, gated):
        _refuse(f"{path} has another activation than transformers' FP8 experts")


def _same_activation(module: Any, twin: Any, gated: bool) -> bool:
    """Whether both compute the same between their products, by values on both sides of any limit."""
    hidden = module.down_proj_scale_inv
    rows = 8 * torch.randn(
        16,
        (2 if gated else 1) * expert_weights(module).w2.logical_shape[-1],
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )
    rows = rows.to(hidden.device)
    with torch.no_grad():
        got, want = (each._apply_gate(rows) if gated else each.act_fn(rows) for each in (module, twin))
    return got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=1e-4, atol=1e-5)
