"""Streams of calls: one that is given, and tensors that are kept for calls on others than the one they were made on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from padless.row_groups import is_traced
from padless.runtime.devices import is_capturing
from padless.runtime.driver import stream_of


class Kept:
    """Tensors that one stream has just written, for calls on any.

    A caller orders its streams by the tensors that it gave and knows nothing of these: another stream has to wait for
    what wrote them, and torch, which gives memory away in the order of the stream that it was asked for on, has to be
    told of the others. On a CPU nothing is to do.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self._tensors = tuple(t for t in tensors if t is not None and t.is_cuda)
        if self._tensors:
            first = self._tensors[0]
            self._stream = stream_of(first)
            self._written = torch.cuda.current_stream(first.device).record_event()

    def read(self) -> None:
        """Lets launches on the current stream, which follow, read them.

        Nothing is to do while a CUDA graph is captured: torch.cuda.graph waits for all streams before it begins, and who
        keeps the tensors has to keep them for as long as the graph may be replayed.
        """
        if not self._tensors or stream_of(self._tensors[0]) == self._stream or is_capturing(self._tensors[0].device):
            return
        here = torch.cuda.current_stream(self._tensors[0].device)
        here.wait_event(self._written)
        for t in self._tensors:
            t.record_stream(here)


def on_stream(name: str, handle: int | None, t: object) -> AbstractContextManager[object]:
    """Makes a stream of t's GPU the current one, so that all of a call is on it: also what fills and converts tensors in
    front of a launch, and the memory that it takes. None stands for the current one; a CPU has none.

    name: the argument, in the error for a call that is traced.
    """
    if handle is None or not isinstance(t, torch.Tensor):  # which is refused later
        return nullcontext()
    if is_traced(t):
        raise ValueError(
            f"{name} must be None in a call that is compiled or exported, whose program has one stream; make this "
            "stream torch's current one where the program runs"
        )
    return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=t.device)) if t.is_cuda else nullcontext()
