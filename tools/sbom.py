"""Writes a bill of materials (CycloneDX 1.5, JSON): padless and all that it requires here, by version and licence.

    python tools/sbom.py dist/padless.cdx.json [--tag v0.1.0]

The versions are those of the environment that runs this. With --tag a tag that is not this version's is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import padless

ROOT = Path(__file__).parents[1]


def required() -> list[str]:
    """Names of all packages that pyproject.toml requires without an extra, and those require, that are installed."""
    found, waiting = set[str](), list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    while waiting:
        each = Requirement(waiting.pop())
        name = re.sub(r"[-_.]+", "-", each.name).lower()
        applies = each.marker is None or each.marker.evaluate({"extra": ""})
        if applies and name not in found and _installed(name):  # else for another platform
            found.add(name)
            waiting += metadata.requires(name) or ()
    return sorted(found)


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def component(name: str) -> dict[str, Any]:
    """A package as CycloneDX has it."""
    about: Any = metadata.metadata(name)
    licence = about.get("License-Expression") or about.get("License") or ""
    if not licence or "\n" in licence:  # the text itself: its kind is among the classifiers
        kinds = [each.rpartition(":: ")[2] for each in about.get_all("Classifier") or () if each.startswith("License")]
        licence = ", ".join(kinds) or "see the package"
    version = metadata.version(name)
    found = {"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"}
    return found | {"licenses": [{"license": {"name": licence}}]}


def materials() -> dict[str, Any]:
    """The bill of materials of this environment."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "library", "name": "padless", "version": padless.__version__}},
        "components": [component(name) for name in required()],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tag")
    chosen = parser.parse_args(arguments)
    if chosen.tag not in (None, f"v{padless.__version__}"):
        sys.exit(f"the tag is {chosen.tag}; this is v{padless.__version__}")
    found = materials()
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"sbom: {len(found['components'])} packages in {chosen.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
