"""The quantising epilogue of the Hopper kernel, run by the emulator and judged bit for bit.

How it is judged is in quant_cases.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_fp8 import host_quant as sm90_fp8_quant
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config
from padless.runtime import jit
from support import sm90_quant_cases
from support.machine_code import complaints
from support.quant_cases import ALL, SIZES, Guarded, plant, slow_but
from support.sm90_quant_cases import DRIVER, Case

WIDE = Sm90Fp8Config(block_m=256, cluster_n=2)
PAIR = Sm90Fp8Config(block_m=128, cluster_n=2)
SHORT = Sm90Fp8Config(block_m=64)
ALONE = Sm90Fp8Config()  # 128 rows, of which each warpgroup has half


def check(
    case: Case, epilogue: Epilogue, config: Sm90Fp8Config | None = None, **options: int | None
) -> dict[str, Guarded]:
    return sm90_quant_cases.check(sm90_fp8_quant, case, epilogue, config, **options)


# --- options ---------------------------------------------------------------------------------------------

COLUMNS = 144  # a tile and a tail
ROWS = Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn")
BOTH = Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK)

FP8_BLOCK_CASES: dict[str, tuple[Epilogue, Sm90Fp8Config | None]] = {
    "rows": (ROWS, None),
    "rows, scales row-major, everything": (dataclasses.replace(ROWS, row_layout="plain", **ALL), None),
    "rows and columns": (BOTH, ALONE),
    "columns alone": (dataclasses.replace(BOTH, row_format=None), ALONE),
    "all outputs, bf16": (dataclasses.replace(BOTH, d_dtype=torch.bfloat16, **ALL), None),
    "all outputs, float32, wide": (dataclasses.replace(BOTH, d_dtype=torch.float32, **ALL), PAIR),
    "wide tile": (dataclasses.replace(BOTH, **ALL), WIDE),
    "short tile": (dataclasses.replace(ROWS, d_dtype=torch.float16, alpha=True), SHORT),
    "amax alone": (Epilogue(amax=True, alpha=True), None),
    "bf16 alone": (Epilogue(d_dtype=torch.bfloat16, bias=True, prob=True), None),
    "bias gated": (dataclasses.replace(ROWS, bias_rule="gated_bias", **ALL), None),
    "prob with no bias to gate": (dataclasses.replace(ROWS, bias_rule="gated_bias", prob=True), None),
}


ALWAYS = {"rows and columns", "all outputs, bf16", "wide tile", "short tile", "amax alone", "bias gated"}


@pytest.mark.parametrize("name", slow_but(ALWAYS, FP8_BLOCK_CASES))
def test_fp8_block(name: str) -> None:
    epilogue, config = FP8_BLOCK_CASES[name]
    check(Case(SIZES, COLUMNS, 256), epilogue, config)


MX_CASES: list[tuple[Epilogue, Sm90Fp8Config | None]] = [
    (Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", **ALL), None),
    (
        Epilogue(
            row_format=MXFP8, row_layout="blocked", column_format=MXFP8, column_layout="blocked", scale_rule="floor"
        ),
        SHORT,
    ),
    (
        Epilogue(
            row_format=MXFP8,
            row_layout="blocked_groups",
            column_format=MXFP8,
            column_layout="blocked_groups",
            scale_rule="cudnn",
            bias_rule="gated_bias",
            **ALL,
        ),
        WIDE,
    ),
    (Epilogue(row_format=MXFP8_E5M2, column_format=MXFP8_E5M2, scale_rule="cudnn_documented"), None),
    (Epilogue(column_format=MXFP8_E5M2, column_layout="blocked", scale_rule="cudnn", alpha=True), None),
    (Epilogue(row_format=MXFP4, row_layout="blocked", scale_rule="rceil", d_dtype=torch.bfloat16), None),
    (Epilogue(row_format=MXFP4, scale_rule="cudnn"), SHORT),
    (Epilogue(row_format=NVFP4, row_layout="blocked_groups", scale_rule="te", **ALL), None),
    (Epilogue(row_format=NVFP4, scale_rule="te"), WIDE),
    (Epilogue(row_format=NVFP4, row_layout="blocked", scale_rule="te", d_dtype=torch.float16), SHORT),
]


def name_of(case: object) -> str:
    if not isinstance(case, Epilogue):
        return f"{case.block_m}x{case.cluster_n}" if isinstance(case, Sm90Fp8Config) else "chosen"
    parts = [case.activation, case.scale_rule, case.row_layout, case.column_layout]
    for what, fmt in (("row", case.row_format), ("column", case.column_format)):
        if fmt is not None:
            parts.append(f"{what} {fmt.name}")
    return ", ".join(part for part in parts if part)


SLOW = pytest.mark.slow
MX_SLOW = (0, 4, 6, 8)


@pytest.mark.parametrize(
    ("epilogue", "config"),
    [pytest.param(*case, marks=SLOW if i in MX_SLOW else ()) for i, case in enumerate(MX_CASES)],
    ids=name_of,
)
def test_one_byte_scales(epilogue: Epilogue, config: Sm90Fp8Config | None) -> None:
    check(Case(SIZES, 160, seed=1), epilogue, config)  # FP4 rows of 16 bytes: N is a multiple of 32


GLU_CASES: list[tuple[Epilogue, Sm90Fp8Config | None, int]] = [
    (
        Epilogue(activation="swiglu", gate_up="interleaved", row_format=FP8_BLOCK, row_layout="plain_mn", **ALL),
        None,
        320,
    ),
    (
        Epilogue(activation="swiglu", gate_up="concatenated", row_format=FP8_BLOCK, column_format=FP8_BLOCK, **ALL),
        WIDE,
        384,
    ),
    (Epilogue(activation="swiglu", gate_up="concatenated", column_format=FP8_BLOCK, prob=True), None, 384),
    (
        Epilogue(
            activation="swiglu",
            gate_up="interleaved",
            row_format=MXFP8,
            row_layout="blocked_groups",
            column_format=MXFP8,
            column_layout="blocked_groups",
            scale_rule="rceil",
        ),
        SHORT,
        192,
    ),
    (
        Epilogue(
            activation="swiglu",
            gate_up="concatenated",
            row_format=NVFP4,
            row_layout="blocked",
            scale_rule="te",
            amax=True,
        ),
        None,
        384,
    ),
    (Epilogue(activation="swiglu", gate_up="interleaved", prob=True, amax=True), None, 192),
]


GLU_SLOW = (2, 5)


@pytest.mark.parametrize(
    ("epilogue", "config", "n"),
    [pytest.param(*case, marks=SLOW if i in GLU_SLOW else ()) for i, case in enumerate(GLU_CASES)],
    ids=name_of,
)
def test_swiglu(epilogue: Epilogue, config: Sm90Fp8Config | None, n: int) -> None:
    """The values within the exponential's error; amax, codes and scales exactly those of the kernel's own values."""
    check(Case(SIZES, n, seed=2), dataclasses.replace(epilogue, d_dtype=torch.float32), config, sms=4)


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_swiglu_where_the_exponential_over_and_underflows(scale: float) -> None:
    epilogue = Epilogue(activation="swiglu", gate_up="interleaved", d_dtype=torch.float32, amax=True)
    case = Case((70,), 128, seed=4, scale=scale)
    acc = case.sums(DRIVER)[:70]
    assert (acc < -89).any()
    assert (acc > 89).any()
    check(case, epilogue)


# --- blocks that are not ordinary ------------------------------------------------------------------------


def poisoned(case: Case) -> Case:
    """NaN in one row, Inf in another, zeros in a third, tiny numbers in a fourth, in the first group of 40 rows."""
    codes = case.a.data.view(torch.uint8)
    codes[3, 17] = 0x7F
    codes[20] = 0
    case.a.scale[21] = 2.0**-120
    case.b.scale[2, 0, 0] = 2.0**60
    case.bias[2, 5] = float("inf")
    case.alpha[0] = 1.0
    return case


@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK, bias=True, amax=True),
        Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", bias=True),
        pytest.param(Epilogue(row_format=NVFP4, scale_rule="te", bias=True), marks=SLOW),
        pytest.param(Epilogue(row_format=MXFP4, scale_rule="cudnn", bias=True), marks=SLOW),
    ],
    ids=name_of,
)
def test_nan_inf_zeros_and_tiny_numbers_stay_in_their_blocks(epilogue: Epilogue) -> None:
    case = poisoned(Case(SIZES, 160, seed=5))
    case.bias[0] = 0.0  # so that the zero row of group 0 stays zero
    check(case, epilogue)


def test_scale_tiles_that_were_not_promised_are_not_stored() -> None:
    """Offsets that break the promise of m_aligned = 128 need more tiles than there are."""
    for layout in ("plain", "blocked", "blocked_groups"):
        epilogue = Epilogue(column_format=MXFP8, column_layout=layout, scale_rule="rceil")
        check(Case((3, 3, 3), 32), epilogue, tiles=2)


def test_no_rows_and_all_rows_in_nobody() -> None:
    for sizes, past in (((0, 0), 7), ((0,), 1)):
        check(Case(sizes, 32, past=past), dataclasses.replace(BOTH, amax=True))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_any_interleaving(seed: int) -> None:
    """More tiles than CTAs, warps in another order: staging, the swap between CTAs and the scratch are reused."""
    epilogue = Epilogue(
        activation="swiglu",
        gate_up="concatenated",
        row_format=FP8_BLOCK,
        column_format=FP8_BLOCK,
        d_dtype=torch.float32,
        amax=True,
    )
    check(Case((65, 5, 0, 70), 512, seed=seed), epilogue, PAIR, seed=seed, sms=2)


# --- planted bugs ----------------------------------------------------------------------------------------

STORE, FRAGMENT, RULES = ("device/sm90/quant_store.cuh", "device/sm90/wgmma_fragment.cuh", "device/quant_rules.cuh")
KERNEL = Sm90Fp8Config().source
GLU_BOTH = Epilogue(activation="swiglu", gate_up="concatenated", row_format=FP8_BLOCK, d_dtype=torch.float32)
# What is wrong: file, text, what takes its place, and the epilogue that has to show it.
BUGS: dict[str, tuple[str, str, str, Epilogue]] = {
    "rows of the next group in the maxima": (FRAGMENT, "M64S == 1 && rows <= 8", "false", BOTH),
    "rows of the next group in amax": (
        STORE,
        "u * M64_STEP * WGMMA_M + 8 * h < extent.rows",
        "true",
        Epilogue(amax=True),
    ),
    "columns past the last in the maxima": (FRAGMENT, "16 * i >= columns", "false", GLU_BOTH),
    "the other warpgroup's maxima are not waited for": (
        STORE,
        "bar_sync(barrier, threads);  ",
        "bar_sync(1 + warpgroup, 128);",
        BOTH,
    ),
    "multipliers from the other warpgroup are not waited for": (
        STORE,
        "        bar_sync(barrier, threads);\n",
        "        bar_sync(1 + warpgroup, 128);\n",
        BOTH,
    ),
    "no barrier before the multipliers are read": (STORE, "        bar_sync(barrier, threads);\n", "", BOTH),
    "no proxy fence before the stores": (STORE, "    fence_proxy_async_shared();\n", "", ROWS),
    "the staging buffer is not waited for": (STORE, "if (issuer) cp_async_bulk_wait_group_read_all();", "", ROWS),
    "one exchange of row maxima too few": (
        FRAGMENT,
        "distance < 4; distance *= 2",
        "distance < 2; distance *= 2",
        ROWS,
    ),
    "columns exchanged with the wrong lane": (
        FRAGMENT,
        "exchange_columns<KEPT>(m, 4",
        "exchange_columns<KEPT>(m, 8",
        BOTH,
    ),
    "codes swizzled by the wrong bits": (FRAGMENT, "(offset >> 7)", "(offset >> 8)", ROWS),
    "rows of the weights dealt the other way round": ("sm90_fp8/load.cuh", "c % 2 * 2", "2 - c % 2 * 2", ROWS),
    "the swap of row maxima is not waited for": (STORE, "            swap.wait(w);\n", "", GLU_BOTH),
    "one barrier of the swap for both m64s": (STORE, "full + w * 8, turn", "full, turn", GLU_BOTH),
    "one buffer for the swap of row maxima": (STORE, "turn % 2", "0", GLU_BOTH),
    "alpha and bias rounded one by one": (
        "device/quant_outputs.cuh",
        "__fmaf_rn(sum, alpha, addend)",
        "__fadd_rn(__fmul_rn(sum, alpha), addend)",
        dataclasses.replace(ROWS, alpha=True, bias=True, d_dtype=torch.float32),
    ),
    "a reciprocal in place of the division": (
        RULES,
        "__fmaf_rn(__fmaf_rn(quotient, -448.0f, x), INVERSE, quotient)",
        "quotient",
        ROWS,
    ),
}
BUGS_OF_TWO_M64S = {"one barrier of the swap for both m64s"}
BUGS_ALWAYS = {
    "rows of the next group in the maxima",
    "no barrier before the multipliers are read",
    "no proxy fence before the stores",
    "the swap of row maxima is not waited for",
    "alpha and bias rounded one by one",
}


def case_for_bugs(epilogue: Epilogue) -> Case:
    if not epilogue.is_glu:
        return Case(SIZES, COLUMNS)
    # 192 columns of output: those past them find weights of the up projection where the gate's would be. A NaN in one
    # of these (row 200 of B is up's of column 8) belongs to the first 128 columns and may not reach the others.
    case = Case(SIZES, 384)
    case.b.data.view(torch.uint8)[2, 200, 5] = 0x7F
    return case


def check_all_seeds(epilogue: Epilogue, pair: Sm90Fp8Config) -> None:
    for seed in range(4):
        check(case_for_bugs(epilogue), epilogue, pair if epilogue.is_glu else ALONE, seed=seed)


def test_a_nan_in_a_weight_stays_in_its_columns() -> None:
    got = check(case_for_bugs(GLU_BOTH), GLU_BOTH, PAIR)
    broken = got["row_scale"].inside[: sum(SIZES)].isnan()
    assert broken.any()
    assert not broken.all()


@pytest.mark.parametrize("name", slow_but(BUGS_ALWAYS, BUGS))
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, old, new, epilogue = BUGS[name]
    case_for_bugs(epilogue).sums(DRIVER)  # compiled before anything is planted
    plant(monkeypatch, sm90_fp8_quant, file, old, new)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        check_all_seeds(epilogue, WIDE if name in BUGS_OF_TWO_M64S else PAIR)
    assert "does not compile" not in str(caught.value)


# --- the compiled kernels and the host -------------------------------------------------------------------

COMPILED: list[tuple[Sm90Fp8Config, Epilogue]] = [
    (WIDE, dataclasses.replace(BOTH, **ALL)),
    (WIDE, dataclasses.replace(BOTH, activation="swiglu", gate_up="interleaved", **ALL)),
    (WIDE, dataclasses.replace(ROWS, activation="swiglu", gate_up="concatenated", **ALL)),
    (WIDE, Epilogue(row_format=NVFP4, row_layout="blocked_groups", scale_rule="te", **ALL)),
    (WIDE, Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="cudnn", **ALL)),
    (PAIR, dataclasses.replace(BOTH, activation="swiglu", gate_up="concatenated", **ALL)),
    (Sm90Fp8Config(), dataclasses.replace(BOTH, d_dtype=torch.float32, **ALL)),
    (Sm90Fp8Config(), dataclasses.replace(ROWS)),
    (SHORT, Epilogue(row_format=MXFP4, row_layout="blocked", scale_rule="rceil", d_dtype=torch.bfloat16, **ALL)),
]
COMPILED_ALWAYS = (1, 3)


@pytest.mark.parametrize(
    ("tile", "epilogue"),
    [pytest.param(*case, marks=() if i in COMPILED_ALWAYS else SLOW) for i, case in enumerate(COMPILED)],
    ids=name_of,
)
def test_the_compiled_kernel_spills_nothing(tile: Sm90Fp8Config, epilogue: Epilogue) -> None:
    tile = dataclasses.replace(tile, out_dtype=epilogue.d_dtype or torch.bfloat16)
    prelude = QuantConfig(tile, epilogue).prelude()
    kernel = jit.compile_kernel(KERNEL, prelude, "sm_90a")
    assert complaints(kernel) == []


def test_the_tile_that_is_chosen_can_do_the_epilogue() -> None:
    epilogues_to_try = [e for e, _ in (*FP8_BLOCK_CASES.values(), *MX_CASES)] + [e for e, _, _ in GLU_CASES]
    for epilogue in epilogues_to_try:
        for m, groups in ((1, 1), (300, 4), (8192, 32), (65536, 8), (8192, 1024)):
            problem = Problem(m, 4096, 7168, groups, epilogue.d_dtype or torch.bfloat16)
            tile = sm90_fp8_quant.select_tile(problem, epilogue)
            sm90_fp8_quant.check_tile(tile, epilogue)
            assert tile.max_groups >= groups


@pytest.mark.parametrize(
    ("epilogue", "config", "n", "message"),
    [
        (ROWS, Sm90Fp8Config(block_n=192), 128, "config.block_n is 192"),
        (ROWS, Sm90Fp8Config(store="pool"), 128, "config.store is 'pool'"),
        (ROWS, Sm90Fp8Config(scales="k"), 128, "config.scales is 'k'"),
        (BOTH, SHORT, 128, "config.block_m is 64; a quantising epilogue needs 128 or 256"),
        (GLU_BOTH, Sm90Fp8Config(), 256, "config.cluster_n is 1; a quantising epilogue needs 2"),
        (GLU_BOTH, PAIR, 192, "N is 192; it must be a multiple of 128"),
        (
            dataclasses.replace(GLU_BOTH, activation="swiglu", gate_up="interleaved"),
            PAIR,
            96,
            "N is 96; it must be a multiple of 64",
        ),
        (ROWS, None, 136, "row_codes has strides"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(
    epilogue: Epilogue, config: Sm90Fp8Config | None, n: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        sm90_quant_cases.run(sm90_fp8_quant, Case((5, 3), n), epilogue, config)
