"""Sm90Fp8Config and select_config: what a kernel is compiled for, and that M never is."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from padless.formats import OUT_DTYPES
from padless.kernels.config import MAX_GROUPS
from padless.kernels.sm90_fp8.config import SCALE_MAJORS, STORES, Problem, Sm90Fp8Config, fit_config, select_config

PROBLEMS = st.builds(
    Problem,
    m=st.integers(0, 2**30 - 1),
    n=st.integers(1, 4096).map(lambda x: 8 * x),
    k=st.integers(1, 1024).map(lambda x: 16 * x),
    num_groups=st.integers(1, MAX_GROUPS),
    out_dtype=st.sampled_from(list(OUT_DTYPES)),
    num_sms=st.sampled_from((2, 7, 78, 132, 144)),
)

# A legal value other than the default, for every field.
OTHER_VALUES: dict[str, object] = {
    "block_m": 64,
    "block_n": 192,
    "num_stages": 3,
    "cluster_n": 2,
    "raster_m": 5,
    "store": "pool",
    "scales": "k",
    "scale_window_k_blocks": 16,
    "max_groups": 77,
    "out_dtype": torch.float16,
    "few_rows": True,
}


def test_every_field_is_tried() -> None:
    assert set(OTHER_VALUES) == {field.name for field in dataclasses.fields(Sm90Fp8Config)}


def test_m_is_no_part_of_a_kernel() -> None:
    names = {field.name for field in dataclasses.fields(Sm90Fp8Config)}
    assert not names & {"m", "M", "rows", "offs"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_m", 0),
        ("block_m", 96),
        ("block_m", 512),
        ("block_n", 32),
        ("block_n", 256),  # spills: see test_kernels_compile.py
        ("scale_window_k_blocks", -1),
        ("num_stages", 1),
        ("num_stages", -1),
        ("num_stages", 13),
        ("cluster_n", 0),
        ("cluster_n", 4),
        ("raster_m", 0),
        ("store", "tma"),
        ("scales", "m"),
        ("max_groups", 0),
        ("max_groups", MAX_GROUPS + 1),
        ("out_dtype", torch.float64),
        ("out_dtype", torch.float8_e4m3fn),
    ],
)
def test_a_value_that_is_not_allowed_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match="allowed") as error:
        Sm90Fp8Config(**{field: value})
    assert f"Sm90Fp8Config.{field} is {value!r}" in str(error.value)


def test_the_largest_tile_is_not_wider_than_its_registers() -> None:
    Sm90Fp8Config(block_m=256, block_n=128)
    with pytest.raises(ValueError, match=r"Sm90Fp8Config.block_n is 192; allowed: at most 128 when block_m is 256"):
        Sm90Fp8Config(block_m=256, block_n=192)


def test_a_config_is_frozen_and_hashable() -> None:
    config = Sm90Fp8Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_m = 64  # type: ignore[misc]
    assert {config: 1}[Sm90Fp8Config()] == 1


@pytest.mark.parametrize("field", OTHER_VALUES)
def test_every_field_reaches_the_device_code(field: str) -> None:
    base = Sm90Fp8Config(scales="k", scale_window_k_blocks=8) if field == "scale_window_k_blocks" else Sm90Fp8Config()
    change = {field: OTHER_VALUES[field]}
    if field == "few_rows":  # another kernel
        base = Sm90Fp8Config(block_m=64)
        assert dataclasses.replace(base, few_rows=True).source != base.source
        return
    if field == "scales":
        base = dataclasses.replace(base, scale_window_k_blocks=8)
    assert dataclasses.replace(base, **change).prelude() != base.prelude()


def test_the_constants_have_the_fields_values() -> None:
    config = Sm90Fp8Config(**OTHER_VALUES | {"few_rows": False})
    prelude = config.prelude()
    for field in ("block_m", "block_n", "num_stages", "cluster_n", "raster_m", "max_groups"):
        assert f"constexpr int {field.upper()} = {getattr(config, field)};" in prelude
    assert "SCALE_WINDOW_K_BLOCKS = 16;" in prelude
    assert "#define STORE_IS_POOL 1" in prelude
    assert "#define SCALES_ARE_K_MAJOR 1" in prelude
    assert "#define OUT_TYPE OUT_F16" in prelude
    other = Sm90Fp8Config(store="ragged", scales="mn", out_dtype=torch.float32).prelude()
    assert "#define STORE_IS_POOL 0" in other
    assert "#define SCALES_ARE_K_MAJOR 0" in other
    assert "#define OUT_TYPE OUT_F32" in other


def test_the_constants_are_those_the_kernel_asks_for() -> None:
    """No constant that the device code never reads."""
    from padless.runtime.jit import sources

    text = "\n".join(sources().values())
    for name in re.findall(r"(?:constexpr int|#define) (\w+)", Sm90Fp8Config().prelude()):
        assert re.search(rf"\b{name}\b", text), name


# --- select_config -----------------------------------------------------------------------------------------


@given(problem=PROBLEMS)
def test_the_chosen_kernel_serves_the_problem(problem: Problem) -> None:
    config = select_config(problem)
    assert config.out_dtype == problem.out_dtype
    assert config.max_groups >= problem.num_groups
    assert config.store in STORES
    assert config.scales in SCALE_MAJORS
    # As many groups have room as when a caller names the same tile.
    assert fit_config(config, problem) == config


@given(problem=PROBLEMS)
def test_the_choice_is_a_function_of_the_problem(problem: Problem) -> None:
    assert select_config(problem) == select_config(dataclasses.replace(problem))


def test_few_kernels_serve_every_problem() -> None:
    """A server must not compile at every request: over all N, K, M and G there are not many kernels."""
    shapes = itertools.product((0, 1, 129, 1000, 8192, 65536), range(8, 8200, 88), (16, 400, 4096, 7168), (1, 8, 300))
    chosen = {select_config(Problem(m, n, k, g, dtype)) for m, n, k, g in shapes for dtype in OUT_DTYPES}
    assert {config.out_dtype for config in chosen} == set(OUT_DTYPES)
    assert len(chosen) <= 40


def test_m_moves_the_choice_among_few_kernels() -> None:
    chosen = {select_config(Problem(m, 4096, 7168, 8)) for m in itertools.chain(range(600), range(600, 10**5, 97))}
    assert len(chosen) <= 5


def test_one_multiprocessor_is_enough() -> None:
    """The emulator can be told to have one."""
    assert select_config(Problem(300, 256, 512, 3, num_sms=1)).cluster_n == 1


def test_select_config_looks_at_nothing_else() -> None:
    assert list(inspect.signature(select_config).parameters) == ["problem"]


def test_more_work_takes_larger_tiles() -> None:
    """Not the numbers of the cost model, but what any sensible one says."""
    small, large = select_config(Problem(64, 256, 4096, 4)), select_config(Problem(65536, 8192, 8192, 4))
    assert small.block_m * small.block_n * small.cluster_n < large.block_m * large.block_n * large.cluster_n


@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (2, 128), (3, 64), (4, 64), (5, 64), (6, 128), (16, 128)])
def test_a_long_k_takes_narrow_tiles_for_a_fuller_last_round(tokens: int, columns: int) -> None:
    """Mixtral's second product: 8 experts of 32 tiles of 128 columns, for 132 multiprocessors.

    One token has 64 tiles, two 104 on average: one round. Three to five have 140 to 189: a second round that is at most
    half full. Of 64 columns the last of three or four rounds is nearly full. From six on both leave as much idle.
    """
    config = select_config(Problem(2 * tokens, 4096, 14336, 8))
    assert (config.block_n, config.few_rows) == (columns, False)
    short = select_config(Problem(2 * tokens, 4096, 7168, 8))
    assert short.block_n == 128 or tokens == 1, "a tile of a short K ends soon"


def test_narrow_tiles_are_for_few_rows() -> None:
    assert select_config(Problem(8 * 4096, 4096, 14336, 8)).block_n > 64


# --- a config of the caller's ------------------------------------------------------------------------------


@given(problem=PROBLEMS, block_m=st.sampled_from((64, 128, 256)), store=st.sampled_from(STORES))
def test_a_callers_config_keeps_its_tile(problem: Problem, block_m: int, store: str) -> None:
    config = Sm90Fp8Config(block_m=block_m, block_n=64, num_stages=3, raster_m=5, store=store, cluster_n=2)
    fitted = fit_config(config, problem)
    for field in ("block_m", "block_n", "num_stages", "raster_m", "store", "cluster_n", "scales"):
        assert getattr(fitted, field) == getattr(config, field)
    assert fitted.out_dtype == problem.out_dtype
    assert fitted.max_groups >= problem.num_groups


@given(k=st.integers(1, 1024).map(lambda x: 16 * x), block_m=st.sampled_from((64, 128)))
def test_the_window_of_row_major_scales_has_room_for_every_k_block(k: int, block_m: int) -> None:
    fitted = fit_config(Sm90Fp8Config(block_m=block_m, scales="k"), Problem(100, 128, k, 2))
    room = fitted.scale_window_k_blocks
    assert room * 128 >= k
    assert room % 8 == 0
    assert (room - 8) * 128 < k


def test_a_window_too_large_for_shared_memory_is_named() -> None:
    with pytest.raises(ValueError, match=r"scales='k' and K is 16400.*use scales='mn' or a smaller block_m"):
        fit_config(Sm90Fp8Config(scales="k"), Problem(100, 128, 16400, 2))
    assert fit_config(Sm90Fp8Config(scales="mn"), Problem(100, 128, 16400, 2)).scale_window_k_blocks == 0
