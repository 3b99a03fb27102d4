"""Activations of the epilogue: what names one, and two that are added for the time of a test, in every kernel's store.

What would convince a sceptic: an activation with a gate and one without, neither of which the library has, are added by
a function in device/activation.cuh, a function in reference/activation.py and a row, as CONTRIBUTING says, and nothing
else; then every bit of the kernels in the emulator is the reference's. A store without the function's call gives others.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterable

import pytest
import torch

from padless import epilogue as definition
from padless.epilogue import ACTIVATIONS, GATE_UP, Epilogue
from padless.formats import FP8_BLOCK, MXFP8
from padless.kernels.epilogue_launch import prelude_of
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16 import host_quant as sm90_bf16_quant
from padless.kernels.sm90_fp8 import host_quant as sm90_fp8_quant
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from padless.kernels.sm100_grouped import host_quant as sm100_grouped_quant
from padless.reference import activation as reference
from padless.runtime import jit
from support import sm90_quant_cases as sm90
from support import sm100_quant as sm100
from support.quant_cases import plant

HEADER, BEFORE = "device/activation.cuh", "// gate = ACTIVATION of gate and up"
# Name, whether it has a gate, the device function and its twin: no exponential, so that every bit is stated.
ADDED = {
    "reglu": (
        True,
        "__device__ float reglu(float gate, float up) { return __fmul_rn(gate > 0.0f ? gate : 0.0f, up); }\n",
        lambda gate, up, epilogue: torch.where(gate > 0, gate, 0.0) * up,
    ),
    "squared": (
        False,
        "__device__ float squared(float sum, float) { return __fmul_rn(sum, sum); }\n",
        lambda sums, same, epilogue: sums * sums,
    ),
}
SIZES = (33, 0, 9)


MODULES = {
    "sm90_fp8": sm90_fp8_quant,
    "sm90_bf16": sm90_bf16_quant,
    "sm90_mxfp8": sm90_mxfp8_quant,
    "sm100_grouped": sm100_grouped_quant,
}
SLOW = pytest.mark.slow
QUICK = {("sm90_bf16", "swiglu"), ("sm90_fp8", "squared"), ("sm100_grouped", "reglu")}


def in_every_kernel(names: Iterable[str]) -> list[object]:
    pairs = itertools.product(MODULES, names)
    return [pair if pair in QUICK else pytest.param(*pair, marks=SLOW) for pair in pairs]


def add(monkeypatch: pytest.MonkeyPatch, name: str, kernel: str) -> None:
    """The three steps."""
    has_gate, function, twin = ADDED[name]
    plant(monkeypatch, MODULES[kernel], HEADER, BEFORE, function + BEFORE)
    monkeypatch.setattr(reference, name, twin, raising=False)
    monkeypatch.setitem(definition.ACTIVATIONS, name, has_gate)


def check(kernel: str, name: str, order: str) -> None:
    """A product whose sums are rounded to bfloat16, activated and multiplied, every byte against the reference."""
    what = Epilogue(activation=name, gate_up=order, d_dtype=torch.float32, gate_in_bf16=True, prob=True)
    mx = dataclasses.replace(what, row_format=MXFP8, scale_rule="rceil")
    if kernel == "sm90_fp8":
        epilogue = dataclasses.replace(what, row_format=FP8_BLOCK, bias=True)
        sm90.check(sm90_fp8_quant, sm90.Case(SIZES, 256), epilogue)
    elif kernel == "sm90_bf16":
        n = 192 if order == "interleaved" else 224
        problem = sm90.PairCase(SIZES, n, 160, plain=sm90_bf16, pair=("BF16", "MXFP4"))
        sm90.check(sm90_bf16_quant, problem, dataclasses.replace(what, bias=True))
    elif kernel == "sm90_mxfp8":
        sm90.check(sm90_mxfp8_quant, sm90.PairCase(SIZES, 192, plain=sm90_mxfp8), mx)
    else:
        sm100.check(sm100.Problem("MXFP8", SIZES, 320), mx, None)


@pytest.mark.parametrize(("kernel", "name"), in_every_kernel(ACTIVATIONS))
def test_every_row(kernel: str, name: str) -> None:
    check(kernel, name, "concatenated")


@pytest.mark.parametrize(("kernel", "name"), in_every_kernel(ADDED))
def test_one_more(kernel: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, name, kernel)
    check(kernel, name, "alternating" if kernel == "sm90_bf16" else "concatenated")


@SLOW
@pytest.mark.parametrize("kernel", MODULES)
def test_one_more_of_runs(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "reglu", kernel)
    check(kernel, "reglu", "interleaved")


@pytest.mark.parametrize("kernel", [name if name == "sm90_fp8" else pytest.param(name, marks=SLOW) for name in MODULES])
def test_a_store_that_leaves_it_out_is_noticed(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an activation without a gate: the sums themselves are stored."""
    add(monkeypatch, "squared", kernel)
    plant(monkeypatch, MODULES[kernel], HEADER, "gate[e] = ACTIVATION(gate_sum, up_sum);", "gate[e] = gate_sum;")
    with pytest.raises(AssertionError, match="wrong bytes"):
        check(kernel, "squared", "concatenated")


def test_a_row_names_a_function_and_its_twin() -> None:
    text = jit.sources()[HEADER]
    for name in ACTIVATIONS:
        assert re.search(rf"__device__ __forceinline__ float {name}\(float \w+, float ?\w*\)", text), name
        assert list(inspect.signature(getattr(reference, name)).parameters)[2:] == ["epilogue"], name


@pytest.mark.parametrize("order", GATE_UP)
def test_kind_and_order_in_one_word(order: str) -> None:
    """The names that there were before: the same value, hence the same kernel."""
    one, two = (Epilogue(d_dtype=torch.float32, **how) for how in (
        {"activation": f"swiglu_{order}"}, {"activation": "swiglu", "gate_up": order},
    ))  # fmt: skip
    assert one == two
    assert hash(one) == hash(two)
    assert prelude_of(one) == prelude_of(two)
    assert f"#define GLU GLU_{order.upper()}\n" in prelude_of(one)


def test_an_activation_without_a_gate_keeps_the_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(definition.ACTIVATIONS, "squared", False)
    epilogue = Epilogue(d_dtype=torch.float32, activation="squared")
    assert (epilogue.is_glu, epilogue.out_columns(96), epilogue.gate_and_up_apart) == (False, 96, False)
    assert "#define GLU GLU_NONE\n" in prelude_of(epilogue)
    with pytest.raises(ValueError, match=r"gate_rule is .*; allowed: None without a gate"):
        Epilogue(d_dtype=torch.float32, activation="squared", gate_rule=definition.GateRule())
