"""The GPU's checks of bf16 weight gradients, run by the emulator on problems of a few tiles, and with wrong results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from padless.kernels.sm90_bf16_wgrad.config import Bf16WgradConfig
from padless.testing.compile_ahead import listing
from padless.verify.bf16 import problems
from padless.verify.bf16 import wgrad as verify_bf16_wgrad
from padless.verify.bf16.problems import SHAPES, VARIANTS, RowsShape
from padless.verify.bf16.wgrad import check_accumulation, check_bits, check_independence, check_repeats
from padless.verify.rehearsals import rehearsals_of
from padless.verify.run import jobs_of

SMALL = (RowsShape((5, 0, 17), 3, 16, 24),)
ON_CPU: dict[str, Any] = {"device": "cpu", "backend": "emulator"}
FEW = (Bf16WgradConfig(block_n=128, out_dtype=torch.float32),)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_bf16_wgrad, "VARIANTS", FEW)
    monkeypatch.setattr(verify_bf16_wgrad, "_REPEATED", SMALL[0])
    monkeypatch.setattr(verify_bf16_wgrad, "_REPEATS", 2)
    batches = tuple(replace(shape, n=16, k=24) for shape in verify_bf16_wgrad._MICROBATCHES)
    monkeypatch.setattr(verify_bf16_wgrad, "_MICROBATCHES", batches)


@pytest.mark.usefixtures("few")
def test_they_pass_in_the_emulator() -> None:
    assert check_bits(SMALL, **ON_CPU) == "2 results, 2304 elements, bit for bit the reference's"
    assert check_repeats(**ON_CPU) == "1 kernels, 2 calls each"


@pytest.mark.usefixtures("few")
@pytest.mark.slow
def test_independence_and_accumulation_pass_in_the_emulator() -> None:
    assert check_independence(SMALL, **ON_CPU).startswith("3 changes")
    assert check_accumulation(**ON_CPU) == "1 kernels accumulate in float32"


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("check", [check_bits, check_independence])
def test_an_element_that_is_a_bit_off_fails(monkeypatch: pytest.MonkeyPatch, check: Any) -> None:
    calls = []

    def off(*arguments: Any) -> torch.Tensor:
        out = problems.run(*arguments).clone()
        calls.append(out)
        if check is check_bits or len(calls) == 3:
            out[0, 1, 2] = torch.nextafter(out[0, 1, 2], torch.tensor(float("inf")))
        return out

    monkeypatch.setattr(verify_bf16_wgrad, "run", off)
    with pytest.raises(AssertionError, match=r"1 of 1152 elements|differs from its padded groups"):
        check(SMALL, **ON_CPU)


@pytest.mark.usefixtures("few")
def test_an_empty_group_that_is_touched_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def touching(dy: Any, x: Any, offs: Any, out: torch.Tensor, accumulate: bool, **_: Any) -> torch.Tensor:
        result = verify_bf16_wgrad._reference(problems.Rows(dy, x, offs))
        out.copy_(out + result if accumulate else result)  # adds zeros where there is no row
        return out

    monkeypatch.setattr(verify_bf16_wgrad, "grouped_gemm_wgrad", touching)
    monkeypatch.setattr(problems, "grouped_gemm_wgrad", touching)
    with pytest.raises(AssertionError, match="without rows"):
        check_accumulation(device="cpu")


def test_shapes_have_what_is_hard() -> None:
    sizes = {size for shape in SHAPES for size in shape.sizes}
    assert {0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129} <= sizes
    assert any(shape.past for shape in SHAPES)
    assert any(shape.n % 16 for shape in SHAPES)
    assert all(len({sum(s.sizes) + s.past, s.n, s.k}) == 3 for s in SHAPES)
    assert {(c.block_n, c.out_dtype) for c in VARIANTS} == {
        (n, dtype) for n in (128, 256) for dtype in (torch.bfloat16, torch.float32)
    }


def test_hopper_alone_runs_them() -> None:
    jobs, sanitized = jobs_of("sm_90a")
    assert "bf16 weight gradients" in jobs
    assert "padless.verify.bf16.wgrad" in sanitized
    jobs, _ = jobs_of("sm_100a")
    assert "bf16 weight gradients" not in jobs


def test_all_kernels_are_compiled_ahead() -> None:
    (rehearsal,) = rehearsals_of("sm_90a", ["bf16 weight gradients"], ())
    with listing("sm_90a", "cubin", 132) as asked:
        rehearsal.calls()
    assert {config.prelude() for config in VARIANTS} <= {kernel.prelude for kernel in asked}
    assert {kernel.source for kernel in asked} == {"sm90_bf16_wgrad/sm90_bf16_wgrad.cu"}
