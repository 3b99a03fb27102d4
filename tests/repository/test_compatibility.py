"""The page of what padless runs with: it is what the tool prints, and only a record without failures makes "works"."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import compatibility
from padless.runtime import devices
from padless.runtime.architecture import BY_CAPABILITY
from support.ragged import ROOT

VERSIONS = {
    "driver": "600.1",
    "cuda": "13.9",
    "python": "3.14.1",
    "versions": {"torch": "2.15.0+cu139", "triton": "4.0"},
}


def rows(folder: Path) -> dict[str, tuple[str, ...]]:
    return {row[0]: row for row in compatibility._gpu_rows(compatibility.runs(folder))}


def write(folder: Path, name: str, record: Any) -> None:
    (folder / name).write_text(json.dumps(record) + "\n")


def test_the_page_is_what_the_tool_prints() -> None:
    tool = ROOT / "tools" / "compatibility.py"
    said = subprocess.run([sys.executable, str(tool)], capture_output=True, text=True, check=False, timeout=120)
    assert said.returncode == 0, said.stderr
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert said.stdout == page, "make readme writes it"
    assert "| NVIDIA H200 | 9.0 | **works** |" in page


def test_a_gpu_works_where_a_record_without_failures_says_so(tmp_path: Path) -> None:
    machine = {**VERSIONS, "date": "2031-02-03T04:05:06+00:00", "gpu": "NVIDIA B200"}
    assert rows(tmp_path)["NVIDIA B200"][2] == "unknown"
    write(tmp_path / "", "a.jsonl", {"kind": "session", "machine": machine})
    assert rows(tmp_path)["NVIDIA B200"][2:] == ("unknown", "measured 2031-02-03 (1 records)"), "it proves nothing"
    fuzz = {"kind": "fuzz", "machine": machine, "problems": 1234, "wrong": [], "ended": []}
    for wrong in ({"wrong": ["x"]}, {"ended": ["x"]}):
        write(tmp_path, "b.jsonl", fuzz | wrong)
        assert rows(tmp_path)["NVIDIA B200"][2] == "unknown"
    write(tmp_path, "b.jsonl", fuzz)
    assert rows(tmp_path)["NVIDIA B200"][2] == "**works**"
    assert rows(tmp_path)["NVIDIA GB200"][2] == "unknown"


@pytest.mark.parametrize("passed", [True, False])
def test_a_record_of_checks_counts_when_all_passed(tmp_path: Path, passed: bool) -> None:
    machine = {"date": "2031-02-03", "gpu, driver, power limit": "NVIDIA H20, 600.2, 500 W", "cuda": "13.9",
               "python": "3.14.1", "torch": "2.15.0", "triton": "4.0"}  # fmt: skip
    write(tmp_path, "v.json", {"machine": machine, "checks": [{"passed": True}, {"passed": passed}]})
    assert rows(tmp_path)["NVIDIA H20"][2] == ("**works**" if passed else "unknown")
    (run,) = compatibility.runs(tmp_path)
    assert run.versions == ("600.2", "13.9", "2.15.0", "4.0", "3.14.1")
    page = compatibility.page(tmp_path)
    assert ("2 checks, with failures" in page) is not passed
    assert ("| 3.14.1 | 3.11" in page) is passed, "a version works where a run of it has no failure"


def test_a_gpu_that_the_page_does_not_list_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl", {"kind": "session", "machine": {**VERSIONS, "date": "2031-02-03", "gpu": "NVIDIA R9"}})
    with pytest.raises(ValueError, match="NVIDIA R9"):
        rows(tmp_path)


def test_every_architecture_has_a_gpu_on_the_page() -> None:
    assert set(BY_CAPABILITY) <= set(compatibility.GPUS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is compared with")
def test_sentences_are_those_of_a_machine_in_that_state() -> None:
    assert compatibility.backend_on(None) == devices.backends()["cuda"]
    refused = compatibility.backend_on("NVIDIA V100", (7, 0))
    assert not refused.available
    assert "NVIDIA V100 has compute capability (7, 0)" in refused.reason


def test_what_is_said_of_a_framework_is_not_what_the_process_has_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("megatron", "megatron.core", "padless.integrations.megatron")
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    before = compatibility.said_without("megatron"), compatibility.said_of_version("megatron", "0.1.0")
    assert all("needs Megatron-Core" in said for said in before)
    imported = {name: ModuleType(name) for name in names}
    for name in names:
        monkeypatch.setitem(sys.modules, name, imported[name])
    assert (compatibility.said_without("megatron"), compatibility.said_of_version("megatron", "0.1.0")) == before
    assert all(sys.modules[name] is imported[name] for name in names)
