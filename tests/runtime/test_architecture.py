"""The records of architectures: that they fit together, that others agree with them, and that nothing else names one.

What would convince a sceptic: a GPU of each record's capability is accepted, with the words of its record; a record that
is added, and nothing else, makes a GPU of that kind run the kernels that it names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest
import torch

import padless
from padless.cli.supported import supported_markdown
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.state.launch import SHARED_LIMIT
from padless.emulator.timing.rates import CHIPS
from padless.kernels.table import PLAIN_ROUTES, ROUTES, find_route
from padless.runtime import architecture, devices, driver, jit
from padless.runtime.architecture import ARCHITECTURES, BY_CAPABILITY, Architecture, with_own_kernels
from padless.runtime.choices import BackendName

SOURCES = Path(padless.__file__).parent
# The emulator stands alone, and verify says of each of its problems where it runs.
NAMED_ELSEWHERE = ("emulator", "verify")
RAN = ("sm_90a",)  # on a GPU, by a record in docs/measured


def test_records_fit_together() -> None:
    assert len({a.name for a in ARCHITECTURES}) == len(BY_CAPABILITY) == len(ARCHITECTURES)
    for a in ARCHITECTURES:
        assert a.name == "sm_{}{}a".format(*a.capability)
        own = next(found for found in with_own_kernels() if found.name == a.kernels)
        assert (a.generation, a.backend, a.chip, a.shared_bytes) == (
            own.generation, own.backend, own.chip, own.shared_bytes,
        )  # fmt: skip
        assert a is own or own.name in a.verified


def test_others_agree() -> None:
    """The table of kernels, the names of backends, and the emulator, which imports no record."""
    own = {a.name for a in with_own_kernels()}
    assert {route.arch for route in (*ROUTES, *PLAIN_ROUTES)} == own == {chip.arch for chip in CHIPS.values()}
    assert {"cuda", "reference", *(a.backend for a in ARCHITECTURES)} == set(get_args(BackendName))
    for a in with_own_kernels():
        assert CHIPS[a.chip].arch == a.name
        assert a.shared_bytes == SHARED_LIMIT
        assert devices.device_of(a.backend, torch.ones(1)) is emulated_driver(a.name)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU, whose capability a test sets."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended")
    monkeypatch.setattr(driver, "cuda_driver", lambda *_: None)
    monkeypatch.setattr(jit, "nvrtc_version", lambda: "13.0")
    monkeypatch.setattr(devices, "capability_of", lambda index: torch.cuda.get_device_capability(index))
    return monkeypatch


@pytest.mark.parametrize("found", ARCHITECTURES, ids=lambda a: a.name)
def test_info_says_how_kernels_are_verified(found: Architecture, pretended: pytest.MonkeyPatch) -> None:
    pretended.setattr(torch.cuda, "get_device_capability", lambda *_: found.capability)
    cuda = padless.backends()["cuda"]
    assert cuda.available
    assert cuda.reason == f"Pretended, kernels compiled with NVRTC 13.0, {found.verified}"


@pytest.mark.parametrize("found", [a for a in ARCHITECTURES if a.name not in RAN], ids=lambda a: a.name)
def test_what_never_ran_says_so(found: Architecture) -> None:
    of_others = "" if found.kernels == found.name else f" for {found.kernels}"
    assert found.verified == f"verified by emulation{of_others}, never run"


def test_one_more_record_is_all(pretended: pytest.MonkeyPatch) -> None:
    """A GPU that exists in no list here, and runs Blackwell's kernels."""
    like = next(a for a in ARCHITECTURES if a.kernels != a.name)
    more = Architecture(
        "sm_119a", "Other", (11, 9), like.kernels, None, like.shared_bytes, like.backend, like.chip, "so"
    )
    pretended.setattr(torch.cuda, "get_device_capability", lambda *_: (11, 9))
    assert not padless.backends()["cuda"].available
    assert devices.kernels_for(torch.device("cuda", 0)) is None
    pretended.setitem(architecture.BY_CAPABILITY, (11, 9), more)
    pretended.setitem(architecture._BY_NAME, "sm_119a", more)
    assert padless.backends()["cuda"].reason.endswith(", so")
    assert devices.kernels_for(torch.device("cuda", 0)) == like.kernels
    assert find_route("grouped_gemm", "sm_119a", "MXFP8", "MXFP8").arch == like.kernels


def test_the_page_names_all() -> None:
    assert all(a.name in supported_markdown() for a in ARCHITECTURES)


def literals(path: Path) -> set[str]:
    """Texts of a module that are values, docstrings and the like left out."""
    tree = ast.parse(path.read_text())
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said)
    return {node.value for node in found if isinstance(node.value, str)}


def test_nothing_else_names_an_architecture() -> None:
    named = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if path.relative_to(SOURCES).parts[0] not in NAMED_ELSEWHERE
        and any(re.search(r"sm_\d+[af]", text) for text in literals(path))
    }
    # Names of backends as types, and the help of the command.
    assert named == {"runtime/architecture.py", "runtime/choices.py", "cli/__init__.py"}
