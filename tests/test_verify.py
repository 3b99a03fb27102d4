"""`padless verify`: its checks run here one by one on a GPU; its judges are tried on planted errors everywhere."""

from __future__ import annotations

import itertools

import pytest
import torch

from padless.verify import run_verify
from padless.verify_checks import CHECKS, ROW_ERROR_LIMIT, row_errors
from padless.verify_emulator import emulate, random_problem


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str) -> None:
    assert CHECKS[name]()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_in_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"on a GPU.*no CUDA GPU"):
        run_verify()


def test_the_judge_sees_one_lost_row_that_a_global_ratio_forgives(generator: torch.Generator) -> None:
    expected = torch.randn(4096, 64, generator=generator, dtype=torch.float64)
    out = expected.clone()
    out[1234] = 0
    x, y = out.flatten(), expected.flatten()
    assert 1 - 2 * (x @ y) / (x @ x + y @ y) < 1e-3  # the ratio in common use: passes
    errors = row_errors(out, expected)
    assert int((errors > ROW_ERROR_LIMIT[torch.bfloat16]).sum()) == 1


def test_the_judge_sees_a_lost_block_of_k(generator: torch.Generator) -> None:
    a, b = (torch.randn(8, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    whole, lost = a @ b.t(), a[:, 128:] @ b[:, 128:].t()
    assert bool((row_errors(lost, whole) > ROW_ERROR_LIMIT[torch.bfloat16]).all())


def test_the_emulated_side_of_the_comparison_is_a_function_of_the_seed_and_right() -> None:
    """The same seed gives the same problem in another process; and what is compared is the product."""
    seed = 7  # normal values: a float64 product of the same codes is a fair judge
    a, b, offs, _, dtype = random_problem(seed)
    again = random_problem(seed)
    assert torch.equal(a.data.view(torch.uint8), again[0].data.view(torch.uint8))
    assert torch.equal(b.scale, again[1].scale)
    out = emulate(seed).view(dtype)
    rows_of_b = b.scale.repeat_interleave(128, 1)[:, : b.shape[1]].repeat_interleave(128, 2)[
        ..., : b.shape[2]
    ]
    weights = b.data.double() * rows_of_b
    values = a.data.double() * a.scale.repeat_interleave(128, 1)[:, : a.shape[1]]
    ends = [0, *offs.tolist()]
    expected = torch.cat([values[s:e] @ weights[g].t() for g, (s, e) in enumerate(itertools.pairwise(ends))])
    assert out.shape == expected.shape
    assert out.numel() > 0
    assert float(row_errors(out, expected).max()) < ROW_ERROR_LIMIT[dtype]
