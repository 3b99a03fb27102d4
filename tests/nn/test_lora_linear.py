"""LoraGroupedLinear against float64, and without an adapter against the bits of grouped_gemm.

What would convince a sceptic: result and every gradient against autograd in float64 of dequantized weights, per row for
x, with groups of 0, 1, 127 and 129 rows and rows of no group; switched off, the bits of the product alone; a planted
fault is seen.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, dequantize, group_offsets, grouped_gemm, quantize
from padless.nn import LoraGroupedLinear
from padless.nn.lora import base, frozen
from support.training_layer import sqnr, worst_row

SIZES, N, K = (129, 0, 1, 127), 96, 160
# Limits of formats' rounding, those of the tests of LoraExperts.
PAIRS = [(FP8_BLOCK, None, 21.0), (MXFP8, None, 21.0), (NVFP4, None, 9.0), (MXFP4, torch.bfloat16, 36.0)]
PARAMETERS = pytest.mark.parametrize(("format", "activations", "least"), PAIRS)


def made(format: Any, activations: Any, **options: Any) -> LoraGroupedLinear:
    g = torch.Generator().manual_seed(1)
    weight = quantize(torch.randn(len(SIZES), N, K, generator=g) / K**0.5, format, kind="weight")
    bias = nn.Parameter(torch.randn(len(SIZES), N, generator=g))
    found = LoraGroupedLinear(weight, bias=bias, activations=activations, **({"rank": 5} | options))
    with torch.no_grad():
        for name in found.adapters:
            for p in (found.a[name], found.b[name]):
                p.copy_(torch.randn(p.shape, generator=g) / p.shape[2] ** 0.5)
    return found


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x with rows of no group, which are NaN, the groups, and a gradient that is zero where no group is."""
    g = torch.Generator().manual_seed(2)
    rows = sum(SIZES)
    x, dy = (torch.randn(rows + 3, n, generator=g).bfloat16() for n in (K, N))
    x[rows:], dy[rows:] = torch.nan, 0.0
    return x, group_offsets(torch.tensor(SIZES)), dy


def results(m: LoraGroupedLinear) -> dict[str, torch.Tensor]:
    x, offs, dy = drawn()
    m.zero_grad()
    x.requires_grad_()
    y = m(x, offs)
    y.backward(dy)
    found = {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
    return found | {n: found[n][: sum(SIZES)] for n in ("y", "x")}


def truth(m: LoraGroupedLinear) -> dict[str, torch.Tensor]:
    x, _, dy = drawn()
    w = dequantize(m.weight).double()
    x = x[: sum(SIZES)].double().requires_grad_()
    p = {n: t.detach().double().requires_grad_() for n, t in m.named_parameters() if "." not in n or m.active in n}
    delta = m.scaling * p[f"b.{m.active}"] @ p[f"a.{m.active}"]
    rows = x.split(SIZES)
    y = torch.cat([r @ (w[i] + delta[i]).T + p["bias"][i] for i, r in enumerate(rows)])
    y.backward(dy[: sum(SIZES)].double())
    return {"y": y.detach(), "x": x.grad} | {n: t.grad for n, t in p.items()}


def least_of(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    return min(float(sqnr(got[n], t)) for n, t in want.items())


@PARAMETERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients(format: Any, activations: Any, least: float, dtype: torch.dtype) -> None:
    m = made(format, activations, dtype=dtype, adapters=("one", "two"), alpha=3.0)
    for name in m.adapters:
        m.active = name
        got, want = results(m), truth(m)
        assert least_of(got, want) >= least
        for rows in ("x", "y"):
            assert worst_row(got[rows], want[rows]) <= 4 * 10 ** (-least / 20)


@PARAMETERS
def test_without_an_adapter(format: Any, activations: Any, least: float) -> None:
    del least
    m, (x, offs, _) = made(format, activations), drawn()
    rows = x[: sum(SIZES)]
    scale = torch.ones(()) if format == NVFP4 else None
    operand = rows if activations is not None else quantize(rows, format, global_scale=scale)
    m.active = None
    m.bias = None
    assert torch.equal(m(rows, offs), grouped_gemm(operand, m.weight, offs))


def test_a_fault_is_seen() -> None:
    m = made(MXFP4, torch.bfloat16)
    want, right, right_gradients, right_call = truth(m), base.Factors, frozen.factor_gradients, frozen.call

    def without_dx(name: str, *given: Any) -> Any:  # the one sum that is not scaled
        is_dx = name == "low_rank_up" and given[4] == 1.0
        return given[-1] if is_dx else right_call(name, *given)

    for module, name, wrong in (
        (base, "Factors", lambda a, b, *others: right(tuple(t.roll(1, 0) for t in a), b, *others)),
        (base, "Factors", lambda a, b, count, scaling: right(a, b, count, scaling * 1.1)),
        (frozen, "factor_gradients", lambda dy, rows, t, dt, *given: right_gradients(dy, rows, t, dt * 1.1, *given)),
        (frozen, "call", without_dx),
    ):
        with mock.patch.object(module, name, wrong):
            assert least_of(results(m), want) < 36.0


def test_states() -> None:
    """Codes are in no state dict; dropout acts in training alone; moved modules keep types of codes."""
    m, (x, offs, _) = made(FP8_BLOCK, None, dropout=0.5), drawn()
    x = x[: sum(SIZES)]
    assert set(m.state_dict()) == {"bias", "a.default", "b.default"}
    assert not torch.equal(m(x, offs), m(x, offs))
    m.eval()
    assert torch.equal(m(x, offs), m(x, offs))
    assert m.to(torch.float32).weight.data.dtype == torch.float8_e4m3fn


def test_refusals() -> None:
    m, (x, offs, _) = made(FP8_BLOCK, None), drawn()
    with pytest.raises(ValueError, match="x must be"):
        m(x[:, :-16], offs)
    m.active = "other"
    with pytest.raises(ValueError, match="active"):
        m(x, offs)
    for word, wrong in {
        "rank": [0], "adapters": ["one", ("a.b",), ("",), ("keys",), 3], "dtype": [torch.half],
        "alpha": ["8", None, float("nan")], "dropout": [None, 1.0], "activations": ["FP8_BLOCK", torch.half, 3],
    }.items():  # fmt: skip
        for value in wrong:
            with pytest.raises(ValueError, match=word):
                made(FP8_BLOCK, **({"activations": None} | {word: value}))
    with pytest.raises(ValueError, match="weight must be"):
        LoraGroupedLinear(torch.randn(2, 32, 32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias must be"):
        LoraGroupedLinear(m.weight, bias=torch.randn(3))
    with pytest.raises(ValueError, match="bias must be"):
        LoraGroupedLinear(m.weight, bias=torch.zeros(len(SIZES), N, dtype=torch.bool))


@PARAMETERS
@pytest.mark.parametrize("active", ["default", None])
def test_rows_of_no_group_have_no_gradient(format: Any, activations: Any, least: float, active: str | None) -> None:
    """Memory that was not written there would make gradients of a layer in front NaN."""
    del least
    m, (x, offs, dy) = made(format, activations), drawn()
    m.active = active
    x.requires_grad_()
    m(x, offs).backward(dy)
    assert not x.grad[sum(SIZES) :].any()


def test_an_output_may_be_written_to() -> None:
    m, (x, offs, _) = made(FP8_BLOCK, None), drawn()
    m.active = None
    m(x.requires_grad_(), offs).add_(1)[: sum(SIZES)].sum().backward()
    assert x.grad[: sum(SIZES)].any()


@pytest.mark.parametrize("active", ["default", None])
def test_offsets(active: str | None) -> None:
    m, (x, offs, _) = made(FP8_BLOCK, None), drawn()
    m.active, rows = active, slice(sum(SIZES))
    assert torch.equal(m(x, offs.long())[rows], m(x, offs)[rows])
    for wrong in (offs[:3], torch.cat([offs, offs[-1:]]), offs.float(), offs.tolist()):
        with pytest.raises(ValueError, match="offs"):
            m(x, wrong)


def test_autocast_changes_no_bit() -> None:
    m = made(MXFP4, torch.bfloat16)
    want = results(m)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(m)
    assert all(torch.equal(got[name], t) for name, t in want.items())
