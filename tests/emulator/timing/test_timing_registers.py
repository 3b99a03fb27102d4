"""Registers in time: whose they are, multiply-adds beside products, waits behind arithmetic."""

from __future__ import annotations

import pytest

from clock_h200 import run_tiles
from padless.emulator.state.register_pool import PartitionedPool, RegisterPool
from padless.emulator.timing import H200
from padless.emulator.timing.events import Events
from padless.emulator.timing.servers import Batches, Server

WIDE, NARROW = (128, 192, 1), (128, 128, 1)


def test_a_warp_takes_registers_of_its_own_quarter() -> None:
    """Twelve warps: what warps 9 to 11 give is nothing to warp 0, whose quarter's warp 8 has given nothing yet."""
    one, quarters = RegisterPool(12, 168), PartitionedPool(12, 168)
    for pool in (one, quarters):
        for warp in (9, 10, 11):
            pool.give(warp, 40)
    assert one.available(0) == 3 * 32 * 128
    assert [quarters.available(warp) for warp in range(4)] == [0, 32 * 128, 32 * 128, 32 * 128]
    quarters.give(8, 40)
    quarters.give(0, 232)
    assert quarters.available(4) == 32 * (128 - 64) == quarters.missing(4, 232)
    quarters.give(4, 232)
    assert quarters.available(0) == 0


def test_warpgroups_begin_together() -> None:
    """The loading warp fills the ring before it gives registers away, and all warps of its quarter wait for it: else a
    warpgroup would run two K blocks ahead of the other, with a ring that is shorter by as much."""
    timeline = run_tiles(WIDE, 128, 1, 12, H200)
    first = {
        group: [w.end for w in timeline.waits if w.what == "products" and w.warp[1] == 4 * group] for group in (0, 1)
    }
    assert len(first[0]) == len(first[1]) == 12
    assert abs(first[0][0] - first[1][0]) < 500  # the tensor pipe's turn


def period(shape: tuple[int, int, int], rows: int, **rates: float) -> float:
    chip = H200.changed("stated", "a test", **rates)
    short, long = (run_tiles(shape, rows, 1, blocks, chip).cycles for blocks in (8, 14))
    return (long - short) / 6


def test_multiply_adds_are_slow_beside_products_alone() -> None:
    """A tile of 64 rows has one warpgroup: no product runs while it multiplies and adds."""
    assert period(NARROW, 64, operand_slots=3.0) == pytest.approx(period(NARROW, 64), rel=0.01)
    assert period(NARROW, 128, operand_slots=3.0) > 1.1 * period(NARROW, 128)


def test_a_wait_passes_while_arithmetic_is_issued() -> None:
    free, slow = (period(NARROW, 64, mbarrier_wait=cycles) for cycles in (0.0, 43.0))
    assert slow - free < 43 / 2 + 5  # half of it comes after a wait that was one
    assert period(NARROW, 64, mbarrier_wait=400.0) > free + 100


def test_work_left_is_that_in_hand_and_that_in_line() -> None:
    events = Events()
    batches = Batches(Server("tensor"), events)
    assert batches.left(5.0) == 0.0
    for customer in ("a", "a", "b"):
        batches.put(customer, 64, "", lambda: None)
    assert batches.left(0.0) == 192
    events.step()
    assert batches.left(events.now + 10) == 118
