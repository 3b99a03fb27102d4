"""`padless verify`: its checks run here one by one on a GPU; its judges are tried on planted errors everywhere."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from padless.runtime.devices import Backend
from padless.testing import compile_ahead
from padless.testing.judge import row_errors
from padless.verify import run as verify
from padless.verify.emulator.products import emulate
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.product_lines import EMULATED
from padless.verify.fuzz.products import ROW_ERROR_LIMIT, Product
from padless.verify.run import CHECKS, SANITIZER_TOOLS, jobs_of, run_verify, sanitizers_of
from support.verify_jobs import pretended_jobs


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    assert CHECKS[name]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"on a GPU.*no CUDA GPU"):
        run_verify()


def test_the_judge_sees_one_lost_row_that_a_global_ratio_forgives(generator: torch.Generator) -> None:
    expected = torch.randn(4096, 64, generator=generator, dtype=torch.float64)
    out = expected.clone()
    out[1234] = 0
    x, y = out.flatten(), expected.flatten()
    assert 1 - 2 * (x @ y) / (x @ x + y @ y) < 1e-3  # the ratio in common use: passes
    errors = row_errors(out, expected)
    assert int((errors > ROW_ERROR_LIMIT[torch.bfloat16]).sum()) == 1


def test_the_judge_sees_a_lost_block_of_k(generator: torch.Generator) -> None:
    a, b = (torch.randn(8, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    whole, lost = a @ b.t(), a[:, 128:] @ b[:, 128:].t()
    assert bool((row_errors(lost, whole) > ROW_ERROR_LIMIT[torch.bfloat16]).all())


def test_the_emulated_side_of_the_comparison_is_a_function_of_the_seed_and_right() -> None:
    """The same seed gives the same problem in another process; and what is compared is the product."""
    o = next(
        o for o in itertools.islice(EMULATED["emulator agrees"]("sm_90a"), 27, None) if o["drawn"] == "wide normal"
    )
    problem, again = (Product(o, place_of("reference")) for _ in range(2))
    a, b, offs, dtype = problem.a.plain, problem.b.plain, problem.offs, problem.dtype
    assert dtype != torch.float16  # whose range the scales leave
    assert torch.equal(a.data.view(torch.uint8), again.a.plain.data.view(torch.uint8))
    assert torch.equal(b.scale, again.b.plain.scale)
    out = emulate("grouped_gemm", "sm_90a", o)[""]
    rows_of_b = b.scale.repeat_interleave(128, 1)[:, : b.shape[1]].repeat_interleave(128, 2)[..., : b.shape[2]]
    weights = b.data.double() * rows_of_b
    values = a.data.double() * a.scale.repeat_interleave(128, 1)[:, : a.shape[1]]
    ends = [0, *offs.tolist()]
    expected = torch.cat([values[s:e] @ weights[g].t() for g, (s, e) in enumerate(itertools.pairwise(ends))])
    assert out.shape == expected.shape
    assert out.numel() > 0
    assert float(row_errors(out, expected).max()) < ROW_ERROR_LIMIT[dtype]


# --- a whole run -----------------------------------------------------------------------------------------

# In compute-sanitizer's place: notes that it ran, and does what its tool's name says below.
FAKE = """#!{python} -IS
import pathlib, sys, time
tool, module = sys.argv[sys.argv.index("--tool") + 1], sys.argv[-1]
assert ("--kernel-name" in sys.argv) == (tool != "initcheck")
time.sleep(30 if (tool, module) == ("initcheck", "second") else 0.1)
pathlib.Path(__file__).with_name(f"{{tool}} {{module}}").touch()
if tool != "synccheck":
    print("small problems done")
print(f"========= {{tool.upper()}} SUMMARY: of {{module}}")
sys.exit(9 if tool == "racecheck" else 0)
"""


def fake_sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(verify, "_SANITIZER_SECONDS", 3)


def test_every_failure_of_a_tool_is_recorded_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_sanitizer(tmp_path, monkeypatch)
    records, traces = [], []
    for name, check in sanitizers_of(["first", "second"]).items():
        printed = io.StringIO()
        records.append(verify._shown(Console(file=printed, width=200), *verify._record(name, check)))
        traces.append("Traceback" in printed.getvalue())
    names = [f"compute-sanitizer {tool} of {m}" for tool in SANITIZER_TOOLS for m in ("first", "second")]
    assert [record.check for record in records] == names
    assert [record.passed for record in records] == [True, True, False, False, True, False, False, False]
    assert traces == [not record.passed for record in records]
    details = [record.detail for record in records]
    assert details[0] == "MEMCHECK SUMMARY: of first"
    assert all("exit code 9" in detail and "RACECHECK" in detail for detail in details[2:4])
    assert details[5].startswith("TimeoutExpired")
    assert all("did not finish" in detail for detail in details[6:])
    assert all(record.seconds >= 0.1 for record in records)
    assert len(list(tmp_path.glob("*check *"))) == 7  # one did not come to its end


def failing() -> str:
    raise RuntimeError("planted")


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calling it says what a machine with an H200 would check."""

    class Driver:
        arch = "sm_90a"

        def num_sms(self, device: int) -> int:
            return 132

    def pretend(jobs: dict[str, Callable[[], str]], modules: list[str]) -> None:
        monkeypatch.setattr(verify, "jobs_of", lambda *args: (jobs, modules))

    monkeypatch.setattr(verify, "backends", lambda: {"cuda": Backend("cuda", True, "pretended")})
    monkeypatch.setattr(verify, "cuda_driver", Driver)
    monkeypatch.setattr(verify, "about_the_machine", lambda: {"gpu": "none"})
    return pretend


def test_a_run_records_everything_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended_gpu: Callable[..., None]
) -> None:
    """What cannot be compiled ahead is said and decides nothing; checks come before the tools."""
    fake_sanitizer(tmp_path, monkeypatch)

    def passing() -> str:
        assert not list(tmp_path.glob("*check first"))  # no tool has run yet
        return "right | so"

    def third() -> str:
        seen = json.loads((tmp_path / "out" / "verify.json").read_text())
        assert [record["check"] for record in seen["checks"]] == ["one", "two"]
        assert seen["machine"]["not run yet"] == "5"
        return passing()

    pretended_gpu({"one": passing, "two": failing, "three": third}, ["first"])
    rehearsals = [verify.Rehearsal(failing, ())]
    monkeypatch.setattr(verify, "rehearsals_of", lambda arch, checks, modules: rehearsals)
    ahead = compile_ahead.Ahead(set(), ["left out"])
    given: list[object] = []
    monkeypatch.setattr(verify, "compile_ahead", lambda *args: given.append(args[:2]) or ahead)
    text = io.StringIO()
    assert run_verify(tmp_path / "out", workers=1, console=Console(file=text, width=200)) == 1
    assert given == [(rehearsals, verify.Gpu("sm_90a", 132))]

    written = json.loads((tmp_path / "out" / "verify.json").read_text())
    names = ["one", "two", "three", *(f"compute-sanitizer {tool} of first" for tool in SANITIZER_TOOLS)]
    assert [record["check"] for record in written["checks"]] == names
    assert [record["passed"] for record in written["checks"]] == [True, False, True, True, False, True, False]
    assert all(set(record) == {"check", "passed", "detail", "seconds"} for record in written["checks"])
    assert written["checks"][1]["detail"] == "RuntimeError: planted"
    assert "1 failed there and are left to the checks: left out" in written["machine"]["compiled ahead"]
    table = (tmp_path / "out" / "verify.md").read_text()
    assert [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")][1:] == [
        f"| {name}" for name in names
    ]
    assert "| two | FAIL | RuntimeError: planted |" in table
    assert "right \\| so" in table
    assert "4 passed, 3 failed" in text.getvalue()
    assert "not run yet" not in table
    assert len(list(tmp_path.glob("*check first"))) == 4


def test_checks_side_by_side_are_recorded_as_they_end() -> None:
    jobs, _ = pretended_jobs()
    with verify._running(jobs, pretended_jobs, 2) as results:
        found = list(results)
    assert sorted(record.check for record, _ in found) == ["fails", "other process", "slow"]
    found.sort(key=lambda result: list(jobs).index(result[0].check))
    assert [record.passed for record, _ in found] == [True, False, True]
    assert found[1][0].detail == "RuntimeError: planted"
    assert "Traceback" in found[1][1]
    assert int(found[2][0].detail) != os.getpid()
    assert found[0][0].seconds >= 0.2


def test_a_check_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="checks has 'denes'; allowed are 'accuracy', "):
        verify.jobs_of("sm_90a", ["dense", "denes"])


def test_only_what_runs_is_rehearsed(monkeypatch: pytest.MonkeyPatch, pretended_gpu: Callable[..., None]) -> None:
    def one() -> str:
        return "right"

    pretended_gpu({"one": one}, ["first"])
    asked: list[object] = []
    monkeypatch.setattr(verify, "rehearsals_of", lambda arch, *names: asked.append((arch, *map(list, names))) or [])
    assert run_verify(sanitizer=False, workers=1, console=Console(file=io.StringIO())) == 0
    monkeypatch.setattr(verify, "_sanitizer", lambda: None)
    assert run_verify(workers=1, console=Console(file=io.StringIO())) == 0
    assert asked == [("sm_90a", [one], [])] * 2


def test_any_check_of_the_architecture_can_be_asked_for() -> None:
    for arch, name in (("sm_90a", "two devices"), ("sm_90a", "layers in one launch"), ("sm_100a", "dense MXFP8")):
        assert list(jobs_of(arch, [name])[0]) == [name]
    with pytest.raises(ValueError, match=r"checks has 'layers in one launch'; allowed are 'accuracy', .*'dense MXFP8'"):
        jobs_of("sm_100a", ["layers in one launch"])
    assert jobs_of("sm_90a", [])[0] == {}
