"""Training steps of a whole decoder with random weights on one GPU: experts in torch's bf16 against padless' FP8.

Contenders differ in the experts alone; one set of parameters and one optimizer are shared by all, and a step is
`microbatches` forward and backward passes of fresh sequences, then AdamW:

    torch bf16              `contenders.torch_experts`: torch._grouped_mm, the passes between compiled by inductor
    padless fp8             padless.nn.Experts, weights quantized in every forward pass
    padless fp8, codes kept the same with keep_codes: weights quantized once a step

Everything else is bfloat16, attention and the loss compiled by inductor. A record has

    losses   cross entropy of each step, by contender, from the same parameters and sequences
    peak     bytes of the device's allocator at their highest in those steps, parameters and optimizer included
    step     microseconds from the call of a step to its end, the host included, contenders in turns
    gpu      microseconds of GPU time of each part alone: forward and backward of one layer's attention, router and
             experts of one microbatch, of the head with its loss, and the optimizer's step of all parameters

A contender that raises is named in ``errors`` and left out of what follows; so is a part.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch

from padless.bench.cases.pretrain.decoder import CONTENDERS, Decoder, DecoderSize
from padless.bench.cases.pretrain.sequences import sequences
from padless.bench.cases.train.contenders import BF16
from padless.bench.report import table
from padless.bench.results import Record
from padless.bench.session import Session
from padless.testing import machine
from padless.testing.judge import LOSS_LIMIT, describe
from padless.testing.timing import Call, Timer

# Published sizes of Qwen/Qwen3-30B-A3B, a quarter of its 48 layers and of its vocabulary of 151936, so that attention,
# experts and head have the shares that they have in the whole model.
QUARTER = DecoderSize(12, 2048, 32, 4, 128, 128, 8, 768, 37984)
LEARNING_RATE = 3e-4
_LAST = 4  # losses of so many last steps are averaged


@dataclass(frozen=True)
class PretrainPoint:
    """A model's layers, and a step: so many microbatches of so many sequences of so many tokens. steps: for losses."""

    model: str
    layers: int
    sequences: int
    tokens: int
    microbatches: int
    steps: int

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.tokens * self.microbatches


def grid(name: str, seed: int) -> list[PretrainPoint]:
    """A quarter of Qwen3-30B-A3B with two microbatches a step; full: with one and with four, too."""
    counts = (2, 1, 4) if name == "full" else (2,)
    return [PretrainPoint("Qwen3-30B-A3B / 4", QUARTER.layers, 4, 4096, count, 12) for count in counts]


class Training:
    """A model, its optimizer and the sequences of its steps; `reset` begins again from the seed."""

    def __init__(self, size: DecoderSize, point: PretrainPoint, seed: int, device: str, *, compiled: bool) -> None:
        self.point, self.seed = point, seed
        self.model = Decoder(size, device=device, compiled=compiled)
        self.data = sequences(point.steps * point.microbatches * point.sequences, point.tokens + 1, size.vocab, seed)
        self.data = self.data.to(device).view(point.steps, point.microbatches, point.sequences, -1)
        self.reset()

    def reset(self) -> None:
        """Parameters of the seed, no state of the optimizer, no gradients, no codes."""
        self.model.reset(self.seed)
        parameters = list(self.model.parameters())
        for parameter in parameters:
            parameter.grad = None
        fused = parameters[0].is_cuda
        self.optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=fused)
        self.calls = 0

    def step(self, contender: str) -> torch.Tensor:
        """One step of the optimizer; the mean loss of its microbatches, on the device."""
        batches = self.data[self.calls % self.point.steps]
        self.calls += 1
        losses = []
        for batch in batches:
            loss = self.model.loss(batch, contender)
            (loss / len(batches)).backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()

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
    for name in CONTENDERS:
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
    """Makes a model for every point."""

    def measure(point: PretrainPoint) -> Record:
        torch._dynamo.reset()
        training = Training(QUARTER, point, session.settings.seed, "cuda", compiled=True)
        return measure_pretrain(training, session.timer, say=lambda text: session.console.print(text, markup=False))

    return measure


# --- showing ---------------------------------------------------------------------------------------------


def part_us(record: Record, contender: str) -> Mapping[str, float]:
    """Microseconds of a step by part: the time of each alone, times how often a step has it."""
    point, gpu = record["point"], record["gpu"]
    passes = point["microbatches"]
    times = {"attention": passes * point["layers"], "router": passes * point["layers"]}
    times |= {f"experts: {contender}": passes * point["layers"], "head and loss": passes, "optimizer": 1}
    return {name.split(":")[0]: gpu[name]["us"] * n for name, n in times.items() if name in gpu}


def tables(records: table.Records, sessions: table.Sessions, width: int) -> Sequence[table.Table]:
    """A line a point and contender: a step, tokens a second, times bf16's, memory, last losses; and the parts."""
    lines = [[{**record, "contender": name}] for record in records for name in record["step"]]

    def of(text: Callable[[Record, str], Any]) -> Callable[[table.Records], str]:
        return lambda part: str(text(part[0], part[0]["contender"]))

    def field(name: str) -> Callable[[table.Records], str]:
        return of(lambda record, _: record["point"][name])

    def faster(record: Record, name: str) -> str:
        base = record["step"].get(BF16)
        return f"{base['us'] / record['step'][name]['us']:.2f}x" if base else "-"

    def tokens(record: Record, name: str) -> str:
        point = PretrainPoint(**record["point"])
        return f"{point.step_tokens / record['step'][name]['us'] * 1e6:.0f}"

    def part(which: str) -> Callable[[table.Records], str]:
        def text(record: Record, name: str) -> str:
            us = part_us(record, name).get(which)
            return "-" if us is None else f"{us * 1e-3:.1f}"

        return of(text)

    where = [
        table.Column("model", text=field("model"), left=True),
        table.Column("mb", text=field("microbatches")),
        table.Column("contender", text=of(lambda _, name: name), left=True),
    ]
    steps = [
        table.Column("step ms", text=of(lambda r, name: f"{r['step'][name]['us'] * 1e-3:.1f}")),
        table.Column("tokens/s", text=of(tokens)),
        table.Column("bf16 /", text=of(faster)),
        table.Column("GB", text=of(lambda r, name: f"{r['peak_bytes'][name] / 1e9:.1f}")),
        table.Column("loss", text=of(lambda r, name: f"{fmean(r['losses'][name][-_LAST:]):.4f}")),
    ]
    parts = [table.Column(which, text=part(which)) for which in PARTS]
    return [
        table.table_of(
            "Steps of mb microbatches; GB: peak memory; loss: of the last steps", [*where, *steps], lines, 1
        ),
        table.table_of("Parts of a step, ms, each timed alone", [*where, *parts], lines, 1),
    ]


PARTS = ("attention", "router", "experts", "head and loss", "optimizer")
