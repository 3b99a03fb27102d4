"""`padless.nn.graphed`: the wiring on a CPU, where a replay does the work again; on a GPU, CUDA graphs themselves."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.nn import DelayedWgrad, Experts, GroupedLinear, MoE, graphed, graphs
from padless.nn.graphs import Graphed, Recorded
from padless.verify.fuzz.place import place_of
from padless.verify.training import graphs as verified
from support import training_layer
from support.replays import again
from support.training_layer import Layer, module

WEIGHTS = ("w13", "w2")


def layer(tokens: int = 30, seed: int = 0) -> Layer:
    return training_layer.layer(tokens=tokens, hidden=64, intermediate=48, seed=seed)


@pytest.fixture(autouse=True)
def replays_do_the_work_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "record", again)


def inputs(problem: Layer, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    p = problem.leaves(dtype)
    return [p["x"], problem.index, p["prob"]]


def step(call: Any, experts: Experts, problem: Layer) -> dict[str, torch.Tensor]:
    """The output and all gradients of one call of ``call``, which is ``experts``; weights' gradients are taken away."""
    given = inputs(problem)
    experts.zero_grad()
    out = call(*given)
    out.backward(problem.dout.to(out.dtype))
    found = {"out": out.detach().clone(), "x": given[0].grad, "prob": given[2].grad}
    found |= {name: getattr(experts, name).grad for name in WEIGHTS}
    return {name: t.clone() for name, t in found.items() if t is not None}


def drawn(seed: int) -> Layer:
    """Other tokens, gradients, and groups of other sizes."""
    problem = layer(seed=seed)
    return replace(problem, index=(problem.index + seed) % 8 - 1)


def pair(recipe: str = "fp8", keep_codes: bool = False) -> tuple[Experts, Experts, Graphed]:
    """Two layers of the same weights, and graphs of the second."""
    first, second = (module(layer(), recipe, dtype=torch.float32, keep_codes=keep_codes) for _ in range(2))
    return first, second, Graphed(second, inputs(layer(seed=9)))


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("keep_codes", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_steps_are_those_of_the_layer_with_other_ids_and_weights(recipe: str, keep_codes: bool) -> None:
    eager, experts, graph = pair(recipe, keep_codes)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (eager, experts)]
    for seed in range(3):
        problem = drawn(seed)
        same(step(graph, experts, problem), step(eager, eager, problem))
        for optimizer in optimizers:
            optimizer.step()
    experts.w13.data.mul_(2)
    with torch.no_grad():
        eager.w13.mul_(2)
    if keep_codes:  # unseen, until it is said
        experts.forget_codes()
    same(step(graph, experts, layer()), step(eager, eager, layer()))


def test_kept_codes_are_made_once_for_all_microbatches_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    _, experts, graph = pair(keep_codes=True)
    made: list[int] = []
    real = graphs.weight_operands
    monkeypatch.setattr(graphs, "weight_operands", lambda *a: (made.append(1), real(*a))[1])
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    for _ in range(2):
        for seed in range(3):
            step(graph, experts, layer(seed=seed))
        optimizer.step()
    assert len(made) == 2 * len(WEIGHTS)


def test_gradients_of_microbatches_are_added_up() -> None:
    """Autograd may take a graph's own memory for .grad: the next replay is not to write there."""
    eager, experts, graph = pair()
    for call in (eager, graph):
        for seed in range(3):
            given, problem = inputs(layer(seed=seed)), layer(seed=seed)
            call(*given).backward(problem.dout.float())
    for name in WEIGHTS:
        assert torch.equal(getattr(experts, name).grad, getattr(eager, name).grad), name


@pytest.mark.parametrize("by_autograd", [False, True])
def test_gradients_outlive_a_forward_pass_that_writes_there(by_autograd: bool) -> None:
    """Captures share memory: what a forward pass is done with may be where a backward pass leaves its results."""
    eager, experts, graph = pair()
    right = graph._forward

    def replay() -> None:
        for t in graph._backward[False].results:
            if t is not None:
                t.fill_(float("nan"))
        right.replay()

    graph._forward = Recorded(replay, right.results)
    for seed in range(3):
        problem = layer(seed=seed)
        eager(*inputs(problem)).backward(problem.dout.float())
        if by_autograd:
            graph(*inputs(problem)).backward(problem.dout.float())
        else:
            graph.forward(*inputs(problem))
            graph.backward(problem.dout.float())
    for name in WEIGHTS:
        assert torch.equal(getattr(experts, name).grad, getattr(eager, name).grad), name


@pytest.mark.parametrize("flagged", [False, True])
def test_main_grad_is_stored_and_added_to_as_the_flag_says(flagged: bool) -> None:
    layers = [module(layer(), "fp8", dtype=torch.float32) for _ in range(2)]
    for experts in layers:
        for name in WEIGHTS:
            weight = getattr(experts, name)
            weight.main_grad = torch.full(weight.shape, 3.0)
            if flagged:
                weight.grad_added_to_main_grad = False
    eager, experts = layers
    graph = Graphed(experts, inputs(layer(seed=9)))
    assert bool((experts.w13.main_grad == 3).all()), "capturing has changed it"
    for call, its in ((eager, eager), (graph, experts)):
        for seed, overwrite in enumerate((True, False, False, True, False)):
            for name in WEIGHTS:
                getattr(its, name).overwrite_main_grad = overwrite
            problem = layer(seed=seed)
            call(*inputs(problem)).backward(problem.dout.float())
    for name in WEIGHTS:
        assert torch.equal(getattr(experts, name).main_grad, getattr(eager, name).main_grad), name
        assert getattr(experts, name).overwrite_main_grad is False
        assert (getattr(experts, name).grad is not None) == flagged
        assert getattr(getattr(experts, name), "grad_added_to_main_grad", False) == flagged


def test_a_layer_with_its_router_and_a_shared_expert() -> None:
    torch.manual_seed(0)
    first = MoE(64, 32, 6, 2, shared_intermediate=48, dtype=torch.bfloat16)
    second = MoE(64, 32, 6, 2, shared_intermediate=48, dtype=torch.bfloat16)
    second.load_state_dict(first.state_dict())
    x = torch.randn(5, 7, 64).bfloat16()
    graph = Graphed(second, [torch.zeros_like(x)])
    for call in (first, graph):
        call(x).square().sum().backward()
    for (name, mine), its in zip(first.named_parameters(), second.parameters(), strict=True):
        assert mine.grad is not None, name
        assert torch.equal(mine.grad, its.grad), name


def test_a_grouped_linear_layer_with_other_sizes_of_groups() -> None:
    """Rows past the last group get zeros, whatever the sizes were when the layer was captured."""
    torch.manual_seed(1)
    first, second = (GroupedLinear(3, 64, 48, dtype=torch.bfloat16) for _ in range(2))
    second.load_state_dict(first.state_dict())
    rows, dout = torch.randn(40, 64).bfloat16(), torch.randn(40, 48).bfloat16()
    graph = Graphed(second, [rows.clone().requires_grad_(), torch.tensor([13, 26, 40], dtype=torch.int32)])
    for ends in ((0, 7, 33), (40, 40, 40), (1, 1, 2)):
        offs, found = torch.tensor(ends, dtype=torch.int32), []
        for call, its in ((first, first), (graph, second)):
            its.zero_grad()
            x = rows.clone().requires_grad_()
            out = call(x, offs)
            out.backward(dout)
            found.append([out.detach().clone(), x.grad, its.weight.grad.clone()])
        assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True)), ends
        assert not found[1][0][ends[-1] :].any()


@pytest.mark.parametrize("in_place", [False, True])
def test_passes_without_autograd(in_place: bool) -> None:
    """The same gradients, added up over microbatches; nothing is copied that is written into the graphs' own inputs."""
    eager, experts, graph = pair()
    for seed in range(2):
        problem = drawn(seed)
        given = inputs(problem)
        want = eager(*given)
        want.backward(problem.dout)
        dout = problem.dout
        replaced: list[torch.Tensor] = [t.detach() for t in given]
        if in_place:
            for mine, its in zip((*graph.inputs, graph.dout), (*replaced, dout), strict=True):
                mine.copy_(its)
            replaced, dout = list(graph.inputs), graph.dout
        assert torch.equal(graph.forward(*replaced), want)
        dx, none, dprob = graph.backward(dout)
        assert none is None
        assert torch.equal(dx, given[0].grad)
        assert torch.equal(dprob, given[2].grad)
    for name in WEIGHTS:
        assert torch.equal(getattr(experts, name).grad, getattr(eager, name).grad), name


def test_without_autograd_the_layer_itself_is_called() -> None:
    eager, _, graph = pair()
    problem = layer()
    pending = graph(*inputs(problem))
    with torch.no_grad():
        assert torch.equal(graph(*inputs(layer(tokens=11))), eager(*inputs(layer(tokens=11))))
    pending.sum().backward()


def test_a_frozen_weight_has_no_gradient() -> None:
    experts = module(layer(), "fp8", dtype=torch.float32)
    experts.w2.requires_grad_(False)
    graph = Graphed(experts, inputs(layer(seed=9)))
    got = step(graph, experts, layer())
    assert "w2" not in got
    assert "w13" in got


def test_what_would_be_wrong_is_refused() -> None:
    _, experts, graph = pair()
    first = graph(*inputs(layer()))
    graph(*inputs(layer()))
    with pytest.raises(RuntimeError, match="called again before this backward pass"):
        first.sum().backward()
    with pytest.raises(ValueError, match="inputs must be as captured"):
        graph(*inputs(layer(tokens=11)))
    experts.w13.data = experts.w13.data.clone()
    with pytest.raises(ValueError, match="a parameter of layer, or its main_grad, is another tensor"):
        graph(*inputs(layer()))
    with pytest.raises(ValueError, match="CUDA graphs are for tensors on one"):
        graphed(experts, *inputs(layer()))
    experts.delayed_wgrad = DelayedWgrad()
    with pytest.raises(ValueError, match="layer has a Experts with ep or delayed_wgrad"):
        graphed(experts, *inputs(layer()))


def test_a_part_of_a_backward_pass_is_refused_where_all_would_be_added_to_main_grad() -> None:
    experts = module(layer(), "fp8", dtype=torch.float32)
    experts.w13.main_grad = torch.zeros_like(experts.w13)
    graph = Graphed(experts, inputs(layer(seed=9)))
    given = inputs(layer())
    with pytest.raises(RuntimeError, match="a graph adds to main_grad of every parameter"):
        torch.autograd.grad(graph(*given).sum(), given[0])
    assert not experts.w13.main_grad.any()
    graph(*given).sum().backward()
    assert experts.w13.main_grad.any()


# --- planted ---------------------------------------------------------------------------------------------


def test_codes_that_are_not_made_again_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs._Codes, "refresh", lambda self: None)
    with pytest.raises(AssertionError):
        test_steps_are_those_of_the_layer_with_other_ids_and_weights("fp8", keep_codes=True)


def test_gradients_in_the_graphs_memory_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_keep_gradient", lambda parameter, written: None)
    with pytest.raises(AssertionError):
        test_gradients_of_microbatches_are_added_up()


# --- the GPU ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_check_of_verify_passes() -> None:
    place = place_of("reference")
    verified.check_graphed_layer(place, Graphed)
    assert "elements" in place.judge.outcome()


def test_the_check_of_verify_finds_stale_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs._Codes, "refresh", lambda self: None)
    place = place_of("reference")
    verified.check_graphed_layer(place, Graphed)
    with pytest.raises(AssertionError, match="another weight"):
        place.judge.outcome()


@pytest.mark.gpu
def test_graphs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert verified.CHECK()


def test_another_parameter_or_recipe_is_refused() -> None:
    """Also of a weight that takes no gradient: no graph reads it."""
    for number in range(4):
        experts = module(layer(), "fp8", dtype=torch.float32)
        experts.w2.requires_grad_(False)
        graph, weight = Graphed(experts, inputs(layer(seed=9))), (experts.w13, experts.w2)[number % 2]
        step(graph, experts, layer(seed=1))
        if number < 2:
            setattr(experts, WEIGHTS[number], torch.nn.Parameter(weight.detach() * 2, weight.requires_grad))
        elif number == 2:
            weight.data = weight.data * 2
        else:
            experts.recipe = "fp8_1d1d"
        with pytest.raises(ValueError, match="capture the layer again"):
            graph(*inputs(layer(seed=2)))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_graphs_are_not_copied(copied: Callable[[Graphed], object]) -> None:
    with pytest.raises(TypeError, match=r"CUDA graphs .* copy the layer and capture the copy"):
        copied(pair()[2])


def test_main_grad_is_what_it_was_where_a_capture_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = module(layer(), "fp8", dtype=torch.float32)
    for name in WEIGHTS:
        weight = getattr(experts, name)
        weight.main_grad = torch.full(weight.shape, 3.0)

    def failing(work: Any, place: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(graphs, "record", failing)
    with pytest.raises(torch.OutOfMemoryError):
        Graphed(experts, inputs(layer(seed=9)))
    for name in WEIGHTS:
        assert getattr(experts, name).main_grad.unique().tolist() == [3.0]
