"""A row's bits are its own: for every pair of formats, whatever is around the row and whichever call computes it.

Quick here: pairs without e5m2 in the emulator in a few surroundings, MXFP8 on Hopper in all of them, every pair by the
reference. Slow: every pair in all surroundings, and every tile that is chosen for any number of rows. On a GPU: larger
random shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
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
from padless.kernels.table import QUANT, ROUTES, Route, find_route
from padless.ops.grouped_gemm import group_offsets
from padless.runtime.choices import BackendName
from padless.testing.bits import bits
from padless.verify.checks import Check
from padless.verify.emulator.kernels import backend_of
from padless.verify.fuzz import products
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import Options
from padless.verify.fuzz.product_lines import _line, invariant_line
from padless.verify.fuzz.products import Product, judge_grouped_gemm
from padless.verify.lines import PRODUCTS
from padless.verify.tiles import pairs_of, routes_of
from support.quant_cases import plant

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.kernels]

ALL = [route for arch in ("sm_90a", "sm_100a") for route in routes_of(arch)]
# For the quick tests: rows as dense products, and D of the quantizing call.
FEW = ("as a dense product", "D of")
SIZES, N, K = (3, 0, 9), 48, 192  # tails of N and K, two stages
SPECIAL = ("MXFP8", "MXFP8")


def name_of(route: Route) -> str:
    return f"{route.module} {route.a} {route.b}"


def route_of(config_class: type, a: str, b: str) -> Route:
    return next(p for p in ALL if (p.config_class, p.a, p.b) == (config_class, a, b))


def drawn(route: Route, sizes: tuple[int, ...], n: int, k: int, out: str, seed: int, drawn: str = "loud") -> Options:
    return _line(route, sizes, n, k, "near", "changes", out=out, seed=seed, drawn=drawn)


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Calling it leaves the changes of these beginnings."""
    every = Product.changes

    def leave(*names: str) -> None:
        monkeypatch.setattr(Product, "changes", lambda self: (c for c in every(self) if c[0].startswith(names)))

    return leave


def judged(o: Options, backend: BackendName, arch: str) -> int:
    """Elements that were compared. Raises AssertionError where a row has other bits."""

    def calls(place: Place) -> None:
        place.judge.now(f"{o['a']} x {o['b']}:")
        judge_grouped_gemm(o, place)

    return int(Check(calls).on(backend, arch).split()[0])


def judged_emulated(o: Options, arch: str) -> int:
    """The same by the emulator, without looking for races, which other tests do."""
    with driver_of(backend_of(arch)).configured(checks=False):
        return judged(o, backend_of(arch), arch)


# --- every pair ------------------------------------------------------------------------------------------


PROMISE = r"bits of a row|row's bits|group's bits|depends, bit for bit|to the bit|All else as grouped_gemm_quant"


@pytest.mark.parametrize(
    "name", [n for n in padless.__all__ if ("gemm" in n and n.islower()) or n == "scaled_grouped_mm"]
)
def test_every_call_says_what_its_bits_depend_on(name: str) -> None:
    assert re.search(PROMISE, " ".join((getattr(padless, name).__doc__ or "").split())), name


def test_every_grouped_route_is_here_and_has_its_other_calls() -> None:
    assert set(ALL) == {p for p in ROUTES if p.operation == "grouped_gemm"}
    assert {(p.a, p.b) for p in ALL if (p.a, p.b) not in pairs_of(p.arch, QUANT)} == {("BF16", "FP8_BLOCK")}
    for route in ALL:
        quant = ("grouped_gemm_quant",) if (route.a, route.b) in pairs_of(route.arch, QUANT) else ()
        default = find_route(route.operation, route.arch, route.a, route.b) == route
        for operation in ("gemm", *quant):
            assert find_route(operation, route.arch, route.a, route.b, None if default else route.config_class)


@pytest.mark.parametrize(
    "route", [pytest.param(p, marks=[pytest.mark.slow] if "E5M2" in p.a + p.b else []) for p in ALL], ids=name_of
)
def test_a_row_is_what_it_is_alone_and_quantized(route: Route, only: Callable[..., None]) -> None:
    only(*FEW)
    quantized = 12 if (route.a, route.b) in pairs_of(route.arch, QUANT) else 0
    found = judged_emulated(drawn(route, SIZES, N, K, "float32", 1), route.arch)
    assert found == (12 + 1 + 9 + quantized) * N  # the first 12 rows against float64


def test_mxfp8_on_hopper_in_all_surroundings() -> None:
    o = drawn(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, "float32", 2)
    assert judged_emulated(o, "sm_90a") > 7 * 12 * N


def with_and_without_loud_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of three rows of MXFP4 x MXFP4 on Hopper, whose scales are all inside of float16's range: among rows that
    have others from the second stage of K on, and by themselves."""
    o = drawn(route_of(Sm90Bf16Config, "MXFP4", "MXFP4"), (9,), N, 544, "float32", 3)
    problem = Product(o, place_of("reference"))
    assert isinstance(problem.a.plain, BlockScaledTensor)
    exponents = problem.a.plain.scale.view(torch.uint8).int() - 127
    beyond = (exponents < -18) | (exponents > 5)
    quiet = torch.tensor([0, 2, 3])
    assert beyond.any(dim=1).nonzero().flatten().tolist() == [1, 8]
    assert not beyond[:, :8].any()
    among, alone = (bits_of(problem, rows, None) for rows in (torch.arange(9), quiet))
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
    o = drawn(route_of(Sm90Mxfp8Config, *SPECIAL), SIZES, N, K, "float32", 2)
    default, other = multiplied(o, None), multiplied(o, Sm90Bf16Config)
    assert not torch.equal(default, other)
    tile = sm90_bf16.select_config(*SPECIAL, sum(SIZES), 4096, len(SIZES))
    assert torch.equal(multiplied(o, tile), other)
    assert torch.equal(multiplied(o, Sm90Mxfp8Config), default)
    with pytest.raises(ValueError, match=r"config is a Sm90Fp8Config; .* takes a Sm90Mxfp8Config or Sm90Bf16Config"):
        multiplied(o, Sm90Fp8Config)


@pytest.mark.slow
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_every_pair_in_all_surroundings(route: Route, out: str) -> None:
    times = 7 if (route.a, route.b) in pairs_of(route.arch, QUANT) else 6  # that all rows are compared
    assert judged_emulated(drawn(route, (2, 0, 17, 1), 80, 288, out, 4), route.arch) > times * 20 * 80


@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_the_reference_in_all_surroundings(route: Route) -> None:
    """Sums of e5m2's and of bf16's products may round in float64, whose order is the BLAS library's: they are compared
    where little spreads."""
    draw = "exact" if "E5M2" in route.a + route.b or route.a == "BF16" else "loud"
    assert judged(drawn(route, (5, 0, 33, 1), 80, 288, "float32", 5, draw), "reference", route.arch) > 0


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


def multiplied(o: Options, config: Any) -> torch.Tensor:
    """The bits of a problem's rows by a kernel of Hopper's."""
    problem = Product(o, place_of("reference"))
    return bits_of(problem, torch.arange(problem.valid), config)


def bits_of(problem: Product, rows: torch.Tensor, config: Any, arch: str = "sm_90a") -> torch.Tensor:
    """Of these rows, of one group where they are not all."""
    sizes = problem.sizes if len(rows) == problem.valid else [len(rows)]
    offs, backend = group_offsets(sizes), backend_of(arch)
    a = products.operands.rows_alone(problem.a.plain, rows, range(problem.groups), offs)
    with driver_of(backend).configured(num_sms=8, checks=False):
        out = grouped_gemm(a, problem.b.plain, offs, out_dtype=problem.dtype, backend=backend, config=config)
    return bits(out[: int(offs[-1])])


@pytest.mark.slow
@pytest.mark.parametrize("route", ALL, ids=name_of)
def test_every_tile_that_is_chosen_gives_the_same_bits(route: Route) -> None:
    problem = Product(drawn(route, (2, 0, 17, 1), 144, 288, "float32", 6), place_of("reference"))
    a, b = problem.a.plain, problem.b.plain
    if isinstance(a, torch.Tensor):
        a[4] = -0.0
    else:
        a.data.view(torch.uint8)[4] = 0x88 if a.format.codes_per_byte == 2 else 0x80
    # Every product of row 4 by column 0 is a negative zero, and a stage past the end of K adds positive ones.
    b.data.view(torch.uint8)[:, 0] &= 0x77 if b.format.codes_per_byte == 2 else 0x7F
    every = torch.arange(problem.valid)
    first, *others = chosen_tiles(route, 144)
    expected = bits_of(problem, every, first, route.arch)
    for config in others:
        assert torch.equal(bits_of(problem, every, config, route.arch), expected), config


# --- bugs ------------------------------------------------------------------------------------------------


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of MXFP8 on Hopper by M / G: up to 32 rows a group the one with bf16 products."""
    right = sm90_mxfp8.prepare

    def prepare(driver: Any, a: Any, b: Any, offs: Any, out: Any, config: Any) -> Any:
        few = config is None and a.shape[0] <= 32 * b.shape[0]
        return (sm90_bf16.prepare if few else right)(driver, a, b, offs, out, config)

    monkeypatch.setattr(sm90_mxfp8, "prepare", prepare)


def special(sizes: tuple[int, ...] = SIZES, seed: int = 2) -> Options:
    return drawn(route_of(Sm90Mxfp8Config, *SPECIAL), sizes, N, K, "float32", seed)


@pytest.mark.parametrize("where", ["before a crowded group", "D of the quantizing call"])
def test_a_choice_by_the_rows_of_a_group_is_seen(where: str, by_rows: None, only: Callable[..., None]) -> None:
    only(where)
    with pytest.raises(AssertionError, match=rf"MXFP8 x MXFP8: {where}"):
        judged_emulated(special(), "sm_90a")


def test_a_quantizing_call_that_adds_up_differently_is_seen(
    only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm90_mxfp8_quant, "prepare", sm90_bf16_quant.prepare)
    only("codes")
    with pytest.raises(AssertionError, match="codes of the quantizing call"):
        judged_emulated(special(), "sm_90a")


def all_changes(o: Options) -> list[str]:
    return list(dict.fromkeys(c[0] for c in Product(o, replace(place_of("reference"), arch="sm_90a")).changes()))


def test_the_surroundings_are_these() -> None:
    assert all_changes(special()) == [
        "plain operands", "scales blocked", "scales blocked_groups", "in reverse", "before a crowded group", "padded",
        "before rows of no group", "rows alone", "a group alone", "as a dense product", "D of the quantizing call",
        "codes of the quantizing call",
    ]  # fmt: skip


@pytest.mark.parametrize("name", all_changes(special()))
def test_one_wrong_bit_of_one_row_is_seen_in_any_surroundings(
    name: str, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reference, whose products after the first have the last bit of a row's first element turned."""
    calls = 0

    def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*args, **options)
            if calls > 1:
                if isinstance(result, torch.Tensor):
                    result.view(torch.int32)[0, 0] ^= 1
                elif "d_format" in options:
                    result.row.data.view(torch.uint8)[0, 0] ^= 1
                else:
                    result["d_tensor"].view(torch.int32)[0, 0] ^= 1
            return result

        return call

    only(name)
    assert judged(special((5, 0, 4), 7), "reference", "sm_90a") > 0
    for function in ("grouped_gemm", "gemm", "grouped_gemm_quant"):
        monkeypatch.setattr(products, function, wrong(getattr(products, function)))
    with pytest.raises(AssertionError, match=rf"\d wrong: MXFP8 x MXFP8: {name}"):
        judged(special((5, 0, 4), 7), "reference", "sm_90a")


def test_rows_that_nobody_wrote_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "grouped_gemm", lambda a, b, offs, out, **options: out)
    with pytest.raises(AssertionError, match="were not written"):
        judged(special((5, 0, 4), 7), "reference", "sm_90a")


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_a_row_that_says_nothing_is_seen(
    value: float, only: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that agree since all of them are zeros, or infinite, are no evidence."""

    def wrong(a: Any, b: Any, offs: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
        right = grouped_gemm(a, b, offs, out=out, **options)
        right[2] = value
        return right

    only("nothing")
    monkeypatch.setattr(products, "grouped_gemm", wrong)
    with pytest.raises(AssertionError, match="MXFP8 x MXFP8: float64"):
        judged(special((5, 0, 4), 7), "reference", "sm_90a")


# --- on a GPU --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("route", routes_of("sm_90a"), ids=name_of)
def test_large_problems_on_a_gpu(route: Route, seed: int) -> None:
    assert judged(invariant_line(route, seed, factor=4), "cuda", "sm_90a") > 0


@pytest.mark.gpu
def test_the_check_of_verify() -> None:
    assert "elements" in PRODUCTS["batch invariance"]()


@pytest.mark.gpu
def test_a_choice_by_the_rows_of_a_group_is_seen_on_a_gpu(by_rows: None) -> None:
    with pytest.raises(AssertionError, match="before a crowded group"):
        judged(invariant_line(route_of(Sm90Mxfp8Config, *SPECIAL), 0), "cuda", "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 0, 40, 129, 9), (5,)], ids=str)
def test_torchs_calling_convention_computes_the_same_rows(sizes: tuple[int, ...]) -> None:
    from padless.compat.torch import scaled_grouped_mm

    o = drawn(route_of(Sm90Fp8Config, "FP8_BLOCK", "FP8_BLOCK"), sizes, 272, 400, "bfloat16", 8)
    problem = Product(o, place_of("cuda"))
    a, b, offs = problem.a.plain, problem.b.plain, problem.offs

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
