"""Codes of a layer's weights: made once for each value, and never of a value before."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from padless.nn import Experts, GroupedLinear, MoE, weight_codes
from padless.nn.weight_codes import WeightCodes
from support.training_layer import BF16, EVERY_RECIPE, gradients, layer, module

Change = Callable[[Experts], None]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the weights that operands are made of."""
    shapes: list[torch.Size] = []
    right = weight_codes.weight_operands

    def counted(weight: torch.Tensor, recipe: object) -> object:
        shapes.append(weight.shape)
        return right(weight, recipe)

    monkeypatch.setattr(weight_codes, "weight_operands", counted)
    return shapes


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


def by_data_alone(experts: Experts) -> None:
    """What nothing can see but a module that is told."""
    experts.w13.data.mul_(0.5)
    experts.forget_codes()


def by_another_recipe(experts: Experts) -> None:
    experts.recipe = "fp8_bf16_wgrad"


CHANGES: list[Change] = [
    by_an_optimizer,
    by_an_optimizer_of_data,
    in_place,
    by_a_state,
    by_another_parameter,
    by_data_alone,
    by_another_recipe,
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


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("recipe", ["fp8", "bf16"])
def test_codes_follow_every_change(recipe: str, change: Change) -> None:
    experts = module(layer(tokens=30), recipe)
    outputs(experts)
    change(experts)
    assert is_fresh(experts)


@pytest.mark.parametrize("change", [by_an_optimizer, in_place, by_a_state, by_another_parameter])
def test_stale_codes_are_seen(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with a layer that never looks."""
    monkeypatch.setattr(weight_codes, "facts_of", lambda weight, recipe: ())
    monkeypatch.setattr(WeightCodes, "forget", lambda self: None)
    experts = module(layer(tokens=30), "fp8")
    outputs(experts)
    change(experts)
    assert not is_fresh(experts)


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_once_for_all_microbatches_of_a_step(name: str, made: list[torch.Size]) -> None:
    experts = module(layer(tokens=30), name)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    for step in range(1, 4):
        for _ in range(3):
            outputs(experts)
        with torch.no_grad():
            experts(*(getattr(layer(tokens=30), part) for part in ("x", "index", "prob")))
        assert len(made) == 2 * step
        optimizer.step()


@pytest.mark.parametrize("rows", [(32, 48), (272, 144)])
def test_codes_of_dgrad_are_the_weights_transposed(rows: tuple[int, int]) -> None:
    """Bit for bit, also where N and K are no multiples of 128: nothing is quantized again."""
    linear = GroupedLinear(3, *rows)
    operands = linear._operands("weight", linear.weight)
    assert torch.equal(operands.dgrad.data.view(torch.uint8), operands.forward.data.view(torch.uint8).mT)
    assert torch.equal(operands.dgrad.scale, operands.forward.scale.mT)


def test_a_weight_in_bfloat16_is_read_where_it_is() -> None:
    linear = GroupedLinear(3, 32, 48, recipe="bf16", dtype=BF16)
    forward, dgrad = linear._operands("weight", linear.weight)
    assert forward is dgrad
    assert forward.data_ptr() == linear.weight.data_ptr()


# --- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda experts: pickle.loads(pickle.dumps(experts))])
def test_a_copy_has_codes_of_its_own(copied: Callable[[Experts], Experts]) -> None:
    experts = module(layer(tokens=30), "fp8")
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


def test_weights_of_inference_mode_are_quantized_every_time(made: list[torch.Size]) -> None:
    """torch counts no writes to them."""
    with torch.inference_mode():
        linear = GroupedLinear(2, 32, 48)
        x, offs = torch.randn(5, 32), torch.tensor([2, 5], dtype=torch.int32)
        first = linear(x, offs)
        linear.weight.mul_(2)
        assert torch.equal(linear(x, offs), first * 2)
    assert len(made) == 2


def test_moving_a_layer_makes_new_codes() -> None:
    experts = module(layer(tokens=30), EVERY_RECIPE["fp8"])
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
