"""Experts of prime-rl, DeepSpeed AutoEP and NeMo Automodel: their own files where they can be imported, else stand-ins.

Modules, names, parameters and layouts of weights were read in prime-rl at 559b447, DeepSpeed 0.19.8 and NeMo Automodel
0.7.0; bodies of stand-ins are the least that the tests need.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from support import stand_in_modules

COUNTS = [0, 1, 12, 0]
PLACES = {
    "prime_rl": "prime_rl.trainer.models.layers.moe",
    "deepspeed": "deepspeed.moe.ep_experts",
    "nemo_automodel": "nemo_automodel.components.moe.experts",
}
CALLS = ["prime_rl", "deepspeed", "deepspeed fused", "nemo_automodel"]


@dataclass
class Trainer:
    """An experts module of a trainer, and how its trainer calls it."""

    framework: str
    place: ModuleType
    build: Callable[..., Any]

    @property
    def input_major(self) -> bool:
        return self.framework == "nemo_automodel"

    def experts(self, h: int = 96, i: int = 48, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
        """The module with random weights, of which no expert's product is near zero."""
        module = self.build(h, i, **more).to(dtype)
        generator = torch.Generator().manual_seed(h + i)
        with torch.no_grad():
            for p in module.parameters():
                fan = p.shape[1] if self.input_major else p.shape[2]
                p.copy_(torch.randn(p.shape, generator=generator) / fan**0.5)
        return module

    def call(self, module: Any, x: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        """out (R, H) of rows (R, H) sorted by expert, of which those behind COUNTS are in none."""
        if not self.input_major:
            return module(x, torch.tensor(COUNTS, device=x.device))
        ids = torch.arange(len(COUNTS)).repeat_interleave(torch.tensor(COUNTS))
        mask = torch.arange(len(x)) < sum(COUNTS)
        return module(x, mask, prob[:, None], torch.cat((ids, ids.new_zeros(len(x) - len(ids))))[:, None])

    def weights(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """(w13, w2), gate before up, of parameters or gradients by their names."""
        if self.input_major:
            return tensors["gate_and_up_projs"], tensors["down_projs"]
        return torch.cat((tensors["w1"], tensors["w3"]), dim=1), tensors["w2"]


def trainer(name: str, patch: pytest.MonkeyPatch) -> Trainer:
    """One of CALLS; what the test replaces is put back with the patch."""
    framework, _, variant = name.partition(" ")
    if framework == "prime_rl":
        _names_around_prime_rl(patch)
    if find_spec(framework) is None:
        stand_in_modules.put(patch, {PLACES[framework]: _STAND_INS[framework]})
    place = import_module(PLACES[framework])
    for function, value in vars(place).copy().items():
        if "experts" in function and callable(value):
            patch.setattr(place, function, value)

    def build(h: int, i: int, **more: Any) -> Any:
        e = len(COUNTS)
        if framework == "nemo_automodel":
            config = {
                "n_routed_experts": e, "expert_dim": h, "moe_inter_dim": i, "dtype": torch.bfloat16, "swiglu_limit": 0.0,
                "expert_bias": False, "expert_activation": "swiglu", "apply_router_weight_after_down": False,
            }  # fmt: skip
            backend = SimpleNamespace(experts="torch_mm", compile_router_weight=False)
            return place.GroupedExperts(SimpleNamespace(**(config | more)), backend)
        if framework == "prime_rl":
            return place.GroupedExperts(h, i, e, use_grouped_mm=True, **more)
        return place.GroupedExperts(h, i, e, gate_up_impl="fused" if variant else "separate", **more)

    return Trainer(framework, place, build)


def _names_around_prime_rl(patch: pytest.MonkeyPatch) -> None:
    """Of what its experts' file imports: a decorator that pads groups of DTensors, one type, none of its models."""
    spec = find_spec("prime_rl")
    if spec is None or PLACES["prime_rl"] in sys.modules:
        return
    places = [f"{root}/trainer/models" for root in spec.submodule_search_locations or ()]
    contents: dict[str, dict[str, Any]] = {
        "torchtitan": {"__path__": []},
        "torchtitan.distributed": {"__path__": []},
        "torchtitan.distributed.expert_parallel": {"expert_parallel": lambda function: function},
        "prime_rl.trainer.models": {"__path__": places},
        "prime_rl.configs": {"__path__": []},
        "prime_rl.configs.trainer": {"EPCommBackend": str},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        patch.setitem(sys.modules, name, module)


# --- stand-ins -------------------------------------------------------------------------------------------


class _Separate(nn.Module):
    """Gate w1, down w2 and up w3 as parameters, (E, I, H), (E, H, I) and (E, I, H)."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))


def _three_products(w1: Any, w2: Any, w3: Any, x: Any, num_tokens_per_expert: Any) -> Any:
    """torch's grouped products of rows and transposed weights, rounded between."""
    offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    gate, up = (torch._grouped_mm(x, w.to(x.dtype).transpose(-2, -1), offs=offs) for w in (w1, w3))
    return torch._grouped_mm(silu(gate) * up, w2.to(x.dtype).transpose(-2, -1), offs=offs)


def _prime_rl_function(w1: Any, w2: Any, w3: Any, x: Any, num_tokens_per_expert: Any, fp8: bool = False) -> Any:
    return _three_products(w1, w2, w3, x, num_tokens_per_expert)


class _PrimeRl(_Separate):
    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool, fp8: bool = False) -> None:
        super().__init__(dim, hidden_dim, num_experts)

    def forward(self, x: Any, num_tokens_per_expert: Any) -> Any:
        run = sys.modules[PLACES["prime_rl"]]._run_experts_grouped_mm_impl
        return run(self.w1, self.w2, self.w3, x, num_tokens_per_expert)


def _deepspeed_function(
    w1: Any, w2: Any, w3: Any, x: Any, num_tokens_per_expert: Any, activation: str = "swiglu", alpha: float = 1.702,
    limit: float = 7.0,
) -> Any:  # fmt: skip
    return _three_products(w1, w2, w3, x, num_tokens_per_expert)


def _deepspeed_fused_function(
    w1: Any, w2: Any, w3: Any, x: Any, num_tokens_per_expert: Any, activation: str = "swiglu", alpha: float = 1.702,
    limit: float = 7.0,
) -> Any:  # fmt: skip
    offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    w13 = torch.cat((w1.to(x.dtype), w3.to(x.dtype)), dim=1)
    gate, up = torch._grouped_mm(x, w13.transpose(-2, -1), offs=offs).chunk(2, dim=-1)
    return torch._grouped_mm(silu(gate) * up, w2.to(x.dtype).transpose(-2, -1), offs=offs)


class _DeepSpeed(_Separate):
    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, *, activation: str = "swiglu", gate_up_impl: str = "separate"
    ) -> None:
        super().__init__(dim, hidden_dim, num_experts)
        self.function = "_run_experts_grouped_mm" + ("_fused_gate_up" if gate_up_impl == "fused" else "")
        self.activation = activation

    def forward(self, x: Any, num_tokens_per_expert: Any) -> Any:
        run = getattr(sys.modules[PLACES["deepspeed"]], self.function)
        return run(self.w1, self.w2, self.w3, x, num_tokens_per_expert, self.activation, 1.702, 7.0)


def _weighted_bias_swiglu_impl(input: Any, weights: Any, fp8_input_store: bool = False) -> Any:
    gate, up = input.float().chunk(2, dim=-1)
    return (silu(gate) * up * weights).to(input.dtype)


def _automodel_function(
    hidden_states: Any, gate_and_up_projs: Any, down_projs: Any, tokens_per_expert: Any, permuted_probs: Any,
    activation_fn: Any, use_mxfp8: bool = False,
) -> Any:  # fmt: skip
    offs = tokens_per_expert.cumsum(0).to(torch.int32)
    hidden = activation_fn(torch._grouped_mm(hidden_states, gate_and_up_projs, offs=offs), permuted_probs)
    return torch._grouped_mm(hidden, down_projs, offs=offs)


class _Automodel(nn.Module):
    """Input-major weights (E, H, 2 I) and (E, I, H); takes tokens, sorts them, and sums their rows."""

    def __init__(self, config: Any, backend: Any) -> None:
        super().__init__()
        e, h, i = config.n_routed_experts, config.expert_dim, config.moe_inter_dim
        self.gate_and_up_projs = nn.Parameter(torch.empty(e, h, 2 * i, dtype=config.dtype))
        self.down_projs = nn.Parameter(torch.empty(e, i, h, dtype=config.dtype))
        place = sys.modules[PLACES["nemo_automodel"]]
        self.activation = place.weighted_bias_swiglu_impl if config.swiglu_limit == 0 else torch.mul

    def forward(self, x: Any, token_mask: Any, weights: Any, indices: Any) -> Any:
        e, k = len(self.gate_and_up_projs), indices.shape[1]
        ids = torch.where(token_mask[:, None], indices, e).flatten()
        counts = torch.bincount(ids, minlength=e + 1)[:e]
        slots = ids.argsort(stable=True)[: int(counts.sum())]
        run = sys.modules[PLACES["nemo_automodel"]]._torch_mm_experts_fwd
        w13, w2, prob = (self.gate_and_up_projs.to(x.dtype), self.down_projs.to(x.dtype), weights.float().flatten())
        rows = run(x[slots // k], w13, w2, counts, prob[slots, None], self.activation, use_mxfp8=False)
        return torch.zeros(x.shape).index_add(0, slots // k, rows.float()).to(x.dtype)


_STAND_INS: dict[str, dict[str, Any]] = {
    "prime_rl": {"GroupedExperts": _PrimeRl, "_run_experts_grouped_mm_impl": _prime_rl_function},
    "deepspeed": {
        "GroupedExperts": _DeepSpeed,
        "_run_experts_grouped_mm": _deepspeed_function,
        "_run_experts_grouped_mm_fused_gate_up": _deepspeed_fused_function,
    },
    "nemo_automodel": {
        "GroupedExperts": _Automodel,
        "_torch_mm_experts_fwd": _automodel_function,
        "weighted_bias_swiglu_impl": _weighted_bias_swiglu_impl,
    },
}
