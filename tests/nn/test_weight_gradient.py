"""Weight gradients: Megatron-LM's main_grad, microbatch after microbatch, and those that wait in a queue."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from padless.nn import DelayedWgrad, Experts, GroupedLinear, weight_gradient
from support.training_layer import BF16, gradients, layer, module

WEIGHTS = ("w13", "w2")


def microbatches(experts: Experts, count: int = 4) -> list[dict[str, torch.Tensor]]:
    """The gradients of each, with a layer that has no main_grad."""
    alone = module(layer(), experts.recipe, dtype=experts.w13.dtype)
    return [gradients(alone, layer(tokens=20 + 13 * i, seed=i), experts.w13.dtype) for i in range(count)]


def train(experts: Experts, count: int = 4) -> None:
    for i in range(count):
        problem = layer(tokens=20 + 13 * i, seed=i)
        p = problem.leaves(experts.w13.dtype)
        out = experts(p["x"], problem.index, p["prob"], p["shared"])
        out.backward(problem.dout.to(out.dtype))
        for name in WEIGHTS:
            getattr(experts, name).overwrite_main_grad = False


def with_main_grads(recipe: str, dtype: torch.dtype = torch.float32, main: torch.dtype = torch.float32) -> Experts:
    """A layer whose first microbatch stores, over NaN."""
    experts = module(layer(), recipe, dtype=dtype)
    for name in WEIGHTS:
        weight = getattr(experts, name)
        weight.main_grad = torch.full(weight.shape, float("nan"), dtype=main)
        weight.overwrite_main_grad = True
    return experts


@pytest.mark.parametrize("recipe", ["fp8", "fp8_bf16_wgrad"])
def test_main_grad_is_the_float32_sum_of_the_microbatches(recipe: str) -> None:
    experts = with_main_grads(recipe)
    train(experts)
    single = microbatches(experts)
    for name in WEIGHTS:
        total = single[0][name].clone()
        for one in single[1:]:
            total += one[name]
        weight = getattr(experts, name)
        assert torch.equal(weight.main_grad, total), name
        assert weight.grad is None
        assert not hasattr(weight, "grad_added_to_main_grad")


def test_an_expert_without_tokens_is_not_touched_when_accumulating() -> None:
    experts = module(layer(), "fp8")
    experts.w13.main_grad, experts.w2.main_grad = (torch.full_like(getattr(experts, n), 7.0) for n in WEIGHTS)
    train(experts, 1)
    assert (experts.w13.main_grad[3] == 7.0).all()
    assert (experts.w2.main_grad[3] == 7.0).all()
    assert not (experts.w13.main_grad[0] == 7.0).any()


def test_storing_where_a_sum_is_wanted_is_seen() -> None:
    """The planted fault: every microbatch the first."""
    experts = with_main_grads("fp8")
    for i in range(2):
        experts.w13.overwrite_main_grad = True
        train_one(experts, i)
    assert not torch.equal(experts.w13.main_grad, sum(one["w13"] for one in microbatches(experts, 2)))


def train_one(experts: Experts, seed: int) -> None:
    problem = layer(tokens=20 + 13 * seed, seed=seed)
    p = problem.leaves(torch.float32)
    experts(p["x"], problem.index, p["prob"], p["shared"]).backward(problem.dout)


@pytest.mark.parametrize("zeros", [False, True])
def test_hooks_get_a_gradient_where_they_wait_for_one(zeros: bool) -> None:
    """The protocol of data parallelism: the attribute is set, and a gradient that nobody reads comes by."""
    experts = with_main_grads("fp8")
    seen: list[torch.Size] = []
    for name in WEIGHTS:
        weight = getattr(experts, name)
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zeros
        weight.register_hook(lambda grad: seen.append(grad.shape))
    train_one(experts, 0)
    for name in WEIGHTS:
        weight = getattr(experts, name)
        assert weight.grad_added_to_main_grad
        assert weight.shape in seen
        assert not zeros or (weight.grad == 0).all()


def test_main_grad_in_bfloat16() -> None:
    experts = with_main_grads("fp8", BF16, BF16)
    train(experts)
    single = microbatches(experts)
    for name in WEIGHTS:
        total = sum(one[name].double() for one in single)
        error = (getattr(experts, name).main_grad.double() - total).norm() / total.norm()
        assert error < 2**-7


@pytest.mark.parametrize("ask", [torch.autograd.grad, lambda out, x: torch.autograd.backward(out, inputs=x)])
@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_bf16_wgrad", "nvfp4"])
def test_weights_that_were_not_asked_for_get_nothing(recipe: str, waits: bool, ask: Callable[..., Any]) -> None:
    """A backward pass of the input alone, or of one weight too, leaves the other gradients where they are."""
    queue = DelayedWgrad()
    problem = layer(tokens=20, intermediate=160)
    experts = module(problem, recipe, delayed_wgrad=queue if waits else None)
    linear = GroupedLinear(2, 160, 32, recipe=recipe, delayed_wgrad=queue if waits else None)
    offs = torch.tensor([3, 20], dtype=torch.int32)
    weights = [experts.w13, experts.w2, linear.weight]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    x, prob = problem.x.requires_grad_(), problem.prob.requires_grad_()

    def total() -> torch.Tensor:
        return experts(x, problem.index, prob).sum() + linear(x, offs).sum()

    ask(total(), [x, prob])
    assert len(queue) == 0
    assert not any(bool(weight.main_grad.any()) for weight in weights)
    total().backward(inputs=[x, experts.w2])
    queue.flush()
    assert [bool(weight.main_grad.any()) for weight in weights] == [False, True, False]
    alone = experts.w2.main_grad.clone()
    total().backward()
    queue.flush()
    assert all(bool(weight.main_grad.any()) for weight in weights)
    assert torch.equal(experts.w2.main_grad, alone + alone)


@pytest.mark.parametrize("recipe", ["fp8", "fp8_bf16_wgrad"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_main_grad_of_another_shape_is_refused(recipe: str, overwrite: bool) -> None:
    """Also one that the gradient could be spread over."""
    linear, offs = GroupedLinear(1, 64, 32, recipe=recipe), torch.tensor([8], dtype=torch.int32)
    linear.weight.overwrite_main_grad = overwrite
    for shape in ((3, 32, 64), (1, 64, 32), (2048,)):
        linear.weight.main_grad = torch.zeros(shape)
        out = linear(torch.randn(8, 64), offs)
        with pytest.raises(ValueError, match=r"main_grad is \(.*\) and its weight \(1, 32, 64\)"):
            out.sum().backward()
        assert not linear.weight.main_grad.any()


# --- later -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["fp8", "fp8_bf16_wgrad"])
def test_delayed_gradients_are_the_same(recipe: str) -> None:
    queue = DelayedWgrad()
    experts = module(layer(), recipe, delayed_wgrad=queue)
    train(experts)
    assert experts.w13.grad is None
    assert len(queue) == 8
    queue.flush(3)
    assert len(queue) == 5
    queue.flush()
    assert len(queue) == 0
    single = microbatches(experts)
    for name in WEIGHTS:
        total = single[0][name].clone()
        for one in single[1:]:
            total += one[name]
        assert torch.equal(getattr(experts, name).grad, total)


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_delayed_gradients_are_added_where_grad_lies(recipe: str) -> None:
    """In a buffer of all gradients, such as one that is reduced or clipped as a whole."""
    queue = DelayedWgrad()
    experts, now = module(layer(), recipe, delayed_wgrad=queue), module(layer(), recipe)
    weights = [experts.w13, experts.w2]
    parts = torch.ones(sum(w.numel() for w in weights)).split([w.numel() for w in weights])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view(weight.shape)
    train_one(experts, 0)
    queue.flush()
    train_one(now, 0)
    for weight, part, want in zip(weights, parts, (now.w13, now.w2), strict=True):
        assert torch.equal(part.view(weight.shape), want.grad + 1)
        assert weight.grad.data_ptr() == part.data_ptr()


def test_delayed_gradients_into_main_grad() -> None:
    now, later = with_main_grads("fp8"), with_main_grads("fp8")
    queue = DelayedWgrad()
    later.delayed_wgrad = queue
    train_one(now, 0)
    train_one(later, 0)
    assert later.w2.main_grad.isnan().all()
    queue.flush()
    assert torch.equal(now.w13.main_grad, later.w13.main_grad)
    assert torch.equal(now.w2.main_grad, later.w2.main_grad)
    assert later.w2.grad is None


@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
@pytest.mark.parametrize("written", ["offs", "x"])
def test_a_queue_refuses_operands_that_were_written_to(recipe: str, written: str) -> None:
    """As autograd does without one. fp8 keeps codes of x, which are its copy."""
    queue = DelayedWgrad()
    linear = GroupedLinear(2, 128, 128, recipe=recipe, delayed_wgrad=queue, dtype=torch.bfloat16)
    x, offs = torch.randn(64, 128).bfloat16(), torch.tensor([16, 64], dtype=torch.int32)
    linear(x, offs).sum().backward()
    (offs if written == "offs" else x).mul_(1)
    if (recipe, written) == ("fp8", "x"):
        queue.flush()
        assert linear.weight.grad is not None
        return
    with pytest.raises(RuntimeError, match="written to between its backward pass and flush"):
        queue.flush()


def queued() -> tuple[GroupedLinear, DelayedWgrad]:
    """A layer, and a queue with its gradient."""
    queue = DelayedWgrad()
    linear = GroupedLinear(2, 128, 128, recipe="fp8", delayed_wgrad=queue, dtype=torch.bfloat16)
    linear(torch.randn(64, 128).bfloat16(), torch.tensor([16, 64], dtype=torch.int32)).sum().backward()
    return linear, queue


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_a_gradient_that_could_not_be_computed_is_not_lost(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    linear, queue = queued()

    def failing(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(weight_gradient, "computed", failing)
        with pytest.raises(error):
            queue.flush()
    assert len(queue) == 1
    queue.flush()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_a_layer_leave_their_gradients_in_its_queue(copied: Callable[[nn.Module], Any]) -> None:
    """Who flushes it has no other one."""
    linear, queue = queued()
    queue.flush()
    other = copied(nn.ModuleList([linear]))[0]
    assert other.delayed_wgrad is queue
    other.weight.grad = None
    other(torch.randn(64, 128).bfloat16(), torch.tensor([16, 64], dtype=torch.int32)).sum().backward()
    queue.flush()
    assert other.weight.grad is not None


def test_a_layer_is_pickled_without_what_waits() -> None:
    """As .grad is not pickled either."""
    linear, queue = queued()
    again = pickle.loads(pickle.dumps(linear))
    assert torch.equal(again.weight, linear.weight)
    assert (len(again.delayed_wgrad), len(queue)) == (0, 1)


def test_weights_that_are_computed_do_not_wait() -> None:
    """A gradient that is written to such a weight would not reach what it was computed from."""
    problem, made = layer(), module(layer(), "fp8")
    p, made.delayed_wgrad = problem.leaves(torch.float32), DelayedWgrad()
    given = {"w2": made.w2 * 2}
    arguments = (p["x"], problem.index, p["prob"], p["shared"])
    with pytest.raises(ValueError, match="w2 is computed from other tensors"):
        torch.func.functional_call(made, given, arguments)
    with torch.no_grad():
        torch.func.functional_call(made, given, arguments)
    given["w2"].main_grad = torch.zeros_like(made.w2)
    torch.func.functional_call(made, given, arguments).sum().backward()
    assert len(made.delayed_wgrad) == 2
