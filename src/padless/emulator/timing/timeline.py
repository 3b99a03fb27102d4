"""What a timed run leaves: when every server was busy, and who waited for what."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from padless.emulator.state.program import Program
from padless.emulator.timing.rates import Chip
from padless.emulator.timing.units import Sm

ROLES = ("load", "multiply", "store", "schedule", "other")


@dataclass
class Wait:
    """Cycles [start, end) that a warp waited, and for what."""

    warp: tuple[int, int]  # SM, warp
    start: float
    end: float
    what: str


@dataclass
class Timeline:
    """One run. Times are cycles from its first instruction.

    marks: when what was done first and last, by what: "load", "product", "store". loads, loaded, load_cycles: their
    number, bytes, and cycles from issue to arrival. most_in_flight: bytes on their way at once. holds: cycles of every
    stage's release after its products (of kernels whose warps release them). began, lasted: when each cluster began, and
    for how long it ran, as they ended.
    """

    chip: Chip
    sms: dict[int, Sm]
    program: Program
    cycles: float = 0.0
    waits: list[Wait] = field(default_factory=list)
    work_of: dict[tuple[int, int], dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    ended: dict[tuple[int, int], float] = field(default_factory=dict)
    marks: dict[str, tuple[float, float]] = field(default_factory=dict)
    loads: int = 0
    loaded: float = 0.0
    load_cycles: float = 0.0
    most_in_flight: float = 0.0
    holds: list[float] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    lasted: list[float] = field(default_factory=list)

    def count_load(self, size: float, cycles: float, in_flight: float) -> None:
        """A load of ``size`` bytes that takes ``cycles``, with ``in_flight`` bytes on their way, its own too."""
        self.loads += 1
        self.loaded += size
        self.load_cycles += cycles
        self.most_in_flight = max(self.most_in_flight, in_flight)

    @property
    def product_cycles(self) -> float:
        """Cycles of the tensor pipes of all SMs."""
        return sum(sm.tensor.busy for sm in self.sms.values())

    @property
    def hold(self) -> float:
        """Cycles, on average, from a warp having seen its products end to its release of their stage."""
        return sum(self.holds) / len(self.holds) if self.holds else 0.0

    def mark(self, what: str, start: float, end: float) -> None:
        """Something was done."""
        low, high = self.marks.get(what, (start, end))
        self.marks[what] = min(low, start), max(high, end)

    def role(self, warp: tuple[int, int]) -> str:
        """What a warp is for, by what it has issued: products, loads or stores, the rarest first."""
        did = self.work_of.get(warp, {})
        if did.get("wgmma") or did.get("mma"):
            return "multiply"
        if did.get("tmem_ld"):
            return "store"
        if did.get("load"):
            return "load"
        if did.get("store"):
            return "store"
        return "schedule" if did.get("atomic") or did.get("other") else "other"

    def waited(self) -> dict[str, dict[str, float]]:
        """Cycles that a warp of each role waits, by what for: a mean over the role's warps."""
        warps: dict[str, set[tuple[int, int]]] = defaultdict(set)
        for warp in self.ended:
            warps[self.role(warp)].add(warp)
        total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for wait in self.waits:
            total[self.role(wait.warp)][wait.what] += wait.end - wait.start
        return {
            role: {what: cycles / max(len(warps[role]), 1) for what, cycles in by.items()} for role, by in total.items()
        }

    def window(self) -> tuple[float, float]:
        """From the first product to the last: where a kernel should be at the rate of something."""
        return self.marks.get("product", (0.0, self.cycles))

    def utilization(self, start: float | None = None, end: float | None = None) -> dict[str, float]:
        """Share of [start, end), by default of ``window``, that each kind of server was busy: a mean over SMs."""
        low, high = self.window()
        low, high = low if start is None else start, high if end is None else end
        by: dict[str, list[float]] = defaultdict(list)
        for sm in self.sms.values():
            issue = [s.utilization(low, high) for s in sm.issue]
            tmem = [s.utilization(low, high) for s in sm.tensor_memory]
            by["issue"].append(max(issue))
            by["tensor memory"].append(max(tmem))
            for server in (sm.tensor, sm.copy, sm.feed, sm.loads, sm.memory, sm.store):
                by[server.name].append(server.utilization(low, high))
            by["shared memory"].append(min(sm.shared.busy / max(self.cycles, 1), 1.0))
        return {name: sum(values) / len(values) for name, values in by.items()}

    def binding(self, enough: float = 0.9) -> str:
        """What sets the pace between the first product and the last: the busiest server where it is busy for
        ``enough`` of the time, else what the multiplying warps wait for most, or the issue of instructions if they
        wait for nothing."""
        used = self.utilization()
        name, share = max(used.items(), key=lambda item: item[1])
        if share >= enough:
            return name
        waited = self.waited()
        waits = waited.get("multiply") or max(waited.values(), key=lambda by: sum(by.values()), default={})
        waits = {what: cycles for what, cycles in waits.items() if not what.startswith("the next tile")}
        if not waits:
            return "issue"
        what, cycles = max(waits.items(), key=lambda item: item[1])
        low, high = self.window()
        return what if cycles > 0.05 * (high - low) else f"{name} ({share:.0%})"
