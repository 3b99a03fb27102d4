"""Gradients of moe() against float64, token by token, and that a token's gradients do not depend on the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, dequantize
from padless.moe import backward, moe
from support.moe_layer_problem import Layer, dense, draw_layer, on_device
from support.training_layer import sqnr, worst_row

LEAST_DB = 22.0  # seen 26.4: x, dout, dZ and H are rounded to e4m3
LARGEST_ROW = 0.12  # seen 0.08


def problem(tokens: int = 23, *, i: int = 144, gate_up: str = "concatenated", seed: int = 0) -> Layer:
    """A layer with a shared expert; some ids are no expert."""
    return draw_layer((FP8_BLOCK, None), tokens=tokens, i=i, shared=True, gate_up=gate_up, seed=seed)


def ragged() -> Layer:
    """Experts of 0, 1, 127, 129 and 0 rows."""
    layer = draw_layer((FP8_BLOCK, None), tokens=257, top_k=1, shared=True)
    order = torch.randperm(257, generator=torch.Generator().manual_seed(1))
    return replace(layer, ids=(2 + (order > 127).long() - (order == 9).long())[:, None])


def dout_of(layer: Layer) -> torch.Tensor:
    """Rows that differ in size by 2^16."""
    g = torch.Generator().manual_seed(7)
    return torch.randn(layer.x.shape, generator=g) * 2.0 ** torch.randint(-8, 9, (len(layer.x), 1), generator=g)


def leaves(layer: Layer, dtype: torch.dtype, needed: str = "xws") -> Layer:
    """The layer with tensors that require grad: x, weights, shared."""
    x, w, s = (
        t.detach().to(dtype).requires_grad_(name in needed)
        for name, t in zip("xws", (layer.x, layer.weights, layer.options["shared"]), strict=True)
    )
    return replace(layer, x=x, weights=w, options=layer.options | {"shared": s})


def gradients(layer: Layer, dout: torch.Tensor, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The result and its gradients."""
    given = leaves(layer, dtype)
    out = given.run(moe)
    out.backward(dout.to(out))
    found = {"out": out, "x": given.x.grad, "weights": given.weights.grad, "shared": given.options["shared"].grad}
    return {name: t.detach().cpu() for name, t in found.items()}


def truth(layer: Layer, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by autograd in float64 of the dequantized weights, an expert at a time."""
    given = leaves(layer, torch.float64)
    w13, w2 = dequantize(layer.w13).double(), dequantize(layer.w2).double()
    out = given.options["shared"]
    for e in range(w13.shape[0]):
        token, slot = torch.nonzero(layer.ids == e, as_tuple=True)
        h = given.x[token] @ w13[e].t()
        if layer.options["gate_up"] == "interleaved":
            gate, up = h.unflatten(1, (-1, 2, 32)).transpose(1, 2).reshape(len(h), 2, -1).unbind(1)
        else:
            gate, up = h.chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[e].t()
        out = out.index_add(0, token, given.weights[token, slot][:, None] * y)
    out.backward(dout.double())
    return {"out": out.detach(), "x": given.x.grad, "weights": given.weights.grad}


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    for name, t in want.items():
        assert sqnr(got[name], t) >= LEAST_DB, (name, sqnr(got[name], t))
    assert worst_row(got["x"], want["x"]) <= LARGEST_ROW, worst_row(got["x"], want["x"])


CASES = {
    "concatenated": lambda: problem(),
    "the epilogue activates": lambda: problem(i=192, seed=2),
    "interleaved": lambda: problem(i=96, gate_up="interleaved", seed=3),
    "ragged": lambda: replace(ragged(), options=ragged().options | {"gate_up": "concatenated"}),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    layer = CASES[name]()
    dout = dout_of(layer)
    got, want = gradients(layer, dout), truth(layer, dout)
    assert sqnr(want["out"], dense(layer)) > 200
    check(got, want)
    assert torch.equal(got["shared"], dout)
    assert (got["weights"][layer.ids < 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_the_gpu(name: str) -> None:
    layer = CASES[name]()
    dout = dout_of(layer)
    got, cpu = gradients(on_device(layer, "cuda"), dout.cuda()), gradients(layer, dout)
    check(got, truth(layer, dout))
    assert worst_row(got["x"], cpu["x"]) <= 0.02


@pytest.mark.parametrize("planted", ["no weights", "scales not turned", "gate for up", "tail counted"])
def test_a_wrong_gradient_is_noticed(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = problem()
    dout = dout_of(layer)
    want = truth(layer, dout)
    original, route = backward.swiglu_backward_quantize, backward.route_quantize

    def differentiate(dh: Any, z: Any, offs: Any, prob: Any, *, gate_up: str) -> Any:
        if planted == "no weights":
            prob = torch.ones_like(prob)
        if planted == "gate for up":
            z = z.roll(z.shape[1] // 2, 1)
        return original(dh, z, offs, prob, gate_up=gate_up)

    def turned(codes: torch.Tensor, scale: torch.Tensor) -> Any:
        flat = scale.reshape(scale.shape[0], scale.shape[2], scale.shape[1])
        return replace(right(codes, scale), scale=flat if planted == "scales not turned" else right(codes, scale).scale)

    def routed(*arguments: Any) -> Any:
        routing, rows = route(*arguments)
        if planted == "tail counted":
            inverse = torch.where(routing.inverse < 0, -1 - routing.inverse, routing.inverse)
            offs = torch.cat([routing.offs[:-1], torch.full_like(routing.offs[-1:], len(routing.tokens))])
            return (offs, routing.tokens, inverse), rows
        return routing, rows

    right = backward.transposed
    monkeypatch.setattr(backward, "swiglu_backward_quantize", differentiate)
    monkeypatch.setattr(backward, "transposed", turned)
    monkeypatch.setattr(backward, "route_quantize", routed)
    with pytest.raises(AssertionError):
        check(gradients(layer, dout), want)


@pytest.mark.parametrize("needed", ["x", "w", "s", "xw"])
def test_what_is_not_needed_is_not_computed(needed: str) -> None:
    """And the others keep their bits."""
    layer = problem()
    dout = dout_of(layer)
    want = gradients(layer, dout)
    given = leaves(layer, torch.float32, needed)
    with mock.patch.object(backward, "transposed", wraps=backward.transposed) as turned:
        given.run(moe).backward(dout)
    assert turned.call_count == {"x": 2, "w": 1, "s": 0, "xw": 2}[needed]
    found = {"x": given.x.grad, "w": given.weights.grad, "s": given.options["shared"].grad}
    for (name, t), wanted in zip(found.items(), ("x", "weights", "shared"), strict=True):
        assert torch.equal(t, want[wanted]) if name in needed else t is None


def test_a_token_does_not_notice_the_others() -> None:
    """Alone, in pieces and permuted: the same bits of gradients."""
    layer = problem(i=192, seed=5)
    dout = dout_of(layer)
    want = gradients(layer, dout)
    for tokens in (torch.tensor([4]), torch.arange(3, 17), torch.randperm(23)):
        got = gradients(layer.only(tokens), dout[tokens])
        for name, t in want.items():
            assert torch.equal(got[name], t[tokens]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_scale_with_the_outputs_gradient(dtype: torch.dtype) -> None:
    """To the bit: a mean over a batch of 16 million tokens is 2^-24 of each one's loss."""
    layer = problem()
    dout = dout_of(layer).clamp(-4, 4) + 0.01
    usual, small = (gradients(layer, given, dtype) for given in (dout, dout * 2.0**-48))
    for name in ("x", "weights", "shared"):
        assert usual[name].abs().amax() > 0
        assert torch.equal(small[name], usual[name] * 2.0**-48), name


def test_dtypes_and_nothing() -> None:
    layer = problem()
    for dtype in (torch.bfloat16, torch.float16):
        got = gradients(layer, torch.ones(layer.x.shape), dtype)
        assert {t.dtype for t in got.values()} == {dtype}
    empty = gradients(layer.only(torch.arange(0)), torch.zeros(0, 160))
    assert empty["x"].shape == (0, 160)
    assert empty["weights"].shape == (0, 3)


def test_the_output_has_the_same_bits() -> None:
    layer = problem(i=192)
    with torch.no_grad():
        want = leaves(layer, torch.float32).run(moe)
    assert torch.equal(gradients(layer, dout_of(layer))["out"], want)
    assert not want.requires_grad


@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ((MXFP8, None), {}),
        ((FP8_BLOCK, torch.bfloat16), {}),
        ((MXFP4, None), {}),
        ((FP8_BLOCK, None), {"bias": True}),
        ((FP8_BLOCK, None), {"limit": 7.0}),
        ((FP8_BLOCK, None), {"gate_up": "alternating"}),
        ((FP8_BLOCK, None), {"activation": "relu2", "gated": False}),
    ],
)
def test_layers_without_a_backward_pass_are_refused(pair: Any, options: dict[str, Any]) -> None:
    layer = draw_layer(pair, tokens=5, **options)
    for name in ("x", "weights"):
        given = replace(layer, **{name: getattr(layer, name).clone().requires_grad_()})
        argument = "top_k_weights" if name == "weights" else name
        with pytest.raises(ValueError, match=rf"{argument} requires grad.*padless\.nn\.Experts.*{argument}\.detach"):
            given.run(moe)


@pytest.mark.parametrize("square", [False, True])
def test_the_second_derivative_is_refused(square: bool) -> None:
    """Whether or not the gradient that comes in requires grad."""
    given = leaves(problem(tokens=6), torch.float32)
    out = given.run(moe)
    with pytest.raises(RuntimeError, match=r"create_graph is True .* can be differentiated once"):
        torch.autograd.grad((out.square() if square else out).sum(), given.x, create_graph=True)


def test_operators() -> None:
    layer = leaves(problem(tokens=6), torch.float32)
    w13, w2 = (t.data.view(torch.uint8) for t in (layer.w13, layer.w2))
    arguments = (torch.randn(6, 160), layer.x.detach(), layer.ids, layer.weights.detach(), w13, layer.w13.scale)
    for needs_x in (False, True):
        more = (w2, layer.w2.scale, "concatenated", None, needs_x)
        torch.library.opcheck(torch.ops.padless.moe_backward.default, (*arguments, *more))


def test_compiled() -> None:
    """In one graph forward and one backward, with the eager call's bits."""
    layer = problem(tokens=7)
    dout = dout_of(layer)
    want = gradients(layer, dout)
    torch._dynamo.reset()
    given = leaves(layer, torch.float32)

    def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        return moe(x, ids, weights, layer.w13, layer.w2, shared=shared)

    out = torch.compile(run, backend="aot_eager", fullgraph=True)(
        given.x, given.ids, given.weights, given.options["shared"]
    )
    out.backward(dout)
    for got, name in ((out, "out"), (given.x.grad, "x"), (given.weights.grad, "weights")):
        assert torch.equal(got, want[name]), name
