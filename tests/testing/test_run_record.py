"""Records of a run and its order, tried by pytest on a repository of a few tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.ragged import ROOT
from support.run_record import LONG, UNTIMED
from support.shares import Shares

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import run_record, slow_share

def pytest_addoption(parser):
    slow_share.add_options(parser)
    run_record.add_options(parser)

def pytest_configure(config):
    slow_share.configure(config)
    run_record.configure(config)
"""
FEW = """
import time, pytest

def test_passes(): time.sleep(0.2)
def test_fails(): assert 1 == 2
def test_skips(): pytest.skip("needs a moon")
@pytest.mark.slow
def test_slow(): pass
@pytest.fixture
def broken():
    yield
    raise ValueError("left behind")
def test_teardown(broken): pass
@pytest.mark.parametrize("i", range(20))
def test_many(i): pass
def test_interrupts():
    import os
    if os.environ.get("STOP"):
        raise KeyboardInterrupt
def test_last(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_few.py").write_text(FEW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    return tmp_path


def run(folder: Path, *options: str, **environment: str) -> tuple[dict[str, Any], list[str]]:
    """(the record, tests in the order of their ends)."""
    command = [sys.executable, "-m", "pytest", "-v", "--record", "found", *options]
    kept = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=kept)
    record = json.loads((folder / "found" / "tests.json").read_text())
    order = [word for line in done.stdout.splitlines() for word in line.split() if word.startswith("test_few.py::")]
    return record, list(dict.fromkeys(order))


@pytest.mark.parametrize("xdist", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "two"])
def test_everything_is_in_the_record_once(folder: Path, xdist: tuple[str, ...]) -> None:
    record, _ = run(folder, "--run-slow", *xdist)
    assert record["collected"] == 27
    assert list(record["failed"]) == ["test_few.py::test_fails", "test_few.py::test_teardown"]
    assert "1 == 2" in record["failed"]["test_few.py::test_fails"]
    assert "left behind" in record["failed"]["test_few.py::test_teardown"]
    assert record["skipped"] == {"test_few.py::test_skips": "needs a moon"}
    assert record["not reached"] == []
    assert len(record["passed"]) == 24
    assert record["passed"]["test_few.py::test_passes"] >= 0.2
    assert record["machine"]["cores"] >= 1
    known = json.loads((folder / ".pytest_cache" / "seconds.json").read_text())
    assert known.keys() == {*record["passed"], *record["failed"]}


def test_what_an_interrupted_run_did_not_reach_is_named(folder: Path) -> None:
    record, _ = run(folder, STOP="1")
    assert record["not reached"] == ["test_few.py::test_interrupts", "test_few.py::test_last"]
    assert len(record["passed"]) == 21
    assert list(record["skipped"].values()) == ["needs a moon", "slow: run with --run-slow"]


def test_a_resumed_run_adds_to_its_record(folder: Path) -> None:
    """Of one commit; another one begins anew."""
    (folder / ".gitignore").write_text("__pycache__/\n.pytest_cache/\nfound/\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *command], cwd=folder, check=True)
    path = {"PATH": os.environ["PATH"]}
    first, _ = run(folder, "--resume", STOP="1", **path)
    second, order = run(folder, "--resume", **path)
    assert first["changed files"] == 0
    assert first["not reached"] == ["test_few.py::test_interrupts", "test_few.py::test_last"]
    assert second["not reached"] == []
    assert len(order) == 6  # two failures, two skips, and what was not reached
    assert second["passed"].keys() == first["passed"].keys() | {*first["not reached"]}
    assert second["wall seconds"] >= first["wall seconds"]  # it alone has a test that sleeps
    (folder / "test_few.py").write_text(FEW + "\n")
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", "commit", "-qam", "x"], cwd=folder, check=True)
    third, _ = run(folder, "--resume", STOP="1", **path)
    assert third["passed"].keys() == first["passed"].keys()


def test_long_tests_come_first_and_the_others_stay_in_order(folder: Path) -> None:
    """By what they took; a slow one that nobody has timed is a long one too."""
    file = folder / ".pytest_cache" / "seconds.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"test_few.py::test_last": 99.0, "test_few.py::test_many[7]": LONG}))
    assert UNTIMED[True] > LONG > UNTIMED[False]
    _, order = run(folder, "--longest-first", "--run-slow")
    names = [name.partition("::")[2] for name in order]
    assert names[:4] == ["test_last", "test_slow", "test_many[7]", "test_passes"]
    assert names[-2:] == ["test_many[19]", "test_interrupts"]
    again = json.loads(file.read_text())
    assert again["test_few.py::test_last"] < 1, "the newest reading counts"


# --- shares of processes -----------------------------------------------------------------------------------


class Node:
    """A process of xdist, as the scheduler sees it, at a speed of its own."""

    def __init__(self, name: str, sent: list[list[int]]) -> None:
        self._sent = sent
        self.gateway = type("Gateway", (), {"id": name})()
        self.shutting_down = False
        self.free_at = 0.0

    def send_runtest_some(self, indices: list[int]) -> None:
        self._sent.append(list(indices))

    def shutdown(self) -> None:
        self.shutting_down = True


def simulated(seconds: list[float], processes: int, sent: list[list[int]] | None = None) -> tuple[float, list[int]]:
    """(when the last process ends, tests in the order of their starts) of a run; shares are added to ``sent``.

    A process starts a test when it has been given the next one or been told that there is none.
    """

    class Config:
        def getoption(self, name: str) -> int:
            return 0

        def getvalue(self, name: str) -> list[str]:
            return ["popen"] * processes

        option = type("Option", (), {"tx": ["popen"] * processes})()

    names = [str(i) for i in range(len(seconds))]
    shares = Shares(Config(), None, lambda nodeid: seconds[int(nodeid)])
    nodes = [Node(str(i), [] if sent is None else sent) for i in range(processes)]
    for node in nodes:
        shares.add_node(node)
        shares.add_node_collection(node, names)
    assert shares.collection_is_completed
    shares.schedule()
    started: list[int] = []
    while any(shares.node2pending.values()):
        ready = [n for n in nodes if len(shares.node2pending[n]) > 1 or (n.shutting_down and shares.node2pending[n])]
        node = min(ready, key=lambda n: n.free_at)
        index = shares.node2pending[node][0]
        started.append(index)
        node.free_at += seconds[index]
        shares.mark_test_complete(node, index, seconds[index])
    assert shares.tests_finished
    assert all(node.shutting_down for node in nodes)
    return max(node.free_at for node in nodes), started


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_shares_end_together(processes: int) -> None:
    """Every test once, and the end at most a few of the last tests after a perfect division."""
    seconds = [90.0, 60.0, 50.0, *([12.0] * 40), *([0.2] * 2000)]
    end, started = simulated(seconds, processes)
    assert sorted(started) == list(range(len(seconds)))
    perfect = max(sum(seconds) / processes, max(seconds))
    assert perfect <= end + 1e-6
    assert end <= 1.04 * perfect + 2.0


def test_shares_are_of_neighbours_and_get_smaller() -> None:
    """Short tests travel together, so that fixtures of their modules serve many of them, until the end is near."""
    sent: list[list[int]] = []
    simulated([0.25] * 4000, 4, sent)
    assert all(share == list(range(share[0], share[0] + len(share))) for share in sent)
    sizes = [len(share) for share in sent[8:]]  # after two single ones for each process
    assert sizes[0] == 120  # 30 seconds
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] <= 4  # a second


def test_fewer_tests_than_processes() -> None:
    end, started = simulated([1.0, 2.0], 5)
    assert sorted(started) == [0, 1]
    assert end == 2.0
