"""A stage is given back when the values read from it have been needed, not when their loads have been issued.

What would convince: one ring, of which only the place of the arrival changes. In front of the first use it is reported, under
every schedule, whatever brings the value and however it is copied; behind it, for a value that nothing uses, and where the
arrival frees another stage, it is not. The outputs are right throughout, so that they prove nothing.
"""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import numpy as np
import pytest

from padless.emulator import Emulator
from support.emulator_cuda import compile_cuda, kinds, launch

FILLS, STAGES = 6, 2
# Warp 1 fills the stages in turn with 128 bytes; warp 0 doubles what it reads, and gives back the stages.
RING = r"""
DEVICE float load(uint32_t a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
DEVICE float doubled(float v) { float d; asm volatile("add.f32 %0, %1, %1;" : "=f"(d) : "f"(v)); return d; }
DEVICE float copied(float v) { float d; asm volatile("mov.b32 %0, %1;" : "=f"(d) : "f"(v)); return d; }
DEVICE float matrix(uint32_t a) { float v; asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ alignas(128) float data[STAGES][32]; __shared__ uint64_t full[STAGES], empty[STAGES], other;
  if (threadIdx.x == 0) { for (int s = 0; s < STAGES; ++s) { init(smem(&full[s]), 1); init(smem(&empty[s]), 1); } init(smem(&other), 100); fence_init(); }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x / 32 == 1) {
    if (lane == 0) for (int i = 0; i < FILLS; ++i) {
      const int s = i % STAGES;
      wait(smem(&empty[s]), (i / STAGES & 1) ^ 1);
      expect(smem(&full[s]), 128);
      bulk_load(smem(data[s]), in + 32 * i, 128, smem(&full[s]));
    }
    return;
  }
  const auto free_stage = [&](int i) { __syncwarp(); if (lane == 0) arrive(smem(&empty[i % STAGES])); };
  float kept = 0;
#pragma unroll 1
  for (int i = 0; i < FILLS; ++i) {
    wait(smem(&full[i % STAGES]), i / STAGES & 1);
    BODY
  }
}"""
USED = "out[32 * i + lane] = doubled(v);"
OWN = "const uint32_t at = smem(&data[i % STAGES][lane]);"
BODIES = {
    "behind the use": (f"{OWN} const float v = load(at); {USED} free_stage(i);", False),
    "behind the load": (f"{OWN} const float v = load(at); free_stage(i); {USED}", True),
    "behind a proxy fence": (f"{OWN} const float v = load(at); fence_async(); free_stage(i); {USED}", False),
    "behind a copy": (f"{OWN} const float v = copied(load(at)); free_stage(i); {USED}", True),
    "behind a matrix load": (
        "const float v = matrix(smem(&data[i % STAGES][lane % 8 * 4])); free_stage(i); out[32 * i + lane] = doubled(v);",
        True,
    ),
    "behind the use of a matrix load": (
        "const float v = matrix(smem(&data[i % STAGES][lane % 8 * 4])); out[32 * i + lane] = doubled(v); free_stage(i);",
        False,
    ),
    "behind the use of half of what is read": (
        f"{OWN} const float v = load(at), d = load(smem(&data[i % STAGES][31 - lane])); out[32 * i + lane] = doubled(v); free_stage(i); kept = doubled(d); out[32 * i + lane] += 0 * kept;",
        True,
    ),
    "for a value that nothing uses": (
        f"{OWN} const float v = load(at); {USED} load(at); free_stage(i);",
        False,
    ),
    "at another barrier in front of the use, at the stage's behind it": (
        f"{OWN} const float v = load(at); __syncwarp(); if (lane == 0) arrive(smem(&other)); {USED} free_stage(i);",
        False,
    ),
    "a turn later, in front of the next value's use": (
        f"{OWN} const float v = load(at); if (i) free_stage(i - 1); {USED} if (i == FILLS - 1) free_stage(i);",
        False,
    ),
    "where lanes have parted": (
        f"{OWN} const float v = load(at); if (lane % 2) {{ {USED} }} else {{ {USED} }} free_stage(i);",
        False,
    ),
}  # fmt: skip


def source(body: str) -> str:
    return RING.replace("BODY", body).replace("FILLS", str(FILLS)).replace("STAGES", str(STAGES))


@pytest.mark.parametrize("place", BODIES)
def test_where_a_stage_is_given_back(place: str) -> None:
    body, is_early = BODIES[place]
    for seed in range(4):
        out, data = np.full(32 * FILLS, np.nan, np.float32), np.random.default_rng(seed).standard_normal(32 * FILLS)
        data = data.astype(np.float32)
        result = launch(source(body), [out, data], block=64, seed=seed)
        assert kinds(result) == ({"unread-load"} if is_early else set()), result.reports
        if "matrix" not in place:
            assert (out == 2 * data).all()
        if is_early:
            (first, *_) = result.reports
            assert "cp.async.bulk" in first.instruction
            assert "ld" in first.other


def test_of_other_peoples_kernels_it_is_tolerated() -> None:
    emulator = Emulator(compile_cuda(source(BODIES["behind the load"][0])), strict=False)
    out, data = np.full(32 * FILLS, np.nan, np.float32), np.random.default_rng(9).random(32 * FILLS, np.float32)
    addresses = [emulator.memory.register(x) for x in (out, data)]
    result = emulator.launch("k", 1, 64, addresses)
    assert kinds(result) == {"tolerated"}
    assert "proxy fence" in result.reports[0].message
