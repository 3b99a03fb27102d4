"""Commands that README, CONTRIBUTING and pages show: each is run, as far as it goes without a GPU and without CI.

`make` targets are run dry; options of `padless` commands are parsed, and those that measure say that they need a GPU.
Whole runs: tests/demo (demo), test_docs.py (docs), test_readme_measured.py (readme), tests/kernels/test_digests.py
(digests), tests/cli (info), tests/emulator/test_cli.py (emulate), tests/bench/test_report.py (bench report),
test_learn.py (lessons, with every break).
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from typer.testing import CliRunner

from padless import cli
from support.ragged import ROOT

RECORDED = re.compile(r"\d{4}-\d{2}-\d{2}-")  # pages that a tool wrote on the day of a run
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [path for path in sorted((ROOT / "docs").rglob("*.md")) if not RECORDED.match(path.name)]
TOOLS = ("make", "padless", "python", "pytest", "pre-commit", "pip", ".venv/bin/python")
START = re.compile(rf"(?:{'|'.join(map(re.escape, TOOLS))}) [^`]+")


def commands_of(text: str) -> list[str]:
    """Commands of a page: lines of its fenced blocks and inline code, without comments and redirections. In a table a
    cell may go on with other benchmarks: `padless bench layer`, `wgrad`.
    """
    found = []
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for language, block in fenced.findall(text):
        found += [line for line in block.splitlines() if not language and START.fullmatch(line)]
    for line in fenced.sub("", text).splitlines():
        first, *others = re.findall(r"`([^`]+)`", line.split("|")[1] if line.startswith("|") else line) or [""]
        found += [code for code in (first, *others) if START.fullmatch(code)]
        if line.startswith("|") and first.startswith("padless bench "):
            found += [f"padless bench {name}" for name in others if " " not in name]
    return sorted({without_brackets(re.split(r"\s+(?:#|>) ", command)[0].strip()) for command in found})


def without_brackets(command: str) -> str:
    """`--a [--b x|y] [more]` as it may be called: `--a --b x`."""
    return re.sub(r" \[(--[^\]|]+)[^\]]*\]", r" \1", re.sub(r" \[(?!--)[^\]]*\]", "", command))


# What begins like a command: a contender's name, an option without the number that it takes, a file that a reader has.
NO_COMMANDS = {"padless bf16", "padless emulate --mutate", "padless emulate --program script.py"}
COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())} - NO_COMMANDS)


def of(tool: str) -> list[str]:
    return [command for command in COMMANDS if shlex.split(command)[0] == tool]


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def padless(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def test_commands_are_found():
    assert without_brackets("padless a b --c [--d x|y] [--e z] [more]") == "padless a b --c --d x --e z"
    table = "| `padless bench one`, `two` | `padless t` |"
    text = f"`make x`\n```\npadless a --b # c\nno\n```\n```text\nmake y\n```\n{table}\nso `python x.py > y` is `z`"
    assert commands_of(text) == ["make x", "padless a --b", "padless bench one", "padless bench two", "python x.py"]
    assert len(COMMANDS) > 30


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("command", of("make"))
def test_make_has_the_target(command):
    found = run("make", "-n", *shlex.split(command)[1:])
    assert found.returncode == 0, found.stderr


@pytest.mark.parametrize("command", of("padless"))
def test_padless_has_the_command_and_its_options(command):
    words = shlex.split(command)[1:]
    # What follows --program is the program's, which would run here.
    words.insert(words.index("--program") if "--program" in words else len(words), "--help")
    found = padless(*words)
    assert found.exit_code == 0, found.output


def parsed(words: list[str]) -> None:
    """Raises for what a command does not take: --help, which is read first, hides words that are left over."""
    command, context, name = typer.main.get_command(cli.app), None, "padless"
    while words:
        context = command.make_context(name, words, parent=context)
        words = [*getattr(context, "_protected_args", ()), *context.args] if hasattr(command, "resolve_command") else []
        if words:
            name, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize("command", of("padless"))
def test_padless_takes_every_word_of_a_command(command):
    parsed(["2" if word == "N" else word for word in shlex.split(command)[1:]])


def test_a_word_that_is_left_over_is_seen():
    with pytest.raises(Exception, match=r"unexpected extra argument\(s\) \(moe.decode\)"):
        parsed(["fuzz", "moe.decode"])


def test_the_page_of_commands_has_all_of_them():
    page = (ROOT / "docs" / "commands.md").read_text()
    named = {word for code in re.findall(r"^\| ([^|]*) \|", page, re.M) for word in re.findall(r"[a-z][\w-]+", code)}
    group = typer.main.get_command(cli.app)
    commands = [*group.commands, *group.commands["bench"].list_commands(None)]
    assert [name for name in commands if name not in named] == []


@pytest.mark.parametrize("wrong", ["bench nothing", "verify --no-such-option", "no-such-command"])
def test_a_wrong_command_is_seen(wrong):
    assert padless(*wrong.split(), "--help").exit_code != 0


@pytest.mark.parametrize(
    "command", [c for c in of("padless") if re.match(r"padless (tune|bench (?!report|host\b|blackwell))", c)]
)
def test_what_measures_says_that_it_needs_a_gpu(command, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert re.fullmatch(r"padless: .*(GPU|Hopper|Blackwell).*\n", capsys.readouterr().err)


class Parsed(Exception):
    """A script has taken its arguments."""


def parse(monkeypatch: pytest.MonkeyPatch, script: str, *arguments: str) -> None:
    """Runs a script until it has parsed its arguments. Exits, as the script would, where they are wrong."""
    whole = argparse.ArgumentParser.parse_args

    def parse_args(*given: object, **named: object) -> None:
        whole(*given, **named)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


@pytest.mark.parametrize("command", [*of("python"), *of(".venv/bin/python"), *of("pytest")])
def test_scripts_take_their_arguments_and_named_tests_exist(command, monkeypatch):
    words = [word for word in shlex.split(command) if word not in ("python", ".venv/bin/python", "--run-slow")]
    if words[0] == "-m":
        script = ROOT / "src" / (words[1].replace(".", "/") + ".py")
        assert script.exists() or words[1] == "pytest" or not words[1].startswith("padless")
        words = words[2:] if words[1] == "pytest" else []
    if words[:1] == ["pytest"]:
        words = words[1:]
    if not words:
        return
    assert (ROOT / words[0]).exists(), command
    if words[0].startswith("docs/learn/"):
        found = run(sys.executable, *words)
        assert found.returncode == (1 if "--break" in words else 0), found.stderr
    elif words[0].startswith("tests/"):
        return
    elif "argparse" in (ROOT / words[0]).read_text():
        parse(monkeypatch, *words)
    else:
        assert not [word for word in words if word.startswith("-")], command


def test_wrong_arguments_of_a_script_are_seen(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(monkeypatch, "tools/mutants.py", "run", "RECORD", "--no-such-option")
    assert stop.value.code == 2
    assert "--no-such-option" in capsys.readouterr().err


def test_hooks_that_are_to_be_installed_are_configured():
    config = (ROOT / ".pre-commit-config.yaml").read_text()
    for command in of("pre-commit"):
        kinds = re.findall(r"--hook-type (\S+)", command)
        assert kinds
        assert all(kind in config for kind in kinds), command
