"""Cases of layers that train over ranks (`padless.nn` with ep), which `support.ep_cases` runs with its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from padless.demo.train.model import ModelSize
from padless.demo.train.ranks import train_over_ranks
from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK
from padless.nn import DelayedWgrad, Experts, MoE
from padless.testing.exchange import draw
from padless.testing.ranks import Rank
from padless.verify.ranks.exchange import Ranks


def experts_of(w13: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The local experts as a differentiable function of rows and offs."""

    def function(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ends = [0, *offs.tolist()]
        parts = [torch.tanh(rows[a:b] @ w13[g].T) @ w2[g].T for g, (a, b) in enumerate(itertools.pairwise(ends))]
        return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])

    return function


def layers(ranks: Ranks) -> None:
    """`MoE` over ranks against one process; weights that a seed draws; sentences for what does not fit."""
    e, h, n = 2 * ranks.size, 64, ranks.size
    options = {"backend": ranks.backend, "device": ranks.device}
    ep = ExpertParallel(None, e, h, 2, 8, torch.float32, **options)
    torch.manual_seed(3)
    over = MoE(h, 32, e, 2, shared_intermediate=32, ep=ep, device=ranks.device)
    drawn: list = [None] * n
    dist.all_gather_object(drawn, (over.experts.w13.detach().cpu(), over.router.weight.detach().cpu()))
    every = torch.cat([w13 for w13, _ in drawn])
    assert len({float(w.sum()) for w in every}) == e, "experts of one seed are the same on several ranks"
    assert all(torch.equal(router, drawn[0][1]) for _, router in drawn)
    alone = MoE(h, 32, e, 2, shared_intermediate=32, device=ranks.device)
    w2: list = [None] * n
    dist.all_gather_object(w2, over.experts.w2.detach().cpu())
    with torch.no_grad():
        for name, parameter in over.named_parameters():
            if ".experts." not in f".{name}":
                alone.get_parameter(name).copy_(parameter)
        alone.experts.w13.copy_(every)
        alone.experts.w2.copy_(torch.cat(w2))
    generator = torch.Generator().manual_seed(4)
    x = torch.randn((n, 2, 4, h), generator=generator).to(ranks.device)
    out = over(x[ranks.rank])
    want = alone(x)[ranks.rank]
    assert out.shape == want.shape
    assert float((out - want).detach().norm() / want.detach().norm()) < 0.02
    for given, words in (
        ({"num_experts": e + 1}, f"ep is for {e} experts and {h} columns"),
        ({"top_k": 1}, "top_k is 1 and ep's 2"),
        ({"ep": ExpertParallel(None, e, h, 2, 8, **options)}, "ep is for .* in FP8_BLOCK"),
    ):
        with pytest.raises(ValueError, match=words if "FP8" not in words else "ep is for"):
            MoE(**{"hidden": h, "intermediate": 32, "num_experts": e, "top_k": 2, "ep": ep} | given)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 and ep's rows are torch\.float32"):
        over.experts(x[0, 0].bfloat16(), torch.zeros(4, 2, dtype=torch.int64, device=x.device), x[0, 0, :, :2])
    with pytest.raises(ValueError, match=r"NVFP4's global scale is of all ranks' rows"):
        MoE(h, 32, e, 2, ep=ep, recipe="nvfp4", device=ranks.device)(x[0])
    with pytest.raises(ValueError, match="distribute is for experts with ep"):
        alone.experts.distribute(None)
    with pytest.raises(ValueError, match="delayed_wgrad is given"):
        Experts(h, 32, e, ep=ep, delayed_wgrad=DelayedWgrad()).distribute(None)


def training(ranks: Ranks) -> None:
    """The demo's model over all ranks: losses and gradients of every step are those of one process with all tokens.

    From the same weights at every step, float32 rows and FP8 products. Two gloo ranks: up to the order of float32 sums,
    and the bits of the experts' gradients. Elsewhere dense layers may round otherwise and so change an FP8 code.
    """
    n = ranks.size
    size = ModelSize(layers=1, hidden=128, heads=2, experts=2 * n, top_k=2, intermediate=128, length=16, batch=2 * n)
    rank = Rank(ranks.rank, n, ranks.device, ranks.backend)
    exact = n == 2 and ranks.device.type == "cpu"
    for recipe in ("fp8", "fp8_compact", "bf16"):
        found = train_over_ranks(rank, recipe, size, 3 if recipe == "fp8" else 1, torch.float32, True)
        assert found.losses[0][-1] < found.losses[0][0] or recipe != "fp8"
        assert found.difference < (1e-6 if exact else 1e-4), (recipe, found.losses)
        for name, off in found.gradients.items():
            most = (0.0 if ".experts." in name else 1e-6) if exact else 0.03
            assert off <= most, f"{recipe}: gradient of {name} is off by {off}"


def gradients_that_travel_in_fp8(ranks: Ranks) -> None:
    """The recipe "fp8" quantizes them along rows anyway, to the same codes: x, router weights and w13 get the bits
    that they get from bfloat16 ones; w2's gradient, quantized along the tokens, is rounded once more. Those of a `dout`
    that is 2^-48 as large are 2^-48 as large, to the bit.
    """
    e, h, i = 2 * ranks.size, 128, 64
    p = draw(ranks.counts(33, 20), e, h, 2, 14, distinct=True)
    generator = torch.Generator().manual_seed(15)
    weights = torch.randn((e, 2 * i, h), generator=generator) / 8, torch.randn((e, h, i), generator=generator) / 6
    dout = torch.randn(p.tokens[ranks.rank].shape, generator=generator).to(ranks.device, torch.bfloat16)
    found = []
    smaller = 2.0**-48
    for gradient_fmt, size in ((None, 1.0), (FP8_BLOCK, 1.0), (FP8_BLOCK, smaller), (None, smaller)):
        ep = ranks.make(p, fmt=torch.bfloat16, gradient_fmt=gradient_fmt)
        module = Experts(h, i, e, recipe="fp8", ep=ep, device=ranks.device)
        with torch.no_grad():
            for mine, w in zip(module.parameters(), weights, strict=True):
                mine.copy_(w[list(ep.local_experts)])
        x, ids, weight = (t.clone() for t in ranks.own(p))
        x.requires_grad_()
        weight.requires_grad_()
        module(x, ids, weight).backward(dout * size)
        found.append([x.grad, weight.grad, module.w13.grad, module.w2.grad])
    for name, got, want in zip(("x", "weights", "w13"), found[1], found[0], strict=False):
        assert torch.equal(got, want), name
    off = float((found[1][3] - found[0][3]).norm() / found[0][3].norm())
    assert 0.01 < off < 0.08, off
    for small, usual in ((2, 1), (3, 0)):
        for got, want in zip(found[small], found[usual], strict=True):
            assert want.abs().amax() > 0
            assert torch.equal(got, want * smaller), small


CASES = {function.__name__: function for function in (layers, gradients_that_travel_in_fp8, training)}
