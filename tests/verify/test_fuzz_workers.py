"""Workers of the fuzzer: what they draw, where they run, what they tell, the record, and the command's options."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from padless.cli import app
from padless.verify.fuzz import products, quantizers, run, worker
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Draw, Problem
from padless.verify.fuzz.states.subjects import STATES
from padless.verify.fuzz.subjects import SUBJECTS, judged, subjects_of
from support.ragged import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")


def told(task: worker.Task) -> tuple[worker.Tally, list[list[str]]]:
    total, started = worker.Tally(), []

    def tell(message: tuple[str, Any]) -> None:
        kind, content = message
        if kind == "tally":
            total.add(content)
        elif kind == "started":
            started.append(content)

    worker.work(task, tell)
    return total, started


def test_a_worker_counts_each_problem_once() -> None:
    task = worker.Task(0, 7, "reference", 1e12, 40)
    total, started = told(task)
    texts = [text for batch in started for text in batch]
    assert sum(total.done.values()) == len(texts) == 40
    assert total.wrong == []
    assert not total.refused
    assert told(task)[1] == started
    assert told(replace(task, worker=1))[1] != started


def test_a_worker_tells_of_wrong_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quantizers.quantize

    def wrong(*args: Any, **kwargs: Any) -> Any:
        made = right(*args, **kwargs)
        made.data.view(torch.uint8).view(-1)[:1] ^= 1
        return made

    monkeypatch.setattr(quantizers, "quantize", wrong)
    total, _ = told(worker.Task(0, 7, "reference", 1e12, 16, ("quantize",)))
    assert total.wrong
    for text, names, smaller in total.wrong:
        assert any("codes by the rules" in name for name in names)
        assert judged(Problem.parse(text), place_of("reference"))
        assert judged(Problem.parse(smaller), place_of("reference"))


def test_a_call_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a must be something else")

    monkeypatch.setattr(quantizers, "quantize_weight_both", raising)
    total, _ = told(worker.Task(0, 7, "reference", 1e12, 4, ("quantize_weight_both",)))
    assert [names for _, names, _ in total.wrong] == [["raised ValueError: a must be something else"]] * 4


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def supervise(tasks: list[worker.Task], *_: Any) -> tuple[worker.Tally, list[dict[str, Any]]]:
        total = worker.Tally()
        for task in tasks:
            total.add(told(task)[0])
        return total, []

    monkeypatch.setattr(run, "_supervise", supervise)
    shown: list[str] = []
    out = tmp_path / "sub" / "fuzz.jsonl"
    for _ in range(2):
        assert run.run_fuzz(problems=21, seed=3, backend="reference", workers=2, out=out, show=shown.append) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        assert record["kind"] == "fuzz"
        assert record["problems"] == sum(record["by_call"].values()) == 21
        assert record["wrong"] == record["ended"] == []
        assert (record["backend"], record["seed"], record["workers"]) == ("reference", 3, 2)


@pytest.fixture(scope="module")
def kept() -> list[dict[str, Any]]:
    """The runs in docs/measured."""
    return [json.loads(line) for line in (ROOT / "docs/measured/fuzz.jsonl").read_text().splitlines()]


def test_the_records_that_were_kept(kept: list[dict[str, Any]]) -> None:
    assert kept
    for record in kept:
        assert record["kind"] == "fuzz"
        assert record["problems"] == sum(record["by_call"].values()) > 0
        assert record["ended"] == []


def test_what_a_kept_run_called_wrong_is_explained_and_right_today(kept: list[dict[str, Any]]) -> None:
    """A wrong result stays in the record; what mended it, or the check, is on the page and holds."""
    page = (ROOT / "docs/fuzz.md").read_text()
    wrong = [(record["date"][:10], Problem.parse(one["problem"])) for record in kept for one in record["wrong"]]
    assert wrong, "the run of 2026-11-29 had one"
    for date, problem in wrong:
        assert f"`{problem.call}` on {date}" in page
        assert judged(problem, place_of("reference")) == []


def test_a_worker_draws_sequences() -> None:
    task = worker.Task(0, 7, "reference", 1e12, 6, ("states.call",), states=True)
    total, started = told(task)
    assert total.done == {"states.call": 6}
    assert total.wrong == []
    assert told(task)[1] == started


@pytest.mark.parametrize(("visible", "names"), [(None, ["0", "1", "2"]), ("4,GPU-a7, 6", ["4", "GPU-a7", "6"])])
def test_workers_are_spread_over_gpus(visible: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, str] = {}

    class Process:
        """One that ends at once."""

        def __init__(self, target: Any, args: tuple[worker.Task, Any], daemon: bool) -> None:
            self.task, self.connection = args

        def start(self) -> None:
            seen[self.task.worker] = os.environ["CUDA_VISIBLE_DEVICES"]
            self.connection.send(("ended", ""))

        def join(self, timeout: float) -> None:
            pass

        def is_alive(self) -> bool:
            return False

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

    Context.Process = Process
    monkeypatch.setattr(run, "get_context", lambda method: Context)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    tasks = [worker.Task(i, 0, "cuda", 0.0, 0) for i in range(7)]
    _, crashes = run._supervise(tasks, run._gpus(), "", lambda line: None, 0.0)
    assert crashes == []
    assert seen == {i: names[i % 3] for i in range(7)}
    tasks = [worker.Task(i, 0, "cuda", 0.0, 0, gpu=1) for i in range(7)]
    run._supervise(tasks, run._gpus(), "", lambda line: None, 0.0)
    assert seen == {i: f"{names[(i - 1) % 3]},{names[i % 3]}" for i in range(7)}, "the last one is worked on"
    run._supervise([replace(task, gpu=0, states=True) for task in tasks], run._gpus(), "", lambda line: None, 0.0)
    assert seen == {i: ",".join(names[i % 3 :] + names[: i % 3]) for i in range(7)}
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_a_worker_varies_what_needs_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """All problems have the constants of a model of the worker's kit, nearly all its kind, and many sizes."""
    monkeypatch.setattr(products, "cuda_arch", lambda: "sm_90a")
    subjects = subjects_of("cuda", "sm_90a")
    task = worker.Task(1, 5, "cuda", 1e12, 0, workers=64)
    kit = worker.kit_of(task, 1, subjects)
    problems = list(itertools.islice(worker.problems_of(task, subjects), 640))
    assert len({str(problem) for problem in problems}) == len(problems)
    strange = 0
    for call, subject in subjects.items():
        own = [problem.options for problem in problems if problem.call == call]
        models = [(model.constants.items(), model.kind) for model in kit[call]]
        of_kit = [any(fixed <= o.items() for fixed, _ in models) for o in map(hashable, own)]
        assert all(of_kit), call
        strange += sum(subject.kind(o) not in [kind for _, kind in models] for o in own)
    assert strange < 30
    sizes = {problem.options["k"] for problem in problems if problem.call == "quantize"}
    assert len(sizes) > 40


def hashable(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--minutes", "0"], "minutes is 0.0; it must be positive"),
        (["--problems", "0"], "problems is 0; it must be 1 or more"),
        (["--workers", "0"], "workers is 0; it must be 1 or more"),
        (["--call", "gem"], "call is 'gem'; allowed: grouped_gemm"),
        (
            ["--backend", "emulator", "--call", "nn.LoraExperts"],
            "which backend 'emulator' does not run; allowed: grouped_gemm",
        ),
        (["--repeat", "gemm"], "problem is 'gemm'"),
        (["--repeat", "gem(a=1)"], "problem is of 'gem'"),
        (["--repeat", "gemm(**{'a': 1})"], "it must be call(option=value, ..): no call by keywords"),
        (["--repeat", "gemm(a=b)"], "and has a=b; its values must be numbers"),
        (["--repeat", "gemm(a='BF16'"], "it must be call(option=value, ..): '(' was never closed"),
        (["--repeat", "quantize_nvfp4_stochastic()"], "problem has no dtype; quantize_nvfp4_stochastic takes dtype, "),
        (["--backend", "cpu"], "backend is 'cpu'"),
        (["--states", "--call", "gemm"], "call is 'gemm'; allowed: states.linear"),
        (["--states", "--backend", "emulator"], "sequences of operations run on 'cuda' and 'reference'"),
    ],
)
def test_bad_options_get_a_sentence(options: list[str], message: str) -> None:
    number = [] if "--repeat" in options else ["--problems", "1"]
    result = CliRunner().invoke(app, ["fuzz", *number, *options])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtyp": "float32"}, "problem has dtyp; quantize_weight_both takes dtype, "),
        ({"dtype": "float64"}, "problem has dtype='float64'; allowed: 'bfloat16', 'float16', 'float32'"),
        ({"seed": "7"}, "problem has seed='7'; it must be of type int"),
    ],
)
def test_a_mistyped_problem_is_not_called_wrong(change: dict[str, Any], message: str) -> None:
    """It ended as a finding, "WRONG: raised KeyError"."""
    name = "quantize_weight_both"
    problem = SUBJECTS[name].draw(name, Draw("1", "reference"))
    SUBJECTS[name].check(problem)
    with pytest.raises(ValueError, match=re.escape(message)):
        run.run_fuzz(repeat=str(problem.but(**change)), backend="reference", show=lambda line: None)


@pytest.mark.parametrize("name", [*SUBJECTS, *(name for name in STATES if name != "states.quantized")])
def test_every_problem_may_be_repeated(name: str) -> None:
    subject = (SUBJECTS | STATES)[name]
    for backend in ("cuda", "reference", "emulator", "emulator:sm_100a"):
        subject.check(Problem.parse(str(subject.draw(name, Draw("other", backend)))))
    for arch in ("sm_90a", "sm_100a"):
        lines = list(subject.lines(arch))
        for options in lines[:: max(1, len(lines) // 3)]:
            subject.check(Problem.parse(str(Problem(name, options))))


@pytest.mark.parametrize("done", [3, 0])
def test_what_the_keyboard_ends_is_no_success(done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tally = worker.Tally(Counter({"gemm": done} if done else {}), ended=True)
    monkeypatch.setattr(run, "_supervise", lambda *arguments: (tally, []))
    out = tmp_path / "fuzz.jsonl"
    assert run.run_fuzz(problems=9, workers=1, backend="reference", out=out, show=lambda line: None) == 130
    assert json.loads(out.read_text())["problems"] == done


@pytest.mark.slow
def test_workers_in_processes(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.jsonl"
    result = CliRunner().invoke(
        app, ["fuzz", "--problems", "30", "--workers", "2", "--backend", "reference", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["problems"] == 30


@pytest.mark.slow
@pytest.mark.parametrize("call", [name for name, subject in SUBJECTS.items() if subject.emulated])
def test_the_emulator_is_right(call: str) -> None:
    backend = "emulator" if "sm_90a" in SUBJECTS[call].kernels else "emulator:sm_100a"
    task = worker.Task(0, 11, backend, 1e12, 2, (call,))
    total, _ = told(task)
    assert total.wrong == []


def test_another_gpu_that_is_current_afterwards_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put back, and found at the problem that changed it alone."""
    current = [0]

    def judge(options: Any, place: Any) -> None:
        current[0] = 1 if options["changes"] else current[0]

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: current.__setitem__(0, index))
    subjects = {"some": SimpleNamespace(judge=judge)}
    batch = [Problem("some", {"changes": changes}) for changes in (False, True, False)]
    place = SimpleNamespace(device=torch.device("cuda", 1), judge=SimpleNamespace(problem=0), has_kernels=True)
    raised, refused = worker._launch(batch, subjects, place, worker.Tally())  # type: ignore[arg-type]
    assert raised == {1: ["cuda:1 was current afterwards, and cuda:0 before"]}
    assert refused == set()
    assert current == [0]


def test_another_gpu_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="other_gpu is True, which takes two GPUs, and there are 0; leave it out"):
        run.run_fuzz(problems=1, backend="reference", other_gpu=True)
