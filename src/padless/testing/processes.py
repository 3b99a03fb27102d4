"""Processes for work that has no use for the GPU: compiling ahead and emulating, side by side on the cores there are.

They are spawned, not forked, since the parent has a CUDA context by then. Each computes with one thread.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

Result = TypeVar("Result")

# Libraries read these when they are loaded, which a spawned process does after it has got its environment.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_open: ProcessPoolExecutor | None = None


def cpus() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def useful_workers() -> int:
    """Processes to start: one core is left to the parent."""
    return max(1, cpus() - 1)


@contextmanager
def unheard_keyboard() -> Iterator[None]:
    """Processes that start in this block ignore Ctrl-C and print no traceback of it: this one, which gets it too, ends
    them.
    """
    if threading.current_thread() is not threading.main_thread():  # only it may set a signal's handler
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_parent() -> None:
    """Ends this process, one of multiprocessing's, when the one that started it has ended, even if that was killed."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ended by Ctrl-C, what it has started too
    end_with_parent()


@contextmanager
def worker_pool(workers: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes to submit work to; inside of another ``worker_pool`` the same ones, unless ``workers`` says how many.

    A pool one of whose processes died is given up, so that the next block gets another.
    """
    global _open
    if workers is None and _open is not None:
        try:
            yield _open
        except BrokenProcessPool:
            _open = None
            raise
        return
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    outer = _open
    os.environ.update(_ONE_THREAD)
    pool = ProcessPoolExecutor(workers or useful_workers(), get_context("spawn"), initializer=_begin)
    _open = pool
    try:
        with unheard_keyboard():
            pool.submit(int)  # starts all of them
        yield pool
    finally:
        _open = outer
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_order(
    pool: ProcessPoolExecutor,
    function: Callable[..., Result],
    jobs: Sequence[tuple[Any, ...]],
    cost: Callable[..., float],
) -> Iterator[Result]:
    """``function(*job)`` of every job, in the order of ``jobs``.

    The dearest by ``cost(*job)`` are started first, so that no long one is left alone at the end. What has not started
    when the caller stops listening is dropped.
    """
    costs = [cost(*job) for job in jobs]
    started: dict[int, Future[Result]] = {}
    for i in sorted(range(len(jobs)), key=lambda i: -costs[i]):
        started[i] = pool.submit(function, *jobs[i])
    try:
        for i in range(len(jobs)):
            yield started[i].result()
    finally:
        for future in started.values():
            future.cancel()
