"""The "deepep" backend over `support.deepep_second` in gloo processes: the bits of "collective", whatever its order."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from padless.distributed import ExpertParallel, backend, deepep
from padless.distributed.plan import ExpertPlan
from padless.testing import exchange as reference
from padless.testing.exchange import draw
from padless.testing.ranks import Rank, RankPool, raise_first
from padless.verify.ranks import exchange
from padless.verify.ranks.exchange import Ranks
from support import deepep_second, ep_cases

HERE = "deepep"


def connected(ranks_per_host: int) -> Any:
    """`deepep.connect` with the stand-in for the package, on a CPU."""
    connect = deepep.connect

    def function(group: Any, device: torch.device, s: Any) -> Any:
        module = ModuleType("deep_ep")
        module.ElasticBuffer = lambda *a, **k: deepep_second.ElasticBuffer(*a, **k, ranks_per_host=ranks_per_host)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "deep_ep", module)
            patch.setattr(deepep, "find_spec", lambda name: object())
            return connect(group, torch.device("cuda"), s)

    return function


def over_deepep(
    rank: Rank, names: tuple[str, ...], planted: str = "", ranks_per_host: int = 1
) -> dict[str, str | None]:
    """Outcomes of cases of `support.ep_cases` with the backend, and a bug in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepep, "connect", connected(ranks_per_host))
        patch.setattr(exchange, "FORMATS", exchange.FORMATS[:-1])  # DeepEP adds bfloat16 alone
        patch.setattr(exchange, "GRADIENTS", exchange.GRADIENTS[:-1])
        for name in ("refusals", "as_collective", "cancelling", "choice"):
            patch.setitem(ep_cases.CASES, name, globals()[name])
        plant(patch, planted)
        return ep_cases.run_cases(Ranks(replace(rank, backend=HERE)), list(names))


def plant(patch: pytest.MonkeyPatch, bug: str) -> None:
    made = deepep.DeepEpBackend
    if bug == "order of ranks":  # slots as they are given
        patch.setattr(made, "_order", lambda self, ids: torch.arange(ids.shape[1]).expand(ids.shape))
    elif bug == "stale":  # what lies behind the received records is taken for records
        patch.setattr(deepep.torch, "where", no_where)
    elif bug == "arrival":  # records in the order of arrival
        patch.setattr(deepep, "_by_source", lambda values, sources, fill: values)
    elif bug == "two reductions":
        init = deepep_second.ElasticBuffer.__init__
        patch.setattr(
            deepep_second.ElasticBuffer,
            "__init__",
            lambda *a, **k: init(*a, **(k | {"allow_multiple_reduction": True})),
        )
    elif bug == "slots":  # gradients of weights stay in the order of ranks
        combine = made.combine

        def unsorted(self: Any, rows: Any, plan: Any, prob: Any, dprob: Any) -> Any:
            out, slots = combine(self, rows, plan, prob, dprob)
            return out, None if slots is None else slots.gather(1, self._order(plan.ids))

        patch.setattr(made, "combine", unsorted)


WHERE = torch.where


def no_where(condition: torch.Tensor, *given: Any) -> torch.Tensor:
    is_mask = condition.dim() == 2 and condition.shape[1] == 1
    return WHERE(torch.ones_like(condition), *given) if is_mask else WHERE(condition, *given)


# --- cases of these tests alone --------------------------------------------------------------------------


def refusals(ranks: Ranks) -> None:
    """What a device finds is raised by the next call; what cannot be is a sentence."""
    p = draw([4] * ranks.size, 2 * ranks.size, 64, 2, 11)
    x, ids, weights = ranks.own(p)
    small = ranks.make(p, capacity=1)
    assert small.backend == HERE
    rows, plan = small.dispatch(x, ids, weights)
    assert int(plan.overflow) == len(reference.slots_of(p, ranks.rank)) - 1
    assert plan.offs.max() <= 1
    with pytest.raises(RuntimeError, match=r"capacity is 1 rows and rank \d received \d+ more"):
        small.check()
    exact, plan = ranks.make(p, capacity="exact").dispatch(x, ids, weights)
    assert exact.data.shape[0] == max(int(plan.offs[-1]), 1)
    ep = ranks.make(p)
    wrong = ids.clone()
    wrong[:, 1] = 2 * ranks.size if ranks.rank == 1 else ids[:, 1]
    ep.dispatch(x, wrong, weights)
    with pytest.raises(RuntimeError, match="ids of rank 1 held a value that is no expert"):
        ep.check()
    rows, plan = ep.dispatch(x, ids, weights)
    strange = ExpertPlan(*(t.clone() for t in plan))
    with pytest.raises(ValueError, match="plan is of another object's dispatch"):
        ep.combine(torch.zeros((len(plan.prob), 64), dtype=torch.bfloat16), strange)
    del rows, plan
    ep.dispatch(x, ids, weights)
    assert len(ep._backend._routes) == 1, "routes live as long as their plans"
    with pytest.raises(ValueError, match=r"fmt is torch.float32, and DeepEP adds bfloat16 alone"):
        ranks.make(p, fmt=torch.float32)


def as_collective(ranks: Ranks) -> None:
    """Rows, plans and sums of both backends side by side, with a second dispatch between dispatch and combine."""
    p = draw(ranks.counts(9, 6), 3 * ranks.size, 288, 4, 17)
    mine, theirs = (ranks.make(p, backend=name) for name in (HERE, "collective"))
    found = []
    for ep in (mine, theirs):
        rows, plan = ep.dispatch(*ranks.own(p))
        other = ep.dispatch(*ranks.own(p))  # its records come in another order
        used = int(plan.offs[-1])
        y = torch.randn((len(plan.prob), 288), generator=torch.Generator().manual_seed(ranks.rank)).bfloat16()
        y[used:] = torch.nan
        sums = [ep.combine(y, each, weighted=weighted) for each in (plan, other[1]) for weighted in (False, True)]
        kept = [plan.offs, plan.prob[:used], plan.inverse.clamp(min=-1), plan.ids, plan.overflow[None]]
        again = ep._backend.redispatch(sums[1], plan)[:used]
        found.append([rows.data[:used].view(torch.uint8), rows.scale[:used], *kept, *sums, again])
    for i, (got, want) in enumerate(zip(*found, strict=True)):
        assert got.dtype == want.dtype
        assert torch.equal(reference.bits(got), reference.bits(want)), i


def cancelling(ranks: Ranks) -> None:
    """Sums of three ranks, A + b - A, and slots in any order: in the order of ranks, in float32, rounded once."""
    n, hidden, tokens = ranks.size, 256, 8
    generator = torch.Generator().manual_seed(31)
    p = draw([tokens] * n, n, hidden, n, 23, distinct=True)
    p.ids = [torch.stack([torch.randperm(n, generator=generator) for _ in range(tokens)]) for _ in range(n)]
    large = 1e4 * torch.randn((n * tokens, hidden), generator=generator)
    outputs = [t.to(torch.bfloat16) for t in (large, torch.randn((n * tokens, hidden), generator=generator), -large)]
    ep = ranks.make(p)
    _, plan = ep.dispatch(*ranks.own(p))
    y = torch.full((len(plan.prob), hidden), torch.nan, dtype=torch.bfloat16)
    y[: n * tokens] = outputs[ranks.rank]
    want = reference.combined(p, outputs, torch.bfloat16, weighted=False)[ranks.rank]
    assert torch.equal(reference.bits(ep.combine(y, plan)), reference.bits(want))


def choice(ranks: Ranks) -> None:
    """ "auto": by the hosts of the ranks and what is installed there, the same on all ranks."""
    p = draw([4] * ranks.size, 2 * ranks.size, 64, 2, 11)
    settings = ranks.make(p).settings
    group, gpu = dist.group.WORLD, torch.device("cuda", 0)

    def chosen(hosts: bool, installed: bool, **changes: Any) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend.socket, "gethostname", lambda: f"host {ranks.rank if hosts else 0}")
            patch.setattr(backend.deepep, "is_there", lambda: installed and (ranks.rank == 0 or installed is True))
            patch.setattr(backend, "has_triton", lambda: True)
            return backend._automatic(group, gpu, replace(settings, **changes))

    assert chosen(hosts=True, installed=True) == HERE
    assert chosen(hosts=True, installed=1) == "collective"  # on the first rank alone
    assert chosen(hosts=True, installed=False) == "collective"
    assert chosen(hosts=True, installed=True, partial=torch.float32) == "collective"
    assert chosen(hosts=True, installed=True, max_tokens=4, top_k=2048) == "collective"
    assert chosen(hosts=False, installed=True) == "symm"
    assert chosen(hosts=False, installed=True, capacity="exact") == "collective"
    assert ExpertParallel(group, 2 * ranks.size, 64, 2, 4).backend == "collective"


# --- processes -------------------------------------------------------------------------------------------

CASES = (
    "sizes", "gradient_rows", "invariance", "transposes", "refusals", "as_collective", "choice", "little_or_nothing",
    "no_gradients", "shared_rows", "router_of_inference_mode", "construction",
)  # fmt: skip


@pytest.fixture(scope="module")
def on_gloo() -> dict[str, str | None]:
    with RankPool(2, cuda=False, backend="collective") as pool:
        return raise_first(pool.call(over_deepep, CASES, timeout_s=100))[0]


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, on_gloo: dict[str, str | None]) -> None:
    assert on_gloo[name] is None, on_gloo[name]


@pytest.mark.slow
def test_three_processes_of_two_hosts() -> None:
    with RankPool(3, cuda=False, backend="collective") as pool:
        names = ("cancelling", "as_collective", "transposes", "formats", "layer")
        found = raise_first(pool.call(over_deepep, names, "", 2, timeout_s=200))
        assert not any(found[0].values()), found[0]
        for bug in ("order of ranks", "two reductions"):
            assert raise_first(pool.call(over_deepep, ("cancelling",), bug, 2, timeout_s=200))[0]["cancelling"], bug


@pytest.mark.slow
def test_planted_bugs_are_found() -> None:
    planted = (("stale", "as_collective"), ("arrival", "as_collective"), ("slots", "transposes"))
    for bug, case in planted:
        with RankPool(2, cuda=False, backend="collective") as pool:
            assert raise_first(pool.call(over_deepep, (case,), bug, timeout_s=60))[0][case] is not None, bug


# --- one process -----------------------------------------------------------------------------------------


def test_refusals_before_anything_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    s = SimpleNamespace(partial=torch.bfloat16, num_ranks=2, top_k=2)
    with pytest.raises(ValueError, match="backend is 'deepep' and the device cpu; it needs GPUs"):
        deepep.connect(None, torch.device("cpu"), s)
    with pytest.raises(ValueError, match=r"deep_ep cannot be imported; install DeepEP 2 \(github.com/deepseek-ai"):
        deepep.connect(None, torch.device("cuda"), s)
    monkeypatch.setattr(deepep, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    with pytest.raises(ValueError, match="deep_ep has no ElasticBuffer, as before version 2; install DeepEP 2"):
        deepep.connect(None, torch.device("cuda"), s)
    s.num_ranks = 2000
    with pytest.raises(ValueError, match="top_k is 2 on 2000 ranks, and 'deepep' takes up to 2048 slots"):
        deepep.connect(None, torch.device("cuda"), s)
