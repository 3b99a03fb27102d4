"""Cases of ranks that have little or nothing, and of errors that one rank alone can see, which `support.ep_cases` runs.

Ranks are drawn that give no token, receive no row or freeze what others train. All must make the same exchanges in both
directions, or a case ends by its group's timeout; results are those of one process with all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import padless
from padless.distributed import ExpertParallel, expert_parallel_moe
from padless.moe import moe
from padless.nn import Experts, MoE
from padless.testing.exchange import Problem, draw
from padless.verify.ranks.exchange import Ranks
from padless.verify.ranks.layers import poison_rows
from support.ep_layers import experts_of
from support.ep_moe import added, assert_bits, parts_of, quantized

HIDDEN, INTERMEDIATE = 64, 32
RECIPES = ("fp8", "fp8_compact", "fp8_bf16_wgrad", "mxfp8", "bf16")
IDS = ("any", "any", "one expert", "the last rank", "none")
QUICK_DRAWS = 6


class Drawn:
    """A problem, and what every rank's leaves need: seed decides all of it, on all ranks alike."""

    def __init__(self, ranks: Ranks, seed: int, dtype: torch.dtype) -> None:
        self.seed, self.generator = seed, torch.Generator().manual_seed(seed)
        n, e = ranks.size, ranks.size * self.pick((1, 2))
        top_k = self.pick((1, 1, 2, 3, e))
        counts = [self.pick((0, 1, 5)) for _ in range(n)]
        expert_map = (
            [r % n for r in torch.randperm(e, generator=self.generator).tolist()] if self.pick((0, 1)) else None
        )
        self.p = p = draw(counts, e, HIDDEN, top_k, seed, expert_map=expert_map, distinct=top_k == e, dtype=dtype)
        p.tokens = [torch.randn(t.shape, generator=self.generator).to(dtype) for t in p.tokens]
        self.mode = self.pick(IDS)
        last = [expert for expert, r in enumerate(p.expert_map) if r == n - 1]
        chosen = {"one expert": self.pick(range(e)), "the last rank": last[0], "none": -1}.get(self.mode)
        if chosen is not None:
            p.ids = [torch.full_like(ids, chosen) for ids in p.ids]
        self.capacity = n * max(*counts, 1) * top_k
        self.w13 = torch.randn((e, 2 * INTERMEDIATE, HIDDEN), generator=self.generator) / 8
        self.w2 = torch.randn((e, HIDDEN, INTERMEDIATE), generator=self.generator) / 6
        # An expanded gradient, as `sum` gives, has strides of 0, also where it has no rows.
        self.douts = [
            torch.randn((), generator=self.generator).to(dtype).expand(t.shape)
            if self.pick((0, 1))
            else torch.randn(t.shape, generator=self.generator).to(dtype)
            for t in p.tokens
        ]
        self.needs = [{name: self.pick((True, False)) for name in ("x", "weights", "w13", "w2")} for _ in range(n)]

    def pick(self, choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (), generator=self.generator))]

    def make(self, ranks: Ranks, **options: Any) -> ExpertParallel:
        ep = ranks.make(self.p, capacity=self.capacity, **options)
        poison_rows(ep)
        return ep

    def own(self, ranks: Ranks) -> list[torch.Tensor]:
        """x, weights, w13 and w2 of this rank, which require what `needs` says."""
        x, _, weights = ranks.own(self.p)
        here = [e for e, r in enumerate(self.p.expert_map) if r == ranks.rank]
        leaves = [x, weights, self.w13[here].to(ranks.device), self.w2[here].to(ranks.device)]
        needs = self.needs[ranks.rank].values()
        return [t.clone().requires_grad_(need) for t, need in zip(leaves, needs, strict=True)]

    def of(self, ranks: Ranks) -> slice:
        """This rank's tokens among those of all."""
        first = sum(len(t) for t in self.p.tokens[: ranks.rank])
        return slice(first, first + len(self.p.tokens[ranks.rank]))

    def __str__(self) -> str:
        counts, k = [len(t) for t in self.p.tokens], self.p.ids[0].shape[1]
        return f"seed {self.seed}: {counts} tokens, k {k}, ids {self.mode}, map {self.p.expert_map}, needs {self.needs}"


def check(d: Drawn, ranks: Ranks, name: str, got: Any, want: Any, *, exact: bool, needs: bool = True) -> None:
    """A value or a gradient against one process'; None where it is not needed."""
    if not needs:
        assert got is None, f"{d}, {name}: a gradient of what requires none"
        return
    assert got is not None, f"{d}, {name}: no gradient"
    got, want = got.detach().cpu(), want.detach().cpu()
    if ranks.device.type != "cpu":  # whose bfloat16 products may add in another order for another number of rows
        assert float((got - want).norm()) <= 0.01 * float(want.norm()) + 1e-4, f"{d}, {name}"
    elif exact:
        assert torch.equal(got, want), f"{d}, {name}: off by {float((got - want).abs().max())}"
    else:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4, msg=lambda m: f"{d}, {name}: {m}")


def trained_experts(d: Drawn, ranks: Ranks) -> None:
    """`Experts`: weight gradients have the bits of one process."""
    recipe = d.pick(RECIPES)
    ep = d.make(ranks, fmt=torch.float32)
    over = Experts(HIDDEN, INTERMEDIATE, len(d.p.expert_map), recipe=recipe, ep=ep, device=ranks.device)
    alone = Experts(HIDDEN, INTERMEDIATE, len(d.p.expert_map), recipe=recipe, device=ranks.device)
    x, weights, w13, w2 = d.own(ranks)
    with torch.no_grad():
        for module, given in ((over, (w13, w2)), (alone, (d.w13, d.w2))):
            for parameter, w in zip(module.parameters(), given, strict=True):
                parameter.copy_(w)
    for parameter, w in zip(over.parameters(), (w13, w2), strict=True):
        parameter.requires_grad_(w.requires_grad)
    _, ids, _ = ranks.own(d.p)
    out = over(x, ids, weights)
    out.backward(d.douts[ranks.rank].to(ranks.device))
    every = [torch.cat(t).to(ranks.device) for t in (d.p.tokens, d.p.ids, d.p.weights)]
    leaves = every[0].requires_grad_(), every[2].requires_grad_()
    want = alone(*every)
    want.backward(torch.cat(d.douts).to(ranks.device))
    here, own, needs = list(ep.local_experts), d.of(ranks), d.needs[ranks.rank]
    one = d.p.ids[0].shape[1] == 1
    check(d, ranks, f"{recipe}, out", out, want[own], exact=one)
    check(d, ranks, f"{recipe}, x", x.grad, leaves[0].grad[own], exact=one, needs=needs["x"])
    check(d, ranks, f"{recipe}, weights", weights.grad, leaves[1].grad[own], exact=one, needs=needs["weights"])
    for name in ("w13", "w2"):
        wanted = getattr(alone, name).grad[here]
        check(d, ranks, f"{recipe}, {name}", getattr(over, name).grad, wanted, exact=True, needs=needs[name])


def any_function(d: Drawn, ranks: Ranks) -> None:
    """`expert_parallel_moe` with a function of autograd's, against dense experts in float64."""
    w13, w2 = d.w13[:, :INTERMEDIATE], d.w2
    ep = d.make(ranks, fmt=torch.float32)
    x, weights, own13, own2 = d.own(ranks)
    own13 = own13.detach()[:, :INTERMEDIATE].clone().requires_grad_(own13.requires_grad)
    _, ids, _ = ranks.own(d.p)
    out = expert_parallel_moe(x, ids, weights, ep, experts_fn=experts_of(own13, own2))
    out.backward(d.douts[ranks.rank].to(ranks.device))
    leaves = [t.double().requires_grad_() for t in (torch.cat(d.p.tokens), torch.cat(d.p.weights), w13, w2)]
    chosen = torch.cat(d.p.ids)
    h = torch.tanh(torch.einsum("th,tkih->tki", leaves[0], leaves[2][chosen.clamp(min=0)]))
    y = torch.einsum("tki,tkhi->tkh", h, leaves[3][chosen.clamp(min=0)])
    want = (torch.where(chosen >= 0, leaves[1], 0.0)[:, :, None] * y).sum(1)
    want.backward(torch.cat(d.douts).double())
    here, own = list(ep.local_experts), d.of(ranks)
    check(d, ranks, "out", out, want[own].float(), exact=False)
    for name, got, leaf, part in zip(
        ("x", "weights", "w13", "w2"), (x, weights, own13, own2), leaves, (own, own, here, here), strict=True
    ):
        check(d, ranks, name, got.grad, leaf.grad[part].float(), exact=False, needs=d.needs[ranks.rank][name])


def quantized_layer(d: Drawn, ranks: Ranks) -> None:
    """`moe` with FP8 weights: the bits of one process' parts."""
    ep = d.make(ranks, fmt=torch.bfloat16)
    x, weights, _, _ = d.own(ranks)
    _, ids, plain_weights = ranks.own(d.p)
    dout = d.douts[ranks.rank].to(ranks.device)
    here, needs = list(ep.local_experts), d.needs[ranks.rank]
    out = moe(x, ids, weights, *quantized([d.w13, d.w2], here, padless.FP8_BLOCK, ranks), ep=ep)
    out.backward(dout)
    every = quantized([d.w13, d.w2], list(range(len(d.p.expert_map))), padless.FP8_BLOCK, ranks)
    found = []
    for part in parts_of(ids, d.p):
        leaves = x.detach().clone().requires_grad_(), plain_weights.clone().requires_grad_()
        its = moe(leaves[0], part, leaves[1], *every)
        its.backward(dout)
        found.append([its.detach(), leaves[0].grad, leaves[1].grad])
    want = [added(list(parts)) for parts in zip(*found, strict=True)]
    assert_bits(out.detach(), want[0], f"{d}: out")
    for name, leaf, wanted in (("x", x, want[1]), ("weights", weights, want[2])):
        check(d, ranks, name, leaf.grad, wanted, exact=True, needs=needs[name])


LAYERS: tuple[tuple[Callable[[Drawn, Ranks], None], torch.dtype], ...] = (
    (trained_experts, torch.float32),
    (any_function, torch.float32),
    (quantized_layer, torch.bfloat16),
)


def little_or_nothing(ranks: Ranks, seeds: range = range(QUICK_DRAWS)) -> None:
    """Drawn problems of all three layers; the first are those that are known to be hard."""
    for seed in seeds:
        for layer, dtype in LAYERS:
            if dtype == torch.float32 and ranks.backend == "deepep":
                continue
            d = Drawn(ranks, seed, dtype)
            if seed == 0:  # one expert for all, k = 1, so that other ranks receive no row
                d.p = draw([3] * ranks.size, ranks.size, HIDDEN, 1, 5, dtype=dtype)
                d.p.ids = [torch.zeros_like(ids) for ids in d.p.ids]
            if seed == 1:  # only rank 0 has tokens, and it alone needs gradients, of its weights
                d.p = draw([3] + [0] * (ranks.size - 1), ranks.size, HIDDEN, 2, 5, dtype=dtype)
                d.needs = [{"x": False, "weights": False, "w13": r == 0, "w2": r == 0} for r in range(ranks.size)]
            if seed < 2:
                e = ranks.size
                d.w13, d.w2, d.capacity = d.w13[:e], d.w2[:e], e * 3 * 2
                d.douts = [torch.randn((), generator=d.generator).to(dtype).expand(t.shape) for t in d.p.tokens]
            layer(d, ranks)


def no_gradients(ranks: Ranks) -> None:
    """With grad mode off nothing requires grad; with it on every rank's results do, whatever requires it there."""
    d = Drawn(ranks, 3, torch.bfloat16)
    d.needs = [dict.fromkeys(needs, False) for needs in d.needs]
    ep = d.make(ranks, fmt=torch.bfloat16)
    x, weights, _, _ = d.own(ranks)
    _, ids, _ = ranks.own(d.p)
    mine = quantized([d.w13, d.w2], list(ep.local_experts), padless.FP8_BLOCK, ranks)
    mxfp8 = quantized([d.w13, d.w2], list(ep.local_experts), padless.MXFP8, ranks)
    layer = Experts(HIDDEN, INTERMEDIATE, len(d.p.expert_map), ep=ep, device=ranks.device).requires_grad_(False)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            rows, plan = ep.dispatch(x, ids, weights)
            assert rows.requires_grad is enabled
            assert ep.combine(rows.detach(), plan._replace(prob=plan.prob.detach())).requires_grad is enabled
            assert layer(x, ids, weights).requires_grad is enabled
            assert moe(x, ids, weights, *mine, ep=ep).requires_grad is enabled
            assert not moe(x, ids, weights, *mxfp8, ep=ep).requires_grad, "a layer without a backward pass"
            plain = expert_parallel_moe(x, ids, weights, ep, w13=mine[0], w2=mine[1])
            assert not plain.requires_grad, "weights that are quantized"
    assert not x.requires_grad


def router_of_inference_mode(ranks: Ranks) -> None:
    """Tokens, ids and router weights that inference mode made, in layers that are trained."""
    for sums in ("ranks", "slots") if ranks.backend != "deepep" else ("ranks",):
        d = Drawn(ranks, 3, torch.bfloat16)
        ep = d.make(ranks, fmt=torch.bfloat16, sums=sums)
        mine = quantized([d.w13, d.w2], list(ep.local_experts), padless.FP8_BLOCK, ranks)
        layer = Experts(HIDDEN, INTERMEDIATE, len(d.p.expert_map), ep=ep, device=ranks.device)
        factor = torch.tensor(1.5, dtype=torch.bfloat16, device=ranks.device, requires_grad=True)
        given = ranks.own(d.p)
        with torch.inference_mode():
            made = [t.clone() for t in given]
        for call in (
            lambda x, ids, weights, ep=ep, mine=mine: moe(x, ids, weights, *mine, ep=ep),
            layer,
            lambda *g, ep=ep, f=factor: expert_parallel_moe(*g, ep, experts_fn=lambda rows, offs: rows * f),
        ):
            out = call(*made)
            out.sum().backward()
            assert_bits(out.detach(), call(*given).detach(), sums)
        assert factor.grad is not None


def shared_rows(ranks: Ranks) -> None:
    """`shared` is added to the ranks' sum in float32, with one rounding, by `moe` and by `Experts`.

    Where all sums are of one rank, those are one process' own.
    """
    for seed, dtype, shared_dtype in (
        (1, torch.float32, torch.float32),
        (2, torch.bfloat16, torch.float32),
        (3, torch.bfloat16, torch.bfloat16),
    ):
        if dtype == torch.float32 and ranks.backend == "deepep":
            continue
        e, generator = 2 * ranks.size, torch.Generator().manual_seed(seed)
        p = draw(ranks.counts(9, 6), e, HIDDEN, 3, seed, dtype=dtype)
        p.tokens = [torch.randn(t.shape, generator=generator).to(dtype) for t in p.tokens]
        w = [
            torch.randn(s, generator=generator) / 8 for s in ((e, 2 * INTERMEDIATE, HIDDEN), (e, HIDDEN, INTERMEDIATE))
        ]
        ep = ranks.make(p, fmt=dtype, capacity=ranks.size * 9 * 3)
        every, mine = (quantized(w, list(i), padless.FP8_BLOCK, ranks) for i in (range(e), ep.local_experts))
        layer = Experts(HIDDEN, INTERMEDIATE, e, ep=ep, device=ranks.device)
        with torch.no_grad():
            for parameter, values in zip(layer.parameters(), w, strict=True):
                parameter.copy_(values[list(ep.local_experts)])
        x, ids, weights = ranks.own(p)
        shared = torch.randn(x.shape, generator=generator).to(ranks.device, shared_dtype)
        turn = (torch.arange(len(ids), device=ids.device) % ranks.size)[:, None]
        for chosen in (ids, turn * 2 + ids.clamp(min=0) % 2):
            of_one_rank = chosen is not ids
            plain = moe(x, chosen, weights, *mine, ep=ep).detach()
            got = moe(x, chosen, weights, *mine, ep=ep, shared=shared).detach()
            assert_bits(got, (plain.float() + shared.float()).to(dtype), f"{dtype} and {shared_dtype}: moe")
            its = layer(x, chosen, weights, shared).detach()
            assert_bits(its, got, f"{dtype} and {shared_dtype}: Experts")
            if of_one_rank:
                alone = moe(x, chosen, weights, *every)
                assert_bits(plain, alone, f"{dtype}: one rank's sums")
                if dtype == torch.float32:
                    assert_bits(got, moe(x, chosen, weights, *every, shared=shared), "one rank's sums and shared")
        into = moe(x, ids, weights, *mine, ep=ep, shared=shared, out_dtype=torch.float32).detach()
        plain = moe(x, ids, weights, *mine, ep=ep).detach()
        assert_bits(into, plain.float() + shared.float(), f"{dtype} and {shared_dtype}: out_dtype")


def gathered(sentence: str) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sentence)
    return every


def said(call: Callable[[], Any]) -> str:
    """The ValueError of call() on this rank."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def construction(ranks: Ranks) -> None:
    """Whatever one rank alone can see at construction is the same sentence on all ranks."""
    n, first = ranks.size, ranks.rank == 0
    where = {"backend": ranks.backend, "device": ranks.device}

    def made(**given: Any) -> ExpertParallel:
        arguments = {
            "num_experts": 2 * n,
            "hidden": HIDDEN,
            "top_k": 2,
            "max_tokens": 4,
            "fmt": torch.bfloat16,
            **where,
        }
        return ExpertParallel(None, **arguments | given)

    empty = [0] * n + [r for r in range(n) if r != 1]  # as many as there are experts, or one less
    empty += [0] * (2 * n - len(empty))
    for given, words in (
        ({"expert_map": empty}, "expert_map gives rank 1 no expert; each rank must have at least one"),
        ({"expert_map": empty if first else [e % n for e in range(2 * n)]}, "expert_map is "),
        ({"expert_map": 7 if first else None}, "expert_map is 7 on rank 0 and None on rank 1"),
        ({"expert_map": 7}, f"expert_map must be {2 * n} ranks from 0 to {n - 1}"),
        (
            {"hidden": HIDDEN if first else 65},
            "hidden is 64 on rank 0 and 65 on rank 1; it must be the same on all ranks",
        ),
        ({"max_tokens": 4 + ranks.rank}, "max_tokens is 4 on rank 0 and 5 on rank 1"),
        ({"device": "nowhere" if first else ranks.device}, "rank 0: device is 'nowhere'"),
        ({"device": "meta" if first else ranks.device}, f"device is meta on rank 0 and {ranks.device.type} on rank 1"),
        ({"top_k": "2" if first else 2}, "rank 0: "),
    ):
        sentences = gathered(said(lambda given=given: made(**given)))
        assert len(set(sentences)) == 1, sentences
        assert words in sentences[0], sentences[0]
    turns = torch.arange(2 * n) % n
    assert made(expert_map=turns if first else turns.tolist()).expert_map == tuple(turns.tolist())
    runs = [e // 2 for e in range(2 * n)]
    runs[-1], runs[0] = runs[0], runs[-1]  # of three ranks the second has its run, and the others have not
    layer = Experts(HIDDEN, INTERMEDIATE, 2 * n, ep=made(expert_map=runs))
    sentences = gathered(said(lambda: layer.distribute(None)))
    assert len(set(sentences)) == 1, sentences


def wrong_calls(ranks: Ranks) -> None:
    """What the layers refuse on one rank is said on all, and the next call works. ("collective" alone tells others.)"""
    if ranks.backend != "collective":
        return
    d = Drawn(ranks, 8, torch.bfloat16)
    p: Problem = draw([4] * ranks.size, 2 * ranks.size, HIDDEN, 2, 3)
    d.p, d.capacity = p, ranks.size * 8
    ep, plain = ranks.make(p, fmt=padless.FP8_BLOCK), ranks.make(p, fmt=torch.bfloat16)
    x, ids, weights = ranks.own(p)
    generator = torch.Generator().manual_seed(1)
    w13, w2 = (
        torch.randn(s, generator=generator) / 8
        for s in ((2 * ranks.size, 2 * INTERMEDIATE, HIDDEN), (2 * ranks.size, HIDDEN, INTERMEDIATE))
    )
    w = quantized([w13, w2], list(ep.local_experts), padless.FP8_BLOCK, ranks)
    layer = Experts(HIDDEN, INTERMEDIATE, 2 * ranks.size, ep=plain, device=ranks.device)
    nvfp4 = Experts(HIDDEN, INTERMEDIATE, 2 * ranks.size, ep=plain, device=ranks.device, recipe="nvfp4")
    model = MoE(HIDDEN, INTERMEDIATE, 2 * ranks.size, 2, ep=plain, device=ranks.device, dtype=torch.bfloat16)
    grad = x.clone().requires_grad_()

    fp4, scale = ranks.make(p, fmt=padless.NVFP4), 0.01 + torch.rand(1, generator=generator).to(ranks.device)
    unread = [-scale] if ranks.device.type == "cpu" else []  # on a GPU values are not read

    def with_tangent(call: Callable[[torch.Tensor], Any], t: torch.Tensor) -> Any:
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(t, torch.rand_like(t)))

    def scaled(scale: Any) -> Any:
        return ep.dispatch(x, ids, weights, global_scale=scale)

    def of_nvfp4(scale: torch.Tensor) -> Any:
        return fp4.dispatch(x, ids, weights, global_scale=scale)

    calls: tuple[tuple[Callable[[], Any], Callable[[], Any], str], ...] = (
        (lambda: moe(x[0], ids, weights, *w, ep=ep), lambda: moe(x, ids, weights, *w, ep=ep), "x must be"),
        (
            lambda: moe(x, ids, weights, *w, ep=ep, shared=x[:1]),
            lambda: moe(x, ids, weights, *w, ep=ep, shared=x),
            "shared must be",
        ),
        (lambda: moe(None, ids, weights, *w, ep=ep), lambda: moe(x, ids, weights, *w, ep=ep), "x must be"),
        (
            lambda: moe(grad, ids, weights, *w, ep=plain, activation="geglu"),
            lambda: moe(x, ids, weights, *w, ep=plain, activation="geglu"),
            "x requires grad",
        ),
        (lambda: layer(x.float(), ids, weights), lambda: layer(x, ids, weights), "convert x"),
        (lambda: layer(x[:, :32], ids, weights), lambda: layer(x, ids, weights), "x must be"),
        (lambda: nvfp4(x, ids, weights), lambda: layer(x, ids, weights), "NVFP4's global scale"),
        (lambda: model(x[:, :32]), lambda: model(x), "x must be"),
        (
            lambda: expert_parallel_moe(x, ids, weights, ep, w13=w[0]),
            lambda: expert_parallel_moe(x, ids, weights, ep, w13=w[0], w2=w[1]),
            "experts_fn or both",
        ),
        (
            lambda: expert_parallel_moe(
                x, ids, weights, ep, w13=w[0], w2=quantized([w13, w2], [0], padless.FP8_BLOCK, ranks)[1]
            ),
            lambda: expert_parallel_moe(x, ids, weights, ep, w13=w[0], w2=w[1]),
            "w2 must be",
        ),
        (
            lambda: expert_parallel_moe(grad, ids, weights, plain, w13=w[0], w2=w[1]),
            lambda: expert_parallel_moe(x, ids, weights, plain, w13=w[0], w2=w[1]),
            "x requires grad",
        ),
        (lambda: scaled(0.5), lambda: scaled(None), "global_scale must be None"),
        (lambda: ep.dispatch(x, ids.to_sparse(), weights), lambda: scaled(None), "ids is a torch.sparse_coo"),
        *(
            (lambda call=call: with_tangent(call, x), lambda call=call: call(x), "has a tangent")
            for call in (
                lambda t: ep.dispatch(t, ids, weights),
                lambda t: plain.dispatch(t, ids, weights),
                lambda t: plain.dispatch(x, ids, t[:, :2].float()),
                lambda t: layer(t, ids, weights),
                lambda t: moe(t, ids, weights, *w, ep=plain),
            )
        ),
        *(
            (lambda s=s: of_nvfp4(s), lambda: of_nvfp4(scale), "global_scale (must be|requires grad)")
            for s in (scale[None], scale.to("meta"), scale.clone().requires_grad_(), *unread)
        ),
    )
    for number, (wrong, right, words) in enumerate(calls):
        if ranks.rank == 0:
            with pytest.raises((ValueError, RuntimeError), match=words):
                wrong()
        else:
            assert said(right) == "rank 0 was given wrong arguments; its own error says which", number
        assert right() is not None


CASES = {
    function.__name__: function
    for function in (little_or_nothing, no_gradients, router_of_inference_mode, shared_rows, construction, wrong_calls)
}
