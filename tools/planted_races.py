"""Triton's own planted faults, the tests of its concurrency sanitizer, as an examination of the emulator.

    python tools/planted_races.py --tests .peers/triton/python/test/gluon/test_consan.py

Each case of that file is a kernel that is right, or has one fault by its parameters (FAILURE, MISSING_BAR, ..). The
kernels run here without Triton's instrumentation; what the emulator reports is compared with what the case says. A
record and its page; the faults are those that the test's own assertions expect the sanitizer to find.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "measured" / "2026-11-28-planted-races.json"
RIGHT: dict[str, tuple[Any, ...]] = {"FAILURE": (False,), "MISSING_BAR": ("none", False), "MISSING_WAIT": (False,)}


def cases(module: Any) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(name, function, parameters) of every case that this chip is for."""
    for name, function in vars(module).items():
        if not name.startswith("test_") or "cache_miss" in name:
            continue
        marks = getattr(function, "pytestmark", [])
        if any(mark.name == "skipif" and mark.args[0] for mark in marks):
            continue
        axes = [(m.args[0], m.args[1]) for m in reversed(marks) if m.name == "parametrize"]
        for values in itertools.product(*(v for _, v in axes)):
            given = dict(zip((n for n, _ in axes), values, strict=True))
            text = ", ".join(f"{k}={v}" for k, v in given.items())
            yield f"{name}[{text}]" if text else name, function, given


def planted(name: str, given: dict[str, Any]) -> bool:
    """Whether the case has a fault."""
    for key, value in given.items():
        if value in RIGHT.get(key, ()):
            return False
    if given.get("OVERLAP") is False:
        return False
    if not set(given) & set(RIGHT):
        return not any(word in name for word in ("exempt", "multibar", "different_phases"))
    return True


class Quiet:
    """In place of pytest's monkeypatch: nothing is instrumented."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def examine(path: Path, chip: str, only: str) -> list[dict[str, Any]]:
    """A row for each case: whether a fault is planted, and what was reported."""
    from padless.emulator.program import install

    session = install(chip, say=lambda line: None, reports=0)
    import torch

    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("planted_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted_cases"] = module
    spec.loader.exec_module(module)
    rows = []
    for name, function, given in cases(module):
        if only not in name:
            continue
        launches, refused, started, why = len(session.launches), len(session.refused), time.process_time(), ""
        torch.manual_seed(0)
        fixtures = {"device": "cuda", "run_wrapper": False, "monkeypatch": Quiet()}
        wanted = inspect.signature(function).parameters
        try:
            function(**given, **{k: v for k, v in fixtures.items() if k in wanted})
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        found: Counter[str] = Counter()
        for launch in session.launches[launches:]:
            found.update(report.kind for report in launch.result.reports)
        why = next(iter(session.refused[refused:]), why)[:160]
        ran = len(session.launches) > launches
        rows.append({
            "case": name, "chip": chip, "planted": planted(name, given), "ran": ran, "reports": dict(found),
            "why": "" if ran else why, "seconds": round(time.process_time() - started, 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def verdict(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Of a planted fault: found, if it has a report of a kind that the same test's right kernels have none of."""
    kinds = set(row["reports"]) - {"tolerated"}
    if not row["ran"]:
        return "not run"
    if not row["planted"]:
        return "reported" if kinds else "silent"
    test = row["case"].partition("[")[0]
    twins = [r for r in rows if not r["planted"] and (r["chip"], r["case"].partition("[")[0]) == (row["chip"], test)]
    return "found" if kinds - {kind for twin in twins for kind in twin["reports"]} else "missed"


def page(record: dict[str, Any]) -> str:
    """The page of a record."""
    rows = record["rows"]
    verdicts = Counter(verdict(row, rows) for row in rows)
    lines = [
        "# Planted races of Triton's sanitizer tests",
        "",
        f"`python tools/planted_races.py`, {record['day']}: cases of {record['source']}, not instrumented.",
        "",
        f"Of {verdicts['found'] + verdicts['missed']} planted faults {verdicts['found']} are found; of "
        f"{verdicts['silent'] + verdicts['reported']} right kernels {verdicts['silent']} give no report that counts. "
        f"{verdicts['not run']} cases did not run.",
        "",
        "| case | chip | planted | verdict | reports |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(row["reports"].items())) or row["why"] or "none"
        lines.append(
            f"| {row['case']} | {row['chip']} | {'yes' if row['planted'] else 'no'} | {verdict(row, rows)} | {kinds} |"
        )
    if record.get("reasons"):
        lines += ["", "## What was missed, and what was reported of right kernels", ""]
        lines += [f"- {case}: {why}" for case, why in record["reasons"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path)
    parser.add_argument("--source", default="an unknown source")
    parser.add_argument("--chip", default="")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.tests is not None:
        os.environ["DISABLE_SUBPROCESS"] = "1"
        rows = examine(arguments.tests.resolve(), arguments.chip, arguments.only)
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {"rows": [], "reasons": {}}
        kept = [r for r in record["rows"] if r["chip"] != arguments.chip or arguments.only not in r["case"]]
        record |= {"day": time.strftime("%Y-%m-%d"), "source": arguments.source, "rows": kept + rows}
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    record = json.loads(RECORD.read_text())
    RECORD.with_suffix(".md").write_text(page(record))


if __name__ == "__main__":
    main()
