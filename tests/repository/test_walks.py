"""Walks of CONTRIBUTING.md, as far as they go by themselves: what they name exists, and steps do what is said."""

from __future__ import annotations

import inspect
import re
import subprocess

import numpy as np
import pytest

from padless.emulator.errors import UnsupportedInstruction
from padless.emulator.prepare import registry
from padless.kernels import epilogue_launch
from support.emulator_kernels import kernel, run
from support.ragged import ROOT

WALKS = (ROOT / "CONTRIBUTING.md").read_text().split("\n## To add ")[1:]
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
TRACKED = subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
OF_A_FILE = re.compile(r"[\w./*-]*(?:/|\w\.(?:py|cuh?|md|yml|json|toml))[\w./*-]*")
OF_A_NAME = re.compile(r"[A-Za-z_]\w*_\w*|[A-Z]\w*[a-z]\w*|[A-Z]{4,}")  # with an underscore, or in capitals
NEW = {"vavrg4"}  # what a walk adds


def is_there(path: str) -> bool:
    """Whether a path of a walk, which may begin anywhere and have stars, is that of a file or folder of the tree."""
    pattern = re.escape(path.rstrip("/")).replace(r"\*", "[^/]*")
    return any(re.search(rf"(?:^|/){pattern}(?:/|$)", name) for name in TRACKED)


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.partition("\n")[0])
def test_what_a_walk_names_exists(walk: str) -> None:
    if not TRACKED:
        pytest.skip("no git")
    spans = {span for span in re.findall(r"`([^`\n]+)`", walk) if "<" not in span} | set(
        re.findall(r"\[(tests/[\w/.*]+)", walk)
    )
    paths = {span for span in spans if OF_A_FILE.fullmatch(span)}
    assert [path for path in sorted(paths) if not is_there(path)] == []
    names = {span for span in spans - paths - NEW if OF_A_NAME.fullmatch(span)}
    assert len(paths) + len(names) > 5
    is_code = re.compile(r"\.(py|cuh?)$").search
    sources = "\n".join((ROOT / name).read_text() for name in TRACKED if is_code(name) and (ROOT / name).is_file())
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", sources)] == []


def test_a_path_that_is_not_there_is_seen() -> None:
    assert is_there("kernels/table.py")
    assert is_there("sm100_grouped/quant_*.cuh")
    assert not is_there("kernels/tables.py")
    assert not is_there("able.py")


def test_outputs_have_one_layout_on_both_sides() -> None:
    """struct QuantOutputs as the header declares it and as the host packs it."""
    header = (ROOT / "src/padless/kernels/device/quant_outputs.cuh").read_text()
    body = re.sub(r"//[^\n]*", "", header.partition("struct QuantOutputs {")[2].partition("};")[0])
    fields = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        kind = "Q" if "*" in declaration else {"TensorMap": "", "long": "q", "int": "i"}[declaration.split()[0]]
        fields.append(kind * (declaration.count(",") + 1))
    packed = re.search(r'struct\.pack\("<(\w+)"', inspect.getsource(epilogue_launch.outputs_bytes))
    assert packed is not None
    host = re.sub(r"(\d+)(\w)", lambda found: int(found[1]) * found[2], packed[1])
    assert "".join(fields) == host
    assert len(host) == len("QQQQQQQqqiii"), "the walk's example says what is there"


def mean_of_bytes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    x, y = (v.astype(np.uint32).view(np.uint8).astype(np.uint16) for v in (a, b))
    return ((x + y + 1) >> 1).astype(np.uint8).view(np.uint32)


def test_an_instruction_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """vavrg4: (a + b + 1) >> 1 of each unsigned byte (PTX ISA, "vavrg4"); before it has a row it is refused by name."""
    text = kernel("vavrg4.u32 %d, %a, %b;", ["u32", "u32"], "u32")
    a, b = np.random.default_rng(5).integers(0, 2**32, (2, 32), np.uint32)
    with pytest.raises(UnsupportedInstruction, match=r"`vavrg4\.u32 .*` is not supported \(unknown instruction\)"):
        run(text, [a, b], np.uint32)
    wanted = [
        sum((((x >> s & 255) + (y >> s & 255) + 1) >> 1) << s for s in (0, 8, 16, 24))
        for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    monkeypatch.setitem(registry.HELPERS, "mean_of_bytes", mean_of_bytes)
    registry.expressions({"vavrg4": ("u32 u32 u32", "mean_of_bytes({0}, {1})")})
    try:
        assert run(text, [a, b], np.uint32).tolist() == wanted
    finally:
        del registry.EMITTERS["vavrg4"]
