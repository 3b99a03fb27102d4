"""The emulator behind the driver's interface: `grouped_gemm(..., backend="emulator")` ends here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from padless.emulator.emulator import Emulator, LaunchResult
from padless.emulator.run.machine import Machine
from padless.emulator.state.memory import DeviceMemory
from padless.emulator.timing.rates import CHIPS, H200

if TYPE_CHECKING:
    from padless.runtime.driver import Argument, LaunchShape
    from padless.runtime.jit import CompiledKernel
    from padless.runtime.tensor_map import TensorMapSpec


@dataclass(frozen=True)
class Settings:
    """How launches run. `num_sms` is what the device claims, so how many CTAs a persistent kernel gets.
    `raise_on_reports` turns findings into a LaunchError, else they are left in `EmulatedDriver.last_result`; `ignore`
    names kinds of report to leave out; `machine` is what runs a launch (Emulator)."""

    seed: int = 0
    arithmetic: str = "truncate"
    checks: bool = True
    num_sms: int = 2
    raise_on_reports: bool = True
    ignore: tuple[str, ...] = ()
    machine: Callable[..., Machine] = Machine


class EmulatedDriver:
    """A device without a GPU, with the methods of runtime.driver.CudaDriver. Memory is the CPU tensors themselves."""

    kind = "ptx"

    def __init__(self, arch: str = H200.arch) -> None:
        self.arch = arch
        self._local = threading.local()

    @property
    def settings(self) -> Settings:
        return getattr(self._local, "settings", Settings())

    @contextmanager
    def configured(self, **changes: Any) -> Iterator[EmulatedDriver]:
        """Launches inside the block run with other settings: `with driver.configured(seed=3): ...`."""
        before = self.settings
        self._local.settings = replace(before, **changes)
        try:
            yield self
        finally:
            self._local.settings = before

    @property
    def last_result(self) -> LaunchResult | None:
        """What the last launch of this thread found and counted."""
        return getattr(self._local, "last_result", None)

    def num_sms(self, device: int) -> int:
        return self.settings.num_sms

    def load(self, kernel: CompiledKernel, device: int) -> Emulator:
        """Parses and prepares the kernel; raises UnsupportedInstruction here and not in the middle of a launch."""
        emulator = Emulator(kernel.image, name=f"{kernel.entry}.ptx")
        emulator.program(kernel.entry)
        return emulator

    def encode(self, spec: TensorMapSpec) -> bytes:
        """The 128 bytes of a tensor map, in the emulator's own encoding. ValueError where the driver would refuse."""
        from padless.emulator.units import tensor_map

        return tensor_map.encode_tiled(
            spec.data_type, spec.address, spec.dims, spec.strides, spec.box, swizzle=spec.swizzle,
            l2_promotion=spec.l2_promotion,
        )  # fmt: skip

    def prepare(
        self,
        function: Emulator,
        kernel: CompiledKernel,
        shape: LaunchShape,
        arguments: Sequence[Argument],
        tensors: Sequence[torch.Tensor],
    ) -> Callable[..., None]:
        """A launch with everything bound; calling it runs the kernel to its end."""
        values = [a if isinstance(a, bytes) else a[0] for a in arguments]

        def launch(stream: int = 0) -> None:
            settings = self.settings
            emulator = function.with_memory(memory_of(tensors))
            for address in shape.ready:
                if (found := emulator.memory.find(address)) is not None:
                    found.ready = True
            emulator.arithmetic, emulator.checks = settings.arithmetic, settings.checks
            emulator.ignore, emulator.machine = frozenset(settings.ignore), settings.machine
            result = emulator.launch(
                kernel.entry, shape.grid, shape.block, values, cluster=shape.cluster, shared_bytes=kernel.shared_bytes,
                seed=settings.seed, programmatic=shape.programmatic,
            )  # fmt: skip
            self._local.last_result = result
            if settings.raise_on_reports:
                result.raise_on_reports()

        return launch


def memory_of(tensors: Sequence[torch.Tensor]) -> DeviceMemory:
    """Exactly the bytes that these CPU tensors reach, so that one step past an end is out of bounds."""
    spans: list[list[Any]] = []
    for tensor in tensors:
        if tensor.numel():
            reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            start = tensor.data_ptr()
            spans.append([start, start + reach * tensor.element_size(), tensor.untyped_storage()])
    memory = DeviceMemory()
    merged: list[list[Any]] = []
    for span in sorted(spans, key=lambda s: s[0]):
        if merged and span[0] < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], span[1])
        else:
            merged.append(span)
    for start, end, storage in merged:
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        at = start - storage.data_ptr()
        memory.register(whole[at : at + end - start].numpy(), address=start)
    return memory


_DRIVERS = {chip.arch: EmulatedDriver(chip.arch) for chip in CHIPS.values()}
_in_place = threading.local()  # by architecture, the device that stands in for this thread's emulated one


def emulated_driver(arch: str = H200.arch) -> EmulatedDriver:
    """The one emulated device of an architecture, that of a chip, in this process."""
    if arch not in _DRIVERS:
        raise ValueError(f"arch is {arch!r}; allowed: {', '.join(map(repr, _DRIVERS))}")
    found: EmulatedDriver = vars(_in_place).get(arch, _DRIVERS[arch])
    return found


@contextmanager
def standing_in(device: EmulatedDriver, arch: str) -> Iterator[None]:
    """In this block `device` is this thread's emulated device of ``arch``."""
    before = dict(vars(_in_place))
    setattr(_in_place, arch, device)
    try:
        yield
    finally:
        vars(_in_place).clear()
        vars(_in_place).update(before)


def driver_of(backend: str) -> EmulatedDriver:
    """The device that a backend's name asks for: "emulator" is Hopper, "emulator:ARCH" is ARCH."""
    return emulated_driver(*backend.split(":")[1:])
