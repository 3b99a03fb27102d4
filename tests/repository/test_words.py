"""Words that have left (docs/glossary.md): no identifier and no file has them where they meant what has another name."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.ragged import ROOT

HOPPER = r"src/padless/kernels/(sm90_(fp8|mxfp8|bf16|bf16_plain|bf16_wgrad|fp8_wgrad)|device/sm90)/"
SCHEDULE = r"src/padless/kernels/((schedule|cost_model)\.py|device/(scheduler|tile_queue)\.cuh|sm90_fp8/)"
# A word within an identifier or a file's path; where it has left; what stands there instead.
LEFT = {
    "quantis": (re.compile("quantis", re.I), re.compile("."), "quantiz"),
    "unit": (re.compile(r"(?<![a-z])units?(?![a-z])", re.I), re.compile(HOPPER), "m64"),
    "half": (re.compile(r"(?<![a-z])halves(?![a-z])|half_of", re.I), re.compile(SCHEDULE), "half tile"),
    "piece": (re.compile(r"(?<![a-z])pieces?(?![a-z])", re.I), re.compile(SCHEDULE), "half tile"),
    # A fence orders memory; what the emulator calls fenced is.
    "fence": (re.compile("fenced", re.I), re.compile(r"(?!src/padless/emulator/|tests/repository/)"), "guarded"),
    "copy engine": (re.compile("copy_?engine", re.I), re.compile("."), "TMA"),
}
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)
CODE = {".py", ".cu", ".cuh", ".cpp", ".h"}


def identifiers(path: str, text: str) -> Iterator[str]:
    """Names in a source, not those in its comments and strings."""
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.string
    else:
        yield from re.findall(r"[A-Za-z_]\w*", NOT_CODE.sub(" ", text))


def wrong(path: str, text: str) -> list[str]:
    """What has left and is there, each with the word that it has to be."""
    here = [(word, left, new) for word, (left, where, new) in LEFT.items() if where.match(path)]
    is_code = Path(path).suffix in CODE and any(left.search(text) for _, left, _ in here)  # most files need no tokens
    names = {path, *(identifiers(path, text) if is_code else ())}
    return sorted(f"{path}: {name} ({word}: {new})" for word, left, new in here for name in names if left.search(name))


def test_words_that_left_are_in_no_name() -> None:
    listed = subprocess.run(["git", "ls-files", "src", "tests", "tools", "docs", "examples"], cwd=ROOT, text=True,
                            capture_output=True, check=False).stdout.splitlines()  # fmt: skip
    files = [path for path in listed if (ROOT / path).is_file()] or pytest.skip("no git")
    found = [w for path in files for w in wrong(path, (ROOT / path).read_text() if Path(path).suffix in CODE else "")]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/padless/kernels/device/sm90/x.cuh", "constexpr int UNIT_STEP = 2;"),
        ("src/padless/kernels/sm90_fp8/x.cu", "int f(int first_unit) { return unitsOf; }"),
        ("src/padless/kernels/schedule.py", "has_halves = 1"),
        ("src/padless/kernels/device/scheduler.cuh", "int pieces;"),
        ("tests/x.py", "def test_quantised(): ..."),
        ("src/padless/verify/x.py", "class FencedOutputs: ..."),
        ("docs/quantisers.md", ""),
        ("tools/copy_engine.py", ""),
    ],
)
def test_a_word_that_left_is_seen(path: str, text: str) -> None:
    assert len(wrong(path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("src/padless/kernels/sm90_fp8/x.cu", '// a unit\nconst char* s = "units"; int united, m64s;'),
        ("src/padless/kernels/token_tiles.cuh", "int first_unit;"),  # of 32 tokens
        ("src/padless/emulator/state/x.py", "halves = init_fenced = tensor_units = 1"),
        ("src/padless/verify/x.py", "# quantised\nguarded = 'fenced'"),
    ],
)
def test_other_meanings_and_prose_are_let_be(path: str, text: str) -> None:
    assert wrong(path, text) == []
