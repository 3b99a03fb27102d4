"""``padless fuzz``: workers side by side, what they found, and the record of it."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from padless.runtime.choices import BackendName
from padless.testing import machine
from padless.testing.processes import cpus, unheard_keyboard
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Problem
from padless.verify.fuzz.subjects import judged, subject_of
from padless.verify.fuzz.worker import Tally, Task, run_process

_PROGRESS_S = 15.0
ENDED = 130  # exit code of what the keyboard ends
_MOST_REFUSED = 1 / 3  # of a call's problems: beyond, nothing was fuzzed
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_WORKER_BYTES = 6 << 30  # of a GPU: a context with all kernels takes 2.4 GB, a problem up to 1.5
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


_say = partial(print, flush=True)  # through a pipe, too, when it is said


def run_fuzz(
    minutes: float | None = None,
    problems: int | None = None,
    seed: int | None = None,
    backend: BackendName | None = None,
    workers: int | None = None,
    out: Path | None = None,
    repeat: str | None = None,
    calls: list[str] | None = None,
    other_gpu: bool = False,
    states: bool = False,
    show: Callable[[str], None] = _say,
) -> int:
    """Draws and judges random problems until the time or the number is over, whichever is first.

    Args:
        minutes: of wall time, compiling included; None: no limit, or one minute where ``problems`` is None too.
        problems: how many in all, shared out to the workers.
        seed: None draws one, which the record has.
        backend: "cuda", "emulator", "emulator:sm_100a" or "reference"; None: the GPU where there is one.
        workers: processes; None: one for each core, and on GPUs no more than their memory has room for.
        out: file that a record of the run, one line of JSON, is added to.
        repeat: a problem as text: only this one is judged.
        calls: only these calls.
        other_gpu: tensors are on a second GPU of the process while the first is current, which must stay so.
        states: sequences of operations on modules and call sites, not single calls.

    Returns 0 when nothing was wrong, else 1, and 130 where the keyboard ended it before anything was. Raises ValueError
    for what is not possible here.
    """
    backend = backend or _default_backend()
    if repeat is not None:
        return _repeat(Problem.parse(repeat), backend, int(other_gpu), show)
    _check(minutes, problems, workers, calls, backend, states)
    if minutes is None and problems is None:
        minutes = 1.0
    seed = random.SystemRandom().randrange(2**31) if seed is None else seed
    gpus = _gpus() if backend == "cuda" else []
    workers = _useful_workers(gpus) if workers is None else workers
    workers = workers if problems is None else max(1, min(workers, problems))
    start = time.time()
    deadline = start + (minutes * 60 if minutes is not None else 10.0**9)
    shares = [(problems or 0) * (i + 1) // workers - (problems or 0) * i // workers for i in range(workers)]
    if other_gpu and len(gpus) < 2:
        raise ValueError(f"other_gpu is True, which takes two GPUs, and there are {len(gpus)}; leave it out")
    gpu, of = int(other_gpu), tuple(calls or ())
    tasks = [Task(i, seed, backend, deadline, shares[i], of, workers, gpu, states) for i in range(workers)]
    on = f" on {len(gpus)} GPUs" if len(gpus) > 1 else ""
    options = f"--backend {backend}{' --other-gpu' if other_gpu else ''}"
    show(f"padless fuzz: {backend}, {workers} workers{on}, seed {seed}")
    total, crashes = _supervise(tasks, gpus, options, show, start)
    seconds = time.time() - start
    _report(total, crashes, options, seconds, show)
    if out is not None:
        _append(out, _record(total, crashes, backend, seed, workers, min(workers, len(gpus)), seconds))
        show(f"added to {out}")
    few = [call for call, count in total.refused.items() if count > _MOST_REFUSED * (count + total.done[call])]
    for call in few:
        show(f"WRONG {call}: {total.refused[call]} problems were refused and {total.done[call]} made")
    if total.wrong or crashes or few:
        return 1
    if total.ended:
        return ENDED
    return 0 if sum(total.done.values()) else 1


def _default_backend() -> BackendName:
    import torch

    return "cuda" if torch.cuda.is_available() else "reference"


def _useful_workers(gpus: Sequence[str]) -> int:
    """One for each core; on GPUs at most one for every 6 GiB of the memory that is free."""
    if not gpus:
        return cpus()
    import torch

    room = sum(torch.cuda.mem_get_info(i)[0] // _WORKER_BYTES for i in range(len(gpus)))
    return max(1, min(cpus(), room))


def _gpus() -> list[str]:
    """The GPUs that this process sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return (named or [str(i) for i in range(torch.cuda.device_count())])[: torch.cuda.device_count()]


def _check(
    minutes: float | None,
    problems: int | None,
    workers: int | None,
    calls: list[str] | None,
    backend: BackendName,
    states: bool,
) -> None:
    from padless.runtime.devices import NAMES, backends
    from padless.verify.fuzz.place import place_of
    from padless.verify.fuzz.states.subjects import STATES
    from padless.verify.fuzz.subjects import SUBJECTS, subjects_of

    subjects = STATES if states else SUBJECTS
    if minutes is not None and not minutes > 0:
        raise ValueError(f"minutes is {minutes}; it must be positive")
    for name, value in (("problems", problems), ("workers", workers)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    for call in calls or ():
        if call not in subjects:
            raise ValueError(f"call is {call!r}; allowed: {', '.join(subjects)}")
    if backend not in NAMES:
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(map(repr, NAMES))}")
    if states and backend.startswith("emulator"):
        raise ValueError(f"backend is {backend!r}; sequences of operations run on 'cuda' and 'reference'")
    if not (found := backends()[backend]).available:
        raise ValueError(f"backend {backend!r} is not available here: {found.reason}")
    here = subjects_of(backend, place_of(backend).arch, states)
    for call in calls or ():
        if call not in here:
            raise ValueError(f"call is {call!r}, which backend {backend!r} does not run; allowed: {', '.join(here)}")


def _repeat(problem: Problem, backend: BackendName, gpu: int, show: Callable[[str], None]) -> int:
    subject_of(problem).check(problem)
    with settings_of(backend):
        wrong = judged(problem, place_of(backend, gpu))
    show(f"{problem}")
    show("nothing is wrong" if not wrong else "WRONG: " + "; ".join(wrong))
    return 1 if wrong else 0


def _supervise(
    tasks: list[Task], gpus: list[str], options: str, show: Callable[[str], None], start: float
) -> tuple[Tally, list[dict[str, Any]]]:
    """Sum of what all workers did, and those that ended before their time with the batch that they were at.

    gpus: names of those that workers are spread over; each sees its own only, behind the others that it is to see, or
        with states its own first.
    options: of the command line that repeats a problem.
    """
    context = get_context("spawn")
    before = {name: os.environ.get(name) for name in (*_ONE_THREAD, _VISIBLE)}
    os.environ.update(_ONE_THREAD)
    total, crashes = Tally(), list[dict[str, Any]]()
    open_: dict[Connection, Task] = {}
    at: dict[int, list[str]] = {}
    processes = []
    try:
        for task in tasks:
            mine, theirs = context.Pipe(duplex=False)
            if gpus:
                first = task.worker % len(gpus)
                others = (
                    gpus[first:] + gpus[:first] if task.states else [gpus[first - i] for i in range(task.gpu, -1, -1)]
                )
                os.environ[_VISIBLE] = ",".join(others)
            process = context.Process(target=run_process, args=(task, theirs), daemon=True)
            with unheard_keyboard():
                process.start()
            theirs.close()
            processes.append(process)
            open_[mine] = task
        shown, last = time.time(), 0
        while open_:
            for connection in wait(list(open_), timeout=_PROGRESS_S):
                assert isinstance(connection, Connection)
                task = open_[connection]
                try:
                    kind, content = connection.recv()
                except (EOFError, OSError):
                    kind, content = "ended", "the process ended"
                if kind == "started":
                    at[task.worker] = content
                elif kind == "tally":
                    total.add(content)
                    for text, names, smaller in content.wrong:
                        _show_wrong(text, names, smaller, options, show)
                else:
                    del open_[connection]
                    if content:
                        crashes.append({"error": content, "problems": at.get(task.worker, [])})
                        show(f"WRONG worker {task.worker} ended: {content}")
            if time.time() - shown >= _PROGRESS_S:
                now, done = time.time(), sum(total.done.values())
                rate = (done - last) / (now - shown)
                shown, last = now, done
                show(f"{now - start:6.0f} s  {done} problems, {rate:.0f} a second, {len(total.wrong)} wrong")
    except KeyboardInterrupt:  # what was done counts
        show("ended by the keyboard")
        total.ended = True
        for process in processes:
            process.terminate()
    finally:
        for process in processes:
            process.join(timeout=30)
            if process.is_alive():
                process.terminate()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    return total, crashes


def _show_wrong(text: str, names: list[str], smaller: str, options: str, show: Callable[[str], None]) -> None:
    show(f"WRONG {'; '.join(names)}")
    show(f"  padless fuzz {options} --repeat {json.dumps(smaller)}")
    if smaller != text:
        show(f"  found as {text}")


def _report(
    total: Tally, crashes: list[dict[str, Any]], options: str, seconds: float, show: Callable[[str], None]
) -> None:
    for call in sorted(total.done | total.refused):
        refused = f", {total.refused[call]} refused" if total.refused[call] else ""
        show(f"{total.done[call]:8d}  {call}{refused}")
    for reason, count in total.reasons.most_common(5):
        show(f"  refused {count} times: {reason}")
    for line, count in total.waits.most_common(5):
        show(f"  waited for the GPU {count} times in {line}")
    for crash in crashes:
        show(f"WRONG one of these ended a worker ({crash['error']}):")
        for text in crash["problems"]:
            show(f"  padless fuzz {options} --repeat {json.dumps(text)}")
    done = sum(total.done.values())
    show(f"{done} problems in {seconds:.1f} s, {len(total.wrong) + len(crashes)} wrong")


def _record(
    total: Tally,
    crashes: list[dict[str, Any]],
    backend: BackendName,
    seed: int,
    workers: int,
    gpus: int,
    seconds: float,
) -> dict[str, Any]:
    """One run: a problem is one random call with all that it is judged by; refused calls are not among them."""
    about = machine.describe()
    return {
        "kind": "fuzz",
        "date": about["date"],
        "backend": backend,
        "machine": about,
        "seed": seed,
        "workers": workers,
        "gpus": gpus,
        "seconds": round(seconds, 1),
        "problems": sum(total.done.values()),
        "by_call": dict(sorted(total.done.items())),
        "refused": dict(sorted(total.refused.items())),
        "wrong": [{"problem": text, "names": names, "smaller": less} for text, names, less in total.wrong],
        "ended": crashes,
        "waits": sum(total.waits.values()),
    }


def _append(out: Path, record: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(record, separators=(",", ":")) + "\n")
