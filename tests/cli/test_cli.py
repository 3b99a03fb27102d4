"""The padless command: quick to answer, one sentence for a user's mistake, the right function called."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import padless
from padless import cli
from padless.cli.bench import commands
from padless.options import check_file, check_folder
from support.ragged import ROOT


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter that finds this padless, installed or not."""
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(padless.__file__).parents[1])},
    )


@pytest.mark.parametrize("command", ["info", "verify"])
def test_a_package_that_is_missing_is_one_sentence(command):
    missing = f"import sys; sys.modules['torch'] = None; sys.argv = ['padless', '{command}']"
    found = run_python("-c", f"{missing}; from padless.cli import main; main()")
    assert found.returncode == 2
    assert found.stderr == "padless: this command needs torch, which is not installed here\n"


def test_help_imports_nothing_heavy():
    """The command's own module, in a package whose __init__ does nothing: what --help makes it import."""
    folder = Path(padless.__file__).parent
    script = f"""
import sys, types
package = types.ModuleType("padless")
package.__path__, package.__version__ = [{str(folder)!r}], "0"
sys.modules["padless"] = package
from padless.cli import app
try:
    app(["--help"])
except SystemExit as stop:
    assert stop.code == 0, stop.code
heavy = {{"torch", "numpy", "triton", "cuda", "matplotlib"}} & set(sys.modules)
assert not heavy, heavy
own = {{"padless", "padless.cli", "padless.cli.calling", "padless.options"}}
assert {{m for m in sys.modules if m.startswith("padless")}} == own
"""
    found = run_python("-c", script)
    assert found.returncode == 0, found.stderr
    for command in ("demo", "train-demo", "info", "tune", "verify", "fuzz", "bench", "emulate"):
        assert command in found.stdout


def test_version():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == padless.__version__


def test_python_dash_m_is_the_command():
    found = run_python("-m", "padless", "--version")
    assert (found.returncode, found.stdout.strip()) == (0, padless.__version__)


@pytest.fixture
def main(monkeypatch, capsys):
    """main("demo", "--synthetic") -> (exit code, stdout, stderr) of the entry point, in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["padless", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        output = capsys.readouterr()
        code = stop.value.code
        return (0 if code is None else int(code)), output.out, output.err

    return run


@pytest.fixture
def recorded(monkeypatch):
    """recorded(module, function) puts a function there that notes its arguments in the returned list."""

    def install(module: str, function: str, returns: object = None) -> list[dict[str, object]]:
        calls: list[dict[str, object]] = []

        def note(**arguments: object) -> object:
            calls.append(arguments)
            return returns

        stub = types.ModuleType(module)
        setattr(stub, function, note)
        monkeypatch.setitem(sys.modules, module, stub)
        return calls

    return install


def test_a_value_error_is_one_sentence_and_exit_code_2(main, monkeypatch):
    def fail(**_: object) -> None:
        raise ValueError("K is 17; it must be a multiple of 16")

    stub = types.ModuleType("padless.verify.run")
    stub.run_verify = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "padless.verify.run", stub)
    code, out, err = main("verify")
    assert code == 2
    assert out == ""
    assert err == "padless: K is 17; it must be a multiple of 16\n"


WRITING = [["demo", "--synthetic"], ["train-demo"], ["verify"], ["fuzz"], ["bench", "paper"], ["bench", "units"]]


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_a_folder_that_cannot_be_written_to_is_refused_first(main, recorded, tmp_path, command):
    ran = [recorded("padless.demo.run", "run_demo"), recorded("padless.demo.train.run", "run_train_demo"),
           recorded("padless.verify.run", "run_verify"), recorded("padless.verify.fuzz.run", "run_fuzz"),
           recorded("padless.bench.commands", "bench"), recorded("padless.bench.units", "units")]  # fmt: skip
    (tmp_path / "file").touch()
    code, _, err = main(*command, "--out", str(tmp_path / "file" / "x"))
    assert code == 2
    assert err.startswith("padless: --out is ")
    assert err.count("\n") == 1
    assert not any(ran)


def test_what_is_written_to_is_looked_at_itself(tmp_path, monkeypatch):
    """A file that is there by its own mode, wherever it lies; a link to nothing is no folder."""
    there, link = tmp_path / "there.jsonl", tmp_path / "link"
    there.touch()
    link.symlink_to(tmp_path / "nothing")
    writable = {there}
    monkeypatch.setattr(os, "access", lambda path, mode: path in writable)
    check_file("--out", there)
    with pytest.raises(ValueError, match="no folder that can be written to"):
        check_file("--out", tmp_path / "new.jsonl")
    writable = {tmp_path}
    check_file("--out", tmp_path / "new.jsonl")
    with pytest.raises(ValueError, match=r"^--out is .*there.jsonl', which cannot be written to$"):
        check_file("--out", there)
    with pytest.raises(ValueError, match=r"link' is no folder that can be written to$"):
        check_folder("--out", link)


@pytest.mark.parametrize("name", [".", "figure", "figure.weird", "file/figure.png"])
def test_a_figure_that_cannot_be_drawn_is_refused_first(main, recorded, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    ran = recorded("padless.bench.commands", "report")
    code, out, err = main("bench", "report", "x.jsonl", "--figure", name)
    assert (code, out) == (2, "")
    assert err.startswith(f"padless: --figure is {name!r}") or "file" in name
    assert err.count("\n") == 1
    assert not ran


@pytest.mark.parametrize(
    "line",
    [
        "info --formats --json",
        "tune --reset --dry-run",
        "tune --reset --repeats 3",
        "train-demo --ranks 2 --seeds 1",
        "verify --ranks 2 --against-cudnn",
        "verify --ranks 2 --workers 1",
        "verify --ranks 2 --no-sanitizer",
        "verify --against-cudnn --no-sanitizer",
        "verify --against-cudnn --against-emulator",
        "fuzz --repeat gemm(m=1) --seed 0",
        "fuzz --repeat gemm(m=1) --call gemm",
        "fuzz --repeat gemm(m=1) --out x.jsonl",
        "bench paper --balanced --full",
        "emulate --time --mutate 0",
        "emulate --launch x.toml --program x.py",
    ],
)
def test_options_that_exclude_each_other_are_refused(main, line):
    """They were read as if only one of them was there."""
    options = [word for word in line.split() if word.startswith("--")]
    code, out, err = main(*line.split())
    assert (code, out) == (2, "")
    assert err.startswith("padless: ")
    assert err.endswith(" exclude each other; leave one of them out\n")
    assert all(option in err for option in options)


@pytest.mark.parametrize("command", [[], ["bench"], ["bench", "paper"], ["fuzz"], ["emulate"]], ids=" ".join)
def test_help_of_a_narrow_terminal_has_whole_names_and_sentences(main, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = main(*command, "--help")
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "..." not in out.replace("[ARGS]...", "")
    assert max(map(len, out.splitlines())) <= 50  # the least that click wraps at


def test_a_value_of_the_wrong_type_is_one_sentence_without_a_box(main):
    code, out, err = main("fuzz", "--minutes", "soon")
    assert (code, out) == (2, "")
    assert err.isascii()
    assert err.splitlines()[-1].startswith("Error: Invalid value for '--minutes'")


def test_other_errors_keep_their_traceback(main, monkeypatch):
    def fail(**_: object) -> None:
        raise RuntimeError("a defect")

    stub = types.ModuleType("padless.verify.run")
    stub.run_verify = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "padless.verify.run", stub)
    with pytest.raises(RuntimeError, match="a defect"):
        main("verify")


def test_an_absent_package_is_named(main, monkeypatch):
    monkeypatch.setitem(sys.modules, "padless.verify.run", None)
    code, _, err = main("verify")
    assert code == 2
    assert "padless.verify.run" in err
    assert "Traceback" not in err


def test_a_wrong_option_is_a_usage_error(main):
    code, _, err = main("bench", "paper", "--quickly")
    assert code == 2
    assert "--quickly" in err


@pytest.mark.parametrize("name", ["paper", "dense", "decode"])
def test_bench_passes_its_options_on(main, recorded, name, tmp_path):
    calls = recorded("padless.bench.commands", "bench", returns=0)
    assert main("bench", name)[0] == 0
    options = ("--full", "--peers", str(tmp_path), "--out", "there", "--only", "x", "--time-limit", "9")
    options += ("--repeats", "3")
    assert main("bench", name, *options)[0] == 0
    same = {"case": name} | ({"balanced": False} if name == "paper" else {})
    nothing = {"full": False, "peers": None, "only": None, "out": Path("padless-out"), "time_limit": None}
    everything = {"full": True, "peers": tmp_path, "only": ["x"], "out": Path("there"), "time_limit": 9.0}
    assert calls == [nothing | same | {"repeats": None}, everything | same | {"repeats": 3}]


def test_bench_quantize_host_and_report_pass_their_options_on(main, recorded, tmp_path):
    benches = recorded("padless.bench.commands", "bench", returns=0)
    assert main("bench", "quantize", "--full", "--out", "there")[0] == 0
    assert main("bench", "formats", "--full", "--time-limit", "9")[0] == 0
    formats = {"case": "formats", "full": True, "out": Path("padless-out"), "time_limit": 9.0}
    assert benches == [{"case": "quantize", "full": True, "out": Path("there")}, formats]
    host = recorded("padless.bench.commands", "host", returns=0)
    assert main("bench", "host")[0] == 0
    assert host == [{}]
    report = recorded("padless.bench.commands", "report", returns=1)
    files = [tmp_path / "paper.jsonl", tmp_path / "decode.jsonl"]
    assert main("bench", "report", *map(str, files), "--figure", "x.png")[0] == 1
    assert report == [{"files": files, "figure": Path("x.png")}]


def test_bench_has_a_command_for_every_case_with_the_options_it_takes(main):
    """The command line passes by keyword: a name that the other side does not know would only fail in use."""
    from padless.bench.case import CASES
    from padless.bench.commands import bench

    taken = set(inspect.signature(bench).parameters) | {"case"}
    made = commands().commands
    assert set(made) == {*CASES, "host", "units", "report"}
    for name, case in CASES.items():
        given = {parameter.name for parameter in made[name].params} - {"help"}
        assert given == set(case.options) <= taken
    code, out, _ = main("bench", "--help")
    assert code == 0
    assert all(name in out for name in made)
    assert main("bench", "weather")[0] == 2


def test_the_help_of_a_benchmark_does_not_wait_for_torch():
    script = """
import sys
from padless.cli import app
try:
    app(["bench", "paper", "--help"])
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert not {"torch", "numpy", "triton", "matplotlib"} & set(sys.modules)
"""
    found = run_python("-c", script)
    assert found.returncode == 0, found.stderr
    assert "--balanced" in found.stdout


def test_tune_options_are_those_it_takes():
    from padless.bench.tune.costs import run_tune

    given = set(inspect.signature(cli.tune).parameters)
    assert given == {"dry_run", "reset", "repeats"} <= set(inspect.signature(run_tune).parameters)


def test_verify_passes_its_options_on_and_its_exit_code_back(main, recorded):
    calls = recorded("padless.verify.run", "run_verify", returns=3)
    assert main("verify", "--out", "there", "--no-sanitizer")[0] == 3
    assert main("verify", "--check", "one", "--check", "two")[0] == 3
    assert calls == [
        {"out": Path("there"), "sanitizer": False, "against_emulator": False, "checks": None, "workers": None},
        {"out": None, "sanitizer": True, "against_emulator": False, "checks": ["one", "two"], "workers": None},
    ]


def test_tune_passes_its_options_on(main, recorded):
    calls = recorded("padless.bench.tune.costs", "run_tune", returns=0)
    assert main("tune")[0] == 0
    assert main("tune", "--dry-run", "--repeats", "3")[0] == 0
    assert main("tune", "--reset")[0] == 0
    nothing = {"dry_run": False, "reset": False, "repeats": 20}
    assert calls == [nothing, nothing | {"dry_run": True, "repeats": 3}, nothing | {"reset": True}]


def test_info_formats_is_the_page(main):
    code, out, _ = main("info", "--formats")
    assert code == 0
    assert out == (ROOT / "docs/supported.md").read_text()


def test_emulate_hands_everything_over(main, monkeypatch):
    seen = []
    stub = types.ModuleType("padless.emulator.cli")
    stub.app = lambda args, prog_name: seen.append((args, prog_name))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "padless.emulator.cli", stub)
    assert main("emulate", "run", "--races", "--help")[0] == 0
    assert seen == [(["run", "--races", "--help"], "padless emulate")]
