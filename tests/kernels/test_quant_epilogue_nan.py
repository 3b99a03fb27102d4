"""NaN sums in the quantising epilogues of every kernel: whose blocks they break, and that no bit of theirs shows.

Run by the emulator and judged byte for byte by the reference of the kernel's own float32 sums. Whose blocks are broken
is also worked out here, from where the sums are NaN; the others are what the reference makes of sums without a NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.epilogue import Epilogue
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockScaledFormat
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16 import host_quant as sm90_bf16_quant
from padless.kernels.sm90_fp8 import host_quant as sm90_fp8_quant
from padless.kernels.sm90_fp8.config import Sm90Fp8Config
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from padless.kernels.sm100_grouped import host_quant as sm100_grouped_quant
from padless.layouts import unpack_fp4
from padless.reference.gemm import group_rows
from padless.runtime import jit
from support.quant_cases import Guarded, QuantCase, plant, reference
from support.sm90_quant_cases import DRIVER, Case, PairCase
from support.sm90_quant_cases import check as check_sm90
from support.sm100_quant import Problem
from support.sm100_quant import check as check_sm100

SLOW = pytest.mark.slow
SIZES = (40, 0, 130, 1, 5)
# Row 3 of the first group, row 100 of the third, the one of the fourth; and column 5 of the third.
BROKEN_ROWS, BROKEN_GROUP, BROKEN_COLUMN = (3, 140, 170), 2, 5
WIDE = Sm90Fp8Config(block_m=256, cluster_n=2)

FP8 = Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK, d_dtype=torch.bfloat16, amax=True)
FP8_CODES = dataclasses.replace(FP8, d_dtype=None)  # two m64s of a warpgroup have no room for more
MX = Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", d_dtype=torch.float32, amax=True)
E5M2 = Epilogue(row_format=MXFP8_E5M2, column_format=MXFP8_E5M2, scale_rule="cudnn_documented")
FLOOR = dataclasses.replace(MX, scale_rule="floor", d_dtype=torch.float16)
FP4 = Epilogue(row_format=MXFP4, scale_rule="cudnn", amax=True)
NV = Epilogue(row_format=NVFP4, scale_rule="te", amax=True)
AMAX = Epilogue(amax=True)
COLUMNS = dataclasses.replace(FP8, row_format=None, d_dtype=None)
SWAPPED = Epilogue(
    row_format=FP8_BLOCK,
    column_format=FP8_BLOCK,
    amax=True,
    activation="swiglu",
    gate_up="interleaved",
    d_dtype=torch.float32,
)


def break_codes(case: Case | PairCase | Problem) -> None:
    """NaN of both signs in rows of A, and one in a weight."""
    operands = case.case if isinstance(case, Problem) else case
    a, b = operands.a.data.view(torch.uint8), operands.b.data.view(torch.uint8)
    a[BROKEN_ROWS, [17, 90, 1]] = torch.tensor([0x7F, 0xFF, 0x7F], dtype=torch.uint8)
    b[BROKEN_GROUP, BROKEN_COLUMN, 40] = 0xFF


def break_scales(case: PairCase) -> None:
    """The same where codes have no NaN: the scales of NVFP4, which are e4m3."""
    a, b = case.a.scale.view(torch.uint8), case.b.scale.view(torch.uint8)
    a[BROKEN_ROWS, [1, 2, 7]] = torch.tensor([0x7F, 0xFF, 0x7F], dtype=torch.uint8)
    b[BROKEN_GROUP, BROKEN_COLUMN, 3] = 0x7F


def fp8_case(n: int) -> Case:
    case = Case(SIZES, n, seed=21)
    break_codes(case)
    return case


def mxfp8_case(n: int) -> PairCase:
    case = PairCase(SIZES, n, seed=22, plain=sm90_mxfp8, altered=True)
    break_codes(case)
    return case


def bf16_case(n: int) -> PairCase:
    case = PairCase(SIZES, n, seed=23, plain=sm90_bf16, pair=("NVFP4", "NVFP4"), altered=True)
    break_scales(case)
    return case


def sm100_case(n: int) -> Problem:
    problem = Problem("MXFP8", SIZES, n, seed=24, layouts=("plain", "blocked"))
    break_codes(problem)
    return problem


# By kernel: its module, a case, the header and the line that has a sum first, and the name of the sum.
KERNELS: dict[str, tuple[ModuleType, Callable[[int], Case | PairCase | Problem], str, str, str]] = {
    "sm90_fp8": (sm90_fp8_quant, fp8_case, "device/sm90/quant_store.cuh", "value = d[accumulator(i, h, e)];", "value"),
    "sm90_mxfp8": (
        sm90_mxfp8_quant,
        mxfp8_case,
        "device/sm90/quant_store.cuh",
        "value = d[accumulator(i, h, e)];",
        "value",
    ),
    "sm90_bf16": (
        sm90_bf16_quant,
        bf16_case,
        "device/sm90/transposed_quant.cuh",
        "for (int e = 0; e < 4; ++e) {\n                x[e] = with_alpha_and_bias",
        "x[e]",
    ),
    "sm100": (
        sm100_grouped_quant,
        sm100_case,
        "sm100_grouped/quant_values.cuh",
        "float value = __fmul_rn(__uint_as_float(sums[i + e]), row.global);",
        "value",
    ),
}
# Kernel, epilogue, tile: between them every way in which maxima are found and handed over.
RUNS: dict[str, tuple[str, Epilogue, object]] = {
    "sm90_fp8, FP8_BLOCK": ("sm90_fp8", FP8, None),
    "sm90_fp8, FP8_BLOCK, 256 rows": ("sm90_fp8", FP8_CODES, WIDE),
    "sm90_fp8, MXFP8": ("sm90_fp8", MX, None),
    "sm90_fp8, columns": ("sm90_fp8", COLUMNS, None),
    "sm90_fp8, MXFP8_E5M2": ("sm90_fp8", E5M2, None),
    "sm90_fp8, NVFP4": ("sm90_fp8", NV, None),
    "sm90_fp8, amax": ("sm90_fp8", AMAX, None),
    "sm90_mxfp8, MXFP4": ("sm90_mxfp8", FP4, None),
    "sm90_mxfp8, floor": ("sm90_mxfp8", FLOOR, None),
    "sm90_mxfp8, FP8_BLOCK": ("sm90_mxfp8", FP8, None),
    "sm90_bf16, FP8_BLOCK": ("sm90_bf16", FP8, None),
    "sm90_bf16, MXFP8": ("sm90_bf16", MX, None),
    "sm90_bf16, NVFP4": ("sm90_bf16", NV, None),
    "sm100, MXFP8": ("sm100", MX, None),
    "sm100, FP8_BLOCK": ("sm100", FP8, None),
    "sm100, NVFP4": ("sm100", NV, None),
    "sm100, MXFP8_E5M2": ("sm100", E5M2, None),
    "sm100, amax": ("sm100", AMAX, None),
}
QUICK = {"sm90_fp8, FP8_BLOCK"}
QUICK_BITS = {"sm90_fp8, FP8_BLOCK, 256 rows", "sm100, MXFP8"}


def slow_but(quick: set[str], names: object) -> list[object]:
    return [name if name in quick else pytest.param(name, marks=SLOW) for name in names]  # type: ignore[attr-defined]


def sums_of(case: QuantCase) -> torch.Tensor:
    if isinstance(case, Problem):
        return case.sums(emulated_driver("sm_100a"))
    assert isinstance(case, Case)
    return case.sums(DRIVER)


def run(kernel: str, case: QuantCase, epilogue: Epilogue, config: object, acc: torch.Tensor) -> dict[str, Guarded]:
    """The kernel's outputs, which are the reference's to the byte."""
    if isinstance(case, Problem):
        return check_sm100(case, epilogue, config, acc=acc)  # type: ignore[arg-type]
    assert isinstance(case, Case)
    return check_sm90(KERNELS[kernel][0], case, epilogue, config, acc=acc)


# --- whose blocks are broken -----------------------------------------------------------------------------


def is_nan_scale(scale: torch.Tensor, format: BlockScaledFormat) -> torch.Tensor:
    if format == FP8_BLOCK:
        return scale.contiguous().view(torch.int32) == 0x7FC00000
    return scale == (0x7F if format == NVFP4 else 0xFF)


def blocks_with(nan: torch.Tensor, block: int) -> torch.Tensor:
    """Whether each block along the last dimension has one."""
    padded = torch.nn.functional.pad(nan, (0, -nan.shape[-1] % block))
    return padded.view(*nan.shape[:-1], -1, block).any(-1)


def check_blocks(case: QuantCase, epilogue: Epilogue, acc: torch.Tensor, got: dict[str, Guarded]) -> None:
    """NaN scales and codes exactly in blocks with a NaN sum; in the others what there is without any."""
    nan = acc[: case.valid].isnan()
    assert 0 < nan.sum() < nan.numel() / 2
    clean = reference(case, epilogue, acc.nan_to_num(nan=0.0))
    groups = group_rows(case.offs, case.valid)

    def check_codes(name: str, format: BlockScaledFormat, broken: torch.Tensor) -> None:
        codes, other = (t[name].inside[: case.valid].view(torch.uint8) for t in (got, clean))
        if format.codes_per_byte == 2:
            codes, other = unpack_fp4(codes), unpack_fp4(other)
        assert (codes[broken] == (0 if format.codes_per_byte == 2 else 0x7F)).all()
        assert torch.equal(codes[~broken], other[~broken])

    if (format := epilogue.row_format) is not None:
        broken = blocks_with(nan, format.block_k)
        scale, other = (t["row_scale"].inside[: case.valid] for t in (got, clean))
        assert torch.equal(is_nan_scale(scale, format), broken)
        assert torch.equal(scale[~broken], other[~broken])
        assert not broken.all()
        check_codes("row_codes", format, broken.repeat_interleave(format.block_k, 1)[:, : nan.shape[1]])
    if (format := epilogue.column_format) is not None:
        tile, elements = 0, torch.zeros_like(nan)
        for start, end in groups:
            broken = blocks_with(nan[start:end].t(), format.block_k).t()
            first = tile * (128 // format.block_k)
            scale, other = (t["column_scale"].inside[first : first + len(broken)] for t in (got, clean))
            assert torch.equal(is_nan_scale(scale, format), broken)
            assert torch.equal(scale[~broken], other[~broken])
            elements[start:end] = broken.repeat_interleave(format.block_k, 0)[: end - start]
            tile += -(-(end - start) // 128)
        assert not elements.all()
        check_codes("column_codes", format, elements)
    if epilogue.amax:
        for group, (start, end) in enumerate(groups):
            found, other = (t["amax"].inside.view(torch.int32)[group].item() for t in (got, clean))
            assert found == (0x7FC00000 if nan[start:end].any() else other), group


@pytest.mark.parametrize("name", slow_but(QUICK, RUNS))
def test_a_nan_sum_breaks_its_blocks_and_no_other(name: str) -> None:
    kernel, epilogue, config = RUNS[name]
    case = KERNELS[kernel][1](160)
    acc = sums_of(case)
    assert acc[list(BROKEN_ROWS)].isnan().all()
    assert acc[40:170, BROKEN_COLUMN].isnan().all()
    check_blocks(case, epilogue, acc, run(kernel, case, epilogue, config, acc))


# --- which NaN -------------------------------------------------------------------------------------------

# What stands behind the line that has a sum: quiet and signalling NaN, of both signs, by lane.
OTHER_NANS = """
    {
        const uint32_t nans[4] = {0xFFC00000, 0x7FC00000, 0xFFFFFFFF, 0x7F800001};
        const uint32_t chosen = nans[threadIdx.x / 2 % 4];
        if (SUM != SUM) SUM = __uint_as_float(chosen);
    }
"""


def plant_nans(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """The kernel's NaN sums get bits that no tensor core makes."""
    module, _, file, line, value = KERNELS[kernel]
    assert jit.sources()[file].count(line) == 1
    head = line.split("\n")[0]
    plant(monkeypatch, module, file, line, line.replace(head, head + OTHER_NANS.replace("SUM", value), 1))


@pytest.mark.parametrize("name", slow_but(QUICK_BITS, RUNS))
def test_the_bits_of_a_nan_sum_do_not_matter(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    kernel, epilogue, config = RUNS[name]
    case = KERNELS[kernel][1](160)
    acc = sums_of(case)
    plant_nans(monkeypatch, kernel)
    check_blocks(case, epilogue, acc, run(kernel, case, epilogue, config, acc))


@SLOW
@pytest.mark.parametrize("kernel", ["sm90_fp8", "sm100"])
def test_nan_sums_of_a_swiglu(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """Row maxima that two CTAs swap, on Hopper."""
    case = KERNELS[kernel][1](256)
    config = Sm90Fp8Config(block_m=128, cluster_n=2) if kernel == "sm90_fp8" else None
    acc = sums_of(case)
    for planted in (False, True):
        if planted:
            plant_nans(monkeypatch, kernel)
        got = run(kernel, case, SWAPPED, config, acc)
        values = got["d"].inside[: case.valid]
        assert values[list(BROKEN_ROWS)].isnan().all()
        assert not values[list(range(40, 140)), BROKEN_COLUMN + 1].isnan().any()
        assert is_nan_scale(got["row_scale"].inside[: case.valid], FP8_BLOCK)[40:170, 0].all()


# --- planted bugs ----------------------------------------------------------------------------------------

# A run, a header, a text of it, and what takes its place.
BUGS: dict[str, tuple[str, str, str, str]] = {
    "maxima drop NaN": ("sm90_fp8, FP8_BLOCK", "device/ptx/conversion.cuh", "max.NaN.f32 %0", "max.f32 %0"),
    "maxima drop NaN, sm100": ("sm100, MXFP8", "device/ptx/conversion.cuh", "max.NaN.f32 %0", "max.f32 %0"),
    "a NaN's exponent as a scale": (
        "sm90_bf16, MXFP8",
        "device/quant_rules.cuh",
        "return __float_as_int(amax) >= INFINITE ? 0xFF : byte;",
        "return byte;",
    ),
    "a NaN is above nothing": (
        "sm100, NVFP4",
        "device/quant_rules.cuh",
        "if (!(amax < __int_as_float(0x7F800000))) return 0x7F;",
        "if (amax >= __int_as_float(0x7F800000)) return 0x7F;",
    ),
    "the code of a NaN": (
        "sm90_mxfp8, MXFP4",
        "device/quant_rules.cuh",
        "return x == x ? e2m1_magnitude(x) | (__float_as_uint(x) >> 31 << 3) : 0;",
        "return e2m1_magnitude(x) | (__float_as_uint(x) >> 31 << 3);",
    ),
    "the bits of a NaN scale": (
        "sm90_fp8, FP8_BLOCK",
        "device/quant_rules.cuh",
        "__int_as_float(bits & 0x7FC00000)",
        "__int_as_float(bits)",
    ),
    "the bits of a NaN amax": (
        "sm90_fp8, amax",
        "device/sm90/quant_store.cuh",
        "bits > 0x7F800000 ? 0x7FC00000 : bits",
        "bits",
    ),
    "the sign of the only row": (
        "sm90_fp8, FP8_BLOCK, 256 rows",
        "device/sm90/wgmma_fragment.cuh",
        "m[c] = rows > 0 ? fabsf(v[0][c / 4 * 8 + c % 4]) : 0.0f;",
        "m[c] = rows > 0 ? v[0][c / 4 * 8 + c % 4] : 0.0f;",
    ),
}


@pytest.mark.parametrize("name", slow_but({"a NaN is above nothing"}, BUGS))
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    of_run, file, old, new = BUGS[name]
    kernel, epilogue, config = RUNS[of_run]
    case = KERNELS[kernel][1](160)
    acc = sums_of(case)  # compiled before anything is planted
    plant(monkeypatch, KERNELS[kernel][0], file, old, new)
    with pytest.raises(AssertionError) as caught:
        run(kernel, case, epilogue, config, acc)
    assert "wrong bytes" in str(caught.value)
