"""padless bench chain on the CPU: points, what a chain is, that wrong contenders are noticed, its record and tables."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from padless import cli, dequantize, grouped_gemm, grouped_gemm_swiglu_quant
from padless.bench import commands, report_file, run_chain, warm_up_worker
from padless.bench.case import CASES
from padless.bench.cases import chain
from padless.bench.cases.problems import chain as chain_problem
from padless.bench.group_sizes import DecodePoint, Point, decode_sizes
from padless.bench.peers import Contender, deepgemm
from padless.bench.results import BenchResult, ResultFile, failures
from padless.bench.run import show_records
from support.bench_records import StandInTimer, timing
from support.deepgemm import stand_in_deepgemm

POINT = DecodePoint(3, 5, 256, 128)
OWN = {"padless", "padless, ordinary launches", "mlp", "mlp, ordinary launches"}


# --- points and operands -------------------------------------------------------------------------------------


def test_the_grid() -> None:
    full, quick = chain_problem.grid(full=True), chain_problem.grid(full=False)
    assert len(set(full)) == len(full) == 36
    assert set(quick) < set(full)
    for axis in ("groups", "rows"):
        assert {getattr(p, axis) for p in quick} == {getattr(p, axis) for p in full}
    assert {(p.N, p.K) for p in quick} == {(p.N, p.K) for p in full}
    assert {p.groups for p in full} == {8, 32, 128}
    assert {p.rows for p in full} == {1, 16, 64}
    assert {(p.N, p.K) for p in full} == {(2048, 2048), (4096, 4096), (7168, 2048), (2048, 7168)}


@pytest.mark.parametrize("point", chain_problem.grid(full=True), ids=repr)
def test_a_chain_has_whole_rounds_of_layers_that_l2_cannot_hold(point: DecodePoint) -> None:
    layers = chain_problem.layers_of(point)
    calls = chain_problem.calls_of(layers)
    weights = point.groups * (point.N * point.K + point.N * point.K // 128**2 * 4)
    assert layers >= 2
    assert layers * weights >= 300e6
    assert layers == 2 or (layers - 1) * weights < 300e6
    assert calls >= 8
    assert calls % layers == 0
    assert calls == layers or calls - layers < 8
    half = Point(1, point.K, point.N // 2, point.groups)  # the second projection: FP8_BLOCK's block and SwiGLU's N
    assert half.K % 128 == 0
    assert point.N % 128 == 0


def test_calls_of() -> None:
    assert [chain_problem.calls_of(layers) for layers in (2, 3, 5, 8, 9, 12)] == [8, 9, 10, 8, 9, 12]


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> chain_problem.ChainProblem:
    monkeypatch.setattr(chain_problem, "WEIGHT_BYTES", 250_000)
    return chain_problem.make_chain(POINT, 7, "cpu")


def test_every_layer_has_operands_of_its_own(problem: chain_problem.ChainProblem) -> None:
    assert (len(problem.layers), len(problem.second), problem.calls) == (3, 3, 9)
    assert problem.order == [0, 1, 2] * 3
    drawn = [layer.b.data for layer in problem.layers] + [layer.b.data for layer in problem.second]
    drawn += [layer.a.data for layer in problem.layers]
    values = [tensor.view(torch.uint8).flatten()[:512].tolist() for tensor in drawn]
    assert len({tuple(value) for value in values}) == len(values)
    for layer, second in zip(problem.layers, problem.second, strict=True):
        assert layer.sizes == second.sizes == decode_sizes(POINT, 7)
        assert layer.b.shape == (3, 256, 128)
        assert second.b.shape == (3, 128, 128)
    other = chain_problem.make_chain(POINT, 8, "cpu")
    assert not torch.equal(other.layers[0].b.data.view(torch.uint8), drawn[0].view(torch.uint8))


def test_references_are_those_of_each_calls_layer(problem: chain_problem.ChainProblem) -> None:
    """Against whole products in float64, without any quantisation between an MLP's projections."""
    product, mlp = problem.references()
    rows = problem.layers[0].point.M
    assert product.rows.tolist() == mlp.rows.tolist()
    assert {row // rows for row in product.rows.tolist()} == set(range(9))
    for reference, tolerance in ((product, 1e-6), (mlp, 0.06)):
        for row, got in zip(reference.rows.tolist(), reference.values, strict=True):
            layer, second = problem.layers[row // rows % 3], problem.second[row // rows % 3]
            group = next(g for g, end in enumerate(layer.offs.tolist()) if row % rows < end)
            x = dequantize(layer.a).double()[row % rows]
            wanted = x @ dequantize(layer.b).double()[group].t()
            if reference is mlp:
                gate, up = wanted.chunk(2)
                hidden = gate / (1 + (-gate).exp()) * up
                wanted = hidden @ dequantize(second.b).double()[group].t()
            assert float((got - wanted).norm() / wanted.norm()) <= tolerance


# --- contenders ----------------------------------------------------------------------------------------------


DRIVER = SimpleNamespace(programmatic=True)


class Graph:
    """What a captured chain does, without a GPU: the calls again, launched as they were when it was captured."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._programmatic = call, DRIVER.programmatic

    def replay(self) -> None:
        with nullcontext() if self._programmatic else chain.ordinary_launches():
            self._call()


Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch, problem: chain_problem.ChainProblem) -> Measure:
    """measure_chain with the reference in the kernels' place, for ordinary launches too."""
    monkeypatch.setattr(chain, "capture", Graph)
    monkeypatch.setattr(chain, "cuda_driver", lambda: DRIVER)

    def run(*peers: Any) -> dict[str, Any]:
        record = chain.measure_chain(problem, peers, StandInTimer(9.0), chain.ordinary_launches)
        assert DRIVER.programmatic
        json.dumps(record, allow_nan=False)
        return record | {"point": vars(POINT), "kind": "chain"}

    return run


def in_ordinary_launches(monkeypatch: pytest.MonkeyPatch, name: str, other: Callable[..., Any]) -> None:
    """Another function in the place of one of the public calls, where launches are ordinary."""
    public = getattr(chain, name)
    monkeypatch.setattr(
        chain, name, lambda *args, **options: (public if DRIVER.programmatic else other)(*args, **options)
    )


def test_record_of_a_point(measure: Measure) -> None:
    record = measure()
    assert failures([record]) == []
    assert list(record["gpu"]) == ["padless", "padless, ordinary launches", "mlp", "mlp, ordinary launches"]
    # Seven letters and nine more, over nine calls: the stand-in's times are of a replay, the record's of a call.
    assert record["gpu"]["padless"] == {"us": 1.28, "spread_percent": 39.13, "samples_us": [0.78, 1.78]}
    assert all(0 < error < 0.01 for error in record["row_error"].values())
    assert set(record["row_error"]) == OWN
    sizes = decode_sizes(POINT, 7)
    assert (record["layers"], record["calls"], record["sizes"]) == (3, 9, sizes)
    assert record["bytes"] == Point(sum(sizes), 256, 128, 3).bytes
    assert record["flops"] == 2 * sum(sizes) * 256 * 128


def test_one_bit_between_the_two_ways_to_launch_is_wrong(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_bit(a: Any, b: Any, offs: Any, out: torch.Tensor) -> None:
        grouped_gemm(a, b, offs, out=out)
        out.view(torch.int16)[0, 0] ^= 1

    in_ordinary_launches(monkeypatch, "grouped_gemm", other_bit)
    record = measure()
    assert set(record["wrong"]) == {"padless", "mlp"}
    assert "bits are not those of 'padless, ordinary launches'" in failures([record])[0]
    assert set(record["gpu"]) == {"padless, ordinary launches", "mlp, ordinary launches"}


@pytest.mark.parametrize(("call", "at_most"), [(0, 0), (8, 0), (8, 2)])
def test_an_output_that_is_not_written_is_wrong(
    measure: Measure, monkeypatch: pytest.MonkeyPatch, call: int, at_most: int
) -> None:
    """One call of the chain, from a replay on: the first replay, or the one after all that were timed."""
    made = [0]

    def lazy(a: Any, b: Any, offs: Any, out: torch.Tensor) -> None:
        if b.shape[1] == 256:  # a product of its own, and no second projection
            replay, which = divmod(made[0], 9)
            made[0] += 1
            if which == call and replay >= at_most:
                return
        grouped_gemm(a, b, offs, out=out)

    in_ordinary_launches(monkeypatch, "grouped_gemm", lazy)
    record = measure()
    assert set(record["wrong"]) == {"padless, ordinary launches"}
    assert record["row_error"]["padless, ordinary launches"] is None
    assert set(record["gpu"]) == OWN - {"padless, ordinary launches"}
    assert made[0] == (9 if at_most == 0 else 27)  # what is wrong at once is not timed


def test_a_wrong_layer_and_a_wrong_half_are_wrong(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of another layer; up in gate's place; and what raises is named."""
    first = {}

    def one_layer(a: Any, b: Any, offs: Any, out: torch.Tensor) -> None:
        grouped_gemm(a, first.setdefault(b.shape, b), offs, out=out)

    in_ordinary_launches(monkeypatch, "grouped_gemm", one_layer)
    assert set(measure()["wrong"]) == {"padless, ordinary launches", "mlp, ordinary launches"}
    monkeypatch.setattr(chain, "grouped_gemm", grouped_gemm)

    def exchanged(b_tensor: Any, **options: Any) -> Any:
        b = b_tensor
        data, scale = (t.roll(t.shape[1] // 2, dims=1) for t in (b.data.view(torch.uint8), b.scale))
        return grouped_gemm_swiglu_quant(b_tensor=type(b)(data.view(b.data.dtype), scale, b.format), **options)

    def explode(a: Any, b: Any, offs: Any, out: torch.Tensor) -> None:
        if b.shape[1] == 256:
            raise RuntimeError("boom\nsecond line")
        grouped_gemm(a, b, offs, out=out)

    in_ordinary_launches(monkeypatch, "grouped_gemm", explode)
    in_ordinary_launches(monkeypatch, "grouped_gemm_swiglu_quant", exchanged)
    record = measure()
    assert set(record["wrong"]) == {"mlp, ordinary launches"}
    assert record["errors"] == {"padless, ordinary launches": "RuntimeError: boom second line"}
    assert set(record["gpu"]) == {"padless", "mlp"}


def usable_deepgemm(monkeypatch: pytest.MonkeyPatch, library: Any) -> deepgemm.DeepGemm:
    monkeypatch.setattr(deepgemm, "hopper_or_reason", lambda: "")
    monkeypatch.setattr(deepgemm, "point_at_cuda_toolkit", lambda: "")
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    peer = deepgemm.DeepGemm(None)
    assert not peer.missing()
    return peer


def test_deepgemm_is_captured_with_both_kinds_of_launches(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    library: Any = stand_in_deepgemm()
    state, captured = ["before"], []
    library.set_pdl = lambda on: state.__setitem__(0, on)
    library.get_pdl = lambda: state[0]
    monkeypatch.setattr(chain, "capture", lambda call: captured.append(state[0]) or Graph(call))
    record = measure(usable_deepgemm(monkeypatch, library))
    assert failures([record]) == []
    assert set(record["gpu"]) == OWN | {"deepgemm_masked", "deepgemm_masked, programmatic"}
    # padless twice, DeepGEMM without and with, the MLP twice
    assert captured == ["before", "before", False, True, "before", "before"]
    assert state == ["before"]


def test_deepgemm_without_the_switch_is_one_contender_and_its_output_is_poisoned(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = stand_in_deepgemm()
    record = measure(usable_deepgemm(monkeypatch, library))
    assert set(record["gpu"]) == OWN | {"deepgemm_masked"}
    done = library.m_grouped_fp8_gemm_nt_masked
    replays = [0]

    def once(*operands: Any, **options: Any) -> None:
        replays[0] += 1
        if replays[0] <= 9:
            done(*operands, **options)

    library.m_grouped_fp8_gemm_nt_masked = once
    assert set(measure(usable_deepgemm(monkeypatch, library))["wrong"]) == {"deepgemm_masked"}


def test_a_peer_that_raises_is_named(measure: Measure) -> None:
    class Broken:
        name = "broken"

        def decode(self, problem: Any) -> list[Contender]:
            raise NotImplementedError("no groups")

    record = measure(Broken())
    assert record["errors"] == {"broken": "NotImplementedError: no groups"}
    assert set(record["gpu"]) == OWN


def test_ordinary_launches_are_packed_without_the_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch is packed with is read where it is packed, and the driver is as before when a call has raised."""
    from padless.runtime import driver as runtime_driver

    device = object.__new__(runtime_driver.CudaDriver)
    device.programmatic, device._cuda = True, SimpleNamespace(cuLaunchKernelEx=None)
    monkeypatch.setattr(chain, "cuda_driver", lambda: device)

    def attributes() -> list[int]:
        shape = runtime_driver.LaunchShape(1, 128, 1, programmatic=True)
        return [a.id for a in runtime_driver.CudaLaunch(device, 0, 0, shape, [], 0)._attributes]

    assert attributes() == [runtime_driver._PROGRAMMATIC_SERIALIZATION]
    with suppress(ZeroDivisionError), chain.ordinary_launches():
        assert attributes() == []
        raise ZeroDivisionError
    assert attributes() == [runtime_driver._PROGRAMMATIC_SERIALIZATION]


def test_kernels_of_both_projections_are_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    made = warm_up_worker.make_decode
    on_cpu = lambda point, seed, device, **options: made(point, seed, "cpu", **options)  # noqa: E731
    monkeypatch.setattr(warm_up_worker, "make_decode", on_cpu)
    contenders = warm_up_worker._contenders("chain", vars(POINT), [], 0)
    assert [contender.name for contender in contenders] == ["padless", "mlp"]
    assert [c.name for c in warm_up_worker._contenders("decode", vars(POINT), [], 0)] == ["padless"]
    for contender in contenders:
        contender.call()


# --- tables and commands -------------------------------------------------------------------------------------


def record_of(point: DecodePoint, **us: float) -> dict[str, Any]:
    names = {
        "own": "padless",
        "ordinary": "padless, ordinary launches",
        "deepgemm": "deepgemm_masked",
        "pdl": "deepgemm_masked, programmatic",
        "mlp": "mlp",
        "mlp_ordinary": "mlp, ordinary launches",
    }
    return {
        "kind": "chain",
        "session": "then",
        "seed": 0,
        "point": vars(point),
        "calls": 9,
        "layers": 9,
        "gpu": {names[name]: timing(value) for name, value in us.items()},
        "floor_us": 7.5,
        "wrong": {},
        "errors": {},
    }


def printed(tmp_path: Path, *records: dict[str, Any]) -> tuple[list[str], BenchResult]:
    file = ResultFile(tmp_path / "chain.jsonl")
    file.append({"kind": "session", "id": "then", "flush": "9 MB written, 4 MB read"})
    for record in records:
        file.append(record)
    text = io.StringIO()
    result = report_file(file.path, console=Console(file=text, width=100))
    assert max(map(len, text.getvalue().splitlines())) <= 100
    assert "…" not in text.getvalue()
    return [" ".join(line.split()) for line in text.getvalue().splitlines()], result


def test_the_tables_numbers(tmp_path: Path) -> None:
    a, b, c = DecodePoint(8, 1, 2048, 2048), DecodePoint(8, 16, 2048, 2048), DecodePoint(128, 64, 7168, 2048)
    lines, result = printed(
        tmp_path,
        record_of(a, own=10.0, ordinary=11.0, deepgemm=20.0, pdl=18.0, mlp=16.0, mlp_ordinary=17.0),
        record_of(b, own=10.0, ordinary=10.4, deepgemm=15.0, pdl=12.5, mlp=20.0, mlp_ordinary=22.0),
        record_of(c, own=400.0, ordinary=402.0),
    )
    assert result.failures == []
    assert "8 1 2048 2048 9 10.0 11.0 20.0 18.0 16.0 17.0 7.5 1.100" in lines
    assert "128 64 7168 2048 9 400.0 402.0 - - - - 7.5 1.005" in lines
    # By hand: sqrt(1.1 * 1.04), sqrt(2 * 1.5), sqrt(1.8 * 1.25), sqrt(17 / 16 * 1.1); (1 + 0.4) / 2 us
    assert "8 34 2 10.0 0.70 1.070 1.040 1.732 1.500 1.500 1.250 1.081 1.062" in lines
    assert "128 1879 1 400.0 2.00 1.005 1.005 - - - - - -" in lines
    # Cube roots: of 10 * 10 * 400 and of 1.1 * 1.04 * 1.005
    assert "all 3 34.2 1.13 1.048 1.005 1.732 1.500 1.500 1.250 1.081 1.062" in lines
    assert any("L2 flushed before every call: 9 MB written, 4 MB read." in line for line in lines)


def test_wrong_contenders_are_shown_and_not_ranked(tmp_path: Path) -> None:
    point = DecodePoint(8, 1, 2048, 2048)
    lines, result = printed(tmp_path, record_of(point, ordinary=11.0) | {"wrong": {"padless": "is wrong: its bits"}})
    assert result.failures == ["groups=8 rows=1 N=2048 K=2048: padless is wrong: its bits"]
    assert "8 34 1 - - - - - - - - - -" in lines
    assert any("padless is wrong: its bits" in line for line in lines)


def test_every_number_of_a_large_point_fits(tmp_path: Path) -> None:
    point = DecodePoint(128, 64, 4096, 4096)
    names = ("own", "ordinary", "deepgemm", "pdl", "mlp", "mlp_ordinary")
    us = dict.fromkeys(names, 1234.56)
    lines, _ = printed(tmp_path, record_of(point, **us) | {"floor_us": 1234.56})
    assert f"128 64 4096 4096 9{' 1234.6' * 7} 1.000" in lines


def test_nothing_measured_says_so() -> None:
    text = io.StringIO()
    show_records(CASES["chain"], [], {}, Console(file=text))
    assert "nothing measured" in text.getvalue()


@pytest.mark.parametrize(("options", "repeats"), [({}, 5), ({"repeats": None}, 5), ({"repeats": 3}, 3)])
def test_the_command_passes_its_options_on(
    options: dict[str, Any], repeats: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(*args: Any) -> BenchResult:
        calls.append(args)
        return BenchResult([], tmp_path / "x.jsonl")

    monkeypatch.setattr(commands, "run_case", run)
    more: dict[str, Any] = {"full": True, "only": ["torch"], "out": tmp_path, "peers": Path("x")}
    assert commands.bench("chain", **more, **options, seed=3, time_limit=9.0) == 0
    ((name, points, peers, out, settings),) = calls
    assert (name, points) == ("chain", "full")
    assert (peers, out) == (["torch"], tmp_path)
    assert (settings.seed, settings.repeats, settings.time_limit_s) == (3, repeats, 9.0)
    assert settings.peers_dir == Path("x")
    assert set(CASES["chain"].options) == {"full", "peers", "out", "time_limit", "repeats"}


def test_the_command_line_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(commands, "bench", lambda **options: calls.append(options) or 0)
    assert CliRunner().invoke(cli.app, ["bench", "chain", "--full", "--repeats", "3"]).exit_code == 0
    (options,) = calls
    assert options["full"]
    assert options["repeats"] == 3
    assert set(options) == {"case", *CASES["chain"].options}


def test_without_a_gpu_the_run_refuses_with_one_sentence(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="padless bench chain needs a CUDA GPU, and torch sees none"):
        run_chain(out_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_small_chain_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs, both ways to launch, bit for bit, and the report."""
    from padless.bench import RunSettings

    monkeypatch.setattr(chain_problem, "WEIGHT_BYTES", 1_000_000)
    points = [DecodePoint(5, 9, 512, 384)]
    result = run_chain(points, [], tmp_path, RunSettings(repeats=2, progress=False))
    assert result.failures == []
    (record,) = result.records
    assert set(record["gpu"]) == OWN
    assert all(timed["us"] > 0 for timed in record["gpu"].values())
