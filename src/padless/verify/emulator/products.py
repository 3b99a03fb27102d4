"""Random products of every route on this GPU and by the emulator: the same bits."""

from __future__ import annotations

from functools import partial

import torch

from padless.runtime.driver import cuda_driver
from padless.testing.bits import bits
from padless.testing.processes import in_order, worker_pool
from padless.verify.checks import Comparison
from padless.verify.emulator.kernels import backend_of, emulation_cost, settings_of
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import Options, Problem
from padless.verify.fuzz.product_lines import EMULATED, Lines
from padless.verify.fuzz.products import Product


def emulate(arch: str, o: Options) -> torch.Tensor:
    """The bits of the valid rows, by the emulator."""
    backend = backend_of(arch)
    with settings_of(backend):
        return computed(o, place_of(backend))


def computed(o: Options, place: Place) -> torch.Tensor:
    """The bits of the valid rows at a place, on the CPU."""
    case = Product(o, place)
    return bits(case.run(case.operands).cpu())


def _jobs(lines: Lines, arch: str) -> list[tuple[str, Options]]:
    return [(arch, o) for o in lines(arch)]


def cost(arch: str, o: Options) -> float:
    """Of a problem for the emulator."""
    return emulation_cost(sum(o["sizes"]), len(o["sizes"]), o["n"], o["k"])


def compare(lines: Lines, workers: int | None = None) -> str:
    """Raises AssertionError with every problem whose bits differ between the GPU and the emulator."""
    place = place_of("cuda")
    place.judge, jobs = Judge(any_nan=False), _jobs(lines, cuda_driver().arch)
    with worker_pool(workers) as pool:
        for (_, o), wanted in zip(jobs, in_order(pool, emulate, jobs, cost), strict=True):
            place.judge.now(str(Problem("grouped_gemm", o)))
            place.judge.same("the emulator's bits", computed(o, place), wanted)
    return f"{len(jobs)} problems, {place.judge.outcome()}, bit for bit the same"


def comparison_of(lines: Lines) -> Comparison:
    return Comparison(partial(compare, lines), partial(_jobs, lines), emulate)


COMPARISONS = {name: comparison_of(lines) for name, lines in EMULATED.items()}
