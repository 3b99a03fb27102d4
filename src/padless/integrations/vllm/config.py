"""The class that vLLM's registry holds for "padless": which checkpoints it claims. Experts are imported when one is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from padless.integrations import NAME
from padless.integrations.engines import VLLM

if TYPE_CHECKING:
    import torch

METHODS = ("fp8", "mxfp4", "gpt_oss_mxfp4")


class PadlessConfig(QuantizationConfig):
    """Quantization "padless" of the command line; `from_config` gives that of the checkpoint's own method."""

    @classmethod
    def get_name(cls) -> str:
        """The name on the command line."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of hidden states."""
        import torch

        return [torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """None: the model's config.json says all."""
        return []

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **_more: Any) -> str | None:
        """ "padless" for FP8 and MXFP4 checkpoints of a user who said `--quantization padless`, else None.

        vLLM asks for every quantized checkpoint, other versions with other keywords.
        """
        if user_quant != NAME or not isinstance(hf_quant_cfg, dict):
            return None
        return NAME if hf_quant_cfg.get("quant_method") in METHODS else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """The configuration for a checkpoint's quantization_config.

        Raises ValueError for another method, and in a vLLM that is not served.
        """
        return VLLM.load("padless.integrations.vllm.quantization").configuration(config)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> None:
        """Nothing: a model without a quantization_config has nothing to compute by padless."""
        raise ValueError(f"the checkpoint is not quantized; --quantization padless needs one that is: {VLLM.remedy}")
