"""The quantising calls that ``padless verify`` makes: all options are drawn, and errors planted in each output are seen.

The reference, and the emulator, stand in for the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

from padless.epilogue import Epilogue, EpilogueTensors, GateRule
from padless.formats import FORMATS, FP8_BLOCK, ceil_div
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.table import QUANT, ROUTES
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.testing.operands import moved
from padless.verify.emulator import products as emulated
from padless.verify.emulator.kernels import settings_of
from padless.verify.fuzz import epilogues
from padless.verify.fuzz.epilogue_lines import CHECKS, GATE_UP, gated_lines, line, random_line, small
from padless.verify.fuzz.epilogue_outputs import GUARD
from padless.verify.fuzz.epilogues import Fused
from padless.verify.fuzz.judge import Judge
from padless.verify.fuzz.place import place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.tiles import FUSED, routes_of

HOPPER = next(p for p in ROUTES if p.operation == QUANT and p.config_class is Sm90Fp8Config)
CALL = "grouped_gemm_epilogue"

pytestmark = pytest.mark.usefixtures("one_thread")


# --- the draws -------------------------------------------------------------------------------------------


@cache
def drawn(count: int = 180) -> list[Options]:
    return [random_line(HOPPER, seed, "near", "bits", "changes") for seed in range(count)]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_every_quantizing_route_is_verified(arch: str) -> None:
    listed = {(p.a, p.b, p.module) for p in ROUTES if (p.operation, p.arch) == (QUANT, arch)}
    for lines in (CHECKS["epilogues"], small):
        assert {(o["a"], o["b"], o["module"]) for o in lines(arch)} == listed
    assert routes_of("sm_103a", QUANT) == routes_of("sm_100a", QUANT)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("row_layout", {"plain", "plain_mn", "blocked", "blocked_groups"}),
        ("column_layout", {"plain", "blocked", "blocked_groups"}),
        ("rule", {"", "te", "rceil", "floor", "cudnn", "cudnn_documented"}),
        ("semantics", {"implementation", "documented"}),
        ("amax", {True, False}),
        ("rows", {True, False}),
        ("columns", {True, False}),
        ("m_aligned", {1, 128}),
        ("out", {"bfloat16", "float16", "float32"}),
        ("special", {"", "inf", "nan"}),
        ("prob_of_rank_3", {True, False}),
        ("tile", {*range(len(FUSED))}),
        *((name, {False, "bfloat16", "float16", "float32"}) for name in ("alpha", "bias", "prob")),
    ],
)
def test_the_draws_reach_every_value_of(option: str, wanted: set[Any]) -> None:
    assert {o[option] for o in drawn()} == wanted


def test_the_draws_reach_every_format_activation_argument_and_odd_group() -> None:
    names = (None, *(format.name for format in FORMATS))
    assert {(o["gate_up"], o["format"]) for o in drawn()} == {*itertools.product(GATE_UP, names)}
    given = {"d_format", "return_amax", "row_layout", "column_layout", "column_output", "scale_rule"}
    assert {name for o in drawn() for name in o["left_out"]} == given
    assert all(any(name not in o["left_out"] for o in drawn()) for name in given)
    sizes = [o["sizes"] for o in drawn()]
    assert all(any(size in some for some in sizes) for size in (0, 1, 127, 129))
    assert any(o["past"] for o in drawn())
    assert any(o["n"] % 128 for o in drawn())
    assert any(o["k"] % 128 for o in drawn())


def test_a_problem_is_a_function_of_route_and_seed() -> None:
    assert random_line(HOPPER, 7, "near", "bits", "changes") == drawn()[7]
    one, two = (Fused(drawn()[7], place_of("reference")) for _ in range(2))
    assert torch.equal(one.product.b.plain.data.view(torch.uint8), two.product.b.plain.data.view(torch.uint8))
    assert torch.equal(one.sums, two.sums)


@pytest.mark.parametrize("rows", [0, 1, 70, 72])
def test_scales_keep_their_layout_on_another_device(rows: int) -> None:
    a = quantize(torch.ones(rows, 400), FP8_BLOCK, kind="activation")
    there, here = moved(a, "meta"), moved(a, "cpu")
    assert there.data.is_meta
    assert there.scale.stride() == here.scale.stride() == a.scale.stride()
    assert there.scale_major == "mn"
    assert torch.equal(here.scale, a.scale)


# --- what is right ---------------------------------------------------------------------------------------


def wrong_of(*lines: Options, backend: BackendName = "reference", arch: str = "sm_90a") -> set[str]:
    """What the properties of these problems find, without tensors' shapes and the like."""
    with settings_of(backend):
        place = replace(place_of(backend), arch=arch, judge=Judge(any_nan=False))
        for o in lines:
            SUBJECTS[CALL].judge(o, place)
        return {name for names in place.judge.verdicts().values() for name in names}


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 6))])
def test_what_the_reference_computes_passes(part: int) -> None:
    """Each activation with each format of the output, on every route of either architecture."""
    lines = [o for arch in ("sm_90a", "sm_100a") for o in CHECKS["epilogues"](arch)]
    assert wrong_of(*drawn()[part:36:6], *lines[part::6]) == set()


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_gates_with_a_rule_pass(arch: str) -> None:
    lines = list(gated_lines(arch))
    assert wrong_of(*lines[::2], arch=arch) == set()
    assert len(lines) == (10 if arch == "sm_90a" else 6)
    assert {tuple(o["gate"]) for o in lines} == {(1.702, 7.0, 1.0), (1.0, 0.75, 0.0)}
    assert any(o["gate_up"] == "alternating" for o in lines) == (arch == "sm_90a")


def test_a_small_launch_is_allowed_and_writes_every_output() -> None:
    for o in small("sm_90a"):
        if o["module"] == HOPPER.module:
            case = Fused(o, place_of("reference"))
            parts = case.run(case.operands)
            assert parts.keys() == case.layout.likes.keys()
            assert all(t.numel() for t in parts.values())
    assert {o["format"] for o in small("sm_90a")} == {None, "FP8_BLOCK", "MXFP8", "NVFP4"}


def test_the_emulator_in_the_gpus_place() -> None:
    """Without an activation, so that its own sums and the other process's bits must be met exactly."""
    o = line(HOPPER, (5, 0, 3), 144, 80, "near", "bits", past=1, format="FP8_BLOCK", columns=True, bias=True, amax=True)
    assert wrong_of(o, backend="emulator") == set()
    with settings_of("emulator"):
        here = emulated.computed(CALL, o, place_of("emulator"))
    judge = Judge(any_nan=False)
    assert emulated.compare_parts(judge, here, emulated.emulate(CALL, "sm_90a", o)) == 0
    assert judge.verdicts() == {}
    assert judge.elements > 0


# --- what is not -----------------------------------------------------------------------------------------

Change = Callable[[Epilogue, EpilogueTensors, int], None]


@dataclass(frozen=True)
class Bug:
    """An error after a call. found: by which properties, and what they say; of: problems that have such an output."""

    change: Change
    found: dict[str, str]
    of: Callable[[Options], bool] = lambda o: o["gate_up"] is None and o["rows"]


def stored(name: str, place: int) -> Change:
    """A bit of the byte at ``place`` of an output and what lies around it, where the call has that output."""

    def change(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
        if getattr(t, name) is not None:
            torch.empty(0, dtype=torch.uint8).set_(getattr(t, name).untyped_storage())[place] ^= 1

    return change


def a_row_of_no_group(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
    assert t.row_codes is not None
    t.row_codes.view(torch.uint8)[valid, 0] ^= 1


def in_the_gap(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
    assert t.row_codes is not None
    codes = t.row_codes.view(torch.uint8)
    codes.as_strided((1,), (1,), codes.storage_offset() + codes.shape[1]).bitwise_xor_(1)


def next_to_scales(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
    """Allowed: the padding of row 0 in the last tile of four columns, of which not all have scales."""
    assert t.row_scale is not None
    t.row_scale.view(torch.uint8)[512 * (tiles_across(epilogue, t) - 1) + 3] = 0


def last_tile_cleared(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
    assert t.row_scale is not None
    assert (t.row_scale.view(torch.uint8)[-512:] != 0).any()
    t.row_scale.view(torch.uint8)[-512:] = 0


def tiles_across(epilogue: Epilogue, t: EpilogueTensors) -> int:
    assert t.row_codes is not None
    assert epilogue.row_format is not None
    columns = t.row_codes.shape[1] * epilogue.row_format.codes_per_byte
    return ceil_div(ceil_div(columns, epilogue.row_format.block_k), 4)


def values_off_by(size: float) -> Change:
    """The float32 values of SwiGLU alone, of which the codes of the other call are then not what follows."""

    def change(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
        if t.d is not None and t.d.dtype == torch.float32:
            t.d[: valid or 1] *= 1 + size

    return change


def another_nan_of_amax(epilogue: Epilogue, t: EpilogueTensors, valid: int) -> None:
    if t.amax is not None:
        t.amax.view(torch.int32)[t.amax.isnan()] = 0x7FC00001


def is_tiled(o: Options) -> bool:
    format = next((f for f in FORMATS if f.name == o["format"]), None)
    tiled = o["gate_up"] is None and o["rows"] and o["row_layout"] == "blocked_groups" and len(o["sizes"]) > 2
    return bool(tiled and format and ceil_div(o["n"], format.block_k) % 4)


def is_in_tiles(o: Options) -> bool:
    return is_rows(o) and "blocked" in o["row_layout"]


def is_swiglu_of_codes(o: Options) -> bool:
    return o["gate_up"] is not None and o["format"] == "FP8_BLOCK"


ELEMENT = {"near": "{0}", "bits": "the definition's bits: {0}", "changes": "cuDNN's call: {0}"}


def of_element(name: str) -> dict[str, str]:
    return {key: text.format(name) for key, text in ELEMENT.items()}


def stray(name: str) -> dict[str, str]:
    return dict.fromkeys(("none", *ELEMENT), f"{name}: something else was written")


SWIGLU = {"near": "SwiGLU's float64", "bits": "the reference's values"}
# Every property of the row finds the bug by itself; with none of them fences alone are looked at.
BUGS: dict[str, Bug] = {
    "one wrong code": Bug(stored("row_codes", GUARD + 3), of_element("row_codes")),
    "one wrong scale": Bug(stored("row_scale", GUARD), of_element("row_scale"), is_in_tiles),
    "one wrong column code": Bug(stored("column_codes", GUARD), of_element("column_codes"), lambda o: o["columns"]),
    "one wrong value": Bug(stored("d", GUARD), of_element("d"), lambda o: o["format"] is None and not o["gate_up"]),
    "one wrong amax": Bug(stored("amax", GUARD), of_element("amax"), lambda o: o["amax"] and o["sizes"][0] > 0),
    "another NaN of amax": Bug(
        another_nan_of_amax, {"bits": ELEMENT["bits"].format("amax"), "changes": ELEMENT["changes"].format("amax")},
        lambda o: o["amax"] and o["special"] == "nan",
    ),
    "a byte before": Bug(stored("row_codes", GUARD - 1), stray("row_codes")),
    "a byte behind": Bug(stored("row_scale", -GUARD), stray("row_scale")),
    "a row of no group": Bug(a_row_of_no_group, stray("row_codes"), lambda o: is_rows(o) and o["past"] > 0),
    "a byte in the gap between rows": Bug(in_the_gap, stray("row_codes")),
    "a tile without scales cleared": Bug(last_tile_cleared, stray("row_scale"), is_tiled),
    "values off by 2^-18": Bug(values_off_by(2.0**-18), SWIGLU, is_swiglu_of_codes),
    "codes of other values": Bug(
        values_off_by(2.0**-22), {key: ELEMENT[key].format("row_scale") for key in ("near", "bits")},
        lambda o: is_swiglu_of_codes(o) and o["rows"],
    ),
}  # fmt: skip


def is_rows(o: Options) -> bool:
    return o["gate_up"] is None and bool(o["rows"])


def line_with(wanted: Callable[[Options], bool]) -> Options:
    return next(o for o in drawn() if sum(o["sizes"]) > 40 and wanted(o)) | {"gaps": [0, 0, 16]}


def planted(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error after every call."""
    right = epilogues.grouped_gemm_epilogue

    def call(a: Any, b: Any, offs: Any, epilogue: Epilogue, tensors: EpilogueTensors, **how: Any) -> EpilogueTensors:
        made = right(a, b, offs, epilogue, tensors, **how)
        change(epilogue, tensors, int(offs[-1]))
        return made

    monkeypatch.setattr(epilogues, "grouped_gemm_epilogue", call)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_error_is_found_by_every_property(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bug = BUGS[name]
    o = line_with(bug.of)
    assert wrong_of(o) == set()
    planted(bug.change, monkeypatch)
    for found_by, message in bug.found.items():
        assert message in wrong_of(o | {"properties": [found_by]}), found_by


def test_zeros_next_to_scales_and_values_as_near_as_exp_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        planted(next_to_scales, patch)
        assert wrong_of(line_with(is_tiled) | {"properties": ["near", "bits"]}) == set()
    planted(values_off_by(2.0**-23), monkeypatch)
    values = line_with(lambda o: o["gate_up"] is not None and o["format"] is None and o["out"] == "float32")
    assert wrong_of(values | {"properties": ["near", "bits"]}) <= {"the definition's bits: amax", "amax"}


@pytest.mark.parametrize("name", ["d", "row_codes", "row_scale"])
def test_a_bit_of_a_gated_output_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [o for o in gated_lines("sm_90a") if (name == "d") == (o["format"] is None)][::2]
    planted(lambda epilogue, t, valid: None if t.d is not None and t.d.dtype == torch.float32 else stored(name, GUARD)(
        epilogue, t, valid), monkeypatch)  # fmt: skip
    for o in lines:
        assert wrong_of(o) == {name, f"the definition's bits: {name}"}


def test_a_rule_that_is_not_kept_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are those of another limit."""
    right = epilogues.grouped_gemm_epilogue

    def call(a: Any, b: Any, offs: Any, epilogue: Epilogue, *others: Any, **how: Any) -> Any:
        rule = epilogue.gate_rule
        assert rule is not None
        return right(a, b, offs, replace(epilogue, gate_rule=GateRule(rule.alpha, 1.5, rule.up_offset)), *others, **how)

    monkeypatch.setattr(epilogues, "grouped_gemm_epilogue", call)
    for o in list(gated_lines("sm_90a"))[1::4]:
        assert wrong_of(o) == set(SWIGLU.values())


def forgotten(name: str) -> Callable[[Any], Any]:
    return lambda right: lambda **keywords: right(**keywords | {name: None})


@pytest.mark.parametrize(
    ("call", "argument", "option"),
    [
        ("grouped_gemm_quant", "bias_tensor", "bias"),
        ("grouped_gemm_quant", "alpha_tensor", "alpha"),
        ("grouped_gemm_swiglu_quant", "prob_tensor", "prob"),
    ],
)
def test_an_argument_that_cudnns_call_loses_is_found(
    call: str, argument: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    o = line_with(lambda o: o[option] and (o["gate_up"] is None) == (call == "grouped_gemm_quant"))
    monkeypatch.setattr(epilogues, call, forgotten(argument)(getattr(epilogues, call)))
    assert any(name.startswith("cuDNN's call") for name in wrong_of(o | {"properties": ["changes"]}))


@pytest.mark.parametrize("forgets", ["values", "sizes"])
def test_a_replay_that_forgets_is_found(forgets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of new values, or of new sizes of groups."""
    o = line_with(
        lambda o: is_rows(o) and "blocked" not in o["row_layout"] + o["column_layout"] and o["m_aligned"] == 1
    )
    o |= {"properties": ["replay"], "drawn": "normal", "special": ""}
    assert wrong_of(o) == set()
    seen: list[tuple[Any, Any]] = []
    right = epilogues.grouped_gemm_epilogue

    def call(a: Any, b: Any, offs: torch.Tensor, *others: Any, **how: Any) -> Any:
        a, offs = moved(a, "cpu"), offs.clone()
        seen.append((replace(a, data=a.data.clone()), offs))
        if len(seen) == 4:  # of the case and of the other one, then made and replayed
            a, offs = (seen[2][0], offs) if forgets == "values" else (a, seen[2][1])
        return right(a, b, offs, *others, **how)

    monkeypatch.setattr(epilogues, "grouped_gemm_epilogue", call)
    assert any("a replay with new values" in name for name in wrong_of(o))
    assert len(seen) == 4


# --- next to the emulator --------------------------------------------------------------------------------


def differences(o: Options, change: Callable[[dict[str, torch.Tensor]], None]) -> tuple[int, set[str]]:
    """(elements that an exponential may have moved, what is wrong) with the results of a GPU changed."""
    got, wanted = (emulated.computed(CALL, o, place_of("reference")) for _ in range(2))
    change(got)
    judge = Judge(any_nan=False)
    moved_ = emulated.compare_parts(judge, got, wanted)
    return moved_, {name for names in judge.verdicts().values() for name in names}


def nudged(name: str, count: int = 1) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(parts: dict[str, torch.Tensor]) -> None:
        parts[name].flatten().view(torch.uint8)[:count] ^= 1

    return change


def test_codes_that_the_emulator_has_not_are_found() -> None:
    o = line_with(is_rows)
    assert differences(o, lambda parts: None) == (0, set())
    assert differences(o, nudged("row_codes")) == (0, {"row_codes: the emulator's bits"})
    gated = line_with(lambda o: is_swiglu_of_codes(o) and o["rows"])
    assert differences(gated, nudged("row_codes")) == (0, {"row_codes: the emulator's bits"})  # of the same values


def test_an_exponential_moves_a_part_of_the_codes_and_scales_by_a_little() -> None:
    gated = line_with(lambda o: is_swiglu_of_codes(o) and o["rows"])

    def exponential(factor: float, codes: int) -> tuple[int, set[str]]:
        def change(parts: dict[str, torch.Tensor]) -> None:
            parts["values"] *= factor
            parts["row_scale"] *= factor
            nudged("row_codes", codes)(parts)

        return differences(gated, change)

    moved_, wrong = exponential(1 + 2.0**-22, 100)
    assert (moved_ > 100, wrong) == (True, set())
    assert {name.split(":")[0] for name in exponential(1 + 2.0**-22, 10_000)[1]} == {"row_codes"}
    assert {name.split(":")[0] for name in exponential(1 + 2.0**-18, 0)[1]} == {"values", "row_scale"}
