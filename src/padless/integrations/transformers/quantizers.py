"""Loading of FP8 and MXFP4 checkpoints that keeps their codes where transformers would dequantize them.

transformers dequantizes FP8 models on machines without a GPU, and MXFP4 ones without its hub kernels. It decides before
the model is there; these quantizers put the decision off until they see whether experts_implementation is "padless",
and leave every other model to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from padless.integrations.transformers.experts import NAME, experts_forward
from padless.integrations.transformers.weights import is_dispatched, keep_codes, label


def register_quantizers() -> None:
    """Puts the two quantizers in the place of transformers'; ones that other code has put there stay."""
    for method, stock, ours in (
        ("fp8", FineGrainedFP8HfQuantizer, Fp8Quantizer),
        ("mxfp4", Mxfp4HfQuantizer, Mxfp4Quantizer),
    ):
        if AUTO_QUANTIZER_MAPPING.get(method) is stock:
            AUTO_QUANTIZER_MAPPING[method] = ours


def asks_for_padless(model: nn.Module) -> bool:
    """Whether a part of the model is to compute its experts by padless."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "_experts_implementation", None) == NAME for config in configs)


class TrainsAdapters:
    """The answer to transformers' Trainer: trainable are models that `adapt_experts` gave adapters."""

    has_adapters = False

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train; else as transformers' own quantizer says."""
        return self.has_adapters or bool(super().is_trainable)  # type: ignore[misc]

    @property
    def is_qat_trainable(self) -> bool:
        """The same: Trainer refuses other quantized models that PEFT has not wrapped."""
        return self.has_adapters


class Fp8Quantizer(TrainsAdapters, FineGrainedFP8HfQuantizer):
    """transformers' FP8 quantizer, which without a GPU keeps FP8 for experts_implementation="padless"."""

    _put_off: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            super().validate_environment(*args, **kwargs)
        else:
            self._put_off = (args, kwargs)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        if self._put_off is not None and not asks_for_padless(model):
            super().validate_environment(*self._put_off[0], **self._put_off[1])
        own = {path: m for path, m in model.named_modules() if path.endswith(".experts") and not is_dispatched(m)}
        result = super()._process_model_before_weight_loading(model, **kwargs)
        for path, module in own.items() if asks_for_padless(model) else ():
            if isinstance(model.get_submodule(path), FP8Experts):
                raise ValueError(
                    f"{path} is {type(module).__name__}, which transformers does not dispatch by experts_implementation "
                    "and whose FP8 form it cannot call: load the model with another quantization_config, or with the "
                    "module's name in modules_to_not_convert"
                )
        return result

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if asks_for_padless(model):
            keep_codes(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """As transformers'; scales go into the file by the names of their weights, whatever was loaded."""
        if hasattr(HfQuantizer, "serialized_names"):  # transformers 5.17 matches scales by the names of weights itself
            conversions = getattr(model, "_weight_conversions", None)
            if conversions is None:
                found = get_model_conversion_mapping(model, add_legacy=False)
                conversions = [each for each in found if not isinstance(each, PrefixChange)]
            known = [each._original_target_patterns for each in conversions if isinstance(each, WeightConverter)]
            more = HfQuantizer.update_weight_conversions(self, list(conversions), model)
            model._weight_conversions = conversions + [
                each
                for each in more
                if isinstance(each, WeightConverter) and each._original_target_patterns not in known
            ]
        return super().get_state_dict_and_metadata(model)


class Mxfp4Quantizer(TrainsAdapters, Mxfp4HfQuantizer):
    """transformers' MXFP4 quantizer, which keeps gpt-oss' blocks for experts_implementation="padless"."""

    _put_off: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    _keeps_blocks = False

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        self._put_off = (args, kwargs)

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        asked = self.pre_quantized and not self.quantization_config.dequantize and asks_for_padless(model)
        found = [name for name, m in model.named_modules() if is_gpt_oss(m)]
        self._keeps_blocks = asked and bool(found)
        if not self._keeps_blocks:
            super().validate_environment(*self._put_off[0], **self._put_off[1])
            return super()._process_model_before_weight_loading(model, **kwargs)
        for name in found:
            config = model.get_submodule(name).config
            with torch.device("meta"):
                model.set_submodule(name, GptOssMxfp4Experts(config))
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> Any:
        if not self._keeps_blocks:
            return super()._process_model_after_weight_loading(model, **kwargs)
        keep_codes(model)
        return model

    def param_needs_quantization(self, model: nn.Module, param_name: str, **kwargs: Any) -> bool:
        return not self._keeps_blocks and super().param_needs_quantization(model, param_name, **kwargs)

    def get_load_operations(self) -> dict[str, Any]:
        return {} if self._keeps_blocks else super().get_load_operations()

    def get_weight_conversions(self) -> list[Any]:
        return [] if self._keeps_blocks else super().get_weight_conversions()

    def get_state_dict_and_metadata(self, model: nn.Module) -> Any:
        return (None, {}) if self._keeps_blocks else super().get_state_dict_and_metadata(model)


def is_gpt_oss(module: nn.Module) -> bool:
    """Whether it is gpt-oss' own experts module."""
    return type(module).__name__ == "GptOssExperts"


def gpt_oss_activation(config: Any) -> dict[str, Any]:
    """Arguments of `padless.moe` for gpt-oss' activation."""
    return {
        "gate_up": "alternating",
        "alpha": float(getattr(config, "swiglu_alpha", 1.702)),
        "limit": float(getattr(config, "swiglu_limit", 7.0)),
        "up_offset": 1.0,
    }


def _codes_of(blocks: torch.Tensor) -> torch.Tensor:
    """(E, N, K / 2) int8 of a file's blocks; repacked ones are int32 words and stay."""
    return blocks if blocks.dtype == torch.int32 else blocks.flatten(-2).view(torch.int8)


class GptOssMxfp4Experts(nn.Module):
    """gpt-oss' experts with the checkpoint's parameters: 4.25 bits a weight.

    gate_up_proj_blocks (E, 2 I, H / 32, 16) and gate_up_proj_scales (E, 2 I, H / 32) uint8, gate_up_proj_bias (E, 2 I);
    down_proj likewise, (E, H, I). Rows of gate and up alternate.
    """

    has_gate = True
    activation_scheme = "dynamic"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.num_experts = config.num_local_experts
        self.padless_activation = gpt_oss_activation(config)
        self.gate_up_proj_blocks: torch.Tensor
        self.gate_up_proj_scales: torch.Tensor
        self.down_proj_blocks: torch.Tensor
        self.down_proj_scales: torch.Tensor
        h, i = config.hidden_size, config.intermediate_size
        for name, n, k in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            blocks = torch.empty(self.num_experts, n, k // 32, 16, dtype=torch.uint8)
            scales = torch.empty(self.num_experts, n, k // 32, dtype=torch.uint8)
            bias = torch.empty(self.num_experts, n)
            for part, t in (("blocks", blocks), ("scales", scales), ("bias", bias)):
                self.register_parameter(f"{name}_{part}", nn.Parameter(t, requires_grad=False))

    # What `padless.integrations.transformers.weights` reads: codes and scales by the names of FP8 experts.
    @property
    def gate_up_proj(self) -> torch.Tensor:
        return _codes_of(self.gate_up_proj_blocks)

    @property
    def gate_up_proj_scale_inv(self) -> torch.Tensor:
        return self.gate_up_proj_scales

    @property
    def down_proj(self) -> torch.Tensor:
        return _codes_of(self.down_proj_blocks)

    @property
    def down_proj_scale_inv(self) -> torch.Tensor:
        return self.down_proj_scales

    def forward(
        self, hidden_states: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
    ) -> torch.Tensor:
        """`experts_forward`. Raises ValueError for another experts_implementation: nothing else reads the blocks."""
        asked = getattr(self.config, "_experts_implementation", None)
        if asked != NAME:
            raise ValueError(
                f"experts_implementation is {asked!r} and {label(self, 'gate_up_proj')} was loaded for {NAME!r} as "
                f"MXFP4 blocks, which nothing else reads: set {NAME!r}, or load the model again with {asked!r}"
            )
        return experts_forward(self, hidden_states, router_indices, routing_weights)
