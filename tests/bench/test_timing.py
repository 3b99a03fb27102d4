"""Clocks and what they are told: statistics, the order of calls, what is read about the machine, compiling
ahead.
"""

from __future__ import annotations

import io
import json
import random
import statistics
import subprocess
import sys
from typing import Any

import pytest
import torch

from padless.bench import warm_up
from padless.bench.group_sizes import Point, balanced_grid, full_grid
from padless.testing import machine, timing


def test_timing_statistics() -> None:
    measured = timing.Timing((4.0, 1.0, 2.0, 3.0, 100.0))
    assert measured.median_us == 3.0
    assert measured.spread_percent == pytest.approx(100 * (4.0 - 2.0) / 3.0)
    assert timing.Timing((5.0,)).spread_percent == 0.0
    written = timing.Timing((1.234567, 1.3)).as_dict()
    assert written == {"us": 1.27, "spread_percent": 2.58, "samples_us": [1.23, 1.3]}


def test_geomean() -> None:
    assert timing.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert timing.geomean([]) != timing.geomean([])


class FakeCuda:
    """torch.cuda as far as Timer uses it: a stream whose clock moves with what is put on it.

    Nothing begins before the host has issued it.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_us = 0.0
        self.host_s = 0.0

    def synchronize(self) -> None:
        self.log.append("sync")

    def issue(self, us: float) -> None:
        self.now_us = max(self.now_us, 1e6 * self.host_s) + us

    def _sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.issue(cycles / 2000)

    def Event(self, enable_timing: bool = False) -> Any:
        fake = self

        class Event:
            at = 0.0

            def record(self) -> None:
                fake.log.append("event")
                fake.issue(0.0)
                self.at = fake.now_us

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1000

        return Event()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    monkeypatch.setattr(timing.torch, "cuda", cuda)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: cuda.host_s)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: cuda.log.append("rest"))
    return cuda


def fake_timer(fake: FakeCuda, repeats: int) -> timing.Timer:
    timer = timing.Timer.__new__(timing.Timer)
    timer.repeats, timer.pause_s = repeats, 0.0

    def flush() -> None:
        fake.log.append("flush")
        fake.issue(120.0)

    timer._flush = flush  # type: ignore[method-assign]
    return timer


def test_a_flush_writes_and_then_reads_what_was_written_first() -> None:
    timer = timing.Timer.__new__(timing.Timer)
    timer._flush_buffer = torch.full((4096,), 3, dtype=torch.uint8)
    timer._clean = timer._flush_buffer[:1024].view(torch.int64)
    timer._sum = torch.full((), -1)
    timer._flush()
    assert not timer._flush_buffer.any()
    assert timer._sum == 0


def test_contenders_take_turns_behind_a_flush_and_a_sleep(fake: FakeCuda) -> None:
    def work(name: str, us: float) -> Any:
        def call() -> None:
            fake.log.append(name)
            fake.host_s += 40e-6
            fake.issue(us)

        return call

    timer = fake_timer(fake, repeats=3)
    times = timer.gpu({"a": work("a", 10.0), "b": work("b", 20.0)})
    # The flush and the sleep are not in the times; the host's 40 us are neither.
    assert times["a"].samples_us == pytest.approx((10.0,) * 3)
    assert times["b"].samples_us == pytest.approx((20.0,) * 3)
    # Every round starts with another one, and everybody rests before a call.
    turns = [step for name in "abbaab" for step in ("sync", "rest", "flush", "sleep", "event", name, "event", "sync")]
    assert fake.log[-len(turns) :] == turns


def test_a_call_that_the_host_issued_late_is_timed_again(fake: FakeCuda) -> None:
    host_us = iter([5.0] * 3 + [900.0, 950.0] + [5.0] * 9)  # warmed up; after a rest; and so on

    def call() -> None:
        fake.host_s += 1e-6 * next(host_us)
        fake.issue(10.0)

    times = fake_timer(fake, repeats=3).gpu({"a": call})
    assert times["a"].samples_us == pytest.approx((10.0,) * 3)
    assert next(host_us) == 5.0
    assert len(list(host_us)) == 14 - 3 - 4 - 1  # one call more than was asked for


def test_a_call_that_waits_for_the_gpu_itself_is_timed_all_the_same(fake: FakeCuda) -> None:
    def call() -> None:
        fake.host_s += 0.2
        fake.issue(10.0)

    (sample,) = fake_timer(fake, repeats=1).gpu({"a": call})["a"].samples_us
    assert sample > 10e3


def test_a_host_that_takes_milliseconds_does_not_count(fake: FakeCuda) -> None:
    """Such as Python beside other processes."""

    def call() -> None:
        fake.host_s += 12e-3
        fake.issue(10.0)

    (sample,) = fake_timer(fake, repeats=1).gpu({"a": call})["a"].samples_us
    assert sample == pytest.approx(10.0)


def test_end_to_end_counts_the_host(fake: FakeCuda) -> None:
    def call() -> None:
        fake.host_s += 55e-6

    times = fake_timer(fake, repeats=4).end_to_end({"a": call, "b": lambda: None})
    assert times["a"].samples_us == pytest.approx((55.0,) * 4)
    assert times["b"].samples_us == (0.0,) * 4


def test_host_time_per_call_is_the_callers(fake: FakeCuda) -> None:
    def call() -> None:
        fake.host_s += 6.5e-6

    assert timing.host_us_per_call(call, calls=50) == pytest.approx(6.5)


def test_repeats_are_checked() -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1"):
        timing.Timer(repeats=0)


@pytest.mark.gpu(capability=None)
def test_the_gpu_clock_agrees_with_known_work() -> None:
    """Copies of one and of four buffers: four times the time, a plausible bandwidth, host time left out."""
    timer = timing.Timer(repeats=7)
    source = torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def slow_host_copy() -> None:
        sum(range(200_000))  # milliseconds of Python before the copy is even issued
        target.copy_(source)

    times = timer.gpu(
        {
            "one": lambda: target.copy_(source),
            "four": lambda: [target.copy_(source) for _ in range(4)],
            "slow host": slow_host_copy,
        }
    )
    one = times["one"].median_us
    assert times["four"].median_us == pytest.approx(4 * one, rel=0.25)
    assert times["slow host"].median_us == pytest.approx(one, rel=0.25)
    assert timer.end_to_end({"slow host": slow_host_copy})["slow host"].median_us > 2 * one
    assert 0.2e12 < timing.copy_bytes_per_second(timer) < 20e12


# --- machine ---------------------------------------------------------------------------------------------


def test_smi_lines_are_parsed() -> None:
    names = ["gpu", "driver", "mhz", "power", "fan"]
    line = "NVIDIA H200, 580.159.04, 1980, 701.25, [N/A]"
    expected = {"gpu": "NVIDIA H200", "driver": "580.159.04", "mhz": 1980.0, "power": 701.25}
    assert machine.parse_smi_line(line, names) == expected
    assert machine.parse_smi_line("", names) == {}
    assert machine.parse_smi_line("a, b", names) == {}


def test_smi_is_only_asked_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        seen.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="1500, 2619, 640.0, 61\n")

    monkeypatch.setattr(machine.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setattr(machine, "_nvml_clocks", lambda: {}["no nvml"])
    clocks = machine.clocks()
    assert clocks == {"sm_mhz": 1500.0, "mem_mhz": 2619.0, "power_w": 640.0, "temperature_c": 61.0}
    assert all(argument.startswith(("/", "--id=", "--query-gpu=", "--format=")) for argument in seen[0])


def test_description_names_the_versions() -> None:
    facts = machine.describe()
    assert facts["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert set(facts) >= {"date", "python", "cuda", "versions"}
    json.dumps(facts, allow_nan=False)


# --- compiling ahead -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 3, 16])
def test_work_is_shared_out_by_kernel_family(workers: int) -> None:
    points = full_grid()
    random.Random(1).shuffle(points)
    shares = warm_up.share_out(points, workers)
    assert sorted(map(repr, (point for share in shares for point in share))) == sorted(map(repr, points))
    homes: dict[tuple[int, int, int], set[int]] = {}
    for index, share in enumerate(shares):
        for point in share:
            homes.setdefault((point.N, point.K, point.groups), set()).add(index)
    assert all(len(where) == 1 for where in homes.values())
    sizes = [len(share) for share in shares]
    assert len(shares) == workers
    assert max(sizes) - min(sizes) <= 4
    assert statistics.mean(sizes) == 576 / workers


def test_fewer_points_than_workers() -> None:
    assert len(warm_up.share_out(balanced_grid()[:3], 16)) == 3
    assert warm_up.share_out([], 4) == []


def test_workers_get_the_points_and_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []

    class Worker:
        def __init__(self, command: list[str], **options: Any) -> None:
            assert command == [sys.executable, "-m", "padless.bench.warm_up_worker"]
            self.stdin = io.StringIO()
            self.stdin.close = lambda: jobs.append(json.loads(self.stdin.getvalue()))  # type: ignore[method-assign]

        def wait(self, timeout: float) -> int:
            return 0

    monkeypatch.setattr(warm_up.subprocess, "Popen", Worker)
    monkeypatch.setattr(warm_up, "_worker_count", lambda points: 2)
    points = [Point(8192, 3072, 3072, 4), Point(8192, 4096, 3072, 4)]
    warm_up.warm_up("paper", points, None, ["deepgemm"], 3)
    assert [job["points"] for job in jobs] == [[vars(points[0])], [vars(points[1])]]
    assert all(job["names"] == ["deepgemm"] and job["seed"] == 3 and job["folder"] is None for job in jobs)
    assert [Point(**fields) for job in jobs for fields in job["points"]] == points
    jobs.clear()
    warm_up.warm_up("paper", points[:1], None, [], 0)
    assert jobs == []
    with pytest.raises(ValueError, match="kind must be one of"):
        warm_up.warm_up("dense", points, None, [], 0)


def test_workers_are_as_many_as_usual_points_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Point(8192, 3072, 3072, 4), Point(65536, 8192, 8192, 32)
    usual = warm_up.working_set_bytes(small.M, small.N, small.K, small.groups)
    monkeypatch.setattr(warm_up, "cpus", lambda: 8)
    for times, expected in ((1, 1), (4, 4), (100, 8)):
        free = int((times + 0.5) * usual / warm_up._MEMORY_SHARE)
        monkeypatch.setattr(warm_up.torch.cuda, "mem_get_info", lambda free=free: (free, free))
        assert warm_up._worker_count([small] * 10) == expected
    # One large point among many does not decide for all.
    monkeypatch.setattr(warm_up.torch.cuda, "mem_get_info", lambda: (10 * usual, 10 * usual))
    assert warm_up._worker_count([large]) == 1 < warm_up._worker_count([small] * 50 + [large])
