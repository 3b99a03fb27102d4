"""The records that README.md is written from: which files count, their points, and what their sessions say."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measured_markdown import listed, paragraph, span
from padless.bench.peers.find import every_peer
from padless.bench.results import Record, of_kind, read_records, sessions_of

FOLDER = "docs/measured"


@dataclass(frozen=True)
class Measured:
    """The points of one record file, and the sessions that measured them by id."""

    path: Path
    points: list[Record]
    sessions: dict[str, Record]

    @property
    def link(self) -> str:
        return f"[record]({FOLDER}/{self.path.name})"

    @property
    def medians(self) -> str:
        return f"medians of {listed([str(n) for n in sorted({s['repeats'] for s in self.sessions.values()})])}"


def newest(folder: Path, name: str) -> Path | None:
    """The newest file `<date>-h200-<name>` of a folder, by its name."""
    pattern = re.compile(rf"\d{{4}}-\d{{2}}-\d{{2}}-h200-{re.escape(name)}")
    return max((path for path in folder.iterdir() if pattern.fullmatch(path.name)), default=None)


def measured(folder: Path, file_kind: str) -> Measured | None:
    """The newest record of a kind, or None where there is none with points in it."""
    path = newest(folder, f"{file_kind}.jsonl")
    records = [] if path is None else read_records(path)
    points = of_kind(records, file_kind.split("-")[0])
    used = {point["session"] for point in points}
    sessions = {name: session for name, session in sessions_of(records).items() if name in used}
    return Measured(path, points, sessions) if path is not None and points else None


def machine(all_measured: Sequence[Measured]) -> str:
    """Machine and settings of all of it: every value that the sessions have."""
    sessions = [session for found in all_measured for session in found.sessions.values()]
    about: list[dict[str, Any]] = [session["machine"] for session in sessions]

    def values(of: Callable[[dict[str, Any]], Any]) -> str:
        return listed(sorted({str(of(one)) for one in about}))

    return paragraph(
        f"One {values(lambda m: m['gpu'])} (driver {values(lambda m: m['driver'])}, "
        f"{values(lambda m: format(m['power_limit_w'], '.0f'))} W, clocks of up to "
        f"{values(lambda m: format(m['max_sm_mhz'], '.0f'))} MHz and memory at "
        f"{values(lambda m: format(m['max_mem_mhz'], '.0f'))}, CUDA {values(lambda m: m['cuda'])}, torch "
        f"{values(lambda m: m['versions']['torch'])}), {values(lambda m: m['date'][:10])}, as the sessions of the "
        f"records say, such as {all_measured[0].link.replace('[record]', '[this one]')}.",
        "Random normal data, L2 flushed before every call, contenders taking turns in one run with rests between "
        "calls. `1.08x` is a contender's time over that of `padless` on the same inputs: above 1 padless is faster. "
        "`of floor`, `of a copy` and `of a read` are the time at a limit over that of padless: the floor is the larger "
        "of FLOPs at the fastest dense product of the run and bytes at the rate of a copy, the others move as many "
        "bytes in a call of their own. Averages are geometric means.",
    )


def peers(found: Measured) -> str:
    """Versions and licences of the libraries that have a contender of their name in the points."""
    licences = {peer.name: peer.licence for peer in every_peer(None)}
    timed = {name for point in found.points for name in point["gpu"]}
    known = {name: about for session in found.sessions.values() for name, about in session["peers"].items()}
    return listed(
        [
            f"{name} {about['version']} under {licences[name]}"
            for name, about in known.items()
            if "version" in about and any(name in contender for contender in timed)
        ]
    )


def command(found: Measured, points: str) -> str:
    """The call that measures the points again, with the peers that took part and the first session's repeats."""
    sessions = list(found.sessions.values())
    names = dict.fromkeys(
        name for session in sessions for name, about in session["peers"].items() if "version" in about
    )
    only = "".join(f" --only {name}" for name in names)
    return f"padless bench {sessions[0]['what']} {points}{only} --repeats {sessions[0]['repeats']}"


def axis_span(records: Sequence[Record], axis: str) -> str:
    """Least to most of a coordinate of the points, or of a number that the records have beside theirs."""
    return span([record["point"].get(axis, record.get(axis)) for record in records])
