"""Programmatic launches: an access to global memory is reported unless griddepcontrol.wait is ordered before it, and a CTA
that ends without a wait is, too. Every case that is clean has a twin next to it that is not."""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from padless.emulator import LaunchError, LaunchResult
from padless.emulator.cli import app
from padless.emulator.fake_driver import EmulatedDriver
from padless.runtime.driver import LaunchShape
from padless.runtime.jit import CompiledKernel
from support.emulator_cuda import compile_cuda, launch, tiled

WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
NEXT = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
KIND = "grid-dependency"


def asm(text: str, *inputs: str) -> str:
    return f'asm volatile("{text}" :: {", ".join(inputs)} : "memory");'


def into_x(text: str, *inputs: str) -> str:
    return f'asm volatile("{text}" : "=f"(x) : {", ".join(inputs)} : "memory");'


def one(text: str) -> str:
    return f"if (t == 0) {{ {text} }}"


def found(result: LaunchResult) -> list[tuple[str, str]]:
    """(kind, opcode with its first modifiers) of every report."""
    return [(r.kind, r.instruction) for r in result.reports]


# ---- one access, before the wait or after it; every thread executes the wait
ACCESS = r"""
__device__ uint32_t counter;
__device__ float table[64];
__constant__ float numbers[64];
extern "C" __global__ void k(const __grid_constant__ TensorMap map, float* in, float* out, TensorMap* maps) {
  __shared__ alignas(1024) float s[256]; __shared__ alignas(8) uint64_t full;
  const uint32_t t = threadIdx.x; float x = 0;
  for (int i = 0; i < 4; ++i) s[t + 64 * i] = t;
  if (t == 0) { init(smem(&full), 1); fence_init(); }
  fence_async(); __syncthreads();
  STATEMENTS
  asm volatile("st.global.f32 [%0], %1;" ::"l"(out + 128 + t), "f"(x) : "memory");
}"""
STORED = "bulk_commit(); bulk_wait();"
LOADED = "wait(smem(&full), 0);"
# name -> what is executed, and how the instruction that touches global memory begins
TOUCHES = {
    "load": (into_x("ld.global.f32 %0, [%1];", '"l"(in + t)'), "ld.global.f32"),
    "read-only load": (into_x("ld.global.nc.f32 %0, [%1];", '"l"(in + t)'), "ld.global.nc"),
    "generic load": (into_x("ld.f32 %0, [%1];", '"l"(in + t)'), "ld.f32"),
    "acquire": (into_x("ld.acquire.gpu.global.f32 %0, [%1];", '"l"(in + t)'), "ld.acquire"),
    "store": (asm("st.global.f32 [%0], %1;", '"l"(out + t)', '"f"(x)'), "st.global"),
    "generic store": (asm("st.v2.f32 [%0], {%1, %1};", '"l"(out + 2 * t)', '"f"(x)'), "st.v2"),
    "reduction": (asm("red.global.add.f32 [%0], %1;", '"l"(out + t)', '"f"(x)'), "red.global"),
    "generic atomic": (into_x("atom.add.f32 %0, [%1], 1.0;", '"l"(out + t)'), "atom.add"),
    "atomic on a device symbol": ("atomicAdd(&counter, 1u);", "atom.global.add.u32"),
    "load of a device symbol": (into_x("ld.global.f32 %0, [table + 4];", '"r"(0)'), "ld.global.f32"),
    "cp.async": (asm("cp.async.ca.shared.global [%0], [%1], 4; cp.async.wait_all;", '"r"(smem(s + t))', '"l"(in + t)'), "cp.async.ca"),
    "bulk load": (one("expect(smem(&full), 256); bulk_load(smem(s), in, 256, smem(&full));") + LOADED, "cp.async.bulk.shared"),
    "tensor load": (one("expect(smem(&full), 512); tma_load(map, smem(s), smem(&full), 0, 0);") + LOADED, "cp.async.bulk.tensor.2d.shared"),
    "bulk store": (one("bulk_store(out, smem(s), 256);" + STORED), "cp.async.bulk.global"),
    "bulk reduction": (one(asm("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], 64;", '"l"(out)', '"r"(smem(s))') + STORED), "cp.reduce.async.bulk.global"),
    "tensor store": (one("tma_store(map, smem(s), 0, 0);" + STORED), "cp.async.bulk.tensor.2d.global"),
    "tensor reduction": (one("tma_reduce_add(map, smem(s), 0, 0);" + STORED), "cp.reduce.async.bulk.tensor"),
    "tensor map replaced": (one(asm("tensormap.replace.tile.global_address.global.b1024.b64 [%0], %1;", '"l"(maps)', '"l"(in)')), "tensormap.replace"),
    "tensor map copied": (
        "if (t < 32) {" + asm("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;", '"l"(maps)', '"r"(smem(s))') + "}",
        "tensormap.cp_fenceproxy",
    ),
    "tensor map acquired": (one(asm("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;", '"l"(maps)')), "fence.proxy.tensormap"),
    "discard": (one(asm("discard.global.L2 [%0], 128;", '"l"(maps)')), "discard"),
}  # fmt: skip
# What needs no wait: prefetches, memory that is nobody else's, and copies of nothing.
HARMLESS = {
    "prefetch": asm("prefetch.global.L2 [%0];", '"l"(in + t)'),
    "bulk prefetch": one(asm("cp.async.bulk.prefetch.L2.global [%0], 256;", '"l"(in)')),
    "tensor prefetch": one(asm("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %1}];", '"l"(&map)', '"r"(0)')),
    "prefetch of a tensor map": one(asm("prefetch.tensormap [%0];", '"l"(maps)')),
    "acquired parameter": one(asm("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;", '"l"(&map)')),
    "parameter": into_x("ld.param.f32 %0, [k_param_1];", '"r"(0)'),
    "generic parameter": into_x("ld.f32 %0, [%1];", '"l"(&map)'),
    "constant": into_x("ld.const.f32 %0, [numbers + 8];", '"r"(0)'),
    "generic constant": into_x("ld.f32 %0, [%1];", '"l"(numbers + t)'),
    "shared": into_x("ld.f32 %0, [%1];", '"l"(s + t)'),
    "nothing by cp.async": asm("cp.async.ca.shared.global [%0], [%1], 4, 0; cp.async.wait_all;", '"r"(smem(s + t))', '"l"(in + t)'),
    "nothing in bulk": one(asm("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;", '"l"(out)', '"r"(smem(s))', '"r"(0)') + STORED),
}  # fmt: skip


def touch(statements: str, programmatic: bool = True, **options: Any) -> LaunchResult:
    maps, data, out = np.zeros(256, np.uint8), np.arange(256, dtype=np.float32), np.zeros(256, np.float32)
    target = np.zeros((8, 32), np.float32)
    source = ACCESS.replace("STATEMENTS", statements)
    arguments: list[Any] = [tiled(target, (32, 4)), data, out, maps]
    return launch(source, arguments, block=64, programmatic=programmatic, **options)


@pytest.mark.parametrize("name", TOUCHES)
def test_an_access_needs_the_wait_before_it(name: str) -> None:
    access, begins = TOUCHES[name]
    early, late = access + NEXT + WAIT, WAIT + NEXT + access
    ((kind, instruction),) = found(touch(early))
    assert kind == KIND
    assert instruction.startswith(begins)
    assert found(touch(late)) == []
    assert found(touch(early, programmatic=False)) == []
    assert found(touch(early, checks=False)) == []


@pytest.mark.parametrize("name", HARMLESS)
def test_what_needs_no_wait(name: str) -> None:
    assert found(touch(HARMLESS[name] + WAIT)) == []


def test_a_report_names_the_line_and_the_remedy() -> None:
    (report,) = touch("\n" + TOUCHES["store"][0] + "\n" + WAIT).reports
    assert report.source.endswith("test.cu:12")
    assert "execute griddepcontrol.wait first" in report.message


def test_the_wait_is_that_of_the_lanes_which_execute_it() -> None:
    load = TOUCHES["load"][0]
    for condition, lane in (("t % 32 < 16", 16), ("t != 37", 5), ("t % 32 == 0", 1)):
        reports = touch(f"if ({condition}) {WAIT} {load}").reports
        assert {(r.kind, r.lane) for r in reports} == {(KIND, lane)}
        assert len(reports) == 2  # the load, and the store at the end
    guarded = asm("{\\n.reg .pred p;\\nsetp.ne.u32 p, %0, 37;\\n@p griddepcontrol.wait;\\n}", '"r"(t)')
    assert {(r.kind, r.warp, r.lane) for r in touch(guarded + load).reports} == {(KIND, 1, 5)}
    assert found(touch(guarded + f"if (t == 37) {WAIT}" + load)) == []


# ---- the wait of another thread
ORDER = r"""
extern "C" __global__ void CLUSTER k(const __grid_constant__ TensorMap map, float* in, float* out) {
  __shared__ alignas(128) float s[64]; __shared__ alignas(8) uint64_t full;
  const uint32_t t = threadIdx.x;
  s[t] = t;
  if (t == 0) { init(smem(&full), COUNT); fence_init(); }
  fence_async(); START
  STATEMENTS
  if (USER) asm volatile("st.global.f32 [%0], %1;" ::"l"(out + t), "f"(1.0f) : "memory");
  LAST
}"""
NAMED = ('asm volatile("bar.arrive 1, 64;" ::: "memory");', 'asm volatile("bar.sync 1, 64;" ::: "memory");')
SHUFFLE = "__shfl_sync(~0u, t, 0);"
# name -> what is executed, who uses global memory afterwards, is it clean
ORDERS = {
    "barrier": (f"if (t < 32) {WAIT} __syncthreads();", "t >= 32", True),
    "no barrier": (f"if (t < 32) {WAIT}", "t >= 32", False),
    "barrier before the wait": (f"__syncthreads(); if (t < 32) {WAIT}", "t >= 32", False),
    "named barrier": (f"if (t < 32) {{ {WAIT} {NAMED[0]} }} else {{ {NAMED[1]} }}", "t >= 32", True),
    "named barrier before": (f"if (t < 32) {{ {NAMED[0]} {WAIT} }} else {{ {NAMED[1]} }}", "t >= 32", False),
    "mbarrier": (f"if (t == 0) {{ {WAIT} arrive(smem(&full)); }} wait(smem(&full), 0);", "true", True),
    "arrival before": (f"if (t == 0) {{ arrive(smem(&full)); {WAIT} }} wait(smem(&full), 0);", "true", False),
    "warp barrier": (f"if (t % 32 == 9) {WAIT} __syncwarp();", "true", True),
    "no warp barrier": (f"if (t % 32 == 9) {WAIT}", "true", False),
    "a shuffle": (f"if (t % 32 == 9) {WAIT} {SHUFFLE}", "true", False),
    "at the user's warp": (f"if (t == 0) {WAIT} __syncwarp(); __syncthreads();", "t >= 32", True),
}


def order(statements: str, user: str, count: int = 1, cluster: int = 1, last: str = "", seed: int = 0) -> LaunchResult:
    source = ORDER.replace("STATEMENTS", statements).replace("USER", user).replace("COUNT", str(count))
    source = source.replace("CLUSTER", f"__cluster_dims__({cluster}, 1, 1)" if cluster > 1 else "")
    source = source.replace("LAST", last)
    source = source.replace("START", "cluster_sync();" if cluster > 1 else "__syncthreads();")
    data, out = np.ones(64, np.float32), np.zeros(64, np.float32)
    box = tiled(np.zeros((8, 32), np.float32), (32, 2))
    return launch(source, [box, data, out], block=64, grid=cluster, seed=seed, programmatic=True)


@pytest.mark.parametrize("name", ORDERS)
def test_what_orders_an_access_after_another_threads_wait(name: str) -> None:
    statements, user, clean = ORDERS[name]
    for seed in range(3):
        reports = found(order(statements, user, seed=seed))
        assert [kind for kind, _ in reports] == ([] if clean else [KIND])
        assert all(instruction.startswith("st.global.f32") for _, instruction in reports)


# CTA 1 executes a wait, but after it has used global memory: that is ordered by what it has from CTA 0 or not at all.
LAST = f"if (cluster_rank() == 1) {WAIT} cluster_sync();"


@pytest.mark.parametrize("seed", range(3))
def test_barriers_of_the_cluster_order_too(seed: int) -> None:
    wait = f"if (cluster_rank() == 0 && t == 0) {WAIT}"
    for statements, clean in ((wait + "cluster_sync();", True), ("cluster_sync();" + wait, False)):
        reports = found(order(statements, "cluster_rank() == 1", cluster=2, last=LAST, seed=seed))
        assert [kind for kind, _ in reports] == ([] if clean else [KIND])


# ---- the end of an asynchronous operation comes after what its issuer had waited for; no arrival says so here
REMOTE = ['"r"(mapa(smem(s + t), 1))', '"f"(1.0f)', '"r"(mapa(smem(&full), 1))']
ACROSS = "if (cluster_rank() == 0) {{ BEFORE {} AFTER }} else {{ {} wait(smem(&full), 0); }}"
# name -> arrivals, CTAs, what is executed, who uses global memory then, reports if the wait comes after the copy
SIGNALS = {
    "bulk load": (
        1, 1, "if (t == 0) { expect(smem(&full), 256); BEFORE bulk_load(smem(s), in, 256, smem(&full)); AFTER } " + LOADED,
        "t >= 32", ["cp.async.bulk.shared", "st.global.f32"],
    ),
    "tensor load": (
        1, 1, "if (t == 0) { expect(smem(&full), 256); BEFORE tma_load(map, smem(s), smem(&full), 0, 4); AFTER } " + LOADED,
        "t >= 32", ["cp.async.bulk.tensor", "st.global.f32"],
    ),
    "cp.async": (
        32, 1, "if (t < 32) { BEFORE " + asm("cp.async.ca.shared.global [%0], [%1], 4;", '"r"(smem(s + t))', '"l"(in + t)')
        + asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];", '"r"(smem(&full))') + " AFTER } " + LOADED,
        "t >= 32", ["cp.async.ca.shared", "st.global.f32"],
    ),
    "st.async": (
        1, 2, ACROSS.format(asm("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];", *REMOTE), one("expect(smem(&full), 256);")),
        "cluster_rank() == 1", ["st.global.f32"],
    ),
    "copy between CTAs": (
        1, 2, ACROSS.format(one(asm("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];", REMOTE[0], '"r"(smem(s + 32))', REMOTE[2])), one("expect(smem(&full), 128);")),
        "cluster_rank() == 1", ["st.global.f32"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("seed", range(3))
def test_the_end_of_a_copy_is_after_the_wait_of_its_issuer(name: str, seed: int) -> None:
    count, cluster, statements, user, expected = SIGNALS[name]
    last = LAST if cluster == 2 else ""
    after = statements.replace("BEFORE", "").replace("AFTER", WAIT)
    before = statements.replace("BEFORE", WAIT).replace("AFTER", "")
    assert found(order(before, user, count, cluster, last, seed)) == []
    reports = sorted(found(order(after, user, count, cluster, last, seed)), key=lambda r: r[1])
    assert [kind for kind, _ in reports] == [KIND] * len(expected)
    for (_, instruction), begins in zip(reports, expected, strict=True):
        assert instruction.startswith(begins)


# ---- no wait at all
END = r"""
extern "C" __global__ void CLUSTER k(uint32_t* out) {
  STATEMENTS
}"""


def end(statements: str, grid: int = 4, cluster: str = "", **options: Any) -> LaunchResult:
    source = END.replace("STATEMENTS", statements).replace("CLUSTER", cluster)
    return launch(source, [np.zeros(64, np.uint32)], block=64, grid=grid, **{"programmatic": True} | options)


def test_every_cta_has_to_wait() -> None:
    nobody = asm("{\\n.reg .pred p;\\nsetp.eq.u32 p, %0, 64;\\n@p griddepcontrol.wait;\\n}", '"r"(threadIdx.x)')
    for statements in ("", NEXT, f"if (threadIdx.x == 64) {WAIT}", nobody):
        ((kind, instruction),) = found(end(statements))
        assert kind == KIND
        assert instruction.startswith("ret")
        assert found(end(statements, programmatic=False)) == found(end(statements, checks=False)) == []
    assert found(end(f"if (threadIdx.x == 63) {WAIT}")) == []
    assert "execute griddepcontrol.wait on every way out" in end("").reports[0].message


@pytest.mark.parametrize("seed", range(3))
def test_the_cta_that_leaves_early_is_named(seed: int) -> None:
    (report,) = end(f"if (blockIdx.x == 2) return; {WAIT}", seed=seed).reports
    assert (report.kind, report.cta) == (KIND, (2, 0, 0))


def test_a_cta_is_not_excused_by_another_of_its_cluster() -> None:
    statements = f"if (cluster_rank() == 0) {WAIT} cluster_sync();"
    reports = end(statements, cluster="__cluster_dims__(2, 1, 1)").reports
    assert [(r.kind, r.cta[0] % 2) for r in reports] == [(KIND, 1)]


# ---- how a launch says that it is programmatic
DOUBLE = r"""
extern "C" __global__ void k(float* x) { FIRST x[threadIdx.x] *= 2; THEN }"""
EARLY = DOUBLE.replace("FIRST", "").replace("THEN", WAIT)
LATE = DOUBLE.replace("FIRST", WAIT).replace("THEN", "")


@pytest.mark.parametrize("source", [EARLY, LATE], ids=["before", "after"])
@pytest.mark.parametrize("programmatic", [False, True])
def test_the_drivers_launch_shape_decides(source: str, programmatic: bool) -> None:
    driver = EmulatedDriver()
    kernel = CompiledKernel(compile_cuda(source).encode(), "ptx", "k", 0, 32, 1, 0, 0, 0, "")
    x = torch.arange(32, dtype=torch.float32)
    shape = LaunchShape(1, 32, 1, programmatic)
    run = driver.prepare(driver.load(kernel, 0), kernel, shape, [(x.data_ptr(), 8)], [x])
    if programmatic and source is EARLY:
        with pytest.raises(LaunchError, match=r"grid-dependency: .*PTX line"):
            run()
        assert {r.kind for r in driver.last_result.reports} == {KIND}
        with driver.configured(ignore=(KIND,)):
            run()
    else:
        run()
        assert driver.last_result.reports == ()
        assert x.tolist() == list(range(0, 64, 2))


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [(True, 1, "grid-dependency"), (False, 0, "0 reports"), ("yes", 2, "programmatic is 'yes'")],
)
def test_the_launch_description_may_say_so(tmp_path: Path, value: Any, code: int, says: str) -> None:
    (tmp_path / "kernel.ptx").write_text(compile_cuda(EARLY))
    description = {"block": 32, "programmatic": value, "args": ["x"],
                   "buffers": {"x": {"dtype": "float32", "shape": [32], "fill": 1}}}  # fmt: skip
    (tmp_path / "launch.json").write_text(json.dumps(description))
    result = CliRunner().invoke(app, [str(tmp_path / "kernel.ptx"), "--launch", str(tmp_path / "launch.json")])
    if code == 2:
        assert isinstance(result.exception, LaunchError)
        assert says in str(result.exception)
    else:
        assert result.exit_code == code
        assert says in result.output


# ---- what is ready before the wait
READ = r"""
extern "C" __global__ void k(const unsigned* x, unsigned* y) {
    unsigned v;
    asm volatile("LOAD %0, [%1];" : "=r"(v) : "l"(x + threadIdx.x) : "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    y[threadIdx.x] = v;
}"""
WEAK, STRONG = "ld.global.u32", "ld.relaxed.gpu.global.u32"


@pytest.mark.parametrize(
    ("load", "is_ready", "is_right"),
    [(WEAK, False, False), (STRONG, False, False), (WEAK, True, False), (STRONG, True, True)],
)
def test_what_is_ready_is_read_past_l1(load: str, is_ready: bool, is_right: bool) -> None:
    """A line of an earlier launch may be left in L1, where a weak load finds it."""
    driver = EmulatedDriver()
    kernel = CompiledKernel(compile_cuda(READ.replace("LOAD", load)).encode(), "ptx", "k", 0, 32, 1, 0, 0, 0, "")
    x, y = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    shape = LaunchShape(1, 32, 1, programmatic=True, ready=(x.data_ptr(),) if is_ready else ())
    arguments = [(t.data_ptr(), 8) for t in (x, y)]
    with driver.configured(raise_on_reports=False):
        driver.prepare(driver.load(kernel, 0), kernel, shape, arguments, [x, y])()
    assert {r.kind for r in driver.last_result.reports} == (set() if is_right else {KIND})
    assert torch.equal(x, y)
