"""Options that choose slow tests, tried by pytest on a repository of a few tests."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from support import slow_share
from support.ragged import ROOT
from support.slow_share import IN_TURNS, LONG_CASES, OF_ANOTHER_TURN, TIME_IS_OVER, draw_of

CONFTEST = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from support.slow_share import add_options as pytest_addoption
from support.slow_share import configure as pytest_configure
"""
SLOW = """
import os, time, pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range(60))
def test_slow(i):
    time.sleep(float(os.environ.get("SLEEP", 0)))
    assert str(i) not in os.environ.get("FAILS", "").split(",")

def test_quick(): pass
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_few.py").write_text(SLOW)
    (tmp_path / ".gitignore").write_text("__pycache__/\n.pytest_cache/\nlog\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "change")


def run(folder: Path, *options: str, **environment: str) -> tuple[Counter[str], list[str], str]:
    """(outcomes, tests that passed, all that was printed)."""
    command = [sys.executable, "-m", "pytest", "-v", "-rs", *options]
    kept = {"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=kept)
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    passed = re.findall(r"(\S+::\S+) PASSED|PASSED (\S+::\S+)", done.stdout)
    last = done.stdout.strip().splitlines()[-1]
    outcomes = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|deselected)", last)}
    return Counter(outcomes), sorted(a or b for a, b in passed), done.stdout


def test_a_share_is_chosen_by_the_commit(repository: Path) -> None:
    chosen = []
    for again in (True, False):
        outcomes, passed, _ = run(repository, "--slow-share", "5")
        assert 2 < outcomes["passed"] - 1 < 30
        assert outcomes["passed"] + outcomes["skipped"] == 61
        assert not again or run(repository, "--slow-share", "5")[1] == passed
        chosen.append(set(passed))
        commit(repository)
    assert chosen[0] != chosen[1]


@pytest.mark.slow
def test_processes_choose_alike(repository: Path) -> None:
    alone = run(repository, "--slow-share", "5")[1]
    assert run(repository, "--slow-share", "5", *TWO_PROCESSES)[1] == alone


def test_the_time_is_kept(repository: Path) -> None:
    """A test that begins in time ends; the others are skipped, and not the same ones at every commit."""
    first = []
    for _ in range(2):
        outcomes, passed, text = run(repository, "--slow-share", "2", "--slow-seconds", "0.15", SLEEP="0.1")
        assert outcomes["passed"] == 3  # two slow ones, and the quick one
        assert TIME_IS_OVER in text
        first.append(tuple(passed))
        commit(repository)
    assert first[0] != first[1]


def test_without_a_repository_there_is_no_share(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_few.py").write_text(SLOW)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: slow\n")
    outcomes, _, _ = run(tmp_path, "--slow-share", "5", "--resume", GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert (outcomes["passed"], outcomes["skipped"]) == (1, 60)


def test_a_thirtieth_is_a_thirtieth() -> None:
    nodes = [f"tests/a/test_{i % 50}.py::test[{i}]" for i in range(3000)]
    counts = [sum(draw_of(commit, node) % 30 == 0 for node in nodes) for commit in ("a", "b", "c")]
    assert all(60 < count < 140 for count in counts)
    reached = {node for commit in range(120) for node in nodes if draw_of(str(commit), node) % 30 == 0}
    assert len(reached) > 0.95 * len(nodes)


TWO_PROCESSES = ("-p", "xdist.plugin", "-n", "2")


@pytest.mark.parametrize("processes", [(), pytest.param(TWO_PROCESSES, marks=pytest.mark.slow)])
def test_a_run_goes_on_where_it_was_ended(repository: Path, processes: tuple[str, ...]) -> None:
    options = ["--run-slow", "--resume", *processes]
    outcomes, _, _ = run(repository, *options, FAILS="3,17")
    assert (outcomes["passed"], outcomes["failed"]) == (59, 2)
    outcomes, _, text = run(repository, *options, FAILS="17")
    assert (outcomes["passed"], outcomes["failed"]) == (1, 1)
    assert "resumed: 59 tests have passed with these files before" in text
    outcomes, passed, _ = run(repository, *options)
    assert passed == ["test_few.py::test_slow[17]"]
    (repository / "other.py").write_text("x = 1\n")  # not even committed
    assert run(repository, *options)[0]["passed"] == 61


def test_a_test_whose_teardown_fails_has_not_passed(repository: Path) -> None:
    (repository / "test_few.py").write_text(
        "import pytest\n@pytest.fixture\ndef broken():\n    yield\n    raise OSError\ndef test_it(broken): pass\n"
    )
    for _ in range(2):
        text = run(repository, "--resume")[2]
        assert "1 passed, 1 error" in text


CASES = """import pytest

def test_that_is_quick(): pass

@pytest.mark.parametrize('i', range(9))
def test_planted_bug_is_found(i): pass
"""


def test_cases_in_turns(repository: Path) -> None:
    """One in eight with --slow-share, others for another commit; all of them without it, and with --run-slow. A test
    that is not listed is run every time.
    """
    file = repository / "tests/emulator/instructions/test_tcgen05.py"
    file.parent.mkdir(parents=True)
    file.write_text(CASES)
    outcomes, passed, output = run(repository, "--slow-share", "30", "tests")
    assert outcomes["passed"] in (2, 3)
    assert any(node.endswith("::test_that_is_quick") for node in passed)
    assert outcomes["passed"] + outcomes["skipped"] == 10
    assert output.count(OF_ANOTHER_TURN) == 1
    for options in ([], ["--run-slow"]):
        assert run(repository, "tests", *options)[0]["passed"] == 10


class Listed:
    """A test as pytest has it, with what it is marked with."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid
        self.markers: list[pytest.MarkDecorator] = []
        self.add_marker = self.markers.append


@pytest.mark.parametrize("count", [2, 8, 9])
@pytest.mark.parametrize("node", ["a.py::test[{}]", "b.py::test_{}"], ids=["cases of a test", "tests of a file"])
def test_every_case_has_a_turn(node: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 2000 commits each is run, as often as any other, and every commit runs one of eight or of fewer."""
    monkeypatch.setattr(slow_share, "IN_TURNS", {"a.py::test", *(f"b.py::test_{i}" for i in range(count))})
    turns: Counter[str] = Counter()
    for number in range(2000):
        items = [Listed(node.format(i)) for i in range(count)]
        slow_share.leave_to_other_commits(items, f"{number:040x}")  # type: ignore[arg-type]
        taken = [item.nodeid for item in items if not item.markers]
        assert len(taken) in ((1, 2) if count > slow_share.TURNS else (1,))
        turns.update(taken)
    assert len(turns) == count
    assert max(turns.values()) < 1.5 * min(turns.values())


@pytest.mark.parametrize("listed", [LONG_CASES, IN_TURNS], ids=["long", "in turns"])
def test_what_is_listed_exists(listed: frozenset[str]) -> None:
    """A test that was renamed would be run every time again, unseen."""
    for nodeid in listed:
        path, _, name = nodeid.partition("[")[0].partition("::")
        assert (f"def {name}(" if name else "def test_") in (ROOT / path).read_text(), nodeid
