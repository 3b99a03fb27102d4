"""Training over ranks: `padless train-demo --ranks`, the model with its experts spread over processes and in one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console

from padless.demo.train.model import Model, ModelSize
from padless.demo.train.text import draw_batch, help_topics
from padless.distributed import ExpertParallel
from padless.nn import RECIPES
from padless.testing.ranks import Rank, RankPool, raise_first

SMALL = ModelSize(layers=2, hidden=128, heads=4, experts=8, top_k=2, intermediate=256, length=64, batch=8)
LARGE = ModelSize(layers=2, hidden=512, heads=8, experts=16, top_k=4, intermediate=512, length=256, batch=16)
STEPS = {"cpu": 10, "cuda": 30}
SECONDS = {"cpu": 600.0, "cuda": 60.0}  # of a run, kernels' compilation included
RATE = 0.1


@dataclass(frozen=True)
class Comparison:
    """Of one process that has all tokens and of the ranks together.

    losses: of every step, cross entropy in nats a byte. gradients: by parameter, the largest over steps of this rank's
    |difference| / |gradient of the one process|. seconds: median of a step.
    """

    losses: tuple[list[float], list[float]]
    gradients: dict[str, float]
    seconds: tuple[float, float]

    @property
    def difference(self) -> float:
        """Largest |difference of losses| / loss over steps."""
        return max(abs(a - b) / a for a, b in zip(*self.losses, strict=True))


class Contender:
    """A model with its optimizer, on all tokens of a batch or, with ep, on this rank's."""

    def __init__(self, rank: Rank, recipe: str, size: ModelSize, rows: torch.dtype, ep: ExpertParallel | None) -> None:
        torch.manual_seed(0)
        self.rank, self.ep = rank, ep
        self.model = Model(size, RECIPES[recipe], ep, rows).to(rank.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
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
        self.losses.append(entropy)
        self.seconds.append(self._now() - begin)

    def part(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """What this contender has of a tensor that is like a parameter of all experts."""
        return t if self.ep is None or ".experts." not in name else t[list(self.ep.local_experts)]

    @torch.no_grad()
    def take(self, other: Contender) -> None:
        """Sets the weights to another's."""
        for (name, mine), theirs in zip(self.model.named_parameters(), other.model.parameters(), strict=True):
            mine.copy_(self.part(name, theirs))

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
    begins with the weights of the one process: what is left of differences is then that of a step.
    """
    text = help_topics()
    ep = ExpertParallel(
        None, size.experts, size.hidden, size.top_k, size.tokens // rank.size, rows, rank.backend, device=rank.device,
        timeout=20.0,
    )  # fmt: skip
    one, spread = (Contender(rank, recipe, size, rows, exchange) for exchange in (None, ep))
    generator = torch.Generator().manual_seed(0)
    off: dict[str, float] = {}
    for _ in range(steps):
        ids, following = (t.to(rank.device) for t in draw_batch(text, size.batch, size.length, generator))
        if same_weights:
            spread.take(one)
        for contender in (one, spread):
            contender.step(ids, following)
        for name, value in spread.gradients_off(one).items():
            off[name] = max(off.get(name, 0.0), value)
    ep.check()
    dist.barrier()
    losses = (torch.stack(one.losses).tolist(), torch.stack(spread.losses).tolist())
    return Comparison(losses, off, (sorted(one.seconds)[steps // 2], sorted(spread.seconds)[steps // 2]))


def run_over_ranks(ranks: int, recipes: Sequence[str], steps: int | None, console: Console) -> None:
    """Trains every recipe twice and prints what the ranks are off by: `padless train-demo --ranks`.

    Float32 rows from the same weights at every step, where sums over ranks are all that differs; and bfloat16 rows with
    weights of their own. On GPUs, one for a rank, where there are as many. Raises ValueError.
    """
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    size, backend = (LARGE, "symm") if device == "cuda" else (SMALL, "collective")
    if ranks < 2 or size.experts % ranks or size.batch % ranks:
        raise ValueError(f"ranks is {ranks}; it must be at least 2 and divide {size.experts} and {size.batch}")
    steps = steps or STEPS[device]
    console.print(
        f"{size.layers} layers of {size.experts} experts, {size.top_k} a token, hidden {size.hidden}, "
        f"{size.tokens:,} bytes a step, {steps} steps in one process and over {ranks} ({device}, {backend}); starting"
    )
    with RankPool(ranks, cuda=device == "cuda", backend=backend) as pool:
        for recipe in recipes:
            for rows, same in ((torch.float32, True), (torch.bfloat16, False)):
                begin = time.perf_counter()
                given = (recipe, size, steps, rows, same)
                found: list[Comparison] = raise_first(pool.call(train_over_ranks, *given, timeout_s=SECONDS[device]))
                first, off = found[0], max(value for one in found for value in one.gradients.values())
                (one, over), (one_step, step) = (losses[-1] for losses in first.losses), first.seconds
                off_too = f", of gradients {off:.1e}" if same else ""
                console.print(
                    f"{recipe}, {'float32 rows, same weights at every step' if same else 'bfloat16 rows'}: last loss "
                    f"{one:.5f} and {over:.5f}; largest difference of losses {first.difference:.1e}{off_too}; "
                    f"a step {1e3 * one_step:.1f} ms and {1e3 * step:.1f} ms ({time.perf_counter() - begin:.0f} s)"
                )
