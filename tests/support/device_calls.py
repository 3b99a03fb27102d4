"""Calls whose tensors all lie on one device: every public function, the layer's passes, and layers that train.

A call is made by a device, as torch names it, or by None for tensors that stay where they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import padless
from padless import FP8_BLOCK, MXFP4, MXFP8, moe
from padless.formats import FORMAT_BY_NAME, FORMATS
from padless.kernels.table import BF16, ROUTES
from padless.nn import Experts, GroupedLinear, graphed
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from support import moe_layer_problem, public_calls, training_layer
from support.moe_layer_problem import PAIRS, pair_name
from support.public_calls import GROUPS, OFFS, K, M, N, activation, copied, normal, replaced, weight

Made = Callable[[], Any]


def on(device: str | None, value: Any) -> Any:
    """An argument with its tensors on the device; one that is there twice stays one."""
    moved: dict[int, torch.Tensor] = {}
    return value if device is None else replaced(value, lambda t: moved.setdefault(id(t), copied(t, device)))


def public(name: str, device: str | None) -> Made:
    """What a call without a result writes into its arguments is its result."""
    call = public_calls.PUBLIC[name]
    given = on(device, call.arguments())

    def made() -> Any:
        found = call.function(**given)
        return given if found is None else found

    return made


def product(a: Any, b: Any, offs: torch.Tensor | None, out: bool, device: str | None) -> Made:
    """A product of a pair of formats; where it has an output it is one launch that is remembered."""
    given = {"a": a, "b": b} | ({} if offs is None else {"offs": offs})
    if out:
        given["out"] = torch.zeros((M, N), dtype=torch.bfloat16)
    return partial(padless.gemm if offs is None else padless.grouped_gemm, **on(device, given))


def products(device: str | None) -> dict[str, Made]:
    """Every pair of formats, grouped and dense."""
    found = {}
    for first, second in dict.fromkeys((route.a, route.b) for route in ROUTES if route.operation == "grouped_gemm"):
        a = normal(M, K).bfloat16() if first == BF16 else activation(FORMAT_BY_NAME[first])
        fmt = FORMAT_BY_NAME[second]
        for out in (True, False):
            pair = f"{first} x {second}{', out' if out else ''}"
            found[f"grouped_gemm of {pair}"] = product(a, weight(fmt, GROUPS), OFFS, out, device)
            found[f"gemm of {pair}"] = product(a, weight(fmt), None, out, device)
    return found


def quantizers(device: str | None) -> dict[str, Made]:
    x, w = on(device, [normal(M, K), normal(GROUPS, N, K)])
    found: dict[str, Made] = {}
    for fmt in FORMATS:
        for kind, values in (("activation", x), ("weight", w)):
            found[f"quantize {kind} to {fmt.name}"] = partial(padless.quantize, values, fmt, kind=kind)
    seed = on(device, torch.tensor(7))
    found["quantize_nvfp4_stochastic"] = partial(quantize_nvfp4_stochastic, x, seed=seed)
    found["random_hadamard"] = partial(random_hadamard, x, 5)
    return found


def passes(device: str | None) -> dict[str, Made]:
    """The layer's passes, each by itself, on few slots and on many."""
    found: dict[str, Made] = {}
    for tokens in (M, 700):
        rows, ids, prob = normal(tokens, K).bfloat16(), torch.arange(2 * tokens).view(tokens, 2) % GROUPS, None
        tokens_of, inverse = (t.contiguous() for t in moe.route(ids, GROUPS)[1:])
        y, prob = normal(2 * tokens, K).bfloat16(), normal(tokens, 2)
        rows, ids, prob, inverse, tokens_of, y = on(device, [rows, ids, prob, inverse, tokens_of, y])
        calls = {
            "route": partial(moe.route, ids, GROUPS),
            "route_quantize": partial(moe.route_quantize, rows, ids, GROUPS, FP8_BLOCK),
            "gather_quantize": partial(moe.gather_quantize, rows, inverse, MXFP8),
            "activate_quantize": partial(moe.activate_quantize, rows, moe.Activation("swiglu"), MXFP4),
            "combine": partial(moe.combine, y, inverse, prob),
            "combine_backward": partial(moe.combine_backward, rows, y, inverse, prob),
            "gather_backward": partial(moe.gather_backward, y, inverse),
        }
        found |= {f"{name}, {tokens} tokens": call for name, call in calls.items()}
    return found


def layers(device: str | None) -> dict[str, Made]:
    """`padless.moe.moe` in every pair of formats, and its gradients."""
    found: dict[str, Made] = {}
    for pair in PAIRS:
        layer = moe_layer_problem.draw_layer(pair, bias=True, shared=True)
        layer = layer if device is None else moe_layer_problem.on_device(layer, device)
        found[f"moe of {pair_name(pair)}"] = partial(layer.run, moe.moe)
    plain = moe_layer_problem.draw_layer(PAIRS[0])
    plain = plain if device is None else moe_layer_problem.on_device(plain, device)

    def gradients() -> list[torch.Tensor]:
        x, weights = (t.detach().clone().requires_grad_() for t in (plain.x, plain.weights))
        out = moe.moe(x, plain.ids, weights, plain.w13, plain.w2)
        torch.autograd.backward(out.float().square().sum())
        return [x.grad, weights.grad]  # type: ignore[list-item]

    return found | {"moe with gradients": gradients}


def trained(
    device: str | None, in_graphs: bool = False, recipes: tuple[str, ...] = tuple(training_layer.EVERY_RECIPE)
) -> dict[str, Made]:
    """Forward and backward passes of layers by every recipe."""
    found: dict[str, Made] = {}
    problem = training_layer.layer(tokens=40, hidden=128, intermediate=128)
    for name in recipes:
        recipe = training_layer.EVERY_RECIPE[name]
        experts = Experts(128, 128, problem.w13.shape[0], recipe=recipe, dtype=torch.bfloat16)
        linear = GroupedLinear(GROUPS, K, N, recipe=recipe, dtype=torch.bfloat16)
        generator = torch.Generator().manual_seed(3)
        for parameter in (*experts.parameters(), *linear.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / 16)
        inputs = on(device, [problem.x.bfloat16(), problem.index, problem.prob])
        rows = on(device, [normal(M, K).bfloat16(), OFFS])
        for kind, layer, given in (("Experts", experts, inputs), ("GroupedLinear", linear, rows)):
            layer = layer if device is None else layer.to(device)
            if in_graphs:
                sample = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
                found[f"{kind} in graphs, {name}"] = partial(stepped, graphed(layer, *sample), layer, given)
            else:
                found[f"{kind}, {name}"] = partial(stepped, layer, layer, given)
    return found


def stepped(call: Any, layer: torch.nn.Module, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and all gradients."""
    layer.zero_grad()
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in given]
    out = call(*leaves)
    torch.autograd.backward(out.float().square().sum())
    return [out, *(t.grad for t in (*leaves, *layer.parameters()) if t.grad is not None)]


def every_call(device: str | None, *, trains: bool = True) -> dict[str, Made]:
    """All but those in CUDA graphs."""
    found = {name: public(name, device) for name in public_calls.PUBLIC}
    for made in (products, quantizers, passes, layers, *((trained,) if trains else ())):
        found |= made(device)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a result, in order."""
    found: list[torch.Tensor] = []
    value = (dict(value), getattr(value, "row", None)) if hasattr(value, "keys") else value
    replaced(value, lambda t: (found.append(t), t)[1])
    return found
