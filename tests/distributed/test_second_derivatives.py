"""Second derivatives through dispatch and combine: refused, whatever gradient comes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from padless.distributed.functions import Combine, Dispatch
from padless.distributed.plan import ExpertPlan


class OneRank:
    """An exchange of one rank: rows are the tokens in their order, one slot each."""

    def dispatch(self, tokens: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, _: Any) -> Any:
        count = torch.tensor([len(tokens)], dtype=torch.int32)
        inverse = torch.arange(len(tokens), dtype=torch.int32)[:, None]
        overflow = torch.tensor(0, dtype=torch.int32)
        return tokens.clone(), ExpertPlan(count, weights[:, 0].clone(), inverse, ids, overflow)

    def combine(self, rows: torch.Tensor, plan: ExpertPlan, prob: Any, dprob: Any, shared: None = None) -> Any:
        assert shared is None
        return rows if prob is None else rows * prob[:, None], None if dprob is None else dprob[:, None]

    def redispatch(self, dout: torch.Tensor, plan: ExpertPlan) -> torch.Tensor:
        return dout.clone()


@pytest.mark.parametrize("cotangent", [torch.sum, lambda out: out.square().sum()], ids=["fixed", "differentiable"])
def test_second_derivatives_of_an_exchange_are_refused(cotangent: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weights = torch.randn(5, 8, requires_grad=True), torch.rand(5, 1, requires_grad=True)
    rows, *plan = Dispatch.apply(OneRank(), x, weights, torch.zeros(5, 1, dtype=torch.int32))
    out = Combine.apply(OneRank(), rows, True, None, *plan)
    (first,) = torch.autograd.grad(cotangent(out), x, retain_graph=True)
    assert first.count_nonzero() == first.numel()
    with pytest.raises(RuntimeError, match=r"create_graph is True .* can be differentiated once"):
        torch.autograd.grad(cotangent(out), x, create_graph=True)
