"""torch's bf16 experts over ranks: the exchange that torchtitan and Megatron-Core make of NCCL's all_to_all.

A row is sent for every slot of a token, with its weight: slots sorted by expert, the experts' counts exchanged and read
on the host, all_to_all of rows, rows sorted by expert where they arrive, both grouped products, and the same way back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from padless.bench.cases.train.contenders import TorchExperts, activated, inverse_of


class ExchangedExperts(TorchExperts):
    """`TorchExperts` of which each rank has a run of E / R. Making one is collective: it has its own process group."""

    def __init__(self, num_experts: int, top_k: int, *, compiled: bool) -> None:
        super().__init__(num_experts, top_k, compiled=compiled)
        if compiled:  # every call has another number of rows
            self.activated = torch.compile(activated, dynamic=True)
        self.group = dist.new_group()
        self.ranks = dist.get_world_size()

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, prob: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        """x (T, H), ids and prob (T, k), w13 (E / R, 2 I, H), w2 (E / R, H, I): (T, H)."""
        order, inverse, sizes = self.sorted_slots(ids)
        counts = sizes.to(torch.int64)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        by_rank = [c.view(self.ranks, -1).sum(1) for c in (counts, received)]
        sends, receives = torch.stack(by_rank).tolist()
        local = self.num_experts // self.ranks
        experts = torch.arange(local, device=x.device).repeat(self.ranks)
        sorting = torch.argsort(
            torch.repeat_interleave(experts, received, output_size=sum(receives)), stable=True
        )  # of rows as they arrive, by source and expert
        back = inverse_of(sorting)
        offs = received.view(self.ranks, local).sum(0).cumsum(0).to(torch.int32)

        def arrived(t: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = _Sent.apply(t, sends, receives, self.group)
            rows: torch.Tensor = _Permuted.apply(found, sorting, back)
            return rows

        slots: torch.Tensor = _Permuted.apply(prob.reshape(-1, 1), order, inverse)
        rows, weights = arrived(self.rows(x, order, inverse)), arrived(slots)
        h = self.activated(self.product(rows, w13, offs), weights.view(-1))
        y = _Permuted.apply(self.product(h, w2, offs), back, sorting)
        return self.sums(_Sent.apply(y, receives, sends, self.group), order, inverse)


class _Permuted(torch.autograd.Function):
    """Rows in another order; the backward pass is the inverse, which neither sorts nor adds."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.inverse = inverse
        return t[order]

    @staticmethod
    def backward(ctx: Any, dt: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return dt[ctx.inverse], None, None


class _Sent(torch.autograd.Function):
    """all_to_all of so many rows to each rank and from it; the backward pass sends gradients back."""

    @staticmethod
    def forward(
        ctx: Any, t: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.given = sends, receives, group
        return _all_to_all(t, sends, receives, group)

    @staticmethod
    def backward(ctx: Any, dt: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sends, receives, group = ctx.given
        return _all_to_all(dt, receives, sends, group), None, None, None


def _all_to_all(t: torch.Tensor, sends: list[int], receives: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = t.new_empty((sum(receives), t.shape[1]))
    dist.all_to_all_single(out.view(torch.uint8), t.contiguous().view(torch.uint8), receives, sends, group=group)
    return out
