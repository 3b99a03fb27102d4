"""No stage of a Hopper kernel's ring is filled again before all of it has been read.

What would convince: with two stages, where the next fill follows soonest, thousands of calls of every kernel with a ring
of codes give the bits of one call with as many stages as fit. Where a warp gave its stage back behind its loads, before
their values were there, over half of the calls of NVFP4 x NVFP4 differed (docs/kernels/sm90_bf16/ladder.md).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from padless.bench.cases.problems.picks import KINDS, PicksPoint, make_problem, picked
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.runtime.driver import cuda_driver

CALLS = 3000
FLUSHED = 256 << 20  # bytes, five times what L2 holds
N, K, GROUPS, TOP_K, TOKENS = 4096, 1536, 128, 8, 512
FEW_TOKENS = 64  # of which a SwiGLU takes tiles of tokens on columns
# The tile of most tokens, whose rings are the shortest and whose shared memory is the busiest, where it is not picked.
LARGEST: dict[str, dict[str, int]] = {"nvfp4": {"block_m": 128, "block_n": 256, "num_warpgroups": 2}}
CASES: list[tuple[str, int, dict[str, int]]] = [
    *((kind, TOKENS, LARGEST.get(kind, {})) for kind in KINDS),
    ("fp8 swiglu", FEW_TOKENS, {}),
    *((kind, TOKENS, {"cluster_n": 2}) for kind in KINDS if kind.startswith("wgrad fp8")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "tokens", "other"), CASES, ids=str)
def test_a_stage_is_read_before_it_is_filled_again(kind: str, tokens: int, other: dict[str, int]) -> None:
    point = PicksPoint(kind, "any", tokens, "drawn", tokens * TOP_K, N, K, GROUPS, TOP_K, 0)
    problem = make_problem(point, 0, "cuda")
    config = picked(point, problem.tokens, cuda_driver(0).num_sms(0))
    chosen = replace(config, **other, **({"stage_blocks": 1} if is_fp4(config) else {}))
    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def call(of: object) -> torch.Tensor:
        problem.out.fill_(0.0 if KINDS[kind].adds else float("nan"))
        return problem.run(config=of)

    want = call(config).clone()
    assert want.float().isfinite().all()
    assert want.float().any()
    few, wrong = replace(chosen, num_stages=2), torch.zeros((), dtype=torch.int64, device="cuda")
    for turn in range(CALLS):
        if turn % 4 == 0:
            flush.zero_()
        wrong += ~(call(few).view(torch.uint8) == want.view(torch.uint8)).all()
    assert wrong.item() == 0, f"{wrong.item()} of {CALLS} calls"


def is_fp4(config: object) -> bool:
    return isinstance(config, Sm90Bf16Config) and config.can_pair_blocks
