"""Profiles a training step of an expert layer: what the host does in it, and what the GPU does.

`python tools/profile_training.py --recipe fp8 bf16` prints for each recipe: microseconds of host time of the forward and
the backward pass of a layer, least and median, codes of weights made in it and kept; Python's functions by their own
time; and, on a GPU, how often products found their launch packed, and kernels by their time. The first steps are not
counted.

``--nothing`` replaces every launch by nothing, so that what is left is the library's Python and torch's (allocations,
views, autograd): also on a CPU, whose tensors then pass for a GPU's, at the addresses of the step before, as torch's
allocator on a GPU gives them in a loop. Take small sizes there, since gathers are torch's.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from padless.nn import RECIPES, Experts
from padless.ops import grouped_gemm as products
from padless.runtime import devices, driver, jit
from padless.testing.compile_ahead import RecordingDevice

STEPS = 20


class Layer:
    """Layers of one recipe, one after the other, so that addresses vary as in a model."""

    def __init__(self, options: argparse.Namespace, recipe: str, again: Again | None) -> None:
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
        self.prob = torch.rand(options.tokens, options.top_k, generator=g).to(device).requires_grad_()
        self.weights = [weight for layer in self.layers for weight in layer.parameters()]
        self.optimizer = torch.optim.SGD(self.weights, lr=1e-6, foreach=True)
        self.again = again

    def step(self) -> tuple[float, float]:
        """Microseconds of a layer's forward and backward pass, as issued; then a step of the optimizer, or none."""
        x = self.x.detach().requires_grad_()
        if self.again is not None:
            self.again.at = 0
        began = time.perf_counter()
        for layer in self.layers:
            x = layer(x, self.ids, self.prob)
        between = time.perf_counter()
        x.backward(self.x)
        ended = time.perf_counter()
        if not self.layers[0].keep_codes:  # else these are a step's other microbatches
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.prob.grad = None
        wait()
        return tuple(1e6 * t / len(self.layers) for t in (between - began, ended - between))  # type: ignore[return-value]


class Again:
    """Tensors that are made once and given again in the order of the first step."""

    def __init__(self) -> None:
        self.at, self._made = 0, list[torch.Tensor]()

    def forget(self) -> None:
        self._made.clear()

    def of(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """``make``, whose results have the memory that they had in the step before."""

        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            at, self.at = self.at, self.at + 1
            if at == len(self._made):
                self._made.append(make(*arguments, **options).zero_())
            return self._made[at].detach()

        return made


@contextmanager
def nothing_launched() -> Iterator[Again | None]:
    """Launches nothing inside. Without a GPU tensors pass for a GPU's, and their memory comes from what is yielded."""
    from triton.runtime.jit import KernelInterface

    from padless.moe.triton import route

    unset = route.empty
    changes: list[tuple[Any, str, Any]] = [
        (KernelInterface, "__getitem__", lambda kernel, grid: lambda *arguments, **options: None),
        (driver.CudaLaunch, "__call__", lambda launch, stream: None),
        (route, "empty", lambda *arguments: route.Sorted(*(t.zero_() for t in unset(*arguments)))),
    ]
    again = None
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            again, device = Again(), RecordingDevice("sm_90a", "cubin", 132)
            stack.enter_context(jit.listing())
            changes += [
                (driver, "cuda_driver", lambda *index: device),
                (devices, "_cuda_of", lambda device: devices.Backend("cuda", True, "pretended")),
                (torch, "empty", again.of(torch.empty)),
                (torch.Tensor, "index_select", again.of(torch.Tensor.index_select)),
                (torch.Tensor, "is_cuda", True),
                (torch.cuda, "current_device", lambda: None),  # what CPU tensors have for an index
                (torch.cuda, "get_device_capability", lambda *device: (9, 0)),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
                (torch.cuda, "device", nullcontext),
            ]
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield again


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def counted(call: Callable[[], object]) -> tuple[int, int]:
    """(products, those of them that were packed anew) in a call."""
    found = [0, 0]
    run, find_route = products._run, products.find_route

    def made(*arguments: object) -> object:
        found[0] += 1
        return run(*arguments)  # type: ignore[arg-type]

    def packed(*arguments: object) -> object:
        found[1] += 1
        return find_route(*arguments)  # type: ignore[arg-type]

    products._run, products.find_route = made, packed  # type: ignore[assignment]
    try:
        call()
    finally:
        products._run, products.find_route = run, find_route
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", nargs="+", default=["fp8", "bf16"], choices=list(RECIPES))
    for name, value in (("layers", 8), ("tokens", 16384), ("hidden", 1024), ("intermediate", 1024), ("experts", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=30, help="lines of each table")
    parser.add_argument("--nothing", action="store_true", help="replace every launch by nothing")
    options = parser.parse_args()
    with nothing_launched() if options.nothing else nullcontext() as again:
        for recipe in options.recipe:
            report(options, recipe, again)


def report(options: argparse.Namespace, recipe: str, again: Again | None) -> None:
    """Prints everything about one recipe."""
    model = Layer(options, recipe, again)
    for keeps_codes in (False, True):
        for layer in model.layers:
            layer.keep_codes = keeps_codes
        for _ in range(2):  # steps make other tensors when codes begin to be kept
            if again is not None:
                again.forget()
            model.step()
        for _ in range(5):
            model.step()
        times = list(zip(*(model.step() for _ in range(10 * STEPS if options.nothing else STEPS)), strict=True))
        least, median = (sum(of(part) for part in times) for of in (min, statistics.median))
        halves = ", ".join(f"{name} {min(part):.0f}" for name, part in zip(("forward", "backward"), times, strict=True))
        kept = "kept" if keeps_codes else "made"
        print(f"{recipe}, codes {kept}: host time of a layer's step {least:.0f} us ({halves}), median {median:.0f} us")
    if not options.nothing:
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
    if torch.cuda.is_available() and not options.nothing:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as traced:
            for _ in range(5):
                model.step()
        print(traced.key_averages().table(sort_by="cuda_time_total", row_limit=options.rows))


if __name__ == "__main__":
    main()
