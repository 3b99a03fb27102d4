"""The quantising epilogue of the grouped Blackwell kernel, run by the emulator and judged bit for bit."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm100_grouped import host
from padless.kernels.sm100_grouped import host_quant as sm100_grouped_quant
from padless.kernels.table import ROUTES
from padless.runtime import jit
from support.machine_code import complaints, instructions
from support.quant_cases import ALL, SIZES, plant
from support.sm100_grouped import drawn_sizes
from support.sm100_quant import Problem, check
from support.sm100_quant_cases import (
    BUGS,
    CASES,
    CONCATENATED,
    INTERLEAVED,
    ONE,
    PAIR,
    ROWS,
    WIDE,
    C,
    blocked,
    epilogue,
)

SLOW = pytest.mark.slow
ALWAYS = {
    "everything",
    "cudnn, tiles of their own",
    "interleaved, everything",
    "concatenated, nvfp4",
    "FP8_BLOCK everything",
    "FP8_BLOCK operands, halves",
    "two pairs, everything",
}


@pytest.mark.parametrize("name", [n if n in ALWAYS else pytest.param(n, marks=SLOW) for n in CASES])
def test_the_references_bits(name: str) -> None:
    """SwiGLU's values are within the exponential's error; all that is made of them is exact."""
    fmt, n, what, config, layouts = CASES[name]
    check(Problem(fmt, SIZES, n, layouts=layouts), what, config, seed=len(name))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("concatenated, nvfp4", marks=SLOW)])
def test_any_interleaving(name: str) -> None:
    """One pair of CTAs and more tiles than it has accumulators: every buffer is used again."""
    fmt, _, what, config, layouts = CASES[name]
    problem = Problem(fmt, (33, 0, 130), 320, 256, layouts=layouts)
    acc = problem.sums(emulated_driver("sm_100a"))
    for seed in (1, 2):
        check(problem, what, dataclasses.replace(config, num_stages=2), seed=seed, acc=acc)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CASES)
def test_twenty_schedules(name: str, seed: int) -> None:
    """Each on a ragged problem of its own."""
    fmt, n, what, config, layouts = CASES[name]
    problem = Problem(fmt, drawn_sizes(seed), n, 32 * (3 + 5 * seed % 7), layouts=layouts, seed=seed)
    check(problem, what, config, seed=seed, sms=2 + 2 * (seed % 2))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed: int) -> None:
    g = torch.Generator().manual_seed(500 + seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    def draw(*values: object) -> object:
        return values[number(0, len(values))]

    sizes = tuple(draw(0, 1, number(1, 40), number(1, 140), number(100, 300)) for _ in range(number(1, 6)))
    row = draw(None, MXFP8, MXFP8_E5M2, MXFP4, NVFP4, FP8_BLOCK)
    column = draw(None, row) if row in (MXFP8, MXFP8_E5M2, FP8_BLOCK) else draw(None, MXFP8) if row is None else None
    gate_up = draw("none", "none", "interleaved", "concatenated")
    flags = {name: bool(number(0, 2)) for name in ALL}
    d_dtype = torch.float32 if gate_up != "none" else draw(None, torch.bfloat16, torch.float16)
    if row is None and column is None and d_dtype is None:
        flags["amax"] = True
    layout = "plain" if row == FP8_BLOCK else draw("plain", "blocked", "blocked_groups")
    glu = {} if gate_up == "none" else {"activation": "swiglu", "gate_up": gate_up}
    what = epilogue(
        row, column, draw("rceil", "floor", "cudnn", "cudnn_documented"), d_dtype=d_dtype, **glu,
        row_layout=layout, column_layout=layout, **flags,
    )  # fmt: skip
    wide = gate_up == "concatenated" or (gate_up != "none" and row == FP8_BLOCK)
    mma_n = 256 if wide or bool(number(0, 2)) else 128
    config = draw(None, C(cta_group=number(1, 3), mma_n=mma_n, multicast=draw(1, 2), raster_m=draw(1, 8)))
    n = 64 * number(1, 9) if gate_up != "none" else 32 * number(1, 18)
    layouts = (draw("plain", "blocked", "blocked_groups"), draw("plain", "blocked"))
    problem = Problem(
        draw("MXFP8", "NVFP4", "MXFP4", "FP8_BLOCK", ("MXFP8", "MXFP4")),
        sizes,
        n,
        32 * number(1, 16),
        past=number(1, 9),
        seed=seed,
        layouts=layouts,
    )
    check(problem, what, config, seed=seed, sms=2 * number(1, 3))


# ---- what is not ordinary


@pytest.mark.parametrize("gain", [1.0, pytest.param(100.0, marks=SLOW)])
def test_swiglu_where_the_exponential_over_and_underflows(gain: float) -> None:
    problem = Problem("MXFP8", (70,), 128, gain=gain * 30)
    check(problem, epilogue(amax=True, alpha=True, **INTERLEAVED), ONE)
    x = problem.sums(emulated_driver("sm_100a"))[:70] * problem.alpha[0]
    assert (x < -89).any()
    assert (x > 89).any()


@pytest.mark.parametrize(
    ("fmt", "what"),
    [
        ("MXFP8", epilogue(MXFP8, MXFP8, bias=True, amax=True)),
        pytest.param("MXFP8", epilogue(MXFP4, None, "cudnn", bias=True), marks=SLOW),
        pytest.param("NVFP4", epilogue(NVFP4, bias=True, amax=True), marks=SLOW),
    ],
    ids=["MXFP8", "MXFP4", "NVFP4"],
)
def test_nan_inf_zeros_and_tiny_numbers_stay_in_their_blocks(fmt: str, what: Epilogue) -> None:
    problem = Problem(fmt, SIZES, 160, layouts=("plain", "blocked"))
    scale = problem.case.a.scale.view(torch.uint8)
    scale[3, 2] = 0xFF if fmt == "MXFP8" else 0x7F  # NaN in row 3
    problem.case.a.data.view(torch.uint8)[20] = 0
    if fmt == "MXFP8":
        scale[21] = 1
    problem.bias[0] = 0.0  # so that the zero row of group 0 stays zero
    problem.bias[2, 5] = float("inf")
    got = check(problem, what)
    broken = got["row_scale"].inside[: problem.valid] == (0x7F if what.row_format == NVFP4 else 0xFF)
    assert broken[3].all()
    assert 0 < broken.sum() < broken.numel() / 2


@pytest.mark.parametrize(
    "layout", [pytest.param("plain", marks=SLOW), pytest.param("blocked", marks=SLOW), "blocked_groups"]
)
def test_scale_tiles_that_were_not_promised_are_not_stored(layout: str) -> None:
    """Offsets that break the promise of m_aligned = 128 need more tiles than there are."""
    check(Problem("MXFP8", (3, 3, 3), 32), epilogue(None, MXFP8, column_layout=layout), ONE, tiles=2)


def test_no_rows_and_all_rows_in_nobody() -> None:
    for sizes, past in (((0, 0), 7), ((0,), 1)):
        check(Problem("MXFP8", sizes, 32, past=past), epilogue(MXFP8, MXFP8, amax=True), ONE)


# ---- the public calls


def test_one_expert_layer_in_two_calls() -> None:
    """Gate and up, SwiGLU and quantising in one launch; the down projection reads its codes and scales as they are."""
    problem = Problem("MXFP8", (5, 0, 40), 128, past=0)
    case, backend = problem.case, "emulator:sm_100a"
    hidden = padless.grouped_gemm_swiglu_quant(
        gate_up="concatenated", a_tensor=case.a, b_tensor=case.b, padded_offsets=case.offs,
        prob_tensor=problem.prob, d_format=MXFP8, column_output=False, backend=backend,
    )  # fmt: skip
    assert hidden.row is not None
    down = Problem("MXFP8", (5, 0, 40), 48, 64, past=0).case.b
    y = padless.grouped_gemm(hidden.row, down, case.offs, out_dtype=torch.float32, backend=backend)
    wanted = padless.grouped_gemm(hidden.row, down, case.offs, out_dtype=torch.float32, backend="reference")
    assert torch.allclose(y, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert y.abs().max() > 0


def test_every_pair_of_formats_has_a_row_in_the_table() -> None:
    def pairs(operation: str) -> set[tuple[str, str]]:
        return {(p.a, p.b) for p in ROUTES if (p.operation, p.arch) == (operation, "sm_100a")}

    assert pairs("grouped_gemm_quant") == pairs("grouped_gemm")


@pytest.mark.parametrize(
    ("what", "config", "n", "message"),
    [
        (epilogue(FP8_BLOCK, **INTERLEAVED), ONE, 256, "config.mma_n is 128; a quantising epilogue needs 256"),
        (ROWS, C(tokens_on_n=True), 128, "config.tokens_on_n is True; a quantising epilogue needs False"),
        (ROWS, C(mma_n=64), 128, "config.mma_n is 64; a quantising epilogue needs 128 or 256"),
        (epilogue(MXFP8, **CONCATENATED), ONE, 256, "config.mma_n is 128; a quantising epilogue needs 256"),
        (epilogue(MXFP8, **INTERLEAVED), None, 96, "N is 96; it must be a multiple of 64"),
        (ROWS, None, 136, "row_codes has strides (136, 1) and shape (11, 136)"),
        (ROWS, C(num_stages=12), 128, "does not fit in shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(what: Epilogue, config: C | None, n: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Problem("MXFP8", (5, 3), n), what, config, acc=torch.zeros(11, n))


def test_the_tile_that_is_chosen_can_do_the_epilogue() -> None:
    tiles = set()
    for _, _, what, _, _ in CASES.values():
        for m, n, groups in ((1, 64, 1), (3000, 128, 4), (8192, 4096, 32), (65536, 4096, 8), (8192, 32, 1024)):
            tile = sm100_grouped_quant.select_tile(m, n, groups, what)
            sm100_grouped_quant.check_tile(tile, what)
            tiles.add((tile.cta_group, tile.mma_n))
    assert len(tiles) == 4, tiles


# ---- planted bugs


BUGS_ALWAYS = {
    "rows of the next group in the maxima",
    "warps do not wait for the others' maxima",
    "sums given back too early",
}


@pytest.mark.parametrize("name", [n if n in BUGS_ALWAYS else pytest.param(n, marks=SLOW) for n in BUGS])
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, old, new, case = BUGS[name]
    fmt, n, what, config, layouts = CASES[case]
    problem = Problem(fmt, SIZES, n, 256, layouts=layouts)
    acc = problem.sums(emulated_driver("sm_100a"))  # before anything is planted
    assert jit.sources()[file].count(old) == 1
    plant(monkeypatch, sm100_grouped_quant, file, old, new)

    def all_seeds() -> None:
        for seed in range(3):
            check(problem, what, config, seed=seed, acc=acc)

    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        all_seeds()
    assert "does not compile" not in str(caught.value)


# ---- the compiled kernels

COPIED = {"scales_a": "tiled", "scales_b": "tiled", "groups_on_tiles": True, "wide_stores": True}
COMPILED = {
    "all outputs of a SwiGLU": (
        dataclasses.replace(PAIR, out_dtype=torch.float32, **COPIED),
        epilogue(MXFP8, MXFP8, "cudnn", **blocked("blocked", "blocked"), **INTERLEAVED, **ALL),
    ),
    "NVFP4 rows, gate and up apart, gathered scales": (
        dataclasses.replace(WIDE, kind="NVFP4"),
        epilogue(
            NVFP4, activation="swiglu", gate_up="concatenated", d_dtype=torch.bfloat16, **blocked("blocked"), **ALL
        ),
    ),
    "rows and columns": (dataclasses.replace(PAIR, **COPIED), epilogue(MXFP8, MXFP8, **ALL)),
    "FP8_BLOCK rows and columns of a SwiGLU, gathered scales": (
        dataclasses.replace(PAIR, kind="NVFP4", multicast=2, out_dtype=torch.float32, wide_stores=True),
        epilogue(FP8_BLOCK, FP8_BLOCK, **CONCATENATED, **ALL),
    ),
    "FP8_BLOCK operands, columns of a SwiGLU": (
        dataclasses.replace(PAIR, kind="FP8_BLOCK", scales_a="plain", scales_b="plain", out_dtype=torch.float32),
        epilogue(FP8_BLOCK, FP8_BLOCK, **CONCATENATED, **ALL),
    ),
    "FP8_BLOCK operands, 128 columns": (
        dataclasses.replace(ONE, kind="FP8_BLOCK", scales_a="plain", scales_b="plain"),
        epilogue(FP8_BLOCK, FP8_BLOCK, **ALL),
    ),
    "FP8_BLOCK rows": (dataclasses.replace(PAIR, **COPIED), epilogue(FP8_BLOCK, **blocked("plain_mn"))),
    "MXFP4 rows": (dataclasses.replace(ONE, kind="MXFP4"), epilogue(MXFP4, **ALL)),
    "NVFP4 rows": (dataclasses.replace(PAIR, kind="NVFP4", **COPIED), epilogue(NVFP4, **blocked("blocked"), **ALL)),
}
COMPILED_ALWAYS = {
    "all outputs of a SwiGLU",
    "NVFP4 rows, gate and up apart, gathered scales",
    "FP8_BLOCK rows and columns of a SwiGLU, gathered scales",
}


@pytest.mark.parametrize("name", [n if n in COMPILED_ALWAYS else pytest.param(n, marks=SLOW) for n in COMPILED])
def test_the_compiled_kernel_has_no_local_memory(name: str, tmp_path: object) -> None:
    tile, what = COMPILED[name]
    prelude = QuantConfig(tile, what).prelude()
    kernel = jit.compile_kernel(host.KERNEL, prelude, "sm_100a")
    assert complaints(kernel) == []
    opcodes = {line.split()[0] for line in instructions(kernel, tmp_path)}
    assert [o for o in opcodes if re.match(r"(LDL|STL)\b", o)] == []
    assert any(o.startswith("UTCQMMA" if tile.kind in ("MXFP8", "FP8_BLOCK") else "UTCOMMA") for o in opcodes)
