"""Virtual ranks: the "symm" backend's kernels for R ranks on one device, step by step, interpreted or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from padless.distributed.placement import place
from padless.distributed.plan import ExpertPlan
from padless.distributed.row_format import RowFormat
from padless.distributed.settings import Settings
from padless.distributed.symm import MOST_POLLING, SymmBackend
from padless.distributed.symm_state import FEW_SLOTS, HALVED_BYTES, State, allocate_virtual
from padless.formats import FP8_BLOCK
from padless.testing import exchange
from padless.testing.exchange import Problem


@dataclass
class Ranks:
    """R ranks on one device."""

    backends: list[SymmBackend]
    states: list[State]
    settings: list[Settings]
    device: str = "cpu"
    plans: list[ExpertPlan] = field(default_factory=list)

    def dispatch(self, p: Problem, global_scale: torch.Tensor | None = None) -> list:
        given = [[t.to(self.device) for t in parts] for parts in zip(p.tokens, p.ids, p.weights, strict=True)]
        scale = None if global_scale is None else global_scale.to(self.device)
        kept = [b.publish(*g, scale) for b, g in zip(self.backends, given, strict=True)]
        both = [b.receive(ids, scale) for b, ids in zip(self.backends, kept, strict=True)]
        self.plans = [plan for _, plan in both]
        if self.settings[0].sums == "slots":
            self.plans = [plan._replace(weights=g[2]) for plan, g in zip(self.plans, given, strict=True)]
        return [rows for rows, _ in both]

    def redispatch(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        x = [t.to(self.device) for t in x]
        for b, t in zip(self.backends, x, strict=True):
            b.publish_again(t)
        return [b.receive_again(t, plan) for b, t, plan in zip(self.backends, x, self.plans, strict=True)]

    def combine(
        self, rows: list[torch.Tensor], *, weighted: bool, dprob: list | None = None, shared: list | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> list:  # fmt: skip
        for i, (b, plan) in enumerate(zip(self.backends, self.plans, strict=True)):
            given = None if dprob is None else dprob[i].to(self.device)
            b.send_back(rows[i].to(self.device), plan, plan.prob if weighted else None, given)
        return [
            b.finish(
                plan, with_slots=dprob is not None, weighted=weighted,
                shared=None if shared is None else shared[i].to(self.device), out_dtype=out_dtype,
            )
            for i, (b, plan) in enumerate(zip(self.backends, self.plans, strict=True))
        ]  # fmt: skip


def make(
    p: Problem,
    *,
    fmt: object = FP8_BLOCK,
    max_tokens: int | None = None,
    capacity: int | None = None,
    scale_major: str | None = None,
    device: str = "cpu",
    programs: int = 0,
    polls: int = 3,
    timeout: float = 2.0,
    few_slots: int = FEW_SLOTS,
    halved_bytes: int | None = None,
    most_polling: int = MOST_POLLING,
    gradient_format: object = None,
    sums: str = "ranks",
) -> Ranks:
    """Ranks for a problem's sizes. capacity: None is for every slot. halved_bytes: None is as by default where slots
    may be few, and else 0.
    """
    hidden, top_k, num_ranks = p.tokens[0].shape[1], p.ids[0].shape[1], p.num_ranks
    most = max_tokens or max(*(t.shape[0] for t in p.tokens), 1)
    major = scale_major or ("mn" if fmt == FP8_BLOCK else "k")
    settings = [
        Settings(
            rank, num_ranks, len(p.expert_map), hidden, top_k, most,
            RowFormat(fmt, hidden, major), capacity or num_ranks * most * top_k,
            torch.float32 if fmt == torch.float32 else torch.bfloat16, timeout, programs, gradient_format, sums,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    if halved_bytes is None:
        halved_bytes = HALVED_BYTES if few_slots else 0
    states = allocate_virtual(settings, torch.device(device), halved_bytes)
    backends = [
        SymmBackend(
            state,
            s,
            place(len(p.expert_map), num_ranks, s.rank, p.expert_map).to(torch.device(device)),
            polls,
            few_slots,
            most_polling,
        )
        for state, s in zip(states, settings, strict=True)
    ]
    return Ranks(backends, states, settings, device)


def expert_outputs(p: Problem, ranks: Ranks, seed: int) -> list[torch.Tensor]:
    """Random rows for a combine, NaN from the last row on."""
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    for rank, plan in enumerate(ranks.plans):
        used = len(exchange.slots_of(p, rank))
        dtype = ranks.settings[rank].partial
        rows = torch.full((plan.prob.shape[0], p.tokens[0].shape[1]), float("nan"), dtype=dtype)
        rows[:used] = torch.randn((used, rows.shape[1]), generator=generator).to(dtype)
        outputs.append(rows)
    return outputs
