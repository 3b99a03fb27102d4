"""Parts of comparisons of whole kernels with the emulator: its backend, what a problem costs it, bits to compare."""

from __future__ import annotations

import torch

from padless.kernels.table import kernels_arch
from padless.runtime.choices import BackendName

_BITS = {2: torch.int16, 4: torch.int32}


def backend_of(arch: str) -> BackendName:
    """The emulator's backend that runs the kernels of a GPU of ``arch``."""
    return "emulator" if kernels_arch(arch) == "sm_90a" else "emulator:sm_100a"


def emulation_cost(rows: int, groups: int, n: int, k: int) -> float:
    """A number about proportional to the emulator's time for a problem: whole tiles, some of which are mostly empty."""
    return (rows + 64 * groups) * (n + 64) * (k + 64)


def bits(out: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """The valid rows as integers, on the CPU."""
    return out[: int(offs[-1])].cpu().view(_BITS[out.element_size()])
