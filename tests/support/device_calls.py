"""Calls whose tensors all lie on one device: every public function, the layer's passes, and layers that train.

A call is made by a device, as torch names it, or by None for tensors that stay where they are made.
"""

from __future__ import annotations

import threading
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
from support.public_calls import GROUPS, OFFS, K, M, N, activation, copied, normal, replaced, same, weight

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
        experts = Experts(128, 128, problem.w13.shape[0], recipe=recipe, dtype=torch.bfloat16, keep_codes=in_graphs)
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


def every_call(device: str | None) -> dict[str, Made]:
    """All but those in CUDA graphs."""
    found = {name: public(name, device) for name in public_calls.PUBLIC}
    for made in (products, quantizers, passes, layers, trained):
        found |= made(device)
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a result, in order."""
    found: list[torch.Tensor] = []
    value = (dict(value), getattr(value, "row", None)) if hasattr(value, "keys") else value
    replaced(value, lambda t: (found.append(t), t)[1])
    return found


# --- on two GPUs -------------------------------------------------------------------------------------------

_CYCLES = 50_000_000  # that the second GPU's usual stream sleeps: more than a call takes
# What looks at values, or is no launch: it cannot be captured.
NOT_CAPTURED = {*public_calls.PUBLIC, "moe with gradients"} - {
    "grouped_gemm", "grouped_gemm_wgrad", "grouped_gemm_wgrad of rows", "grouped_gemm_quant", "quantize_rows_columns",
    "swiglu_backward_quantize", "quantize_weight_both", "scaled_grouped_mm",
}  # fmt: skip


def bits_of(call: Made) -> list[torch.Tensor] | str:
    """The tensors of a call's result on the CPU, or why there is none. The seed of all GPUs is the same at each call."""
    torch.cuda.manual_seed_all(5)
    try:
        return [t.detach().cpu() for t in tensors_of(call())]
    except ValueError as error:
        return f"ValueError: {error}"


def in_a_thread(call: Made) -> list[torch.Tensor] | str:
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(bits_of(call))
            if torch.cuda.current_device() != 0:
                found[0] = f"cuda:{torch.cuda.current_device()} was current in the thread"
        except BaseException as error:
            found.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def on_a_side_stream(call: Made) -> list[torch.Tensor] | str:
    """Beside the second GPU's usual stream, which sleeps: what is launched there comes too late."""
    usual, side = torch.cuda.default_stream(1), torch.cuda.Stream("cuda:1")
    with torch.cuda.stream(usual):
        torch.cuda._sleep(_CYCLES)
    with torch.cuda.stream(side), torch.cuda.device(0):
        found = bits_of(call)
    torch.cuda.synchronize(1)
    return found


def captured(call: Made) -> list[torch.Tensor] | str:
    torch.cuda.synchronize(1)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream("cuda:1")
    with torch.cuda.graph(graph, stream=side), torch.cuda.device(0):
        result = call()
    graph.replay()
    torch.cuda.synchronize(1)
    return [t.detach().cpu() for t in tensors_of(result)]


WAYS: dict[str, Callable[[Made], list[torch.Tensor] | str]] = {
    "first": bits_of, "again": bits_of, "once more": bits_of, "on a side stream": on_a_side_stream,
    "in a thread": in_a_thread, "captured": captured,
}  # fmt: skip


def wrong_on_the_second(name: str, first: Made, second: Made) -> list[str]:
    """What is wrong with a call whose tensors are on cuda:1 while cuda:0 is current, against the same on cuda:0."""
    torch.cuda.set_device(0)
    want, found = bits_of(first), []
    for way, made in WAYS.items():
        trains = name.startswith(("Experts", "GroupedLinear"))
        if way == "captured" and (isinstance(want, str) or trains or name in NOT_CAPTURED):
            continue
        try:
            got = made(second)
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
        if torch.cuda.current_device() != 0:
            found.append(f"{name}, {way}: cuda:{torch.cuda.current_device()} was current afterwards")
            torch.cuda.set_device(0)
        found += _difference(f"{name}, {way}", got, want)
    return found


def wrong_in_graphs(recipe: str) -> list[str]:
    """What is wrong with graphs of layers on cuda:1, made behind those of cuda:0, against calls of layers on cuda:0."""
    found = []
    torch.cuda.set_device(0)
    trained("cuda:0", in_graphs=True, recipes=(recipe,))
    want, replayed = trained("cuda:0", recipes=(recipe,)), trained("cuda:1", in_graphs=True, recipes=(recipe,))
    for (name, first), second in zip(want.items(), replayed.values(), strict=True):
        for _ in range(2):
            found += _difference(f"{name} in graphs", bits_of(second), bits_of(first))
            if torch.cuda.current_device() != 0:
                found.append(f"{name} in graphs: cuda:{torch.cuda.current_device()} was current afterwards")
                torch.cuda.set_device(0)
    return found


def _difference(where: str, got: list[torch.Tensor] | str, want: list[torch.Tensor] | str) -> list[str]:
    if isinstance(got, str) or isinstance(want, str):
        both = [text.replace("cuda:1", "cuda:0") if isinstance(text, str) else "a result" for text in (got, want)]
        return [] if both[0] == both[1] else [f"{where}: {both[0][:300]}; on cuda:0 {both[1][:300]}"]
    if len(got) != len(want):
        return [f"{where}: {len(got)} tensors and not {len(want)}"]
    others = [i for i, (one, other) in enumerate(zip(got, want, strict=True)) if not same(one, other)]
    return [f"{where}: other bits in tensors {others} of {len(want)}"] if others else []
