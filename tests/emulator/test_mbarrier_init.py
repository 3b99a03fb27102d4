"""Initialisations of mbarriers: what foreign compilers leave out and chips let pass is tolerated, defects stay errors."""

# ruff: noqa: E501  (lines of CUDA are kept whole)

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from padless.emulator import Emulator, LaunchResult
from support.emulator_cuda import compile_cuda, kinds

RNG = np.random.default_rng(6)

# A copy a round; the barrier of the first round is made once more for each that follows. Thread 0 makes it, warp 1 copies.
ROUNDS = r"""
DEVICE void inval(uint32_t b) { asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(b) : "memory"); }
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ alignas(128) float s[256]; __shared__ alignas(8) uint64_t full;
  for (int i = 0; i < 3; ++i) {
    if (threadIdx.x == 0) { init(smem(&full), 1); fence_init(); }
    __syncthreads();
    if (threadIdx.x == 32) { expect(smem(&full), 1024); bulk_load(smem(s), in + 256 * i, 1024, smem(&full)); }
    wait(smem(&full), 0);
    for (int j = threadIdx.x; j < 256; j += 64) out[256 * i + j] = 2 * s[j];
    __syncthreads();
    if (threadIdx.x == 0) inval(smem(&full));
  }
}"""
FENCE, INVAL, WAIT = "fence_init(); }", "if (threadIdx.x == 0) inval(smem(&full));", "wait(smem(&full), 0);"


def run(edits: dict[str, str], strict: bool, seed: int = 0) -> tuple[LaunchResult, bool]:
    source = ROUNDS
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    data = RNG.standard_normal(768).astype(np.float32)
    out = np.full_like(data, np.nan)
    emulator = Emulator(compile_cuda(source), strict=strict, seed=seed)
    result = emulator.launch("k", 1, 64, [emulator.memory.register(x) for x in (out, data)])
    return result, bool((out == 2 * data).all())


@pytest.mark.parametrize("seed", range(4))
def test_the_right_kernel_has_no_report(seed: int) -> None:
    result, right = run({}, True, seed)
    assert right
    assert not result.reports


@pytest.mark.parametrize(
    ("edits", "sentence"),
    [
        ({FENCE: "}"}, r"used by the async proxy with no fence.*; mbarrier\.init is .* \(PTX ISA, async proxy\)"),
        ({INVAL: ""}, r"initialised again without mbarrier\.inval.*; .* mbarrier\.inval .* \(PTX ISA, mbarrier\.inval\)"),
    ],
    ids=["no fence", "no inval"],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_what_chips_let_pass_is_tolerated_with_the_sentence(edits: dict[str, str], sentence: str, seed: int) -> None:
    lenient, right = run(edits, False, seed)
    assert right
    assert not lenient.errors
    assert kinds(lenient) == {"tolerated"}
    assert all(re.search(sentence, report.message) for report in lenient.reports)
    strict, right = run(edits, True, seed)
    assert right
    assert kinds(strict) == {"mbarrier-init"}
    assert strict.errors


LATE = {"__syncthreads();\n    if (threadIdx.x == 32)": "if (threadIdx.x == 32)"}
DEFECTS: dict[str, tuple[dict[str, str], set[str]]] = {
    # the initialisation comes in no order with the use
    "no fence and no barrier": (LATE | {FENCE: "}"}, {"mbarrier"}),
    # the second initialisation, while the copy of the first has yet to arrive
    "again while bytes are on their way": ({INVAL: "", WAIT: "if (i == 2) wait(smem(&full), 0);"}, {"mbarrier"}),
    # two arrivals a phase, of which one has come
    "again in the middle of a phase": (
        {INVAL: "if (threadIdx.x == 0) arrive(smem(&full));", "init(smem(&full), 1)": "init(smem(&full), 2)",
         WAIT: "arrive(smem(&full)); wait(smem(&full), 0);", "if (threadIdx.x == 32) { expect": "if (threadIdx.x == 32) { arrive(smem(&full)); expect"},
        {"mbarrier"},
    ),
    # thread 0 does not know that the copy is over, since it and its warp do not wait for it
    "again by a thread that has not waited": (
        {"    __syncthreads();\n    " + INVAL: "", WAIT: "if (threadIdx.x >= 32) wait(smem(&full), 0);"},
        {"mbarrier"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_stays_an_error(name: str) -> None:
    edits, expected = DEFECTS[name]
    found: set[str] = set()
    for seed in range(4):
        found |= {report.kind for report in run(edits, False, seed)[0].errors}
    assert expected <= found, found


PAIR = r"""
extern "C" __global__ void __cluster_dims__(2, 1, 1) k(uint32_t* out) {
  __shared__ alignas(8) uint64_t done;
  if (threadIdx.x == 0) { init(smem(&done), 32); FENCE }
  cluster_sync();
  arrive_remote(mapa(smem(&done), cluster_rank() ^ 1));
  wait(smem(&done), 0);
  out[32 * cluster_rank() + threadIdx.x] = 7 * threadIdx.x + 5;
  cluster_sync();
}"""


@pytest.mark.parametrize(("fence", "expected"), [("fence_init();", set()), ("", {"mbarrier"})])
def test_another_ctas_use_needs_the_fence(fence: str, expected: set[str]) -> None:
    out: Any = np.zeros(64, np.uint32)
    emulator = Emulator(compile_cuda(PAIR.replace("FENCE", fence)), strict=False)
    result = emulator.launch("k", 2, 32, [emulator.memory.register(out)], cluster=2)
    assert kinds(result) == expected
    assert (out == np.tile(7 * np.arange(32) + 5, 2)).all()
