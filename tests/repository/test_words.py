"""Words that have left (docs/glossary.md): no identifier and no file has them where they meant what has another name.

And words of prose that are leaving pages, docstrings and comments: how often they still stand there can only go down.
"""

from __future__ import annotations

import ast
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


# --- prose -----------------------------------------------------------------------------------------------

# A word of docs/glossary.md's last table, what finds it, and how often pages, docstrings and comments still have it.
LEAVING = {
    "judge": (r"judg\w*", 22),
    "nobody, somebody, whoever": (r"nobody|somebody|whoever", 33),
    "by chance": (r"by chance", 5),
    "in any words": (r"in (?:any|our|their|other people's) words", 0),
    "holds .. to": (r"(?:hold|holds|held) (?:\w+ ){0,3}to (?:all of|its|account)", 0),
    "at once": (r"at once", 39),
    "beside": (r"beside", 38),
    "of its own": (r"of (?:its|their|our) own", 120),
    "lifted, lowered": (r"lift(?:s|ed|ing)?|lowered", 11),
    "look at": (r"look(?:s|ed|ing)? at", 25),
    "copy engine": (r"copy engines?", 33),
}
SLACK = 10  # so that two branches that each rewrite some can be merged
DRAWN = re.compile(
    r"```.*?```|<!-- ([\w-]+):begin -->.*?<!-- \1:end -->|<!-- families -->.*?<!-- end of families -->", re.S
)
# Written by tools, lists of the words themselves, or history.
NOT_PROSE = re.compile(r"docs/(measured/|mutants|glossary|supported)|CHANGELOG")


def prose(path: str, text: str) -> str:
    """What a file says to readers: a page without code, docstrings and comments of Python, comments of device code.
    Lines stay where they are.
    """
    lines: dict[int, str] = {}
    if path.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0]] = token.string
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                for number in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1):
                    lines[number] = text.splitlines()[number - 1]
        text = "\n".join(lines.get(number, "") for number in range(1, max(lines, default=0) + 1))
    elif path.endswith(".md"):
        text = DRAWN.sub(lambda drawn: "\n" * drawn[0].count("\n"), text)
        text = re.sub(r"\]\([^)]*\)", "]", text)
    else:
        text = "\n".join(line.partition("//")[2] for line in text.splitlines())
    return re.sub(r"`[^`]*`", lambda code: "\n" * code[0].count("\n"), text)


def places(word: str, path: str, text: str) -> list[str]:
    """Where a file has a word in its prose."""
    left = re.compile(rf"\b(?:{LEAVING[word][0]})\b".replace(" ", r"\s+"), re.I)
    if not left.search(text):
        return []
    said = prose(path, text)
    return [f"{path}:{said.count(chr(10), 0, match.start()) + 1}" for match in left.finditer(said)]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "src", "docs", "*.md"], cwd=ROOT, text=True, capture_output=True,
                            check=False).stdout.splitlines() or pytest.skip("no git")  # fmt: skip
    kinds = {".md", ".py", ".cu", ".cuh"}
    listed = [path for path in listed if Path(path).suffix in kinds and not NOT_PROSE.match(path)]
    return {path: (ROOT / path).read_text() for path in listed if (ROOT / path).is_file()}


@pytest.mark.parametrize("word", LEAVING)
def test_words_of_prose_become_fewer(word: str, texts: dict[str, str]) -> None:
    allowed = LEAVING[word][1]
    found = [place for path, text in texts.items() for place in places(word, path, text)]
    rule = "docs/glossary.md has what to write instead"
    assert len(found) <= allowed, f"{word!r} {len(found)} times, {allowed} allowed; {rule}:\n" + "\n".join(found)
    assert len(found) >= allowed - SLACK, f"{word!r} {len(found)} times: lower the {allowed} in {Path(__file__).name}"


def test_the_glossary_says_what_to_write_instead() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text().partition("## Words of prose")[2]
    assert re.findall(r"^\| (?!now|---)([^|]+?) \|", page, re.M) == list(LEAVING)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/x.md", "It stands beside the other."),
        ("docs/x.md", "It stands\n[beside](x.md)."),
        ("src/padless/x.py", '"""Stands beside."""'),
        ("src/padless/x.py", 'def f():\n    """Stands\n    beside.\n    """'),
        ("src/padless/x.py", "x = 1  # beside"),
        ("src/padless/x.cuh", "int x;  // beside"),
    ],
)
def test_a_word_of_prose_is_seen(path: str, text: str) -> None:
    assert len(places("beside", path, text)) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("docs/x.md", "`beside` [a](beside.md)\n```\nbeside\n```\n<!-- a:begin -->\nbeside\n<!-- a:end -->\nbesides"),
        ("src/padless/x.py", 'beside = "beside"\nf("""beside""")'),
        ("src/padless/x.cuh", "int beside;"),
    ],
)
def test_code_is_no_prose(path: str, text: str) -> None:
    assert places("beside", path, text) == []
