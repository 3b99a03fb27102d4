"""Records and pages of measurements that are made up."""

from __future__ import annotations

import json
from pathlib import Path

from measured_records import measured
from support.bench_records import timing


def session(**changes) -> dict:
    about = {
        "date": "2031-02-03T04:05:06+00:00",
        "cuda": "13.0",
        "versions": {"torch": "2.11.0"},
        "gpu": "NVIDIA H200",
        "driver": "600.1",
        "power_limit_w": 700.0,
        "max_sm_mhz": 1234.0,
        "max_mem_mhz": 3201.0,
    }
    ceilings = {"dense_tflops": 1000.0, "copy_gb_per_s": 4000.0}
    known = {"deepgemm": {"version": "9.8"}, "mslk": {"missing": "no module"}, "torch": {"version": "2.11.0"}}
    return {
        "kind": "session",
        "id": "then",
        "what": "paper",
        "machine": about,
        "peers": known,
        "ceilings": ceilings,
        "repeats": 4,
    } | changes


def point(kind: str, at: dict, times: dict[str, float], **more) -> dict:
    return {
        "kind": kind,
        "session": "then",
        "point": at,
        "wrong": {},
        "errors": {},
        "gpu": {name: timing(us) for name, us in times.items()},
    } | more


def write(folder: Path, name: str, *records: dict) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def found(folder: Path, kind: str, *points: dict):
    write(folder, f"2031-02-03-h200-{kind}.jsonl", session(what=kind.split("-")[0]), *points)
    return measured(folder, kind)


def rows_of(text: str) -> list[list[str]]:
    """Cells of a Markdown table, without the rule under its heading."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [lines[0], *lines[2:]]
