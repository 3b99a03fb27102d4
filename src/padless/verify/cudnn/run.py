"""``padless verify --against-cudnn``: cuDNN's kernel and padless's on the same operands, both in the emulator."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import as_completed
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from padless import __version__
from padless.testing.processes import cpus, worker_pool
from padless.verify.cudnn.cases import CASES, OUTPUTS, case_of, class_options, operands, outputs_here
from padless.verify.cudnn.kernel import CudnnKernel, Tensors, missing, versions

FILE = "cudnn.json"


@dataclass(frozen=True)
class Comparison:
    """The outcome of one case.

    bytes, differing: of every output, by cuDNN's name. shape: M, N, K, groups. grid, cluster, block,
    warp_instructions, seconds: of cuDNN's launches. reports: the emulator's about cuDNN's kernel, by kind; padless's
    has none, or the case fails. error: why there is no comparison, or nothing.
    """

    case: str
    format: str
    d: str
    shape: tuple[int, int, int, int]
    options: str
    bytes: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    grid: tuple[int, ...] = ()
    cluster: tuple[int, ...] = ()
    reports: dict[str, int] = field(default_factory=dict)
    warp_instructions: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether outputs were compared and every byte is the same."""
        return not self.error and sum(self.bytes.values()) > 0 and not any(self.differing.values())

    def __str__(self) -> str:
        if self.error:
            return f"{self.case}: {self.error}"
        wrong = ", ".join(f"{count} of {name}" for name, count in self.differing.items() if count)
        return (
            f"{self.case}: {sum(self.bytes.values()):,} bytes of {', '.join(self.bytes)}, differing: {wrong or 'none'}"
        )


def run_verify_cudnn(
    out: Path | None = None,
    *,
    checks: list[str] | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> int:
    """Compares every byte that the two kernels write, case by case.

    Args:
        out: folder for ``cudnn.json``, or None to print only.
        checks: names of cases; all of them when None.
        workers: cases at a time, each in a process of its own; None is one for each core, 1 runs them here.

    Returns:
        0 when every byte is the same, else 1. Raises ValueError where cuDNN's packages are missing.
    """
    if reason := missing():
        raise ValueError(reason)
    names = [case_of(name).name for name in checks] if checks else [case.name for case in CASES]
    console = console or Console()
    start = time.perf_counter()
    found: list[Comparison] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("cuDNN's kernel and padless's", total=len(names))
        for comparison in _results(names, min(workers or cpus(), len(names))):
            found.append(comparison)
            console.print(f"{'same' if comparison.same else 'FAIL'}  {comparison}", markup=False, soft_wrap=True)
            progress.advance(task)
    found.sort(key=lambda comparison: names.index(comparison.case))
    same, seconds = sum(comparison.same for comparison in found), round(time.perf_counter() - start, 1)
    console.print(f"{same} of {len(found)} calls give the same bytes, in {seconds} s")
    if out is not None:
        write_record(out, found, seconds)
        console.print(f"recorded in {out / FILE}")
    return 0 if same == len(found) else 1


def _results(names: list[str], workers: int) -> Iterable[Comparison]:
    if workers == 1:
        yield from map(compare, names)
        return
    with worker_pool(workers) as pool:
        for future in as_completed([pool.submit(compare, name) for name in names]):
            yield future.result()


def compare(name: str, seed: int = 1) -> Comparison:
    """Runs a case by both kernels. What goes wrong is in the result."""
    case = case_of(name)
    options = dict(case.cudnn) | ({"bias": case.bias} if case.bias else {}) | ({} if case.prob else {"prob": None})
    options |= {"num_experts": len(case.sizes)} if case.by_pointers else {}
    about = Comparison(
        name, case.format, _shown(case.d_dtype), (sum(case.sizes), case.n, case.k, len(case.sizes)),
        ", ".join(f"{key} {_shown(value)}" for key, value in options.items()),
    )  # fmt: skip
    try:
        tensors = operands(case, seed)
        kernel = CudnnKernel(case.program, tensors, class_options(case))
        start = time.perf_counter()
        device = kernel.run(tensors)
        seconds = time.perf_counter() - start
        sizes, differing = differences(tensors, outputs_here(case, tensors), case.compared)
    except Exception as error:  # the others still run
        return Comparison(**(vars(about) | {"error": f"{type(error).__name__}: {error}"[:500]}))
    shape = device.launches[-1]
    return Comparison(
        **vars(about) | {"bytes": sizes, "differing": differing, "grid": shape.grid, "cluster": shape.cluster,
        "reports": dict(sorted(device.reports.items())), "warp_instructions": device.instructions,
        "seconds": round(seconds, 1)}
    )  # fmt: skip


def differences(
    theirs: Tensors, ours: Tensors, names: Sequence[str] = OUTPUTS
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of every output of these names, and how many of them differ. Raises ValueError where one has an output that
    the other lacks, or one of another shape or type."""
    sizes, differing = {}, {}
    for name in names:
        x, y = theirs.get(name), ours.get(name)
        if x is None and y is None:
            continue
        if x is None or y is None or (x.shape, x.dtype) != (y.shape, y.dtype):
            raise ValueError(f"{name}: cuDNN's is {_about(x)}, padless's {_about(y)}")
        left, right = _bytes(x), _bytes(y)
        sizes[name], differing[name] = left.numel(), int((left != right).sum())
    return sizes, differing


def write_record(out: Path, found: list[Comparison], seconds: float) -> None:
    """Writes cudnn.json: versions and the machine, then every comparison."""
    about = {
        "date": date.today().isoformat(),
        "padless": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "packages": versions(),
        "command": "padless " + " ".join(sys.argv[1:]),
        "seconds": seconds,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / FILE).write_text(json.dumps({"about": about, "cases": [asdict(c) for c in found]}, indent=1) + "\n")


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, in the order of its indices."""
    # Codes and scales are moved as bytes: torch cannot copy every type of theirs.
    return t.view(torch.uint8).reshape(-1) if t.dtype.itemsize == 1 else t.reshape(-1).view(torch.uint8)


def _about(t: torch.Tensor | None) -> str:
    return "none" if t is None else f"{tuple(t.shape)} {_shown(t.dtype)}"


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return str(value).removeprefix("torch.")
