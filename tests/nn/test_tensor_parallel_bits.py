"""Experts cut along their intermediate columns, as tensor parallelism does: which bits stay, and which cannot.

What would convince: with parts of whole blocks every rank's weight gradients are slices of one process', bit for bit,
and parts that cut a block are seen; outputs are sums of rounded parts, which differ from the whole's and stay near;
columns of a product do not depend on those next to them, so that gathering the activation keeps all bits.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from padless import FP8_BLOCK, MXFP8, grouped_gemm, quantize
from padless.formats import BlockScaledFormat
from padless.nn import experts_of_rows
from support.training_layer import sqnr

COUNTS, H, INNER = [0, 1, 12], 64, 256
OFFS = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
Step = dict[str, torch.Tensor]


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


X, DOUT, PROB = drawn(sum(COUNTS), H, seed=1), drawn(sum(COUNTS), H, seed=2), drawn(sum(COUNTS), seed=3).abs().float()
W13, W2 = drawn(len(COUNTS), 2 * INNER, H, seed=4) / H**0.5, drawn(len(COUNTS), H, INNER, seed=5) / INNER**0.5


@cache
def step(start: int, end: int, recipe: str) -> Step:
    """A rank's step: these intermediate columns of gate, of up and of the second weight."""
    columns = slice(start, end)
    gate, up = W13.chunk(2, dim=1)
    leaves = {
        "x": X,
        "w13": torch.cat((gate[:, columns], up[:, columns]), dim=1),
        "w2": W2[:, :, columns],
        "prob": PROB,
    }
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    out = experts_of_rows(leaves["x"], OFFS, leaves["w13"], leaves["w2"], leaves["prob"], recipe)
    out.backward(DOUT)
    return {"out": out.detach()} | {name: t.grad for name, t in leaves.items()}


def of_ranks(ranks: int, recipe: str) -> tuple[Step, Step]:
    """(one process, ranks): the ranks' weight gradients put together, outputs and gradients of x added in float32."""
    width = INNER // ranks
    whole, parts = step(0, INNER, recipe), [step(r * width, (r + 1) * width, recipe) for r in range(ranks)]
    gates, ups = zip(*(part["w13"].chunk(2, dim=1) for part in parts), strict=True)
    together = {"w13": torch.cat((*gates, *ups), dim=1), "w2": torch.cat([part["w2"] for part in parts], dim=2)}
    for name in ("out", "x", "prob"):
        added = torch.stack([part[name].float() for part in parts]).sum(0)
        together[name] = added.to(whole[name].dtype)
    return whole, together


@pytest.mark.parametrize(
    "recipe", ["fp8", pytest.param("fp8_1d1d", marks=pytest.mark.slow), pytest.param("mxfp8", marks=pytest.mark.slow)]
)
def test_weight_gradients_are_slices(recipe: str) -> None:
    """Those of probabilities are sums over columns in float32: near, as outputs are."""
    whole, together = of_ranks(2, recipe)
    for name in ("w13", "w2"):
        assert torch.equal(together[name], whole[name]), name
    for name in ("out", "x"):
        assert not torch.equal(together[name], whole[name]), name
        assert sqnr(together[name], whole[name]) > 46.0, name
    assert sqnr(together["prob"], whole["prob"]) > 100.0


def test_a_block_that_is_cut_is_seen() -> None:
    """Parts of 64 columns have other scales."""
    whole, together = of_ranks(4, "fp8")
    assert not torch.equal(together["w13"], whole["w13"])
    assert not torch.equal(together["w2"], whole["w2"])


@pytest.mark.slow
def test_mxfp8_is_cut_every_32_columns() -> None:
    whole, together = of_ranks(8, "mxfp8")
    assert torch.equal(together["w13"], whole["w13"])
    assert torch.equal(together["w2"], whole["w2"])


@pytest.mark.parametrize("backend", [None, pytest.param("emulator", marks=[pytest.mark.slow, pytest.mark.kernels])])
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8])
def test_columns_do_not_depend_on_those_next_to_them(format: BlockScaledFormat, backend: str | None) -> None:
    """The second product by columns: with the activation of every rank gathered, a rank's outputs are slices."""
    x, w = drawn(37, 256, seed=6), drawn(3, 384, 256, seed=7)
    offs = torch.tensor([5, 5, 37], dtype=torch.int32)
    a, whole = quantize(x, format), quantize(w, format, kind="weight")
    want = grouped_gemm(a, whole, offs, backend=backend)
    for columns in (slice(0, 128), slice(128, 384)):
        part = quantize(w[:, columns].contiguous(), format, kind="weight")
        assert torch.equal(grouped_gemm(a, part, offs, backend=backend), want[:, columns]), columns
