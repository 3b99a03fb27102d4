"""The contender made of DeepEP's first version (github.com/deepseek-ai/DeepEP, v1.2.1), built without NVSHMEM.

Its passes within a host send a token once to a rank and hand rows over by source. What it leaves to its caller is done
here by padless' own kernels: quantizing before it, the sort by expert, rows and scales to their places, and the weighted
sum of a token's rows before they go back.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from padless.bench.cases.ep.problem import EpProblem
from padless.formats import FP8_BLOCK, BlockScaledTensor
from padless.layouts import empty_mn_major
from padless.moe import ops
from padless.quantization.quantize import quantize

FOLDER = "DeepEP"  # of peers: the package deep_ep and its extension deep_ep_cpp
SMS = (24, 64, 128)
CHUNKS = (6, 16, 32)  # tokens that a channel sends together
RECEIVED = 256  # tokens that a channel has room for


class Plan(NamedTuple):
    """handle: DeepEP's. inverse: (R * T, k) rows by expert of received tokens. weights: (R * T, k) float32."""

    handle: Any
    inverse: torch.Tensor
    weights: torch.Tensor


@lru_cache
def load(folder: Path) -> Any:
    """Its package. Raises what importing raises."""
    sys.path.insert(0, str(folder / FOLDER))
    try:
        return import_module("deep_ep")
    finally:
        sys.path.remove(str(folder / FOLDER))


@lru_cache
def buffer_of(api: Any, num_bytes: int) -> Any:
    """A buffer of the default group, kept as long as the process."""
    return api.Buffer(dist.group.WORLD, num_bytes)


class DeepEpExchange:
    """Rows in FP8 with their scales, once a rank, and sums in bfloat16 back; room for the worst case, so no size is read
    on the host and a CUDA graph can have it.

    The number of rows is taken as known, so that the scales of the capacity's other rows are not placed: no caller on a
    device could do as well. sms: of both directions, whose plan goes with it; chunks: of dispatch and of combine. The
    benchmark chooses them.
    """

    def __init__(self, problem: EpProblem, api: Any) -> None:
        q, size = problem.point, problem.rank.size
        self.p, self._api = problem, api
        self.sms, self.chunks = SMS[0], (CHUNKS[0], CHUNKS[0])
        self._local = q.experts // size
        most = api.Config(max(SMS), max(CHUNKS), RECEIVED)
        self._buffer = buffer_of(api, most.get_nvl_buffer_size_hint(2 * q.hidden, size))
        self._used = problem.point.tokens * size * q.top_k
        self._used = int(self.dispatch()[1][-1])

    def dispatch(self, chunk: int | None = None) -> tuple[BlockScaledTensor, torch.Tensor]:
        """(rows in FP8_BLOCK by expert, offs)."""
        p, q = self.p, self.p.point
        x = quantize(p.x, FP8_BLOCK, scale_major="k")
        by_rank, _, by_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(p.ids, q.experts)
        (codes, scale), ids, weights, _, handle, _ = self._buffer.dispatch(
            (x.data, x.scale), num_tokens_per_rank=by_rank, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=by_expert, topk_idx=p.ids, topk_weights=p.weights,
            num_worst_tokens=p.rank.size * q.tokens, config=self._config(chunk or self.chunks[0]),
        )  # fmt: skip
        offs, tokens, inverse = ops.call("route", ids, self._local)
        self.plan = Plan(handle, inverse, weights)
        return expand(codes, scale, inverse, tokens[: self._used]), offs

    def combine(self, y: torch.Tensor, plan: Plan, chunk: int | None = None) -> torch.Tensor:
        """(T, H) of y, rows by expert, with the plan of their dispatch."""
        sums = ops.call("combine", y, plan.inverse, plan.weights, None, torch.bfloat16)
        config = self._config(chunk or self.chunks[1])
        out: torch.Tensor = self._buffer.combine(sums, plan.handle, config=config)[0]
        return out

    def layer(self) -> torch.Tensor:
        rows, offs = self.dispatch()
        return self.combine(self.p.products(rows, offs), self.plan)

    def _config(self, chunk: int) -> Any:
        return self._api.Config(self.sms, chunk, RECEIVED)


def expand(codes: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, tokens: torch.Tensor) -> BlockScaledTensor:
    """Rows by expert of received tokens (W, H), with MN-major scales. inverse: (W, k). tokens: that of each row."""
    rows = len(tokens)
    data = torch.empty((rows, codes.shape[1]), dtype=torch.uint8, device=codes.device).view(codes.dtype)
    placed = empty_mn_major(rows, scale.shape[1], codes.device)
    if codes.device.type == "cuda":
        from padless.bench.cases.ep import deepep_kernels
        from padless.moe.triton.place_scales import Placed, place

        deepep_kernels.expand_codes(codes, inverse, data)
        place(Placed(scale, tokens), placed)
    else:
        data.view(torch.uint8).copy_(codes.view(torch.uint8)[tokens.long()])
        placed.copy_(scale[tokens.long()])
    return BlockScaledTensor(data, placed, FP8_BLOCK, None)
