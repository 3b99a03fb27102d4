"""The problems of products that ``padless verify`` runs: every pair and kernel is among them, and errors are found.

Right values pass every check by the reference; a wrong row, element or bit, and a write past the groups, does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.formats import BlockScaledTensor
from padless.kernels.sm90_bf16.config import Sm90Bf16Config
from padless.kernels.table import ROUTES, Route
from padless.ops.grouped_gemm import grouped_gemm
from padless.testing.bits import same_bits
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify import run as verify
from padless.verify.fuzz import product_lines, products
from padless.verify.fuzz.place import Place, place_of
from padless.verify.fuzz.problem import DTYPES, Options
from padless.verify.fuzz.product_lines import random_line
from padless.verify.fuzz.products import Product
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import PRODUCTS, small_of
from padless.verify.tiles import config_of, configs_of, routes_of

pytestmark = pytest.mark.usefixtures("one_thread")

BLACKWELL = "emulator:sm_100a"


def lines_of(check: str, arch: str = "sm_90a") -> list[Options]:
    return list(product_lines.CHECKS[check][1](arch))


def route_of(config_class: type, a: str, b: str) -> Route:
    return next(p for p in routes_of("sm_90a") if (p.config_class, p.a, p.b) == (config_class, a, b))


# --- what is drawn ---------------------------------------------------------------------------------------


def test_every_grouped_route_is_verified() -> None:
    listed = {p for p in ROUTES if p.operation == "grouped_gemm"}
    assert {p for arch in ("sm_90a", "sm_100a") for p in routes_of(arch)} == listed
    assert routes_of("sm_103a") == routes_of("sm_100a")
    for arch in ("sm_90a", "sm_100a"):
        pairs = {(p.a, p.b, p.module) for p in routes_of(arch)}
        own = {("FP8_BLOCK", "FP8_BLOCK", "sm90_fp8")}  # of which the other checks are
        assert {(o["a"], o["b"], o["module"]) for o in lines_of("formats", arch)} == pairs - own
        emulated = {(o["a"], o["b"], o["module"]) for o in product_lines.EMULATED["emulator agrees on formats"](arch)}
        assert emulated == pairs - own
        assert {(o["a"], o["b"], o["module"]) for o in lines_of("batch invariance", arch)} == pairs


def test_the_draws_reach_all_configurations_layouts_and_output_types() -> None:
    route = route_of(Sm90Bf16Config, "NVFP4", "NVFP4")
    lines = [random_line(route, seed) for seed in range(150)]
    place = replace(place_of("reference"), arch="sm_90a")
    assert {config_of(place, o) for o in lines} == set(configs_of(route))
    assert {o["out"] for o in lines} == set(DTYPES)
    assert {o["a_layout"] for o in lines} == {"plain", "blocked", "blocked_groups"}
    assert {o["b_layout"] for o in lines} == {"plain", "blocked"}
    assert any(o["past"] for o in lines), "rows past the last group"
    assert random_line(route, 7) == lines[7]


@pytest.mark.parametrize("drawn", ["anywhere", "wide", "wide normal", "normal", "loud"])
@pytest.mark.parametrize("name", ["FP8_BLOCK", "NVFP4", "MXFP8"])
def test_operands_are_a_function_of_the_problem(name: str, drawn: str) -> None:
    """Random, and the same in another process: nothing but the options goes into them."""
    route = next(p for p in routes_of("sm_90a") if (p.a, p.b) == (name, name))
    o = product_lines._line(route, (5, 0, 7), 48, 160, drawn=drawn, seed=3, past=2)
    if drawn.startswith("wide") and name != "FP8_BLOCK":
        pytest.skip("FP8_BLOCK's alone")
    torch.manual_seed(1)
    first = Product(o, place_of("reference"))
    torch.manual_seed(2)
    again, other = Product(o, place_of("reference")), Product(o | {"seed": 4}, place_of("reference"))
    for operand in ("a", "b"):
        one, two, three = (getattr(p, operand).plain for p in (first, again, other))
        assert isinstance(one, BlockScaledTensor)
        assert same_bits(one.data, two.data)
        assert same_bits(one.scale, two.scale)
        assert not same_bits(one.data, three.data)
        assert bool(getattr(first, operand).values[: first.valid].isfinite().all())


def test_small_launches_are_of_every_kernel_and_way_through_it() -> None:
    hopper, blackwell = (list(product_lines.small(arch)) for arch in ("sm_90a", "sm_100a"))
    assert {o["module"] for o in hopper} == {p.module for p in routes_of("sm_90a")}
    assert {(o["a"], o["b"]) for o in blackwell} == {(p.a, p.b) for p in routes_of("sm_100a")}
    of_bf16 = [(o["a"], o["b"], o["tile"] == 0) for o in hopper if o["module"] == "sm90_bf16"]
    four = (("NVFP4", "NVFP4"), ("MXFP8", "MXFP8"), ("BF16", "MXFP4"), ("FP8_BLOCK", "NVFP4"))
    assert sorted(of_bf16) == sorted((*pair, chosen) for pair in four for chosen in (True, False))
    fp8 = [o for o in hopper if o["module"] == "sm90_fp8"]
    ways = {(tile, x) for tile in range(1, len(configs_of(product_lines._FP8))) for x in ("plain", "k")}
    assert ways <= {(o["tile"], o["a_layout"]) for o in fp8 if o["out"] == "bfloat16"}
    sources = [rehearsed(arch) for arch in ("sm_100a", "sm_90a")]
    assert all(any(kernel in source for source in sources[0]) for kernel in ("sm100_dense", "sm100_grouped"))
    assert not any("sm100" in source for source in sources[1])


def rehearsed(arch: str) -> set[str]:
    """Sources of what the small launches ask for."""
    check = small_of("grouped_gemm", "gemm", "grouped_gemm_list")
    kernels, problems = kernels_of(check.rehearsals(arch), Gpu(arch, 148))
    assert not problems
    return {kernel.source for kernel in kernels}


# --- what is found ---------------------------------------------------------------------------------------


def found_in(o: Options, place: Place | None = None, call: str = "grouped_gemm") -> list[str]:
    place = replace(place_of("reference"), arch="sm_90a") if place is None else place
    SUBJECTS[call].judge(o, place)
    return [name for names in place.judge.verdicts().values() for name in names]


@pytest.mark.parametrize("name", ["streams and threads", "graph replay", "dense", "formats"])
def test_a_check_finds_nothing_wrong_with_the_reference(name: str) -> None:
    assert "elements" in PRODUCTS[name].on("reference", "sm_90a")


def mistaken(mistake: str) -> Callable[..., torch.Tensor]:
    """The reference's product, with a mistake."""

    def call(a: Any, b: Any, offs: torch.Tensor, *, out: torch.Tensor, config: Any, **_: Any) -> torch.Tensor:
        grouped_gemm(a, b, offs, out=out, backend="reference")
        valid = int(offs[-1])
        if mistake == "row":
            out[valid // 2] = 0
        if mistake == "element":
            out[valid // 2, 0] *= 1.5
        if mistake == "past":
            out[valid] = 0
        if mistake == "tile" and getattr(config, "block_m", 0) == 64:
            out.view(torch.int16)[0, 0] ^= 1
        if mistake == "layout" and a.scale.is_contiguous():
            out.view(torch.int16)[0, 0] ^= 1
        return out

    return call


FORMATS = random_line(route_of(Sm90Bf16Config, "MXFP4", "MXFP4"), 1, "near") | {"sizes": [9, 0, 5], "past": 2}
TILES = product_lines._line(routes_of("sm_90a")[0], [5, 0, 7], 136, 272, "tiles")


@pytest.mark.parametrize(
    ("mistake", "o", "said"),
    [
        ("row", FORMATS, "float64: rows"),
        ("element", FORMATS, "float64"),
        ("past", FORMATS, "fences: something was written outside of the valid rows"),
        ("tile", TILES, "Sm90Fp8Config(block_m=64"),
        ("layout", TILES, "Sm90Fp8Config(block_m=128"),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 8 else "",
)
def test_a_mistake_is_found(mistake: str, o: Options, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(o) == []
    monkeypatch.setattr(products, "grouped_gemm", mistaken(mistake))
    assert any(name.startswith(said) for name in found_in(o)), found_in(o)


@pytest.mark.parametrize(("property", "said"), [("repeats", "moved"), ("threads", "thread"), ("replay", "a replay")])
def test_a_result_that_moves_is_found(property: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of every fourth result is another one."""
    count, right = 0, products.grouped_gemm

    def moving(*args: Any, **how: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        out = right(*args, **how)
        if count % 4 == 0:
            out.view(torch.int16)[0, 0] ^= 1
        return out

    o = product_lines._line(routes_of("sm_90a")[0], [5, 9, 7], 136, 272, property)
    assert found_in(o) == []
    monkeypatch.setattr(products, "grouped_gemm", moving)
    assert any(name.startswith(said) for name in found_in(o) + found_in(o))


# --- wrong offsets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("o", lines_of("wrong offsets stay inside")[::4], ids=lambda o: str(o["hostile"]))
def test_wrong_offsets_write_the_rows_of_ascending_ones(o: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    place, right = place_of("emulator"), products.grouped_gemm
    with emulated_driver("sm_90a").configured(num_sms=4, checks=False, arithmetic="fast"):
        assert found_in(o, place) == []

    def written_past(a: Any, b: Any, offs: Any, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
        return out[: max(0, max(min(end, 256) for end in o["hostile"]) - 1)].fill_(1.0)

    monkeypatch.setattr(products, "grouped_gemm", written_past)
    reach = max(0, max(min(end, 256) for end in o["hostile"]))
    assert (found_in(o, place) != []) == (reach > 0)
    monkeypatch.setattr(products, "grouped_gemm", right)


# --- Blackwell's dense kernel and lists ------------------------------------------------------------------


@pytest.fixture
def four_multiprocessors() -> Iterator[None]:
    with emulated_driver("sm_100a").configured(num_sms=4, checks=False, arithmetic="fast"):
        yield


@pytest.mark.parametrize("count", [2, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("check", ["dense MXFP8", "lists of problems"])
def test_products_of_integers_are_exact(check: str, count: int, four_multiprocessors: None) -> None:
    call = product_lines.CHECKS[check][0]
    for o in lines_of(check, "sm_100a")[:count]:
        assert found_in(o, place_of(BLACKWELL), call) == []


@pytest.mark.parametrize("check", ["dense MXFP8", "lists of problems"])
def test_one_wrong_bit_is_seen(check: str, four_multiprocessors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = product_lines.CHECKS[check][0]
    right = getattr(products, call)

    def wrong(*args: Any, **how: Any) -> Any:
        made = right(*args, **how)
        last = made if isinstance(made, torch.Tensor) else made[-1]
        last.view({2: torch.int16, 4: torch.int32}[last.element_size()])[-1, -1] ^= 1
        return made

    monkeypatch.setattr(products, call, wrong)
    o = lines_of(check, "sm_100a")[0]
    assert any("bits" in name for name in found_in(o, place_of(BLACKWELL), call))


def test_verify_runs_them_on_blackwell_alone() -> None:
    names = {"dense MXFP8", "lists of problems"}
    for arch in ("sm_100a", "sm_103a"):
        assert names <= set(verify.jobs_of(arch)[0])
        assert not names & set(verify.jobs_of(arch, ["quantizers agree"])[0])
    assert not names & set(verify.jobs_of("sm_90a")[0])
