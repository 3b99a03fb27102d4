"""Stand-in for what padless' experts import of vLLM 0.33.0, where vLLM is not installed.

Names, parameters and defaults were read in that version; bodies are the least that the tests need. Where vLLM's own
files can be imported (.peers/vllm on PYTHONPATH, see docs/frameworks.md) the same tests run on those, and
`test_the_stand_in_is_like_vllm` compares both.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import stand_in_modules
from support.moe_layer_problem import Layer

# Parameters of what PadlessExperts overrides, as vLLM calls it.
PARAMETERS = {
    "activation_format": [],
    "workspace_shapes": [
        *("self", "M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta"),
        "activation",
    ],
    "finalize_weight_and_reduce_impl": ["self"],
    "apply": [
        *("self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation"),
        *("global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2"),
        *("expert_tokens_meta", "apply_router_weight_on_input"),
    ],
    "_supports_current_device": [],
    "_supports_no_act_and_mul": [],
    "_supports_quant_scheme": ["weight_key", "activation_key"],
    "_supports_activation": ["activation"],
    "_supports_parallel_config": ["moe_parallel_config"],
    "_supports_batch_invariance": [],
}
# Parameters of what PadlessPrepareAndFinalize overrides.
EXCHANGE = {
    "prepare": [
        *("self", "a1", "topk_weights", "topk_ids", "num_experts", "expert_map", "apply_router_weight_on_input"),
        *("quant_config", "defer_input_quant"),
    ],
    "finalize": [
        *("self", "output", "fused_expert_output", "topk_weights", "topk_ids", "apply_router_weight_on_input"),
        "weight_and_reduce_impl",
    ],
    "topk_indices_dtype": ["self"],
    "max_num_tokens_per_rank": ["self"],
    "num_dispatchers": ["self"],
    "output_is_reduced": ["self"],
}
ACTIVATIONS = {
    "SILU": "silu",
    "GELU": "gelu",
    "GELU_TANH": "gelu_tanh",
    "RELU2": "relu2",
    "SWIGLUOAI": "swigluoai",
    "SITU": "situ",
    "SWIGLUOAI_UNINTERLEAVE": "swigluoai_uninterleave",
    "SWIGLUSTEP": "swiglustep",
    "SILU_NO_MUL": "silu_no_mul",
    "GELU_NO_MUL": "gelu_no_mul",
    "GELU_TANH_NO_MUL": "gelu_tanh_no_mul",
    "RELU2_NO_MUL": "relu2_no_mul",
}
ALL2ALL = ("use_all2all_kernels", "use_ag_rs_all2all_kernels", "use_deepep_ht_kernels", "use_passthrough_all2all")
_LAYERS = "vllm.model_executor.layers"
MoEActivation = Enum("MoEActivation", ACTIVATIONS)  # type: ignore[misc]
FusedMoEActivationFormat = Enum("FusedMoEActivationFormat", ["Standard", "BatchedExperts"])


@dataclass
class ApplyMoEActivationConfig:
    clamp_limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0

    @classmethod
    def from_configs(cls, moe_config: Any, quant_config: Any) -> ApplyMoEActivationConfig:
        def first(name: str, default: float | None = None) -> Any:
            found = (getattr(quant_config, f"gemm1_{name}"), getattr(moe_config, f"swiglu_{name.split('_')[-1]}"))
            return next((value for value in found if value is not None), default)

        return cls(first("clamp_limit"), first("alpha", 1.0), first("beta", 0.0))


@dataclass
class FusedMoEParallelConfig:
    use_all2all_kernels: bool = False
    use_ag_rs_all2all_kernels: bool = False
    use_deepep_ht_kernels: bool = False
    use_passthrough_all2all: bool = False

    @classmethod
    def make_no_parallel(cls) -> FusedMoEParallelConfig:
        return cls()


@dataclass
class QuantConfig:
    w1_scale: torch.Tensor
    w2_scale: torch.Tensor
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    block_shape: list[int] | None = None
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None


class FusedMoEConfig:
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class FusedMoEExpertsModular(ABC):
    def __init__(
        self, moe_config: Any, quant_config: Any, max_num_tokens: int | None = None, num_dispatchers: int | None = None
    ) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config
        self.activation_config = ApplyMoEActivationConfig.from_configs(moe_config, quant_config)

    @abstractmethod
    def apply(self, *arguments: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name in ("w1_scale", "w2_scale", "w1_bias", "w2_bias"):
            return getattr(self.quant_config, name)
        raise AttributeError(name)


class FusedMoEPrepareAndFinalizeModular(ABC):
    @abstractmethod
    def prepare(self, *arguments: Any) -> Any: ...

    @abstractmethod
    def finalize(self, *arguments: Any) -> None: ...


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None


class Platform:
    capability: tuple[int, int] | None = None

    def is_cuda(self) -> bool:
        return self.capability is not None

    def is_cpu(self) -> bool:
        return False

    def is_unspecified(self) -> bool:
        return not self.is_cuda()

    def get_device_capability(self) -> Any:
        return self.capability and SimpleNamespace(major=self.capability[0], minor=self.capability[1])


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in into sys.modules."""
    moe = f"{_LAYERS}.fused_moe"
    contents: dict[str, dict[str, Any]] = {
        "vllm.platforms": {"current_platform": Platform()},
        f"{moe}.modular_kernel": {
            "FusedMoEExpertsModular": FusedMoEExpertsModular,
            "FusedMoEActivationFormat": FusedMoEActivationFormat,
            "FusedMoEPrepareAndFinalizeModular": FusedMoEPrepareAndFinalizeModular,
            "ExpertTokensMetadata": ExpertTokensMetadata,
            "TopKWeightAndReduce": object,
        },
        f"{moe}.activation": {"MoEActivation": MoEActivation, "ApplyMoEActivationConfig": ApplyMoEActivationConfig},
        f"{moe}.config": {
            "FusedMoEParallelConfig": FusedMoEParallelConfig,
            "FusedMoEConfig": FusedMoEConfig,
            "RoutingMethodType": Enum("RoutingMethodType", ["Renormalize"]),
            "fp8_w8a8_moe_quant_config": QuantConfig,
            "mxfp4_w4a16_moe_quant_config": QuantConfig,
        },
        f"{moe}.topk_weight_and_reduce": {"TopKWeightAndReduceNoOP": type("TopKWeightAndReduceNoOP", (), {})},
        f"{_LAYERS}.quantization.utils.quant_utils": {
            "QuantKey": str,
            "kFp8Dynamic128Sym": "kFp8Dynamic128Sym",
            "kFp8Static128BlockSym": "kFp8Static128BlockSym",
            "kMxfp4Static": "kMxfp4Static",
            "kMxfp4Dynamic": "kMxfp4Dynamic",
        },
    }
    stand_in_modules.put(patch, contents)


def moe_config(layer: Layer, activation: str, **more: Any) -> Any:
    """FusedMoEConfig of a layer, vLLM's or the stand-in's."""
    moe = "vllm.model_executor.layers.fused_moe"
    config, kinds = importlib.import_module(f"{moe}.config"), importlib.import_module(f"{moe}.activation")
    experts = layer.w13.data.shape[0]
    fields = {
        "num_experts": experts,
        "experts_per_token": layer.ids.shape[1],
        "hidden_dim": layer.x.shape[1],
        "intermediate_size": layer.w2.logical_shape[2],
        "num_local_experts": experts,
        "num_logical_experts": experts,
        "activation": kinds.MoEActivation[activation],
        "device": "cpu",
        "routing_method": config.RoutingMethodType.Renormalize,
        "moe_parallel_config": config.FusedMoEParallelConfig.make_no_parallel(),
        "in_dtype": torch.bfloat16,
    }
    return config.FusedMoEConfig(**(fields | more))


@contextmanager
def in_place() -> Iterator[None]:
    """The stand-in where vLLM is not installed; padless' plug-in, imported meanwhile, is forgotten behind it."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("vllm") is None:
            install(patch)
        yield
        for name in [name for name in sys.modules if name.startswith("padless.integrations.vllm")]:
            del sys.modules[name]
