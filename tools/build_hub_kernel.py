"""Builds the folder of a kernel for the Hugging Face hub, in the universal form, which has no compiled parts.

    python tools/build_hub_kernel.py OUT [--backend cuda]      OUT/build/torch-BACKEND
    kernels.get_local_kernel(Path("OUT"))

The hub's loader gives a kernel a module name of its own, and several versions may be loaded together. So in the copy no
module is imported by the name padless, and operators of torch are registered under the hash of all files.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import padless

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "padless"
PACKAGE = SOURCE.name
# What a kernel has no use for. The emulator's absence makes its backends unavailable, with the reason.
LEFT_OUT = {"__main__", "autograd", "bench", "cli", "demo", "distributed", "emulator", "nn", "testing", "verify"}
INTEGRATIONS = {"__init__.py", "fp8_products.py", "hub.py", "operators.py"}
MAY_BE_ABSENT = {"emulator"}
PYTHON = (3, 11)

INIT = '''"""Block-scaled grouped GEMM and Mixture-of-Experts layer without padding: padless {version}."""

import sys

if sys.version_info < {python}:
    raise ImportError(f"padless needs Python {oldest} or newer; this is {{sys.version.split()[0]}}")

from .{package}.integrations.hub import *  # noqa: E402, F403
from .{package}.integrations.hub import __all__  # noqa: E402, F401
'''


def files() -> Iterator[Path]:
    """The files of the package that belong to the kernel, relative to it."""
    for path in sorted(SOURCE.rglob("*")):
        inside = path.relative_to(SOURCE)
        if path.suffix not in (".py", ".cu", ".cuh") or inside.parts[0].removesuffix(".py") in LEFT_OUT:
            continue
        if inside.parts[0] != "integrations" or (len(inside.parts) == 2 and inside.name in INTEGRATIONS):
            yield inside


def relative(text: str, inside: Path) -> str:
    """A module's source with imports of the package made relative. ValueError for one of what is left out."""
    lines = text.split("\n")
    up = "." * len(inside.parts)  # a module of the package itself: one dot
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == PACKAGE:
            _, _, rest = (node.module or "").partition(".")
            for room in [rest.split(".")[0]] if rest else [alias.name for alias in node.names]:
                absent = room in LEFT_OUT - MAY_BE_ABSENT and not _for_types(text, node)
                if absent:
                    raise ValueError(f"{inside}:{node.lineno} imports {PACKAGE}.{room}, which the kernel leaves out")
            start, old = node.lineno - 1, f"from {node.module} import"
            lines[start] = _replaced(lines[start], old, f"from {up}{rest} import", inside)
        elif isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE for alias in node.names):
            start = node.lineno - 1
            lines[start] = _replaced(lines[start], f"import {PACKAGE}", f"from {up}. import {PACKAGE}", inside)
    return "\n".join(lines)


def _replaced(line: str, old: str, new: str, inside: Path) -> str:
    """The line of an import, whose words begin it; a whole module is imported under its own name alone."""
    if line.strip().startswith(f"{old} ") or line.partition("#")[0].strip() == old:
        return line.replace(old, new, 1)
    raise ValueError(f"{inside}: cannot make this import relative: {line.strip()}")


def _for_types(text: str, node: ast.ImportFrom) -> bool:
    """Whether an import stands in a block ``if TYPE_CHECKING``."""
    blocks = (each for each in ast.walk(ast.parse(text)) if isinstance(each, ast.If))
    return any(
        isinstance(block.test, ast.Name)
        and block.test.id == "TYPE_CHECKING"
        and block.lineno <= node.lineno <= (block.end_lineno or 0)
        for block in blocks
    )


def build(out: Path, backend: str = "cuda") -> Path:
    """Writes the kernel and returns its variant's folder. An older one in its place is replaced."""
    texts = {inside: (SOURCE / inside).read_text() for inside in files()}
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, text in texts.items()).encode()).hexdigest()[:12]
    name = f"{PACKAGE}_{digest}"
    variant = out / "build" / f"torch-{backend}"
    if variant.exists():
        shutil.rmtree(variant)
    for inside, source in texts.items():
        text = source
        if inside.suffix == ".py":
            text = relative(text, inside)
            text = re.sub(rf"\btorch\.ops\.{PACKAGE}\b", f"torch.ops.{name}", text)
            text = re.sub(rf'^NAMESPACE = "{PACKAGE}"$', f'NAMESPACE = "{name}"', text, flags=re.MULTILINE)
        target = variant / PACKAGE / inside
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    oldest = ".".join(map(str, PYTHON))
    init = INIT.format(version=padless.__version__, python=PYTHON, oldest=oldest, package=PACKAGE)
    (variant / "__init__.py").write_text(init)
    about = {"id": f"_{name}", "name": PACKAGE, "version": 1, "license": "MIT", "python-depends": []}
    about["backend"] = {"type": backend}
    (variant / "metadata.json").write_text(json.dumps(about, indent=1) + "\n")
    return variant


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    chosen = parser.parse_args(arguments)
    variant = build(chosen.out, chosen.backend)
    count = sum(path.is_file() for path in variant.rglob("*"))
    print(f"{count} files in {variant}")


if __name__ == "__main__":
    main(sys.argv[1:])
