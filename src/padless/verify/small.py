"""A small launch of every kernel of this GPU but the first, for compute-sanitizer: ``python -m padless.verify.small``.

One for each source file and each way through it: operands by format, outputs of a quantising epilogue. Operands are
drawn on the CPU and copied, so that a tool sees who wrote them; outputs are guarded.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.launch import KernelChoice
from padless.kernels.sm90_bf16.config import Sm90Bf16Config, select_config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.kernels.table import BF16, Route
from padless.ops.grouped_gemm import group_offsets, grouped_gemm
from padless.verify.blackwell import dense_products, problem_lists
from padless.verify.checks import Check, run_small
from padless.verify.formats import routes_of
from padless.verify.fuzz.place import Place
from padless.verify.problems.epilogue import EpilogueProblem, operands, quant_routes, run_problem

# No rows, one row, more than a tile of 128 rows; rows past the last group.
_SIZES, _PAST = (5, 0, 130, 1), 3
# A tail of the 128 columns; five blocks of 128 along K and a tail, so that a ring of four stages goes round.
_N, _K = 160, 672
_PAIRS = (("NVFP4", "NVFP4"), ("MXFP8", "MXFP8"), (BF16, "MXFP4"), ("FP8_BLOCK", "NVFP4"))

# Keywords of a quantising call.
_EVERYTHING: dict[str, Any] = {"alpha": True, "bias": True, "prob": True, "return_amax": True}
QUANT_CALLS: tuple[tuple[str | None, dict[str, Any]], ...] = (
    (None, {"d_format": FP8_BLOCK} | _EVERYTHING),  # rows and columns
    (None, {"d_format": MXFP8, "discrete_col_sfd": True}),
    (None, {"d_format": NVFP4, "row_layout": "blocked_groups", "global_scale_tensor": torch.tensor([0.01])}),
    # Two CTAs of a cluster swap the maxima of their rows.
    ("concatenated", {"d_format": FP8_BLOCK, "column_output": False} | _EVERYTHING),
    ("interleaved", {"d_format": FP8_BLOCK, "prob": True}),
    ("interleaved", {"d_dtype": torch.bfloat16}),
)


def small_routes(arch: str) -> list[Route]:
    """The routes that are launched: on Hopper a few pairs of the bf16 kernel, which differ in how operands are read."""
    chosen = []
    for route in routes_of(arch):
        many = route.config_class in (Sm90Bf16Config, Sm90Mxfp8Config)
        if not many or (route.a, route.b) in _PAIRS:
            chosen.append(route)
    return chosen


def small_problem(route: Route, gate_up: str | None, options: dict[str, Any]) -> EpilogueProblem:
    """A quantising call; "alpha", "bias" and "prob" in ``options`` stand for tensors of random numbers."""
    generator = torch.Generator().manual_seed(1)
    m, groups = sum(_SIZES) + _PAST, len(_SIZES)
    n = _N if gate_up is None else 384  # of the output 192: a tile and a tail
    numbers = {
        "alpha": torch.randn(groups, generator=generator),
        "bias": torch.randn((groups, n), generator=generator),
        "prob": torch.rand(m, generator=generator),
    }
    given: dict[str, Any] = {f"{k}_tensor": numbers[k] for k in numbers if options.get(k)}
    given |= {k: v for k, v in options.items() if k not in numbers} | {"m_aligned": 1}
    a, b = operands(route, m, n, _K, groups, generator, special=False)
    return EpilogueProblem(a, b, group_offsets(_SIZES), gate_up, given, seed=1)


def _configs(route: Route, m: int) -> list[KernelChoice | None]:
    """Kernels of a route: the default, and of the bf16 kernel the one for so many rows, with twice the warpgroups."""
    if route.config_class is Sm90Mxfp8Config:
        return [Sm90Mxfp8Config()]
    if route.config_class is Sm90Bf16Config:
        return [Sm90Bf16Config(route.a, route.b), select_config(route.a, route.b, m, _N, len(_SIZES))]
    return [None]


def small_launches(place: Place) -> None:
    """All of the launches, one after the other."""
    draw, device, backend = random.Random(0), str(place.device), place.backend
    for route in small_routes(place.arch):
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        m = sum(_SIZES) + _PAST
        drawn = operands(route, m, _N, _K, len(_SIZES), generator, special=False)
        a, b, offs = (place.put(t) for t in (*drawn, group_offsets(_SIZES)))
        for config in _configs(route, m):
            guarded = place.output(m, _N, torch.bfloat16)
            grouped_gemm(a, b, offs, out=guarded.out, backend=backend, config=config)
            place.judge.written(route.name, guarded, sum(_SIZES))
    for route in quant_routes(place.arch):
        for gate_up, options in QUANT_CALLS:
            try:
                run_problem(small_problem(route, gate_up, options), device, backend)
            except ValueError:
                if route.config_class is Sm90Fp8Config:  # the one that takes all of these calls
                    raise
    if place.arch == "sm_100a":
        dense_products(place, 1)
        problem_lists(place, 1)


SMALL = Check(small_launches)

if __name__ == "__main__":
    run_small(SMALL)
