"""`padless.autograd.grouped_linear` on a CPU: gradients in float64, in bfloat16 and in FP8, and rows of no group."""

from __future__ import annotations

import pytest
import torch

import padless
from padless import FP8_BLOCK, MXFP8, NVFP4, dequantize, quantize
from padless.autograd import grouped_linear, weight_operands
from padless.nn import RECIPES, Recipe
from support.training_layer import BF16, sqnr

K, N = 160, 288
SIZES = [127, 0, 129, 1, 40]
LEAST_DB = {FP8_BLOCK: 27.0, MXFP8: 27.0, NVFP4: 14.0, BF16: 47.0}
OFFS = padless.group_offsets(SIZES)
M = sum(SIZES) + 23


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and the gradient of y; rows of no group hold NaN."""
    x, w, dy = normal(M, K), normal(len(SIZES), N, K) / K**0.5, normal(M, N)
    x[OFFS[-1] :], dy[OFFS[-1] :] = float("nan"), float("nan")
    return x.to(dtype), w.to(dtype), dy.to(dtype)


def step(recipe: Recipe | str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    x, w, dy = problem(dtype)
    x.requires_grad_(), w.requires_grad_()
    y = grouped_linear(x, w, OFFS, recipe)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad, "w": w.grad}


def truth() -> dict[str, torch.Tensor]:
    x, w, dy = (t.double() for t in problem())
    found = {"y": torch.zeros(M, N), "x": torch.zeros(M, K), "w": torch.zeros(len(SIZES), N, K)}
    found = {name: t.double() for name, t in found.items()}
    start = 0
    for g, end in enumerate(OFFS.tolist()):
        found["y"][start:end] = x[start:end] @ w[g].T
        found["x"][start:end] = dy[start:end] @ w[g]
        found["w"][g] = dy[start:end].T @ x[start:end]
        start = end
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_against_float64(name: str) -> None:
    """27 dB for outputs and 26 dB for gradients are what torchao's tests ask of its blockwise FP8."""
    got, recipe = step(name), RECIPES[name]
    formats = {"y": recipe.forward, "x": recipe.dgrad, "w": recipe.wgrad}
    for what, want in truth().items():
        assert sqnr(got[what], want) >= LEAST_DB[formats[what]], (what, sqnr(got[what], want))


@pytest.mark.parametrize("name", RECIPES)
def test_rows_of_no_group_are_zeros(name: str) -> None:
    """Whatever they held: here NaN, in x and in dy."""
    got = step(name)
    assert (got["y"][OFFS[-1] :] == 0).all()
    assert (got["x"][OFFS[-1] :] == 0).all()
    assert (got["w"][1] == 0).all(), "a group without rows"
    assert all(t.isfinite().all() for t in got.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_of_bfloat16(name: str) -> None:
    got = step(name, BF16)
    for what, want in truth().items():
        assert got[what].dtype == BF16
        assert sqnr(got[what], want) >= LEAST_DB[NVFP4 if name == "nvfp4" else FP8_BLOCK] - 1, what


def test_gradients_of_fp8_are_products_of_codes() -> None:
    """Row by row: what the codes decode to, multiplied in float64."""
    x, w, dy = problem()
    got = step("fp8_1d1d")
    start = 0
    for g, end in enumerate(OFFS.tolist()):
        if start < end:
            rows = slice(start, end)
            weight = dequantize(quantize(w[g], FP8_BLOCK, kind="weight")).double()
            a, d = (dequantize(quantize(t[rows], FP8_BLOCK)).double() for t in (x, dy))
            columns = [dequantize(quantize(t[rows].T.contiguous(), FP8_BLOCK)).double() for t in (dy, x)]
            assert sqnr(got["y"][rows], a @ weight.T) > 50
            assert sqnr(got["x"][rows], d @ weight) > 50
            assert sqnr(got["w"][g], columns[0] @ columns[1].T) > 120
        start = end


def test_gradcheck_in_float64() -> None:
    """The seam of plain products, by finite differences."""
    offs = padless.group_offsets([3, 0, 6])
    x = normal(11, 16).double().requires_grad_()
    w = normal(3, 32, 16).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_linear(a, b, offs, "bf16"), (x, w))


def test_operands_may_be_given() -> None:
    x, w, _ = problem()
    want = grouped_linear(x, w, OFFS)
    assert torch.equal(grouped_linear(x, w, OFFS, "fp8", weight_operands(w, RECIPES["fp8"])), want)


def test_gradients_that_are_no_matrices_of_memory() -> None:
    """dy of a sum is one number, expanded."""
    x, w, _ = problem()
    x.requires_grad_()
    grouped_linear(x, w, OFFS).sum().backward()
    got, x.grad = x.grad, None
    grouped_linear(x, w, OFFS).backward(torch.ones(M, N))
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": torch.zeros(5, 8)}, r"weight must be \(num_groups, N, K\) with K = 8"),
        ({"x": torch.zeros(5, K).double()}, "x must be a matrix"),
        ({"weight": torch.zeros(5, 24, K)}, "positive multiples of 16"),
        ({"offs": torch.zeros(4, dtype=torch.int32)}, "offs has 4 groups and weight 5"),
        ({"offs": torch.zeros(5)}, "offs must be a 1-D int32"),
        ({"recipe": "int8"}, "recipe is 'int8'"),
    ],
)
def test_bad_arguments_are_refused(changed: dict[str, object], message: str) -> None:
    x, w, _ = problem()
    with pytest.raises(ValueError, match=message):
        grouped_linear(**({"x": x, "weight": w, "offs": OFFS, "recipe": "fp8"} | changed))


def test_operands_that_do_not_fit_are_refused() -> None:
    """With N = K those of no backward pass would multiply, by the weight that is not transposed."""
    x, w, offs = normal(8, 64).requires_grad_(), normal(1, 64, 64), padless.group_offsets([8])
    operands = weight_operands(w, RECIPES["fp8"], backward=False)
    with pytest.raises(ValueError, match="operands was made with backward=False"):
        grouped_linear(x, w, offs, "fp8", operands)
    assert torch.equal(weight_operands(w, "fp8").forward.scale, operands.forward.scale)
    for recipe in ("bf16", "mxfp8"):
        with pytest.raises(ValueError, match=r"operands\.forward is FP8_BLOCK and the recipe's"):
            grouped_linear(x, w, offs, recipe, operands)
    with torch.no_grad():
        assert torch.equal(grouped_linear(x, w, offs, "fp8", operands), grouped_linear(x, w, offs, "fp8"))
