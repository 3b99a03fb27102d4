"""bf16 products that find their groups and fetch weights while the launch ahead still runs.

What would convince: as tests/kernels/test_ahead.py says, for every kind of operand that the kernel reads differently
(codes, repacked codes, float32 scales of tokens, global scales, scales that checkers look at), for plain products and
both epilogues of gpt-oss' layer. And weights' scales that a launch right ahead copies are not taken for ready.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import EpilogueTensors, GateRule
from padless.formats import round_up
from padless.kernels import ahead
from padless.kernels.sm90_bf16 import host, host_quant
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.table import BF16
from padless.moe.fused import epilogue_of
from padless.moe.layer import BIAS
from padless.ops.epilogue_run import with_outputs
from support import planted_bugs
from support.ahead_cases import EARLY, GROUPS, LOAD_OF_END, PAST, RING, WAIT, check_found, ids_of
from support.emulator_variants import Variant
from support.sm90_bf16_cases import Problem, error_bound, exact_result, random_problem

DRIVER = EmulatedDriver()
SLOW = pytest.mark.slow
GATED = epilogue_of("alternating", True, None, GateRule(1.702, 7.0, 1.0))
FP4_WEIGHTS = Sm90Bf16Config(BF16, "MXFP4", block_m=16, block_n=256, num_warpgroups=4, blocked=True)
REPACKED = Sm90Bf16Config(BF16, "MXFP4_REPACKED", block_m=16, stage_blocks=1, blocked=True)
TILES = {
    "repacked": REPACKED,
    "helpers in one warpgroup": FP4_WEIGHTS,
    "float32 scales of tokens": Sm90Bf16Config("FP8_BLOCK", "MXFP4", block_m=16, blocked=True),
    "global scales": Sm90Bf16Config("NVFP4", "NVFP4", block_m=8, blocked=True),
    "checkers": Sm90Bf16Config("MXFP4", "MXFP4", block_m=32, blocked=True),
    "two boxes": Sm90Bf16Config(BF16, "MXFP4", block_m=128, blocked=True),
}
TILES = {name: replace(tile, num_stages=2, out_dtype=torch.float32) for name, tile in TILES.items()}


def problem_of(tile: Sm90Bf16Config, groups: str, k: int = 448) -> Problem:
    """With more stages than the ring has, and a tail of K where rows of scales are none or are read in place."""
    pair = tile.a_format, tile.b_format
    k = round_up(k, 256 if pair[0] == "NVFP4" else 512 if pair[0] == "MXFP4" else 64)
    return random_problem(pair, GROUPS[groups], 80, k, spare_rows=PAST, layout="blocked")


def product(problem: Problem, tile: Sm90Bf16Config, what: ahead.Ready | None, driver: EmulatedDriver) -> torch.Tensor:
    out = torch.full((problem.a.shape[0], problem.b.shape[1]), float("nan"), dtype=tile.out_dtype)
    with ahead.ready(what):
        assert host.operands(problem.a, problem.b, problem.offs, tile).early.is_ready == (what is not None)
        host.prepare(driver, problem.a, problem.b, problem.offs, out, tile).launch(0)
    return out


# --- bits ------------------------------------------------------------------------------------------------


QUICK = ("repacked", "flat")


@pytest.mark.parametrize(
    ("name", "groups"),
    [pair if pair == QUICK else pytest.param(*pair, marks=SLOW) for pair in itertools.product(TILES, GROUPS)],
)
def test_bits_do_not_depend_on_what_is_ready(name: str, groups: str) -> None:
    for k in (192, 448) if groups == "few" else (448,):  # less than the ring has, and more
        problem = problem_of(TILES[name], groups, k)
        with DRIVER.configured(num_sms=3, seed=k, arithmetic="fast"):
            plain = product(problem, TILES[name], None, DRIVER)
            assert bool(plain[:-PAST].isfinite().all())
            got = product(problem, TILES[name], ahead.Ready(), DRIVER)
            assert torch.equal(got.view(torch.int32), plain.view(torch.int32)), k


@pytest.mark.parametrize("epilogue", [GATED, pytest.param(BIAS, marks=SLOW)], ids=["gated", "bias"])
def test_bits_of_a_layer_do_not_depend_on_what_is_ready(epilogue: Any) -> None:
    tile = replace(TILES["repacked"], out_dtype=torch.bfloat16)
    problem = problem_of(tile, "flat", 192)
    m, (groups, n) = problem.a.shape[0], problem.b.shape[:2]
    bias = torch.randn(groups, n, generator=torch.Generator().manual_seed(2))

    def result(what: ahead.Ready | None) -> torch.Tensor:
        tensors = with_outputs(epilogue, EpilogueTensors(bias=bias), m, n, groups, torch.device("cpu"))
        assert tensors.d is not None
        tensors.d.fill_(float("nan"))
        with ahead.ready(what):
            host_quant.prepare(DRIVER, problem.a, problem.b, problem.offs, tensors, tile, epilogue=epilogue).launch(0)
        return tensors.d.view(torch.int16)

    with DRIVER.configured(num_sms=3, arithmetic="fast"):
        plain = result(None)
        assert torch.equal(result(ahead.Ready()), plain)


def test_what_is_not_ready() -> None:
    """Row-major scales of 21 columns are copied to rows of 32 bytes; tiles of scales are read in place. Nobody counts
    ids here: a layer's rows are there as soon."""
    tile = TILES["helpers in one warpgroup"]
    blocked = problem_of(tile, "few")
    plain = random_problem((BF16, "MXFP4"), GROUPS["few"], 80, 672, spare_rows=PAST)
    with ahead.ready(ahead.Ready()):
        in_place = host.operands(blocked.a, blocked.b, blocked.offs, tile)
        copied = host.operands(plain.a, plain.b, plain.offs, replace(tile, blocked=False))
        said = host.operands(blocked.a, blocked.b, blocked.offs, tile, are_copies=True)
    with ahead.ready(ahead.Ready(ids_of(GROUPS["few"], torch.int64))):
        assert not host.operands(blocked.a, blocked.b, blocked.offs, tile).early.is_ready
    assert copied.copies
    assert [used.early.is_ready for used in (in_place, copied, said)] == [True, False, False]
    wanted = {blocked.b.data.data_ptr(), blocked.b.scale.data_ptr(), blocked.offs.data_ptr()}
    assert set(in_place.early.addresses()) == wanted


# --- order -----------------------------------------------------------------------------------------------


MAIN, LOAD, AHEAD = "sm90_bf16/sm90_bf16_grouped_gemm.cu", "sm90_bf16/load.cuh", "device/ahead.cuh"


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    tile: str = "repacked"
    groups: str = "flat"


BUGS = (
    Bug("tokens ahead of the wait", EARLY, (LOAD, WAIT, "")),
    Bug("the scheduler draws ahead of the wait", EARLY, (MAIN, WAIT + " schedule", "schedule")),
    # The compiler may as well load the scale behind the products, which wait: volatile, it does not.
    Bug("consumers do not wait", EARLY, (MAIN, WAIT + " consume", "consume", MAIN, "__ldg(problem.global_a",
        "*static_cast<const volatile float*>(problem.global_a"), tile="global scales"),
    Bug("converters do not wait", EARLY, (MAIN, WAIT + " convert", "convert"), tile="float32 scales of tokens"),
    Bug("ends of few are read through L1", EARLY, (AHEAD, LOAD_OF_END, "(offs[g])"), groups="few"),
    Bug("ends are read through L1", EARLY, (AHEAD, LOAD_OF_END, "(offs[g])")),
    Bug("a ring that is full begins in its old phase", RING, (LOAD, "ahead == STAGES};", "false};")),
    Bug("the stages ahead are loaded again", RING, (LOAD, "int ks = ahead;", "int ks = 0;")),
    Bug("later tiles begin behind the stages ahead", RING, (LOAD, "ahead = 0; reader", "reader")),
)  # fmt: skip


def result_of(driver: EmulatedDriver, bug: Bug) -> tuple[bool, Any]:
    """(whether all rows are right and no others written, what the launch reported)."""
    problem = problem_of(TILES[bug.tile], bug.groups)
    out = product(problem, TILES[bug.tile], ahead.Ready(), driver)
    valid = problem.valid_rows
    close = (out[:valid].double() - exact_result(problem)).abs() <= error_bound(problem, out.dtype)
    return bool(close.all()) and bool(out[valid:].isnan().all()), driver.last_result


@pytest.mark.parametrize("name", [name if name == "repacked" else pytest.param(name, marks=SLOW) for name in TILES])
def test_unmodified_kernels_give_no_report(name: str) -> None:
    for seed, groups in enumerate(GROUPS):
        with DRIVER.configured(seed=seed, raise_on_reports=False, num_sms=1 + seed, arithmetic="fast"):
            right, result = result_of(DRIVER, Bug("none", tile=name, groups=groups))
        assert not result.reports, "\n".join(map(str, result.reports))
        assert right, groups


@pytest.mark.parametrize(
    "bug",
    [bug if i % 4 == 0 else pytest.param(bug, marks=SLOW) for i, bug in enumerate(BUGS)],
    ids=lambda bug: bug.name,
)
def test_planted_bug_is_found(bug: Bug) -> None:
    driver = Variant("sm_90a", MAIN, bug.edits, TILES[bug.tile])
    check_found(bug.kinds, driver, partial(result_of, driver, bug))
