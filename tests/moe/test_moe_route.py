"""route against loops in Python, and that the checks notice a routing that is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import padless
from padless.moe import Routing, twins
from padless.moe.routing import most_slots
from support.moe_cases import draw_ids


def expected_rows(ids: torch.Tensor, num_experts: int) -> list[tuple[int, int, int]]:
    """(expert, token, slot) of every row, by sorting tuples; num_experts for ids that are none."""
    slots = []
    for token, of_token in enumerate(ids.tolist()):
        for slot, expert in enumerate(of_token):
            slots.append((expert if 0 <= expert < num_experts else num_experts, token, slot))
    return sorted(slots)


def check_routing(routing: Routing, ids: torch.Tensor, num_experts: int) -> None:
    """Every entry of a routing by its definition."""
    offs, tokens, inverse = routing
    rows = expected_rows(ids, num_experts)
    assert [t.dtype for t in routing] == [torch.int32] * 3
    assert offs.tolist() == [sum(expert <= e for expert, _, _ in rows) for e in range(num_experts)], "offs"
    assert tokens.tolist() == [token for _, token, _ in rows], "tokens"
    assert inverse.shape == ids.shape
    for row, (expert, token, slot) in enumerate(rows):
        wanted = row if expert < num_experts else -1 - row
        assert int(inverse[token, slot]) == wanted, f"inverse of token {token}, slot {slot}"


CASES = {
    "no tokens": (torch.empty((0, 4), dtype=torch.int64), 5),
    "one slot": (torch.tensor([[0]]), 1),
    "one expert gets all": (torch.full((33, 4), 2), 5),
    "ids from num_experts on": (torch.full((7, 2), 5), 5),
    "negative ids": (torch.full((7, 2), -1), 5),
    "some are no expert": (draw_ids(130, 3, 7, 1), 7),
    "k 1": (draw_ids(129, 1, 9, 2), 9),
    "k 16": (draw_ids(40, 16, 64, 3), 64),
    "512 experts": (draw_ids(40, 8, 512, 4), 512),
    "1025 experts": (draw_ids(20, 8, 1025, 8), 1025),
    "4096 experts": (torch.tensor([[4095, 1024, 4096], [1023, 4095, -1], [0, 2048, 3071]]), 4096),
    "int32": (draw_ids(50, 2, 6, 5).clamp(max=100).to(torch.int32), 6),
    "not contiguous": (draw_ids(6, 4, 6, 6).t(), 6),
    "distinct": (draw_ids(20, 8, 16, 7, distinct=True), 16),
}


@pytest.mark.parametrize("name", CASES)
def test_route(name: str) -> None:
    ids, num_experts = CASES[name]
    check_routing(padless.moe.route(ids, num_experts), ids, num_experts)


def test_the_example_of_the_docstring() -> None:
    offs, tokens, inverse = padless.moe.route(torch.tensor([[2, 0], [0, 9]]), 3)
    assert offs.tolist() == [2, 2, 3]
    assert tokens.tolist() == [0, 1, 0, 1]
    assert inverse.tolist() == [[2, 0], [1, -4]]


def unstable(ids: torch.Tensor, num_experts: int) -> Routing:
    """Slots of an expert in the reverse order."""
    offs, tokens, inverse = twins.route(ids.flip(0), num_experts)
    return Routing(offs, ids.shape[0] - 1 - tokens, inverse.flip(0))


def tail_counted(ids: torch.Tensor, num_experts: int) -> Routing:
    """Ids that are no expert are the last expert's."""
    offs, tokens, inverse = twins.route(ids, num_experts)
    offs[-1] = tokens.shape[0]
    return Routing(offs, tokens, inverse)


def tail_kept(ids: torch.Tensor, num_experts: int) -> Routing:
    offs, tokens, inverse = twins.route(ids, num_experts)
    return Routing(offs, tokens, torch.where(inverse < 0, -1 - inverse, inverse))


def first_rows(ids: torch.Tensor, num_experts: int) -> Routing:
    offs, tokens, inverse = twins.route(ids, num_experts)
    return Routing(torch.cat([offs.new_zeros(1), offs[:-1]]), tokens, inverse)


@pytest.mark.parametrize("planted", [unstable, tail_counted, tail_kept, first_rows])
def test_a_wrong_routing_is_noticed(planted: Callable[[torch.Tensor, int], Routing]) -> None:
    ids, num_experts = CASES["some are no expert"]
    with pytest.raises(AssertionError):
        check_routing(planted(ids, num_experts), ids, num_experts)


@pytest.mark.parametrize(
    ("ids", "num_experts", "named"),
    [
        (torch.zeros((3, 2)), 4, "top_k_index"),
        (torch.zeros(3, dtype=torch.int64), 4, "top_k_index"),
        (torch.zeros((3, 0), dtype=torch.int64), 4, "k from 1 to 16"),
        (torch.zeros((3, 17), dtype=torch.int64), 4, "k from 1 to 16"),
        (torch.zeros((3, 2), dtype=torch.int64), 0, "num_experts is 0"),
        (torch.zeros((3, 2), dtype=torch.int64), 4097, "num_experts is 4097"),
        ([[1]], 4, "top_k_index"),
        (torch.zeros((1, 1), dtype=torch.int32).expand(2**21 + 1, 16), 4096, "of 4096 experts 33554304 slots"),
        (torch.zeros((1, 1), dtype=torch.int32).expand(2**27, 16), 8, "of 8 experts 2147483520 slots"),
    ],
)
def test_errors(ids: object, num_experts: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        padless.moe.route(ids, num_experts)


@pytest.mark.parametrize("num_experts", [1, 8, 126, 127, 256, 1024, 4095, 4096])
def test_the_table_of_counts_has_offsets_of_32_bits(num_experts: int) -> None:
    """It has a row for each tile of slots and one more, and a column for each expert and two more."""
    route = pytest.importorskip("padless.moe.triton.route")
    columns = max(2 ** math.ceil(math.log2(num_experts + 2)), 128)
    most = most_slots(num_experts)
    assert (most // route.TILE + 1) * columns <= 2**31
    assert (most // route.TILE + 2) * columns > 2**31
