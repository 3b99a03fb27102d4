"""Activations against float64, and what they do with Inf, NaN and arguments that do not go together."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from padless.moe import Activation
from padless.moe.activation import activate, gelu, sigmoid
from support.moe_layer_problem import exact_activation
from support.ragged import ROOT

DOCS = ROOT / "docs" / "moe.md"


def units_off(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest distance in units of the last place of float32."""
    unit = torch.exp2(torch.frexp(exact.abs()).exponent.double() - 24)
    return float(((got.double() - exact).abs() / unit).max())


def test_sigmoid_and_gelu() -> None:
    x = torch.linspace(-80, 80, 200_001)
    assert units_off(sigmoid(x), 1 / (1 + (-x.double()).exp())) < 4
    exact = torch.nn.functional.gelu(x.double(), approximate="tanh")
    assert (gelu(x).double() - exact).abs().max() < 1e-6 * 80


KINDS: list[dict[str, Any]] = [
    {"gate_up": "concatenated"},
    {"gate_up": "interleaved"},
    {"gate_up": "alternating", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
    {"activation": "geglu", "gate_up": "alternating", "limit": 2.0},
    {"activation": "relu2"},
    {"activation": "gelu"},
    {"activation": "silu"},
]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_activations(options: dict[str, Any]) -> None:
    x = torch.randn(33, 192) * 5
    o = dict(options)
    got = activate(x, Activation(o.pop("activation", "swiglu"), **o))
    exact = exact_activation(x.double(), options)
    assert got.dtype == torch.float32
    assert ((got.double() - exact).abs() <= 1e-6 * (exact.abs() + 1)).all()


@pytest.mark.parametrize("kind", ["silu", "gelu", "relu2"])
def test_infinities(kind: str) -> None:
    """A NaN stays, Inf stays Inf, and -Inf has the product's value: -Inf times the sigmoid's least."""
    x = torch.tensor([[float("nan"), float("inf"), 0.0, -0.0, -1e4]])
    y = activate(x, Activation(kind))[0]
    assert y[0].isnan()
    assert y[1] == float("inf")
    assert (y[2:4] == 0).all()
    assert y[4].abs() < 1e-30


def test_limits_keep_nan() -> None:
    x = torch.tensor([[float("nan"), 1.0, 9.0, float("nan")]])
    y = activate(x, Activation("swiglu", "alternating", limit=7.0))
    assert y.isnan().all()


def test_out_columns() -> None:
    assert Activation().out_columns(12) == 6
    assert Activation("relu2").out_columns(7) == 7
    with pytest.raises(ValueError, match="multiple of 64"):
        Activation(gate_up="interleaved").out_columns(96)
    with pytest.raises(ValueError, match="multiple of 2"):
        Activation().out_columns(7)


def test_the_examples_of_the_documentation_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec("".join(blocks), names)
    assert names["x"].grad.shape == (200, 512)
    assert names["out"].shape == (200, 512)
    assert names["out"].dtype == torch.bfloat16
    assert names["out"].isfinite().all()
