"""The quantising epilogue of the Hopper kernel, run by the emulator and judged bit for bit.

The judge is epilogue_reference, from the float32 sums that the same kernel stores without an epilogue. Every output lies
between fences of random bytes, and whatever the reference leaves alone the kernel has to leave alone too.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from padless import epilogue as epilogues
from padless import jit
from padless.config import GemmConfig, Problem
from padless.emulator.fake_driver import EmulatedDriver
from padless.epilogue import Epilogue, EpilogueTensors
from padless.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    BlockScaledFormat,
    BlockScaledTensor,
)
from padless.paths import sm90_fp8, sm90_fp8_quant
from padless.quantize import quantize
from padless.reference_epilogue import epilogue_reference

FENCE = 4096
WIDE = GemmConfig(block_m=256, cluster_n=2)
PAIR = GemmConfig(block_m=128, cluster_n=2)
SHORT = GemmConfig(block_m=64)


# --- one problem -----------------------------------------------------------------------------------------


@dataclass
class Case:
    """A grouped problem with every operand an epilogue can ask for; rows past the last group belong to nobody."""

    sizes: tuple[int, ...]
    n: int
    k: int = 128
    past: int = 3
    seed: int = 0
    scale: float = 1.0  # of the activations
    a: BlockScaledTensor = field(init=False)
    b: BlockScaledTensor = field(init=False)
    offs: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(self.seed)
        m, groups = self.m, len(self.sizes)
        values = torch.randn(m, self.k, generator=draw) * self.scale
        self.a = quantize(values, FP8_BLOCK, kind="activation")
        self.b = quantize(torch.randn(groups, self.n, self.k, generator=draw), FP8_BLOCK, kind="weight")
        self.offs = torch.tensor(self.sizes).cumsum(0).to(torch.int32)
        self.alpha = torch.randn(groups, generator=draw)
        self.bias = torch.randn(groups, self.n, generator=draw) * 3
        self.prob = torch.rand(m, generator=draw) * 2 - 0.5
        self.norm_const = torch.rand(1, generator=draw) + 0.01
        self.global_scale = torch.rand(groups, generator=draw) * 0.1 + 0.001

    @property
    def m(self) -> int:
        return sum(self.sizes) + self.past

    def sums(self, driver: EmulatedDriver) -> torch.Tensor:
        """(M, N) float32 of the plain kernel, NaN in rows of nobody."""
        out = torch.full((self.m, self.n), float("nan"))
        with driver.configured(arithmetic="fast", num_sms=1):
            sm90_fp8.prepare(driver, self.a, self.b, self.offs, out, GemmConfig()).launch(0)
        return out


class Fenced:
    """A tensor of random bytes between two fences of random bytes."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator, mn: bool = False):
        logical = shape
        if mn:  # MN-major scales: the memory is (columns, ld)
            ld = max(-(-shape[0] // 4) * 4, 4)
            shape = (shape[1], ld)
        size = torch.Size(shape).numel() * dtype.itemsize
        self.bytes = torch.randint(1, 256, (2 * FENCE + size,), dtype=torch.uint8, generator=draw)
        inside = self.bytes[FENCE : FENCE + size].view(dtype).view(shape)
        self.inside = inside.t()[: logical[0]] if mn else inside


OUTPUTS = ("d", "amax", "row_codes", "row_scale", "column_codes", "column_scale")
SCALES = ("row_scale", "column_scale")


def make_outputs(case: Case, epilogue: Epilogue, tiles: int | None = None) -> dict[str, Fenced]:
    """The outputs of an epilogue, the same bytes at every call."""
    draw = torch.Generator().manual_seed(case.seed + 99)
    m, groups, n_out = case.m, len(case.sizes), epilogue.out_columns(case.n)
    made: dict[str, Fenced] = {}
    if epilogue.d_dtype is not None:
        made["d"] = Fenced((m, n_out), epilogue.d_dtype, draw)
    if epilogue.amax:
        made["amax"] = Fenced((groups,), torch.float32, draw)
        made["amax"].inside.fill_(float("-inf"))
    if (fmt := epilogue.row_format) is not None:
        made["row_codes"] = Fenced((m, n_out // fmt.codes_per_byte), torch.uint8, draw)
        shape = epilogues.row_scale_shape(epilogue, m, n_out, groups)
        made["row_scale"] = Fenced(shape, scale_dtype(fmt), draw, mn=epilogue.row_layout == "plain_mn")
    if (fmt := epilogue.column_format) is not None:
        tiles = epilogues.column_tiles(m, groups) if tiles is None else tiles
        made["column_codes"] = Fenced((m, n_out), torch.uint8, draw)
        shape = epilogues.column_scale_shape(epilogue, n_out, tiles)
        made["column_scale"] = Fenced(shape, scale_dtype(fmt), draw)
    return made


def scale_dtype(fmt: BlockScaledFormat) -> torch.dtype:
    return torch.float32 if fmt.scale_dtype == torch.float32 else torch.uint8


def tensors_of(
    case: Case, epilogue: Epilogue, outputs: dict[str, Fenced], tiles: int | None
) -> EpilogueTensors:
    if tiles is None:
        tiles = epilogues.column_tiles(case.m, len(case.sizes))
    return EpilogueTensors(
        alpha=case.alpha if epilogue.alpha else None,
        bias=case.bias if epilogue.bias else None,
        prob=case.prob if epilogue.prob else None,
        norm_const=case.norm_const if epilogue.norm_const else None,
        global_scale=case.global_scale if epilogue.format == NVFP4 else None,
        column_tiles=tiles,
        **{name: fenced.inside for name, fenced in outputs.items()},
    )


def run(
    driver: EmulatedDriver,
    case: Case,
    epilogue: Epilogue,
    config: GemmConfig | None,
    tiles: int | None = None,
) -> dict[str, Fenced]:
    """The kernel's outputs; raises when the emulator has anything to report."""
    outputs = make_outputs(case, epilogue, tiles)
    tensors = tensors_of(case, epilogue, outputs, tiles)
    sm90_fp8_quant.prepare(driver, case.a, case.b, case.offs, tensors, config, epilogue=epilogue).launch(0)
    assert driver.last_result is not None
    assert not driver.last_result.reports
    return outputs


def reference(
    case: Case, epilogue: Epilogue, acc: torch.Tensor, tiles: int | None = None
) -> dict[str, Fenced]:
    outputs = make_outputs(case, epilogue, tiles)
    epilogue_reference(acc, case.offs, epilogue, tensors_of(case, epilogue, outputs, tiles))
    return outputs


def differences(
    got: dict[str, Fenced], wanted: dict[str, Fenced], before: dict[str, Fenced]
) -> dict[str, int]:
    """By output: bytes that differ, fences included. Zeros where the reference leaves padding of scales are allowed."""
    found = {}
    for name in got:
        wrong = got[name].bytes != wanted[name].bytes
        if name in SCALES and got[name].inside.dtype == torch.uint8:
            untouched = wanted[name].bytes == before[name].bytes
            untouched[:FENCE] = untouched[-FENCE:] = False
            wrong &= ~(untouched & (got[name].bytes == 0))
        if wrong.any():
            found[name] = int(wrong.sum())
    return found


def check(
    case: Case,
    epilogue: Epilogue,
    config: GemmConfig | None = None,
    seed: int = 0,
    sms: int = 2,
    tiles: int | None = None,
) -> dict[str, Fenced]:
    driver = EmulatedDriver()
    acc = case.sums(driver)
    with driver.configured(arithmetic="fast", num_sms=sms, seed=seed):
        got = run(driver, case, epilogue, config, tiles)
    if epilogue.is_glu:
        acc, epilogue = glu_of_own_values(case, epilogue, acc, got)
    wanted, before = reference(case, epilogue, acc, tiles), make_outputs(case, epilogue, tiles)
    assert differences(got, wanted, before) == {}
    return got


def glu_of_own_values(
    case: Case, epilogue: Epilogue, acc: torch.Tensor, got: dict[str, Fenced]
) -> tuple[torch.Tensor, Epilogue]:
    """Judges the float32 values of an epilogue with an exponential; what comes after them is then judged exactly.

    Returns the kernel's own values as sums, and the epilogue without what has been done to them.
    """
    assert epilogue.d_dtype == torch.float32, "the judge needs the values"
    valid = sum(case.sizes)
    exact = reference(case, epilogue, acc)["d"].inside[:valid].double()
    values = got["d"].inside[:valid]
    # exp within 2^-21, of which the sigmoid takes at most all; four roundings of 2^-24, and one subnormal.
    bound = exact.abs() * (2.0**-21 + 2.0**-22) + 2.0**-148
    assert (((values.double() - exact).abs() <= bound) | (values.isnan() & exact.isnan())).all()
    assert (values != 0).any()
    sums = torch.full_like(acc[:, : values.shape[1]], float("nan"))
    sums[:valid] = values
    rest = dataclasses.replace(epilogue, alpha=False, bias=False, prob=False, activation="none")
    case.n //= 2
    return sums, rest


# --- options ---------------------------------------------------------------------------------------------

# A unit without a second warpgroup (40), no rows, two tiles of 128, one row; 144 columns are a tile and a tail.
SIZES, COLUMNS = (40, 0, 130, 1), 144
ALL = {"alpha": True, "bias": True, "prob": True, "amax": True}
ROWS = Epilogue(row_format=FP8_BLOCK, row_layout="plain_mn")
BOTH = Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK)

FP8_BLOCK_CASES: dict[str, tuple[Epilogue, GemmConfig | None]] = {
    "rows": (ROWS, None),
    "rows, scales row-major, everything": (dataclasses.replace(ROWS, row_layout="plain", **ALL), None),
    "rows and columns": (BOTH, GemmConfig()),
    "columns alone": (dataclasses.replace(BOTH, row_format=None), GemmConfig()),
    "all outputs, bf16": (dataclasses.replace(BOTH, d_dtype=torch.bfloat16, **ALL), None),
    "all outputs, float32, wide": (dataclasses.replace(BOTH, d_dtype=torch.float32, **ALL), PAIR),
    "wide tile": (dataclasses.replace(BOTH, **ALL), WIDE),
    "short tile": (dataclasses.replace(ROWS, d_dtype=torch.float16, alpha=True), SHORT),
    "amax alone": (Epilogue(amax=True, alpha=True), None),
    "bf16 alone": (Epilogue(d_dtype=torch.bfloat16, bias=True, prob=True), None),
    "bias gated": (dataclasses.replace(ROWS, bias_rule="gated_bias", **ALL), None),
    "prob with no bias to gate": (dataclasses.replace(ROWS, bias_rule="gated_bias", prob=True), None),
}


def slow_but(names: set[str]) -> Callable[[str], object]:
    return lambda name: name if name in names else pytest.param(name, marks=pytest.mark.slow)


ALWAYS = {"rows and columns", "all outputs, bf16", "wide tile", "short tile", "amax alone", "bias gated"}


@pytest.mark.parametrize("name", [slow_but(ALWAYS)(name) for name in FP8_BLOCK_CASES])
def test_fp8_block(name: str) -> None:
    epilogue, config = FP8_BLOCK_CASES[name]
    check(Case(SIZES, COLUMNS, 256), epilogue, config)


MX_CASES: list[tuple[Epilogue, GemmConfig | None]] = [
    (Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", **ALL), None),
    (
        Epilogue(
            row_format=MXFP8,
            row_layout="blocked",
            column_format=MXFP8,
            column_layout="blocked",
            scale_rule="floor",
        ),
        SHORT,
    ),
    (
        Epilogue(
            row_format=MXFP8,
            row_layout="blocked_groups",
            column_format=MXFP8,
            column_layout="blocked_groups",
            scale_rule="cudnn",
            bias_rule="gated_bias",
            **ALL,
        ),
        WIDE,
    ),
    (Epilogue(row_format=MXFP8_E5M2, column_format=MXFP8_E5M2, scale_rule="cudnn_documented"), None),
    (Epilogue(column_format=MXFP8_E5M2, column_layout="blocked", scale_rule="cudnn", alpha=True), None),
    (Epilogue(row_format=MXFP4, row_layout="blocked", scale_rule="rceil", d_dtype=torch.bfloat16), None),
    (Epilogue(row_format=MXFP4, scale_rule="cudnn"), SHORT),
    (Epilogue(row_format=NVFP4, row_layout="blocked_groups", scale_rule="te", **ALL), None),
    (Epilogue(row_format=NVFP4, scale_rule="te"), WIDE),
    (Epilogue(row_format=NVFP4, row_layout="blocked", scale_rule="te", d_dtype=torch.float16), SHORT),
]


def name_of(case: object) -> str:
    if not isinstance(case, Epilogue):
        return f"{case.block_m}x{case.cluster_n}" if isinstance(case, GemmConfig) else "chosen"
    parts = [case.activation, case.scale_rule, case.row_layout, case.column_layout]
    for what, fmt in (("row", case.row_format), ("column", case.column_format)):
        if fmt is not None:
            parts.append(f"{what} {fmt.name}")
    return ", ".join(part for part in parts if part)


SLOW = pytest.mark.slow
MX_SLOW = (0, 4, 6, 8)


@pytest.mark.parametrize(
    ("epilogue", "config"),
    [pytest.param(*case, marks=SLOW if i in MX_SLOW else ()) for i, case in enumerate(MX_CASES)],
    ids=name_of,
)
def test_one_byte_scales(epilogue: Epilogue, config: GemmConfig | None) -> None:
    check(Case(SIZES, 160, seed=1), epilogue, config)  # FP4 rows of 16 bytes: N is a multiple of 32


GLU_CASES: list[tuple[Epilogue, GemmConfig | None, int]] = [
    (
        Epilogue(activation="swiglu_interleaved", row_format=FP8_BLOCK, row_layout="plain_mn", **ALL),
        None,
        320,
    ),
    (
        Epilogue(activation="swiglu_concatenated", row_format=FP8_BLOCK, column_format=FP8_BLOCK, **ALL),
        WIDE,
        384,
    ),
    (Epilogue(activation="swiglu_concatenated", column_format=FP8_BLOCK, prob=True), None, 384),
    (
        Epilogue(
            activation="swiglu_interleaved",
            row_format=MXFP8,
            row_layout="blocked_groups",
            column_format=MXFP8,
            column_layout="blocked_groups",
            scale_rule="rceil",
        ),
        SHORT,
        192,
    ),
    (
        Epilogue(
            activation="swiglu_concatenated",
            row_format=NVFP4,
            row_layout="blocked",
            scale_rule="te",
            amax=True,
        ),
        None,
        384,
    ),
    (Epilogue(activation="swiglu_interleaved", prob=True, amax=True), None, 192),
]


GLU_SLOW = (2, 5)


@pytest.mark.parametrize(
    ("epilogue", "config", "n"),
    [pytest.param(*case, marks=SLOW if i in GLU_SLOW else ()) for i, case in enumerate(GLU_CASES)],
    ids=name_of,
)
def test_swiglu(epilogue: Epilogue, config: GemmConfig | None, n: int) -> None:
    """The values within the exponential's error; amax, codes and scales exactly those of the kernel's own values."""
    check(Case(SIZES, n, seed=2), dataclasses.replace(epilogue, d_dtype=torch.float32), config, sms=4)


@pytest.mark.parametrize("scale", [30.0, 3000.0])
def test_swiglu_where_the_exponential_over_and_underflows(scale: float) -> None:
    epilogue = Epilogue(activation="swiglu_interleaved", d_dtype=torch.float32, amax=True)
    case = Case((70,), 128, seed=4, scale=scale)
    acc = case.sums(EmulatedDriver())[:70]
    assert (acc < -89).any()
    assert (acc > 89).any()
    check(case, epilogue)


# --- blocks that are not ordinary ------------------------------------------------------------------------


def poisoned(case: Case) -> Case:
    """NaN in one row, Inf in another, zeros in a third, tiny numbers in a fourth, in the first group of 40 rows."""
    codes = case.a.data.view(torch.uint8)
    codes[3, 17] = 0x7F
    codes[20] = 0
    case.a.scale[21] = 2.0**-120
    case.b.scale[2, 0, 0] = 2.0**60
    case.bias[2, 5] = float("inf")
    case.alpha[0] = 1.0
    return case


@pytest.mark.parametrize(
    "epilogue",
    [
        Epilogue(row_format=FP8_BLOCK, column_format=FP8_BLOCK, bias=True, amax=True),
        Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="rceil", bias=True),
        pytest.param(Epilogue(row_format=NVFP4, scale_rule="te", bias=True), marks=SLOW),
        pytest.param(Epilogue(row_format=MXFP4, scale_rule="cudnn", bias=True), marks=SLOW),
    ],
    ids=name_of,
)
def test_nan_inf_zeros_and_tiny_numbers_stay_in_their_blocks(epilogue: Epilogue) -> None:
    case = poisoned(Case(SIZES, 160, seed=5))
    case.bias[0] = 0.0  # so that the zero row of group 0 stays zero
    check(case, epilogue)


def test_scale_tiles_that_were_not_promised_are_not_stored() -> None:
    """Offsets that break the promise of m_aligned = 128 need more tiles than there are."""
    for layout in ("plain", "blocked", "blocked_groups"):
        epilogue = Epilogue(column_format=MXFP8, column_layout=layout, scale_rule="rceil")
        check(Case((3, 3, 3), 32), epilogue, tiles=2)


def test_no_rows_and_all_rows_in_nobody() -> None:
    for sizes, past in (((0, 0), 7), ((0,), 1)):
        check(Case(sizes, 32, past=past), dataclasses.replace(BOTH, amax=True))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=SLOW), pytest.param(3, marks=SLOW)])
def test_any_interleaving(seed: int) -> None:
    """More tiles than CTAs, warps in another order: staging, the swap between CTAs and the scratch are reused."""
    epilogue = Epilogue(
        activation="swiglu_concatenated",
        row_format=FP8_BLOCK,
        column_format=FP8_BLOCK,
        d_dtype=torch.float32,
        amax=True,
    )
    check(Case((65, 5, 0, 70), 512, seed=seed), epilogue, PAIR, seed=seed, sms=2)


# --- planted bugs ----------------------------------------------------------------------------------------

STORE, FRAGMENT, RULES = "sm90_quant_store.cuh", "wgmma_fragment.cuh", "quant_rules.cuh"
KERNEL = sm90_fp8_quant.KERNEL
GLU_BOTH = Epilogue(activation="swiglu_concatenated", row_format=FP8_BLOCK, d_dtype=torch.float32)
# What is wrong: file, text, what takes its place, and the epilogue that has to show it.
BUGS: dict[str, tuple[str, str, str, Epilogue]] = {
    "rows of the next group in the maxima": (STORE, "MASKS_ROWS && rows_left <= 8", "false", BOTH),
    "columns past the last in the maxima": (
        STORE,
        "MASKS_COLUMNS && out_column + OUT_COLUMNS > outputs.n_out",
        "false",
        GLU_BOTH,
    ),
    "no barrier before the maxima of other warps are read": (
        STORE,
        "        column_maxima_wait(warpgroup);\n        scale",
        "scale",
        BOTH,
    ),
    "no barrier before the multipliers are read": (
        STORE,
        "        column_barrier();\n#pragma",
        "#pragma",
        BOTH,
    ),
    "a skipping warpgroup does not keep step": (
        STORE,
        "        column_maxima_arrive(warpgroup);\n        column_maxima_wait(warpgroup);\n        column_barrier();\n",
        "",
        BOTH,
    ),
    "no proxy fence before the stores": (STORE, "    fence_proxy_async_shared();\n", "", ROWS),
    "the staging buffer is not waited for": (
        STORE,
        "if (issuer) cp_async_bulk_wait_group_read_all();",
        "",
        ROWS,
    ),
    "one exchange of row maxima too few": (
        FRAGMENT,
        "distance < 4; distance *= 2",
        "distance < 2; distance *= 2",
        ROWS,
    ),
    "columns exchanged with the wrong lane": (
        FRAGMENT,
        "exchange_columns<KEPT>(m, 4",
        "exchange_columns<KEPT>(m, 8",
        BOTH,
    ),
    "codes swizzled by the wrong bits": (FRAGMENT, "(offset >> 7)", "(offset >> 8)", ROWS),
    "rows of the weights dealt the other way round": (KERNEL, "c % 2 * 2", "2 - c % 2 * 2", ROWS),
    "the swap of row maxima is not waited for": (
        STORE,
        "        swap.wait();\n",
        "",
        GLU_BOTH,
    ),
    "one buffer for the swap of row maxima": (STORE, "turn % 2", "0", GLU_BOTH),
    "a multiplication and an addition contracted": (
        STORE,
        "__fadd_rn(value, BIAS_GATED_BY_PROB ? __fmul_rn(bias[e], prob[h]) : bias[e])",
        "fmaf(d[accumulator(i, h, e)], alpha, bias[e])",
        dataclasses.replace(ROWS, alpha=True, bias=True, d_dtype=torch.float32),
    ),
    "a reciprocal in place of the division": (
        RULES,
        "__fdiv_rn(amax < 1e-4f ? 1e-4f : amax, 448.0f)",
        "(amax < 1e-4f ? 1e-4f : amax) * (1.0f / 448.0f)",
        ROWS,
    ),
}
BUGS_ALWAYS = {
    "rows of the next group in the maxima",
    "no barrier before the multipliers are read",
    "no proxy fence before the stores",
    "the swap of row maxima is not waited for",
    "a multiplication and an addition contracted",
}


def plant(monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str) -> None:
    """Replaces a text of the kernel's sources in what prepare() compiles."""
    texts = dict(jit.sources())
    assert old in texts[file], f"{file} has nothing like {old!r} any more: plant another bug"
    texts[file] = texts[file].replace(old, new)
    monkeypatch.setattr(jit, "sources", lambda: texts)

    def load_kernel(
        driver: EmulatedDriver, source: str, config: sm90_fp8_quant.QuantConfig, _: int
    ) -> object:
        image, log = jit._run_nvrtc(config.prelude() + texts[source], source, driver.arch, driver.kind)
        kernel = jit._describe(image, driver.kind, log)
        return kernel, driver.load(kernel, 0)

    monkeypatch.setattr(sm90_fp8_quant, "load_kernel", load_kernel)


def case_for_bugs(epilogue: Epilogue) -> Case:
    if not epilogue.is_glu:
        return Case(SIZES, COLUMNS)
    # 192 columns of output: those past them find weights of the up projection where the gate's would be. A NaN in one
    # of these (row 200 of B is up's of column 8) belongs to the first 128 columns and may not reach the others.
    case = Case(SIZES, 384)
    case.b.data.view(torch.uint8)[2, 200, 5] = 0x7F
    return case


def check_all_seeds(epilogue: Epilogue) -> None:
    for seed in range(4):
        check(case_for_bugs(epilogue), epilogue, PAIR if epilogue.is_glu else None, seed=seed)


def test_a_nan_in_a_weight_stays_in_its_columns() -> None:
    got = check(case_for_bugs(GLU_BOTH), GLU_BOTH, PAIR)
    broken = got["row_scale"].inside[: sum(SIZES)].isnan()
    assert broken.any()
    assert not broken.all()


@pytest.mark.parametrize("name", [slow_but(BUGS_ALWAYS)(name) for name in BUGS])
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, old, new, epilogue = BUGS[name]
    case_for_bugs(epilogue).sums(EmulatedDriver())  # compiled before anything is planted
    plant(monkeypatch, file, old, new)
    with pytest.raises((AssertionError, ValueError, RuntimeError)) as caught:
        check_all_seeds(epilogue)
    assert "does not compile" not in str(caught.value)


# --- the compiled kernels and the host -------------------------------------------------------------------

COMPILED: list[tuple[GemmConfig, Epilogue]] = [
    (WIDE, dataclasses.replace(BOTH, **ALL)),
    (WIDE, dataclasses.replace(BOTH, activation="swiglu_interleaved", **ALL)),
    (WIDE, dataclasses.replace(ROWS, activation="swiglu_concatenated", **ALL)),
    (WIDE, Epilogue(row_format=NVFP4, row_layout="blocked_groups", scale_rule="te", **ALL)),
    (WIDE, Epilogue(row_format=MXFP8, column_format=MXFP8, scale_rule="cudnn", **ALL)),
    (PAIR, dataclasses.replace(BOTH, activation="swiglu_concatenated", **ALL)),
    (GemmConfig(), dataclasses.replace(BOTH, d_dtype=torch.float32, **ALL)),
    (GemmConfig(), dataclasses.replace(ROWS)),
    (
        SHORT,
        Epilogue(row_format=MXFP4, row_layout="blocked", scale_rule="rceil", d_dtype=torch.bfloat16, **ALL),
    ),
]
COMPILED_ALWAYS = (1, 3)


@pytest.mark.parametrize(
    ("tile", "epilogue"),
    [pytest.param(*case, marks=() if i in COMPILED_ALWAYS else SLOW) for i, case in enumerate(COMPILED)],
    ids=name_of,
)
def test_the_compiled_kernel_spills_nothing(tile: GemmConfig, epilogue: Epilogue) -> None:
    tile = dataclasses.replace(tile, out_dtype=epilogue.d_dtype or torch.bfloat16)
    prelude = sm90_fp8_quant.QuantConfig(tile, epilogue).prelude()
    kernel = jit.compile_kernel(sm90_fp8_quant.KERNEL, prelude, "sm_90a")
    assert (kernel.spill_bytes, kernel.stack_bytes) == (0, 0)
    assert kernel.num_stages >= 2
    assert [line for line in kernel.log.splitlines() if re.search(r"warning|error|\(C\d{4}\)", line)] == []


def test_the_tile_that_is_chosen_can_do_the_epilogue() -> None:
    epilogues_to_try = [e for e, _ in (*FP8_BLOCK_CASES.values(), *MX_CASES)] + [e for e, _, _ in GLU_CASES]
    for epilogue in epilogues_to_try:
        for m, groups in ((1, 1), (300, 4), (8192, 32), (65536, 8), (8192, 1024)):
            problem = Problem(m, 4096, 7168, groups, epilogue.d_dtype or torch.bfloat16)
            tile = sm90_fp8_quant.select_tile(problem, epilogue)
            sm90_fp8_quant.check_tile(tile, epilogue)
            assert tile.max_groups >= groups


@pytest.mark.parametrize(
    ("epilogue", "config", "n", "message"),
    [
        (ROWS, GemmConfig(block_n=192), 128, "config.block_n is 192"),
        (ROWS, GemmConfig(store="pool"), 128, "config.store is 'pool'"),
        (ROWS, GemmConfig(scales="k"), 128, "config.scales is 'k'"),
        (BOTH, SHORT, 128, "config.block_m is 64; a quantising epilogue needs 128 or 256"),
        (GLU_BOTH, GemmConfig(), 256, "config.cluster_n is 1; a quantising epilogue needs 2"),
        (GLU_BOTH, PAIR, 192, "N is 192; it must be a multiple of 128"),
        (
            dataclasses.replace(GLU_BOTH, activation="swiglu_interleaved"),
            PAIR,
            96,
            "N is 96; it must be a multiple of 64",
        ),
        (ROWS, None, 136, "row_codes has strides"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(
    epilogue: Epilogue, config: GemmConfig | None, n: int, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        run(EmulatedDriver(), Case((5, 3), n), epilogue, config)
