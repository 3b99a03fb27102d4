"""Ways to call a layer: modes of torch, two calls in flight, checkpoints, threads, gradients kept elsewhere."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from padless.nn import DelayedWgrad
from padless.verify.fuzz.states.layers import Layer, Results, core_of
from padless.verify.fuzz.states.sequence import Operation, table


class _Passing(TorchDispatchMode):
    """A mode that every operator goes through."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _inside(layer: Layer, manager: Callable[[], AbstractContextManager[Any]]) -> Callable[..., torch.Tensor]:
    def call(*inputs: Any) -> torch.Tensor:
        with manager():
            out: torch.Tensor = layer.module(*inputs)
            return out

    return call


def twice(layer: Layer, r: random.Random) -> None:
    """Calls as they are."""
    for _ in range(r.randint(1, 2)):
        layer.check("again")


def without_grad(layer: Layer, r: random.Random) -> None:
    """Under no_grad or inference_mode, against a fresh module there."""
    if r.random() < 0.5:
        with torch.no_grad():
            layer.parameter(r).mul_(-1)
    with r.choice((torch.no_grad, torch.inference_mode))():
        layer.check("within without_grad")


def inference_weights(layer: Layer, r: random.Random) -> None:
    """A copy whose weights were made in inference mode, where torch counts no writes."""
    weights = layer.snapshot()
    with torch.inference_mode():
        other = layer.fresh(weights)
        core_of(other).keep_codes = r.random() < 0.7
        layer.check("of weights of inference mode", other)
        for parameter in other.parameters():
            parameter.mul_(-1.25)
        layer.check("of weights of inference mode, written", other)


def autocast(layer: Layer, r: random.Random) -> None:
    """In a region of autocast, against a fresh module there."""
    if layer.dtype == torch.float32:
        with torch.autocast(layer.device.type, dtype=torch.bfloat16, cache_enabled=r.random() < 0.5):
            layer.check("within autocast")


def checkpointed(layer: Layer, r: random.Random) -> None:
    """By activation checkpointing of both kinds."""
    reentrant, module, inputs = r.random() < 0.5, layer.module, layer.inputs()
    if not layer.is_plain:
        return
    out = checkpoint(module, *inputs, use_reentrant=reentrant)
    want, _ = layer.results(layer.fresh(layer.read(module)), inputs)
    if reentrant and not any(t is not None and t.requires_grad for t in inputs):
        want = {"output": want["output"]}  # torch differentiates nothing then
    layer.same(layer.gradients(out, inputs, layer.read(module), by_backward=True), want, "by a checkpoint")


def other_modes(layer: Layer, r: random.Random) -> None:
    """Modes of torch that are to change no bit."""
    manager = r.choice((_Passing, torch.autograd.graph.save_on_cpu, _Filled))
    layer.check("within a mode", call=_inside(layer, manager))


class _Filled:
    """Memory is filled before it is used, as deterministic algorithms have it."""

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *error: object) -> None:
        torch.use_deterministic_algorithms(self._before)


def compiled(layer: Layer, r: random.Random) -> None:
    """By torch.compile, before and after a write."""
    if not layer.is_plain or layer.rows < 2:
        return
    torch._dynamo.reset()
    call = torch.compile(layer.module, backend="aot_eager")
    layer.check("compiled", call=call)
    with torch.no_grad():
        layer.parameter(r).mul_(-1)
    layer.check("compiled, after a write", call=call)
    layer.uncounted()


def functional(layer: Layer, r: random.Random) -> None:
    """torch.func.functional_call with other weights, more than once."""
    if not layer.is_plain:
        return
    prefix = "" if layer.core is layer.module else "experts."
    for _ in range(r.randint(1, 3)):
        given = {f"{prefix}{name}": t.requires_grad_() for name, t in layer.other(r).items()}
        inputs = layer.inputs()
        weights = layer.read(layer.module) | given
        out = torch.func.functional_call(layer.module, given, inputs)
        want, _ = layer.results(layer.fresh(weights), inputs)
        layer.same(layer.gradients(out, inputs, weights), want, "by functional_call")


# --- several calls ---------------------------------------------------------------------------------------


def in_flight(layer: Layer, r: random.Random) -> None:
    """Two calls, the first one's backward pass last; perhaps with other weights in the second one."""
    if not layer.is_plain:
        return
    calls: list[tuple[Any, ...]] = []
    for _ in range(2):
        inputs = layer.inputs()
        calls.append((layer.module(*inputs), inputs, layer.read(layer.module), layer.snapshot()))
        if len(calls) == 1 and not _saves_weights(layer) and r.random() < 0.6:
            with torch.no_grad():
                for name in layer.weights:
                    getattr(layer.core, name).mul_(-1.5)
    for out, inputs, weights, before in reversed(calls):
        want, _ = layer.results(layer.fresh(before), inputs)
        layer.same(layer.gradients(out, inputs, weights), want, "of two calls in flight")


def written_in_between(layer: Layer, r: random.Random) -> None:
    """Weights change between a forward and its backward pass, whose gradients are of the weights before.

    Where the weight itself is saved, torch counts the write and raises.
    """
    if not layer.is_plain:
        return
    inputs, weights, before = layer.inputs(), layer.read(layer.module), layer.snapshot()
    out = layer.module(*inputs)
    with torch.no_grad():
        for name in layer.weights:
            getattr(layer.core, name).mul_(-1.5)
    if r.random() < 0.5:
        layer.check("between a forward and its backward pass")
    want, _ = layer.results(layer.fresh(before), inputs)
    try:
        got = layer.gradients(out, inputs, weights)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error) or not _saves_weights(layer):
            raise
    else:
        layer.same(got, want, "with weights written before the backward pass")


def _saves_weights(layer: Layer) -> bool:
    """Whether a product of the backward pass reads the parameter itself."""
    recipe = layer.core.recipe
    return layer.dtype == torch.bfloat16 and torch.bfloat16 in (recipe.forward, recipe.dgrad)


def backward_twice(layer: Layer, r: random.Random) -> None:
    """Twice through one graph, by retain_graph."""
    if not layer.is_plain:
        return
    inputs, weights, before = layer.inputs(), layer.read(layer.module), layer.snapshot()
    out = layer.module(*inputs)
    want, _ = layer.results(layer.fresh(before), inputs)
    layer.same(layer.gradients(out, inputs, weights, retain_graph=True), want, "in the first backward pass")
    layer.same(layer.gradients(out, inputs, weights), want, "in the second backward pass")


def threads(layer: Layer, r: random.Random) -> None:
    """Two threads call the module at the same time."""
    if not layer.is_plain:
        return
    layer.uncounted()
    given, found = [layer.inputs() for _ in range(2)], dict[int, Any]()
    barrier = threading.Barrier(2)

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = layer.results(layer.module, given[number])[0]
        except Exception as error:
            found[number] = error

    started = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    for number, inputs in enumerate(given):
        if isinstance(found[number], Exception):
            raise found[number]
        layer.same(found[number], layer.results(layer.fresh(layer.snapshot()), inputs)[0], "of two threads")


# --- gradients kept elsewhere ----------------------------------------------------------------------------


def main_grad(layer: Layer, r: random.Random) -> None:
    """Weight gradients are added to main_grad, over two microbatches."""
    _gradients_elsewhere(layer, r, None)


def delayed(layer: Layer, r: random.Random) -> None:
    """Weight gradients are computed later, after the weights were written."""
    _gradients_elsewhere(layer, r, DelayedWgrad())


def _gradients_elsewhere(layer: Layer, r: random.Random, queue: DelayedWgrad | None) -> None:
    if not layer.is_plain:
        return
    fresh, batches = layer.fresh(layer.snapshot()), [layer.inputs() for _ in range(r.randint(1, 2))]
    seed, dtype, overwrite = r.randrange(1000), r.choice((torch.float32, torch.bfloat16)), r.random() < 0.5
    has_main, found = queue is None or seed % 2 == 0, []
    for module in (layer.module, fresh):
        core, results = core_of(module), Results()
        weights = {name: getattr(core, name) for name in layer.weights}
        core.delayed_wgrad = queue
        for weight in weights.values():
            weight.grad = None
            if has_main:
                weight.main_grad = layer.values(weight.detach(), random.Random(seed)).to(dtype)
                weight.overwrite_main_grad = overwrite
        for number, inputs in enumerate(batches):
            out = module(*inputs)
            if out.requires_grad:
                out.backward(torch.ones_like(out) / (1 + torch.arange(out.shape[-1], device=out.device)))
            results |= {f"output {number}": out.detach()}
        if queue is not None:
            if module is layer.module:
                with torch.no_grad():
                    layer.parameter(r).mul_(-1)
            queue.flush()
        for name, weight in weights.items():
            results[name] = weight.main_grad if has_main else weight.grad
            if has_main:
                del weight.main_grad, weight.overwrite_main_grad
        module.zero_grad(set_to_none=True)
        core.delayed_wgrad = None
        found.append(results)
    layer.same(found[0], found[1], "with gradients elsewhere")


USES: dict[str, Operation] = {
    **table(twice, share=2.0),
    **table(functional, in_flight, written_in_between, share=2.0),
    **table(without_grad, backward_twice),
    **table(checkpointed, autocast, inference_weights, main_grad, delayed, other_modes, share=0.7),
    **table(threads, share=0.3),
    **table(compiled, share=0.02),
}
