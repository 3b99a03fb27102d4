"""`quantize_weight_both` on the CPU: a weight, and its transpose with the same codes and scales."""

from __future__ import annotations

import pytest
import torch

import padless
from padless import FP8_BLOCK, BlockScaledTensor, dequantize, quantize, quantize_weight_both
from support import triton_cases
from support.triton_cases import awkward, bits

SHAPES = ((1, 1), (130, 144), (16, 300), (2, 127, 257), (3, 128, 128), (0, 16, 32))


def judge(weight: BlockScaledTensor, transposed: BlockScaledTensor, w: torch.Tensor) -> None:
    """Raise AssertionError unless these are quantize's weight and its transpose, element by element."""
    triton_cases.assert_same(weight, quantize(w, FP8_BLOCK, kind="weight"))
    assert transposed.data.shape == weight.data.mT.shape
    assert transposed.data.is_contiguous()
    assert transposed.scale.is_contiguous()
    assert torch.equal(bits(transposed.data), bits(weight.data.view(torch.uint8).mT)), "codes"
    assert torch.equal(bits(transposed.scale), bits(weight.scale.mT)), "scales"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = awkward(shape, dtype, 31)
    judge(*quantize_weight_both(w), w)


def test_the_transpose_is_the_quantized_transpose() -> None:
    """Nothing is quantized a second time, and nothing would be gained: quantizing the transpose gives the same."""
    w = awkward((2, 144, 270), torch.bfloat16, 32)
    triton_cases.assert_same(quantize_weight_both(w)[1], quantize(w.mT, FP8_BLOCK, kind="weight"))
    weight, transposed = quantize_weight_both(torch.randn(144, 270))
    assert torch.equal(dequantize(weight).t(), dequantize(transposed))


def test_strides() -> None:
    wide = awkward((2, 40, 320), torch.bfloat16, 33)
    for w in (wide[:, :, :144], wide.mT, wide[..., ::2], wide[1]):
        judge(*quantize_weight_both(w), w.contiguous())


def test_the_judge_sees_planted_errors() -> None:
    w = torch.randn(2, 130, 150, generator=torch.Generator().manual_seed(34))
    weight, transposed = quantize_weight_both(w)
    judge(weight, transposed, w)
    codes, scale = transposed.data.view(torch.uint8), transposed.scale
    tail = codes.clone()
    tail[1, -1, -1] ^= 1
    straight = scale.mT.contiguous().view(scale.shape)  # the grid of blocks not transposed
    for data, s in ((tail, scale), (codes.flip(0), scale), (codes, straight)):
        with pytest.raises(AssertionError):
            judge(weight, BlockScaledTensor(data.view(torch.float8_e4m3fn), s, FP8_BLOCK), w)


def test_operator() -> None:
    for shape in ((40, 144), (2, 20, 130), (1, 1)):
        torch.library.opcheck(torch.ops.padless.quantize_weight_both.default, (torch.randn(shape).bfloat16(),))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend: str) -> None:
    def step(w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, transposed = quantize_weight_both(w * 2)
        return (weight.data.view(torch.uint8), weight.scale, transposed.data.view(torch.uint8), transposed.scale)

    w = awkward((2, 40, 144), torch.bfloat16, 35)
    for got, want in zip(torch.compile(step, fullgraph=True, backend=backend)(w), step(w), strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (None, "w must be a torch.Tensor"),
        (torch.zeros(4, 4, dtype=torch.float64), "w must be bfloat16"),
        (torch.zeros(4), r"w must be \(N, K\)"),
        (torch.zeros(2, 0, 4), "at least 1"),
    ],
)
def test_errors(w: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_weight_both(w)


def test_public_name() -> None:
    assert padless.quantize_weight_both is quantize_weight_both
