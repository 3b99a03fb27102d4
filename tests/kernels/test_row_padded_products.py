"""Row-padded scales of weights give the bits of contiguous ones, in the emulator; what pads them is NaN where no kernel
reads it."""

from __future__ import annotations

import pytest
import torch

import padless
from padless.formats import FORMAT_BY_NAME, BlockScaledTensor, round_up
from padless.kernels.table import BF16
from padless.moe.fused import swiglu
from padless.runtime.choices import BackendName

N, SIZES = 72, (3, 0, 9)
NAN = {"NVFP4": 0x7F}  # else 0xFF
HOPPER = [(("MXFP8", "MXFP8"), 96), (("MXFP8", "MXFP8"), 160), ((BF16, "MXFP4"), 160), (("NVFP4", "NVFP4"), 96)]
BLACKWELL = [(("MXFP8", "MXFP8"), 96), (("MXFP8", "MXFP4"), 192), (("NVFP4", "NVFP4"), 96), (("NVFP4", "NVFP4"), 192)]


def operands(pair: tuple[str, str], n: int, k: int) -> tuple[BlockScaledTensor | torch.Tensor, BlockScaledTensor]:
    generator = torch.Generator().manual_seed(n + k)
    x = torch.randn(sum(SIZES), k, generator=generator)
    w = torch.randn(len(SIZES), n, k, generator=generator) * 2.0 ** torch.randint(-3, 4, (n, 1), generator=generator)
    a = x.bfloat16() if pair[0] == BF16 else padless.quantize(x, FORMAT_BY_NAME[pair[0]])
    return a, padless.quantize(w, FORMAT_BY_NAME[pair[1]], kind="weight")


def contiguous(t: BlockScaledTensor) -> BlockScaledTensor:
    scale = t.scale.view(torch.uint8).contiguous().view(t.scale.dtype)
    return BlockScaledTensor(t.data, scale, t.format, t.global_scale)


def in_nan(t: BlockScaledTensor) -> BlockScaledTensor:
    """The same with NaN between the rows of scales."""
    columns = t.scale.shape[-1]
    whole = torch.full((*t.scale.shape[:-1], round_up(columns, 16)), NAN.get(t.format.name, 0xFF), dtype=torch.uint8)
    scale = whole[..., :columns].copy_(t.scale.view(torch.uint8))
    return BlockScaledTensor(t.data, scale.view(t.scale.dtype), t.format, t.global_scale)


def product(a: BlockScaledTensor | torch.Tensor, b: BlockScaledTensor, backend: BackendName) -> torch.Tensor:
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    return padless.grouped_gemm(a, b, offs, out_dtype=torch.float32, backend=backend)


@pytest.mark.parametrize(("pair", "k"), HOPPER, ids=str)
def test_on_hopper(pair: tuple[str, str], k: int) -> None:
    a, b = operands(pair, N, k)
    assert not b.scale.is_contiguous()
    got = product(a, in_nan(b), "emulator")
    assert got.isfinite().all()
    assert torch.equal(got, product(a, contiguous(b), "emulator"))


@pytest.mark.parametrize(("pair", "k"), BLACKWELL, ids=str)
def test_on_blackwell(pair: tuple[str, str], k: int) -> None:
    """Where 64 of K that an FP4 product takes end with K nothing that pads is read; else it is zero."""
    a, b = operands(pair, N, k)
    assert not b.scale.is_contiguous()
    b = in_nan(b) if k % 64 == 0 else b
    got = product(a, b, "emulator:sm_100a")
    assert got.isfinite().all()
    assert torch.equal(got, product(a, contiguous(b), "emulator:sm_100a"))


@pytest.mark.parametrize(
    ("pair", "backend"), [(("MXFP8", "MXFP8"), "emulator"), (("MXFP8", "MXFP4"), "emulator:sm_100a")], ids=str
)
def test_gate_above_up_in_the_epilogue(pair: tuple[str, str], backend: BackendName) -> None:
    a, b = operands(pair, 128, 160)
    offs = torch.tensor(SIZES).cumsum(0).to(torch.int32)
    format = None if pair[0] == BF16 else FORMAT_BY_NAME[pair[0]]
    found = [
        swiglu(a, w, offs, gate_up="concatenated", bias=None, format=format, global_scale=None, backend=backend)
        for w in (b, contiguous(b))
    ]
    for x, y in zip(*([t] if isinstance(t, torch.Tensor) else [t.data, t.scale] for t in found), strict=True):
        same = [t.contiguous().view(torch.uint8) for t in (x, y)]
        assert torch.equal(*same)


@pytest.mark.parametrize("backend", ["emulator", "emulator:sm_100a"])
def test_weights_as_activations(backend: BackendName) -> None:
    """Scales of 1 x 32 serve as either, in rows of either kind."""
    pair = ("MXFP8", "MXFP8")
    _, b = operands(pair, N, 96)
    x = torch.randn(sum(SIZES), 96, generator=torch.Generator().manual_seed(4))
    padded = padless.quantize(x, FORMAT_BY_NAME[pair[0]], kind="weight")
    assert torch.equal(product(padded, b, backend), product(contiguous(padded), b, backend))
