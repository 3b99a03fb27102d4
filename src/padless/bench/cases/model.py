"""Prefill of a whole model of transformers with random weights: padless' FP8 experts against bfloat16 ones.

Contenders of a point, in turns on the same token ids; a call is `model(ids)` that keeps the last token's logits:

    grouped_mm    the model in bfloat16 with experts_implementation="grouped_mm", transformers' own
    padless       the same after `quantize_experts(model, FP8_BLOCK)`, with experts_implementation="padless"; every
                  parameter that is no expert's is shared with the first

A time is from the first launch to the end of the last with a head start of 5 ms, so a host slower than the GPU counts.
Prompts of one sequence are timed from CUDA graphs too, where it does not.
Memory is the model's own parameters with what a call adds at its peak. Logits of both are compared before anything is
timed: FP8 moves a random model's by some percent, a wrong layer by all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from padless.bench.report import table
from padless.bench.results import Record, finite
from padless.bench.session import Session
from padless.formats import FP8_BLOCK
from padless.testing import machine
from padless.testing.judge import describe
from padless.testing.timing import Call, Timer, capture

GROUPED_MM, PADLESS = "grouped_mm", "padless"
IN_GRAPH = " in a graph"
# Largest relative error of a token's logits: 48 layers of random weights, each with activations quantized twice.
TOLERANCE = 0.15
_CHECKED_TOKENS = 16
# Keywords of transformers' Qwen3MoeConfig; those of the checkpoint Qwen/Qwen3-30B-A3B.
MODELS: dict[str, dict[str, int]] = {
    "Qwen3-30B-A3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
    }
}


@dataclass(frozen=True)
class ModelPoint:
    """A prompt for a model: sequences of the same number of tokens."""

    model: str
    sequences: int
    tokens: int


def require_transformers() -> None:
    """Raises ValueError where transformers is missing."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ValueError("this benchmark needs transformers: pip install 'padless[transformers]'") from error


def grid(name: str, seed: int) -> list[ModelPoint]:
    """Prompts from 2048 to 16384 tokens ("full"), or two of them."""
    shapes = [(1, 2048), (1, 4096), (1, 8192), (4, 2048), (8, 2048)] if name == "full" else [(1, 2048), (4, 2048)]
    return [ModelPoint(model, *shape) for model in MODELS for shape in shapes]


def random_models(config: dict[str, int], seed: int, device: str) -> dict[str, Any]:
    """Both contenders' models, in eval mode, of random weights in transformers' own distribution."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from padless.integrations.transformers import quantize_experts

    torch.manual_seed(seed)
    with torch.device(device):
        first = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**config, norm_topk_prob=True), dtype=torch.bfloat16)
    first = first.eval().requires_grad_(False)
    first.set_experts_implementation(GROUPED_MM)
    second = copy.deepcopy(first, {id(p): p for p in first.parameters()})
    quantize_experts(second, FP8_BLOCK)
    second.set_experts_implementation(PADLESS)
    return {GROUPED_MM: first, PADLESS: second}


def _forward(model: Any, ids: torch.Tensor, kept: int = 1) -> torch.Tensor:
    """Logits (sequences, kept, vocabulary) of a prompt."""
    with torch.no_grad():
        logits: torch.Tensor = model(ids, logits_to_keep=kept).logits
    return logits


def logits_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative error of a token's logits."""
    found, expected = found.double(), expected.double()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def peak_bytes(model: Any, ids: torch.Tensor) -> int:
    """Bytes of the model's parameters and buffers, and what a call adds to them at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    _forward(model, ids)
    torch.cuda.synchronize()
    own = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    return sum(own.values()) + torch.cuda.max_memory_allocated() - before


def in_graph(call: Call) -> Call:
    """The call as a replay of a CUDA graph of it."""
    return capture(call).replay


def measure_model(
    models: dict[str, Any],
    ids: torch.Tensor,
    timer: Timer,
    memory: Callable[[Any, torch.Tensor], int] = peak_bytes,
    captured: Callable[[Call], Call] = in_graph,
) -> Record:
    """One point's record: largest error of a token's logits, peak memory, and microseconds where padless is right.

    captured: makes the call that is timed as a graph, for one sequence.
    """
    record: Record = {"logits_error": None, "wrong": {}, "errors": {}, "memory_bytes": {}, "gpu": {}}
    expected = _forward(models[GROUPED_MM], ids, _CHECKED_TOKENS)
    right = [GROUPED_MM]
    try:
        error = logits_error(_forward(models[PADLESS], ids, _CHECKED_TOKENS), expected)
        record["logits_error"] = finite(error)
        if error <= TOLERANCE:
            right.append(PADLESS)
        else:
            record["wrong"][PADLESS] = f"is wrong: a token's logits are off by {error:.3g}, allowed {TOLERANCE}"
    except Exception as failure:
        record["errors"][PADLESS] = describe(failure)
    record["memory_bytes"] = {name: memory(models[name], ids) for name in right}
    calls: dict[str, Call] = {name: partial(_forward, models[name], ids) for name in right}
    if len(ids) == 1:
        for name in right:
            try:
                calls[name + IN_GRAPH] = captured(calls[name])
            except Exception as failure:
                record["errors"][name + IN_GRAPH] = describe(failure)
    times = timer.gpu(calls)
    return record | {"gpu": {name: timing.as_dict() for name, timing in times.items()}}


def start(session: Session) -> Callable[[ModelPoint], Record]:
    """Both models, made once, at a point."""
    seed = session.settings.seed
    made: dict[str, dict[str, Any]] = {}

    def measure(point: ModelPoint) -> Record:
        if point.model not in made:
            made.clear()
            made[point.model] = random_models(MODELS[point.model], seed, "cuda")
        generator = torch.Generator().manual_seed(seed)
        shape = (point.sequences, point.tokens)
        ids = torch.randint(0, MODELS[point.model]["vocab_size"], shape, generator=generator).cuda()
        return measure_model(made[point.model], ids, session.timer) | {"clocks": machine.clocks()}

    return measure


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point: milliseconds of both, how many times faster padless is, memory at its peak."""

    def milliseconds(name: str) -> table.Column:
        return table.Column(f"{name} ms", lambda part: [us * 1e-3 for us in table.times(part, name)], 1)

    def memory(name: str) -> table.Column:
        def values(part: table.Records) -> list[float]:
            return [r["memory_bytes"][name] / 1e9 for r in part if name in r["memory_bytes"]]

        return table.Column(f"{name} GB", values, 1)

    graphs = (GROUPED_MM + IN_GRAPH, PADLESS + IN_GRAPH)
    columns = [
        table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=16),
        *table.axes("sequences", "tokens"),
        milliseconds(GROUPED_MM),
        milliseconds(PADLESS),
        table.ratio("faster", GROUPED_MM, PADLESS, 2, unit="x"),
        *([table.ratio("in a graph", *graphs, 2, unit="x")] if table.measured(records, graphs) else []),
        memory(GROUPED_MM),
        memory(PADLESS),
    ]
    return [table.table_of("Prefill of a whole model of transformers", columns, table.by_point(records), 1)]
