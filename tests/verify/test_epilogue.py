"""The random quantising calls that ``padless verify`` judges: all options are drawn, and planted mistakes are seen.

The reference and the emulator stand in for the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from padless.formats import FORMATS, FP8_BLOCK, ceil_div
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import QUANT, ROUTES
from padless.ops.grouped_gemm import grouped_gemm
from padless.quantization.quantize import quantize
from padless.verify import epilogue as verify_epilogue
from padless.verify import small as verify_small
from padless.verify.epilogue import check_epilogue_against_emulator
from padless.verify.problems.epilogue import (
    FENCE,
    GATE_UP,
    EpilogueProblem,
    GuardedOutputs,
    Outputs,
    moved,
    quant_routes,
    random_epilogue_problem,
    run_problem,
)

HOPPER = next(p for p in ROUTES if p.operation == QUANT and p.config_class is Sm90Fp8Config)
Mistake = Callable[[EpilogueProblem, Outputs], None]


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the draws -------------------------------------------------------------------------------------------


@cache
def drawn(count: int = 180) -> list[EpilogueProblem]:
    return [random_epilogue_problem(HOPPER, seed) for seed in range(count)]


def test_every_quantizing_route_is_verified() -> None:
    listed = {p for p in ROUTES if p.operation == "grouped_gemm_quant"}
    assert listed
    assert {p for arch in ("sm_90a", "sm_100a") for p in quant_routes(arch)} == listed
    assert quant_routes("sm_103a") == quant_routes("sm_100a")


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("row_layout", {None, "plain", "plain_mn", "blocked", "blocked_groups"}),
        ("column_layout", {None, "plain", "blocked", "blocked_groups"}),
        ("scale_rule", {None, "rceil", "floor"}),
        ("semantics", {"implementation", "documented"}),
        ("return_amax", {None, True, False}),
        ("row_output", {None, True, False}),
        ("column_output", {None, True, False}),
        ("m_aligned", {1, 128}),
        ("discrete_col_sfd", {None, True, False}),
    ],
)
def test_the_draws_reach_every_value_of(option: str, wanted: set[Any]) -> None:
    assert {p.options.get(option) for p in drawn()} == wanted


def test_the_draws_reach_every_format_activation_number_tile_and_odd_group() -> None:
    problems = drawn()
    assert {(p.gate_up, p.options.get("d_format")) for p in problems} >= {(g, f) for g in GATE_UP for f in FORMATS}
    dtypes = {p.options.get("d_dtype") for p in problems}
    assert dtypes >= {torch.bfloat16, torch.float16, torch.float32, torch.float8_e5m2}
    for name in ("alpha", "bias", "prob", "norm_const", "global_scale"):
        given = [p.options.get(f"{name}_tensor") is not None for p in problems]
        assert any(given), name
        assert not all(given), name
    tiles = {(c.block_m, c.cluster_n) if (c := p.options["config"]) else None for p in problems}
    assert tiles == {None, *((m, n) for m in (64, 128, 256) for n in (1, 2))}
    sizes = [p.offs.diff(prepend=p.offs.new_zeros(1)).tolist() for p in problems]
    assert any(0 in s for s in sizes)
    assert any(1 in s for s in sizes)
    assert any(p.valid_rows < p.a.shape[0] for p in problems)
    assert any(p.b.shape[1] % 128 for p in problems)
    assert any(p.b.shape[2] % 128 for p in problems)


def test_a_problem_is_a_function_of_route_and_seed() -> None:
    x, y = drawn()[7], random_epilogue_problem(HOPPER, 7)
    assert str(x) == str(y)
    assert torch.equal(x.b.data.view(torch.uint8), y.b.data.view(torch.uint8))
    one, two = (GuardedOutputs(p, run(7, "reference").epilogue).buffers for p in (x, y))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("rows", [0, 1, 70, 72])
def test_scales_keep_their_layout_on_another_device(rows: int) -> None:
    a = quantize(torch.ones(rows, 400), FP8_BLOCK, kind="activation")
    there, here = moved(a, "meta"), moved(a, "cpu")
    assert there.data.is_meta
    assert there.scale.stride() == here.scale.stride() == a.scale.stride()
    assert there.scale_major == "mn"
    assert torch.equal(here.scale, a.scale)


# --- the judges ------------------------------------------------------------------------------------------


@cache
def run(seed: int, backend: str, values: bool = False) -> Outputs:
    problem = random_epilogue_problem(HOPPER, seed)
    return run_problem(problem.for_values() if values else problem, "cpu", backend)


def in_place_of_the_gpu(monkeypatch: pytest.MonkeyPatch, backend: str, mistake: Mistake | None = None) -> None:
    def on_gpu(problem: EpilogueProblem, *_: object) -> Outputs:
        is_values = "row_layout" not in problem.options and "d_format" not in problem.options
        values = is_values and problem.options["d_dtype"] == torch.float32 and problem.gate_up is not None
        right = run(problem.seed, backend, values)
        outputs = Outputs(right.epilogue, {name: t.clone() for name, t in right.bytes.items()})
        if mistake is not None:
            mistake(problem, outputs)
        return outputs

    def sums(problem: EpilogueProblem, *_: object) -> torch.Tensor:
        return grouped_gemm(problem.a, problem.b, problem.offs, out_dtype=torch.float32, backend=backend)

    monkeypatch.setattr(verify_epilogue, "run_problem", on_gpu)
    monkeypatch.setattr(verify_epilogue, "_sums", sums)
    monkeypatch.setattr(verify_epilogue, "cuda_driver", lambda: type("D", (), {"arch": "sm_90a"}))
    monkeypatch.setattr(verify_epilogue, "quant_routes", lambda arch: [HOPPER])


def checked(*seeds: int) -> str:
    """The check of `padless verify` on problems of Hopper's first route."""
    with pytest.MonkeyPatch.context() as few:
        few.setattr(verify_epilogue, "problems_of", lambda arch: [(HOPPER, seed) for seed in seeds])
        return verify_epilogue.CHECK.on("reference", "sm_90a")


def test_what_the_reference_computes_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    in_place_of_the_gpu(monkeypatch, "reference")
    assert "elements" in checked(*range(36))


def test_problems_go_to_all_routes_in_turn() -> None:
    routes = quant_routes("sm_90a")
    problems = verify_epilogue.problems_of("sm_90a", 54, 3)
    assert {route for route, _ in problems} == set(routes)
    assert [seed for _, seed in problems] == list(range(3, 57))
    assert verify_epilogue.problems_of("sm_75", 54) == []


def seed_with(wanted: Callable[[EpilogueProblem], bool]) -> int:
    return next(p.seed for p in drawn() if p.valid_rows > 40 and wanted(p))


def is_rows_of_codes(p: EpilogueProblem) -> bool:
    return p.gate_up is None and p.options.get("row_output") is True


def one_code(problem: EpilogueProblem, outputs: Outputs) -> None:
    outputs.bytes["row_codes"][FENCE + 3] ^= 1


def one_byte_before(problem: EpilogueProblem, outputs: Outputs) -> None:
    outputs.bytes["row_codes"][FENCE - 1] ^= 1


def one_byte_behind(problem: EpilogueProblem, outputs: Outputs) -> None:
    outputs.bytes["row_scale"][-FENCE] ^= 1


def a_row_of_nobody(problem: EpilogueProblem, outputs: Outputs) -> None:
    assert problem.valid_rows < problem.a.shape[0]
    outputs.bytes["row_codes"][-FENCE - 1] ^= 1


MISTAKES: dict[str, tuple[Mistake, Callable[[EpilogueProblem], bool], str]] = {
    "one wrong code": (one_code, is_rows_of_codes, r"row_codes.* 1 of .* from 3 to 3"),
    "a byte before": (one_byte_before, is_rows_of_codes, r"row_codes.*from -1 to -1; 1 of them outside"),
    "a byte behind": (one_byte_behind, is_rows_of_codes, r"row_scale.*1 of them outside"),
    "a row of nobody": (
        a_row_of_nobody,
        lambda p: is_rows_of_codes(p) and p.valid_rows < p.a.shape[0],
        r"row_codes.* 1 of",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_seen_by_both_checks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mistake, wanted, message = MISTAKES[name]
    seed = seed_with(wanted)
    in_place_of_the_gpu(monkeypatch, "reference")
    assert checked(seed)
    emulated = {k: t.numpy().tobytes() for k, t in run(seed, "reference").bytes.items()}
    assert verify_epilogue._compare(drawn()[seed], (emulated, b""))[1] == 0
    in_place_of_the_gpu(monkeypatch, "reference", mistake)
    with pytest.raises(AssertionError, match=message):
        checked(seed)
    with pytest.raises(AssertionError, match=message):
        verify_epilogue._compare(drawn()[seed], (emulated, b""))


def test_zeros_are_allowed_beside_scales_in_their_tile_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with a number of scales that is no multiple of 4 leave columns of a tile; the last tiles have none at all."""

    def row_scales(p: EpilogueProblem) -> int:
        fmt = run(p.seed, "reference").epilogue.row_format
        assert fmt is not None
        return ceil_div(p.b.shape[1], fmt.block_k)

    def padded(p: EpilogueProblem) -> bool:
        tiled = is_rows_of_codes(p) and p.options["row_layout"] == "blocked_groups"
        return tiled and row_scales(p) % 4 != 0 and len(p.offs) > 2

    seed = seed_with(padded)

    def beside(problem: EpilogueProblem, outputs: Outputs) -> None:
        tiles = ceil_div(row_scales(problem), 4)
        outputs.bytes["row_scale"][FENCE + 512 * (tiles - 1) + 3] = 0  # row 0, the last of four columns

    def alone(problem: EpilogueProblem, outputs: Outputs) -> None:
        last = outputs.bytes["row_scale"][-FENCE - 512 : -FENCE]
        assert (last != 0).any()
        last.zero_()

    in_place_of_the_gpu(monkeypatch, "reference", beside)
    assert checked(seed)
    in_place_of_the_gpu(monkeypatch, "reference", alone)
    with pytest.raises(AssertionError, match="row_scale"):
        checked(seed)


@pytest.mark.parametrize("size", [2.0**-23, 2.0**-18])
def test_swiglu_may_be_off_by_what_its_exponential_explains(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    """Values off by 2^-23 are counted, by 2^-18 refused; and codes have to follow from the values."""
    seed = seed_with(lambda p: p.gate_up is not None and p.options.get("d_format") == FP8_BLOCK)

    def off(problem: EpilogueProblem, outputs: Outputs) -> None:
        if outputs.bytes.keys() == {"d"}:
            valid = outputs.bytes["d"][FENCE : FENCE + 4 * problem.valid_rows * (problem.b.shape[1] // 2)]
            values = valid.clone().view(torch.float32)
            values[5] *= 1 + size
            valid.copy_(values.view(torch.uint8))

    in_place_of_the_gpu(monkeypatch, "reference", off)
    if size > 2.0**-20:
        with pytest.raises(AssertionError, match=r"1 of .* values are further off .* row 0, column 5"):
            checked(seed)
    else:
        assert checked(seed)


def test_beside_the_emulator_a_swiglu_with_the_same_values_has_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = seed_with(lambda p: p.gate_up is not None and is_rows_of_codes(p) is False and "row_output" in p.options)
    name = "row_codes" if drawn()[seed].options["row_output"] else "column_codes"
    emulated = {k: t.numpy().tobytes() for k, t in run(seed, "reference").bytes.items()}
    values = run(seed, "reference", True).bytes["d"].numpy().tobytes()

    def a_code(problem: EpilogueProblem, outputs: Outputs) -> None:
        if name in outputs.bytes:
            outputs.bytes[name][FENCE] ^= 1

    in_place_of_the_gpu(monkeypatch, "reference", a_code)
    with pytest.raises(AssertionError, match=name):
        verify_epilogue._compare(drawn()[seed], (emulated, values))


def test_both_checks_with_the_emulator_in_the_gpus_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an activation, so that its own sums and the other process's bits must be met exactly."""
    candidates = [p for p in drawn() if is_rows_of_codes(p) and p.valid_rows > 0]
    seed = min(candidates, key=lambda p: p.valid_rows * p.b.shape[1] * (p.b.shape[2] + 512)).seed
    in_place_of_the_gpu(monkeypatch, "emulator")
    assert checked(seed)
    assert "bytes the same, but 0 that" in check_epilogue_against_emulator(1, seed, workers=1)


# --- small launches for compute-sanitizer ----------------------------------------------------------------


@pytest.mark.parametrize("index", range(len(verify_small.QUANT_CALLS)))
def test_a_small_quantizing_call_is_allowed_and_writes_every_output(index: int) -> None:
    problem = verify_small.small_problem(HOPPER, *verify_small.QUANT_CALLS[index])
    outputs = run_problem(problem, "cpu", "reference")
    before = GuardedOutputs(problem, outputs.epilogue).buffers
    assert all(not torch.equal(outputs.bytes[name], before[name]) for name in before)


def test_the_small_launches_of_a_machine_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, by the reference, with their fences looked at."""
    launched: list[str] = []
    right = verify_small.run_problem
    monkeypatch.setattr(verify_small, "run_problem", lambda *a: (launched.append("one"), right(*a))[1])
    verify_small.SMALL.on("reference", "sm_90a")
    assert len(launched) == len(verify_small.QUANT_CALLS) * len(quant_routes("sm_90a"))
