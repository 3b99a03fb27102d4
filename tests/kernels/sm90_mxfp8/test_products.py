"""The MXFP8 kernel on Hopper's FP8 tensor cores, in the emulator: bit for bit what its arithmetic says it gives."""

from __future__ import annotations

import pytest
import torch

import padless
from padless.emulator.errors import LaunchError
from padless.formats import MXFP8, BlockScaledTensor
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8.config import Sm90Mxfp8Config, select_config
from padless.kernels.sm90_mxfp8.host import KERNEL
from padless.kernels.table import find_route
from padless.reference.gemm import grouped_gemm_reference
from support.machine_code import edit_sources
from support.sm90_mxfp8_cases import (
    DRIVER,
    NAN_SCALE,
    PAIRS,
    Problem,
    multiply,
    offsets,
    predicted,
    random_problem,
    tensor,
)

SIZES = (70, 0, 1, 5)  # a tail of 6 rows in an m64 of its own, an empty group, a one-row group
N, K = 136, 160  # tails of a tile of 128 and of 64 columns, and of 128 of K
SMALL = Sm90Mxfp8Config(block_m=64, block_n=64)


def assert_same(out: torch.Tensor, wanted: torch.Tensor) -> None:
    same = (out == wanted) | (out.isnan() & wanted.isnan())
    bad = torch.nonzero(~same.all(1)).flatten()
    assert bad.numel() == 0, f"rows {bad.tolist()[:8]} of {len(out)} differ"


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(fmt.name for fmt in pair))
def test_every_bit_of_every_pair(pair: tuple[padless.BlockScaledFormat, padless.BlockScaledFormat]) -> None:
    problem = random_problem(SIZES, N, K, pair=pair)
    assert_same(multiply(problem), predicted(problem))


@pytest.mark.parametrize("config", [Sm90Mxfp8Config(block_n=64), Sm90Mxfp8Config(block_m=64), SMALL], ids=str)
def test_every_tile(config: Sm90Mxfp8Config) -> None:
    problem = random_problem((65, 3), 72, 288)
    assert_same(multiply(problem, config=config), predicted(problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_output_is_rounded_once(dtype: torch.dtype) -> None:
    problem = random_problem((3, 9), 72, 160, scales=(119, 122))
    assert_same(multiply(problem, dtype, SMALL), predicted(problem, dtype))


@pytest.mark.parametrize("of_b", ["plain", "blocked"])
@pytest.mark.parametrize("of_a", ["plain", "blocked", "blocked_groups"])
@pytest.mark.parametrize("k", [32, 256], ids=lambda k: f"K{k}")
def test_scales_in_every_layout(of_a: str, of_b: str, k: int) -> None:
    """Rows of a group start anywhere in a 128-row tile of scales; what pads the tiles is NaN."""
    problem = random_problem((3, 0, 130), 136 if k == 32 else 8, k, layouts=(of_a, of_b))
    plain = random_problem((3, 0, 130), 136 if k == 32 else 8, k)
    assert torch.equal(problem.a.data.view(torch.uint8), plain.a.data.view(torch.uint8))
    assert_same(multiply(problem, config=Sm90Mxfp8Config(block_n=64)), predicted(plain))


@pytest.mark.parametrize("sizes", [(0, 0), (1, 1, 1), (0, 129, 0), (64, 64), (63, 65)], ids=str)
def test_ragged_groups(sizes: tuple[int, ...]) -> None:
    problem = random_problem(sizes, 8, 96)
    assert_same(multiply(problem, config=Sm90Mxfp8Config(block_n=64)), predicted(problem))


@pytest.mark.parametrize("seed", [1, 2, 17])
def test_every_schedule_gives_the_same_bits(seed: int) -> None:
    problem = random_problem((129, 2), 72, 544)  # more stages than the pipeline has, and tiles to queue
    config = Sm90Mxfp8Config(block_n=64, num_stages=3)
    assert_same(multiply(problem, config=config, seed=seed, num_sms=1 + seed % 2), predicted(problem))


def test_exact_sums_are_the_references() -> None:
    """Small integers: sums of 32 fit 13 bits, so nothing is lost and the reference says the same."""
    generator = torch.Generator().manual_seed(5)
    offs = offsets((7, 0, 66))
    parts = []
    for shape in ((75, 320), (3, 72, 320)):
        values = torch.randint(-4, 5, shape, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.randint(120, 135, (*shape[:-1], 10), generator=generator)
        parts.append(tensor(values.view(torch.uint8), scales, MXFP8, "plain", offs))
    problem = Problem(*parts, offs)
    wanted = grouped_gemm_reference(problem.a, problem.b, offs, out_dtype=torch.float32)
    assert_same(multiply(problem, config=SMALL), wanted[:73])


def test_quantized_values_multiply_as_the_values_do() -> None:
    """From end to end, through the public call: within 13 bits of each sum of 32, row by row."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn((20, 160), generator=generator) * 2.0 ** torch.randint(-9, 9, (20, 1), generator=generator)
    w = torch.randn((2, 72, 160), generator=generator)
    a, b = padless.quantize(x, MXFP8), padless.quantize(w, MXFP8, kind="weight")
    offs = padless.group_offsets([3, 17])
    out = padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend="emulator", config=SMALL)
    exact = grouped_gemm_reference(a, b, offs, out_dtype=torch.float64, accumulate="float64")
    relative = (out - exact).norm(dim=1) / exact.norm(dim=1)
    assert bool((relative < 2**-11).all())
    assert bool((relative > 0).all())  # else these were not FP8 tensor cores
    assert_same(out, predicted(Problem(a, b, offs)))


# --- extreme scales --------------------------------------------------------------------------------------


def test_extreme_scales_overflow_and_vanish_as_documented() -> None:
    problem = random_problem((9, 5), 40, 416, scales=(0, 255))
    out = multiply(problem, config=SMALL, expect_finite=False)
    wanted = predicted(problem)
    assert bool(wanted.isinf().any())
    assert_same(out, wanted)


def test_scales_a_long_way_from_one_that_cancel_are_exact() -> None:
    """2^-120 times 2^120: no step on the way may overflow or vanish."""
    near = random_problem((9, 5), 40, 160, scales=(120, 134))
    far = random_problem((9, 5), 40, 160, scales=(120, 134))
    far.a.scale.view(torch.uint8).sub_(120)  # 0 is 2^-127
    far.b.scale.view(torch.uint8).add_(120)
    assert int(far.b.scale.view(torch.uint8).max()) < NAN_SCALE
    assert_same(multiply(far, config=SMALL), predicted(near))


def test_a_nan_scale_is_nan_in_its_row_or_column_alone() -> None:
    problem = random_problem((9, 5), 40, 160)
    clean = multiply(problem, config=SMALL)
    problem.a.scale.view(torch.uint8)[2, 3] = NAN_SCALE
    problem.b.scale.view(torch.uint8)[1, 33, 4] = NAN_SCALE
    problem.a.scale.view(torch.uint8)[14:] = NAN_SCALE  # rows of nobody
    out = multiply(problem, config=SMALL, expect_finite=False)
    poisoned = torch.zeros_like(out, dtype=torch.bool)
    poisoned[2] = True
    poisoned[9:, 33] = True
    assert torch.equal(out.isnan(), poisoned)
    assert torch.equal(out[~poisoned], clean[~poisoned])


def test_a_nan_code_is_nan_in_its_row_or_column_alone() -> None:
    problem = random_problem((9, 5), 40, 160)
    problem.a.data.view(torch.uint8)[3, 159] = 0x7F
    problem.b.data.view(torch.uint8)[0, 7, 0] = 0xFF
    out = multiply(problem, config=SMALL, expect_finite=False)
    poisoned = torch.zeros_like(out, dtype=torch.bool)
    poisoned[3] = True
    poisoned[:9, 7] = True
    assert torch.equal(out.isnan(), poisoned)


# --- the host side ---------------------------------------------------------------------------------------


def test_the_dense_product_is_one_group() -> None:
    problem = random_problem((66,), 72, 160, spare_rows=0)
    b = BlockScaledTensor(problem.b.data[0], problem.b.scale[0], MXFP8)
    dense = padless.gemm(problem.a, b, out_dtype=torch.float32, backend="emulator", config=SMALL)
    assert_same(dense, predicted(problem))


def test_scales_are_read_where_they_are_if_words_can_be() -> None:
    problem = random_problem((3,), 8, 96, spare_rows=0)
    out = torch.empty((3, 8))
    assert sm90_mxfp8.prepare(DRIVER, problem.a, problem.b, problem.offs, out, SMALL).copies == ()
    shifted = torch.zeros(25, dtype=torch.uint8)
    shifted[1:] = problem.b.scale.view(torch.uint8).flatten()
    scale = shifted[1:].view(1, 8, 3).view(torch.float8_e8m0fnu)
    moved = Problem(problem.a, BlockScaledTensor(problem.b.data, scale, MXFP8), problem.offs)
    assert len(sm90_mxfp8.prepare(DRIVER, moved.a, moved.b, moved.offs, out, SMALL).copies) == 1
    assert_same(multiply(moved, config=SMALL), predicted(problem))


def test_the_config_chooses_this_kernel() -> None:
    for operation in ("grouped_gemm", "gemm"):
        for pair in PAIRS:
            path = find_route(operation, "sm_90a", pair[0].name, pair[1].name, Sm90Mxfp8Config())
            assert (path.config_class, path.kernel) == (Sm90Mxfp8Config, KERNEL)


@pytest.mark.parametrize(
    ("field", "value"), [("block_m", 256), ("block_n", 192), ("num_stages", 1), ("raster_m", 0), ("max_groups", 4097)]
)
def test_a_config_that_does_not_exist_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"Sm90Mxfp8Config\.{field} is {value}; allowed: "):
        Sm90Mxfp8Config(**{field: value})


def test_small_problems_get_narrow_tiles() -> None:
    assert select_config(8192, 4096, 8, 132) == Sm90Mxfp8Config()
    assert select_config(128, 4096, 1, 132).block_n == 64
    assert select_config(32, 4096, 1, 132) == SMALL
    assert select_config(16 * 128, 4096, 128, 132) == Sm90Mxfp8Config(block_m=64)
    assert select_config(16 * 128 + 1, 4096, 128, 132) == Sm90Mxfp8Config()
    for m in (0, 1, 64, 65, 10**6):
        for n in (8, 4096):
            for groups in (1, 7, 1024):
                assert select_config(m, n, groups, 132).block_m in (64, 128)


# --- the checks above can fail ---------------------------------------------------------------------------

FILES = (KERNEL, "device/queue_start.cuh", "sm90_mxfp8/storage.cuh", "sm90_mxfp8/load.cuh", "sm90_mxfp8/multiply.cuh")
BUGS = {
    "scales written without a proxy fence": (r"if constexpr \(!OF_A\) fence_proxy_async_shared\(\);", ""),
    "scales written before the stage is empty": (
        r"mbarrier_wait\(shared_address\(&shared.empty\[stage\]\), pipeline.phase \^ 1\);(?=\s+const uint32_t to)",
        "",
    ),
    "one scale warp not waited for": (r"1 \+ NUM_SCALE_WARPS \* 32\)", "1 + (NUM_SCALE_WARPS - 1) * 32)"),
    "sums promoted before they are done": (r"step\.wait<0, 1>\(\);", ""),
    "no fence before the products": (r"wgmma_fence\(\);", ""),
    "a stage's first products not waited for": (r"step\.wait<0, 0>\(\);", ""),
    "stage released before its last product": (
        r"(?s)(if \(more\)\s+step\.wait<1, 1>.*?)(if \(next == 0\) release_stage\(shared, stage\);)",
        r"\2\1",
    ),
    "stage never released": (r"if \(next == 0\) release_stage\(shared, stage\);", ""),
    "V never zeroed": (r"(\+ i \* 16,) 0, 0, 0, 0\)", r"\1 ~0u, ~0u, ~0u, ~0u)"),
    "steps swapped in U": (r"::make_u\(u\[step % 2\], pairs, step", "::make_u(u[step % 2], pairs, 3 - step"),
    "scale of the next column": (r"v_offset\(lane\)", "v_offset(lane ^ 1)"),
    "memory read while the kernels ahead write it": (r"griddepcontrol_wait\(\);(?=\s+return)", ""),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    assert edit_sources(monkeypatch, FILES, *BUGS[bug]) == 1
    driver = type(DRIVER)()
    monkeypatch.setattr("support.sm90_mxfp8_cases.DRIVER", driver)  # a kernel prepared before is the right one
    problem = random_problem((66, 3), 72, 416)
    config = Sm90Mxfp8Config(block_n=64, num_stages=2, raster_m=3 + list(BUGS).index(bug))
    with pytest.raises((LaunchError, AssertionError)):
        assert_same(multiply(problem, config=config), predicted(problem))
