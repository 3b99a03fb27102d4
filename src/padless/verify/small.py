"""Small launches of the quantizing epilogues, for compute-sanitizer: ``python -m padless.verify.small``.

Operands are drawn on the CPU and copied, so that a tool sees who wrote them; outputs are guarded.
"""

from __future__ import annotations

from typing import Any

import torch

from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import Route
from padless.ops.grouped_gemm import group_offsets
from padless.verify.checks import Check, run_small
from padless.verify.fuzz.place import Place
from padless.verify.problems.epilogue import EpilogueProblem, operands, quant_routes, run_problem

# No rows, one row, more than a tile of 128 rows; rows past the last group.
_SIZES, _PAST = (5, 0, 130, 1), 3
# A tail of the 128 columns; five blocks of 128 along K and a tail, so that a ring of four stages goes round.
_N, _K = 160, 672

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


def small_launches(place: Place) -> None:
    """All of the launches, one after the other."""
    for route in quant_routes(place.arch):
        for gate_up, options in QUANT_CALLS:
            try:
                run_problem(small_problem(route, gate_up, options), str(place.device), place.backend)
            except ValueError:
                if route.config_class is Sm90Fp8Config:  # the one that takes all of these calls
                    raise


SMALL = Check(small_launches)

if __name__ == "__main__":
    run_small(SMALL)
