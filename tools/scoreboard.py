"""Other people's programs in the emulator: what is right, refused or wrong, with reports by kind; a record and its page.

    python tools/scoreboard.py --peers .peers                       # runs what tools/scoreboard.toml lists
    python tools/scoreboard.py --peers .peers --only "CuTe DSL" --again   # those that have a row in the record, too
    python tools/scoreboard.py --page                                # only the page

Programs are run as they are, by `ptx-emulate --program`, one after the other, and judged by their own checks; those
that nvcc compiled by tests/support/foreign_programs.py. Where a family says `discover`, every file is a program, and a
file of pytest's gives one for each test, its smallest cases. A program is "right" if it ends well, "wrong" if its own
check fails, "refused" if the emulator cannot do something, "crash" where that is no sentence, "time" beyond --seconds,
"absent" if it needs what is not installed or not in this version. Seconds are those of one core.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measured" / "2026-11-28-emulated-programs.json"
LIST = ROOT / "tools" / "scoreboard.toml"
CHIPS = ("H200", "B200")
VERDICTS = ("right", "wrong", "refused", "crash", "time", "absent")
# Runs what is behind its first argument with at most so many seconds of one core.
LIMITED = """import os, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
os.execv(sys.argv[2], sys.argv[2:])"""
MOST_CASES = 8  # of a test, all of the smallest size
COUNT = re.compile(r"^([\w-]+): (\d+) in (.*) \(.*\); --ignore \1 leaves them out$", re.MULTILINE)
NVCC_END = re.compile(r"^exit code (\d+); .* reports: (.*)$", re.MULTILINE)
END = re.compile(r"^(\d+) launch(?:es)?, (\d+) errors, (\d+) refusals, the program's exit code (\d+)$", re.MULTILINE)
ABSENT = re.compile(
    r"^E? *(ModuleNotFoundError|ImportError|FileNotFoundError|AttributeError: module 'triton|.*Could not find `lib)",
    re.MULTILINE,
)
OWN_CHECK = re.compile(
    r"differ\b|AssertionError|Mismatched elements|not close|Disposition: Failed|verification failed", re.IGNORECASE
)


@dataclass
class Row:
    """One program on one chip. reports: by kind, the tolerated ones too. why: of all verdicts but "right"."""

    family: str
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
    options = ["-q", "-s", "-x", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", folder]
    return int(pytest.main([*options, case], plugins=[Smallest()]))


def listed(families: dict[str, Any], peers: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """(family, program, chip, command behind Python) of every program of the list."""
    emulate = ["-m", "padless.emulator", "--reports", "0", "--chip"]
    for family, about in families.items():
        folder = (ROOT if about.get("ours") else peers) / about["folder"]
        for chip in CHIPS:
            if about.get("discover") and chip in about.get("chips", CHIPS):
                for name, arguments in programs(folder):
                    if re.search(about["discover"], name):
                        yield family, name, chip, [*emulate, chip, "--program", *arguments]
            for line in (*about.get(chip, ()), *about.get("both", ())):
                name, *arguments = shlex.split(line)
                if about.get("nvcc"):
                    runner = str(ROOT / "tests" / "support" / "foreign_programs.py")
                    yield family, name, chip, [runner, str(folder / name), *arguments]
                    continue
                if "::" in name:
                    arguments = ["--case", str(folder / name), *arguments]
                script = str(Path(__file__)) if "::" in name else str(folder / name)
                named = line if about.get("ours") else name
                yield family, named, chip, [*emulate, chip, "--program", script, *arguments]


def judge(family: str, name: str, chip: str, command: list[str], seconds: float, folder: Path) -> Row | None:
    """Run one program. None where it says that it is not for this chip, or launches nothing."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / ".peers" / "packages")])
    environment = {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "agg"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(int(seconds)), sys.executable, *command], capture_output=True, text=True,
        env=environment, check=False, cwd=folder, errors="replace",
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, text = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout + done.stderr
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Row(family, name, chip, "time", seconds, why=f"not over after {seconds:.0f} s")
    end, nvcc = END.search(text), NVCC_END.search(text)
    row = Row(family, name, chip, "crash", round(took, 1), reports={k: int(n) for k, n, _ in COUNT.findall(text)})
    errors = re.findall(r"^E? *((?:[\w.]*Error|refused)\b.*)$", text, re.MULTILINE)
    row.why = errors[-1] if errors else text.strip().splitlines()[-1] if text.strip() else f"code {done.returncode}"
    row.why = row.why[:160].replace(str(folder) + "/", "").replace(str(ROOT) + "/", "")
    if nvcc is not None:
        failed = re.findall(r"^launch of .* failed: (.*)$", text, re.MULTILINE)
        row.reports = {} if nvcc[2] == "none" else ast.literal_eval(nvcc[2])
        row.launches = len(re.findall(r"^launch \S+ grid ", text, re.MULTILINE))
        row.verdict = "refused" if failed else "wrong" if int(nvcc[1]) or OWN_CHECK.search(done.stdout) else "right"
        row.why = failed[0][:160] if failed else row.why if row.verdict == "wrong" else ""
        return row
    if end is None:
        if first := re.search(r"^refused: (.*)$", text, re.MULTILINE):  # the host code ended the process behind it
            row.verdict, row.why = "refused", first[1][:160]
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
    right = [row for row in rows if row.verdict == "right"]
    clean = [row for row in right if is_clean(row)]
    lines = [
        "# Other people's programs in the emulator",
        "",
        f"`python tools/scoreboard.py`, {record['day']}: programs of others, unchanged, each with at most "
        f"{record['seconds']:.0f} s of one core, judged by its own check.",
        "",
        f"{len(rows)} programs: {counted(rows)}; {len(clean)} of {len(right)} right ones have no report that counts "
        "(tolerated findings do not).",
        "",
        "| family | of | rows | verdicts | right ones with no report that counts |",
        "|---|---|---|---|---|",
    ]
    for family, source in record["sources"].items():
        own = [row for row in rows if row.family == family]
        good = [row for row in own if row.verdict == "right"]
        clean = [row for row in good if is_clean(row)]
        lines.append(f"| {family} | {source} | {len(own)} | {counted(own)} | {len(clean)} of {len(good)} |")
    for family in record["sources"]:
        lines += [
            "",
            f"## {family}",
            "",
            "| program | chip | verdict | launches | s | reports |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            if row.family == family:
                kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(row.reports.items())) or "none"
                what = f"| {row.program} | {row.chip} | {row.verdict} | {row.launches} | {row.seconds:.0f} | {kinds} |"
                lines.append(what)
    failed = [row for row in rows if row.verdict != "right"]
    lines += ["", "## What is not right", ""] if failed else []
    reasons = record["reasons"]
    for row in failed:
        told = reasons.get(f"{row.program}, {row.chip}") or reasons.get(row.program) or f"`{row.why.replace('`', '')}`"
        lines.append(f"- {row.family}: {row.program}, {row.chip}: {row.verdict}, {told}")
    return "\n".join(lines) + "\n"


def is_clean(row: Row) -> bool:
    """Whether it is right and nothing that it was told counts."""
    return row.verdict == "right" and set(row.reports) <= {"tolerated"}


def counted(rows: list[Row]) -> str:
    """Count the verdicts."""
    verdicts = [row.verdict for row in rows]
    return ", ".join(f"{n} {v}" for v in VERDICTS if (n := verdicts.count(v)))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", default="", help="a regular expression of 'family program chip'")
    parser.add_argument("--again", action="store_true", help="run those that have a row and did not crash, too")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        sys.exit(run_case(arguments.case))
    families = tomllib.loads(LIST.read_text())
    record: dict[str, Any] = {"rows": []}
    if RECORD.exists():
        record = json.loads(RECORD.read_text())
    for family, name, chip, command in () if arguments.page else listed(families, arguments.peers.resolve()):
        known = [
            row
            for row in record["rows"]
            if (row["family"], row["program"], row["chip"]) == (family, name, chip) and row["verdict"] != "crash"
        ]
        if (known and not arguments.again) or not re.search(arguments.only, f"{family} {name} {chip}"):
            continue
        folder = arguments.peers.resolve() / families[family].get("in", families[family]["folder"])
        row = judge(family, name, chip, command, arguments.seconds, folder)
        print(row or f"{name}, {chip}: nothing", flush=True)
        record = json.loads(RECORD.read_text()) if RECORD.exists() else record  # another process may have written
        kept = [r for r in record["rows"] if (r["family"], r["program"], r["chip"]) != (family, name, chip)]
        order = list(families)
        record["rows"] = sorted(
            [*kept, *([asdict(row)] if row else [])], key=lambda r: (order.index(r["family"]), r["program"], r["chip"])
        )
        record |= {"day": time.strftime("%Y-%m-%d"), "seconds": arguments.seconds}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    record["sources"] = {family: about["source"] for family, about in families.items()}
    record["reasons"] = {k: v for about in families.values() for k, v in about.get("reasons", {}).items()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    RECORD.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
