"""A wrong problem made smaller: options are simplified one after the other for as long as it stays wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options, Problem
from padless.verify.fuzz.subjects import judged

_SIMPLE = {
    "strides": "contiguous",
    "layout": "plain",
    "a_layout": "plain",
    "b_layout": "plain",
    "row_layout": "plain",
    "column_layout": "plain",
    "nan_row": -1,
    "nan_group": -1,
    "past": 0,
    "globals": 0,
    "b_globals": 0,
    "d_globals": 1,
    "tile": 0,
    "special": False,
    "limit": None,
    "up_offset": 0.0,
    "alignment": 32,
}
_KEPT = ("seed", "beside", "call", "module", "top_k", "m_aligned", "cluster", "pieces")


def _smaller(options: Options) -> Iterator[Options]:
    """Simpler options, the largest steps first."""
    for name, value in sorted(options.items(), key=lambda option: option[0] != "operations"):
        if name in _KEPT:
            continue
        if name in _SIMPLE:
            if value != _SIMPLE[name]:
                yield {name: _SIMPLE[name]}
        elif name == "hostile":
            continue
        elif isinstance(value, bool):
            if value:
                yield {name: False}
        elif isinstance(value, int):
            yield from ({name: one} for one in _smaller_number(value))
        elif isinstance(value, list):
            yield from _smaller_list(name, value, options)


def _smaller_number(value: int) -> Iterator[int]:
    for one in (0, 1, 2, 8, 16, 32, 64, 128, value // 2 // 32 * 32, value // 2, value - 1):
        if 0 <= one < value:
            yield one


def _smaller_list(name: str, value: list[Any], options: Options) -> Iterator[Options]:
    if name == "gaps":
        if any(value):
            yield {name: [0] * len(value)}
        return
    if name == "alignments":
        return
    if len(value) > 3:
        middle = len(value) // 2
        yield from ({name: part} for part in (value[middle:], value[:middle]) if name == "operations")
    if len(value) > 1:
        for i in range(len(value)):
            shorter: Options = {name: value[:i] + value[i + 1 :]}
            if name == "sizes" and options.get("hostile"):
                shorter["hostile"] = options["hostile"][:i] + options["hostile"][i + 1 :]
            for other in ("globals", "b_globals", "d_globals"):
                if options.get(other, 0) == len(value):
                    shorter[other] = len(value) - 1
            yield shorter
    for i, one in enumerate(value):
        if isinstance(one, int):
            yield from ({name: [*value[:i], less, *value[i + 1 :]]} for less in _smaller_number(one))


def shrunk(problem: Problem, place: Place, seconds: float = 20.0, tries: int = 400) -> tuple[Problem, list[str]]:
    """(the smallest problem that was found, what is wrong with it); nothing wrong where it cannot be repeated."""
    wrong = judged(problem, place)
    end, left = time.monotonic() + seconds, tries
    found = bool(wrong)
    while found:
        found = False
        for changes in _smaller(problem.options):
            if time.monotonic() > end or left == 0:
                return problem, wrong
            left -= 1
            smaller = problem.but(**changes)
            if names := _still_wrong(smaller, place, wrong):
                problem, wrong, found = smaller, names, True
                break
    return problem, wrong


def _still_wrong(problem: Problem, place: Place, before: list[str]) -> list[str]:
    """Findings, where it was wrong before: an option that breaks the problem itself is no finding."""
    names = judged(problem, place)
    raised = [name for name in before if name.startswith("raised")]
    kinds = {name.split(":")[0] for name in before}
    if raised:
        return names if any(name in raised for name in names) else []
    return names if any(name.split(":")[0] in kinds for name in names) else []
