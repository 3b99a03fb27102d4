"""MXFP4 weights beside 8-bit activations in the grouped Blackwell kernel: the copy engine spreads their codes."""

from __future__ import annotations

import pytest
import torch

import padless
from padless.emulator.fake_driver import emulated_driver
from padless.emulator.units import tensor_map as emulated_map
from padless.formats import MXFP4, MXFP8, BlockScaledTensor
from padless.kernels.padded_fp4 import padded_fp4
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig
from padless.kernels.sm100_grouped.host import fit, prepare
from padless.runtime.tensor_map import TensorMapSpec
from support.emulator_variants import Edit, Variant
from support.ragged import GuardedOutput
from support.sm100_grouped import check_close, drawn_sizes, make_case, run

C = Sm100GroupedConfig
PAIR = ("MXFP8", "MXFP4")
E5M2 = ("MXFP8_E5M2", "MXFP4")
BACKEND = "emulator:sm_100a"
SLOW = pytest.mark.slow
CONFIGS = {
    "128x128": C(),
    "pair 256x256": C(cta_group=2, mma_n=256),
    "64 tokens": C(tokens_on_n=True, mma_n=64),
    "pair 32 tokens": C(tokens_on_n=True, mma_n=32, cta_group=2),
    "two pairs 256x256": C(cta_group=2, mma_n=256, multicast=2),
    "two pairs 128 tokens": C(tokens_on_n=True, mma_n=128, cta_group=2, multicast=2),
    "four 128x128": C(multicast=4),
}


# (formats, tile, sizes, rows past the end, N, K, scales of A, scales of B, output). K ends with a stage or half of one.
RAGGED = [
    (PAIR, "128x128", (70, 0, 129, 3), 2, 200, 320, "blocked", "blocked", torch.bfloat16),
    (E5M2, "pair 256x256", (1, 0, 127), 0, 264, 128, "blocked_groups", "blocked", torch.float32),
    (PAIR, "pair 32 tokens", (5, 0, 64, 1), 7, 392, 192, "plain", "plain", torch.float16),
    (PAIR, "two pairs 128 tokens", (0, 130, 3), 1, 520, 448, "blocked", "blocked", torch.bfloat16),
]


@pytest.mark.parametrize("number", [0, *(pytest.param(i, marks=SLOW) for i in (1, 2, 3))])
def test_ragged(number: int) -> None:
    fmt, tile, sizes, extra, n, k, scales_a, scales_b, dtype = RAGGED[number]
    case = make_case(fmt, sizes, n, k, m=sum(sizes) + extra, seed=number, layouts=(scales_a, scales_b))
    check_close(case, run(case, CONFIGS[tile], dtype, seed=number, num_sms=4).out)


@SLOW
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", CONFIGS)
def test_twenty_schedules(name: str, seed: int) -> None:
    """Each on a ragged problem of its own, bit-accurate: data without roundings has equal bits, other data is close."""
    config = CONFIGS[name] if seed % 3 else C(**(vars(CONFIGS[name]) | {"num_stages": 2}))
    n = 8 * (1 + 7 * seed % 19) + config.cluster_n - config.tile_n
    layouts = (("blocked", "blocked_groups", "plain")[seed % 3], ("blocked", "plain")[seed % 2])
    exact, sizes = seed % 4 < 2, drawn_sizes(seed)
    case = make_case(
        (PAIR, E5M2)[seed % 2], sizes, n, 64 * (2 + 5 * seed % 9), m=sum(sizes) + seed % 4, seed=seed, exact=exact,
        layouts=layouts,
    )  # fmt: skip
    out = run(case, config, torch.float32, seed=seed, num_sms=4 * (1 + seed % 2)).out
    check_close(case, out)
    if exact:
        assert torch.equal(out[: case.valid].double(), case.exact[: case.valid])


@pytest.mark.parametrize("name", ["128x128", pytest.param("64 tokens", marks=SLOW)])
@pytest.mark.parametrize("side", [pytest.param("a", marks=SLOW), "b"])
def test_single_elements_can_be_read_out(name: str, side: str) -> None:
    """The order along K, and that of a byte's two halves, cannot hide in a sum: one operand is unit vectors."""
    case = make_case(PAIR, (66, 70), 136, 192, exact=True)
    for which, t in (("a", case.a), ("b", case.b)):
        codes = t.data.view(torch.uint8)
        if which != side:
            rows = codes.view(-1, codes.shape[-1])
            at = (11 * torch.arange(len(rows)) + 3) % rows.shape[1]
            rows.zero_()
            # FP4: a 1 in the low half of one row's byte, in the high half of the next one's.
            one = (
                torch.full((len(rows),), 0x38) if which == "a" else torch.where(torch.arange(len(rows)) % 2 == 0, 2, 32)
            )
            rows[torch.arange(len(rows)), at] = one.to(torch.uint8)
    expected = padless.grouped_gemm(
        padless.BlockScaledTensor(case.a.data, case.a.scale, MXFP8, None, "blocked"), case.b, case.offs,
        out_dtype=torch.float32, backend="reference",
    )  # fmt: skip
    assert (expected != 0).double().mean() > 0.4
    assert torch.equal(run(case, CONFIGS[name], arithmetic="fast").out, expected)


def test_nan_scale_stays_in_its_row_and_column() -> None:
    case = make_case(PAIR, (40, 9), 24, 192, exact=True, layouts=("plain", "plain"))
    case.a.scale.view(torch.uint8)[33, 5] = 0xFF
    case.b.scale.view(torch.uint8)[1, 7, 4] = 0xFF
    out = run(case, C(), guard=False).out
    hit = torch.zeros(49, 24, dtype=torch.bool)
    hit[33], hit[40:, 7] = True, True
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit].double(), case.exact[~hit])


# ---- the public calls


def test_the_public_calls_agree_and_gemm_is_one_group() -> None:
    case = make_case(PAIR, (37,), 72, 192, seed=3)
    guarded = GuardedOutput(37, 72, torch.float32)
    padless.grouped_gemm(case.a, case.b, case.offs, out=guarded.out, backend=BACKEND)
    guarded.check(37)
    check_close(case, guarded.out)
    b = BlockScaledTensor(case.b.data[0], case.b.scale[0], MXFP4, None, "blocked")
    assert torch.equal(padless.gemm(case.a, b, out_dtype=torch.float32, backend=BACKEND), guarded.out)
    (listed,) = padless.grouped_gemm_list([case.a], [b], out_dtype=torch.float32, backend=BACKEND)
    assert torch.equal(listed, guarded.out)


@SLOW
def test_a_row_has_the_same_bits_alone() -> None:
    case = make_case(PAIR, (130, 3), 136, 320, seed=5, layouts=("plain", "blocked"))
    out = run(case, CONFIGS["pair 256x256"]).out
    alone = BlockScaledTensor(case.a.data[129:130], case.a.scale[129:130].clone(), MXFP8)
    b = BlockScaledTensor(case.b.data[0], case.b.scale[0], MXFP4, None, "blocked")
    for config in (None, CONFIGS["64 tokens"]):
        got = padless.gemm(alone, b, out_dtype=torch.float32, backend=BACKEND, config=config)
        assert torch.equal(got[0], out[129])


@pytest.mark.parametrize(("k", "copied"), [*(pytest.param(k, 1, marks=SLOW) for k in (32, 64, 96)), (160, 1), (192, 0)])
def test_rows_that_cannot_be_spread_are_copied(k: int, copied: int) -> None:
    """K that leaves a row too short or ends it off a boundary; in a list too."""
    case = make_case(PAIR, (20, 3), 16, k, exact=True)
    out = torch.empty(23, 16)
    assert len(prepare(emulated_driver("sm_100a"), case.a, case.b, case.offs, out, None).copies) == copied
    assert torch.equal(run(case, C(), arithmetic="fast").out.double(), case.exact)
    one = make_case(PAIR, (5,), 8, k, exact=True)
    b = BlockScaledTensor(one.b.data[0], one.b.scale[0], MXFP4, None, "blocked")
    (listed,) = padless.grouped_gemm_list([one.a], [b], out_dtype=torch.float32, backend=BACKEND)
    assert torch.equal(listed.double(), one.exact)


def test_weights_on_16_byte_boundaries_are_copied() -> None:
    case = make_case(PAIR, (4,), 16, 128, exact=True)
    whole = torch.full((16 * 80 + 64,), 0x77, dtype=torch.uint8)
    start = -whole.data_ptr() % 32 + 16
    data = whole[start : start + 16 * 80].view(1, 16, 80)[..., :64].copy_(case.b.data.view(torch.uint8))
    case.b = BlockScaledTensor(data.view(MXFP4.data_dtype), case.b.scale, MXFP4, None, "blocked")
    assert torch.equal(run(case, C(), arithmetic="fast").out.double(), case.exact)


def test_other_mixtures_are_refused_by_name() -> None:
    for a, b in (("NVFP4", "MXFP8"), ("MXFP4", "MXFP8"), ("MXFP8", "NVFP4")):
        case, other = make_case(a, (4,), 16, 128), make_case(b, (4,), 16, 128)
        with pytest.raises(ValueError, match="one element size, but for MXFP4 weights"):
            prepare(emulated_driver("sm_100a"), case.a, other.b, case.offs, torch.empty(4, 16), None)
    with pytest.raises(ValueError, match="b_e2m1 is True"):
        C(kind="MXFP4", b_e2m1=True)


# ---- what the copy engine needs, and planted bugs


def test_the_map_is_one_that_the_driver_takes() -> None:
    codes = torch.zeros(3, 24, 1440, dtype=torch.uint8)  # K = 2880 is 22 stages and a half
    spec = padded_fp4(codes, 128)
    assert spec.dims == (128, 44, 24, 3)
    assert 128 * spec.strides[0] // 64 * (spec.dims[1] - 1) // 2 + 64 == 1376 + 64 == 1440, (
        "the last window ends with K"
    )

    def refused(**changes: object) -> str:
        fields = vars(spec) | changes
        s = TensorMapSpec(**fields)
        with pytest.raises(ValueError, match=": ") as caught:
            emulated_map.encode_tiled(s.data_type, s.address, s.dims, s.strides, s.box, swizzle=s.swizzle)
        return str(caught.value)

    aligned = torch.empty(64, dtype=torch.uint8).data_ptr() // 32 * 32
    assert "multiple of 128" in refused(dims=(2880, 24, 3), strides=(1440, 24 * 1440), box=(128, 128, 1))
    assert "needs 128" in refused(box=(64, 1, 128, 1))
    assert "none or 128B" in refused(swizzle=2)
    assert "not a multiple of 32" in refused(address=aligned + 16)
    assert "not a multiple of 32" in refused(strides=(16, 1440, 24 * 1440))


LOAD, MAIN, STORAGE = (f"sm100_grouped/{name}" for name in ("load.cuh", "sm100_grouped_gemm.cu", "storage.cuh"))
# name: edit, kinds of report (none: wrong values)
BUGS: dict[str, tuple[Edit, tuple[str, ...]]] = {
    "bytes as they lie in shared memory": (
        (STORAGE, "RIGHT_BYTES / (PADDED_B && !TOKENS_ON_N ? 2 : 1)", "RIGHT_BYTES"), ("deadlock",),
    ),
    "the last window past the end": (
        (MAIN, "PADDED_B && kb > 0 && kb * BLOCK_K > last ? last : kb * BLOCK_K", "kb * BLOCK_K"), (),
    ),
    "the last window from its beginning": (
        (MAIN, "PADDED_B ? (kb * BLOCK_K - operands.first_of_stage(kb)) / 16 : 0", "0"), (),
    ),
    "windows counted in stages": ((LOAD, "c0 / WINDOW_STEP", "c0 / BLOCK_K"), ()),
    "rows of the group before": ((LOAD, "c0 / WINDOW_STEP, c1, c2, policy", "c0 / WINDOW_STEP, c1, 0, policy"), ()),
    "codes taken for e4m3": (
        (MAIN, "TOKENS_ON_N ? A_CODE : B_CODE);", "TOKENS_ON_N ? A_CODE : MMA_E4M3);"), (),
    ),
    "codes taken for e2m1 on the other side": (
        (MAIN, "TOKENS_ON_N ? B_CODE : A_CODE, TOKENS_ON_N ? A_CODE : B_CODE", "B_CODE, A_CODE"), (),
    ),
}  # fmt: skip
QUICK_BUGS = ("the last window from its beginning",)


@pytest.mark.parametrize("name", [n if n in QUICK_BUGS else pytest.param(n, marks=SLOW) for n in [*BUGS, "none"]])
def test_a_planted_bug_is_found(name: str) -> None:
    edit, kinds = BUGS.get(name, ((STORAGE, "#pragma once", "#pragma once"), ()))
    case = make_case(PAIR, (20, 0, 66), 136, 320, exact=True)
    config = C(num_stages=2)
    driver = Variant("sm_100a", MAIN, (edit,), fit(config, case.a, case.b, torch.empty(case.exact.shape)), 0)
    got = run(case, config, arithmetic="fast", driver=driver, guard=False)
    seen = {report.kind for report in got.result.reports}
    wrong = not torch.equal(got.out.double(), case.exact)
    if name == "none":
        assert not seen
        assert not wrong
    else:
        assert (seen & set(kinds)) if kinds else wrong, (seen, wrong)


def test_a_map_that_does_not_spread_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes packed as in memory, in a box of as many bytes: counted bytes do not close, or sums are wrong."""
    from padless.kernels.sm100_grouped import host

    def packed(codes: torch.Tensor, rows: int) -> TensorMapSpec:
        spec = padded_fp4(codes, rows)
        return TensorMapSpec(0, spec.address, (64, *spec.dims[1:]), spec.strides, (64, *spec.box[1:]), spec.swizzle)

    monkeypatch.setattr(host, "padded_fp4", packed)
    case = make_case(PAIR, (20,), 40, 192, exact=True)
    got = run(case, C(num_stages=2), arithmetic="fast", guard=False)
    assert got.result.reports or not torch.equal(got.out.double(), case.exact)
