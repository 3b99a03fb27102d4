"""vLLM's prepare and finalize over `padless.distributed.ExpertParallel`, and experts that take its rows.

    exchange = ExpertParallel(group, num_experts, hidden, top_k, max_tokens)
    kernel = mk.FusedMoEKernel(
        PadlessPrepareAndFinalize(exchange), PadlessGroupedExperts(moe_config, quant_config))

Rows arrive in FP8, grouped by expert with their scales as the products take them: nothing is sorted, permuted or
quantized between the exchange and the first product. To vLLM each row is a token with one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from torch.utils.weak import WeakIdKeyDictionary
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey

from padless.distributed import ExpertParallel, ExpertPlan
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.integrations.vllm.experts import FP8_SCHEME, PadlessExperts, activation_arguments
from padless.moe.activation import Activation
from padless.moe.layer import Projection
from padless.runtime.devices import is_capturing


class PadlessPrepareAndFinalize(mk.FusedMoEPrepareAndFinalizeModular):
    """Dispatch and combine of one layer after the other, for `PadlessGroupedExperts`.

    exchange: in FP8_BLOCK. Its experts lie on ranks as vLLM's do: in runs ("linear"), or by its expert_map.
    """

    def __init__(self, exchange: ExpertParallel) -> None:
        super().__init__()
        if exchange.settings.row_format.format != FP8_BLOCK:
            raise ValueError(f"exchange has rows in {exchange.settings.row_format.format}; they must be in FP8_BLOCK")
        self.exchange = exchange
        self._plan: ExpertPlan | None = None
        self._compared = WeakIdKeyDictionary()  # layers' maps of experts

    @property
    def activation_format(self) -> mk.FusedMoEActivationFormat:
        """Rows (C, H)."""
        return mk.FusedMoEActivationFormat.Standard

    def topk_indices_dtype(self) -> torch.dtype | None:
        """int32 and int64 ids are taken."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """max_tokens of the exchange."""
        return self.exchange.settings.max_tokens

    def num_dispatchers(self) -> int:
        """Ranks of the exchange."""
        return self.exchange.num_ranks

    def output_is_reduced(self) -> bool:
        """True: `finalize` gives the sums of all ranks."""
        return True

    def prepare(
        self,
        a1: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor, torch.Tensor]:
        """(codes (C, H), scales, numbers of rows by expert, local ids (C, 1), weights (C, 1)) of a1 (T, H).

        Ids of rows behind the last are -1. Raises ValueError.
        """
        if defer_input_quant:
            raise ValueError("the experts take rows that are not quantized; give the kernel PadlessGroupedExperts")
        settings = self.exchange.settings
        if num_experts != settings.num_experts:
            raise ValueError(f"num_experts is {num_experts} and the exchange was made for {settings.num_experts}")
        if expert_map is not None and expert_map not in self._compared and not is_capturing(expert_map.device):
            places = expert_map.tolist()
            here = tuple(sorted((e for e in range(num_experts) if places[e] >= 0), key=places.__getitem__))
            if here != self.exchange.local_experts:
                raise ValueError(
                    f"expert_map has experts {here} here and the exchange {self.exchange.local_experts}; make it with "
                    "expert_map, the rank of each of vLLM's experts"
                )
            self._compared[expert_map] = True  # once, since it waits for the GPU
        if apply_router_weight_on_input:
            a1 = a1 * topk_weights.to(a1.dtype)
        rows, plan = self.exchange.dispatch(a1, topk_ids, topk_weights)
        assert isinstance(rows, BlockScaledTensor)
        self._plan = plan
        number = torch.arange(len(plan.prob), device=a1.device, dtype=torch.int32)
        ids = torch.searchsorted(plan.offs, number, right=True, out_int32=True)
        ids = torch.where(number < plan.offs[-1], ids, -1)
        counts = torch.diff(plan.offs, prepend=torch.zeros_like(plan.offs[:1]))
        meta = mk.ExpertTokensMetadata(expert_num_tokens=counts, expert_num_tokens_cpu=None)
        return rows.data, rows.scale, meta, ids[:, None], plan.prob[:, None]

    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: Any,
    ) -> None:
        """Writes each token's weighted sum over all ranks into output (T, H)."""
        if self._plan is None:
            raise ValueError("finalize comes behind a prepare")
        weighted = not apply_router_weight_on_input
        output.copy_(self.exchange.combine(fused_expert_output, self._plan, weighted=weighted))
        self._plan = None


class PadlessGroupedExperts(PadlessExperts):
    """`PadlessExperts` in FP8 for rows that are quantized and grouped by expert; unweighted rows come out."""

    @property
    def expects_unquantized_inputs(self) -> bool:
        """False: `PadlessPrepareAndFinalize` gives FP8 rows."""
        return False

    @staticmethod
    def _supports_quant_scheme(weight_key: QuantKey | None, activation_key: QuantKey | None) -> bool:
        scheme = (weight_key, activation_key)
        return scheme == FP8_SCHEME and PadlessExperts._supports_quant_scheme(*scheme)

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
        """Writes both products of hidden_states (C, H) FP8 codes with MN-major a1q_scale into output (C, H).

        expert_tokens_meta: numbers of rows by expert, from `PadlessPrepareAndFinalize.prepare`. Raises ValueError.
        """
        if a1q_scale is None or expert_tokens_meta is None:
            raise ValueError(
                "hidden_states are not quantized and grouped; PadlessGroupedExperts goes with PadlessPrepareAndFinalize"
            )
        weights = self._weights(w1, w2)
        offs = expert_tokens_meta.expert_num_tokens.cumsum(0, dtype=torch.int32)
        given = activation_arguments(activation, self.activation_config)
        given["kind"] = given.pop("activation", "swiglu")
        first, second = Projection(weights.w13, weights.bias13, None), Projection(weights.w2, weights.bias2, None)
        rows = BlockScaledTensor(hidden_states, a1q_scale, FP8_BLOCK, None)
        output.copy_(second.product(first.activated(rows, offs, Activation(**given), FP8_BLOCK, None), offs))
