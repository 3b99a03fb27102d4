"""Cases of `padless.moe.moe` with its experts over ranks, which `support.ep_cases` runs with its own.

What it must equal is made of calls in one process: each with the ids of other ranks' experts taken away, which is a
rank's part of every sum, and the parts added in the order of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK, NVFP4
from padless.moe import Router, moe, topk
from padless.nn import Experts
from padless.testing.exchange import Problem
from padless.verify.ranks.exchange import Ranks
from padless.verify.ranks.layers import (
    FORWARD,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    assert_bits,
    drawn,
    named,
    poison_rows,
    quantized,
)


def parts_of(ids: torch.Tensor, p: Problem) -> list[torch.Tensor]:
    """For every rank the ids of its experts alone, -1 for others."""
    owner = torch.tensor(p.expert_map, device=ids.device)[ids.clamp(min=0)]
    return [torch.where(owner == r, ids, -1) for r in range(p.num_ranks)]


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts' sum in float32, in the order of ranks, in their type."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    return total.to(parts[0].dtype)


def moe_forward(ranks: Ranks) -> None:
    """Bits of one process, in every format, with rows quantized before they are sent and where they arrive."""
    every, here = list(range(2 * ranks.size)), list(range(ranks.rank, 2 * ranks.size, ranks.size))
    for number, (fmt, sent, dtype, given) in enumerate(FORWARD):
        options = dict(given)
        p, weights, shared = drawn(ranks, 20 + number, dtype)
        generator = torch.Generator().manual_seed(number)
        by_expert: dict[str, torch.Tensor] = {}
        if options.pop("bias", False):
            biases = (
                torch.randn((len(every), n), generator=generator).to(ranks.device) for n in (2 * INTERMEDIATE, HIDDEN)
            )
            by_expert |= zip(("bias13", "bias2"), biases, strict=True)
        for name in ("1", "2"):
            scale = options.pop(f"scale{name}", None)
            if scale == "each":
                by_expert[f"global_scale{name}"] = (torch.rand(len(every), generator=generator) + 0.5).to(
                    ranks.device
                ) / 50
            elif scale is not None:
                options[f"global_scale{name}"] = torch.tensor(scale, device=ranks.device)
        ep = ranks.make(p, fmt=sent)
        assert list(ep.local_experts) == here
        if isinstance(sent, torch.dtype):
            poison_rows(ep)
        x, ids, weight = ranks.own(p)
        all_of_them = named(weights, every, fmt, ranks) | by_expert
        parts = [moe(x, part, weight, **all_of_them, **options) for part in parts_of(ids, p)]
        mine = named(weights, here, fmt, ranks)
        mine |= {name: t[here] for name, t in by_expert.items()}
        got = moe(x, ids, weight, **mine, **options, ep=ep, num_experts=len(every))
        case = f"{fmt.name} weights, rows in {getattr(sent, 'name', sent)}, {given}"
        assert_bits(got, added(parts), case)
        got = moe(x, ids, weight, **mine, **options, ep=ep, shared=shared)
        assert_bits(got, (added(parts).float() + shared.float()).to(parts[0].dtype), f"{case}, shared")
        logits = torch.randn((len(ids), len(every)), generator=generator).to(ranks.device)
        by_logits, chosen = topk(logits, Router(TOP_K))
        got = moe(x, None, None, **mine, **options, ep=ep, router_logits=logits, router=Router(TOP_K))
        assert_bits(got, moe(x, chosen, by_logits, **mine, **options, ep=ep), f"{case}, logits")
        # All experts of a token at one rank, another for every token: one process' own call.
        together = parts_of(ids, p)
        turn = torch.arange(len(ids), device=ids.device)[:, None] % ranks.size
        chosen = torch.stack(together, dim=2).gather(2, turn[:, None, :].expand(-1, TOP_K, -1))[:, :, 0]
        assert_bits(
            moe(x, chosen, weight, **mine, **options, ep=ep), moe(x, chosen, weight, **all_of_them, **options), case
        )


def moe_gradients(ranks: Ranks) -> None:
    """Gradients of x, weights and shared: the bits of one process' parts, and those of `padless.nn.Experts`."""
    every, here = list(range(2 * ranks.size)), list(range(ranks.rank, 2 * ranks.size, ranks.size))
    for number, (dtype, gate_up) in enumerate(
        ((torch.bfloat16, "concatenated"), (torch.float32, "concatenated"), (torch.bfloat16, "interleaved"))
    ):
        p, weights, shared = drawn(ranks, 41 + number, dtype)
        ep = ranks.make(p, fmt=dtype)
        poison_rows(ep)
        x, ids, weight = ranks.own(p)
        generator = torch.Generator().manual_seed(number)
        dout = torch.randn(x.shape, generator=generator).to(x)

        def leaves(x: torch.Tensor = x, weight: torch.Tensor = weight) -> list[torch.Tensor]:
            return [x.clone().requires_grad_(), weight.clone().requires_grad_()]

        w13, w2 = quantized(weights, every, FP8_BLOCK, ranks)
        found = []
        for part in parts_of(ids, p):
            given = leaves()
            its = moe(given[0], part, given[1], w13, w2, gate_up=gate_up)
            its.backward(dout)
            found.append([its.detach(), *(t.grad for t in given)])
        want_out, *want = (added(list(parts)) for parts in zip(*found, strict=True))
        mine = leaves()
        shared.requires_grad_()
        out = moe(
            mine[0], ids, mine[1], *quantized(weights, here, FP8_BLOCK, ranks), gate_up=gate_up, shared=shared, ep=ep
        )
        assert_bits(out, (want_out.float() + shared.float()).to(dtype), f"{dtype}, {gate_up}: out")
        out.backward(dout)
        for name, leaf, wanted in zip(("x", "weights"), mine, want, strict=True):
            assert_bits(leaf.grad, wanted, f"{dtype}, {gate_up}: {name}")
        assert_bits(shared.grad, dout, "shared")
        small = leaves()
        its = moe(small[0], ids, small[1], *quantized(weights, here, FP8_BLOCK, ranks), gate_up=gate_up, ep=ep)
        its.backward(dout * 2.0**-48)
        for name, leaf, other in zip(("x", "weights"), mine, small, strict=True):
            assert_bits(other.grad, leaf.grad * 2.0**-48, f"{dtype}, {gate_up}: {name} of a small gradient")
        trained = Experts(HIDDEN, INTERMEDIATE, len(every), recipe="fp8", gate_up=gate_up, ep=ep, device=ranks.device)
        with torch.no_grad():
            for parameter, w in zip(trained.parameters(), weights, strict=True):
                parameter.copy_(w[here])
        theirs = leaves()
        trained(theirs[0], ids, theirs[1]).backward(dout)
        for name, leaf, other in zip(("x", "weights"), mine, theirs, strict=True):
            assert_bits(leaf.grad, other.grad, f"{dtype}, {gate_up}: {name} of nn.Experts")


def moe_errors(ranks: Ranks) -> None:
    """What does not fit is a sentence on every rank before anything is sent, and the next call works."""
    p, weights, shared = drawn(ranks, 50, torch.bfloat16)
    every, here = list(range(2 * ranks.size)), list(range(ranks.rank, 2 * ranks.size, ranks.size))
    ep, plain = ranks.make(p, fmt=FP8_BLOCK), ranks.make(p, fmt=torch.bfloat16)
    x, ids, weight = ranks.own(p)
    w, nvfp4 = (quantized(weights, here, fmt, ranks) for fmt in (FP8_BLOCK, NVFP4))
    w_every = quantized(weights, every, FP8_BLOCK, ranks)
    grad = x.clone().requires_grad_()
    each = torch.ones(len(here), device=ranks.device)
    refused: tuple[tuple[tuple, dict[str, Any], str], ...] = (
        ((x, ids, weight, *w_every), {"ep": ep}, f"w13 has {len(every)} experts and rank"),
        ((x, ids, weight, *w), {"ep": ep, "num_experts": 99}, "num_experts is 99 and ep's"),
        ((x, ids[:, :2], weight[:, :2], *w), {"ep": ep}, "top_k_index 2, and ep is for 128 and 3"),
        ((x, ids, weight, *nvfp4), {"ep": ep}, "ep's rows are FP8_BLOCK and activations NVFP4"),
        ((grad, ids, weight, *w), {"ep": ep}, "requires grad and ep's rows in FP8_BLOCK carry none"),
        ((x.float(), ids, weight, *w), {"ep": plain}, r"x is torch\.float32 and ep's rows are torch\.bfloat16"),
        ((grad, ids, weight, *nvfp4), {"ep": plain}, "moe has gradients for FP8_BLOCK"),
        (
            (x, ids, weight, *nvfp4),
            {"ep": ranks.make(p, fmt=NVFP4), "global_scale1": each},
            "global_scale1 has 2 values and ep's rows have one",
        ),
    )
    for given, options, words in refused:
        with pytest.raises(ValueError, match=words):
            moe(*given, **options)
    if ranks.backend == "collective":
        wrong = w if ranks.rank else w_every
        words = "rank 0 was given wrong arguments" if ranks.rank else "w13 has"
        with pytest.raises(ValueError, match=words):
            moe(x, ids, weight, *wrong, ep=ep)
    sent, arrived = (moe(x, ids, weight, *w, ep=one, shared=shared) for one in (ep, plain))
    assert_bits(sent, arrived, "rows quantized before and behind")
    assert isinstance(ep, ExpertParallel)


CASES = {function.__name__: function for function in (moe_forward, moe_gradients, moe_errors)}
