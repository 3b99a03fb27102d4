"""Layers of frozen experts with adapters: points, `padless.nn.LoraExperts` of random factors, torch's own, float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from padless.bench.cases.problems.decoding import GPT_OSS, MODELS
from padless.bench.cases.problems.layer import PLAIN_SWIGLU, LayerPoint, LayerProblem, make_layer
from padless.formats import FORMAT_BY_NAME, FP8_BLOCK, BlockScaledTensor
from padless.nn.lora import LoraExperts
from padless.quantization.quantize import dequantize
from padless.testing.judge import values_of

Part = Literal["forward", "step", "decode", "model"]
RANK, ALPHA = 16, 32.0
_EXPERTS_AT_ONCE = 8  # that are dequantized together
_CHECKED_TOKENS = 6


@dataclass(frozen=True)
class AdapterPoint(LayerPoint):
    """A layer, or ``layers`` of them, under one question. format: of the weights. adapters: that tokens choose among."""

    format: str
    part: Part
    adapters: int = 1
    layers: int = 1


def _point(model: str, part: Part, tokens: int, adapters: int = 1, layers: int = 1) -> AdapterPoint:
    experts, top_k, hidden, intermediate, format = (
        (32, *MODELS["gpt-oss-120b"][1:]) if model == "gpt-oss-20b" else MODELS[model]
    )
    return AdapterPoint(model, tokens, experts, top_k, hidden, intermediate, format, part, adapters, layers)


def grid() -> list[AdapterPoint]:
    """Nine points; 128 experts with 8 adapters and none are more groups than are allowed, so that they have 7."""
    models = ("Qwen3-30B", "gpt-oss-120b")
    return [
        *(_point(model, "forward", tokens) for model in models for tokens in (2048, 8192)),
        *(_point(model, "step", 8192) for model in models),
        _point("gpt-oss-20b", "decode", 16, adapters=8),
        _point("Qwen3-30B", "decode", 16, adapters=7),
        _point("gpt-oss-120b", "model", 8192, layers=36),
    ]


def make_problem(point: AdapterPoint, seed: int, device: str | torch.device) -> LayerProblem:
    """A layer of random values; gpt-oss' gate and biases where the weights are not FP8_BLOCK."""
    is_fp8 = point.format == FP8_BLOCK.name
    format, activation = FORMAT_BY_NAME[point.format], PLAIN_SWIGLU if is_fp8 else GPT_OSS
    return make_layer(point, seed, device, format, activation, biases=not is_fp8)


def with_adapters(problem: LayerProblem, names: tuple[str, ...], seed: int) -> LoraExperts:
    """The layer's codes under adapters of rank 16 whose A and B are normal, so that they change the result."""
    activations = None if problem.w13.format is FP8_BLOCK else torch.bfloat16
    layer = LoraExperts(
        problem.w13, problem.w2, bias13=problem.bias13, bias2=problem.bias2, activation=problem.activation,
        activations=activations, rank=RANK, alpha=ALPHA, adapters=names,
    )  # fmt: skip
    generator = torch.Generator(problem.x.device).manual_seed(seed)
    with torch.no_grad():
        for factors, scale in ((layer.a13, 1.0), (layer.b13, 0.25), (layer.a2, 1.0), (layer.b2, 0.25)):
            for p in factors.values():
                p.normal_(generator=generator).mul_(scale / p.shape[2] ** 0.5)
    return layer


def without_bf16(problem: LayerProblem) -> LayerProblem:
    """The same problem without the values that the codes were made of, which are as large as everything else."""
    nothing = problem.x.new_empty(0)
    return replace(problem, w13_bf16=nothing, w2_bf16=nothing)


def dequantized(w: BlockScaledTensor) -> torch.Tensor:
    """The weights in bfloat16, a few experts at a time."""
    parts = range(0, w.data.shape[0], _EXPERTS_AT_ONCE)
    return torch.cat([dequantize(w[first : first + _EXPERTS_AT_ONCE], torch.bfloat16) for first in parts])


def checked_tokens(problem: LayerProblem) -> list[int]:
    """A few tokens from the first to the last."""
    last = problem.x.shape[0] - 1
    return torch.linspace(0, last, min(_CHECKED_TOKENS, last + 1)).round().long().tolist()


def expected(
    problem: LayerProblem, layer: LoraExperts, tokens: list[int], adapter_of: list[str | None]
) -> torch.Tensor:
    """(len(tokens), H) float64 of the layer's codes and adapters; adapter_of: a name for each of these tokens."""
    result = []
    for t, name in zip(tokens, adapter_of, strict=True):
        total = torch.zeros(problem.point.hidden, dtype=torch.float64)
        for e, weight in zip(problem.ids[t].tolist(), problem.weights[t].tolist(), strict=True):
            h = _projection(
                layer.w13, layer.bias13, layer.a13, layer.b13, layer.scaling, e, name, problem.x[t].double()
            )
            y = _projection(
                layer.w2, layer.bias2, layer.a2, layer.b2, layer.scaling, e, name, problem.activated(h).double()
            )
            total += weight * y.cpu()
        result.append(total)
    return torch.stack(result)


def _projection(
    w: BlockScaledTensor, bias: torch.Tensor | None, a: torch.nn.ParameterDict, b: torch.nn.ParameterDict,
    scaling: float, expert: int, name: str | None, row: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    y = values_of(w[expert]).to(row.device) @ row
    if bias is not None:
        y = y + bias[expert].detach().double()
    if name is not None:
        y = y + scaling * (b[name][expert].detach().double() @ (a[name][expert].detach().double() @ row))
    return y


def torch_layer(
    problem: LayerProblem, layer: LoraExperts, *, compiled: bool
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(x, weights) -> output with the same adapter's parameters, by torch in bfloat16 over dequantized weights.

    compiled: what is between the grouped products, by torch.compile.
    """
    p, name = problem.point, layer.adapters[0]
    w13, w2 = dequantized(problem.w13), dequantized(problem.w2)

    def between(h: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        h = h + layer.scaling * delta
        return problem.activated(h if bias is None else h + bias).to(torch.bfloat16)

    def summed(
        y: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None, weights: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        y = y + layer.scaling * delta
        y = y if bias is None else y + bias
        of_tokens = y[inverse].view(-1, p.top_k, p.hidden).float() * weights[:, :, None]
        return of_tokens.sum(dim=1).to(torch.bfloat16)

    if compiled:
        torch._dynamo.reset()
        between, summed = torch.compile(between, dynamic=False), torch.compile(summed, dynamic=False)

    def product(rows: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(rows, w.transpose(-2, -1), offs=offs)

    def low_rank(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return product(product(rows, a, offs), b, offs)

    def forward(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        flat = problem.ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        offs = torch.histc(flat.float(), bins=p.experts, min=0, max=p.experts - 1).cumsum(0).to(torch.int32)
        biases = [None if b is None else b[flat[order]].to(torch.bfloat16) for b in (problem.bias13, problem.bias2)]
        rows = x[order // p.top_k]
        hidden = between(product(rows, w13, offs), low_rank(rows, layer.a13[name], layer.b13[name], offs), biases[0])
        delta = low_rank(hidden, layer.a2[name], layer.b2[name], offs)
        return summed(product(hidden, w2, offs), delta, biases[1], weights, inverse)

    return forward
