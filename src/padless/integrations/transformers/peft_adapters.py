"""PEFT's adapters of `target_parameters` over quantized experts: `use_padless_peft`.

PEFT takes shape and type of an adapter from the parameter and adds B A to it while the module runs. Codes have neither
the weight's shape (FP4 is packed) nor a sum, so that quantized experts get another wrapper: parameters, names
and files are PEFT's, the arithmetic is that of `padless.nn.LoraExperts`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from padless.integrations.transformers.experts import NAME, fused_activation
from padless.integrations.transformers.weights import ADAPTERS, expert_weights, first_projection, is_quantized, label
from padless.moe.activation import Activation
from padless.moe.routing import check_ids
from padless.nn.lora.base import MAX_RANK, format_of_rows
from padless.nn.lora.experts import adapted_experts, routed
from padless.nn.lora.frozen import Frozen
from padless.nn.lora.low_rank import Factors, LowRank


def use_padless_peft() -> None:
    """Makes PEFT adapt quantized experts that padless computes; for all models of the process, and twice is once.

    Then `peft.get_peft_model`, `PeftModel.from_pretrained` and `load_adapter` take ``target_parameters`` of quantized
    experts: ``gate_up_proj`` and ``down_proj``, and for gpt-oss loaded in MXFP4 ``gate_up_proj_blocks`` and
    ``down_proj_blocks``. Adapters have the logical sizes of the weights and are float32; all that are active are added.
    Everything else is PEFT's own. `merge_adapter` and `merge_and_unload` are refused. Raises ImportError without PEFT.
    """
    try:
        from peft.tuners.lora.model import LoraModel
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise
        raise ImportError("adapters of PEFT need PEFT: pip install peft") from error
    stock = LoraModel._create_new_module
    if getattr(stock, "is_padless", False):
        return

    def created(lora_config: Any, adapter_name: str, target: Any, **keywords: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        if keywords.get("parameter_name") is not None and is_quantized(base):
            return _wrapper()(target, adapter_name, config=lora_config, **keywords)
        return stock(lora_config, adapter_name, target, **keywords)

    created.is_padless = True  # type: ignore[attr-defined]
    LoraModel._create_new_module = staticmethod(created)


@cache
def _wrapper() -> Any:
    """PEFT's wrapper of a parameter for quantized experts; PEFT finds wrappers by the name of their class."""
    from peft.tuners.lora.layer import ParamWrapper as Stock

    class ParamWrapper(Stock):  # type: ignore[misc]
        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            del module
            base = self.get_base_layer()
            if fused_activation(base) is None:
                raise ValueError(
                    f"{label(base, self.parameter_name)} is of experts that compute an activation or a norm themselves, "
                    "which adapters are not made for: leave it out of target_parameters"
                )
            weights = expert_weights(base)
            sides = {first_projection(base): weights.w13, "down_proj": weights.w2}
            self.side = self.parameter_name.removesuffix("_blocks")
            if self.side not in sides:
                raise ValueError(
                    f"{label(base, self.parameter_name)} is not a weight of quantized experts; target_parameters can "
                    f"be {' and '.join(sides)}"
                )
            self.num_experts, n, k = sides[self.side].logical_shape
            self._param_ndim = 3
            return n, k  # `update_layer` exchanges them, weights being (E, N, K)

        def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: Any = None) -> None:
            """To the codes' device; the type stays, which for FP8 codes PEFT would make theirs."""
            device = self.get_param().device if device is None else device
            for layers in (self.lora_A, self.lora_B):
                if layers[adapter_name].weight.device.type != "meta":
                    layers[adapter_name].to(device)

        def get_delta_weight(self, adapter_name: str, *args: Any, **keywords: Any) -> torch.Tensor:
            del adapter_name, args, keywords
            raise ValueError(self._not_merged())

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """Raises ValueError: a sum of codes and an adapter would be quantized again."""
            del safe_merge, adapter_names
            raise ValueError(self._not_merged())

        def _not_merged(self) -> str:
            return (
                f"{label(self.get_base_layer(), self.parameter_name)} is quantized, and no adapter is added to its "
                "codes: save the adapter, load it by padless.nn.lora.load_adapter over adapt_experts, and call "
                "padless.nn.lora.merged, which says what quantizing again loses"
            )

        def forward(self, x: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
            self._check_forward_args(x, *args, **keywords)
            keywords.pop("adapter_names", None)
            wrapper: Any = self
            factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
            while isinstance(wrapper, ParamWrapper):
                if (found := wrapper.factors()) is not None:
                    factors[wrapper.side] = found
                wrapper = wrapper.base_layer
            if not factors:
                return wrapper(x, *args, **keywords)  # type: ignore[no-any-return]
            return _adapted(wrapper, factors, x, *args, **keywords)

        def factors(self) -> tuple[torch.Tensor, torch.Tensor] | None:
            """A (E, r, K) and scaling * B (E, N, r), ranks of all active adapters next to one another."""
            names = [] if self.disable_adapters else [n for n in self.active_adapters if n in self.lora_A]
            if not names:
                return None
            a = [self.lora_A[n].weight.unflatten(0, (self.num_experts, -1)) for n in names]
            b = [
                (self.lora_B[n].weight * self.scaling[n]).unflatten(1, (-1, self.num_experts)).permute(2, 0, 1)
                for n in names
            ]
            return torch.cat(a, 1), torch.cat(b, 2)

    return ParamWrapper


def _adapted(
    module: Any,
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]],
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The experts of a module with low-rank factors by projection."""
    asked = getattr(getattr(module, "config", None), "_experts_implementation", NAME)
    if asked != NAME:
        raise ValueError(f"experts_implementation is {asked!r}; adapters of PEFT over quantized experts need {NAME!r}")
    if hasattr(module, ADAPTERS):
        raise ValueError("the experts have adapters of adapt_experts and of PEFT; use one of the two")
    how, weights = fused_activation(module), expert_weights(module)
    assert how is not None, "the wrapper refuses it"
    check_ids(top_k_index, weights.w13.data.shape[0])
    of_rows = format_of_rows(weights.activation_format, weights.w13)
    frozen = Frozen(weights.w13, weights.w2, weights.bias13, weights.bias2, Activation(**how), of_rows)
    (offs, tokens, inverse), read = routed(hidden_states, top_k_index, weights.w13.data.shape[0], frozen)

    def low_rank(side: str) -> LowRank | None:
        if side not in factors:
            return None
        a, b = factors[side]
        if a.shape[1] > MAX_RANK:
            raise ValueError(
                f"the active adapters of {label(module, side)} have a rank of {a.shape[1]} together; at most "
                f"{MAX_RANK} is computed: activate fewer, or adapters of a lower rank"
            )
        return LowRank(Factors((a,), (b,), 1, 1.0), offs)

    return adapted_experts(
        hidden_states, (offs, tokens, inverse), read, top_k_weights, None, frozen,
        low_rank(first_projection(module)), low_rank("down_proj"),
    )  # fmt: skip
