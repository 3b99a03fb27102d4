"""The judge of results: right ones pass, and every kind of wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from padless import dequantize, grouped_gemm
from padless.testing.judge import attempt, check, describe, float64_rows, outside, row_errors, worst
from padless.testing.operands import make_operands

SIZES = [5, 0, 33]
N, K = 144, 288
PAIRS = [("FP8_BLOCK", "FP8_BLOCK"), ("NVFP4", "NVFP4"), ("BF16", "MXFP4")]


@dataclass
class Contender:
    name: str
    call: Callable[[], Any]
    output: Callable[[], torch.Tensor] | None = None
    tolerance: float = 0.01


@pytest.fixture(scope="module", params=PAIRS, ids=" x ".join)
def operands(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    return make_operands(*request.param, SIZES, N, K, seed=3, device="cpu")


def test_rows_in_float64_by_hand(operands) -> None:  # type: ignore[no-untyped-def]
    a = operands.a if isinstance(operands.a, torch.Tensor) else dequantize(operands.a)
    w = [dequantize(operands.b[g]).double() for g in range(3)]
    wanted = torch.cat([a[:5].double() @ w[0].t(), a[5:].double() @ w[2].t()])
    every = float64_rows(operands.a, operands.b, SIZES, rows=None)
    assert every.rows.tolist() == list(range(38))
    torch.testing.assert_close(every.values, wanted, rtol=1e-12, atol=1e-12)
    some = float64_rows(operands.a, operands.b, SIZES, groups=(2, 2), rows=3)
    assert some.rows.tolist() == [5, 21, 37]
    torch.testing.assert_close(some.values, wanted[[5, 21, 37]], rtol=1e-12, atol=1e-12)
    nothing = float64_rows(operands.a, operands.b, SIZES, groups=(1,))
    assert nothing.rows.numel() == 0
    assert nothing.row_error(torch.zeros(38, N)) == 0.0


def test_the_reference_passes_and_damage_does_not(operands) -> None:  # type: ignore[no-untyped-def]
    out = grouped_gemm(operands.a, operands.b, operands.offs)
    reference = float64_rows(operands.a, operands.b, SIZES)
    assert reference.row_error(out) < 2**-7.5
    swapped = out.clone()
    swapped[[0, 4]] = swapped[[4, 0]]
    assert reference.row_error(swapped) > 1
    lost = out.clone()
    lost[37, 3] = float("nan")
    assert reference.row_error(lost) == math.inf


def test_contenders_are_blamed(operands) -> None:  # type: ignore[no-untyped-def]
    right = grouped_gemm(operands.a, operands.b, operands.offs)
    reference = float64_rows(operands.a, operands.b, SIZES)
    unsampled = next(row for row in range(38) if row not in reference.rows.tolist())
    wrong = right.clone()
    wrong[unsampled] *= 1.05

    def explode() -> None:
        raise RuntimeError("boom\n  second   line")

    contenders = [
        Contender("first", lambda: None, lambda: right),
        Contender("wrong elsewhere", lambda: None, lambda: wrong),
        Contender("tolerated", lambda: None, lambda: wrong, 0.1),
        Contender("raises", explode),
        Contender("raises when read", lambda: None, lambda: right[99]),
        Contender("no result", lambda: None),
    ]
    errors: dict[str, str] = {}
    found, record = check(contenders, reference, errors)
    assert [c.name for c in found] == ["first", "tolerated", "no result"]
    assert set(record["wrong"]) == {"wrong elsewhere"}
    assert record["errors"] == errors
    assert errors["raises"] == "RuntimeError: boom second line"
    assert errors["raises when read"].startswith("IndexError: ")
    # Of operands of their own, contenders are compared with their own reference and not with each other.
    found, record = check(contenders[:2], lambda name: reference, {}, compare_all=False)
    assert [c.name for c in found] == ["first", "wrong elsewhere"]


def test_numbers() -> None:
    expected = torch.tensor([[3.0, 4.0], [0.0, 2.0]], dtype=torch.float64)
    out = torch.tensor([[3.0, 4.5], [0.0, 2.0]])
    assert row_errors(out, expected).tolist() == [0.1, 0.0]
    assert worst(torch.tensor([0.1, float("nan")])) == math.inf
    assert worst(torch.zeros(0)) == 0.0
    assert outside(out, expected, 0.1) == 0
    assert outside(out, expected, 0.09) == 1
    assert outside(out * float("nan"), expected, 1e9) == 4
    assert describe(ValueError("x" * 400)) == "ValueError: " + "x" * 300
    errors: dict[str, str] = {}
    assert attempt("a", lambda: 3, errors) == (True, 3)
    assert attempt("b", lambda: 1 // 0, errors) == (False, None)
    assert list(errors) == ["b"]
