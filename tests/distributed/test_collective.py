"""Expert parallelism in two gloo processes: every case of `support.ep_cases` and what they are held against."""

from __future__ import annotations

import pytest
import torch

from padless.testing import exchange
from padless.testing.ranks import RankError, RankPool, raise_first, run_ranks
from support import ep_cases, ep_composed, ep_edges, ep_slots

ELSEWHERE = ep_edges.CASES | ep_composed.CASES  # test_edges.py, test_composed.py
CASES = [name for name in ep_cases.CASES if name not in ELSEWHERE]


@pytest.fixture(scope="module")
def on_gloo() -> dict[str, str | None]:
    """The outcome of every case, from one start of two processes."""
    return ep_cases.run(names=CASES)


@pytest.mark.parametrize("name", CASES)
def test_two_processes(name: str, on_gloo: dict[str, str | None]) -> None:
    assert on_gloo[name] is None, on_gloo[name]


@pytest.mark.slow
def test_three_processes() -> None:
    found = ep_cases.run(3)
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_sums_of_slots_in_more_processes(size: int) -> None:
    found = ep_cases.run(size, names=["sums_of_slots", "gradients_of_slots", *ep_slots.CASES])
    assert not any(found.values()), found


@pytest.mark.slow
def test_planted_bugs_are_found() -> None:
    """Rows in another order, weights left out, a row left out, gradients of weights too small, of other rows, or cut."""
    planted = (
        ("order", "formats"), ("unweighted", "formats"), ("lost", "sizes"), ("slots", "gradients"),
        ("order", "training"), ("slots", "training"), ("order", "experts"), ("again", "experts"),
        ("scales", "gradients_in_fp8"), ("scales", "gradient_rows"), ("again", "gradient_rows"),
        ("floor", "gradient_rows"), ("slots", "moe_gradients"),
    )  # fmt: skip
    with RankPool(2, cuda=False, backend="collective") as pool:
        for bug, case in planted:
            found = raise_first(pool.call(ep_cases.run_with_bug, bug, case, timeout_s=100))
            assert found[0][case] is not None, bug


def test_loops_are_what_they_say() -> None:
    """The reference on an example that can be followed by hand: 2 ranks, 3 experts (0, 1 on rank 0), k = 2."""
    p = exchange.draw([2, 1], 3, 32, 2, 1, expert_map=[0, 0, 1])
    p.ids = [torch.tensor([[2, 0], [0, 0]]), torch.tensor([[1, -1]])]
    # Rank 0: expert 0 has token 0 slot 1, token 1 slots 0 and 1; expert 1 has rank 1's token.
    assert exchange.slots_of(p, 0) == [(0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (1, 1, 0, 0)]
    assert exchange.offs_of(p, 0) == [3, 4]
    assert exchange.slots_of(p, 1) == [(2, 0, 0, 0)]
    outputs = [torch.arange(1.0, 5.0)[:, None].repeat(1, 32), torch.full((1, 32), 10.0)]
    sums = exchange.combined(p, outputs, torch.bfloat16, weighted=False)
    assert [s[:, 0].tolist() for s in sums] == [[11.0, 5.0], [4.0]]


def _fails_on_one(rank: object) -> int:
    if rank.rank == 1:
        raise ValueError("planted")
    return rank.rank


@pytest.mark.slow
def test_a_rank_that_fails_is_said() -> None:
    found = run_ranks(_fails_on_one, 2, cuda=False, backend="collective", timeout_s=30)
    assert found[0] == 0
    assert isinstance(found[1], RankError)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*planted"):
        raise_first(found)
