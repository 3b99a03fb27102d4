"""Edge cases of the Mixture-of-Experts layer for ``padless verify``, its operators, and the launches of decoding.

Each check raises AssertionError. `CHECKS` are these by name, with that of `padless.verify.moe` and those of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from padless.formats import FP8_BLOCK, NVFP4, BlockScaledFormat
from padless.kernels.table import kernels_arch
from padless.moe import moe, ops, route
from padless.moe.checks import MAX_TOP_K
from padless.quantization.quantize import dequantize
from padless.runtime.driver import cuda_driver
from padless.verify import epilogue
from padless.verify import moe as layers
from padless.verify.checks import Check
from padless.verify.fuzz.place import Place
from padless.verify.lines import triton_check_of
from padless.verify.moe import Layer, draw_layer, same_bits

EXPERTS, COLUMNS, HIDDEN = 20, 256, 128
DECODED, DECODE_EXPERTS, DECODE_TOP_K, DECODE_COLUMNS = (1, 16, 64), 64, 8, 512
MOST_LAUNCHES = 4
# Norm of the error of a gradient over its norm, against float64 with the dequantized weights: as in the forward pass,
# activations and gradients are rounded to e4m3.
GRADIENT_BOUND = 0.08
# Of the bounds of `padless.verify.moe`: the error of a token's only slot is averaged with no other.
FEW_SLOTS = 1.5


def edges() -> Iterator[tuple[str, torch.Tensor]]:
    """Names and (T, k) ids: no tokens, one expert for all, no expert for any or for some, k of 1 and of 16."""
    generator = torch.Generator().manual_seed(16)

    def distinct(tokens: int, top_k: int) -> torch.Tensor:
        return torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :top_k]

    some = distinct(33, 4)
    some[::3, 1], some[1::3, 0] = EXPERTS, -1
    yield "no tokens", distinct(0, 4)
    yield "one expert gets all", torch.full((131, 1), EXPERTS - 1)
    yield "one expert gets all slots", torch.full((33, 4), 3)
    yield "no id is an expert", torch.full((17, 2), EXPERTS)
    yield "some ids are no expert", some
    yield "k 1", distinct(37, 1)
    yield "k 16", distinct(21, 16)


# --- the layer -------------------------------------------------------------------------------------------


def layers_at_edges(arch: str) -> Iterator[tuple[str, Layer]]:
    """A layer for each format of weights that has kernels on ``arch``, at every edge; on the CPU."""
    for weights, activations, _, options, with_bias in layers.cases(arch):
        sizes = (max(len(ids) for _, ids in edges()), MAX_TOP_K, EXPERTS, COLUMNS, HIDDEN)
        whole = draw_layer(weights, activations, sizes, options, with_bias, 5)
        for name, ids in edges():
            tokens, top_k = ids.shape
            some = replace(whole, x=whole.x[:tokens], weights=whole.weights[:tokens, :top_k].contiguous(), ids=ids)
            yield f"{weights.name} {options}, {name}", some


def check_layer_edges(place: Place) -> None:
    """moe() at every edge is its passes' twins around the GPU's products and right, and so are its gradients."""
    device = str(place.device)
    for name, on_cpu in layers_at_edges(place.arch):
        layer = on_cpu.to(device)
        out = layer.run()
        place.judge.wrong(f"moe() of {name}: shape {tuple(out.shape)}", out.shape != layer.x.shape)
        if len(out):
            place.judge.ask(partial(same_bits, f"moe() of {name}", out, layers.composed(on_cpu, device)))
            last = torch.tensor([len(out) - 1], device=device)
            place.judge.same(f"a token of moe() of {name}", layer.only(last).run(), out[-1:])
        if not ((on_cpu.ids >= 0) & (on_cpu.ids < EXPERTS)).any():
            place.judge.wrong(f"moe() of {name}: tokens without an expert are not 0", out.any())
        else:
            limit = FEW_SLOTS * layers.BOUNDS[layers.activations_of(layer.w13.format, layer.options["activations"])]
            place.judge.ask(partial(layers.judge_error, name, out, on_cpu, limit))
        if layer.w13.format == FP8_BLOCK and set(layer.options) == {"activations"}:
            place.judge.ask(partial(check_gradients, name, on_cpu, device))


def check_gradients(name: str, on_cpu: Layer, device: str) -> None:
    """Gradients of moe() for x, weights and shared, against float64."""
    shared = torch.randn(on_cpu.x.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    dout = torch.randn(on_cpu.x.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    layer = on_cpu.to(device)
    x, weights, added = (t.clone().requires_grad_() for t in (layer.x, layer.weights, shared.to(device)))
    replace(layer, x=x, weights=weights).run(shared=added).backward(dout.to(device))
    exact_x, exact_weights = (t.double().requires_grad_() for t in (on_cpu.x, on_cpu.weights))
    w13, w2 = dequantize(on_cpu.w13).double(), dequantize(on_cpu.w2).double()
    total = torch.zeros(on_cpu.x.shape, dtype=torch.float64)
    for e in range(EXPERTS):
        token, slot = (on_cpu.ids == e).nonzero(as_tuple=True)
        gate, up = (exact_x[token] @ w13[e].t()).chunk(2, dim=1)
        y = (torch.nn.functional.silu(gate) * up) @ w2[e].t()
        total = total.index_add(0, token, y * exact_weights[token, slot, None])
    if total.requires_grad:
        total.backward(dout.double())
    wanted = {"x": (x, exact_x), "top_k_weights": (weights, exact_weights)}
    for part, (got, exact) in wanted.items():
        want = torch.zeros_like(exact) if exact.grad is None else exact.grad
        assert got.grad is not None
        assert got.grad.shape == want.shape, f"gradient of {part}, {name}: shape {tuple(got.grad.shape)}"
        error = float((got.grad.cpu().double() - want).norm() / (want.norm() or 1.0))
        assert error <= GRADIENT_BOUND, f"gradient of {part}, {name}: off by {error:.3f}, allowed {GRADIENT_BOUND}"
    assert added.grad is not None
    same_bits(f"gradient of shared, {name}", added.grad, dout)


# --- operators -------------------------------------------------------------------------------------------


def operators() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator on the device; scales are float32, which opcheck can compare."""
    layer = draw_layer(FP8_BLOCK, None, (6, 3, 5, COLUMNS, HIDDEN), {}, False, 1).to(layers.DEVICE)
    ids = layer.ids.clone()
    inverse = route(ids, 5).inverse
    y = torch.randn(18, COLUMNS, device=layers.DEVICE).bfloat16()
    activation = ("swiglu", "alternating", 1.5, 7.0, 1.0)
    weights, second = ops.packed(layer.w13), ops.packed(layer.w2)
    how = ("FP8_BLOCK", "swiglu", "concatenated", 1.0, None, 0.0, torch.bfloat16, None)
    none = (None,) * 5
    return {
        "route": (ids, 5),
        "route_quantize": (layer.x, ids, 5, "FP8_BLOCK", "", "plain", None),
        "gather_quantize": (layer.x, inverse, "FP8_BLOCK", "", "plain", None),
        "activate_quantize": (y, *activation, "FP8_BLOCK", "", "plain", None, None),
        "combine": (y, inverse, layer.weights, layer.x, torch.float32),
        "combine_backward": (layer.x, y, inverse, layer.weights),
        "moe": (layer.x, ids, layer.weights, *weights, *second, *none, *how),
        "moe_backward": (
            layer.x, layer.x, ids, layer.weights, *weights[:2], *second[:2], "concatenated", None, True
        ),
    }  # fmt: skip


def check_operators() -> str:
    """Every operator keeps torch.library's rules, and the layer compiles to one graph with the eager call's bits."""
    found = operators()
    for name, arguments in found.items():
        torch.library.opcheck(getattr(torch.ops.padless, name).default, arguments)
    layer = draw_layer(FP8_BLOCK, None, (7, 3, 5, COLUMNS, HIDDEN), {}, False, 2).to(layers.DEVICE)
    compiled = torch.compile(partial(_doubled, layer.w13, layer.w2), backend="aot_eager", fullgraph=True)
    given = (layer.x, layer.ids, layer.weights)
    same_bits("compiled moe()", compiled(*given), _doubled(layer.w13, layer.w2, *given).cpu())
    torch._dynamo.reset()
    return f"{len(found)} operators"


def _doubled(w13: Any, w2: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return moe(x * 2, ids, weights, w13, w2) + 1


# --- decoding --------------------------------------------------------------------------------------------


def check_decode() -> str:
    """A layer of at most 64 tokens is one kernel, or four with the products begun before those ahead have ended."""
    for tokens in DECODED:
        sizes = (tokens, DECODE_TOP_K, DECODE_EXPERTS, DECODE_COLUMNS, DECODE_COLUMNS)
        for weights, activations, options, with_bias in decoded(cuda_driver().arch):
            layer = draw_layer(weights, activations, sizes, options, with_bias, tokens).to(layers.DEVICE)
            judge_launches(
                f"{weights.name} {options}, {tokens} tokens", *nodes_of(layer.run), programmatic=_is_programmatic()
            )
    return f"at most {MOST_LAUNCHES} launches"


def decoded(arch: str) -> Iterator[tuple[BlockScaledFormat, Any, dict[str, Any], bool]]:
    """(weights, activations, options, whether with biases) of four launches: plain SwiGLU, and gpt-oss' on Hopper."""
    for weights, activations, _, options, with_bias in layers.cases(arch):
        is_plain = not options and not with_bias and weights != NVFP4
        is_gpt_oss = options == layers.GPT_OSS and activations is torch.bfloat16
        if is_plain or (is_gpt_oss and kernels_arch(arch) == "sm_90a"):
            yield weights, activations, options, with_bias


def _is_programmatic() -> bool:
    from padless.quantization.triton.launches import is_programmatic

    return bool(is_programmatic(torch.device(layers.DEVICE)))


def judge_launches(name: str, kinds: Sequence[str], early: int, *, programmatic: bool) -> None:
    """Raises AssertionError for more than four nodes, one that is no kernel, and of several a product that waits.

    kinds: of a captured layer's nodes. early: how many of them begin before the one ahead has ended.
    """
    assert set(kinds) == {"KERNEL"}, f"{name}: a layer's nodes are {kinds}"
    assert len(kinds) <= MOST_LAUNCHES, f"{name}: {len(kinds)} launches, allowed {MOST_LAUNCHES}"
    if programmatic and len(kinds) > 1:
        assert early >= 2, f"{name}: {early} launches begin early, of two products"


def nodes_of(call: Callable[[], object]) -> tuple[list[str], int]:
    """Kinds of the nodes of a CUDA graph of one call, and how many edges between them are programmatic."""
    from cuda.bindings import driver

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    nodes = _answer(driver.cuGraphGetNodes(raw, _answer(driver.cuGraphGetNodes(raw))[-1]))[0]
    kinds = [str(_answer(driver.cuGraphNodeGetType(node))[0].name).rpartition("_")[2] for node in nodes]
    count = _answer(driver.cuGraphGetEdges(raw))[-1]
    edges_data = _answer(driver.cuGraphGetEdges(raw, count))[2] if count else []
    programmatic = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
    return kinds, sum(int(edge.type) == int(programmatic) for edge in edges_data)


def _answer(found: tuple[Any, ...]) -> tuple[Any, ...]:
    assert int(found[0]) == 0, f"CUDA driver: {found[0]}"
    return found[1:]


# By name; Triton compiles the passes while they run, so each is a check of its own, in parallel with the others.
PASSES: dict[str, Callable[[], str]] = {
    "routing of the MoE layer": triton_check_of("moe.route"),
    "gathers of the MoE layer": triton_check_of("moe.gather_quantize"),
    "activations of the MoE layer": triton_check_of("moe.activate_quantize"),
    "sums of the MoE layer": triton_check_of("moe.combine"),
}
CHECKS: dict[str, Callable[[], str]] = {
    **PASSES,
    "operators of the MoE layer": check_operators,
    "gated epilogues": epilogue.GATES,
    "MoE layer": layers.CHECK,
    "MoE layer at edges": Check(check_layer_edges),
    "decoding by the MoE layer": check_decode,
}
# Those for which nothing is compiled ahead: Triton's kernels alone, or few products.
TRITON_ALONE = (*PASSES, "operators of the MoE layer", "decoding by the MoE layer")
