"""The contender made of torchtitan's MinimalAsyncEP (github.com/pytorch/torchtitan), where its two files can be had."""

from __future__ import annotations

import importlib.util
import logging
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from padless.bench.cases.ep.problem import EpProblem
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.quantization.quantize import quantize

FOLDER = "torchtitan"  # of peers: api.py and kernels.py of torchtitan/distributed/minimal_async_ep
_PACKAGE = "torchtitan.distributed.minimal_async_ep"


@lru_cache
def load(folder: Path) -> Any:
    """Its api, without the rest of torchtitan, whose logger alone it takes. Raises what importing raises."""
    for name in ("torchtitan", "torchtitan.distributed", "torchtitan.tools", "torchtitan.tools.logging", _PACKAGE):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["torchtitan.tools.logging"].logger = logging.getLogger("torchtitan")  # type: ignore[attr-defined]
    for name in ("kernels", "api"):
        full = f"{_PACKAGE}.{name}"
        spec = importlib.util.spec_from_file_location(full, folder / FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[f"{_PACKAGE}.api"]


class AsyncEpExchange:
    """Rows pushed to their places by expert, k times in bfloat16, and back, with the passes that are left to a caller.

    Those are: counting the ids before it, and quantizing the rows behind it. Their number is taken as known, so that the
    capacity's other rows are not quantized: no caller on a device could do as well.
    """

    def __init__(self, problem: EpProblem, folder: Path) -> None:
        self.p, self.api = problem, load(folder)
        q, size = problem.point, problem.rank.size
        local = q.experts // size
        self.capacity = size * q.tokens * min(q.top_k, local)
        self.api._buffer_key = self.api._buffer_state = None  # one a process, and points differ
        group = dist.group.WORLD
        self.api.init_buffer(group, q.hidden, q.tokens, local, q.top_k, torch.bfloat16, problem.x.device)
        self.used = int(self._dispatch()[8].sum())

    def dispatch(self) -> tuple[BlockScaledTensor, torch.Tensor]:
        """(rows in FP8_BLOCK by expert, offs)."""
        rows, *self.plan, counts = self._dispatch()
        return quantize(rows[: self.used], FP8_BLOCK), counts.cumsum(0).to(torch.int32)

    def combine(self, y: torch.Tensor, plan: list[torch.Tensor]) -> torch.Tensor:
        """(T, H) of y, rows by expert, with the plan of their dispatch."""
        ranks, rows, back_ranks, back_rows, num_rows, sorted_slots, places = plan
        p, q = self.p, self.p.point
        scores = p.weights.reshape(-1)
        out: torch.Tensor = self.api.combine_op(
            y, ranks, rows, back_ranks, back_rows, num_rows, places, sorted_slots, scores, q.tokens, q.top_k
        )[0]
        return out

    def layer(self) -> torch.Tensor:
        rows, offs = self.dispatch()
        return self.combine(self.p.products(rows, offs), self.plan)

    def _dispatch(self) -> tuple[torch.Tensor, ...]:
        p, q = self.p, self.p.point
        counts = torch.zeros(q.experts, dtype=torch.int64, device=p.x.device)
        counts.scatter_add_(0, p.ids.reshape(-1), torch.ones_like(p.ids).reshape(-1))
        found: tuple[torch.Tensor, ...] = self.api.dispatch_op(p.x, p.ids, counts, self.capacity, p.rank.size)
        return found
