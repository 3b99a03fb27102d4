"""Plain one-byte scales of weights: rows that start on 16 bytes, which kernels read where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import padless
from padless import layouts
from padless.checkpoints import concatenate_rows, from_gpt_oss, from_torch, stack_experts
from padless.formats import FORMATS, BlockScaledFormat, BlockScaledTensor, ceil_div, round_up

ONE_BYTE = [fmt for fmt in FORMATS if fmt.scale_dtype.itemsize == 1]
SHAPES = [(3, 40, 32), (3, 40, 96), (1, 24, 160), (2, 8, 512), (2, 1, 544), (2, 40, 2880), (40, 96), (1, 96), (24, 512)]


def weight(fmt: BlockScaledFormat, shape: tuple[int, ...]) -> BlockScaledTensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return padless.quantize(torch.randn(shape, generator=generator), fmt, kind="weight")


def contiguous(t: BlockScaledTensor) -> BlockScaledTensor:
    scale = t.scale.view(torch.uint8).contiguous().view(t.scale.dtype)
    return BlockScaledTensor(t.data, scale, t.format, t.global_scale)


def assert_rows_are_padded(t: BlockScaledTensor) -> None:
    """Strides as documented, and zeros where no scale is."""
    *batch, n, k = t.logical_shape
    columns = ceil_div(k, t.format.block_k)
    ld = round_up(columns, 16)
    assert tuple(t.scale.shape) == (*batch, n, columns)
    wanted = (n * ld, ld, 1)[-t.scale.dim() :]
    assert all(s == w or size == 1 for s, w, size in zip(t.scale.stride(), wanted, t.scale.shape, strict=True))
    assert t.scale.data_ptr() % 16 == 0
    if t.scale.numel() > columns:  # there is nothing behind one row
        whole = t.scale.view(torch.uint8).as_strided((*batch, n, ld), (n * ld, ld, 1)[-t.scale.dim() :])
        assert not whole[..., columns:].any()
    assert t.is_weight


@pytest.mark.parametrize("fmt", ONE_BYTE, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_weights_have_rows_of_whole_16_bytes(fmt: BlockScaledFormat, shape: tuple[int, ...]) -> None:
    t = weight(fmt, shape)
    assert_rows_are_padded(t)
    assert torch.equal(padless.dequantize(t), padless.dequantize(contiguous(t)))
    flat = padless.quantize(
        torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).reshape(-1, shape[-1]),
        fmt,
        global_scale=None if t.global_scale is None else t.global_scale.reshape(-1)[0],
    )
    if t.global_scale is None or t.global_scale.numel() == 1:  # the same bytes as an activation's
        assert torch.equal(t.scale.view(torch.uint8).reshape(-1), flat.scale.view(torch.uint8).reshape(-1))
    assert flat.scale.is_contiguous()


@pytest.mark.parametrize("fmt", ONE_BYTE, ids=lambda fmt: fmt.name)
def test_copies_and_views_keep_the_rows(fmt: BlockScaledFormat) -> None:
    t = weight(fmt, (3, 40, 96))
    for copy in (t.clone(), t[1:], t[2]):
        assert_rows_are_padded(copy)
    assert t.to("meta").scale.stride() == t.scale.stride()
    assert torch.equal(padless.dequantize(t.clone()), padless.dequantize(t))


@pytest.mark.parametrize("fmt", ONE_BYTE, ids=lambda fmt: fmt.name)
def test_checkpoints_give_such_rows(fmt: BlockScaledFormat) -> None:
    t = weight(fmt, (4, 40, 96))
    scale = contiguous(t).scale
    loaded = from_torch(t.data, scale, t.global_scale)
    tiled = from_torch(t.data, layouts.to_blocked(scale), t.global_scale)
    stacked = stack_experts([t[g] for g in range(4)])
    joined = concatenate_rows([contiguous(t), t])
    for made in (loaded, tiled, stacked, joined):
        assert_rows_are_padded(made)
    for made in (loaded, tiled, stacked):
        assert torch.equal(padless.dequantize(made), padless.dequantize(t))
    assert torch.equal(padless.dequantize(joined), torch.cat([padless.dequantize(t)] * 2, dim=1))


def test_gpt_oss_weights_have_such_rows() -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, 24, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (2, 24, 5), dtype=torch.uint8, generator=generator)
    t = from_gpt_oss(blocks, scales)
    assert_rows_are_padded(t)
    assert torch.equal(t.scale.view(torch.uint8), scales)


@pytest.mark.parametrize("fmt", ONE_BYTE, ids=lambda fmt: fmt.name)
def test_a_traced_call_says_the_same_strides(fmt: BlockScaledFormat) -> None:
    with FakeTensorMode():
        t = padless.quantize(torch.empty(2, 40, 96), fmt, kind="weight")
    assert t.scale.stride() == weight(fmt, (2, 40, 96)).scale.stride()


def cut(t: BlockScaledTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> BlockScaledTensor:
    return BlockScaledTensor(t.data, change(t.scale.view(torch.uint8)).view(t.scale.dtype), t.format)


def test_other_strides_are_refused() -> None:
    t = weight(padless.MXFP8, (2, 40, 96))
    wide = torch.zeros(2, 40, 32, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"contiguous, got strides \(1280, 32, 1\): .* or padless.layouts.to_row_padded"
    ):
        cut(t, lambda scale: wide[..., :3].copy_(scale))
    with pytest.raises(ValueError, match=r"scale must be contiguous"):
        cut(t, lambda scale: scale.mT.contiguous().mT)


def test_both_forms_are_the_same_operand() -> None:
    t = weight(padless.MXFP4, (2, 40, 96))
    a = padless.quantize(torch.randn(7, 96, generator=torch.Generator().manual_seed(1)), padless.MXFP4)
    offs = torch.tensor([3, 7], dtype=torch.int32)
    assert torch.equal(padless.grouped_gemm(a, t, offs), padless.grouped_gemm(a, contiguous(t), offs))
