"""NVFP4's operands of training: scales of 16 x 16, groups padded and transformed, and rounding without bias."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import padless
from padless import NVFP4, BlockScaledTensor, dequantize, quantize
from padless.autograd import grouped_linear, weight_operands
from padless.nn import RECIPES, nvfp4
from padless.nn.operators import _bf16_wgrad
from padless.nn.quantizers import nvfp4_columns, nvfp4_rows
from padless.ops.grouped_gemm_wgrad_nvfp4 import grouped_gemm_wgrad_nvfp4
from padless.quantization.nvfp4_random import quantize_nvfp4_stochastic, random_hadamard
from padless.reference.gemm import group_rows
from support.training_layer import sqnr

SIZES = [127, 0, 129, 1, 16, 40]
OFFS = padless.group_offsets(SIZES)
M, N, K = sum(SIZES) + 23, 96, 64


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def test_a_weight_and_its_transpose_are_one() -> None:
    """Which blocks of 1 x 16 would not be."""
    w = normal(3, N, K) * torch.tensor([1e-3, 1.0, 300.0])[:, None, None]
    operands = weight_operands(w, RECIPES["nvfp4"])
    made, transposed = dequantize(operands.forward), dequantize(operands.dgrad)
    assert torch.equal(transposed, made.mT)
    for got, want in zip(made, w, strict=True):
        assert sqnr(got, want) >= 18.0
    by_rows = [dequantize(quantize(t, NVFP4, kind="weight")) for t in (w, w.mT.contiguous())]
    assert not torch.equal(by_rows[1], by_rows[0].mT)
    alone = weight_operands(w, RECIPES["nvfp4"], backward=False)
    assert alone.dgrad is alone.forward
    assert torch.equal(dequantize(alone.forward), made)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_weight_that_is_not_finite_stays_so(value: float) -> None:
    """NaN in the block of 16 x 16, both ways, and the others' bits: an optimizer's overflow is to be seen."""
    w = normal(3, N, K)
    want = dequantize(weight_operands(w, RECIPES["nvfp4"]).forward)
    w[1, 17, 33] = value
    operands = weight_operands(w, RECIPES["nvfp4"])
    made, transposed = dequantize(operands.forward), dequantize(operands.dgrad)
    inside = torch.zeros_like(w, dtype=torch.bool)
    inside[1, 16:32, 32:48] = True
    assert torch.equal(made.isnan(), inside)
    assert torch.equal(transposed.isnan(), inside.mT)
    assert torch.equal(made[[0, 2]], want[[0, 2]])


def test_a_weight_has_few_values_in_a_block() -> None:
    """Those of e2m1 times one scale, of which 6 is the largest; the scale is an e4m3 number times the global one."""
    w = normal(2, N, K)
    made = dequantize(weight_operands(w, RECIPES["nvfp4"]).forward).double()
    scale = made.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)).abs().amax((2, 4), keepdim=True) / 6
    codes = made.unflatten(2, (-1, 16)).unflatten(1, (-1, 16)) / scale
    allowed = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    assert (codes.abs().unsqueeze(-1) - allowed).abs().amin(-1).max() < 2.0**-20  # the largest is 6
    shared = scale.flatten(1) / (w.abs().amax((1, 2)).double() / 2688)[:, None]
    assert ((shared / shared.to(torch.float8_e4m3fn).double()) - 1).abs().max() < 2.0**-20


@pytest.mark.parametrize("by_chance", [False, True])
def test_columns_have_the_product_of_their_origins(by_chance: bool) -> None:
    """Each group alone, and none of the rows of no group, which hold NaN; padding adds nothing."""
    dy, x = normal(M, N), normal(M, K, seed=1)
    dy[OFFS[-1] :], x[OFFS[-1] :] = float("nan"), float("nan")
    ends = nvfp4.padded_offs(OFFS)
    assert ends.dtype == torch.int32
    assert ends.tolist() == [128, 128, 320, 384, 448, 512]
    operands = [nvfp4_columns(t, OFFS, by_chance) for t in (dy, x)]
    assert operands[0].logical_shape == (N, M + 63 * len(SIZES) + 63 & ~63)
    a, b = (dequantize(t) for t in operands)
    assert (a[:, 512:] == 0).all()
    for (start, end), (s, e) in zip(group_rows(OFFS, M), group_rows(ends, a.shape[1]), strict=True):
        if start < end:
            want = dy[start:end].double().T @ x[start:end].double()
            assert sqnr(a[:, s:e].double() @ b[:, s:e].double().T, want) >= (13.0 if by_chance else 15.0)


def test_columns_are_transformed() -> None:
    """By sixteen tokens, from the group's first on; the matrix written out."""
    x = normal(M, K)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.kron(hadamard, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    matrix = hadamard / 4 * torch.tensor([-1.0 if nvfp4.SIGNS >> i & 1 else 1.0 for i in range(16)])
    got = dequantize(nvfp4_columns(x, OFFS, False)).T
    for start, to in ((0, 0), (127, 128), (273, 448)):
        assert sqnr(got[to : to + 16], matrix @ x[start : start + 16].double()) >= 18.0


def test_elsewhere_the_values_are_multiplied() -> None:
    """The twin of a GPU without the kernel: products of values in bfloat16, which has them all, and factors behind."""
    dy, x = (nvfp4_columns(normal(M, n, seed=n), OFFS, True) for n in (N, K))
    ends = nvfp4.padded_offs(OFFS)
    exact = grouped_gemm_wgrad_nvfp4(dy, x, ends, out_dtype=torch.float32)
    plain = [replace(t, global_scale=None) for t in (dy, x)]
    values = [dequantize(t, torch.bfloat16) for t in plain]
    assert all(torch.equal(value.float(), dequantize(t)) for value, t in zip(values, plain, strict=True))
    got = _bf16_wgrad(*(t.T.contiguous() for t in values), ends, torch.float32) * (dy.global_scale * x.global_scale)
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


def saturated(x: torch.Tensor) -> torch.Tensor:
    """x (M, N) with what a scale that was rounded down sends above 6 codes at 6, float64: what is left without bias."""
    t = quantize(x, NVFP4)
    largest = 6 * t.scale.double() * t.global_scale.double()
    largest = largest.repeat_interleave(16, 1)
    return x.double().clamp(-largest, largest)


@pytest.mark.parametrize("kind", ["x", "w"])
def test_gradients_have_no_bias(kind: str) -> None:
    """Means over 100 seeds are off float64's products of the unrounded gradient by what their spread explains.

    z, a mean's error over its standard deviation, has 1 for its mean square: 1.02 where the deviation comes from 100
    draws. With rounding to nearest, whose draws are all one, the error is as large as a single draw's.
    """
    count, g = 100, torch.Generator().manual_seed(11)
    offs = torch.tensor([40, 70], dtype=torch.int32)
    dy, x = torch.randn(70, 64, generator=g).bfloat16(), torch.randn(70, 32, generator=g).bfloat16()
    weight = dequantize(weight_operands(torch.randn(1, 64, 32, generator=g), RECIPES["nvfp4"]).dgrad)[0].double()
    columns = dequantize(nvfp4_columns(x, offs, False), torch.float64)[:, :64]

    def gradient(values: torch.Tensor) -> torch.Tensor:
        """Of the input, for all rows; of the weight, for the first group's tokens."""
        return values.double() @ (weight.T if kind == "x" else columns.T)

    def rounded(seed: int | None) -> torch.Tensor:
        def quantizer(t: torch.Tensor, *, seed: torch.Tensor, by: int | None = seed) -> BlockScaledTensor:
            return quantize(t, NVFP4) if by is None else quantize_nvfp4_stochastic(t, seed=seed + by)

        with patch.object(nvfp4, "quantize_nvfp4_stochastic", quantizer):
            made = (nvfp4_rows if kind == "x" else nvfp4_columns)(dy, offs, True)
        return gradient(dequantize(made) if kind == "x" else dequantize(made)[:, :64])

    unrounded = dy if kind == "x" else random_hadamard(padded(dy, offs).T, nvfp4.SIGNS)
    exact = gradient(saturated(unrounded)[:, :64])
    found = torch.stack([rounded(seed) for seed in range(count)])
    unit = found.std(0) / count**0.5
    assert ((found.mean(0) - exact) / unit).square().mean() < 1.2
    assert ((found.mean(0) - exact) / unit).abs().max() < 6
    assert ((rounded(None) - exact) / unit).square().mean() > 20


def padded(t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Rows of groups that begin at `nvfp4.padded_offs`."""
    ends = nvfp4.padded_offs(offs)
    whole = torch.zeros(int(ends[-1]), t.shape[1])
    for (start, end), (to, _) in zip(group_rows(offs, len(t)), group_rows(ends, len(whole)), strict=True):
        whole[to : to + end - start] = t[start:end]
    return whole


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
