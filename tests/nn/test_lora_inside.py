"""Adapters whose B t the product adds in its own launch: one adapter of all rows over FP8_BLOCK experts.

What would convince a sceptic: the result of every rank against the sum written out here, rounded once where the product
adds it and twice where it does not; training and eval with the same bits; result and gradients against autograd in
float64 with the kernels in the emulator, where a row does not depend on the rows around it either, however few they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, grouped_gemm
from padless.moe import gather_quantize, moe, route
from padless.moe.activation import activate
from padless.nn.lora import LoraExperts, inside
from padless.nn.lora.low_rank import Factors, LowRank, down
from padless.reference.gemm import fma_float32
from padless.runtime.devices import backend_on_cpu
from support.lora_layer import LEAST_DB, check, dout_of, module, run, truth
from support.moe_layer_problem import Layer, draw_layer
from support.training_layer import worst_row

PAIR = (FP8_BLOCK, None)
INSIDE = (8, 16, 24, 64)
OUTSIDE = (1, 7, 12, 72, 256)


def first_product(layer: Layer, m: LoraExperts, *, is_rounded_once: bool) -> torch.Tensor:
    """The activated sum of the first projection of every row, in bfloat16."""
    offs, tokens, inverse = route(layer.ids, m.num_experts)
    rows = gather_quantize(layer.x, inverse, FP8_BLOCK, tokens=tokens)
    t = down(layer.x[tokens], [m.a13[m.adapters[0]]], offs, 1, 1.0)[:, : m.rank].float()
    acc = grouped_gemm(rows, layer.w13, offs, out_dtype=torch.float32)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        b = m.b13[m.adapters[0]][expert].detach().float()
        added, scaling = t[start:end] @ b.T, torch.tensor(m.scaling)
        bias = 0.0 if m.bias13 is None else m.bias13[expert].float()
        if is_rounded_once:
            acc[start:end] = fma_float32(added, scaling, acc[start:end]) + bias
        else:
            acc[start:end] = (acc[start:end] + bias).bfloat16().float() + added * scaling
        start = end
    return activate(acc.bfloat16(), m.activation).bfloat16()


class Caught(Exception):
    """Carries what A of the second projection reads."""


def read_by_a2(layer: Layer, m: LoraExperts, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Activated rows of the forward pass under no_grad."""
    from padless.nn.lora import experts, low_rank

    calls: list[torch.Tensor] = []
    right = low_rank.applied

    def applied(rows: torch.Tensor, *others: Any) -> torch.Tensor:
        calls.append(rows)
        return right(rows, *others)

    monkeypatch.setattr(experts.low_rank, "applied", applied)
    with torch.no_grad():
        m(layer.x, layer.ids, layer.weights)
    return calls[1]


@pytest.mark.parametrize("rank", INSIDE + OUTSIDE)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_sums_are_those_that_are_written_here(rank: int, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = draw_layer(PAIR, tokens=40, bias=bias)
    m = module(layer, rank=rank)
    rows = int((layer.ids >= 0).logical_and(layer.ids < 5).sum())
    got = read_by_a2(layer, m, monkeypatch)[:rows]
    assert torch.equal(got, first_product(layer, m, is_rounded_once=rank in INSIDE)[:rows])
    assert not torch.equal(got, first_product(layer, m, is_rounded_once=rank in OUTSIDE)[:rows])


@pytest.mark.parametrize("rank", [16, 40, 72])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate_up": "interleaved", "alpha": 1.702, "limit": 7.0, "up_offset": 1.0},
        {"gate_up": "alternating"},
        {"i": 96},
        {"activation": "relu2", "gated": False},
    ],
    ids=str,
)
def test_training_has_the_bits_of_eval(rank: int, options: dict[str, Any]) -> None:
    """Where SwiGLU is the launch's own, and where it is a pass."""
    layer = draw_layer(PAIR, bias=True, **options)
    m, dout = module(layer, rank=rank, train_biases=True), dout_of(layer)
    got = run(layer, m, dout, None)
    check(got, truth(layer, m, dout, None), LEAST_DB["FP8_BLOCK"])
    with torch.no_grad():
        assert torch.equal(m(layer.x, layer.ids, layer.weights), got["out"])
        if rank == 16:
            torch._dynamo.reset()
            compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
            assert torch.equal(compiled(layer.x, layer.ids, layer.weights), got["out"])
    m.active = None
    with torch.no_grad():
        assert torch.equal(m(layer.x, layer.ids, layer.weights), layer.run(moe))


def test_operators() -> None:
    """Schemas and fake tensors are those of what they compute."""
    layer = draw_layer(PAIR)
    x = layer.x[:, :]
    offs, tokens, inverse = route(layer.ids, 5)
    rows = gather_quantize(x, inverse, FP8_BLOCK, tokens=tokens)
    g = torch.Generator().manual_seed(1)
    t, b = (torch.randn(shape, generator=g).bfloat16() for shape in ((len(tokens), 16), (5, 256, 16)))
    given = (
        rows.data.view(torch.uint8),
        rows.scale,
        layer.w13.data.view(torch.uint8),
        layer.w13.scale,
        None,
        offs,
        t,
        b,
    )
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.padless.low_rank_product, (*given, 2.0), test_utils=utils)
    how = ("concatenated", 1.0, None, 0.0)
    torch.library.opcheck(torch.ops.padless.low_rank_swiglu, (*given, 2.0, *how), test_utils=utils)
    h = torch.randn((9, 256), generator=g).bfloat16()
    quantized = ("swiglu", *how, "FP8_BLOCK", "", "plain", None, None)
    torch.library.opcheck(torch.ops.padless.activate_and_quantize, (h, *quantized), test_utils=utils)


def test_other_weights_and_rows_are_not_taken() -> None:
    layer = draw_layer(PAIR)
    rows = gather_quantize(layer.x, route(layer.ids, 5)[2], FP8_BLOCK)
    factor = torch.zeros(5, 16, 160)
    offs = torch.zeros(5, dtype=torch.int32)

    def taken(operand: Any, w: Any, count: int = 1) -> bool:
        return inside.adds_inside(operand, w, LowRank(Factors((factor,), (), count, 1.0), offs))

    assert taken(rows, layer.w13)
    assert not taken(rows, layer.w13, 2)
    assert not taken(layer.x, layer.w13)
    with backend_on_cpu("emulator:sm_100a"):
        assert not taken(rows, layer.w13)


@pytest.mark.kernels
def test_factors_lie_anywhere() -> None:
    """Transposed, in float32 and at an odd address, as the gradient's factor and slices of a file are."""
    layer = draw_layer(PAIR, h=128, i=64, experts=2, tokens=9)
    layer.ids.remainder_(2)
    offs, tokens, inverse = route(layer.ids, 2)
    rows = gather_quantize(layer.x, inverse, FP8_BLOCK, tokens=tokens)
    g = torch.Generator().manual_seed(5)
    t, factor = torch.randn(len(tokens), 16, generator=g).bfloat16(), torch.randn(2, 128, 16, generator=g).bfloat16()
    odd = torch.empty(factor.numel() + 1, dtype=torch.bfloat16)[1:].view(factor.shape).copy_(factor)
    assert odd.data_ptr() % 16 != 0
    with backend_on_cpu("emulator"):
        want = inside.product(rows, layer.w13, None, offs, t, factor, 2.0)
        for other in (odd, factor.float(), factor.mT.contiguous().mT):
            assert torch.equal(inside.product(rows, layer.w13, None, offs, t, other, 2.0), want)


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("rank", [16, 40])
def test_kernels_in_the_emulator(rank: int) -> None:
    layer = draw_layer(PAIR, tokens=40, bias=True)
    layer.ids[layer.ids == 2] = 3
    m, dout = module(layer, rank=rank), dout_of(layer)
    want = truth(layer, m, dout, None)
    with backend_on_cpu("emulator"):
        got = run(layer, m, dout, None)
        check(got, want, LEAST_DB["FP8_BLOCK"])
        with torch.no_grad():
            assert torch.equal(m(layer.x, layer.ids, layer.weights), got["out"])
            for few in (slice(3, 4), slice(30, 40)):  # of a token, and of so many that groups have few rows
                assert torch.equal(m(layer.x[few], layer.ids[few], layer.weights[few]), got["out"][few])
    assert worst_row(got["out"], want["out"]) < 0.3
