"""Ranks that have little or nothing, in gloo processes, and what of it needs none."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from padless.distributed import ExpertParallel
from padless.distributed.placement import place
from padless.distributed.row_format import RowFormat, as_bytes
from padless.testing.ranks import Rank, raise_first, run_ranks
from padless.verify.ranks.exchange import Ranks
from support import ep_cases, ep_edges


@pytest.fixture(scope="module")
def on_gloo() -> dict[str, str | None]:
    """The outcome of every case, from one start of two processes."""
    return ep_cases.run(names=list(ep_edges.CASES))


@pytest.mark.parametrize("name", ep_edges.CASES)
def test_two_processes(name: str, on_gloo: dict[str, str | None]) -> None:
    assert on_gloo[name] is None, on_gloo[name]


@pytest.mark.parametrize("shape", [(0, 1), (1, 1), (3, 1), (0, 64), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_bytes_of_any_strides(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Expanded, turned and cut tensors, which count as contiguous where they have one row or column."""
    value = (torch.rand(()) * 100).to(dtype)
    wide = (torch.rand(shape[0], shape[1] + 3) * 100).to(dtype)
    for t in (value.expand(shape), wide[:, 1 : 1 + shape[1]], (torch.rand(shape[::-1]) * 100).to(dtype).t()):
        got = as_bytes(t)
        assert got.shape == (shape[0], shape[1] * dtype.itemsize)
        assert got.tolist() == torch.tensor(t.tolist(), dtype=dtype).reshape(shape).view(torch.uint8).tolist()


@pytest.mark.parametrize("tokens", [0, 1])
def test_records_of_an_expanded_gradient(tokens: int) -> None:
    x = torch.rand(()).to(torch.bfloat16).expand(tokens, 64)
    row_format = RowFormat(torch.bfloat16, 64)
    assert torch.equal(row_format.values(row_format.records(x, None), torch.bfloat16), x)


def test_a_map_is_refused_by_every_rank() -> None:
    for rank in range(3):
        with pytest.raises(ValueError, match="expert_map gives rank 1 no expert; each rank must have at least one"):
            place(4, 3, rank, [0, 0, 2, 2])
        with pytest.raises(ValueError, match="expert_map must be 4 ranks from 0 to 2, one for each expert, got 7"):
            place(4, 3, rank, 7)


def draws(rank: Rank, first: int, last: int) -> None:
    ep_edges.little_or_nothing(Ranks(rank), range(first, last))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "first"), [(2, 10), (3, 0)])
def test_many_draws(size: int, first: int) -> None:
    raise_first(run_ranks(draws, size, first, first + 20, cuda=False, backend="collective", timeout_s=300))


def test_an_exchange_is_shared_by_copies_of_its_layer_and_is_not_pickled() -> None:
    """It belongs to a process group, in which every rank makes the same calls of it."""
    ep = ExpertParallel.__new__(ExpertParallel)
    for copied in (copy.copy, copy.deepcopy):
        assert copied([ep])[0] is ep
        assert copied(ep) is ep
    with pytest.raises(TypeError, match=r"an ExpertParallel .* save the layer's state_dict\(\)"):
        pickle.dumps(ep)
