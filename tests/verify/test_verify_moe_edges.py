"""The checks of edges, operators and decoding of `padless verify`, as far as a CPU runs them, and what they notice."""

from __future__ import annotations

import pytest
import torch

from padless.moe import ops, twins
from padless.verify import moe as verify_moe
from padless.verify import moe_edges
from padless.verify.checks import Check
from padless.verify.run import jobs_of

LAYERS = Check(moe_edges.check_layer_edges)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "DEVICE", "cpu")


@pytest.fixture
def first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8_BLOCK alone."""
    monkeypatch.setattr(verify_moe, "CASES", verify_moe.CASES[:1])


def test_edges_are_there() -> None:
    """No tokens, k of 1 and 16, an expert with every slot, ids that are no expert."""
    found = dict(moe_edges.edges())
    assert len(found["no tokens"]) == 0
    assert {ids.shape[1] for ids in found.values()} >= {1, 16}
    assert found["one expert gets all"].unique().numel() == 1
    assert len(found["one expert gets all"]) > 128
    for name in ("no id is an expert", "some ids are no expert"):
        assert (found[name] >= moe_edges.EXPERTS).any()
    assert (found["some ids are no expert"] < 0).any()


def test_layers_on_the_cpu(first_layer: None) -> None:
    assert "elements" in LAYERS.on("reference", "sm_90a")


@pytest.mark.slow
def test_operators_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs, and an operator that gives other bits when it is compiled is noticed."""
    assert "8 operators" in moe_edges.check_operators()
    monkeypatch.setattr(moe_edges, "operators", dict)
    monkeypatch.setattr(moe_edges, "moe", lambda *a: ops.call("combine", a[0], a[1] * 0, None, None, torch.bfloat16))
    monkeypatch.setattr(ops, "call", lambda name, *a: getattr(torch.ops.padless, name)(*a))
    moe_edges.check_operators()
    monkeypatch.setattr(ops, "call", lambda name, *a: a[0] * (3 if torch.compiler.is_compiling() else 1))
    with pytest.raises(AssertionError, match="compiled moe"):
        moe_edges.check_operators()


@pytest.mark.slow
def test_layers_of_every_format_on_the_cpu() -> None:
    LAYERS.on("reference", "sm_90a")
    LAYERS.on("reference", "sm_100a")


@pytest.mark.parametrize("planted", ["tail counted", "dx of half", "dweights of others", "moe doubled"])
def test_a_wrong_layer_is_noticed(planted: str, first_layer: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin itself is wrong, or the gradient is, or a fused step of the layer."""
    original, backward, forward = twins.route, ops._FUNCTIONS["moe_backward"], ops._FUNCTIONS["combine"]

    def tail_counted(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        offs, tokens, inverse = original(ids, num_experts)
        return offs, tokens, torch.where(inverse < 0, -1 - inverse, inverse)

    def wrong_gradient(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        dx, dweights = backward(*arguments)
        return (dx / 2, dweights) if planted == "dx of half" else (dx, dweights.flip(0))

    if planted == "tail counted":
        monkeypatch.setattr(twins, "route", tail_counted)
    elif planted == "moe doubled":
        monkeypatch.setitem(ops._FUNCTIONS, "combine", lambda *arguments: 2 * forward(*arguments))
    else:
        monkeypatch.setattr(torch.ops.padless, "moe_backward", wrong_gradient)
    with pytest.raises(AssertionError):
        LAYERS.on("reference", "sm_90a")


@pytest.mark.parametrize(
    ("kinds", "early", "said"),
    [
        (["KERNEL"] * 5, 3, "5 launches"),
        (["KERNEL", "MEMSET", "KERNEL"], 2, "nodes are"),
        (["KERNEL"] * 4, 1, "1 launches begin early"),
    ],
)
def test_a_layer_of_more_launches_is_noticed(kinds: list[str], early: int, said: str) -> None:
    moe_edges.judge_launches("a layer", ["KERNEL"] * 4, 2, programmatic=True)
    moe_edges.judge_launches("a layer", ["KERNEL"] * 4, 0, programmatic=False)
    with pytest.raises(AssertionError, match=said):
        moe_edges.judge_launches("a layer", kinds, early, programmatic=True)


def test_decoding_is_of_more_than_one_pair() -> None:
    hopper, blackwell = (list(moe_edges.decoded(arch)) for arch in ("sm_90a", "sm_100a"))
    assert len(blackwell) >= 2
    assert len(hopper) >= 4
    assert {activations for _, activations, options, _ in hopper if options} == {torch.bfloat16}


def test_verify_has_the_checks() -> None:
    assert set(moe_edges.CHECKS) <= set(jobs_of("sm_90a")[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["operators of the MoE layer"])
def test_operators_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "DEVICE", "cuda")
    moe_edges.CHECKS[name]()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["MoE layer at edges", "decoding by the MoE layer"])
def test_layers_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_moe, "DEVICE", "cuda")
    moe_edges.CHECKS[name]()
