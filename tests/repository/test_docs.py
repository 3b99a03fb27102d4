"""Documentation: the site builds without a warning, pages name what exists, every public name has a reference."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest

import docs_hooks
import padless
from support.ragged import ROOT
from support.recipes import copied, make

DOCS = ROOT / "docs"
RECORDED = re.compile(r"\d{4}-\d{2}-\d{2}-")  # pages that a tool wrote on the day of a run
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if not RECORDED.match(path.name)),
]

needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="building the site needs mkdocs, as make installs"
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """The recipe of `make docs` for the mkdocs.yml of ``root``."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )


# --- the site --------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page points at, and the places in it that others may point at."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.places: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        self.targets += [found[name] for name in ("href", "src") if name in found]


def dead_ends(site: Path) -> list[str]:
    """Links, pictures and scripts of a built site that are not in it, those that Markdown's own check cannot see too."""
    pages = {path: Page(path) for path in site.rglob("*.html")}
    wrong = []
    for path, page in pages.items():
        for target in page.targets:
            if path.name == "404.html" or re.match(r"[a-z]+:", target):  # the first is served at any address
                continue
            address, _, place = target.partition("#")
            found = (path.parent / unquote(address.partition("?")[0])).resolve() if address else path
            found = found / "index.html" if found.is_dir() else found
            if not found.exists() or (place and found in pages and unquote(place) not in pages[found].places):
                wrong.append(f"{path.relative_to(site)}: {target}")
    return wrong


def test_a_dead_end_of_a_site_is_seen(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text('<a href="sub/"></a><a id="top" href="https://a.b/c"></a><img src="no.png">')
    (tmp_path / "sub" / "index.html").write_text('<a href="../index.html#top"></a><a href="../index.html#bottom"></a>')
    assert dead_ends(tmp_path) == ["index.html: no.png", "sub/index.html: ../index.html#bottom"]


MIKE = Path(sys.executable).with_name("mike")


@pytest.mark.skipif(not MIKE.exists(), reason="versions of the site need mike, as make installs")
def test_versions_of_the_site_stand_next_to_each_other(tmp_path):
    """For main, a release and main again: whoever opens the site gets the release."""
    shutil.copy(ROOT / "Makefile", small_tree(tmp_path))
    environment = {f"GIT_{who}_{what}": f"a@b.{what}" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    environment |= {"HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1"}

    def run(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("git init -q -b main && git add -A && git commit -qm start")
    run("git init -q --bare origin.git && git remote add origin origin.git")
    for version in ("main", "v0.1.0", "main"):
        make(tmp_path, "site", f"VERSION={version}", "PUSH=1", **environment)
        if version == "main":
            expected = "latest" if "v0.1.0/" in run("git ls-tree -d --name-only gh-pages | sed s,$,/,") else "main"
            assert f"url={expected}/" in run("git show gh-pages:index.html").replace("&#47;", "/")
    listed = json.loads(run("git show gh-pages:versions.json"))
    assert {each["version"]: each["aliases"] for each in listed} == {"main": [], "v0.1.0": ["latest"]}
    assert run("git -C origin.git rev-parse gh-pages") == run("git rev-parse gh-pages"), "pushed"
    run("git show gh-pages:v0.1.0/formats.html && git show gh-pages:main/search/search_index.json")


@needs_mkdocs
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path):
    tree = copied(tmp_path / "tree")
    assert "WARNING" not in make(tree, "docs")
    site = tree / "site"
    reference = (site / "api.html").read_text()
    missing = [name for name in padless.__all__ if f'id="padless.{name}"' not in reference]
    assert not missing
    assert "Multiplies every group's rows" in reference, "docstrings are read"
    assert "To add a kernel" in (site / "contributing.html").read_text()
    assert dead_ends(site) == []
    assert 'src="measured/overview.png"' in (site / "index.html").read_text(), "the first page has the figure"
    assert len(json.loads((site / "search" / "search_index.json").read_text())["docs"]) > 100


def small_tree(folder: Path) -> Path:
    """A tree of two pages, with the settings of the whole."""
    settings = (ROOT / "mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(settings[: settings.index("\nnav:")].replace("hooks:", "hooks: []  #"))
    (folder / "docs").mkdir()
    (folder / "src").symlink_to(ROOT / "src")
    (folder / "docs" / "formats.md").write_text("# Formats\n")
    (folder / "docs" / "index.md").write_text("# Start\n\n[x](formats.md#formats)\n")
    return folder


@needs_mkdocs
def test_a_page_that_leads_nowhere_is_a_failure(tmp_path):
    small_tree(tmp_path)
    wrong = {
        "page": "[x](no_such_page.md)",
        "heading": "[x](formats.md#no-such-heading)",
        "name": "::: padless.no_such",
    }
    good = build(tmp_path, tmp_path / "site")
    assert good.returncode == 0, good.stderr
    for page in ("page", "heading"):
        (tmp_path / "docs" / f"{page}.md").write_text(f"# {page}\n\n{wrong[page]}\n")
    led = build(tmp_path, tmp_path / "site")
    assert led.returncode == 1
    assert "'page.md' contains a link 'no_such_page.md'" in led.stderr
    assert "'heading.md' contains a link 'formats.md#no-such-heading'" in led.stderr
    for page in ("page", "heading"):
        (tmp_path / "docs" / f"{page}.md").unlink()
    (tmp_path / "docs" / "name.md").write_text(f"# name\n\n{wrong['name']}\n")  # ends a build where it is met
    assert build(tmp_path, tmp_path / "site").returncode == 1


def test_every_public_name_stands_in_the_reference_once():
    named = re.findall(r"^::: padless\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(padless.__all__)


def test_contributing_is_a_page_with_links_as_from_docs():
    text = docs_hooks.contributing_page()
    targets = re.findall(r"\]\(([^)#]+)", text)
    assert "architecture.md" in targets
    page = "[a](../CONTRIBUTING.md#to-add-a-kernel) [b](formats.md)"
    assert docs_hooks.on_page_markdown(page) == "[a](contributing.md#to-add-a-kernel) [b](formats.md)"
    assert [target for target in targets if not (DOCS / target).is_file()] == []


# --- what pages say --------------------------------------------------------------------------------------

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Names of files of the repository, as text: `src/padless/x.py`, `tests/a/b.py`, `tools/x.py`, `docs/x.md`.
NAMED = re.compile(r"(?<![\w/.-])((?:src/padless|tests|tools|docs)/[\w./-]*\w\.(?:py|cu|cuh|cpp|md|json|jsonl|yml))\b")


def leads_nowhere(page: Path, text: str) -> list[str]:
    """Links of a page, and files that it names, that do not exist."""
    links = [target for target in LINK.findall(text) if "://" not in target]
    wrong = [target for target in links if not (page.parent / target).exists()]
    return wrong + [name for name in NAMED.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    assert leads_nowhere(page, page.read_text()) == []


def test_a_name_of_nothing_is_seen():
    text = (
        "[a](no.md#x) `tests/no_such.py` (docs/formats.md) [b](docs/formats.md) src/padless/no/x.cuh [c](https://x.y)"
    )
    assert leads_nowhere(ROOT / "README.md", text) == ["no.md", "tests/no_such.py", "src/padless/no/x.cuh"]


# Folders with device code that is no kernel of a call.
WITHOUT_PAGES = {"unit_probe", "device", "wgmma_probe"}


LIMIT = 1200  # words of a page that explains something


def words_of(text: str) -> int:
    """Words of a page without what a tool drew into it."""
    return len(re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", text, flags=re.DOTALL).split())


def test_every_kernel_has_pages():
    kernels = {path.parent.name for path in (ROOT / "src/padless/kernels").glob("*/*.cu")} - WITHOUT_PAGES
    listed = (DOCS / "kernels" / "README.md").read_text()
    for folder in sorted({*kernels, "quant_epilogue"}):
        assert (DOCS / "kernels" / folder / "index.md").is_file()
        assert (DOCS / "kernels" / folder / "ladder.md").is_file()
        assert f"({folder}/index.md)" in listed


# Pages that explain: how kernels and the emulator work, and how to use the emulator and its clock.
EXPLAINING = [path for path in sorted(DOCS.glob("kernels/*/*.md")) if path.name != "ladder.md"]
EXPLAINING += [*sorted(DOCS.glob("walkthrough*.md")), *sorted(DOCS.glob("architecture*.md"))]
EXPLAINING += [DOCS / f"timing{part}.md" for part in ("", "_internals")]
EXPLAINING += [DOCS / f"emulator{part}.md" for part in ("", "_programs", "_internals", "_order", "_model")]


@pytest.mark.parametrize("page", EXPLAINING, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_explains_in_1200_words(page):
    words = words_of(page.read_text())
    assert words <= LIMIT, f"{words} words: split it by subject, and move what was tried to ladder.md"


def test_words_of_a_page_are_those_that_were_written():
    assert words_of("a b\n<!-- map:begin -->\nc d e\n<!-- map:end -->\nf") == 3


def sentences_of(text: str) -> int:
    """Words of a page outside tables, headings and blocks of code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return sum(len(line.split()) for line in text.splitlines() if not line.startswith(("|", "#", "<!--")))


@pytest.mark.parametrize("page", sorted(DOCS.glob("kernels/*/ladder.md")), ids=lambda page: page.parent.name)
def test_a_ladder_is_tables_with_short_sentences_around_them(page):
    text = page.read_text()
    words = sentences_of(text)
    assert "\n|---|" in text
    assert words <= max(250, sum(len(line.split()) for line in text.splitlines() if line[:1] == "|") // 5), words


def test_sentences_are_what_is_in_no_table():
    assert sentences_of("# a b\n\n| c | d |\n|---|---|\n\ne f\n\n```\ng\n```\nh") == 3


# What a reader who knows CUDA and not padless asks, the links that lead there, and what stands at their end.
WAYS = {
    "serve a Qwen3-MoE FP8 checkpoint": (
        ["README.md", "docs/index.md", "docs/frameworks.md"],
        ["pip install '.[vllm]'", "vllm serve Qwen/Qwen3-30B-A3B-FP8 --quantization padless"],
    ),
    "the same in transformers": (
        ["README.md", "docs/transformers.md"],
        ["Qwen/Qwen3-30B-A3B-FP8", 'experts_implementation="padless"'],
    ),
    "train Qwen3-MoE": (
        ["README.md", "docs/index.md", "docs/transformers.md"],
        ["examples/fine_tune_qwen3_moe.py", 'experts_implementation="padless_train"'],
    ),
    "train over its FP8 codes": (
        ["README.md", "docs/index.md", "docs/transformers.md", "docs/adapters.md"],
        ["LoraExperts"],
    ),
    "the kernel of MXFP8 x MXFP4 on a B200": (
        ["README.md", "docs/index.md", "docs/kernels/sm100_grouped/pairs.md"],
        ["## MXFP8 x MXFP4", "never measured", "| predicted, us |"],
    ),
    "how fast that is believed to be": (
        ["README.md", "docs/timing_b200.md"],
        ["# This library on a B200: predicted, never run", "| MXFP8 x MXFP4 prefill, 8 x 2048 rows |"],
    ),
}


def has_link(page: str, target: str) -> bool:
    folder = (ROOT / page).parent
    return (ROOT / target).resolve() in {(folder / link).resolve() for link in LINK.findall((ROOT / page).read_text())}


@pytest.mark.parametrize("question", WAYS)
def test_a_newcomer_finds_the_way_by_links(question):
    pages, texts = WAYS[question]
    assert len(pages) <= 4
    for page, target in pairwise(pages):
        assert has_link(page, target), f"{page} has no link to {target}"
    said = "\n".join((ROOT / page).read_text() for page in pages[1:])
    assert [text for text in texts if text not in said] == []


def test_a_link_that_is_not_there_is_seen():
    assert has_link("docs/kernels/README.md", "docs/kernels/sm90_fp8/index.md")
    assert not has_link("docs/kernels/README.md", "docs/transformers.md")


def test_predicted_times_of_a_page_are_those_of_the_clock():
    """Of MXFP8 x MXFP4: the page of the kernel repeats two lines of the generated table."""
    table = (DOCS / "timing_b200.md").read_text()
    page = (DOCS / "kernels/sm100_grouped/pairs.md").read_text()
    lines = re.findall(r"^\| MXFP8 x MXFP4 (?:[^|]*\|){3} ([^|]*) \| ([^|]*) \|[^|]*\| ([^|]*) \|", table, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        assert f"| {' | '.join(line)} |" in page
