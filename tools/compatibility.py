"""Prints docs/compatibility.md: what padless runs with, what it refuses and in which words, and what is unknown.

    python tools/compatibility.py > docs/compatibility.md      (`make readme` does it)

What works is read from the records in docs/measured, what is allowed from pyproject.toml and the workflow of CI. A
sentence of a refusal is the code's own: the code is asked as if the machine were the one in question.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from padless.integrations import engines
from padless.runtime import devices, driver, jit

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "measured"
COMPILER = "13.0"
# GPUs by compute capability, as NVIDIA lists them: what people ask for.
GPUS = {
    (8, 0): ("NVIDIA A100",),
    (8, 9): ("NVIDIA L40S",),
    (9, 0): ("NVIDIA H200", "NVIDIA H100", "NVIDIA H20", "NVIDIA GH200"),
    (10, 0): ("NVIDIA B200", "NVIDIA GB200"),
    (10, 3): ("NVIDIA B300", "NVIDIA GB300"),
    (11, 0): ("NVIDIA Thor",),
    (12, 0): ("NVIDIA RTX PRO 6000 Blackwell",),
}


# --- records ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A record, or one line of it, with the machine that it ran on.

    gpu: as the driver names it; "" without one. verified: what it proves, in words, "" for a measurement. failed: it
    found something wrong.
    """

    file: str
    date: str
    gpu: str
    versions: tuple[str, ...]  # driver, CUDA, torch, triton, Python
    verified: str
    failed: bool


def runs(folder: Path) -> list[Run]:
    """All runs in the records of a folder that say what machine they are of, by date."""
    found = []
    for path in sorted(folder.glob("*.json*")):
        for record in _lines(path):
            machine = record.get("machine") if isinstance(record, dict) else None
            if isinstance(machine, dict) and (of := _run(path.name, record, machine)):
                found.append(of)
    return sorted(found, key=lambda run: (run.date, run.file))


def _lines(path: Path) -> Iterator[Any]:
    text = path.read_text()
    yield from map(json.loads, text.splitlines()) if path.suffix == ".jsonl" else [json.loads(text)]


def _run(file: str, record: Mapping[str, Any], machine: Mapping[str, Any]) -> Run | None:
    gpu, own_driver, *_ = [*str(machine.get("gpu, driver, power limit", "")).split(", "), ""]
    packages = machine.get("versions", machine)
    if "torch" not in packages or "python" not in machine:
        return None
    versions = (
        machine.get("driver") or own_driver or "-",
        machine.get("cuda") or "-",
        packages["torch"].partition("+")[0],
        packages.get("triton") or "-",
        machine["python"],
    )
    verified, failed = "", False
    if checks := record.get("checks"):
        verified, failed = f"{len(checks)} checks", not all(check["passed"] for check in checks)
    elif record.get("kind") == "fuzz":
        verified, failed = f"{record['problems']:,} random problems", bool(record["wrong"] or record["ended"])
    return Run(file, machine["date"][:10], machine.get("gpu") or gpu, versions, verified, failed)


def _evidence(some: Iterable[Run]) -> str:
    """Runs in brief: those that prove, the newest of each file, and how many measure."""
    some = list(some)
    proofs = {run.file: run for run in some if run.verified}
    said = [
        f"{run.date}: {run.verified}{', with failures' if run.failed else ''} ([record](measured/{run.file}))"
        for run in proofs.values()
    ]
    measured = {run.file for run in some if not run.verified}
    if measured:
        dates = sorted({run.date for run in some if not run.verified})
        said.append(f"measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} ({len(measured)} records)")
    return "; ".join(said)


# --- what the code says ----------------------------------------------------------------------------------


@contextmanager
def machine_with(gpu: str | None, capability: tuple[int, int], compiler: Exception | None) -> Iterator[None]:
    """In this block the code sees a GPU, or none, and a compiler, or the error of one that is absent."""
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "is_available", gpu is not None),
            (torch.cuda, "get_device_capability", capability),
            (torch.cuda, "get_device_name", gpu),
        ):
            stack.enter_context(mock.patch.object(owner, name, return_value=value))
        stack.enter_context(mock.patch.object(driver, "cuda_driver"))
        asked = mock.Mock(return_value=COMPILER, side_effect=compiler)
        stack.enter_context(mock.patch.object(jit, "nvrtc_version", asked))
        yield


def backend_on(
    gpu: str | None, capability: tuple[int, int] = (9, 0), compiler: Exception | None = None
) -> devices.Backend:
    """The backend "cuda" of such a machine."""
    with machine_with(gpu, capability, compiler):
        return devices.backends()["cuda"]


def said_without(framework: str) -> str:
    """The error of padless' plug-in where its framework is not installed."""
    with _in_place_of(framework, None):
        try:
            importlib.import_module(f"padless.integrations.{framework}")
        except ImportError as error:
            return str(error)
    raise RuntimeError(f"padless' plug-in is imported without {framework}")


def said_of_version(framework: str, version: str) -> str:
    """Error of padless' plug-in for a version that is not served; "" for frameworks that are not asked for theirs."""
    named = ModuleType(framework)
    vars(named)["__version__"] = version
    engine = {"vllm": engines.VLLM, "sglang": engines.SGLANG}.get(framework)
    with _in_place_of(framework, named):
        try:
            if engine is None:
                importlib.import_module(f"padless.integrations.{framework}")
            else:
                engine.load("padless")
        except ModuleNotFoundError:  # it went on to the framework's own modules
            return ""
        except (ImportError, ValueError) as error:
            return str(error)
    raise RuntimeError(f"{framework} {version} is taken")


@contextmanager
def _in_place_of(framework: str, module: ModuleType | None) -> Iterator[None]:
    """``module``, or nothing, where the framework would be imported: its modules and those of padless' plug-in, which
    this process may have imported before, are out of the way. Others that are imported meanwhile stay.
    """

    def taken_out() -> dict[str, ModuleType]:
        packages = (framework, f"padless.integrations.{framework}")
        names = [name for name in sys.modules if any(f"{name}.".startswith(f"{package}.") for package in packages)]
        return {name: sys.modules.pop(name) for name in names}

    before = taken_out()
    sys.modules[framework] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        taken_out()
        sys.modules.update(before)


# --- the page --------------------------------------------------------------------------------------------


def page(folder: Path = RECORDS) -> str:
    """The page, of the records in a folder."""
    found = runs(folder)
    lines = [
        "# What it runs with",
        "",
        "Generated: `python tools/compatibility.py`, from the [records](measured/README.md), the code, pyproject.toml",
        "and CI's workflow. *Works*: a record of a run without failures says so. *Refused*: padless, or pip, says no,",
        "in these words. *Unknown*: allowed, and no such record.",
        "",
        "## GPUs",
        "",
        *_table(("GPU", "compute capability", "", "where from"), _gpu_rows(found)),
        "",
        "Kernels for Blackwell have run in the [emulator](emulator.md) alone, as sm_100a. Without a GPU every call runs",
        "in plain torch and every kernel in the emulator. [Which formats run where](supported.md).",
        "",
        "## Versions that have run together",
        "",
        *_table(("GPU", "driver", "CUDA", "torch", "triton", "Python", "what ran"), _together(found)),
        "",
        "## Versions by themselves",
        "",
        *_table(("", "allowed", "works: has run", "in CI's workflow", "else"), _version_rows(found)),
        "",
        "## What is said where something is missing",
        "",
        *_table(("missing", "refused with"), _missing_rows()),
        "",
        "At a call the sentence begins with \"backend 'cuda' is not available here:\".",
        "",
        "## Frameworks",
        "",
        *_table(
            ("framework", "allowed", "has run", "refused: not installed", "refused: another version"),
            _framework_rows(found),
        ),
    ]
    return "\n".join(lines) + "\n"


def _table(heading: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heading, ("---",) * len(heading), *rows)]


def _gpu_rows(found: list[Run]) -> Iterator[tuple[str, ...]]:
    named = {name for names in GPUS.values() for name in names}
    if strange := {run.gpu for run in found if run.gpu} - named:
        raise ValueError(f"records are of {sorted(strange)}, which GPUS does not list")
    for capability, names in GPUS.items():
        for name in names:
            here = [run for run in found if run.gpu == name]
            said = backend_on(name, capability)
            if not said.available:
                verdict = ("**refused**", said.reason)
            elif any(run.verified and not run.failed for run in here):
                verdict = ("**works**", "[records below](#versions-that-have-run-together)")
            else:
                verdict = ("unknown", _evidence(here) or f"no record; allowed: {said.reason}")
            yield (name, ".".join(map(str, capability)), *verdict)


def _together(found: list[Run]) -> Iterator[tuple[str, ...]]:
    for gpu, versions in dict.fromkeys((run.gpu, run.versions) for run in reversed(found)):
        here = [run for run in found if (run.gpu, run.versions) == (gpu, versions)]
        yield (gpu or "none", *versions, _evidence(here))


def _version_rows(found: list[Run]) -> Iterator[tuple[str, ...]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()

    def required(package: str) -> str:
        (asked,) = (each for each in project["dependencies"] if re.match(rf"{package}\b", each))
        return f"`{asked.removeprefix(package)}`"

    def matrix(name: str) -> str:
        (listed,) = re.findall(rf"^ +{name}: \[(.*)\]$", workflow, re.MULTILINE)
        return listed.replace('"', "")

    def has_run(place: int) -> str:
        good = {run.versions[place] for run in found if run.verified and not run.failed} - {"-"}
        return ", ".join(sorted(good, key=lambda version: [int(part) for part in re.findall(r"\d+", version)]))

    other = "refused by pip; newer ones inside: unknown"
    yield "Python", f"`{project['requires-python']}`", has_run(4), matrix("python"), other
    yield "torch", required("torch"), has_run(2), matrix("torch"), other
    yield "triton", "what torch brings", has_run(3), "-", "unknown"
    yield "NVRTC", required("nvidia-cuda-nvrtc"), COMPILER, COMPILER, "refused by pip"
    yield "driver", f"for CUDA {COMPILER} or newer", has_run(0), "-", "unknown"


def _missing_rows() -> Iterator[tuple[str, ...]]:
    yield "a GPU", backend_on(None).reason
    with mock.patch("ctypes.CDLL", side_effect=OSError("libcuda.so.1: cannot open shared object file")):
        try:
            driver.CudaDriver()
        except driver.DriverError as error:
            yield "a driver", str(error)
    absent = OSError("libnvrtc.so.13: cannot open shared object file")
    yield "NVRTC", backend_on("NVIDIA H200", compiler=absent).reason


def _framework_rows(found: list[Run]) -> Iterator[tuple[str, ...]]:
    # `padless bench model` measures models of transformers; of the others a page says what was run and where.
    models = [run for run in found if re.search(r"-model[-.]", run.file)]
    page = {"vllm": "frameworks.md#vllms-engine-on-an-h200", "sglang": "frameworks.md#sglang"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for framework in ("transformers", "vllm", "sglang", "torchtitan", "megatron", "torchao"):
        asked = extras[framework][0]
        asked = asked[asked.index(">") :]
        other = said_of_version(framework, "0.1.0")
        described = f"[page]({page.get(framework, 'frameworks.md#what-has-been-run')})"
        if framework == "transformers":
            on = " and ".join(dict.fromkeys(run.gpu for run in models))
            described = f"{on}, {_evidence(models)}, [page](transformers.md)" if models else "[page](transformers.md)"
        yield framework, f"`{asked}`", described, said_without(framework), other or "refused by pip alone"


if __name__ == "__main__":
    print(page(), end="")
