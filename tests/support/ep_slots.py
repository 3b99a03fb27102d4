"""Cases of sums of slots, which `support.ep_cases` runs with its own: the bits of one process, wherever experts are."""

from __future__ import annotations

import pytest
import torch

from padless.distributed import expert_parallel_moe
from padless.moe import combine
from padless.verify.ranks.exchange import Ranks
from padless.verify.ranks.layers import assert_bits, drawn


def functions_of_slots(ranks: Ranks) -> None:
    """`expert_parallel_moe` of a function, weighted and summed at home, and its gradients; what is refused."""
    p, _, _ = drawn(ranks, 91, torch.float32)
    ep = ranks.make(p, fmt=torch.float32, sums="slots")
    x, ids, weight = (t.clone() for t in ranks.own(p))
    x.requires_grad_(), weight.requires_grad_()
    factors = 1.0 + torch.arange(2 * ranks.size, dtype=torch.float32, device=ranks.device)
    mine = factors[list(ep.local_experts)]

    def experts(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        group = torch.searchsorted(offs, torch.arange(len(rows), device=offs.device), right=True)
        return rows * mine[group.clamp(max=len(mine) - 1), None]

    out = expert_parallel_moe(x, ids, weight, ep, experts_fn=experts)
    out.sum().backward()
    slots = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
    rows = (x.detach()[:, None] * factors[ids.clamp(min=0), None]).flatten(0, 1)
    inverse = torch.where(ids >= 0, slots, -1 - slots)
    assert_bits(out.detach(), combine(rows, inverse, weight.detach(), out_dtype=torch.float32), "out")
    kept = torch.where(ids >= 0, factors[ids.clamp(min=0)], 0.0)
    torch.testing.assert_close(x.grad, (kept * weight.detach()).sum(1, keepdim=True).expand(x.shape))
    torch.testing.assert_close(weight.grad, kept * x.detach().sum(1, keepdim=True), rtol=1e-4, atol=1e-4)
    for wrong in ("tokens", None):
        with pytest.raises(ValueError, match=r"sums is .*; allowed: 'ranks', 'slots'"):
            ranks.make(p, fmt=torch.float32, sums=wrong)
    if ranks.backend == "collective":
        with pytest.raises(ValueError, match="sums is 'slots' and backend 'deepep'"):
            ranks.make(p, fmt=torch.bfloat16, sums="slots", backend="deepep")


def batches_in_one_memory(ranks: Ranks) -> None:
    """Two batches are dispatched out of the same tensors before the first is combined, as a server has them."""
    p, _, _ = drawn(ranks, 91, torch.float32)
    for sums in ("ranks", "slots"):
        ep = ranks.make(p, fmt=torch.float32, sums=sums)
        given = [t.clone() for t in ranks.own(p)]
        batches = [[t.flip(0) if turned else t.clone() for t in given] for turned in (False, True)]
        dispatched = []
        for batch in batches:
            for t, values in zip(given, batch, strict=True):
                t.copy_(values)
            dispatched.append(ep.dispatch(*given))
        for batch, (rows, plan) in zip(batches, dispatched, strict=True):
            got = ep.combine(rows, plan, weighted=True)
            alone, its_plan = ep.dispatch(*batch)
            assert_bits(got.detach(), ep.combine(alone, its_plan, weighted=True).detach(), sums)


CASES = {function.__name__: function for function in (functions_of_slots, batches_in_one_memory)}
