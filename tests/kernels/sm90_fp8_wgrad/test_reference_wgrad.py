"""The reference of weight gradients: against float64 written another way, and against the emulator's tensor core."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from padless.emulator.units import arithmetic
from padless.layouts import GroupedColumns
from padless.reference.wgrad import ACCUMULATIONS, grouped_gemm_wgrad_reference, multiply_accumulate
from padless.testing.bits import same_bits
from padless.testing.gradients import WgradShape, padded, permuted, poisoned, random_operands

SHAPE = WgradShape((5, 0, 130, 1, 256), 3, 80, 144, (32, 128))
MODES = ("1d2d", "1d1d")


def rows_of(operand: GroupedColumns, group: int, tokens: int) -> torch.Tensor:
    """(tokens, features) float64 values of one group, token by token."""
    rows = []
    for t in range(tokens):
        codes = operand.data[:, int(operand.starts[group]) + t].double()
        scale = operand.scale[int(operand.block_starts[group]) + t // 128].double()
        rows.append(codes * scale.repeat_interleave(operand.block[0])[: codes.numel()])
    return torch.stack(rows) if rows else torch.zeros((0, operand.features), dtype=torch.float64)


def exact(dy: GroupedColumns, x: GroupedColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and the sum of its terms' magnitudes."""
    ends = [0, *dy.offs.tolist()]
    products, terms = [], []
    for group, (start, end) in enumerate(itertools.pairwise(ends)):
        a, b = (rows_of(operand, group, end - start) for operand in (dy, x))
        products.append(a.T @ b)
        terms.append(a.abs().T @ b.abs())
    return torch.stack(products), torch.stack(terms)


@pytest.mark.parametrize("mode", MODES)
def test_float64_is_the_product_of_the_groups_rows(mode: str) -> None:
    dy, x = random_operands(SHAPE, mode)
    product, terms = exact(dy, x)
    out = grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float64, accumulation="float64")
    assert ((out - product).abs() <= 1e-13 * terms).all()
    assert (out[1] == 0).all()
    assert (out[0] != 0).any()


# Of each element, against the sum of its terms' magnitudes: 256 fused additions of float32; and on top the tensor core's
# 33 terms, each cut to 2^-13 of the largest, four times in a block.
@pytest.mark.parametrize(("accumulation", "limit"), [("fp8_block", 2.0**-21), ("tensor_core", 2.0**-12 * 4)])
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_arithmetic_is_near(mode: str, accumulation: str, limit: float) -> None:
    dy, x = random_operands(SHAPE, mode, 1)
    product, terms = exact(dy, x)
    out = grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32, accumulation=accumulation)
    off = (out.double() - product).abs()
    assert (off <= limit * terms).all()
    by_group = off.sum((1, 2)) / terms.sum((1, 2)).clamp(min=1e-300)
    assert (by_group[[0, 2, 3, 4]] > 0).any()


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_others_takes_part(mode: str, accumulation: str) -> None:
    dy, x = random_operands(SHAPE, mode, 2)
    out = grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32, accumulation=accumulation)
    others = grouped_gemm_wgrad_reference(poisoned(dy), poisoned(x), out_dtype=torch.float32, accumulation=accumulation)
    assert same_bits(out, others)
    order = (3, 2, 4, 0, 1)
    moved = grouped_gemm_wgrad_reference(
        permuted(dy, order), permuted(x, order), out_dtype=torch.float32, accumulation=accumulation
    )
    assert same_bits(moved[1:], out[list(order)])
    whole = grouped_gemm_wgrad_reference(padded(dy), padded(x), out_dtype=torch.float32, accumulation=accumulation)
    assert same_bits(whole, out)


def test_accumulating_adds_and_leaves_empty_groups_alone() -> None:
    dy, x = random_operands(SHAPE, "1d2d", 3)
    stored = grouped_gemm_wgrad_reference(dy, x, out_dtype=torch.float32)
    before = torch.randn(stored.shape, generator=torch.Generator().manual_seed(1))
    before[1] = float("nan")
    out = grouped_gemm_wgrad_reference(dy, x, out=before.clone(), accumulate=True)
    assert same_bits(out[1], before[1])
    kept = [0, 2, 3, 4]
    assert same_bits(out[kept], before[kept] + stored[kept])


@pytest.mark.parametrize("kind", ["any", "normal", "small", "nan"])
def test_the_tensor_core_is_the_emulators(kind: str) -> None:
    """Two independent implementations of one instruction, on codes that are hard for it."""
    generator = torch.Generator().manual_seed(7)
    shape = {"a": (48, 32), "b": (40, 32)}
    codes = {}
    for name, size in shape.items():
        code = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        if kind == "normal":
            code = torch.randn(size, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        elif kind == "small":  # subnormals and zeros beside the largest
            code = torch.where(torch.rand(size, generator=generator) < 0.8, code & 0x87, code)
        if kind != "nan":
            code[(code & 0x7F) == 0x7F] = 0
        codes[name] = code
    c = torch.zeros((48, 40))
    a, b = (codes[name].view(torch.float8_e4m3fn) for name in ("a", "b"))
    x, y = (arithmetic.decode_operand(codes[name].numpy(), "e4m3") for name in ("a", "b"))
    for _ in range(3):  # what it left is what it adds to
        wanted = arithmetic.dot_product_add(x, y, c.numpy(), arithmetic.HOPPER_FP8, mode="truncate", result="f32")
        c = multiply_accumulate(a, b, c)
        assert np.array_equal(np.isnan(wanted), c.isnan().numpy())
        assert np.array_equal(wanted[~np.isnan(wanted)], c.numpy()[~np.isnan(wanted)])
    assert bool(c.isnan().any()) == (kind == "nan")


def test_what_is_not_allowed() -> None:
    dy, x = random_operands(SHAPE, "1d2d")
    with pytest.raises(ValueError, match="accumulation is 'exact'; allowed"):
        grouped_gemm_wgrad_reference(dy, x, accumulation="exact")
    with pytest.raises(ValueError, match="accumulate needs out"):
        grouped_gemm_wgrad_reference(dy, x, accumulate=True)
