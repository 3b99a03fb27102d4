"""The quantising epilogue of the grouped Blackwell kernel, run by the emulator and judged bit for bit."""

# ruff: noqa: E501  (a bug is a line)

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from machine_code import complaints, instructions
from quant_cases import ALL, SIZES, plant
from sm100_quant import Problem, check

import padless
from padless import jit
from padless.config_sm100_grouped import Sm100GroupedConfig
from padless.emulator.fake_driver import emulated_driver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat
from padless.paths import PATHS, sm100_grouped_quant
from padless.paths.quant_launch import QuantConfig

C = Sm100GroupedConfig
ONE, WIDE = C(), C(mma_n=256)
PAIR = C(cta_group=2, mma_n=256)
NARROW_PAIR = C(cta_group=2)
SLOW = pytest.mark.slow
INTERLEAVED = {"activation": "swiglu_interleaved", "d_dtype": torch.float32}
CONCATENATED = {"activation": "swiglu_concatenated", "d_dtype": torch.float32}
TILED = ("blocked_groups", "blocked")


def epilogue(
    row: BlockScaledFormat | None = None, column: BlockScaledFormat | None = None, rule: str = "rceil", **options: object
) -> Epilogue:  # fmt: skip
    rule = "te" if row == NVFP4 else rule if row or column else ""
    return Epilogue(row_format=row, column_format=column, scale_rule=rule, **options)


def blocked(row: str, column: str = "plain") -> dict[str, str]:
    return {"row_layout": row, "column_layout": column}


ROWS = epilogue(MXFP8)
BOTH = epilogue(MXFP8, MXFP8)
# name: format of the operands, N, epilogue, tile, layouts of the operands' scales
CASES: dict[str, tuple[str, int, Epilogue, Sm100GroupedConfig | None, tuple[str, str]]] = {
    "rows": ("MXFP8", 144, ROWS, ONE, ("blocked", "blocked")),
    "everything": (
        "MXFP8", 160, epilogue(MXFP8, MXFP8, d_dtype=torch.bfloat16, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "floor, 32x4x4 tiles": (
        "MXFP8", 160, epilogue(MXFP8, MXFP8, "floor", **blocked("blocked", "blocked")), ONE, TILED,
    ),
    "cudnn, tiles of their own": (
        "MXFP8", 304,
        epilogue(
            MXFP8, MXFP8, "cudnn", bias_rule="gated_bias", **blocked("blocked_groups", "blocked_groups"), **ALL
        ),
        PAIR, ("plain", "blocked"),
    ),
    "e5m2 documented": (
        "NVFP4", 160, epilogue(MXFP8_E5M2, MXFP8_E5M2, "cudnn_documented"), None, ("blocked", "blocked"),
    ),
    "columns alone": ("MXFP8", 272, epilogue(None, MXFP8, "cudnn", alpha=True), WIDE, ("blocked", "blocked")),
    "nvfp4": ("NVFP4", 288, epilogue(NVFP4, **blocked("blocked"), **ALL), PAIR, ("blocked", "blocked")),
    "nvfp4, narrow pair": (
        "NVFP4", 160, epilogue(NVFP4, d_dtype=torch.float16), NARROW_PAIR, ("blocked", "blocked"),
    ),
    "mxfp4": ("MXFP4", 160, epilogue(MXFP4, None, "cudnn", **blocked("blocked_groups")), ONE, TILED),
    "amax alone": ("MXFP8", 168, epilogue(amax=True, alpha=True), None, ("blocked", "blocked")),
    "float32 alone": (
        "NVFP4", 136, epilogue(d_dtype=torch.float32, bias=True, prob=True), WIDE, ("blocked", "blocked"),
    ),
    "prob with no bias to gate": (
        "MXFP8", 144, epilogue(MXFP8, bias_rule="gated_bias", prob=True), ONE, ("blocked", "blocked"),
    ),
    "interleaved, everything": (
        "MXFP8", 192, epilogue(MXFP8, MXFP8, **blocked("blocked"), **INTERLEAVED, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "interleaved, nvfp4, 64 columns": (
        "NVFP4", 192, epilogue(NVFP4, **blocked("blocked"), **INTERLEAVED), ONE, ("blocked", "blocked"),
    ),
    "concatenated, nvfp4": (
        "NVFP4", 320, epilogue(NVFP4, **blocked("blocked"), **CONCATENATED, **ALL), PAIR, ("blocked", "blocked"),
    ),
    "concatenated, one CTA, copied scales": (
        "MXFP8", 512, epilogue(MXFP8, MXFP8, **blocked("blocked_groups", "blocked"), **CONCATENATED, **ALL), WIDE, TILED,
    ),
    "concatenated, pair, copied scales": ("NVFP4", 512, epilogue(NVFP4, **CONCATENATED), PAIR, TILED),
    "concatenated, a tail and plain scales": (
        "MXFP8", 352, epilogue(MXFP8, amax=True, **CONCATENATED), WIDE, ("plain", "plain"),
    ),
}  # fmt: skip
ALWAYS = {
    "everything",
    "cudnn, tiles of their own",
    "interleaved, everything",
    "concatenated, nvfp4",
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
    problem = Problem(fmt, (33, 0, 130), 288, 256, layouts=layouts)
    acc = problem.sums(emulated_driver("sm_100a"))
    for seed in (1, 2):
        check(problem, what, dataclasses.replace(config, num_stages=2), seed=seed, acc=acc)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_schedules(name: str) -> None:
    fmt, n, what, config, layouts = CASES[name]
    problem = Problem(fmt, (33, 0, 140), n, layouts=layouts, seed=1)
    acc = problem.sums(emulated_driver("sm_100a"))
    for seed in range(20):
        check(problem, what, config, seed=seed, sms=2 + 2 * (seed % 2), acc=acc)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(16))
def test_random_problems(seed: int) -> None:
    g = torch.Generator().manual_seed(500 + seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    def draw(*values: object) -> object:
        return values[number(0, len(values))]

    sizes = tuple(draw(0, 1, number(1, 40), number(1, 140), number(100, 300)) for _ in range(number(1, 6)))
    row = draw(None, MXFP8, MXFP8_E5M2, MXFP4, NVFP4)
    column = draw(None, row) if row in (MXFP8, MXFP8_E5M2) else draw(None, MXFP8) if row is None else None
    activation = draw("none", "none", "swiglu_interleaved", "swiglu_concatenated")
    flags = {name: bool(number(0, 2)) for name in ALL}
    d_dtype = torch.float32 if activation != "none" else draw(None, torch.bfloat16, torch.float16)
    if row is None and column is None and d_dtype is None:
        flags["amax"] = True
    layout = draw("plain", "blocked", "blocked_groups")
    what = epilogue(
        row, column, draw("rceil", "floor", "cudnn", "cudnn_documented"), activation=activation, d_dtype=d_dtype,
        row_layout=layout, column_layout=layout, **flags,
    )  # fmt: skip
    wide = activation == "swiglu_concatenated" or bool(number(0, 2))
    config = draw(None, C(cta_group=number(1, 3), mma_n=256 if wide else 128, raster_m=draw(1, 8)))
    n = 64 * number(1, 9) if activation != "none" else 32 * number(1, 18)
    layouts = (draw("plain", "blocked", "blocked_groups"), draw("plain", "blocked"))
    problem = Problem(
        draw("MXFP8", "NVFP4", "MXFP4"), sizes, n, 32 * number(1, 16), past=number(1, 9), seed=seed, layouts=layouts
    )  # fmt: skip
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
        return {(p.a, p.b) for p in PATHS if (p.operation, p.arch) == (operation, "sm_100a")}

    assert pairs("grouped_gemm_quant") == pairs("grouped_gemm")


@pytest.mark.parametrize(
    ("what", "config", "n", "message"),
    [
        (
            epilogue(FP8_BLOCK, None, ""),
            None,
            128,
            "d_format is FP8_BLOCK; on Blackwell MXFP8, MXFP8_E5M2, MXFP4, NVFP4 are stored",
        ),
        (ROWS, C(tokens_on_n=True), 128, "config.tokens_on_n is True; a quantising epilogue needs False"),
        (ROWS, C(mma_n=64), 128, "config.mma_n is 64; a quantising epilogue needs 128 or 256"),
        (epilogue(MXFP8, **CONCATENATED), ONE, 256, "config.mma_n is 128; a quantising epilogue needs 256"),
        (epilogue(MXFP8, **INTERLEAVED), None, 96, "N is 96; it must be a multiple of 64"),
        (ROWS, None, 136, "row_codes is (11, 136)"),
        (ROWS, C(num_stages=12), 128, "does not fit in shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(
    what: Epilogue, config: Sm100GroupedConfig | None, n: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check(Problem("MXFP8", (5, 3), n), what, config, acc=torch.zeros(11, n))


def test_the_tile_that_is_chosen_can_do_the_epilogue() -> None:
    tiles = set()
    for _, _, what, _, _ in CASES.values():
        for m, n, groups in (
            (1, 64, 1),
            (3000, 128, 4),
            (8192, 4096, 32),
            (65536, 4096, 8),
            (8192, 32, 1024),
        ):
            tile = sm100_grouped_quant.select_tile(m, n, groups, what)
            sm100_grouped_quant.check_tile(tile, what)
            tiles.add((tile.cta_group, tile.mma_n))
    assert len(tiles) == 4


# ---- planted bugs

MAIN, STORE, STORAGE = "sm100_grouped_gemm.cu", "sm100_quant_store.cuh", "sm100_grouped_storage.cuh"
# What is wrong: file, text, what takes its place, and the case that has to show it.
BUGS = {
    "rows of the next group in the maxima": (STORE, "if (MASKS_ROWS && !has_row)", "if (false)", "columns alone"),
    "columns past the last in the maxima": (STORE, "if (column + CHUNK > n_out)", "if (false)", "rows"),
    "multipliers read before they are there": (STORE, "    __syncwarp();\n    float multiplier[CHUNK];", "    float multiplier[CHUNK];", "columns alone"),
    "columns exchanged with the wrong lane": (STORE, "given, half)", "given, half ^ 1)", "columns alone"),
    "the other half of the columns kept": (STORE, "upper ? m[i + half] : m[i];", "upper ? m[i] : m[i + half];", "columns alone"),
    "sums given back too early": (STORE, "if (i == OUT_CHUNKS_BEFORE_DRAINED - 1)", "if (i == 0)", "nvfp4"),
    "loads of sums not waited for": (STORE, "    tcgen05_wait_ld();\n", "", "rows"),
    "no tcgen05 fence after done": (STORE, "        tcgen05_fence_after_thread_sync();\n", "", "rows"),
    "up from the neighbouring columns": (STORE, "chunk + OUT_CHUNKS :", "chunk + OUT_CHUNKS - 1 :", "concatenated, a tail and plain scales"),
    "up's scales where gate's are": (MAIN, "scale_tile + piece * (to_up / 128)", "scale_tile", "concatenated, one CTA, copied scales"),
    "up's rows where gate's are": (MAIN, "row + piece * to_up", "row", "concatenated, one CTA, copied scales"),
    "up's gathered scales 128 rows on": (MAIN, "!IS_A && GATE_AND_UP_APART ? operands.n / 2 : 128", "128", "concatenated, a tail and plain scales"),
    "a multiplication and an addition contracted": (
        STORE, "__fadd_rn(value, BIAS_GATED_BY_PROB ? __fmul_rn(four[e], row.prob) : four[e])",
        "fmaf(__uint_as_float(sums[i + e]), row.global, four[e])", "float32 alone",
    ),
    "scales of the word before kept": (STORE, "                    word = 0;\n", "", "nvfp4"),
    "a group's tile counted from its row": (STORE, "(shared.scale_shifts[group] + start) / 128", "start / 128", "cudnn, tiles of their own"),
    "nobody counts the groups' tiles": (STORAGE, "GROUPS_ON_TILES || EPILOGUE_IS_QUANT", "GROUPS_ON_TILES", "everything"),
    "a whole chunk of codes at the last columns": (STORE, "limit >= CHUNK && reinterpret", "reinterpret", "rows"),
    "amax of a warp without rows": (STORE, "lane == 0 && first < tile.rows", "lane == 0 && first >= tile.rows", "amax alone"),
}  # fmt: skip
BUGS_ALWAYS = {
    "rows of the next group in the maxima",
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
        epilogue(NVFP4, activation="swiglu_concatenated", d_dtype=torch.bfloat16, **blocked("blocked"), **ALL),
    ),
    "rows and columns": (dataclasses.replace(PAIR, **COPIED), epilogue(MXFP8, MXFP8, **ALL)),
    "MXFP4 rows": (dataclasses.replace(ONE, kind="MXFP4"), epilogue(MXFP4, **ALL)),
    "NVFP4 rows": (dataclasses.replace(PAIR, kind="NVFP4", **COPIED), epilogue(NVFP4, **blocked("blocked"), **ALL)),
}  # fmt: skip
COMPILED_ALWAYS = {"all outputs of a SwiGLU", "NVFP4 rows, gate and up apart, gathered scales"}


@pytest.mark.parametrize(
    "name", [n if n in COMPILED_ALWAYS else pytest.param(n, marks=SLOW) for n in COMPILED]
)
def test_the_compiled_kernel_has_no_local_memory(name: str, tmp_path: object) -> None:
    tile, what = COMPILED[name]
    prelude = QuantConfig(tile, what).prelude()
    kernel = jit.compile_kernel(sm100_grouped_quant.KERNEL, prelude, "sm_100a")
    assert complaints(kernel) == []
    opcodes = {line.split()[0] for line in instructions(kernel, tmp_path)}
    assert [o for o in opcodes if re.match(r"(LDL|STL)\b", o)] == []
    assert any(o.startswith("UTCQMMA" if tile.kind == "MXFP8" else "UTCOMMA") for o in opcodes)
