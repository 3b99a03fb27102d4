"""CUDA graphs on a CPU, for `padless.nn.graphs.record`: a replay does the work again, into the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from padless.nn.graphs import Recorded, Results


def again(work: Callable[[], Results], pool: Any) -> Recorded:
    """What a graph does: the work's results are tensors that a replay writes."""
    results = work()

    def replay() -> None:
        with torch.no_grad():
            for mine, its in zip(results, work(), strict=True):
                if mine is not None and its is not None:
                    mine.view(torch.uint8).copy_(its.view(torch.uint8))

    return Recorded(replay, results)
