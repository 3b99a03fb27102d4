"""Weights that engines' plug-ins keep: made anew when, and only when, what they were made from changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import pytest
import torch

from padless import FP8_BLOCK, quantize
from padless.integrations import weights as kept_weights
from padless.integrations.weights import KeptWeights, WeightCache, refresh
from support.between import with_one_between


def codes(experts: int = 2) -> tuple[torch.Tensor, ...]:
    """w13, its scales, w2, its scales."""
    made = (quantize(torch.randn(experts, n, 128), FP8_BLOCK, kind="weight") for n in (256, 128))
    return tuple(t for weight in made for t in (weight.data, weight.scale))


@pytest.mark.parametrize("refreshed", [False, True])
def test_data_that_is_assigned_may_lie_where_the_last_one_lay(refreshed: bool) -> None:
    """As engines offload and reload: neither address nor version of a parameter moves."""
    weights = codes()
    bias = torch.nn.Parameter(torch.zeros(2, 256, dtype=torch.bfloat16), requires_grad=False)
    cache = WeightCache("")
    for turn in range(40):
        bias.data = torch.empty(0, dtype=torch.bfloat16)
        bias.data = torch.full((2, 256), float(turn), dtype=torch.bfloat16)
        if refreshed and turn == 20:
            refresh()
        found = cache.get(*weights, bias).bias13
        assert found is not None
        assert torch.equal(found, bias.float()), turn


def test_views_of_fewer_experts_are_other_weights() -> None:
    weights, cache = codes(4), WeightCache("")
    whole = cache.get(*weights)
    assert cache.get(*weights) is whole
    assert cache.get(*(t[:2] for t in weights)).w13.data.shape[0] == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_keeps_what_is_written_to_its_own_tensors(copied: Callable[[Any], WeightCache]) -> None:
    """Not what the first one keeps, and `refresh` knows of it."""
    tensors, bias = codes(), torch.nn.Parameter(torch.zeros(2, 256, dtype=torch.bfloat16), requires_grad=False)
    first = WeightCache("")
    kept = first.get(*tensors, bias)
    second = copied(first)
    assert second.get(*tensors, bias) is not kept
    bias.data.fill_(3)  # which torch does not count
    refresh(bias)
    for cache in (first, second):
        found = cache.get(*tensors, bias).bias13
        assert found is not None
        assert found.unique().tolist() == [3.0]


def test_layers_may_be_made_while_others_are_refreshed() -> None:
    """Wherever in the walk over them."""
    place, is_between, alive = 0, True, [WeightCache("") for _ in range(3)]
    while is_between:
        place += 1
        walk, made = (lambda: refresh(torch.empty(1))), (lambda: alive.append(WeightCache("")))
        _, is_between = with_one_between(WeakSet.__iter__.__code__, place, walk, made, 0.02)
        del alive[3:]
    assert place > 10


def test_threads_with_tensors_of_their_own_get_their_weights() -> None:
    """Also where another's are kept in the middle of a call."""
    whole, place, is_between = codes(4), 0, True
    part, cache = tuple(t[:2] for t in whole), WeightCache("")
    while is_between:
        place += 1
        cache.get(*whole)
        found, is_between = with_one_between(
            KeptWeights.of.__code__, place, lambda: cache.get(*whole), lambda: cache.get(*part)
        )
        assert found.w13.data.shape[0] == 4, place
    assert place > 10


def test_what_a_graph_makes_when_it_runs_is_no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, bias, cache = codes(), torch.zeros(2, 256, dtype=torch.bfloat16), WeightCache("")
    monkeypatch.setattr(kept_weights, "is_capturing", lambda device: True)
    of_graph = [cache.get(*tensors, bias) for _ in range(2)]
    assert of_graph[0] is not of_graph[1], "each graph makes it anew"
    monkeypatch.setattr(kept_weights, "is_capturing", lambda device: False)
    kept = cache.get(*tensors, bias)
    assert kept not in of_graph
    monkeypatch.setattr(kept_weights, "is_capturing", lambda device: True)
    assert cache.get(*tensors, bias) is kept, "there when a graph is captured"


def test_values_of_tensors_that_will_be_copied_lie_where_graphs_read() -> None:
    """As vLLM reloads: through temporary tensors, then by a copy that torch does not count."""
    tensors, bias = codes(), torch.randn(2, 256).bfloat16()
    cache = WeightCache("")
    kept = cache.get(*tensors, bias)
    others, other_bias = codes(), torch.randn(2, 256).bfloat16()
    cache.write_values_of(*others, other_bias, None)
    for t, values in zip((*tensors, bias), (*others, other_bias), strict=True):
        t.data.copy_(values)
    assert cache.get(*tensors, bias) is kept
    assert kept.bias13 is not None
    assert torch.equal(kept.bias13, other_bias.float())
    cache.write_values_of(*codes(3), None, None)
    assert cache.get(*tensors, bias) is not kept, "of another number of experts"
