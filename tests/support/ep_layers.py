"""Cases of layers that train over ranks (`padless.nn` with ep), which `support.ep_cases` runs with its own."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from padless.demo.train.model import ModelSize
from padless.demo.train.ranks import train_over_ranks
from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK
from padless.nn import DelayedWgrad, Experts, MoE, Recipe
from padless.testing.exchange import draw
from padless.testing.ranks import Rank
from padless.verify.ranks.exchange import Ranks


def meshes(ranks: Ranks) -> None:
    """Meshes (efsdp, ep) = (1, R) and (R, 1) with FSDP2 in FP8: two steps, and a checkpoint of one for the other."""
    e, h, i, n = 2 * ranks.size, 64, 32, ranks.size
    generator = torch.Generator().manual_seed(12)
    p = draw(ranks.counts(5, 4), e, h, 2, 13, dtype=torch.float32)
    p.tokens = [torch.randn(t.shape, generator=generator) for t in p.tokens]
    w13, w2 = torch.randn((e, 2 * i, h), generator=generator) / 6, torch.randn((e, h, i), generator=generator) / 5
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)

    def layer(ep: ExpertParallel | None, weights: list[torch.Tensor]) -> Experts:
        made = Experts(h, i, e, ep=ep, device=ranks.device)
        with torch.no_grad():
            for mine, all_of_them in zip(made.parameters(), weights, strict=True):
                mine.copy_(all_of_them if ep is None else all_of_them[list(ep.local_experts)])
        return made

    for shape in ((1, n), (n, 1)):
        mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("efsdp", "ep"))
        options = {"fmt": torch.float32, "backend": ranks.backend, "device": ranks.device}
        ep = ExpertParallel(mesh["ep"], e, h, 2, max(len(t) for t in p.tokens), **options)
        experts, alone = layer(ep, [w13, w2]), layer(None, [w13, w2])
        assert len(experts.w13) == e // shape[1]
        experts.distribute(mesh["ep"])
        fully_shard(experts, mesh=mesh["efsdp"])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (experts, alone)]
        # One process has the tokens of ranks that share experts at once, and the mean over "efsdp", which FSDP takes.
        parts = [range(n)] if shape[0] == 1 else [[r] for r in range(n)]
        for step in range(2):
            own = ranks.own(p)
            out = experts(*own)
            out.square().sum().backward()
            for part in parts:
                given = [torch.cat([t[r] for r in part]).to(ranks.device) for t in (p.tokens, p.ids, p.weights)]
                want = alone(*given)
                want.square().sum().backward()
                if ranks.rank in part:
                    first = sum(len(p.tokens[r]) for r in part if r < ranks.rank)
                    wanted = want[first : first + len(out)]
                    if step == 0 or not out.is_cuda:
                        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
                    else:  # weights that a GPU's sums left an ulp apart may have another FP8 code
                        assert float((out - wanted).norm()) <= 0.02 * float(wanted.norm()), f"{shape}, step {step}"
            for name in ("w13", "w2"):
                getattr(alone, name).grad /= shape[0]
                got, expected = getattr(experts, name).grad.full_tensor(), getattr(alone, name).grad
                off = float((got - expected).norm() / expected.norm())
                assert off < (1e-5 if step == 0 else 0.02), f"{shape}, step {step}: gradient of {name} is off by {off}"
            if step == 0 and shape[0] == 1:
                checkpoint.save({"experts": experts.state_dict()}, checkpoint_id=folder[0])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if shape[0] > 1:
            other = layer(ep, [torch.zeros_like(w13), torch.zeros_like(w2)])
            other.distribute(mesh["ep"])
            fully_shard(other, mesh=mesh["efsdp"])
            state = {"experts": other.state_dict()}
            checkpoint.load(state, checkpoint_id=folder[0])
            other.load_state_dict(state["experts"])
            assert torch.equal(other.w13.full_tensor().cpu(), w13)
            assert torch.equal(other.w2.full_tensor().cpu(), w2)


RECIPES = (
    "fp8",
    "fp8_1d1d",
    "fp8_bf16_wgrad",
    "mxfp8",
    Recipe(save="recompute"),
    Recipe(wgrad=torch.bfloat16, save="recompute"),
)


def experts(ranks: Ranks) -> None:
    """`Experts` over ranks in every recipe against one process with all tokens; NaN in all rows that belong to nobody.

    Uneven tokens, none on the last rank, ids -1 and twice. Weight gradients: the same bits, also when they wait.
    """
    e, h, i, n = 2 * ranks.size, 64, 32, ranks.size
    generator = torch.Generator().manual_seed(5)
    p = draw([*ranks.counts(70, 90)[:-1], 0], e, h, 3, 21, dtype=torch.float32)
    dout = [torch.randn(t.shape, generator=generator).to(ranks.device) for t in p.tokens]
    shared = [torch.randn(t.shape, generator=generator).to(ranks.device) for t in p.tokens]
    weights = torch.randn((e, 2 * i, h), generator=generator) / 8, torch.randn((e, h, i), generator=generator) / 6
    ep = ranks.make(p, fmt=torch.float32, capacity=n * max(len(t) for t in p.tokens) * 3)
    poison_rows(ep)
    here, r = list(ep.local_experts), ranks.rank
    for recipe in RECIPES:
        queue = DelayedWgrad() if recipe == "fp8_1d1d" else None
        over = Experts(h, i, e, recipe=recipe, ep=ep, device=ranks.device, delayed_wgrad=queue)
        alone = Experts(h, i, e, recipe=recipe, device=ranks.device)
        with torch.no_grad():
            for mine, one, w in zip(over.parameters(), alone.parameters(), weights, strict=True):
                mine.copy_(w[here])
                one.copy_(w)
        x, ids, weight = (t.clone() for t in ranks.own(p))
        every = [torch.cat(t).to(ranks.device) for t in (p.tokens, p.ids, p.weights)]
        leaves = [x, weight, every[0], every[2]]
        for leaf in leaves:
            leaf.requires_grad_()
        out = over(x, ids, weight, shared[r])
        out.backward(dout[r])
        want = alone(*every, torch.cat(shared))
        want.backward(torch.cat(dout))
        if queue is not None:
            queue.flush()
        first = sum(len(t) for t in p.tokens[:r])
        own = slice(first, first + len(x))
        for name, got, expected in (
            ("out", out, want[own]), ("x", x.grad, every[0].grad[own]), ("weights", weight.grad, every[2].grad[own])
        ):  # fmt: skip
            torch.testing.assert_close(
                got, expected, rtol=1e-5, atol=1e-4, msg=lambda m, n=name, q=recipe: f"{q}, {n}: {m}"
            )
        for name in ("w13", "w2"):
            got, expected = getattr(over, name).grad, getattr(alone, name).grad[here]
            # A GPU's bfloat16 products may add in another order for another number of rows.
            off = float((got - expected).norm() / expected.norm())
            assert torch.equal(got, expected) or (got.is_cuda and off < 1e-5), f"{recipe}: {name} is off by {off}"


def experts_of(w13: torch.Tensor, w2: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The local experts as a differentiable function of rows and offs."""

    def function(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ends = [0, *offs.tolist()]
        parts = [torch.tanh(rows[a:b] @ w13[g].T) @ w2[g].T for g, (a, b) in enumerate(itertools.pairwise(ends))]
        return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])

    return function


def poison_rows(ep: ExpertParallel) -> None:
    """Fills rows from the last on with NaN, which no result may show."""
    backend = ep._backend
    dispatch, redispatch = backend.dispatch, backend.redispatch

    def poisoned(*given: Any) -> Any:
        rows, plan = dispatch(*given)
        tail = torch.arange(len(rows), device=rows.device) >= plan.offs[-1]
        rows[tail], plan.prob[tail] = float("nan"), float("nan")
        return rows, plan

    def poisoned_again(x: torch.Tensor, plan: Any) -> torch.Tensor:
        rows = redispatch(x, plan)
        rows[torch.arange(len(rows), device=rows.device) >= plan.offs[-1]] = float("nan")
        return rows

    backend.dispatch, backend.redispatch = poisoned, poisoned_again


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


CASES = {function.__name__: function for function in (experts, layers, gradients_that_travel_in_fp8, meshes, training)}
