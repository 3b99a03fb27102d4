"""The figures of docs/tested.md: what the newest record of each kind of test says, and which kernels no GPU has run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measured_records import newest

KERNELS = Path(__file__).parents[1] / "src" / "padless" / "kernels"
FUZZED = {"cuda": "random problems on GPUs", "reference": "random problems with the reference"}


def tested_block(folder: Path) -> str:
    """The table between the marks of docs/tested.md, of the records in a folder."""
    rows = [*_tests(folder), *_checks(folder), *_fuzz(folder), *_mutants(folder), *_cudnn(folder)]
    emulated = ", ".join(f"`{path.parent.name}`" for path in sorted(KERNELS.glob("sm100_*/*.cu")))
    rows.append(("run in the emulator alone, on no GPU", emulated, "[what has run](compatibility.md)"))
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in [("what ran", "newest figures", ""), ("---",) * 3, *rows])
        + "\n\n"
    )


def _record(path: Path) -> str:
    return f"[record](measured/{path.name})"


def _tests(folder: Path) -> Iterator[tuple[str, ...]]:
    if (path := newest(folder, "tests.json")) is not None:
        record = json.loads(path.read_text())
        failed, later = record["failed"].keys(), record.get("mended", {}).keys()
        again = f" ({len(failed & later)} of them passed in a later tree)" if failed else ""
        said = (
            f"{record['tests']:,}: {record['passed']:,} passed, {len(failed)} failed{again}, "
            f"{sum(record['skipped'].values())} skipped, {len(record['not reached'])} not reached"
        )
        yield "all tests once, the slow ones and those of GPUs too", said, _record(path)


def _checks(folder: Path) -> Iterator[tuple[str, ...]]:
    for kind, what in (("verify", "`padless verify`"), ("ranks", "`padless verify --ranks {ranks}`, a GPU each")):
        if (path := newest(folder, f"{kind}.json")) is not None:
            record = json.loads(path.read_text())
            passed = sum(check["passed"] for check in record["checks"])
            said = f"{record['machine']['date']}: {passed} of {len(record['checks'])} checks passed"
            yield what.format(**record["machine"]), said, _record(path)


def _fuzz(folder: Path) -> Iterator[tuple[str, ...]]:
    path = folder / "fuzz.jsonl"
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kinds: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        what = FUZZED.get(run["backend"], f"random problems on {run['backend']}")
        calls = run.get("by_call", {})
        are_sequences = calls and all(call.startswith("states.") for call in calls)
        kinds.setdefault(what.replace("problems", "sequences of operations") if are_sequences else what, []).append(run)
    for what, here in kinds.items():
        wrong = sum(len(run["wrong"]) + len(run["ended"]) for run in here)
        said = f"{wrong} {'was' if wrong == 1 else 'were'} wrong"
        yield what, f"{sum(run['problems'] for run in here):,}, of which {said}", _record(path)


def _mutants(folder: Path) -> Iterator[tuple[str, ...]]:
    path = folder / "mutants.json"
    if path.exists():
        found = json.loads(path.read_text())["kernels"].values()
        tried, left = (sum(kernel[key] for kernel in found) for key in ("judged", "survivors"))
        said = f"{tried - left:,} of {tried:,} noticed; the other {left} are [explained one by one](mutants.md)"
        yield "kernels with one synchronisation deleted or weakened, in the emulator", said, _record(path)


def _cudnn(folder: Path) -> Iterator[tuple[str, ...]]:
    if path := max(folder.glob("20*-cudnn-emulator.json"), default=None):
        cases = json.loads(path.read_text())["cases"]
        same = sum(not case["error"] and not any(case["differing"].values()) for case in cases)
        yield "bits of cuDNN's kernel, both in the emulator", f"{same} of {len(cases)} cases equal", _record(path)
