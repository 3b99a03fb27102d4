"""Comparison of results: truth values on the device, which are read when a whole batch of problems was launched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from padless.testing.bits import differing
from padless.testing.guarded import GuardedOutput

# Half of the distance of neighbours relative to a number, at most, and of the smallest numbers.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
TINY = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
Late = torch.Tensor | Callable[[], torch.Tensor]  # what is compared with, or what computes it where that is asked for


class Precision(NamedTuple):
    """Bounds on the error of sums of products.

    of_sum: of an element, as part of the sum of its terms' magnitudes. of_row: of a row's norm, as part of its size (see
    `Product`). floor: of an element, added to both. of_norm: of a row's norm, rounding included, as part of the norm
    itself instead, which is tighter for long rows.
    """

    of_sum: float
    of_row: float
    floor: float = 0.0
    of_norm: float | None = None


# FP8 tensor cores keep 13 fractional bits of the largest of 32 terms and the sum, truncating: up to 2^-13 of the largest
# is lost of each. The worst case is 33 times that. Of random signs it is sqrt(33 / 3) times, 2^-11.3 of a row's size
# where one term is most of it, and 2^-12 of rows as they are drawn; a row may have one large element, of millions.
FP8_PRECISION = Precision(2.0**-8, 2.0**-9)
# At least 24 bits of the largest, truncated toward zero with every one of some hundred additions: 2^-17 of all.
FLOAT32_PRECISION = Precision(2.0**-17, 2.0**-14)
# Of bf16 values: the tensor core keeps 25 fractional bits of the largest of 16 products, the reference float64.
BF16_PRECISION = FLOAT32_PRECISION._replace(floor=2.0**-126)


def precision_of(fp8: bool) -> Precision:
    return FP8_PRECISION if fp8 else FLOAT32_PRECISION


@dataclass(frozen=True)
class Product:
    """A product of A and B in float64. sums: of the magnitudes of each element's terms. sizes: (rows,), the root of the
    sum of the squares of all terms of a row, which is its norm where signs are random, and no sum can cancel."""

    values: torch.Tensor
    sums: torch.Tensor
    sizes: torch.Tensor

    def scaled(self, alpha: torch.Tensor) -> Product:
        """The product times a positive number."""
        return Product(*(t * alpha.double() for t in vars(self).values()))


LateProduct = Product | Callable[[], Product]


def exact_product(a: torch.Tensor, b: torch.Tensor) -> Product:
    """A (rows, K) times B (K, columns), both float64; NaN counts as 0 in sizes."""
    squares = a.nan_to_num(0.0).square() @ b.nan_to_num(0.0).square().sum(1)
    return Product(a @ b, a.abs() @ b.abs(), squares.sqrt())


def exact_grouped(a: torch.Tensor, b: torch.Tensor, groups: Iterable[tuple[int, int]]) -> Product:
    """Rows [start, end) of each group of A (M, K) times its B (G, N, K), both float64, one behind the other."""
    none = exact_product(a[:0], b[0].t())
    parts = [none, *(exact_product(a[s:e], b[g].t()) for g, (s, e) in enumerate(groups) if s < e)]
    return Product(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(none)))


def _now(t: Late) -> torch.Tensor:
    return t if isinstance(t, torch.Tensor) else t()


class Judge:
    """Truth values of what is wrong, by problem and by name. any_nan: one NaN is as good as another."""

    def __init__(self, *, any_nan: bool = True) -> None:
        self._any_nan = any_nan
        self._names: list[tuple[int, str]] = []
        self._flags: list[torch.Tensor] = []
        self._known: list[tuple[int, str]] = []
        self._worst: dict[str, list[torch.Tensor]] = {}
        self._problems: dict[int, str] = {}
        self.problem = self.elements = 0

    @contextmanager
    def any_nan(self, allowed: bool = True) -> Iterator[None]:
        """In this block one NaN is as good as another."""
        before, self._any_nan = self._any_nan, self._any_nan or allowed
        yield
        self._any_nan = before

    def now(self, problem: str) -> None:
        """Begins a problem."""
        self.problem += 1
        self._problems[self.problem] = problem

    def wrong(self, name: str, flag: torch.Tensor | bool) -> None:
        """Says that the current problem is wrong where ``flag``, a () bool tensor, is true."""
        if isinstance(flag, bool):
            if flag:
                self._known.append((self.problem, name))
            return
        self._names.append((self.problem, name))
        self._flags.append(flag)

    def same(self, name: str, got: torch.Tensor, want: Late) -> None:
        """All bits are equal, but those of NaN where any will do."""
        want = _now(want)
        self.elements += got.numel()
        if got.shape != want.shape or got.dtype != want.dtype:
            self.wrong(f"{name}: {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}", True)
        elif got.numel() > 0:
            self.wrong(name, differing(got, want, any_nan=self._any_nan).any())

    def near(self, name: str, got: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor, largest: float) -> None:
        """got is within tolerance of exact (float64); NaN where that is. Where it would exceed ``largest``, anything."""
        if got.shape != exact.shape:
            self.wrong(f"{name}: {tuple(got.shape)}, not {tuple(exact.shape)}", True)
        elif got.numel() > 0:
            values = got.double()
            near = (values == exact) | ((values - exact).abs() <= tolerance)  # infinities are equal
            near = torch.where(exact.isnan(), got.isnan(), near | (exact.abs() + tolerance > largest))
            self.wrong(name, ~near.all())

    def written(self, name: str, output: GuardedOutput, valid: int | None = None) -> None:
        """The rows were written, and nothing else; see `GuardedOutput.findings`."""
        for finding, flag in output.findings(valid):
            self.wrong(f"{name}: {finding}", flag)

    def product(self, name: str, got: torch.Tensor, exact: LateProduct, precision: Precision) -> None:
        """got (rows, columns) is a product within both bounds: of each element and of each row.

        Neither replaces the other: a row that is too large by 2^-8 is within the bound of every element, and one
        element that is half too large is within the bound of its row. NaN where ``exact`` is; where the output's dtype
        would overflow anything.
        """
        self.elements += got.numel()
        if got.numel() == 0:
            return
        p = exact if isinstance(exact, Product) else exact()
        unit, tiny = UNIT[got.dtype], TINY[got.dtype] + precision.floor
        largest = 0.98 * torch.finfo(got.dtype).max
        tolerance = p.values.abs() * unit * 1.01 + precision.of_sum * p.sums + tiny
        self.near(name, got, p.values, tolerance.nan_to_num(0.0), largest)
        compared = p.values.abs() + tolerance <= largest  # false for NaN too
        values = torch.where(compared, p.values, 0.0)
        errors = torch.where(compared, got.double() - values, 0.0).norm(dim=1)
        rounding = unit * values.norm(dim=1) + tiny * got.shape[1] ** 0.5
        bound = precision.of_row * p.sizes + rounding
        if precision.of_norm is not None:
            bound = precision.of_norm * values.norm(dim=1)
        parts = torch.where(errors == 0, 0.0, errors / bound)
        self._worst.setdefault(str(got.dtype)[6:], []).append(parts.nan_to_num(nan=math.inf).max())
        self.wrong(f"{name}: rows", ~(parts <= 1.01).all())

    def ask(self, look: Callable[[], int | None]) -> None:
        """Calls what returns how many elements it has compared, or raises AssertionError."""
        try:
            self.elements += look() or 0
        except AssertionError as error:
            self.wrong(str(error), True)

    def outcome(self) -> str:
        """Sentence of what was compared. Waits for the device. Raises AssertionError with what is wrong."""
        found = self.verdicts().items()
        wrong = [f"{self._problems.get(i, '')} {name}".strip() for i, names in found for name in names]
        assert not wrong, f"{len(wrong)} wrong: " + "; ".join(wrong[:8])
        worst = [f"worst row {name} {float(torch.stack(t).max()):.2f} of its bound" for name, t in self._worst.items()]
        return ", ".join([f"{self.elements} elements", *worst])

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


class Discarding(Judge):
    """Discards results, and computes nothing to compare with: for rehearsals, where nothing was launched."""

    def wrong(self, name: str, flag: torch.Tensor | bool) -> None:
        pass

    def written(self, name: str, output: GuardedOutput, valid: int | None = None) -> None:
        pass

    def same(self, name: str, got: torch.Tensor, want: Late) -> None:
        pass

    def product(self, name: str, got: torch.Tensor, exact: LateProduct, precision: Precision) -> None:
        pass

    def ask(self, look: Callable[[], int | None]) -> None:
        pass

    def near(self, name: str, got: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor, largest: float) -> None:
        pass
