"""The calls that the checks of ``padless verify`` will make, as rehearsals for `padless.testing.compile_ahead`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from padless.emulator import fake_driver
from padless.kernels.table import kernels_arch
from padless.testing.compile_ahead import BOTH_IMAGES, Rehearsal
from padless.verify import chains, epilogue, formats, fp8_block, invariance, moe_edges, small, wgrad
from padless.verify.bf16 import forward as bf16_forward
from padless.verify.bf16 import wgrad as bf16_wgrad
from padless.verify.blackwell import PROBLEM_LISTS, PRODUCTS, dense_launches, list_launches
from padless.verify.emulator.kernels import backend_of
from padless.verify.emulator.tensor_core import PAIRS, problems_of, run_wgmma
from padless.verify.training import layer as training


def rehearsals_of(arch: str, checks: Iterable[str], modules: Iterable[str]) -> list[Rehearsal]:
    """The calls of the checks of these names and of these modules of small launches, in parts of about a second.

    Raises KeyError for another name.
    """
    return [rehearsal for name in (*checks, *modules) for rehearsal in _of(name, arch)]


def _of(name: str, arch: str) -> list[Rehearsal]:
    if name in _PARTS:
        jobs, rehearse, *kinds = _PARTS[name]
        return [Rehearsal(partial(rehearse, *job), *kinds) for job in jobs(arch)]
    if name in _WHOLE:
        return [Rehearsal(partial(_WHOLE[name], arch))]
    return [Rehearsal(partial(fp8_block.rehearse, *fp8_block.CALLS[name], backend_of(arch)))]


def _wgmmas(arch: str) -> None:
    driver = fake_driver.emulated_driver(kernels_arch(arch))
    for pair in PAIRS:
        for _, operands in problems_of(pair, 1, 0):
            run_wgmma(driver, pair, *operands)


def _exhaust(launches: Callable[..., Iterator[object]], problems: int, arch: str) -> None:
    for _ in launches(problems, "cpu", backend_of(arch)):
        pass


def _on_backend(rehearse: Callable[..., object], arch: str) -> None:
    rehearse(backend_of(arch))


def _nothing(arch: str) -> None:
    """The calls of a check of Triton's kernels alone, which Triton compiles."""


def _small_launches(arch: str) -> None:
    """The calls of all modules of small launches, and of the layer where it trains."""
    small.rehearse(arch)
    if kernels_arch(arch) == "sm_90a":
        for module in (wgrad, bf16_wgrad, bf16_forward, training):
            _on_backend(module.rehearse, arch)


# Checks in parts: the jobs on an architecture, what makes the calls of one, and the images it needs where not the GPU's.
_PARTS: dict[str, tuple[Any, ...]] = {
    "emulator's tensor core agrees": (lambda arch: [(arch,)], _wgmmas, BOTH_IMAGES),
    "emulator agrees": (lambda arch: formats.fp8_block_problems(), formats.emulate_formats, BOTH_IMAGES),
    "emulator agrees on formats": (
        partial(formats.problems_of, problems=formats.COMPARED),
        formats.emulate_formats,
        BOTH_IMAGES,
    ),
    "emulator agrees on epilogues": (epilogue.problems_of, epilogue.emulate_epilogue, BOTH_IMAGES),
    "formats": (partial(formats.problems_of, problems=formats.JUDGED), formats.emulate_formats),
    "epilogues": (epilogue.problems_of, epilogue.rehearse_epilogue),
    "batch invariance": (invariance.problems_of, invariance.rehearse),
}
# Checks and modules of small launches whose calls are one part, made on an architecture.
_WHOLE: dict[str, Callable[[str], object]] = {
    "dense MXFP8": partial(_exhaust, dense_launches, PRODUCTS),
    "lists of problems": partial(_exhaust, list_launches, PROBLEM_LISTS),
    **dict.fromkeys(moe_edges.TRITON_ALONE, _nothing),
    **moe_edges.REHEARSALS,
    "chains": chains.rehearse,
    "two devices": _small_launches,
    "training layer": partial(_on_backend, training.rehearse),
    "training layer in graphs": partial(_on_backend, training.rehearse),
    "weight gradients": partial(_on_backend, wgrad.rehearse),
    "bf16 products": partial(_on_backend, bf16_forward.rehearse),
    "bf16 weight gradients": partial(_on_backend, bf16_wgrad.rehearse),
    "padless.verify.small": small.rehearse,
    "padless.verify.wgrad": partial(_on_backend, wgrad.rehearse),
    "padless.verify.bf16.forward": partial(_on_backend, bf16_forward.rehearse),
    "padless.verify.bf16.wgrad": partial(_on_backend, bf16_wgrad.rehearse),
}
