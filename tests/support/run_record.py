"""Records of a run of the tests: `--record FOLDER` and `--longest-first` of pytest.

`--record FOLDER` writes FOLDER/tests.json when the run ends, also when it is interrupted: the tree, the machine, what
passed, failed and was skipped for which reason, what was not reached, and the seconds of everything. With `--resume` it
also keeps what has passed before, of the same commit. The seconds are kept in `.pytest_cache/seconds.json` too, where
`--longest-first` finds them. tools/tests_record.py makes a page of it.

`--longest-first` runs the tests that take long ahead of the others, longest first, and hands the rest to processes of
xdist in shares that get smaller towards the end. A slow test that nobody has timed counts as long.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from support.slow_share import LONG_CASES, git, version_of

LONG = 5.0  # seconds from which a test is run ahead of the others
UNTIMED = {True: 12.0, False: 0.15}  # seconds of a test that nobody has timed: a slow one, another


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FOLDER", help="write tests.json there: what ran, and how long it took")
    parser.addoption("--longest-first", action="store_true", help="long tests first, by what earlier runs took")


def configure(config: pytest.Config) -> None:
    if config.getoption("--longest-first"):
        config.pluginmanager.register(LongestFirst(config), "padless-longest-first")
    if config.getoption("--record") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config), "padless-recorder")


def seconds_file(config: pytest.Config) -> Path:
    return config.rootpath / ".pytest_cache" / "seconds.json"


def seconds_before(config: pytest.Config) -> dict[str, float]:
    """What tests took in earlier runs."""
    try:
        found: dict[str, float] = json.loads(seconds_file(config).read_text())
    except (OSError, json.JSONDecodeError):
        found = {}
    return found


# --- order -----------------------------------------------------------------------------------------------


class LongestFirst:
    """Puts long tests in front and gives xdist its shares."""

    def __init__(self, config: pytest.Config) -> None:
        self._before = seconds_before(config)

    def expected(self, nodeid: str, slow: bool) -> float:
        return self._before.get(nodeid, UNTIMED[slow or nodeid in LONG_CASES])

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        took = {item.nodeid: self.expected(item.nodeid, bool(item.get_closest_marker("slow"))) for item in items}
        items.sort(key=lambda item: -took[item.nodeid] if took[item.nodeid] >= LONG else 0)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from support.shares import Shares

        return Shares(config, log, lambda nodeid: self._before.get(nodeid, LONG))


# --- record ----------------------------------------------------------------------------------------------


class Recorder:
    """Collects what happened to every test, in the process that reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config, self._folder = config, Path(config.getoption("--record"))
        self._started, self._clock = time.time(), time.monotonic()
        self._collected: set[str] = set()
        self._deselected = 0
        self._seconds: Counter[str] = Counter()
        self._outcomes: dict[str, str] = {}
        self._why: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._collected.update(item.nodeid for item in session.items)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._deselected += len(items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected.update(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._why[report.nodeid] = str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)[-300:]
        elif report.skipped:
            self._outcomes.setdefault(report.nodeid, "skipped")
            _, _, reason = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
            self._why[report.nodeid] = reason.removeprefix("Skipped: ")
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self) -> None:
        seconds = {nodeid: round(took, 2) for nodeid, took in self._seconds.items()}
        timed = {nodeid: took for nodeid, took in seconds.items() if self._outcomes.get(nodeid) != "skipped"}
        file = seconds_file(self._config)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({**seconds_before(self._config), **timed}, indent=0, sort_keys=True))
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "tests.json").write_text(json.dumps(self.record(timed), indent=1) + "\n")

    def record(self, seconds: dict[str, float]) -> dict[str, Any]:
        """The content of tests.json."""
        root = self._config.rootpath
        tree = git(root, "rev-parse", "HEAD^{tree}").decode().strip()
        changed = len(git(root, "status", "--porcelain").splitlines())
        earlier = self._earlier(tree) if changed == 0 else {}
        of = {
            kind: sorted(n for n, outcome in self._outcomes.items() if outcome == kind)
            for kind in ("passed", "failed", "skipped")
        }
        return {
            "tree": tree,
            "changed files": changed,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            "wall seconds": round(time.monotonic() - self._clock + earlier.get("wall seconds", 0.0), 1),
            "options": list(self._config.invocation_params.args),
            "machine": machine(),
            "collected": len(self._collected),
            "left out": self._deselected,
            "failed": {nodeid: self._why[nodeid] for nodeid in of["failed"]},
            "skipped": {nodeid: self._why[nodeid] for nodeid in of["skipped"]},
            "not reached": sorted(self._collected - set(self._outcomes)),
            "passed": {**earlier.get("passed", {}), **{nodeid: seconds[nodeid] for nodeid in of["passed"]}},
        }

    def _earlier(self, tree: str) -> dict[str, Any]:
        """The record there is, of what --resume leaves out."""
        try:
            found: dict[str, Any] = json.loads((self._folder / "tests.json").read_text())
        except (OSError, json.JSONDecodeError):
            return {}
        known = self._config.getoption("--resume") and found["tree"] == tree and found["changed files"] == 0
        return found if known else {}


def machine() -> dict[str, Any]:
    """What the run ran on."""
    torch = sys.modules.get("torch")
    cuda = torch is not None and torch.cuda.is_available()
    return {
        "cores": os.cpu_count(),
        "GPUs": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda and torch else [],
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "triton", "numpy")},
    }
