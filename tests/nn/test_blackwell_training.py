"""Training steps on a pretended B200, of every recipe that runs there, with the bits of their parts; and on the CPU.

What would convince: the step's launches are those of sm_100a, Triton's and padless's own, in MXFP8 throughout weight
gradients by the kernel for them; no bit of the output or of a gradient differs from the same step of torch twins and
products that are emulated one by one, where torch multiplies none more than its roundings; columns that are quantized
with a neighbouring group's row change the weight gradients, and these alone; scale tiles of the group before change
everything; and a product that does not wait for the launch ahead is reported, each time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from padless.autograd import grouped_linear
from padless.nn import Experts
from padless.nn.operators import _bf16_wgrad
from padless.ops.grouped_gemm_wgrad_mxfp8 import grouped_gemm_wgrad_mxfp8
from padless.quantization.mx_rows_columns import quantize_mx_rows_columns, values_of_columns
from padless.runtime.devices import backend_on_cpu
from support.blackwell_training import COLUMNS, SCALES
from support.own_process import run_pretended

PRODUCT, BOTH = "padless_sm100_grouped_gemm", "_mx_rows_columns"
WGRADS = {"mxfp8": "padless_sm100_mxfp8_wgrad", "nvfp4": "padless_sm100_nvfp4_wgrad"}


NAMES = ("out", "x", "w13", "w2", "prob")
BY_TORCH = ("w13", "w2")  # of products in bfloat16
ROUNDING = 2.0**-8  # float32 sums in another order, rounded to bfloat16: the next value at most


run = partial(run_pretended, "blackwell_training")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", list(WGRADS))
def test_a_step_has_the_bits_of_its_parts(recipe: str) -> None:
    record = run(recipe)
    assert record["equal"] == dict.fromkeys(NAMES, True)
    assert [name for name, reports in record["launches"] if reports] == []
    kernels = [name for name, _ in record["launches"]]
    assert (kernels.count(PRODUCT), kernels.count(WGRADS[recipe])) == (4, 2)
    assert kernels.count(BOTH) == (4 if recipe == "mxfp8" else 0), "dout, dZ, H and x, once each"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["mxfp8_bf16_wgrad", "fp8_bf16_wgrad"])
def test_a_step_of_products_by_padless_and_by_torch(recipe: str) -> None:
    record = run(recipe)
    assert [name for name, reports in record["launches"] if reports] == []
    kernels = [name for name, _ in record["launches"]]
    assert kernels.count(PRODUCT) == 4
    assert not set(kernels) & set(WGRADS.values())
    for name in NAMES:
        assert record["equal"][name] or (name in BY_TORCH and record["off"][name] <= ROUNDING), name


@pytest.mark.parametrize("recipe", ["fp8", "fp8_compact", "fp8_1d1d"])
def test_weight_gradients_in_fp8_block_are_refused(recipe: str) -> None:
    weight = torch.randn(1, 128, 128).requires_grad_()
    with backend_on_cpu("emulator:sm_100a"):
        out = grouped_linear(torch.randn(4, 128), weight, torch.tensor([4], dtype=torch.int32), recipe)
        with pytest.raises(ValueError, match=r"emulator:sm_100a.*has a kernel for sm_90a"):
            out.sum().backward()


@pytest.mark.slow
def test_columns_of_other_rows_are_seen() -> None:
    """In the gradients of the weights, and in these alone."""
    assert run("mxfp8", COLUMNS)["equal"] == dict.fromkeys(NAMES, True) | {"w13": False, "w2": False}


@pytest.mark.slow
def test_scale_tiles_of_the_group_before_are_seen() -> None:
    record = run("mxfp8", SCALES)
    assert record["equal"] == dict.fromkeys(NAMES, False)
    assert min(record["off"].values()) > ROUNDING


@pytest.mark.slow
def test_products_that_do_not_wait_for_the_launch_ahead_are_reported() -> None:
    launches = run("mxfp8", f"no wait in {PRODUCT}")["launches"]
    assert [found for name, found in launches if name == PRODUCT] == [["grid-dependency"]] * 4
    assert [name for name, found in launches if found and name != PRODUCT] == []


def test_elsewhere_the_values_are_multiplied() -> None:
    """The twin of a GPU without the kernel: products of the codes' values in bfloat16, within float32's rounding."""
    g = torch.Generator().manual_seed(1)
    offs = torch.tensor([40, 40, 170], dtype=torch.int32)
    columns = [quantize_mx_rows_columns(torch.randn(176, n, generator=g), offs, rows=False)[1] for n in (96, 64)]
    exact = grouped_gemm_wgrad_mxfp8(*columns, offs, out_dtype=torch.float32)
    values = [values_of_columns(t, offs) for t in columns]
    got = _bf16_wgrad(*values, offs, torch.float32)
    assert (got - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("recipe", list(WGRADS))
def test_microbatches_are_added_in_float32(recipe: str) -> None:
    """main_grad is the sum of the single gradients, bit for bit, and the first one may overwrite it."""
    g = torch.Generator().manual_seed(2)
    offs = torch.tensor([33, 40], dtype=torch.int32)
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


@pytest.mark.parametrize("recipe", list(WGRADS))
def test_a_compiled_step_has_the_eager_bits(recipe: str) -> None:
    g = torch.Generator().manual_seed(3)
    layer = Experts(96, 64, 3, recipe=recipe, dtype=torch.bfloat16)
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
