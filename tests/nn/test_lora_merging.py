"""Merged adapters: codes are those of W + delta, the loss is measured, and the layer agrees with the adapted one."""

from __future__ import annotations

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, dequantize, quantize
from padless.moe import moe
from padless.nn.lora import LoraExperts, merged

FORMATS = (FP8_BLOCK, MXFP8, MXFP4, NVFP4)
E, H, INNER = 3, 160, 96


def module(fmt: BlockScaledFormat, size: float) -> LoraExperts:
    g = torch.Generator().manual_seed(0)
    shapes = (E, 2 * INNER, H), (E, H, INNER)
    m = LoraExperts(*(quantize(torch.randn(s, generator=g) / s[2] ** 0.5, fmt, kind="weight") for s in shapes), rank=5)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn(p.shape, generator=g) * size)
    return m


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_values_and_loss(fmt: BlockScaledFormat) -> None:
    """Against float64 by expert; a delta far below a code's step is lost, and the loss says so."""
    losses = []
    for size in (0.2, 0.002):
        m = module(fmt, size)
        found = merged(m, "default")
        for new, old, a, b, loss in (
            (found.w13, m.w13, m.a13["default"], m.b13["default"], found.loss13),
            (found.w2, m.w2, m.a2["default"], m.b2["default"], found.loss2),
        ):
            assert new.format == old.format
            assert new.logical_shape == old.logical_shape
            delta = (b.detach().double() @ a.detach().double()) * m.scaling
            wanted = dequantize(old).double() + delta
            for e in range(E):
                alone = dequantize(quantize(wanted[e].float(), fmt, kind="weight")).double()
                assert (dequantize(new[e]).double() - alone).norm() <= 1e-3 * alone.norm()
            error = (dequantize(new).double() - wanted).flatten(1).norm(dim=1) / delta.flatten(1).norm(dim=1)
            torch.testing.assert_close(loss.double(), error, rtol=1e-3, atol=0)
        losses.append(float(found.loss13.min()))
    assert losses[1] > 5 * losses[0]


def test_the_layer_agrees() -> None:
    m = module(FP8_BLOCK, 0.1)
    found = merged(m, "default")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(40, H, generator=g).bfloat16()
    weights, ids = torch.rand(40, E, generator=g).topk(2)
    adapted, plain = m(x, ids, weights).double(), moe(x, ids, weights, m.w13, m.w2).double()
    got = moe(x, ids, weights, found.w13, found.w2).double()
    assert (got - adapted).norm() < 0.1 * adapted.norm() < 0.5 * (plain - adapted).norm()


def test_autocast_changes_no_bit() -> None:
    m = module(FP8_BLOCK, 0.2)
    want = merged(m, "default")
    with torch.autocast("cpu", torch.bfloat16):
        found = merged(m, "default")
    for new, right in ((found.w13, want.w13), (found.w2, want.w2)):
        assert torch.equal(dequantize(new), dequantize(right))


def test_an_adapter_of_zeros_and_a_wrong_name() -> None:
    """MXFP8's codes are their own quantization, so that nothing is lost."""
    m = module(MXFP8, 0.1)
    m.reset_parameters()
    found = merged(m, "default")
    assert torch.equal(dequantize(found.w13), dequantize(m.w13))
    assert not bool(found.loss13.any())
    with pytest.raises(ValueError, match="other"):
        merged(m, "other")
