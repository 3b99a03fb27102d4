"""Problems that the fuzz must not draw, and right results that it called wrong."""

from __future__ import annotations

import pytest

from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Draw, Problem
from padless.verify.fuzz.subjects import SUBJECTS, judged

# Sums in float64 are rounded to bfloat16 once, not by way of float32.
LINES = [
    "fp4_input_gradient(b='NVFP4', b_layout='plain', tile=0, out='bfloat16', sizes=[16, 16, 0, 0], past=0, n=64, k=128, "
    "b_globals=1, gaps=[0, 0, 0], nan_row=-1, nan_group=-1, hostile=[], seed=1253585937, properties=['bits'])",
    "fp4_input_gradient(b='MXFP4', b_layout='plain', tile=0, out='bfloat16', sizes=[128, 3], past=3, n=64, k=56, "
    "b_globals=0, gaps=[0, 0, 0], nan_row=-1, nan_group=-1, hostile=[], seed=1752281885, properties=['bits'])",
]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("line", LINES, ids=["NVFP4", "MXFP4"])
def test_a_right_result_is_not_called_wrong(line: str) -> None:
    assert judged(Problem.parse(line), place_of("reference")) == []


@pytest.mark.parametrize("call", ["grouped_gemm", "grouped_gemm_epilogue"])
def test_other_ends_follow_only_where_scales_are_of_no_groups(call: str) -> None:
    """A CPU compares the ends that scales were made for, and refuses others."""
    drawn = [SUBJECTS[call].draw(call, Draw(f"{call} {number}", "reference")).options for number in range(1500)]
    of_groups = [o for o in drawn if o["a_layout"] == "blocked_groups" or (o["a"] == "NVFP4" and o["globals"] > 1)]
    assert any("replay" in o["properties"] for o in drawn)
    assert len(of_groups) > 100
    assert not any("replay" in o["properties"] for o in of_groups)


@pytest.mark.usefixtures("one_thread")
def test_repacked_codes_are_not_quantized_to() -> None:
    line = (
        "states.call(pairs=[('BF16', 'MXFP4_REPACKED')], layers=('FP8_BLOCK', 'FP8_BLOCK'), calls=['quantize'], n=[64], "
        "k=[64], seed=769540053, operations=[('call', 668)])"
    )
    problem = Problem.parse(line)
    assert judged(problem, place_of("reference")) == []
