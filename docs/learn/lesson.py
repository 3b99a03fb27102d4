"""Runner of the lessons: compiles a kernel, breaks it where told to, runs it in the emulator, prints the reports.

A line ``// break NAME: code`` in a kernel stands above a line of code; ``--break NAME`` puts ``code``, or nothing, in
the place of that line. Several such lines may stand above one line, and a name may stand in several places.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from padless.emulator import Emulator, LaunchResult
from padless.emulator.units import tensor_map
from padless.runtime import jit

BREAK = re.compile(r"\s*// break ([\w-]+):(.*)")
WRONG_VALUES = "wrong values"  # what a break leads to that breaks no rule of the ISA
TYPES = {"float32": 7, "bfloat16": 9}  # of cuTensorMapEncodeTiled


@dataclass(frozen=True)
class Lesson:
    """A kernel and what runs it.

    source: its file, beside this one. arch: "sm_90a" or "sm_100a". run: takes an emulator that has the kernel, under the
    name ``lesson``, launches it on a small problem, and returns the result and the output's largest error. breaks: name
    -> kind of report that the break leads to, or WRONG_VALUES.
    """

    source: str
    arch: str
    run: Callable[[Emulator], tuple[LaunchResult, float]]
    breaks: Mapping[str, str]

    @property
    def text(self) -> str:
        return (Path(__file__).parent / self.source).read_text(encoding="utf-8")


def broken(text: str, name: str) -> str:
    """The kernel with the lines under ``// break name:`` replaced; line numbers stay. ValueError for an unknown name."""
    lines = text.splitlines()
    found = False
    wanted: str | None = None
    for i, line in enumerate(lines):
        if match := BREAK.fullmatch(line):
            if match[1] == name:
                wanted, found = match[2].strip(), True
        elif wanted is not None:
            lines[i], wanted = wanted, None
    if not found:
        raise ValueError(f"name is {name!r}, the kernel can be broken by {', '.join(names_of_breaks(text))}")
    return "\n".join(lines) + "\n"


def names_of_breaks(text: str) -> list[str]:
    """Names in a kernel's break lines, each once, in the order of the file."""
    return list(dict.fromkeys(match[1] for line in text.splitlines() if (match := BREAK.fullmatch(line))))


def compiled(lesson: Lesson, name: str | None = None) -> str:
    """PTX of the lesson's kernel, whole or broken. Raises jit.CompileError with the compiler's log."""
    text = lesson.text if name is None else broken(lesson.text, name)
    text = f'#line 1 "{lesson.source}"\n{text}'
    image, _ = jit._run_nvrtc(text, lesson.source, lesson.arch, "ptx")
    return image.rstrip(b"\0").decode()


def run(lesson: Lesson, name: str | None = None, seed: int = 0) -> tuple[LaunchResult, float]:
    """Reports and largest error of one run."""
    return lesson.run(Emulator(compiled(lesson, name), seed=seed, name=lesson.source))


def kinds(result: LaunchResult, error: float) -> set[str]:
    """Findings of a run: kinds of report, and WRONG_VALUES where the output is not the expected one."""
    return {report.kind for report in result.reports} | ({WRONG_VALUES} if error != 0 else set())


def tiled(
    emulator: Emulator,
    array: np.ndarray,
    box: tuple[int, int],
    *,
    element: str = "float32",
    rows: int | None = None,
    swizzle: bool = False,
) -> bytes:
    """The 128 bytes of a tensor map of a (rows, columns) array: box is (columns, rows), innermost first.

    element: what 16-bit arrays hold ("bfloat16"). rows: of the tensor, if the array has more. swizzle: 128 bytes.
    """
    dims = (array.shape[1], array.shape[0] if rows is None else rows)
    address = emulator.memory.register(array)
    return tensor_map.encode_tiled(TYPES[element], address, dims, array.strides[:1], box, swizzle=3 if swizzle else 0)


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Upper halves of float32 values, which must be exact in bf16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    if (bits & 0xFFFF).any():
        raise ValueError("values must be exact in bfloat16: use small integers")
    return (bits >> 16).astype(np.uint16)


def product(emulator: Emulator, m: int, n: int, k: int) -> tuple[LaunchResult, float]:
    """A (m x k) times B (n x k) transposed in bf16, by 128 threads: small integers, so that every sum is exact."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (rows, k)).astype(np.float32) for rows in (m, n))
    out = np.full((m, n), np.nan, np.float32)
    maps = [
        tiled(emulator, to_bfloat16(x), (k, rows), element="bfloat16", swizzle=True) for x, rows in ((a, m), (b, n))
    ]
    result = emulator.launch("lesson", 1, 128, [*maps, emulator.memory.register(out)])
    return result, float(np.abs(out - a @ b.T).max())


def main(lesson: Lesson) -> int:
    """Command line of a lesson. Returns 0 when the run found nothing, else 1."""
    parser = argparse.ArgumentParser(description=f"Runs {lesson.source} in the emulator.")
    parser.add_argument("--break", dest="name", choices=names_of_breaks(lesson.text), help="what to break")
    parser.add_argument("--seed", type=int, default=0, help="of the schedule (default 0)")
    options = parser.parse_args()
    result, error = run(lesson, options.name, options.seed)
    for report in result.reports:
        print(str(report).replace(f"{Path.cwd()}/", ""), end="\n\n")  # the compiler puts it before names of files
    print(f"reports: {len(result.reports)}, largest error: {error:g}")
    return 0 if not result.reports and error == 0 else 1


def run_as_script(lesson: Lesson) -> None:
    sys.exit(main(lesson))
