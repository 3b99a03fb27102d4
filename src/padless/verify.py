"""``padless verify``: everything that must hold on this GPU, with a record of the run."""

from __future__ import annotations

import datetime
import itertools
import json
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from padless import __version__
from padless.backends import backends
from padless.driver import cuda_driver
from padless.paths import PATHS, kernels_arch
from padless.verify_arithmetic import check_tensor_core
from padless.verify_blackwell import check_dense_mxfp8, check_problem_lists
from padless.verify_checks import CHECKS
from padless.verify_emulator import check_against_emulator
from padless.verify_epilogue import check_epilogue, check_epilogue_against_emulator
from padless.verify_formats import check_formats_accuracy, check_formats_against_emulator

SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Command lines of small launches: the first kernel's, then the other paths'.
SANITIZED = ("padless.verify_checks", "padless.verify_small")
_SANITIZER_SECONDS = 240


def run_verify(
    out: Path | None = None,
    *,
    sanitizer: bool = True,
    against_emulator: bool = False,
    checks: list[str] | None = None,
    console: Console | None = None,
) -> int:
    """Runs every check on the GPU, then a few small launches under compute-sanitizer.

    Args:
        out: folder for ``verify.json`` and ``verify.md``, or None to print only.
        sanitizer: run compute-sanitizer's tools too, where it is installed.
        against_emulator: also compare single tensor-core instructions and 200 random problems with the emulator, bit
            for bit (a minute on many cores).
        checks: names out of ``verify_checks.CHECKS``; all of them when None.

    Returns:
        0 when all passed, else 1. Raises ValueError when this machine cannot run the kernels.
    """
    found = backends()["cuda"]
    if not found.available:
        raise ValueError(f"padless verify runs the kernels on a GPU, and cannot here: {found.reason}")
    console = console or Console()
    jobs, sanitized = jobs_of(cuda_driver().arch, checks, against_emulator)
    tools = list(itertools.product(SANITIZER_TOOLS, sanitized)) if sanitizer and _sanitizer() else []
    records: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("verify", total=len(jobs) + len(tools))
        for name, check in jobs.items():
            progress.update(task, description=name)
            records.append(_record(console, name, check))
            progress.advance(task)
        for tool, module in tools:
            name = f"compute-sanitizer {tool} of {module}"
            progress.update(task, description=name)
            records.append(_record(console, name, partial(_sanitize, tool, module)))
            progress.advance(task)
    if sanitizer and not tools:
        console.print(
            "compute-sanitizer is not installed (it comes with the CUDA toolkit); those checks were not run"
        )
    passed = sum(r["passed"] for r in records)
    console.print(f"{passed} passed, {len(records) - passed} failed")
    if out is not None:
        _write(out, records)
        console.print(f"recorded in {out / 'verify.md'}")
    return 0 if passed == len(records) else 1


def jobs_of(
    arch: str, checks: list[str] | None = None, against_emulator: bool = False
) -> tuple[dict[str, Callable[[], str]], list[str]]:
    """Checks by name, and modules of small launches for the sanitizer, that concern kernels of ``arch``.

    Most of ``verify_checks.CHECKS`` are about FP8_BLOCK's kernel, which Hopper alone has; those named in ``checks`` are
    run wherever it is.
    """
    fp8_block = any(
        (p.operation, p.arch, p.a, p.b) == ("grouped_gemm", arch, "FP8_BLOCK", "FP8_BLOCK") for p in PATHS
    )
    names = checks if checks is not None else list(CHECKS) if fp8_block else ["quantizers agree"]
    jobs = {name: CHECKS[name] for name in names}
    if against_emulator:  # first: its processes compile what the checks below need too
        if fp8_block:
            jobs["emulator's tensor core agrees"] = check_tensor_core
            jobs["emulator agrees"] = check_against_emulator
        jobs["emulator agrees on formats"] = check_formats_against_emulator
        jobs["emulator agrees on epilogues"] = check_epilogue_against_emulator
    if checks is None and kernels_arch(arch) == "sm_100a":
        jobs["dense MXFP8"] = check_dense_mxfp8
        jobs["lists of problems"] = check_problem_lists
    if checks is None:
        jobs["formats"] = check_formats_accuracy
        jobs["epilogues"] = check_epilogue
    return jobs, [module for module in SANITIZED if fp8_block or module != SANITIZED[0]]


def _record(console: Console, name: str, check: Any) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        detail, passed = check(), True
    except Exception as error:  # a check may fail in any way; the others still run
        detail, passed = f"{type(error).__name__}: {error}", False
        console.print(traceback.format_exc(), style="red", markup=False)
    seconds = round(time.perf_counter() - start, 2)
    console.print(f"{'pass' if passed else 'FAIL'}  {name}: {detail} ({seconds} s)", markup=False)
    return {"check": name, "passed": passed, "detail": detail, "seconds": seconds}


def _sanitizer() -> str | None:
    default = Path("/usr/local/cuda/bin/compute-sanitizer")
    return shutil.which("compute-sanitizer") or (str(default) if default.exists() else None)


def _sanitize(tool: str, module: str) -> str:
    command = [str(_sanitizer()), "--tool", tool, "--error-exitcode", "9"]
    if tool != "initcheck":  # it has to see who wrote the inputs
        command += ["--kernel-name", "kns=padless"]
    command += [sys.executable, "-m", module]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_SANITIZER_SECONDS, check=False)
    text = result.stdout + result.stderr
    assert "small problems done" in text, f"did not finish: {text[-2000:]}"
    summary = [line for line in text.splitlines() if "SUMMARY" in line]
    assert result.returncode == 0, f"exit code {result.returncode}: {text[-3000:]}"
    return summary[-1].strip("= ") if summary else "clean"


def machine() -> dict[str, str]:
    """What a record has to say about where it was made."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        gpu = torch.cuda.get_device_name()
    import triton

    return {
        "date": datetime.date.today().isoformat(),
        "gpu, driver, power limit": gpu.splitlines()[0] if gpu else torch.cuda.get_device_name(),
        "padless": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "command": "padless " + " ".join(sys.argv[1:]),
    }


def _write(out: Path, records: list[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    (out / "verify.json").write_text(json.dumps({"machine": about, "checks": records}, indent=1) + "\n")
    lines = ["# padless verify", "", *(f"- {k}: {v}" for k, v in about.items()), ""]
    lines += ["| check | result | detail | seconds |", "|---|---|---|---|"]
    for r in records:
        detail = str(r["detail"]).replace("|", "\\|").replace("\n", " ")[:300]
        lines.append(f"| {r['check']} | {'pass' if r['passed'] else 'FAIL'} | {detail} | {r['seconds']} |")
    (out / "verify.md").write_text("\n".join(lines) + "\n")
