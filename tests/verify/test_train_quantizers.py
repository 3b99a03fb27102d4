"""Errors planted in the quantizers of training, next to their definitions in torch, and the check finds each.

On a CPU the calls are the definitions, so what is planted is all that can differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from padless.testing.bits import bits
from padless.verify.fuzz import quantizers, training
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import check_of
from padless.verify.run import QUANTIZER_CHECKS

pytestmark = pytest.mark.usefixtures("one_thread")

CALLS = ("quantize_rows_columns", "swiglu_backward_quantize", "quantize_weight_both", "quantize_nvfp4_stochastic")


def few(call: str, arch: str) -> list[Options]:
    """The fixed problems of one dtype, but those of many groups."""
    lines = (o for o in SUBJECTS[call].lines(arch) if o["dtype"] == "bfloat16")
    return [o for o in lines if o.get("k", 0) <= 272 and sum(o.get("sizes", [])) < 1000]


def checked(call: str) -> str:
    return check_of(call, partial(few, call)).on("reference")


Change = Callable[[Any], Any]


def one_bit(t: torch.Tensor) -> torch.Tensor:
    """The last element's lowest bit is another, in place."""
    if t.numel():
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
    "a code of a row": ("quantize_rows_columns", first(codes), "0 data"),
    "a scale of a row": ("quantize_rows_columns", first(scales), "0 scale"),
    "padding of scales": ("quantize_rows_columns", first(padding), "0 scale"),
    "strides of scales": ("quantize_rows_columns", first(strides), "0 scale: strides"),
    "a code of a column": ("quantize_rows_columns", second(codes), "1 data"),
    "a scale of a column": ("quantize_rows_columns", second(scales), "1 scale"),
    "a start": ("quantize_rows_columns", second(of("starts", one_bit)), "1 starts"),
    "a code of dZ": ("swiglu_backward_quantize", of("dz_rows", codes), "dz_rows data"),
    "a code of dZ transposed": ("swiglu_backward_quantize", of("dz_columns", codes), "dz_columns data"),
    "a scale of the hidden rows": ("swiglu_backward_quantize", of("hidden_columns", scales), "hidden_columns scale"),
    "a sum": ("swiglu_backward_quantize", of("dprob", lambda t: None if t is None else one_bit(t)), "dprob"),
    "a code of a transposed weight": ("quantize_weight_both", second(codes), "1 data"),
    "a code rounded stochastically": ("quantize_nvfp4_stochastic", codes, "rounded data"),
    "a rotated value": ("random_hadamard", one_bit, "rotated"),
    "strides of a code": (
        "quantize_weight_both",
        second(lambda q: replace(q, data=q.data.mT.contiguous().mT)),
        "1 data: strides",
    ),
}


def test_nothing_is_wrong_with_the_definitions() -> None:
    for call in CALLS:
        assert int(checked(call).split()[0]) > 10_000


def test_all_of_them_are_checks_of_verify() -> None:
    every: Any = QUANTIZER_CHECKS.values()
    problems = [call for check in every for call, _ in check.calls.args[0]]
    assert sorted(problems) == sorted([*CALLS, "quantize"])
    assert all(SUBJECTS[call].lines("sm_90a") for call in problems)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_error_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every other call, so that neither a repetition nor the definition next to it has the same."""
    call, change, where = BUGS[name]
    module: Any = training if call.startswith("swiglu") else quantizers
    right, calls = getattr(module, call), 0

    def wrong(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        found = right(*args, **options)
        return change(found) if calls % 2 else found

    monkeypatch.setattr(module, call, wrong)
    subject = "quantize_nvfp4_stochastic" if call == "random_hadamard" else call
    with pytest.raises(AssertionError, match=f"the definition's bits: {where}"):
        checked(subject)


def test_what_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last column's codes are what the memory held."""
    right, calls = quantizers.quantize_weight_both, 0

    def wrong(w: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        found, transposed = right(w)
        kept = torch.empty(found.data.shape, dtype=torch.uint8)
        kept[..., :-1] = found.data.view(torch.uint8)[..., :-1]
        return (replace(found, data=kept.view(found.data.dtype)) if calls % 2 else found), transposed

    monkeypatch.setattr(quantizers, "quantize_weight_both", wrong)
    with pytest.raises(AssertionError, match="the definition's bits: 0 data"):
        checked("quantize_weight_both")


@pytest.mark.parametrize("call", ["quantize_rows_columns", "swiglu_backward_quantize"])
def test_sizes_of_the_first_call_are_seen_at_a_replay(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that keeps what it read at first."""
    module: Any = training if call.startswith("swiglu") else quantizers
    right = getattr(module, call)
    seen: dict[int, torch.Tensor] = {}

    def stale(*args: torch.Tensor, **options: Any) -> Any:
        offs = next(t for t in args if t is not None and t.dtype == torch.int32)
        kept = seen.setdefault(offs.data_ptr(), offs.clone())
        return right(*(kept if t is offs else t for t in args), **options)

    monkeypatch.setattr(module, call, stale)
    replayed = [o for o in SUBJECTS[call].lines("sm_90a") if "replay" in o["properties"]]
    with pytest.raises(AssertionError, match="a replay with new values"):
        check_of(call, lambda arch: replayed).on("reference")
