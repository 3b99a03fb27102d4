"""Exchange by torch.distributed's collectives: the definition, on gloo and NCCL.

An all_gather of ids and weights, an all_to_all of each token's record once for every rank that it goes to, and back an
all_to_all of partial sums, or of the rows of slots. The numbers of records are read on the host, so this backend waits
for a GPU and cannot be captured in a CUDA graph. Everything travels as bytes: gloo refuses one-byte floats and 16-bit
integers.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from padless.distributed.placement import Placement
from padless.distributed.plan import ExpertPlan, sort_slots
from padless.distributed.row_format import as_bytes
from padless.distributed.settings import Settings
from padless.formats import BlockScaledTensor
from padless.moe import ops
from padless.reference.gemm import round_to

Rows = BlockScaledTensor | torch.Tensor


class CollectiveBackend:
    """Dispatch and combine of checked arguments. One call at a time on all ranks, in one order."""

    name = "collective"

    def __init__(self, group: dist.ProcessGroup, settings: Settings, placement: Placement) -> None:
        self._group, self._settings, self._placement = group, settings, placement

    # --- forward -------------------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        problem: str | None = None,
    ) -> tuple[Rows, ExpertPlan]:
        """Rows and plan. problem: a sentence that all ranks raise, in the place of tokens, ids and weights."""
        s = self._settings
        table, gathered = self._all_ids(ids, weights, problem)
        own = table[s.rank, : 0 if ids is None else ids.shape[0]]
        ranks = self._ranks_of(table)
        counts = [int((ranks == r).sum()) for r in range(s.num_ranks)]
        capacity = max(counts[s.rank], 1) if s.capacity == "exact" else int(s.capacity)
        if s.capacity != "exact":
            for r, needed in enumerate(counts):
                if needed > capacity:
                    raise ValueError(
                        f"capacity is {capacity} rows and rank {r} receives {needed}; give a larger capacity or None"
                    )
        local = torch.where(ranks == s.rank, self._placement.local_index[table.clamp(min=0).long()], -1)
        offs, inverse, _ = sort_slots(local.view(-1, s.top_k), len(self._placement.local_experts))
        plan = ExpertPlan(
            offs,
            torch.zeros(capacity, dtype=torch.float32, device=table.device),
            inverse,
            own.to(torch.int32).contiguous(),
            torch.zeros((), dtype=torch.int32, device=table.device),
        )
        kept = inverse >= 0
        plan.prob[inverse[kept].long()] = gathered.view(-1, s.top_k)[kept]
        assert tokens is not None
        records = self._send(s.row_format.records(tokens, global_scale), plan)
        return s.row_format.rows(self._fan_out(records, plan), global_scale), plan

    def redispatch(self, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """Rows of x (T, H), by the plan of an earlier dispatch, as they are or through the gradients' format."""
        row_format = self._settings.gradient_rows(x)
        records = self._send(row_format.records(x, None), plan)
        return row_format.values(self._fan_out(records, plan), x.dtype)

    def combine(
        self,
        rows: torch.Tensor,
        plan: ExpertPlan,
        prob: torch.Tensor | None,
        dprob: torch.Tensor | None,
        shared: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(sums (T, H), values of dprob by slot (T, k) or None)."""
        s = self._settings
        if s.sums == "slots":
            weights = None if prob is None else plan.weights
            return self._combine_slots(rows, plan, weights, dprob, shared, out_dtype or s.partial)
        inverse, sources = self._present(plan)
        slots = inverse.clamp(min=0).long()
        weights = None if prob is None else prob[slots]
        partial = ops.call("combine", rows, inverse, weights, None, s.partial)
        back = as_bytes(partial)
        if dprob is not None:
            by_slot = torch.where(inverse >= 0, dprob.to(torch.float32)[slots], 0.0)
            back = torch.cat([back, as_bytes(by_slot)], dim=1)
        lists = self._lists(plan)
        received = self._all_to_all(back, sources, [len(tokens) for tokens in lists])
        total = torch.zeros((plan.ids.shape[0], s.hidden), dtype=torch.float32, device=rows.device)
        dweights = torch.zeros(plan.ids.shape, dtype=torch.float32, device=rows.device)
        first, size = 0, s.hidden * s.partial.itemsize
        for tokens in lists:
            part = received[first : first + len(tokens)]
            total[tokens] += part[:, :size].contiguous().view(s.partial).view(-1, s.hidden).to(torch.float32)
            if dprob is not None:
                dweights[tokens] += part[:, size:].contiguous().view(torch.float32).view(-1, s.top_k)
            first += len(tokens)
        return round_to(total, s.partial), None if dprob is None else dweights

    def _combine_slots(
        self,
        rows: torch.Tensor,
        plan: ExpertPlan,
        weights: torch.Tensor | None,
        dprob: torch.Tensor | None,
        shared: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine` at home: the rows of a token's slots come back as they are, and are one process' operands there."""
        s = self._settings
        here = plan.inverse >= 0
        sends = here.view(s.num_ranks, -1).sum(dim=1).tolist()
        sent = plan.inverse[here].long()
        back = as_bytes(rows[sent])
        if dprob is not None:
            back = torch.cat([back, as_bytes(dprob.to(torch.float32)[sent, None])], dim=1)
        ranks = self._ranks_of(plan.ids)
        masks = [ranks == r for r in range(s.num_ranks)]
        receives = [int(mask.sum()) for mask in masks]
        received = self._all_to_all(back, sends, receives)
        inverse, first = torch.full_like(plan.ids, -1), 0
        for mask, count in zip(masks, receives, strict=True):  # a rank's rows come by token and slot
            inverse[mask] = torch.arange(first, first + count, dtype=torch.int32, device=rows.device)
            first += count
        size = s.hidden * s.partial.itemsize
        values = received[:, :size].contiguous().view(s.partial).view(-1, s.hidden)
        out = ops.call("combine", values, inverse, weights, shared, out_dtype)
        if dprob is None:
            return out, None
        of_rows = received[:, size:].contiguous().view(torch.float32).view(-1)
        by_slot = torch.zeros(plan.ids.shape, dtype=torch.float32, device=rows.device)
        by_slot[inverse >= 0] = of_rows[inverse[inverse >= 0].long()]
        return out, by_slot

    def check(self) -> None:
        """Nothing is found out late here: `dispatch` raises."""

    # --- parts ---------------------------------------------------------------------------------------------

    def _all_ids(
        self, ids: torch.Tensor | None, weights: torch.Tensor | None, problem: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids (R, Tmax, k) int32, -1 for none; weights float32) of all ranks. Raises on all ranks or on none."""
        s = self._settings
        size = s.max_tokens * s.top_k
        mine = torch.full((2 * size + 1,), -1, dtype=torch.int32, device=self._placement.rank_of.device)
        if ids is not None and weights is not None:
            mine[0] = ids.shape[0]
            mine[1 : 1 + ids.numel()] = ids.clamp(-1, s.num_experts).reshape(-1).to(torch.int32)
            values = weights.detach().to(torch.float32).contiguous().reshape(-1).view(torch.int32)
            mine[1 + size : 1 + size + values.numel()] = values
        every = [torch.empty_like(mine) for _ in range(s.num_ranks)]
        dist.all_gather(every, mine, group=self._group)
        if problem is not None:
            raise ValueError(problem)
        all_ranks = torch.stack(every)
        failed = (all_ranks[:, 0] < 0).nonzero()
        if len(failed):
            raise ValueError(f"rank {int(failed[0])} was given wrong arguments; its own error says which")
        table = all_ranks[:, 1 : 1 + size].view(s.num_ranks, s.max_tokens, s.top_k)
        bad = (table >= s.num_experts).nonzero()
        if len(bad):
            raise ValueError(
                f"ids of rank {int(bad[0, 0])} hold a value at token {int(bad[0, 1])} that is no expert; they must be "
                f"below {s.num_experts}, or negative for none"
            )
        return table, all_ranks[:, 1 + size :].contiguous().view(torch.float32)

    def _ranks_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank of each id's expert, -1 for negative ids."""
        return torch.where(ids >= 0, self._placement.rank_of[ids.clamp(min=0).long()], -1)

    def _lists(self, plan: ExpertPlan) -> list[torch.Tensor]:
        """For every rank, this rank's tokens that go there, in order."""
        ranks = self._ranks_of(plan.ids)
        return [(ranks == r).any(dim=1).nonzero().view(-1) for r in range(self._settings.num_ranks)]

    def _present(self, plan: ExpertPlan) -> tuple[torch.Tensor, list[int]]:
        """(inverse of the tokens that have a row here, in order; their numbers by source rank)."""
        here = (plan.inverse >= 0).any(dim=1)
        counts = here.view(self._settings.num_ranks, -1).sum(dim=1).tolist()
        return plan.inverse[here].contiguous(), counts

    def _send(self, records: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """The records of all tokens that have a row here, by source rank and token."""
        lists = self._lists(plan)
        _, counts = self._present(plan)
        return self._all_to_all(records[torch.cat(lists)], [len(tokens) for tokens in lists], counts)

    def _fan_out(self, records: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """Every record at all of its rows; zeros behind the last."""
        inverse, _ = self._present(plan)
        out = torch.zeros((plan.prob.shape[0], records.shape[1]), dtype=torch.uint8, device=records.device)
        for j in range(inverse.shape[1]):
            kept = inverse[:, j] >= 0
            out[inverse[kept, j].long()] = records[kept]
        return out

    def _all_to_all(self, rows: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        out = torch.empty((sum(receives), rows.shape[1]), dtype=torch.uint8, device=rows.device)
        dist.all_to_all_single(out, rows.contiguous(), receives, sends, group=self._group)
        return out
