"""The dense MXFP8 kernel of Blackwell, emulated: exact where exactness can be had, bounded where not, no report."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.formats import BlockScaledTensor
from padless.kernels.sm100_dense.config import DenseProblem, Sm100DenseConfig, select_config
from padless.kernels.sm100_dense.host import KERNEL, prepare
from padless.kernels.table import find_route
from padless.reference.gemm import round_to
from support.ragged import GuardedOutput
from support.sm100_dense import (
    DenseCase,
    compute,
    error_bound,
    exact_case,
    launch,
    nan_padded,
    random_case,
    read_out_case,
    swapped,
)

PAIR = Sm100DenseConfig()
ONE = Sm100DenseConfig(cta_group=1, block_n=128)
CONFIGS = {
    "pair": PAIR,
    "pair, staged, hilbert": dataclasses.replace(PAIR, store="staged", tile_order="hilbert"),
    "pair, 128 bytes staged": dataclasses.replace(PAIR, store="staged", store_bytes=128, block_k=128),
    "pair, 128 columns": dataclasses.replace(PAIR, block_n=128, tile_order="hilbert"),
    "pair, overlap of 32": dataclasses.replace(PAIR, chunk_columns=32),
    "pair, overlap of 128": dataclasses.replace(PAIR, chunk_columns=128, store="staged", num_stages=2),
    "one CTA": ONE,
    "one CTA, 256 columns": dataclasses.replace(ONE, block_n=256, block_k=128),
}
SLOW = pytest.mark.slow
ARITHMETICS = ("truncate", pytest.param("exact", marks=SLOW), "separate_add")
ALWAYS = ("pair", "pair, staged, hilbert", "pair, overlap of 32", "one CTA")
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Three tiles of 256 x 256 on one pair of CTAs, the last one nearly empty: the first accumulator comes round twice.
# K: a whole stage and one step of the next.
TAILS = (200, 520, 288)


def wrong(out: torch.Tensor, case: DenseCase) -> list[list[int]]:
    """Where the bits differ from the exact product, rounded once."""
    expected = round_to(case.exact, out.dtype)
    assert expected.isfinite().all()
    return torch.nonzero(out != expected)[:8].tolist()


# --- exact -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=SLOW) for name in CONFIGS])
def test_exact_on_several_schedules(name: str) -> None:
    case = exact_case(*TAILS, seed=1)
    for seed in (1, 2 + list(CONFIGS).index(name)):
        out = compute(case, CONFIGS[name], seed=seed)
        assert not wrong(out, case), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_exact_on_twenty_schedules(name: str, dtype: torch.dtype, seed: int) -> None:
    m, n, k = 1 + 53 * seed % 400, 8 * (1 + 11 * seed % 66), 32 * (1 + 5 * seed % 19)
    config = dataclasses.replace(CONFIGS[name], tile_order=("row", "hilbert")[seed % 2])
    case = exact_case(m, n, k, seed=seed, formats=("e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2")[seed % 3])
    out = compute(case, config, dtype, seed=seed, num_sms=2 * (1 + seed % 3))
    assert not wrong(out, case), f"{(m, n, k)}"


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 32), (1, 270, 64), (257, 3, 96), (128, 128, 128), (129, 130, 160), (65, 8, 800), (140, 700, 160)],
)
@pytest.mark.parametrize("config", [PAIR, pytest.param(ONE, marks=SLOW)], ids=["pair", "one CTA"])
def test_any_m_and_n(m: int, n: int, k: int, config: Sm100DenseConfig) -> None:
    """The last has three tiles for two pairs, which cut the third."""
    case = exact_case(m, n, k, seed=m + n)
    assert not wrong(compute(case, config, seed=m, num_sms=4), case)


@pytest.mark.parametrize("dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("store", ["direct", pytest.param("staged", marks=SLOW)])
def test_every_output_dtype(store: str, dtype: torch.dtype) -> None:
    case = exact_case(140, 272, 96, seed=3)
    config = dataclasses.replace(PAIR, store=store, tile_order="hilbert")
    assert not wrong(compute(case, config, dtype, seed=4), case)


@pytest.mark.parametrize("formats", ["e4m3 e5m2", "e5m2 e4m3", "e5m2 e5m2"])
def test_every_pair_of_element_formats(formats: str) -> None:
    case = exact_case(130, 136, 160, seed=5, formats=formats)
    assert not wrong(compute(case, PAIR, seed=1), case)
    assert not wrong(compute(case, ONE, seed=2), case)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_exact_data_is_exact_in_every_arithmetic(arithmetic: str) -> None:
    case = exact_case(200, 270, 288, seed=7)
    for config in (PAIR, ONE):
        assert not wrong(compute(case, config, arithmetic=arithmetic, num_sms=4), case)


# --- witnesses: two errors that cancel cannot pass these ---------------------------------------------------


@pytest.mark.parametrize("config", [PAIR, ONE, CONFIGS["one CTA, 256 columns"]], ids=["pair", "one", "wide"])
def test_every_element_and_scale_is_read_where_it_lies(config: Sm100DenseConfig) -> None:
    """One operand selects single elements of the other with their scales, and the other way round."""
    for case in (read_out_case(140, 300, 288), swapped(read_out_case(270, 300, 288, seed=1))):
        assert not wrong(compute(case, config), case)


def test_the_witnesses_see_exchanged_scales() -> None:
    """The answers change when two scales of neighbouring rows, blocks or operands are exchanged."""
    case = read_out_case(70, 300, 288)
    bytes_of = case.a.scale.view(torch.uint8)
    for exchanged in (
        bytes_of.roll(1, 0),
        bytes_of.roll(1, 1),
        bytes_of[:, [1, 0, 2, 3, 4, 5, 6, 7, 8]],
        bytes_of.roll(32, 0),
    ):
        other = BlockScaledTensor(case.a.data, exchanged.view(torch.float8_e8m0fnu), case.a.format)
        out = compute(dataclasses.replace(case, a=other), ONE)
        assert wrong(out, case)


def test_scales_past_the_end_of_k_and_of_rows_do_not_matter() -> None:
    """The unused bytes of the last tiles of scales are NaN scales."""
    case = nan_padded(exact_case(130, 140, 160, seed=9))  # 5 scales a row: the second tile has 1 column of 4 in use
    for config in (PAIR, ONE):
        assert not wrong(compute(case, config, num_sms=4), case)


def test_a_nan_scale_spoils_its_row_alone() -> None:
    case = exact_case(150, 140, 64, seed=2)
    sfa = case.a.scale.view(torch.uint8).clone()
    sfa[131, 1] = 0xFF
    a = BlockScaledTensor(case.a.data, sfa.view(torch.float8_e8m0fnu), case.a.format)
    out = torch.zeros(150, 140)
    launch(emulated_driver("sm_100a"), dataclasses.replace(case, a=a), out, PAIR).raise_on_reports()
    assert out[131].isnan().all()
    out[131] = case.exact[131].float()
    assert not wrong(out, case)


# --- ordinary numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize(
    ("shape", "formats", "dtype"),
    [
        ((150, 264, 416), "e4m3 e4m3", torch.float32),
        pytest.param((270, 72, 288), "e5m2 e4m3", torch.bfloat16, marks=SLOW),
        ((70, 130, 544), "e4m3 e5m2", torch.float16),
    ],
    ids=str,
)
def test_ordinary_numbers_stay_within_the_bound(
    shape: tuple[int, int, int], formats: str, dtype: torch.dtype, arithmetic: str
) -> None:
    case = random_case(*shape, seed=sum(shape), formats=formats)
    out = compute(case, None, dtype, arithmetic=arithmetic, num_sms=4)
    excess = (out.double() - case.exact).abs() / error_bound(case, dtype)
    assert excess.amax(1).max() <= 1, f"rows {torch.nonzero(excess.amax(1) > 1).flatten().tolist()[:8]}"


def test_the_bound_is_not_loose() -> None:
    """Leaving out the first of 416 terms breaks it in nearly every row."""
    case = random_case(150, 264, 416, seed=1)
    x, y = case.a.data[:, :1].double(), case.b.data[0, :, :1].double()
    scale_a = torch.exp2(case.a.scale.view(torch.uint8)[:, :1].double() - 127)
    scale_b = torch.exp2(case.b.scale.view(torch.uint8)[0, :, :1].double() - 127)
    error = ((x * scale_a) @ (y * scale_b).T).abs()
    assert (error > error_bound(case, torch.float32)).any(1).double().mean() > 0.9


# --- operands as callers have them -------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("pitch", [264, 269, 272])
def test_any_pitch_and_start_of_the_output(pitch: int, offset: int) -> None:
    case = exact_case(40, 264 - offset, 64, seed=4)
    guarded = GuardedOutput(40, pitch, torch.float32)
    before = guarded.out.view(torch.int32).clone()
    out = guarded.out[:, offset : offset + case.exact.shape[1]]
    launch(emulated_driver("sm_100a"), case, out, None, seed=3).raise_on_reports()
    assert not wrong(out, case)
    rest = torch.ones(40, pitch, dtype=torch.bool)
    rest[:, offset : offset + case.exact.shape[1]] = False
    assert torch.equal(guarded.out.view(torch.int32)[rest], before[rest])


def test_pitched_operands() -> None:
    case = exact_case(70, 90, 96, seed=6)
    a, b = torch.zeros(70, 160, dtype=torch.uint8), torch.zeros(1, 90, 112, dtype=torch.uint8)
    a[:, 16:112], b[:, :, :96] = case.a.data.view(torch.uint8), case.b.data.view(torch.uint8)
    pitched = [
        BlockScaledTensor(data.view(t.data.dtype), t.scale, t.format)
        for data, t in ((a[:, 16:112], case.a), (b[:, :, :96], case.b))
    ]
    assert not wrong(compute(dataclasses.replace(case, a=pitched[0], b=pitched[1]), PAIR), case)


def test_the_same_seed_runs_the_same_way() -> None:
    case = exact_case(140, 140, 64)
    results = [launch(emulated_driver("sm_100a"), case, torch.empty(140, 140), PAIR, seed=11) for _ in range(2)]
    assert results[0].statistics.warp_instructions == results[1].statistics.warp_instructions


def test_gemm_picks_this_kernel() -> None:
    """The public call, with plain and with blocked scales; twice the same bits."""
    case = exact_case(70, 136, 96, seed=8, formats="e4m3 e5m2")
    b = BlockScaledTensor(case.b.data[0], case.b.scale[0], case.b.format)
    outs = [padless.gemm(case.a, b, out_dtype=torch.float32, backend="emulator:sm_100a")]
    padded = nan_padded(dataclasses.replace(case, b=b))
    outs.append(padless.gemm(padded.a, padded.b, out_dtype=torch.float32, backend="emulator:sm_100a"))
    for out in outs:
        assert not wrong(out, case)
    for a_format, b_format in itertools.product(("MXFP8", "MXFP8_E5M2"), repeat=2):
        assert find_route("gemm", "sm_100a", a_format, b_format).kernel == KERNEL
    assert find_route("gemm", "sm_103a", "MXFP8", "MXFP8", PAIR).kernel == KERNEL


# --- the host side -----------------------------------------------------------------------------------------


def test_the_choice_of_a_kernel() -> None:
    def chosen(m: int, n: int, k: int, **rest: object) -> tuple[object, ...]:
        c = select_config(DenseProblem(m, n, k, **rest))
        return c.cta_group, c.block_n, c.store, c.tile_order

    assert chosen(8192, 8192, 8192) == (2, 256, "direct", "hilbert")
    assert chosen(16384, 16384, 16384) == (2, 256, "direct", "hilbert")
    assert chosen(4096, 4096, 4096) == (2, 256, "direct", "row")
    assert chosen(2048, 2048, 2048) == (2, 256, "direct", "row")
    assert chosen(1024, 1024, 1024) == (2, 128, "direct", "row")
    assert chosen(128, 4096, 4096) == (1, 128, "direct", "row")
    assert chosen(8192, 8192, 8192, num_sms=1)[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cta_group": 4}, "cta_group is 4; allowed: 1 or 2"),
        ({"block_n": 192}, "block_n is 192"),
        ({"block_k": 64}, "block_k is 64"),
        ({"num_stages": 1}, "num_stages is 1"),
        ({"chunk_columns": 16}, "chunk_columns is 16"),
        ({"store": "tma"}, "store is 'tma'; allowed: direct or staged"),
        ({"store_bytes": 32}, "store_bytes is 32"),
        ({"store": "staged", "store_bytes": 128, "chunk_columns": 32}, "store_bytes is 128"),
        ({"tile_order": "z"}, "tile_order is 'z'"),
        ({"a_dtype": torch.bfloat16}, "a_dtype is torch.bfloat16"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
    ],
    ids=str,
)
def test_configs_that_cannot_be(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PAIR, **change)


def test_what_prepare_refuses() -> None:
    driver = emulated_driver("sm_100a")
    case = exact_case(40, 40, 64)
    odd = torch.empty(40, 41)[:, :40]
    with pytest.raises(ValueError, match=r"rows of out are not all on 16-byte boundaries; use store='direct'"):
        prepare(driver, case.a, case.b, None, odd, dataclasses.replace(PAIR, store="staged"))
    with pytest.raises(ValueError, match="does not fit in shared memory"):
        prepare(driver, case.a, case.b, None, torch.empty(40, 40), dataclasses.replace(PAIR, num_stages=9))
    with driver.configured(num_sms=1), pytest.raises(ValueError, match="cta_group=2; the device has 1 SM"):
        prepare(driver, case.a, case.b, None, torch.empty(40, 40), PAIR)
    offs = torch.tensor([40], dtype=torch.int32)
    with pytest.raises(ValueError, match="offs"):
        prepare(driver, case.a, case.b, offs, torch.empty(40, 40), PAIR)


def test_the_public_call_takes_any_number_of_columns(generator: torch.Generator) -> None:
    """Rows of 37 columns start at odd addresses. Elsewhere the same N is refused."""
    a, b = (
        padless.quantize(torch.randn(rows, 64, generator=generator), padless.MXFP8, kind=kind)
        for rows, kind in ((35, "activation"), (37, "weight"))
    )
    out = padless.gemm(a, b, out_dtype=torch.float32, backend="emulator:sm_100a")
    expected = padless.dequantize(a).double() @ padless.dequantize(b).double().t()
    assert float((out.double() - expected).norm() / expected.norm()) < 1e-6
    with pytest.raises(ValueError, match="N is 37; it must be a multiple of 4"):
        padless.gemm(a, b, out_dtype=torch.float32, backend="emulator")
