"""Regions of the buffers that kernels of the "symm" backend store in, and how many slots are few, on any device.

As `support.ep_symm_cases`: `tests/distributed` runs every case on a GPU where there is one, and everywhere in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import padless
from padless.distributed.row_format import RowFormat
from padless.distributed.symm import MOST_POLLING
from padless.distributed.symm_state import CELL, FEW_SLOTS, FEW_TOKENS, HALVED_BYTES, Layout, layout_of
from padless.testing.exchange import Problem, draw
from support.ep_symm_cases import (
    WAYS,
    check_again,
    check_combine,
    check_dispatch,
    check_no_error,
    check_slots,
    synchronize,
)
from support.ep_virtual import Ranks, expert_outputs, make
from support.interpreter import Cases, main

CASES = Cases()
case = CASES.add

GUARD = 4096  # bytes ahead of a buffer and behind it
POISON = 0xA5
REGIONS = [name for name in Layout.__dataclass_fields__ if name not in ("size", "record_bytes", "halves")]


class Guarded:
    """Buffers of the ranks, poisoned between guards, and what steps store in them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.layout, s = ranks, ranks.states[0].layout, ranks.settings[0]
        self.is_few = ranks.backends[0].is_few
        self.buffers = [
            torch.full((self.layout.size + 2 * GUARD,), POISON, dtype=torch.uint8, device=ranks.device)
            for _ in ranks.states
        ]
        for buffer in self.buffers:
            buffer[GUARD : GUARD + self.layout.ids] = 0
        for state in ranks.states:
            state.pointers.copy_(torch.tensor([b.data_ptr() + GUARD for b in self.buffers]))
        table, many = s.max_tokens * s.top_k * 4, s.num_ranks
        of_sums = self.layout.halves
        self.halves = {  # of each region: how many, and bytes of one
            "listed": (2, many * CELL),
            "published": (2, many * CELL),
            "summed": (of_sums, many * CELL),
            "finished": (1, many * CELL),
            "ids": (2, many * table),
            "weights": (2, many * table),
            "scales": (2, many * s.max_tokens * s.row_format.placed_columns * 4),
            "slots": (of_sums, table),
            "x": (2, s.max_tokens * self.layout.record_bytes),
            "part": (
                of_sums, s.max_tokens * s.hidden * s.partial.itemsize * (s.top_k if s.sums == "slots" else many),
            ),
        }  # fmt: skip
        starts = [getattr(self.layout, name) for name in REGIONS] + [self.layout.size]
        for name, start, end in zip(REGIONS, starts, starts[1:], strict=False):
            number, size = self.halves.get(name, (1, CELL))
            assert start + number * size <= end, f"{name} has {end - start} bytes and needs {number} times {size}"

    def check(self, what: str, epochs: dict[str, int], step: Callable[[], Any]) -> None:
        """Runs a step, which must store in the halves of these epochs, in each of them, and nowhere else."""
        before = [b.clone() for b in self.buffers]
        step()
        synchronize(self.ranks.device)
        stored = torch.stack([old != new for old, new in zip(before, self.buffers, strict=True)]).any(dim=0)
        for name, epoch in epochs.items():
            number, size = self.halves[name]
            first = GUARD + getattr(self.layout, name) + epoch % number * size
            assert bool(stored[first : first + size].any()), f"{what}: nothing in {name}"
            stored[first : first + size] = False
        outside = stored.nonzero()
        assert not len(outside), f"{what}: byte {int(outside[0]) - GUARD} of {self.layout}, from {list(epochs)}"


def variants() -> Iterator[tuple[int, int, list[int], int, str, Any]]:
    """(few_slots, halved_bytes, tokens of ranks, k, sums, format)"""
    for few_slots, halved_bytes in ((FEW_SLOTS, HALVED_BYTES), (FEW_SLOTS, 0), (0, HALVED_BYTES), (0, 0)):
        yield few_slots, halved_bytes, [3, 3], 3, "slots", torch.float32
        yield few_slots, halved_bytes, [2, 2, 2], 2, "ranks", padless.FP8_BLOCK
        if bool(few_slots) == bool(halved_bytes):
            yield few_slots, halved_bytes, [2, 2, 2], 1, "slots", torch.bfloat16
            yield few_slots, halved_bytes, [3, 1], 3, "ranks", torch.float32
            yield few_slots, halved_bytes, [2], 2, "slots", padless.FP8_BLOCK
            yield few_slots, halved_bytes, [1, 1], 1, "ranks", torch.bfloat16


@case
def halves(device: str) -> None:
    """Each step stores in its half of its regions alone: dispatches, gradients by an earlier plan, and combines."""
    for variant in variants():
        check_halves(device, *variant)


def check_halves(
    device: str, few_slots: int, halved_bytes: int, sizes: list[int], top_k: int, sums: str, fmt: Any
) -> None:
    experts = max(2 * len(sizes), top_k)
    what = f"{few_slots}, {halved_bytes}, {sizes}, {top_k}, {sums}, {fmt}"
    p = draw(sizes, experts, 160, top_k, 5, distinct=True)
    options: dict[str, Any] = {"few_slots": few_slots, "halved_bytes": halved_bytes, "max_tokens": max(sizes)}
    options["most_polling"] = MOST_POLLING if halved_bytes else 0
    ranks = make(p, fmt=fmt, device=device, sums=sums, **options)
    guarded = Guarded(ranks)
    assert (guarded.is_few, guarded.layout.halves) == (few_slots > 0, 2 if halved_bytes else 1)
    published = summed = 0

    def dispatch(p: Problem) -> None:
        check_dispatch(p, ranks, fmt, ranks.dispatch(p))

    def combine(p: Problem) -> None:
        if sums == "slots":
            check_slots(p, ranks, summed, weighted=summed % 2 == 0, out_dtype=torch.float32)
        else:
            check_combine(p, ranks, summed, weighted=summed % 2 == 0)

    for listed in (1, 2):
        p = draw(sizes, experts, 160, top_k, listed, distinct=True)
        for is_again in (False, True) if fmt != torch.bfloat16 else (False,):
            published, summed = published + 1, summed + 1
            epochs = {"published": published, "x": published}
            if is_again:
                guarded.check(f"{what}: gradients", epochs, partial(check_again, p, ranks, listed))
            else:
                epochs |= {"ids": listed, "weights": listed}
                if not guarded.is_few:
                    epochs |= {"listed": listed} | ({"scales": published} if fmt == padless.FP8_BLOCK else {})
                guarded.check(f"{what}: dispatch", epochs, partial(dispatch, p))
            epochs = dict.fromkeys(("summed", "slots", "part"), summed)
            if guarded.layout.halves == 1:
                epochs["finished"] = summed
            guarded.check(f"{what}: combine", epochs, partial(combine, p))
    check_no_error(ranks)


@case
def at_the_limit(device: str) -> None:
    """So many slots, and so many tokens, of all ranks are few, and with a token more they are not."""
    for most, top_k, is_few in (
        (FEW_SLOTS // 32, 16, True),
        (FEW_SLOTS // 32 + 1, 16, False),
        (FEW_TOKENS // 2, 2, True),
        (FEW_TOKENS // 2 + 1, 2, False),
    ):
        p = draw([most, 5], 24, 32, top_k, 3)
        ranks = make(p, fmt=torch.bfloat16, device=device, max_tokens=most)
        assert [b.is_few for b in ranks.backends] == [is_few] * 2
        if top_k == 16:
            check_dispatch(p, ranks, torch.bfloat16, ranks.dispatch(p))
            check_combine(p, ranks, 1, weighted=True)
            check_no_error(ranks)


@case
def sizes_of_buffers(device: str) -> None:
    """Regions of any settings hold all that is stored in them, and sums of so many bytes have two halves."""
    for sizes, top_k in (([64, 64], 8), ([1024], 1), ([1], 16), ([41] * 5, 5), ([129] * 8, 1), ([128] * 8, 1)):
        for sums in ("ranks", "slots"):
            for fmt in (torch.bfloat16, torch.float32, padless.FP8_BLOCK, padless.NVFP4):
                p = draw(sizes, len(sizes), 32, top_k, 1)
                ranks = make(p, fmt=fmt, device=device, sums=sums)
                assert layout_of(ranks.settings[-1]) == Guarded(ranks).layout
    s = ranks.settings[0]  # of 8 ranks
    for sums, most in (("ranks", 1024), ("slots", 8192)):
        for further in (0, 8):
            hidden = HALVED_BYTES // most // s.partial.itemsize // (1 if sums == "slots" else 8) + further
            given = replace(
                s, sums=sums, max_tokens=most, hidden=hidden, row_format=RowFormat(torch.bfloat16, hidden, "k")
            )
            assert layout_of(given).halves == (1 if further else 2), (sums, hidden)


@case
def sums_after_a_timeout(device: str) -> None:
    """A rank that has given up in a dispatch, or was told that another has, has no rows, and does not say that sums of
    them are there: sums are NaN at all ranks.
    """
    p = draw([3, 2, 2], 6, 64, 2, 7, distinct=True)
    for way in WAYS:
        ranks = make(p, device=device, polls=5, timeout=0.05, **way)
        ranks.dispatch(p)
        outputs = [o.to(device) for o in expert_outputs(p, ranks, 1)]
        given = [[t.to(device) for t in parts] for parts in zip(p.tokens, p.ids, p.weights, strict=True)]
        ids = [ranks.backends[r].publish(*given[r], None) for r in (0, 1)]
        plans = [ranks.backends[0].receive(ids[0], None)[1]]  # gives up
        ids.append(ranks.backends[2].publish(*given[2], None))  # which was late
        plans += [ranks.backends[r].receive(ids[r], None)[1] for r in (1, 2)]
        synchronize(device)
        assert not any(plan.offs.any() for plan in plans), "rows of a dispatch that one has given up"
        for r in range(3):
            ranks.backends[r].send_back(outputs[r], plans[r], None, None)
        synchronize(device)
        for state in ranks.states:
            cells = state.buffer[state.layout.summed : state.layout.finished].view(torch.int64)
            assert not cells.any(), "sums that are not there were said to be"
        for r in range(3):
            out, _ = ranks.backends[r].finish(plans[r], with_slots=False)
            synchronize(device)
            assert out.isnan().all(), f"rank {r}"
            with pytest.raises(RuntimeError, match="rank 2 did not answer"):
                ranks.backends[r].check()


if __name__ == "__main__":
    main(CASES)
