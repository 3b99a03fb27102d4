"""cuDNN's host code without a GPU: its calls of the driver end here, its launches in the emulator."""

from __future__ import annotations

import ctypes
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from padless.emulator import Emulator
from padless.emulator.program.cute_dsl import HostCode, LaunchShape
from padless.emulator.program.dlpack import CUDA, on_gpu


def read_parameters(address: int, sizes: Sequence[int]) -> list[bytes]:
    """The bytes of a launch's parameters."""
    pointers = struct.unpack(f"<{len(sizes)}Q", ctypes.string_at(address, 8 * len(sizes)))
    return [ctypes.string_at(pointer, size) for pointer, size in zip(pointers, sizes, strict=True)]


@dataclass
class Device(HostCode):
    """The driver of a program, with one device. A kernel's handle is its place in `kernels`, from 1.

    emulator: runs the launches; it is given once the program has been compiled. reports: what it found, by kind.
    """

    seed: int = 0
    emulator: Emulator | None = None
    launches: list[LaunchShape] = field(default_factory=list)
    reports: Counter[str] = field(default_factory=Counter)
    instructions: int = 0
    error: Exception | None = None

    def failed(self, name: str, error: Exception) -> None:
        self.error = self.error or error

    def raise_error(self) -> None:
        """Raises what went wrong inside of a call of the host code, if anything did."""
        if self.error is not None:
            raise self.error

    def launch(self, kernel: str, shape: LaunchShape, parameters: int) -> int:
        assert self.emulator is not None
        self.launches.append(shape)
        sizes = [parameter.size for parameter in self.emulator.program(kernel).function.parameters]
        result = self.emulator.launch(
            kernel, shape.grid, shape.block, read_parameters(parameters, sizes), cluster=shape.cluster,
            shared_bytes=shape.shared_bytes, seed=self.seed, programmatic=shape.programmatic,
        )  # fmt: skip
        self.reports.update(report.kind for report in result.reports)
        self.instructions += result.statistics.warp_instructions
        if fatal := [r for r in result.reports if r.kind in ("deadlock", "fault", "out-of-bounds", "race")]:
            raise RuntimeError(f"{kernel[:60]}: {fatal[0]}")
        return 0


class OnDevice:
    """A CPU tensor that DLPack's readers take for one of CUDA device 0. Its memory is the CPU's."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.ndim = tensor, tensor.ndim

    def __dlpack__(self, **options: Any) -> Any:
        return on_gpu(self.tensor.__dlpack__(**{k: v for k, v in options.items() if k == "max_version"}))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0
