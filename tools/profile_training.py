"""Profiles a training step of an expert layer: what the host does in it, and what the GPU does.

`python tools/profile_training.py --recipe fp8 bf16` prints for each recipe: microseconds of Python of the forward and
the backward pass, as issued without a wait; how often products found their launch packed; Python's functions by their
own time; and, on a GPU, kernels by their time. The first steps are not counted. On a CPU it prints what it can.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable

import torch

from padless.nn import RECIPES, Experts
from padless.ops import grouped_gemm as products

STEPS = 20


class Layer:
    """Layers of one recipe, one after the other, so that addresses vary as in a model."""

    def __init__(self, options: argparse.Namespace, recipe: str) -> None:
        g = torch.Generator().manual_seed(0)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
        self.layers = [
            Experts(options.hidden, options.intermediate, options.experts, recipe=recipe, dtype=dtype, device=device)
            for _ in range(options.layers)
        ]
        ids = torch.rand(options.tokens, options.experts, generator=g).topk(options.top_k, dim=-1).indices
        self.ids = ids.to(device)
        self.x = torch.randn(options.tokens, options.hidden, generator=g).to(device, torch.bfloat16)
        self.prob = torch.rand(options.tokens, options.top_k, generator=g).to(device)
        self.weights = [weight for layer in self.layers for weight in layer.parameters()]
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-6, foreach=True)

    def forward(self) -> torch.Tensor:
        """The output of the last layer; each adds to what it is given."""
        x = self.x.detach().requires_grad_()
        for layer in self.layers:
            x = x + layer(x, self.ids, self.prob)
        return x

    def step(self) -> tuple[float, float]:
        """Microseconds of Python of the forward and of the backward pass; then a step of the optimizer."""
        began = time.perf_counter()
        out = self.forward().square().mean()
        between = time.perf_counter()
        out.backward()
        ended = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        wait()
        return 1e6 * (between - began), 1e6 * (ended - between)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """(products, those of them that were packed anew) in a call."""
    found = [0, 0]
    again, anew = products.launch_cache.launch_again, products._run

    def looked_up(*arguments: object) -> object:
        found[0] += 1
        return again(*arguments)  # type: ignore[arg-type]

    def packed(*arguments: object) -> object:
        found[1] += 1
        return anew(*arguments)  # type: ignore[arg-type]

    products.launch_cache.launch_again, products._run = looked_up, packed  # type: ignore[assignment]
    try:
        call()
    finally:
        products.launch_cache.launch_again, products._run = again, anew
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["fp8", "bf16"], choices=list(RECIPES))
    for name, value in (("layers", 8), ("tokens", 16384), ("hidden", 1024), ("intermediate", 1024), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=30, help="lines of each table")
    options = parser.parse_args()
    for recipe in options.recipe:
        model = Layer(options, recipe)
        for _ in range(5):
            model.step()
        times = [model.step() for _ in range(STEPS)]
        forward, backward = (statistics.median(part) / options.layers for part in zip(*times, strict=True))
        print(f"\n{recipe}: Python of a layer: forward {forward:.0f} us, backward {backward:.0f} us")
        print("products looked up, and packed anew, in a step: {}, {}".format(*counted(model.step)))
        profile = cProfile.Profile()
        with torch.autograd.set_multithreading_enabled(False):  # a profile is of one thread
            profile.enable()
            for _ in range(STEPS):
                model.step()
            profile.disable()
        stats = pstats.Stats(profile)
        calls = sum(entry[0] for entry in stats.stats.values())  # type: ignore[attr-defined]
        print(f"calls of Python functions a layer and step: {calls / STEPS / options.layers:.0f}")
        stats.sort_stats("tottime").print_stats(options.rows)
        if torch.cuda.is_available():
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=kinds) as traced:
                for _ in range(5):
                    model.step()
            table = traced.key_averages().table(sort_by="cuda_time_total", row_limit=options.rows)
            print(table)


if __name__ == "__main__":
    main()
