"""Stand-in for what padless' runner imports of SGLang 0.5.23, where SGLang is not installed.

Names, fields and defaults were read in that version; bodies are the least that the tests need. Where SGLang's own
files can be imported (.peers/sglang on PYTHONPATH, see docs/frameworks.md) the same tests run on those.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import pytest
import torch

from support import stand_in_modules

# Fields of SGLang's configuration that padless reads, with their defaults.
CONFIG = {
    "activation": "silu",
    "is_gated": True,
    "apply_router_weight_on_input": False,
    "no_combine": False,
    "routed_scaling_factor": None,
    "gemm1_alpha": None,
    "gemm1_clamp_limit": None,
    "swiglu_limit": None,
    "gate_up_interleaved": True,
}
QUANT_INFO = ("w13_weight", "w2_weight", "w13_scale", "w2_scale", "b13", "b2")
RUN = ["self", "dispatch_output", "quant_info", "runner_config", "hooks"]
_MOE = "sglang.srt.layers.moe"


class Format(Enum):
    STANDARD = "standard"
    DEEPEP_LL = "deepep_ll"

    def is_standard(self) -> bool:
        return self is Format.STANDARD


class StandardDispatchOutput(NamedTuple):
    hidden_states: torch.Tensor
    hidden_states_scale: Any
    topk_output: Any
    hidden_states_pre_quant: Any = None

    @property
    def format(self) -> Format:
        return Format.STANDARD


class StandardCombineInput(NamedTuple):
    hidden_states: torch.Tensor


class StandardTopKOutput(NamedTuple):
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    router_logits: Any


class MoeRunnerConfig:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(CONFIG | fields)


class DispatchMoeRunnerCore(ABC):
    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def run_from_dispatch(self, *arguments: Any) -> Any: ...


@dataclass(frozen=True)
class RegisteredMoeRunnerBackend:
    value: str


class A2ABackend(Enum):
    NONE = "none"
    DEEPEP = "deepep"

    def is_none(self) -> bool:
        return self is A2ABackend.NONE


class MoeRunner:
    def __init__(self, runner_backend: Any, config: Any) -> None:
        self.runner_backend, self.config = runner_backend, config


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in into sys.modules."""
    contents: dict[str, dict[str, Any]] = {
        f"{_MOE}.moe_runner": {"MoeRunner": MoeRunner},
        f"{_MOE}.moe_runner.base": {"DispatchMoeRunnerCore": DispatchMoeRunnerCore, "MoeRunnerConfig": MoeRunnerConfig},
        f"{_MOE}.token_dispatcher.standard": {
            "StandardDispatchOutput": StandardDispatchOutput,
            "StandardCombineInput": StandardCombineInput,
        },
        f"{_MOE}.topk": {"StandardTopKOutput": StandardTopKOutput},
        f"{_MOE}.utils": {
            "RegisteredMoeRunnerBackend": RegisteredMoeRunnerBackend,
            "get_moe_a2a_backend": lambda: A2ABackend.NONE,
            "get_moe_runner_backend": lambda: RegisteredMoeRunnerBackend("padless"),
        },
    }
    stand_in_modules.put(patch, contents)
