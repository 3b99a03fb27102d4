"""Decoding steps of whole models of transformers with random weights and a static cache, each in one CUDA graph.

A step is `model(ids, past_key_values=cache)` for one more token of every sequence, and the likeliest next token of each,
which the next replay reads: what a server's loop does. Contenders of a point, in turns:

    grouped_mm    the model in bfloat16 with experts_implementation="grouped_mm", transformers' own
    batched_mm    the same with "batched_mm", transformers' other one, a copy of its weights for every token and expert
    padless       the same after `quantize_experts(model, format)`, in the format of that model's published checkpoint

Everything but the experts is shared, and so is the prompt's cache, which the first model makes. The models have fewer
layers than their namesakes, so that bfloat16 fits. Before anything is timed every layer's experts are compared on what
those of the first model are given in a step: logits would not do, since a router of random weights chooses other experts
where its input moves by a percent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from padless.bench.cases.model import IN_GRAPH, in_graph, logits_error
from padless.bench.cases.model import require_transformers as require_transformers
from padless.bench.report import table
from padless.bench.results import Record, finite
from padless.bench.session import Session
from padless.formats import FORMAT_BY_NAME, MXFP4
from padless.testing import machine
from padless.testing.judge import describe
from padless.testing.timing import Call, Timer

GROUPED_MM, BATCHED_MM, PADLESS = "grouped_mm", "batched_mm", "padless"
# Largest relative error of a token behind a layer's experts; codes of 4 bits move a weight by a ninth of its size.
TOLERANCE = {"FP8_BLOCK": 0.15, "MXFP4": 0.4}
_STEPS = 128  # that are left in the cache: more than are timed
_MOST_COPIED = 256  # pairs of a token and an expert of which batched_mm may copy weights


@dataclass(frozen=True)
class GeneratePoint:
    """Sequences that have a prompt of so many tokens behind them."""

    model: str
    sequences: int
    prompt: int


# (configuration class, its keywords, the experts' format). Full attention only for gpt-oss: its windows are of no
# interest here.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "Qwen3-Next-80B-A3B / 4": (
        "Qwen3NextConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        "FP8_BLOCK",
    ),
    "gpt-oss-120b / 6": (
        "GptOssConfig",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 6,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "layer_types": ["full_attention"] * 6,
        },
        "MXFP4",
    ),
}


def grid(name: str, seed: int) -> list[GeneratePoint]:
    """1 to 64 sequences ("full"), or 1 and 16, behind 512 tokens each."""
    counts = (1, 4, 16, 64) if name == "full" else (1, 16)
    return [GeneratePoint(model, count, 512) for model in MODELS for count in counts]


def random_models(model: tuple[str, dict[str, Any], str], seed: int, device: str) -> dict[str, Any]:
    """All contenders' models, in eval mode, of random weights in transformers' own distribution."""
    import transformers

    from padless.integrations.codes import repack
    from padless.integrations.transformers import quantize_experts

    configuration, keywords, format = model
    torch.manual_seed(seed)
    with torch.device(device):
        first = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, configuration)(**keywords), dtype=torch.bfloat16
        )
    first = first.eval().requires_grad_(False)
    models = {GROUPED_MM: first}
    for name in (BATCHED_MM, PADLESS):
        models[name] = copy.deepcopy(first, {id(t): t for t in (*first.parameters(), *first.buffers())})
    quantize_experts(models[PADLESS], FORMAT_BY_NAME[format])
    if format == MXFP4.name:
        repack(models[PADLESS])
    for name, made in models.items():
        made.set_experts_implementation(name)
    return models


class Steps:
    """A model's steps behind a prompt: a call moves every sequence by the likeliest token.

    reader: the model that reads the prompt.
    """

    def __init__(self, model: Any, prompt: torch.Tensor, reader: Any) -> None:
        from transformers import StaticCache

        self._model = model
        self._length = prompt.shape[1] + _STEPS
        self._cache = StaticCache(config=model.config, max_cache_len=self._length)
        self._ids = prompt[:, -1:].clone()
        with torch.no_grad():
            reader(prompt[:, :-1], past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    def __call__(self) -> torch.Tensor:
        """Logits (sequences, 1, vocabulary) of a step."""
        with torch.no_grad():
            out = self._model(self._ids, past_key_values=self._cache, use_cache=True, **self._mask())
            logits: torch.Tensor = out.logits
            self._ids.copy_(logits.argmax(-1))
        return logits

    def _mask(self) -> dict[str, Any]:
        """gpt-oss' own is made of a number that is copied to the GPU, which cannot be captured."""
        if self._model.config.model_type != "gpt_oss":
            return {}
        later = torch.arange(self._length, device=self._ids.device) > self._cache.get_seq_length()
        mask = later.to(self._model.dtype) * torch.finfo(self._model.dtype).min
        return {"attention_mask": {"full_attention": mask.expand(len(self._ids), 1, 1, -1)}}


def experts_of(model: Any) -> list[Any]:
    """The layers' experts, in order."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def given_experts(model: Any, step: Steps) -> list[tuple[Any, ...]]:
    """Arguments of each layer's experts in a step."""
    found = list[tuple[Any, ...]]()

    def note(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found.append(tuple(t.clone() for t in (*arguments, *keywords.values())))

    hooks = [experts.register_forward_pre_hook(note, with_kwargs=True) for experts in experts_of(model)]
    step()
    for hook in hooks:
        hook.remove()
    return found


def experts_error(model: Any, expected: Any, given: list[tuple[Any, ...]]) -> float:
    """Largest relative error of a token behind any layer's experts."""
    pairs = zip(experts_of(model), experts_of(expected), given, strict=True)
    with torch.no_grad():
        return max(logits_error(mine(*inputs), theirs(*inputs)) for mine, theirs, inputs in pairs)


def measure_steps(
    models: dict[str, Any], prompt: torch.Tensor, top_k: int, tolerance: float, timer: Timer,
    captured: Callable[[Call], Call] = in_graph,
) -> Record:  # fmt: skip
    """One point's record: errors of experts, and microseconds a step of what is right.

    prompt: (sequences, tokens) ids. captured: makes a call's replay.
    """
    record: Record = {"experts_error": {}, "wrong": {}, "errors": {}, "gpu": {}}
    calls: dict[str, Call] = {}
    kept = list[Steps]()  # a graph holds nothing of what it reads
    first = models[GROUPED_MM]
    given = given_experts(first, Steps(first, prompt, first))
    for name, model in models.items():
        if name == BATCHED_MM and len(prompt) * top_k > _MOST_COPIED:
            continue
        try:
            error = experts_error(model, first, given)
            record["experts_error"][name] = finite(error)
            if not error <= tolerance:
                record["wrong"][name] = f"is wrong: a token's experts are off by {error:.3g}, allowed {tolerance}"
                continue
            calls[name] = Steps(model, prompt, first)
            kept.append(Steps(model, prompt, first))
            calls[name + IN_GRAPH] = captured(kept[-1])
        except Exception as failure:
            record["errors"][name] = describe(failure)
    times = timer.end_to_end(calls)
    return record | {"gpu": {name: timing.as_dict() for name, timing in times.items()}}


def start(session: Session) -> Callable[[GeneratePoint], Record]:
    """A model's contenders, made once, at its points."""
    seed = session.settings.seed
    made: dict[str, dict[str, Any]] = {}

    def measure(point: GeneratePoint) -> Record:
        _, keywords, format = MODELS[point.model]
        if point.model not in made:
            made.clear()
            made[point.model] = random_models(MODELS[point.model], seed, "cuda")
        generator = torch.Generator().manual_seed(seed)
        shape = (point.sequences, point.prompt)
        prompt = torch.randint(0, keywords["vocab_size"], shape, generator=generator).cuda()
        top_k, tolerance = keywords["num_experts_per_tok"], TOLERANCE[format]
        found = measure_steps(made[point.model], prompt, top_k, tolerance, session.timer)
        return found | {"clocks": machine.clocks()}

    return measure


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point: tokens a second of every contender, from graphs and eager, and how many times padless' are."""

    def tokens(name: str) -> table.Column:
        def values(part: table.Records) -> list[float]:
            return [r["point"]["sequences"] * 1e6 / us for r in part for us in table.times([r], name)]

        return table.Column(name.replace(IN_GRAPH, ""), values, 0)

    def lines(title: str, suffix: str) -> table.Table:
        names = [name + suffix for name in (GROUPED_MM, BATCHED_MM, PADLESS)]
        columns = [
            table.Column("model", text=lambda part: str(part[0]["point"]["model"]), left=True, width=24),
            *table.axes("sequences"),
            *map(tokens, names),
            table.ratio("to grouped_mm", names[0], names[2], 2, unit="x"),
            table.ratio("to batched_mm", names[1], names[2], 2, unit="x"),
        ]
        return table.table_of(title, columns, table.by_point(records), 1)

    return [
        lines("Decoding steps of whole models in CUDA graphs: tokens a second", IN_GRAPH),
        lines("The same without a graph", ""),
    ]
