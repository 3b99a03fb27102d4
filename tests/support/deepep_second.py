"""DeepEP's `ElasticBuffer` over gloo, for tests of `padless.distributed.deepep` where there is none.

It does what version 2 (commit dd758ca) is known to do, and refuses what that is known to hang or stop at: records arrive
in any order within their source's part of the host, another one at every dispatch; what lies behind them is stale; a
cached dispatch keeps the order of its handle; a token's sums are added in the order of its slots, one a rank, up to two
of them in bfloat16, else in float32, and with several hosts and multiple reductions once a host before.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

STALE = 0x7FC07FC1  # as bfloat16 NaN, as an index far outside


class ElasticBuffer:
    def __init__(
        self,
        group: Any,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        allow_multiple_reduction: bool = True,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        ranks_per_host: int = 1,
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.most, self.hidden, self.top_k = num_max_tokens_per_rank, hidden, num_topk
        self.reduces_twice, self.ranks_per_host = allow_multiple_reduction, ranks_per_host
        assert isinstance(num_cpu_timeout_secs, int)
        assert isinstance(num_gpu_timeout_secs, int)
        self.calls = 0

    def _gathered(self, value: Any) -> list[Any]:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value, group=self.group)
        return every

    def dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor | None = None, topk_weights: torch.Tensor | None = None, *,
        num_experts: int | None = None, num_max_tokens_per_rank: int | None = None, expert_alignment: int | None = None,
        num_sms: int = 0, handle: Any = None, do_cpu_sync: bool | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert num_sms or num_experts is not None, "the number of SMs is chosen by num_experts"
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] <= self.hidden
        assert x.shape[1] * 2 % 32 == 0
        assert 0 < len(x) <= self.most, "hangs without tokens"
        if handle is None:
            handle = self._handle(x, topk_idx, num_experts, num_max_tokens_per_rank)
        else:
            assert topk_idx is None
            assert not do_cpu_sync
        every = self._gathered(x)
        records = torch.full((self.size * self.most, x.shape[1] // 2), STALE, dtype=torch.int32).view(torch.bfloat16)
        for w, (source, token) in enumerate(handle.received):
            records[w] = every[source][token]
        return records, None, None, handle, None

    def _handle(self, x: torch.Tensor, topk_idx: Any, num_experts: Any, most: Any) -> Any:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.shape == (len(x), self.top_k)
        assert most == self.most
        assert num_experts % self.size == 0
        assert num_experts <= 2048
        local = num_experts // self.size
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.calls + self.rank)
        received = []
        for source, ids in enumerate(self._gathered(topk_idx)):
            assert int(ids.max()) < num_experts
            mine = torch.where(ids // local == self.rank, ids, -1)
            tokens = (mine >= 0).any(dim=1).nonzero()[:, 0]
            for t in tokens[torch.randperm(len(tokens), generator=generator)].tolist():
                here = mine[t][mine[t] >= 0]
                assert len(here.unique()) == len(here), "stops at an id that occurs twice"
                received.append((source, t))
        # Of the ranks that share a place on their hosts, one after the other: sources of several hosts are mixed.
        received.sort(key=lambda at: at[0] % self.ranks_per_host)
        metadata = torch.full((self.size * self.most, 2 + self.top_k), STALE, dtype=torch.int32)
        metadata[: len(received), 0] = torch.tensor([s * self.most + t for s, t in received], dtype=torch.int32)
        places = [sum(s % self.ranks_per_host <= p for s, _ in received) for p in range(self.ranks_per_host)]
        return SimpleNamespace(
            topk_idx=topk_idx.clone(), num_experts=num_experts, num_sms=24, recv_src_metadata=metadata,
            received=received, psum_num_recv_tokens_per_scaleup_rank=torch.tensor(places, dtype=torch.int32),
        )  # fmt: skip

    def combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[0] == self.size * self.most
        assert x.shape[1] % 256 == 0
        assert x.shape[1] <= self.hidden
        assert topk_weights is None or (topk_weights.dtype == torch.float32 and topk_weights.is_contiguous())
        parts = self._gathered((x, topk_weights, handle.received))
        rows: list[dict[int, int]] = [
            {t: w for w, (source, t) in enumerate(part[2]) if source == self.rank} for part in parts
        ]
        out = torch.zeros((len(handle.topk_idx), x.shape[1]), dtype=torch.bfloat16)
        weights = torch.zeros(handle.topk_idx.shape)
        for t, ids in enumerate(handle.topk_idx.tolist()):
            ranks = [e // (handle.num_experts // self.size) for e in ids]
            out[t] = self._sum({r: parts[r][0][rows[r][t]] for r in ranks if r >= 0}, x.shape[1])
            for j, r in enumerate(ranks):
                if r >= 0 and topk_weights is not None:
                    weights[t, j] = parts[r][1][rows[r][t], j]
        return out, None if topk_weights is None else weights, None

    def _sum(self, values: dict[int, torch.Tensor], hidden: int) -> torch.Tensor:
        if self.reduces_twice:
            hosts: dict[int, dict[int, torch.Tensor]] = {}
            for r, value in values.items():
                hosts.setdefault(r // self.ranks_per_host, {})[r] = value
            return added([added(list(of_host.values()), hidden) for of_host in hosts.values()], hidden)
        return added(list(values.values()), hidden)


def added(values: list[torch.Tensor], hidden: int) -> torch.Tensor:
    """The sum in DeepEP's arithmetic."""
    if len(values) <= 2:
        total = torch.zeros(hidden, dtype=torch.bfloat16)
        for value in values:
            total = total + value
        return total
    exact = torch.zeros(hidden)
    for value in values:
        exact = exact + value.float()
    return exact.to(torch.bfloat16)
