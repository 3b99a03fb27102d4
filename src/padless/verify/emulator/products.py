"""Random calls of every route on this GPU and by the emulator: the same bits, but for what an exponential moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from padless.runtime.driver import cuda_driver
from padless.testing.bits import differing
from padless.testing.processes import in_order, worker_pool
from padless.verify.checks import Comparison
from padless.verify.emulator.kernels import backend_of, emulation_cost, settings_of
from padless.verify.fuzz.case import parts_of
from padless.verify.fuzz.epilogue_lines import random_lines
from padless.verify.fuzz.epilogue_outputs import Parts
from padless.verify.fuzz.epilogues import GLU_ABSOLUTE, GLU_RELATIVE, Fused
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import Options, Problem
from padless.verify.fuzz.product_lines import EMULATED, Lines
from padless.verify.fuzz.products import Product

_CASES: dict[str, Any] = {"grouped_gemm": Product, "grouped_gemm_epilogue": Fused}
# The emulator's exponential is exactly rounded: a part of the codes, of one-byte scales and of 16-bit values may be
# others on a GPU, and of few bytes a whole block of codes, which moves with its scale.
_MOST_MOVED, _MOST_MOVED_OF_FEW = 0.01, 128


def emulate(call: str, arch: str, o: Options) -> Parts:
    """Results of a call by the emulator."""
    backend = backend_of(arch)
    with settings_of(backend):
        return computed(call, o, place_of(backend))


def computed(call: str, o: Options, place: Place) -> Parts:
    """All elements that a call gives at a place, on the CPU; "values": those of SwiGLU in float32."""
    case: Any = _CASES[call](o, place)
    parts = parts_of(case.run(case.operands))
    if isinstance(case, Fused) and case.epilogue.is_glu:
        parts |= {"values": case.values}
    return {name: t.cpu() for name, t in parts.items()}


def compare_parts(judge: Judge, got: Parts, wanted: Parts) -> int:
    """The number of elements that an exponential moved: none where the float32 values are the same."""
    judge.wrong(f"there are {[*got]}, not {[*wanted]}", got.keys() != wanted.keys())
    moved, is_exact = 0, "values" not in wanted or not differing(got["values"], wanted["values"], any_nan=True).any()
    for name, want in wanted.items():
        t = got[name]
        if is_exact or t.shape != want.shape:
            judge.same(f"{name}: the emulator's bits", t, want)
            continue
        count = int(differing(t, want, any_nan=False).sum())
        judge.elements, moved = judge.elements + t.numel(), moved + count
        if t.dtype == torch.float32:  # values, amax and scales, twice the values' bound apart
            exact = want.double()
            tolerance = 2 * (exact.abs() * (GLU_RELATIVE + 2.0**-23) + GLU_ABSOLUTE)
            judge.near(f"{name}: near the emulator's", t, exact, tolerance.nan_to_num(0.0), torch.inf)
        else:
            most = max(_MOST_MOVED_OF_FEW, _MOST_MOVED * t.numel() * t.element_size())
            judge.wrong(f"{name}: {count} elements are not the emulator's", count * t.element_size() > most)
    return moved


def cost(call: str, arch: str, o: Options) -> float:
    """Of a problem for the emulator."""
    calls = 2 if o.get("gate_up") else 1
    return calls * emulation_cost(sum(o["sizes"]), len(o["sizes"]), o["n"], o["k"])


def compare(call: str, lines: Lines, workers: int | None = None) -> str:
    """Raises AssertionError with every problem whose bits differ between the GPU and the emulator."""
    place, moved = place_of("cuda"), 0
    place.judge, jobs = Judge(any_nan=False), jobs_of(call, lines, cuda_driver().arch)
    with worker_pool(workers) as pool:
        for (_, _, o), wanted in zip(jobs, in_order(pool, emulate, jobs, cost), strict=True):
            place.judge.now(str(Problem(call, o)))
            moved += compare_parts(place.judge, computed(call, o, place), wanted)
    found = f"{len(jobs)} problems, {place.judge.outcome()}, bit for bit the same"
    return found + (f" but {moved} that SwiGLU's exponential moved" if moved else "")


def jobs_of(call: str, lines: Lines, arch: str) -> list[tuple[str, str, Options]]:
    return [(call, arch, o) for o in lines(arch)]


def comparison_of(call: str, lines: Lines) -> Comparison:
    return Comparison(partial(compare, call, lines), partial(jobs_of, call, lines), emulate)


COMPARISONS = {name: comparison_of("grouped_gemm", lines) for name, lines in EMULATED.items()}
COMPARISONS["emulator agrees on epilogues"] = comparison_of("grouped_gemm_epilogue", random_lines)
