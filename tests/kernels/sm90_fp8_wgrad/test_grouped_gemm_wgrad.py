"""The public call of weight gradients: what it computes on the CPU, what it refuses, what it packs for a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import padless
from padless import WgradConfig, grouped_gemm_wgrad
from padless.kernels.sm90_fp8_wgrad import host
from padless.kernels.sm90_fp8_wgrad.config import WgradProblem, tiles_of
from padless.layouts import GroupedColumns
from padless.reference.wgrad import grouped_gemm_wgrad_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import WgradShape, random_operands
from support.weight_gradients import Recording

SHAPE = WgradShape((33, 0, 129, 1), 3, 48, 80)
Operands = tuple[GroupedColumns, GroupedColumns]


@pytest.fixture
def operands() -> Operands:
    return random_operands(SHAPE, "1d2d")


@pytest.mark.parametrize("mode", ["1d2d", "1d1d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_cpu_it_is_the_reference(mode: str, dtype: torch.dtype) -> None:
    dy, x = random_operands(SHAPE, mode, 1)
    wanted = grouped_gemm_wgrad_reference(dy, x, out_dtype=dtype)
    assert same_bits(grouped_gemm_wgrad(dy, x, out_dtype=dtype), wanted)
    out = torch.full((4, 48, 80), float("nan"), dtype=dtype)
    assert grouped_gemm_wgrad(dy, x, out=out) is out
    assert same_bits(out, wanted)


def test_on_the_cpu_accumulating_adds(operands: Operands) -> None:
    stored = grouped_gemm_wgrad(*operands, out_dtype=torch.float32)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(2))
    out = before.clone()
    assert grouped_gemm_wgrad(*operands, out=out, accumulate=True) is out
    assert same_bits(out[[0, 2, 3]], (before + stored)[[0, 2, 3]])
    assert same_bits(out[1], before[1])


def test_four_microbatches_are_four_additions() -> None:
    """The first one stores into memory that nobody cleared, the others add, in the emulator."""
    batches = [random_operands(replace(SHAPE, sizes=sizes), "1d2d", seed) for seed, sizes in
               enumerate(((33, 0, 129, 1), (0, 5, 64, 0), (31, 32, 0, 0), (1, 0, 1, 0)))]  # fmt: skip
    config = WgradConfig(block_m=128, out_dtype=torch.float32)
    out = torch.full((4, 48, 80), float("nan"))
    total = None
    for first, (dy, x) in zip((True, False, False, False), batches, strict=True):
        grouped_gemm_wgrad(dy, x, out=out, accumulate=not first, backend="emulator", config=config)
        part = grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32, accumulation="tensor_core")
        total = part if total is None else total + part
    assert total is not None
    assert same_bits(out, total)


def test_without_groups_there_is_nothing(operands: Operands) -> None:
    dy, x = (replace(o, offs=o.offs[:0], starts=o.starts[:0], block_starts=o.block_starts[:0]) for o in operands)
    for backend in ("reference", "emulator"):
        assert grouped_gemm_wgrad(dy, x, backend=backend).shape == (0, 48, 80)


Change = Callable[[GroupedColumns, GroupedColumns], dict[str, Any]]
BAD: dict[str, tuple[Change, str]] = {
    "dy of another type": (lambda dy, x: {"dy": dy.data}, r"dy must be GroupedColumns, got \(48,"),
    "x of another type": (lambda dy, x: {"x": None}, "x must be GroupedColumns, got NoneType"),
    "block of dy": (
        lambda dy, x: {"dy": replace(dy, block=(128, 128))},
        r"dy has scales per \(128, 128\) features and tokens; allowed: \(1, 128\)",
    ),
    "block of x": (
        lambda dy, x: {"x": replace(x, block=(1, 32))},
        r"x has scales per \(1, 32\) .* allowed: \(128, 128\) or \(1, 128\)",
    ),
    "features": (
        lambda dy, x: {"dy": replace(dy, data=dy.data[:40], scale=dy.scale[:, :40].contiguous())},
        "dy has 40 features; they must be a positive multiple of 16",
    ),
    "dtype of codes": (
        lambda dy, x: {"x": replace(x, data=x.data.view(torch.uint8))},
        r"x.data must be \(features, tokens\) float8_e4m3fn, got \(80, \d+\) torch.uint8",
    ),
    "tokens": (
        lambda dy, x: {"x": replace(x, data=x.data[:, :96])},
        "x.data must be row-major with a multiple of 128 tokens",
    ),
    "token order": (lambda dy, x: {"dy": replace(dy, data=dy.data.t().contiguous().t())}, "dy.data must be row-major"),
    "alignment": (lambda dy, x: {"dy": replace(dy, alignment=16)}, r"dy.alignment is 16; allowed: \(32, 128\)"),
    "scales": (
        lambda dy, x: {"x": replace(x, scale=x.scale.repeat(1, 2))},
        r"x.scale must be \(rows, 1\) float32, got \(\d+, 2\)",
    ),
    "order of scales": (
        lambda dy, x: {"dy": replace(dy, scale=dy.scale.t().contiguous().t())},
        "dy.scale must be contiguous",
    ),
    "scale rows": (
        lambda dy, x: {"x": replace(x, scale=x.scale[:-1])},
        "copies of the same groups have equal numbers of them",
    ),
    "starts": (
        lambda dy, x: {"x": replace(x, starts=x.starts[:-1])},
        "x.starts must be a contiguous int32 tensor with an entry for each group",
    ),
    "dtype of offs": (
        lambda dy, x: {"dy": replace(dy, offs=dy.offs.long())},
        "dy.offs must be a contiguous int32 tensor",
    ),
    "shape of out": (
        lambda dy, x: {"out": torch.empty((4, 80, 48))},
        r"out must be \(G, N, K\) = \(4, 48, 80\) on cpu, got \(4, 80, 48\)",
    ),
    "dtype of out": (
        lambda dy, x: {"out": torch.empty((4, 48, 80), dtype=torch.float16)},
        "out.dtype is torch.float16; allowed: torch.bfloat16 or torch.float32",
    ),
    "out_dtype": (lambda dy, x: {"out_dtype": torch.float64}, "out_dtype is torch.float64; allowed"),
    "strides of out": (
        lambda dy, x: {"out": torch.empty((4, 80, 48)).transpose(1, 2)},
        "out must be contiguous along K",
    ),
    "row starts of out": (
        lambda dy, x: {"out": torch.empty((4, 48, 82))[:, :, :80], "backend": "emulator"},
        "rows that start at multiples of 16 bytes",
    ),
    "rows of out overlap": (
        lambda dy, x: {"out": torch.empty(10**5).as_strided((4, 48, 80), (48 * 80, 64, 1))},
        "out has rows that overlap",
    ),
    "groups of out overlap": (
        lambda dy, x: {"out": torch.empty((1, 48, 80)).expand(4, 48, 80)},
        "out has rows that overlap",
    ),
    "accumulating without out": (
        lambda dy, x: {"accumulate": True},
        "accumulate adds to float32 and out is None; give a float32 tensor as out",
    ),
    "accumulating in bfloat16": (
        lambda dy, x: {"accumulate": True, "out": torch.empty((4, 48, 80), dtype=torch.bfloat16)},
        "accumulate adds to float32 and out is torch.bfloat16",
    ),
    "backend": (lambda dy, x: {"backend": "cpu"}, "backend is 'cpu'; allowed"),
    "architecture": (
        lambda dy, x: {"backend": "emulator:sm_100a"},
        "backend 'emulator:sm_100a' is sm_100a; grouped_gemm_wgrad has a kernel for sm_90a",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_allowed_is_named(operands: Operands, what: str) -> None:
    change, message = BAD[what]
    dy, x = operands
    with pytest.raises(ValueError, match=message):
        grouped_gemm_wgrad(**{"dy": dy, "x": x, **change(dy, x)})


def test_one_launch_that_knows_no_number_of_tokens(operands: Operands) -> None:
    """A persistent grid, and the same kernel for every M: one that stores and one that adds."""
    driver = Recording()
    out = torch.empty((4, 48, 80))
    for sizes in ((33, 0, 129, 1), (0, 1000, 7, 2)):
        dy, x = random_operands(replace(SHAPE, sizes=sizes), "1d2d")
        for accumulate in (False, True):
            host.prepare(driver, dy, x, out, accumulate, None)  # type: ignore[arg-type]
    assert len(driver.launches) == 4
    assert len({id(launch[1]) for launch in driver.launches}) == 2
    shape = driver.launches[0][2]
    problem = WgradProblem(48, 80, 0, 4, "1d2d", torch.float32)
    assert shape.grid == tiles_of(problem, 128) == 4
    assert shape.programmatic
    entries = {launch[0] for launch in driver.launches}
    assert entries == {"padless_sm90_fp8_wgrad"}


def test_the_public_names() -> None:
    assert padless.grouped_gemm_wgrad is grouped_gemm_wgrad
    assert {"grouped_gemm_wgrad", "WgradConfig"} <= set(padless.__all__)
