"""Adapters of rank 16 over frozen experts, `padless.nn.LoraExperts`, on one GPU. Parts, each with its points:

    forward   prefill: the layer "without" adapters and "rank 16", on the same rows
    step      forward and backward of adapters, rows and routing weights: padless over codes, and torch in bfloat16 over
              dequantized weights, what is between its products compiled; replayed from CUDA graphs
    decode    a token's adapter chosen among several, from CUDA graphs, against no adapter
    model     gpt-oss-120b's 36 layers of experts in MXFP4, optimizer's steps with checkpointing: tokens a second, bytes

Outputs are compared with float64 on tokens from the first to the last, gradients of a step with torch's, before
anything is timed. A part that raises is named in its record, and the next one is measured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from padless.bench.cases.problems import adapters as problems
from padless.bench.cases.problems.adapters import AdapterPoint, make_problem, with_adapters, without_bf16
from padless.bench.cases.problems.layer import LayerProblem
from padless.bench.report import table
from padless.bench.results import Record, finite
from padless.bench.session import Session
from padless.nn.lora import LoraExperts
from padless.testing import machine
from padless.testing.judge import describe, row_errors, worst
from padless.testing.timing import Call, Timer, capture

WITHOUT, WITH, PADLESS, TORCH = "without", "rank 16", "padless", "torch bf16"
# Largest relative error: of a token's result, rows quantized twice to e4m3 or bfloat16 roundings; of a gradient's norm.
TOLERANCE = {"FP8_BLOCK": 0.1, "MXFP4": 0.03}
STEPS, WARM_UP = 3, 2
_BYTES = ("codes", "adapter", "checkpoint", "layer", "peak")
Graphs = Callable[[Call], Call]


def replayed(call: Call) -> Call:
    """The call as a replay of a CUDA graph of it, which keeps what it holds."""
    graph = capture(call)

    def replay() -> None:
        assert call is not None  # a graph has addresses alone: what the call holds lives as long as this function
        graph.replay()

    return replay


# --- forward and decode ----------------------------------------------------------------------------------


def measure_forward(problem: LayerProblem, point: AdapterPoint, timer: Timer, graphs: Graphs) -> Record:
    """Microseconds of the layer with and without adapters, and how far tokens are from float64."""
    problem = without_bf16(problem)
    names = tuple(f"adapter{i}" for i in range(point.adapters))
    layer = with_adapters(problem, names, 1)
    chosen = None
    if point.part == "decode":
        chosen = torch.arange(point.tokens, device=problem.x.device) % point.adapters
    operands = (problem.x, problem.ids, problem.weights)

    def run(active: str | None, ids: torch.Tensor | None) -> torch.Tensor:
        layer.active = active
        with torch.no_grad():
            out: torch.Tensor = layer(*operands, adapter_ids=ids)
            return out

    calls: dict[str, Call] = {WITHOUT: partial(run, None, None), WITH: partial(run, names[0], chosen)}
    tokens = problems.checked_tokens(problem)
    by_token = {WITHOUT: [None] * len(tokens), WITH: [names[t % point.adapters] for t in tokens]}
    record: Record = {"row_error": {}, "wrong": {}, "errors": {}, "gpu": {}}
    right: dict[str, Call] = {}
    for name, call in calls.items():
        try:
            out = call()[torch.tensor(tokens, device=problem.x.device)].cpu()
            error = worst(row_errors(out, problems.expected(problem, layer, tokens, by_token[name])))  # type: ignore[arg-type]
            record["row_error"][name] = finite(error)
            allowed = TOLERANCE[point.format]
            if error <= allowed:
                right[name] = graphs(call) if point.part == "decode" else call
            else:
                record["wrong"][name] = f"is wrong: a token is off by {error:.3g}, allowed {allowed}"
        except Exception as failure:
            record["errors"][name] = describe(failure)
    return record | {"gpu": {name: timing.as_dict() for name, timing in timer.gpu(right).items()}}


# --- a step of one layer ---------------------------------------------------------------------------------


def measure_step(problem: LayerProblem, point: AdapterPoint, timer: Timer, graphs: Graphs) -> Record:
    """Microseconds of forward and backward, with gradients of all four factors, x and the routing weights."""
    problem = without_bf16(problem)
    layer = with_adapters(problem, ("adapter",), 1)
    on_gpu = problem.x.device.type == "cuda"
    leaves = {
        "x": problem.x.clone().requires_grad_(),
        "weights": problem.weights.clone().requires_grad_(),
        **dict(layer.named_parameters()),
    }
    dout = torch.randn(problem.x.shape, device=problem.x.device, dtype=torch.bfloat16)

    def step(forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        for leaf in leaves.values():
            leaf.grad = None
        out = forward(leaves["x"], leaves["weights"])
        out.backward(dout)
        return out.detach()

    forwards = {
        TORCH: problems.torch_layer(problem, layer, compiled=on_gpu),
        PADLESS: lambda x, weights: layer(x, problem.ids, weights),
    }
    record: Record = {"gradient_error": {}, "wrong": {}, "errors": {}, "gpu": {}, "peak_bytes": {}}
    found: dict[str, dict[str, torch.Tensor]] = {}
    right: dict[str, Call] = {}
    allowed = TOLERANCE[point.format]
    for name, forward in forwards.items():
        try:
            out, peak = _with_peak(partial(step, forward), problem.x.device)
            record["peak_bytes"][name] = peak
            found[name] = {"out": out} | {n: t.grad.clone() for n, t in leaves.items() if t.grad is not None}
            if name == PADLESS:
                errors = {n: _relative(found[name][n], t) for n, t in found[TORCH].items()}
                record["gradient_error"] = {n: finite(e) for n, e in errors.items()}
                if wrong := [f"{n} {e:.3g}" for n, e in errors.items() if not e <= allowed]:
                    record["wrong"][name] = f"is wrong against torch: {', '.join(wrong)}; allowed {allowed}"
                    continue
            right[name] = partial(step, forward)
        except Exception as failure:
            record["errors"][name] = describe(failure)
    found.clear()
    timed: dict[str, Call] = {}
    for name, call in right.items():
        try:
            timed[name] = graphs(call)
        except Exception as failure:
            record["errors"][f"{name} in a graph"] = describe(failure)
    return record | {"gpu": {name: timing.as_dict() for name, timing in timer.gpu(timed).items()}}


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm())


def _with_peak(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, int | None]:
    """The result of a call, and the bytes that it had at most beyond what it found; None without a GPU."""
    if device.type != "cuda":
        return call(), None
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = call()
    torch.cuda.synchronize()
    return out, torch.cuda.max_memory_allocated() - before


# --- a model's layers ------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of experts, each next to a residual stream, routing drawn once, and every layer checkpointed."""

    def __init__(self, layers: list[LoraExperts], routing: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.layers, self.experts, self.routing = nn.ModuleList(layers), tuple(layers), routing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.experts)):
            x = checkpoint(self._layer, index, x, use_reentrant=False)
        return x

    def _layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.routing[index]
        normed = nn.functional.rms_norm(x, (x.shape[1],))
        out: torch.Tensor = x + self.experts[index](normed, ids, weights)
        return out


def make_layers(point: AdapterPoint, seed: int, device: str, say: Callable[[str], None]) -> Layers:
    """As many layers as the point says, each with separate random codes, biases, adapters and routing."""
    layers, routing = [], []
    for index in range(point.layers):
        problem = make_problem(replace(point, layers=1), seed + index, device)
        codes = without_bf16(problem)
        del problem
        layers.append(with_adapters(codes, ("adapter",), index))
        routing.append((codes.ids, codes.weights))
        if index % 6 == 5:
            say(f"{index + 1} of {point.layers} layers are made")
    return Layers(layers, routing)


def measure_model(point: AdapterPoint, seed: int, device: str, say: Callable[[str], None]) -> Record:
    """Tokens a second of an optimizer's step, its losses, and where its bytes are."""
    record: Record = {"wrong": {}, "errors": {}, "gpu": {}}
    on_gpu = device == "cuda"
    model = make_layers(point, seed, device, say)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=on_gpu)
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (point.tokens, point.hidden)
    x, wanted = (torch.randn(sizes, device=device, dtype=torch.bfloat16, generator=generator) for _ in "xy")
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.mse_loss(model(x.requires_grad_()).float(), wanted.float())
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, seconds = [], []
    peak = None
    for number in range(WARM_UP + STEPS):
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        losses.append(float(step()))
        if on_gpu:
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        seconds.append(time.perf_counter() - begin)
        say(f"step {number + 1} of {WARM_UP + STEPS}: {seconds[-1]:.2f} s, loss {losses[-1]:.4f}")
    if not all(b < a for a, b in pairwise(losses)):  # a NaN is no fall either
        record["wrong"][PADLESS] = f"is wrong: losses of steps on one batch do not fall: {losses}"
    codes = sum(t.nbytes for m in model.experts for w in (m.w13, m.w2) for t in (w.data, w.scale))
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    adapters = sum(2 * p.nbytes for p in model.parameters()) + sum(t.nbytes for t in states)
    median = sorted(seconds[WARM_UP:])[STEPS // 2]
    return record | {
        "gpu": {
            PADLESS: {"us": 1e6 * median, "spread_percent": 0.0, "samples_us": [1e6 * s for s in seconds[WARM_UP:]]}
        },
        "losses": [finite(loss) for loss in losses],
        "tokens_per_s": point.tokens / median,
        "peak_bytes": peak,
        "codes_bytes": codes,
        "adapter_bytes": adapters,
        "checkpoint_bytes": point.layers * x.nbytes,
        "layer_bytes": _activation_bytes(model, x) if on_gpu else None,
    }


def _activation_bytes(model: Layers, x: torch.Tensor) -> int:
    """All that one layer's forward pass keeps for its backward pass."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = model._layer(0, x.detach().requires_grad_())
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del out
    return kept


# --- the benchmark ---------------------------------------------------------------------------------------


def measure(
    point: AdapterPoint, seed: int, timer: Timer, device: str, say: Callable[[str], None], graphs: Graphs = replayed
) -> Record:
    """One point's record; what raises is in its "errors"."""
    try:
        if point.part == "model":
            return measure_model(point, seed, device, say)
        of_part = measure_step if point.part == "step" else measure_forward
        return of_part(make_problem(point, seed, device), point, timer, graphs)
    except Exception as failure:
        return {"errors": {point.part: describe(failure)}, "wrong": {}, "gpu": {}}


def grid(name: str, seed: int) -> list[AdapterPoint]:
    """Every point; `--part` takes those of a part."""
    return problems.grid()


def start(session: Session) -> Callable[[AdapterPoint], Record]:
    """Every part, which says where it is."""

    def measure_point(point: AdapterPoint) -> Record:
        def say(text: str) -> None:
            session.console.print(text, highlight=False, markup=False)

        say(f"{point.part}: {point.model}, {point.tokens} tokens, {point.format}")
        begin = time.perf_counter()
        record = measure(point, session.settings.seed, session.timer, "cuda", say)
        gc.collect()
        torch.cuda.empty_cache()
        times = ", ".join(f"{name} {timing['us']:.0f} us" for name, timing in record["gpu"].items())
        say(f"  {times or 'nothing timed'} ({time.perf_counter() - begin:.0f} s)")
        return record | {"clocks": machine.clocks()}

    return measure_point


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A table of each part: microseconds and their ratio; of the model tokens a second and GB."""
    found = []
    titles = {
        "forward": ("The layer with adapters over the layer without", WITH, WITHOUT),
        "step": ("Forward and backward of adapters, rows and routing weights", TORCH, PADLESS),
        "decode": ("An adapter chosen for each token, over none", WITH, WITHOUT),
    }
    point = [table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=14)]
    for part, (title, top, bottom) in titles.items():
        rows = [record for record in records if record["point"]["part"] == part]
        columns = [
            *point, *table.axes("tokens", "format", "adapters"), table.time(bottom, digits=0), table.time(top, digits=0),
            table.ratio("ratio", top, bottom, 2, unit="x"),
        ]  # fmt: skip
        if rows:
            found.append(table.table_of(f"{title}: GPU time (us)", columns, table.by_point(rows), 1))
    rows = [record for record in records if record["point"]["part"] == "model" and "tokens_per_s" in record]
    if rows:
        columns = [
            *point, *table.axes("layers", "tokens"), table.time(PADLESS, "us a step", digits=0),
            table.Column("tokens/s", _field("tokens_per_s"), 0),
            *(table.Column(name, _field(f"{name}_bytes", 1e-9), 1) for name in _BYTES),
        ]  # fmt: skip
        found.append(table.table_of("Optimizer's steps of a model's experts; GB", columns, table.by_point(rows), 1))
    return found


def _field(name: str, scale: float = 1.0) -> Callable[[table.Records], list[float]]:
    def values(part: table.Records) -> list[float]:
        found: list[Any] = [record.get(name) for record in part]
        return [scale * value for value in found if value is not None]

    return values
