"""Architectures of GPUs: everything that differs between them outside of kernels is a field of one record here.

A kernel belongs to an architecture (`padless.kernels.table`); another may run the same sources, compiled for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from padless.runtime.choices import BackendName


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture that kernels are compiled for.

    Attributes:
        name: NVRTC's target, as in "sm_90a".
        generation: NVIDIA's name.
        capability: compute capability.
        kernels: the architecture whose kernels run here; its own name where kernels were written for it.
        family: a target whose machine code runs here as well; None for none.
        shared_bytes: shared memory that a CTA can have.
        backend: the emulator's backend that executes those kernels.
        chip: the chip of `padless.emulator.timing.rates` that the emulator's clock has for those kernels.
        verified: how it is known that they are right, for `padless info`.
    """

    name: str
    generation: str
    capability: tuple[int, int]
    kernels: str
    family: str | None
    shared_bytes: int
    backend: BackendName
    chip: str
    verified: str


HOPPER = Architecture("sm_90a", "Hopper", (9, 0), "sm_90a", None, 227 << 10, "emulator", "H200", "verified on H200")
BLACKWELL = Architecture(
    "sm_100a", "Blackwell", (10, 0), "sm_100a", "sm_100f", 227 << 10, "emulator:sm_100a", "B200",
    "verified by emulation, never run",
)  # fmt: skip
_AS_SM_100A = "verified by emulation for sm_100a, never run"
ARCHITECTURES = (
    HOPPER,
    BLACKWELL,
    Architecture(
        "sm_103a", "Blackwell", (10, 3), "sm_100a", "sm_100f", 227 << 10, "emulator:sm_100a", "B200", _AS_SM_100A
    ),
    Architecture("sm_110a", "Blackwell", (11, 0), "sm_100a", None, 227 << 10, "emulator:sm_100a", "B200", _AS_SM_100A),
)
BY_CAPABILITY = {found.capability: found for found in ARCHITECTURES}
_BY_NAME = {found.name: found for found in ARCHITECTURES}


def kernels_arch(name: str) -> str:
    """The architecture whose kernels a device of this one runs: "sm_100a" for "sm_103a"; without a record itself."""
    return _BY_NAME[name].kernels if name in _BY_NAME else name


def family_of(name: str) -> str | None:
    """The target, besides its own name, whose machine code an architecture runs; None for none."""
    return _BY_NAME[name].family if name in _BY_NAME else None


def with_own_kernels() -> list[Architecture]:
    """The architectures that kernels were written for, in the order of the table of routes."""
    return [found for found in ARCHITECTURES if found.kernels == found.name]
