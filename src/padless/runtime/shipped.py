"""Kernels compiled before they are installed: the package ``padless_cubins``, where it is there.

Its index names NVRTC's version and has every cubin's checksum and what is said of it: the log of one of NVRTC's, under
the same name as in the cache on disk; how it is launched, of one of Triton's. A name holds the hash of the sources, so a
cubin of other sources is never found. As a package, it is code that was installed, and trusted as such.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE = "padless_cubins"


@dataclass(frozen=True)
class Shipped:
    """An installed folder of cubins. compiler: NVRTC's version. kernels: by name, "sha256" and what is said of each."""

    folder: Path
    compiler: str
    kernels: dict[str, dict[str, Any]]

    def read(self, name: str) -> tuple[bytes, dict[str, Any]] | None:
        """Image of the kernel ``name`` and what is said of it; None where it is not there, with a warning where it is
        damaged.
        """
        if (said := self.kernels.get(name)) is None:
            return None
        path = self.folder / f"{name}.cubin"
        try:
            image = path.read_bytes()
        except OSError:
            image = b""
        if hashlib.sha256(image).hexdigest() != said["sha256"]:
            warnings.warn(f"{path} is damaged: the kernel is compiled; reinstall padless-cubins", RuntimeWarning, 2)
            return None
        return image, said


def shipped() -> Shipped | None:
    """The package that is installed; None where none is, or where PADLESS_CUBINS=0 asks for none."""
    return None if os.environ.get("PADLESS_CUBINS") == "0" else _installed()


@lru_cache(maxsize=1)
def _installed() -> Shipped | None:
    try:
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            return None
        folder = Path(found.origin).parent
        index = json.loads((folder / "index.json").read_text())
        return Shipped(folder, index["compiler"], index["kernels"])
    except (OSError, ValueError, KeyError) as error:
        warnings.warn(f"{PACKAGE} has no index that can be read ({error}): kernels are compiled", RuntimeWarning, 2)
        return None


def write(folder: Path, compiler: str, kernels: dict[str, tuple[bytes, dict[str, Any]]], version: str) -> None:
    """Writes the package and the project file of its wheel, for padless ``version``, or adds to the package that is
    there. kernels: by name, image and what is said of it. Raises ValueError where that one is of another NVRTC.
    """
    package = folder / PACKAGE
    index = package / "index.json"
    before: dict[str, Any] = json.loads(index.read_text()) if index.exists() else {"compiler": compiler, "kernels": {}}
    if before["compiler"] != compiler:
        raise ValueError(
            f"{index} is of NVRTC {before['compiler']} and this one is {compiler}; write to another folder"
        )
    said = before["kernels"]
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text('"""Kernels of padless, compiled ahead."""\n')
    for name, (image, rest) in kernels.items():
        (package / f"{name}.cubin").write_bytes(image)
        said[name] = {"sha256": hashlib.sha256(image).hexdigest()} | rest
    index.write_text(json.dumps({"compiler": compiler, "kernels": said}, indent=1, sort_keys=True) + "\n")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77.0.3"]\nbuild-backend = "setuptools.build_meta"\n\n'
        f'[project]\nname = "padless-cubins"\nversion = "{version}"\nlicense = "MIT"\nrequires-python = ">=3.11"\n'
        f'description = "Kernels of padless, compiled ahead"\ndependencies = ["padless=={version}"]\n'
        'readme = { text = "Kernels found before a compiler is asked.", content-type = "text/plain" }\n\n'
        f'[tool.setuptools]\npackages = ["{PACKAGE}"]\n\n'
        f'[tool.setuptools.package-data]\n{PACKAGE} = ["*.cubin", "index.json"]\n'
    )
