"""The CUDA kernels on tiles of 128 tokens in the emulator: every bit and byte is that of the definitions in torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from padless.emulator.fake_driver import EmulatedDriver, emulated_driver
from padless.kernels.sm90_rows_columns import host as columns_host
from padless.kernels.sm90_swiglu_backward import host as swiglu_host
from padless.quantization.rows_columns import rows_columns_torch
from padless.quantization.swiglu_backward import swiglu_backward_torch
from padless.runtime import jit
from padless.runtime.driver import cuda_driver
from support.emulator_variants import Variant
from support.machine_code import complaints, instructions
from support.token_tile_bugs import BUGS, COLUMNS_MAIN, Bug
from support.training_quantizer_cases import COLUMNS, assert_equal, offs_of, poisoned_memory, swiglu_operands
from support.triton_cases import awkward

pytest.importorskip("triton")
from padless.quantization.triton import rows_columns, swiglu_backward
from support.emulated_triton import EmulatedKernel

BY_FEATURE, SQUARE = (1, 128), (128, 128)
SWIGLU_NAMES = "row_codes row_scale dz_codes dz_scale hidden_codes hidden_scale starts block_starts dprob"


def with_one_nan(x: torch.Tensor) -> torch.Tensor:
    """The emulator's arithmetic keeps the sign of a NaN, a GPU's does not."""
    return x.masked_fill(x.isnan(), float("nan"))


def check_columns(
    driver: Any,
    sizes: tuple[int, ...],
    past: int,
    features: int,
    block: tuple[int, int],
    alignment: int,
    rows: bool = True,
    ends: list[int] | None = None,
    device: str = "cpu",
    gathers: bool = False,
) -> None:
    """Raises AssertionError unless every output equals the definition's, padding and slack included.

    gathers: the rows are chosen from others, out of order and some of them twice, among NaN and in a wider tensor.
    """
    x = with_one_nan(awkward((sum(sizes) + past, features), torch.bfloat16, features))
    tokens, values = None, x
    if gathers:
        values = torch.full((x.shape[0] + 9, features + 8), float("nan"), dtype=x.dtype)[:, 8:]
        tokens = torch.randperm(len(values), generator=torch.Generator().manual_seed(features))[: len(x)].int()
        values[tokens.long()] = x
        tokens[len(x) // 2 :: 3] = tokens[0]
        x = values[tokens.long()]
    offs = offs_of(sizes, "cpu") if ends is None else torch.tensor(ends, dtype=torch.int32)
    want = rows_columns_torch(x, offs, block, alignment, rows)
    with poisoned_memory():
        moved = None if tokens is None else tokens.to(device)
        got = rows_columns.rows_columns(values.to(device), offs.to(device), block, alignment, rows, driver, moved)
    names = COLUMNS if rows else COLUMNS.split(" ", 2)[2]
    assert_equal(got if rows else got[2:], want if rows else want[2:], names)


def check_swiglu(
    driver: Any,
    sizes: tuple[int, ...],
    past: int,
    columns: int,
    gate_up: str,
    block: tuple[int, int],
    alignment: int,
    with_prob: bool = True,
    device: str = "cpu",
) -> None:
    dh, z, prob = swiglu_operands(sum(sizes) + past, columns, torch.bfloat16, columns)
    operands = (with_one_nan(dh), with_one_nan(z), offs_of(sizes, "cpu"), prob if with_prob else None)
    want = swiglu_backward_torch(*operands, gate_up, block, alignment)
    with poisoned_memory():
        moved = (None if t is None else t.to(device) for t in operands)
        got = swiglu_backward.swiglu_backward(*moved, gate_up, block, alignment, driver)
    assert_equal(got, want, SWIGLU_NAMES)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> EmulatedDriver:
    """The emulated device; the small kernel that adds up dprob is emulated too."""
    monkeypatch.setattr(swiglu_backward, "_sum_blocks", EmulatedKernel(swiglu_backward._sum_blocks))
    return emulated_driver("sm_90a")


@contextmanager
def bands_of(blocks: int) -> Iterator[None]:
    with mock.patch.object(columns_host, "BAND", blocks), mock.patch.object(swiglu_host, "BAND", blocks):
        yield


# --- values ----------------------------------------------------------------------------------------------


def test_columns(driver: EmulatedDriver) -> None:
    """A tile of few tokens, a group of none, one block of features that is not whole, rows past the last group."""
    before = driver.last_result
    check_columns(driver, (5, 0, 33), 2, 136, BY_FEATURE, 32)
    assert driver.last_result is not before


def test_columns_of_chosen_rows(driver: EmulatedDriver) -> None:
    before = driver.last_result
    check_columns(driver, (5, 0, 33), 2, 136, BY_FEATURE, 32, gathers=True)
    assert driver.last_result is not before


def test_swiglu(driver: EmulatedDriver) -> None:
    before = driver.last_result
    check_swiglu(driver, (12, 0, 33), 2, 128, "concatenated", BY_FEATURE, 32)
    assert driver.last_result is not before


COLUMN_CASES: list[tuple[Any, ...]] = [
    ((5, 0, 130, 33), 2, 144, BY_FEATURE, 32),
    ((127, 0, 1), 3, 160, SQUARE, 128),
    ((0, 31, 5), 4, 16, BY_FEATURE, 32, False),
    ((0, 0), 5, 128, SQUARE, 32),
    ((129, 128), 90, 264, BY_FEATURE, 128),
    ((), 61, 32, BY_FEATURE, 32, True, [90, 10, -5, 40]),
    ((), 61, 32, BY_FEATURE, 32, True, [0, 2**30, -(2**31), 5, 2**31 - 1]),
    (tuple((7 * g) % 5 for g in range(40)), 7, 24, BY_FEATURE, 32),
]
SWIGLU_CASES: list[tuple[Any, ...]] = [
    ((12, 0, 33), 2, 128, "interleaved", SQUARE, 32),
    ((129, 0, 127, 1), 3, 256, "concatenated", SQUARE, 128),
    ((130, 0, 31), 40, 256, "interleaved", BY_FEATURE, 32, False),
    ((0, 0), 6, 128, "concatenated", BY_FEATURE, 32),
]


def name_of(case: tuple[Any, ...]) -> str:
    return f"{len(case[0])} groups, {sum(case[0])} + {case[1]} rows, {case[2]} columns"


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("case", COLUMN_CASES, ids=name_of)
def test_columns_of_all_kinds(case: tuple[Any, ...], gathers: bool, driver: EmulatedDriver) -> None:
    with bands_of(2):
        check_columns(driver, *case, gathers=gathers)


MANY = (1, *[0] * 1022, 2, 1, 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_columns_of_more_than_1024_groups(driver: EmulatedDriver) -> None:
    """A tile for every group, for the scales of those without tokens are zeroed."""
    check_columns(driver, MANY, 2, 16, BY_FEATURE, 32)


@pytest.mark.slow
def test_a_table_that_is_full(driver: EmulatedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in (columns_host, swiglu_host):
        monkeypatch.setattr(host, "room_for_groups", lambda groups: groups)
    check_columns(driver, (0, *[3] * 38, 5), 2, 16, SQUARE, 32)
    check_swiglu(driver, (0, *[3] * 8, 5), 2, 128, "concatenated", BY_FEATURE, 32)


@pytest.mark.slow
@pytest.mark.parametrize("case", SWIGLU_CASES, ids=name_of)
def test_swiglu_of_all_kinds(case: tuple[Any, ...], driver: EmulatedDriver) -> None:
    with bands_of(1):
        check_swiglu(driver, *case)


@pytest.mark.gpu
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("blocks", [1, 2, 8])
@pytest.mark.parametrize("case", COLUMN_CASES, ids=name_of)
def test_columns_on_the_gpu(case: tuple[Any, ...], blocks: int, gathers: bool) -> None:
    with bands_of(blocks):
        check_columns(cuda_driver(), *case, device="cuda", gathers=gathers)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 8])
@pytest.mark.parametrize("case", [*SWIGLU_CASES, ((500, 0, 700), 9, 1152, "interleaved", BY_FEATURE, 32)], ids=str)
def test_swiglu_on_the_gpu(case: tuple[Any, ...], blocks: int) -> None:
    with bands_of(blocks):
        check_swiglu(cuda_driver(), *case, device="cuda")


def test_what_does_not_fit_is_left_to_triton() -> None:
    offs = torch.zeros(3, dtype=torch.int32)
    x = torch.zeros(20, 256, dtype=torch.bfloat16)
    assert columns_host.fits(x, offs)
    wide = torch.zeros(20, 264, dtype=torch.bfloat16)
    assert columns_host.fits(wide, offs)
    assert columns_host.fits(wide[:, 8:], offs)
    for other in (x.half(), x.float(), wide[:, :252], wide[:, 1:249], torch.zeros(20, 252, dtype=torch.bfloat16)):
        assert not columns_host.fits(other, offs)
    assert not columns_host.fits(x, torch.zeros(4097, dtype=torch.int32))
    assert not columns_host.fits(x, torch.zeros(0, dtype=torch.int32))
    assert swiglu_host.fits(x, torch.zeros(20, 512, dtype=torch.bfloat16), offs)
    assert not swiglu_host.fits(x[:, :144], torch.zeros(20, 288, dtype=torch.bfloat16), offs)
    assert not swiglu_host.fits(x, torch.zeros(20, 512), offs)
    near, far = (
        torch.empty_strided((20, 256), (apart, 1), dtype=x.dtype, device="meta") for apart in (2**29 - 8, 2**29)
    )
    assert columns_host.fits(near, offs)
    assert not columns_host.fits(far, offs)
    assert not swiglu_host.fits(far, torch.zeros(20, 512, dtype=torch.bfloat16), offs)


# --- planted bugs ----------------------------------------------------------------------------------------


def faults_of(bug: Bug | None, kernel: str) -> list[str]:
    """What a run of one CTA finds: kinds of report, and where bits differ. Several items, several bands."""
    edits = () if bug is None else bug.edits
    band = 1 if bug is None else bug.band
    driver: Variant
    if kernel == COLUMNS_MAIN:
        gathers = bug is not None and bug.gathers
        driver = Variant("sm_90a", kernel, edits, columns_host.RowsColumnsConfig(gathers=gathers, band=band))
        # Ends that are not ascending; with many groups more than a warp scans at once.
        many = bug is not None and bug.many_groups
        ends = [*range(1, 33), 20, 36] if many else [5, 4, 38]
        features = 8 if many else 136

        def check() -> None:
            check_columns(driver, (), ends[-1] + 3, features, BY_FEATURE, 32, ends=ends, gathers=gathers)

    else:
        driver = Variant("sm_90a", kernel, edits, swiglu_host.SwigluBackwardConfig(band=band))

        def check() -> None:
            check_swiglu(driver, (12, 0, 33), 2, 128, "concatenated", BY_FEATURE, 32)

    with bands_of(band), driver.configured(num_sms=1, raise_on_reports=False):
        try:
            check()
            wrong = []
        except AssertionError as error:
            wrong = [str(error)]
        assert driver.last_result is not None
        return sorted({report.kind for report in driver.last_result.reports}) + wrong


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_found(bug: Bug, driver: EmulatedDriver) -> None:
    assert faults_of(bug, bug.kernel) != []


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted({bug.kernel for bug in BUGS}))
def test_without_a_bug_nothing_is_found(kernel: str, driver: EmulatedDriver) -> None:
    assert faults_of(None, kernel) == []


# --- machine code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("has_rows", "gathers"), [(False, False), (True, False), (True, True)])
def test_compiled_columns(has_rows: bool, gathers: bool, square: bool, tmp_path: Any) -> None:
    config = columns_host.RowsColumnsConfig(has_rows, square, gathers)
    kernel = jit.compile_kernel(columns_host.KERNEL, config.prelude(), "sm_90a")
    assert complaints(kernel) == []
    assert kernel.registers <= 64, "two CTAs of 512 threads fit on a multiprocessor"
    assert 2 * (kernel.shared_bytes + 1024) <= 228 * 1024
    check_instructions(instructions(kernel, tmp_path))


@pytest.mark.parametrize("interleaved", [False, True])
def test_compiled_swiglu(interleaved: bool, tmp_path: Any) -> None:
    config = swiglu_host.SwigluBackwardConfig(True, interleaved)
    kernel = jit.compile_kernel(swiglu_host.KERNEL, config.prelude(), "sm_90a")
    assert kernel.registers * kernel.num_threads <= 65536
    assert kernel.spill_bytes <= 48, "what is spilled is not in the innermost steps"
    sass = instructions(kernel, tmp_path)
    check_instructions(sass)
    # 32 gradients a thread: no multiplication and sum is fused that the definition rounds twice, none is missing.
    assert sum(line.startswith("FFMA") for line in sass) < 12 * 32


def check_instructions(sass: list[str]) -> None:
    """16-byte copies and lines, no bytes or halves in memory, no division by subroutine."""
    opcodes = {line.split()[0] for line in sass}
    assert "LDGSTS.E.BYPASS.128.ZFILL" in opcodes or any(o.startswith("LDGSTS") and "128" in o for o in opcodes)
    assert any(o.startswith("STG") and o.endswith("128") for o in opcodes)
    assert not [o for o in opcodes if o.startswith(("STG", "LDG.", "STS", "LDS")) and ("U8" in o or "U16" in o)]
    assert not [o for o in opcodes if o.startswith("CALL")]
