"""Kernels that `padless verify` compiles ahead: those that its checks then ask for; a failure there hides nothing."""

from __future__ import annotations

import os
import pickle
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.emulator import fake_driver
from padless.kernels import launch as launching
from padless.runtime import jit
from padless.runtime.devices import backend_on_cpu
from padless.runtime.jit import Kernel
from padless.testing.compile_ahead import Gpu, Rehearsal, compile_ahead, kernels_of, listing
from padless.testing.processes import worker_pool
from padless.verify import run as verify
from padless.verify.bf16 import fuzz as plain
from padless.verify.checks import Check, Comparison, small_of
from padless.verify.emulator.kernels import settings_of
from padless.verify.emulator.products import cost, emulate
from padless.verify.fuzz import input_gradients, training
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import Place
from padless.verify.fuzz.product_lines import EMULATED

H200, B300 = Gpu("sm_90a", 132), Gpu("sm_103a", 148)


pytestmark = pytest.mark.usefixtures("one_thread")


def jobs_of(gpu: Gpu, *, against_emulator: bool = False) -> dict[str, Check]:
    """Checks, and small launches by their modules, that are compiled for ahead."""
    jobs, modules = verify.jobs_of(gpu.arch, None, against_emulator)
    found = jobs | {module: small_of(module) for module in modules}
    return {name: check for name, check in found.items() if isinstance(check, Check | Comparison) and check.parts}


def listed(name: str, gpu: Gpu = H200) -> set[Kernel]:
    """What is compiled ahead for one check."""
    kernels, problems = kernels_of(jobs_of(gpu)[name].rehearsals(gpu.arch), gpu)
    assert not problems
    return set(kernels)


@pytest.mark.parametrize("gpu", [H200, B300], ids=str)
@pytest.mark.parametrize("against_emulator", [False, True])
def test_other_processes_can_be_given_every_rehearsal(gpu: Gpu, against_emulator: bool) -> None:
    for name, check in jobs_of(gpu, against_emulator=against_emulator).items():
        for rehearsal in check.rehearsals(gpu.arch):
            assert pickle.loads(pickle.dumps(rehearsal)).calls.func is rehearsal.calls.func, name


# --- what a check asks for -------------------------------------------------------------------------------

SLOW = ("accuracy", "repeats agree", "chains", "training layer")
# A part of so many, without the reference of the tensor core's arithmetic, which is slow. "two devices" is made of the
# others.
PARTS = {
    "weight gradients": 48,
    "bf16 weight gradients": 48,
    "bf16 products": 48,
    "layers in one launch": 9,
    "FP4 input gradients": 48,
}
LOOKED_AT = [name for name in jobs_of(H200) if name != "two devices"]


@pytest.mark.parametrize("gpu", [H200, B300], ids=str)
def test_all_but_tritons_own_checks_are_rehearsed(gpu: Gpu) -> None:
    every = verify.jobs_of(gpu.arch, None, against_emulator=True)[0]
    assert every.keys() - jobs_of(gpu, against_emulator=True).keys() == {*verify.QUANTIZER_CHECKS, *verify.TRITON_ALONE}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in (*SLOW, *PARTS) else ()) for n in LOOKED_AT]
)
def test_a_check_that_is_looked_at_asks_for_what_its_rehearsal_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check with everything that it is compared with, where nothing runs."""
    for case in (training.Wgrad, plain.Wgrad, plain.Product, input_gradients.InputGradient):
        monkeypatch.setattr(case, "reference", lambda self: torch.zeros_like(self.run(self.operands)))
    judge, check = Judge(), jobs_of(H200)[name]
    parts = PARTS.get(name, 1)
    with listing(H200.arch, "cubin", H200.num_sms) as asked, settings_of("emulator"), backend_on_cpu("emulator"):
        check.calls(Place(torch.device("cpu"), "emulator", "sm_90a", judge, (0, parts)))
    assert judge.verdicts() or name == "padless.verify.lines grouped_gemm_epilogue"  # nothing was computed
    rehearsals = replace(check, parts=parts).rehearsals(H200.arch)[:1]
    kernels, problems = kernels_of(rehearsals, H200)
    assert not problems
    assert set(asked) == set(kernels) != set()


@pytest.mark.parametrize("name", ["dense", "graph replay", "streams and threads"])
def test_a_check_finds_nothing_wrong_with_the_reference(name: str) -> None:
    assert "elements" in jobs_of(H200)[name].on("reference")


@pytest.mark.parametrize("gpu", [H200, B300], ids=str)
def test_every_comparison_with_the_emulator_is_compiled_for_on_both_sides(gpu: Gpu) -> None:
    for name, check in jobs_of(gpu, against_emulator=True).items():
        if isinstance(check, Comparison):
            kernels, problems = kernels_of(check.rehearsals(gpu.arch)[::16], gpu)
            assert not problems, name
            assert {k.kind for k in kernels} == {"cubin", "ptx"}


def test_the_choice_is_made_for_the_gpus_multiprocessors() -> None:
    assert listed("accuracy", Gpu("sm_90a", 132)) != listed("accuracy", Gpu("sm_90a", 8))


def test_a_listing_is_of_its_block_and_its_thread() -> None:
    device = fake_driver.emulated_driver()
    elsewhere: list[Any] = []
    question = ("sm90_fp8/sm90_fp8_grouped_gemm.cu", "", "sm_90a")
    with suppress(ZeroDivisionError), listing("sm_90a", "cubin", 132) as asked:
        assert jit.compile_kernel(*question).image == b""
        assert fake_driver.emulated_driver() is not device
        with listing("sm_90a", "ptx") as inner:
            jit.compile_kernel(*question, "ptx")
        assert jit.compile_kernel(*question).kind == "cubin"
        thread = threading.Thread(target=lambda: elsewhere.append(fake_driver.emulated_driver()))
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert list(asked) == [Kernel(*question, "cubin")]
    assert list(inner) == [Kernel(*question, "ptx")]
    assert elsewhere == [device]
    assert fake_driver.emulated_driver() is device
    with pytest.raises(KeyError):
        jit.compile_kernel("no_such_kernel.cu", "", "sm_90a")


# --- compiling -------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on disk, and a process that has compiled nothing."""
    monkeypatch.setenv("PADLESS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_in_memory", {})
    launching.load_kernel.cache_clear()
    return tmp_path / "cache"


def no_compiler(*args: Any) -> Any:
    raise AssertionError(f"{args[1]} was compiled after all")


def refused_by_the_compiler() -> None:
    launching.compile_kernel("wgmma_probe/wgmma_probe.cu", "#error planted\n", "sm_90a")


def missing_argument() -> None:
    raise TypeError("planted")


def test_nothing_is_compiled_after_compiling_ahead(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes and a disk; what fails is said, and fails again where it is needed."""
    drawn = [("grouped_gemm", "sm_90a", o) for o in EMULATED["emulator agrees"]("sm_90a") if sum(o["sizes"])]
    jobs = sorted(drawn, key=lambda job: cost(*job))[:2]
    rehearsals = [Rehearsal(partial(emulate, *job), ("ptx",)) for job in jobs]
    rehearsals += [Rehearsal(refused_by_the_compiler), Rehearsal(missing_argument)]
    seen: list[tuple[int, int]] = []
    ahead = compile_ahead(rehearsals, H200, lambda *bar: seen.append(bar), workers=1)

    assert len(ahead.kernels) == 3
    assert seen[-1] == (4 + 3, 4 + 3)
    assert sorted(problem.split(":")[0] for problem in ahead.problems) == [
        "a rehearsal ended with TypeError",
        "wgmma_probe/wgmma_probe.cu",
    ]
    with pytest.raises(jit.CompileError, match="planted"):
        refused_by_the_compiler()

    files = sorted(path.name for path in fresh_cache.glob("*.*"))
    assert len(files) == 2 * 2  # an image and its description
    monkeypatch.setattr(jit, "_run_nvrtc", no_compiler)
    assert all(emulate(*job)[""].numel() for job in jobs)
    assert sorted(path.name for path in fresh_cache.glob("*.*")) == files

    monkeypatch.setattr(jit, "_in_memory", {})
    launching.load_kernel.cache_clear()
    next(fresh_cache.glob("*.ptx")).unlink()
    with pytest.raises(AssertionError, match="was compiled after all"):
        [emulate(*job) for job in jobs]


def test_a_process_that_dies_is_said_and_the_next_pool_works(fresh_cache: Path) -> None:
    with worker_pool(1):
        ahead = compile_ahead([Rehearsal(partial(os._exit, 3))], H200)
        assert len(ahead.problems) == 1
        assert ahead.problems[0].startswith("a compiling process ended")
        with worker_pool() as pool:
            assert pool.submit(os.getpid).result() != os.getpid()
