"""grouped_gemm_quant and grouped_gemm_swiglu_quant on Blackwell: what a caller gets, beside the reference and Hopper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from padless.kernels.table import QUANT
from padless.runtime.choices import BackendName
from padless.verify.emulator.products import computed
from padless.verify.fuzz.epilogue_lines import line, random_line
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.tiles import route_of, routes_of

pytestmark = pytest.mark.kernels

BLACKWELL: BackendName = "emulator:sm_100a"
HOPPER: BackendName = "emulator"
CALL = "grouped_gemm_epilogue"
ROUTES = {route.a: route for route in routes_of("sm_100a", QUANT) if route.a == route.b}


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
    place = replace(place_of(BLACKWELL), judge=Judge(any_nan=False))
    o = random_line(ROUTES[fmt], seed, "bits")
    SUBJECTS[CALL].judge(o, place)
    assert place.judge.verdicts() == {}
    assert (place.judge.elements > 0) is (sum(o["sizes"]) > 0 or o["amax"]), "without rows an amax alone is compared"


NUMBERS = {"alpha": True, "bias": True, "prob": True}
# Every format of the output, with cuDNN's constants and rules or without.
CALLS: dict[str, Options] = {
    "FP8_BLOCK": {"format": "FP8_BLOCK", "columns": True, "row_layout": "plain_mn", "amax": True, **NUMBERS},
    "MXFP8, norm_const": {
        "format": "MXFP8",
        "rule": "cudnn",
        "columns": True,
        "column_layout": "blocked_groups",
        **NUMBERS,
    },
    "MXFP8, documented": {"format": "MXFP8", "rule": "cudnn_documented", "semantics": "documented", **NUMBERS},
    "MXFP8_E5M2, floor": {"format": "MXFP8_E5M2", "rule": "floor", "columns": True, "row_layout": "blocked", **NUMBERS},
    "MXFP4": {"format": "MXFP4", "row_layout": "blocked_groups", "amax": True},
    "NVFP4": {"format": "NVFP4", "d_globals": 4, **NUMBERS},
    "float16": {"out": "float16", "amax": True, **NUMBERS},
    "interleaved, FP8_BLOCK": {
        "gate_up": "interleaved",
        "format": "FP8_BLOCK",
        "rows": False,
        "columns": True,
        **NUMBERS,
    },
    "interleaved, NVFP4": {"gate_up": "interleaved", "format": "NVFP4", "alpha": True},
    "concatenated, MXFP8": {"gate_up": "concatenated", "format": "MXFP8", "prob": True},
}
ALWAYS = ("FP8_BLOCK", "concatenated, MXFP8")


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=pytest.mark.slow) for n in CALLS])
def test_hopper_gives_the_same_bits(name: str) -> None:
    """The kernels share the arithmetic of an epilogue and nothing else; after exact sums every bit is the same."""
    n = 256 if "gate_up" in CALLS[name] else 160
    o = line(ROUTES["MXFP8"], (40, 0, 130, 1), n, 160, a_layout="blocked", b_layout="blocked", seed=3, **CALLS[name])
    o |= {"drawn": "exact"}
    on_hopper = o | {"module": route_of("sm_90a", {"a": "MXFP8", "b": "MXFP8"}, QUANT).module}
    judge, compared = Judge(any_nan=False), []
    places: list[Any] = [replace(place_of(backend), judge=judge) for backend in (BLACKWELL, HOPPER)]
    here, there = (computed(CALL, one, place) for one, place in zip((o, on_hopper), places, strict=True))
    for output, t in here.items():
        judge.same(output, t, there[output])
        compared.append(t.numel())
    assert here.keys() == there.keys()
    assert sum(compared) > 171 * n / 4
    assert judge.verdicts() == {}
