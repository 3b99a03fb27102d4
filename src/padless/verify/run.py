"""``padless verify``: everything that must hold on this GPU, with a record of the run."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from padless.kernels.table import kernels_arch
from padless.runtime.devices import backends
from padless.runtime.driver import cuda_driver
from padless.runtime.jit import source_digests
from padless.testing import machine
from padless.testing.compile_ahead import Gpu, Rehearsal, compile_ahead
from padless.testing.processes import cpus, useful_workers, worker_pool
from padless.verify import chains
from padless.verify.checks import rehearsals_of
from padless.verify.emulator import products, tensor_core
from padless.verify.lines import EPILOGUES, PRODUCTS, check_of, triton_check_of
from padless.verify.moe import CHECKS as MOE_CHECKS
from padless.verify.moe import TRITON_ALONE
from padless.verify.training import graphs
from padless.verify.training import layer as training
from padless.verify.two_devices import CHECK as TWO_DEVICES

SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Command lines of small launches. The first two are every GPU's.
SANITIZED = (
    "padless.verify.lines grouped_gemm gemm grouped_gemm_list",
    "padless.verify.lines grouped_gemm_epilogue",
    "padless.verify.lines grouped_gemm_wgrad",
    "padless.verify.lines plain.grouped_gemm_wgrad",
    "padless.verify.lines plain.grouped_gemm",
    "padless.verify.lines fp4_input_gradient",
)
_SANITIZER_SECONDS = 240
# racecheck does not follow a cp.async to the mbarrier at which it arrives when it is complete, and reports every scale
# that the weight-gradient kernel hands over so. The emulator does; its tests plant the waits that are missing.
_NOT_FOLLOWED = {("racecheck", "padless.verify.lines grouped_gemm_wgrad")}
_TRAINING = (
    "quantize_rows_columns", "swiglu_backward_quantize", "quantize_weight_both", "quantize_nvfp4_stochastic"
)  # fmt: skip

Check = Callable[[], str]
QUANTIZER_CHECKS: dict[str, Check] = {
    "quantizers agree": triton_check_of("quantize"),
    "training quantizers agree": triton_check_of(*_TRAINING),
}
# Checks by name, and modules of small launches for the sanitizer.
Jobs = Callable[[], tuple[dict[str, Check], list[str]]]
_FP8_BLOCK = (
    "accuracy", "configs agree", "padding changes nothing", "wrong offsets stay inside", "repeats agree",
    "graph replay", "streams and threads", "dense",
)  # fmt: skip
# Hopper's kernel of FP8_BLOCK, and quantizers; every GPU's; those of an architecture alone.
CHECKS: dict[str, Check] = {**{name: PRODUCTS[name] for name in _FP8_BLOCK}, **QUANTIZER_CHECKS}
_ALL: dict[str, Check] = {
    "formats": PRODUCTS["formats"],
    "epilogues": EPILOGUES["epilogues"],
    "chains": chains.CHECK,
    "batch invariance": PRODUCTS["batch invariance"],
    **MOE_CHECKS,
    "two devices": TWO_DEVICES,
}
_HOPPERS: dict[str, Check] = {
    "weight gradients": check_of("grouped_gemm_wgrad"),
    "bf16 weight gradients": check_of("plain.grouped_gemm_wgrad"),
    "bf16 products": check_of("plain.grouped_gemm"),
    "FP4 input gradients": check_of("fp4_input_gradient"),
    "layers in one launch": check_of("moe.decode"),
    "training layer": training.CHECK,
    "training layer in graphs": graphs.CHECK,
}
_BLACKWELLS: dict[str, Check] = {name: PRODUCTS[name] for name in ("dense MXFP8", "lists of problems")}

# Checks at a time, each in a process of its own: most of their time is one core's.
_MOST_WORKERS, _CORES_OF_ONE = 8, 2
# Those that Triton compiles for longest, so that they end with the others.
_FIRST = ("training quantizers agree", *TRITON_ALONE)


@dataclass(frozen=True)
class Record:
    """The outcome of a check."""

    check: str
    passed: bool
    detail: str
    seconds: float


def run_verify(
    out: Path | None = None,
    *,
    sanitizer: bool = True,
    against_emulator: bool = False,
    checks: list[str] | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> int:
    """Runs every check on the GPU, then a few small launches under compute-sanitizer.

    What they need is compiled first, by a process for each core; a check compiles for itself what failed there.

    Args:
        out: folder for ``verify.json`` and ``verify.md``, or None to print only.
        sanitizer: run compute-sanitizer's tools too, where it is installed.
        against_emulator: also compare single tensor-core instructions and random problems of every route with the
            emulator, bit for bit (a minute on many cores).
        checks: names out of `jobs_of`'s; all of them when None.
        workers: checks and runs of the sanitizer at a time, each in a process of its own. 1 runs them here, one after
            the other; None is one for every two cores, at most eight.

    Returns:
        0 when all passed, else 1. Raises ValueError when this machine cannot run the kernels.
    """
    found = backends()["cuda"]
    if not found.available:
        raise ValueError(f"padless verify runs the kernels on a GPU, and cannot here: {found.reason}")
    console = console or Console()
    start = time.perf_counter()
    gpu = Gpu(cuda_driver().arch, cuda_driver().num_sms(0))
    jobs_here = partial(jobs_of, gpu.arch, checks, against_emulator)
    jobs, sanitized = jobs_here()
    tools = sanitizers_of(sanitized) if sanitizer and _sanitizer() else {}
    rehearsals = rehearsals_of(gpu.arch, jobs.values(), sanitized if tools else ())
    records: list[Record] = []
    about = about_the_machine() if out is not None else {}
    workers = max(1, min(_MOST_WORKERS, cpus() // _CORES_OF_ONE)) if workers is None else workers
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        with worker_pool():
            compiled = _compile_ahead(rehearsals, gpu, progress)
        names = [*jobs, *tools]
        task = progress.add_task("verify", total=len(names))
        with _running(jobs | tools, jobs_here, workers) as results:
            for result in results:
                records.append(_shown(console, *result))
                records.sort(key=lambda record: names.index(record.check))
                left = len(names) - len(records)
                if out is not None and left:  # a run that is ended before its time leaves what it knows
                    write_records(out, records, about | {"compiled ahead": compiled, "not run yet": str(left)})
                progress.advance(task)
    if sanitizer and not tools:
        console.print("compute-sanitizer is not installed (it comes with the CUDA toolkit); those checks were not run")
    passed = sum(r.passed for r in records)
    seconds = round(time.perf_counter() - start, 1)
    console.print(f"{passed} passed, {len(records) - passed} failed, in {seconds} s")
    if out is not None:
        write_records(out, records, about | {"compiled ahead": compiled, "seconds in all": str(seconds)})
        console.print(f"recorded in {out / 'verify.md'}")
    return 0 if passed == len(records) else 1


def jobs_of(
    arch: str, checks: Sequence[str] | None = None, against_emulator: bool = False
) -> tuple[dict[str, Check], list[str]]:
    """Checks by name, and modules of small launches for the sanitizer, that concern kernels of ``arch``.

    Most of `CHECKS` are about Hopper's FP8_BLOCK kernel; those named in ``checks`` are run anywhere.
    """
    kernels = kernels_arch(arch)
    on_hopper = kernels == "sm_90a"
    every = CHECKS | (_BLACKWELLS if kernels == "sm_100a" else {}) | _ALL | (_HOPPERS if on_hopper else {})
    unknown = [name for name in checks or () if name not in every]
    if unknown:
        raise ValueError(f"checks has {unknown[0]!r}; allowed are {', '.join(map(repr, every))}")
    left_out = () if on_hopper else CHECKS.keys() - set(QUANTIZER_CHECKS)
    names = [name for name in every if name not in left_out] if checks is None else checks
    jobs = {name: every[name] for name in names}
    if against_emulator:
        if on_hopper:
            jobs |= tensor_core.COMPARISONS
        comparisons = products.COMPARISONS
        jobs |= {name: c for name, c in comparisons.items() if on_hopper or name != "emulator agrees"}
    return jobs, [*SANITIZED[: None if on_hopper else 2]]


def _compile_ahead(rehearsals: list[Rehearsal], gpu: Gpu, progress: Progress) -> str:
    """Shows a bar, and a line for all that failed; returns what the record says of it."""
    start = time.perf_counter()
    bar = progress.add_task("compiling ahead", total=len(rehearsals))
    ahead = compile_ahead(rehearsals, gpu, lambda done, total: progress.update(bar, completed=done, total=total))
    seconds = round(time.perf_counter() - start, 1)
    found = f"{len(ahead.kernels)} kernels in {seconds} s by {useful_workers()} processes"
    if ahead.problems:
        found += f"; {len(ahead.problems)} failed there and are left to the checks: {ahead.problems[0]}"
    progress.console.print(f"compiled ahead: {found}", markup=False)
    return found


@contextmanager
def _running(checks: dict[str, Check], jobs_here: Jobs, workers: int) -> Iterator[Iterator[tuple[Record, str]]]:
    """Yields what came of every check, as each ends; one worker takes them in order."""
    if workers == 1:
        yield (_record(name, check) for name, check in checks.items())
        return
    with worker_pool(workers) as pool:
        started = [pool.submit(_record_of, name, jobs_here) for name in sorted(checks, key=lambda n: n not in _FIRST)]
        yield (future.result() for future in as_completed(started))


def _record_of(name: str, jobs_here: Jobs) -> tuple[Record, str]:
    """`_record` of a check by its name, in a process that has not made the checks."""
    jobs, modules = jobs_here()
    return _record(name, (jobs | sanitizers_of(modules))[name])


def _record(name: str, check: Check) -> tuple[Record, str]:
    """The outcome of a check, and the traceback of one that failed."""
    start = time.perf_counter()
    trace = ""
    try:
        detail, passed = check(), True
    except Exception as error:  # a check may fail in any way; the others still run
        detail, passed, trace = f"{type(error).__name__}: {error}", False, traceback.format_exc()
    return Record(name, passed, detail, round(time.perf_counter() - start, 2)), trace


def _shown(console: Console, record: Record, trace: str) -> Record:
    """Prints what came of a check."""
    if trace:
        console.print(trace, style="red", markup=False)
    outcome = "pass" if record.passed else "FAIL"
    console.print(f"{outcome}  {record.check}: {record.detail} ({record.seconds} s)", markup=False)
    return record


def sanitizers_of(modules: Iterable[str]) -> dict[str, Check]:
    """Every tool on every module of small launches that it can follow, by name."""
    return {
        f"compute-sanitizer {tool} of {module}": partial(_sanitize, tool, module)
        for tool, module in itertools.product(SANITIZER_TOOLS, modules)
        if (tool, module) not in _NOT_FOLLOWED
    }


def _sanitizer() -> str | None:
    default = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(default) if default.exists() else None)


def _sanitize(tool: str, module: str) -> str:
    command = [str(_sanitizer()), "--tool", tool, "--error-exitcode", "9"]
    if tool != "initcheck":  # it has to see who wrote the inputs
        command += ["--kernel-name", "kns=padless"]
    command += [sys.executable, "-m", *module.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_SANITIZER_SECONDS, check=False)
    text = result.stdout + result.stderr
    assert "small problems done" in text, f"did not finish: {text[-2000:]}"
    summary = [line for line in text.splitlines() if "SUMMARY" in line]
    assert result.returncode == 0, f"exit code {result.returncode}: {text[-3000:]}"
    return summary[-1].strip("= ") if summary else "clean"


def about_the_machine() -> dict[str, str]:
    """The machine, as a record describes it."""
    found = machine.describe()
    gpu = [str(found.get(name, "unknown")) for name in ("gpu", "driver")]
    if "power_limit_w" in found:
        gpu.append(f"{found['power_limit_w']:.2f} W")
    return {
        "date": found["date"][:10],
        "gpu, driver, power limit": ", ".join(gpu),
        **{name: str(found["versions"].get(name)) for name in ("padless", "torch", "triton")},
        "cuda": str(found["cuda"]),
        "python": found["python"],
        "command": "padless " + " ".join(sys.argv[1:]),
    }


def write_records(out: Path, records: list[Record], about: dict[str, str]) -> None:
    """Writes verify.json and verify.md. about: what to say of the machine and of the run, by name."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": about, "kernels": source_digests(), "checks": [asdict(record) for record in records]}
    (out / "verify.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = ["# padless verify", "", *(f"- {k}: {v}" for k, v in about.items()), ""]
    lines += ["| check | result | detail | seconds |", "|---|---|---|---|"]
    for r in records:
        detail = r.detail.replace("|", "\\|").replace("\n", " ")[:300]
        lines.append(f"| {r.check} | {'pass' if r.passed else 'FAIL'} | {detail} | {r.seconds} |")
    (out / "verify.md").write_text("\n".join(lines) + "\n")
