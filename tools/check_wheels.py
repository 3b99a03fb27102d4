"""Builds sdist and wheel into dist/, lets twine check them and uses each as its user does: README's example, a kernel in
the emulator and `padless info`.

    python tools/check_wheels.py [--index]

Every artefact gets a new virtual environment of its own, where pip installs it with its dependencies, the sdist after
building it, and runs outside of the tree. Nothing is downloaded: dependencies are wheels without contents that lead to
what the environment that runs this has. With --index they come from the index, in the versions of constraints.txt. Where
there is a GPU the wheel runs `padless verify` as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"

# After README's example: a few of its rows by a kernel, whose sources the artefact must carry. Sums of 512 products of
# standard deviation 23; tensor cores round them otherwise than the reference.
KERNEL = """
few = padless.quantize(tokens[:9], padless.FP8_BLOCK, kind="activation")
ends = padless.group_offsets(torch.tensor([4, 0, 3, 2]))
found, expected = (padless.grouped_gemm(few, b, ends, backend=backend) for backend in ("emulator", "reference"))
torch.testing.assert_close(found, expected, rtol=0.02, atol=0.05)
"""


def run(*command: str | Path, cwd: Path, timeout: float = 300, **environment: str) -> str:
    """The text that a command prints. RuntimeError with all that it said where it fails."""
    unset = ("PYTHONPATH", "PADLESS_CUBINS")
    given = {name: value for name, value in os.environ.items() if name not in unset} | environment
    done = subprocess.run(command, cwd=cwd, env=given, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def copy_of_the_tree(folder: Path) -> Path:
    """The files that git knows or would add, copied, so that nothing else gets into an artefact."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def build(kind: str, tree: Path, out: Path) -> Path:
    """The "wheel" or "sdist" of a tree, in the folder out."""
    return out / run(sys.executable, "-c", BUILD, f"build_{kind}", out, cwd=tree).splitlines()[-1]


def wheel_of(sdist: Path, folder: Path) -> Path:
    """The wheel that an sdist builds, in a folder of its own."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


def stand_in(name: str, folder: Path) -> None:
    """Writes a wheel of the package's version that is here, without contents: installed, it leads here."""
    found = metadata.distribution(name)
    stem = f"{name.replace('-', '_')}-{found.version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {found.version}\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: padless\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": found.read_text("entry_points.txt") or "",  # setuptools finds its commands by them
        "RECORD": "",
    }
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{stem}.pth", sysconfig.get_path("purelib") + "\n")
        for file, text in about.items():
            wheel.writestr(f"{stem}.dist-info/{file}", text)


def stand_ins(folder: Path) -> dict[str, str]:
    """Stand-ins for what padless, its command and its build require. Returns the variables that make pip take packages
    from the folder alone.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needs = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for need in (*needs, *project["project"]["optional-dependencies"]["cli"]):
        stand_in(Requirement(need).name, folder)
    return {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def use(artefact: Path, folder: Path, **index: str) -> list[dict[str, Any]]:
    """Installs a wheel or an sdist into a new environment in folder, and uses it. index: variables that tell pip where
    packages come from. Returns the GPUs that it sees. RuntimeError where something fails.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*install, f"{artefact}[cli]", cwd=folder, timeout=1800, **index)
    where = Path(run(python, "-c", "import padless; print(padless.__file__)", cwd=folder).strip())
    if not where.is_relative_to(folder):
        raise RuntimeError(f"{artefact.name} was installed, and {where} is imported")
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    said = run(python, "-c", example + "\nassert not out.isnan().any()", cwd=folder)
    if not said.startswith("torch.Size([1000, 256])"):
        raise RuntimeError(f"README's example prints {said!r}")
    run(python, "-c", example + KERNEL, cwd=folder)
    info = json.loads(run(folder / "bin" / "padless", "info", "--json", cwd=folder))
    if not info["backends"]["emulator"]["available"]:
        raise RuntimeError(f"padless info: {info['backends']}")
    return list(info["devices"])


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", action="store_true")
    index = parser.parse_args(arguments).index
    dist = ROOT / "dist"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        dist.mkdir(exist_ok=True)
        tree = copy_of_the_tree(folder / "tree")
        wheel, sdist = build("wheel", tree, dist), build("sdist", tree, dist)
        again = wheel_of(sdist, folder / "unpacked")
        names = [sorted(zipfile.ZipFile(each).namelist()) for each in (wheel, again)]
        if names[0] != names[1]:
            raise RuntimeError(f"the sdist's wheel differs in {sorted(set(names[0]) ^ set(names[1]))}")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=folder)
        taken = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")} if index else stand_ins(folder / "index")
        gpus = use(wheel, folder / "wheel", **taken)
        use(sdist, folder / "sdist", **taken)
        if gpus:
            run(folder / "wheel" / "bin" / "padless", "verify", "--out", folder / "record", cwd=folder, timeout=1800)
    for artefact in (wheel, sdist):
        print(f"wheels: {artefact.name} ({artefact.stat().st_size / 1e6:.1f} MB) installs and runs on its own")
    print("wheels: padless verify passed" if gpus else "wheels: no GPU here, padless verify was not run")


if __name__ == "__main__":
    main(sys.argv[1:])
