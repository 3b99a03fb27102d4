"""The clock's parts on their own: servers, events, barriers, costs of instructions, formulas of units, rates."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from padless.emulator.prepare.program import prepare
from padless.emulator.ptx.parser import parse
from padless.emulator.timing import B200, CHIPS, H200, Rate, chip_of
from padless.emulator.timing.chip import Call, TileTimes, band, call_time, clock_under_load, first_touches, queue_cycles
from padless.emulator.timing.costs import Costs
from padless.emulator.timing.events import Barrier, Events, Process, Simulation
from padless.emulator.timing.loops import loop_of, period, simulate
from padless.emulator.timing.rates import MARKS
from padless.emulator.timing.servers import Batches, Server
from padless.emulator.timing.units import mma_cycles, mma_latency, wgmma_cycles


# -------------------------------------------------------------------------------------------- servers, events
def test_server_is_first_come_first_served() -> None:
    server = Server("pipe", record=True)
    assert server.take(10, 5, "a") == (10, 15)
    assert server.take(11, 5, "b") == (15, 20)
    assert server.take(100, 1, "c") == (100, 101)
    assert server.busy == 11
    assert server.utilization(0, 110) == pytest.approx(0.1)
    assert server.utilization(12, 17) == 1.0
    assert server.utilization(30, 90) == 0.0


def test_little_work_slips_in_and_delays_the_rest() -> None:
    server = Server("issue")
    server.take(0, 100)
    assert server.squeeze(10, 5) == 15
    assert server.take(20, 10) == (105, 115)


def test_batches_stay_with_a_customer_that_has_work() -> None:
    events, order = Events(), []
    batches = Batches(Server("tensor"), events)
    for at, customer in ((0, "a"), (1, "b"), (2, "a"), (3, "b"), (4, "a")):
        events.at(at, lambda c=customer: batches.put(c, 64, "", lambda: order.append((events.now, c))))  # type: ignore[misc]
    while events.next < float("inf"):
        events.step()
    assert order == [(64, "a"), (128, "a"), (192, "a"), (256, "b"), (320, "b")]


def test_events_of_one_moment_keep_their_order() -> None:
    events, seen = Events(), []
    for i in range(20):
        events.at(7, lambda i=i: seen.append(i))  # type: ignore[misc]
    events.at(3, lambda: events.at(1, lambda: seen.append("late")))  # type: ignore[arg-type]
    while events.next < float("inf"):
        events.step()
    assert seen == ["late", *range(20)]
    assert events.now == 7


def test_barrier_waits_for_arrivals_and_bytes() -> None:
    simulation = Simulation()
    barrier = Barrier(simulation, 2, "full")
    times: list[float] = []

    def waiter() -> Process:
        yield barrier, 1, 5
        times.append(simulation.now)
        yield barrier, 2, 0
        times.append(simulation.now)

    def producer() -> Process:
        barrier.arrive(1, expect=100)
        yield 10
        barrier.arrive(1, expect=20)
        simulation.at(50, lambda: barrier.complete(100))
        simulation.at(40, lambda: barrier.complete(20))
        yield 90
        barrier.arrive(2)

    simulation.start("waiter", waiter())
    simulation.start("producer", producer())
    simulation.run()
    assert times == [55, 100]
    assert simulation.waits["waiter"]["full"] == 50 + 45


def test_too_many_arrivals_are_refused() -> None:
    barrier = Barrier(Simulation(), 1, "empty")
    with pytest.raises(ValueError, match="2 arrivals at empty, which expects 1"):
        barrier.arrive(2)


def test_phase_that_never_ends_is_reported() -> None:
    simulation = Simulation()

    def waiter() -> Process:
        yield Barrier(simulation, 1, "full"), 1, 0

    simulation.start("waiter", waiter())
    with pytest.raises(RuntimeError, match="1 processes wait"):
        simulation.run()


# ------------------------------------------------------------------------------------------------------ rates
def test_every_rate_says_where_it_is_from() -> None:
    for chip in CHIPS.values():
        for name, rate in chip.rates.items():
            assert rate.mark in MARKS, name
            assert len(rate.source) > 5 or rate.source in ("as on H200",), name
            assert rate.unit, name
            assert rate.value >= 0, name
    with pytest.raises(ValueError, match="mark is 'guessed'"):
        Rate(1, "clk", "guessed", "nobody")


def test_chips_are_found_by_architecture() -> None:
    assert chip_of("sm_90a") is H200
    assert chip_of("sm_100a") is B200
    with pytest.raises(ValueError, match="sm_80"):
        chip_of("sm_80")


def test_changed_chip_leaves_the_other_alone() -> None:
    other = H200.changed("fitted", "a test", l2_feed=1.0)
    assert (other["l2_feed"], H200["l2_feed"] > 1) == (1.0, True)
    assert other.rates["l2_feed"].mark == "fitted"


# ------------------------------------------------------------------------------------------------------ units
@pytest.mark.parametrize(
    ("rows", "n", "pair", "shared", "published"),
    [
        (128, 64, False, True, 48.6), (128, 112, False, True, 60.6), (128, 256, False, True, 128.6),
        (64, 64, False, True, 32.6), (64, 256, False, False, 128.6), (128, 80, True, True, 45.3),
        (128, 256, True, True, 128.7), (64, 96, True, True, 29.7), (64, 256, True, False, 64.7),
    ],
)  # fmt: skip
def test_product_intervals_are_those_published(rows: int, n: int, pair: bool, shared: bool, published: float) -> None:
    # SemiAnalysisAI/microbench-blackwell: 256 products in a row, so half a cycle of latency in each.
    assert mma_cycles(B200, rows, n, 32, pair, shared) == pytest.approx(published - 0.6, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "pair", "shared", "tail"),
    [(128, False, False, 104), (64, False, True, 120), (128, False, True, 136), (128, True, False, 138), (128, True,
    True, 170)],
)  # fmt: skip
def test_product_latencies_are_those_published(rows: int, pair: bool, shared: bool, tail: float) -> None:
    assert mma_latency(B200, rows, pair, shared) == tail


def test_hopper_product_takes_half_a_cycle_a_column() -> None:
    for n in (8, 64, 128, 192, 256):
        from_registers = wgmma_cycles(H200, n, 32, a_in_shared=False)
        assert from_registers == pytest.approx(n / 2 + H200["wgmma_register_a"], rel=0.005)
        assert wgmma_cycles(H200, n, 32) == pytest.approx(max(n / 2, 16 + n / 4), rel=0.005)


def test_law_of_a_ring_is_what_its_simulation_does() -> None:
    draw = random.Random(3)
    for _ in range(40):
        m, n = draw.choice((64, 128)), draw.choice((32, 64, 128, 192, 256))
        k_bytes, stages = draw.choice((64, 128, 256, 512)), draw.randrange(2, 9)
        loop = loop_of(m, n, k_bytes, mma_cycles(B200, m, n, 32, False, True), stages)
        cycles, _ = simulate(B200, loop)
        assert cycles == pytest.approx(period(B200, loop), rel=0.03), loop


def test_deeper_ring_is_never_slower() -> None:
    for stages in range(2, 8):
        shallow, deep = (loop_of(128, 128, 128, 64, s) for s in (stages, stages + 1))
        assert period(B200, deep) <= period(B200, shallow)


# ------------------------------------------------------------------------------------------------------ costs
PTX = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 p)
{
    .reg .b64 %rd<9>;
    .reg .b32 %r<9>;
    .reg .f32 %f<99>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [p];
BODY
    ret;
}
"""


def cost_of(body: str, tensor: bool = False) -> list[object]:
    program = prepare(parse(PTX.replace("BODY", body), "test"), "kernel")
    costs = Costs(H200, program.register_names, tensor)
    return [costs.of(block) for block in program.blocks]


def test_independent_arithmetic_costs_its_slots() -> None:
    body = "\n".join(f"fma.rn.f32 %f{i}, %f{i}, %f90, %f{i};" for i in range(64))
    (alone,), (beside,) = cost_of(body), cost_of(body, tensor=True)
    assert alone.slots == pytest.approx(64 + 1.5)  # type: ignore[attr-defined]
    assert beside.slots == pytest.approx(64 * 2.5 * H200["operand_slots_alone"] + 1.5)  # type: ignore[attr-defined]
    slow = beside.slots + beside.beside  # type: ignore[attr-defined]
    assert slow == pytest.approx(64 * 2.5 * H200["operand_slots"] + 1.5)
    assert alone.dense  # type: ignore[attr-defined]
    assert not cost_of("add.f32 %f1, %f2, %f3;")[0].dense  # type: ignore[attr-defined]


def test_chain_behind_a_load_counts_its_latency() -> None:
    (used,) = cost_of("ld.shared.f32 %f1, [%r1]; add.f32 %f2, %f1, %f1; st.shared.f32 [%r2], %f2;")
    assert used.chain >= H200["shared_latency"] + H200["alu_latency"]  # type: ignore[attr-defined]
    assert not used.later  # type: ignore[attr-defined]
    (unused,) = cost_of("ld.global.f32 %f1, [%rd1];")
    assert unused.chain < 10  # type: ignore[attr-defined]
    ((latency, registers),) = unused.later  # type: ignore[attr-defined]
    assert latency >= H200["global_latency"]
    assert registers.bit_count() == 1


def test_arrival_is_seen_where_it_stands_in_its_block() -> None:
    work = "\n".join(f"fma.rn.f32 %f{i}, %f{i}, %f90, %f{i};" for i in range(64))
    arrive = "mbarrier.arrive.shared::cta.b64 %rd2, [%r1];"
    (early,), (late,) = cost_of(arrive + work), cost_of(work + arrive)
    assert early.signal < 20 < 64 <= late.signal  # type: ignore[attr-defined]


def test_shared_memory_is_charged_by_bytes() -> None:
    (narrow,) = cost_of("st.shared.u32 [%r1], %r2;")
    (wide,) = cost_of("st.shared.v4.u32 [%r1], {%r2, %r3, %r4, %r5};")
    assert (narrow.shared, wide.shared) == (1, 4)  # type: ignore[attr-defined]


def test_global_bytes_are_counted() -> None:
    (cost,) = cost_of("ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1]; st.global.f32 [%rd1], %f5;")
    assert (cost.loaded, cost.stored) == (512, 128)  # type: ignore[attr-defined]


def test_products_of_a_warp_take_their_share() -> None:
    body = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, "
        "{%f5, %f6, %f7, %f8};"
    )
    cycles = max(cost.slots for cost in cost_of(body))  # type: ignore[attr-defined]
    assert cycles == pytest.approx(16 * 8 * 32 / 1024 / H200["mma_sync_share"], rel=0.005)


# ------------------------------------------------------------------------------------------------------- chip
TIMES = TileTimes(1000, 500, {1: 100, 2: 190}, {1: 60, 2: 70})


def call(tiles: list[int], memory_bytes: float = 1e6, written_bytes: float = 0.0) -> Call:
    """Four workers, the bytes evenly over the tiles."""
    loads, stores = ([size / max(len(tiles), 1)] * len(tiles) for size in (memory_bytes - written_bytes, written_bytes))
    return Call(tiles, 10, 1e9, 4, loads, stores)


def test_queue_gives_tiles_to_whoever_is_free() -> None:
    assert queue_cycles(call([]), TIMES) == 1500
    assert queue_cycles(call([2] * 4), TIMES) == 1500 + 1970
    assert queue_cycles(call([2] * 5), TIMES) == 1500 + 2 * 1970
    assert queue_cycles(call([2, 2, 2, 1, 1]), TIMES) == 1500 + max(1970, 2 * 1060)


def test_clock_falls_with_the_cube_root_of_what_is_done() -> None:
    highest, full = H200.clocks_ghz[1], H200["full_load_ghz"]
    assert clock_under_load(H200, 0.01) == highest
    assert clock_under_load(H200, 2.0) == pytest.approx(full * 2 ** (-1 / 3))
    moved = 1 / H200["received_power"]  # as much as the tensor cores, all busy
    assert clock_under_load(H200, 1.0, moved) == pytest.approx(full * 2 ** (-1 / 3))
    half = 0.5 / H200["memory_power"]
    assert clock_under_load(H200, 1.0, moved, half) == pytest.approx(full * 4 ** (-1 / 3))


def test_clock_of_a_call_follows_from_what_it_moves() -> None:
    busy = call([2] * 400)
    heavy = replace(busy, products=3e11)
    fed = replace(heavy, received=50.0 * queue_cycles(heavy, TIMES))
    assert call_time(busy, TIMES, H200).ghz == H200.clocks_ghz[1]
    assert call_time(fed, TIMES, H200).ghz < call_time(heavy, TIMES, H200).ghz <= H200.clocks_ghz[1]
    assert call_time(fed, TIMES, H200, ghz=1.5).ghz == 1.5


def test_memory_bounds_a_call_from_below() -> None:
    lean, fat = call([1] * 8), call([1] * 8, memory_bytes=1e9)
    floor = 1e9 / H200["memory_gb_per_s"]
    assert call_time(fat, TIMES, H200).bound == "memory"
    assert call_time(fat, TIMES, H200).ns >= floor + H200["launch_ns"]
    assert call_time(lean, TIMES, H200).bound == "tiles"
    low, high = band(lean, TIMES, H200)
    assert low < high


def test_written_bytes_take_their_own_rate() -> None:
    one = call_time(call([1] * 8, memory_bytes=1e9), TIMES, H200)
    other = call_time(call([1] * 8, memory_bytes=1e9, written_bytes=4e8), TIMES, H200)
    assert one.memory_ns == pytest.approx(1e9 / H200["memory_gb_per_s"])
    expected = 6e8 / H200["memory_gb_per_s"] + 4e8 / H200["memory_write_gb_per_s"]
    assert other.memory_ns == pytest.approx(expected)
    assert other.ns > one.ns
    known = call_time(call([1] * 8), TIMES, H200, cycles=1e6)
    assert known.cycles == 1e6


def test_bytes_are_read_by_the_first_tile_that_needs_them() -> None:
    tiles = [((row, 30.0), (column, 7.0)) for row in range(2) for column in (0, 1, 1)]
    assert first_touches(tiles) == [37, 7, 0, 30, 0, 0]


def test_a_round_waits_for_its_own_bytes_alone() -> None:
    """All bytes in the first of two rounds: the second takes what its tiles take, and no more."""
    early, even = call([1] * 8, memory_bytes=4e6), call([1] * 8, memory_bytes=4e6)
    early = replace(early, loads=[1e6] * 4 + [0.0] * 4)
    late = replace(early, loads=early.loads[::-1])
    assert call_time(early, TIMES, H200).ns == pytest.approx(call_time(late, TIMES, H200).ns)
    ghz = call_time(early, TIMES, H200).ghz
    p, tile = H200["memory_overlap"], 1060 / ghz
    first = (tile**p + (4e6 / H200["memory_gb_per_s"]) ** p) ** (1 / p)
    fixed = 1500 / ghz + H200["launch_ns"]
    assert call_time(early, TIMES, H200).ns == pytest.approx(fixed + first + tile)
    assert call_time(even, TIMES, H200).ns < call_time(early, TIMES, H200).ns


def test_stores_run_beside_the_next_tiles_products() -> None:
    """Two accumulators: a worker's third tile waits for the first one's stores, its last tile's are in the end."""
    times = replace(TIMES, least={1: 5000.0})
    assert queue_cycles(call([1] * 4), times) == 1500 + 1060
    assert queue_cycles(call([1] * 8), times) == 1500 + 1060 + 5000
    assert queue_cycles(call([1] * 12), times) == 1500 + 1060 + 2 * 5000
    assert queue_cycles(call([1] * 12), replace(TIMES, least={1: 1000.0})) == 1500 + 3 * 1060


def test_a_last_tile_ends_as_its_own_sort() -> None:
    times = replace(TIMES, ends={1: TIMES.end - 300})
    assert queue_cycles(call([2] * 4 + [1] * 4), times) == 1200 + 1970 + 1060
    assert queue_cycles(call([1] * 4 + [2] * 4), times) == 1500 + 1970 + 1060
