"""Copies, barriers, clusters and matrix instructions: right results on every schedule, and a report for each misuse."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import Emulator
from padless.emulator.run import machine
from support.emulator_cuda import kinds, launch, tiled

SEEDS = range(6)
RNG = np.random.default_rng(7)


# ---- ordinary shared memory
EXCHANGE = r"""
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ float s[128];
  s[threadIdx.x] = in[threadIdx.x];
  SYNC
  out[threadIdx.x] = s[127 - threadIdx.x];
}"""


@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("__syncthreads();", set()),
        ('asm volatile("barrier.cta.sync 3, 128;" ::: "memory");', set()),
        ("", {"race", "uninitialised-shared"}),
        ("__syncwarp();", {"race", "uninitialised-shared"}),
        ("__threadfence_block();", {"race", "uninitialised-shared"}),
    ],
)
def test_exchange_through_shared_memory(sync: str, expected: set[str]) -> None:
    seen: set[str] = set()
    for seed in SEEDS:
        out, data = np.full(128, np.nan, np.float32), RNG.standard_normal(128).astype(np.float32)
        result = launch(EXCHANGE.replace("SYNC", sync), [out, data], seed=seed)
        seen |= kinds(result)
        if not expected:
            assert (out == data[::-1]).all()
    assert seen == expected or (expected and "race" in seen and seen <= expected)


@pytest.mark.parametrize(("sync", "expected"), [("__syncwarp();", set()), ("", {"race"})])
def test_lanes_of_a_warp_need_a_barrier_too(sync: str, expected: set[str]) -> None:
    source = r"""
    extern "C" __global__ void k(float* out, const float* in) {
      __shared__ volatile float unused; __shared__ float s[32];
      s[threadIdx.x] = in[threadIdx.x]; SYNC
      out[threadIdx.x] = s[threadIdx.x ^ 9];
    }"""
    out, data = np.full(32, np.nan, np.float32), RNG.standard_normal(32).astype(np.float32)
    result = launch(source.replace("SYNC", sync), [out, data], block=32)
    assert kinds(result) == expected


def test_write_after_read_needs_a_barrier() -> None:
    source = r"""
    extern "C" __global__ void k(float* out, const float* in) {
      __shared__ float s[64]; float sum = 0;
      for (int i = 0; i < 3; ++i) { s[threadIdx.x] = in[threadIdx.x] + i; __syncthreads(); sum += s[63 - threadIdx.x]; SYNC }
      out[threadIdx.x] = sum;
    }"""
    for sync, expected in (("__syncthreads();", set()), ("", {"race"})):
        out, data = np.full(64, np.nan, np.float32), RNG.standard_normal(64).astype(np.float32)
        assert kinds(launch(source.replace("SYNC", sync), [out, data], block=64)) == expected


def test_flags_with_release_and_acquire_order() -> None:
    source = r"""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {
      __shared__ unsigned data, flag;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x == 32) { data = in[0]; asm volatile("st.release.cta.shared.u32 [%0], 1;" :: "r"(smem(&flag)) : "memory"); }
      if (threadIdx.x == 0) {
        unsigned v = 0;
        while (v == 0) asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem(&flag)) : "memory");
        out[0] = data;
      }
    }"""
    for seed in SEEDS:
        out = np.zeros(1, np.uint32)
        launch(source, [out, np.array([77], np.uint32)], block=64, seed=seed).raise_on_reports()
        assert out[0] == 77


# ---- bulk copies and mbarriers
COPY = r"""
extern "C" __global__ void k(float* out, const float* in, int n) {
  __shared__ alignas(128) float s[2][256]; __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) { for (int i = 0; i < 2; ++i) { init(smem(&full[i]), 1); init(smem(&empty[i]), 64); } fence_init(); }
  __syncthreads();
  if (threadIdx.x >= 64) {
    if (threadIdx.x == 64)
      for (int i = 0; i < n; ++i) {
        wait(smem(&empty[i % 2]), (i / 2 & 1) ^ 1);
        expect(smem(&full[i % 2]), 1024);
        bulk_load(smem(s[i % 2]), in + 256 * i, 1024, smem(&full[i % 2]));
      }
  } else {
    for (int i = 0; i < n; ++i) {
      wait(smem(&full[i % 2]), i / 2 & 1);
      for (int j = threadIdx.x; j < 256; j += 64) out[256 * i + j] = 2 * s[i % 2][j];
      arrive(smem(&empty[i % 2]));
    }
  }
}"""
COPY_BUGS = {
    "consumer does not wait": ("wait(smem(&full[i % 2]), i / 2 & 1);", "", {"race"}),
    "producer does not wait": ("wait(smem(&empty[i % 2]), (i / 2 & 1) ^ 1);", "", {"race"}),
    "wrong parity": ("wait(smem(&full[i % 2]), i / 2 & 1)", "wait(smem(&full[i % 2]), (i / 2 & 1) ^ 1)", {"race"}),
    "expects too much": ("1024); \n", "", set()),
    "no init fence": ("fence_init();", "", {"mbarrier-init"}),
    "no barrier after init": ("__syncthreads();", "", {"mbarrier"}),
    "arrives twice": ("arrive(smem(&empty[i % 2]));", "arrive(smem(&empty[i % 2])); arrive(smem(&empty[i % 2]));", {"mbarrier"}),
    "never arrives": ("arrive(smem(&empty[i % 2]));", "", {"deadlock"}),
    "expects 16 bytes more": ("expect(smem(&full[i % 2]), 1024)", "expect(smem(&full[i % 2]), 1040)", {"deadlock"}),
    "copies past the array": ("in + 256 * i", "in + 256 * i + 4", {"out-of-bounds"}),
    "odd size": ("in + 256 * i, 1024", "in + 256 * i, 1020", {"fault"}),
    "writes to the barrier": ("fence_init();", "fence_init(); full[1] = 0;", {"mbarrier"}),
}  # fmt: skip
del COPY_BUGS["expects too much"]


@pytest.mark.parametrize("seed", range(8))
def test_double_buffered_bulk_copy(seed: int) -> None:
    data = RNG.standard_normal(256 * 7).astype(np.float32)
    out = np.full_like(data, np.nan)
    launch(COPY, [out, data, 7], seed=seed).raise_on_reports()
    assert (out == 2 * data).all()


@pytest.mark.parametrize("name", COPY_BUGS)
def test_bulk_copy_bugs(name: str) -> None:
    old, new, expected = COPY_BUGS[name]
    assert old in COPY
    data = RNG.standard_normal(256 * 5).astype(np.float32)
    found: set[str] = set()
    for seed in SEEDS:
        found |= kinds(launch(COPY.replace(old, new), [np.full_like(data, np.nan), data, 5], seed=seed))
    assert expected <= found


def test_deadlock_report_says_who_waits_for_what() -> None:
    data = np.zeros(1280, np.float32)
    result = launch(COPY.replace("arrive(smem(&empty[i % 2]));", ""), [np.zeros_like(data), data, 5])
    (report,) = [r for r in result.reports if r.kind == "deadlock"]
    assert "waits for parity" in report.message
    assert "64 of 64 arrivals pending" in report.message
    assert "empty" in report.message
    assert "test.cu:" in report.message


# ---- stores
STORE = r"""
extern "C" __global__ void k(float* out) {
  __shared__ alignas(128) float s[128];
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x == 0) bulk_wait_read();
    __syncthreads();
    s[threadIdx.x] = 100 * i + threadIdx.x;
    fence_async();
    __syncthreads();
    if (threadIdx.x == 0) { bulk_store(out + 128 * i, smem(s), 512); bulk_commit(); }
  }
  if (threadIdx.x == 0) bulk_wait();
}"""


@pytest.mark.parametrize("seed", range(8))
def test_bulk_store(seed: int) -> None:
    out = np.full(512, np.nan, np.float32)
    launch(STORE, [out], seed=seed).raise_on_reports()
    assert (out.reshape(4, 128) == 100 * np.arange(4)[:, None] + np.arange(128)).all()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("fence_async();\n", "\n", "missing-proxy-fence"),
        ("if (threadIdx.x == 0) bulk_wait_read();", "", "race"),
        ("if (threadIdx.x == 0) bulk_wait();", "", "exit"),
        ("bulk_commit();", "", "race"),
        ("fence_async();\n    __syncthreads();", "fence_async();", "race"),
        (
            "fence_async();\n    __syncthreads();",
            "__syncthreads(); if (threadIdx.x) fence_async();",
            "missing-proxy-fence",
        ),
    ],
)
def test_bulk_store_bugs(old: str, new: str, expected: str) -> None:
    assert old in STORE
    assert expected in kinds(launch(STORE.replace(old, new), [np.zeros(512, np.float32)]))


def test_a_fence_on_the_issuing_side_counts() -> None:
    """The fence may stand anywhere on the path from the write to the copy."""
    source = STORE.replace("fence_async();\n", "\n").replace("{ bulk_store", "{ fence_async(); bulk_store")
    launch(source, [np.zeros(512, np.float32)]).raise_on_reports()


# ---- tensor copies
TENSOR = r"""
extern "C" __global__ void k(const __grid_constant__ TensorMap in, const __grid_constant__ TensorMap out, int x, int y) {
  extern __shared__ __align__(1024) uint8_t s[]; __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) {
    init(smem(&full), 1); fence_init();
    expect(smem(&full), BYTES); tma_load(in, smem(s), smem(&full), x, y);
    wait(smem(&full), 0);
    STORE(out, smem(s), x, y); bulk_commit(); bulk_wait();
  }
}"""


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize(("x", "y"), [(0, 0), (8, 5), (16, 37), (96, 60)])
def test_tensor_copy_clips_and_fills_with_zeros(swizzle: int, x: int, y: int) -> None:
    """Loaded and stored with the same swizzle, so what arrives is the box; outside the tensor nothing is written."""
    width = (64, 16, 32, 64)[swizzle] // 2 if swizzle else 32
    data = RNG.integers(1, 60000, (61, 104)).astype(np.uint16)
    out = np.full_like(data, 7)
    source = TENSOR.replace("BYTES", str(width * 16 * 2)).replace("STORE", "tma_store")
    box = (width, 16)
    launch(
        source, [tiled(data, box, swizzle), tiled(out, box, swizzle), x, y], block=32, shared_bytes=8192
    ).raise_on_reports()
    expected = np.full_like(data, 7)
    rows, columns = slice(max(y, 0), max(y + 16, 0)), slice(max(x, 0), max(x + width, 0))
    expected[rows, columns] = data[rows, columns]
    assert (out == expected).all()


def test_negative_start_reads_zeros_and_is_refused_for_stores() -> None:
    data, out = RNG.integers(1, 60000, (61, 104)).astype(np.uint16), np.full((16, 32), 7, np.uint16)
    source = TENSOR.replace("BYTES", "1024").replace("STORE(out, smem(s), x, y)", "tma_store(out, smem(s), 0, 0)")
    arguments = [tiled(data, (32, 16)), tiled(out, (32, 16)), -8, -3]
    launch(source, arguments, block=32, shared_bytes=8192).raise_on_reports()
    expected = np.zeros((16, 32), np.uint16)
    expected[3:, 8:] = data[:13, :24]
    assert (out == expected).all()
    source = TENSOR.replace("BYTES", "1024").replace("STORE", "tma_store")
    assert kinds(launch(source, arguments, block=32, shared_bytes=8192)) == {"tma"}


def test_tensor_reduction_adds() -> None:
    data, out = (RNG.standard_normal((16, 32)).astype(np.float32), RNG.standard_normal((16, 32)).astype(np.float32))
    expected = data + out
    source = TENSOR.replace("BYTES", str(16 * 32 * 4)).replace("STORE", "tma_reduce_add")
    launch(source, [tiled(data, (32, 16)), tiled(out, (32, 16)), 0, 0], block=32, shared_bytes=8192).raise_on_reports()
    assert (out == expected).all()


def test_innermost_start_must_be_a_multiple_of_16_bytes() -> None:
    data = np.zeros((16, 64), np.uint16)
    source = TENSOR.replace("BYTES", "1024").replace("STORE", "tma_store")
    result = launch(source, [tiled(data, (32, 16)), tiled(data, (32, 16)), 3, 0], block=32, shared_bytes=8192)
    assert "tma" in kinds(result)


# ---- clusters
CLUSTER = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(float* out, const __grid_constant__ TensorMap in) {
  __shared__ alignas(128) float s[64]; __shared__ alignas(128) float t[64]; __shared__ alignas(8) uint64_t full, ready;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) { init(smem(&full), 1); init(smem(&ready), 64); fence_init(); }
  cluster_sync();
  if (threadIdx.x == 0) {
    expect(smem(&full), 256);
    tma_load_multicast(in, smem(s + 32 * rank), smem(&full), 32 * rank, 0, 3);
  }
  wait(smem(&full), 0);
  asm volatile("st.shared::cluster.f32 [%0], %1;" :: "r"(mapa(smem(&t[threadIdx.x]), rank ^ 1)), "f"(s[threadIdx.x] + rank) : "memory");
  arrive_remote(mapa(smem(&ready), rank ^ 1));
  READY asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@p bra D;\nbra W;\nD:\n}" :: "r"(smem(&ready)) : "memory");
  out[64 * blockIdx.x + threadIdx.x] = t[63 - threadIdx.x];
  END
}"""


@pytest.mark.parametrize("seed", range(8))
def test_multicast_and_distributed_shared_memory(seed: int) -> None:
    data, out = RNG.standard_normal((1, 64)).astype(np.float32), np.full(256, np.nan, np.float32)
    source = CLUSTER.replace("END", "cluster_sync();").replace("READY", "")
    launch(source, [out, tiled(data, (32, 1))], grid=4, block=64, seed=seed).raise_on_reports()
    for cta in range(4):
        assert (out[64 * cta : 64 * cta + 64] == (data[0] + (cta & 1 ^ 1))[::-1].astype(np.float32)).all()


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("READY", "if (rank)", "exit"),
        ("cluster_sync();\n  if", "__syncthreads();\n  if", "mbarrier"),
        ("rank, 0, 3)", "rank, 0, 1)", "deadlock"),
        ("arrive_remote(mapa(smem(&ready), rank ^ 1))", "arrive_remote(mapa(smem(&ready), rank))", "race"),
    ],
)
def test_cluster_bugs(old: str, new: str, expected: str) -> None:
    assert old in CLUSTER
    source = CLUSTER.replace(old, new).replace("END", "" if old == "READY" else "cluster_sync();").replace("READY", "")
    found: set[str] = set()
    for seed in SEEDS:
        data, out = np.ones((1, 64), np.float32), np.zeros(128, np.float32)
        found |= kinds(launch(source, [out, tiled(data, (32, 1))], grid=2, block=64, seed=seed))
    assert expected in found


# ---- cp.async
def test_cp_async() -> None:
    source = r"""
    extern "C" __global__ void k(float* out, const float* in) {
      __shared__ alignas(16) float s[128];
      asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" :: "r"(smem(&s[4 * threadIdx.x])), "l"(in + 4 * threadIdx.x) : "memory");
      asm volatile("cp.async.commit_group;" ::: "memory"); WAIT __syncwarp();
      for (int i = 0; i < 4; ++i) out[i * 32 + threadIdx.x] = s[127 - (i * 32 + threadIdx.x)];
    }"""
    wait = 'asm volatile("cp.async.wait_group 0;" ::: "memory");'
    for seed in SEEDS:
        data, out = RNG.standard_normal(128).astype(np.float32), np.full(128, np.nan, np.float32)
        launch(source.replace("WAIT", wait), [out, data], block=32, seed=seed).raise_on_reports()
        assert (out == data[::-1]).all()
    assert "race" in kinds(launch(source.replace("WAIT", ""), [out, data], block=32))


# ---- matrices
def test_ldmatrix_and_stmatrix_are_inverse_and_transpose() -> None:
    source = r"""
    extern "C" __global__ void k(uint16_t* out, const uint16_t* in) {
      __shared__ alignas(128) uint16_t s[256], t[256];
      for (int i = threadIdx.x; i < 256; i += 32) s[i] = in[i];
      __syncwarp();
      uint32_t r[4];
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(smem(&s[8 * threadIdx.x])));
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%4], {%0, %1, %2, %3};" :: "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(smem(&t[8 * threadIdx.x])) : "memory");
      __syncwarp();
      for (int i = threadIdx.x; i < 256; i += 32) out[i] = t[i];
    }"""
    data, out = RNG.integers(0, 65536, 256).astype(np.uint16), np.zeros(256, np.uint16)
    launch(source, [out, data], block=32).raise_on_reports()
    assert (out.reshape(4, 8, 8) == data.reshape(4, 8, 8).transpose(0, 2, 1)).all()


# ---- barriers among fewer than all threads, registers, early exits
def test_producer_and_consumer_with_named_barriers() -> None:
    source = r"""
    extern "C" __global__ void k(float* out, const float* in) {
      __shared__ float s[32];
      const int lane = threadIdx.x % 32;
      for (int i = 0; i < 4; ++i) {
        if (threadIdx.x < 32) {
          s[lane] = in[32 * i + lane];
          asm volatile("bar.arrive 1, 64;" ::: "memory"); asm volatile("bar.sync 2, 64;" ::: "memory");
        } else {
          asm volatile("bar.sync 1, 64;" ::: "memory"); out[32 * i + lane] = s[31 - lane]; asm volatile("bar.arrive 2, 64;" ::: "memory");
        }
      }
    }"""
    for seed in SEEDS:
        data, out = RNG.standard_normal(128).astype(np.float32), np.full(128, np.nan, np.float32)
        launch(source, [out, data], block=64, seed=seed).raise_on_reports()
        assert (out.reshape(4, 32) == data.reshape(4, 32)[:, ::-1]).all()
    broken = source.replace('asm volatile("bar.sync 2, 64;"', 'asm volatile("bar.arrive 2, 64;"')
    assert kinds(launch(broken, [out, data], block=64)) & {"race", "barrier"}


def test_threads_that_have_ended_do_not_hold_a_barrier() -> None:
    source = r"""
    extern "C" __global__ void k(float* out) {
      if (threadIdx.x >= 64) return;
      __syncthreads(); out[threadIdx.x] = 1;
    }"""
    out = np.zeros(64, np.float32)
    launch(source, [out]).raise_on_reports()
    assert out.all()


def test_aligned_instruction_in_divergent_code_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "IDLE_LIMIT", 600)  # turns of spinning; forward progress is given up at 256
    source = r"""
    extern "C" __global__ void k(unsigned* out) {
      if (threadIdx.x < 7) asm volatile("bar.sync 1, 32;" ::: "memory");
      else { unsigned v = 0; while (v == 0) asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(out)); }
    }"""
    assert kinds(launch(source, [np.zeros(1, np.uint32)], block=32)) == {"deadlock"}


def test_bank_conflicts_are_counted() -> None:
    source = r"""
    extern "C" __global__ void k(float* out) {
      __shared__ float s[32 * 32];
      for (int i = 0; i < 32; ++i) s[32 * i + threadIdx.x] = i;
      __syncwarp(); out[threadIdx.x] = s[STRIDE * threadIdx.x];
    }"""
    counts = []
    for stride in (1, 2, 32, 31):
        result = launch(source.replace("STRIDE", str(stride)), [np.zeros(32, np.float32)], block=32)
        counts.append(result.raise_on_reports().statistics.bank_conflicts)
    assert counts == [0, 1, 31, 0]


BARRIER_OF_FEW = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out) {
.reg .b32 %t, %v; .reg .b64 %o, %at; .reg .pred %q;
.shared .align 4 .b32 words[64];
mov.u32 %t, %tid.x; ld.param.u64 %o, [out];
EXIT
mul.wide.u32 %at, %t, 4; add.s64 %o, %o, %at;
barrier.sync 0;
add.u32 %v, %t, 7; st.global.u32 [%o], %v;
ret; }
"""


@pytest.mark.parametrize("threads", [1, 16, 33, 48])
@pytest.mark.parametrize("leave", ["", "setp.eq.u32 %q, %t, 0; @%q exit;", "setp.gt.u32 %q, %t, 20; @%q exit;"])
def test_barrier_that_is_not_aligned_counts_the_threads_that_there_are(threads: int, leave: str) -> None:
    for seed in range(4):
        emulator = Emulator(BARRIER_OF_FEW.replace("EXIT", leave), seed=seed)
        out = np.zeros(threads, np.uint32)
        emulator.launch("k", 1, threads, [emulator.memory.register(out)]).raise_on_reports()
        left = np.arange(threads) == 0 if "eq" in leave else np.arange(threads) > 20 if "gt" in leave else False
        assert (out == np.where(left, 0, np.arange(threads) + 7)).all()
