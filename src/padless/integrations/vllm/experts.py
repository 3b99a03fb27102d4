"""Experts of vLLM's modular kernel, computed by `padless.moe`: routing, quantization, both products, weighted sum.

The class takes bfloat16 rows and router weights and gives the reduced sum of this rank's experts, so that vLLM's
prepare and finalize do nothing but communicate.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExpertsModular,
    TopKWeightAndReduce,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8Dynamic128Sym,
    kFp8Static128BlockSym,
    kMxfp4Static,
)
from vllm.platforms import current_platform

from padless.integrations.engines import VLLM
from padless.integrations.weights import ExpertWeights, WeightCache
from padless.moe.layer import moe
from padless.runtime.architecture import BY_CAPABILITY

# (weights, activations) in vLLM's words; kernels are for Hopper and Blackwell.
FP8_SCHEME = (kFp8Static128BlockSym, kFp8Dynamic128Sym)
MXFP4_SCHEME = (kMxfp4Static, None)
_WITHOUT_GATE = {
    MoEActivation.SILU_NO_MUL: "silu",
    MoEActivation.GELU_TANH_NO_MUL: "gelu",
    MoEActivation.RELU2_NO_MUL: "relu2",
}
_GATED = (MoEActivation.SILU, MoEActivation.GELU_TANH, MoEActivation.SWIGLUOAI, MoEActivation.SWIGLUOAI_UNINTERLEAVE)


class PadlessExperts(FusedMoEExpertsModular):
    """FP8 experts with 128 x 128 blocks, and MXFP4 experts, for vLLM's modular kernel.

    w1 (E, 2 I, H) and w2 (E, H, I) stay as vLLM's loaders leave them, gate above up; nothing is repacked or padded.
    Activations of FP8 weights are quantized to FP8 with 1 x 128 scales; MXFP4 weights take bfloat16
    ones on Hopper, MXFP8 on Blackwell.
    """

    def __init__(self, moe_config: Any, quant_config: Any, **arguments: Any) -> None:
        super().__init__(moe_config, quant_config, **arguments)
        self._cache = WeightCache(VLLM.remedy)

    # --- what vLLM asks before it takes the class ---

    @staticmethod
    def activation_format() -> FusedMoEActivationFormat:
        """Rows of tokens as they are, (T, H)."""
        return FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        """True: rows are quantized while they are gathered."""
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return any(_runs_here(scheme) for scheme in (FP8_SCHEME, MXFP4_SCHEME))

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        return _runs_here((weight_key, activation_key))

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in _GATED or activation in _WITHOUT_GATE

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        # Tensor parallelism, and expert parallelism whose dispatch gives unquantized rows and global ids.
        return not moe_parallel_config.use_passthrough_all2all and (
            not moe_parallel_config.use_all2all_kernels
            or moe_parallel_config.use_ag_rs_all2all_kernels
            or moe_parallel_config.use_deepep_ht_kernels
        )

    @staticmethod
    def _supports_batch_invariance() -> bool:
        # `padless.moe` promises it for every format and size, and its tests hold it bit for bit.
        return True

    # --- the layer ---

    def finalize_weight_and_reduce_impl(self) -> TopKWeightAndReduce:
        """Nothing is left to do: `apply` weights and sums."""
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: Any,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """No workspaces, and an output of (M, K): torch's allocator gives what the steps need."""
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor | None,
        workspace2: torch.Tensor | None,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Writes the weighted sum of each token's experts that are on this rank into output (T, H).

        hidden_states: (T, H), not quantized. topk_ids: (T, k) global ids; those of other ranks, and sentinels outside
            of the experts, add nothing. expert_map: (global_num_experts,) local ids, -1 for other ranks', or None.
        apply_router_weight_on_input: the rows are weighted already.
        Raises ValueError for rows that were quantized before.
        """
        if a1q_scale is not None or a2_scale is not None:
            raise ValueError(
                "hidden_states are quantized and padless.integrations.vllm takes bfloat16 or float16 rows: choose "
                "another all2all backend, such as allgather_reducescatter"
            )
        weights = self._weights(w1, w2)
        ids = topk_ids if expert_map is None else local_ids(topk_ids, expert_map)
        result = moe(
            hidden_states,
            ids,
            torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights,
            weights.w13,
            weights.w2,
            bias13=weights.bias13,
            bias2=weights.bias2,
            activations=weights.activation_format,
            out_dtype=output.dtype,
            **activation_arguments(activation, self.activation_config),
        )
        output.copy_(result)

    def _weights(self, w1: torch.Tensor, w2: torch.Tensor) -> ExpertWeights:
        return self._cache.get(*self._sources(w1, w2))

    def _sources(self, w1: torch.Tensor, w2: torch.Tensor) -> tuple[Any, ...]:
        assert self.w1_scale is not None
        assert self.w2_scale is not None
        return w1, self.w1_scale, w2, self.w2_scale, self.w1_bias, self.w2_bias

    def take_over(self, before: PadlessExperts, w1: torch.Tensor, w2: torch.Tensor) -> None:
        """Takes the copies that `before` made of its weights, with the values of w1, w2 and this kernel's scales."""
        self._cache = before._cache
        self._cache.write_values_of(*self._sources(w1, w2))


def activation_arguments(activation: MoEActivation, config: ApplyMoEActivationConfig) -> dict[str, Any]:
    """Arguments of `padless.moe` for vLLM's activation. Raises ValueError for one that padless does not have."""
    if activation in _WITHOUT_GATE:
        return {"activation": _WITHOUT_GATE[activation]}
    if activation == MoEActivation.SILU:
        return {"limit": config.clamp_limit}
    if activation == MoEActivation.GELU_TANH:
        return {"activation": "geglu"}
    if activation == MoEActivation.SWIGLUOAI:  # vLLM's operator has these as constants too
        return {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    if activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE:
        return {"alpha": config.alpha, "limit": config.clamp_limit, "up_offset": config.beta}
    known = ", ".join(each.value for each in (*_GATED, *_WITHOUT_GATE))
    raise ValueError(f"activation is {activation.value!r}; padless.integrations.vllm has {known}")


def local_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """expert_map[topk_ids] (T, k) int32, and -1 for ids outside of the map, such as sentinels of a dispatch."""
    last = expert_map.shape[0] - 1
    known = (topk_ids >= 0) & (topk_ids <= last)
    mapped = expert_map[topk_ids.clamp(0, last).long()]
    return torch.where(known, mapped, -1).to(torch.int32)


def _runs_here(scheme: tuple[QuantKey | None, QuantKey | None]) -> bool:
    """Whether this machine computes the scheme: by a kernel, or on a CPU by the reference, slowly."""
    if scheme not in (FP8_SCHEME, MXFP4_SCHEME):
        return False
    if current_platform.is_cuda():
        found = current_platform.get_device_capability()
        return found is not None and (found.major, found.minor) in BY_CAPABILITY
    return bool(current_platform.is_cpu() or current_platform.is_unspecified())
