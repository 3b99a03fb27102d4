"""One process that draws, launches and judges problems, a batch at a time, until its time or its number is over."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from padless.runtime.choices import BackendName
from padless.runtime.shared_cache import alone
from padless.testing.processes import end_with_parent
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz.place import Place, place_of, reserve
from padless.verify.fuzz.problem import Draw, Model, Problem, Subject
from padless.verify.fuzz.shrink import shrunk
from padless.verify.fuzz.subjects import subjects_of

BATCH = {"cuda": 48, "reference": 16, "emulator": 1}
_KITS = 4  # of all workers together
_FIRST = 3  # problems of each part of a kit at the start, of several sizes, for which tiles differ
_SHRUNK = 3  # wrong problems that a worker makes smaller
_SHOWN = 300  # characters of an error


@dataclass(frozen=True)
class Task:
    """A worker's share. ``deadline``: time.time() at which it stops; ``problems``: after so many, 0 for no limit.

    workers: how many there are, which share kits; see ``problems_of``. gpu: the index of the one that tensors are on;
    the first is current. states: sequences of operations, not single calls.
    """

    worker: int
    seed: int
    backend: BackendName
    deadline: float
    problems: int
    calls: tuple[str, ...] = ()
    workers: int = 1
    gpu: int = 0
    states: bool = False


@dataclass
class Tally:
    """Outcome of problems, by call; wrong: (problem, what is wrong, the problem made smaller).

    waits: lines of Python that made torch wait for the GPU before all of a batch was launched. ended: by the keyboard.
    """

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, list[str], str]] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    ended: bool = False

    def add(self, other: Tally) -> None:
        self.done += other.done
        self.refused += other.refused
        self.reasons += other.reasons
        self.wrong += other.wrong
        self.waits += other.waits


def problems_of(task: Task, subjects: dict[str, Subject]) -> Iterator[Problem]:
    """The problems of a worker, without end: a function of the task alone.

    Where kernels are compiled, a worker has a kit: a few draws of what they are compiled for, of each call. Several
    workers have the same kit, and each begins with a part of it, so that what one compiled the others find on disk.
    """
    names, shares = list(subjects), [s.share for s in subjects.values()]
    kit: dict[str, list[Model]] = {}
    if task.backend != "reference":
        kits = min(_KITS, task.workers)
        sharers = len(range(task.worker % kits, task.workers, kits))
        kit = kit_of(task, task.worker % kits, subjects)
        every = [(name, model) for name in names for model in kit[name]]
        mine = every[task.worker // kits :: sharers]
        Draw(f"{task.seed} order {task.worker}", task.backend).shuffle(mine)
        for number, (name, model) in itertools.product(range(_FIRST), mine):
            draw = Draw(f"{task.seed} first {task.worker} {number} {name}", task.backend)
            yield subjects[name].draw(name, draw, model)
    number = 0
    while True:
        draw = Draw(f"{task.seed} {task.worker} {number}", task.backend)
        name = draw.choices(names, shares)[0]
        yield subjects[name].draw(name, draw, draw.one(kit[name]) if kit else None)
        number += 1


def kit_of(task: Task, kit: int, subjects: dict[str, Subject]) -> dict[str, list[Model]]:
    """Constants that kernels are compiled for, by call, in kit number ``kit`` of a run."""
    found = {}
    for name, subject in subjects.items():
        draw = Draw(f"{task.seed} kit {kit} {name}", task.backend)
        found[name] = [subject.model(draw) for _ in range(subject.variants)]
    return found


def run_batch(batch: list[Problem], subjects: dict[str, Subject], place: Place) -> tuple[Tally, dict[int, list[str]]]:
    """(what was done, what is wrong by position). Waits for the device once, behind all launches."""
    tally = Tally()
    with _waits(place, tally):
        raised, refused = _launch(batch, subjects, place, tally)
    wrong = place.judge.verdicts() | raised
    for i, problem in enumerate(batch):
        if i not in refused:
            tally.done[problem.call] += 1
    return tally, {i: names for i, names in wrong.items() if i not in refused}


def _launch(
    batch: list[Problem], subjects: dict[str, Subject], place: Place, tally: Tally
) -> tuple[dict[int, list[str]], set[int]]:
    """(what calls raised, problems that were refused), by position."""
    raised, refused = dict[int, list[str]](), set[int]()
    for i, problem in enumerate(batch):
        place.judge.problem = i
        try:
            subjects[problem.call].judge(problem.options, place)
        except ValueError as error:
            if not place.has_kernels:
                raised[i] = [f"raised ValueError: {error}"[:_SHOWN]]
                continue
            refused.add(i)
            tally.refused[problem.call] += 1
            tally.reasons[f"{problem.call}: {error}"[:_SHOWN]] += 1
        except Exception as error:
            if "CUDA" in f"{type(error).__name__}{error}":
                raise
            raised[i] = [f"raised {type(error).__name__}: {error}"[:_SHOWN]]
        if place.device.type == "cuda" and (now := torch.cuda.current_device()) != 0:
            torch.cuda.set_device(0)
            raised.setdefault(i, []).append(f"cuda:{now} was current afterwards, and cuda:0 before")
    return raised, refused


@contextmanager
def _waits(place: Place, tally: Tally) -> Iterator[None]:
    """Counts the lines that wait for the GPU in this block."""
    if place.device.type != "cuda":
        yield
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for warning in found:
        if "synchronizing" in str(warning.message):
            tally.waits[f"{warning.filename}:{warning.lineno}"] += 1


@cache
def _compile_once() -> None:
    """Of several workers that need a kernel of Triton's, one compiles it, and the others find it on disk."""
    from triton.runtime.jit import JITFunction

    compiling = JITFunction._do_compile

    def once(function: Any, key: object, *args: Any, **kwargs: Any) -> Any:
        with alone(f"{function.fn.__qualname__} {key}"):
            return compiling(function, key, *args, **kwargs)

    JITFunction._do_compile = once


def work(task: Task, tell: Callable[[tuple[str, Any]], None]) -> None:
    """Runs batches. tell: gets ("started", problems as text), ("tally", Tally), and at the end ("ended", "")."""
    torch.set_num_threads(1)
    if task.backend == "cuda":
        _compile_once()
    place = place_of(task.backend, task.gpu)
    reserve(place)
    subjects = subjects_of(task.backend, place.arch, task.states)
    if task.calls:
        subjects = {name: s for name, s in subjects.items() if name in task.calls}
    with settings_of(task.backend):
        _work(task, place, subjects, tell)


def _work(task: Task, place: Place, subjects: dict[str, Subject], tell: Callable[[tuple[str, Any]], None]) -> None:
    size = BATCH[task.backend.split(":")[0]]
    source, done, shrunken = problems_of(task, subjects), 0, 0
    while time.time() < task.deadline and (task.problems == 0 or done < task.problems):
        count = min(size, 8 if done < 40 else size)  # the first ones compile
        count = count if task.problems == 0 else min(count, task.problems - done)
        batch = [next(source) for _ in range(count)]
        tell(("started", [str(problem) for problem in batch]))
        tally, wrong = run_batch(batch, subjects, place)
        for i, names in wrong.items():
            smaller, again = batch[i], names
            if shrunken < _SHRUNK:
                shrunken += 1
                smaller, again = shrunk(batch[i], place)
            repeated = names if again else [*names, "(not repeated alone)"]
            tally.wrong.append((str(batch[i]), repeated, str(smaller)))
        done += count
        tell(("tally", tally))
    tell(("ended", ""))


def run_process(task: Task, connection: Any) -> None:
    """``work`` in a process of its own, told through a connection."""
    end_with_parent()
    try:
        work(task, connection.send)
    except Exception as error:
        connection.send(("ended", f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}"))
    connection.close()
