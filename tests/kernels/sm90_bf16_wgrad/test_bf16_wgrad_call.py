"""The public call of weight gradients on bf16 rows: what it computes on the CPU, what it refuses, what it packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import padless
from padless import Bf16WgradConfig, WgradConfig, grouped_gemm_wgrad
from padless.kernels.sm90_bf16_wgrad import host
from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradProblem, select_config, tiles_of
from padless.reference.bf16 import grouped_gemm_wgrad_rows_reference
from padless.testing.bits import same_bits
from padless.testing.gradients import Rows, WgradShape, random_operands
from support.bf16_problems import Shape, random_rows
from support.weight_gradients import Recording

SHAPE = Shape((33, 0, 129, 1), 3, 24, 72)


@pytest.fixture
def rows() -> Rows:
    return random_rows(SHAPE)


def call(rows: Rows, **arguments: Any) -> torch.Tensor:
    return grouped_gemm_wgrad(**{"dy": rows.dy, "x": rows.x, "offs": rows.offs, **arguments})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_cpu_it_is_the_reference(rows: Rows, dtype: torch.dtype) -> None:
    wanted = grouped_gemm_wgrad_rows_reference(rows.dy, rows.x, rows.offs, out_dtype=dtype)
    assert same_bits(call(rows, out_dtype=dtype), wanted)
    out = torch.full((4, 24, 72), float("nan"), dtype=dtype)
    assert call(rows, out=out) is out
    assert same_bits(out, wanted)


def test_on_the_cpu_accumulating_adds_and_leaves_empty_groups_alone(rows: Rows) -> None:
    stored = call(rows, out_dtype=torch.float32)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(2))
    out = before.clone()
    assert call(rows, out=out, accumulate=True) is out
    assert same_bits(out[[0, 2, 3]], (before + stored)[[0, 2, 3]])
    assert same_bits(out[1], before[1])


def test_it_is_torchs_product_within_rounding(rows: Rows) -> None:
    ours = call(rows, out_dtype=torch.float32).double()
    start = 0
    for group, end in enumerate(rows.offs.tolist()):
        exact = rows.dy[start:end].double().t() @ rows.x[start:end].double()
        assert (ours[group] - exact).norm() <= 2.0**-23 * exact.norm()
        start = end


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_without_rows_or_groups_there_is_nothing_to_multiply(rows: Rows, backend: str) -> None:
    assert call(rows, offs=rows.offs[:0], backend=backend).shape == (0, 24, 72)
    none = {"dy": rows.dy[:0], "x": rows.x[:0], "offs": torch.zeros_like(rows.offs), "backend": backend}
    out = torch.full((4, 24, 72), float("nan"))
    assert bool((call(rows, **none, out=out) == 0).all())
    out.fill_(3.0)
    assert bool((call(rows, **none, out=out, accumulate=True) == 3.0).all())


@pytest.mark.parametrize("backend", ["reference", "emulator"])
def test_int64_offs_are_int32(rows: Rows, backend: str) -> None:
    ends = rows.offs.long()
    ends[-1] = 2**40  # past every row in both
    narrow = ends.clamp(max=2**31 - 1).int()
    assert torch.equal(call(rows, offs=ends, backend=backend), call(rows, offs=narrow, backend=backend))


BAD: dict[str, tuple[Callable[[Rows], dict[str, Any]], str]] = {
    "one copy, one tensor": (
        lambda r: {"x": random_operands(WgradShape((33, 0), 3, 48, 80), "1d2d")[1]},
        "offs is given and dy and x are copies",
    ),
    "dtype": (lambda r: {"dy": r.dy.half()}, r"dy must be \(M, features\) bfloat16, or GroupedColumns, got"),
    "rank": (lambda r: {"x": r.x[None]}, r"x must be \(M, features\) bfloat16"),
    "features": (lambda r: {"dy": r.dy[:, :20]}, "dy has 20 features; they must be a multiple of 8 and at least 16"),
    "few features": (lambda r: {"x": r.x[:, :8]}, "x has 8 features; they must be a multiple of 8 and at least 16"),
    "order": (lambda r: {"dy": r.dy.t().contiguous().t()}, "dy has strides"),
    "rows": (lambda r: {"x": r.x[1:]}, r"x is \(165, 72\) .* they must have the same rows on one device"),
    "no offs": (lambda r: {"offs": None}, "offs is None; pass the end row of each group"),
    "dtype of offs": (lambda r: {"offs": r.offs.short()}, "offs must be a 1-D int32 or int64 tensor"),
    "strides of offs": (lambda r: {"offs": r.offs.repeat(2)[::2]}, "offs must be contiguous, got stride 2"),
    "groups": (lambda r: {"offs": torch.zeros(4097, dtype=torch.int32)}, "offs has 4097 groups; at most 4096"),
    "config": (lambda r: {"config": WgradConfig()}, "config is a WgradConfig; rows take a Bf16WgradConfig"),
    "out": (lambda r: {"out": torch.empty(4, 72, 24)}, r"out must be \(G, N, K\) = \(4, 24, 72\) on cpu"),
    "out_dtype": (lambda r: {"out_dtype": torch.float16}, "out_dtype is torch.float16; allowed"),
    "accumulating without out": (lambda r: {"accumulate": True}, "accumulate adds to float32 and out is None"),
    "address": (
        lambda r: {"dy": torch.zeros(166, 32, dtype=torch.bfloat16)[:, 1:25], "backend": "emulator"},
        "dy is at address .* 16-byte aligned",
    ),
    "gradients": (lambda r: {"dy": r.dy.clone().requires_grad_()}, "dy requires grad"),
    "backend": (lambda r: {"backend": "cpu"}, "backend is 'cpu'; allowed"),
    "architecture": (
        lambda r: {"backend": "emulator:sm_100a"},
        "backend 'emulator:sm_100a' is sm_100a; grouped_gemm_wgrad has a kernel for sm_90a",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_allowed_is_named(rows: Rows, what: str) -> None:
    change, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        call(rows, **change(rows))


def test_copies_refuse_the_rows_config() -> None:
    dy, x = random_operands(WgradShape((33, 0), 3, 48, 80), "1d2d")
    with pytest.raises(ValueError, match="config is a Bf16WgradConfig; copies of grouped columns take a WgradConfig"):
        grouped_gemm_wgrad(dy, x, config=Bf16WgradConfig())


def test_one_launch_that_knows_no_number_of_tokens() -> None:
    """A persistent grid, and the same kernel for other M: one that stores and one that adds."""
    driver = Recording()
    out = torch.empty((4, 24, 72))
    for sizes in ((33, 0, 129, 1), (0, 700, 7, 2)):
        rows = random_rows(replace(SHAPE, sizes=sizes))
        for accumulate in (False, True):
            host.prepare(driver, rows.dy, rows.x, rows.offs, out, accumulate, None)  # type: ignore[arg-type]
    assert len(driver.launches) == 4
    assert len({id(launch[1]) for launch in driver.launches}) == 2
    assert driver.launches[0][2].grid == tiles_of(Bf16WgradProblem(24, 72, 166, 4, torch.float32), 128) == 4
    assert driver.launches[0][2].programmatic
    assert {launch[0] for launch in driver.launches} == {"padless_sm90_bf16_wgrad"}


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_handful_of_kernels_for_all_numbers_of_tokens(accumulate: bool) -> None:
    picked = {
        select_config(Bf16WgradProblem(4096, 7168, tokens, 32, torch.float32, accumulate=accumulate))
        for tokens in range(0, 1 << 20, 509)
    }
    assert 1 < len(picked) <= 4


def test_the_public_names() -> None:
    assert {"grouped_gemm_wgrad", "Bf16WgradConfig"} <= set(padless.__all__)
