"""sm90_fp8_few: few rows a group, tokens on the side of the tensor core's columns.

What would convince: every tile has the bits of sm90_fp8, stored and quantized, with groups of no row, of one, of more
than a tile, rows past the last group, tails of N and K, K blocks even and odd in number; no report by the emulator on
any seed, and every planted bug found.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from padless.emulator import KINDS
from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP8, NVFP4
from padless.kernels.epilogue_launch import QuantConfig
from padless.kernels.sm90_fp8 import host, host_quant
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config, select_config
from padless.runtime import jit
from support import sm90_quant_cases
from support.emulator_bugs import Bug
from support.emulator_cases import make_case, run_case
from support.emulator_variants import Variant
from support.fp8_few_bugs import BUGS, NARROW, TALL, WIDE
from support.machine_code import complaints
from support.quant_cases import ALL
from support.ragged import GuardedOutput

TILES = [Sm90Fp8Config(block_m=m, block_n=n, few_rows=True) for m, n in itertools.product((8, 16, 32, 64), (128, 256))]
SWIGLU = Epilogue(
    row_format=FP8_BLOCK, row_layout="plain_mn", activation="swiglu", gate_up="concatenated", gate_in_bf16=True
)
DRIVER = EmulatedDriver()


def name_of(tile: Sm90Fp8Config) -> str:
    return f"{tile.block_m}x{tile.block_n}"


# --- bits ------------------------------------------------------------------------------------------------


SLOW = pytest.mark.slow
OFTEN = ("16x128", "32x256")  # what is picked most; the others are slow tests
SHARED_TILES = [tile if name_of(tile) in OFTEN else pytest.param(tile, marks=SLOW) for tile in TILES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=SLOW), torch.float32], ids=str)
@pytest.mark.parametrize("tile", SHARED_TILES, ids=name_of)
def test_every_tile_has_the_bits_of_tokens_on_rows(tile: Sm90Fp8Config, dtype: torch.dtype) -> None:
    sizes, past = (5, 0, 70, 1, 0), 3
    for n, k in ((200, 672), (264, 256)):  # tails; 6 and 2 K blocks
        case = make_case(sizes, n, k, "mn", seed=tile.block_m)
        rows = case.rows - past  # of the last group but one: offs[-1] < M
        offs = case.offs - torch.tensor([0, 0, past, past, past])
        want = GuardedOutput(case.rows, n, dtype)
        with DRIVER.configured(arithmetic="fast", num_sms=2):
            host.prepare(DRIVER, case.a, case.b, offs.int(), want.out, Sm90Fp8Config(out_dtype=dtype)).launch(0)
            got = GuardedOutput(case.rows, n, dtype)
            host.prepare(DRIVER, case.a, case.b, offs.int(), got.out, tile).launch(0)
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert bool(want.out[:rows].isfinite().all())
        assert torch.equal(got.out[:rows].view(bits), want.out[:rows].view(bits))
        got.check(rows)


def test_an_odd_number_of_k_blocks() -> None:
    for k in (16, 128, 384, 4224):  # 4224: more scales than a warp holds
        case = make_case((3, 9), 136, k, "mn", seed=k)
        outs = []
        for config in (Sm90Fp8Config(), NARROW, WIDE):
            outs.append(GuardedOutput(12, 136, torch.bfloat16))
            with DRIVER.configured(arithmetic="fast", num_sms=2):
                host.prepare(DRIVER, case.a, case.b, case.offs, outs[-1].out, config).launch(0)
        want, *got = (guarded.out.view(torch.int16) for guarded in outs)
        assert all(torch.equal(out, want) for out in got), k


EPILOGUES: dict[str, tuple[Epilogue, Sm90Fp8Config]] = {
    "SwiGLU": (SWIGLU, WIDE),
    "SwiGLU, 16 rows, all operands": (dataclasses.replace(SWIGLU, **ALL), dataclasses.replace(WIDE, block_m=16)),
    "SwiGLU, 64 rows, bf16 too": (dataclasses.replace(SWIGLU, d_dtype=torch.bfloat16), TALL),
    "SwiGLU, 8 rows, interleaved": (
        dataclasses.replace(SWIGLU, activation="swiglu", gate_up="interleaved"), dataclasses.replace(WIDE, block_m=8),
    ),
    "rows": (Epilogue(row_format=FP8_BLOCK, row_layout="plain", bias=True), NARROW),
    "MXFP8 by group": (Epilogue(row_format=MXFP8, row_layout="blocked_groups", scale_rule="rceil", **ALL), NARROW),
    "NVFP4": (Epilogue(row_format=NVFP4, row_layout="blocked", scale_rule="te"), WIDE),
    "amax": (Epilogue(amax=True, alpha=True), TALL),
}  # fmt: skip


@pytest.mark.parametrize("name", EPILOGUES)
def test_a_quantized_tile(name: str) -> None:
    epilogue, tile = EPILOGUES[name]
    n = 384 if epilogue.is_glu else 160
    sm90_quant_cases.check(host_quant, sm90_quant_cases.Case((5, 0, 70, 1), n, 256, seed=3), epilogue, tile)


# --- order -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [NARROW, WIDE, TALL], ids=name_of)
def test_unmodified_kernel_gives_no_report(tile: Sm90Fp8Config) -> None:
    case = make_case((5, 0, 39, 1), 520, 672, "mn")
    for seed in range(4):
        with DRIVER.configured(seed=seed, raise_on_reports=False, num_sms=1 + seed % 3, arithmetic="fast"):
            right, result = run_case(DRIVER, case, tile)
        assert result is not None
        assert not result.reports, f"seed {seed}:\n" + "\n".join(map(str, result.reports))
        assert right, f"seed {seed}: wrong result"


@pytest.mark.parametrize(
    "bug",
    [bug if i % 3 == 0 else pytest.param(bug, marks=SLOW) for i, bug in enumerate(BUGS)],
    ids=lambda bug: bug.name,
)
def test_planted_bug_is_found(bug: Bug) -> None:
    case = make_case(bug.sizes, bug.n, bug.k, "mn")
    driver = Variant("sm_90a", bug.config.source, bug.edits, bug.config, bug.nth)
    kinds: set[str] = set()
    for seed in range(bug.seeds):
        with driver.configured(seed=seed, raise_on_reports=False, num_sms=1, arithmetic="fast"):
            right, result = run_case(driver, case, bug.config)
        assert result is not None
        kinds |= {report.kind for report in result.reports}
        if kinds & bug.kinds or (not bug.kinds and not right):
            break
    else:
        pytest.fail(f"not found on {bug.seeds} seeds; reports seen: {sorted(kinds) or 'none'}")
    assert bug.kinds <= set(KINDS)


# --- the compiler's own words ----------------------------------------------------------------------------


@pytest.mark.parametrize("tile", SHARED_TILES, ids=name_of)
def test_a_tile_compiles_without_spills(tile: Sm90Fp8Config) -> None:
    texts = [tile.prelude(), dataclasses.replace(tile, out_dtype=torch.float32, max_groups=1024).prelude()]
    if tile.block_n == 256:
        texts.append(QuantConfig(tile, SWIGLU).prelude())
        texts.append(QuantConfig(tile, dataclasses.replace(SWIGLU, d_dtype=torch.float32, **ALL)).prelude())
    for text in texts:
        kernel = jit.compile_kernel(tile.source, text, "sm_90a")
        assert complaints(kernel) == []
        assert kernel.num_stages >= 3


# --- the choice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "k", "block_m"),
    [
        (1, 768, 16),
        (96, 1040, 16),
        (97, 768, 32),
        (320, 1024, 32),
        (321, 1024, 64),
        (1024, 1024, 64),
        (1025, 768, None),
        (160, 2048, 32),
        (161, 1040, None),
        (64, 2176, None),
    ],
)
def test_groups_of_few_rows_and_short_k_take_few_rows(rows: int, k: int, block_m: int | None) -> None:
    chosen = select_config(Problem(rows, 2048, k, 64))
    assert (chosen.block_m if chosen.few_rows else None) == block_m


def test_groups_of_few_rows_and_the_shortest_k_take_192_columns() -> None:
    """Up to 2.5 rows tokens are on columns, and from 24 on the table of costs chooses."""
    for rows, tile in ((160, None), (161, (64, 192)), (24 * 64, (64, 192))):
        chosen = select_config(Problem(rows, 2048, 512, 64, torch.float32))
        assert (None if chosen.few_rows else (chosen.block_m, chosen.block_n)) == tile
        assert chosen.out_dtype == torch.float32
    assert select_config(Problem(24 * 64 + 1, 2048, 512, 64)).block_m >= 128
    assert select_config(Problem(161, 2048, 528, 64)).block_n < 192


def test_many_tiles_are_wide() -> None:
    few, many = (select_config(Problem(groups, 2048, 512, groups)) for groups in (64, 512))
    assert (few.block_n, many.block_n) == (128, 256)
    assert many.few_rows
    assert many.max_groups >= 512


@pytest.mark.parametrize(("rows", "block_m"), [(8, 16), (96, 16), (512, 32), (1024, 64), (1025, None)])
def test_a_swiglu_of_few_rows_needs_no_cluster(rows: int, block_m: int | None) -> None:
    chosen = host_quant.select_tile(Problem(rows, 1536, 7168, 64), SWIGLU)
    assert (chosen.block_m if chosen.few_rows else None) == block_m
    assert chosen.cluster_n == (1 if chosen.few_rows else 2)


def test_column_outputs_take_tokens_on_rows() -> None:
    both = dataclasses.replace(SWIGLU, column_format=MXFP8, row_format=MXFP8, row_layout="plain", scale_rule="rceil")
    assert not host_quant.select_tile(Problem(8, 1536, 768, 64), both).few_rows
    with pytest.raises(ValueError, match=r"config.few_rows is True; a quantising epilogue needs False"):
        host_quant.check_tile(WIDE, both)
    with pytest.raises(ValueError, match=r"config.block_n is 128; a quantising epilogue needs 256"):
        host_quant.check_tile(NARROW, SWIGLU)


@pytest.mark.parametrize(
    ("field", "value"), [("block_m", 128), ("block_n", 64), ("cluster_n", 2), ("store", "pool"), ("scales", "k")]
)
def test_what_few_rows_cannot_have_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"Sm90Fp8Config.{field} is {value!r}; allowed: .* with few_rows"):
        dataclasses.replace(NARROW, **{field: value})
