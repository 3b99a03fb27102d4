"""MXFP8 x MXFP8 on Hopper with a quantising epilogue, run by the emulator and judged byte for byte."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch

from padless import grouped_gemm, grouped_gemm_quant
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config
from padless.runtime import jit
from support.machine_code import complaints
from support.quant_cases import ALL, SIZES, plant, reference, slow_but
from support.sm90_quant_cases import DRIVER, EPILOGUES, GLU_EPILOGUES, PairCase, check, poisoned, run

SLOW = pytest.mark.slow
SPILLS = 48  # bytes a thread that some epilogues still spill, most of them with a GLU
SHORT = Sm90Mxfp8Config(block_m=64)
# A tile of 128 columns and a tail; 128 of K and a tail.
COLUMNS, DEPTH = 160, 160


def case(n: int = COLUMNS, **fields: object) -> PairCase:
    return PairCase(SIZES, n, DEPTH, plain=sm90_mxfp8, **fields)  # type: ignore[arg-type]


ALWAYS = {"FP8_BLOCK rows and columns, bf16, everything", "MXFP8 rows and columns by group, cudnn, everything"}


@pytest.mark.parametrize("name", slow_but(ALWAYS, EPILOGUES))
def test_every_output(name: str) -> None:
    check(sm90_mxfp8_quant, case(), EPILOGUES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, e in EPILOGUES.items() if e.column_format != FP8_BLOCK])
def test_tiles_of_64_rows(name: str) -> None:
    check(sm90_mxfp8_quant, case(), EPILOGUES[name], SHORT)


@pytest.mark.parametrize("name", slow_but({"concatenated, MXFP8 rows and columns"}, GLU_EPILOGUES))
def test_swiglu(name: str) -> None:
    """224 concatenated columns: the second tile has 48 of gate, beside which 16 of up are of nobody."""
    n = 192 if name.startswith("interleaved") else 224 if "MXFP8" in name else 192
    check(sm90_mxfp8_quant, case(n), GLU_EPILOGUES[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts", list(itertools.product(("plain", "blocked", "blocked_groups"), ("plain", "blocked")))
)
@pytest.mark.parametrize("pair", list(itertools.product(("MXFP8", "MXFP8_E5M2"), repeat=2)))
def test_every_pair_and_layout_of_operands(pair: tuple[str, str], layouts: tuple[str, str]) -> None:
    epilogue = GLU_EPILOGUES["concatenated, MXFP8 rows and columns"]
    check(sm90_mxfp8_quant, case(224, pair=pair, layouts=layouts), epilogue)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=SLOW) for seed in (2, 3, 4))])
def test_any_interleaving(seed: int) -> None:
    """More tiles than CTAs, warps in another order: staging and scratch are used again."""
    epilogue = Epilogue(row_format=NVFP4, row_layout="blocked", scale_rule="te", amax=True)
    check(sm90_mxfp8_quant, case(288, layouts=("blocked_groups", "blocked")), epilogue, seed=seed, sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda f: f.name)
def test_nan_inf_and_zeros_stay_in_their_blocks(format: object) -> None:
    rule = {FP8_BLOCK: "", MXFP8: "rceil", NVFP4: "te"}[format]  # type: ignore[index]
    column = None if format == NVFP4 else format
    epilogue = Epilogue(row_format=format, column_format=column, scale_rule=rule, bias=True, amax=True)  # type: ignore[arg-type]
    check(sm90_mxfp8_quant, poisoned(case()), epilogue)


@pytest.mark.slow
def test_scale_tiles_that_were_not_promised_are_not_stored() -> None:
    for layout in ("plain", "blocked", "blocked_groups"):
        epilogue = Epilogue(column_format=MXFP8, column_layout=layout, scale_rule="rceil")
        check(sm90_mxfp8_quant, PairCase((3, 3, 3), 32, plain=sm90_mxfp8), epilogue, tiles=2)


@pytest.mark.parametrize("sizes", [(0, 0), pytest.param((1,), marks=SLOW), pytest.param((5, 0, 129), marks=SLOW)])
def test_few_rows_and_none(sizes: tuple[int, ...]) -> None:
    check(sm90_mxfp8_quant, PairCase(sizes, 32, plain=sm90_mxfp8), EPILOGUES["MXFP8 rows and columns in tiles, floor"])


# What is wrong: file, text, what takes its place, and the epilogue that has to show it.
KERNEL = sm90_mxfp8_quant.KERNEL
LOAD, STORAGE = "sm90_mxfp8/load.cuh", "sm90_mxfp8/storage.cuh"
GLU = GLU_EPILOGUES["concatenated, MXFP8 rows and columns"]
BUGS: dict[str, tuple[str, str, str, Epilogue]] = {
    "the weights' scales are not dealt": (
        LOAD,
        "row = interleaved_weight_row(problem, tile.column, row) - tile.column",
        "row = row",
        GLU,
    ),
    "up is fetched from the gate's rows": (STORAGE, "(column + copy / 2 * problem.n) / 2", "column / 2", GLU),
    "columns past the last in the maxima of a cut tile": (
        "device/sm90/wgmma_fragment.cuh",
        "16 * i >= columns",
        "16 * i >= columns + 16",
        GLU,
    ),
    "the other warpgroup's maxima are not waited for": (
        "device/sm90/quant_store.cuh",
        "bar_sync(barrier, threads);  ",
        "bar_sync(1 + warpgroup, 128);",
        EPILOGUES["FP8_BLOCK rows and columns, bf16, everything"],
    ),
}


def case_for_bugs(epilogue: Epilogue) -> PairCase:
    if not epilogue.is_glu:
        return case(COLUMNS)
    # 112 columns of output: where the last tile's gates would be past them lie the first of up. A NaN in one of these
    # (row 112 of B is up's of column 0) belongs to the first 32 columns and may not reach the last 16.
    made = case(224)
    made.b.data.view(torch.uint8)[2, 112, 5] = 0x7F
    made.altered = True
    return made


@SLOW
def test_a_nan_in_a_weight_stays_in_its_columns() -> None:
    got = check(sm90_mxfp8_quant, case_for_bugs(GLU), GLU)
    broken = (got["row_scale"].inside[: sum(SIZES)] == 0xFF).any(0)
    assert broken.tolist() == [True, False, False, False]


@pytest.mark.parametrize("name", slow_but({"the weights' scales are not dealt"}, BUGS))
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, old, new, epilogue = BUGS[name]
    of_bug = case_for_bugs(epilogue)
    of_bug.sums(DRIVER)  # compiled before anything is planted
    plant(monkeypatch, sm90_mxfp8_quant, file, old, new)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        check(sm90_mxfp8_quant, of_bug, epilogue)
    assert "does not compile" not in str(caught.value)


# --- the compiled kernels and the host -------------------------------------------------------------------

COMPILED = [
    (Sm90Mxfp8Config(), dataclasses.replace(GLU, d_dtype=torch.float32)),
    (Sm90Mxfp8Config(max_groups=1024), dataclasses.replace(GLU, d_dtype=torch.float32)),
    *((Sm90Mxfp8Config(), epilogue) for epilogue in (*EPILOGUES.values(), *GLU_EPILOGUES.values())),
    *((SHORT, e) for e in (*EPILOGUES.values(), *GLU_EPILOGUES.values()) if e.column_format != FP8_BLOCK),
    (Sm90Mxfp8Config(a_e5m2=True, b_e5m2=True), dataclasses.replace(GLU, activation="swiglu", gate_up="interleaved")),
]


@pytest.mark.parametrize(
    ("tile", "epilogue"), [pytest.param(*c, marks=() if i == 0 else SLOW) for i, c in enumerate(COMPILED)]
)
def test_the_compiled_kernel_spills_next_to_nothing(tile: Sm90Mxfp8Config, epilogue: Epilogue) -> None:
    tile = dataclasses.replace(tile, out_dtype=epilogue.d_dtype or torch.bfloat16)
    kernel = jit.compile_kernel(KERNEL, QuantConfig(tile, epilogue).prelude(), "sm_90a")
    assert [c for c in complaints(kernel) if "spilled" not in c and "of stack" not in c] == []
    assert kernel.spill_bytes <= SPILLS
    assert kernel.num_stages >= 2


@pytest.mark.parametrize(
    ("epilogue", "config", "n", "message"),
    [
        (Epilogue(amax=True), Sm90Mxfp8Config(block_n=64), 128, "config.block_n is 64"),
        (
            EPILOGUES["FP8_BLOCK rows and columns, bf16, everything"],
            SHORT,
            128,
            "config.block_m is 64; a quantising epilogue needs 128 for FP8_BLOCK columns",
        ),
        (
            Epilogue(activation="swiglu", gate_up="interleaved", row_format=FP8_BLOCK),
            None,
            256,
            "the row output is FP8_BLOCK, whose blocks of 128 columns are wider than a tile of a SwiGLU",
        ),
        (GLU, None, 40, "N is 40; it must be a multiple of 16"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(
    epilogue: Epilogue, config: Sm90Mxfp8Config | None, n: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(sm90_mxfp8_quant, PairCase((5, 3), n, plain=sm90_mxfp8), epilogue, config)


def test_the_public_call_gets_there() -> None:
    given = PairCase((7, 0, 3), 64, plain=sm90_mxfp8)
    epilogue = Epilogue(row_format=MXFP8, row_layout="blocked", scale_rule="rceil", **ALL)
    out = grouped_gemm_quant(
        a_tensor=given.a,
        b_tensor=given.b,
        padded_offsets=given.offs,
        alpha_tensor=given.alpha,
        prob_tensor=given.prob,
        bias_tensor=given.bias,
        d_format=MXFP8,
        column_output=False,
        semantics="documented",
        return_amax=True,
        backend="emulator",
    )
    sums = grouped_gemm(
        given.a, given.b, given.offs, out_dtype=torch.float32, config=Sm90Mxfp8Config(), backend="emulator"
    )
    wanted = reference(given, epilogue, sums)
    assert torch.equal(out.row.data.view(torch.uint8)[:10], wanted["row_codes"].inside[:10])
    assert torch.equal(out["amax_tensor"][:, 0], wanted["amax"].inside)
