"""The Hopper kernel that adds a low-rank product to its sums before the epilogue, run by the emulator.

What would convince a sceptic: every byte of every output, fences included, is what the reference makes of
fma(t factor^T, scaling, sums of the plain kernel), where t and factor are small integers, whose sums are exact; t is NaN
in rows of no group; ranks that fill a stage and do not; groups without rows, tails of K and N; planted bugs in the new
stage are found.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue, GateRule
from padless.formats import FP8_BLOCK
from padless.kernels.epilogue_launch import prelude_of
from padless.kernels.sm90_fp8 import host_quant
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_fp8.host_quant import LowRankProduct
from padless.reference.gemm import fma_float32, group_rows
from padless.runtime import jit
from support.emulator_variants import Edit, Variant
from support.machine_code import complaints
from support.quant_cases import SIZES, Guarded, judge, make_outputs, tensors_of
from support.sm90_quant_cases import DRIVER, Case

MAIN = "sm90_fp8/sm90_fp8_grouped_gemm.cu"
LOAD, MULTIPLY, LOW_RANK = (f"sm90_fp8/{name}.cuh" for name in ("load", "multiply", "low_rank"))
SHORT, WIDE = Sm90Fp8Config(block_m=64), Sm90Fp8Config(block_m=256)
PAIR, WIDE_PAIR, SHORT_PAIR = (dataclasses.replace(c, cluster_n=2) for c in (Sm90Fp8Config(), WIDE, SHORT))
PLAIN = Epilogue(d_dtype=torch.bfloat16)
BIASED = Epilogue(d_dtype=torch.bfloat16, bias=True)
SWIGLU = Epilogue(
    d_dtype=torch.bfloat16, activation="swiglu", gate_in_bf16=True, row_format=FP8_BLOCK, row_layout="plain_mn"
)
GATED = dataclasses.replace(SWIGLU, bias=True, gate_up="interleaved", gate_rule=GateRule(1.702, 7.0, 1.0))
SCALING = 1.0 / 3.0


def low_rank(case: Case, rank: int) -> LowRankProduct:
    """Small integers, whose sums of products are exact in any order."""
    draw = torch.Generator().manual_seed(case.seed + rank)
    t = torch.full((case.m, max(16, -(-rank // 8) * 8)), 0.0, dtype=torch.bfloat16)
    t[:, :rank] = torch.randint(-8, 9, (case.m, rank), generator=draw).bfloat16()
    t[case.valid :] = torch.nan
    factor = torch.randint(-8, 9, (len(case.sizes), case.n, rank), generator=draw).bfloat16()
    return LowRankProduct(t, factor, SCALING)


def sums(case: Case, low: LowRankProduct) -> torch.Tensor:
    acc, rank = case.sums(DRIVER), low.factor.shape[2]
    for group, (start, end) in enumerate(group_rows(case.offs, case.m)):
        exact = low.t[start:end, :rank].float() @ low.factor[group].float().T
        acc[start:end] = fma_float32(exact, torch.tensor(low.scaling), acc[start:end])
    return acc


def run(
    driver: EmulatedDriver, case: Case, epilogue: Epilogue, config: Sm90Fp8Config | None, low: LowRankProduct
) -> dict[str, Guarded]:
    outputs = make_outputs(case, epilogue)
    tensors = tensors_of(case, epilogue, outputs, None)
    host_quant.prepare(driver, case.a, case.b, case.offs, tensors, config, epilogue=epilogue, low=low).launch(0)
    return outputs


CASES = {
    "rank 8": (PLAIN, SHORT, 8, {}),
    "rank 16": (PLAIN, None, 16, {}),
    "rank 24, two tiles of columns in a cluster": (PLAIN, PAIR, 24, {"n": 272}),
    "rank 40, two waves": (BIASED, WIDE, 40, {"k": 144}),
    "rank 64, more stages than K blocks": (BIASED, None, 64, {"k": 16}),
    "rank 16, more K blocks than stages": (PLAIN, WIDE, 16, {"k": 640}),
    "rank 16, few rows in many groups": (PLAIN, None, 16, {"sizes": (1, 0, 3, 2, 0, 0, 9)}),
    "gate and up apart": (SWIGLU, None, 16, {"n": 256}),
    "gate and up apart, two waves": (SWIGLU, WIDE_PAIR, 64, {"n": 384, "k": 272}),
    "gate and up in runs, a rule, bias": (GATED, SHORT_PAIR, 48, {"n": 320}),
}
ALWAYS = {"rank 8", "rank 40, two waves", "gate and up apart"}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_byte(name: str, seed: int) -> None:
    epilogue, config, rank, sizes = CASES[name]
    case = Case(**({"sizes": SIZES, "n": 144, "k": 256, "seed": seed} | sizes))
    low = low_rank(case, rank)
    acc = sums(case, low)
    with DRIVER.configured(arithmetic="fast", num_sms=2, seed=seed):
        judge(case, epilogue, acc, run(DRIVER, case, epilogue, config, low))


def test_refusals() -> None:
    case = Case(SIZES, 256)
    with pytest.raises(ValueError, match="rank is 72"):
        run(DRIVER, case, PLAIN, None, low_rank(case, 72))
    with pytest.raises(ValueError, match="few_rows True"):
        run(DRIVER, case, SWIGLU, Sm90Fp8Config(16, 256, few_rows=True), low_rank(case, 16))


# --- planted bugs ----------------------------------------------------------------------------------------

OF_STAGE = "mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);\n    pipeline.advance();"
OF_EMPTY = "mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);"
RELEASED = "if (w == NUM_WAVES - 1) release_stage(shared, stage, lane);"
FMA = "d[w][i] = fmaf(p[i], problem.scaling, d[w][i]);"
BUGS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "stage not waited for": ((LOW_RANK, OF_STAGE, "pipeline.advance();"), ("race",)),
    "stage not waited for to be empty": ((LOAD, OF_EMPTY, ""), ("race", "mbarrier")),
    "products not waited for": ((LOW_RANK, "wgmma_wait_group<0>();", ""), ("register-in-flight",)),
    "stage not given back": ((LOW_RANK, RELEASED, ""), ("deadlock",)),
    "skipped tiles do not count it": (
        (MULTIPLY, "kb < problem.k_blocks() + 1", "kb < problem.k_blocks()"),
        ("deadlock", "race", "mbarrier"),
    ),
    "bytes of scales expected": ((LOAD, "loads.bytes -= loads.sfa_copies * SFA_COPY_FLOATS * 4;", ""), ("deadlock",)),
    "scales loaded": ((LOAD, "loads.sfa_copies = 0;", ""), ("mbarrier", "deadlock", "race")),
    "not scaled": ((LOW_RANK, FMA, "d[w][i] = p[i] + d[w][i];"), ()),
    "products accumulate on what was there": ((LOW_RANK, "step * 2), step != 0);", "step * 2), 1);"), ()),
    "t in the place of factor": ((LOAD, "*problem.map_t, *problem.map_factor", "*problem.map_t, *problem.map_t"), ()),
    "the first 16 columns again": (
        (LOW_RANK, "k_major_128b_descriptor(a + step * 2)", "k_major_128b_descriptor(a)"),
        (),
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    edit, kinds = BUGS[name]
    case = Case(SIZES, 272, k=272)
    low = low_rank(case, 40)
    acc = sums(case, low)
    tile = dataclasses.replace(Sm90Fp8Config(), num_stages=3)
    driver = Variant("sm_90a", MAIN, (edit,), host_quant.LowRankConfig(tile, PLAIN, 3))
    for seed in range(4):
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=1, arithmetic="fast"):
            got = run(driver, case, PLAIN, tile, low)
        assert driver.last_result is not None
        reports = {report.kind for report in driver.last_result.reports}
        if kinds and reports & set(kinds):
            return
        if not kinds:
            with pytest.raises(AssertionError):
                judge(case, PLAIN, acc, got)
            return
    raise AssertionError(f"{name}: not found; reports {reports}")


# --- machine code ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("config", [SHORT_PAIR, PAIR, WIDE_PAIR], ids=lambda c: str(c.block_m))
@pytest.mark.parametrize("steps", [1, 4])
def test_compiles_without_spills(config: Sm90Fp8Config, steps: int) -> None:
    for epilogue in (PLAIN, BIASED, SWIGLU):
        kernel = host_quant.LowRankConfig(config, epilogue, steps)
        assert kernel.prelude().startswith(config.prelude() + prelude_of(epilogue))
        assert not complaints(jit.compile_kernel(config.source, kernel.prelude(), "sm_90a")), epilogue
