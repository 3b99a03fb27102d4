"""The layer's operators: registration, fake tensors and whole-graph compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import padless
from padless.moe import Activation, activate_quantize, combine_backward, gather_quantize, moe, ops, route_quantize
from support.moe_cases import combine_problem, draw_ids
from support.moe_layer_problem import PAIRS, draw_layer, pair_name

X = torch.randn(6, 160).bfloat16()
IDS = draw_ids(6, 3, 5, 1)
Y, INVERSE, WEIGHTS, SHARED = combine_problem(6, 3, 40, torch.bfloat16, 2)
DOUT = SHARED.bfloat16()
ACTIVATION = ("swiglu", "alternating", 1.5, 7.0, 1.0)
# torch compares values, so operators are held against their schema with formats whose scales are float32.
CALLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "route": ("route", (IDS, 5)),
    "route of int32": ("route", (IDS.clamp(-9, 9).to(torch.int32), 5)),
    "route nothing": ("route", (IDS[:0], 5)),
    "gather_quantize": ("gather_quantize", (X, INVERSE, "FP8_BLOCK", "", "plain", None)),
    "route_quantize": ("route_quantize", (X, IDS, 5, "FP8_BLOCK", "", "plain", None)),
    "activate_quantize": ("activate_quantize", (X, *ACTIVATION, "FP8_BLOCK", "", "plain", None, None)),
    "activate, weights": ("activate_quantize", (X, *ACTIVATION, "FP8_BLOCK", "", "plain", None, None, torch.randn(6))),
    "activate": ("activate_quantize", (X, *ACTIVATION, "BF16", "", "plain", None, None)),
    "combine": ("combine", (Y, INVERSE, WEIGHTS.nan_to_num(0.0), DOUT, torch.float32)),
    "combine with ones": ("combine", (Y, INVERSE, None, None, torch.bfloat16)),
    "combine_backward": ("combine_backward", (DOUT, Y.nan_to_num(0.0), INVERSE, WEIGHTS.nan_to_num(0.0))),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    operator, arguments = CALLS[name]
    torch.library.opcheck(getattr(torch.ops.padless, operator).default, arguments)


def moe_arguments(pair: Any) -> tuple[Any, ...]:
    """What moe() hands to its operator when it is traced."""
    layer = draw_layer(pair, tokens=6, bias=True, shared=True)
    seen: list[tuple[Any, ...]] = []
    with (
        mock.patch.object(ops, "is_traced", return_value=True),
        mock.patch.object(torch.ops.padless, "moe", lambda *arguments: seen.append(arguments)),
    ):
        layer.run(moe)
    return seen[0]


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_opcheck_of_the_layer(pair: Any) -> None:
    torch.library.opcheck(torch.ops.padless.moe.default, moe_arguments(pair))


@pytest.mark.parametrize("name", ["MXFP8", "MXFP8_E5M2", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_fake_tensors_of_other_formats(name: str, layout: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = torch.tensor(0.01) if name == "NVFP4" else None
    arguments = (X, INVERSE, name, "te" if given is not None else "rceil", layout, given)
    want = torch.ops.padless.gather_quantize(*arguments)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        got = torch.ops.padless.gather_quantize(*fake)
    for one, other in zip(got, want, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view(torch.uint8)


def assert_compiles(function: Callable[..., Any], *arguments: Any) -> None:
    """In one graph, with the eager call's bits."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*arguments), function(*arguments), strict=True):
        assert got.dtype == want.dtype
        assert got.stride() == want.stride()
        assert torch.equal(bits(got), bits(want))


def test_compiled_parts() -> None:
    def parts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offs, tokens, inverse = padless.moe.route(ids, 5)
        again, rows = route_quantize(x, ids, 5, padless.FP8_BLOCK)
        gathered = gather_quantize(x, inverse, padless.MXFP8)
        h = x[tokens]
        hidden = activate_quantize(h, Activation("swiglu"), padless.FP8_BLOCK)
        out = padless.moe.combine(h, inverse, weights, x)
        dy, dweights = combine_backward(x, h, inverse, weights)
        return (offs, tokens, inverse, *again, rows.data, rows.scale, gathered.data, hidden.data, out, dy, dweights)

    assert_compiles(parts, X, IDS, torch.rand(6, 3))


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
def test_compiled_layer(pair: Any) -> None:
    layer = draw_layer(pair, tokens=7, bias=True)
    options = layer.options
    w13, w2 = layer.w13, layer.w2

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor]:
        return (moe(x * 2, ids, weights, w13, w2, **options) + 1,)

    assert_compiles(run, layer.x, layer.ids, layer.weights)
