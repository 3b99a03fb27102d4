"""The operands of single wgmma instructions are what they are said to be, and the emulated side multiplies them."""

from __future__ import annotations

import pytest
import torch

from padless.emulator.fake_driver import emulated_driver
from padless.verify.emulator import tensor_core as verify_arithmetic
from padless.verify.emulator.tensor_core import KINDS_OF_DATA, PAIRS, TYPES, problems_of, run_wgmma


def in_rows(d: torch.Tensor) -> torch.Tensor:
    """(problems, 128, 4) accumulators as (problems, 64, 8): thread t of warp w holds row 16 w + t / 4 (+ 8), columns
    2 (t % 4) and the next."""
    out = torch.empty((d.shape[0], 64, 8))
    for thread in range(128):
        row, column = 16 * (thread // 32) + thread % 32 // 4, 2 * (thread % 4)
        for i in range(4):
            out[:, row + 8 * (i // 2), column + i % 2] = d[:, thread, i]
    return out


def in_values(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Core matrices back to (problems, rows, K) float64."""
    problems, blocks = t.shape[:2]
    rows = t.transpose(2, 3).contiguous().view(problems, 8 * blocks, 32)
    return rows.view(dtype).double()


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_small_integers_multiply_exactly(pair: tuple[str, str], generator: torch.Generator) -> None:
    """All different operands, all sums exact in the narrowest arithmetic: a wrong place anywhere shows."""
    k = 32 // TYPES[pair[0]].itemsize
    a = torch.randint(-2, 3, (3, 64, k), generator=generator).float().to(TYPES[pair[0]])
    b = torch.randint(-2, 3, (3, 8, k), generator=generator).float().to(TYPES[pair[1]])
    c = torch.randint(-8, 9, (3, 128, 4), generator=generator).float()
    d = run_wgmma(
        emulated_driver(), pair, verify_arithmetic.in_core_matrices(a), verify_arithmetic.in_core_matrices(b), c
    )
    expected = in_rows(c).double() + a.double() @ b.double().transpose(1, 2)
    assert torch.equal(in_rows(d).double(), expected)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_operands_are_as_hostile_as_they_say(pair: tuple[str, str]) -> None:
    for data, (a, b, c) in problems_of(pair, 4, seed=1):
        values = [in_values(t, TYPES[kind]) for t, kind in zip((a, b), pair, strict=True)]
        finite = all(bool(v.isfinite().all()) for v in (*values, c))
        assert finite == (data != "specials"), data
        products = values[0][:, :, None, :] * values[1][:, None, :, :]
        if data == "zero times large beside tiny":
            large = values[1].abs().amax(1, keepdim=True) > 1
            assert bool((values[0][large.expand_as(values[0])] == 0).all())
            assert 0.2 < large.double().mean() < 0.8
        if data == "any bits":
            nonzero = products[products != 0].abs().log2()
            assert float(nonzero.max() - nonzero.min()) > 20, "the exponents are close together"


def test_the_same_seed_draws_the_same_operands() -> None:
    once, again = (list(problems_of(("bf16", "bf16"), 2, seed=5)) for _ in range(2))
    assert [name for name, _ in once] == list(KINDS_OF_DATA)
    for (_, x), (_, y) in zip(once, again, strict=True):
        assert all(torch.equal(s.view(torch.uint8), t.view(torch.uint8)) for s, t in zip(x, y, strict=True))


def test_an_accumulator_of_another_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison of one pair with itself, and with the last bit of one sum changed."""

    def computed(driver: object, pair: object, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        found = c.clone()
        if driver == "wrong":
            found.view(torch.int32)[-1, -1, -1] ^= 1
        return found

    monkeypatch.setattr(verify_arithmetic, "PAIRS", PAIRS[:1])
    monkeypatch.setattr(verify_arithmetic, "run_wgmma", computed)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(verify_arithmetic, "cuda_driver", lambda: "right")
    assert "bit for bit the same" in verify_arithmetic.check_tensor_core(2)
    monkeypatch.setattr(verify_arithmetic, "cuda_driver", lambda: "wrong")
    with pytest.raises(AssertionError, match=r"1 of \d+ differ, first at \(1, 127, 3\)"):
        verify_arithmetic.check_tensor_core(2)
