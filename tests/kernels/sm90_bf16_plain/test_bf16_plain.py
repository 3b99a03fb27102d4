"""Products of plain bf16 tensors: the kernel in the emulator bit for bit, the reference, and what a call refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import padless
from padless import Bf16PlainConfig, Sm90Fp8Config, gemm, grouped_gemm
from padless.emulator.fake_driver import emulated_driver
from padless.reference.bf16 import grouped_gemm_plain_reference
from padless.testing.bits import same_bits
from padless.testing.compile_ahead import Gpu, kernels_of
from padless.verify.bf16.fuzz import product_lines
from padless.verify.checks import Check
from padless.verify.fuzz import products
from padless.verify.fuzz.subjects import SUBJECTS
from padless.verify.lines import check_of
from padless.verify.run import jobs_of
from support.bf16_problems import VARIANTS, Plain, Shape, random_plain, run

EMULATOR, CALL = "emulator", "plain.grouped_gemm"
SHAPE = Shape((33, 0, 70, 1), 3, 24, 72)
STORED = Bf16PlainConfig(block_n=128, out_dtype=torch.float32)


def reference(plain: Plain, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    whole = grouped_gemm_plain_reference(plain.a, plain.b, plain.offs, out_dtype=dtype, accumulation="tensor_core")
    return whole[: max(end for _, end in plain.groups)]


def launched(plain: Plain, config: Bf16PlainConfig, **settings: Any) -> torch.Tensor:
    """The emulator's result; its reports are errors."""
    with emulated_driver().configured(**settings):
        return run(plain, config, EMULATOR)


# ---------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("n_major", [False, True], ids=["K", "N"])
@pytest.mark.parametrize(
    "config", [pytest.param(c, marks=() if i == 1 else pytest.mark.slow) for i, c in enumerate(VARIANTS)]
)
def test_bits_are_the_references(config: Bf16PlainConfig, n_major: bool) -> None:
    plain = random_plain(SHAPE, wide=n_major)
    wanted = reference(plain, config.out_dtype)
    assert same_bits(launched(plain.n_major() if n_major else plain, config), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_bits_are_the_references_in_random_problems(seed: int) -> None:
    """Sizes, N, K, values, kernel, order of the weights and schedule at random."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    sizes = (draw(1, 100), *(draw(0, 150) * draw(0, 2) for _ in range(draw(0, 4))))
    shape = Shape(sizes, draw(0, 20), 8 * draw(1, 40), 8 * draw(1, 30))
    plain = random_plain(shape, seed, wide=bool(draw(0, 2)))
    plain = plain.n_major() if draw(0, 2) else plain
    config = replace(VARIANTS[seed % len(VARIANTS)], num_stages=draw(2, 4), raster_m=draw(1, 5))
    out = launched(plain, config, seed=seed, num_sms=draw(1, 5))
    assert same_bits(out, reference(plain, config.out_dtype))


def test_other_rows_have_no_influence() -> None:
    """NaN in all rows but one group's; the group alone, by gemm, and a row of it alone."""
    plain = random_plain(SHAPE, 2)
    out = launched(plain, STORED)
    start, end = plain.groups[2]
    a = torch.full_like(plain.a, float("nan"))
    a[start:end] = plain.a[start:end]
    others = launched(replace(plain, a=a), STORED)
    assert same_bits(others[start:end], out[start:end])
    assert bool(others[:start].isnan().all())
    for first in (start, end - 1):
        alone = gemm(a[first:end], plain.b[2], out_dtype=torch.float32, backend=EMULATOR)
        assert same_bits(alone, out[first:end])


@pytest.mark.slow
def test_no_report_on_sixteen_schedules() -> None:
    plain = random_plain(Shape((130, 0, 40), 3, 136, 136), 6)
    wanted = None
    for seed in range(16):
        config = replace(
            VARIANTS[seed % len(VARIANTS)], num_stages=2 + seed % 2, out_dtype=torch.float32, piece_slabs=1
        )
        out = launched(plain, config, seed=seed, num_sms=1 + seed % 3, arithmetic="fast")
        wanted = out if wanted is None else wanted
        assert same_bits(out, wanted)


@pytest.mark.parametrize("offs", [[100, 10, -5, 70], [2**31 - 1] * 4])
def test_wrong_offsets_stay_inside(offs: list[int]) -> None:
    plain = replace(random_plain(SHAPE, 7), offs=torch.tensor(offs, dtype=torch.int32))
    assert same_bits(launched(plain, STORED), reference(plain))


@pytest.mark.slow
def test_more_groups_than_lanes_and_threads() -> None:
    plain = random_plain(Shape(tuple(int(g % 13 == 5) for g in range(390)), 0, 16, 24), 9)
    assert same_bits(launched(plain, STORED), reference(plain))


@pytest.fixture
def one_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of `padless verify` on one fixed problem of one kernel."""
    one = {"out": "float32", "tile": 2, "properties": ["near", "bits", "changes"], "wide": False}
    lines = [o for o in product_lines("sm_90a") if one.items() <= o.items() and len(o["sizes"]) == 4][:1]
    lines = [o | {"sizes": [33, 0, 70, 1], "n": 24, "k": 72} for o in lines]
    monkeypatch.setitem(SUBJECTS, CALL, replace(SUBJECTS[CALL], lines=lambda arch: lines))


@pytest.mark.slow
@pytest.mark.usefixtures("one_problem")
def test_the_check_of_a_gpu_passes_in_the_emulator() -> None:
    assert "elements" in check_of(CALL).on(EMULATOR)


@pytest.mark.usefixtures("one_problem")
def test_an_element_that_is_a_bit_off_fails_the_check_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
        valid = int(offs[-1])
        out[:valid] = reference(Plain(a, b, offs), out.dtype)
        if valid > 1:
            out[1, 2] = torch.nextafter(out[1, 2], torch.tensor(float("inf")))
        return out

    monkeypatch.setattr(products, "grouped_gemm", off)
    with pytest.raises(AssertionError, match=r"sizes=\[33, 0, 70, 1\].* the reference's bits"):
        check_of(CALL).on(EMULATOR)


@pytest.mark.slow
def test_all_kernels_of_the_checks_are_compiled_ahead() -> None:
    jobs, sanitized = jobs_of("sm_90a")
    assert f"padless.verify.lines {CALL}" in sanitized
    check = jobs["bf16 products"]
    assert isinstance(check, Check)
    asked, problems = kernels_of(check.rehearsals("sm_90a"), Gpu("sm_90a", 132))
    assert not problems
    wanted = {replace(c, n_major=order).prelude() for c in VARIANTS for order in (False, True)}
    assert wanted <= {kernel.prelude for kernel in asked}


# ------------------------------------------------------------------------------------------------ the call


@pytest.fixture
def plain() -> Plain:
    return random_plain(SHAPE)


def call(plain: Plain, **arguments: Any) -> torch.Tensor:
    return grouped_gemm(**{"a": plain.a, "b": plain.b, "offs": plain.offs, **arguments})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_the_cpu_it_is_the_reference(plain: Plain, dtype: torch.dtype) -> None:
    wanted = grouped_gemm_plain_reference(plain.a, plain.b, plain.offs, out_dtype=dtype)
    assert same_bits(call(plain, out_dtype=dtype)[:104], wanted[:104])
    assert same_bits(call(plain.n_major(), out_dtype=dtype)[:104], wanted[:104])
    assert same_bits(gemm(plain.a[:33], plain.b[0], out_dtype=dtype), wanted[:33])
    out = torch.full((107, 24), -7.5, dtype=dtype)
    assert call(plain, out=out, check_offs=True) is out
    assert same_bits(out[:104], wanted[:104])
    assert bool((out[104:] == -7.5).all())


def test_it_is_the_float64_product_within_rounding(plain: Plain) -> None:
    ours = call(plain, out_dtype=torch.float32).double()
    for group, (start, end) in enumerate(plain.groups):
        exact = plain.a[start:end].double() @ plain.b[group].double().t()
        assert (ours[start:end] - exact).norm() <= 2.0**-23 * exact.norm()


@pytest.mark.parametrize("backend", ["reference", EMULATOR])
def test_without_rows_or_groups_nothing_is_written(plain: Plain, backend: str) -> None:
    zeros = torch.zeros_like(plain.offs)
    assert call(plain, a=plain.a[:0], offs=zeros, backend=backend).shape == (0, 24)
    out = torch.full((107, 24), -7.5, dtype=torch.bfloat16)
    call(plain, b=plain.b[:0], offs=plain.offs[:0], out=out, backend=backend)
    assert bool((out == -7.5).all())


BAD: dict[str, tuple[Callable[[Plain], dict[str, Any]], str]] = {
    "dtype": (lambda p: {"b": p.b.half()}, r"b is \(4, 24, 72\) torch.float16 .* both bfloat16"),
    "rank of a": (lambda p: {"a": p.a[None]}, r"a must have rank 2, \(M, K\)"),
    "rank of b": (lambda p: {"b": p.b[0]}, r"b must have rank 3, \(G, N, K\)"),
    "K differs": (lambda p: {"a": p.a[:, :64]}, "K must be the same"),
    "K": (lambda p: {"a": p.a[:, :68], "b": p.b[..., :68]}, "K is 68; it must be a positive multiple of 8"),
    "N": (lambda p: {"b": p.b[:, :20]}, "N is 20; it must be a multiple of 8 for torch.bfloat16 output"),
    "order of a": (lambda p: {"a": p.a.t().contiguous().t()}, "a has strides"),
    "order of b": (lambda p: {"b": p.b.repeat(1, 2, 2)[:, ::2, ::2]}, "b has strides .* K or N must be contiguous"),
    "no offs": (lambda p: {"offs": None}, "offs is None and b has . groups; pass the end row"),
    "entries of offs": (lambda p: {"offs": p.offs[:3]}, "offs has 3 entries and b 4 groups"),
    "values of offs": (lambda p: {"offs": p.offs + 100, "check_offs": True}, "nor pass M = 107"),
    "config": (lambda p: {"config": Sm90Fp8Config}, "config is a Sm90Fp8Config; plain tensors take a Bf16PlainConfig"),
    "out": (lambda p: {"out": torch.empty(24, 107)}, r"out must be \(M, N\) = \(107, 24\) on cpu"),
    "out_dtype": (lambda p: {"out_dtype": torch.float64}, "out_dtype is torch.float64; allowed"),
    "address": (
        lambda p: {"a": torch.zeros(107, 80, dtype=torch.bfloat16)[:, 1:73], "backend": EMULATOR},
        "a is at address .* 16-byte aligned",
    ),
    "gradients": (lambda p: {"b": p.b.clone().requires_grad_()}, "b requires grad"),
    "architecture": (lambda p: {"backend": "emulator:sm_100a"}, "plain bfloat16 tensors have a kernel for sm_90a"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_not_allowed_is_named(plain: Plain, what: str) -> None:
    change, message = BAD[what]
    with pytest.raises(ValueError, match=message):
        call(plain, **change(plain))


def test_the_dense_product_takes_two_dimensions(plain: Plain) -> None:
    with pytest.raises(ValueError, match=r"b must have rank 2, \(N, K\)"):
        gemm(plain.a, plain.b)


def test_the_public_name() -> None:
    assert "Bf16PlainConfig" in padless.__all__
