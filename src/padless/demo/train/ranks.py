"""Training over ranks: `padless train-demo --ranks`, the model with its experts spread over processes and in one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from padless.demo.train.model import Model, ModelSize
from padless.demo.train.report import save_record
from padless.demo.train.text import draw_batch, help_topics
from padless.distributed import ExpertParallel
from padless.nn import RECIPES
from padless.runtime.choices import Exchange
from padless.testing.ranks import Rank, RankPool, raise_first

SMALL = ModelSize(layers=2, hidden=128, heads=4, experts=8, top_k=2, intermediate=256, length=64, batch=8)
LARGE = ModelSize(layers=2, hidden=512, heads=8, experts=16, top_k=4, intermediate=512, length=256, batch=16)
STEPS = {"cpu": 10, "cuda": 30}
SECONDS = {"cpu": 600.0, "cuda": 60.0}  # of a run, kernels' compilation included
RATE, WARM_UP = 1e-3, 5  # learning rate, and the steps over which it rises
STEP_BOUND, LAST_BOUND = 1e-6, 0.01  # of a step from the same weights, and of the last fifth of the steps


@dataclass(frozen=True)
class Comparison:
    """Of one process that has all tokens and of the ranks together.

    losses: of every step, cross entropy in nats a byte; from the same weights, those of one process by the ranks' parts.
    gradients: by parameter, the largest over steps of this rank's |difference| / |gradient of the one process|.
    seconds: median of a step.
    """

    losses: tuple[list[float], list[float]]
    gradients: dict[str, float]
    seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """Largest |difference of losses| / loss over steps."""
        return max(abs(a - b) / a for a, b in zip(*self.losses, strict=True))

    @property
    def last(self) -> tuple[float, float]:
        """Mean losses of the last fifth of the steps."""
        one, over = (losses[-max(1, len(losses) // 5) :] for losses in self.losses)
        return sum(one) / len(one), sum(over) / len(over)


class Contender:
    """A model with its optimizer, on all tokens of a batch or, with ep, on this rank's."""

    def __init__(self, rank: Rank, recipe: str, size: ModelSize, rows: torch.dtype, ep: ExpertParallel | None) -> None:
        torch.manual_seed(0)
        self.rank, self.ep = rank, ep
        self.model = Model(size, RECIPES[recipe], ep, rows).to(rank.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min((step + 1) / WARM_UP, 1.0))
        self.losses: list[torch.Tensor] = []
        self.seconds: list[float] = []

    def step(self, ids: torch.Tensor, following: torch.Tensor) -> None:
        """One optimizer step. The loss is the mean over ranks, so that each adds its share of it."""
        begin = self._now()
        share = 1 if self.ep is None else self.rank.size
        if share > 1:
            ids, following = (t.chunk(share)[self.rank.rank] for t in (ids, following))
        self.optimizer.zero_grad(set_to_none=True)
        loss, entropy = self.model.loss(ids, following)
        (loss / share).backward()
        entropy = entropy / share
        if self.ep is not None:
            dist.all_reduce(entropy)
            for name, parameter in self.model.named_parameters():
                if ".experts." not in name:  # of experts they are of all ranks' tokens already
                    dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(entropy)
        self.seconds.append(self._now() - begin)

    def loss_by_parts(self, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The loss of the weights as they are, every rank's part of the batch computed by itself, as ranks compute it.

        In dense products of more rows a GPU may add in another order, and then a token between two experts changes; so
        may attention's kernel without gradients.
        """
        share = self.rank.size
        part = (t.chunk(share)[self.rank.rank] for t in (ids, following))
        entropy = self.model.loss(*part)[1].detach() / share
        dist.all_reduce(entropy)
        return entropy

    def part(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """This contender's part of a tensor that is like a parameter of all experts."""
        return t if self.ep is None or ".experts." not in name else t[list(self.ep.local_experts)]

    @torch.no_grad()
    def take(self, other: Contender) -> None:
        """Sets the weights to another's."""
        for (name, mine), theirs in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            mine.copy_(self.part(name, theirs))

    @torch.no_grad()
    def agree(self) -> None:
        """Sets the weights of all ranks to the first's: what a backward pass adds by atomics may differ by an ulp."""
        for parameter in self.model.parameters():
            dist.broadcast(parameter.detach(), src=0)

    def gradients_off(self, other: Contender) -> dict[str, float]:
        """|difference| / |gradient| from another's gradients by parameter."""
        found = {}
        for (name, mine), theirs in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            wanted = self.part(name, theirs.grad).double()
            found[name] = float((mine.grad - wanted).norm() / wanted.norm())
        return found

    def _now(self) -> float:
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train_over_ranks(
    rank: Rank, recipe: str, size: ModelSize, steps: int, rows: torch.dtype, same_weights: bool
) -> Comparison:
    """Trains the model over all ranks, and in this process alone with all tokens.

    rows: what experts are given and what travels, bfloat16 or float32. same_weights: whether every step of the ranks
    begins with the weights of the one process, and sums are of slots: then a step's tokens have the bits of one process.
    """
    text = help_topics()
    ep = ExpertParallel(
        None, size.experts, size.hidden, size.top_k, size.tokens // rank.size, rows, rank.backend, device=rank.device,
        timeout=20.0, sums="slots" if same_weights else "ranks",
    )  # fmt: skip
    one, spread = (Contender(rank, recipe, size, rows, exchange) for exchange in (None, ep))
    generator = torch.Generator().manual_seed(0)
    off: dict[str, float] = {}
    by_parts: list[torch.Tensor] = []
    for _ in range(steps):
        ids, following = (t.to(rank.device) for t in draw_batch(text, size.batch, size.length, generator))
        if same_weights:
            one.agree()
            spread.take(one)
            by_parts.append(one.loss_by_parts(ids, following))
        for contender in (one, spread):
            contender.step(ids, following)
        for name, value in spread.gradients_off(one).items():
            off[name] = max(off.get(name, 0.0), value)
    ep.check()
    dist.barrier()
    losses = (torch.stack(by_parts or one.losses).tolist(), torch.stack(spread.losses).tolist())
    return Comparison(losses, off, (sorted(one.seconds)[steps // 2], sorted(spread.seconds)[steps // 2]))


def run_over_ranks(ranks: int, recipes: Sequence[str], steps: int | None, console: Console, out: Path) -> None:
    """Trains every recipe twice and prints what the ranks are off by; losses go to out / "train-demo-ranks.json".

    `padless train-demo --ranks`.

    Float32 rows and sums of slots from the same weights at every step, where no token may have another loss; and
    bfloat16 rows and sums of ranks with separate weights, whose last losses are to agree. On GPUs, one for a rank, where
    there are as many. Raises ValueError for ranks that do not divide experts and batch; ends the program with 1 where
    losses do not agree.
    """
    device = "cuda" if 0 < ranks <= torch.cuda.device_count() else "cpu"
    size = LARGE if device == "cuda" else SMALL
    backend: Exchange = "symm" if device == "cuda" else "collective"
    if ranks < 2 or size.experts % ranks or size.batch % ranks:
        divided = f"the {size.experts} experts and the {size.batch} texts of a step"
        raise ValueError(f"ranks is {ranks}; it must be at least 2 and divide {divided}")
    steps = STEPS[device] if steps is None else steps
    if steps < 2:
        raise ValueError(f"steps is {steps}; over ranks it must be 2 or more, since the loss has to fall")
    console.print(
        f"{size.layers} layers of {size.experts} experts, {size.top_k} a token, hidden {size.hidden}, "
        f"{size.tokens:,} bytes a step, {steps} steps in one process and over {ranks} ({device}, {backend}); starting"
    )
    runs = list[dict[str, Any]]()
    with RankPool(ranks, cuda=device == "cuda", backend=backend) as pool:
        for recipe in recipes:
            for rows, same in ((torch.float32, True), (torch.bfloat16, False)):
                begin = time.perf_counter()
                given = (recipe, size, steps, rows, same)
                found: list[Comparison] = raise_first(pool.call(train_over_ranks, *given, timeout_s=SECONDS[device]))
                first, gradients = found[0], max(value for one in found for value in one.gradients.values())
                one, over = first.last
                if same:
                    kind, off, bound = "sums of slots, same weights at every step", first.difference, STEP_BOUND
                    what = f"a step's losses differ by {off:.1e} at most, gradients by {gradients:.1e}"
                else:
                    kind, off, bound = "sums of ranks", abs(over / one - 1), LAST_BOUND
                    what = f"last losses differ by {off:.2%}"
                passed = off <= bound and one < first.losses[0][0]
                runs.append(asdict(first) | {"recipe": recipe, "kind": kind, "gradients": gradients, "passed": passed})
                console.print(
                    f"{'pass' if passed else 'FAIL'}  {recipe}, {kind}: loss from "
                    f"{first.losses[0][0]:.3f} to {one:.4f} and {over:.4f}; {what}; "
                    f"{' and '.join(f'{1e3 * s:.1f}' for s in first.seconds)} ms a step "
                    f"({time.perf_counter() - begin:.0f} s)",
                    markup=False,
                )
    path = save_record(
        out / "train-demo-ranks.json", "train_demo_ranks", device, ranks=ranks, size=asdict(size), runs=runs
    )
    console.print(f"Losses: {path}")
    if not all(run["passed"] for run in runs):
        raise SystemExit(1)
