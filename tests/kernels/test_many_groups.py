"""More groups than 1024, most of them empty, in every kernel that takes groups: what fits, what is computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor
from padless.kernels.config import FEW_GROUPS, MANY_GROUPS, MAX_GROUPS, room_for_groups
from padless.kernels.epilogue_launch import check_groups
from padless.kernels.launch import KernelConfig
from padless.kernels.sm90_bf16 import config as bf16_config
from padless.kernels.sm90_bf16 import host as bf16_host
from padless.kernels.sm90_bf16_plain import host as plain_host
from padless.kernels.sm90_bf16_plain.config import Bf16PlainConfig
from padless.kernels.sm90_fp8 import host_quant as fp8_quant
from padless.kernels.sm90_fp8.config import Problem, Sm90Fp8Config, fit_config, select_config
from padless.kernels.sm90_fp8_wgrad import host as wgrad_host
from padless.kernels.sm90_fp8_wgrad.config import WgradConfig, WgradProblem
from padless.kernels.sm90_fp8_wgrad.config import select_config as select_wgrad
from padless.kernels.sm90_mxfp8 import config as mxfp8_config
from padless.kernels.sm90_mxfp8 import host as mxfp8_host
from padless.kernels.sm90_mxfp8 import host_quant as mxfp8_quant
from padless.kernels.sm90_rows_columns import host as columns_host
from padless.kernels.sm90_swiglu_backward import host as swiglu_host
from padless.kernels.sm100_grouped import host as sm100_host
from padless.kernels.sm100_grouped.config import TILE_CYCLES, Sm100GroupedConfig
from padless.kernels.sm100_wgrad import Sm100WgradConfig
from padless.ops.grouped_gemm_wgrad import grouped_gemm_wgrad
from padless.quantization.quantize import quantize
from padless.reference.bf16 import grouped_gemm_plain_reference, grouped_gemm_wgrad_rows_reference
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.reference.wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import WgradShape, poisoned, random_operands
from padless.testing.guarded import GuardedOutput
from support.bf16_problems import Shape, random_plain, random_rows
from support.kernel_heads import head_of
from support.mxfp8_wgrad import launched as launched_on_blackwell
from support.mxfp8_wgrad import random_columns
from support.planted_bugs import Bug, assert_found, cases, holds, search
from support.sm90_quant_cases import EPILOGUES, PairCase, check
from support.sm100_quant import Problem as Problem100
from support.sm100_quant import check as check_on_blackwell

SLOW = pytest.mark.slow
COUNTS = (1025, 2880, 4096)
DTYPES = (torch.bfloat16, torch.float32)
BLACKWELL = "emulator:sm_100a"


def sizes_of(groups: int, last: int) -> tuple[int, ...]:
    """A row in groups around multiples of 256 and 1024, two in the one before the last, ``last`` in the last."""
    sizes = [0] * groups
    for g in (0, 255, 256, 1022, 1023, 1024, 1025, 2047, 2048, 3071, 3072):
        if g < groups:
            sizes[g] = 1
    sizes[-2:] = 2, last
    return tuple(sizes)


def alone(groups: int, last: int) -> tuple[int, ...]:
    """All rows in the last group."""
    return (*[0] * (groups - 1), last)


# --- what fits -------------------------------------------------------------------------------------------


def test_the_table_comes_in_three_sizes() -> None:
    for most, groups in ((FEW_GROUPS, (1, 256)), (MANY_GROUPS, (257, 1024)), (MAX_GROUPS, COUNTS)):
        assert {room_for_groups(count) for count in groups} == {most}


def fp8_configs(groups: int) -> set[Sm90Fp8Config]:
    problems = itertools.product((1, 16, 300, 2000), (8, 4096), (128, 7168), DTYPES)
    return {select_config(Problem(rows * groups, n, k, groups, dtype)) for rows, n, k, dtype in problems}


def bf16_configs(groups: int) -> set[bf16_config.Sm90Bf16Config]:
    problems = itertools.product(bf16_config.PAIRS, (1, 8, 30, 60, 500), (256, 1 << 17), DTYPES, (False, True))
    return {
        bf16_config.select_config(*pair, rows * groups, n, groups, out_dtype=dtype, blocked=blocked)
        for pair, rows, n, dtype, blocked in problems
        if "MXFP8_E5M2" not in pair
    }


def wgrad_configs(groups: int) -> set[WgradConfig]:
    problems = itertools.product(("1d1d", "1d2d"), DTYPES, (100, 600, 4000))
    return {
        select_wgrad(WgradProblem(4096, 4096, tokens * groups, groups, mode, dtype)) for mode, dtype, tokens in problems
    }


def heads_of_products(groups: int) -> dict[KernelConfig, tuple[str, str]]:
    """Source and architecture of what is picked for so many groups."""
    room = room_for_groups(groups)
    found: dict[KernelConfig, tuple[str, str]] = {config: (config.source, "sm_90a") for config in fp8_configs(groups)}
    found |= dict.fromkeys(bf16_configs(groups), (bf16_host.KERNEL, "sm_90a"))
    found |= dict.fromkeys(wgrad_configs(groups), (wgrad_host.KERNEL, "sm_90a"))
    for m, n, dtype in itertools.product((64, 128), (64, 128), DTYPES):
        config = mxfp8_config.Sm90Mxfp8Config(m, n, max_groups=room, out_dtype=dtype)
        found[config] = mxfp8_host.KERNEL, "sm_90a"
    for kind, tile in ((kind, tile) for kind, tiles in TILE_CYCLES.items() for tile in tiles):
        tokens_on_n, mma_n, cta_group = tile
        scales = "plain" if kind == "FP8_BLOCK" else "window"
        config = Sm100GroupedConfig(
            cta_group, tokens_on_n, mma_n, kind=kind.split()[0], b_e2m1="x" in kind, scales_a=scales, scales_b=scales,
            groups_on_tiles=True, max_groups=room,
        )  # fmt: skip
        found[config] = sm100_host.KERNEL, "sm_100a"
    return found


@pytest.mark.parametrize("groups", [pytest.param(MANY_GROUPS, marks=SLOW), pytest.param(MAX_GROUPS, marks=SLOW)])
def test_every_tile_that_is_picked_fits(groups: int) -> None:
    """Two stages at least beside a table of 1024 groups, three beside the largest."""
    least = 2 if groups <= MANY_GROUPS else 3
    heads = {config: head_of(source, config, arch) for config, (source, arch) in heads_of_products(groups).items()}
    assert {config: head for config, head in heads.items() if head is None or head.stages < least} == {}
    assert len(heads) > 150


def test_tight_tiles_fit() -> None:
    """Of those above, and kernels whose table is a schedule of tiles: one of their CTAs on a multiprocessor, or two."""
    few = bf16_config.select_config("NVFP4", "NVFP4", 60 * 512, 1 << 17, 512)
    many = bf16_config.select_config("BF16", "MXFP4", 60 * 4096, 1 << 17, 4096, out_dtype=torch.float32)
    for config in (few, many):
        assert head_of(bf16_host.KERNEL, config) is not None
    columns = head_of(columns_host.KERNEL, columns_host.RowsColumnsConfig(max_groups=MAX_GROUPS))
    swiglu = head_of(swiglu_host.KERNEL, swiglu_host.SwigluBackwardConfig(True, False, False, MAX_GROUPS))
    assert columns is not None
    assert 2 * (columns.shared_bytes + 1024) <= 228 * 1024
    assert swiglu is not None


def test_a_tile_of_256_rows_is_not_picked_beside_the_largest_table() -> None:
    picked = [select_config(Problem(2000 * groups, 4096, 7168, groups)).block_m for groups in (1024, 1025)]
    assert picked == [256, 128]
    assert {config.block_m for config in wgrad_configs(4096)} == {128}
    assert {config.block_m for config in wgrad_configs(1024)} == {128, 256}


def test_windows_of_scales_that_do_not_fit_are_refused() -> None:
    config, k = Sm90Fp8Config(scales="k"), 128 * 100
    assert fit_config(config, Problem(8, 8, k, 1024)).scale_window_k_blocks == 104
    with pytest.raises(ValueError, match=r"K is 12800: the scales of 128 rows take 53248 bytes .*, at most 32768 fit"):
        fit_config(config, Problem(8, 8, k, 1025))


def test_outputs_that_do_not_fit_are_refused() -> None:
    everything = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", d_dtype=torch.float32)
    check_groups(1024, everything)
    for fits in (
        {"d_dtype": torch.bfloat16},
        {"d_dtype": None},
        {"row_format": None},
        {"activation": "swiglu", "gate_up": "interleaved"},
    ):
        check_groups(4096, Epilogue(**{**vars(everything), **fits}))
    message = r"^b has 1025 groups, .* allowed: at most 1024 groups, d of 16 bits, or codes along one of the two$"
    with pytest.raises(ValueError, match=message):
        fp8_quant.select_tile(Problem(10**5, 128, 128, 1025, torch.float32), everything)


# --- products --------------------------------------------------------------------------------------------

PRODUCTS: dict[str, tuple[str, BlockScaledFormat | None, BlockScaledFormat | None, KernelConfig | None]] = {
    "FP8, few rows": ("emulator", FP8_BLOCK, FP8_BLOCK, None),
    "FP8": ("emulator", FP8_BLOCK, FP8_BLOCK, Sm90Fp8Config()),
    "MXFP8": ("emulator", MXFP8, MXFP8, None),
    "BF16 x MXFP4": ("emulator", None, MXFP4, None),
    "NVFP4": ("emulator", NVFP4, NVFP4, None),
    "BF16": ("emulator", None, None, None),
    "Blackwell, MXFP8": (BLACKWELL, MXFP8, MXFP8, None),
    "Blackwell, NVFP4": (BLACKWELL, NVFP4, NVFP4, None),
    "Blackwell, FP8_BLOCK": (BLACKWELL, FP8_BLOCK, FP8_BLOCK, None),
}
# Sizes of the groups. A tall group has them sorted, and more than 512 with rows are merged.
RAGGED = {
    "1025": sizes_of(1025, 3),
    "1025, tall": sizes_of(1025, 70),
    "2880": sizes_of(2880, 3),
    "4096": sizes_of(4096, 3),
    "4096, tall": sizes_of(4096, 70),
    "4096, the last": alone(4096, 9),
    "4096, none": alone(4096, 0),
}


def ends_of(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def weights_of(
    groups: int, n: int, k: int, fmt: BlockScaledFormat | None, draw: torch.Generator
) -> BlockScaledTensor | torch.Tensor:
    """Those of group g are number g % 61 of 61, so that they are drawn soon and neighbours differ."""
    few, number = torch.randn(61, n, k, generator=draw), torch.arange(groups) % 61
    if fmt is None:
        return few.bfloat16()[number]
    weights = quantize(few, fmt, kind="weight")
    codes, scale = (t.view(torch.uint8)[number].view(t.dtype) for t in (weights.data, weights.scale))
    return BlockScaledTensor(codes, scale, fmt)


def check_product(name: str, sizes: tuple[int, ...], n: int = 16) -> None:
    """Raises AssertionError unless every row is that of its group and rows past the last group are as they were."""
    backend, a_format, b_format, config = PRODUCTS[name]
    draw = torch.Generator().manual_seed(len(sizes) + n)
    k, behind, offs = 128, 3, ends_of(sizes)
    x = torch.randn(sum(sizes) + behind, k, generator=draw)
    a = x.bfloat16() if a_format is None else quantize(x, a_format, kind="activation")
    b = weights_of(len(sizes), n, k, b_format, draw)
    out = torch.full((len(x), n), float("nan"))
    with emulated_driver("sm_100a" if backend == BLACKWELL else "sm_90a").configured(num_sms=2, arithmetic="fast"):
        padless.grouped_gemm(a, b, offs, out=out, backend=backend, config=config)
    want = padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend="reference").double()
    valid = int(offs[-1])
    assert out[valid:].isnan().all()
    wrong = (out[:valid].double() - want[:valid]).abs() > 0.01 * want[:valid].abs().amax(1, keepdim=True)
    assert not wrong.any(), f"rows {wrong.any(1).nonzero().flatten().tolist()}"


QUICK = ("FP8, few rows", "4096")
EACH = ("1025, tall", "4096", "4096, the last")
CASES = [(name, ragged) for name in PRODUCTS for ragged in (RAGGED if name in ("FP8", "Blackwell, MXFP8") else EACH)]


@pytest.mark.parametrize(("name", "ragged"), [pytest.param(*c, marks=() if c == QUICK else SLOW) for c in CASES])
def test_products(name: str, ragged: str) -> None:
    check_product(name, RAGGED[ragged])


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["FP8", "BF16", "Blackwell, MXFP8"])
def test_products_of_more_than_512_groups_with_rows(name: str) -> None:
    sizes = [1 + g % 3 if g % 8 == 0 else 0 for g in range(4096)]
    sizes[4001] = 70
    check_product(name, tuple(sizes), n=8)


# --- quantizing epilogues, which ask for each group's first tile of scales ---------------------------------

BY_GROUP = EPILOGUES["MXFP8 rows and columns by group, cudnn, everything"]


@SLOW
@pytest.mark.parametrize("groups", COUNTS)
def test_quantized_outputs(groups: int) -> None:
    check(mxfp8_quant, PairCase(sizes_of(groups, 3), 32, plain=mxfp8_host), BY_GROUP)


@SLOW
def test_quantized_outputs_on_blackwell() -> None:
    check_on_blackwell(Problem100("MXFP8", sizes_of(1025, 3), 32), BY_GROUP)


# --- weight gradients ------------------------------------------------------------------------------------

GRADIENTS = {"1025": sizes_of(1025, 40), "4096": sizes_of(4096, 40), "4096, the last": alone(4096, 40)}


@SLOW
@pytest.mark.parametrize("ragged", GRADIENTS)
@pytest.mark.parametrize("mode", ["1d1d", "1d2d"])
def test_fp8_weight_gradients(mode: str, ragged: str) -> None:
    """Added to what was there, so that groups without a token have no tiles, and stay as they are."""
    sizes = GRADIENTS[ragged]
    dy, x = random_operands(WgradShape(sizes, 3, 16, 16), mode, 1)
    out = torch.randn((len(sizes), 16, 16), generator=torch.Generator().manual_seed(1))
    want = out + grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32, accumulation="tensor_core")
    with emulated_driver().configured(num_sms=2):
        grouped_gemm_wgrad(poisoned(dy), poisoned(x), out=out, accumulate=True, backend="emulator")
    assert same_bits(out, want)


@SLOW
@pytest.mark.parametrize("ragged", GRADIENTS)
def test_bf16_weight_gradients(ragged: str) -> None:
    sizes = GRADIENTS[ragged]
    rows = random_rows(Shape(sizes, 3, 16, 16))
    out = torch.randn((len(sizes), 16, 16), generator=torch.Generator().manual_seed(1))
    reference = grouped_gemm_wgrad_rows_reference(
        rows.dy, rows.x, rows.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )
    want = out + reference
    with emulated_driver().configured(num_sms=2):
        grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, out=out, accumulate=True, backend="emulator")
    assert same_bits(out, want)


@SLOW
def test_mxfp8_weight_gradients_on_blackwell() -> None:
    """A CTA for every group."""
    problem = random_columns(sizes_of(1025, 40), 3, 16, 16)
    config = Sm100WgradConfig(num_stages=2, out_dtype=torch.float32)
    out = launched_on_blackwell(emulated_driver("sm_100a"), problem, config)
    want = grouped_gemm_wgrad_mxfp8_reference(
        problem.dy, problem.x, problem.offs, out=torch.empty(out.shape, dtype=torch.float64), accumulate=False
    )
    assert (out - want).abs().amax() <= 1e-4 * want.abs().amax()
    has_rows = torch.tensor(problem.sizes) > 0
    assert torch.equal(out.flatten(1).any(1), has_rows)


@SLOW
def test_empty_groups_get_zeros() -> None:
    """A tile for every group."""
    sizes = alone(1025, 40)
    rows = random_rows(Shape(sizes, 0, 16, 16))
    with emulated_driver().configured(num_sms=2):
        out = grouped_gemm_wgrad(rows.dy, rows.x, offs=rows.offs, out_dtype=torch.float32, backend="emulator")
    want = grouped_gemm_wgrad_rows_reference(
        rows.dy, rows.x, rows.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )
    assert same_bits(out, want)
    assert not out[:-1].any()


# --- planted bugs ----------------------------------------------------------------------------------------

SORTED = "device/sorted_groups.cuh"
PLACE = "order[is_active ? before : all + g - before]"
TABLE = Bf16PlainConfig(block_n=128, num_stages=2, max_groups=MAX_GROUPS, out_dtype=torch.float32)
BUGS = (
    Bug("a group's number in 10 bits", "", (SORTED, PLACE + " = g;", PLACE + " = g & 1023;"), quick=True),
    Bug("a table one entry short", "", (SORTED, "int ends[MAX_GROUPS];", "int ends[MAX_GROUPS - 1];")),
    Bug("bits of 1024 groups", "", (SORTED, "of_chunk[CHUNKS];", "of_chunk[32];")),
    Bug("groups past 1024 are not looked at", "", (SORTED, "chunks = (num_groups + 31) / 32", "chunks = 32")),
    Bug("the table of 1024 groups", "", (SORTED, "int order[MAX_GROUPS];", "int order[1024];")),
)


def detect(bug: Bug) -> tuple[int | None, list[str]]:
    """(number of seeds needed, kinds reported until then); None if it was not found."""
    plain = random_plain(Shape(sizes_of(MAX_GROUPS, 70), 3, 16, 64))
    wanted = grouped_gemm_plain_reference(
        plain.a, plain.b, plain.offs, out_dtype=torch.float32, accumulation="tensor_core"
    )
    valid = int(plain.offs[-1])

    def launch(driver: Any) -> Callable[[], bool]:
        guarded = GuardedOutput(plain.a.shape[0], 16, torch.float32)
        plain_host.prepare(driver, plain.a, plain.b, plain.offs, guarded.out, TABLE).launch(0)
        return lambda: holds(lambda: guarded.check(valid)) and same_bits(guarded.out[:valid], wanted[:valid])

    return search(bug, plain_host.KERNEL, TABLE, launch)


@pytest.mark.parametrize("bug", cases(BUGS))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert_found(bug, detect)


@SLOW
def test_without_a_bug_nothing_is_found() -> None:
    assert detect(Bug("none", seeds=1)) == (None, [])
