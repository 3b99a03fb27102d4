"""The kernels of the "symm" backend for virtual ranks, against loops, on any device.

`tests/distributed` runs every case on a GPU where there is one, and everywhere in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

import padless
from padless.distributed import symm
from padless.distributed.placement import place
from padless.distributed.symm import MOST_POLLING, SymmBackend
from padless.distributed.symm_state import FEW_SLOTS, allocate
from padless.moe import twins
from padless.testing import exchange
from padless.testing.exchange import Problem, draw
from padless.testing.guarded import GuardedOutput
from support.ep_virtual import Ranks, expert_outputs, make
from support.interpreter import Cases, main

CASES = Cases()
case = CASES.add


WAYS: tuple[dict[str, int], ...] = tuple(
    {"few_slots": few_slots, "most_polling": most_polling}
    for few_slots in (0, FEW_SLOTS)
    for most_polling in (0, MOST_POLLING)
)


def all_ways(function: Callable[..., None]) -> Callable[..., None]:
    """Add `function` to CASES, to be called for a receive in several launches and in one, each of which waits for ranks
    itself, and each behind one that does.
    """

    def run_all(device: str) -> None:
        for way in WAYS:
            function(device, way)

    CASES[function.__name__] = run_all
    return function


def check_dispatch(p: Problem, ranks: Ranks, fmt: Any, rows: list, scale: Any = None) -> None:
    """Rows and plans of all ranks against the loops."""
    for r, (got, plan) in enumerate(zip(rows, ranks.plans, strict=True)):
        assert plan.offs.tolist() == exchange.offs_of(p, r), f"rank {r}: offs"
        exchange.assert_rows(got, exchange.rows_of(p, r, fmt, global_scale=scale), f"rank {r}")
        prob = exchange.prob_of(p, r)
        assert torch.equal(plan.prob[: len(prob)].cpu(), prob), f"rank {r}: prob"
        assert int(plan.overflow) == 0


def check_combine(p: Problem, ranks: Ranks, seed: int, *, weighted: bool) -> None:
    """Sums, and values brought back by slot."""
    outputs = expert_outputs(p, ranks, seed)
    dprob = [torch.randn(plan.prob.shape[0]) for plan in ranks.plans]
    found = ranks.combine(outputs, weighted=weighted, dprob=dprob)
    judge_sums(p, ranks, outputs, dprob, found, weighted=weighted)


def judge_sums(p: Problem, ranks: Ranks, outputs: list, dprob: list, found: list, *, weighted: bool) -> None:
    """Sums of a combine of these rows, and the values brought back by slot."""
    sizes = [len(exchange.slots_of(p, r)) for r in range(p.num_ranks)]
    used = [o[:n] for o, n in zip(outputs, sizes, strict=True)]
    want = exchange.combined(p, used, ranks.settings[0].partial, weighted=weighted)
    for r, ((got, slots), expected) in enumerate(zip(found, want, strict=True)):
        assert torch.equal(exchange.bits(got), exchange.bits(expected)), f"rank {r}: sums"
        by_slot = torch.zeros(p.ids[r].shape)
        for owner in range(p.num_ranks):
            for row, (_, source, token, slot) in enumerate(exchange.slots_of(p, owner)):
                if source == r:
                    by_slot[token, slot] = dprob[owner][row]
        assert torch.equal(slots.cpu(), by_slot), f"rank {r}: values by slot"


def check_slots(p: Problem, ranks: Ranks, seed: int, *, weighted: bool, out_dtype: torch.dtype) -> None:
    """Sums of slots with shared rows, and values by slot: `padless.moe.combine` of every token's rows, wherever made."""
    outputs = expert_outputs(p, ranks, seed)
    dprob = [torch.randn(plan.prob.shape[0]) for plan in ranks.plans]
    g = torch.Generator().manual_seed(seed)
    shared = [torch.randn((t.shape[1], t.shape[0]), generator=g).T for t in p.tokens]  # columns are not adjacent
    found = ranks.combine(outputs, weighted=weighted, dprob=dprob, shared=shared, out_dtype=out_dtype)
    top_k, hidden = p.ids[0].shape[1], p.tokens[0].shape[1]
    rows = [torch.full((t.shape[0] * top_k, hidden), float("nan")).to(outputs[0]) for t in p.tokens]
    inverse = [torch.full(ids.shape, -1, dtype=torch.int32) for ids in p.ids]
    by_slot = [torch.zeros(ids.shape) for ids in p.ids]
    for owner in range(p.num_ranks):
        for row, (_, source, token, slot) in enumerate(exchange.slots_of(p, owner)):
            inverse[source][token, slot] = token * top_k + slot
            rows[source][token * top_k + slot] = outputs[owner][row]
            by_slot[source][token, slot] = dprob[owner][row]
    for r, (got, slots) in enumerate(found):
        weights = p.weights[r] if weighted else None
        want = twins.combine(rows[r], inverse[r], weights, shared[r], out_dtype)
        assert got.dtype == out_dtype
        assert torch.equal(exchange.bits(got), exchange.bits(want)), f"rank {r}: sums"
        assert torch.equal(slots.cpu(), by_slot[r]), f"rank {r}: values by slot"


def check_again(p: Problem, ranks: Ranks, seed: int) -> None:
    """Rows of other values by the plan that is there."""
    generator = torch.Generator().manual_seed(seed)
    partial = ranks.settings[0].partial
    x = [torch.randn(t.shape, generator=generator).to(partial) for t in p.tokens]
    other = Problem(x, p.ids, p.weights, p.expert_map)
    for r, got in enumerate(ranks.redispatch(x)):
        exchange.assert_rows(got, exchange.rows_of(other, r, partial), f"rank {r}, again")


def check_no_error(ranks: Ranks) -> None:
    for backend in ranks.backends:
        backend.check()


@case
def two_ranks(device: str) -> None:
    """FP8_BLOCK, three calls of everything, uneven tokens; several programs and one."""
    for programs, way in product((0, 1), WAYS):
        p = draw([5, 3], 4, 160, 3, 1)
        ranks = make(p, device=device, programs=programs, **way)
        for call in range(1 if programs else 3):
            p = draw([5 - call, 3 + call], 4, 160, 3, call)
            check_dispatch(p, ranks, padless.FP8_BLOCK, ranks.dispatch(p))
            check_combine(p, ranks, call, weighted=call % 2 == 0)
            check_again(p, ranks, call)
            check_combine(p, ranks, call, weighted=True)
        check_no_error(ranks)


@case
def three_ranks(device: str) -> None:
    """bfloat16; a rank without tokens, uneven experts."""
    p = draw([4, 0, 3], 5, 64, 2, 2, expert_map=[2, 0, 1, 2, 2])
    for way in WAYS:
        ranks = make(p, fmt=torch.bfloat16, device=device, **way)
        check_dispatch(p, ranks, torch.bfloat16, ranks.dispatch(p))
    check_combine(p, ranks, 1, weighted=False)
    check_combine(p, ranks, 2, weighted=True)
    check_no_error(ranks)


@all_ways
def sums_of_slots(device: str, way: dict[str, int]) -> None:
    """Rows of slots summed at home: three calls that use the places again, types of sums, ranks without tokens."""
    for fmt, sizes, expert_map in ((padless.FP8_BLOCK, [5, 3], None), (torch.float32, [4, 0, 3], [2, 0, 1, 2, 2])):
        p = draw(sizes, 4 if expert_map is None else 5, 160, 3, 1, expert_map=expert_map)
        ranks = make(p, fmt=fmt, device=device, **way, sums="slots")
        for call, out_dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
            p = draw([max(n - call, 0) for n in sizes], len(p.expert_map), 160, 3, call, expert_map=p.expert_map)
            check_dispatch(p, ranks, fmt, ranks.dispatch(p))
            check_slots(p, ranks, call, weighted=call != 1, out_dtype=out_dtype)
            check_again(p, ranks, call)
        check_no_error(ranks)


@all_ways
def nothing_here(device: str, way: dict[str, int]) -> None:
    """One slot a token and all rows on one rank, no tokens on another; gradients of an expanded value, of strides 0."""
    p = draw([4, 0, 3], 3, 64, 1, 6)
    for expert in (2, -1):
        p.ids = [torch.full_like(ids, expert) for ids in p.ids]
        ranks = make(p, fmt=torch.bfloat16, device=device, **way)
        check_dispatch(p, ranks, torch.bfloat16, ranks.dispatch(p))
        x = [torch.randn(()).to(torch.bfloat16).expand(t.shape) for t in p.tokens]
        other = Problem(x, p.ids, p.weights, p.expert_map)
        for r, got in enumerate(ranks.redispatch(x if device == "cpu" else [t.contiguous() for t in x])):
            exchange.assert_rows(got, exchange.rows_of(other, r, torch.bfloat16), f"rank {r}, again")
        check_combine(p, ranks, 1, weighted=True)
        check_no_error(ranks)


@all_ways
def one_rank(device: str, way: dict[str, int]) -> None:
    """A group of one, such as a mesh's dimension of one: memory of its own, without torch's symmetric memory."""
    p = draw([5], 4, 64, 2, 9)
    ranks = make(p, device=device, **way)
    settings, there = ranks.settings[0], torch.device(device)
    state = allocate(None, there, settings)  # type: ignore[arg-type]
    assert state.pointers.tolist() == [state.buffer.data_ptr()]
    ranks.backends[0] = SymmBackend(state, settings, place(4, 1, 0, p.expert_map).to(there), 3, **way)
    for call in range(2):
        check_dispatch(p, ranks, padless.FP8_BLOCK, ranks.dispatch(p))
        check_combine(p, ranks, call, weighted=True)
    check_no_error(ranks)


@case
def eight_ranks(device: str) -> None:
    p = draw([2, 1, 2, 0, 1, 2, 1, 1], 16, 96, 4, 3)
    ranks = make(p, fmt=torch.bfloat16, device=device, few_slots=0)
    check_dispatch(p, ranks, torch.bfloat16, ranks.dispatch(p))
    check_combine(p, ranks, 1, weighted=True)
    check_no_error(ranks)


@case
def order_of_sums(device: str) -> None:
    """float32 throughout, where every other order shows: several slots at a rank, and several ranks."""
    p = draw([5, 4, 5], 6, 64, 8, 3, dtype=torch.float32)
    ranks = make(p, fmt=torch.float32, device=device)
    check_dispatch(p, ranks, torch.float32, ranks.dispatch(p))
    check_combine(p, ranks, 1, weighted=True)
    check_no_error(ranks)


@case
def gradients_in_fp8(device: str) -> None:
    """Rows of other values through FP8_BLOCK, decoded: the bits of quantizing and decoding a token, wherever it goes.

    Rows are down to 2^-48 as large, which scales their bits alone.
    """
    for dtype, programs in ((torch.bfloat16, 0), (torch.float32, 1)):
        p = draw([5, 0, 3], 6, 160, 3, 4)
        ranks = make(p, fmt=dtype, device=device, programs=programs, gradient_format=padless.FP8_BLOCK, few_slots=0)
        check_dispatch(p, ranks, dtype, ranks.dispatch(p))
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x = [torch.randn(t.shape, generator=generator) for t in p.tokens]
            x = [t * 2.0 ** torch.randint(-30, 9, t.shape, generator=generator) for t in x]
            x[0][1, 130:] = torch.nan
            x[0][2, 7] = torch.inf
            x[2][1] = 0.0
            x = [t.to(dtype) for t in x]
            sizes = [2.0 ** torch.randint(-48, 1, (len(t), 1), generator=generator) for t in x]
            values = [padless.dequantize(padless.quantize(t, padless.FP8_BLOCK), dtype) for t in x]
            x, values = ([(t * s).to(dtype) for t, s in zip(given, sizes, strict=True)] for given in (x, values))
            want = Problem(values, p.ids, p.weights, p.expert_map)
            for r, got in enumerate(ranks.redispatch(x)):
                assert got.dtype == dtype
                rows = exchange.rows_of(want, r, dtype)
                torch.testing.assert_close(got[: len(rows)].cpu(), rows, rtol=0, atol=0, equal_nan=True)
                assert len(rows)
        check_combine(p, ranks, 1, weighted=True)
        check_no_error(ranks)


@case
def formats(device: str) -> None:
    """Every format's codes and scales."""
    for fmt in (padless.FP8_BLOCK, padless.MXFP8, padless.MXFP4, padless.NVFP4, torch.float32):
        scale = torch.tensor(0.01) if fmt == padless.NVFP4 else None
        p = draw([2, 3], 4, 160, 2, 4)
        major = "k" if fmt == padless.FP8_BLOCK else None
        ranks = make(p, fmt=fmt, scale_major=major, device=device)
        check_dispatch(p, ranks, fmt, ranks.dispatch(p, scale), scale)
        if fmt == torch.float32:
            check_combine(p, ranks, 1, weighted=True)
        check_no_error(ranks)


@all_ways
def one_rank_ahead(device: str, way: dict[str, int]) -> None:
    """A rank that has received publishes again, with other ids, before the other receives; one that has its sums sends
    others back, with few slots, before the other has its own.
    """
    first, second = draw([4, 4], 4, 64, 2, 5), draw([3, 4], 4, 64, 2, 6)
    ranks = make(first, device=device, **way)
    a, b = ranks.backends

    def given(p: Problem, r: int) -> list:
        return [t[r].to(device) for t in (p.tokens, p.ids, p.weights)]

    ids = [back.publish(*given(first, r), None) for r, back in enumerate((a, b))]
    one = [a.receive(ids[0], None)]
    next_ids = [a.publish(*given(second, 0), None)]
    one.append(b.receive(ids[1], None))
    next_ids.append(b.publish(*given(second, 1), None))
    two = [back.receive(i, None) for back, i in zip((a, b), next_ids, strict=True)]
    for p, found in ((first, one), (second, two)):
        ranks.plans = [plan for _, plan in found]
        check_dispatch(p, ranks, padless.FP8_BLOCK, [rows for rows, _ in found])
    if way["few_slots"]:
        given = [
            (expert_outputs(second, ranks, s), [torch.randn(len(plan.prob)) for plan in ranks.plans]) for s in (1, 2)
        ]

        def send(r: int, call: int) -> None:
            rows, dprob = (parts[r].to(device) for parts in given[call])
            ranks.backends[r].send_back(rows, ranks.plans[r], None, dprob)

        def finish(r: int) -> Any:
            return ranks.backends[r].finish(ranks.plans[r], with_slots=True)

        send(0, 0)
        send(1, 0)
        sums = [finish(0)]
        send(0, 1)
        sums.append(finish(1))
        send(1, 1)
        for (outputs, dprob), found in zip(given, (sums, [finish(0), finish(1)]), strict=True):
            judge_sums(second, ranks, outputs, dprob, found, weighted=False)
    check_no_error(ranks)


def late(ranks: Ranks, rank: int) -> None:
    """All ranks that looked name the rank."""
    for backend in ranks.backends:
        if int(backend._state.status[0]):
            with pytest.raises(RuntimeError, match=f"rank {rank} did not answer"):
                backend.check()


@all_ways
def waits(device: str, way: dict[str, int]) -> None:
    """Each step that needs another rank's waits for it, gives up in the end and says for whom it waited."""
    p = draw([3, 2, 2], 6, 64, 2, 7, distinct=True)

    def fresh() -> tuple[Ranks, list]:
        ranks = make(p, device=device, polls=5, timeout=0.05, **way)
        given = [[t.to(device) for t in parts] for parts in zip(p.tokens, p.ids, p.weights, strict=True)]
        return ranks, given

    ranks, given = fresh()
    ids = [b.publish(*g, None) for b, g in zip(ranks.backends[:2], given[:2], strict=True)]
    _, plan = ranks.backends[0].receive(ids[0], None)
    synchronize(device)
    assert plan.offs.tolist() == [0, 0], "rows of ranks that are not there"
    ranks.backends[1].receive(ids[1], None)
    synchronize(device)
    assert [int(s.status[0]) for s in ranks.states] == [3, 3, 0]
    late(ranks, 2)
    with pytest.raises(RuntimeError, match="rank 2 did not answer"):
        ranks.backends[0].check()
    ranks.backends[2].receive(ranks.backends[2].publish(*given[2], None), None)  # it comes after all
    synchronize(device)
    assert int(ranks.states[2].status[0]) == 3, "the late rank has not been told"

    ranks, _ = fresh()
    ranks.dispatch(p)
    outputs = [o.to(device) for o in expert_outputs(p, ranks, 1)]
    for r in (0, 2):
        ranks.backends[r].send_back(outputs[r], ranks.plans[r], None, None)
    out, _ = ranks.backends[0].finish(ranks.plans[0], with_slots=False)
    synchronize(device)
    assert out.isnan().all(), "sums without a rank's are not NaN"
    late(ranks, 1)
    assert int(ranks.states[0].status[0]) == 2

    ranks, _ = fresh()
    ranks.dispatch(p)
    for r in range(3):
        ranks.backends[r].send_back(outputs[r], ranks.plans[r], None, None)
    for r in (0, 1):
        ranks.backends[r].finish(ranks.plans[r], with_slots=False)
    ranks.backends[0].send_back(outputs[0], ranks.plans[0], None, None)  # rank 2 has not read the first sums
    synchronize(device)
    if way["few_slots"]:  # it need not have: there are two halves, and who stores a third has waited for it
        assert int(ranks.states[0].status[0]) == 0
        ranks.backends[1].send_back(outputs[1], ranks.plans[1], None, None)
        out, _ = ranks.backends[0].finish(ranks.plans[0], with_slots=False)
        assert out.isnan().all(), "sums without a rank's are not NaN"
    late(ranks, 2)
    assert int(ranks.states[0].status[0]) == 3


@all_ways
def waits_for_rows(device: str, way: dict[str, int]) -> None:
    """Ids of all ranks are there and the rows of one are not."""
    p = draw([3, 2, 2], 6, 64, 2, 7, distinct=True)
    ranks = make(p, device=device, polls=5, timeout=0.05, **(way | {"few_slots": 0}))
    given = [[t.to(device) for t in parts] for parts in zip(p.tokens, p.ids, p.weights, strict=True)]
    ids = [b.publish_ids(*g[1:]) for b, g in zip(ranks.backends, given, strict=True)]
    for b, (tokens, _, _) in list(zip(ranks.backends, given, strict=True))[1:]:
        b.publish_rows(tokens, None)
    _, plan = ranks.backends[1].receive(ids[1], None)
    synchronize(device)
    assert plan.offs.tolist() == exchange.offs_of(p, 1)
    assert int(ranks.states[1].status[0]) == 1
    late(ranks, 0)


@all_ways
def waits_for_gradients(device: str, way: dict[str, int]) -> None:
    """Two ranks give a plan's gradients in FP8 and one does not."""
    p = draw([3, 2, 2], 6, 64, 2, 7, distinct=True)
    options: dict[str, Any] = {"fmt": torch.bfloat16, "gradient_format": padless.FP8_BLOCK, **way}
    ranks = make(p, device=device, polls=5, timeout=0.05, **options)
    ranks.dispatch(p)
    x = [t.to(device, torch.bfloat16) for t in p.tokens]
    for b, t in list(zip(ranks.backends, x, strict=True))[1:]:
        b.publish_again(t)
    ranks.backends[1].receive_again(x[1], ranks.plans[1])
    synchronize(device)
    assert int(ranks.states[1].status[0]) == 1
    late(ranks, 0)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@case
def capacity_of_scales(device: str) -> None:
    """MN-major scales of rows that do not fit are not stored, nor anything from the last row on."""
    p = draw([6, 5], 4, 160, 3, 8)
    needed = [len(exchange.slots_of(p, r)) for r in range(2)]
    for size in (needed[0] - 3, max(needed) + 5):
        ranks = make(p, capacity=size, device=device, few_slots=0)
        poisoned: list[torch.Tensor] = []

        def poison(rows: int, columns: int, on: Any, poisoned: list = poisoned) -> torch.Tensor:
            ld = (rows + 3) // 4 * 4
            poisoned.append(torch.full((columns + 1, ld), float("nan"), device=on))
            return poisoned[-1].t()[:rows, :columns]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(symm, "empty_mn_major", poison)
            rows = ranks.dispatch(p)
        for r, (got, every) in enumerate(zip(rows, poisoned, strict=True)):
            kept, columns = min(needed[r], size), got.scale.shape[1]
            want = exchange.rows_of(p, r, padless.FP8_BLOCK).scale
            assert torch.equal(got.scale[:kept].cpu(), want[:kept]), f"rank {r}"
            assert every[:columns, kept:].isnan().all(), f"rank {r}: scales behind the last row"
            assert every[columns:].isnan().all(), f"rank {r}: memory behind the scales"


@all_ways
def capacity(device: str, way: dict[str, int]) -> None:
    """Rows that do not fit are counted and not stored; what lies behind the last row is not written."""
    p = draw([6, 5], 4, 64, 3, 8)
    needed = [len(exchange.slots_of(p, r)) for r in range(2)]
    for size in (needed[0] - 3, max(needed) + 5):
        ranks = make(p, fmt=torch.bfloat16, capacity=size, device=device, **way)
        guards: list[GuardedOutput] = []
        original = SymmBackend._empty

        def guarded(
            self: SymmBackend,
            *shape: int,
            dtype: torch.dtype,
            guards: Any = guards,
            size: int = size,
            original: Any = original,
        ) -> Any:
            if shape == (size, 128) and dtype == torch.uint8:
                guards.append(GuardedOutput(size, 64, torch.bfloat16, device))
                return guards[-1].out.view(torch.uint8)
            return original(self, *shape, dtype=dtype)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SymmBackend, "_empty", guarded)
            rows = ranks.dispatch(p)
        for r, (guard, plan) in enumerate(zip(guards, ranks.plans, strict=True)):
            kept = min(needed[r], size)
            guard.check(kept)
            want = exchange.rows_of(p, r, torch.bfloat16)
            exchange.assert_rows(rows[r], want[:kept], f"rank {r}")
            assert plan.offs.tolist() == [min(o, size) for o in exchange.offs_of(p, r)]
            assert int(plan.overflow) == max(needed[r] - size, 0)
            if needed[r] > size:
                with pytest.raises(RuntimeError, match=f"capacity is {size} rows and rank {r} received"):
                    ranks.backends[r].check()
            ranks.backends[r].check()


@all_ways
def wrong_ids(device: str, way: dict[str, int]) -> None:
    """An id that is no expert counts as none and is said."""
    p = draw([3, 3], 4, 64, 2, 9)
    wrong = Problem(p.tokens, [ids.clone() for ids in p.ids], p.weights, p.expert_map)
    wrong.ids[1][2, 0], p.ids[1][2, 0] = 2**33, -1
    ranks = make(p, device=device, **way)
    check_dispatch(p, ranks, padless.FP8_BLOCK, ranks.dispatch(wrong))
    synchronize(device)
    for backend in ranks.backends:
        with pytest.raises(RuntimeError, match="ids of rank 1 held a value that is no expert"):
            backend.check()
        backend.check()


if __name__ == "__main__":
    main(CASES)
