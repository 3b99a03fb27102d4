"""Places for problems: the device, outputs, graphs and threads there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from padless.runtime.choices import BackendName
from padless.testing.bits import bits
from padless.testing.guarded import GUARD_ROWS, GuardedOutput
from padless.testing.operands import moved
from padless.testing.timing import capture
from padless.verify.fuzz.judge import Discarding, Judge

Item = TypeVar("Item")


@dataclass
class Place:
    """A device, a backend, and the judge of what is computed there. ``arch``: of the kernels, "" for none.

    part: (number, of how many) of a check's problems that are made here.
    """

    device: torch.device
    backend: BackendName
    arch: str
    judge: Judge = field(default_factory=Judge)
    part: tuple[int, int] = (0, 1)
    _last: tuple[Any, Any] = (None, None)

    @property
    def is_rehearsal(self) -> bool:
        return isinstance(self.judge, Discarding)

    def some(self, problems: Sequence[Item]) -> Sequence[Item]:
        """Those of a check's problems that are made here."""
        return problems[self.part[0] :: self.part[1]]

    def once(self, key: Any, compute: Callable[[], Item]) -> Item:
        """``compute``'s result, or that of the last call where the key is the same."""
        if self._last[0] != key:
            self._last = (key, compute())
        found: Item = self._last[1]
        return found

    def put(self, t: Any) -> Any:
        return moved(t, self.device)

    def output(
        self, rows: int | tuple[int, ...], columns: int, dtype: torch.dtype, gap: int = 0, guard: int | None = None
    ) -> GuardedOutput:
        """An output of poison; fewer guard rows where what is stored is no tile of a GPU."""
        guard = (GUARD_ROWS if self.device.type == "cuda" else 4) if guard is None else guard
        return GuardedOutput(rows, columns, dtype, self.device, gap=gap, guard=guard)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def times(self, count: int) -> range:
        """Repetitions of a call that asks for nothing new: one in a rehearsal."""
        return range(1 if self.is_rehearsal else count)

    @contextmanager
    def no_wait(self) -> Iterator[None]:
        """In this block torch raises where something waits for the GPU."""
        if self.device.type != "cuda":
            yield
            return
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def replayed(self, calls: Callable[[], object], targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Captures calls in a CUDA graph, copies ``sources`` into operands, and replays it; elsewhere calls again."""
        with self.no_wait():
            calls()
        replay = capture(calls, self.device).replay if self.device.type == "cuda" else calls
        for target, source in zip(targets, sources, strict=True):
            bits(target).copy_(bits(source))
        replay()

    def in_threads(self, work: Callable[[int], None], count: int) -> None:
        """work(0), work(1), .. in threads, each with a stream of its own; elsewhere one after the other."""

        def in_stream(index: int) -> None:
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(stream):
                work(index)
                stream.synchronize()

        if self.device.type != "cuda":
            list(map(work, range(count)))
            return
        self.synchronize()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(in_stream, range(count)))

    @property
    def has_kernels(self) -> bool:
        return self.backend != "reference"

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def ends(self, ends: list[int]) -> torch.Tensor:
        """int32 numbers on the device. From pinned memory: any other copy would wait for all that was launched."""
        numbers = torch.tensor(ends, dtype=torch.int32)
        if self.device.type != "cuda":
            return numbers
        return numbers.pin_memory().to(self.device, non_blocking=True)


def place_of(backend: BackendName, gpu: int = 0) -> Place:
    """The place of "cuda", "reference", "emulator" or "emulator:sm_100a". Raises ValueError where it is not here.

    gpu: the index of the GPU for "cuda".
    """
    from padless.kernels.table import kernels_arch
    from padless.runtime.devices import device_of

    if backend == "reference":
        return Place(torch.device("cpu"), backend, "")
    device = torch.device("cuda", gpu) if backend == "cuda" else torch.device("cpu")
    if backend == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend is 'cuda' and torch sees no CUDA GPU; allowed here: 'reference', 'emulator'")
    driver = device_of(backend, torch.empty(0, device=device))
    return Place(device, backend, kernels_arch(driver.arch))


def reserve(place: Place) -> None:
    """Takes memory from the GPU's driver at once, for torch to hand out: each later request to the driver would wait for
    all that runs, that of other processes too.
    """
    if place.device.type == "cuda":
        small = [torch.empty(1 << 19, dtype=torch.uint8, device=place.device) for _ in range(256)]
        large = torch.empty(3 << 29, dtype=torch.uint8, device=place.device)
        del small, large
