"""Findings against the ISA that chips let pass: the values are a chip's, the finding is said, its kind tells.

A sceptic would ask whether the results are still compared (against the bytes of the input and float64 products), whether
the same kernel without the fault is silent, and whether a fault of the same family that chips do punish stays an error.
"""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from padless.emulator.units.swizzle import swizzle
from support.emulator_cuda import compile_cuda, kinds

# ---- tensor memory freed before its last reader
FREED = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ unsigned base;
  if (threadIdx.x < 32) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(smem(&base)) : "memory");
  SYNC
  const unsigned t = base, at = t + (threadIdx.x / 32 * 32 << 16);
  asm volatile("tcgen05.st.sync.aligned.32x32b.x1.b32 [%0], {%1};" ::"r"(at), "r"(in[threadIdx.x]) : "memory");
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
  SYNC
  EARLY
  unsigned r;
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(r) : "r"(at));
  asm volatile("tcgen05.wait::ld.sync.aligned;" : "+r"(r) :: "memory");
  out[threadIdx.x] = r;
  SYNC
  LATE
}"""
DEALLOC = 'if (threadIdx.x < 32) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 32;" ::"r"(t));'
SYNC = 'asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); __syncthreads(); asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");'


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [False, True])
def test_freed_columns_keep_their_values_and_their_use_is_reported(early: bool, seed: int) -> None:
    source = FREED.replace("EARLY", DEALLOC + " SYNC" if early else "").replace("LATE", "" if early else DEALLOC)
    emulator = Emulator(compile_cuda(source.replace("SYNC", SYNC), "100a"), seed=seed)
    data = np.random.default_rng(seed).integers(0, 1 << 32, 128, dtype=np.uint32)
    out = np.full(128, 9, np.uint32)
    result = emulator.launch("k", 1, 128, [emulator.memory.register(x) for x in (out, data)])
    assert (out == data).all()
    assert kinds(result) == ({"tensor-memory"} if early else set())
    assert all("are not allocated" in report.message for report in result.errors)


# ---- a swizzled operand that begins inside of its pattern
PRODUCT = r"""
extern "C" __global__ void k(float* out, const unsigned* in) {
  extern __shared__ __align__(1024) unsigned s[];
  for (int i = threadIdx.x; i < 8192; i += 128) s[i] = in[i];
  fence_async(); __syncthreads();
  const uint64_t form = 1ull << 62 | 64ull << 32;
  const uint64_t a = form | (smem(s) + START) >> 4, b = form | (smem(s) + 16384 + START) >> 4;
  float d[4] = {};
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;\n}"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  for (int i = 0; i < 4; ++i) out[8 * (row + 8 * (i / 2)) + column + i % 2] = d[i];
}"""


def product(start: int, strict: bool) -> LaunchResult:
    rng = np.random.default_rng(start)
    a, b = rng.standard_normal((64, 16)).astype(np.float16), rng.standard_normal((8, 16)).astype(np.float16)
    shared = rng.integers(0, 256, 32768, dtype=np.uint8)
    for matrix, base in ((a, 0), (b, 16384)):
        row, x = np.arange(len(matrix))[:, None], np.arange(32)[None, :]
        at = swizzle(base + start + row % 8 * 128 + row // 8 * 1024 + x, "128B")
        shared[at] = matrix.view(np.uint8)
    out = np.full((64, 8), np.nan, np.float32)
    emulator = Emulator(compile_cuda(PRODUCT.replace("START", str(start))), strict=strict)
    arguments = [emulator.memory.register(x) for x in (out, shared.view(np.uint32))]
    result = emulator.launch("k", 1, 128, arguments, shared_bytes=32768)
    assert np.abs(out - a.astype(float) @ b.astype(float).T).max() < 1e-3
    return result


@pytest.mark.parametrize("start", [0, 1024, 64])
def test_operands_that_begin_where_the_pattern_does(start: int) -> None:
    assert not product(start, strict=True).reports


def test_operands_that_begin_inside_of_the_pattern() -> None:
    strict, lenient = product(384, strict=True), product(384, strict=False)
    assert {report.kind for report in strict.errors} == {"descriptor-start"}
    assert not lenient.errors
    said = [report.message for report in lenient.reports]
    assert said
    assert all(text.startswith("descriptor-start: ") and "base offset" in text for text in said)


# ---- a second product on registers that were written in between
def test_a_missing_wgmma_fence_is_put_in_by_ptxas() -> None:
    """The machine code with and without it is the same, by ptxas 13.0 (C7519)."""
    again = PRODUCT.replace("START", "0").replace(
        "  const int row", "  for (float& x : d) x = 0;\n" + PRODUCT[PRODUCT.index("  asm volatile") : PRODUCT.index("  const int row")]
        .replace("wgmma.fence.sync.aligned;\\n", "") + "  const int row"
    )  # fmt: skip
    for strict, kind in ((True, "missing-wgmma-fence"), (False, "tolerated")):
        emulator = Emulator(compile_cuda(again), strict=strict)
        out, data = np.zeros((64, 8), np.float32), np.full(8192, 0x3C003C00, np.uint32)
        arguments = [emulator.memory.register(x) for x in (out, data)]
        result = emulator.launch("k", 1, 128, arguments, shared_bytes=32768)
        assert kinds(result) == {kind}
        assert bool(result.errors) == strict
        assert (out == 16).all()


# ---- the CTA of a refused request, asked for before the refusal is tested
READ_FIRST = r"""
extern "C" __global__ void k(int* out) {
  __shared__ alignas(16) uint32_t answer[4]; __shared__ alignas(8) uint64_t full;
  if (threadIdx.x == 0) {
    answer[0] = answer[1] = answer[2] = answer[3] = 7;
    init(smem(&full), 1); fence_init(); fence_async(); expect(smem(&full), 16);
    ASK
  }
  __syncthreads();
  WAIT
  uint32_t ok, x;
  asm volatile("{\n.reg .pred p;\n.reg .b128 h;\nld.shared.b128 h, [%2];\n"
               "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %1, h;\n"
               "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, h;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(ok), "=r"(x) : "r"(smem(answer)) : "memory");
  out[threadIdx.x] = ok ? x : -1;
}"""
ASK = 'asm volatile("clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%0], [%1];" ::"r"(smem(answer)), "r"(smem(&full)) : "memory");'


def ask(strict: bool, grid: int, asked: bool = True) -> tuple[np.ndarray, LaunchResult]:
    source = READ_FIRST.replace("ASK", ASK if asked else "").replace("WAIT", "wait(smem(&full), 0);" if asked else "")
    out = np.full(64, 9, np.int32)
    emulator = Emulator(compile_cuda(source, "100a"), strict=strict, seed=1)
    return out, emulator.launch("k", grid, 64, [emulator.memory.register(out)])


def test_the_cta_of_a_refused_request() -> None:
    out, strict = ask(strict=True, grid=1)
    assert (out == -1).all()
    assert {report.kind for report in strict.errors} == {"launch-control-refused"}
    _, lenient = ask(strict=False, grid=1)
    assert not lenient.errors
    assert "get_first_ctaid" in lenient.reports[0].message


def test_bytes_that_are_no_response_stay_an_error() -> None:
    _, result = ask(strict=False, grid=1, asked=False)
    assert "launch-control" in {report.kind for report in result.errors}


# ---- stores of one value by many threads, as compilers make of values that several threads hold
EQUAL = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ unsigned s[2];
  asm volatile("WHERE" ::"r"(smem(s)), "l"(out), "r"(in[VALUE]) : "memory");
  __syncthreads();
  if (threadIdx.x == 0) out[1] = s[0];
}"""
STORES = {"shared": "st.shared.u32 [%0], %2;", "global": "st.global.u32 [%1], %2;"}


@pytest.mark.parametrize("place", STORES)
@pytest.mark.parametrize(("value", "strict", "kind"), [
    ("0", False, "tolerated"), ("0", True, "race"), ("threadIdx.x / 32", False, "race"),
    ("threadIdx.x == 37", False, "race"),
])  # fmt: skip
def test_unordered_stores_of_one_value(place: str, value: str, strict: bool, kind: str) -> None:
    """One value in every thread is tolerated; another in any of them, were it in one lane, is a race."""
    source = EQUAL.replace("WHERE", STORES[place]).replace("VALUE", value)
    if place == "global":
        source = source.replace("out[1] = s[0]", "")
    emulator = Emulator(compile_cuda(source), strict=strict, seed=1)
    out, data = np.zeros(8, np.uint32), np.random.default_rng(3).integers(1, 1 << 32, 64, dtype=np.uint32)
    result = emulator.launch("k", 1, 64, [emulator.memory.register(x) for x in (out, data)])
    assert kinds(result) == {kind}
    assert out[int(place == "shared")] in data


def outcome(source: str, threads: int, strict: bool, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """A word of output to a thread, and the random input of as many, of a launch whose reports are all of this kind."""
    emulator = Emulator(compile_cuda(source), strict=strict, seed=1)
    out = np.zeros(threads, np.uint32)
    data = np.random.default_rng(4).integers(0, 1 << 32, threads, dtype=np.uint32)
    result = emulator.launch("k", 1, threads, [emulator.memory.register(x) for x in (out, data)])
    assert kinds(result) == {kind}
    return out, data


COPIES = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ unsigned s[2];
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\ncp.async.wait_all;" ::"r"(smem(s + threadIdx.x / 16)), "l"(in + VALUE) : "memory");
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x / 16];
}"""


@pytest.mark.parametrize(("value", "strict", "kind"), [
    ("threadIdx.x / 16", False, "tolerated"), ("threadIdx.x / 16", True, "race"), ("threadIdx.x", False, "race"),
])  # fmt: skip
def test_copies_of_one_word_to_one_word(value: str, strict: bool, kind: str) -> None:
    out, data = outcome(COPIES.replace("VALUE", value), 32, strict, kind)
    assert value == "threadIdx.x" or (out == data[np.arange(32) // 16]).all()


MATRICES = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ alignas(16) unsigned s[32];
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(smem(s + 4 * (threadIdx.x % 8))), "r"(in[VALUE]) : "memory");
  __syncthreads();
  out[threadIdx.x] = s[threadIdx.x % 32];
}"""


@pytest.mark.parametrize(("value", "strict", "kind"), [
    ("threadIdx.x % 32", False, "tolerated"), ("threadIdx.x % 32", True, "race"), ("threadIdx.x", False, "race"),
])  # fmt: skip
def test_unordered_stores_of_one_matrix(value: str, strict: bool, kind: str) -> None:
    out, data = outcome(MATRICES.replace("VALUE", value), 64, strict, kind)
    assert (out[:32] == out[32:]).all()
    assert (out[:32] == data[:32]).all() or value == "threadIdx.x"


# ---- registers that an unfinished tcgen05.st reads
STORED = r"""
extern "C" __global__ void k(unsigned* out, const unsigned* in) {
  __shared__ unsigned base;
  if (threadIdx.x < 32) asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 32;" ::"r"(smem(&base)) : "memory");
  SYNC
  const unsigned t = base, at = t + (threadIdx.x / 32 * 32 << 16);
  unsigned r;
  asm volatile("{\n.reg .b32 x;\nmov.b32 x, %2;\n"
    "tcgen05.st.sync.aligned.32x32b.x1.b32 [%1], {x};\nAGAIN\n"
    "tcgen05.wait::st.sync.aligned;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1+1];\ntcgen05.wait::ld.sync.aligned;\n}"
    : "=r"(r) : "r"(at), "r"(in[threadIdx.x]) : "memory");
  out[threadIdx.x] = r;
  SYNC
  DEALLOC
}"""


@pytest.mark.parametrize(("again", "found"), [
    ("tcgen05.st.sync.aligned.32x32b.x1.b32 [%1+1], {x};", set()),
    ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {x}, [%1+1];", {"register-in-flight"}),
])  # fmt: skip
def test_two_stores_of_one_register(again: str, found: set[str]) -> None:
    source = STORED.replace("DEALLOC", DEALLOC).replace("SYNC", SYNC).replace("AGAIN", again)
    emulator = Emulator(compile_cuda(source, "100a"), seed=1)
    data, out = np.random.default_rng(8).integers(0, 1 << 32, 128, dtype=np.uint32), np.zeros(128, np.uint32)
    result = emulator.launch("k", 1, 128, [emulator.memory.register(x) for x in (out, data)])
    assert kinds(result) - {"uninitialised-tensor-memory"} == found
    assert found or (out == data).all()
