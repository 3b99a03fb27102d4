"""Kernels that `padless verify` compiles ahead: those that its checks then ask for; a failure there hides nothing.

The checks themselves run here, with the reference in the GPU's place: every call is also made of the driver that writes
kernels down, so that what a check asks for is seen where it asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from padless.emulator import fake_driver
from padless.formats import BlockScaledTensor
from padless.kernels import launch as launching
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.ops.grouped_gemm import gemm, grouped_gemm
from padless.reference.gemm import grouped_gemm_reference
from padless.row_groups import clamped_ends
from padless.runtime import jit
from padless.runtime.jit import Kernel
from padless.testing.compile_ahead import Gpu, Rehearsal, compile_ahead, kernels_of, listing
from padless.testing.guarded import GuardedOutput
from padless.testing.processes import worker_pool
from padless.verify import epilogue as verify_epilogue
from padless.verify import formats as verify_formats
from padless.verify import fp8_block as verify_checks
from padless.verify import invariance as verify_invariance
from padless.verify import run as verify
from padless.verify import small as verify_small
from padless.verify import train_quantizers as verify_training
from padless.verify.emulator import tensor_core as verify_arithmetic
from padless.verify.problems.epilogue import run_problem
from padless.verify.rehearsals import rehearsals_of

H200, B300 = Gpu("sm_90a", 132), Gpu("sm_103a", 148)


pytestmark = pytest.mark.usefixtures("one_thread")


def listed(name: str, gpu: Gpu = H200) -> set[Kernel]:
    """What is compiled ahead for one check."""
    kernels, problems = kernels_of(rehearsals_of(gpu.arch, [name], []), gpu)
    assert not problems
    return set(kernels)


# --- the checks, with the reference in the GPU's place ---------------------------------------------------


class InPlaceOfTheGpu:
    """Computes what a check asks the GPU for, and keeps the kernels that the GPU's driver would have compiled."""

    def __init__(self) -> None:
        self.asked: set[Kernel] = set()
        self.last: Callable[[], Any] = lambda: None
        self._known: dict[Any, tuple[Any, ...]] = {}

    @contextmanager
    def watched(self, kind: str = "cubin") -> Iterator[None]:
        with listing(H200.arch, kind, H200.num_sms if kind == "cubin" else None) as asked:
            yield
        self.asked |= set(asked)

    def grouped_gemm(self, a: Any, b: BlockScaledTensor, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        with self.watched():
            grouped_gemm(a, b, offs, **options | {"backend": "emulator"})
        return self._product(a, b, offs, options.get("out"), options.get("out_dtype", torch.bfloat16))

    def gemm(self, a: Any, b: BlockScaledTensor) -> torch.Tensor:
        with self.watched():
            gemm(a, b, backend="emulator")
        weights = BlockScaledTensor(b.data[None], b.scale[None], b.format, b.global_scale, b.scale_layout)
        return self._product(a, weights, torch.tensor([a.shape[0]], dtype=torch.int32), None, torch.bfloat16)

    def _product(
        self, a: Any, b: BlockScaledTensor, offs: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if out is None:
            out = torch.empty((a.shape[0], b.shape[1]), dtype=dtype)
        self.last = partial(self._product, a, b, offs, out, dtype)
        ends = clamped_ends(offs.tolist(), a.shape[0])
        data = a.data if isinstance(a, BlockScaledTensor) else a
        key = (data.data_ptr(), data._version, b.data.data_ptr(), b.data._version, tuple(ends))
        if key not in self._known:  # operands are kept, so that no others have their addresses
            rows = grouped_gemm_reference(
                a, b, torch.tensor(ends, dtype=torch.int32), out_dtype=torch.float64, accumulate="float64"
            )
            self._known[key] = (rows, a, b)
        out[: ends[-1]] = self._known[key][0][: ends[-1]]
        return out

    def run_problem(self, problem: Any, device: str, backend: str | None) -> Any:
        with self.watched():
            run_problem(problem, "cpu", "emulator")
        return run_problem(problem, "cpu", "reference")

    def sums(self, problem: Any, device: str, backend: str | None) -> torch.Tensor:
        with self.watched():
            _SUMS(problem, "cpu", "emulator")
        return grouped_gemm(problem.a, problem.b, problem.offs, out_dtype=torch.float32, backend="reference")


_SUMS = verify_epilogue._sums


@contextmanager
def in_place_of_the_gpu() -> Iterator[tuple[InPlaceOfTheGpu, pytest.MonkeyPatch]]:
    """In this block the checks can run; what else is patched with the second is undone with it."""
    here = InPlaceOfTheGpu()

    class Graph:
        """Replays the last call made before."""

        def __init__(self) -> None:
            self.replay = here.last

    with pytest.MonkeyPatch.context() as monkeypatch:
        _patch(monkeypatch, here, Graph)
        yield here, monkeypatch


def _patch(monkeypatch: pytest.MonkeyPatch, here: InPlaceOfTheGpu, graph: type) -> None:
    for module in (verify_checks, verify_formats, verify_training):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(verify_checks, "_REPEATS", 1)
    for name, stub in (
        ("synchronize", lambda: None),
        ("Stream", lambda: type("S", (), {"synchronize": lambda self: None})()),
        ("stream", lambda stream: nullcontext()),
        ("CUDAGraph", graph),
        ("graph", lambda graph: nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, stub)
    for module in (verify_checks, verify_formats):
        monkeypatch.setattr(module, "grouped_gemm", here.grouped_gemm)
    monkeypatch.setattr(verify_checks, "gemm", here.gemm)
    monkeypatch.setattr(verify_epilogue, "run_problem", here.run_problem)
    monkeypatch.setattr(verify_epilogue, "_sums", here.sums)
    for module in (verify_formats, verify_epilogue):
        monkeypatch.setattr(module, "cuda_driver", lambda: type("D", (), {"arch": H200.arch}))


ON_ALL_SHAPES = ("accuracy", "configs agree", "padding changes nothing")
OTHERS = [name for name in verify_checks.CHECKS if name not in ("streams and threads", *ON_ALL_SHAPES)]


@pytest.mark.parametrize("name", OTHERS)
def test_a_check_asks_for_nothing_else(name: str) -> None:
    with in_place_of_the_gpu() as (gpu, _):
        assert verify_checks.CHECKS[name]()
    assert gpu.asked == listed(name)
    assert bool(gpu.asked) == (name not in verify.QUANTIZER_CHECKS)


@pytest.mark.parametrize("shapes", [slice(3, 5), pytest.param(slice(None), marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ON_ALL_SHAPES)
def test_a_check_of_all_shapes_asks_for_nothing_else(name: str, shapes: slice) -> None:
    with in_place_of_the_gpu() as (gpu, patch):
        patch.setattr(verify_checks, "SHAPES", verify_checks.SHAPES[shapes])
        assert verify_checks.CHECKS[name]()
    expected = listed(name)
    assert gpu.asked
    assert gpu.asked <= expected
    assert shapes != slice(None) or gpu.asked == expected


def test_the_threads_ask_for_nothing_else() -> None:
    """One after the other: a listing is for a process with one thread."""

    class Threads(nullcontext):
        map = staticmethod(map)

        def __enter__(self) -> Any:
            return self

    with in_place_of_the_gpu() as (gpu, patch):
        patch.setattr(verify_checks, "ThreadPoolExecutor", Threads)
        assert verify_checks.check_streams_and_threads()
    assert gpu.asked == listed("streams and threads")


def test_the_small_launches_of_the_first_kernel_ask_for_nothing_else() -> None:
    with in_place_of_the_gpu() as (gpu, _):
        verify_checks.small_problems()
    kernels, _ = kernels_of(rehearsals_of(H200.arch, [], ["padless.verify.fp8_block"]), H200)
    assert gpu.asked == set(kernels)


def test_the_formats_ask_for_nothing_else() -> None:
    with in_place_of_the_gpu() as (gpu, _):
        assert verify_formats.check_formats_accuracy()
    assert gpu.asked == listed("formats")


def test_batch_invariance_asks_for_nothing_else() -> None:
    judge = verify_invariance.judge_problem

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def on_both(*args: Any, **options: Any) -> Any:
            with gpu.watched():
                call(*args, **options | {"backend": "emulator"})
            return call(*args, **options | {"backend": "reference"})

        return on_both

    with in_place_of_the_gpu() as (gpu, patch):
        for name in ("grouped_gemm", "gemm", "grouped_gemm_quant"):
            patch.setattr(verify_invariance, name, watched(getattr(verify_invariance, name)))
        patch.setattr(verify_invariance, "judge_problem", lambda problem: judge(problem, "cpu"))
        patch.setattr(verify_invariance, "problems_of", lambda arch, problems: SOME_INVARIANT)
        patch.setattr(verify_invariance, "cuda_driver", lambda: type("D", (), {"arch": H200.arch}))
        assert verify_invariance.check_batch_invariance()
    kernels, _ = kernels_of([Rehearsal(partial(verify_invariance.rehearse, *job)) for job in SOME_INVARIANT], H200)
    assert len(gpu.asked) > 20
    assert gpu.asked == set(kernels) <= listed("batch invariance")


# One problem by each kernel of Hopper, one of them a second kernel for its pair. The reference's sums are exact.
SOME_INVARIANT = [
    (path, 0)
    for path in verify_invariance.invariance_routes(H200.arch)
    if (path.config_class, path.a, path.b)
    in {
        (Sm90Fp8Config, "FP8_BLOCK", "FP8_BLOCK"),
        (Sm90Mxfp8Config, "MXFP8", "MXFP8"),
        (Sm90Bf16Config, "MXFP8", "MXFP8"),
        (Sm90Bf16Config, "NVFP4", "NVFP4"),
    }
]


def test_the_epilogues_ask_for_nothing_else() -> None:
    with in_place_of_the_gpu() as (gpu, _):
        assert verify_epilogue.check_epilogue(18)
    assert len(gpu.asked) > 20
    assert gpu.asked <= listed("epilogues")


COMPARISONS: dict[str, tuple[Any, str, Callable[[], str]]] = {
    "emulator agrees": (
        verify_formats,
        "emulate_formats",
        partial(verify_formats.check_fp8_block_against_emulator, 60),
    ),
    "emulator agrees on formats": (
        verify_formats,
        "emulate_formats",
        partial(verify_formats.check_formats_against_emulator, 4),
    ),
    "emulator agrees on epilogues": (
        verify_epilogue,
        "emulate_epilogue",
        partial(verify_epilogue.check_epilogue_against_emulator, 12),
    ),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_both_sides_of_a_comparison_ask_for_nothing_else(name: str) -> None:
    """The emulator's side is called as in a process of the pool, and writes down what it asks for; what it is said to
    return is what stands in for the GPU."""
    module, emulating, check = COMPARISONS[name]
    emulate = getattr(module, emulating)

    def in_order(pool: Any, function: Any, jobs: Any, cost: Any) -> Iterator[Any]:
        assert function is emulate
        for job in jobs:
            assert cost(*job) > 0
            with pytest.MonkeyPatch.context() as real:
                real.setattr(module, "grouped_gemm", grouped_gemm)
                real.setattr(verify_epilogue, "run_problem", run_problem)
                with gpu.watched("ptx"):
                    refused = function(*job) is None
            yield None if refused else by_reference(*job)

    def by_reference(*job: Any) -> Any:
        def product(a: Any, b: Any, offs: Any, **options: Any) -> torch.Tensor:
            return gpu._product(a, b, offs, None, options["out_dtype"])

        def outputs(problem: Any, device: str, backend: str) -> Any:
            return run_problem(problem, "cpu", "reference")

        with pytest.MonkeyPatch.context() as stand_in:
            stand_in.setattr(module, "grouped_gemm", product)
            stand_in.setattr(verify_epilogue, "run_problem", outputs)
            return emulate(*job)

    with in_place_of_the_gpu() as (gpu, patch):
        patch.setattr(module, "in_order", in_order)
        patch.setattr(module, "worker_pool", lambda workers: nullcontext())
        assert check()
    assert {kernel.kind for kernel in gpu.asked} == {"cubin", "ptx"}
    assert gpu.asked <= listed(name)


def test_single_instructions_are_rehearsed_on_both_sides() -> None:
    kernels = listed("emulator's tensor core agrees")
    assert {k.source for k in kernels} == {verify_arithmetic.KERNEL}
    for kind in ("cubin", "ptx"):
        assert len({k.prelude for k in kernels if k.kind == kind}) == len(verify_arithmetic.PAIRS)


def test_what_runs_has_a_rehearsal() -> None:
    """None is missing on Hopper, whose rehearsals are compared above one by one."""
    jobs, modules = verify.jobs_of(H200.arch, None, against_emulator=True)
    assert all(rehearsals_of(H200.arch, [name], []) for name in jobs)
    assert all(rehearsals_of(H200.arch, [], [module]) for module in modules)
    with pytest.raises(KeyError):
        kernels_of(rehearsals_of(H200.arch, [], ["padless.no_such_module"]), H200)


@pytest.mark.parametrize(
    ("where", "step"),
    [(B300, 16), pytest.param(B300, 1, marks=pytest.mark.slow), pytest.param(H200, 1, marks=pytest.mark.slow)],
    ids=str,
)
def test_everything_that_runs_has_been_rehearsed(where: Gpu, step: int) -> None:
    """No check and no module without a rehearsal, and no rehearsal that ends early (of those looked at)."""
    jobs, modules = verify.jobs_of(where.arch, None, against_emulator=True)
    for name in jobs:
        kernels, problems = kernels_of(rehearsals_of(where.arch, [name], [])[::step], where)
        assert not problems
        assert bool(kernels) == (name not in (*verify.QUANTIZER_CHECKS, *verify.TRITON_ALONE)), name
        assert {k.arch for k in kernels if k.kind == "cubin"} <= {where.arch}
        assert all(k.arch in ("sm_90a", "sm_100a") for k in kernels if k.kind == "ptx")
        assert any(k.kind == "ptx" for k in kernels) == name.startswith("emulator")
    for module in modules:
        kernels, problems = kernels_of(rehearsals_of(where.arch, [], [module]), where)
        assert kernels
        assert not problems
    assert set(verify_checks.CALLS) == {*verify_checks.CHECKS, "padless.verify.fp8_block"}


def test_the_small_launches_of_the_others_ask_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches as the module's own process makes them, fences not looked at: nothing was launched."""
    monkeypatch.setattr(GuardedOutput, "check", lambda *args: None)
    with listing(H200.arch, "cubin", H200.num_sms) as asked:
        assert verify_small.small_launches("cpu", "emulator", H200.arch) > 20
    kernels, _ = kernels_of(rehearsals_of(H200.arch, [], ["padless.verify.small"]), H200)
    assert list(asked) == kernels


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
    drawn = [
        job for job in verify_formats.fp8_block_problems(100) if verify_formats.random_formats_problem(*job).offs[-1]
    ]
    jobs = sorted(drawn, key=lambda job: verify_formats._cost(*job))[:2]
    rehearsals = [Rehearsal(partial(verify_formats.emulate_formats, *job), ("ptx",)) for job in jobs]
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
    assert all(verify_formats.emulate_formats(*job).numel() for job in jobs)
    assert sorted(path.name for path in fresh_cache.glob("*.*")) == files

    monkeypatch.setattr(jit, "_in_memory", {})
    launching.load_kernel.cache_clear()
    next(fresh_cache.glob("*.ptx")).unlink()
    with pytest.raises(AssertionError, match="was compiled after all"):
        [verify_formats.emulate_formats(*job) for job in jobs]


def test_a_process_that_dies_is_said_and_the_next_pool_works(fresh_cache: Path) -> None:
    with worker_pool(1):
        ahead = compile_ahead([Rehearsal(partial(os._exit, 3))], H200)
        assert len(ahead.problems) == 1
        assert ahead.problems[0].startswith("a compiling process ended")
        with worker_pool() as pool:
            assert pool.submit(os.getpid).result() != os.getpid()
