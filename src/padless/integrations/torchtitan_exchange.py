"""torchtitan's tokens between ranks by `padless.distributed`: the override `expert_parallel` of its token dispatcher.

    --override.imports 'padless.integrations.torchtitan_exchange.expert_parallel={"hidden_dim": 7168,
        "num_max_tokens_per_rank": 4096}'

Every expert-parallel dispatcher of a configuration is replaced; the experts between dispatch and combine stay, and may
be those of `padless.integrations.torchtitan`. docs/frameworks.md describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

try:
    import torchtitan as _torchtitan  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torchtitan":
        raise
    raise ImportError(
        "padless.integrations.torchtitan_exchange needs torchtitan 0.3: pip install 'padless[torchtitan]'"
    ) from error

from torchtitan.config.override import derive, override
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher, LocalTokenDispatcher

from padless.distributed import ExpertParallel, ExpertPlan

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

__all__ = ["PadlessTokenDispatcher", "expert_parallel"]


class PadlessTokenDispatcher(BaseEPTokenDispatcher):
    """Tokens by `padless.distributed.ExpertParallel`, differentiable; router weights are applied when rows are summed.

    A token is sent once to a rank. Rows are in bfloat16 (or float32), grouped by expert; those behind the last are
    undefined. Sums are those of `ExpertParallel.combine`, in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        """hidden_dim, num_max_tokens_per_rank: of the tokens that a rank gives. dtype: of rows, "bfloat16" or "float32".
        backend, capacity: as in `ExpertParallel`.
        """

        hidden_dim: int
        num_max_tokens_per_rank: int
        dtype: str = "bfloat16"
        backend: str = "auto"
        capacity: int | str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.dtype not in _DTYPES:
            raise ValueError(f"dtype is {config.dtype!r}; allowed: {', '.join(_DTYPES)}")
        self.config = config
        self.exchange: ExpertParallel | None = None

    def init_buffer(self) -> None:
        """Makes the exchange over the expert-parallel mesh; none where there is one rank. Collective."""
        c = self.config
        self.exchange = None
        if self.ep_mesh is not None:
            self.exchange = ExpertParallel(
                self.ep_mesh, c.num_experts, c.hidden_dim, c.top_k, c.num_max_tokens_per_rank, _DTYPES[c.dtype],
                c.backend, c.capacity,
            )  # fmt: skip

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """(rows (C, D), their numbers by local expert, the plan) of x_TD (T, D), scores (T, K) and ids (T, K)."""
        if self.exchange is None:
            return LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
        rows, plan = self.exchange.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        assert isinstance(rows, torch.Tensor)
        return rows, torch.diff(plan.offs, prepend=torch.zeros_like(plan.offs[:1])), plan

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """(T, D): the weighted sums of the experts' outputs, rows as `dispatch` gave them. metadata: its plan."""
        if self.exchange is None:
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        assert isinstance(metadata, ExpertPlan)
        return self.exchange.combine(routed_output_RD, metadata, weighted=True).to(x_TD.dtype)


@override(
    target=BaseEPTokenDispatcher.Config,
    description="Tokens between expert-parallel ranks without padding, each once a rank",
)
def expert_parallel(config: Any, *, hidden_dim: int, num_max_tokens_per_rank: int, **more: Any) -> Any:
    """The configuration of `PadlessTokenDispatcher` for that of another dispatcher; more: its other fields."""
    return derive(
        config,
        PadlessTokenDispatcher.Config,
        hidden_dim=hidden_dim,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        **more,
    )
