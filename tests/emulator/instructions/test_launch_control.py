"""Behaviour that other people's kernels rely on: cluster launch control, relaxed cluster barriers, arrivals after cp.async,
and results of tcgen05.ld that are used too early."""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from support.emulator_cuda import kinds, launch

# Every CTA writes its own number; a cluster goes on with the work of clusters that it cancels. SYNC orders the reading of
# a response before the next one is written.
CLAIM = r"""
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) k(int* done, int* taken) {
  __shared__ alignas(16) uint32_t answer[4]; __shared__ alignas(8) uint64_t full;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) { init(smem(&full), 1); fence_init(); }
  cluster_sync();
  int x = blockIdx.x, y = blockIdx.y, refused = 0;
  for (int phase = 0;; phase ^= 1) {
    if (threadIdx.x == 0) {
      atomicAdd(&done[x + gridDim.x * y], 1);
      expect(smem(&full), 16);
      BEFORE
      if (rank == 0) asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%0], [%1];" ::"r"(smem(answer)), "r"(smem(&full)) : "memory");
    }
    WAIT
    uint32_t ok, first[3];
    asm volatile("{\n.reg .pred p;\n.reg .b128 h;\nld.shared.b128 h, [%4];\nclusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h;\nselp.u32 %0, 1, 0, p;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\n"
                 "@p clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%1, %2, %3, _}, h;\n}" : "=r"(ok), "=r"(first[0]), "=r"(first[1]), "=r"(first[2]) : "r"(smem(answer)) : "memory");
    LEAVE
    x = first[0] + rank; y = first[1];
    if (threadIdx.x == 0) atomicAdd(taken, 1);
    SYNC
  }
  cluster_sync();
}"""
RIGHT = {
    "CLUSTER": "2",
    "BEFORE": "",
    "WAIT": "wait(smem(&full), phase);",
    "LEAVE": "if (!ok) break;",
    "SYNC": "fence_async(); cluster_sync();",
}


AGAIN = "if (!ok && ++refused == 2) break; if (!ok) { fence_async(); cluster_sync(); continue; }"


def claim(seed: int, **changes: str) -> tuple[np.ndarray, int, set[str]]:
    source = CLAIM
    for name, text in (RIGHT | changes).items():
        source = source.replace(name, text)
    done, taken = np.zeros((3, 4), np.int32), np.zeros(1, np.int32)
    result = launch(source, [done, taken], arch="100a", grid=(4, 3, 1), block=64, seed=seed)
    return done, int(taken[0]), kinds(result)


@pytest.mark.parametrize("seed", range(8))
def test_every_cta_is_computed_once_whoever_claims_it(seed: int) -> None:
    done, taken, found = claim(seed)
    assert found == set()
    assert (done == 1).all()
    assert taken % 2 == 0
    if seed < 3:  # one cluster at a time is resident: it takes over all the others
        assert taken == 10


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"WAIT": ""}, {"race", "uninitialised-shared"}),
        ({"SYNC": ""}, {"race"}),
        ({"LEAVE": AGAIN}, {"launch-control"}),
    ],
    ids=["no wait", "no barrier", "asks again"],
)
def test_launch_control_bugs(changes: dict[str, str], expected: set[str]) -> None:
    found = set().union(*(claim(seed, **changes)[2] for seed in range(4)))
    assert found & expected, found


def test_bytes_that_are_no_response_are_named() -> None:
    source = r"""
extern "C" __global__ void k(int* out) {
  __shared__ alignas(16) uint32_t answer[4];
  if (threadIdx.x < 4) answer[threadIdx.x] = 7;
  __syncthreads();
  uint32_t ok;
  asm volatile("{\n.reg .pred p;\n.reg .b128 h;\nld.shared.b128 h, [%1];\nclusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok) : "r"(smem(answer)) : "memory");
  out[threadIdx.x] = ok;
}"""
    out = np.full(32, -1, np.int32)
    assert kinds(launch(source, [out], arch="100a", block=32)) == {"launch-control"}
    assert (out == 0).all()


# ---- a relaxed cluster barrier publishes what fence.mbarrier_init covers, and nothing else
RELAXED = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out) {
  __shared__ alignas(8) uint64_t ready; __shared__ int value;
  if (threadIdx.x == 0) { value = out[0]; init(smem(&ready), 2); FENCE }
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 32) { arrive_remote(mapa(smem(&ready), 0)); arrive_remote(mapa(smem(&ready), 1)); }
  asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@p bra D;\nbra W;\nD:\n}" :: "r"(smem(&ready)) : "memory");
  out[64 * blockIdx.x + threadIdx.x] = READ;
  cluster_sync();
}"""


@pytest.mark.parametrize(
    ("fence", "read", "expected"),
    [("fence_init();", "1", set()), ("", "1", {"mbarrier"}), ("fence_init();", "value", {"race"})],
)
def test_relaxed_cluster_barrier(fence: str, read: str, expected: set[str]) -> None:
    for seed in range(3):
        out = np.full(128, -1, np.int32)
        source = RELAXED.replace("FENCE", fence).replace("READ", read)
        assert kinds(launch(source, [out], grid=2, block=64, seed=seed)) == expected


# ---- an arrival that follows several cp.async waits for all of them
GATHER = r"""
extern "C" __global__ void k(const float* in, float* out) {
  __shared__ float s[4 * 32]; __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) init(smem(&full), 32);
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int i = 0; i < 4; ++i)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem(s + 32 * i + threadIdx.x)), "l"(in + 32 * i + threadIdx.x) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem(&full)) : "memory");
  } else {
    wait(smem(&full), 0);
    for (int i = 0; i < 4; ++i) out[32 * i + threadIdx.x - 32] = s[32 * i + threadIdx.x - 32];
  }
}"""


@pytest.mark.parametrize("seed", range(12))
def test_arrival_after_copies_in_any_order(seed: int) -> None:
    data = np.random.default_rng(seed).standard_normal(128).astype(np.float32)
    out = np.full(128, np.nan, np.float32)
    launch(GATHER, [data, out], block=64, seed=seed).raise_on_reports()
    assert (out == data).all()


# ---- tcgen05.ld without its wait
EARLY = r"""
extern "C" __global__ void k(uint32_t* out) {
  __shared__ uint32_t base;
  if (threadIdx.x < 32) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(smem(&base)) : "memory");
  __syncthreads();
  const uint32_t at = base + (threadIdx.x / 32 * 32 << 16);
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};\ntcgen05.wait::st.sync.aligned;" ::"r"(at), "r"(threadIdx.x * 3) : "memory");
  uint32_t r;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(r) : "r"(at) : "memory");
  BEFORE
  out[threadIdx.x] = r + 1;
  asm volatile("tcgen05.wait::ld.sync.aligned;\ntcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (threadIdx.x < 32) asm volatile("tcgen05.fence::after_thread_sync;\ntcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" ::"r"(base));
}"""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_early_use_is_reported_and_the_rest_is_still_judged(early: bool, seed: int) -> None:
    out = np.zeros(128, np.uint32)
    before = "" if early else 'asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");'
    result = launch(EARLY.replace("BEFORE", before), [out], arch="100a", seed=seed)
    assert kinds(result) == ({"register-in-flight"} if early else set())
    assert (out == 3 * np.arange(128) + 1).all()


def test_registers_written_under_a_guard_may_be_read_under_it() -> None:
    source = r"""
extern "C" __global__ void k(uint32_t* out) {
  uint32_t p = threadIdx.x < 7;
  asm volatile("{\n.reg .pred p;\n.reg .u32 t;\nsetp.ne.u32 p, %0, 0;\n@p add.u32 t, %2, 1;\nGUARD st.global.u32 [%1], t;\n}" ::"r"(p), "l"(out + threadIdx.x), "r"(threadIdx.x) : "memory");
}"""
    report = {"uninitialised-register"}
    for guard, expected in (("@p", set()), ("@!p", report), ("", report)):
        out = np.zeros(32, np.uint32)
        assert kinds(launch(source.replace("GUARD", guard), [out], block=32)) == expected
        if guard == "@p":
            assert (out[:7] == np.arange(7) + 1).all()
            assert (out[7:] == 0).all()
