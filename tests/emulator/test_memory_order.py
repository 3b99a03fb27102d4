"""Memory order: what a release, an acquire, a fence and their scopes order, and what they do not."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import LaunchResult
from padless.emulator.state import strong_access
from support.emulator_cuda import kinds, launch

RNG = np.random.default_rng(11)
SEEDS = range(4)
ORDER = r"""
#define ARRIVE(s, b) asm volatile("mbarrier.arrive." s " _, [%0];" ::"r"(b) : "memory")
#define WAIT(s, b) asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity." s ".shared::cta.b64 p, [%0], 0;\n@p bra D;\nbra W;\nD:\n}" ::"r"(b) : "memory")
#define FENCE(s) asm volatile("fence." s ";" ::: "memory")
#define ld(v, a) asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory")
#define st(a, v) asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory")
"""


def run(source: str, seed: int, **options: int) -> tuple[LaunchResult, np.ndarray, np.ndarray]:
    data = RNG.integers(1, 1 << 32, 32, dtype=np.uint32)
    out = np.full(32, 0xFFC0FFEE, np.uint32)
    result = launch(ORDER + source, [out, data], seed=seed, **options)
    return result, out, data


# ---- one CTA: warp 1 writes (or reads) shared memory and arrives, warp 0 waits and reads (or writes)
HANDED = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ unsigned word[32]; __shared__ alignas(8) uint64_t bar;
  const unsigned lane = threadIdx.x % 32; const uint32_t at = smem(&word[lane]);
  if (threadIdx.x == 0) { init(smem(&bar), 32); fence_init(); }
  if (threadIdx.x < 32) st(at, in[lane]);
  __syncthreads();
  unsigned v = 0;
  if (threadIdx.x >= 32) { FIRST; ARRIVAL; AFTER } else { WAITED; SECOND; }
  if (FROM) out[lane] = v;
}"""
WRITTEN = {"FIRST": "st(at, in[31 - lane])", "SECOND": "ld(v, at)", "FROM": "threadIdx.x < 32"}
READ = {"FIRST": "ld(v, at)", "SECOND": "st(at, 7)", "FROM": "threadIdx.x >= 32"}
RELEASE, RELAXED = (
    'ARRIVE("release.cta.shared::cta.b64", smem(&bar))',
    'ARRIVE("relaxed.cta.shared::cta.b64", smem(&bar))',
)
PLAIN = 'ARRIVE("shared::cta.b64", smem(&bar))'
ACQUIRE, SEE = 'WAIT("acquire.cta", smem(&bar))', 'WAIT("relaxed.cta", smem(&bar))'
FENCE = 'FENCE("acq_rel.cta")'


def handed(parts: dict[str, str], arrival: str, waited: str, after: str = "") -> str:
    source = HANDED.replace("ARRIVAL", arrival).replace("WAITED", waited).replace("AFTER", after)
    for name, text in parts.items():
        source = source.replace(name, text)
    return source


@pytest.mark.parametrize(
    ("arrival", "waited", "after", "expected"),
    [
        (RELEASE, ACQUIRE, "", set()),
        (PLAIN, ACQUIRE, "", set()),
        (RELAXED, ACQUIRE, "", {"race"}),
        (RELEASE, SEE, "", {"race"}),
        (f"{FENCE}; {RELAXED}", ACQUIRE, "", set()),
        (f'FENCE("release.cta"); {RELAXED}', ACQUIRE, "", set()),
        (f'FENCE("acquire.cta"); {RELAXED}', ACQUIRE, "", {"race"}),
        (RELAXED, ACQUIRE, f"{FENCE};", {"race"}),
        (RELEASE, f"{SEE}; {FENCE}", "", set()),
        (RELEASE, f'{SEE}; FENCE("release.cta")', "", {"race"}),
        (f"{FENCE}; {RELAXED}", f"{SEE}; {FENCE}", "", set()),
        (RELEASE, f"{FENCE}; {SEE}", "", {"race"}),
    ],
)
def test_arrivals_release_writes_and_waits_acquire_them(
    arrival: str, waited: str, after: str, expected: set[str]
) -> None:
    for seed in SEEDS:
        result, out, data = run(handed(WRITTEN, arrival, waited, after), seed, block=64)
        assert kinds(result) == expected
        assert (out == data[::-1]).all()


def test_reads_are_done_with_when_any_arrival_follows_them() -> None:
    """What CUTLASS's consumers rely on: slots are given back by arrivals that release nothing to the one who refills."""
    for arrival, waited in ((RELEASE, ACQUIRE), (RELAXED, SEE)):
        for seed in SEEDS:
            result, out, data = run(handed(READ, arrival, waited), seed, block=64)
            assert not result.reports
            assert (out == data).all()
    early = handed({**READ, "FIRST": f"{RELEASE}; ld(v, at)"}, "", ACQUIRE)
    assert "race" in kinds(run(early, 0, block=64)[0])


# ---- a cluster: CTA 1 writes into CTA 0's memory (or reads its own) and arrives there
ACROSS = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(unsigned* out, const unsigned* in) {
  __shared__ unsigned word[32]; __shared__ alignas(8) uint64_t bar;
  const unsigned lane = threadIdx.x, rank = cluster_rank();
  if (lane == 0) { init(smem(&bar), 32); fence_init(); }
  st(smem(&word[lane]), in[lane]);
  cluster_sync();
  unsigned v = 0;
  const uint32_t there = mapa(smem(&word[lane]), rank ^ 1), remote = mapa(smem(&bar), 0);
  if (rank == 1) { FIRST; ARRIVAL; } else { WAITED; SECOND; }
  cluster_sync();
  if (rank == FROM) out[lane] = v;
}"""
WROTE = {"FIRST": "st(there, in[31 - lane])", "SECOND": "ld(v, smem(&word[lane]))", "FROM": "0"}
LOADED = {"FIRST": "ld(v, smem(&word[lane]))", "SECOND": "st(there, 7)", "FROM": "1"}


@pytest.mark.parametrize(
    ("arrival", "waited", "expected"),
    [
        ("release.cluster", "acquire.cluster", set()),
        ("release.cta", "acquire.cluster", {"race"}),
        ("release.cluster", "acquire.cta", {"race"}),
        ("relaxed.cluster", "acquire.cluster", {"race"}),
        ("acq_rel.cluster fence", "acquire.cluster", set()),
        ("acq_rel.gpu fence", "acquire.cluster", set()),
        ("acq_rel.cta fence", "acquire.cluster", {"race"}),
    ],
)
def test_scopes_have_to_reach_the_other_cta(arrival: str, waited: str, expected: set[str]) -> None:
    fence = ""
    if arrival.endswith("fence"):
        fence, arrival = f'FENCE("{arrival.split()[0]}"); ', "relaxed.cluster"
    for parts, found in ((WROTE, expected), (LOADED, set())):
        source = ACROSS.replace("ARRIVAL", f'{fence}ARRIVE("{arrival}.shared::cluster.b64", remote)')
        source = source.replace("WAITED", f'WAIT("{waited}", smem(&bar))')
        for name, text in parts.items():
            source = source.replace(name, text)
        for seed in range(2):
            result, out, data = run(source, seed, grid=2, block=32)
            assert kinds(result) == found
            assert (out == (data[::-1] if parts is WROTE else data)).all()


# ---- copies
@pytest.mark.parametrize(
    ("waited", "expected"),
    [
        ('WAIT("acquire.cta", smem(&bar))', set()),
        ('WAIT("relaxed.cta", smem(&bar))', {"race", "exit"}),
        (f"{SEE}; {FENCE}", set()),
    ],
)
def test_a_copy_is_acquired_by_who_reads_it(waited: str, expected: set[str]) -> None:
    source = r"""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {
      __shared__ alignas(128) unsigned s[32]; __shared__ alignas(8) uint64_t bar;
      if (threadIdx.x == 0) { init(smem(&bar), 1); fence_init(); expect(smem(&bar), 128); bulk_load(smem(s), in, 128, smem(&bar)); }
      __syncthreads();
      WAITED;
      out[threadIdx.x] = s[31 - threadIdx.x];
    }"""
    for seed in SEEDS:
        result, out, data = run(source.replace("WAITED", waited), seed, block=32)
        assert kinds(result) == expected
        assert (out == data[::-1]).all()


# ---- flags in shared memory
@pytest.mark.parametrize(
    ("write", "after", "read", "expected"),
    [
        ("st.release.cta", "", "ld.acquire.cta", set()),
        ("st.relaxed.cta", "", "ld.acquire.cta", {"race"}),
        ("st.release.cta", "", "ld.relaxed.cta", {"race"}),
        ("st.volatile", "", "ld.volatile", {"race"}),
        ("fence st.relaxed.cta", "fence.acq_rel.cta;", "ld.relaxed.cta", set()),
        ("fence st.volatile", "membar.cta;", "ld.volatile", set()),
    ],
)
def test_flags_need_release_and_acquire(write: str, after: str, read: str, expected: set[str]) -> None:
    fence = 'asm volatile("fence.acq_rel.cta;" ::: "memory");' if write.startswith("fence") else ""
    source = f"""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {{
      __shared__ unsigned data, flag;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x == 32) {{ data = in[3]; {fence} asm volatile("{write.removeprefix("fence ")}.shared.u32 [%0], 1;" :: "r"(smem(&flag)) : "memory"); }}
      if (threadIdx.x == 0) {{
        unsigned v = 0;
        while (v == 0) asm volatile("{read}.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem(&flag)) : "memory");
        asm volatile("{after}" ::: "memory");
        out[0] = data;
      }}
    }}"""
    for seed in SEEDS:
        result, out, data = run(source, seed, block=64)
        assert kinds(result) == expected
        assert out[0] == data[3]


# ---- a counter in global memory that the last CTA sets back
COUNTER = r"""
__device__ unsigned drawn, finished;
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  for (int i = 0; i < 3; ++i) {
    const unsigned ticket = atomicAdd(&drawn, 1);
    out[ticket] = in[ticket];
    __syncthreads();
  }
  LAST
  if (atomicAdd(&finished, 1) == gridDim.x - 1) { drawn = 0; finished = 0; }
}"""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("__threadfence();", False),
        ('asm volatile("fence.acq_rel.sys;" ::: "memory");', False),
        ("", True),
        ("__threadfence_block();", True),
    ],
)
def test_setting_a_counter_back_needs_a_fence_before_the_last_arrival(last: str, expected: bool) -> None:
    for seed in SEEDS:
        result, out, data = run(COUNTER.replace("LAST", last), seed, grid=5, block=1)
        assert kinds(result) == ({"race"} if expected else set())
        assert (out[:15] == data[:15]).all()


def test_setting_back_the_counter_that_says_who_is_last_needs_no_fence() -> None:
    """The last atomic came after the others: by its value, which the thread has looked at."""
    for seed in SEEDS:
        result, _, _ = run(COUNTER.replace("LAST", "").replace("drawn = 0; ", ""), seed, grid=5, block=1)
        assert not result.reports


# ---- wgmma
PRODUCTS = r"""
DEVICE void product(float (&d)[4], uint64_t a, uint64_t b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b) : "memory");
}
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ alignas(128) unsigned s[1024];
  for (int i = threadIdx.x; i < 1024; i += 128) s[i] = 0x38383838;
  fence_async(); __syncthreads();
  const uint64_t a = smem(s) >> 4 | 8ull << 16 | 16ull << 32, b = a;
  float d[4] = {1, 2, 3, 4}, seen = 0;
  asm volatile("wgmma.fence.sync.aligned;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  product(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  asm volatile("add.f32 %0, %0, %1;" : "+f"(seen) : "f"(d[0]));
  FENCE
  product(d, a, b);
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  if (threadIdx.x < 32) out[threadIdx.x] = seen + d[1];
}"""


def test_accumulators_that_were_read_need_a_wgmma_fence() -> None:
    fence = 'asm volatile("wgmma.fence.sync.aligned;" ::: "memory");'
    for text, expected in ((fence, set()), ("", {"missing-wgmma-fence"})):
        result, out, _ = run(PRODUCTS.replace("FENCE", text), 0, block=128)
        assert kinds(result) == expected
        assert (out == 1 + 32 + 2 + 64).all()


# ---- strong accesses of several CTAs to one word are no race if the scope of each reaches the other thread
STRONG = r"""
#define RED(s) asm volatile("red" s ".global.add.u32 [%0], 1;" ::"l"(out) : "memory")
#define LD(s) asm volatile("{\n.reg .u32 r;\nld" s ".global.u32 r, [%0];\n}" ::"l"(out) : "memory")
#define MEET() asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory")
extern "C" __global__ void __cluster_dims__(CTAS) k(unsigned* out) { STATEMENTS }"""


@pytest.mark.parametrize(
    ("statements", "grid", "ctas", "expected"),
    [
        ('RED("");', 4, 1, set()),
        ('RED(".relaxed.gpu");', 4, 2, set()),
        ('RED(".relaxed.sys");', 4, 1, set()),
        ('RED(".relaxed.cta");', 1, 1, set()),
        ('RED(".relaxed.cta");', 2, 1, {"race"}),
        ('RED(".relaxed.cta");', 2, 2, {"race"}),
        ('RED(".relaxed.cluster");', 2, 2, set()),
        ('RED(".relaxed.cluster");', 4, 2, {"race"}),
        ('if (blockIdx.x == 1) RED(".relaxed.cta"); else RED(".relaxed.gpu");', 2, 1, {"race"}),
        ('if (blockIdx.x == 1) LD(".relaxed.cta"); else RED(".relaxed.gpu");', 2, 1, {"race"}),
        ('if (blockIdx.x == 1) LD(".relaxed.gpu"); else RED(".relaxed.gpu");', 2, 1, set()),
        ('LD(".relaxed.cta");', 4, 1, set()),
        ('if (blockIdx.x == 0) RED(".relaxed.cta"); MEET(); if (blockIdx.x == 1) RED(".relaxed.cta");', 2, 2, set()),
    ],
)
def test_atomics_of_several_ctas_need_a_scope_that_reaches_them(
    statements: str, grid: int, ctas: int, expected: set[str]
) -> None:
    source = STRONG.replace("STATEMENTS", statements).replace("CTAS", str(ctas))
    for seed in SEEDS:
        found = launch(source, [np.zeros(32, np.uint32)], grid=grid, block=32, seed=seed)
        assert kinds(found) == expected


def test_words_beyond_those_told_apart_order_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release at one word and an acquire at another order nothing, unless words are so many that they count as one."""
    source = r"""
    extern "C" __global__ void k(unsigned* out, const unsigned* in) {
      __shared__ unsigned data;
      if (threadIdx.x == 32) { data = in[3]; asm volatile("atom.release.gpu.global.add.u32 %0, [%1], 1;" : "=r"(out[9]) : "l"(out + 4) : "memory"); }
      if (threadIdx.x == 0) {
        unsigned v = 0;
        while (v == 0) asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(out + 9) : "memory");
        asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(out + 5) : "memory");
        out[0] = data;
      }
    }"""
    for most, expected in ((strong_access.MOST_WORDS, {"race"}), (0, set())):
        monkeypatch.setattr(strong_access, "MOST_WORDS", most)
        found = {r.kind for seed in SEEDS for r in run_counted(source, seed).reports if "shared memory" in r.message}
        assert found == expected


def run_counted(source: str, seed: int) -> LaunchResult:
    data, out = RNG.integers(1, 1 << 32, 32, dtype=np.uint32), np.zeros(32, np.uint32)
    out[4] = 1
    return launch(ORDER + source, [out, data], seed=seed, block=64)
