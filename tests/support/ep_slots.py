"""Cases of sums of slots, which `support.ep_cases` runs with its own: the bits of one process, wherever experts are."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from padless.distributed import expert_parallel_moe
from padless.moe import combine, moe
from padless.nn import Experts
from padless.verify.ranks.exchange import Ranks
from support.ep_layers import poison_rows
from support.ep_moe import FORWARD, FP8, HIDDEN, INTERMEDIATE, assert_bits, drawn, quantized


def placements(ranks: Ranks) -> list[list[int]]:
    """Experts by turns, in runs, in no order, and all but one on each rank at the last."""
    n, e = ranks.size, 2 * ranks.size
    mixed = [expert % n for expert in range(e)]
    random.Random(n).shuffle(mixed)
    return [[x % n for x in range(e)], [x * n // e for x in range(e)], mixed, [*range(n), *([n - 1] * (e - n))]]


def sums_of_slots(ranks: Ranks) -> None:
    """moe(ep=) in every format, with shared rows and without: bits of one process; those of sums of ranks are others."""
    every, others = list(range(2 * ranks.size)), []
    for number, (fmt, sent, dtype, given) in enumerate(FORWARD):
        options = dict(given)
        p, weights, shared = drawn(ranks, 60 + number, dtype)
        p.expert_map = placements(ranks)[number % 4]
        here = [e for e in every if p.expert_map[e] == ranks.rank]
        generator = torch.Generator().manual_seed(number)
        by_expert = {}
        if options.pop("bias", False):
            for name, n in (("bias13", 2 * INTERMEDIATE), ("bias2", HIDDEN)):
                by_expert[name] = torch.randn((len(every), n), generator=generator).to(ranks.device)
        for name in ("1", "2"):
            scale = options.pop(f"scale{name}", None)
            if scale == "each":
                values = (torch.rand(len(every), generator=generator) + 0.5) / 50
                by_expert[f"global_scale{name}"] = values.to(ranks.device)
            elif scale is not None:
                options[f"global_scale{name}"] = torch.tensor(scale, device=ranks.device)
        ep, by_ranks = (ranks.make(p, fmt=sent, sums=sums) for sums in ("slots", "ranks"))
        if isinstance(sent, torch.dtype):
            poison_rows(ep)
        x, ids, weight = ranks.own(p)
        if number % 2:
            weight = weight.to(torch.bfloat16)
        whole, mine = (quantized(weights, chosen, fmt, ranks) for chosen in (every, here))
        one = by_expert | options
        part = {name: t[here] for name, t in by_expert.items()} | options
        for more in ({}, {"shared": shared}):
            case = f"{fmt.name} weights, rows in {getattr(sent, 'name', sent)}, {p.expert_map}, {list(more)}"
            want = moe(x, ids, weight, *whole, **one, **more)
            assert_bits(moe(x, ids, weight, *mine, **part, **more, ep=ep), want, case)
            others.append(torch.equal(moe(x, ids, weight, *mine, **part, **more, ep=by_ranks), want))
    if len(x):
        assert not all(others), "sums of ranks would do"


def gradients_of_slots(ranks: Ranks) -> None:
    """Gradients of tokens, router weights and shared rows, of moe(ep=) and of nn.Experts: those of one process."""
    every = list(range(2 * ranks.size))
    for number, dtype in enumerate((torch.bfloat16, torch.float32)):
        p, weights, shared = drawn(ranks, 81 + number, dtype)
        p.expert_map = placements(ranks)[2 + number]
        here = [e for e in every if p.expert_map[e] == ranks.rank]
        ep = ranks.make(p, fmt=dtype, sums="slots")
        poison_rows(ep)
        own = ranks.own(p)
        dout = torch.randn(own[0].shape, generator=torch.Generator().manual_seed(number)).to(own[0])

        def step(layer: Any, own: Any = own, shared: torch.Tensor = shared, dout: Any = dout) -> list[torch.Tensor]:
            given = [t.clone().requires_grad_() for t in (own[0], own[2], shared)]
            out = layer(given[0], own[1], given[1], given[2])
            out.backward(dout)
            return [out.detach(), *(t.grad for t in given)]

        def served(chosen: list[int], weights: Any = weights, **more: Any) -> Any:
            w = quantized(weights, chosen, FP8, ranks)
            return lambda x, ids, weight, rows: moe(x, ids, weight, *w, shared=rows, **more)

        def trained(recipe: str, chosen: list[int], weights: Any = weights, **more: Any) -> Experts:
            made = Experts(HIDDEN, INTERMEDIATE, len(every), recipe=recipe, device=ranks.device, **more)
            with torch.no_grad():
                for parameter, w in zip(made.parameters(), weights, strict=True):
                    parameter.copy_(w[chosen])
            return made

        pairs = [("moe", served(here, ep=ep), served(every))]
        pairs += [(name, trained(name, here, ep=ep), trained(name, every)) for name in ("fp8", "mxfp8", "bf16")]
        for name, over, alone in pairs:
            for what, got, want in zip(("out", "x", "weights", "shared"), step(over), step(alone), strict=True):
                assert_bits(got, want, f"{name}, {dtype}, {p.expert_map}: {what}")


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


CASES = {function.__name__: function for function in (sums_of_slots, gradients_of_slots, functions_of_slots)}
