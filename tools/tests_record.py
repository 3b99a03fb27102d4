"""The page about a run of the tests: `python tools/tests_record.py [--commit NAME] [--later F]... --out STEM FOLDER...`.

FOLDER: of `pytest --record`, one or several parts of one run, of the same files. STEM.json gets the counts, the slowest
tests, every failure and every test that was not reached; STEM.md the same for a reader. F: records of later commits, in
which tests that had failed pass; they stay listed as failed, beside the tree in which they pass. Ends with 1 where the
parts are of different files, a test failed and passes in none of the later ones, or a test was not reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SLOWEST = 30


def read(folder: Path) -> dict[str, Any]:
    """A part: tests.json of a folder of `pytest --record`."""
    part: dict[str, Any] = json.loads((folder / "tests.json").read_text())
    return part


def combined(parts: list[dict[str, Any]], commit: str | None = None) -> dict[str, Any]:
    """The parts' outcomes together. A test that passed in one and failed in another has failed; one that was skipped, or
    not reached, in one part and ran in another ran. Raises ValueError for parts of different or of changed files.
    """
    trees = {part["tree"] for part in parts}
    if len(trees) != 1 or any(part["changed files"] for part in parts):
        raise ValueError(f"parts are of the trees {sorted(trees)}, or of changed files; all must be of one commit")
    failed = {nodeid: why for part in parts for nodeid, why in part["failed"].items()}
    passed = {n: took for part in parts for n, took in part["passed"].items() if n not in failed}
    skipped = {n: why for part in parts for n, why in part["skipped"].items() if n not in passed and n not in failed}
    known = passed.keys() | failed.keys() | skipped.keys()
    missing = sorted({n for part in parts for n in part["not reached"]} - known)
    folders: defaultdict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for nodeid, took in passed.items():
        own = folders["/".join(nodeid.partition("::")[0].split("/")[:2])]
        own[0], own[1] = own[0] + 1, round(own[1] + took, 1)
    return {
        "commit": commit,
        "tree": trees.pop(),
        "parts": [{key: part[key] for key in ("started", "wall seconds", "options", "machine")} for part in parts],
        "tests": len(known) + len(missing),
        "passed": len(passed),
        "failed": failed,
        "skipped": dict(Counter(skipped.values()).most_common()),
        "not reached": missing,
        "seconds": round(sum(passed.values()), 1),
        "folders": dict(sorted(folders.items())),
        "slowest": dict(sorted(passed.items(), key=lambda item: -item[1])[:SLOWEST]),
    }


def mended(failed: dict[str, str], later: list[dict[str, Any]]) -> dict[str, str]:
    """Tests that failed and the tree in which each has passed since; one that failed in a later part has not."""
    found = {nodeid: part["tree"] for part in later for nodeid in part["passed"] if nodeid in failed}
    return {nodeid: tree for nodeid, tree in found.items() if not any(nodeid in part["failed"] for part in later)}


def page(record: dict[str, Any]) -> str:
    """The text of STEM.md."""
    skipped = sum(record["skipped"].values())
    named = f"commit `{record['commit'][:12]}` " if record["commit"] else ""
    text = (
        f"# Every test once\n\nThe tests of {named}(tree `{record['tree'][:12]}`), quick and slow:\n"
        f"{record['tests']:,} tests, {record['passed']:,} passed, {len(record['failed'])} failed, {skipped:,} skipped, "
        f"{len(record['not reached'])} not reached; {record['seconds']:,.0f} seconds of tests in all.\n\n"
        "| part | wall seconds | machine |\n|---|---|---|\n"
    )
    for part in record["parts"]:
        about = part["machine"]
        gpus = Counter(about["GPUs"])
        shown = ", ".join(f"{count} {name}" for name, count in gpus.items()) or "no GPU in sight"
        versions = ", ".join(f"{name} {about[name]}" for name in ("python", "torch", "triton", "numpy"))
        options = " ".join(part["options"]).replace("|", "/")
        text += f"| `pytest {options}` | {part['wall seconds']:.0f} | {about['cores']} cores, {shown}; {versions} |\n"
    text += "\n| folder | passed | seconds |\n|---|---|---|\n"
    for name, (count, took) in record["folders"].items():
        text += f"| {name} | {count:,} | {took:,.0f} |\n"
    text += "\n| skipped | why |\n|---|---|\n"
    for why, count in record["skipped"].items():
        text += f"| {count:,} | {' '.join(why.split()).replace('|', '/')} |\n"
    text += "\n| slowest | seconds |\n|---|---|\n"
    for nodeid, took in record["slowest"].items():
        text += f"| {code(nodeid)} | {took:.0f} |\n"
    for title in ("failed", "not reached"):
        if record[title]:
            text += f"\n## {title.capitalize()}\n\n"
            since = record.get("mended", {})
            says = {nodeid: f"; passes in tree `{tree[:12]}`" for nodeid, tree in since.items()}
            text += "".join(f"- {code(nodeid)}{says.get(nodeid, '')}\n" for nodeid in record[title])
    return text


def code(nodeid: str) -> str:
    """A test's name for a table."""
    return f"`{nodeid.replace('|', '/')}`"


def tree_of(commit: str) -> tuple[str, str]:
    """(the commit, its tree) in full. Raises ValueError where there is none."""
    done = subprocess.run(
        ["git", "rev-parse", commit, f"{commit}^{{tree}}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"commit is {commit!r}; this repository has none of that name")
    name, tree = done.stdout.split()
    return name, tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="STEM")
    parser.add_argument("--commit", help="the commit that ran, which must have the tree of the record")
    parser.add_argument("--later", type=Path, action="append", default=[], metavar="F", help="a later commit's record")
    options = parser.parse_args()
    try:
        name, tree = tree_of(options.commit) if options.commit else (None, None)
        record = combined([read(folder) for folder in options.folders], name)
        record["mended"] = mended(record["failed"], [read(folder) for folder in options.later])
        if tree not in (None, record["tree"]):
            raise ValueError(f"commit {options.commit} has the tree {tree}, and the record {record['tree']}")
    except ValueError as error:
        sys.exit(str(error))
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    options.out.with_suffix(".md").write_text(page(record))
    print(page(record).partition("\n\n")[2].partition("\n\n")[0])
    return int(bool(record["failed"].keys() - record["mended"] or record["not reached"]))


if __name__ == "__main__":
    sys.exit(main())
