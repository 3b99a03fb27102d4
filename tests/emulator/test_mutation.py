"""`padless emulate --mutate`: mutants of a small kernel, which of them are noticed, and the command."""

# ruff: noqa: E501  (lines of PTX and CUDA are kept whole)

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from padless.emulator import Emulator, LaunchError
from padless.emulator.cli import app, launch_on_buffers
from padless.emulator.mutation import Survey, Verdict, mutated, table
from padless.emulator.ptx.ast import Instruction
from support.emulator_cuda import compile_cuda

# Copies come in through a ring of two stages, are doubled, and leave by a copy.
RING = r"""
extern "C" __global__ void k(float* out, const float* in) {
  __shared__ alignas(128) float s[2][32], t[32]; __shared__ alignas(8) uint64_t full[2], empty[2];
  if (threadIdx.x == 0) { for (int i = 0; i < 2; ++i) { init(smem(&full[i]), 1); init(smem(&empty[i]), 32); } fence_init(); }
  __syncthreads();
  if (threadIdx.x >= 32) {
    if (threadIdx.x == 32)
      #pragma unroll 1
      for (int i = 0; i < 5; ++i) {
        wait(smem(&empty[i % 2]), (i / 2 & 1) ^ 1);
        expect(smem(&full[i % 2]), 128);
        bulk_load(smem(s[i % 2]), in + 32 * i, 128, smem(&full[i % 2]));
      }
  } else {
    #pragma unroll 1
    for (int i = 0; i < 5; ++i) {
      wait(smem(&full[i % 2]), i / 2 & 1);
      t[threadIdx.x] = 2 * s[i % 2][threadIdx.x];
      arrive(smem(&empty[i % 2]));
      fence_async(); __syncwarp();
      if (threadIdx.x == 0) { bulk_store(out + 32 * i, smem(t), 128); bulk_commit(); bulk_wait_read(); }
      __syncwarp();
    }
  }
  NEVER
}"""
MUTANTS, KILLED = 16, 13
LAUNCH = {
    "block": 64,
    "buffers": {
        "x": {"dtype": "float32", "shape": [160], "fill": "random", "seed": 4},
        "y": {"dtype": "float32", "shape": [160], "fill": "nan"},
    },
    "args": ["y", "x"],
}


def survey(source: str, seeds: range = range(2)) -> Survey:
    emulator = Emulator(compile_cuda(source))
    return Survey(emulator, "k", lambda device, seed: launch_on_buffers(device, "k", LAUNCH, seed, Path()), seeds)


def test_killed_mutants_of_a_small_kernel_are_as_recorded() -> None:
    found = survey(RING.replace("NEVER", ""))
    verdicts = [found.judge(mutant) for mutant in found.mutants]
    survivors = [v.mutant for v in verdicts if not v.killed_by]
    assert (len(verdicts), len(verdicts) - len(survivors)) == (MUTANTS, KILLED)
    # Equivalent: the slots are given back after reads alone, and the arrival of expect_tx has nothing to publish.
    assert {m.change for m in survivors} == {"relaxed"}
    assert [m.instruction.modifiers[0] for m in survivors] == ["try_wait", "arrive", "arrive"]
    assert [m.instruction.modifiers[1] for m in survivors] == ["parity", "expect_tx", "shared::cta"]
    by = Counter(v.killed_by for v in verdicts if v.killed_by)
    assert by == {"race": 7, "deadlock": 2, "mbarrier": 2, "mbarrier-init": 1, "missing-proxy-fence": 1}


def test_mutants_are_drawn_from_executed_instructions_with_a_seed() -> None:
    found = survey(RING.replace("NEVER", "if (threadIdx.x == 99) { __threadfence(); fence_async(); }"), range(1))
    assert len(found.mutants) == MUTANTS
    some = found.sample(5, seed=3)
    assert some == found.sample(5, seed=3) != found.sample(5, seed=4)
    assert len(some) == 5
    assert found.sample(0, 0) == found.sample(10**6, 0) == found.mutants
    for mutant in some:  # one instruction differs
        before = [str(x) for x in found.program.function.body if isinstance(x, Instruction)]
        after = [str(x) for x in mutated(found.program, mutant).functions["k"].body if isinstance(x, Instruction)]
        before.remove(str(mutant.instruction))
        if mutant.after is not None:
            after.remove(str(mutant.after))
        assert before == after


def test_a_kernel_that_is_reported_itself_is_refused() -> None:
    with pytest.raises(LaunchError, match="itself is reported with seed 0"):
        survey(RING.replace("fence_async();", "").replace("NEVER", ""))


def test_the_command_prints_a_table_of_survivors(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text(compile_cuda(RING.replace("NEVER", "")))
    (tmp_path / "k.json").write_text(json.dumps(LAUNCH))
    arguments = [str(tmp_path / "k.ptx"), "--launch", str(tmp_path / "k.json"), "--mutate"]
    result = CliRunner().invoke(app, [*arguments, "6", "--seed", "1"])
    lines = result.output.splitlines()
    survivors = [line for line in lines if line.startswith("survives: ")]
    assert result.exit_code == bool(survivors)
    assert lines[-1] == f"{6 - len(survivors)} of 6 mutants killed"
    for wrong in (["-1"], ["3", "--no-check"]):
        refused = CliRunner().invoke(app, [*arguments, *wrong])
        assert isinstance(refused.exception, LaunchError)
        assert "--mutate" in str(refused.exception)


def test_table_lists_who_survives() -> None:
    found = survey(RING.replace("NEVER", ""), range(1))
    lines = table([Verdict(found.mutants[0], "race"), Verdict(found.mutants[1], "")])
    assert lines[-1] == "1 of 2 mutants killed"
    assert sum(line.startswith("survives: ") and str(found.mutants[1].instruction) in line for line in lines) == 1
