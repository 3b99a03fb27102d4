"""The emulator by itself: its own command, its page, its action. A sceptic would ask whether torch is loaded behind the
scenes (it is looked for in the process that ran), and whether the page shows what is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import check_wheels
from padless.emulator import Emulator
from padless.emulator.annotation import annotation, escaped
from padless.emulator.order.reports import Report
from support.emulator_cuda import compile_ptx
from support.ragged import ROOT
from support.recipes import copied

EXAMPLE = ROOT / "docs" / "ptx_emulate"
PAGE = (ROOT / "docs" / "ptx_emulate.md").read_text()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files and the PTX of both kernels, compiled there, as its paths say."""
    monkeypatch.chdir(tmp_path)
    source = (EXAMPLE / "sums.cu").read_text()
    (tmp_path / "sums.cu").write_text(source)
    (tmp_path / "sums.toml").write_text((EXAMPLE / "sums.toml").read_text())
    for name, text in (("sums", source), ("mended", "#define MENDED\n#line 1\n" + source)):
        (tmp_path / f"{name}.ptx").write_bytes(compile_ptx(text, "sums.cu", "90a").rstrip(b"\0"))
    return tmp_path


def alone(folder: Path, *arguments: str, after: str = "") -> subprocess.CompletedProcess[str]:
    """`ptx-emulate` in a process of its own; then, whether torch was loaded there, as the last line."""
    code = (
        "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        f"from padless.emulator.__main__ import main\nsys.argv = {['ptx-emulate', *arguments]!r}\n{after}main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False, env=environment
    )


def test_the_page_shows_what_is_printed_and_torch_is_not_loaded(folder: Path) -> None:
    done = alone(folder, "--launch", "sums.toml")
    assert done.returncode == 1, done.stderr
    *lines, torch = done.stdout.splitlines()
    assert torch == "False"
    shown = re.search(r"```\n(race: .*?)```", PAGE, re.DOTALL)
    assert shown
    printed = "\n".join(lines).replace(f"{folder}/", "")
    assert printed[printed.index("race: ") :].startswith(shown[1])
    assert re.search(r"^seed 0: 9 reports,", printed, re.MULTILINE)
    assert "nine reports" in PAGE
    assert (EXAMPLE / "sums.cu").read_text() in PAGE.replace("```cuda\n", "")
    assert (EXAMPLE / "sums.toml").read_text() in PAGE


def test_the_mended_kernel_is_silent_on_every_schedule_and_right(folder: Path) -> None:
    done = alone(folder, "mended.ptx", "--launch", "sums.toml", "--seeds", "5")
    assert (done.returncode, done.stdout.count(": 0 reports,")) == (0, 5), done.stdout
    found = re.findall(r"sums = \[(.*?)\]", done.stdout, re.DOTALL)
    x = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    for text in found:
        assert np.abs(np.fromstring(text, sep=" ") - x.astype(float).sum(1)).max() < 1e-4
    assert len(found) == 5


def test_time_mutants_and_refusals_load_no_torch(folder: Path) -> None:
    timed = alone(folder, "mended.ptx", "--launch", "sums.toml", "--time")
    assert timed.returncode == 0
    assert "the whole launch: about" in timed.stdout
    mutants = alone(folder, "mended.ptx", "--launch", "sums.toml", "--mutate", "0")
    (folder / "empty.toml").write_text("grid = 1\n")
    refused = alone(folder, "--launch", "empty.toml")
    assert (refused.returncode, refused.stderr) == (
        2, 'ptx-emulate: a PTX file is needed, before --launch or as ptx = "kernel.ptx" in empty.toml\n')  # fmt: skip
    for done in (timed, mutants, refused, alone(folder, "--help")):
        assert done.stdout.splitlines()[-1] == "False"


def test_torch_is_loaded_when_a_tensor_is_given(folder: Path) -> None:
    import torch

    data = torch.randn(1024)
    emulator = Emulator((folder / "mended.ptx").read_text())
    out = np.full(4, np.nan, np.float32)
    arguments = [emulator.memory.register(data), emulator.memory.register(out)]
    emulator.launch("sums", 4, 256, arguments).raise_on_reports()
    assert np.abs(out - data.double().view(4, 256).sum(1).numpy()).max() < 1e-4


def test_without_the_commands_packages_it_says_so(folder: Path) -> None:
    done = alone(folder, "--help", after="sys.modules['typer'] = None\n")
    assert (done.returncode, done.stderr) == (
        2, "ptx-emulate: the command needs typer and rich; pip install 'padless[cli]'\n")  # fmt: skip


# ---- annotations and the action
def test_a_report_becomes_an_annotation_of_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own,file.cu").write_text("x")
    at = (0, 0, 0), 1, 2, 3

    def made(kind: str, source: str) -> str:
        return annotation(Report(kind, "50% of\nit", 40, source, *at), "k.ptx")

    assert made("race", "own,file.cu:7").startswith("::error file=own%2Cfile.cu,line=7,title=race::race: own,file.cu:7")
    assert "50%25 of%0Ait" in made("race", "own,file.cu:7")
    inlined = made("tolerated", "/usr/include/header.cuh:3 (inlined at own,file.cu:9)")
    assert inlined.startswith("::warning file=own%2Cfile.cu,line=9,title=tolerated::")
    assert made("race", "").startswith("::error file=k.ptx,line=40,")
    assert escaped("a:b", ":") == "a%3Ab"


ACTION = ".github/actions/ptx-emulate"
DEFINITION = yaml.safe_load((ROOT / ACTION / "action.yml").read_text())
INSTALL, EMULATE = DEFINITION["runs"]["steps"]


def as_a_runner(step: dict[str, Any], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
    return subprocess.run(shell, cwd=folder, capture_output=True, text=True, check=False, env=environment)


def action(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The action's second step; `ptx-emulate` is that of this tree."""
    assert DEFINITION["runs"]["using"] == "composite"
    names = {value: name for name, text in EMULATE["env"].items() for value in re.findall(r"inputs\.(\w+)", text)}
    assert set(names) == set(DEFINITION["inputs"])
    command = folder / "bin" / "ptx-emulate"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} -m padless.emulator "$@"\n')
    command.chmod(0o755)
    given = {names[name]: inputs.get(name, "") for name in names}
    return as_a_runner(EMULATE, folder, {**os.environ, **given, "PATH": f"{command.parent}:{os.environ['PATH']}"})


def test_the_action_installs_the_command(tmp_path: Path) -> None:
    """Its first step, in a new environment, from a folder that stands for the index."""
    tree, commands = copied(tmp_path / "tree"), tmp_path / "environment" / "bin"
    venv.create(commands.parent, with_pip=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= check_wheels.stand_ins(tmp_path / "index")
    environment |= {"PATH": f"{commands}:{os.environ['PATH']}", "GITHUB_ACTION_PATH": str(tree / ACTION)}
    done = as_a_runner(INSTALL, tmp_path, environment)
    assert done.returncode == 0, done.stderr
    found = as_a_runner({"run": "command -v ptx-emulate && ptx-emulate --help"}, tmp_path, environment)
    assert found.stdout.startswith(f"{commands}/ptx-emulate\n"), found.stderr
    assert "--launch" in found.stdout


def test_the_action_annotates_the_line_of_a_launch_files_kernel(folder: Path) -> None:
    done = action(folder, launch="sums.toml", options="--seeds 2")
    assert done.returncode == 1, done.stderr
    found = re.findall(r"^::error file=(.*?),line=(\d+),title=race::", done.stdout, re.MULTILINE)
    assert ("sums.cu", "8") in found
    (folder / "sums.ptx").write_bytes((folder / "mended.ptx").read_bytes())
    done = action(folder, launch="sums.toml")
    assert (done.returncode, "::" in done.stdout) == (0, False)


def test_the_action_annotates_the_line_of_a_program(tmp_path: Path) -> None:
    for name in ("tma_program.py", "tma_copy.py", "tma_copy.cu", "lesson.py"):
        (tmp_path / name).write_text((ROOT / "docs/learn" / name).read_text())
    (tmp_path / "broken.py").write_text(
        "import runpy, sys\nsys.argv = ['tma_program.py', '--break', 'no-proxy-fence']\n"
        "runpy.run_path('tma_program.py', run_name='__main__')\n"
    )
    done = action(tmp_path, program="broken.py", options="--seed 1")
    assert done.returncode == 1, done.stderr
    assert re.search(r"^::error file=tma_copy.cu,line=55,title=missing-proxy-fence::", done.stderr, re.MULTILINE)
