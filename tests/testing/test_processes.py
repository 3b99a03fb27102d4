"""Processes side by side: as many as cores but one, with one thread each, the longest work first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.testing import processes
from padless.testing.processes import in_order, useful_workers, worker_pool
from support.ragged import ROOT


def test_one_core_is_left_to_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((1, 1), (2, 1), (16, 15)):
        monkeypatch.setattr(processes.os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        assert useful_workers() == workers


def test_a_process_computes_with_one_thread_and_blocks_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    with worker_pool(1) as outer:
        assert outer.submit(torch.get_num_threads).result() == 1
        assert outer.submit(os.getenv, "OPENBLAS_NUM_THREADS").result() == "1"
        with worker_pool() as inner:
            assert inner is outer
        first = outer.submit(os.getpid).result()
        assert first == outer.submit(os.getpid).result()
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


class Pool:
    """Notes the order in which work comes; nothing is ever done."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.futures: dict[str, Future[str]] = {}

    def submit(self, function: Any, name: str, cost: int) -> Future[str]:
        self.order.append(name)
        self.futures[name] = Future()
        return self.futures[name]


JOBS = [("a", 2), ("b", 9), ("c", 2), ("d", 5)]


def test_the_dearest_start_first_and_results_come_in_order() -> None:
    pool: Any = Pool()
    submit = pool.submit

    def finished(function: Any, name: str, cost: int) -> Future[str]:
        future = submit(function, name, cost)
        future.set_result(name.upper())
        return future

    pool.submit = finished
    assert list(in_order(pool, str, JOBS, lambda name, cost: cost)) == ["A", "B", "C", "D"]
    assert pool.order == ["b", "d", "a", "c"]


def test_what_has_not_started_is_dropped_when_nobody_listens() -> None:
    pool: Any = Pool()
    submit = pool.submit

    def one_fails(function: Any, name: str, cost: int) -> Future[str]:
        future = submit(function, name, cost)
        if name == "a":
            future.set_exception(ValueError("planted"))
        return future

    pool.submit = one_fails
    with pytest.raises(ValueError, match="planted"):
        list(in_order(pool, str, JOBS, lambda name, cost: cost))
    assert all(pool.futures[name].cancelled() for name in "bcd")


POOL = """
import time
from padless.testing.processes import worker_pool
with worker_pool(2) as pool:
    started = [pool.submit(time.sleep, seconds) for seconds in (%s, 60)]
    ready()
    started[-1].result()
"""
RANKS = """
import time
from padless.testing.ranks import RankPool
with RankPool(2, cuda=False, backend="collective") as ranks:
    ready()
    ranks.call(time.sleep, timeout_s=60)
"""
KEYBOARD = """
import os, signal, threading
def ready(): threading.Timer(1.0, lambda: os.killpg(0, signal.SIGINT)).start()
def main():
{body}
if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a command in the background ignores it, as under nohup
    try:
        main()
    except KeyboardInterrupt:
        print("ended")
"""


@pytest.mark.parametrize("code", [POOL % 0, RANKS], ids=["pool", "ranks"])
def test_the_keyboard_ends_processes_without_a_word(code: str) -> None:
    """A terminal tells all processes of a command, here while they start, and import."""
    script = KEYBOARD.format(body=textwrap.indent(code, "    "))
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True,
        text=True, timeout=50, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.stdout == "ended\n"
    assert done.stderr == ""


KILLED = """
import os, signal, time
from padless.testing.processes import worker_pool
from padless.testing.ranks import RankPool
def orphaned(*rank):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if __name__ == "__main__":
"""
OF_POOL = "    with worker_pool(2) as pool: pool.submit(orphaned).result()"
OF_RANKS = "    with RankPool(2, cuda=False, backend='collective') as pool: pool.call(orphaned, timeout_s=60)"


@pytest.mark.parametrize("started", [OF_POOL, OF_RANKS], ids=["pool", "ranks"])
def test_processes_end_with_the_one_that_started_them(started: str, tmp_path: Path) -> None:
    """A command that is killed, such as by `timeout`, left them behind, and what they held of a GPU."""
    (tmp_path / "script.py").write_text(KILLED + started)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(tmp_path / "script.py")]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            process.communicate(timeout=40)  # until the last of them has let go of the pipe
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_processes_hear_the_keyboard_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with worker_pool(1) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == before != signal.SIG_DFL
