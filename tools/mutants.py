"""Mutants of this library's kernels: which missing or weakened synchronisations are noticed, and the table of the rest.

    python tools/mutants.py run RECORD [--processes N] [--seconds S] [--case NAME]    appends what RECORD lacks
    python tools/mutants.py run RECORD --unsettled                                    of new and changed kernels alone
    python tools/mutants.py show RECORD                                               the table

A record is JSON lines, one a verdict; a run goes on where another ended, and judges anew the kernels whose PTX has
changed. A mutant is noticed by a report or by an output that differs from the kernel's under the same schedule; outputs
that the schedule alone changes do not count.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch

from kernel_digests import normalised
from padless.emulator.emulator import Emulator, LaunchResult
from padless.emulator.fake_driver import EmulatedDriver, memory_of, standing_in
from padless.emulator.mutation import Mutant, Survey
from padless.runtime.driver import Argument, LaunchShape
from padless.runtime.jit import CompiledKernel

SEEDS = 2
OVERLAPPING = 0, 32  # seeds of exchanges: CTA by CTA in the order of the grid, and three at a time
SUMMARY = Path(__file__).parents[1] / "docs" / "measured" / "mutants.json"
EXCHANGE_SUMMARY = SUMMARY.with_name("mutants_exchange.json")
Arrays = dict[str, np.ndarray[Any, Any]]
Key = tuple[str, str, int, str]  # case, digest of its PTX, PTX line, change


class Captured(Exception):
    """Ends a call at its launch."""

    def __init__(self, launch: Launch) -> None:
        super().__init__("launch")
        self.launch = launch


class Launch(NamedTuple):
    """Everything of a call's launch, as a driver is given it."""

    emulator: Emulator
    kernel: CompiledKernel
    shape: LaunchShape
    arguments: Sequence[Argument]
    tensors: Sequence[torch.Tensor]

    @property
    def values(self) -> list[Any]:
        return [a if isinstance(a, bytes) else a[0] for a in self.arguments]


class Capturing(EmulatedDriver):
    """A device that hands out the launch of a call in place of running it."""

    def prepare(self, *arguments: Any) -> Any:
        launch = Launch(*arguments)

        def stop(stream: int = 0) -> None:
            raise Captured(launch)

        return stop


def captured(name: str, short: bool = False) -> Launch:
    """The launch of a case, its tensors as they are before it."""
    from mutant_cases import CASES, LONG, SHORT, of_sizes
    from mutant_exchange import EXCHANGES

    arch, call = {**CASES, **EXCHANGES}[name]
    device, sizes = Capturing(arch), SHORT if short else LONG
    with standing_in(device, arch), of_sizes(device, sizes):
        try:
            call(device)
        except Captured as caught:
            return caught.launch
    raise RuntimeError(f"case {name} has launched nothing")


def digest_of(launch: Launch) -> str:
    """Of the PTX; with the version of Triton where that has written it."""
    digest, log = hashlib.sha256(normalised(launch.kernel).encode()).hexdigest()[:12], launch.kernel.log
    return f"{digest} of {log}" if log.startswith("Triton") else digest


def unsettled(summary: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Those cases whose kernel is not in a summary of the page's tool as it is now, with all its mutants judged."""

    def is_settled(name: str) -> bool:
        own = summary["kernels"].get(name)
        return own is not None and own["judged"] == own["mutants"] and own["digest"] == digest_of(captured(name))

    return [name for name in names if not is_settled(name)]


class Case:
    """A launch that is repeated, and the mutants of its kernel. digest: of the kernel's PTX. short: the second size."""

    def __init__(self, name: str, seeds: int = SEEDS, short: bool = False) -> None:
        from mutant_exchange import EXCHANGES

        launch = captured(name, short)
        self.name, self.is_exchange = name, name in EXCHANGES
        self.seeds = OVERLAPPING if self.is_exchange else range(seeds)
        self._other: Case | None = None
        self._launch = launch
        self._tensors = {i: t for i, t in enumerate(launch.tensors) if t.numel()}
        storages = (t.untyped_storage() for t in self._tensors.values())
        self._bytes = {s.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(s) for s in storages}
        self._before = {address: raw.clone() for address, raw in self._bytes.items()}
        self.digest = digest_of(launch)
        self.survey = Survey(launch.emulator, launch.kernel.entry, self.run, self.seeds)
        expected = self.survey.expected
        for output in list(expected[0]):  # of those that the schedule changes nothing can be said
            if any(not np.array_equal(expected[seed][output], expected[0][output]) for seed in self.seeds):
                for arrays in expected.values():
                    del arrays[output]

    def run(self, emulator: Emulator, seed: int) -> tuple[LaunchResult, Arrays]:
        """One launch on the operands as they were."""
        for address, raw in self._bytes.items():
            raw.copy_(self._before[address])
        launch = self._launch
        device = emulator.with_memory(memory_of(launch.tensors))
        for allocation in device.memory.allocations:
            allocation.followed = self.is_exchange
        device.arithmetic = "fast"
        result = device.launch(
            launch.kernel.entry, launch.shape.grid, launch.shape.block, launch.values,
            cluster=launch.shape.cluster, shared_bytes=launch.kernel.shared_bytes, seed=seed,
            programmatic=launch.shape.programmatic,
        )  # fmt: skip
        return result, {str(address): raw.numpy().copy() for address, raw in self._bytes.items()}

    def key(self, mutant: Mutant) -> Key:
        return self.name, self.digest, mutant.instruction.line, mutant.change

    def left(self, done: dict[Key, bool], survivors: bool) -> list[Mutant]:
        """The mutants without a last verdict, in the order of the text; survivors: those with a first one alone."""
        return [m for m in self.survey.mutants if not done.get(self.key(m), survivors)]

    def verdict(self, mutant: Mutant, again: bool = False) -> dict[str, Any]:
        """A line of the record; short: that the second size was needed, or has been tried in vain. again: the first one
        has been tried before."""
        started = time.perf_counter()
        killed_by = "" if again else self.survey.judge(mutant).killed_by
        if short := not killed_by:
            self._other = self._other or Case(self.name, len(self.seeds), short=True)
            if self._other.digest != self.digest:
                raise RuntimeError(f"the two sizes of {self.name} are two kernels")
            killed_by = self._other.survey.judge(mutant).killed_by
        ins = mutant.instruction
        source = re.sub(
            r"[^\s(]*/(?=device/|sm\d+_\w+/|distributed/triton/|triton/language/)", "", str(ins.source or "")
        )  # paths below kernels/
        if self.is_exchange:
            text = self._launch.kernel.image.decode()
            begins = text[: text.index("$RECEIVE:")].count("\n") + 1
            source += ", sender" if ins.line < begins else ", receiver"
        return {"case": self.name, "digest": self.digest, "line": ins.line, "change": mutant.change,
                 "killed_by": killed_by, "short": short, "source": source,
                 "instruction": re.sub(r"^@\S+ ", "", str(ins)),
                 "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def key_of(verdict: dict[str, Any]) -> Key:
    return verdict["case"], verdict["digest"], verdict["line"], verdict["change"]


def totals(record: Path) -> dict[tuple[str, str], int]:
    """Numbers of mutants of a record's kernels, by case and digest."""
    lines = (json.loads(line) for line in record.read_text().splitlines() if '"mutants"' in line)
    return {(line["case"], line["digest"]): line["mutants"] for line in lines}


def read(record: Path) -> list[dict[str, Any]]:
    """Verdicts of a record, the last of each mutant; broken lines are left out."""
    found = {}
    for line in record.read_text().splitlines() if record.exists() else []:
        try:
            verdict = json.loads(line)
            found[key_of(verdict)] = verdict
        except (json.JSONDecodeError, KeyError):
            continue
    return list(found.values())


def judge(
    record: Path, done: dict[Key, bool], names: list[str], first: int, taken: Any, deadline: float, survivors: bool
) -> None:
    """One process: mutants of its first case, then of the others, each drawn by one process alone."""
    torch.set_num_threads(1)
    for at in [*range(first, len(names)), *range(first)]:
        if taken[at] < 0 or time.time() > deadline:
            continue
        started = time.time()
        try:
            case = Case(names[at])
        except Exception as error:
            print(f"{names[at]}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            taken[at] = -1
            continue
        left = case.left(done, survivors)
        append(record, {"case": case.name, "digest": case.digest, "mutants": len(case.survey.mutants)})
        print(f"{names[at]}: {len(left)} of {len(case.survey.mutants)} left, {time.time() - started:.0f} s", flush=True)
        while time.time() < deadline:
            with taken.get_lock():
                index = taken[at]
                if 0 <= index < len(left):
                    taken[at] += 1
                else:
                    taken[at] = -1
                    break
            mutant = left[index]
            append(record, case.verdict(mutant, again=case.key(mutant) in done))


def append(record: Path, line: dict[str, Any]) -> None:
    with record.open("a") as file:  # one write, which the file takes as a whole
        file.write(json.dumps(line) + "\n")


def run(record: Path, names: list[str], processes: int, seconds: float, survivors: bool = False) -> None:
    """Judge until nothing is left or the time is over; returns after at most a few seconds more."""
    context = multiprocessing.get_context("spawn")
    taken = context.Array("l", [0] * len(names))
    deadline = time.time() + seconds
    done = {key_of(v): bool(v["killed_by"]) or v.get("short", False) for v in read(record)}
    workers = [
        context.Process(target=judge, args=(record, done, names, i % len(names), taken, deadline, survivors))
        for i in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(deadline + 10 - time.time(), 0.1))
        if worker.is_alive():
            worker.kill()


def table(verdicts: list[dict[str, Any]]) -> Iterator[str]:
    """Markdown: verdicts by case, and the survivors by source line."""
    yield "| kernel | mutants | by a report | by an output | survivors |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(v["case"] for v in verdicts):
        own = [v["killed_by"] for v in verdicts if v["case"] == name]
        output, left = own.count("output"), own.count("")
        yield f"| {name} | {len(own)} | {len(own) - output - left} | {output} | {left} |"
    yield ""
    survivors = Counter(
        (v["case"], v["source"], v["instruction"].split(" ")[0], v["change"]) for v in verdicts if not v["killed_by"]
    )
    for (name, source, opcode, change), count in sorted(survivors.items()):
        yield f"{name}: {source}: {opcode} {change}" + (f" ({count})" if count > 1 else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "show"])
    parser.add_argument("record", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--survivors", action="store_true", help="only those that the first size has not killed")
    parser.add_argument("--case", action="append", help="one of them alone; may be repeated")
    parser.add_argument("--unsettled", action="store_true", help="those alone that the page lacks as they are now")
    options = parser.parse_args()
    if options.command == "run":
        from mutant_cases import CASES

        names = options.case or list(CASES)
        if options.unsettled:
            names = unsettled(json.loads(SUMMARY.read_text()), names)
            print(f"{len(names)} of {len(options.case or CASES)} cases are unsettled: {'; '.join(names)}", flush=True)
        if names:
            run(options.record, names, options.processes, options.seconds, options.survivors)
    print("\n".join(table(read(options.record))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
