"""Codes of a layer's weights: new in every forward pass, or kept as asked for, and then never of a value before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from padless.nn import Experts, GroupedLinear, MoE, linear, weight_codes
from padless.nn.weight_codes import WeightCodes
from support.between import with_one_between
from support.training_layer import BF16, EVERY_RECIPE, gradients, layer, module

Change = Callable[[Experts], None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each weight that operands are made of, whether they are for a backward pass too."""
    found: list[bool] = []
    right = weight_codes.weight_operands

    def counted(weight: torch.Tensor, recipe: Any, *, backward: bool = True) -> object:
        found.append(backward)
        return right(weight, recipe, backward=backward)

    for where in (weight_codes, linear):
        monkeypatch.setattr(where, "weight_operands", counted)
    return found


def by_an_optimizer(experts: Experts) -> None:
    torch.optim.SGD(experts.parameters(), lr=0.1).step()


def by_an_optimizer_of_data(experts: Experts) -> None:
    """A step that torch's versions do not count."""

    class Optimizer(torch.optim.Optimizer):
        def step(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.mul_(0.5)

    before = experts.w13._version
    Optimizer(experts.parameters(), {}).step()
    assert experts.w13._version == before


def in_place(experts: Experts) -> None:
    with torch.no_grad():
        experts.w13 *= 1.5
        experts.w2 *= 0.5


def by_a_state(experts: Experts) -> None:
    experts.load_state_dict({name: value * 2 for name, value in experts.state_dict().items()})


def by_another_parameter(experts: Experts) -> None:
    experts.w13 = torch.nn.Parameter(experts.w13.detach() * 2)
    experts.w2 = torch.nn.Parameter(experts.w2.detach() * 2)


def by_another_recipe(experts: Experts) -> None:
    experts.recipe = "fp8_bf16_wgrad"


COUNTED: list[Change] = [
    by_an_optimizer,
    by_an_optimizer_of_data,
    in_place,
    by_a_state,
    by_another_parameter,
    by_another_recipe,
]


def by_data(experts: Experts) -> None:
    experts.w13.data.mul_(0.5)


def by_data_assigned_twice(experts: Experts) -> None:
    """The second one often has the memory that the first one left."""
    for _ in range(2):
        experts.w13.data = experts.w13.data * 2


def by_numpy(experts: Experts) -> None:
    array = experts.w13.detach().numpy()
    np.negative(array, out=array)


def by_dlpack(experts: Experts) -> None:
    torch.from_dlpack(experts.w2.detach()).neg_()


def by_the_storage(experts: Experts) -> None:
    experts.w2.untyped_storage().copy_((-experts.w2.detach()).untyped_storage())


def by_a_flat_vector(experts: Experts) -> None:
    flat = parameters_to_vector(experts.parameters()).detach()
    vector_to_parameters(flat, experts.parameters())
    outputs(experts)
    flat.neg_()


def by_apply(experts: Experts) -> None:
    for _ in range(2):
        experts._apply(lambda t: t * 2)


def by_an_average_swapped_in(experts: Experts) -> None:
    raw, average = experts.w13.data, experts.w13.data * 2
    experts.w13.data = average
    outputs(experts)
    experts.w13.data = raw
    average.mul_(-1)
    experts.w13.data = average


UNCOUNTED: list[Change] = [
    by_data,
    by_data_assigned_twice,
    by_numpy,
    by_dlpack,
    by_the_storage,
    by_a_flat_vector,
    by_apply,
    by_an_average_swapped_in,
]


def outputs(experts: Experts) -> dict[str, torch.Tensor]:
    return gradients(experts, layer(tokens=30))


def is_fresh(experts: Experts) -> bool:
    """Whether a step has the bits of a layer that was never called before."""
    new = Experts(experts.hidden, experts.intermediate, experts.num_experts, recipe=experts.recipe)
    with torch.no_grad():
        new.w13.copy_(experts.w13)
        new.w2.copy_(experts.w2)
    got, want = outputs(experts), outputs(new)
    return all(torch.equal(got[name], want[name]) for name in want)


# --- the default -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [*COUNTED, *UNCOUNTED], ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_a_step_is_that_of_the_weights_as_they_are(recipe: str, change: Change) -> None:
    experts = module(layer(tokens=30), recipe)
    outputs(experts)
    change(experts)
    assert is_fresh(experts)


@pytest.mark.parametrize("change", [*COUNTED[:4], *UNCOUNTED], ids=lambda change: change.__name__)
def test_codes_that_are_kept_without_a_look_are_seen(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a layer that makes codes once."""
    first: dict[str, Any] = {}
    right = linear.QuantizedModule._operands

    def stale(self: Any, name: str, *arguments: Any) -> Any:
        return (
            right(self, name, *arguments)
            if self is not experts
            else first.setdefault(name, right(self, name, *arguments))
        )

    experts = module(layer(tokens=30), "fp8")
    monkeypatch.setattr(linear.QuantizedModule, "_operands", stale)
    outputs(experts)
    change(experts)
    assert not is_fresh(experts)


@pytest.mark.parametrize("keep_codes", [False, True])
def test_functional_calls_use_the_weights_that_they_are_given(keep_codes: bool) -> None:
    torch.manual_seed(0)
    moe, x = MoE(64, 32, 4, 2, keep_codes=keep_codes), torch.randn(20, 64)
    with torch.no_grad():
        for i in range(10):
            given = {name: p * (i + 1) for name, p in moe.named_parameters() if "experts" in name}
            got = torch.func.functional_call(moe, given, (x,))
            fresh = copy.deepcopy(moe)
            fresh.load_state_dict({**moe.state_dict(), **given})
            assert torch.equal(got, fresh(x)), i


class Scaled(nn.Module):
    """A parametrization."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.by


@pytest.mark.parametrize("keep_codes", [False, True])
def test_parametrized_weights_are_followed(keep_codes: bool) -> None:
    torch.manual_seed(0)
    grouped = GroupedLinear(2, 64, 32, keep_codes=keep_codes)
    nn.utils.parametrize.register_parametrization(grouped, "weight", Scaled())
    x, offs = torch.randn(40, 64), torch.tensor([10, 40], dtype=torch.int32)
    for i in range(20):
        with torch.no_grad():
            grouped.parametrizations.weight[0].by.fill_(1 + i / 7)
        rows = [x.clone().requires_grad_() for _ in range(2)]
        fresh = GroupedLinear(2, 64, 32)
        fresh.load_state_dict({"weight": grouped.weight})
        for one, leaf in zip((grouped, fresh), rows, strict=True):
            one(leaf, offs).square().sum().backward()
        assert torch.equal(rows[0].grad, rows[1].grad), i


def test_a_backward_pass_is_that_of_its_forward_pass() -> None:
    """Whatever happened to the weights in between: the gradient of x is a product with the weights that made y."""
    torch.manual_seed(0)
    grouped, offs = GroupedLinear(2, 64, 32), torch.tensor([10, 40], dtype=torch.int32)
    x, dy = torch.randn(40, 64).requires_grad_(), torch.randn(40, 32)
    grouped(x, offs).backward(dy)
    want, x.grad = x.grad, None
    y = grouped(x, offs)
    grouped.weight.data.mul_(-3)
    y.backward(dy)
    assert torch.equal(x.grad, want)


@pytest.mark.parametrize("name", list(EVERY_RECIPE))
def test_without_gradients_no_operand_of_a_backward_pass_is_made(name: str, made: list[bool]) -> None:
    """And the output has the same bits."""
    problem = layer(tokens=30, hidden=160, intermediate=160)
    experts = module(problem, EVERY_RECIPE[name])
    inputs = problem.x, problem.index, problem.prob
    with torch.no_grad():
        out = experts(*inputs)
    assert made == [False, False]
    assert torch.equal(experts(*inputs), out)
    assert made == [False, False, True, True]
    for weight in experts.parameters():
        weight.requires_grad_(False)
    assert torch.equal(experts(*inputs), out)
    assert made[4:] == [False, False]


# --- keep_codes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", COUNTED, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_kept_codes_follow_what_is_promised(recipe: str, change: Change) -> None:
    experts = module(layer(tokens=30), recipe, keep_codes=True)
    outputs(experts)
    change(experts)
    assert is_fresh(experts)


@pytest.mark.parametrize("change", UNCOUNTED, ids=lambda change: change.__name__)
def test_kept_codes_follow_the_rest_where_they_are_told(change: Change) -> None:
    experts = module(layer(tokens=30), "fp8", keep_codes=True)
    outputs(experts)
    change(experts)
    experts.forget_codes()
    assert is_fresh(experts)


@pytest.mark.parametrize("change", [by_an_optimizer, in_place, by_a_state, by_another_parameter])
def test_kept_codes_that_are_stale_are_seen(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a layer that never looks."""
    right = WeightCodes.of

    def stale(self: WeightCodes, *arguments: Any) -> Any:
        return right(self, *arguments) if self._made is None else self._made.operands

    monkeypatch.setattr(WeightCodes, "of", stale)
    monkeypatch.setattr(WeightCodes, "forget", lambda self: None)
    experts = module(layer(tokens=30), "fp8", keep_codes=True)
    outputs(experts)
    change(experts)
    assert not is_fresh(experts)


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_codes_are_made_once_for_all_microbatches_of_a_step(name: str, made: list[bool]) -> None:
    experts = module(layer(tokens=30), name, keep_codes=True)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    for step in range(1, 4):
        for _ in range(3):
            outputs(experts)
        with torch.no_grad():
            experts(*(getattr(layer(tokens=30), part) for part in ("x", "index", "prob")))
        assert made == [True, True] * step
        optimizer.step()


def test_the_switch_leaves_what_was_kept(made: list[bool]) -> None:
    experts = module(layer(tokens=30), "fp8", keep_codes=True)
    outputs(experts)
    experts.keep_codes = False
    by_data(experts)
    assert is_fresh(experts)
    experts.keep_codes = True
    outputs(experts)
    assert is_fresh(experts)
    with pytest.raises(ValueError, match="keep_codes is 1; it must be True or False"):
        experts.keep_codes = 1


@pytest.mark.parametrize("rows", [(32, 48), (272, 144)])
def test_codes_of_dgrad_are_the_weights_transposed(rows: tuple[int, int]) -> None:
    """Bit for bit, also where N and K are no multiples of 128: nothing is quantized again."""
    operands = weight_codes.weight_operands(GroupedLinear(3, *rows).weight, EVERY_RECIPE["fp8"])
    assert torch.equal(operands.dgrad.data.view(torch.uint8), operands.forward.data.view(torch.uint8).mT)
    assert torch.equal(operands.dgrad.scale, operands.forward.scale.mT)


def test_a_weight_in_bfloat16_is_read_where_it_is() -> None:
    weight = GroupedLinear(3, 32, 48, recipe="bf16", dtype=BF16).weight
    forward, dgrad = weight_codes.weight_operands(weight, EVERY_RECIPE["bf16"])
    assert forward is dgrad
    assert forward.data_ptr() == weight.data_ptr()


# --- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda experts: pickle.loads(pickle.dumps(experts))])
def test_a_copy_has_codes_of_its_own(copied: Callable[[Experts], Experts]) -> None:
    experts = module(layer(tokens=30), "fp8", keep_codes=True)
    before = outputs(experts)
    other = copied(experts)
    in_place(other)
    assert is_fresh(other)
    again = outputs(experts)
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_a_state_has_the_weights_and_nothing_else() -> None:
    moe = MoE(32, 48, 4, 2, shared_intermediate=16)
    moe(torch.randn(5, 32))
    assert sorted(moe.state_dict()) == [
        "experts.w13",
        "experts.w2",
        "router.weight",
        "shared.w13.weight",
        "shared.w2.weight",
    ]


def test_weights_of_inference_mode_are_quantized_every_time(made: list[bool]) -> None:
    """torch counts no writes to them."""
    with torch.inference_mode():
        linear = GroupedLinear(2, 32, 48, keep_codes=True)
        x, offs = torch.randn(5, 32), torch.tensor([2, 5], dtype=torch.int32)
        first = linear(x, offs)
        linear.weight.mul_(2)
        assert torch.equal(linear(x, offs), first * 2)
    assert len(made) == 2


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_codes_that_were_made_in_inference_mode_train(name: str) -> None:
    experts = module(layer(tokens=30), name, keep_codes=True)
    problem = layer(tokens=30)
    with torch.inference_mode():
        experts(problem.x, problem.index, problem.prob)
    assert is_fresh(experts)


def test_parameters_may_be_swapped_while_codes_are_kept() -> None:
    """torch refuses to swap a tensor that something refers to weakly."""
    grouped, offs = GroupedLinear(2, 32, 48, keep_codes=True), torch.tensor([2, 5], dtype=torch.int32)
    x = torch.randn(5, 32)
    first = grouped(x, offs).detach()
    torch.utils.swap_tensors(grouped.weight, nn.Parameter(-grouped.weight.detach()))
    grouped.forget_codes()
    assert torch.equal(grouped(x, offs), -first)


def test_moving_a_layer_makes_new_codes() -> None:
    experts = module(layer(tokens=30), EVERY_RECIPE["fp8"], keep_codes=True)
    outputs(experts)
    experts.to(BF16)
    got = gradients(experts, layer(tokens=30), BF16)
    want = gradients(copy.deepcopy(experts), layer(tokens=30), BF16)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_weights_drawn_again_over_ranks_are_other_values() -> None:
    """What is made of a weight is kept by its version, which drawing has to change."""
    experts = Experts(128, 128, 2)
    experts.ep = SimpleNamespace(local_experts=(1, 0))  # type: ignore[assignment]
    before = [(weight._version, weight.detach().clone()) for weight in (experts.w13, experts.w2)]
    experts.reset_parameters()
    for weight, (version, values) in zip((experts.w13, experts.w2), before, strict=True):
        assert weight._version > version
        assert not torch.equal(weight, values)


def test_threads_that_call_a_layer_after_a_step_have_codes_of_its_weights_now() -> None:
    """Wherever in the look at what is kept another thread makes the codes again."""
    recipe, place, is_between = EVERY_RECIPE["fp8"], 0, True
    while is_between:
        place += 1
        weight, codes = nn.Parameter(torch.ones(1, 128, 128)), WeightCodes()
        before = codes.of(weight, weight, recipe).forward.scale
        with torch.no_grad():
            weight.mul_(2)

        def of(codes: WeightCodes = codes, weight: nn.Parameter = weight) -> Any:
            return codes.of(weight, weight, recipe)

        found, is_between = with_one_between(WeightCodes.of.__code__, place, of, of)
        assert torch.equal(found.forward.scale, 2 * before), place
    assert place > 50


def test_steps_of_optimizers_in_threads_are_counted() -> None:
    """Codes that were made before a step are never taken for those behind it."""
    place, is_between, seen = 0, True, set[int]()

    def step() -> None:
        seen.add(weight_codes._steps[0])
        weight_codes._count_step()
        seen.add(weight_codes._steps[0])
        weight_codes._count_step()

    while is_between:
        place += 1
        seen.clear()
        _, is_between = with_one_between(weight_codes._count_step.__code__, place, weight_codes._count_step, step)
        assert weight_codes._steps[0] not in seen, place
