"""Products that find their groups and fetch weights while the launch ahead still runs.

What would convince: with ends of groups, or the experts' ids, said to be ready the bits are those without, for tables
that one warp sorts and large ones, sorted and flat; for more workers than tiles, rings longer and shorter than K, groups
without rows, ids of no group, rows past the last group. The emulator, which reports every access to what is not ready
ahead of the wait, reports none on any seed, and every planted bug is found.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import FP8_BLOCK
from padless.kernels import ahead
from padless.kernels.sm90_fp8 import host, host_quant
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.ops.epilogue_run import with_outputs
from support import planted_bugs
from support.ahead_cases import EARLY, GROUPS, LOAD_OF_END, PAST, RING, WAIT, check_found, ids_of, readiness
from support.emulator_cases import Case, make_case
from support.emulator_variants import Variant

DRIVER = EmulatedDriver()
FEW = Sm90Fp8Config(block_m=16, block_n=128, num_stages=3, few_rows=True)
WIDE = replace(FEW, block_n=256)
ROWS = Sm90Fp8Config(block_m=64, block_n=128, num_stages=3)
SWIGLU = Epilogue(
    row_format=FP8_BLOCK, row_layout="plain_mn", activation="swiglu", gate_up="concatenated", gate_in_bf16=True
)
SLOW = pytest.mark.slow


def case_of(sizes: tuple[int, ...], n: int, k: int) -> Case:
    case = make_case((*sizes, PAST), n, k, "mn")
    return replace(case, b=type(case.b)(case.b.data[:-1], case.b.scale[:-1], case.b.format), offs=case.offs[:-1])


def product(case: Case, config: Sm90Fp8Config, what: ahead.Ready | None) -> torch.Tensor:
    out = torch.full((case.rows, case.reference.shape[1]), float("nan"), dtype=torch.bfloat16)
    with ahead.ready(what):
        host.prepare(DRIVER, case.a, case.b, case.offs, out, config).launch(0)
    return out.view(torch.int16)


def swiglu(case: Case, config: Sm90Fp8Config, what: ahead.Ready | None) -> list[torch.Tensor]:
    groups, n, _ = case.b.data.shape
    tensors = with_outputs(SWIGLU, EpilogueTensors(), case.rows, n, groups, torch.device("cpu"))
    assert tensors.row_codes is not None
    assert tensors.row_scale is not None
    tensors.row_codes.view(torch.uint8).fill_(0x7F)
    tensors.row_scale.fill_(float("nan"))
    with ahead.ready(what):
        host_quant.prepare(DRIVER, case.a, case.b, case.offs, tensors, config, epilogue=SWIGLU).launch(0)
    return [tensors.row_codes.view(torch.uint8), tensors.row_scale.view(torch.int32)]


# --- bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sms", [2, pytest.param(33, marks=SLOW)])
@pytest.mark.parametrize("groups", ["few", "flat", pytest.param("sorted", marks=SLOW)])
def test_bits_do_not_depend_on_what_is_ready(groups: str, num_sms: int) -> None:
    sizes = GROUPS[groups]
    for k in (256, 400) if groups == "few" else (400,):  # two K blocks and four, where a ring has three
        case = case_of(sizes, 136, k)
        with DRIVER.configured(num_sms=num_sms, seed=k, arithmetic="fast"):
            for config in (FEW, ROWS):
                plain = product(case, config, None)
                assert bool(plain[:-PAST].view(torch.bfloat16).isfinite().all())
                for what in readiness(sizes) if config is FEW else [ahead.Ready()]:
                    assert torch.equal(product(case, config, what), plain), (k, config, what)


@pytest.mark.parametrize("groups", [g if g == "flat" else pytest.param(g, marks=SLOW) for g in GROUPS])
def test_quantized_bits_do_not_depend_on_what_is_ready(groups: str) -> None:
    sizes = GROUPS[groups]
    case = case_of(sizes, 256, 400)
    with DRIVER.configured(num_sms=3, arithmetic="fast"):
        plain = swiglu(case, WIDE, None)
        for what in readiness(sizes):
            for got, wanted in zip(swiglu(case, WIDE, what), plain, strict=True):
                assert torch.equal(got, wanted), what


def test_what_a_kernel_cannot_use() -> None:
    """Clusters wait for everything; ids are for tokens on columns, one for each row, and lie side by side."""
    ids, weights = ids_of(GROUPS["few"], torch.int64), torch.zeros(1)
    offs, m = torch.zeros(4, dtype=torch.int32), len(ids)
    for what, ends, tile, is_usable in (
        (None, offs, FEW, False),
        (ahead.Ready(), None, FEW, False),
        (ahead.Ready(), offs, FEW, True),
        (ahead.Ready(), offs, ROWS, True),
        (ahead.Ready(), offs, replace(ROWS, block_m=128, cluster_n=2), False),
        (ahead.Ready(), offs, replace(ROWS, scales="k", scale_window_k_blocks=8), False),
        (ahead.Ready(ids), offs, FEW, True),
        (ahead.Ready(ids), offs, ROWS, False),
        (ahead.Ready(ids[:-1]), offs, FEW, False),
        (ahead.Ready(ids.expand(-1, 2)[:, :1].expand(-1, 2)[::2]), offs, FEW, False),
    ):
        with ahead.ready(what):
            use = host.usable(weights, ends, m, tile)
        assert use.is_ready == is_usable, (what, tile)
        read = () if what is None or not is_usable else (weights, offs if what.ids is None else ids)
        assert use.addresses() == tuple(t.data_ptr() for t in read)
        assert use.arguments()[0] == (int(is_usable), 4)


def test_a_block_ends_with_what_was_before() -> None:
    with ahead.ready(ahead.Ready()):
        with pytest.raises(KeyError), ahead.ready(None):
            raise KeyError
        assert ahead.current() == ahead.current() is not None
        assert ahead.facts() == ()
    assert ahead.current() is ahead.facts() is None


# --- order -----------------------------------------------------------------------------------------------


MAIN, LOAD = "sm90_fp8_few/sm90_fp8_few_grouped_gemm.cu", "sm90_fp8_few/load.cuh"
ROWS_MAIN, ROWS_LOAD = "sm90_fp8/sm90_fp8_grouped_gemm.cu", "sm90_fp8/load.cuh"
AHEAD = "device/ahead.cuh"


@dataclass(frozen=True)
class Bug(planted_bugs.Bug):
    config: Sm90Fp8Config = FEW
    ids: bool = False
    groups: str = "flat"


BUGS = (
    Bug("tokens ahead of the wait", EARLY, (LOAD, WAIT, "")),
    Bug("the scheduler draws ahead of the wait", EARLY, (MAIN, WAIT + " schedule", "schedule")),
    Bug("consumers do not wait", EARLY, (MAIN, WAIT + " consume", "consume")),
    Bug("ids are read through L1", EARLY, (AHEAD, "id = ld_relaxed_gpu(word)", "id = *word"), ids=True),
    Bug("offs are read through L1", EARLY, (AHEAD, LOAD_OF_END, "(offs[g])"), config=ROWS),
    Bug("ends are read where ids are ready", EARLY, (AHEAD, "ahead.ids != nullptr", "false"), ids=True),
    Bug("ends of few are read where ids are ready", EARLY, (MAIN, "are_few && ids != nullptr", "false"), ids=True,
        groups="few"),
    Bug("a ring that is full begins in its old phase", RING, (LOAD, "ahead == STAGES};", "false};")),
    Bug("the blocks ahead are loaded again", RING, (LOAD, "int kb = ahead;", "int kb = 0;")),
    Bug("later tiles begin behind the blocks ahead", RING, (LOAD, "ahead = 0; reader", "reader")),
    Bug("an id's upper half is not looked at", "", (AHEAD, "&& high == 0", ""), ids=True),
    Bug("counts are not summed up over chunks", "", (AHEAD, "chunks > 1", "false"), ids=True),
    Bug("counts are not cleared", "", (AHEAD, "ends[g] = 0;", ";"), ids=True),
    Bug("rows ahead of the wait", EARLY, (ROWS_LOAD, WAIT, ""), config=ROWS),
    Bug("the scheduler of rows draws ahead of the wait", EARLY, (ROWS_MAIN, WAIT + " schedule", "schedule"),
        config=ROWS),
    Bug("consumers of rows do not wait", EARLY, (ROWS_MAIN, WAIT + " consume", "consume"), config=ROWS),
)  # fmt: skip


def result_of(driver: EmulatedDriver, groups: str, config: Sm90Fp8Config, ids: bool) -> tuple[bool, Any]:
    """(whether all rows are right and no others written, what the launch reported)."""
    sizes = GROUPS[groups]
    case = case_of(sizes, 136, 400)
    out = torch.full((case.rows, 136), float("nan"), dtype=torch.bfloat16)
    with ahead.ready(ahead.Ready(ids_of(sizes, torch.int64) if ids else None)):
        host.prepare(driver, case.a, case.b, case.offs, out, config).launch(0)
    rows = case.rows - PAST
    close = (out[:rows].double() - case.reference[:rows]).abs() <= 0.01 * case.magnitude[:rows]
    return bool(close.all()) and bool(out[rows:].isnan().all()), driver.last_result


@pytest.mark.parametrize(
    ("config", "ids"),
    [pytest.param(FEW, False, marks=SLOW), (FEW, True), (ROWS, False)],
    ids=["few", "few, ids", "rows"],
)
def test_unmodified_kernels_give_no_report(config: Sm90Fp8Config, ids: bool) -> None:
    for groups in GROUPS:
        for seed in range(2):
            with DRIVER.configured(seed=seed, raise_on_reports=False, num_sms=1 + seed, arithmetic="fast"):
                right, result = result_of(DRIVER, groups, config, ids)
            assert not result.reports, "\n".join(map(str, result.reports))
            assert right, (groups, seed)


@pytest.mark.parametrize(
    "bug",
    [bug if i % 3 == 0 else pytest.param(bug, marks=SLOW) for i, bug in enumerate(BUGS)],
    ids=lambda bug: bug.name,
)
def test_planted_bug_is_found(bug: Bug) -> None:
    driver = Variant("sm_90a", bug.config.source, bug.edits, bug.config)
    check_found(bug.kinds, driver, partial(result_of, driver, bug.groups, bug.config, bug.ids))
