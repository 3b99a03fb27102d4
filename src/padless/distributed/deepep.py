"""Exchange by DeepEP's `ElasticBuffer` (github.com/deepseek-ai/DeepEP, version 2): GPUs of several hosts.

DeepEP moves opaque rows and adds sums; what is defined here stays defined. A token travels once to a rank as one record:
codes, scales, ids and weights. Records arrive in any order, each with the number of its token, and are sorted as by all
backends. In the place of experts DeepEP is given the slots of ranks, k of each: so ids may occur twice, experts may lie
anywhere, and its sums at the origin are in the order of ranks, in one float32 reduction. That differs from the
other backends in nothing but the sign of a zero, where two sums are both -0.

Facts of DeepEP as of its commit dd758ca: a token's slots are added in their order, in float32 where there are more than
two, else in bfloat16, whose one rounding is the same; records behind the received ones are stale; a rank without tokens,
and ids that occur twice, are not safe to give.
"""

from __future__ import annotations

import math
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import pad

from padless.distributed.placement import Placement
from padless.distributed.plan import ExpertPlan, sort_slots
from padless.distributed.row_format import as_bytes
from padless.distributed.settings import Settings
from padless.formats import BlockScaledTensor, round_up
from padless.moe import ops

RECORD_MULTIPLE = 128  # bytes
SUM_MULTIPLE = 256  # values of a row that DeepEP adds
MOST_SLOTS = 2048  # R * k, DeepEP's experts
REMEDY = "install DeepEP 2 (github.com/deepseek-ai/DeepEP) on every rank, or use 'collective' or 'auto'"


def is_there() -> bool:
    """Whether deep_ep can be imported; it is not imported."""
    return find_spec("deep_ep") is not None


def fits(s: Settings) -> bool:
    """Whether DeepEP's limits allow the settings."""
    return s.partial == torch.bfloat16 and s.num_ranks * s.top_k <= MOST_SLOTS


def connect(group: dist.ProcessGroup, device: torch.device, s: Settings) -> Any:
    """An `ElasticBuffer` for the settings. Collective. Raises ValueError."""
    if s.partial != torch.bfloat16:
        raise ValueError("fmt is torch.float32, and DeepEP adds bfloat16 alone; use another fmt, or 'collective'")
    if not fits(s):
        raise ValueError(
            f"top_k is {s.top_k} on {s.num_ranks} ranks, and 'deepep' takes up to {MOST_SLOTS} slots of all ranks; use "
            "'collective'"
        )
    if device.type != "cuda":
        raise ValueError(f"backend is 'deepep' and the device {device}; it needs GPUs, use 'collective' or 'auto'")
    if not is_there():
        raise ValueError(f"backend is 'deepep' and deep_ep cannot be imported; {REMEDY}")
    deep_ep = import_module("deep_ep")
    if not hasattr(deep_ep, "ElasticBuffer"):
        raise ValueError(f"backend is 'deepep' and deep_ep has no ElasticBuffer, as before version 2; {REMEDY}")
    seconds = math.ceil(s.timeout)
    return deep_ep.ElasticBuffer(
        group,
        num_max_tokens_per_rank=s.max_tokens,
        hidden=max(record_bytes(s) // 2, round_up(s.hidden, SUM_MULTIPLE)),
        num_topk=s.top_k,
        allow_multiple_reduction=False,
        num_cpu_timeout_secs=seconds,
        num_gpu_timeout_secs=seconds,
    )


def record_bytes(s: Settings) -> int:
    """Bytes of a token's record: codes and scales, k ids, k weights, and whether its rank's ids were wrong."""
    return round_up(s.row_format.record_bytes + 8 * s.top_k + 4, RECORD_MULTIPLE)


class Route(NamedTuple):
    """The rest that a plan's transfers need. W = R * Tmax records.

    handle: DeepEP's. here: (W,) bool, received. sources: (W,) int64, ``source * Tmax + token``, W where not received.
    positions: (C,) int64, the record of each row. order: (W, k) int64, the slots of a token in the order of their ranks.
    """

    handle: Any
    here: torch.Tensor
    sources: torch.Tensor
    positions: torch.Tensor
    order: torch.Tensor


class DeepEpBackend:
    """Dispatch and combine of checked arguments over a buffer that behaves as DeepEP's `ElasticBuffer`."""

    name = "deepep"

    def __init__(self, buffer: Any, settings: Settings, placement: Placement) -> None:
        self._buffer, self._settings, self._placement = buffer, settings, placement
        device = placement.rank_of.device
        self._found = torch.zeros(2, dtype=torch.int32, device=device)  # rows too many; 1 + a rank with wrong ids
        self._seen = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        self._routes: dict[int, tuple[StorageWeakRef, Route]] = {}

    # --- calls ---------------------------------------------------------------------------------------------

    def dispatch(
        self,
        tokens: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        global_scale: torch.Tensor | None,
        problem: str | None = None,
    ) -> tuple[BlockScaledTensor | torch.Tensor, ExpertPlan]:
        if problem is not None:
            raise ValueError(problem)
        assert tokens is not None
        assert ids is not None
        assert weights is not None
        s = self._settings
        own = torch.where(ids < s.num_experts, ids, -1).clamp(min=-1).to(torch.int32)
        is_wrong = (ids >= s.num_experts).any()
        words = [own, weights.to(torch.float32).view(torch.int32), is_wrong.to(torch.int32).repeat(len(ids), 1)]
        given = torch.cat([s.row_format.records(tokens, global_scale), as_bytes(torch.cat(words, dim=1))], dim=1)
        given = pad(given, (0, record_bytes(s) - given.shape[1]))
        sends = self._slots_of_ranks(own)
        records, _, _, handle, _ = self._buffer.dispatch(
            _at_least_one(given, 0).view(torch.bfloat16),
            topk_idx=_at_least_one(sends, -1),
            num_experts=s.num_ranks * s.top_k,
            num_max_tokens_per_rank=s.max_tokens,
            expert_alignment=1,
            do_cpu_sync=False,
        )
        got = records.view(torch.int32)
        first, k = s.row_format.record_bytes // 4, s.top_k
        most = s.num_ranks * s.max_tokens
        number = torch.arange(most, device=got.device)
        here = number < handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        sources = torch.where(here, handle.recv_src_metadata[:, 0].long(), most)
        sent_ids = torch.where(here[:, None], got[:, first : first + k], -1)
        sent_weights = torch.where(here[:, None], got[:, first + k : first + 2 * k], 0).view(torch.float32)
        local = torch.where(sent_ids >= 0, self._placement.local_index[sent_ids.clamp(min=0).long()], -1)
        found = sort_slots(_by_source(local, sources, -1), len(self._placement.local_experts))

        plan = self._plan(found.offs, found.inverse, _by_source(sent_weights, sources, 0.0), own)
        capacity = plan.prob.shape[0]
        of_rows = pad(found.tokens, (0, max(capacity - len(found.tokens), 0)))[:capacity].long()
        positions = _by_source(number[:, None], sources, 0)[:, 0].index_select(0, of_rows)
        route = Route(handle, here, sources.clamp(max=most - 1), positions, self._order(sent_ids))
        self._remember(plan, route)
        was_wrong = torch.where(here & (got[:, first + 2 * k] > 0), sources // s.max_tokens + 1, 0).amax()
        self._note(plan.overflow, torch.where(is_wrong, s.rank + 1, was_wrong))
        rows = got[:, :first].index_select(0, positions).view(torch.uint8)
        return s.row_format.rows(rows, global_scale), plan

    def redispatch(self, x: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        """Rows of x (T, H), by the plan of an earlier dispatch, as they are or through the gradients' format."""
        route = self._route(plan)
        row_format = self._settings.gradient_rows(x)
        given = row_format.records(x, None)
        given = _at_least_one(pad(given, (0, -given.shape[1] % RECORD_MULTIPLE)), 0)
        records = self._buffer.dispatch(
            given.view(torch.bfloat16),
            handle=route.handle,
            num_experts=self._settings.num_ranks * self._settings.top_k,
            num_sms=route.handle.num_sms,
        )[0]
        rows = records.view(torch.int32).index_select(0, route.positions).view(torch.uint8)
        return row_format.values(rows, x.dtype)

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
        s, route = self._settings, self._route(plan)
        inverse = plan.inverse.index_select(0, route.sources)
        inverse = torch.where(route.here[:, None] & (inverse < plan.prob.shape[0]), inverse, -1)
        slots = inverse.clamp(min=0).long()
        partial = ops.call("combine", rows, inverse, None if prob is None else prob[slots], None, s.partial)
        back = None
        if dprob is not None:
            by_slot = torch.where(inverse >= 0, dprob.to(torch.float32)[slots], 0.0)
            back = by_slot.gather(1, route.order)
        padded = pad(partial, (0, -s.hidden % SUM_MULTIPLE)).contiguous()
        out, values, _ = self._buffer.combine(padded, route.handle, topk_weights=back)
        count = plan.ids.shape[0]
        sums = out[:count, : s.hidden].contiguous()
        if values is None:
            return sums, None
        return sums, torch.zeros_like(values[:count]).scatter_(1, self._order(plan.ids), values[:count])

    def check(self) -> None:
        """Raises RuntimeError for what a device found out."""
        overflow, wrong = self._seen.tolist()
        if not overflow and not wrong:
            return
        self._found.zero_()
        self._seen.zero_()
        s = self._settings
        if overflow:
            raise RuntimeError(
                f"capacity is {s.capacity} rows and rank {s.rank} received {overflow} more in an earlier dispatch, "
                "whose results are wrong; give a larger capacity or None"
            )
        raise RuntimeError(
            f"ids of rank {wrong - 1} held a value that is no expert in an earlier dispatch; they must be below "
            f"{s.num_experts}, or negative for none"
        )

    # --- parts ---------------------------------------------------------------------------------------------

    def _order(self, ids: torch.Tensor) -> torch.Tensor:
        """(.., k) int64: the slots in the order of their experts' ranks, those without an expert last."""
        ranks = torch.where(ids >= 0, self._placement.rank_of[ids.clamp(min=0).long()], self._settings.num_ranks)
        return ranks.sort(dim=1, stable=True).indices

    def _slots_of_ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """(T, k) int64, DeepEP's experts: ``rank * k + place`` of the sorted slots, no two alike; -1 for none."""
        order = self._order(ids)
        by_rank = ids.gather(1, order)
        ranks = self._placement.rank_of[by_rank.clamp(min=0).long()].long()
        place = torch.arange(self._settings.top_k, device=ids.device)
        return torch.where(by_rank >= 0, ranks * self._settings.top_k + place, -1)

    def _plan(self, offs: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, own: torch.Tensor) -> ExpertPlan:
        capacity = max(int(offs[-1]), 1) if self._settings.capacity == "exact" else int(self._settings.capacity)
        prob = torch.zeros(capacity + 1, dtype=torch.float32, device=offs.device)
        at = torch.where((inverse >= 0) & (inverse < capacity), inverse, capacity)
        prob.scatter_(0, at.view(-1).long(), weights.view(-1))
        overflow = (offs[-1] - capacity).clamp(min=0)
        return ExpertPlan(offs.clamp(max=capacity), prob[:capacity], inverse, own, overflow)

    def _note(self, overflow: torch.Tensor, wrong: torch.Tensor) -> None:
        """Keeps what the device found for `check`, which waits for nothing."""
        torch.maximum(self._found, torch.stack([overflow, wrong.to(torch.int32)]), out=self._found)
        self._seen.copy_(self._found, non_blocking=True)

    def _remember(self, plan: ExpertPlan, route: Route) -> None:
        """Keeps the route as long as the plan's memory; a plan has tensors only, and autograd makes others of them."""
        self._routes = {key: kept for key, kept in self._routes.items() if not kept[0].expired()}
        storage = StorageWeakRef(plan.inverse.untyped_storage())
        self._routes[storage.cdata] = (storage, route)

    def _route(self, plan: ExpertPlan) -> Route:
        kept = self._routes.get(plan.inverse.untyped_storage()._cdata)
        if kept is None:
            raise ValueError("plan is of another object's dispatch; give the plan that this object's dispatch returned")
        return kept[1]


def _at_least_one(t: torch.Tensor, fill: int) -> torch.Tensor:
    """t, or one row of fill where it has none."""
    return t.contiguous() if len(t) else t.new_full((1, t.shape[1]), fill)


def _by_source(values: torch.Tensor, sources: torch.Tensor, fill: float) -> torch.Tensor:
    """(W, columns) of the records' values, each at its source; those of source W go nowhere."""
    out = values.new_full((len(sources) + 1, values.shape[1]), fill)
    return out.index_copy_(0, sources, values)[:-1]
