"""Other people's programs in the emulator: what is right, refused or wrong, with reports by kind; a record and its page.

    python tools/scoreboard.py --programs .peers/triton-tutorials --source "triton-lang/triton at f4fca2c0b"   # runs all
    python tools/scoreboard.py --page                                                                     # only the page

Programs are run as they are, by `ptx-emulate --program`, one after the other, and judged by their own checks. A file of
pytest's gives one program for each test, its smallest case. A program is "right" if it ends well, "wrong" if its own
check fails, "refused" if the emulator cannot do something, "crash" where that is no sentence, "time" beyond --seconds,
"absent" if it needs what is not installed or not in this Triton.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measured" / "2026-11-24-emulated-programs.json"
CHIPS = ("H200", "B200")
MOST_CASES = 8  # of a test, all of the smallest size
COUNT = re.compile(r"^([\w-]+): (\d+) in (.*) \(.*\); --ignore \1 leaves them out$", re.MULTILINE)
END = re.compile(r"^(\d+) launch(?:es)?, (\d+) errors, (\d+) refusals, the program's exit code (\d+)$", re.MULTILINE)
ABSENT = re.compile(
    r"^E? *(ModuleNotFoundError|ImportError|FileNotFoundError|AttributeError: module 'triton|.*Could not find `lib)",
    re.MULTILINE,
)
OWN_CHECK = re.compile(r"differ\b|AssertionError|Mismatched elements|not close", re.IGNORECASE)


@dataclass
class Row:
    """One program on one chip. reports: by kind, the tolerated ones too. why: of all verdicts but "right"."""

    program: str
    chip: str
    verdict: str
    seconds: float
    launches: int = 0
    reports: dict[str, int] = field(default_factory=dict)
    why: str = ""


def programs(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments of --program) of each file; of each test where a file has tests and no body of its own."""
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        tests = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")]
        called = {
            ast.unparse(n.value.func) for n in tree.body if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call)
        }
        name = str(path.relative_to(folder))
        if tests and not called & set(tests):
            yield from ((f"{name}::{test}", [str(Path(__file__)), "--case", f"{path}::{test}"]) for test in tests)
        elif path.name != "conftest.py":
            yield name, [str(path)]


def run_case(case: str) -> int:
    """The smallest cases of a test, by pytest; inside of the emulator. Returns pytest's exit code."""
    import pytest

    class Smallest:
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            def size(item: Any) -> float:
                values = getattr(item, "callspec", None)
                return math.prod(v for v in (values.params if values else {}).values() if type(v) is int and v > 0)

            items[:] = [item for item in items if size(item) == min(map(size, items))][:MOST_CASES]

    folder = str(Path(case.partition("::")[0]).parent)
    sys.path.insert(0, folder)  # where files that a file imports lie
    options = ["-q", "-x", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    return int(pytest.main([*options, case], plugins=[Smallest()]))


def judge(name: str, chip: str, arguments: list[str], seconds: float) -> Row | None:
    """Run one program. None where it says that it is not for this chip, or launches nothing."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "padless.emulator", "--chip", chip, "--reports", "0", "--program", *arguments]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / ".peers" / "packages")])
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=environment, check=False, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        return Row(name, chip, "time", seconds, why=f"not over after {seconds:.0f} s")
    took, text = time.perf_counter() - started, done.stdout + done.stderr
    end = END.search(text)
    row = Row(name, chip, "crash", round(took, 1), reports={k: int(n) for k, n, _ in COUNT.findall(text)})
    errors = re.findall(r"^E? *((?:[\w.]*Error|refused)\b.*)$", text, re.MULTILINE)
    row.why = (errors[-1] if errors else text.strip().splitlines()[-1])[:160].replace(str(ROOT) + "/", "")
    if end is None:
        return row
    if ABSENT.search(text):
        row.verdict = "absent"
        return row
    row.launches, _, refused, code = (int(n) for n in end.groups())
    if row.launches == 0 and not refused and code in (0, 5):
        return None  # not for this chip, or only a sweep of measurements
    if refused:
        row.verdict, row.why = "refused", next(iter(re.findall(r"^refused: (.*)$", text, re.MULTILINE)), row.why)[:160]
    elif OWN_CHECK.search(text):
        row.verdict = "wrong"
    elif code == 0:
        row.verdict, row.why = "right", ""
    return row


def page(record: dict[str, Any]) -> str:
    """The page of a record."""
    rows = [Row(**row) for row in record["rows"]]
    verdicts = [row.verdict for row in rows]
    counts = {v: verdicts.count(v) for v in ("right", "wrong", "refused", "crash", "time", "absent")}
    right = [row for row in rows if row.verdict == "right"]
    clean = [row for row in right if set(row.reports) <= {"tolerated"}]
    lines = [
        "# Other people's programs in the emulator",
        "",
        f"`python tools/scoreboard.py`, {record['day']}: programs of {record['source']} with Triton {record['triton']}, "
        f"unchanged, each with at least {record['seconds']:.0f} s on one core of a shared machine, judged by its own "
        "check.",
        "",
        f"{len(rows)} programs: " + ", ".join(f"{n} {v}" for v, n in counts.items() if n) + "; "
        f"{len(clean)} of {len(right)} right ones have no report that counts.",
        "",
        "| program | chip | verdict | launches | s | reports |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        reports = ", ".join(f"{kind} {n}" for kind, n in sorted(row.reports.items())) or "none"
        lines.append(f"| {row.program} | {row.chip} | {row.verdict} | {row.launches} | {row.seconds:.0f} | {reports} |")
    failed = [row for row in rows if row.verdict != "right"]
    lines += ["", "## What is not right", ""] if failed else []
    lines += [f"- {row.program}, {row.chip}: {row.verdict}, `{row.why.replace('`', '')}`" for row in failed]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=ROOT / ".peers" / "triton-tutorials")
    parser.add_argument("--source", default="an unknown source")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        sys.exit(run_case(arguments.case))
    if not arguments.page:
        record: dict[str, Any] = {
            "day": time.strftime("%Y-%m-%d"), "source": arguments.source, "seconds": arguments.seconds,
            "triton": importlib.metadata.version("triton"), "rows": [],
        }  # fmt: skip
        if arguments.only and RECORD.exists():
            kept = json.loads(RECORD.read_text())
            record |= kept | {
                "source": record["source"],
                "rows": [row for row in kept["rows"] if arguments.only not in row["program"]],
            }
        for name, command in programs(arguments.programs):
            for chip in CHIPS if arguments.only in name else ():
                row = judge(name, chip, command, arguments.seconds)
                if row is not None:
                    print(row, flush=True)
                    record["rows"] = sorted([*record["rows"], asdict(row)], key=lambda r: r["program"])
                    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    RECORD.with_suffix(".md").write_text(page(json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
