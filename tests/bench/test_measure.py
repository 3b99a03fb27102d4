"""One point measured on the CPU with the reference GEMM and a stand-in clock: what is checked, timed and
recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import padless
from padless.bench import measure, problem
from padless.bench.group_sizes import DenseShape, Point, group_sizes, memory_saving_percent, padded_rows
from padless.bench.peers import Contender
from padless.bench.results import ResultFile
from padless.testing import bits, judge
from support.bench_records import StandInTimer

POINT = Point(70, 136, 272, 5)
SIZES = [0, 33, 1, 36, 0]


class ScriptedPeer:
    """A peer with one contender per attribute: right, wrong, raising."""

    name = "scripted"
    compiles_at_run_time = False

    def missing(self) -> str:
        return ""

    def version(self) -> str:
        return "1"

    def grouped(self, of: problem.GroupedProblem) -> list[Contender]:
        right = padless.grouped_gemm(of.a, of.b, of.offs)
        wrong = right.clone()
        wrong[40] = wrong[40] * 1.05  # one row, five percent: a global ratio would not notice

        def explode() -> None:
            raise RuntimeError("boom\nsecond line")

        return [
            Contender("right", lambda: None, lambda: right),
            Contender("wrong_row", lambda: None, lambda: wrong),
            Contender("wrong_but_tolerated", lambda: None, lambda: wrong, tolerance=0.1),
            Contender("nan", lambda: None, lambda: torch.full_like(right, float("nan"))),
            Contender("raises", explode),
            Contender("part", lambda: None, whole=False),
        ]

    decode = grouped

    def dense(self, of: problem.GroupedProblem) -> list[Contender]:
        raise NotImplementedError("no dense product")


@pytest.fixture(scope="module")
def grouped() -> problem.GroupedProblem:
    return problem.make_grouped(POINT, SIZES, 7, "cpu")


def test_record_of_a_point(grouped: problem.GroupedProblem) -> None:
    record = measure.measure_grouped(grouped, [ScriptedPeer()], StandInTimer(2.0))
    own = {"padless", "padless_on_padded", "pad", "pad_then_padless"}
    assert set(record["gpu"]) == own | {"right", "wrong_but_tolerated", "part"}
    assert set(record["end_to_end"]) == {"padless", "pad_then_padless", "right", "wrong_but_tolerated"}
    assert record["bitwise_identical"] is True
    assert set(record["wrong"]) == {"wrong_row", "nan"}
    assert record["errors"] == {"raises": "RuntimeError: boom second line"}
    assert record["row_error"]["padless"] < 0.004
    # Row 40 is no sampled row: the comparison of all rows with the first right result finds it.
    assert 40 not in problem.sample_reference(grouped).rows.tolist()
    assert record["row_error"]["wrong_row"] == pytest.approx(0.05, rel=0.1)
    assert record["row_error"]["nan"] is None
    assert record["sizes"] == SIZES
    assert record["padded_rows"] == padded_rows(SIZES) == 384
    assert record["memory_saving_percent"] == memory_saving_percent(SIZES)
    assert record["flops"] == 2 * 70 * 136 * 272
    assert record["gpu"]["right"] == {"us": 6.0, "spread_percent": 16.67, "samples_us": [5.0, 7.0]}
    json.dumps(record, allow_nan=False)


def test_different_bits_are_reported(grouped: problem.GroupedProblem) -> None:
    own = measure.own_contenders(grouped)
    for contender in own:
        contender.call()
    assert measure.bitwise_identical(own) is True
    output = next(c for c in own if c.name == "padless").output
    assert output is not None
    bits = output().view(torch.int16)
    bits[50, 3] ^= 1
    assert measure.bitwise_identical(own) is False
    assert measure.bitwise_identical(own[1:]) is None


def test_the_padded_gemm_really_runs_on_padded_groups(grouped: problem.GroupedProblem) -> None:
    assert grouped.padded.offs.tolist() == [0, 128, 256, 384, 384]
    assert grouped.padded.a.shape == (384, 272)
    assert grouped.padded.a.scale_major == grouped.a.scale_major == "mn"
    assert grouped.a_row_major.scale_major == "k"


def test_decode_and_dense_records(grouped: problem.GroupedProblem) -> None:
    record = measure.measure_decode(grouped, [ScriptedPeer()], StandInTimer(2.0))
    moved = {"copy of as many bytes", "read of as many bytes"}
    assert set(record["gpu"]) == {"padless", "right", "wrong_but_tolerated", "part"} | moved
    assert moved.isdisjoint(record["end_to_end"])
    assert moved.isdisjoint(record["row_error"])
    assert "bitwise_identical" not in record
    dense = problem.make_dense(DenseShape(24, 136, 272), 3, "cpu")
    record = measure.measure_dense(dense, [ScriptedPeer()], StandInTimer(2.0))
    assert set(record["gpu"]) == {"padless"}
    assert record["errors"] == {"scripted": "NotImplementedError: no dense product"}
    assert record["row_error"]["padless"] < 0.004


def test_operands_are_what_the_quantizer_makes_of_normal_values(grouped: problem.GroupedProblem) -> None:
    x, w = grouped.values()
    assert x.shape == (70, 272)
    assert w.shape == (5, 136, 272)
    assert float(x.float().std()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(padless.quantize(x, padless.FP8_BLOCK).data.view(torch.uint8), grouped.a.data.view(torch.uint8))
    again = problem.make_grouped(POINT, SIZES, 7, "cpu")
    assert torch.equal(again.b.data.view(torch.uint8), grouped.b.data.view(torch.uint8))
    other = problem.make_grouped(POINT, SIZES, 8, "cpu")
    assert not torch.equal(other.b.data.view(torch.uint8), grouped.b.data.view(torch.uint8))
    with pytest.raises(ValueError, match="uninitialised"):
        problem.make_grouped(POINT, SIZES, None, "cpu").values()
    with pytest.raises(ValueError, match="5 values with sum 70"):
        problem.make_grouped(POINT, [70], 7, "cpu")


def test_sampled_reference_agrees_with_the_whole_product(grouped: problem.GroupedProblem) -> None:
    reference = problem.sample_reference(grouped)
    a = padless.dequantize(grouped.a).double()
    b = padless.dequantize(grouped.b).double()
    ends = grouped.offs.tolist()
    assert set(reference.rows.tolist()) >= {0, 32, 34, 69}
    for row, values in zip(reference.rows.tolist(), reference.values, strict=True):
        group = next(g for g, end in enumerate(ends) if row < end)
        assert torch.allclose(values, a[row] @ b[group].t(), rtol=1e-5, atol=1e-5)
    assert problem.sample_reference(problem.make_grouped(Point(1, 8, 16, 1), [1], 0, "cpu")).rows.tolist() == [0]


def test_masked_operand_holds_every_row(grouped: problem.GroupedProblem) -> None:
    data, scale = problem.masked_operand(grouped, 128)
    assert data.shape == (5, 128, 272)
    assert scale.shape == (5, 128, 3)
    assert scale.stride() == (3 * 128, 1, 128)
    codes = torch.cat([data[g, :size].view(torch.uint8) for g, size in enumerate(SIZES)])
    assert torch.equal(codes, grouped.a.data.view(torch.uint8))
    assert torch.equal(torch.cat([scale[g, :size] for g, size in enumerate(SIZES)]), grouped.a.scale)
    assert not data[0].view(torch.uint8).any()
    with pytest.raises(ValueError, match="multiple of 4"):
        problem.masked_operand(grouped, 37)


def test_largest_row_difference_is_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "_ROWS_AT_ONCE", 3)
    y = torch.full((8, 4), 100.0)
    y[6:] = torch.tensor([[1.0], [0.0]])
    x = y.clone()
    assert judge.largest_row_difference(x, y) == 0.0
    x[6, 0] = 1.5  # nothing beside the other rows' size
    assert judge.largest_row_difference(x, y) == pytest.approx(0.25)
    x[7, 0] = 1e-6
    assert judge.largest_row_difference(x, y) == float("inf")
    x[7, 0], x[2, 1] = 0.0, float("nan")
    assert judge.largest_row_difference(x, y) == float("inf")


def test_same_bits_sees_the_sign_of_zero() -> None:
    zero, minus = torch.zeros(2, 2, dtype=torch.bfloat16), -torch.zeros(2, 2, dtype=torch.bfloat16)
    assert bits.same_bits(zero, zero.clone())
    assert not bits.same_bits(zero, minus)
    assert not bits.same_bits(zero, zero[:1])


# --- runs ------------------------------------------------------------------------------------------------


def session_on_cpu(tmp_path: Path, **settings: Any) -> Any:
    from padless.bench.session import Ceilings, RunSettings, Session

    ceilings = Ceilings(4.0e12, 1.4e15, {"gpu": {"padless": {"us": 785.0}}})
    chosen = RunSettings(progress=False, **settings)
    file = ResultFile(tmp_path / "paper.jsonl")
    return Session(file, [], StandInTimer(2.0), ceilings, chosen, "now", started=1e9)


def test_a_cut_run_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    from padless.bench.session import run_points

    points = [Point(40, 8, 16, 2), Point(41, 8, 16, 2), Point(42, 8, 16, 2)]
    measured = []

    def once(point: Point) -> dict[str, Any]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(point)
        made = problem.make_grouped(point, group_sizes(point), 0, "cpu")
        return measure.measure_grouped(made, [], StandInTimer(2.0))

    with pytest.raises(KeyboardInterrupt):
        run_points(session_on_cpu(tmp_path), "paper", points, once)
    assert measured == points[:2]
    measured.clear()
    records = run_points(session_on_cpu(tmp_path), "paper", points, once)
    assert measured == points[2:]
    assert [record["point"] for record in records] == [vars(point) for point in points]
    assert all(record["bitwise_identical"] for record in records)
    # Another seed is another measurement.
    measured.clear()
    run_points(session_on_cpu(tmp_path, seed=1), "paper", points[:1], once)
    assert measured == points[:1]


def test_a_time_limit_stops_between_points(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from padless.bench import session as module

    now = [1e9]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def ten_seconds(point: Point) -> dict[str, Any]:
        now[0] += 10
        return {"gpu": {}}

    points = [Point(40 + i, 8, 16, 2) for i in range(5)]
    run = session_on_cpu(tmp_path, time_limit_s=35)
    # 10, 20, 30 s: a fourth point would end at 40 s.
    assert len(module.run_points(run, "paper", points, ten_seconds)) == 3
    assert module.run_points(session_on_cpu(tmp_path, time_limit_s=5), "paper", [], ten_seconds) == []


def test_the_floor_is_the_larger_of_arithmetic_and_traffic(tmp_path: Path) -> None:
    run = session_on_cpu(tmp_path)
    assert run.floor_us(1_400_000_000, 4) == pytest.approx(1.0)
    assert run.floor_us(1, 8_000_000) == pytest.approx(2.0)


def test_without_a_gpu_runs_refuse_with_one_sentence(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    from padless import bench

    runs = {
        "paper": lambda: bench.run_paper(out_dir=tmp_path),
        "dense": lambda: bench.run_dense(out_dir=tmp_path),
        "decode": lambda: bench.run_decode(out_dir=tmp_path),
        "quantize": lambda: bench.run_quantize(out_dir=tmp_path),
        "host": lambda: bench.run_host(),
    }
    for name, run in runs.items():
        with pytest.raises(ValueError, match=rf"padless bench {name} needs a CUDA GPU, and torch sees none"):
            run()
    assert list(tmp_path.iterdir()) == []


def test_names_and_grids_are_checked(tmp_path: Path) -> None:
    from padless import bench
    from padless.bench.case import CASES
    from padless.bench.peers.find import resolve_peers
    from padless.bench.run import resolve_grid

    paper = CASES["paper"]
    assert len(resolve_grid(paper, "quick")) == len(resolve_grid(paper, None)) == 14
    assert len(resolve_grid(paper, "balanced")) == 72
    assert len(resolve_grid(paper, "full")) == 576
    assert resolve_grid(paper, [POINT]) == [POINT]
    with pytest.raises(ValueError, match=r"points of paper is 'all'; allowed: 'quick', 'balanced', 'full', or"):
        bench.run_paper("all", out_dir=tmp_path)
    with pytest.raises(ValueError, match="'quick', 'full', or a list"):
        bench.run_decode("balanced", out_dir=tmp_path)
    assert [peer.name for peer in resolve_peers(["mslk"], None)] == ["mslk"]
    assert len(resolve_peers(None, None)) == 4
    assert resolve_peers([], None) == []
    scripted = ScriptedPeer()
    assert resolve_peers([scripted], None) == [scripted]
    with pytest.raises(ValueError, match="peers must be among"):
        resolve_peers(["nobody"], None)
    with pytest.raises(ValueError, match="existing folder"):
        resolve_peers(None, tmp_path / "missing")


def test_memory_bound_calls_run_and_count_their_bytes() -> None:
    from padless.bench.cases.quantize import memory_bound_calls

    calls, moved = memory_bound_calls(Point(100, 256, 256, 32), 0, "cpu")
    assert set(calls) == set(moved)
    for call in calls.values():
        call()
    assert moved["quantize activations, MN-major"] == 100 * (512 + 256 + 8)
    assert moved["quantize MXFP8, plain scales"] == 100 * (512 + 256 + 8)
    assert moved["quantize MXFP4, blocked scales"] == 100 * (512 + 128 + 8)
    assert moved["quantize NVFP4, plain scales"] == 100 * (512 + 128 + 16)
    assert moved["unpad bf16"] == 2 * 100 * 512
    assert moved["quantize weights"] == 8 * (256 * 256 * 3 + 4 * 4)
    assert moved["rows and columns, 1x128"] == 100 * (512 + 256 + 256 + 8) + 4 * 256
    assert moved["rows and columns, 128x128"] == 100 * (512 + 256 + 256 + 8) + 4 * 2
    assert moved["columns alone, 1x128"] == 100 * (512 + 256) + 4 * 256
    assert moved["weights and transposes"] == 8 * (256 * 256 * 4 + 2 * 4 * 4)
    # dH and Z of 64 and 128 columns, dZ twice and H; prob and dprob; scales of one row block and of 192 columns.
    rows = 2 * 64 + 2 * 128 + 128 + 128 + 64 + 4 + 4 + 4
    assert moved["swiglu backward, interleaved"] == 100 * rows + 4 * 192


@pytest.mark.gpu
def test_a_small_run_on_the_gpu(tmp_path: Path) -> None:
    """Ceilings, two ragged points and the report, with torch's own product beside padless."""
    from padless import bench

    points = [Point(1030, 384, 512, 5), Point(515, 256, 1024, 3)]
    settings = bench.RunSettings(repeats=2, progress=False)
    result = bench.run_paper(points, ["torch"], tmp_path, settings)
    assert result.failures == []
    assert [record["bitwise_identical"] for record in result.records] == [True, True]
    for record in result.records:
        assert set(record["gpu"]) >= {"padless", "pad_then_padless", "torch_rowwise", "torch_bf16"}
        assert record["floor_us"] > 0
        assert all(timing["us"] > 0 for timing in record["gpu"].values())
    again = bench.run_paper(points, ["torch"], tmp_path, settings)
    assert [record["took_s"] for record in again.records] == [r["took_s"] for r in result.records]


@pytest.mark.gpu(capability=None)
@pytest.mark.slow
def test_padding_runs_near_the_copy_ceiling() -> None:
    from padless.bench.cases.quantize import memory_bound_calls
    from padless.testing.timing import Timer, copy_bytes_per_second

    timer = Timer()
    calls, moved = memory_bound_calls(Point(65536, 8192, 8192, 32), 0)
    ceiling = copy_bytes_per_second(timer)
    times = timer.gpu({name: call for name, call in calls.items() if "pad" in name})
    for name, timing in times.items():
        assert moved[name] / (1e-6 * timing.median_us) >= 0.85 * ceiling, name
