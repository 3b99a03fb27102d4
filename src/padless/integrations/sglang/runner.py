"""SGLang's runner core "padless": a layer's experts by `padless.moe`, from dispatched tokens to their weighted sum."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.moe_runner.base import DispatchMoeRunnerCore, MoeRunnerConfig
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import RegisteredMoeRunnerBackend

from padless.integrations import NAME
from padless.integrations.weights import WeightCache
from padless.moe.layer import moe

REMEDY = "choose another --moe-runner-backend"


class PadlessRunnerCore(DispatchMoeRunnerCore):
    """FP8 experts with 128 x 128 blocks, weights as SGLang loads them: w13 (E, 2 I, H), gate above up, w2 (E, H, I)."""

    def __init__(self, config: MoeRunnerConfig) -> None:
        super().__init__(config)
        self._cache = WeightCache(REMEDY)
        self._arguments = activation_arguments(config)

    @property
    def runner_backend(self) -> RegisteredMoeRunnerBackend:
        """The registered name."""
        return RegisteredMoeRunnerBackend(NAME)

    def run_from_dispatch(
        self, dispatch_output: Any, quant_info: Any, runner_config: MoeRunnerConfig, hooks: Any = None
    ) -> StandardCombineInput:
        """The weighted sum of each token's experts on this rank, (T, H) in hidden_states' dtype.

        dispatch_output: hidden_states (T, H) and topk_output (weights (T, k), local ids (T, k), logits); ids below 0,
            SGLang's sentinel for other ranks' experts, add nothing.
        quant_info: w13_weight, w2_weight, w13_scale, w2_scale, b13, b2.
        Raises ValueError for other dispatches and for LoRA.
        """
        if not dispatch_output.format.is_standard() or dispatch_output.hidden_states_scale is not None:
            raise ValueError(
                f"the dispatch is {dispatch_output.format.value!r}, or quantized; the runner padless takes "
                f"'standard' with unquantized rows: {REMEDY}"
            )
        if hooks is not None:
            raise ValueError(f"LoRA hooks are set; the runner padless has none: {REMEDY}")
        x = dispatch_output.hidden_states
        topk_weights, topk_ids = dispatch_output.topk_output[:2]
        if runner_config.apply_router_weight_on_input:
            x = x * topk_weights.to(x.dtype)  # one expert a token, as SGLang asserts where it makes the ids
            topk_weights = torch.ones_like(topk_weights)
        if runner_config.routed_scaling_factor is not None:
            topk_weights = topk_weights * runner_config.routed_scaling_factor
        weights = self._cache.get(
            quant_info.w13_weight,
            quant_info.w13_scale,
            quant_info.w2_weight,
            quant_info.w2_scale,
            quant_info.b13,
            quant_info.b2,
        )
        out = moe(
            x,
            topk_ids,
            topk_weights,
            weights.w13,
            weights.w2,
            bias13=weights.bias13,
            bias2=weights.bias2,
            activations=weights.activation_format,
            out_dtype=x.dtype,
            **self._arguments,
        )
        return StandardCombineInput(hidden_states=out)


def activation_arguments(config: MoeRunnerConfig) -> dict[str, Any]:
    """Arguments of `padless.moe` for SGLang's activation. Raises ValueError for one that padless does not have.

    A limit without alpha is applied by SGLang behind silu, and by padless before it, so it is refused; swiglu_limit
    is applied before. SGLang's "gelu" is the exact one, and padless has the tanh form.
    """
    kind, alpha, limit = config.activation, config.gemm1_alpha, config.gemm1_clamp_limit
    if not config.is_gated and kind in ("silu", "relu2"):
        return {"activation": kind}
    if config.is_gated and kind == "gelu_tanh":
        return {"activation": "geglu"}
    if config.is_gated and kind == "silu":
        if alpha is not None:
            rows = "alternating" if config.gate_up_interleaved else "concatenated"
            return {"gate_up": rows, "alpha": float(alpha), "limit": limit, "up_offset": 1.0}
        if limit is None:
            return {"limit": config.swiglu_limit}
    raise ValueError(
        f"activation is {kind!r} (gated: {config.is_gated}, gemm1_clamp_limit: {limit}); the runner padless has 'silu' "
        f"with and without a gate, 'gelu_tanh' with one and 'relu2' without: {REMEDY}"
    )
