"""`padless train-demo`: the same model, batches and seed under several recipes, step by step in turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from padless.demo.train.curves import Curve, Training
from padless.demo.train.model import Model, ModelSize
from padless.demo.train.text import SOURCES, TOPICS, draw_batch, help_topics, library_sources
from padless.nn import RECIPES, Recipe
from padless.testing.progress import progress

SMALL = ModelSize(
    layers=2, hidden=128, heads=4, experts=8, top_k=2, intermediate=256, length=64, batch=4
)  # two minutes on two CPU cores
LARGE = ModelSize(
    layers=8, hidden=1024, heads=16, experts=32, top_k=4, intermediate=1024, length=512, batch=32
)  # three minutes on an H200
STEPS = {"cpu": 150, "cuda": 600}
LEARNING_RATE = {"cpu": 3e-3, "cuda": 6e-4}
WARM_UP = 0.1  # fraction of steps over which the learning rate rises; it then falls to a tenth along a cosine
EAGER_STEPS = 4  # of a contender on a GPU before its passes are captured
MakeModel = Callable[[ModelSize, Recipe], Model]


class Contender:
    """A model under one recipe with its optimizer.

    On a GPU the first steps run call by call; the forward and backward passes of the others are one CUDA graph, since at
    this size a host takes longer to launch them than a GPU to compute them.
    """

    def __init__(
        self, name: str, recipe: Recipe, size: ModelSize, seed: int, steps: int, device: str, make: MakeModel = Model
    ) -> None:
        torch.manual_seed(seed)
        self.curve = Curve(name, seed)
        with torch.device(device):
            self.model = make(size, recipe)
        rate, eps = LEARNING_RATE[device], self.model.adam_eps
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), eps=eps, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _rate_of(steps))
        self._losses: list[torch.Tensor] = []
        self._times: list[float] = []
        self._on_gpu = device == "cuda"
        self._graph: Graph | None = None

    def step(self, ids: torch.Tensor, following: torch.Tensor) -> None:
        """One optimizer step. The device is synchronized around it, as contenders take turns on it."""
        if self._on_gpu and len(self._losses) == EAGER_STEPS:
            self.optimizer.zero_grad(set_to_none=True)
            self._graph = Graph(self.model, ids, following)
        found = self._synchronized()
        begin = time.perf_counter()
        if self._graph is None:
            self.optimizer.zero_grad(set_to_none=True)
            loss, entropy = self.model.loss(ids, following)
            loss.backward()
        else:
            entropy = self._graph.replay(ids, following)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        if self._on_gpu:
            torch.cuda.synchronize()
        self._times.append(time.perf_counter() - begin)
        self._losses.append(entropy)
        if self._on_gpu and 1 < len(self._losses) <= EAGER_STEPS:  # the first makes the optimizer's state
            taken = torch.cuda.max_memory_allocated() - found
            self.curve.step_bytes = max(self.curve.step_bytes or 0, taken)

    def finish(self) -> Curve:
        """Its curve."""
        self.curve.losses = torch.stack(self._losses).tolist()
        settled = sorted(self._times[len(self._times) // 10 :])
        self.curve.step_seconds = settled[len(settled) // 2]
        return self.curve

    def _synchronized(self) -> int:
        """Waits for the device; bytes allocated there."""
        if not self._on_gpu:
            return 0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()


class Graph:
    """A model's forward and backward passes as a CUDA graph. Gradients are written anew by every replay."""

    def __init__(self, model: Model, ids: torch.Tensor, following: torch.Tensor) -> None:
        self._ids, self._following = ids.clone(), following.clone()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            loss, self._entropy = model.loss(self._ids, self._following)
            loss.backward()

    def replay(self, ids: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """The cross entropy of a batch; the gradients are in the model's parameters."""
        self._ids.copy_(ids)
        self._following.copy_(following)
        self._graph.replay()
        return self._entropy.clone()


def train(
    recipes: Sequence[str | tuple[str, Recipe]],
    *,
    size: ModelSize,
    steps: int,
    seeds: Sequence[int] = (0,),
    device: str = "cpu",
    text: torch.Tensor | None = None,
    source: str = TOPICS,
    on_step: Callable[[], None] | None = None,
    model: MakeModel = Model,
) -> Training:
    """Trains one model for every recipe and seed, those of a seed in turns on the same batches.

    recipes: names in `padless.nn.RECIPES`, or (name, recipe). text: (bytes,) uint8; None is Python's help topics.
    model: makes the model of a size and a recipe.
    """
    named = [(r, RECIPES[r]) if isinstance(r, str) else r for r in recipes]
    text = help_topics() if text is None else text
    begin = time.perf_counter()
    curves: list[Curve] = []

    def train_seed(seed: int) -> list[Curve]:  # its models are gone when it returns
        contenders = [Contender(name, recipe, size, seed, steps, device, model) for name, recipe in named]
        generator = torch.Generator().manual_seed(seed)
        for step in range(steps):
            ids, following = draw_batch(text, size.batch, size.length, generator)
            ids, following = ids.to(device), following.to(device)
            turn = step % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                contender.step(ids, following)
                if on_step is not None:
                    on_step()
        return [contender.finish() for contender in contenders]

    for seed in seeds:
        curves += train_seed(seed)
        gc.collect()  # a scheduler and its optimizer refer to each other
    return Training(size, source, device, curves, time.perf_counter() - begin)


def run_train_demo(
    *,
    recipes: Sequence[str] = (),
    steps: int | None = None,
    seeds: int = 1,
    ranks: int = 1,
    out: Path = Path("padless-out"),
    console: Console | None = None,
) -> Training | None:
    """Trains with a progress bar, prints a table and draws the losses to out / "train-demo.png".

    With ranks it is `padless.demo.train.ranks.run_over_ranks`, which draws nothing. Raises ValueError for a recipe that
    does not exist, fewer than ten steps or no seed.
    """
    from padless.demo.train.ranks import run_over_ranks
    from padless.demo.train.report import print_training, save_training
    from padless.runtime.devices import backends

    console = console or Console()
    names = list(recipes) or ["bf16", "fp8"]
    for name in names:
        if name not in RECIPES:
            raise ValueError(f"recipe is {name!r}; allowed: {', '.join(RECIPES)}")
    if ranks != 1:
        run_over_ranks(ranks, recipes or ["fp8"], steps, console, out)
        return None
    device = "cuda" if backends()["cuda"].available else "cpu"
    steps = STEPS[device] if steps is None else steps
    if steps < 10 or seeds < 1:
        raise ValueError(f"steps is {steps} and seeds {seeds}; allowed: at least 10 steps and 1 seed")
    on_gpu = device == "cuda"
    size, source = (LARGE, SOURCES) if on_gpu else (SMALL, TOPICS)
    text = library_sources() if on_gpu else help_topics()
    with progress(console, f"Training {' and '.join(names)}", steps * seeds * len(names)) as advance:
        training = train(
            names, size=size, steps=steps, seeds=range(seeds), device=device, text=text, source=source,
            on_step=advance,
        )  # fmt: skip
    print_training(console, training)
    save_training(console, training, out)
    return training


def _rate_of(steps: int) -> Callable[[int], float]:
    rising = max(1, round(WARM_UP * steps))

    def rate(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        along = torch.tensor((step - rising) / max(1, steps - rising) * torch.pi)
        return 0.1 + 0.45 * (1 + float(along.cos()))

    return rate
