"""A row's bits are its own: for every pair of formats, whatever is around the row and whichever call computes it.

Quick here: pairs without e5m2 in the emulator in a few surroundings, MXFP8 on Hopper in all of them, every pair by the
reference. Slow: every pair in all surroundings, and every tile that is chosen for any number of rows. On a GPU: larger
random shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import padless
from padless import BlockScaledTensor, Sm90Bf16Config, Sm90Fp8Config, Sm90Mxfp8Config, grouped_gemm
from padless.emulator.fake_driver import driver_of
from padless.kernels.sm90_bf16 import host as sm90_bf16
from padless.kernels.sm90_bf16 import host_quant as sm90_bf16_quant
from padless.kernels.sm90_fp8 import config as fp8_config
from padless.kernels.sm90_mxfp8 import host as sm90_mxfp8
from padless.kernels.sm90_mxfp8 import host_quant as sm90_mxfp8_quant
from padless.kernels.sm100_grouped.config import Sm100GroupedConfig, select_grouped_config
from padless.kernels.table import ROUTES, Route, find_route
from padless.ops.grouped_gemm import group_offsets
from padless.quantization.quantize import quantize
from padless.runtime.choices import BackendName
from padless.testing.operands import moved
from padless.verify import invariance as verify_invariance
from padless.verify.checks import Check
from padless.verify.emulator.kernels import backend_of, bits
from padless.verify.fuzz.products import routes_of
from padless.verify.invariance import (
    SURROUNDINGS,
    InvarianceProblem,
    judge_problem,
    make_problem,
    quant_pairs,
    random_problem,
)
from support.quant_cases import plant

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.kernels]

ALL = [route for arch in ("sm_90a", "sm_100a") for route in routes_of(arch, "grouped_gemm")]
# Two of them for the quick tests: rows as dense products, and D of the quantising call.
FEW = ("dense", "values")
SIZES, N, K = (3, 0, 9), 48, 160  # tails of N and K, two stages
SPECIAL = ("MXFP8", "MXFP8")


def name_of(route: Route) -> str:
    return f"{route.module} {route.a} {route.b}"


def route_of(config_class: type, a: str, b: str) -> Route:
    return next(p for p in ALL if (p.config_class, p.a, p.b) == (config_class, a, b))


def judged(
    problem: InvarianceProblem, backend: BackendName, surroundings: tuple[str, ...] = tuple(SURROUNDINGS)
) -> int:
    """Elements that were compared. Raises AssertionError where a row has other bits."""
    calls = partial(judge_problem, problem, surroundings=surroundings)
    return int(Check(calls).on(backend, problem.arch).split()[0])


def judged_emulated(problem: InvarianceProblem, surroundings: tuple[str, ...] = tuple(SURROUNDINGS)) -> int:
    """The same by the emulator, without looking for races, which other tests do."""
    backend = backend_of(problem.arch)
    with driver_of(backend).configured(checks=False):
        return judged(problem, backend, surroundings)


# --- every pair ------------------------------------------------------------------------------------------


PROMISE = r"bits of a row|row's bits|group's bits|depends, bit for bit|to the bit|All else as grouped_gemm_quant"


@pytest.mark.parametrize(
    "name", [n for n in padless.__all__ if ("gemm" in n and n.islower()) or n == "scaled_grouped_mm"]
)
def test_every_call_says_what_its_bits_depend_on(name: str) -> None:
    assert re.search(PROMISE, " ".join((getattr(padless, name).__doc__ or "").split())), name


def test_every_grouped_route_is_here_and_has_its_other_calls() -> None:
    assert set(ALL) == {p for p in ROUTES if p.operation == "grouped_gemm"}
    assert {(p.a, p.b) for p in ALL if (p.a, p.b) not in quant_pairs(p.arch)} == {("BF16", "FP8_BLOCK")}
    for route in ALL:
        quant = ("grouped_gemm_quant",) if (route.a, route.b) in quant_pairs(route.arch) else ()
        for operation in ("gemm", *quant):
            choice = make_problem(route, (1,), 16, 32, torch.float32, 0).kernel
            assert find_route(operation, route.arch, route.a, route.b, choice)


@pytest.mark.parametrize(
    "route", [pytest.param(p, marks=[pytest.mark.slow] if "E5M2" in p.a + p.b else []) for p in ALL], ids=name_of
)
def test_a_row_is_what_it_is_alone_and_quantized(route: Route) -> None:
    quantized = 12 if (route.a, route.b) in quant_pairs(route.arch) else 0
    assert judged_emulated(make_problem(route, SIZES, N, K, torch.float32, 1), FEW) == (1 + 9 + quantized) * N


def test_mxfp8_on_hopper_in_all_surroundings() -> None:
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, torch.float32, 2)
    assert problem.kernel is None
    assert judged_emulated(problem) > 6 * 12 * N


def with_and_without_loud_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of three rows of MXFP4 x MXFP4 on Hopper, whose scales are all inside of float16's range: among rows that
    have others from the second stage of K on, and by themselves."""
    problem = make_problem(route_of(Sm90Bf16Config, "MXFP4", "MXFP4"), (9,), N, 544, torch.float32, 3)
    assert isinstance(problem.a, BlockScaledTensor)
    exponents = problem.a.scale.view(torch.uint8).int() - 127
    beyond = (exponents < -18) | (exponents > 5)
    quiet = torch.tensor([0, 2, 3])
    assert beyond.any(dim=1).nonzero().flatten().tolist() == [1, 8]
    assert not beyond[:, :8].any()
    few = verify_invariance.rows_of(problem.a, quiet)
    among, alone = (multiplied(p, None) for p in (problem, replace(problem, a=few, sizes=(3,))))
    return among[quiet], alone


def test_mxfp4_leaves_float16_for_the_rows_that_need_it_alone() -> None:
    """A tile goes from f16 to bf16 products at the first scale beyond f16: no other row may see it."""
    among, alone = with_and_without_loud_rows()
    assert torch.equal(among, alone)


def test_a_tile_that_leaves_float16_wrongly_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    old = "d[u][i] *= F16_UNSHIFT"
    plant(monkeypatch, sm90_bf16, "sm90_bf16/multiply.cuh", old, "d[u][i] *= F16_UNSHIFT / 2")
    among, alone = with_and_without_loud_rows()
    assert bool((among != alone).any(dim=1).all())


def test_a_class_chooses_the_kernel_and_leaves_the_tile_to_it() -> None:
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, torch.float32, 2)
    default, other = multiplied(problem, None), multiplied(problem, Sm90Bf16Config)
    assert not torch.equal(default, other)
    tile = sm90_bf16.select_config(*SPECIAL, sum(SIZES), 4096, len(SIZES))
    assert torch.equal(multiplied(problem, tile), other)
    assert torch.equal(multiplied(problem, Sm90Mxfp8Config), default)
    with pytest.raises(ValueError, match=r"config is a Sm90Fp8Config; .* takes a Sm90Mxfp8Config or Sm90Bf16Config"):
        multiplied(problem, Sm90Fp8Config)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_every_pair_in_all_surroundings(route: Route, dtype: torch.dtype) -> None:
    problem = make_problem(route, (2, 0, 17, 1), 80, 288, dtype, 4)
    times = 6 if (route.a, route.b) in quant_pairs(route.arch) else 5  # that all rows are compared
    assert judged_emulated(problem) > times * 20 * 80


@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_the_reference_in_all_surroundings(route: Route) -> None:
    """Sums of e5m2's and of bf16's products may round in float64, whose order is the BLAS library's: they are compared
    where nothing rounds."""
    problem = make_problem(route, (5, 0, 33, 1), 80, 288, torch.float32, 5)
    if "E5M2" in route.a + route.b or route.a == "BF16":
        problem = with_integers(problem)
    assert judged(problem, "reference") > 0


def with_integers(problem: InvarianceProblem) -> InvarianceProblem:
    x = torch.randint(-8, 9, tuple(problem.a.shape), generator=torch.Generator().manual_seed(5)).float()
    whole = isinstance(problem.a, torch.Tensor)
    a = x.to(torch.bfloat16) if whole else quantize(x, problem.a.format, kind="activation")  # type: ignore[union-attr]
    return replace(problem, a=a)


# --- every tile ------------------------------------------------------------------------------------------


def chosen_tiles(route: Route, n: int) -> list[Any]:
    """Every configuration that is picked for some number of rows, without what follows from the operands."""
    numbers = [*range(1, 34), 48, 64, 65, 100, 128, 129, 192, 193, 256, 512, 1024, 4096, 65536]
    found: dict[Any, None] = {}
    for m in numbers:
        for groups in (1, 2, 8):
            if route.config_class is Sm90Bf16Config:
                found[sm90_bf16.select_config(route.a, route.b, m, n, groups, out_dtype=torch.float32)] = None
            elif route.config_class is Sm90Mxfp8Config:
                found[sm90_mxfp8.select_config(m, n, groups, 132)] = None
                found[sm90_mxfp8.select_config(m, 8192, groups, 132)] = None
            elif route.config_class is Sm90Fp8Config:
                for columns in (n, 4096):
                    shape = fp8_config.Problem(m, columns, K, groups, torch.float32)
                    found[fp8_config.select_config(shape)] = None
            else:
                found[select_grouped_config(m, n, groups)] = None
                found[select_grouped_config(m, 4096, groups)] = None
    return list(found)


def test_the_tiles_that_are_chosen_are_many() -> None:
    """For one pair of every kernel."""
    counts = {route.config_class: len(chosen_tiles(route, 144)) for route in ALL if route.a == route.b}
    assert set(counts) == {Sm90Fp8Config, Sm90Mxfp8Config, Sm90Bf16Config, Sm100GroupedConfig}
    assert all(count >= 2 for count in counts.values()), counts
    heights = {tile.block_m for tile in chosen_tiles(route_of(Sm90Bf16Config, "NVFP4", "NVFP4"), 144)}
    assert heights == {8, 16, 32, 64, 128}


def multiplied(problem: InvarianceProblem, config: Any) -> torch.Tensor:
    backend = backend_of(problem.arch)
    offs = group_offsets(problem.sizes)
    with driver_of(backend).configured(num_sms=8, checks=False):
        out = grouped_gemm(problem.a, problem.b, offs, out_dtype=problem.dtype, backend=backend, config=config)
    return bits(out, offs)


@pytest.mark.slow
@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_every_tile_that_is_chosen_gives_the_same_bits(route: Route) -> None:
    problem = make_problem(route, (2, 0, 17, 1), 144, 288, torch.float32, 6)
    if isinstance(problem.a, torch.Tensor):
        problem.a[4] = -0.0
    else:
        problem.a.data.view(torch.uint8)[4] = 0x88 if problem.a.format.codes_per_byte == 2 else 0x80
    # Every product of row 4 by column 0 is a negative zero, and a stage past the end of K adds positive ones.
    problem.b.data.view(torch.uint8)[:, 0] &= 0x77 if problem.b.format.codes_per_byte == 2 else 0x7F
    first, *others = chosen_tiles(route, 144)
    expected = multiplied(problem, first)
    for config in others:
        assert torch.equal(multiplied(problem, config), expected), config


# --- bugs ------------------------------------------------------------------------------------------------


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of MXFP8 on Hopper by M / G: up to 32 rows a group the one with bf16 products."""
    right = sm90_mxfp8.prepare

    def prepare(driver: Any, a: Any, b: Any, offs: Any, out: Any, config: Any) -> Any:
        few = config is None and a.shape[0] <= 32 * b.shape[0]
        return (sm90_bf16.prepare if few else right)(driver, a, b, offs, out, config)

    monkeypatch.setattr(sm90_mxfp8, "prepare", prepare)


@pytest.mark.parametrize(
    ("surroundings", "where"), [("crowded", "before a crowded group"), ("values", "D of the quantizing call")]
)
def test_a_choice_by_the_rows_of_a_group_is_seen(by_rows: None, surroundings: str, where: str) -> None:
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, torch.float32, 2)
    with pytest.raises(AssertionError, match=rf"MXFP8 x MXFP8 .*: {where}"):
        judged_emulated(problem, (surroundings,))


def test_a_quantizing_call_that_adds_up_differently_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_mxfp8_quant, "prepare", sm90_bf16_quant.prepare)
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, torch.float32, 2)
    with pytest.raises(AssertionError, match="codes of the quantizing call"):
        judged_emulated(problem, ("codes",))


@pytest.mark.parametrize("surroundings", [name for name in SURROUNDINGS if name != "codes"])
def test_one_wrong_bit_of_one_row_is_seen_in_any_surroundings(
    surroundings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reference, whose products after the first have the last bit of a row's first element turned."""
    calls = 0

    def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args, **options)
            out = result if isinstance(result, torch.Tensor) else result["d_tensor"]
            if calls > 1:
                out.view(torch.int32)[0, 0] ^= 1
            return result

        return call

    for name in ("grouped_gemm", "gemm", "grouped_gemm_quant"):
        monkeypatch.setattr(verify_invariance, name, wrong(getattr(verify_invariance, name)))
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), (5, 0, 4), 48, 160, torch.float32, 7)
    with pytest.raises(
        AssertionError, match=r"\d wrong: MXFP8 x MXFP8 .*: (in reverse|before a|5 rows|gemm of 1|scales in|D of)"
    ):
        judged(problem, "reference", (surroundings,))


def test_rows_that_nobody_wrote_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_invariance, "grouped_gemm", lambda a, b, offs, out, **options: out)
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), (5, 0, 4), 48, 160, torch.float32, 7)
    with pytest.raises(AssertionError, match="were not written"):
        judged(problem, "reference", ("crowded",))


@pytest.mark.parametrize(("value", "name"), [(0.0, "nothing but zeros"), (float("inf"), "not finite")])
def test_a_row_that_says_nothing_is_seen(value: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that agree since all of them are zeros, or infinite, are no evidence."""

    def wrong(a: Any, b: Any, offs: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right = grouped_gemm(a, b, offs, out=out, **options)
        right[2] = value
        return right

    monkeypatch.setattr(verify_invariance, "grouped_gemm", wrong)
    problem = make_problem(route_of(Sm90Mxfp8Config, *SPECIAL), (5, 0, 4), 48, 160, torch.float32, 7)
    with pytest.raises(AssertionError, match=f"MXFP8 x MXFP8 .*{name}"):
        judged(problem, "reference", ())


# --- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("route", routes_of("sm_90a", "grouped_gemm"), ids=name_of)
def test_large_problems_on_a_gpu(route: Route, seed: int) -> None:
    assert judged(random_problem(route, seed, factor=4), "cuda") > 0


@pytest.mark.gpu
def test_the_check_of_verify() -> None:
    assert "elements" in verify_invariance.CHECK()


@pytest.mark.gpu
def test_a_choice_by_the_rows_of_a_group_is_seen_on_a_gpu(by_rows: None) -> None:
    problem = random_problem(route_of(Sm90Mxfp8Config, *SPECIAL), 0)
    with pytest.raises(AssertionError, match="before a crowded group"):
        judged(problem, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 0, 40, 129, 9), (5,)], ids=str)
def test_torchs_calling_convention_computes_the_same_rows(sizes: tuple[int, ...]) -> None:
    from padless.compat.torch import scaled_grouped_mm

    problem = make_problem(route_of(Sm90Fp8Config, "FP8_BLOCK", "FP8_BLOCK"), sizes, 272, 400, torch.bfloat16, 8)
    a, b = (moved(t, "cuda") for t in (problem.a, problem.b))
    offs = group_offsets(sizes).cuda()

    def recipe(name: str) -> Any:
        return type("Recipe", (), {"name": name})

    got = scaled_grouped_mm(
        a.data,
        b.data.transpose(-2, -1),
        a.scale,
        recipe("BlockWise1x128"),
        b.scale.transpose(-2, -1),
        recipe("BlockWise128x128"),
        offs=offs,
    )
    assert torch.equal(got, grouped_gemm(a, b, offs))
