"""Python blocks of README and of every page: run as they would be pasted, the blocks of a page one after the other.

A block that cannot be run here stands under a comment that readers do not see, `<!-- not run: a checkpoint -->`, with
one of `REASONS`. It is parsed, and what it takes from padless must exist.
"""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.ragged import ROOT

REASONS = {
    "a checkpoint": "reads a published model",
    "an engine": "writes into a program that serves",
    "a GPU": "measures, or captures CUDA graphs",
    "several GPUs": "its processes are started by torchrun",
    "torchao": "a framework that the tests' environment does not have",
}
RECORDED = re.compile(r"\d{4}-\d{2}-\d{2}-")  # pages that a tool wrote on the day of a run
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if not RECORDED.match(path.name)]
BLOCK = re.compile(r"(?:^<!-- not run: (?P<reason>.*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
EMULATED = {"docs/emulator.md", "docs/timing.md"}


class Block(NamedTuple):
    line: int  # of its first line, in the page
    code: str
    reason: str | None


def blocks_of(text: str) -> list[Block]:
    found = BLOCK.finditer(text)
    return [Block(text.count("\n", 0, each.start("code")) + 1, each["code"], each["reason"]) for each in found]


BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page.read_text()) for page in PAGES}
BLOCKS = {page: blocks for page, blocks in BLOCKS.items() if blocks}
UNRUN = [(page, block) for page, blocks in BLOCKS.items() for block in blocks if block.reason is not None]


def run(page: str, blocks: list[Block]) -> dict[str, Any]:
    """The namespace after the page's blocks. Errors name lines of the page."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.reason is None:
            exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)
    return namespace


def test_every_block_is_found() -> None:
    fences = {page: (ROOT / page).read_text().count("```python") for page in BLOCKS}
    assert fences == {page: len(blocks) for page, blocks in BLOCKS.items()}
    assert sum(fences.values()) > 20
    assert all("```py\n" not in page.read_text() for page in PAGES)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.kernels] if page in EMULATED else []) for page in BLOCKS]
)
def test_a_page_runs_as_pasted(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    run(page, BLOCKS[page])


@pytest.mark.parametrize(("page", "block"), UNRUN, ids=[f"{page}:{block.line}" for page, block in UNRUN])
def test_a_block_that_is_not_run_names_what_exists(page: str, block: Block) -> None:
    assert block.reason in REASONS
    assert unknown(block.code) == []


def test_no_reason_is_left_over() -> None:
    assert {block.reason for _, block in UNRUN} == set(REASONS)


def unknown(code: str) -> list[str]:
    """Names of padless in the code, imported or by attribute, that do not exist."""
    tree = ast.parse(code)
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "padless":
            wrong += [f"{node.module}.{each.name}" for each in node.names if not exists(f"{node.module}.{each.name}")]
        elif isinstance(node, ast.Import):
            wrong += [each.name for each in node.names if each.name.startswith("padless.") and not exists(each.name)]
        elif isinstance(node, ast.Attribute) and (name := ast.unparse(node)).startswith("padless."):
            wrong += [name] if re.fullmatch(r"[\w.]+", name) and not exists(name) else []
    return wrong


def exists(name: str) -> bool:
    """Whether it is a module, or an attribute of one. Plug-ins are read: their frameworks may be absent."""
    module, _, attribute = name.rpartition(".")
    if name.startswith("padless.integrations."):
        return file_of(name) is not None or attribute in names_of(file_of(module))
    try:
        return hasattr(import_module(module), attribute) or bool(import_module(name))
    except ImportError:
        return False


def file_of(module: str) -> Path | None:
    path = ROOT / "src" / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def names_of(file: Path | None) -> set[str]:
    """Functions, classes and imported names of a file."""
    found: set[str] = set()
    for node in ast.parse(file.read_text()).body if file else []:
        found |= {each.asname or each.name for each in node.names} if isinstance(node, ast.ImportFrom) else set()
        found |= {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else set()
    return found


def test_what_is_wrong_is_seen() -> None:
    text = "```python\na = 1\n```\n\n<!-- not run: a GPU -->\n```python\nb = a\n```\n\n```python\nassert a == 2\n```\n"
    first, second, third = blocks_of(text)
    assert (first.line, second.line, third.line) == (2, 7, 11)
    assert (first.reason, second.reason, third.reason) == (None, "a GPU", None)
    assert run("page.md", [first, second])["a"] == 1
    with pytest.raises(AssertionError) as raised:
        run("page.md", [first, second, third])
    assert raised.traceback[-1].lineno == 10
    with pytest.raises(NameError, match="grouped_gemm"):
        run("page.md", [Block(1, "grouped_gemm(a, b, offs)", None)])
    code = """
import padless.no
from padless.moe import moe, nothing
from padless.integrations.torchao import PadlessWeight, Other
padless.moe.moe(x).sum()
padless.nn.Nothing
"""
    missing = ["padless.integrations.torchao.Other", "padless.moe.nothing", "padless.nn.Nothing", "padless.no"]
    assert sorted(unknown(code)) == missing
