"""Other people's GEMMs, measured when they can be imported and skipped, with the reason, when they cannot.

Each library lies in a sub-folder of one folder (`padless bench --peers DIR`, by default ./.peers):

    deepgemm/       the folder that contains the package deep_gemm (DeepGEMM 2.x, its extension built)
    tma_adaptive/   the paper's published code; its package is called deep_gemm too and is loaded under another name
    mslk/           the folder that contains the package mslk
    torchao/        the folder that contains the package torchao (its wheel, unpacked)
    monomoe/        FlashInfer's MonoMoE as tools/monomoe/build.sh builds it

What is installed in the environment is found without a folder. torch's own products are always there, and a product in
plain Triton.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from padless.bench.problem import GroupedProblem
from padless.runtime.architecture import HOPPER

if TYPE_CHECKING:
    from padless.bench.cases.problems.layer import LayerProblem


@dataclass(frozen=True)
class Contender:
    """Something to be timed.

    name: how tables and records call it.
    call: does the work on the current stream.
    output: the (M, N) result of the last call, for checking; None for parts of a product, which have none.
    tolerance: largest relative error of a row against the float64 product of the block-scaled operands. Wider
        for contenders that use another scaling or none: their operands differ.
    whole: whether it is all of a user's work (then it is timed end to end too) or only a part.
    buffer: the tensor that output is made of, where one holds all of it: what can be poisoned before a call.
    """

    name: str
    call: Callable[[], Any]
    output: Callable[[], torch.Tensor] | None = None
    tolerance: float = 0.01
    whole: bool = True
    buffer: torch.Tensor | None = None


def returning(
    name: str, call: Callable[[], torch.Tensor], tolerance: float = Contender.tolerance, whole: bool = True
) -> Contender:
    """A contender of a call that returns a new result, the last of which is kept for checking."""
    last: list[torch.Tensor] = []

    def kept() -> None:
        last[:] = [call()]

    return Contender(name, kept, lambda: last[0], tolerance, whole)


class Peer:
    """One library: a subclass says how it is imported, why not, and what it computes."""

    name: str
    licence: str  # its own, by SPDX
    compiles_at_run_time = True
    loading = "loading it"  # what load does, for the reason where it fails
    needs: tuple[str, ...] = ()  # functions that the library must have
    by_default: bool = True  # whether it takes part in benchmarks of products that name no peers
    formats: tuple[str, ...] = ("FP8_BLOCK",)  # of the weights that it multiplies

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._library: Any = None

    def obstacle(self) -> str:
        """The reason not to try loading; empty where there is none."""
        raise NotImplementedError

    def load(self) -> Any:
        """The library, or whatever a broken one raises."""
        raise NotImplementedError

    def missing(self) -> str:
        """The reason why it cannot be used here, empty where it can; loads it, never raises."""
        if self._library is not None:
            return ""
        if obstacle := self.obstacle():
            return obstacle
        try:
            library = self.load()
        except Exception as error:  # a missing extension raises ImportError, a broken one anything
            return f"{self.loading}: {type(error).__name__}: {error}"
        if absent := [name for name in self.needs if not hasattr(library, name)]:
            return f"it has no {', '.join(absent)}"
        self._library = library
        return ""

    def version(self) -> str:
        """The library's version, in its own words; once available."""
        return str(getattr(self._library, "__version__", "unknown"))

    def grouped(self, problem: GroupedProblem) -> list[Contender]:
        """Its contenders on ragged groups."""
        return []

    def decode(self, problem: GroupedProblem) -> list[Contender]:
        """Its contenders on groups of few rows."""
        return []

    def dense(self, problem: GroupedProblem) -> list[Contender]:
        """Its contenders on a dense product: one group."""
        return []

    def layer(self, problem: LayerProblem) -> list[Contender]:
        """Its contenders on a whole Mixture-of-Experts layer, from the router's logits."""
        return []

    def choices(self, problems: Sequence[GroupedProblem]) -> list[str]:
        """The configurations that it chose for such groups of few rows, for the record."""
        return []


def hopper_or_reason() -> str:
    """The reason that keeps Hopper-only peers from this device; empty where none does."""
    if not torch.cuda.is_available():
        return "needs a CUDA GPU"
    major, minor = torch.cuda.get_device_capability()
    return "" if (major, minor) == HOPPER.capability else f"needs compute capability 9.0, this GPU has {major}.{minor}"


def look_in(folder: Path | None, name: str) -> None:
    """Lets Python import what lies in `folder`/`name` before what is installed, if there is such a folder."""
    path = folder / name if folder is not None else None
    if path is not None and path.is_dir() and str(path) not in sys.path:
        sys.path.insert(0, str(path))


def point_at_cuda_toolkit() -> str:
    """Sets CUDA_HOME for peers that call nvcc, unless it is set; returns why that is impossible, or nothing.

    They take it from the environment or from where `nvcc` is, which fails when that is a wrapper script.
    """
    if os.environ.get("CUDA_HOME"):
        return ""
    candidates = [Path("/usr/local/cuda")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.insert(0, Path(nvcc).resolve().parent.parent)
    for home in candidates:
        if (home / "bin" / "nvcc").exists() and (home / "include" / "cuda_runtime.h").exists():
            os.environ["CUDA_HOME"] = str(home)
            return ""
    return "needs the CUDA toolkit's nvcc, none found"
