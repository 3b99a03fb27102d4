"""Stand-in for what padless imports of torchtitan 0.3.0, where torchtitan is not installed.

Names and parameters were read in that version; bodies are the least that the tests need. Where torchtitan's own files
can be imported the same tests run on those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from support import stand_in_modules

GROUPED_MM = ["self", "A", "B_t", "offs"]
REGISTERED: dict[str, Any] = {}


class GroupedExperts(nn.Module):
    """Parameters w1, w3 (E, F, D), w2 (E, D, F); the three products go through `_grouped_mm`."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dim: int
        hidden_dim: int
        num_experts: int
        _owner: ClassVar[type | None] = None

        def build(self) -> Any:
            assert self._owner is not None
            return self._owner(self)

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.Config._owner = cls

    def __init__(self, config: Any) -> None:
        super().__init__()
        e, f, d = config.num_experts, config.hidden_dim, config.dim
        self.w1_EFD = nn.Parameter(torch.empty(e, f, d))
        self.w2_EDF = nn.Parameter(torch.empty(e, d, f))
        self.w3_EFD = nn.Parameter(torch.empty(e, f, d))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        x = x_RD.bfloat16()
        w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        h = nn.functional.silu(self._grouped_mm(A=x, B_t=w1, offs=offs)) * self._grouped_mm(A=x, B_t=w3, offs=offs)
        return self._grouped_mm(A=h, B_t=w2, offs=offs).type_as(x_RD)

    def _grouped_mm(self, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch._grouped_mm(A, B_t, offs=offs)
        return result


GroupedExperts.Config._owner = GroupedExperts


class LocalTokenDispatcher:
    """Rows of one rank's tokens by expert, and their weighted sums."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Any) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k

    def dispatch(
        self, x_TD: Any, topk_scores_TK: Any, topk_expert_ids_TK: Any, num_local_tokens_per_expert_E: Any
    ) -> Any:
        order = torch.argsort(topk_expert_ids_TK.view(-1), stable=True)
        plan = (order // self.top_k, topk_scores_TK.view(-1)[order])
        return x_TD[plan[0]], num_local_tokens_per_expert_E, plan

    def combine(self, routed_output_RD: Any, metadata: Any, x_TD: Any) -> Any:
        tokens, scores = metadata
        return torch.zeros_like(x_TD).index_add(0, tokens, (routed_output_RD.float() * scores[:, None]).to(x_TD.dtype))


class BaseEPTokenDispatcher(LocalTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        pass

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ep_mesh = None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Initialize backend communication buffers, if any."""


def override(*, target: type, description: str = "") -> Callable[[Any], Any]:
    def register(factory: Any) -> Any:
        REGISTERED[f"{factory.__module__}.{factory.__name__}"] = (target, factory)
        return factory

    return register


def derive(source: Any, target_cls: Any, **deltas: Any) -> Any:
    shared = {f.name: getattr(source, f.name) for f in fields(target_cls) if hasattr(source, f.name)}
    return target_cls(**(shared | deltas))


def install(patch: pytest.MonkeyPatch) -> None:
    """Puts the stand-in into sys.modules."""
    contents: dict[str, dict[str, Any]] = {
        "torchtitan.config.override": {"override": override, "derive": derive},
        "torchtitan.models.common.moe": {"GroupedExperts": GroupedExperts},
        "torchtitan.models.common.token_dispatcher": {
            "BaseEPTokenDispatcher": BaseEPTokenDispatcher,
            "LocalTokenDispatcher": LocalTokenDispatcher,
        },
    }
    stand_in_modules.put(patch, contents)
