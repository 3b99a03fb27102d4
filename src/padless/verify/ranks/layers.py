"""Checks of layers over ranks against one process: `moe` with sums of slots, `padless.nn` in training and on meshes."""

from __future__ import annotations

import random
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from padless.distributed import ExpertParallel
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledTensor
from padless.moe import moe
from padless.nn import DelayedWgrad, Experts, Recipe
from padless.quantization.quantize import quantize
from padless.testing import exchange as reference
from padless.testing.exchange import Problem, draw
from padless.verify.ranks.exchange import Ranks

HIDDEN, INTERMEDIATE, TOP_K = 128, 64, 3
GPT_OSS = {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}

# (format of weights, of ep's rows, dtype of x, options of the layer).
FORWARD: tuple[tuple[Any, Any, torch.dtype, dict[str, Any]], ...] = (
    (FP8_BLOCK, FP8_BLOCK, torch.bfloat16, {}),
    (FP8_BLOCK, FP8_BLOCK, torch.float32, {"out_dtype": torch.bfloat16}),
    (FP8_BLOCK, torch.bfloat16, torch.bfloat16, {"gate_up": "interleaved"}),
    (FP8_BLOCK, torch.float32, torch.float32, {}),
    (MXFP8, MXFP8, torch.bfloat16, {"bias": True}),
    (MXFP8, torch.bfloat16, torch.bfloat16, {}),
    (MXFP4, FP8_BLOCK, torch.bfloat16, {"bias": True, **GPT_OSS}),
    (MXFP4, torch.bfloat16, torch.bfloat16, {"activations": torch.bfloat16}),
    (NVFP4, NVFP4, torch.bfloat16, {}),
    (NVFP4, NVFP4, torch.bfloat16, {"scale1": 0.01, "scale2": "each"}),
    (NVFP4, torch.bfloat16, torch.bfloat16, {"scale1": "each", "scale2": 0.02}),
)


def drawn(ranks: Ranks, seed: int, dtype: torch.dtype) -> tuple[Problem, list[torch.Tensor], torch.Tensor]:
    """(uneven tokens, experts by turns over the ranks; weights (E, 2 I, H) and (E, H, I); shared rows)."""
    e = 2 * ranks.size
    counts = ranks.counts(9, 6)
    if seed % 3 == 1:  # none on the last rank
        counts[-1] = 0
    p = draw(counts, e, HIDDEN, TOP_K, seed, expert_map=[expert % ranks.size for expert in range(e)], dtype=dtype)
    p.tokens = [t.clamp(-4, 4) for t in p.tokens]
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(s, generator=generator) / s[2] ** 0.5
        for s in ((e, 2 * INTERMEDIATE, HIDDEN), (e, HIDDEN, INTERMEDIATE))
    ]
    return p, weights, torch.randn((len(p.tokens[ranks.rank]), HIDDEN), generator=generator).to(ranks.device, dtype)


def quantized(weights: list[torch.Tensor], experts: list[int], fmt: Any, ranks: Ranks) -> list[BlockScaledTensor]:
    """Codes of w13 and w2 of these experts."""
    return [quantize(w[experts].to(ranks.device), fmt, kind="weight") for w in weights]


def named(weights: list[torch.Tensor], experts: list[int], fmt: Any, ranks: Ranks) -> dict[str, Any]:
    """The same as arguments of `moe`."""
    return dict(zip(("w13", "w2"), quantized(weights, experts, fmt, ranks), strict=True))


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    assert got.dtype == want.dtype, f"{what}: {got.dtype}, not {want.dtype}"
    assert torch.equal(reference.bits(got), reference.bits(want)), what


def poison_rows(ep: ExpertParallel) -> None:
    """Fills rows from the last on with NaN, which no result may show."""
    backend: Any = ep._backend
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


def placements(ranks: Ranks) -> list[list[int]]:
    """Experts by turns, in runs, in no order, and all but one on each rank at the last."""
    n, e = ranks.size, 2 * ranks.size
    mixed = [expert % n for expert in range(e)]
    random.Random(n).shuffle(mixed)
    return [[x % n for x in range(e)], [x * n // e for x in range(e)], mixed, [*range(n), *([n - 1] * (e - n))]]


def check_slots(ranks: Ranks) -> None:
    """moe(ep=) in every format, with shared rows and without: bits of one process; those of sums of ranks are others."""
    every, others = list(range(2 * ranks.size)), []
    for number, (fmt, sent, dtype, given) in enumerate(FORWARD):
        options = dict(given)
        p, weights, shared = drawn(ranks, 60 + number, dtype)
        p.expert_map = placements(ranks)[number % 4]
        here = [e for e in every if p.expert_map[e] == ranks.rank]
        generator = torch.Generator().manual_seed(number)
        by_expert: dict[str, torch.Tensor] = {}
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
        one = named(weights, every, fmt, ranks) | by_expert | options
        part = named(weights, here, fmt, ranks) | options
        part |= {name: t[here] for name, t in by_expert.items()}
        for more in dict[str, Any](), dict[str, Any](shared=shared):
            case = f"{fmt.name} weights, rows in {getattr(sent, 'name', sent)}, {p.expert_map}, {list(more)}"
            want = moe(x, ids, weight, **one, **more)
            assert_bits(moe(x, ids, weight, **part, **more, ep=ep), want, case)
            others.append(torch.equal(moe(x, ids, weight, **part, **more, ep=by_ranks), want))
    if len(x):
        assert not all(others), "sums of ranks would do"


def check_slot_gradients(ranks: Ranks) -> None:
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
            w = named(weights, chosen, FP8_BLOCK, ranks)
            return lambda x, ids, weight, rows: moe(x, ids, weight, shared=rows, **w, **more)

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


RECIPES = (
    "fp8",
    "fp8_1d1d",
    "fp8_bf16_wgrad",
    "mxfp8",
    Recipe(save="recompute"),
    Recipe(wgrad=torch.bfloat16, save="recompute"),
)


def check_training(ranks: Ranks) -> None:
    """`Experts` over ranks in every recipe against one process with all tokens; NaN in all rows of no expert.

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
        for leaf in (x, weight, every[0], every[2]):
            leaf.requires_grad_()
        out = over(x, ids, weight, shared[r])
        out.backward(dout[r])
        want = alone(*every, torch.cat(shared))
        want.backward(torch.cat(dout))
        if queue is not None:
            queue.flush()
        first = sum(len(t) for t in p.tokens[:r])
        pairs: list[tuple[str, Any, Any]] = [
            ("out", out, want), ("x", x.grad, every[0].grad), ("weights", weight.grad, every[2].grad)
        ]  # fmt: skip
        for name, got, whole in pairs:
            said = partial("{}, {}: {}".format, recipe, name)
            torch.testing.assert_close(got, whole[first : first + len(x)], rtol=1e-5, atol=1e-4, msg=said)
        for name in ("w13", "w2"):
            got, expected = getattr(over, name).grad, getattr(alone, name).grad[here]
            # A GPU's bfloat16 products may add in another order for another number of rows.
            off = float((got - expected).norm() / expected.norm())
            assert torch.equal(got, expected) or (got.is_cuda and off < 1e-5), f"{recipe}: {name} is off by {off}"


def shapes(ranks: int) -> list[tuple[int, int]]:
    """Meshes (efsdp, ep) of so many ranks."""
    return [(1, ranks), *([(2, ranks // 2)] if ranks > 2 and ranks % 2 == 0 else []), (ranks, 1)]


def check_meshes(ranks: Ranks) -> None:
    """Meshes (efsdp, ep) = (1, R), (2, R / 2) and (R, 1) with FSDP2 in FP8: two steps, and a checkpoint of the first for
    the others.
    """
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

    for shape in shapes(n):
        mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=("efsdp", "ep"))
        most, given_to_all = max(len(t) for t in p.tokens), (torch.float32, ranks.backend)
        ep = ExpertParallel(mesh["ep"], e, h, 2, most, *given_to_all, device=ranks.device)
        experts, alone = layer(ep, [w13, w2]), layer(None, [w13, w2])
        assert len(experts.w13) == e // shape[1]
        experts.distribute(mesh["ep"])
        fully_shard(experts, mesh=mesh["efsdp"])
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02) for m in (experts, alone)]
        # One process has the tokens of ranks that share experts at once, and the mean over "efsdp", which FSDP takes.
        parts = [range(first, first + shape[1]) for first in range(0, n, shape[1])]
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
            for name, drawn_weight in (("w13", w13), ("w2", w2)):
                assert torch.equal(getattr(other, name).full_tensor().cpu(), drawn_weight), f"{shape}: {name} as loaded"
