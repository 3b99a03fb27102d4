"""NVFP4's operands of training: scales of 16 x 16, groups padded and transformed, and rounding without bias."""

from __future__ import annotations

import pytest
import torch

import padless
from padless import NVFP4, dequantize, quantize
from padless.autograd import grouped_linear, weight_operands
from padless.nn import RECIPES, nvfp4
from padless.reference.gemm import group_rows
from support.training_layer import sqnr

SIZES = [127, 0, 129, 1, 16, 40]
OFFS = padless.group_offsets(SIZES)
M, N, K = sum(SIZES) + 23, 80, 48


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_a_weight_and_its_transpose_are_one() -> None:
    """Which blocks of 1 x 16 would not be."""
    w = normal(3, N, K) * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
    made = nvfp4.weight(w)
    assert torch.equal(nvfp4.weight(w.mT.contiguous()), made.mT)
    operands = weight_operands(w, RECIPES["nvfp4"])
    assert operands.dgrad is operands.forward
    assert torch.equal(operands.forward, made)
    for got, want in zip(made, w, strict=True):
        assert sqnr(got, want) >= 18.0
    by_rows = [dequantize(quantize(t, NVFP4, kind="weight")) for t in (w, w.mT.contiguous())]
    assert not torch.equal(by_rows[1], by_rows[0].mT)


def test_a_weight_has_few_values_in_a_block() -> None:
    """Those of e2m1 times one scale, of which 6 is the largest; the scale is an e4m3 number times the global one."""
    w = normal(2, N, K)
    made = nvfp4.weight(w).double()
    scale = made.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)).abs().amax((2, 4), keepdim=True) / 6
    codes = made.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)) / scale
    allowed = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    assert (codes.abs().unsqueeze(-1) - allowed).abs().amin(-1).max() < 2.0**-5  # the largest is 6 but for rounding
    shared = scale.flatten(1) / (w.abs().amax((1, 2)).double() / 2688)[:, None]
    assert ((shared / shared.to(torch.float8_e4m3fn).double()) - 1).abs().max() < 2.0**-7


@pytest.mark.parametrize("by_chance", [False, True])
def test_columns_have_the_product_of_their_origins(by_chance: bool) -> None:
    """Each group alone, and none of the rows of no group, which hold NaN; padding adds nothing."""
    dy, x = normal(M, N), normal(M, K, seed=1)
    dy[OFFS[-1] :], x[OFFS[-1] :] = float("nan"), float("nan")
    ends = nvfp4.padded_offs(OFFS)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [128, 128, 272, 288, 304, 352]
    a, b = (nvfp4.columns(t, OFFS, by_chance) for t in (dy, x))
    assert a.shape == (M + 15 * len(SIZES) + 7 & ~15, N)
    assert (a[352:] == 0).all()
    for (start, end), (s, e) in zip(group_rows(OFFS, M), group_rows(ends, len(a)), strict=True):
        if start < end:
            want = dy[start:end].double().T @ x[start:end].double()
            assert sqnr(a[s:e].double().T @ b[s:e].double(), want) >= (13.0 if by_chance else 15.0)


def test_columns_are_transformed() -> None:
    """By sixteen tokens, from the group's first on; the matrix written out."""
    x = normal(M, K)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    matrix = hadamard / 4 * torch.tensor([-1.0 if nvfp4.SIGNS >> i & 1 else 1.0 for i in range(16)])
    got = nvfp4.columns(x, OFFS, False)
    for start, to in ((0, 0), (127, 128), (273, 304)):
        assert sqnr(got[to : to + 16], matrix @ x[start : start + 16].double()) >= 18.0


def test_gradients_are_rounded_without_bias() -> None:
    """The mean over calls with gradients that differ in one value comes closer to the truth; to nearest it stays."""
    dy, count = normal(M, N).bfloat16(), 64
    dy[OFFS[-1] :] = float("nan")
    means = {}
    for by_chance in (False, True):
        total = torch.zeros(int(OFFS[-1]), N, dtype=torch.float64)
        for i in range(count):
            dy[0, 0] = i / count
            total += nvfp4.rows(dy, OFFS, by_chance)[: OFFS[-1]]
        means[by_chance] = sqnr((total / count)[1:], dy[1 : OFFS[-1]])
    assert means[True] > means[False] + 10, means


def test_a_step_repeats_and_chances_do_not() -> None:
    """The same gradient has the same bits, another one other chances."""
    x, w = normal(M, K).requires_grad_(), (normal(len(SIZES), N, K) / K**0.5).requires_grad_()
    dy = normal(M, N)
    found = []
    for t in (dy, dy, 2 * dy):
        y = grouped_linear(x, w, OFFS, "nvfp4")
        found.append(torch.autograd.grad(y, (x, w), t))
    for once, again, doubled in zip(*found, strict=True):
        assert torch.equal(once, again)
        assert not torch.equal(2 * once, doubled)
