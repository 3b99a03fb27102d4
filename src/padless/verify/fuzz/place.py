"""Places for problems: the device, what is said against results, outputs between guards; no wait for the device.

A judgement is one truth value on the device. It is asked for when a whole batch of problems has been launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from padless.runtime.choices import BackendName
from padless.testing.guarded import POISON

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BYTE = 0xA5  # poison of outputs of bytes, which have no NaN to spare


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bit patterns of t as integers, without a copy."""
    return t.view(_BITS[t.element_size()])


class Judge:
    """Truth values of what is wrong, by problem and by name."""

    def __init__(self) -> None:
        self._names: list[tuple[int, str]] = []
        self._flags: list[torch.Tensor] = []
        self._known: list[tuple[int, str]] = []
        self.problem = 0

    def wrong(self, name: str, flag: torch.Tensor | bool) -> None:
        """Says that the current problem is wrong where ``flag``, a () bool tensor, is true."""
        if isinstance(flag, bool):
            if flag:
                self._known.append((self.problem, name))
            return
        self._names.append((self.problem, name))
        self._flags.append(flag)

    def same(self, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """All bits are equal, but that any NaN of floating point is as good as another."""
        if got.shape != want.shape or got.dtype != want.dtype:
            self.wrong(f"{name}: {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}", True)
        elif got.numel() > 0:
            differ = bits(got) != bits(want)
            if got.element_size() > 1 and got.is_floating_point():
                differ = differ & ~(got.isnan() & want.isnan())
            self.wrong(name, differ.any())

    def near(self, name: str, got: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor, largest: float) -> None:
        """got is within tolerance of exact (float64); NaN where that is. Where it would exceed ``largest``, anything."""
        if got.shape != exact.shape:
            self.wrong(f"{name}: {tuple(got.shape)}, not {tuple(exact.shape)}", True)
        elif got.numel() > 0:
            near = (got.double() - exact).abs() <= tolerance
            near = torch.where(exact.isnan(), got.isnan(), near | (exact.abs() + tolerance > largest))
            self.wrong(name, ~near.all())

    def verdicts(self) -> dict[int, list[str]]:
        """Names of what is wrong, by problem. Waits for the device; then everything is forgotten."""
        found: dict[int, list[str]] = {}
        for problem, name in self._known:
            found.setdefault(problem, []).append(name)
        if self._flags:
            flags = [flag.to(self._flags[0].device) for flag in self._flags]  # sequences use several GPUs
            for wrong, (problem, name) in zip(torch.stack(flags).tolist(), self._names, strict=True):
                if wrong:
                    found.setdefault(problem, []).append(name)
        self._names, self._flags, self._known = [], [], []
        return found


@dataclass
class Place:
    """A device, a backend, and the judge of what is computed there. ``arch``: of the kernels, "" for none."""

    device: torch.device
    backend: BackendName
    arch: str
    judge: Judge = field(default_factory=Judge)

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


class Guarded:
    """A (rows, columns) output of poison inside of more poison: guard rows before and behind, and a gap after each row.

    gap: bytes between the rows. Floating-point outputs are full of a NaN that no arithmetic makes; bytes of one number.
    """

    def __init__(
        self, place: Place, rows: int, columns: int, dtype: torch.dtype, gap: int = 0, guard: int | None = None
    ) -> None:
        size = dtype.itemsize
        kind, self._poison = (torch.uint8, _BYTE) if size == 1 else POISON[size]
        guard = (256 if place.device.type == "cuda" else 4) if guard is None else guard
        self._guard, self._rows, self._columns = guard, rows, columns
        shape = (guard + rows + guard, columns + gap // size)
        self._whole = torch.full(shape, self._poison, dtype=kind, device=place.device)
        self.out = self._whole.view(dtype)[guard : guard + rows, :columns]

    def check(self, judge: Judge, name: str, valid: int, *, anything: bool = False) -> None:
        """Rows [0, valid) were written, every element of them, and nothing else; anything: not even that is asked."""
        left = self._whole == self._poison
        region = left[self._guard : self._guard + (self._rows if anything else valid), : self._columns]
        if not anything and self._whole.element_size() > 1:
            judge.wrong(f"{name}: elements of valid rows were not written", region.any())
        region.fill_(True)
        judge.wrong(f"{name}: something was written outside of the valid rows", ~left.all())
