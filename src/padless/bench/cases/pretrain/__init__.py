"""Training steps of a whole decoder with random weights: experts in torch's bf16 against padless' FP8.

Contenders differ in the experts alone; one set of parameters and one optimizer are shared by all, and a step is
`microbatches` forward and backward passes of fresh sequences, then AdamW:

    torch bf16              `contenders.torch_experts`: torch._grouped_mm, the passes between compiled by inductor
    padless fp8             padless.nn.Experts, weights quantized in every forward pass
    padless fp8, codes kept the same with keep_codes: weights quantized once a step

Over ranks (``--ranks``), a GPU each, every rank has its run of each layer's experts and other sequences; all else is
sharded by FSDP2. Contenders are

    torch bf16              `exchange.ExchangedExperts`: the same products between NCCL's all_to_all
    padless fp8             padless.nn.Experts with ep=, over "symm"
    padless bf16            the same in the recipe "bf16": what is left is the exchange and the passes

Where a point has drawn experts, those of a token are drawn for each layer and position, as evenly as chance has it, and
the router gives their weights: trainers have such an option for benchmarks. Over ranks they always are. A router of
random weights sends nearly all tokens of a deep layer to the same few experts.

Everything else is bfloat16, attention and the loss compiled by inductor. A record has

    losses   cross entropy of each step, by contender, from the same parameters and sequences
    peak     bytes of the device's allocator at their highest in those steps, parameters and optimizer included
    step     microseconds from the call of a step to its end, the host included, contenders in turns
    gpu      microseconds of GPU time of each part alone: forward and backward of one layer's attention, router and
             experts of one microbatch, of the head with its loss, and the optimizer's step of all parameters; over
             ranks of the experts with their exchange, and of the optimizer

Over ranks memory and times are those of the rank that has the most, losses the mean.

A contender that raises is named in ``errors`` and left out of what follows; so is a part.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from padless.bench.cases.pretrain import spread
from padless.bench.cases.pretrain.decoder import CONTENDERS, OVER_RANKS, Decoder, DecoderSize
from padless.bench.cases.pretrain.sequences import sequences
from padless.bench.cases.train.contenders import BF16
from padless.bench.report import table
from padless.bench.results import BrokenRecord, Fields, Record
from padless.bench.session import Session
from padless.testing import machine
from padless.testing.judge import LOSS_LIMIT, describe
from padless.testing.ranks import Rank, RankPool, first_error
from padless.testing.timing import Call, Timer

# Published sizes of Qwen/Qwen3-30B-A3B, a quarter of its 48 layers and of its vocabulary of 151936, so that attention,
# experts and head have the shares that they have in the whole model.
QUARTER = DecoderSize(12, 2048, 32, 4, 128, 128, 8, 768, 37984)
LEARNING_RATE = 3e-4
_LAST = 4  # losses of so many last steps are averaged
MOST_LAYERS = 24  # of a point over ranks, whose steps are to be short enough
SECONDS = 300.0  # of a point over ranks


@dataclass(frozen=True)
class PretrainPoint:
    """A model's layers, and a step: so many microbatches of so many sequences of so many tokens. steps: for losses.

    ranks: GPUs, each with so many sequences. drawn: whether experts of tokens are drawn.
    """

    model: str
    layers: int
    sequences: int
    tokens: int
    microbatches: int
    steps: int
    ranks: int = 1
    drawn: bool = False

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.ranks * self.sequences * self.tokens * self.microbatches


def grid(name: str, seed: int) -> list[PretrainPoint]:
    """A quarter of Qwen3-30B-A3B with two microbatches a step; full: with drawn experts, with one and four, too."""
    points = [PretrainPoint("Qwen3-30B-A3B / 4", QUARTER.layers, 4, 4096, count, 12) for count in (2, 1, 4)]
    return [points[0], replace(points[0], drawn=True), *points[1:]] if name == "full" else points[:1]


def grid_over_ranks(name: str, ranks: int) -> list[PretrainPoint]:
    """As many layers as fit into the memory of so many GPUs, `MOST_LAYERS` at most, with one microbatch; full: two, too.

    Raises ValueError where there are no such GPUs, or experts cannot be spread evenly.
    """
    if ranks < 2 or QUARTER.experts % ranks:
        raise ValueError(f"ranks is {ranks}; it must be 2 or more and divide {QUARTER.experts}")
    if torch.cuda.device_count() < ranks:
        raise ValueError(f"ranks is {ranks}, and torch sees {torch.cuda.device_count()} GPUs here")
    memory = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(ranks))
    layers = min(MOST_LAYERS, spread.layers_that_fit(QUARTER, ranks, 4 * 4096, memory))
    counts = (1, 2) if name == "full" else (1,)
    return [PretrainPoint("Qwen3-30B-A3B", layers, 4, 4096, count, 6, ranks, drawn=True) for count in counts]


class Training:
    """A model, its optimizer and the sequences of its steps; `reset` begins again from the seed.

    rank: of a point over ranks, whose gradients and losses are then of the sequences of all.
    """

    def __init__(
        self,
        size: DecoderSize,
        point: PretrainPoint,
        seed: int,
        device: str,
        *,
        compiled: bool,
        rank: Rank | None = None,
    ) -> None:
        self.point, self.seed = point, seed
        self.contenders = CONTENDERS if rank is None else OVER_RANKS
        drawn = seed if point.drawn else None
        if rank is None:
            self.model = Decoder(size, device=device, compiled=compiled, drawn=drawn)
        else:
            self.model = spread.make_model(rank, size, point.sequences * point.tokens, drawn, compiled=compiled)
        count = point.steps * point.microbatches * point.ranks * point.sequences
        data = sequences(count, point.tokens + 1, size.vocab, seed)
        data = data.view(point.steps, point.microbatches, point.ranks, point.sequences, -1)
        self.data = data[:, :, 0 if rank is None else rank.rank].to(device)
        self.reset()

    def reset(self) -> None:
        """Parameters of the seed, no state of the optimizer, no gradients, no codes."""
        self.model.reset(self.seed)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        fused = parameters[0].is_cuda
        experts = {id(weight) for weight in self.model.weights_of_experts()}
        # One launch takes no DTensors, which all else is over ranks, together with other tensors.
        groups = [[p for p in parameters if (id(p) in experts) == of_experts] for of_experts in (False, True)]
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups], lr=LEARNING_RATE, betas=(0.9, 0.95), fused=fused
        )
        self.calls = 0

    def step(self, contender: str) -> torch.Tensor:
        """One step of the optimizer; the mean loss of its microbatches, and of ranks, on the device."""
        batches = self.data[self.calls % self.point.steps]
        self.calls += 1
        losses = []
        for batch in batches:
            loss = self.model(batch, contender)
            (loss / (len(batches) * self.point.ranks)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = torch.stack(losses).mean() / self.point.ranks
        if self.model.ep is not None:
            dist.all_reduce(mean)
            self.model.ep.check()
        return mean

    def losses(self, contender: str) -> list[float]:
        """Of every step, from the parameters of the seed."""
        self.reset()
        return [float(self.step(contender)) for _ in range(self.point.steps)]


def peak_bytes() -> int:
    """Bytes that the device's allocator had given out at the highest since the last call."""
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return peak


def excess(losses: Sequence[float], base: Sequence[float]) -> float:
    """By how much the mean of the last losses is above the base's, relative to it; NaN of NaN."""
    return fmean(losses[-_LAST:]) / fmean(base[-_LAST:]) - 1


def measure_pretrain(
    training: Training, timer: Timer, peak: Callable[[], int] = peak_bytes, say: Callable[[str], None] = print
) -> Record:
    """One point's record. Nothing is timed of a contender whose losses are above bf16's by more than the limit."""
    record: Record = {"losses": {}, "peak_bytes": {}, "wrong": {}, "errors": {}, "step": {}, "gpu": {}}
    right = []
    for name in training.contenders:
        try:
            peak()
            losses = training.losses(name)
        except Exception as error:
            record["errors"][name] = describe(error)
            continue
        record["losses"][name], record["peak_bytes"][name] = losses, peak()
        say(f"{name}: losses {losses[0]:.4f} to {losses[-1]:.4f}")
        base = record["losses"].get(BF16)
        fell = losses[-1] < losses[0]
        if fell and (base is None or excess(losses, base) <= LOSS_LIMIT):
            right.append(name)
        else:
            against = "" if base is None else f", {excess(losses, base):+.2%} of {BF16}'s, allowed {LOSS_LIMIT:.2%}"
            record["wrong"][name] = f"is wrong: losses {losses[0]:.4f} to {losses[-1]:.4f}{against}"
    steps: dict[str, Call] = {name: partial(training.step, name) for name in right}
    try:
        record["step"] = {name: timing.as_dict() for name, timing in timer.end_to_end(steps).items()}
    except Exception as error:
        record["errors"]["step"] = describe(error)
    record["clocks"] = machine.clocks()
    say("steps are timed; their parts")
    training.reset()
    parts: dict[str, Call] = {}
    for name, call in training.model.parts(training.data[0, 0], right).items():
        try:
            call()
            parts[name] = call
        except Exception as error:
            record["errors"][name] = describe(error)
    for p in training.model.parameters():  # an optimizer's step needs gradients
        p.grad = torch.zeros_like(p)
    parts["optimizer"] = training.optimizer.step
    record["gpu"] = {name: timing.as_dict() for name, timing in timer.gpu(parts).items()}
    training.optimizer.zero_grad()
    return record


def start(session: Session) -> Callable[[PretrainPoint], Record]:
    """Makes a model for every point, over ranks in separate processes."""

    def measure(point: PretrainPoint) -> Record:
        if point.ranks > 1:
            with RankPool(point.ranks, cuda=True, backend="symm") as pool:
                settings = session.settings
                given = (QUARTER, point, settings.seed, settings.repeats)
                found = pool.call(measure_over_ranks, *given, timeout_s=SECONDS)
            failed = first_error(found)
            if failed is not None:
                return {"losses": {}, "peak_bytes": {}, "step": {}, "gpu": {}, "errors": {"ranks": failed[-400:]}}
            record: Record = found[0]
            return record
        torch._dynamo.reset()
        training = Training(QUARTER, point, session.settings.seed, "cuda", compiled=True)
        return measure_pretrain(training, session.timer, say=lambda text: session.console.print(text, markup=False))

    return measure


def measure_over_ranks(
    rank: Rank, size: DecoderSize, point: PretrainPoint, seed: int, repeats: int, timer: Timer | None = None
) -> Record:
    """The record of a point, on every rank. size: of the model, but for its layers. timer: of GPUs by default."""
    size, on_gpu = replace(size, layers=point.layers), rank.device.type == "cuda"
    training = Training(size, point, seed, str(rank.device), compiled=on_gpu, rank=rank)
    timer = timer or spread.RanksTimer(rank, repeats)

    def peak() -> int:
        return spread.largest(rank, peak_bytes() if on_gpu else 0)

    def say(text: str) -> None:
        if rank.rank == 0:
            print(text, flush=True)

    return measure_pretrain(training, timer, peak, say)


# --- showing ---------------------------------------------------------------------------------------------


def part_us(record: Record, contender: str) -> Mapping[str, float]:
    """Microseconds of a step by part: the time of each alone, times how often a step has it."""
    point, gpu = record["point"], record["gpu"]
    passes = point["microbatches"]
    times = {"attention": passes * point["layers"], "router": passes * point["layers"]}
    times |= {f"experts: {contender}": passes * point["layers"], "head and loss": passes, "optimizer": 1}
    return {name.split(":")[0]: gpu[name]["us"] * n for name, n in times.items() if name in gpu}


def _point_of(record: Record) -> PretrainPoint:
    try:
        return PretrainPoint(**record["point"])
    except TypeError as error:
        raise BrokenRecord(str(error)) from error


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point and contender: a step, tokens a second, times bf16's, memory, last losses; and the parts."""
    lines = [[Fields(record, contender=name)] for record in records for name in record["step"]]

    def of(text: Callable[[Record, str], Any]) -> Callable[[table.Records], str]:
        return lambda part: str(text(part[0], part[0]["contender"]))

    def field(name: str) -> Callable[[table.Records], str]:
        return of(lambda record, _: record["point"][name])

    def model(record: Record, _: str) -> str:
        point = _point_of(record)
        return f"{point.model}, drawn" if point.drawn else point.model

    def faster(record: Record, name: str) -> str:
        base = record["step"].get(BF16)
        return f"{base['us'] / record['step'][name]['us']:.2f}x" if base else "-"

    def tokens(record: Record, name: str) -> str:
        point = _point_of(record)
        return f"{point.step_tokens / record['step'][name]['us'] * 1e6:.0f}"

    def part(which: str) -> Callable[[table.Records], str]:
        def text(record: Record, name: str) -> str:
            us = part_us(record, name).get(which)
            return "-" if us is None else f"{us * 1e-3:.1f}"

        return of(text)

    where = [
        table.Column("model", text=of(model), left=True),
        table.Column("mb", text=field("microbatches")),
        table.Column("contender", text=of(lambda _, name: name), left=True),
    ]
    steps = [
        table.Column("GPUs", text=of(lambda record, _: record["point"].get("ranks", 1))),
        table.Column("layers", text=field("layers")),
        table.Column("step ms", text=of(lambda r, name: f"{r['step'][name]['us'] * 1e-3:.1f}")),
        table.Column("tokens/s", text=of(tokens)),
        table.Column("bf16 /", text=of(faster)),
        table.Column("GB", text=of(lambda r, name: f"{r['peak_bytes'][name] / 1e9:.1f}")),
        table.Column("loss", text=of(lambda r, name: f"{fmean(r['losses'][name][-_LAST:]):.4f}")),
    ]
    parts = [table.Column(which, text=part(which)) for which in PARTS]
    return [
        table.table_of(
            "Steps of mb microbatches; GB: peak memory of a GPU; loss: of the last steps", [*where, *steps], lines, 1
        ),
        table.table_of("Parts of a step, ms, each timed alone", [*where, *parts], lines, 1),
    ]


PARTS = ("attention", "router", "experts", "head and loss", "optimizer")
