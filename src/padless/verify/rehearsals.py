"""The calls that the checks of ``padless verify`` will make, as rehearsals for `padless.testing.compile_ahead`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from padless.emulator import fake_driver
from padless.kernels.table import kernels_arch
from padless.testing.compile_ahead import BOTH_IMAGES, Rehearsal
from padless.verify import chains as verify_chain
from padless.verify import epilogue as verify_epilogue
from padless.verify import formats as verify_formats
from padless.verify import fp8_block as verify_checks
from padless.verify import invariance as verify_invariance
from padless.verify import moe as verify_moe
from padless.verify import small as verify_small
from padless.verify import wgrad as verify_wgrad
from padless.verify.bf16 import forward as verify_bf16_forward
from padless.verify.bf16 import wgrad as verify_bf16_wgrad
from padless.verify.blackwell import PROBLEM_LISTS, PRODUCTS, dense_launches, list_launches
from padless.verify.emulator import tensor_core as verify_arithmetic
from padless.verify.emulator.kernels import PROBLEMS, backend_of, emulate
from padless.verify.training import layer as verify_training


def rehearsals_of(arch: str, checks: Iterable[str], modules: Iterable[str]) -> list[Rehearsal]:
    """The calls of the checks of these names and of these modules of small launches, in parts of about a second."""
    found: list[Rehearsal] = []
    for name in checks:
        found += _CHECKS[name](arch) if name in _CHECKS else [_of_check(name, arch)]
    for module in modules:
        found += _MODULES[module](arch)
    return found


def _of_check(name: str, arch: str) -> Rehearsal:
    return Rehearsal(partial(verify_checks.rehearse, name, backend_of(arch)))


def _arithmetic(arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(_wgmmas, arch), BOTH_IMAGES)]


def _wgmmas(arch: str) -> None:
    driver = fake_driver.emulated_driver(kernels_arch(arch))
    for pair in verify_arithmetic.PAIRS:
        for _, operands in verify_arithmetic.problems_of(pair, 1, 0):
            verify_arithmetic.run_wgmma(driver, pair, *operands)


def _compared(arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(emulate, seed), BOTH_IMAGES) for seed in range(PROBLEMS)]


def _formats(problems: int, kinds: tuple[str, ...], arch: str) -> list[Rehearsal]:
    jobs = verify_formats.problems_of(arch, problems)
    return [Rehearsal(partial(verify_formats.emulate_formats, *job), kinds) for job in jobs]


def _epilogues(arch: str) -> list[Rehearsal]:
    jobs = verify_epilogue.problems_of(arch)
    return [Rehearsal(partial(verify_epilogue.rehearse_epilogue, *job)) for job in jobs]


def _epilogues_compared(arch: str) -> list[Rehearsal]:
    jobs = verify_epilogue.problems_of(arch)
    return [Rehearsal(partial(verify_epilogue.emulate_epilogue, *job), BOTH_IMAGES) for job in jobs]


def _launches(launches: Callable[..., Iterator[object]], problems: int, arch: str) -> list[Rehearsal]:
    return [Rehearsal(partial(_exhaust, launches, problems, backend_of(arch)))]


def _exhaust(launches: Callable[..., Iterator[object]], problems: int, backend: str) -> None:
    for _ in launches(problems, "cpu", backend):
        pass


def _nothing() -> None:
    """The calls of a check of Triton's kernels alone, which Triton compiles."""


_CHECKS: dict[str, Callable[[str], list[Rehearsal]]] = {
    "emulator's tensor core agrees": _arithmetic,
    "emulator agrees": _compared,
    "emulator agrees on formats": partial(_formats, verify_formats.COMPARED, BOTH_IMAGES),
    "emulator agrees on epilogues": _epilogues_compared,
    "dense MXFP8": partial(_launches, dense_launches, PRODUCTS),
    "lists of problems": partial(_launches, list_launches, PROBLEM_LISTS),
    "formats": partial(_formats, verify_formats.JUDGED, ("cubin",)),
    "epilogues": _epilogues,
    **{name: lambda arch: [Rehearsal(_nothing)] for name in verify_moe.PASSES},
    "MoE layer": lambda arch: [Rehearsal(partial(verify_moe.rehearse, arch, backend_of(arch)))],
    "chains": lambda arch: [Rehearsal(partial(verify_chain.rehearse, arch))],
    "batch invariance": lambda arch: [
        Rehearsal(partial(verify_invariance.rehearse, *job)) for job in verify_invariance.problems_of(arch)
    ],
    "training layer": lambda arch: [Rehearsal(partial(verify_training.rehearse, backend_of(arch)))],
    "training layer in graphs": lambda arch: [Rehearsal(partial(verify_training.rehearse, backend_of(arch)))],
    "weight gradients": lambda arch: [Rehearsal(partial(verify_wgrad.rehearse, backend_of(arch)))],
    "bf16 products": lambda arch: [Rehearsal(partial(verify_bf16_forward.rehearse, backend_of(arch)))],
    "bf16 weight gradients": lambda arch: [Rehearsal(partial(verify_bf16_wgrad.rehearse, backend_of(arch)))],
}
_MODULES: dict[str, Callable[[str], list[Rehearsal]]] = {
    "padless.verify.fp8_block": lambda arch: [_of_check(verify_checks.SMALL, arch)],
    "padless.verify.small": lambda arch: [Rehearsal(partial(verify_small.rehearse, arch, backend_of(arch)))],
    "padless.verify.wgrad": lambda arch: [Rehearsal(partial(verify_wgrad.rehearse, backend_of(arch)))],
    "padless.verify.bf16.forward": lambda arch: [Rehearsal(partial(verify_bf16_forward.rehearse, backend_of(arch)))],
    "padless.verify.bf16.wgrad": lambda arch: [Rehearsal(partial(verify_bf16_wgrad.rehearse, backend_of(arch)))],
}
