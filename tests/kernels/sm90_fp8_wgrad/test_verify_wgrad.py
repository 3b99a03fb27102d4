"""The GPU's checks of weight gradients, run by the emulator on problems of a few tiles, and with wrong results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.kernels.sm90_fp8_wgrad.config import WgradConfig
from padless.testing.compile_ahead import listing
from padless.verify import wgrad as verify_wgrad
from padless.verify.problems import wgrad as verify_wgrad_problems
from padless.verify.problems.wgrad import ADDING, SHAPES, VARIANTS, WgradShape, random_operands, sizes_of
from padless.verify.rehearsals import rehearsals_of
from padless.verify.run import jobs_of
from padless.verify.wgrad import check_accumulation, check_bits, check_independence, check_repeats

SMALL = (WgradShape((5, 0, 33), 3, 16, 48, (32, 128)),)
ON_CPU: dict[str, Any] = {"device": "cpu", "backend": "emulator"}
FEW = (WgradConfig(block_m=128, out_dtype=torch.float32),)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_wgrad, "VARIANTS", FEW)
    monkeypatch.setattr(verify_wgrad, "ADDING", ())
    monkeypatch.setattr(verify_wgrad, "_REPEATED", SMALL[0])
    monkeypatch.setattr(verify_wgrad, "_REPEATS", 2)
    batches = tuple(replace(shape, n=16, k=48) for shape in verify_wgrad._MICROBATCHES)
    monkeypatch.setattr(verify_wgrad, "_MICROBATCHES", batches)


@pytest.mark.usefixtures("few")
def test_they_pass_in_the_emulator() -> None:
    assert check_bits(SMALL, **ON_CPU) == "2 results, 4608 elements, bit for bit the reference's"
    assert check_independence(SMALL, **ON_CPU).startswith("3 changes")
    assert check_repeats(**ON_CPU) == "1 kernels, 2 calls each"


@pytest.mark.usefixtures("few")
def test_accumulation_passes_in_the_emulator() -> None:
    assert check_accumulation(**ON_CPU) == "1 kernels accumulate in float32, subnormal numbers too"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("check", [check_bits, check_independence])
def test_an_element_that_is_a_bit_off_fails(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    calls = []

    def off(*arguments: Any) -> torch.Tensor:
        out = verify_wgrad_problems.run(*arguments).clone()
        calls.append(out)
        if check is check_bits or len(calls) == 3:
            out[0, 1, 2] = torch.nextafter(out[0, 1, 2], torch.tensor(float("inf")))
        return out

    monkeypatch.setattr(verify_wgrad, "run", off)
    with pytest.raises(AssertionError, match=r"1 of 2304 elements|padded to 128 tokens"):
        check(SMALL, **ON_CPU)


@pytest.mark.usefixtures("few")
def test_an_empty_group_that_is_touched_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def touching(dy: Any, x: Any, out: torch.Tensor, accumulate: bool, **_: Any) -> torch.Tensor:
        result = verify_wgrad._reference(dy, x)
        out.copy_(out + result if accumulate else result)  # adds zeros where there is no token
        return out

    monkeypatch.setattr(verify_wgrad, "grouped_gemm_wgrad", touching)
    monkeypatch.setattr(verify_wgrad_problems, "grouped_gemm_wgrad", touching)
    with pytest.raises(AssertionError, match="without tokens"):
        check_accumulation(device="cpu")


def test_shapes_have_what_is_hard() -> None:
    sizes = {size for shape in SHAPES for size in shape.sizes}
    assert {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129} <= sizes
    assert {shape.alignments for shape in SHAPES} == {(32, 32), (32, 128), (128, 32), (128, 128)}
    assert any(shape.past for shape in SHAPES)
    assert all(len({sum(s.sizes) + s.past, s.n, s.k}) == 3 for s in SHAPES)
    assert {(c.mode, c.block_m, c.out_dtype) for c in VARIANTS} == {
        *((mode, m, torch.bfloat16) for mode in ("1d2d", "1d1d") for m in (128, 256)),
        ("1d2d", 128, torch.float32),
        ("1d2d", 256, torch.float32),
        ("1d1d", 128, torch.float32),
    }
    dy, x = random_operands(SHAPES[4], "1d2d")
    assert sizes_of(dy) == sizes_of(x) == list(SHAPES[4].sizes)


def test_hopper_alone_runs_them() -> None:
    jobs, sanitized = jobs_of("sm_90a")
    assert "weight gradients" in jobs
    assert "padless.verify.wgrad" in sanitized
    jobs, sanitized = jobs_of("sm_100a")
    assert "weight gradients" not in jobs
    assert sanitized == ["padless.verify.small"]


def test_all_kernels_are_compiled_ahead() -> None:
    (rehearsal,) = rehearsals_of("sm_90a", ["weight gradients"], ())
    with listing("sm_90a", "cubin", 132) as asked:
        rehearsal.calls()
    texts = {kernel.prelude for kernel in asked}
    assert {config.prelude() for config in (*VARIANTS, *ADDING)} <= texts
    assert {kernel.source for kernel in asked} == {"sm90_fp8_wgrad/sm90_fp8_wgrad.cu"}
