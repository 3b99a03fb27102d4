"""Weights that engines' plug-ins keep: made anew when, and only when, what they were made from changed."""

from __future__ import annotations

import pytest
import torch

from padless import FP8_BLOCK, quantize
from padless.integrations.weights import WeightCache, refresh


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
