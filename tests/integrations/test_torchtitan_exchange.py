"""torchtitan's token dispatcher over `ExpertParallel`, in two gloo processes: values and gradients.

Where torchtitan can be imported its own files are used, and its all-to-all dispatcher is compared with; elsewhere it is
`support.torchtitan_seam`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from padless.testing.ranks import Rank, RankPool, raise_first
from support import torchtitan_seam

HAS_TITAN = find_spec("torchtitan") is not None
PLUGIN = "padless.integrations.torchtitan_exchange"
EXPERTS = "padless.integrations.torchtitan"
E, K, D, F = 6, 2, 128, 96
TOKENS = (9, 5)
NAMES = ["out", "x", "scores", "w1", "w2", "w3"]


@pytest.fixture(scope="module", autouse=True)
def _seam() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TITAN:
            torchtitan_seam.install(patch)
        yield
        for name in () if HAS_TITAN else (PLUGIN, EXPERTS):
            sys.modules.pop(name, None)


def titan(name: str) -> Any:
    return importlib.import_module(f"torchtitan.models.common.{name}")


def drawn(rank: int) -> SimpleNamespace:
    """Tokens of a rank with distinct experts, scores, a gradient; the experts' weights, the same on all ranks."""
    generator = torch.Generator().manual_seed(40 + rank)
    t = TOKENS[rank]
    ids = torch.rand((t, E), generator=generator).topk(K, dim=1).indices
    scores, dout = torch.rand((t, K), generator=generator), torch.randn((t, D), generator=generator).bfloat16()
    x = torch.randn((t, D), generator=generator).bfloat16()
    generator = torch.Generator().manual_seed(4)
    shapes = {"w1_EFD": (E, F, D), "w2_EDF": (E, D, F), "w3_EFD": (E, F, D)}
    weights = {n: torch.randn(s, generator=generator).bfloat16().float() / 10 for n, s in shapes.items()}
    return SimpleNamespace(x=x, ids=ids, scores=scores, dout=dout, weights=weights)


def experts_of(p: SimpleNamespace, rank: int, size: int, fp8: bool = False) -> Any:
    """This rank's experts, torchtitan's class, or the one that the override `fp8_experts` puts in its place."""
    own = slice(rank * E // size, (rank + 1) * E // size)
    config = titan("moe").GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E // size)
    module = (importlib.import_module(EXPERTS).fp8_experts(config) if fp8 else config).build()
    with torch.no_grad():
        for name, w in p.weights.items():
            getattr(module, name).copy_(w[own])
    return module


def stepped(dispatcher: Any, p: SimpleNamespace, module: Any) -> list[torch.Tensor]:
    """Output and gradients of a step, as `RoutedExperts.forward` makes it."""
    x, scores = p.x.clone().requires_grad_(), p.scores.clone().requires_grad_()
    rows, counts, plan = dispatcher.dispatch(x, scores, p.ids, torch.bincount(p.ids.flatten(), minlength=E))
    out = dispatcher.combine(module(rows, counts), plan, x)
    out.backward(p.dout)
    return [out.detach(), x.grad, scores.grad, *(getattr(module, name).grad for name in p.weights)]


def dense(size: int) -> list[list[torch.Tensor]]:
    """`stepped` of every rank in float64: gradients of the experts are those of all tokens."""
    parts = [drawn(r) for r in range(size)]
    weights = [w.double().requires_grad_() for w in parts[0].weights.values()]
    found = []
    for p in parts:
        x, scores = p.x.double().requires_grad_(), p.scores.double().requires_grad_()
        w1, w2, w3 = (w[p.ids] for w in weights)
        h = torch.nn.functional.silu(torch.einsum("tkfd,td->tkf", w1, x)) * torch.einsum("tkfd,td->tkf", w3, x)
        out = (torch.einsum("tkdf,tkf->tkd", w2, h) * scores[..., None]).sum(1)
        out.backward(p.dout.double())
        found.append([out.detach(), x.grad, scores.grad])
    half = E // size
    return [[*f, *(w.grad[r * half : (r + 1) * half] for w in weights)] for r, f in enumerate(found)]


def differences(rank: Rank, bug: str = "", fp8: bool = False) -> dict[str, dict[str, float]]:
    """Relative error of each result against float64, and against torchtitan's own dispatcher where it is there."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TITAN:
            torchtitan_seam.install(patch)
        plugin = importlib.import_module(PLUGIN)
        if bug == "unweighted":
            combine = plugin.ExpertParallel.combine
            patch.setattr(plugin.ExpertParallel, "combine", lambda s, rows, plan, weighted: combine(s, rows, plan))
        if bug == "counts":
            diff = torch.diff
            patch.setattr(torch, "diff", lambda offs, prepend: diff(offs, prepend=prepend).flip(0))
        p = drawn(rank.rank)
        mesh = init_device_mesh("cpu", (rank.size,), mesh_dim_names=("ep",))
        given = plugin.BaseEPTokenDispatcher.Config(num_experts=E, top_k=K)
        config = plugin.expert_parallel(given, hidden_dim=D, num_max_tokens_per_rank=max(TOKENS))
        mine = plugin.PadlessTokenDispatcher(config)
        mine.wire_meshes(ep_mesh=mesh)
        results = stepped(mine, p, experts_of(p, rank.rank, rank.size, fp8))
        wanted = {"float64": dense(rank.size)[rank.rank]}
        if HAS_TITAN:
            theirs = titan("token_dispatcher").AllToAllTokenDispatcher
            patch.setattr(titan("token_dispatcher"), "get_spmd_backend", lambda: "")  # a mesh and no context around
            other = theirs(theirs.Config(num_experts=E, top_k=K))
            other.wire_meshes(ep_mesh=mesh)
            wanted["torchtitan"] = stepped(other, p, experts_of(p, rank.rank, rank.size))
        return {
            who: {n: error(got, w) for n, got, w in zip(NAMES, results, want, strict=True)}
            for who, want in wanted.items()
        }


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


def alone(rank: Rank) -> list[list[torch.Tensor]]:
    """One rank without a mesh, beside torchtitan's local dispatcher."""
    with pytest.MonkeyPatch.context() as patch:
        if not HAS_TITAN:
            torchtitan_seam.install(patch)
        plugin = importlib.import_module(PLUGIN)
        given = plugin.LocalTokenDispatcher.Config(num_experts=E, top_k=K)
        mine = plugin.PadlessTokenDispatcher(plugin.expert_parallel(given, hidden_dim=D, num_max_tokens_per_rank=9))
        mine.wire_meshes(ep_mesh=None)
        p = drawn(0)
        return [stepped(d, p, experts_of(p, 0, 1)) for d in (mine, plugin.LocalTokenDispatcher(given))]


@pytest.mark.slow
def test_two_ranks() -> None:
    """A step near float64 and near torchtitan's all-to-all, with FP8 experts too; weights left out and wrong counts are
    found."""
    with RankPool(2, cuda=False, backend="collective") as pool:
        for found in raise_first(pool.call(differences, timeout_s=90)):
            assert set(found) == ({"float64", "torchtitan"} if HAS_TITAN else {"float64"})
            for who, errors in found.items():
                assert all(e < 0.012 for e in errors.values()), (who, errors)
        for bug in ("unweighted", "counts"):
            found = raise_first(pool.call(differences, bug, timeout_s=90))
            assert all(f["float64"]["out"] > 0.1 for f in found), bug
        for found in raise_first(pool.call(differences, "", True, timeout_s=90)):  # both overrides
            assert all(0.03 < e < 0.1 for errors in found.values() for e in errors.values()), found


def test_one_rank() -> None:
    mine, theirs = alone(Rank(0, 1, torch.device("cpu"), "collective"))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_override() -> None:
    plugin = importlib.import_module(PLUGIN)
    base = plugin.BaseEPTokenDispatcher
    config = plugin.expert_parallel(
        base.Config(num_experts=E, top_k=K), hidden_dim=D, num_max_tokens_per_rank=4, capacity=7
    )
    assert (config.num_experts, config.top_k, config.hidden_dim, config.capacity) == (E, K, D, 7)
    for name in ("dispatch", "combine"):
        assert inspect.signature(getattr(plugin.PadlessTokenDispatcher, name)).parameters.keys() == (
            inspect.signature(getattr(plugin.LocalTokenDispatcher, name)).parameters.keys()
        )
    config.dtype = "float16"
    with pytest.raises(ValueError, match="dtype is 'float16'; allowed: bfloat16, float32"):
        plugin.PadlessTokenDispatcher(config)
    if HAS_TITAN:
        from torchtitan.config.override import OverrideConfig, apply_overrides

        moe, dispatchers = titan("moe"), titan("token_dispatcher")
        tree = moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E),
            token_dispatcher=dispatchers.AllToAllTokenDispatcher.Config(num_experts=E, top_k=K),
        )
        sizes = {"hidden_dim": D, "num_max_tokens_per_rank": 9}
        both = [f"{EXPERTS}.fp8_experts", (f"{PLUGIN}.expert_parallel", sizes)]
        assert len(apply_overrides(OverrideConfig(imports=both), tree)) == 2
        built = tree.build()
        assert isinstance(built.token_dispatcher, plugin.PadlessTokenDispatcher)
        assert type(built.inner_experts).__name__ == "PadlessGroupedExperts"
