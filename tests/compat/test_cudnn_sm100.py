"""grouped_gemm_quant and grouped_gemm_swiglu_quant on Blackwell: what a caller gets, beside the reference and Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4
from padless.ops.grouped_gemm import grouped_gemm
from padless.verify.epilogue import judge
from padless.verify.problems.epilogue import (
    EpilogueProblem,
    GuardedOutputs,
    Outputs,
    quant_routes,
    random_epilogue_problem,
    run_problem,
)
from support.sm100_grouped import make_case

pytestmark = pytest.mark.kernels

BLACKWELL, HOPPER = "emulator:sm_100a", "emulator"
ROUTES = {route.a: route for route in quant_routes("sm_100a") if route.a == route.b}


@pytest.mark.parametrize(
    ("fmt", "seed"),
    [
        pytest.param(fmt, seed, marks=[] if (fmt, seed) == ("MXFP8", 4) else pytest.mark.slow)
        for fmt in ("MXFP8", "NVFP4", "MXFP4")
        for seed in range(18)
    ],
)
def test_any_call_gives_the_references_bytes(fmt: str, seed: int) -> None:
    """Options drawn at random; eighteen seeds in a row have each activation with each format of the output."""
    problem = random_epilogue_problem(ROUTES[fmt], seed)
    try:
        got = run_problem(problem, "cpu", BLACKWELL)
    except ValueError as error:
        pytest.skip(f"refused: {error}")
    values = None if problem.gate_up is None else run_problem(problem.for_values(), "cpu", BLACKWELL)
    sums = grouped_gemm(problem.a, problem.b, problem.offs, out_dtype=torch.float32, backend=BLACKWELL)
    assert judge(problem, sums, got, values).bytes > 0 or problem.valid_rows == 0


NUMBERS = {"alpha": True, "bias": True, "prob": True}
# (gate and up, options): every format of the output, with cuDNN's constants and rules or without.
CALLS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "FP8_BLOCK": (None, {"d_format": FP8_BLOCK, "return_amax": True, **NUMBERS}),
    "MXFP8, norm_const": (None, {"d_format": MXFP8, "norm_const": True, "discrete_col_sfd": True, **NUMBERS}),
    "MXFP8, documented": (
        None,
        {"d_format": MXFP8, "norm_const": True, "semantics": "documented", "row_layout": "plain", **NUMBERS},
    ),
    "MXFP8_E5M2, floor": (None, {"d_format": MXFP8_E5M2, "scale_rule": "floor", **NUMBERS}),
    "MXFP4": (None, {"d_format": MXFP4, "row_layout": "blocked_groups", "return_amax": True}),
    "NVFP4": (None, {"d_format": NVFP4, "global_scale": True, **NUMBERS}),
    "float16": (None, {"d_dtype": torch.float16, "return_amax": True, **NUMBERS}),
    "interleaved, FP8_BLOCK": ("interleaved", {"d_format": FP8_BLOCK, "row_output": False, **NUMBERS}),
    "interleaved, NVFP4": ("interleaved", {"d_format": NVFP4, "global_scale": True, "alpha": True}),
    "concatenated, MXFP8": ("concatenated", {"d_format": MXFP8, "prob": True}),
}
ALWAYS = ("FP8_BLOCK", "concatenated, MXFP8")


def exact_problem(gate_up: str | None, options: dict[str, Any]) -> EpilogueProblem:
    """Sums that no tensor core rounds: MXFP8 of small integers."""
    n = 160 if gate_up is None else 256
    case = make_case("MXFP8", (40, 0, 130, 1), n, 160, exact=True, layouts=("blocked", "blocked"), trap=False)
    draw = torch.Generator().manual_seed(5)
    groups, m = len(case.sizes), case.valid
    given = {
        "alpha": torch.randn(groups, generator=draw),
        "bias": torch.randn((groups, n), generator=draw) * 3,
        "prob": torch.rand(m, generator=draw) * 2 - 0.5,
        "norm_const": torch.rand(1, generator=draw) + 0.5,
        "global_scale": torch.rand(groups, generator=draw) * 0.1 + 0.01,
    }
    numbers = {f"{name}_tensor": t for name, t in given.items() if options.get(name)}
    others = {name: value for name, value in options.items() if name not in given}
    return EpilogueProblem(case.a, case.b, case.offs, gate_up, numbers | others | {"m_aligned": 1}, seed=3)


def differences(x: Outputs, y: Outputs, before: dict[str, torch.Tensor]) -> dict[str, int]:
    """Bytes that differ by output; one kernel may leave alone the padding of scales that the other one clears."""
    found = {}
    for name in x.bytes:
        left, right = x.bytes[name], y.bytes[name]
        wrong = left != right
        if name.endswith("scale"):
            cleared = ((left == 0) & (right == before[name])) | ((right == 0) & (left == before[name]))
            wrong &= ~cleared
        if wrong.any():
            found[name] = int(wrong.sum())
    return found


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_hopper_gives_the_same_bits(name: str) -> None:
    """The kernels share the arithmetic of an epilogue and nothing else; after exact sums every bit is the same."""
    problem = exact_problem(*CALLS[name])
    here, there = (run_problem(problem, "cpu", backend) for backend in (BLACKWELL, HOPPER))
    assert here.epilogue == there.epilogue
    before = GuardedOutputs(problem, here.epilogue).buffers
    assert differences(here, there, before) == {}
    written = sum(int((here.bytes[name] != before[name]).sum()) for name in before)
    assert written > problem.valid_rows * problem.b.shape[1] / 4
    broken = {name: t.clone() for name, t in here.bytes.items()}
    broken[next(iter(broken))][4096] += 1
    assert len(differences(Outputs(here.epilogue, broken), there, before)) == 1
