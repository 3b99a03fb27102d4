"""Checks that are fixed problems of the fuzzer's calls; small ones for compute-sanitizer: ``python -m .. CALL``."""

from __future__ import annotations

import sys
from functools import partial

from padless.verify.checks import Check, run_small
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options, Problem
from padless.verify.fuzz.subjects import SUBJECTS

CALLS = tuple(name for name, subject in SUBJECTS.items() if any(True for _ in subject.lines()))
_PARTS = 12  # of a check's rehearsal


def _judge(call: str, lines: list[Options], place: Place) -> None:
    for options in place.some(lines):
        place.judge.now(str(Problem(call, options)))
        SUBJECTS[call].judge(options, place)


def check_of(call: str) -> Check:
    """All of a call's fixed problems."""
    return Check(partial(_judge, call, list(SUBJECTS[call].lines())), _PARTS)


def small_of(call: str) -> Check:
    """Those of them that ask for no property: one launch, or two, of every kernel."""
    return Check(partial(_judge, call, [o for o in SUBJECTS[call].lines() if not o["properties"]]))


if __name__ == "__main__":
    run_small(small_of(sys.argv[1]))
