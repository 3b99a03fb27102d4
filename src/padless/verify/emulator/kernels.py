"""Parts of comparisons of whole kernels with the emulator: its backend, what a problem costs it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from padless.runtime.architecture import kernels_arch, with_own_kernels
from padless.runtime.choices import BackendName


def backend_of(arch: str) -> BackendName:
    """The emulator's backend that runs the kernels of a GPU of ``arch``."""
    return next(own.backend for own in with_own_kernels() if own.name == kernels_arch(arch))


def settings_of(backend: BackendName | None) -> AbstractContextManager[object]:
    """Multiprocessors enough for the largest cluster, where the emulator runs the kernels."""
    if backend is None or not backend.startswith("emulator"):
        return nullcontext()
    from padless.emulator.fake_driver import driver_of

    return driver_of(backend).configured(num_sms=4)


def emulation_cost(rows: int, groups: int, n: int, k: int) -> float:
    """A number about proportional to the emulator's time for a problem: whole tiles, some of which are mostly empty."""
    return (rows + 64 * groups) * (n + 64) * (k + 64)
