"""Checks that are fixed problems of the fuzzer's calls; small ones for compute-sanitizer: ``python -m .. CALL ..``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial

from padless.verify.checks import Check
from padless.verify.fuzz import epilogue_lines, product_lines
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Options, Problem
from padless.verify.fuzz.subjects import SUBJECTS

_PARTS = 12  # of a check's rehearsal


def _judge(calls: Iterable[tuple[str, product_lines.Lines]], place: Place) -> None:
    every = [Problem(call, options) for call, lines in calls for options in lines(place.arch)]
    for problem in place.some(every):
        place.judge.now(str(problem))
        SUBJECTS[problem.call].judge(problem.options, place)


def check_of(call: str, lines: product_lines.Lines | None = None) -> Check:
    """Fixed problems of a call: all that it has on an architecture, or those of ``lines``."""
    return Check(partial(_judge, [(call, lines or SUBJECTS[call].lines)]), _PARTS)


def triton_check_of(*calls: str, formats: tuple[str | None, ...] = ()) -> Check:
    """All fixed problems of calls for which Triton compiles, while they run; with formats those of these outputs."""
    lines = [(call, partial(_of_formats, call, formats) if formats else SUBJECTS[call].lines) for call in calls]
    return Check(partial(_judge, lines), 0)


def _of_formats(call: str, formats: tuple[str | None, ...], arch: str) -> Iterator[Options]:
    return (options for options in SUBJECTS[call].lines(arch) if options["format"] in formats)


def small_of(*calls: str) -> Check:
    """Those of these calls that ask for no property: one launch, or two, of every kernel."""
    return Check(partial(_judge, [(call, partial(_small, call)) for call in calls]))


def _small(call: str, arch: str) -> Iterator[Options]:
    return (options for options in SUBJECTS[call].lines(arch) if not options["properties"])


PRODUCTS: dict[str, Check] = {name: check_of(*found) for name, found in product_lines.CHECKS.items()}
EPILOGUES: dict[str, Check] = {
    name: check_of("grouped_gemm_epilogue", lines) for name, lines in epilogue_lines.CHECKS.items()
}

if __name__ == "__main__":
    print(small_of(*sys.argv[1:])())
    print("small problems done")
