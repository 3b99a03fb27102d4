"""The grouped block-scaled GEMM of Blackwell, in the emulator: right, inside its groups, and without a report."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.formats import BlockScaledTensor
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import prepare
from padless.kernels.table import ROUTES
from support.ragged import GuardedOutput
from support.sm100_grouped import (
    FORMATS,
    Case,
    case_of,
    check_close,
    drawn_sizes,
    make_case,
    random_bytes,
    run,
    values_of,
)

C = Sm100GroupedConfig
SQUARE = C()
WIDE = C(mma_n=256)
PAIR = C(cta_group=2, mma_n=256)
FEW = C(tokens_on_n=True, mma_n=64)
FEW_PAIR = C(tokens_on_n=True, mma_n=64, cta_group=2)
MANY_PAIR = C(tokens_on_n=True, mma_n=256, cta_group=2)
TWO_PAIRS = C(cta_group=2, mma_n=256, multicast=2)
FEW_TWO_PAIRS = C(tokens_on_n=True, mma_n=128, cta_group=2, multicast=2)
FOUR = C(multicast=4)
CONFIGS = {
    "128x128": SQUARE,
    "128x256": WIDE,
    "pair 256x256": PAIR,
    "pair 256x128": C(cta_group=2),
    "64 tokens": FEW,
    "pair 64 tokens": FEW_PAIR,
    "pair 256 tokens": MANY_PAIR,
    "two pairs 256x256": TWO_PAIRS,
    "two pairs 128 tokens": FEW_TWO_PAIRS,
    "four 128x128": FOUR,
    "128x64": C(mma_n=64),
    "pair 32 tokens": C(tokens_on_n=True, mma_n=32, cta_group=2),
    "two 64 tokens": C(tokens_on_n=True, mma_n=64, multicast=2),
}


def slow(*values: object) -> object:
    """Parameters of a case for the slow suite."""
    return pytest.param(*values, marks=pytest.mark.slow)


SLOW_RAGGED = (5, 7, 8, 11, 13, 14, 16)
# (format, config, sizes, rows past the end, N, K, scales of A, scales of B, output): every format with every layout and
# tile; empty groups, groups of one row, tails of M, N and K, one group alone, groups that start inside a scale tile.
RAGGED = [
    ("MXFP8", SQUARE, (70, 0, 129, 3), 0, 200, 320, "blocked", "blocked", torch.bfloat16),
    ("NVFP4", WIDE, (1, 1, 1), 3, 264, 96, "blocked", "blocked", torch.float32),
    ("MXFP4", PAIR, (0, 130, 257, 0), 0, 392, 352, "blocked_groups", "plain", torch.float16),
    ("MXFP8", PAIR, (33, 0, 0, 126), 9, 136, 160, "plain", "blocked", torch.float32),
    ("NVFP4", C(cta_group=2), (127, 128, 1), 0, 72, 544, "blocked", "blocked", torch.bfloat16),
    ("NVFP4", FEW, (5, 0, 64, 63, 1), 7, 144, 320, "blocked_groups", "blocked", torch.bfloat16),
    ("MXFP8", FEW_PAIR, (65, 2), 0, 312, 96, "blocked", "plain", torch.float16),
    ("MXFP4", MANY_PAIR, (0, 0, 257), 0, 264, 224, "blocked", "blocked", torch.float32),
    ("MXFP4", C(mma_n=64), (31, 0, 97, 33), 40, 104, 416, "plain", "plain", torch.bfloat16),
    ("MXFP8", WIDE, (0, 0, 0), 5, 64, 128, "blocked", "blocked", torch.float32),
    ("MXFP8", MANY_PAIR, (40,), 0, 8, 32, "blocked_groups", "blocked", torch.float32),
    # Clusters that share the tokens: columns for one worker of the last cluster, for both, for a part of the last.
    ("NVFP4", TWO_PAIRS, (0, 257, 3), 2, 264, 352, "blocked", "blocked", torch.bfloat16),
    ("MXFP8", TWO_PAIRS, (1, 130), 0, 520, 288, "blocked_groups", "blocked", torch.float16),
    ("MXFP4", FEW_TWO_PAIRS, (5, 0, 129), 5, 392, 160, "blocked_groups", "plain", torch.float32),
    ("NVFP4", replace(FEW_TWO_PAIRS, mma_n=32), (33, 1), 0, 600, 64, "plain", "blocked", torch.bfloat16),
    ("MXFP8", FOUR, (70, 0, 129), 1, 328, 224, "plain", "blocked", torch.bfloat16),
    ("MXFP4", C(multicast=2, tokens_on_n=True, mma_n=64), (3, 66), 0, 200, 128, "blocked", "blocked", torch.float16),
]


@pytest.mark.parametrize("number", [slow(i) if i in SLOW_RAGGED else i for i in range(len(RAGGED))])
def test_ragged(number: int) -> None:
    fmt, config, sizes, extra, n, k, scales_a, scales_b, dtype = RAGGED[number]
    case = make_case(fmt, sizes, n, k, m=sum(sizes) + extra, seed=number, layouts=(scales_a, scales_b))
    check_close(case, run(case, config, dtype, seed=number, num_sms=2 + 2 * (number % 2)).out)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_forty_groups(name: str) -> None:
    sizes = (*(7 * g % 23 if g % 5 else 0 for g in range(39)), 201)
    number = list(CONFIGS).index(name)
    fmt = ("MXFP8", "NVFP4", "MXFP4")[number % 3]
    layouts = (("blocked", "blocked_groups")[number % 2], "blocked")
    case = make_case(fmt, sizes, 136, 288, seed=number, layouts=layouts)
    check_close(case, run(case, CONFIGS[name], seed=number, num_sms=4).out)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_random_problems(seed: int) -> None:
    g = torch.Generator().manual_seed(1000 + seed)

    def draw(*values: object) -> object:
        return values[int(torch.randint(0, len(values), (1,), generator=g))]

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    sizes = tuple(draw(0, 1, number(1, 40), number(1, 140), number(100, 300)) for _ in range(number(1, 7)))
    n, k, extra = 8 * number(1, 50), 32 * number(1, 24), draw(0, 5, 130)
    fmt = draw("MXFP8", "NVFP4", "MXFP4", ("MXFP8", "MXFP8_E5M2"), ("MXFP8_E5M2", "MXFP8"))
    config = C(
        cta_group=draw(1, 2), tokens_on_n=draw(False, True), mma_n=draw(32, 64, 128, 256), multicast=draw(1, 2),
        raster_m=draw(1, 8),
    )  # fmt: skip
    layouts = (draw("plain", "blocked", "blocked_groups"), draw("plain", "blocked"))
    case = make_case(fmt, sizes, n, k, m=max(sum(sizes) + extra, 1), seed=seed, layouts=layouts)
    dtype = draw(torch.float32, torch.bfloat16, torch.float16)
    check_close(case, run(case, config, dtype, seed=seed, num_sms=2 * number(1, 3)).out)


# ---- the public call


def test_grouped_gemm_picks_this_kernel() -> None:
    case = make_case("NVFP4", (3, 0, 20), 160, 128, layouts=("plain", "blocked"))
    out = GuardedOutput(23, 160, torch.bfloat16)
    padless.grouped_gemm(case.a, case.b, case.offs, out=out.out, backend="emulator:sm_100a")
    out.check(23)
    check_close(case, out.out)
    assert emulated_driver("sm_100a").last_result.statistics.warp_instructions > 0


def test_gemm_of_fp4_is_a_group_of_all_rows() -> None:
    case = make_case("MXFP4", (37,), 72, 96, exact=True)
    b = BlockScaledTensor(case.b.data[0], case.b.scale[0], case.b.format, None, "blocked")
    out = padless.gemm(case.a, b, out_dtype=torch.float32, backend="emulator:sm_100a")
    assert torch.equal(out.double(), case.exact)


def test_every_pair_of_formats_has_a_row_in_the_table() -> None:
    mine = {(p.a, p.b) for p in ROUTES if p.config_class is Sm100GroupedConfig and p.operation == "grouped_gemm"}
    eight = ("MXFP8", "MXFP8_E5M2")
    same = {(name, name) for name in ("NVFP4", "MXFP4", "FP8_BLOCK")}
    assert mine == {*itertools.product(eight, (*eight, "MXFP4")), *same}


@pytest.mark.parametrize("name", ["128x128", "64 tokens"])
def test_the_two_8_bit_formats_mix(name: str) -> None:
    pair = ("MXFP8", "MXFP8_E5M2") if name == "128x128" else ("MXFP8_E5M2", "MXFP8")
    case = make_case(pair, (17, 3), 40, 64, exact=True)
    assert torch.equal(run(case, CONFIGS[name]).out.double(), case.exact)


# ---- bit for bit


@pytest.mark.parametrize(
    ("fmt", "name"),
    [
        ("MXFP8", "128x128"),
        ("NVFP4", "pair 256x256"),
        ("MXFP4", "pair 64 tokens"),
        slow("NVFP4", "128x128"),
        slow("MXFP4", "pair 256x256"),
        slow("MXFP8", "pair 64 tokens"),
    ],
)
def test_exact_data_bit_for_bit(fmt: str, name: str) -> None:
    """Every row and every block has a scale of its own, A, B and all groups differ, and no rounding hides anything."""
    case = make_case(fmt, (70, 0, 3), 136, 288, exact=True, seed=3)
    assert torch.equal(run(case, CONFIGS[name], seed=1, arithmetic="fast").out.double(), case.exact)


@pytest.mark.parametrize("arithmetic", ["truncate", slow("exact"), "separate_add"])
def test_every_rule_of_adding_gives_exact_data_the_same_bits(arithmetic: str) -> None:
    for fmt, config in (("MXFP8", FEW), ("NVFP4", SQUARE)):
        case = make_case(fmt, (30, 5), 72, 192, exact=True, seed=4)
        assert torch.equal(run(case, config, arithmetic=arithmetic).out.double(), case.exact)


@pytest.mark.parametrize("arithmetic", ["truncate", slow("exact"), "separate_add"])
def test_every_rule_of_adding_is_close_on_random_data(arithmetic: str) -> None:
    case = make_case("MXFP8", (30, 5), 72, 320, seed=5)
    check_close(case, run(case, FEW, arithmetic=arithmetic).out)


def one_hot(fmt: str, side: str, sizes: tuple[int, ...], n: int, k: int) -> Case:
    """One operand random, the other with a single 1 a row: every result is one element of the first with its scale."""
    g = torch.Generator().manual_seed(9)
    f = FORMATS[fmt]
    shapes = {"a": (sum(sizes), k), "b": (len(sizes), n, k)}
    codes, scales = {}, {}
    for name, shape in shapes.items():
        codes[name], scales[name] = random_bytes(f, shape, g, exact=False)
        if name != side:
            rows = codes[name].view(-1, k)
            at = (11 * torch.arange(rows.shape[0]) + 3) % k
            rows.zero_()
            rows[torch.arange(rows.shape[0]), at] = 2 if f.codes_per_byte == 2 else 0x38
    return case_of((codes["a"], codes["b"]), (scales["a"], scales["b"]), (f, f), sizes)


@pytest.mark.parametrize(
    ("fmt", "side", "name"),
    [
        ("MXFP8", "a", "pair 256x256"),
        ("NVFP4", "b", "64 tokens"),
        ("NVFP4", "a", "pair 256x256"),
        slow("MXFP8", "b", "64 tokens"),
        slow("MXFP4", "b", "pair 256x256"),
    ],
)
def test_single_elements_can_be_read_out(fmt: str, side: str, name: str) -> None:
    """A permutation that both operands share leaves a sum of products as it is, but not a single product."""
    case = one_hot(fmt, side, (66, 70), 136, 160)
    assert (case.exact != 0).double().mean() > 0.4
    assert torch.equal(run(case, CONFIGS[name], arithmetic="fast").out.double(), case.exact)


@pytest.mark.parametrize("fmt", ["MXFP8", "NVFP4", "MXFP4"])
def test_wrong_readings_of_the_scales_would_show(fmt: str) -> None:
    """Of the data of the exact cases: no exchange of scales that a kernel could make leaves the product as it is."""
    g = torch.Generator().manual_seed(3)
    f = FORMATS[fmt]
    a, sa = random_bytes(f, (73, 288), g, exact=True)
    b, sb = random_bytes(f, (1, 136, 288), g, exact=True)
    right = values_of(a, sa, f) @ values_of(b, sb, f)[0].T

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return values_of(a, x, f) @ values_of(b, y, f)[0].T

    wrong = {
        "next block of A": product(sa.roll(1, 1), sb),
        "next block of B": product(sa, sb.roll(1, 2)),
        "next block of both": product(sa.roll(1, 1), sb.roll(1, 2)),
        "rows of A 32 further": product(sa.roll(32, 0), sb),
        "rows of both 32 further": product(sa.roll(32, 0), sb.roll(32, 1)),
        "next row of both": product(sa.roll(1, 0), sb.roll(1, 1)),
        "blocks of A in another order": product(sa.flip(1), sb),
    }
    for name, product_ in wrong.items():
        assert (product_ != right).double().mean() > 0.9, name


# ---- scales


@pytest.mark.parametrize("start", [1, slow(31), slow(32), 33, slow(96), slow(127), 128])
def test_a_group_may_start_anywhere_in_a_scale_tile(start: int) -> None:
    case = make_case("MXFP8", (start, 140), 16, 128, exact=True, seed=start)
    config = SQUARE if start % 2 else C(tokens_on_n=True, mma_n=128)
    assert torch.equal(run(case, config, arithmetic="fast").out.double(), case.exact)


@pytest.mark.parametrize("fmt", ["NVFP4", slow("MXFP4")])
@pytest.mark.parametrize("layouts", [("blocked", "blocked"), ("blocked_groups", "blocked")], ids=str)
def test_nan_in_the_padding_of_scales_goes_nowhere(fmt: str, layouts: tuple[str, str]) -> None:
    """K ends in the middle of a product of 64: its other half is zeros with scales that are not there."""
    case = make_case(fmt, (20, 9), 24, 288, exact=True, layouts=layouts)
    for t in (case.a, case.b):
        assert not t.scale.view(t.format.scale_dtype).float().isfinite().all(), "no trap was laid"
    assert torch.equal(run(case, FEW, arithmetic="fast").out.double(), case.exact)


def test_nan_in_one_row_stays_in_that_row() -> None:
    case = make_case("MXFP8", (40, 9), 24, 128, exact=True, layouts=("plain", "blocked"))
    case.a.scale.view(torch.uint8)[33, 2] = 0xFF
    out = run(case, SQUARE, guard=False).out
    assert out[33].isnan().all()
    others = torch.arange(49) != 33
    assert torch.equal(out[others].double(), case.exact[others])


def test_plain_scales_of_odd_width_are_copied_and_say_so() -> None:
    case = make_case("MXFP8", (4,), 8, 96, layouts=("plain", "plain"))
    driver = emulated_driver("sm_100a")
    out = torch.empty(4, 8)
    assert len(prepare(driver, case.a, case.b, case.offs, out, None).copies) == 2
    case = make_case("MXFP8", (4,), 8, 128, layouts=("plain", "plain"))
    assert prepare(driver, case.a, case.b, case.offs, out, None).copies == ()


@pytest.mark.parametrize("config", [SQUARE, FEW_PAIR], ids=["128x128", "pair 64 tokens"])
def test_global_scales_and_alpha(config: Sm100GroupedConfig) -> None:
    g = torch.Generator().manual_seed(8)
    of_a, of_b, alpha = (torch.rand(count, generator=g) + 0.5 for count in (1, 3, 3))
    case = make_case("NVFP4", (9, 0, 30), 40, 64, exact=True, global_scales=(of_a, of_b))
    out = run(case, config, alpha=alpha).out
    group = torch.tensor([0] * 9 + [2] * 30)
    factor = of_a * of_b[group] * alpha[group]  # float32, in this order
    assert torch.equal(out, case.exact.float() * factor[:, None])


# ---- outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)])
@pytest.mark.parametrize("config", [SQUARE, FEW], ids=["128x128", "64 tokens"])
def test_column_major_output(config: Sm100GroupedConfig, dtype: torch.dtype) -> None:
    case = make_case("MXFP8", (70, 0, 33), 40, 64, exact=True)
    out = run(case, config, dtype, column_major=True).out
    assert out.stride(0) == 1
    assert torch.equal(out, case.exact.to(dtype))


@pytest.mark.parametrize("pitch", [40, 48, slow(56)])
def test_rows_of_any_pitch_of_16_bytes(pitch: int) -> None:
    """Wide stores only where rows start on 32-byte boundaries; nothing between the rows is written."""
    case = make_case("NVFP4", (3, 6), 40, 64, exact=True)
    whole = torch.full((9, pitch), 77.0, dtype=torch.bfloat16)
    driver = emulated_driver("sm_100a")
    prepare(driver, case.a, case.b, case.offs, whole[:, :40], SQUARE).launch(0)
    assert torch.equal(whole[:, :40], case.exact.to(torch.bfloat16))
    assert (whole[:, 40:] == 77).all()


@pytest.mark.parametrize("offs", [[5, 3, 9], [-4, 2, 2], [0, 100, 7], [9, 9, 9]], ids=str)
def test_offs_that_lie_stay_inside(offs: list[int]) -> None:
    for layout, config in (("blocked", FEW), ("blocked_groups", C(cta_group=2))):
        case = make_case("MXFP8", (3, 3, 3), 24, 64, layouts=(layout, "blocked"))
        case.offs.copy_(torch.tensor(offs))
        run(case, config, guard=False).result.raise_on_reports()


# ---- schedules


def check_schedule(name: str, fmt: str, seed: int) -> None:
    config = replace(CONFIGS[name], num_stages=2)
    n = 136 + config.cluster_n - config.tile_n  # a tail for the last worker of a cluster
    case = make_case(fmt, (20, 0, 130, 3), n, 640, exact=True)
    num_sms = max(2, config.cluster) * (1 + seed % 2)
    out = run(case, config, seed=seed, num_sms=num_sms, arithmetic="fast").out
    assert torch.equal(out.double(), case.exact)


@pytest.mark.parametrize("name", ["128x256", "pair 256x256", slow("pair 64 tokens"), "two pairs 256x256"])
def test_no_report_on_any_schedule(name: str) -> None:
    for seed in (1, 2):
        check_schedule(name, "NVFP4", seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("fmt", ["MXFP8", "NVFP4", "MXFP4"])
def test_twenty_schedules(fmt: str, name: str, seed: int) -> None:
    """Each on a ragged problem of its own, bit-accurate: data without roundings has equal bits, other data is close."""
    config = CONFIGS[name] if seed % 3 else replace(CONFIGS[name], num_stages=2)
    n = 8 * (1 + 7 * seed % 19) + config.cluster_n - config.tile_n  # a tail for the last worker of a cluster
    layouts = (("blocked", "blocked_groups", "plain")[seed % 3], ("blocked", "plain")[seed % 2])
    exact = seed % 4 < 2
    case = make_case(
        fmt, drawn_sizes(seed), n, 32 * (3 + 5 * seed % 17), m=sum(drawn_sizes(seed)) + seed % 4, seed=seed,
        exact=exact, layouts=layouts,
    )  # fmt: skip
    dtype = torch.float32 if exact else torch.bfloat16
    out = run(case, config, dtype, seed=seed, num_sms=max(2, config.cluster) * (1 + seed % 2)).out
    check_close(case, out)
    if exact:
        assert torch.equal(out[: case.valid].double(), case.exact[: case.valid])


def test_more_groups_than_the_small_table_holds() -> None:
    sizes = tuple(int(g % 100 == 7) for g in range(300))
    case = make_case("MXFP8", sizes, 8, 32, exact=True)
    assert torch.equal(run(case, FEW, arithmetic="fast", checks=False).out.double(), case.exact)
