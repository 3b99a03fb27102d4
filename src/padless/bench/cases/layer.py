"""A whole Mixture-of-Experts layer, FP8_BLOCK against torch's bf16, and the passes around its products, on one GPU.

Contenders of a point; all begin with tokens, expert ids and weights and end with the tokens' sums in bfloat16:

    torch bf16             argsort, gather, torch._grouped_mm, silu * up, torch._grouped_mm, weights, sum: what a
                           plug-in does that quantizes nothing
    padless, torch passes  padless' quantize and grouped_gemm with torch's indexing, activation and sum
    deepgemm               DeepGEMM's contiguous grouped GEMM with the passes that frameworks put around it
                           (`padless.bench.peers.padded_layer`); H and I multiples of 128
    padless                padless.moe

and the passes alone: route, gather_quantize (with the sorted slots; up to 1024 of them sorting included) and combine,
with which the fewest bytes that each must move are recorded, and the time of a copy that moves as many; and padless'
two products alone.

Up to 256 tokens every contender is replayed from a CUDA graph. Outputs are compared with float64 before anything is
timed, on tokens from the first to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from padless.bench.cases.problems import layer as layer_problem
from padless.bench.cases.problems.layer import DECODE_TOKENS, LayerPoint, LayerProblem, make_layer
from padless.bench.peers import Peer
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.peers.padded_layer import padded_layer
from padless.bench.report import table
from padless.bench.results import Record, finite, time_us
from padless.bench.session import Session
from padless.bench.traffic import make_traffic
from padless.formats import FP8_BLOCK
from padless.runtime.choices import BackendName
from padless.testing import machine
from padless.testing.judge import describe, row_errors, worst
from padless.testing.timing import Call, Timer, capture

BF16, TODAY, DEEPGEMM, PADLESS = "torch bf16", "padless, torch passes", "deepgemm", "padless"
PRODUCTS = "products"
PASSES = ("route", "gather_quantize", "combine")
# Largest relative error of a token: activations quantized twice to e4m3, or bfloat16 roundings.
TOLERANCE = {BF16: 0.02, TODAY: 0.1, DEEPGEMM: 0.1, PADLESS: 0.1}


# --- contenders ------------------------------------------------------------------------------------------


def calls(problem: LayerProblem, peers: Sequence[Peer] = (), backend: BackendName | None = None) -> dict[str, Call]:
    """Every contender of a problem, by name; each returns (T, H) bfloat16."""
    found: dict[str, Call] = {
        BF16: lambda: bf16_layer(problem),
        TODAY: lambda: layer_of_torch_passes(problem, backend),
        PADLESS: lambda: padless_layer(problem, backend),
    }
    p = problem.point
    for peer in peers:
        if isinstance(peer, DeepGemm) and p.hidden % 128 == 0 and p.intermediate % 128 == 0:
            given = (problem.x, problem.ids, problem.weights, problem.w13, problem.w2)
            found[DEEPGEMM] = partial(padded_layer, *given, peer.contiguous)
    return found


def padless_layer(problem: LayerProblem, backend: BackendName | None = None) -> torch.Tensor:
    """The public call."""
    from padless.moe import moe

    operands = (problem.x, problem.ids, problem.weights, problem.w13, problem.w2)
    return moe(*operands, backend=backend, **problem.options)


def _sorted(problem: LayerProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order of the slots by expert, its inverse, end offsets) by torch, without synchronizing."""
    flat = problem.ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    sizes = torch.histc(flat.float(), bins=problem.point.experts, min=0, max=problem.point.experts - 1)
    return order, inverse, sizes.cumsum(0).to(torch.int32)


def _summed(problem: LayerProblem, y: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Rows times weights, back in the tokens' order and summed, by torch."""
    p = problem.point
    weighted = y * problem.weights.reshape(-1)[order][:, None].to(y.dtype)
    return weighted[inverse].view(p.tokens, p.top_k, p.hidden).sum(dim=1).to(torch.bfloat16)


def bf16_layer(problem: LayerProblem) -> torch.Tensor:
    """torch's grouped products of bfloat16 operands, with torch's passes."""
    order, inverse, offs = _sorted(problem)
    x = problem.x[order // problem.point.top_k]
    expert = problem.ids.reshape(-1)[order] if problem.bias13 is not None else None
    h = torch._grouped_mm(x, problem.w13_bf16.transpose(-2, -1), offs=offs)
    hidden = problem.activated(h if problem.bias13 is None else h + problem.bias13[expert].to(h.dtype))
    y = torch._grouped_mm(hidden, problem.w2_bf16.transpose(-2, -1), offs=offs)
    y = y if problem.bias2 is None else y + problem.bias2[expert].to(y.dtype)
    return _summed(problem, y, order, inverse)


def layer_of_torch_passes(problem: LayerProblem, backend: BackendName | None = None) -> torch.Tensor:
    """padless' public calls on rows that torch gathers and sums."""
    from padless.compat.cudnn.calls import grouped_gemm_swiglu_quant
    from padless.ops.grouped_gemm import grouped_gemm
    from padless.quantization.quantize import quantize

    order, inverse, offs = _sorted(problem)
    a = quantize(problem.x[order // problem.point.top_k], FP8_BLOCK)
    hidden = grouped_gemm_swiglu_quant(
        gate_up="concatenated",
        a_tensor=a,
        b_tensor=problem.w13,
        padded_offsets=offs,
        d_format=FP8_BLOCK,
        column_output=False,
        backend=backend,
    ).row
    assert hidden is not None
    return _summed(problem, grouped_gemm(hidden, problem.w2, offs, backend=backend), order, inverse)


def passes(problem: LayerProblem) -> dict[str, Call]:
    """The passes around the products, each alone."""
    from padless.moe import combine, gather_quantize, route

    p = problem.point
    routing = route(problem.ids, p.experts)
    y = torch.randn((p.slots, p.hidden), dtype=torch.bfloat16, device=problem.x.device)
    return {
        "route": lambda: route(problem.ids, p.experts),
        "gather_quantize": lambda: gather_quantize(problem.x, routing.inverse, FP8_BLOCK, tokens=routing.tokens),
        "combine": lambda: combine(y, routing.inverse, problem.weights),
    }


def copies(problem: LayerProblem) -> dict[str, Call]:
    """A device copy for each pass that moves rows, of as many bytes, read and written."""
    found: dict[str, Call] = {}
    for name in PASSES[1:]:
        source, target, *_ = make_traffic(problem.pass_bytes()[name], 0, problem.x.device)
        found[name] = partial(target.copy_, source)
    return found


def joined_passes(problem: LayerProblem) -> Call:
    """Routing with quantization, and the sum, one after the other: what a layer adds to its products."""
    from padless.moe import combine, route_quantize

    p = problem.point
    y = torch.randn((p.slots, p.hidden), dtype=torch.bfloat16, device=problem.x.device)

    def all_of_them() -> Any:
        routing, rows = route_quantize(problem.x, problem.ids, p.experts, FP8_BLOCK)
        return rows, combine(y, routing.inverse, problem.weights)

    return all_of_them


def products(problem: LayerProblem, backend: BackendName | None = None) -> Call:
    """The two products of the layer, activation and quantization in the first one's epilogue, and nothing else."""
    from padless.moe import Activation, route_quantize
    from padless.moe.layer import Projection

    p = problem.point
    routing, rows = route_quantize(problem.x, problem.ids, p.experts, FP8_BLOCK)
    first, second = Projection(problem.w13, None, backend), Projection(problem.w2, None, backend)

    def both() -> Any:
        hidden = first.activated(rows, routing.offs, Activation("swiglu"), FP8_BLOCK, None)
        return second.product(hidden, routing.offs)

    return both


# --- measuring -------------------------------------------------------------------------------------------


def check(problem: LayerProblem, found: dict[str, Call]) -> tuple[dict[str, Call], Record]:
    """The contenders that ran and are right, and the fields row_error, wrong and errors."""
    tokens = problem.checked_tokens()
    expected = {quantized: problem.expected(tokens, quantized=quantized) for quantized in (False, True)}
    right: dict[str, Call] = {}
    record: Record = {"row_error": {}, "wrong": {}, "errors": {}}
    for name, call in found.items():
        try:
            out = call()[tokens.to(problem.x.device)].cpu()
        except Exception as error:
            record["errors"][name] = describe(error)
            continue
        error_of_row = worst(row_errors(out, expected[name != BF16]))
        record["row_error"][name] = finite(error_of_row)
        if error_of_row <= TOLERANCE[name]:
            right[name] = call
        else:
            record["wrong"][name] = f"is wrong: a token is off by {error_of_row:.3g}, allowed {TOLERANCE[name]}"
    return right, record


def measure_layer(
    problem: LayerProblem, peers: Sequence[Peer], timer: Timer, *, graphs: bool, backend: BackendName | None = None
) -> Record:
    """One point's record: checks, and microseconds of every contender that is right and of the passes.

    graphs: each call is captured in a CUDA graph, which is replayed.
    """
    right, record = check(problem, calls(problem, peers, backend))
    timed = right | {f"pass: {name}": call for name, call in passes(problem).items()}
    timed |= {f"copy: {name}": call for name, call in copies(problem).items()}
    timed |= {"passes": joined_passes(problem), PRODUCTS: products(problem, backend)}
    # A graph keeps addresses and no tensors: `timed`, whose calls hold the operands, lives until the end.
    replayed = {name: capture(call).replay for name, call in timed.items()} if graphs else timed
    times = timer.gpu(replayed)
    return record | {
        "flops": problem.point.flops,
        "bytes": problem.bytes,
        "sizes": problem.sizes,
        "graphs": graphs,
        "pass_bytes": problem.pass_bytes(),
        "gpu": {name: timing.as_dict() for name, timing in times.items()},
    }


def grid(name: str, seed: int) -> list[LayerPoint]:
    """27 points ("full") or six."""
    return layer_problem.grid(full=name == "full")


def start(session: Session) -> Callable[[LayerPoint], Record]:
    """Every contender and the passes at a point."""
    copy = session.ceilings.copy_bytes_per_s

    def measure(point: LayerPoint) -> Record:
        problem = make_layer(point, session.settings.seed, "cuda")
        record = measure_layer(problem, session.peers, session.timer, graphs=point.tokens <= DECODE_TOKENS)
        floor = session.floor_us(record["flops"], record["bytes"])
        return record | {"floor_us": floor, "copy_gb_per_s": copy / 1e9, "clocks": machine.clocks()}

    return measure


# --- showing ---------------------------------------------------------------------------------------------


def pass_rate(record: Record, name: str) -> float | None:
    """Bytes a second of a pass over those of a copy of as many, or else of a large one; None if neither was timed."""
    us, copy = time_us(record, "gpu", f"pass: {name}"), record.get("copy_gb_per_s")
    if us and (same := time_us(record, "gpu", f"copy: {name}")):
        return same / us
    return None if not us or not copy else record["pass_bytes"][name] / us * 1e-3 / copy


def over_floor(record: Record, name: str) -> float | None:
    """A contender's time over that of a layer whose products and passes run at their floors; None if not measured."""
    us, floor, copy = (time_us(record, "gpu", name), record.get("floor_us"), record.get("copy_gb_per_s"))
    if not us or not floor or not copy:
        return None
    return us / (floor + sum(record["pass_bytes"].values()) * 1e-3 / copy)


def over_parts(record: Record) -> float | None:
    """The layer's time over that of its products and of its passes' bytes at the copy's rate; None if not measured."""
    layer, both, copy = (time_us(record, "gpu", PADLESS), time_us(record, "gpu", PRODUCTS), record.get("copy_gb_per_s"))
    if not layer or not both or not copy:
        return None
    return layer / (both + sum(record["pass_bytes"].values()) * 1e-3 / copy)


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """Two tables of a line a point: microseconds of each contender and what others take over padless; parts alone.

    more: microseconds that the layer takes more than its two products alone. over parts: the layer over these and its
    passes' bytes at the rate of a copy.
    """
    point = [
        table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=18),
        table.Column("T", text=lambda part: str(part[0]["point"]["tokens"])),
    ]
    layers = [table.time(name, digits=0, width=10) for name in (BF16, TODAY, DEEPGEMM, PADLESS, "floor")]
    layers.append(table.ratio("bf16 / padless", BF16, PADLESS, 2, unit="x", width=10))
    if table.measured(records, [DEEPGEMM]):
        layers.append(table.ratio("deepgemm / padless", DEEPGEMM, PADLESS, 2, unit="x", width=10))

    def beyond(found: table.Records) -> list[float]:
        """Microseconds that the layer takes more than its products."""
        pairs = ((time_us(r, "gpu", PADLESS), time_us(r, "gpu", PRODUCTS)) for r in found)
        return [layer - both for layer, both in pairs if layer and both]

    parts = table.Column("over parts", lambda found: [x for r in found if (x := over_parts(r)) is not None], 2)
    alone = [table.time("passes", "all"), *(_pass_column(name) for name in PASSES)]
    if table.measured(records, [PRODUCTS]):
        alone = [table.time(PRODUCTS, digits=0), table.Column("more", beyond, 0), *alone, parts]
    rows = table.by_point(records)
    return [
        table.table_of("A Mixture-of-Experts layer: GPU time (us)", [*point, *layers], rows, 1),
        table.table_of(
            "Parts alone: GPU time (us), and bytes a second over those of a copy", [*point, *alone], rows, 1
        ),
    ]


def _pass_column(name: str) -> table.Column:
    """Microseconds of a pass, and its rate over that of the copy."""

    def text(part: table.Records) -> str:
        rate = pass_rate(part[0], name)
        us = table.number(time_us(part[0], "gpu", f"pass: {name}"), 1)
        return us if rate is None else f"{us} {rate:.0%}"

    return table.Column(name, text=text, width=15)
