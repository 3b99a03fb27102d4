"""Checks of the tree as a whole: what the README promises, what a wheel carries, what a file may not say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import padless
from padless.runtime import jit
from support.ragged import ROOT

README = ROOT / "README.md"
MEASURED = re.compile(r"<!-- measured:begin -->\n(.*?)<!-- measured:end -->", re.DOTALL)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        return [p for p in (ROOT / "src").rglob("*") if p.is_file()] + sorted((ROOT / "tests").glob("*.py"))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


# --- what a file may not say -----------------------------------------------------------------------------

# The product speaks of itself only. Each pattern is written so that it does not match itself.
FOREIGN = re.compile(
    r"/wor[k]/|/far[m]/|\.librar[y]/|before-sto[p]|steerin[g]|developer sessio[n]|/opt/whee[l]s"
    r"|\bissue[s]? #?\d|shared/(?:fact|desig|seed|hook)|\bTOD[O]\b|\bFIXM[E]\b"
)


def foreign_words(text: str) -> list[str]:
    return [line for line in text.splitlines() if FOREIGN.search(line)]


def test_files_speak_of_the_product_only():
    found = {}
    for path in tracked_files():
        if path.suffix not in (".png", ".gz", ".zst"):
            lines = foreign_words(path.read_text())
            if lines:
                found[str(path.relative_to(ROOT))] = lines[:3]
    assert not found


@pytest.mark.parametrize(
    "text", ["see /wor" + "k/x", "as iss" + "ue #3 asks", "# TO" + "DO later", "shared/" + "facts"]
)
def test_foreign_words_are_seen(text):
    assert foreign_words(f"fine\n{text}\nfine") == [text]


# --- the README ------------------------------------------------------------------------------------------


def test_readme_shows_the_two_commands_and_ci_runs_the_test_one():
    blocks = re.findall(r"```\n(.*?)```", README.read_text(), re.DOTALL)
    commands = "".join(blocks)
    for command in ("make demo", "make test"):
        assert command in commands
        assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_readme_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README.read_text())
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert not missing


def test_readme_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    found = subprocess.run(
        [sys.executable, "-c", code + "\nassert not out.isnan().any()"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("torch.Size([1000, 256])")


def names_its_records(text: str, root: Path) -> bool:
    """Whether a text names files under docs/measured, and all of them exist."""
    files = re.findall(r"docs/measured/[\w./-]+", text)
    return bool(files) and all((root / file).is_file() for file in files)


def unrecorded(readme: str, root: Path) -> list[str]:
    """Paragraphs, rows and items of the measured part with a figure in them whose record is not named: by themselves,
    by the heading of their table, or by the paragraph right before their table or list.
    """
    (section,) = MEASURED.findall(readme)
    found = []
    captioned = False
    for block in re.split(r"\n\s*\n", section.strip()):
        is_table, is_list = block.startswith("|"), block.startswith("- ")
        if is_table:
            heading, _, *parts = block.splitlines()
            captioned = captioned or names_its_records(heading, root)
        else:
            parts = re.split(r"\n(?=- )", block) if is_list else [block]
        if not ((is_table or is_list) and captioned):
            found += [part for part in parts if re.search(r"\d", part) and not names_its_records(part, root)]
        captioned = not (is_table or is_list) and names_its_records(block, root)
    return found


# A figure of speed, such as "1.2x faster", "900 TF", "34 us" or "3.1 TB/s".
SPEED = re.compile(r"\d\s*(?:TF|TFLOP|us|µs|[GT]B/s)\b|\d\s*[x×] (?:faster|slower)|\d ?% faster")


def test_every_measured_figure_names_its_record():
    readme = README.read_text()
    assert not unrecorded(readme, ROOT)
    assert not SPEED.search(MEASURED.sub("", readme)), "figures of speed belong into the measured table"


def test_an_unrecorded_figure_is_seen(tmp_path):
    (tmp_path / "docs" / "measured").mkdir(parents=True)
    (tmp_path / "docs" / "measured" / "paper.json").write_text("{}")
    kept, absent, bare = (f"| a | 900 | {name} |" for name in ("docs/measured/paper.json", "docs/measured/no.json", ""))
    rows = f"| case | TF | record |\n|---|---|---|\n{kept}\n{absent}\n{bare}"
    table = "| case | TF |\n|---|---|\n| b | 800 |"
    headed = "| case | TF, docs/measured/paper.json |\n|---|---|\n| c | 700 |"
    caption, wrong = "Of 12 calls (docs/measured/paper.json).", "Of 13 calls (docs/measured/no.json)."
    blocks = [
        *(rows, caption, table, table, headed, wrong, table),  # a caption is that of the next table only
        *(caption, "- 14 calls\n- 15 calls", "- 16 calls\n- no figure", "no figure", "17 calls"),
    ]
    readme = "<!-- measured:begin -->\n" + "\n\n".join(blocks) + "\n\n<!-- measured:end -->"
    unnamed = "| b | 800 |"
    assert unrecorded(readme, tmp_path) == [absent, bare, unnamed, wrong, unnamed, "- 16 calls", "17 calls"]
    assert SPEED.search("about 1200 TF")
    assert SPEED.search("1.3x faster than")


# --- versions --------------------------------------------------------------------------------------------


def test_one_version_everywhere():
    version = project()["version"]
    assert padless.__version__ == version
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == version


def test_development_pins_agree_with_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = project()["optional-dependencies"]
    pins = dict(requirement.split("==") for requirement in extras["dev"] + extras["docs"])
    assert pins.items() <= constraints.items()
    assert "torch" in pins, "an unpinned torch pulls gigabytes"


def test_pre_commit_runs_what_make_lint_runs():
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    tool = r"bin/|\$\(BIN\)/"
    linted = re.findall(rf"(?:{tool})([a-z-]+(?: check| format)?)", recipe)
    hooks = re.findall(
        rf"entry: \.venv/(?:{tool})([a-z-]+(?: check| format)?)", (ROOT / ".pre-commit-config.yaml").read_text()
    )
    assert len(linted) >= 4
    assert sorted(hooks) == sorted(linted)


def test_public_names_are_what_they_say():
    """Importing every module first must not put a module in the place of a function of the same name."""
    modules = sorted(path.stem for path in (ROOT / "src" / "padless").glob("*.py") if path.stem != "__main__")
    code = f"""
import importlib, types, padless
for name in {modules!r}:
    importlib.import_module("padless." + name if name != "__init__" else "padless")
wrong = [name for name in padless.__all__ if isinstance(getattr(padless, name), types.ModuleType)]
assert not wrong, wrong
"""
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert found.returncode == 0, found.stderr


# --- dependencies ----------------------------------------------------------------------------------------


def test_every_dependency_and_extra_has_its_reason():
    page = (ROOT / "docs" / "install.md").read_text()
    rows = [re.findall(r"`([\w-]+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    names = [re.match(r"[\w-]+", each)[0] for each in project()["dependencies"]]
    assert [name for row in rows for name in row] == names + list(project()["optional-dependencies"])


# --- the wheel -------------------------------------------------------------------------------------------


def setuptools_is_new_enough() -> bool:
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """A wheel of the tracked files, built offline in a folder of its own."""
    folder = tmp_path_factory.mktemp("tree")
    for path in tracked_files():
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    code = "import setuptools.build_meta as b; print(b.build_wheel('dist'))"
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=250, check=False
    )
    assert built.returncode == 0, built.stderr
    return zipfile.ZipFile(folder / "dist" / built.stdout.splitlines()[-1])


@pytest.mark.skipif(not setuptools_is_new_enough(), reason="building a wheel needs setuptools 77, as make installs")
def test_a_wheel_carries_the_kernels_and_the_command(wheel):
    names = set(wheel.namelist())
    tracked = {str(path.relative_to(ROOT / "src")) for path in tracked_files() if ROOT / "src" in path.parents}
    assert tracked <= names, tracked - names
    device_sources = {f"padless/kernels/{name}" for name in jit.sources()}
    assert "padless/kernels/sm90_fp8/sm90_fp8_grouped_gemm.cu" in device_sources
    assert {name for name in names if name.endswith((".cu", ".cuh"))} == device_sources & tracked
    assert {"padless/py.typed", "padless/cli/batch_invariance.md"} <= set(names)
    assert not [name for name in names if name.startswith(("tests", "docs", "tools"))]
    info = f"padless-{padless.__version__}.dist-info"
    entries = wheel.read(f"{info}/entry_points.txt").decode()
    assert "ptx-emulate = padless.emulator.__main__:main" in entries
    assert "padless = padless.__main__:main" in entries
    assert "MIT" in wheel.read(f"{info}/licenses/LICENSE").decode()
