"""A ring's main loop as a law and as a simulation: one loader, one multiplier, ``stages`` stages between them.

The law is for sweeps: the period of a stage is the largest of five terms, each a server or a round trip. The
simulation plays the same loop with the servers and barriers of this package; a test holds them together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from padless.emulator.timing.events import Barrier, Process, Simulation
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.servers import Server


@dataclass(frozen=True)
class Loop:
    """What one stage brings and multiplies.

    rows: box rows of at most 128 bytes, of both operands. bytes_b: of B. products: instructions. interval: cycles of
    one, as of ``units.mma_cycles``. stages: of the ring. copies: cycles of tcgen05.cp on the tensor pipe.
    """

    rows: int
    bytes_b: float
    products: int
    interval: float
    stages: int
    copies: float = 0.0


def loop_of(rows_a: int, rows_b: int, k_bytes: int, interval: float, stages: int) -> Loop:
    """The loop of a tile whose stage holds ``k_bytes`` bytes of K of every row; a product takes 32 of them."""
    boxes = math.ceil(k_bytes / 128)
    return Loop((rows_a + rows_b) * boxes, float(rows_b * k_bytes), k_bytes // 32, interval, stages)


def terms(chip: Chip, loop: Loop) -> dict[str, float]:
    """Cycles of a stage by what could set the pace."""
    load = chip["tma_row"] * loop.rows
    multiply = loop.products * max(chip["mma_least"], loop.interval) + loop.copies
    trip = chip["ring_latency"] + chip["ring_load"] * load + chip["ring_products"] * multiply
    return {
        "copy engine": load,
        "stream of B": loop.bytes_b / chip["stream_bytes_per_clk"],
        "tensor pipe": multiply,
        "copies": trip / loop.stages,
        "issue": chip["stage_floor"],
    }


def period(chip: Chip, loop: Loop) -> float:
    """Cycles of a stage."""
    return max(terms(chip, loop).values())


def simulate(chip: Chip, loop: Loop, blocks: int = 96) -> tuple[float, str]:
    """Cycles of a stage in a run of ``blocks`` stages, past the first ring, and what set the pace."""
    simulation = Simulation()
    full = [Barrier(simulation, 1, "copies") for _ in range(loop.stages)]
    empty = [Barrier(simulation, 1, "products") for _ in range(loop.stages)]
    engine, stream, pipe = Server("copy engine"), Server("stream of B"), Server("tensor pipe")
    issue = Server("issue")
    ends: list[float] = []
    load = chip["tma_row"] * loop.rows
    multiply = loop.products * max(chip["mma_least"], loop.interval) + loop.copies
    # What a round trip takes beyond its load and its products once each.
    latency = chip["ring_latency"] + (chip["ring_load"] - 1) * load + (chip["ring_products"] - 1) * multiply

    def places() -> Iterator[tuple[int, int]]:
        for block in range(blocks):
            yield block % loop.stages, block // loop.stages

    def loader() -> Process:
        for stage, use in places():
            yield empty[stage], use, 0.0
            _, issued = issue.take(simulation.now, chip["stage_floor"])
            _, read = engine.take(simulation.now, load)
            _, streamed = stream.take(simulation.now, loop.bytes_b / chip["stream_bytes_per_clk"])
            landed = max(read + latency, streamed)
            simulation.at(landed, full[stage].arrive)
            yield max(issued - simulation.now, 0.0)

    def multiplier() -> Process:
        for stage, use in places():
            yield full[stage], use + 1, 0.0
            _, end = pipe.take(simulation.now, multiply)
            ends.append(end)
            simulation.at(end, empty[stage].arrive)
            yield 0.0

    simulation.start("load", loader())
    simulation.start("multiply", multiplier())
    total = simulation.run()
    first = loop.stages * max(2, blocks // loop.stages // 3)
    steady = (ends[-1] - ends[first]) / (len(ends) - 1 - first)
    waits: dict[str, Any] = simulation.waits["multiply"]
    servers = {server.name: server.busy / total for server in (engine, stream, pipe, issue)}
    name, share = max(servers.items(), key=lambda item: item[1])
    return steady, name if share > 0.85 else max(waits, key=lambda what: waits[what])
