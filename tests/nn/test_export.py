"""Programs that torch.export makes of modules that quantize and multiply: operators of padless, and the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import padless
from padless import moe, nn
from padless.formats import FORMATS, FP8_BLOCK, BlockScaledFormat, BlockScaledTensor

H, WIDTH, E = 128, 160, 3
OFFS = padless.group_offsets([5, 0, 9])


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Quantizer(torch.nn.Module):
    def __init__(self, format: BlockScaledFormat) -> None:
        super().__init__()
        self.format = format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return padless.dequantize(padless.quantize(x, self.format))


class Layer(torch.nn.Module):
    """A layer of quantized weights, which a module keeps as buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("w13", (E, 2 * WIDTH, H)), ("w2", (E, H, WIDTH))):
            w = padless.quantize(normal(*shape), FP8_BLOCK, kind="weight")
            self.register_buffer(name, w.data)
            self.register_buffer(f"{name}_scale", w.scale)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        w13, w2 = (BlockScaledTensor(getattr(self, n), getattr(self, f"{n}_scale"), FP8_BLOCK) for n in ("w13", "w2"))
        return moe.moe(x, ids, weights, w13, w2)


def operators_of(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if "padless" in str(node.target)}


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_quantize(format: BlockScaledFormat) -> None:
    module = Quantizer(format)
    program = torch.export.export(module, (normal(6, H),), strict=False)
    other = normal(6, H, seed=1) * 3
    assert torch.equal(program.module()(other), module(other))


class Parts(torch.nn.Module):
    """The passes of a layer, one after the other."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offs, tokens, inverse = moe.route(ids, E)
        again, rows = moe.route_quantize(x, ids, E, FP8_BLOCK)
        gathered = moe.gather_quantize(x, inverse, padless.MXFP8)
        hidden = moe.activate_quantize(x[tokens], moe.Activation("swiglu"), padless.MXFP4)
        out = moe.combine(x[tokens], inverse, weights, x)
        dy, dweights = moe.combine_backward(x, x[tokens], inverse, weights)
        parts = (rows.data, rows.scale, gathered.data, gathered.scale, hidden.data, hidden.scale)
        return (offs, tokens, inverse, *again, *parts, out, dy, dweights, moe.gather_backward(dy, inverse))


def test_the_passes_of_a_layer() -> None:
    module, ids, weights = Parts(), torch.tensor([[0, 2], [2, 0], [2, 2]]), torch.rand(3, 2)
    program = torch.export.export(module, (normal(3, H), ids, weights), strict=False)
    names = {"route", "route_quantize", "gather_quantize", "activate_quantize", "combine", "combine_backward"}
    assert {f"padless.{name}.default" for name in names} <= operators_of(program)
    given = (normal(3, H, seed=1), torch.tensor([[1, 0], [2, 1], [0, 1]]), weights)
    for got, want in zip(program.module()(*given), module(*given), strict=True):
        bits = [t.flatten().clone().view(torch.uint8) for t in (got, want)]
        assert torch.equal(*bits)


@pytest.mark.parametrize("strict", [False, True])
def test_a_layer_of_quantized_weights(strict: bool) -> None:
    module, ids, weights = Layer(), torch.tensor([[0, 2], [2, 0], [2, 2]]), torch.rand(3, 2)
    program = torch.export.export(module, (normal(3, H), ids, weights), strict=strict)
    assert operators_of(program) == {"padless.moe.default"}
    other, others = normal(3, H, seed=1), torch.tensor([[1, 0], [2, 1], [0, 1]])
    assert torch.equal(program.module()(other, others, weights), module(other, others, weights))


def test_grouped_products_that_quantize_their_operands() -> None:
    """The program reads offs: other groups, and rows of none."""
    module = nn.GroupedLinear(E, H, WIDTH, dtype=torch.bfloat16)
    program = torch.export.export(module, (normal(14, H).bfloat16(), OFFS), strict=False)
    assert "padless.grouped_gemm_.default" in operators_of(program)
    for sizes in ([5, 0, 9], [0, 12, 1]):
        x, offs = normal(14, H, seed=2).bfloat16(), padless.group_offsets(sizes)
        assert torch.equal(program.module()(x, offs)[: sum(sizes)], module(x, offs)[: sum(sizes)])


def test_a_whole_trainable_layer() -> None:
    module = nn.MoE(H, WIDTH, E, 2, dtype=torch.bfloat16)
    program = torch.export.export(module, (normal(6, H).bfloat16(),), strict=False)
    assert {"padless.route.default", "padless.grouped_gemm_.default", "padless.combine.default"} <= operators_of(
        program
    )
    other = normal(6, H, seed=3).bfloat16()
    assert torch.equal(program.module()(other), module(other))


def test_a_bounded_number_of_tokens() -> None:
    module, tokens = nn.MoE(64, 32, 4, 2).eval(), torch.export.Dim("tokens", min=2, max=1024)
    program = torch.export.export(module, (normal(17, 64),), dynamic_shapes=({0: tokens},)).module()
    for count in (2, 5, 17, 1024):
        x = normal(count, 64, seed=count)
        assert torch.equal(program(x), module(x))


@pytest.mark.parametrize("recipe", ["fp8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp8", "bf16"))])
def test_sizes_that_may_all_change(recipe: str) -> None:
    """torch.compile(dynamic=True): outputs and gradients of other numbers of tokens, without another compilation."""
    torch._dynamo.reset()
    module = nn.MoE(64, 32, 4, 2, recipe=recipe)
    compiled = torch.compile(module, backend="aot_eager", dynamic=True)
    for count in (5, 33):
        results = []
        for call in (compiled, module):
            module.zero_grad()
            x = normal(count, 64, seed=count).requires_grad_()
            out = call(x)
            out.backward(normal(count, 64, seed=1))
            results.append([out, x.grad, *(p.grad for p in module.parameters())])
        assert all(torch.equal(got, want) for got, want in zip(*results, strict=True))
        with torch.compiler.set_stance("fail_on_recompile"):
            assert torch.equal(compiled(x), module(x))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_quantize_of_sizes_that_may_all_change(format: BlockScaledFormat) -> None:
    torch._dynamo.reset()
    module = Quantizer(format)
    compiled = torch.compile(module, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (5, 17, 33):
        x = normal(rows, H, seed=rows)
        assert torch.equal(compiled(x), module(x))
