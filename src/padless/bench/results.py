"""Result files (JSON lines), and what is computed from them.

A file holds one `session` record per run (machine, versions, ceilings, peers) and one record per measured point, which
names its session. Runs append, and skip the points that a file already holds: a run that was cut goes on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from padless.bench.group_sizes import acceleration_percent
from padless.testing.timing import geomean

Record = dict[str, Any]

AXES = ("M", "N", "K", "groups")

# Moving as many bytes as a call does, without arithmetic (padless.bench.traffic).
COPY = "copy of as many bytes"
READ = "read of as many bytes"

# (title, clock, numerator, denominator): how many times faster padless is. "floor" is the time the measured ceilings
# allow.
COMPARISONS = (
    ("pad + DeepGEMM / padless", "gpu", "pad_then_deepgemm", "padless"),
    ("DeepGEMM on padded data / padless", "gpu", "deepgemm_on_padded", "padless"),
    ("pad + padless / padless", "gpu", "pad_then_padless", "padless"),
    ("paper's code, its GEMM alone / padless", "gpu", "tma_adaptive_kernel", "padless"),
    ("paper's code / padless, end to end", "end_to_end", "tma_adaptive", "padless"),
    ("MSLK / padless", "gpu", "mslk", "padless"),
    ("torch, one scale per row / padless", "gpu", "torch_rowwise", "padless"),
    ("torch bf16 / padless", "gpu", "torch_bf16", "padless"),
    ("DeepGEMM masked / padless", "gpu", "deepgemm_masked", "padless"),
    ("DeepGEMM dense / padless", "gpu", "deepgemm", "padless"),
    ("cuBLASLt, same scales / padless", "gpu", "cublaslt_block", "padless"),
    ("floor / padless", "gpu", "floor", "padless"),
    (f"{COPY} / padless", "gpu", COPY, "padless"),
    (f"{READ} / padless", "gpu", READ, "padless"),
)
# What these comparisons set padless against that is no product of the same matrices.
NOT_PEERS = ("pad_then_padless", "floor", COPY, READ)


class BrokenRecord(ValueError):
    """A line of a result file that no benchmark has written."""


class Fields(dict[str, Any]):
    """An object of a result file: a field that it lacks is a mistake of the file, not of the table that asks for it."""

    def __missing__(self, name: str) -> Any:
        raise BrokenRecord(f"no field {name!r} beside {list(self)}")


class ResultFile:
    """Appends records to a JSON lines file and knows which points it holds."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.records = read_records(self.path) if self.path.exists() else []
        data = self.path.read_bytes() if self.path.exists() else b""
        if data and not data.endswith(b"\n"):  # a last line that was cut: what is appended starts a new line
            start = data.rfind(b"\n") + 1
            with self.path.open("r+b") as file:
                if _is_json(data[start:]):  # of its end alone
                    file.seek(0, os.SEEK_END)
                    file.write(b"\n")
                else:
                    file.truncate(start)

    def append(self, record: Record) -> None:
        """Writes one record, flushed to the disk: a run that dies keeps what it measured."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":"), allow_nan=False, default=_plain) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)

    def measured(self, kind: str, seed: int) -> set[str]:
        """Keys of the points of one kind and seed that are there."""
        return {
            point_key(record["point"])
            for record in self.records
            if record.get("kind") == kind and record.get("seed") == seed
        }


def _plain(value: Any) -> Any:
    """Numpy and torch scalars, which json cannot write, as numbers."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def finite(value: float) -> float | None:
    """value, or None (JSON null) for NaN and infinities."""
    return float(value) if math.isfinite(value) else None


def point_key(point: Record) -> str:
    """One string per point, whatever the order of its fields."""
    return json.dumps(point, sort_keys=True)


def read_records(path: str | Path) -> list[Record]:
    """The records of a result file. A last line that was cut while it was written is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line, object_hook=Fields)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise BrokenRecord(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise BrokenRecord(f"{path} line {number} is not a JSON object: {line[:80]}")
        records.append(record)
    return records


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """Records of one kind."""
    return [record for record in records if record.get("kind") == kind]


def sessions_of(records: Iterable[Record]) -> dict[str, Record]:
    """Session records by their id."""
    return {record["id"]: record for record in of_kind(records, "session")}


def time_us(record: Record, clock: str, name: str) -> float | None:
    """Median time of a contender of a record ("floor": the floor), or None if it was not measured."""
    if name == "floor":
        floor = record.get("floor_us")
        return None if floor is None else float(floor)
    timing = record.get(clock, {}).get(name)
    return None if timing is None else float(timing["us"])


def ratios(records: Sequence[Record], clock: str, numerator: str, denominator: str) -> list[float]:
    """t(numerator) / t(denominator) of every record that has both."""
    pairs = ((time_us(r, clock, numerator), time_us(r, clock, denominator)) for r in records)
    return [top / bottom for top, bottom in pairs if top is not None and bottom]


@dataclass(frozen=True)
class BenchResult:
    """Records of a run, its earlier parts included.

    records: one per point, as in the result file (docs/benchmarking.md has the fields).
    file: the JSON lines. figure: the PNG, where one is drawn. problems: what keeps a file from being reported.
    """

    records: list[Record]
    file: Path
    figure: Path | None = None
    problems: tuple[str, ...] = ()

    @property
    def comparisons(self) -> dict[str, Spread]:
        return summarise(self.records)

    @property
    def failures(self) -> list[str]:
        """Damage of the file, differing bits, wrong results and contenders that raised, one line each."""
        return [*self.problems, *failures(self.records)]


class Spread(NamedTuple):
    """Ratios of times: how many there are, and how they came out."""

    points: int
    geomean: float
    smallest: float
    largest: float


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    return Spread(len(values), geomean(values), min(values), max(values)) if values else None


def summarise(records: Sequence[Record]) -> dict[str, Spread]:
    """Every comparison that at least one record allows, by its title."""
    found = {title: spread(ratios(records, *comparison)) for title, *comparison in COMPARISONS}
    return {title: values for title, values in found.items() if values is not None}


def baseline_of(records: Sequence[Record]) -> str:
    """The padded baseline these records were measured with: DeepGEMM if it is in all of them, else padless's own."""
    has_all = records and all(time_us(r, "gpu", "pad_then_deepgemm") is not None for r in records)
    return "pad_then_deepgemm" if has_all else "pad_then_padless"


def accelerations(records: Sequence[Record], baseline: str) -> list[float]:
    """The paper's acceleration in percent, one per record; NaN where the baseline or padless is missing."""
    result = []
    for record in records:
        base, own = time_us(record, "gpu", baseline), time_us(record, "gpu", "padless")
        result.append(acceleration_percent(base, own) if base is not None and own else math.nan)
    return result


def memory_savings(records: Sequence[Record]) -> list[float]:
    """The paper's memory saving in percent, one per record."""
    return [float(record["memory_saving_percent"]) for record in records]


def correlation_table(records: Sequence[Record], values: Sequence[float]) -> np.ndarray:
    """Pearson correlations of (M, N, K, groups, values), a 5 x 5 matrix: the paper's Tables 2 and 3.

    NaN where a column does not vary, or where fewer than two records have a value.
    """
    columns = [[float(record["point"][axis]) for record in records] for axis in AXES]
    table = np.array([*columns, list(values)], dtype=np.float64)
    table = table[:, np.isfinite(table).all(axis=0)]
    if table.shape[1] < 2:
        return np.full((5, 5), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.corrcoef(table))


def tflops(record: Record, name: str = "padless") -> float | None:
    """Rate on valid rows in 10^12 FLOP/s."""
    us = time_us(record, "gpu", name)
    return None if not us else record["flops"] / us * 1e-6


def failures(records: Sequence[Record]) -> list[str]:
    """Failures in these records: differing bits, results out of tolerance, contenders that raised."""
    found = []
    for record in records:
        where = " ".join(f"{axis}={value}" for axis, value in record["point"].items())
        if record.get("bitwise_identical") is False:
            found.append(f"{where}: valid rows differ from pad + the same GEMM")
        found += [f"{where}: {name} {text}" for name, text in record.get("wrong", {}).items()]
        found += [f"{where}: {name} failed: {text}" for name, text in record.get("errors", {}).items()]
    return found
