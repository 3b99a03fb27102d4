"""Contracts of pyproject.toml between rooms: kept as the tree is, broken by imports planted into a copy."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.ragged import ROOT

needs_linter = pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="checking imports needs import-linter, as make installs"
)

# Module, a line put at its end, and the contract that it breaks.
PLANTED = [
    ("formats.py", "from padless.layouts import to_blocked", "Imports lead downwards"),
    ("ops/checks.py", "def _late():\n    import padless.testing.judge", "Imports lead downwards"),
    ("reference/gemm.py", "from padless.quantization.rules import *", "The reference and the quantizers share no code"),
    ("quantization/rules.py", "import padless.reference.gemm", "The reference and the quantizers share no code"),
    ("kernels/config.py", "import padless.quantization.rules", "Imports lead downwards"),
    ("verify/lines.py", "import padless.bench.run", "Imports lead downwards"),
    ("newroom.py", "import torch", "Imports lead downwards"),
    ("kernels/sm90_mxfp8/host.py", "import padless.kernels.sm90_fp8.host", "A kernel knows no other kernel"),
    ("kernels/maps.py", "import padless.kernels.table", "A kernel knows no other kernel"),
    ("emulator/errors.py", "import padless.formats", "Imports lead downwards"),
    ("emulator/ptx/tokens.py", "import padless.emulator.run.machine", "Layers of the emulator"),
    ("quantization/rules.py", "import padless.emulator.units", "Definitions and kernels know nothing of the emulator"),
    ("moe/layer.py", "def _late():\n    import transformers", "Frameworks stay in integrations"),
    ("runtime/jit.py", "import rich.console", "The library prints nothing and draws nothing"),
]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command as run; run(['--no-logo', '--no-cache'])"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "COLUMNS": "200"},
    )


@needs_linter
def test_every_contract_is_kept():
    found = lint_imports(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    assert " 0 broken" in found.stdout


@needs_linter
@pytest.mark.parametrize(("module", "line", "contract"), PLANTED, ids=[name for name, *_ in PLANTED])
def test_a_planted_import_breaks_its_contract(tmp_path, module, line, contract):
    shutil.copytree(
        ROOT / "src" / "padless",
        tmp_path / "src" / "padless",
        ignore=shutil.ignore_patterns("__pycache__", "*.cu", "*.cuh"),
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "padless" / module).open("a") as file:
        file.write(f"\n{line}\n")
    found = lint_imports(tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert f"{contract} BROKEN" in found.stdout


def test_importing_padless_imports_no_framework():
    code = """
import sys, padless
late = {"triton", "matplotlib", "rich", "typer", "transformers", "accelerate"}
assert not (late | {"torch", "numpy", "cuda"}) & set(sys.modules)
padless.grouped_gemm
assert not late & set(sys.modules)
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert found.returncode == 0, found.stderr
