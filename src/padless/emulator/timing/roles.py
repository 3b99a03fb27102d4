"""A pipelined GEMM for Blackwell as roles that wait for one another: for kernels that are described but cannot be run.

One CTA of a pair, which does what its partner does: a loader, a multiplier and an epilogue over a ring of stages and
accumulators in tensor memory. They use the servers and rates that emulated kernels use; what a kernel does is all in
its ``Design``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from padless.emulator.timing.events import Barrier, Process, Simulation
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.servers import Server
from padless.emulator.timing.units import mma_cycles, mma_latency

ROWS = 128  # of a CTA
SHARED_BYTES = 227 * 1024
ACCUMULATOR_BYTES = 4


@dataclass(frozen=True)
class Design:
    """A kernel for MXFP8 with 256 rows a pair and float32 results.

    n: columns of a tile. block_k: of a stage. shared_columns: columns that two accumulators have in common, which the
    epilogue has to read before the next tile's products begin. store_bytes: of a lane's store instruction, 0 for the
    copy engine. scales_shared: whether the scales of B come once for both CTAs. local_arrays: whether the barriers'
    state lies in local memory. compact_order: whether tiles at work at one time lie in a square, not in rows.
    """

    n: int = 256
    block_k: int = 256
    shared_columns: int = 128
    store_bytes: int = 32
    scales_shared: bool = True
    local_arrays: bool = False
    compact_order: bool = False

    @property
    def stage_bytes(self) -> int:
        """Of a CTA: A, half of B, scales of A and of all of B."""
        values = (ROWS + self.n // 2) * self.block_k
        return values + (ROWS + self.n) * self.block_k // 32

    @property
    def stages(self) -> int:
        """As many as fit, beside the staging of results for the copy engine."""
        staging = 0 if self.store_bytes else 16 * 1024
        return (SHARED_BYTES - staging - 1024) // self.stage_bytes


def gemm_cycles(chip: Chip, design: Design, size: int) -> float:
    """Cycles of a pair's tiles in a product of ``size`` rows, columns and K."""
    pairs = chip.num_sms // 2
    tiles_m, tiles_n = size // (2 * ROWS), size // design.n
    tiles, k_blocks = -(-tiles_m * tiles_n // pairs), size // design.block_k
    simulation = Simulation()
    stages = design.stages
    full = [Barrier(simulation, 1, "copies") for _ in range(stages)]
    empty = [Barrier(simulation, 1, "products") for _ in range(stages)]
    done = Barrier(simulation, 1, "products of the tile")
    freed = Barrier(simulation, 1, "columns read")
    engine, feed, pipe = Server("copy engine"), Server("L2"), Server("tensor pipe")
    stores, memory = Server("stores"), Server("memory")
    # A role that looks up the barrier it waits for, and then the one it signals, waits for local memory twice: what it
    # stores passes L1 on its way.
    look = chip["mbarrier_wait"] + (chip["local_lookups"] * chip["global_latency"] if design.local_arrays else 0)

    boxes = design.block_k // 128
    rows = (ROWS + design.n // 2) * boxes + design.stage_bytes // 32 // 128
    interval = mma_cycles(chip, ROWS, design.n, 32, True, True)
    copies = (1 + design.n // 128) * boxes  # of 512 bytes of scales
    products = design.block_k // 32 * interval + copies * 512 / chip["cp_bytes_per_clk"]
    issue = chip["mma_issue"] * (design.block_k // 32 + copies)
    own_bytes = design.stage_bytes - (design.n * design.block_k // 64 if design.scales_shared else 0)
    tail = mma_latency(chip, ROWS, True, True) - chip["mbarrier_wait"]
    cold = bytes_from_memory(chip, design, size) / (pairs * tiles * k_blocks)
    per_clk = chip["memory_gb_per_s"] / chip.clocks_ghz[1] / pairs

    def loader() -> Process:
        for at in range(tiles * k_blocks):
            stage, use = at % stages, at // stages
            yield empty[stage], use, look
            yield 4 * chip["tma_issue"]
            _, read = engine.take(simulation.now, rows * chip["tma_row"])
            _, fed = feed.take(simulation.now, own_bytes / chip["l2_feed"])
            _, fetched = memory.take(simulation.now, cold / per_clk)
            simulation.at(max(read, fed, fetched) + chip["tma_latency"], full[stage].arrive)

    def multiplier() -> Process:
        for tile in range(tiles):
            # Two accumulators; what they share, or the one before the last where they share nothing, must be read.
            before = tile if design.shared_columns else tile - 1
            if before > 0:
                yield freed, before, look
            for block in range(k_blocks):
                at = tile * k_blocks + block
                yield full[at % stages], at // stages + 1, look
                _, end = pipe.take(simulation.now, products)
                simulation.at(end + tail, empty[at % stages].arrive)
                yield issue
            simulation.at(pipe.free + tail, done.arrive)

    def read_columns(columns: int) -> float:
        return columns * 32 * ACCUMULATOR_BYTES / chip["tmem_ld_bytes_per_clk"] + chip["tmem_latency_busy"]

    def store_columns(columns: int) -> float:
        """Cycles of all four warps' stores of so many columns, of which every lane has a row."""
        size = columns * ROWS * ACCUMULATOR_BYTES
        through = size / chip["store_bytes_per_clk"]
        if not design.store_bytes:
            return through
        instructions = size / (32 * design.store_bytes)
        return max(through, instructions * 32 * chip["store_line"])

    def epilogue() -> Process:
        for tile in range(tiles):
            yield done, tile + 1, look
            first = design.shared_columns or design.n
            yield read_columns(first)
            freed.arrive()
            for columns in chunks(design.n, first):
                _, end = stores.take(simulation.now, store_columns(columns))
                if design.store_bytes:  # the warps stand while their stores are taken
                    yield end - simulation.now
                else:
                    yield columns * ROWS * ACCUMULATOR_BYTES / chip["shared_bytes_per_clk"]
                yield read_columns(columns)
        yield max(stores.free - simulation.now, 0.0) + chip["store_latency"]

    simulation.start("load", loader())
    simulation.start("multiply", multiplier())
    simulation.start("store", epilogue())
    return simulation.run()


def chunks(n: int, first: int) -> Iterator[int]:
    """``first`` columns, then the rest by as many as 128."""
    yield first
    left = n - first
    while left > 0:
        yield min(left, 128)
        left -= 128


def bytes_from_memory(chip: Chip, design: Design, size: int) -> float:
    """Bytes that the chip reads from memory, each row and column of tiles once as long as it stays in L2.

    A round of tiles needs the rows of A and columns of B that it touches; what the round before had is still there if
    both rounds' fit in L2."""
    pairs = chip.num_sms // 2
    tiles_m, tiles_n = size // (2 * ROWS), size // design.n
    rounds = -(-tiles_m * tiles_n // pairs)
    if design.compact_order:
        side = pairs**0.5
        high, wide = min(side, tiles_m), min(side, tiles_n)
    else:
        wide = min(pairs, tiles_n)
        high = min(pairs / tiles_n + (1 if pairs % tiles_n else 0), tiles_m)
    touched = (high * 2 * ROWS + wide * design.n) * size
    once = 2.0 * size * size
    if once <= 0.8 * chip["l2_mb"] * 1e6:
        return once
    if not design.compact_order and touched <= 0.8 * chip["l2_mb"] * 1e6:
        return once  # a row of tiles' columns stay for the next
    return max(once, rounds * touched)
