"""CUDA graphs of a training layer: one for its forward pass, one for its backward pass, one for codes that are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from padless.gradients import asked_for, once_differentiable
from padless.nn.linear import QuantizedModule
from padless.nn.weight_codes import WeightCodes, flat_operands, joined_operands, weight_operands, writes_of
from padless.runtime.devices import on_device_of

Results = tuple[torch.Tensor | None, ...]
_WARM_UPS = 2


class Recorded(NamedTuple):
    """Work that was captured: what does it again, and the tensors that it then writes."""

    replay: Callable[[], None]
    results: Results


class Place(NamedTuple):
    """Place of a layer's captured graphs: the memory that they share, and a stream of its GPU."""

    pool: Any
    stream: torch.cuda.Stream


def record(work: Callable[[], Results], place: Place | None) -> Recorded:
    """Captures the launches of ``work``, which ran before, in a CUDA graph; it is not run."""
    assert place is not None
    graph = torch.cuda.CUDAGraph()
    # torch's own stream for captures is of the GPU that was current at the first one.
    with torch.cuda.graph(graph, pool=place.pool, stream=place.stream):
        results = work()
    return Recorded(graph.replay, results)


class _Codes:
    """Kept codes of one weight at addresses that stay, made again where the weight changed."""

    def __init__(self, layer: QuantizedModule, name: str, place: Place | None) -> None:
        self._weight, self._recipe = getattr(layer, name), layer.recipe
        self.owner = layer._codes[name]
        self.owner.forget()  # the warm-up's memory
        self._facts: tuple[int, ...] | None = None
        self.operands = weight_operands(self._weight, self._recipe)
        plain = self.operands.forward
        self._made: Recorded | None = None
        if not (isinstance(plain, torch.Tensor) and plain.data_ptr() == self._weight.data_ptr()):
            self._made = record(lambda: flat_operands(weight_operands(self._weight, self._recipe)), place)
            data, *rest = self._made.results
            assert data is not None
            self.operands = joined_operands(self._recipe, data, *rest)

    def refresh(self) -> None:
        """Makes the codes again if the weight was written; its address and type stay."""
        written = writes_of(self._weight)
        now = None if written is None else (self.owner.forgotten, *written)
        if self._made is not None and (now is None or now != self._facts):
            self._made.replay()
        self._facts = now


class Graphed:
    """A layer whose passes are replayed from CUDA graphs: see `graphed`.

    inputs, dout: the graphs' own inputs and gradient of the output. What is given as these very tensors is not copied.
    """

    def __init__(self, layer: nn.Module, sample: Sequence[torch.Tensor]) -> None:
        self.layer = layer
        self.parameters = [p for p in layer.parameters() if p.requires_grad]
        self._parts = [part for part in layer.modules() if isinstance(part, QuantizedModule)]
        self._places = [(part._parameters, name) for part in layer.modules() for name in part._parameters]
        self._captured = [owner[name] for owner, name in self._places]  # alive, so that no other has an id of theirs
        self._facts = self._facts_now()
        self._leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in sample]
        self.inputs = tuple(t.detach() for t in self._leaves)
        self._needs = [t.requires_grad for t in sample]
        self._mains: list[Any] = [p for p in self.parameters if getattr(p, "main_grad", None) is not None]
        self._calls = 0
        keys = (True, False) if self._mains else (False,)
        with on_device_of(self.inputs[0]), _restored([p.main_grad for p in self._mains]):
            self._warm_up(keys)
            self._capture(keys)
        del self._live  # what it kept stays where it is: nothing else is captured in this memory

    def _capture(self, keys: Sequence[bool]) -> None:
        on_gpu = self._leaves[0].is_cuda
        place = Place(torch.cuda.graph_pool_handle(), torch.cuda.Stream()) if on_gpu else None
        self._codes = [_Codes(part, name, place) for part in self._parts if part.keep_codes for name in part._codes]
        self._forward = record(self._run_forward, place)
        out = self._forward.results[0]
        assert out is not None
        self._out, self.dout = out, torch.empty_like(out)
        self._backward = {key: record(partial(self._run_backward, key), place) for key in keys}

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The layer's output for other values of the sample's tensors, under autograd. Raises ValueError."""
        if not torch.is_grad_enabled():
            out: torch.Tensor = self.layer(*inputs)
            return out
        if [t.requires_grad for t in inputs] != self._needs:
            raise ValueError(f"requires_grad of inputs must be as captured, {self._needs}; capture the layer again")
        replayed: torch.Tensor = _Replay.apply(self, *inputs, *self.parameters)  # type: ignore[no-untyped-call]
        return replayed

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            "CUDA graphs of a layer read its memory and cannot be copied; copy the layer and capture the copy"
        )

    @torch.no_grad()
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The same without autograd: the caller runs `backward`. Raises ValueError."""
        return self.replay_forward(inputs)

    def replay_forward(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The forward pass of both ways, gradients being off."""
        if self._facts != self._facts_now():
            raise ValueError(
                "a parameter of layer, or its main_grad, is another tensor now, or its recipe another one; capture the "
                "layer again"
            )
        for mine, its in zip(self.inputs, inputs, strict=True):
            if mine is its:
                continue
            if mine.shape != its.shape or mine.dtype != its.dtype:
                described = ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in self.inputs)
                raise ValueError(f"inputs must be as captured, {described}; capture the layer again with others")
            mine.copy_(its)
        for recorded in self._backward.values():  # its results may lie where the other graphs have scratch
            self._keep_gradients(recorded)
        for codes in self._codes:
            codes.refresh()
        self._forward.replay()
        self._calls += 1
        return self._out

    @torch.no_grad()
    def backward(self, dout: torch.Tensor) -> Results:
        """Gradients of the last call's inputs, in memory that the next call writes; None where there is none.

        Those of parameters go to ``.grad`` and ``main_grad``.
        """
        of_inputs, of_parameters = self._replay_backward(dout)
        for p, gradient in zip(self.parameters, of_parameters, strict=True):
            if gradient is not None:
                p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        return of_inputs

    def _facts_now(self) -> list[Any]:
        """Facts that the graphs were made of and that no replay can follow."""
        parameters = [owner.get(name) for owner, name in self._places]
        found: list[Any] = [(id(p), p.data_ptr()) for p in parameters if p is not None]
        found += [main.data_ptr() for p in self.parameters if (main := getattr(p, "main_grad", None)) is not None]
        return found + [part.recipe for part in self._parts]

    def _warm_up(self, keys: Sequence[bool]) -> None:
        """Runs both passes, so that everything is compiled and loaded."""
        with _on_a_side_stream(self._leaves[0]):
            for _ in range(_WARM_UPS):
                for key in keys:
                    with torch.enable_grad():
                        self._live = self.layer(*self._leaves)
                    self.dout = torch.zeros_like(self._live)
                    self._run_backward(key)

    def _run_forward(self) -> Results:
        with torch.enable_grad(), _pinned({codes.owner: codes.operands for codes in self._codes}):
            self._live = self.layer(*self._leaves)
        return (self._live.detach(),)

    def _run_backward(self, overwrite: bool) -> Results:
        """Gradients of inputs and parameters, None where there is none, from the last forward pass, which is kept."""
        before = [getattr(p, "overwrite_main_grad", False) for p in self._mains]
        wanted = [t for t in (*self._leaves, *self.parameters) if t.requires_grad]
        for p in self._mains:
            p.overwrite_main_grad = overwrite
        try:
            found = torch.autograd.grad(self._live, wanted, self.dout, retain_graph=True, allow_unused=True)
        finally:
            for p, value in zip(self._mains, before, strict=True):
                p.overwrite_main_grad = value
        given = iter(found)
        return tuple(next(given) if t.requires_grad else None for t in (*self._leaves, *self.parameters))

    def _keep_gradients(self, recorded: Recorded) -> None:
        """Copies what .grad has taken of the results of a backward pass, which a replay is about to write."""
        for p, gradient in zip(self.parameters, recorded.results[len(self.inputs) :], strict=True):
            _keep_gradient(p, gradient)

    def _replay_backward(self, dout: torch.Tensor) -> tuple[Results, Results]:
        """Gradients of inputs and of parameters, all in the graph's memory."""
        flags = {bool(getattr(p, "overwrite_main_grad", False)) for p in self._mains} or {False}
        if len(flags) > 1:
            raise RuntimeError("overwrite_main_grad differs from weight to weight; a graph takes one for all")
        recorded = self._backward[flags.pop()]
        count = len(self.inputs)
        of_inputs, of_parameters = recorded.results[:count], recorded.results[count:]
        self._keep_gradients(recorded)
        if dout is not self.dout:
            self.dout.copy_(dout)
        recorded.replay()
        for p in self._mains:
            if hasattr(p, "grad_added_to_main_grad"):
                p.grad_added_to_main_grad = True
        return of_inputs, tuple(None if t is None else t.detach() for t in of_parameters)

    def run_backward(self, dout: torch.Tensor, call: int, asked: tuple[bool, ...]) -> Results:
        """For autograd: gradients of inputs, copied, since it may keep them, and of parameters.

        asked: of which parameters autograd wants them.
        """
        if self._mains and not all(asked):
            raise RuntimeError(
                "a backward pass of some tensors was asked for, and a graph adds to main_grad of every parameter; ask "
                "for all, or call the layer itself"
            )
        if call != self._calls:
            raise RuntimeError(
                "the layer was called again before this backward pass, in memory that both share; run a call's backward "
                "pass before the next call, or capture the layer once for each call that is under way"
            )
        of_inputs, of_parameters = self._replay_backward(dout)
        return *(None if t is None else t.clone() for t in of_inputs), *of_parameters


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphed, *tensors: torch.Tensor) -> torch.Tensor:
        out = graphs.replay_forward(tensors[: len(graphs.inputs)])
        ctx.graphs, ctx.call = graphs, graphs._calls
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        asked = asked_for(ctx)[1 + len(ctx.graphs.inputs) :]
        return None, *ctx.graphs.run_backward(dout, ctx.call, asked)


def _keep_gradient(parameter: torch.Tensor, written: torch.Tensor | None) -> None:
    """Autograd may have taken the graph's own memory for .grad, which a replay is about to write."""
    if parameter.grad is not None and written is not None and parameter.grad.data_ptr() == written.data_ptr():
        parameter.grad = parameter.grad.clone()


@contextmanager
def _pinned(operands: dict[WeightCodes, Any]) -> Iterator[None]:
    """Codes of weights that are not made inside, but are these."""
    for codes, made in operands.items():
        codes.pinned = made
    try:
        yield
    finally:
        for codes in operands:
            codes.pinned = None


@contextmanager
def _restored(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Tensors that have the values afterwards that they had before."""
    kept = [t.clone() for t in tensors]
    try:
        yield
    finally:
        for t, values in zip(tensors, kept, strict=True):
            t.copy_(values)


@contextmanager
def _on_a_side_stream(like: torch.Tensor) -> Iterator[None]:
    if not like.is_cuda:
        yield
        return
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


def graphed(layer: nn.Module, *sample: torch.Tensor) -> Graphed:
    """``layer`` with its forward and its backward pass in CUDA graphs: a call is two launches and no Python of a layer.

    layer: `Experts`, `MoE`, `GroupedLinear`, or a module with such inside, whose forward takes tensors and returns one.
    sample: tensors as every call will give them: shapes, dtypes, device, requires_grad. Ids, offsets and so the sizes of
        groups may differ from call to call: they are read on the device. Fewer tokens: ids of no expert, -1.

    A call has the bits of ``layer(*inputs)``. Codes of weights are made in the graph of the forward pass; with
    ``keep_codes``, as it is now, in a third graph, at the first call after a change of one. ``main_grad`` is added
    to, or overwritten where ``overwrite_main_grad`` is true at the backward pass. A call's output is the graph's
    memory, which the next call writes, and its backward pass is to run before the next call. Where autograd is off
    ``layer`` itself is called. ``forward`` and ``backward`` of the result replay the passes without autograd, for who
    has the gradient of the output. Not for layers with ``ep``, ``delayed_wgrad`` or weights that are DTensors. Raises
    ValueError.
    """
    for part in layer.modules():
        if getattr(part, "ep", None) is not None or getattr(part, "delayed_wgrad", None) is not None:
            raise ValueError(
                f"layer has a {type(part).__name__} with ep or delayed_wgrad; a graph takes neither, give None"
            )
    if any(hasattr(p, "to_local") for p in layer.parameters()):
        raise ValueError("layer has a parameter that is a DTensor, gathered anew at every call; call the layer itself")
    if not sample or any(not t.is_cuda for t in (*sample, *layer.parameters())):
        raise ValueError("sample is empty, or it or layer is not on a GPU; CUDA graphs are for tensors on one")
    return Graphed(layer, sample)
