"""The bf16 kernel of Hopper with a quantising epilogue, run by the emulator and judged byte for byte."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16 import host_quant as sm90_bf16_quant
from padless.kernels.sm90_bf16.config import QUANT_PAIRS, Sm90Bf16Config
from padless.runtime import jit
from support.machine_code import complaints
from support.quant_cases import ALL, SIZES, plant, slow_but
from support.sm90_quant_cases import DRIVER, EPILOGUES, GLU_EPILOGUES, PairCase, check, poisoned, run

SLOW = pytest.mark.slow
SPILLS = 192  # bytes a thread that some epilogues still spill: with biases, or with a GLU of several outputs
FP4 = ("NVFP4", "NVFP4")
# A tile of 128 columns and a tail; 128 of K and a tail.
COLUMNS, DEPTH = 160, 160
GLU_FP8_ROWS = Epilogue(
    activation="swiglu", gate_up="concatenated", row_format=FP8_BLOCK, d_dtype=torch.float32, prob=True, amax=True
)
EVERY_GLU = GLU_EPILOGUES | {"concatenated, FP8_BLOCK rows": GLU_FP8_ROWS}
# By what decides the stores' shape: m64s of a warpgroup, warpgroups, tokens.
TILES = {
    "128x128": Sm90Bf16Config(*FP4, block_m=128, block_n=128),
    "128x256": Sm90Bf16Config(*FP4, block_m=128, block_n=256),
    "64x128": Sm90Bf16Config(*FP4, block_m=64, block_n=128),
    "32x256x4": Sm90Bf16Config(*FP4, block_m=32, block_n=256, num_warpgroups=4),
    "8x256": Sm90Bf16Config(*FP4, block_m=8, block_n=256),
    "8x128": Sm90Bf16Config(*FP4, block_m=8, block_n=128),
}


def case(n: int = COLUMNS, **fields: object) -> PairCase:
    return PairCase(SIZES, n, DEPTH, plain=sm90_bf16, **{"pair": FP4, **fields})  # type: ignore[arg-type]


ALWAYS = {"FP8_BLOCK rows and columns, bf16, everything", "MXFP8 rows and columns by group, cudnn, everything"}


@pytest.mark.parametrize("name", slow_but(ALWAYS, EPILOGUES))
def test_every_output(name: str) -> None:
    check(sm90_bf16_quant, case(), EPILOGUES[name])


def columns_of_glu(name: str) -> int:
    """224 concatenated columns: the second tile has 48 of gate, and of up, and 16 of nobody beside each."""
    return 192 if name.startswith("interleaved") or "MXFP4" in name else 224


@pytest.mark.parametrize("name", slow_but({"concatenated, MXFP8 rows and columns"}, EVERY_GLU))
def test_swiglu(name: str) -> None:
    check(sm90_bf16_quant, case(columns_of_glu(name)), EVERY_GLU[name])


def goes(tile: Sm90Bf16Config, epilogue: Epilogue) -> bool:
    """Whether a tile can do an epilogue, and fits."""
    try:
        sm90_bf16_quant.check_tile(tile, epilogue)
    except ValueError:
        return False
    return sm90_bf16_quant.shared_bytes(tile, epilogue, 2) <= 227 * 1024


ON_TILES = [
    (tile, name)
    for tile, config in TILES.items()
    for name, epilogue in (EPILOGUES | EVERY_GLU).items()
    if goes(config, epilogue)
]


@pytest.mark.parametrize(
    ("tile", "name"),
    [pytest.param(*c, marks=() if c == ("8x256", "NVFP4 rows by group, everything") else SLOW) for c in ON_TILES],
)
def test_every_tile(tile: str, name: str) -> None:
    epilogue = (EPILOGUES | EVERY_GLU)[name]
    n = columns_of_glu(name) if epilogue.is_glu else COLUMNS
    check(sm90_bf16_quant, PairCase((40, 0, 9), n, DEPTH, plain=sm90_bf16, pair=FP4), epilogue, TILES[tile])


@pytest.mark.slow
@pytest.mark.parametrize("pair", QUANT_PAIRS, ids="x".join)
@pytest.mark.parametrize("name", ["MXFP8 rows and columns by group, cudnn, everything", "NVFP4 rows"])
def test_every_pair(pair: tuple[str, str], name: str) -> None:
    check(sm90_bf16_quant, case(pair=pair), EPILOGUES[name])
    check(sm90_bf16_quant, case(224, pair=pair), GLU_EPILOGUES["concatenated, MXFP8 rows and columns"])


@pytest.mark.parametrize("block_m", [8, 16, 32])
@pytest.mark.parametrize("pair", [("BF16", "MXFP4"), ("FP8_BLOCK", "NVFP4"), ("MXFP8", "MXFP4")], ids="x".join)
def test_few_tokens_of_pairs_whose_activations_are_swizzled(pair: tuple[str, str], block_m: int) -> None:
    """The staged sums of so few tokens are no multiple of 1024 bytes, at which what lies behind them has to start."""
    for warpgroups in (2, 4):
        tile = Sm90Bf16Config(*pair, block_m=block_m, block_n=256, num_warpgroups=warpgroups)
        few = PairCase((1, 0, 9, 1), COLUMNS, DEPTH, plain=sm90_bf16, pair=pair)
        check(sm90_bf16_quant, few, EPILOGUES["NVFP4 rows"], tile)


@pytest.mark.slow
def test_blocked_scales_of_both_operands() -> None:
    blocked = case(192, layouts=("blocked_groups", "blocked"))
    check(sm90_bf16_quant, blocked, GLU_EPILOGUES["interleaved, NVFP4 rows"])
    check(sm90_bf16_quant, blocked, EPILOGUES["NVFP4 rows"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_any_interleaving(seed: int) -> None:
    """More tiles than CTAs, warps in another order: the staged sums' memory is used again, by one team and by two."""
    for tile, name in (
        ("128x256", "NVFP4 rows by group, everything"),
        ("64x128", "FP8_BLOCK rows, MN-major"),
        ("32x256x4", "MXFP8 rows and columns by group, cudnn, everything"),
    ):
        check(sm90_bf16_quant, case(), EPILOGUES[name], TILES[tile], seed=seed, sms=1)


@pytest.mark.slow
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, NVFP4], ids=lambda f: f.name)
def test_nan_inf_and_zeros_stay_in_their_blocks(format: object) -> None:
    rule = {FP8_BLOCK: "", MXFP8: "rceil", NVFP4: "te"}[format]  # type: ignore[index]
    column = None if format == NVFP4 else format
    epilogue = Epilogue(row_format=format, column_format=column, scale_rule=rule, bias=True, amax=True)  # type: ignore[arg-type]
    check(sm90_bf16_quant, poisoned(case()), epilogue)


@pytest.mark.parametrize("sizes", [(0, 0), pytest.param((1,), marks=SLOW), pytest.param((5, 0, 129), marks=SLOW)])
def test_few_rows_and_none(sizes: tuple[int, ...]) -> None:
    few = PairCase(sizes, 32, plain=sm90_bf16, pair=FP4)
    check(sm90_bf16_quant, few, EPILOGUES["MXFP8 rows and columns in tiles, floor"])


# What is wrong: text of the header, what takes its place, and the epilogue that has to show it.
COLUMNS_TOO = EPILOGUES["MXFP8 rows and columns by group, cudnn, everything"]
HEADER = "device/sm90/transposed_quant.cuh"
LAST_BARRIER = """            bar_sync(1 + team, 32 * TEAM_WARPS);
            quantize_columns"""
BUGS: dict[str, tuple[str, str, Epilogue]] = {
    "no barrier before the columns": (LAST_BARRIER, "            quantize_columns", COLUMNS_TOO),
    "rows of the next group in the columns' maxima": (
        "const int end = first + BLOCK < tile.rows ? first + BLOCK : tile.rows;",
        "const int end = first + BLOCK;",
        COLUMNS_TOO,
    ),
    "one exchange of row maxima too few": (
        "distance < BLOCK_LANES; distance *= 2",
        "distance < BLOCK_LANES / 2; distance *= 2",
        EPILOGUES["NVFP4 rows"],
    ),
    "columns past the last in a row's maxima": (
        "v[e] = column_exists ? v[e] : 0.0f;",
        "",
        GLU_EPILOGUES["concatenated, MXFP8 rows and columns"],
    ),
}


@pytest.mark.parametrize("name", slow_but({"no barrier before the columns"}, BUGS))
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    old, new, epilogue = BUGS[name]
    of_bug = case(224 if epilogue.is_glu else COLUMNS)
    if epilogue.is_glu:
        # Past gate's 112 columns lie up's first: NaN, or the zeros past up's columns would hide them.
        assert isinstance(of_bug.b.scale, torch.Tensor)
        of_bug.b.scale.view(torch.uint8)[:, 112:128] = 0x7F
        of_bug.altered = True
    of_bug.sums(DRIVER)  # compiled before anything is planted
    plant(monkeypatch, sm90_bf16_quant, HEADER, old, new)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:  # noqa: PT012
        for seed in range(3):
            check(sm90_bf16_quant, of_bug, epilogue, seed=seed)
    assert "does not compile" not in str(caught.value)


# --- the compiled kernels and the host -------------------------------------------------------------------

COMPILED = [
    *((TILES[tile], (EPILOGUES | EVERY_GLU)[name]) for tile, name in ON_TILES),
    *(
        (sm90_bf16_quant.select_tile(*pair, m, 4, epilogue), epilogue)
        for pair in QUANT_PAIRS
        for m in (16, 8192)
        for epilogue in (COLUMNS_TOO, *EVERY_GLU.values())
    ),
]
QUICK = ("128x256", "MXFP8 rows and columns by group, cudnn, everything")


@pytest.mark.parametrize(
    ("slow", "tile", "epilogue"),
    [
        pytest.param(i != ON_TILES.index(QUICK), *c, marks=() if i == ON_TILES.index(QUICK) else SLOW)
        for i, c in enumerate(COMPILED)
    ],
)
def test_the_compiled_kernel_spills_next_to_nothing(slow: bool, tile: Sm90Bf16Config, epilogue: Epilogue) -> None:
    tile = dataclasses.replace(tile, out_dtype=epilogue.d_dtype or torch.bfloat16)
    kernel = jit.compile_kernel(sm90_bf16_quant.KERNEL, QuantConfig(tile, epilogue).prelude(), "sm_90a")
    assert [c for c in complaints(kernel) if "spilled" not in c and "of stack" not in c] == []
    assert kernel.spill_bytes <= (SPILLS if slow else 0)
    assert kernel.num_stages >= 2


def test_the_tile_that_is_chosen_can_do_the_epilogue() -> None:
    for pair in QUANT_PAIRS:
        for epilogue in (*EPILOGUES.values(), *EVERY_GLU.values()):
            for m, groups in ((1, 1), (300, 4), (8192, 32), (65536, 8), (8192, 1024)):
                if groups > 256 and epilogue.column_format == FP8_BLOCK:
                    continue  # the larger table of groups may leave too little
                tile = sm90_bf16_quant.select_tile(*pair, m, groups, epilogue)
                sm90_bf16_quant.check_tile(tile, epilogue)
                assert tile.max_groups >= groups
    with pytest.raises(ValueError, match="at most 256 groups, or no FP8_BLOCK columns"):
        sm90_bf16_quant.select_tile("BF16", "MXFP4", 8192, 1024, Epilogue(column_format=FP8_BLOCK))


@pytest.mark.parametrize(
    ("epilogue", "config", "layouts", "message"),
    [
        (
            COLUMNS_TOO,
            TILES["8x256"],
            ("plain", "plain"),
            "config.block_m is 8; a quantising epilogue needs at least 32",
        ),
        (
            EPILOGUES["FP8_BLOCK rows and columns, bf16, everything"],
            TILES["64x128"],
            ("plain", "plain"),
            "config.block_m is 64; a quantising epilogue needs 128 for FP8_BLOCK columns",
        ),
        (GLU_FP8_ROWS, TILES["64x128"], ("plain", "plain"), "config.block_n is 128; a quantising epilogue needs 256"),
        (
            dataclasses.replace(GLU_FP8_ROWS, column_format=FP8_BLOCK),
            None,
            ("plain", "plain"),
            "the output is FP8_BLOCK along rows and columns, of a SwiGLU",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_said(
    epilogue: Epilogue, config: Sm90Bf16Config | None, layouts: tuple[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(sm90_bf16_quant, PairCase((5, 3), 256, plain=sm90_bf16, pair=FP4, layouts=layouts), epilogue, config)


def test_amax_of_a_group_without_rows_is_left_alone() -> None:
    got = check(sm90_bf16_quant, PairCase((3, 0), 32, plain=sm90_bf16, pair=FP4), Epilogue(**ALL))
    assert got["amax"].inside[1] == float("-inf")
    assert got["amax"].inside[0] > 0
