"""Checks results: calls that raise are named in one line, rows are compared with float64, failures are attributed.

The float64 products come from the operands' codes and scales by `dequantize` and torch's product in float64; they share
no code with a kernel, nor with the reference that stands in for one on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.formats import BlockScaledTensor
from padless.quantization.quantize import dequantize
from padless.testing.operands import Activation, rows_of

Record = dict[str, Any]
_SHOWN = 300  # characters of an error
LOSS_LIMIT = 0.0025  # of loss parity: by how much of it a recipe's last loss may be above the one it is compared with
# Rows compared with float64 in a group: its first and last, and some between.
CHECKED_ROWS = 16
_ROWS_AT_ONCE = 8192


def describe(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"


def attempt(name: str, call: Callable[[], Any], errors: dict[str, str]) -> tuple[bool, Any]:
    """(whether the call returned, what); one that raised, or whose kernel did, is named in `errors`."""
    try:
        result = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what a kernel did wrong is found here and attributed to the right contender
    except Exception as error:
        errors[name] = describe(error)
        return False, None
    return True, result


# --- rows ------------------------------------------------------------------------------------------------


def row_errors(out: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """|out - expected| / |expected| of each row (Euclidean norms)."""
    return (out.double() - expected).norm(dim=1) / expected.norm(dim=1)


def worst(errors: torch.Tensor) -> float:
    """The largest; inf for NaN, 0 of nothing."""
    return float(errors.nan_to_num(nan=math.inf, posinf=math.inf).max()) if errors.numel() else 0.0


@dataclass(frozen=True)
class SampledReference:
    """float64 products of some rows of the quantised operands: `values[i]` is row `rows[i]`."""

    rows: torch.Tensor
    values: torch.Tensor

    def row_error(self, out: torch.Tensor) -> float:
        """Largest relative error |out - ref| / |ref| of a sampled row (Euclidean norms); inf for NaN."""
        return worst(row_errors(out[self.rows], self.values))


def values_of(t: Activation, offs: torch.Tensor | None = None) -> torch.Tensor:
    """Values in float64. offs: end offsets of groups, needed where scales are per group of rows."""
    return (t if isinstance(t, torch.Tensor) else dequantize(t, torch.float32, offs=offs)).double()


def float64_rows(
    a: Activation,
    b: BlockScaledTensor,
    sizes: Sequence[int],
    groups: Iterable[int] | None = None,
    rows: int | None = CHECKED_ROWS,
) -> SampledReference:
    """Products of rows of some groups: b (G, N, K), groups of ``sizes`` rows of a (M, K) with plain scales.

    groups: None for every one. rows: at most so many of each, spread from its first to its last; None for all.
    """
    device = b.data.device
    picked, products = [], []
    for group in range(len(sizes)) if groups is None else sorted(set(groups)):
        start, size = sum(sizes[:group]), sizes[group]
        if size:
            index = spread_rows(start, size, rows).to(device)
            picked.append(index)
            products.append(values_of(rows_of(a, index)) @ values_of(b[group]).t())
    if not picked:
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return SampledReference(none, torch.zeros(0, b.data.shape[1], dtype=torch.float64, device=device))
    return SampledReference(torch.cat(picked), torch.cat(products))


def spread_rows(start: int, size: int, most: int | None) -> torch.Tensor:
    """int64 indices of at most ``most`` rows of a group, from its first to its last; of all for None."""
    count = size if most is None else min(size, most)
    return torch.linspace(start, start + max(size - 1, 0), count).round().to(torch.int64)


def largest_row_difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """Largest |x - y| / |y| of a row (Euclidean norms) over all rows; inf for NaN, 0 where both are zero."""
    found = 0.0
    for first in range(0, x.shape[0], _ROWS_AT_ONCE):  # in parts: float32 copies of all rows would be large
        a = x[first : first + _ROWS_AT_ONCE].to(torch.float32)
        b = y[first : first + _ROWS_AT_ONCE].to(torch.float32)
        apart, size = (a - b).norm(dim=1), b.norm(dim=1)
        found = max(found, worst(torch.where(apart == 0, apart, apart / size)))
    return found


def outside(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> int:
    """Elements further from the expected ones than tolerance + tolerance |expected|; NaN is."""
    return int((~((out.double() - expected).abs() <= tolerance + tolerance * expected.abs())).sum())


# --- contenders ------------------------------------------------------------------------------------------


def check(
    contenders: Sequence[Any], reference: Any, errors: dict[str, str], compare_all: bool = True
) -> tuple[list[Any], Record]:
    """Calls every contender once; compares sampled rows with float64, all rows with the first right result.

    contenders: with name, call, output and tolerance, as `padless.bench.peers.Contender`. reference: a SampledReference,
        or of a contender's name. compare_all: False where contenders multiply operands of other formats, so that their
        results differ.

    Returns those that ran and are right, and the record's fields row_error, wrong and errors.
    """
    right, row_error, wrong = [], {}, {}
    anchor: torch.Tensor | None = None
    for contender in contenders:

        def result(contender: Any = contender) -> torch.Tensor | None:
            contender.call()
            return None if contender.output is None else contender.output()

        ran, out = attempt(contender.name, result, errors)
        if not ran:
            continue
        if out is not None:
            of = reference if isinstance(reference, SampledReference) else reference(contender.name)
            error = of.row_error(out)
            if anchor is not None:
                error = max(error, largest_row_difference(out, anchor))
            row_error[contender.name] = error if math.isfinite(error) else None
            if not error <= contender.tolerance:
                limit = contender.tolerance
                wrong[contender.name] = f"is wrong: relative error of a row {error:.3g}, allowed {limit}"
                continue
            anchor = out if anchor is None and compare_all else anchor
        right.append(contender)
    return right, {"row_error": row_error, "wrong": wrong, "errors": errors}
