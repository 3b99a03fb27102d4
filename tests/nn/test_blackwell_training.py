"""A training step in MXFP8 throughout: on a pretended B200 with the bits of its parts, and on the CPU.

What would convince: the step's launches are those of sm_100a, Triton's and padless's own, weight gradients by the kernel
for them; no bit of the output or of a gradient differs from the same step of torch twins and products that are emulated
one by one; and columns that are quantized with a neighbouring group's row change the weight gradients, and these alone.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from padless import MXFP8
from padless.autograd import grouped_linear
from padless.nn import Experts, Recipe
from padless.nn.operators import _bf16_wgrad
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.quantization.mx_rows_columns import quantize_mx_rows_columns, values_of_columns
from support.blackwell_training import BUG
from support.own_process import run_pretended

PRODUCT, WGRAD, BOTH = "padless_sm100_grouped_gemm", "padless_sm100_mxfp8_wgrad", "_mx_rows_columns"


run = partial(run_pretended, "blackwell_training")


@pytest.mark.slow
def test_a_step_has_the_bits_of_its_parts() -> None:
    record = run()
    assert record["equal"] == dict.fromkeys(("out", "x", "w13", "w2", "prob"), True)
    assert [name for name, reports in record["launches"] if reports] == []
    kernels = [name for name, _ in record["launches"]]
    assert (kernels.count(PRODUCT), kernels.count(WGRAD)) == (4, 2)
    assert kernels.count(BOTH) == 4, "dout, dZ, H and x, once each"


@pytest.mark.slow
def test_columns_of_other_rows_are_seen() -> None:
    assert run(BUG)["equal"] == {"out": True, "x": True, "w13": False, "w2": False, "prob": True}


def test_elsewhere_the_values_are_multiplied() -> None:
    """The twin of a GPU without the kernel: products of the codes' values in bfloat16, within float32's rounding."""
    g = torch.Generator().manual_seed(1)
    offs = torch.tensor([40, 40, 170], dtype=torch.int32)
    columns = [quantize_mx_rows_columns(torch.randn(176, n, generator=g), offs, rows=False)[1] for n in (96, 64)]
    exact = grouped_gemm_wgrad_mxfp8(*columns, offs, out_dtype=torch.float32)
    values = [values_of_columns(t, offs) for t in columns]
    got = _bf16_wgrad(*values, offs, torch.float32)
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_microbatches_are_added_in_float32() -> None:
    """main_grad is the sum of the single gradients, bit for bit, and the first one may overwrite it."""
    g = torch.Generator().manual_seed(2)
    recipe, offs = Recipe(MXFP8, MXFP8, MXFP8), torch.tensor([33, 40], dtype=torch.int32)
    weight = torch.randn(2, 64, 96, generator=g)
    single, added = [], weight.clone().requires_grad_()
    added.main_grad = torch.full(weight.shape, torch.nan)
    for turn in range(2):
        x, dy = torch.randn(40, 96, generator=g), torch.randn(40, 64, generator=g)
        alone = weight.clone().requires_grad_()
        grouped_linear(x, alone, offs, recipe).backward(dy)
        single.append(alone.grad)
        added.overwrite_main_grad = turn == 0
        grouped_linear(x, added, offs, recipe).backward(dy)
    assert torch.equal(added.main_grad, single[0] + single[1])


def test_a_compiled_step_has_the_eager_bits() -> None:
    g = torch.Generator().manual_seed(3)
    layer = Experts(96, 64, 3, recipe=Recipe(MXFP8, MXFP8, MXFP8), dtype=torch.bfloat16)
    x, dout = (torch.randn(40, 96, generator=g).bfloat16() for _ in range(2))
    ids, weights = torch.randint(-1, 3, (40, 2), generator=g), torch.rand(40, 2, generator=g)

    def step(call: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = call(leaf, ids, weights)
        out.backward(dout)
        return [out.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]

    for got, want in zip(step(torch.compile(layer, fullgraph=True, backend="aot_eager")), step(layer), strict=True):
        assert torch.equal(got, want)
