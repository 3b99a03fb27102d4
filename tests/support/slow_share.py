"""Tests in part, and all of them in parts: `--slow-share` and `--resume` of pytest.

`--slow-share N` runs one in N of the slow tests. Which ones the commit decides, so that all are run in the course of
time; they come first, in an order that the commit decides too, until each process has spent `--slow-seconds` on them.
Of a file's tests that are in cases_in_turns.txt it runs one case in `TURNS`, by the commit too. Quick tests are not in
there, so that each change that breaks one is seen at once.

`--resume` leaves out what has passed before with the same files and versions. What passed is kept in
`.pytest_cache/passed`, one file for each state of the tree.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

TIME_IS_OVER = "slow: the time of this run's share is over"


LONG_CASES = frozenset(Path(__file__).with_name("long_cases.txt").read_text().splitlines()[1:])
IN_TURNS = frozenset(Path(__file__).with_name("cases_in_turns.txt").read_text().splitlines()[1:])
TURNS = 8
OF_ANOTHER_TURN = f"in turns: one in {TURNS} is run for a commit; without --slow-share all are"


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow too")
    parser.addoption(
        "--slow-share", type=int, default=0, metavar="N", help="run one in N of them, chosen by the commit"
    )
    parser.addoption("--slow-seconds", type=float, default=15.0, metavar="S", help="of each process, for --slow-share")
    parser.addoption("--resume", action="store_true", help="leave out what has passed with these files before")


def configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests(config), "padless-slow-tests")
    if config.getoption("--resume"):
        config.pluginmanager.register(Resumed(config), "padless-resumed")


def git(root: Path, *arguments: str) -> bytes:
    """What git prints; nothing where there is no repository."""
    try:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return b""


# --- a share ---------------------------------------------------------------------------------------------


def draw_of(commit: str, nodeid: str) -> int:
    """A number that the commit and the test decide, as good as random."""
    return int.from_bytes(hashlib.sha256(f"{commit} {nodeid}".encode()).digest()[:8], "big")


def leave_to_other_commits(items: list[pytest.Item], commit: str) -> None:
    """Skips cases of tests in cases_in_turns.txt, all but every eighth of a file from one that the commit decides."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        test = item.nodeid.partition("[")[0]
        if test in IN_TURNS:
            files.setdefault(test.partition("::")[0], []).append(item)
    for file, cases in files.items():
        first = draw_of(commit, file) % TURNS
        for place, item in enumerate(cases):
            if place % TURNS != first % len(cases):
                item.add_marker(pytest.mark.skip(reason=OF_ANOTHER_TURN))


class SlowTests:
    """Skips slow tests, but for all of them or a share."""

    def __init__(self, config: pytest.Config) -> None:
        self._all = config.getoption("--run-slow")
        self._share = config.getoption("--slow-share")
        self._left = config.getoption("--slow-seconds")
        self._commit = git(config.rootpath, "rev-parse", "HEAD").decode().strip() if self._share else ""
        self._chosen: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        slow = [item for item in items if item.get_closest_marker("slow") or item.nodeid in LONG_CASES]
        if self._all:
            return
        if self._share and self._commit:
            apart = set(slow)
            leave_to_other_commits([item for item in items if item not in apart], self._commit)
        if not slow:
            return
        draws = {item.nodeid: draw_of(self._commit, item.nodeid) for item in slow}
        if self._share and self._commit:
            self._chosen = {nodeid for nodeid, draw in draws.items() if draw % self._share == 0}
        for item in slow:
            if item.nodeid not in self._chosen:
                item.add_marker(pytest.mark.skip(reason="slow: run with --run-slow"))
        # In front, so that the last ones do not keep one process busy at the end.
        items.sort(
            key=lambda item: (item.nodeid not in self._chosen, draws[item.nodeid] if item.nodeid in self._chosen else 0)
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid in self._chosen and self._left <= 0:
            pytest.skip(TIME_IS_OVER)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        start = time.monotonic()
        try:
            return (yield)
        finally:
            if item.nodeid in self._chosen:
                self._left -= time.monotonic() - start


# --- in parts --------------------------------------------------------------------------------------------


def state_of(root: Path) -> str:
    """A hash of every file of the repository, ignored ones left out, and of what runs the tests; "" without git."""
    tree = git(root, "rev-parse", "HEAD^{tree}")
    if not tree:
        return ""
    digest = hashlib.sha256(tree + git(root, "diff", "HEAD", "--binary"))
    for path in git(root, "ls-files", "--others", "--exclude-standard", "-z").split(b"\0"):
        if path:
            digest.update(path + b"\0" + (root / path.decode()).read_bytes())
    digest.update(f"{sys.version} {version_of('torch')} {version_of('triton')} {_gpu()}".encode())
    return digest.hexdigest()[:24]


def version_of(package: str) -> str:
    """The version that is installed, "" without one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpu() -> str:
    torch = sys.modules.get("torch")  # loaded by whatever there is to test
    return torch.cuda.get_device_name(0) if torch is not None and torch.cuda.is_available() else ""


class Resumed:
    """Leaves out what has passed, and writes down what passes."""

    def __init__(self, config: pytest.Config) -> None:
        self._worker = getattr(config, "workerinput", None)
        self._called: set[str] = set()
        self._file: Path | None = None
        if self._worker is not None:
            self._before = set(self._worker["padless_passed"])
            return
        state = state_of(config.rootpath)
        if state:
            self._file = config.rootpath / ".pytest_cache" / "passed" / f"{state}.txt"
            self._file.parent.mkdir(parents=True, exist_ok=True)
        known = self._file is not None and self._file.exists()
        self._before = set(self._file.read_text().splitlines()) if known and self._file else set()

    def pytest_report_header(self) -> str:
        return f"resumed: {len(self._before)} tests have passed with these files before"

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tells a process of xdist what all of them leave out."""
        node.workerinput["padless_passed"] = sorted(self._before)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left = [item for item in items if item.nodeid not in self._before]
        if len(left) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self._before])
            items[:] = left

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None or self._worker is not None or not report.passed:
            return
        if report.when == "call":
            self._called.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid in self._called:
            with self._file.open("a") as file:
                file.write(report.nodeid + "\n")
