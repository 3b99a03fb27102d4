"""The time of a launch of any kernel on a whole chip: a few of its clusters on the clock, the others by their number.

The clusters of a sample share a multiprocessor as the chip would let them, and read memory as it was before the launch;
what they write is thrown away. Rounds of clusters follow from their number. Bytes that have to come from memory at
least are those of the arrays that the parameters point into; where loads ask for more than L2 keeps, a sample does not
tell how many come again, and the result says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from padless.emulator.prepare.control_flow import successors
from padless.emulator.state.launch import Shape, shape_of
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.state.program import Program
from padless.emulator.state.spaces import STORAGE
from padless.emulator.timing.chip import clock_under_load
from padless.emulator.timing.machine import timed
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.timeline import Timeline

if TYPE_CHECKING:
    from padless.emulator.emulator import Emulator

ALONE = 3  # clusters of a sample that have a multiprocessor each
LIMIT = 2e6  # cycles after which a sample is given up
CLOSE = 1.25  # a band of times that is wider than this is no time
THREADS, REGISTERS, CTAS, SHARED = 2048, 65536, 32, 228 << 10  # of a multiprocessor, Hopper's and Blackwell's


@dataclass(frozen=True)
class KernelTime:
    """From event to event. ``low_ns``, ``high_ns``: equal, unless the bytes that come from memory more than once are not
    known. ``why``: why there is no time, or "". ``pace``: "memory", "tiles" or "launch". ``cycles``: of a
    multiprocessor. ``together``: CTAs that a multiprocessor holds. ``sampled`` of ``clusters`` ran."""

    low_ns: float
    high_ns: float
    why: str
    pace: str
    cycles: float
    memory_bytes: float
    together: int
    sampled: int
    clusters: int

    @property
    def known(self) -> bool:
        """Whether it is a time."""
        return not self.why

    def __str__(self) -> str:
        held = f"{self.together} CTA{'s' * (self.together > 1)} a multiprocessor"
        told = f"({self.sampled} of {self.clusters} clusters on the clock, {held})"
        if not self.known:
            return f"the whole launch: cannot tell, {self.why} {told}"
        return f"the whole launch: about {self.low_ns / 1e3:.1f} us, {self.pace} {told}"


def kernel_time(
    emulator: Emulator, entry: str, grid: Shape, block: Shape, arguments: Sequence[Any], chip: Chip, *,
    cluster: Shape = (1, 1, 1), shared_bytes: int = 0, programmatic: bool = False,
) -> KernelTime:  # fmt: skip
    """The time of a launch, whose arguments are those of `Emulator.launch`; its memory stays as it is."""
    program = emulator.program(entry)
    grid, block, cluster = shape_of(program, grid, block, cluster)
    size = math.prod(cluster)
    clusters, places = max(math.prod(grid) // size, 1), max(chip.num_sms // size, 1)
    together = min(resident(program, math.prod(block), shared_bytes), -(-clusters // places))
    wanted = min(clusters, together if together > 1 else ALONE)
    sample = sorted({int((i + 0.5) * clusters / wanted) for i in range(wanted)})
    other = copy.copy(emulator)
    other.memory, other.checks, other.trace = copied(emulator.memory), False, None
    other.machine = timed(chip, record=False, sample=sample, together=together, limit=LIMIT)
    result = other.launch(
        entry, grid, block, arguments, cluster=cluster, shared_bytes=shared_bytes, programmatic=programmatic
    )
    reached = sum(a.size for a in reached_by(emulator.memory, arguments))
    told = together, len(sample), clusters
    if result.reports or len(result.timeline.lasted) < len(sample):
        found = result.reports[0].message if result.reports else "they wait for others"
        return KernelTime(math.nan, math.nan, f"clusters of a sample do not end: {found}", "", 0.0, 0.0, *told)
    return _whole(result.timeline, program, reached, places, *told)


def _whole(
    timeline: Timeline, program: Program, reached: int, places: int, together: int, sampled: int, clusters: int
) -> KernelTime:
    chip = timeline.chip
    # Warps find issue slots between those of others there, however many: here they add up, as of every other server.
    busy = max(s.busy for sm in timeline.sms.values() for s in (*sm.issue, sm.tensor, sm.loads, sm.feed, sm.store))
    longest, mean = max(*timeline.lasted, busy), max(sum(timeline.lasted) / sampled, busy)
    rounds = clusters / (places * together)
    if longest < 1.1 * mean:  # all alike: a last round takes as long as a full one
        rounds = math.ceil(rounds)
    cycles = max(mean * rounds, longest)
    loaded, stored = bytes_moved(timeline)
    loaded, stored = loaded * clusters / sampled, stored * clusters / sampled
    again = loaded if reached > chip["l2_mb"] * 1e6 else min(loaded, reached)
    used = timeline.product_cycles / sampled * clusters / (chip.num_sms * cycles)
    power = min(used, 1.0) * (chip["wide_power"] if wide(program) else 1.0)
    times = []
    for read in (min(loaded, reached), again):
        written = min(stored, reached)
        memory = read / chip["memory_gb_per_s"] + written / chip["memory_write_gb_per_s"]
        queue = cycles / clock_under_load(chip, power, loaded / chip.num_sms / cycles)
        p = chip["memory_overlap"]
        times.append((chip["launch_ns"] + (queue**p + memory**p) ** (1 / p), queue, memory))
    (low, queue, memory), (high, *_) = times
    why = ""
    if high > CLOSE * low:
        why = f"between {low / 1e3:.1f} and {high / 1e3:.1f} us, as L2 keeps what is loaded again or not"
    pace = "launch" if max(queue, memory) < chip["launch_ns"] else "memory" if memory > queue else "tiles"
    return KernelTime(low, high, why, pace, cycles, min(loaded, reached) + min(stored, reached), together, sampled,
                      clusters)  # fmt: skip


def bytes_moved(timeline: Timeline) -> tuple[float, float]:
    """Bytes that the multiprocessors of a run loaded and stored."""
    chip = timeline.chip
    loaded = sum((sm.loads.busy + sm.feed.busy) * chip["l2_feed"] for sm in timeline.sms.values())
    return loaded, sum(sm.store.busy * chip["store_bytes_per_clk"] for sm in timeline.sms.values())


def wide(program: Program) -> bool:
    """Whether its asynchronous products are of 16-bit elements."""
    kinds = ({"f16", "bf16"}, {"kind::f16"})
    return any(
        i.opcode in ("wgmma", "tcgen05") and any(k & set(i.modifiers) for k in kinds) for i in program.instructions
    )


def copied(memory: DeviceMemory) -> DeviceMemory:
    """The same bytes at the same addresses, in memory of their own."""
    other = DeviceMemory()
    for allocation in memory.allocations:
        other.register(allocation.bytes.copy(), allocation.address, allocation.name, allocation.constant)
    return other


def reached_by(memory: DeviceMemory, args: Sequence[Any]) -> list[Any]:
    """The arrays that the parameters, or words of those that are structures or tensor maps, point into."""
    words: list[int] = []
    for argument in args:
        if isinstance(argument, bytes | bytearray):
            words += np.frombuffer(argument[: len(argument) // 8 * 8], np.uint64).tolist()
        elif isinstance(argument, int | np.integer):
            words.append(int(argument))
    found = {id(a): a for a in map(memory.find, words) if a is not None}
    return list(found.values())


def resident(program: Program, threads: int, shared_bytes: int) -> int:
    """CTAs that a multiprocessor holds at once, by threads, shared memory and registers."""
    threads = -(-threads // 32) * 32
    shared = program.static_shared_bytes + shared_bytes + 1024
    registers = min(program.function.max_registers or max(live_registers(program), 16), 256)
    room = REGISTERS // (-(-registers // 8) * 8 * threads)
    return max(1, min(CTAS, THREADS // threads, SHARED // shared, room))


def live_registers(program: Program) -> int:
    """32-bit registers a thread that hold values from one block to another at most: ptxas takes that many at least."""
    blocks = program.blocks
    live = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            after = 0
            for index in successors(block):
                if index >= 0:
                    after |= live[index]
            before = block.reads | (after & ~block.writes)
            if before != live[block.index]:
                live[block.index], changed = before, True
    words = [0 if cls == "p" else max(np.dtype(STORAGE[cls]).itemsize // 4, 1) for cls, _ in program.register_rows]
    return max((sum(words[i] for i in range(len(words)) if bits >> i & 1) for bits in live), default=0)
