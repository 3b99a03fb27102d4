"""Cases of expert parallelism that all ranks of a group run together: the same on gloo and on GPUs, with each backend.

As a program, `python ep_cases.py [--cuda] [symm | collective] [case ..]` spawns two processes, runs all cases or those
named in them, says which on stderr, and prints one JSON object, case -> error or null.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import padless
from padless.distributed import ExpertParallel, expert_parallel_moe
from padless.testing import exchange as reference
from padless.testing.exchange import Problem, draw
from padless.testing.ranks import Rank, raise_first, run_ranks
from padless.verify.ranks import layers, together
from padless.verify.ranks.exchange import (
    Ranks,
    check_exchange,
    check_formats,
    check_gradients,
    check_invariance,
    check_sizes,
)
from support import ep_composed, ep_edges, ep_layers, ep_lora, ep_moe, ep_slots
from support.ep_layers import experts_of

Case = Callable[[Ranks], None]
CASES: dict[str, Case] = {
    "formats": check_formats,
    "sizes": check_sizes,
    "gradient_rows": check_gradients,
    "invariance": check_invariance,
    "experts": layers.check_training,
    "meshes": layers.check_meshes,
    "sums_of_slots": layers.check_slots,
    "gradients_of_slots": layers.check_slot_gradients,
}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def dense(p: Problem, w13: torch.Tensor, w2: torch.Tensor, tokens: list, weights: list) -> list[torch.Tensor]:
    """The layer in one process and in float32."""
    out = []
    for x, ids, weight in zip(tokens, p.ids, weights, strict=True):
        total = torch.zeros_like(x)
        for j in range(ids.shape[1]):
            h = torch.einsum("th,tih->ti", x, w13[ids[:, j].clamp(min=0)])
            y = torch.einsum("ti,thi->th", torch.tanh(h), w2[ids[:, j].clamp(min=0)])
            total = total + torch.where(ids[:, j, None] >= 0, weight[:, j, None] * y, torch.zeros_like(y))
        out.append(total)
    return out


@case
def gradients(ranks: Ranks) -> None:
    """Output and all gradients of the layer in float32 against the dense layer of one process."""
    e, h, i = 2 * ranks.size, 32, 24
    generator = torch.Generator().manual_seed(3)
    p = draw(ranks.counts(6, 4), e, h, 3, 6, dtype=torch.float32)
    p.tokens = [torch.randn(t.shape, generator=generator) for t in p.tokens]
    w13, w2 = torch.randn((e, i, h), generator=generator) / 6, torch.randn((e, h, i), generator=generator) / 5
    douts = [torch.randn(t.shape, generator=generator) for t in p.tokens]
    leaves = [w13, w2, *p.tokens, *p.weights]
    leaves = [t.clone().requires_grad_() for t in leaves]
    tokens, weights = leaves[2 : 2 + ranks.size], leaves[2 + ranks.size :]
    want = dense(p, leaves[0], leaves[1], tokens, weights)
    sum((o * d).sum() for o, d in zip(want, douts, strict=True)).backward()

    ep = ranks.make(p, fmt=torch.float32)
    mine = [e for e, r in enumerate(p.expert_map) if r == ranks.rank]
    own13, own2 = (w[mine].to(ranks.device).requires_grad_() for w in (w13, w2))
    x, ids, weight = ranks.own(p)
    x.requires_grad_()
    weight = weight.clone().requires_grad_()
    out = expert_parallel_moe(x, ids, weight, ep, experts_fn=experts_of(own13, own2))
    (out * douts[ranks.rank].to(ranks.device)).sum().backward()
    r = ranks.rank
    for name, got, expected in (
        ("out", out, want[r]), ("x", x.grad, tokens[r].grad), ("weights", weight.grad, weights[r].grad),
        ("w13", own13.grad, leaves[0].grad[mine]), ("w2", own2.grad, leaves[1].grad[mine]),
    ):  # fmt: skip
        torch.testing.assert_close(
            got.detach().cpu(), expected.detach(), rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@case
def gradients_in_fp8(ranks: Ranks) -> None:
    """dout travels in FP8_BLOCK: gradients are those of its decoded values in float64, and near those of dout itself."""
    e, h = 2 * ranks.size, 160
    generator = torch.Generator().manual_seed(3)
    p = draw(ranks.counts(6, 4), e, h, 3, 6, dtype=torch.float32)
    w = torch.randn((e, h, h), generator=generator) / 13
    douts = [torch.randn(t.shape, generator=generator) for t in p.tokens]
    ep = ranks.make(p, fmt=torch.float32, gradient_fmt=padless.FP8_BLOCK)
    x, ids, weight = ranks.own(p)
    x.requires_grad_()
    weight = weight.clone().requires_grad_()
    own = w[list(ep.local_experts)].to(ranks.device).requires_grad_()

    def experts(rows: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ends = [0, *offs.tolist()]
        parts = [rows[a:b] @ own[g].T for g, (a, b) in enumerate(itertools.pairwise(ends))]
        return torch.cat([*parts, torch.zeros_like(rows[ends[-1] :])])

    out = expert_parallel_moe(x, ids, weight, ep, experts_fn=experts)
    out.backward(douts[ranks.rank].to(ranks.device))
    decoded = [padless.dequantize(padless.quantize(d, padless.FP8_BLOCK), torch.float32) for d in douts]
    errors = []
    for dout in (decoded, douts):
        leaves = [t.detach().double().requires_grad_() for t in (w, *p.tokens, *p.weights)]
        tokens, weights = leaves[1 : 1 + ranks.size], leaves[1 + ranks.size :]
        for t, router, chosen, d in zip(tokens, weights, p.ids, dout, strict=True):
            y = torch.einsum("tkih,th->tki", leaves[0][chosen.clamp(min=0)], t)
            y = (torch.where(chosen >= 0, router, 0.0)[..., None] * y).sum(1)
            y.backward(d.double())
        want = [tokens[ranks.rank].grad, weights[ranks.rank].grad, leaves[0].grad[list(ep.local_experts)]]
        got = [t.grad.cpu().double() for t in (x, weight, own)]
        errors.append([float((a - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)])
    assert max(errors[0]) < 1e-5, errors
    assert min(errors[1]) > 0.005, errors
    assert max(errors[1]) < 0.08, errors  # of router weights most: their dot products cancel
    assert ep.settings.gradient_rows(x).record_bytes == 176, "160 codes and two scales, not 640 bytes"
    with pytest.raises(ValueError, match=r"gradient_fmt is .* allowed: None, and FP8_BLOCK where fmt is"):
        ranks.make(p, gradient_fmt=padless.FP8_BLOCK)


@case
def transposes(ranks: Ranks) -> None:
    """In bfloat16, with numbers whose sums are exact: <dispatch(x), y> = <x, combine(y)>, and the weights' gradient."""
    p = draw(ranks.counts(6, 5), 2 * ranks.size, 64, 2, 7)
    generator = torch.Generator().manual_seed(8)
    p.tokens = [torch.randint(-4, 5, t.shape, generator=generator).to(torch.bfloat16) for t in p.tokens]
    p.weights = [torch.randint(1, 5, w.shape, generator=generator).float() for w in p.weights]
    ep = ranks.make(p, fmt=torch.bfloat16)
    x, ids, weight = ranks.own(p)
    x.requires_grad_()
    weight.requires_grad_()
    rows, plan = ep.dispatch(x, ids, weight)
    used = int(plan.offs[-1])
    y = torch.randint(-4, 5, rows.shape, generator=generator).to(rows)
    (rows[:used] * y[:used]).sum().backward(retain_graph=True)
    assert torch.equal(x.grad, ep.combine(y, plan._replace(prob=plan.prob.detach())))
    x.grad = None
    back = y.clone().requires_grad_()
    out = ep.combine(back, plan, weighted=True)
    dout = torch.randint(-3, 4, out.shape, generator=generator).to(out)
    out.backward(dout)
    token = {slot[1:]: i for i, slot in enumerate(reference.slots_of(p, ranks.rank))}
    douts: list = [None] * ranks.size
    dist.all_gather_object(douts, dout.cpu())
    ys: list = [None] * ranks.size
    dist.all_gather_object(ys, y[:used].cpu())
    for (source, t, j), row in token.items():
        want = (p.weights[source][t, j] * douts[source][t].float()).to(torch.bfloat16)
        assert torch.equal(back.grad[row].cpu(), want), "gradient of rows"
    slots = {r: {s[1:]: i for i, s in enumerate(reference.slots_of(p, r))} for r in range(ranks.size)}
    for t, row_ids in enumerate(p.ids[ranks.rank].tolist()):
        for j, expert in enumerate(row_ids):
            want = 0.0
            if expert >= 0:
                r = p.expert_map[expert]
                want = float((ys[r][slots[r][ranks.rank, t, j]].float() * dout[t].cpu().float()).sum())
            assert float(weight.grad[t, j]) == want, "gradient of weights"


@case
def layer(ranks: Ranks) -> None:
    """The layer of FP8_BLOCK, MXFP8 and NVFP4 weights equals the same products in one process, bit for bit."""
    from padless.moe.activation import Activation
    from padless.moe.layer import Projection

    e, h, i = 2 * ranks.size, 128, 64
    for fmt in (padless.FP8_BLOCK, padless.MXFP8, padless.NVFP4):
        generator = torch.Generator().manual_seed(9)
        p = draw(ranks.counts(6, 5), e, h, 3, 10)
        p.tokens = [t.clamp(-4, 4) for t in p.tokens]
        w13 = torch.randn((e, 2 * i, h), generator=generator) / 11
        w2 = torch.randn((e, h, i), generator=generator) / 8
        one = torch.tensor(0.01) if fmt == padless.NVFP4 else None

        def weights(experts: list[int], device: Any, w13: Any = w13, w2: Any = w2, fmt: Any = fmt) -> list:
            return [padless.quantize(w[experts].to(device), fmt, kind="weight") for w in (w13, w2)]

        outputs = []
        for r in range(ranks.size):
            experts = [x for x, owner in enumerate(p.expert_map) if owner == r]
            first, second = (Projection(w, None, None) for w in weights(experts, ranks.device))
            rows = reference.rows_of(p, r, fmt, global_scale=one)
            if len(rows.data):
                rows = on(rows, ranks.device)
                offs = torch.tensor(reference.offs_of(p, r), dtype=torch.int32, device=ranks.device)
                scale = None if one is None else one.to(ranks.device)
                hidden = first.activated(rows, offs, Activation(), fmt, scale)
                outputs.append(second.product(hidden, offs).cpu())
            else:
                outputs.append(torch.empty((0, h), dtype=torch.bfloat16))
        want = reference.combined(p, outputs, torch.bfloat16, weighted=True)[ranks.rank]
        ep = ranks.make(p, fmt=fmt)
        own13, own2 = weights(list(ep.local_experts), ranks.device)
        scale = None if one is None else one.to(ranks.device)
        got = expert_parallel_moe(*ranks.own(p), ep, w13=own13, w2=own2, global_scale1=scale, global_scale2=scale)
        assert torch.equal(reference.bits(got), reference.bits(want)), fmt.name


def on(t: padless.BlockScaledTensor, device: torch.device) -> padless.BlockScaledTensor:
    """t on a device, FP8_BLOCK's scales MN-major."""
    from padless.layouts import to_mn_major

    scale = t.scale.to(device)
    if t.format == padless.FP8_BLOCK:
        scale = to_mn_major(scale.contiguous())
    scale_g = None if t.global_scale is None else t.global_scale.to(device)
    return padless.BlockScaledTensor(t.data.to(device), scale, t.format, scale_g)


@case
def errors(ranks: Ranks) -> None:
    """Wrong use is a sentence on every rank, and the next call works."""
    p = draw([4] * ranks.size, 2 * ranks.size, 64, 2, 11)
    with pytest.raises(ValueError, match=r"hidden is .* on rank 0 and .* on rank 1"):
        ExpertParallel(None, 2 * ranks.size, 64 if ranks.rank == 0 else 96, 2, 4, device=ranks.device)
    with pytest.raises(ValueError, match=r"num_experts is \d+ and there are"):
        ExpertParallel(None, 2 * ranks.size + 1, 64, 2, 4, device=ranks.device)
    with pytest.raises(ValueError, match="backend is 'nccl'"):
        ranks.make(p, backend="nccl")
    ep = ranks.make(p)
    assert ep.backend == ranks.backend
    x, ids, weights = ranks.own(p)
    if ranks.backend == "collective":
        wrong = torch.cat([x, x]) if ranks.rank == 0 else x
        with pytest.raises(
            ValueError, match="max_tokens is 4" if ranks.rank == 0 else "rank 0 was given wrong arguments"
        ):
            ep.dispatch(wrong, ids, weights)
        wrong_ids = ids.clone()
        if ranks.rank == 1:
            wrong_ids[2, 1] = 2 * ranks.size
        with pytest.raises(ValueError, match="ids of rank 1 hold a value at token 2"):
            ep.dispatch(x, wrong_ids, weights)
        small = ranks.make(p, capacity=1)
        with pytest.raises(ValueError, match="capacity is 1 rows and rank 0 receives"):
            small.dispatch(x, ids, weights)
        exact = ranks.make(p, capacity="exact")
        rows, plan = exact.dispatch(x, ids, weights)
        assert rows.shape[0] == max(int(plan.offs[-1]), 1)
    else:
        small = ranks.make(p, capacity=1)
        _, plan = small.dispatch(x, ids, weights)
        assert int(plan.overflow) == len(reference.slots_of(p, ranks.rank)) - 1
        assert int(plan.offs[-1]) == 1
        with pytest.raises(RuntimeError, match="capacity is 1 rows and rank"):
            small.check()
    with pytest.raises(ValueError, match="rows must be"):
        ep.combine(x, ep.dispatch(x, ids, weights)[1])
    large = ranks.make(p, max_tokens=8)
    _, plan = large.dispatch(x, ids, weights)
    with pytest.raises(ValueError, match=r"plan has .* slots and this object .*; give the plan that its own dispatch"):
        ep.combine(torch.randn(len(plan.prob), 64).bfloat16().to(ranks.device), plan)
    x.requires_grad_()
    with pytest.raises(ValueError, match=r"requires grad|wrong arguments"):
        ep.dispatch(x, ids, weights)
    x.requires_grad_(False)
    check_exchange(ranks, p, ep, padless.FP8_BLOCK, None, 2)


CASES |= ep_layers.CASES | ep_moe.CASES | ep_edges.CASES | ep_slots.CASES | ep_lora.CASES | ep_composed.CASES


# --- processes -------------------------------------------------------------------------------------------


def run_cases(ranks: Ranks, names: list[str]) -> dict[str, str | None]:
    """Outcome of every case on this rank; nothing runs after a failure anywhere, as ranks may then be at odds."""
    found: dict[str, str | None] = {}
    failed = ""
    for name in names:
        if failed:
            found[name] = f"not run: {failed} failed"
            continue
        try:
            CASES[name](ranks)
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
        outcomes: list[Any] = [None] * ranks.size
        dist.all_gather_object(outcomes, found[name])
        if any(outcomes):
            failed = name
            found[name] = next(f"rank {r}: {o}" for r, o in enumerate(outcomes) if o)
    return found


def run_all(rank: Rank, names: list[str] | None = None) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in names or list(CASES):
        start = time.monotonic()
        found |= run_cases(Ranks(rank), [name])
        if rank.rank == 0:
            print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
        if found[name] is not None:  # nothing runs after a failure anywhere, as ranks may then be at odds
            return dict.fromkeys(names or CASES, f"not run: {name} failed") | found
    together(rank)
    return found


def run_with_bug(rank: Rank, bug: str, name: str) -> dict[str, str | None]:
    """A case with a bug in the collective backend of every rank."""
    from padless.distributed import collective, row_format, settings
    from padless.distributed.plan import Sorted, sort_slots

    backend, call = collective.CollectiveBackend, collective.ops.call
    combine, fan_out, redispatch = backend.combine, backend._fan_out, backend.redispatch

    def from_the_last(table: torch.Tensor, experts: int) -> Sorted:
        found = sort_slots(table.flip(0, 1), experts)
        return Sorted(found.offs, found.inverse.flip(0, 1), found.tokens)

    def unweighted(name: str, *given: Any) -> Any:
        return call(name, given[0], given[1], None, *given[3:]) if name == "combine" else call(name, *given)

    def without_row_0(self: Any, records: torch.Tensor, plan: Any) -> torch.Tensor:
        rows = fan_out(self, records, plan)
        rows[:1] = 0
        return rows

    def without_slots(self: Any, rows: Any, plan: Any, prob: Any, dprob: Any) -> Any:
        out, slots = combine(self, rows, plan, prob, dprob)
        return out, None if slots is None else slots * 0.99

    def two_rows_exchanged(self: Any, x: torch.Tensor, plan: Any) -> torch.Tensor:
        rows = redispatch(self, x, plan)
        return torch.cat([rows[:2].flip(0), rows[2:]])

    def scales_of_other_blocks(self: Any, records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = self.rows(records, None)
        return rows if self.is_plain else padless.dequantize(replace(rows, scale=rows.scale.flip(1)), dtype)

    patches: dict[str, tuple[Any, str, Any]] = {
        "order": (collective, "sort_slots", from_the_last),
        "scales": (row_format.RowFormat, "values", scales_of_other_blocks),
        "unweighted": (collective.ops, "call", unweighted),
        "lost": (backend, "_fan_out", without_row_0),
        "slots": (backend, "combine", without_slots),
        "floor": (settings, "LIFT", 1.0),
        "again": (backend, "redispatch", two_rows_exchanged),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*patches[bug])
        return run_cases(Ranks(rank), [name])


def run(
    size: int = 2,
    *,
    cuda: bool = False,
    backend: str = "collective",
    timeout_s: float = 100.0,
    names: list[str] | None = None,
) -> Any:
    """Outcome of every case, or of those named, in processes of their own."""
    return raise_first(run_ranks(run_all, size, names, cuda=cuda, backend=backend, timeout_s=timeout_s))[0]


if __name__ == "__main__":
    on_gpus = "--cuda" in sys.argv
    given = [a for a in sys.argv[1:] if a in ("symm", "collective")] or ["collective"]
    chosen = [a for a in sys.argv[1:] if a in CASES]
    json.dump(run(cuda=on_gpus, backend=given[0], names=chosen, timeout_s=300), sys.stdout, indent=1)
