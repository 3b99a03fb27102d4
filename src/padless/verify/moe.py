"""Checks of ``padless verify`` for the Mixture-of-Experts layer: its passes, edges, operators, launches of decoding.

Each raises AssertionError. `CHECKS` are these by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from padless.kernels.table import kernels_arch
from padless.moe import moe, ops, route
from padless.runtime.driver import cuda_driver
from padless.testing.bits import same_bits
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.whole_layer import GPT_OSS, Layer, cases_of, edge_lines, line_of
from padless.verify.lines import EPILOGUES, check_of, triton_check_of

DEVICE = "cuda"
DECODED, DECODE_EXPERTS, DECODE_TOP_K, DECODE_COLUMNS = (1, 16, 64), 64, 8, 512
MOST_LAUNCHES = 4


def _layer(options: Options) -> Layer:
    return Layer(options, place_of("cuda" if DEVICE == "cuda" else "reference"))


# --- operators -------------------------------------------------------------------------------------------


def operators() -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator on the device; scales are float32, which opcheck can compare."""
    layer = _layer(line_of("FP8_BLOCK", "FP8_BLOCK", (6, 3, 5, 256, 128), 1))
    x, ids, top_k_weights = layer.operands.x, layer.operands.ids, layer.operands.weights
    inverse = route(ids, 5).inverse
    y = torch.randn(18, 256, device=DEVICE).bfloat16()
    activation = ("swiglu", "alternating", 1.5, 7.0, 1.0)
    weights, second = ops.packed(layer.w13), ops.packed(layer.w2)
    how = ("FP8_BLOCK", "swiglu", "concatenated", 1.0, None, 0.0, torch.bfloat16, None)
    none = (None,) * 5
    return {
        "route": (ids, 5),
        "route_quantize": (x, ids, 5, "FP8_BLOCK", "", "plain", None),
        "gather_quantize": (x, inverse, "FP8_BLOCK", "", "plain", None),
        "activate_quantize": (y, *activation, "FP8_BLOCK", "", "plain", None, None),
        "combine": (y, inverse, top_k_weights, x, torch.float32),
        "combine_backward": (x, y, inverse, top_k_weights),
        "moe": (x, ids, top_k_weights, *weights, *second, *none, *how),
        "moe_backward": (
            x, x, ids, top_k_weights, *weights[:2], *second[:2], "concatenated", None, True
        ),
    }  # fmt: skip


def check_operators() -> str:
    """Every operator keeps torch.library's rules, and the layer compiles to one graph with the eager call's bits."""
    found = operators()
    for name, arguments in found.items():
        torch.library.opcheck(getattr(torch.ops.padless, name).default, arguments)
    layer = _layer(line_of("FP8_BLOCK", "FP8_BLOCK", (7, 3, 5, 256, 128), 2))
    compiled = torch.compile(partial(_doubled, layer.w13, layer.w2), backend="aot_eager", fullgraph=True)
    given = (layer.operands.x, layer.operands.ids, layer.operands.weights)
    eager = _doubled(layer.w13, layer.w2, *given)
    assert same_bits(compiled(*given), eager), "compiled moe() has other bits"
    torch._dynamo.reset()
    return f"{len(found)} operators"


def _doubled(w13: Any, w2: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return moe(x * 2, ids, weights, w13, w2) + 1


# --- decoding --------------------------------------------------------------------------------------------


def check_decode() -> str:
    """A layer of at most 64 tokens is one kernel, or four with the products begun before those ahead have ended."""
    for tokens in DECODED:
        sizes = (tokens, DECODE_TOP_K, DECODE_EXPERTS, DECODE_COLUMNS, DECODE_COLUMNS)
        for weights, activations, options in decoded(cuda_driver().arch):
            layer = _layer(line_of(weights, activations, sizes, tokens, **options))
            call = partial(layer.call, layer.operands)
            name = f"{weights} {options}, {tokens} tokens"
            judge_launches(name, *nodes_of(call), programmatic=_is_programmatic())
    return f"at most {MOST_LAUNCHES} launches"


def decoded(arch: str) -> Iterator[tuple[str, str, Options]]:
    """(weights, activations, options) of four launches: plain SwiGLU, and gpt-oss' on Hopper."""
    for weights, activations, _, options in cases_of(arch):
        is_gpt_oss = options == GPT_OSS and activations == "BF16" and kernels_arch(arch) == "sm_90a"
        if is_gpt_oss or (not options and weights != "NVFP4"):
            yield weights, activations, options


def _is_programmatic() -> bool:
    from padless.quantization.triton.launches import is_programmatic

    return bool(is_programmatic(torch.device(DEVICE)))


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


# Formats of activations, whose kernels take Triton longest: each part is a process's.
ACTIVATED: dict[str, tuple[str | None, ...]] = {
    "": (None, "FP8_BLOCK"),
    " in MXFP8": ("MXFP8", "MXFP8_E5M2"),
    " in FP4": ("MXFP4", "NVFP4"),
}
# By name; Triton compiles the passes while they run, so each is one check, in parallel with the others.
PASSES: dict[str, Callable[[], str]] = {
    "routing of the MoE layer": triton_check_of("moe.route"),
    "gathers of the MoE layer": triton_check_of("moe.gather_quantize"),
    **{
        f"activations of the MoE layer{where}": triton_check_of("moe.activate_quantize", formats=formats)
        for where, formats in ACTIVATED.items()
    },
    "sums of the MoE layer": triton_check_of("moe.combine"),
}
CHECKS: dict[str, Callable[[], str]] = {
    **PASSES,
    "operators of the MoE layer": check_operators,
    "gated epilogues": EPILOGUES["gated epilogues"],
    "MoE layer": check_of("moe.moe"),
    "MoE layer at edges": check_of("moe.moe", edge_lines),
    "decoding by the MoE layer": check_decode,
}
# Those for which nothing is compiled ahead: Triton's kernels alone, or few products.
TRITON_ALONE = (*PASSES, "operators of the MoE layer", "decoding by the MoE layer")
