"""vLLM's quantization "padless": its FP8 and MXFP4 checkpoints, loaded as ever, with experts of `PadlessExperts`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig, mxfp4_w4a16_moe_quant_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from padless.integrations.engines import VLLM
from padless.integrations.vllm.config import METHODS
from padless.integrations.vllm.experts import FP8_SCHEME, MXFP4_SCHEME, PadlessExperts


def configuration(config: dict[str, Any]) -> QuantizationConfig:
    """The configuration for a checkpoint's quantization_config. Raises ValueError for a method not in `METHODS`."""
    method = config.get("quant_method")
    if method == "fp8":
        return PadlessFp8Config.from_config(config)
    if method in METHODS:
        return PadlessMxfp4Config.from_config(config)
    raise ValueError(
        f"quant_method is {method!r}; --quantization padless takes checkpoints of 'fp8' in 128 x 128 blocks and "
        f"gpt-oss' 'mxfp4': {VLLM.remedy}"
    )


class PadlessFp8Config(Fp8Config):
    """FP8 checkpoints with 128 x 128 blocks: experts by padless, linear layers and the cache by vLLM.

    Its name stays "fp8", by which vLLM's models and loaders know what they load.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if self.weight_block_size != [128, 128]:
            raise ValueError(
                f"weight_block_size is {self.weight_block_size}; --quantization padless takes [128, 128]: {VLLM.remedy}"
            )

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """`PadlessFp8MoEMethod` for experts, vLLM's own methods for the rest."""
        if isinstance(layer, RoutedExperts) and self.store_dtype is None and not self._skips(prefix):
            return PadlessFp8MoEMethod(self, layer)
        return super().get_quant_method(layer, prefix)

    def _skips(self, prefix: str) -> bool:
        return bool(
            is_layer_skipped(
                prefix=prefix,
                ignored_layers=self.ignored_layers,
                fused_mapping=self.packed_modules_mapping,
                match_mode=self.ignored_layers_match_mode,
            )
        )


class _Reloaded:
    """Experts that vLLM's reload of weights leaves computing with them, eagerly and in captured CUDA graphs.

    vLLM loads into temporary parameters, makes a kernel of these and copies them to where the layer's lie. The kernel
    would go on with scales and biases that are not the layer's, and graphs with copies that went with the last one's.
    """

    weight_scale_name: str
    moe_kernel: Any
    moe_quant_config: Any
    get_fused_moe_quant_config: Any

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """vLLM's own; the kernel takes over the copies of the one before, written anew where they lie."""
        before = self.moe_kernel
        super().process_weights_after_loading(layer)  # type: ignore[misc]
        if before is not None:
            experts = self.moe_kernel.fused_experts
            experts.take_over(before.fused_experts, layer.w13_weight, layer.w2_weight)

    def apply(self, layer: RoutedExperts, *arguments: Any, **named: Any) -> Any:
        """vLLM's own, with the layer's scales and biases."""
        scale = getattr(layer, f"w13_{self.weight_scale_name}")
        if self.moe_quant_config.w1_scale is not scale:
            self.moe_quant_config = self.get_fused_moe_quant_config(layer)
            self.moe_kernel.fused_experts.quant_config = self.moe_quant_config
        return super().apply(layer, *arguments, **named)  # type: ignore[misc]


class PadlessFp8MoEMethod(_Reloaded, Fp8MoEMethod):
    """vLLM's FP8 experts, created and loaded by it, with `PadlessExperts` in the place of what its oracle picks."""

    def __init__(self, quant_config: Fp8Config, layer: RoutedExperts) -> None:
        # Not Fp8MoEMethod's: it asks the oracle, which knows vLLM's own kernels alone.
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self.quant_config = quant_config
        self.weight_block_size = quant_config.weight_block_size
        self.block_quant = True
        self.weight_scale_name = "weight_scale_inv"
        self.weight_scale_refine = None
        self.moe_block_shape = quant_config.weight_block_size
        self.per_act_token_quant = False
        self.fp8_backend = Fp8MoeBackend.TRITON  # of vLLM's backends one that leaves weights as they are loaded
        self.experts_cls = PadlessExperts
        _check_supported(layer.moe_config, FP8_SCHEME)


class PadlessMxfp4Config(GptOssMxfp4Config):
    """gpt-oss' MXFP4 checkpoints: experts by padless, linear layers in bfloat16 by vLLM.

    Its name stays "gpt_oss_mxfp4", by which vLLM loads all experts of a layer together.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """Hopper."""
        return 90

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, **_more: Any) -> None:
        """None: `PadlessConfig` is the class that is registered."""
        return

    def _make_moe_method(self, moe: Any) -> FusedMoEMethodBase:
        return PadlessMxfp4MoEMethod(moe)


class PadlessMxfp4MoEMethod(_Reloaded, GptOssMxfp4MoEMethod):
    """vLLM's gpt-oss experts, created and loaded by it in 4.25 bits a weight, with `PadlessExperts`.

    Sizes are not rounded up, but for the 32 values that share a scale.
    """

    def __init__(self, moe: Any) -> None:
        FusedMoEMethodBase.__init__(self, moe)
        self.weight_dtype = "gpt_oss_mxfp4"
        self.weight_scale_name = "weight_scale"
        # Of vLLM's backends the one that leaves weights as they are loaded and rounds sizes to blocks alone.
        self.mxfp4_backend = Mxfp4MoeBackend.EMULATION
        self.experts_cls = PadlessExperts
        if moe.activation != MoEActivation.SWIGLUOAI:  # loaders and limits are gpt-oss'
            raise ValueError(
                f"experts in MXFP4 have the activation {moe.activation.value!r}; --quantization padless takes gpt-oss': "
                f"{VLLM.remedy}"
            )
        self.max_capture_size = moe.max_capture_size
        self._cache_permute_indices: dict[torch.Size, torch.Tensor] = {}
        self.w13_precision_config = None
        self.w2_precision_config = None
        _check_supported(moe, MXFP4_SCHEME)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> FusedMoEQuantConfig:
        """Scales and biases of the layer; activations stay in bfloat16."""
        return mxfp4_w4a16_moe_quant_config(
            w1_scale=layer.w13_weight_scale,
            w2_scale=layer.w2_weight_scale,
            w1_bias=getattr(layer, "w13_bias", None),
            w2_bias=getattr(layer, "w2_bias", None),
            gemm1_alpha=1.702,
            gemm1_beta=1.0,
            gemm1_clamp_limit=7.0,
        )


def _check_supported(moe_config: Any, scheme: tuple[Any, Any]) -> None:
    """Raises ValueError where `PadlessExperts` does not compute the layer."""
    supported, reason = PadlessExperts.is_supported_config(
        PadlessExperts, moe_config, *scheme, PadlessExperts.activation_format()
    )
    if not supported:
        raise ValueError(f"padless does not compute this layer's experts ({reason}): {VLLM.remedy}")
