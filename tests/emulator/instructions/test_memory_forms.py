"""Vector and 128-bit atomics, asynchronous stores, the rarer forms of cp.async, and an arrival's state."""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import LaunchResult
from support.emulator_cuda import kinds, launch

# Every lane of four warps adds four floats, and four pairs of halves, to one of two places.
VECTORS = r"""
extern "C" __global__ void k(float* sums, uint32_t* halves, uint32_t* largest, float* before) {
  const uint32_t at = threadIdx.x & 1, x = threadIdx.x;
  asm volatile("red.global.v4.f32.add [%0], {%1, %2, %3, %4};" ::"l"(sums + 4 * at), "f"(1.0f), "f"((float)x), "f"(2.0f * x), "f"(0.5f) : "memory");
  const uint32_t one_x = 0x3C00 | (x & 7) << 26, two = 0x4000C000;  // (1, small), (-2, 2)
  asm volatile("red.global.add.noftz.v2.f16x2 [%0], {%1, %2};" ::"l"(halves + 2 * at), "r"(0x3C003C00), "r"(two) : "memory");
  asm volatile("{\n.reg .b32 a, b;\natom.global.v2.f16x2.max.noftz {a, b}, [%0], {%1, %2};\n}" ::"l"(largest + 2 * at), "r"(one_x), "r"(two) : "memory");
  float o[2];
  if (x < 32) {
    asm volatile("atom.global.v2.f32.add {%0, %1}, [%2], {%3, %4};" : "=f"(o[0]), "=f"(o[1]) : "l"(before + 4 * x), "f"(10.0f), "f"(20.0f) : "memory");
    before[4 * x + 2] = o[0]; before[4 * x + 3] = o[1];
  }
}"""


def test_vector_atomics() -> None:
    sums, halves, largest = np.zeros((2, 4), np.float32), np.zeros(8, np.float16), np.full(8, -9, np.float16)
    before = np.tile(np.array([3, 4, 0, 0], np.float32), (32, 1))
    launch(VECTORS, [sums, halves, largest, before], block=128).raise_on_reports()
    for parity in range(2):
        x = np.arange(parity, 128, 2)
        assert sums[parity].tolist() == [64, x.sum(), 2 * x.sum(), 32]
    assert halves.tolist() == [64, 64, -128, 128] * 2
    top = [np.array([(x & 7) << 10 for x in range(p, 8, 2)], np.uint16).view(np.float16).max() for p in range(2)]
    assert largest.tolist() == [1, top[0], -2, 2, 1, top[1], -2, 2]
    assert (before == [13, 24, 3, 4]).all()


def test_atomics_of_128_bits_are_one() -> None:
    source = r"""
extern "C" __global__ void k(uint64_t* cell, uint64_t* seen) {
  uint64_t lo, hi; const uint64_t want_lo = threadIdx.x, want_hi = threadIdx.x == 7 ? 99 : threadIdx.x * 3;
  asm volatile("{\n.reg .b128 d, c, n;\nmov.b128 c, {%3, %4};\nmov.b128 n, {%5, %6};\natom.global.cas.b128 d, [%2], c, n;\nmov.b128 {%0, %1}, d;\n}"
    : "=l"(lo), "=l"(hi) : "l"(cell), "l"(want_lo), "l"(want_hi), "l"(want_lo + 1), "l"((want_lo + 1) * 3) : "memory");
  seen[2 * threadIdx.x] = lo; seen[2 * threadIdx.x + 1] = hi;
}"""
    cell, seen = np.zeros(2, np.uint64), np.zeros((32, 2), np.uint64)
    launch(source, [cell, seen], block=32).raise_on_reports()
    assert cell.tolist() == [7, 21]  # lane 7 compares with another upper half, and all after it with other numbers
    assert seen[:8].tolist() == [[i, 3 * i] for i in range(8)]
    assert (seen[8:] == [7, 21]).all()


PUSH = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(uint32_t* out) {
  __shared__ alignas(16) uint32_t s[128]; __shared__ uint32_t total; __shared__ alignas(8) uint64_t full, counted;
  if (threadIdx.x == 0) { init(smem(&full), 1); init(smem(&counted), 1); fence_init(); total = 5; }
  cluster_sync();
  const uint32_t rank = cluster_rank(), other = rank ^ 1, x = threadIdx.x;
  if (x == 0) { expect(smem(&full), 512); expect(smem(&counted), 128); }
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(mapa(smem(s + 4 * x), other)), "r"(x), "r"(rank), "r"(x * x), "r"(7), "r"(mapa(smem(&full), other)) : "memory");
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(mapa(smem(&total), other)), "r"(x), "r"(mapa(smem(&counted), other)) : "memory");
  WAIT
  for (int i = 0; i < 4; ++i) out[128 * rank + 4 * x + i] = s[4 * x + i];
  wait(smem(&counted), 0);
  if (x == 0) out[256 + rank] = total;
  cluster_sync();
}"""


# the operand of the store: a list of registers, or a vector variable
VARIABLE = "{\\n.reg .v4 .b32 s;\\nmov.b32 s.x, %1;\\nmov.b32 s.y, %2;\\nmov.b32 s.z, %3;\\nmov.b32 s.w, %4;\\nSTORE s, [%5];\\n}"


@pytest.mark.parametrize(("seed", "checks"), [*((seed, True) for seed in range(6)), (6, False)])
def test_stores_into_another_cta_arrive_by_themselves(seed: int, checks: bool) -> None:
    out = np.zeros(258, np.uint32)
    source = PUSH.replace("WAIT", "wait(smem(&full), 0);")
    if seed % 2:
        store = source[source.index("st.async") : source.index(" {%1, %2, %3, %4}, [%5];")]
        source = source.replace(store + " {%1, %2, %3, %4}, [%5];", VARIABLE.replace("STORE", store))
    launch(source, [out], grid=2, block=32, seed=seed, checks=checks).raise_on_reports()
    x = np.arange(32)
    for rank in range(2):
        expected = np.stack([x, 0 * x + 1 - rank, x * x, 0 * x + 7], 1)
        assert (out[128 * rank : 128 * rank + 128].reshape(32, 4) == expected).all()
    assert (out[256:] == 5 + x.sum()).all()


def test_reading_before_the_barrier_is_a_race() -> None:
    found = set()
    for seed in range(3):
        found |= kinds(launch(PUSH.replace("WAIT", ""), [np.zeros(258, np.uint32)], grid=2, block=32, seed=seed))
    assert found & {"race", "uninitialised-shared"}


def test_small_copies_with_hints_and_ignored_sources() -> None:
    source = r"""
extern "C" __global__ void k(const float* in, float* out) {
  __shared__ alignas(16) float s[128]; const uint32_t x = threadIdx.x; const uint64_t hint = 0;
  asm volatile("{\n.reg .pred p;\nsetp.lt.u32 p, %3, 3;\ncp.async.ca.shared.global [%0], [%1], 4, p;\ncp.async.cg.shared.global.L2::cache_hint [%4], [%5], 16, %2;\n}"
    ::"r"(smem(s + x)), "l"(in + x), "l"(hint), "r"(x), "r"(smem(s + 32) + 16 * (x & 15)), "l"(in + 32 + 4 * (x & 15)) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
  for (int i = 0; i < 3; ++i) out[x + 32 * i] = s[x + 32 * i];
}"""
    data, out = (np.random.default_rng(0).standard_normal(128).astype(np.float32), np.full(96, np.nan, np.float32))
    result = launch(source, [data, out], block=16)
    result.raise_on_reports()
    written = np.concatenate([np.arange(16), np.arange(32, 48), np.arange(64, 80)])
    expected = data.copy()
    expected[:3] = 0
    assert (out[written] == expected[written]).all()


def test_an_arrival_returns_the_pending_count() -> None:
    source = r"""
extern "C" __global__ void k(uint32_t* out) {
  __shared__ alignas(8) uint64_t bar;
  if (threadIdx.x == 0) {
    init(smem(&bar), 5);
    for (int i = 0; i < 7; ++i) {
      uint64_t state; uint32_t pending;
      asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%2];\nmbarrier.pending_count.b64 %1, %0;" : "=l"(state), "=r"(pending) : "r"(smem(&bar)) : "memory");
      out[i] = pending;
    }
  }
}"""
    out = np.zeros(7, np.uint32)
    launch(source, [out], block=32).raise_on_reports()
    assert out.tolist() == [5, 4, 3, 2, 1, 5, 4]


# ---- cp.async of a warp: lanes differ in what they read, where they write, and where they are wrong
LANES = r"""
extern "C" __global__ void k(uint32_t* out, const uint32_t* in, const int* from, const int* to, const int* count) {
  __shared__ alignas(16) uint32_t s[256];
  const int x = threadIdx.x;
  for (int i = x; i < 256; i += 32) s[i] = 7;
  __syncwarp();
  if (to[x] >= 0)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem(&s[4 * to[x]])), "l"(in + 4 * from[x]), "r"(count[x]) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory"); WAIT
  __syncwarp();
  for (int i = x; i < 256; i += 32) out[i] = s[i];
}"""


def run_lanes(seed: int, wait: bool = True, **changes: int) -> tuple[np.ndarray, np.ndarray, LaunchResult]:
    """Random permutations and counts; `changes`: of lane 9's entries. Returns what came, what has to come, reports."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 1 << 32, 4 * 64, dtype=np.uint32)
    lanes = {"from": rng.permutation(64)[:32], "to": rng.permutation(64)[:32], "count": rng.integers(0, 17, 32)}
    lanes["to"][rng.integers(10, 32, 5)] = -1
    for name, value in changes.items():
        lanes[name][9] = lanes[name][8] if value == -2 else value
    out = np.full(256, 9, np.uint32)
    source = LANES.replace("WAIT", 'asm volatile("cp.async.wait_group 0;" ::: "memory");' if wait else "")
    given = [lanes[name].astype(np.int32) for name in ("from", "to", "count")]
    result = launch(source, [out, data, *given], block=32, seed=seed)
    expected = np.full(1024, 0, np.uint8)
    expected.view(np.uint32)[:] = 7
    for source_at, at, count in zip(*given, strict=True):
        if at >= 0:
            expected[16 * at : 16 * at + 16] = 0
            piece = data.view(np.uint8)[16 * source_at :][:count]
            expected[16 * at : 16 * at + len(piece)] = piece
    return out, expected.view(np.uint32), result


@pytest.mark.parametrize("seed", range(6))
def test_lanes_of_cp_async_differ_in_everything(seed: int) -> None:
    out, expected, result = run_lanes(seed)
    result.raise_on_reports()
    assert (out == expected).all()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"to": -2, "count": 16}, {"race"}),  # where lane 8 writes
        ({"from": 400, "to": 63, "count": 16}, {"out-of-bounds"}),
        ({"wait": False}, {"race"}),
    ],
    ids=["two lanes", "outside", "no wait"],
)
def test_what_lanes_of_cp_async_do_wrong_is_reported(changes: dict[str, int], found: set[str]) -> None:
    for seed in range(4):
        _, _, result = run_lanes(seed, **changes)
        assert found <= kinds(result)
        if "from" in changes:
            assert [report.lane for report in result.reports if report.kind == "out-of-bounds"] == [9]
