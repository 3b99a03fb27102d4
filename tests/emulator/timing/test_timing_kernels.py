"""The clock on real kernels: what it says of them, that it repeats, and that it names planted slow-downs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from padless import group_offsets, grouped_gemm
from padless.emulator.fake_driver import EmulatedDriver, driver_of
from padless.emulator.timing import B200, H200, Timeline, timed
from padless.emulator.timing.diagnosis import compare
from padless.emulator.timing.report import lines_of, phases
from padless.emulator.timing.trace import trace_of
from padless.formats import MXFP8, NVFP4
from padless.kernels.sm90_fp8 import host as sm90_fp8
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.quantization.quantize import quantize
from support.emulator_bugs import LOAD, MULTIPLY, RELEASE
from support.emulator_cases import make_case
from support.emulator_variants import Variant

KERNEL = "sm90_fp8/sm90_fp8_grouped_gemm.cu"
RING = Sm90Fp8Config(block_m=128, block_n=128, num_stages=4)


def time_fp8(
    config: Sm90Fp8Config, k_blocks: int, edits: tuple[Any, ...] = (), sizes: tuple[int, ...] = (128,)
) -> Timeline:
    """The FP8 kernel, with edits to its source, on one tile a group (of 128 columns a CTA)."""
    case = make_case(sizes, config.block_n * config.cluster_n, 128 * k_blocks, config.scales)
    driver = Variant("sm_90a", KERNEL, edits, config) if edits else EmulatedDriver("sm_90a")
    out = torch.full((case.rows, case.reference.shape[1]), float("nan"), dtype=config.out_dtype)
    with driver.configured(machine=timed(H200), num_sms=config.cluster_n):
        sm90_fp8.prepare(driver, case.a, case.b, case.offs, out, config).launch(0)
    assert driver.last_result is not None
    assert isinstance(driver.last_result.timeline, Timeline)
    return driver.last_result.timeline


@pytest.fixture(scope="module")
def baseline() -> Timeline:
    return time_fp8(RING, 12)


def test_run_repeats_to_the_cycle(baseline: Timeline) -> None:
    again = time_fp8(RING, 12)
    assert again.cycles == baseline.cycles
    assert lines_of(again) == lines_of(baseline)
    assert json.dumps(trace_of(again)) == json.dumps(trace_of(baseline))


def test_products_take_the_tensor_cores_cycles(baseline: Timeline) -> None:
    # 12 K blocks x 4 products of K 32 x 2 warpgroups, 64 cycles each
    assert baseline.product_cycles == pytest.approx(12 * 4 * 2 * 64, rel=0.005)
    assert baseline.loaded == 12 * (128 * 128 * 2 + 132 * 4)
    low, high = baseline.window()
    assert high - low > baseline.product_cycles


def test_period_lies_between_the_tensor_pipe_and_the_feed() -> None:
    short, long = (time_fp8(RING, blocks).cycles for blocks in (8, 20))
    period = (long - short) / 12
    assert 512 <= period <= 1.25 * max(512, 2 * 128 * 128 / H200["l2_feed"])


def test_two_ctas_of_a_cluster_share_rows() -> None:
    timeline = time_fp8(Sm90Fp8Config(block_m=256, block_n=128, cluster_n=2), 8, sizes=(256,))
    assert len(timeline.sms) == 2
    assert timeline.product_cycles == pytest.approx(2 * 8 * 4 * 4 * 64, rel=0.005)
    # A box of A is fetched once and received twice: both CTAs' L2 servers get all of A and their own B.
    received = [sum(end - start for start, end, _ in sm.feed.spans) for sm in timeline.sms.values()]
    assert received[0] == pytest.approx(received[1])
    assert received[0] * H200["l2_feed"] >= 8 * (256 + 128) * 128


def test_phases_cover_the_run(baseline: Timeline) -> None:
    assert sum(cycles for _, cycles in phases(baseline)) == pytest.approx(baseline.cycles)
    assert all(cycles >= 0 for _, cycles in phases(baseline))
    assert all(0 <= share <= 1 for share in baseline.utilization().values())


def test_roles_are_told_by_what_warps_do(baseline: Timeline) -> None:
    roles = [baseline.role((0, warp)) for warp in range(12)]
    assert roles[:8] == ["multiply"] * 8
    assert roles[8] == "load"
    assert roles[10:] == ["store"] * 2


def test_trace_is_what_perfetto_reads(baseline: Timeline) -> None:
    events = json.loads(json.dumps(trace_of(baseline)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert spans
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= named


# ---------------------------------------------------------------------------------------- planted slow-downs


def test_ring_one_stage_shorter_is_named() -> None:
    three, two = (time_fp8(Sm90Fp8Config(block_m=128, block_n=128, num_stages=stages), 12) for stages in (3, 2))
    assert [finding.cause for finding in compare(three, two)] == ["ring"]
    assert not compare(three, three)


def test_late_release_is_named() -> None:
    config = Sm90Fp8Config(block_m=128, block_n=128, num_stages=2)
    before = time_fp8(config, 12)
    last = "d[w][4 * i + 3] = fmaf(p[4 * i + 3], scale[1][i / 8], d[w][4 * i + 3]);\n                }"
    edits = ((MULTIPLY, RELEASE, ""), (MULTIPLY, last, last + "\n pin_register(d[w][0]);\n" + RELEASE))
    after = time_fp8(config, 12, edits)
    assert after.cycles > before.cycles
    found = compare(before, after)
    assert found[0].cause == "release", found
    assert after.hold > before.hold + 60


def test_operand_loaded_twice_is_named(baseline: Timeline) -> None:
    load = "tma_load_3d(map_b, shared_address(shared.b[stage]), full, kb * BLOCK_K, loads.column, tile.group);"
    expect = "mbarrier_arrive_expect_tx(full, loads.bytes"
    edits = ((LOAD, load, load + load), (LOAD, expect, expect + " + B_BYTES"))
    after = time_fp8(RING, 12, edits)
    found = compare(baseline, after)
    assert found[0].cause == "loads"
    assert after.loaded == baseline.loaded + 12 * 128 * 128
    assert after.utilization()["L2"] > baseline.utilization()["L2"] + 0.15


# ------------------------------------------------------------------------------------------------ Blackwell


@pytest.mark.parametrize(("fmt", "bytes_a_value"), [(MXFP8, 1.0), (NVFP4, 0.5)])
def test_blackwell_kernel_at_the_pace_of_its_products(fmt: Any, bytes_a_value: float) -> None:
    generator = torch.Generator().manual_seed(0)
    m, n, k = 256, 256, 2048
    offs = group_offsets([m])
    a = quantize(torch.randn(m, k, generator=generator), fmt, scale_layout="blocked_groups", offs=offs)
    b = quantize(torch.randn(1, n, k, generator=generator), fmt, kind="weight", scale_layout="blocked")
    driver = driver_of("emulator:sm_100a")
    with driver.configured(machine=timed(B200), num_sms=2):
        grouped_gemm(a, b, offs, backend="emulator:sm_100a", config=Sm100GroupedConfig(cta_group=2, mma_n=256))
    assert driver.last_result is not None
    timeline = driver.last_result.timeline
    ideal = k * bytes_a_value / 32 * n / 2  # an instruction takes 32 bytes of K and n / 2 cycles
    low, high = timeline.window()
    assert ideal <= high - low <= 1.35 * ideal
    assert timeline.utilization()["tensor pipe"] > 0.8
    assert {timeline.role(warp) for warp in timeline.ended} >= {"load", "multiply", "store"}
