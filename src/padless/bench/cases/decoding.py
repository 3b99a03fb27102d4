"""Mixture-of-Experts layers of ten models at 1 to 64 tokens, as when generating token by token, against other kernels.

Contenders of a point; every one runs all layers of its stack in one CUDA graph, each layer with weights and tokens of
its own, and a time is a layer's share of a replay:

    padless            padless.moe.moe, from ids
    padless, logits    the same from the router's logits
    padless, repacked  the first with MXFP4 weights repacked (padless.layouts.to_repacked)
    torch bf16         torch's indexing, torch._grouped_mm, silu * up, torch._grouped_mm, weights, sum
    triton             the two products alone in plain Triton, the fastest of its configurations
    deepgemm_masked    the two products alone in DeepGEMM's masked layout
    monomoe            FlashInfer's layer in one launch, from logits: of one shape, up to 8 tokens
    floor              the weights of the experts that have a token, at the rate of a copy

What a contender writes is filled with NaN, its graph replayed, and rows of the first and the last layer are compared
with float64; one that is wrong, or raises, is named and not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch

from padless.bench.cases.layer import BF16, PADLESS, TOLERANCE, bf16_layer, padless_layer
from padless.bench.cases.problems import decoding as problems
from padless.bench.cases.problems.decoding import MODELS, DecodingPoint, Stack, make_stack
from padless.bench.cases.problems.layer import LayerProblem
from padless.bench.peers import Contender, Peer, returning
from padless.bench.problem import sample_reference
from padless.bench.report import figures, table
from padless.bench.results import Record, finite, time_us
from padless.bench.session import Session
from padless.layouts import is_repackable, to_repacked
from padless.testing import machine
from padless.testing.judge import SampledReference, attempt
from padless.testing.timing import Call, Timer, Timing, capture

LOGITS = "padless, logits"
REPACKED = "padless, repacked"
OTHERS = (BF16, "triton", "deepgemm_masked", "monomoe")
SHOWN = (PADLESS, LOGITS, REPACKED, *OTHERS)


class Part(NamedTuple):
    """A call of a contender on one layer, and rows of what is right; None where no row is checked."""

    contender: Contender
    reference: Callable[[], SampledReference] | None


Parts = dict[str, list[Part]]


# --- contenders ------------------------------------------------------------------------------------------


def own_layers(layer: LayerProblem) -> list[Contender]:
    """padless' and torch's calls on one layer."""
    from padless.moe import moe

    found = [
        returning(PADLESS, partial(padless_layer, layer), TOLERANCE[PADLESS]),
        returning(BF16, partial(bf16_layer, layer), TOLERANCE[BF16]),
    ]
    if "router_logits" in signature(moe).parameters:
        found.append(returning(LOGITS, partial(layer_of_logits, layer), TOLERANCE[PADLESS]))
    if is_repackable(layer.w13) and is_repackable(layer.w2):
        repacked = replace(layer, w13=to_repacked(layer.w13), w2=to_repacked(layer.w2))
        found.append(returning(REPACKED, partial(padless_layer, repacked), TOLERANCE[PADLESS]))
    return found


def layer_of_logits(layer: LayerProblem) -> torch.Tensor:
    """The public call with the router's logits: softmax over the chosen."""
    from padless import moe

    router = moe.Router(layer.point.top_k)  # type: ignore[attr-defined]
    given: dict[str, Any] = {"router_logits": layer.logits, "router": router, **layer.options}
    return moe.moe(layer.x, None, None, layer.w13, layer.w2, **given)  # type: ignore[arg-type]


def parts_of(stack: Stack, peers: Sequence[Peer]) -> tuple[Parts, dict[str, str]]:
    """Every contender's calls, in the order of the layers, and by name of a peer what it failed of."""
    parts: Parts = {}
    errors: dict[str, str] = {}
    for layer in stack.layers:
        looked_at = any(layer is end for end in (stack.layers[0], stack.layers[-1]))
        references = {quantized: cache(partial(expected, layer, quantized=quantized)) for quantized in (False, True)}
        for contender in own_layers(layer):
            reference = references[contender.name != BF16]
            parts.setdefault(contender.name, []).append(Part(contender, reference if looked_at else None))
    for peer in peers:
        if stack.point.format in peer.formats:
            ran, found = attempt(peer.name, partial(parts_of_peer, stack, peer), errors)
            parts |= found if ran else {}
    return parts, errors


def parts_of_peer(stack: Stack, peer: Peer) -> Parts:
    """A library's calls: of whole layers, and of both products of each."""
    parts: Parts = {}
    for layer, products in zip(stack.layers, stack.products, strict=True):
        looked_at = any(layer is end for end in (stack.layers[0], stack.layers[-1]))
        found = [(contender, partial(expected, layer, quantized=True)) for contender in peer.layer(layer)]
        for problem in products:
            found += [(contender, partial(sample_reference, problem)) for contender in peer.decode(problem)]
        for contender, reference in found:
            parts.setdefault(contender.name, []).append(Part(contender, reference if looked_at else None))
    return parts


def expected(layer: LayerProblem, *, quantized: bool) -> SampledReference:
    """Some tokens' sums in float64."""
    tokens = layer.checked_tokens()
    return SampledReference(tokens.to(layer.x.device), layer.expected(tokens, quantized=quantized).to(layer.x.device))


# --- measuring -------------------------------------------------------------------------------------------


def poison(part: Part) -> None:
    """Fills what a call writes with NaN."""
    contender = part.contender
    assert contender.output is not None
    (contender.output() if contender.buffer is None else contender.buffer).fill_(float("nan"))


def worst_error(parts: Sequence[Part]) -> float:
    """Largest relative error of a row that is checked, over the tolerance of its contender."""
    errors = [
        part.reference().row_error(part.contender.output())
        for part in parts
        if part.reference is not None and part.contender.output is not None
    ]
    return max(errors)


def measure(stack: Stack, peers: Sequence[Peer], timer: Timer, *, graphs: bool = True) -> Record:
    """One point's record: checks of what is replayed, and microseconds a layer of every contender that is right.

    graphs: without, calls are timed as they are, which is for machines without a GPU.
    """
    parts, errors = parts_of(stack, peers)
    record: Record = {"row_error": {}, "wrong": {}, "errors": errors}
    right: dict[str, Call] = {}
    for name, calls in parts.items():

        def run(calls: Sequence[Part] = calls) -> None:
            for part in calls:
                part.contender.call()

        def replayed(calls: Sequence[Part] = calls, run: Call = run) -> tuple[Call, float]:
            run()
            again: Call = capture(run).replay if graphs else run
            for part in calls:
                poison(part)
            again()
            return again, worst_error(calls)

        ran, found = attempt(name, replayed, errors)
        if not ran:
            continue
        again, error = found
        record["row_error"][name] = finite(error)
        tolerance = calls[0].contender.tolerance
        if error <= tolerance:
            right[name] = again
        else:
            record["wrong"][name] = f"is wrong: a row is off by {error:.3g}, allowed {tolerance}"
    # A graph keeps addresses and no tensors: `parts`, whose calls hold the operands, lives until the end.
    times = timer.gpu(right)
    layers = len(stack.layers)
    return record | {
        "hit": round(stack.hit, 2),
        "flops": stack.point.flops,
        "bytes": stack.bytes,
        "gpu": {name: a_layer(timing, layers).as_dict() for name, timing in times.items()},
        "choices": {peer.name: found for peer in peers if (found := peer.choices(stack.products[0]))},
    }


def a_layer(timing: Timing, layers: int) -> Timing:
    """The share of one of so many."""
    return Timing(tuple(us / layers for us in timing.samples_us))


def grid(name: str, seed: int) -> list[DecodingPoint]:
    """Every model at every number of tokens."""
    return problems.grid()


def start(session: Session) -> Callable[[DecodingPoint], Record]:
    """The function that measures a point; it keeps the weights of the last model."""
    copy, seed = session.ceilings.copy_bytes_per_s, session.settings.seed
    kept: list[Stack] = []

    def at(point: DecodingPoint) -> Record:
        if not kept or replace(kept[0].point, tokens=point.tokens) != point:
            kept.clear()  # before the next model's are made
            torch.cuda.empty_cache()
            kept.append(make_stack(point, seed, "cuda"))
        stack = kept[0].with_tokens(point.tokens, seed)
        record = measure(stack, session.peers, session.timer)
        record |= {"floor_us": 1e6 * stack.bytes / copy, "copy_gb_per_s": copy / 1e9, "clocks": machine.clocks()}
        session.console.print(line(point, record), highlight=False, markup=False)
        return record

    return at


def line(point: DecodingPoint, record: Record) -> str:
    """A point in a line, while a run goes on."""
    times = {"floor": record["floor_us"]} | {name: timing["us"] for name, timing in record["gpu"].items()}
    bad = "".join(f"; {name} {text}" for kind in ("wrong", "errors") for name, text in record[kind].items())
    return f"{point.model} T {point.tokens}: " + ", ".join(f"{name} {us:.1f}" for name, us in times.items()) + bad


# --- showing ---------------------------------------------------------------------------------------------


def in_order(records: table.Records) -> list[Record]:
    """By model and tokens, whatever the order in which parts of the table were measured."""
    models = list(MODELS)

    def place(record: Record) -> tuple[int, int]:
        model = record["point"]["model"]
        return (models.index(model) if model in models else len(models), record["point"]["tokens"])

    return sorted(records, key=place)


def compared_with(name: str) -> str:
    """padless' contender next to another one, which does as much: from ids, or from logits."""
    return LOGITS if name == "monomoe" else PADLESS


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point: microseconds a layer, and what others take over padless."""
    names = table.measured(records, SHOWN)
    named = [name for name in names if name in OTHERS]
    columns = [
        table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=15),
        table.Column("T", text=lambda part: str(part[0]["point"]["tokens"])),
        table.time("floor"),
        *(table.time(name, HEADINGS.get(name), width=7 if name in (PADLESS, LOGITS, BF16) else 8) for name in names),
        *(
            table.ratio(f"{SHORT.get(name, name)} / {SHORT.get(own, own)}", name, own, digits=2, width=8)
            for name in named
            for own in [compared_with(name)]
        ),
    ]
    rows = table.by_point(in_order(records))
    return [table.table_of("Layers of few tokens: GPU time of a layer (us)", columns, rows, 1)]


HEADINGS = {
    LOGITS: "from logits",
    REPACKED: "repacked",
    BF16: "bf16",
    "triton": "triton products",
    "deepgemm_masked": "deepgemm products",
}
SHORT = {LOGITS: "logits", REPACKED: "repacked", BF16: "bf16", "deepgemm_masked": "deepgemm"}


def draw(records: table.Records, path: Path) -> Path | None:
    """Microseconds a layer over tokens, a panel for each model."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in in_order(records):
        lines = panels.setdefault(record["point"]["model"], {})
        for name in (*SHOWN, "floor"):
            if (us := time_us(record, "gpu", name)) is not None:
                lines.setdefault(name, []).append((record["point"]["tokens"], us))
    return figures.draw_lines(panels, "tokens", "us a layer", path) if panels else None
