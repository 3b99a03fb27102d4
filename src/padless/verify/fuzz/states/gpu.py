"""Operations on a GPU: CUDA graphs, by hand and by `padless.nn.graphed`, other streams, another device."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import nn

from padless.nn.graphs import Graphed
from padless.verify.fuzz.states.layers import FRESH, NAMED, Layer
from padless.verify.fuzz.states.sequence import Operation, table


def _written(layer: Layer, r: random.Random, counted: bool) -> None:
    """Writes the weights where they are, perhaps in a way that torch does not count."""
    for parameter in layer.core.parameters():
        value = layer.values(parameter.detach(), r)
        if counted:
            with torch.no_grad():
                parameter.copy_(value)
        else:
            parameter.data.copy_(value)
    if not counted:
        layer.uncounted()


def _is_trained(layer: Layer) -> bool:
    """Whether there are tokens, and something to differentiate."""
    needs = layer.x_needs_grad or any(p.requires_grad for p in layer.module.parameters())
    return layer.is_plain and layer.rows > 0 and needs


def graphed(layer: Layer, r: random.Random) -> None:
    """Passes in graphs, called between writes; refused where a parameter is another."""
    if not _is_trained(layer):
        return
    module = layer.module
    graphs = Graphed(module, [t for t in layer.inputs() if t is not None])
    for number in range(r.randint(2, 4)):
        inputs = layer.inputs()
        out = graphs(*(t for t in inputs if t is not None))
        want, weights = layer.results(layer.fresh(layer.read(module)), inputs)
        del weights
        layer.same(layer.gradients(out, inputs, layer.read(module)), want, f"in graphs, call {number}")
        _written(layer, r, r.random() < 0.6)
        if r.random() < 0.3:
            layer.check("next to graphs")
    name, recipe = r.choice(layer.weights), layer.core.recipe
    before = getattr(layer.core, name)
    how = r.randrange(3)
    if how == 0:
        setattr(layer.core, name, nn.Parameter(before.detach().clone(), before.requires_grad))
    elif how == 1:
        before.data = before.data.clone()
        layer.uncounted()
    else:
        layer.core.recipe = NAMED[r.choice(layer.recipes())]
    must_refuse = how < 2 or layer.core.recipe != recipe
    try:
        graphs(*(t for t in layer.inputs() if t is not None))
    except ValueError as error:
        if "capture the layer again" in str(error) and must_refuse:
            return
        raise
    layer.place.judge.wrong(f"{FRESH}: graphs of another parameter or recipe were replayed", must_refuse)


def captured(layer: Layer, r: random.Random) -> None:
    """A step captured by hand: the weights are quantized when the graph runs, also where codes are kept."""
    if not _is_trained(layer) or layer.device.index:  # it is captured on the current device
        return
    inputs = layer.inputs()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer.results(layer.module, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    drawn = torch.randn(layer.module(*inputs).shape, device=layer.device)
    with torch.cuda.graph(graph):
        out = layer.module(*inputs)
        named = {f"input {i}": t for i, t in enumerate(inputs) if t is not None} | layer.read(layer.module)
        wanted = {name: t for name, t in named.items() if t.requires_grad}
        dout = drawn.to(out.dtype)
        made = torch.autograd.grad(out, list(wanted.values()), dout, allow_unused=True)
    for _ in range(r.randint(2, 3)):
        _written(layer, r, r.random() < 0.5)
        with torch.no_grad():
            for mine, other in zip(inputs, layer.inputs(), strict=True):
                if mine is not None and other is not None:
                    mine.copy_(other)
        graph.replay()
        fresh = layer.fresh(layer.read(layer.module))
        given = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in inputs]
        again = fresh(*given)
        sources = {f"input {i}": t for i, t in enumerate(given) if t is not None} | layer.read(fresh)
        wants = torch.autograd.grad(again, [sources[name] for name in wanted], dout, allow_unused=True)
        layer.same({"output": out.detach()}, {"output": again.detach()}, "replayed")
        layer.same(dict(zip(wanted, made, strict=True)), dict(zip(wanted, wants, strict=True)), "replayed")


def side_stream(layer: Layer, r: random.Random) -> None:
    """Calls on another stream, after a write there."""
    side, here = torch.cuda.Stream(layer.device), torch.cuda.current_stream(layer.device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        if r.random() < 0.5:
            with torch.no_grad():
                layer.parameter(r).mul_(-1)
        layer.check("on another stream")
    here.wait_stream(side)
    layer.kept = [*layer.kept[-4:], *layer.module.parameters()]  # their memory is of two streams now


def other_device(layer: Layer, r: random.Random) -> None:
    """To another GPU, with either of both the current device."""
    count = torch.cuda.device_count()
    if count < 2:
        return
    to = torch.device("cuda", r.randrange(count))
    layer.module.to(to)
    layer.uncounted()
    layer.device = to
    layer.place = replace(layer.place, device=to)
    with torch.cuda.device(r.randrange(count)):
        layer.check("on another device")
    layer.place.judge.wrong("the current device is another", torch.cuda.current_device() != 0)


GPU: dict[str, Operation] = {
    **table(graphed, captured, share=0.15, where="cuda"),
    **table(side_stream, share=1.0, where="cuda"),
    **table(other_device, share=1.5, where="cuda"),
}
