"""Errors planted in values of products, and which of the two bounds finds each: of elements, or of rows.

In the kernel's place stand float64 products of the same operands, rounded to the output's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch

from padless.reference.gemm import grouped_gemm_reference
from padless.verify.bf16 import fuzz as plain
from padless.verify.fuzz import product_lines, products
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.problem import Draw, Limits, Options
from padless.verify.fuzz.subjects import SUBJECTS

pytestmark = pytest.mark.usefixtures("one_thread")

Bug = Callable[[torch.Tensor], torch.Tensor]
ELEMENTS, ROWS, BOTH = {"float64"}, {"float64: rows"}, {"float64", "float64: rows"}
PROBLEMS = 10


def too_large(part: float) -> Bug:
    return lambda values: values * (1 + part)


def changed(change: Callable[[torch.Tensor], object]) -> Bug:
    """A copy of the values that is changed in place."""

    def bug(values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        change(values)
        return values

    return bug


def one_element(values: torch.Tensor) -> None:
    """Of a median size."""
    values[0, values[0].abs().median(0).indices] *= 1.5


def a_column_of_another(values: torch.Tensor) -> None:
    values[:, 0] = values[:, 1]


def a_row_of_zeros(values: torch.Tensor) -> None:
    values[0] = 0


def a_row_of_another(values: torch.Tensor) -> None:
    values[0] = values[-1]


EXACT: Bug = lambda values: values  # noqa: E731
# Pairs of formats with the kernel's module and the output, and what finds a bug in every problem of the pair.
# Of FP8 tensor cores an element may be off by 2^-8 of its terms' magnitudes and a row by 2^-9 of its size, of a bfloat16
# output 2^-8 of its norm more: 2^-6 is too much for both, 2^-8 for a row of float32 alone. bfloat16 of bfloat16 is no
# bug. One element moves a row that others dominate by less than its bound.
FP8, MX, FP4, BF16 = (
    ("FP8_BLOCK", "FP8_BLOCK", "sm90_fp8", "float32"),
    ("MXFP8", "MXFP8", "sm90_mxfp8", "bfloat16"),
    ("NVFP4", "NVFP4", "sm90_bf16", "float32"),
    ("", "", "", "float32"),
)
PAIRS = (FP8, MX, FP4, BF16)
BUGS: dict[str, tuple[Bug, tuple[set[str], ...]]] = {
    "too large by 2^-6": (too_large(2.0**-6), (BOTH, BOTH, BOTH, BOTH)),
    "too large by 2^-8": (too_large(2.0**-8), (ROWS, set(), BOTH, BOTH)),
    "rounded to bfloat16 first": (lambda values: values.bfloat16().double(), (set(), set(), BOTH, BOTH)),
    "one element half too large": (changed(one_element), (BOTH, ELEMENTS, BOTH, BOTH)),
    "a column of another": (changed(a_column_of_another), (BOTH, BOTH, BOTH, BOTH)),
    "a row of zeros": (changed(a_row_of_zeros), (BOTH, BOTH, BOTH, BOTH)),
    "a row of another": (changed(a_row_of_another), (BOTH, BOTH, BOTH, BOTH)),
}


def drawn(pair: tuple[str, str, str, str], number: int) -> tuple[str, Options]:
    """A problem without NaN and hostile offsets."""
    a, b, module, out = pair
    draw = Draw(f"planted {number}", "emulator")
    draw.limits = Limits(4, 150, 272, 448)
    if not a:
        constants: Options = {"out": out, "n_major": False, "tile": 0}
        call, rest = "plain.grouped_gemm", plain.product_rest(draw, constants)
    else:
        constants = {"a": a, "b": b, "module": module, "out": out, "b_layout": "plain", "tile": 0}
        call, rest = "grouped_gemm", products.shape(draw, constants) | {"a_layout": "plain"}
    fixed = {"nan_row": -1, "nan_group": -1, "hostile": [], "properties": ["near"]}
    return call, constants | rest | fixed


def found_by(
    bug: Bug,
    pair: tuple[str, str, str, str],
    monkeypatch: pytest.MonkeyPatch,
    problems: Iterable[tuple[str, Options]] = (),
) -> set[str]:
    """Bounds that find the bug in every problem, of the pair's ten where no others are given."""

    def call(a: Any, b: Any, offs: torch.Tensor, *, out: Any = None, out_dtype: Any = None, **_: Any) -> torch.Tensor:
        ends, rows = offs.tolist(), a.shape[0]
        if isinstance(a, torch.Tensor):
            values = torch.zeros((rows, b.shape[1]), dtype=torch.float64)
            for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                values[start:end] = a[start:end].double() @ b[group].double().t()
        else:
            values = grouped_gemm_reference(a, b, offs, out_dtype=torch.float64, accumulate="float64")
        out = torch.zeros(values.shape, dtype=out_dtype) if out is None else out
        out[: ends[-1]] = bug(values[: ends[-1]]).to(out.dtype)
        return out

    monkeypatch.setattr(products, "grouped_gemm", call)
    place, found = Place(torch.device("cpu"), "emulator", "sm_90a"), set(BOTH)
    several = (problem for problem in map(partial(drawn, pair), itertools.count()) if sum(problem[1]["sizes"]) > 1)
    for name, options in problems or itertools.islice(several, PROBLEMS):
        SUBJECTS[name].judge(options, place)
        found &= {finding for names in place.judge.verdicts().values() for finding in names}
    return found


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_right_values_are_within_both_bounds(pair: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_by(EXACT, pair, monkeypatch) == set()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_error_is_found(name: str, pair: tuple[str, str, str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    bug, expected = BUGS[name]
    assert expected[PAIRS.index(pair)] <= found_by(bug, pair, monkeypatch)


@pytest.mark.parametrize("name", ["too large by 2^-8", "rounded to bfloat16 first", "one element half too large"])
def test_the_check_of_accuracy_finds_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of long rows of normal values the bound of rows is tighter than of any codes."""
    lines = [("grouped_gemm", o) for o in product_lines.CHECKS["accuracy"][1]("sm_90a") if o["out"] == "float32"]
    lines = [(call, o) for call, o in lines if o["seed"] in (3, 4)]
    assert len(lines) == 4
    assert found_by(EXACT, FP8, monkeypatch, lines) == set()
    assert found_by(BUGS[name][0], FP8, monkeypatch, lines)
