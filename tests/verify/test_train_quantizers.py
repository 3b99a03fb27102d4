"""Errors planted in the quantizers of training, next to their definitions in torch, and the check finds each.

On a CPU the calls are the definitions, so what is planted is all that can differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.testing.bits import bits
from padless.verify import train_quantizers
from padless.verify.train_quantizers import CHECKS

CHECK = CHECKS["training quantizers agree"]

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem of rows, three times, one of weights, and one dtype."""
    monkeypatch.setattr(train_quantizers, "_PROBLEMS", [((0, 1, 17, 32, 127, 0), 4, 144)] * 3)
    monkeypatch.setattr(train_quantizers, "_WEIGHTS", [(2, 127, 257)])
    monkeypatch.setattr(train_quantizers, "_STOCHASTIC", [(33, 272)])
    monkeypatch.setattr(train_quantizers, "_DTYPES", [torch.bfloat16])


def one_bit(t: torch.Tensor) -> torch.Tensor:
    """The last element's lowest bit is another, in place."""
    bits(t)[tuple(size - 1 for size in t.shape)] ^= 1
    return t


def codes(q: Any) -> Any:
    return replace(q, data=one_bit(q.data.view(torch.uint8)).view(q.data.dtype))


def scales(q: Any) -> Any:
    return replace(q, scale=one_bit(q.scale))


def padding(q: Any) -> Any:
    """Of MN-major scales: behind the last row."""
    whole = q.scale.as_strided((q.scale.stride(1), q.scale.shape[1]), q.scale.stride())
    if len(whole) > len(q.scale):
        whole[-1, -1] = 3.0
    return q


def strides(q: Any) -> Any:
    return replace(q, scale=q.scale.contiguous())


def second(change: Change) -> Change:
    return lambda found: (found[0], change(found[1]))


def first(change: Change) -> Change:
    return lambda found: (change(found[0]), found[1])


def of(field: str, change: Change) -> Change:
    return lambda found: replace(found, **{field: change(getattr(found, field))})


# Call, what is wrong in its results, and where that is said.
BUGS: dict[str, tuple[str, Change, str]] = {
    "a code of a row": ("quantize_rows_columns", first(codes), "rows and columns [^;]*output 0"),
    "a scale of a row": ("quantize_rows_columns", first(scales), "rows and columns [^;]*output 1"),
    "padding of scales": ("quantize_rows_columns", first(padding), "rows and columns [^;]*output 1"),
    "strides of scales": ("quantize_rows_columns", first(strides), "rows and columns [^;]*output 1: strides"),
    "a code of a column": ("quantize_rows_columns", second(codes), "rows and columns [^;]*output 2"),
    "a scale of a column": ("quantize_rows_columns", second(scales), "rows and columns [^;]*output 3"),
    "a start": (
        "quantize_rows_columns",
        second(lambda c: replace(c, starts=one_bit(c.starts))),
        "rows and columns [^;]*output 4",
    ),
    "a code of dZ": ("swiglu_backward_quantize", of("dz_rows", codes), "swiglu [^;]*output 0"),
    "a code of dZ transposed": ("swiglu_backward_quantize", of("dz_columns", codes), "swiglu [^;]*output 2"),
    "a scale of the hidden rows": ("swiglu_backward_quantize", of("hidden_columns", scales), "swiglu [^;]*output 5"),
    "a sum": (
        "swiglu_backward_quantize",
        of("dprob", lambda t: None if t is None else one_bit(t)),
        "swiglu [^;]*output 8",
    ),
    "a code of a transposed weight": ("quantize_weight_both", second(codes), "weight [^;]*output 2"),
    "a code rounded stochastically": ("quantize_nvfp4_stochastic", codes, "stochastic rounding [^;]*output 0"),
    "a rotated value": ("random_hadamard", one_bit, "Hadamard [^;]*output 0"),
}


def test_nothing_is_wrong_with_the_definitions() -> None:
    assert int(CHECK.on("reference").split()[0]) > 10_000


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_error_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other call, so that neither a repetition nor the definition next to it has the same."""
    call, change, where = BUGS[name]
    right, calls = getattr(train_quantizers, call), 0

    def wrong(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = right(*args, **options)
        return change(found) if calls % 2 else found

    monkeypatch.setattr(train_quantizers, call, wrong)
    with pytest.raises(AssertionError, match=f"wrong: {where}"):
        CHECK.on("reference")


def test_sizes_of_the_first_call_are_seen_at_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that keeps what it read at first."""
    right, seen = train_quantizers.quantize_rows_columns, {}

    def stale(x: torch.Tensor, offs: torch.Tensor, **options: Any) -> Any:
        return right(x, seen.setdefault(offs.data_ptr(), offs.clone()), **options)

    monkeypatch.setattr(train_quantizers, "quantize_rows_columns", stale)
    monkeypatch.setattr(train_quantizers, "_PROBLEMS", ())
    monkeypatch.setattr(train_quantizers, "range", lambda count: (), raising=False)
    with pytest.raises(AssertionError, match="a graph's replay: output"):
        CHECK.on("reference")
