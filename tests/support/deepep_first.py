"""DeepEP's first version as its caller sees it, over gloo: what `padless.bench.cases.ep.deepep` is tested with.

As in v1.2.1: a token comes once, by source rank and token; ids are those of the receiver's own experts and -1 for
others; with num_worst_tokens there is no list of counts, and rows behind the last are garbage with ids of -1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Config(NamedTuple):
    num_sms: int
    send_tokens: int
    recv_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self.num_sms * self.recv_tokens * hidden_bytes * num_ranks


class Buffer:
    """planted: a bug to have, "lost" (a token's slot) or "again" (a token's sum counted twice)."""

    planted = ""

    def __init__(self, group: Any, num_nvl_bytes: int) -> None:
        assert num_nvl_bytes > 0
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def get_dispatch_layout(self, ids: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert ids.dtype == torch.int64
        ranks = ids // (num_experts // self.size)
        is_in = torch.stack([(ranks == r).any(dim=1) for r in range(self.size)], dim=1)
        by_expert = torch.bincount(ids.flatten(), minlength=num_experts).to(torch.int32)
        return is_in.sum(dim=0, dtype=torch.int32), None, by_expert, is_in, None

    def dispatch(
        self, x: tuple[torch.Tensor, torch.Tensor], *, num_tokens_per_rank: torch.Tensor, is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_worst_tokens: int,
        config: Config,
    ) -> tuple[Any, ...]:  # fmt: skip
        codes, scale = x
        assert topk_weights.dtype == scale.dtype == torch.float32
        assert torch.equal(num_tokens_per_rank.long(), is_token_in_rank.sum(dim=0))
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, (codes.view(torch.uint8), scale, topk_idx, topk_weights, is_token_in_rank))
        kept = [part[4][:, self.rank] for part in every]
        parts = [torch.cat([part[i][k] for part, k in zip(every, kept, strict=True)]) for i in range(4)]
        local = len(num_tokens_per_expert) // self.size
        mine = parts[2] // local == self.rank
        if self.planted == "lost":
            mine[0, mine[0].nonzero()[0]] = False
        ids = torch.where(mine, parts[2] - self.rank * local, -1)
        weights = torch.where(mine, parts[3], 0.0)
        tail = num_worst_tokens - len(ids)
        assert tail >= 0
        filled = [
            torch.cat([t, torch.full((tail, t.shape[1]), fill, dtype=t.dtype)])
            for t, fill in ((parts[0], 0x7F), (parts[1], torch.nan), (ids, -1), (weights, torch.nan))
        ]
        return (filled[0].view(codes.dtype), filled[1]), filled[2], filled[3], [], (kept, config.num_sms), None

    def combine(self, x: torch.Tensor, handle: Any, *, config: Config) -> tuple[Any, ...]:
        kept, sms = handle
        assert sms == config.num_sms, "a plan goes with the number of SMs that made it"
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, (x, kept))
        out = torch.zeros((len(kept[self.rank]), x.shape[1]))
        for rows, theirs in every:
            first = sum(int(k.sum()) for k in theirs[: self.rank])
            there = theirs[self.rank]
            out[there] += rows[first : first + int(there.sum())].float() * (2 if self.planted == "again" else 1)
        return out.to(torch.bfloat16), None, None
