"""grouped_gemm_quant and grouped_gemm_swiglu_quant as a caller meets them, on the reference.

What would convince a sceptic: the documented call runs as it is printed; D against float64 with cuDNN's own tolerances,
group by group, and the quantised outputs decoded with cuDNN's formula; a quantised output that is quantize(D) to the
bit; a layer of two products chained without a quantisation between.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import padless
from padless import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
    dequantize,
    group_offsets,
    grouped_gemm,
    grouped_gemm_quant,
    grouped_gemm_swiglu_quant,
    layouts,
    quantize,
)
from padless.compat.cudnn.outputs import KEYS
from padless.reference.gemm import group_rows
from support.quant_calls import SIZES, as_cudnn, bits, check_groups, exact_d, operands

# --- cuDNN's call ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[256, 256, 256, 256], [64, 256, 320], SIZES], ids=str)
def test_the_documented_call_runs_as_printed(sizes: list[int]) -> None:
    """cuDNN's test data: uniform in (-2, 2), alpha and prob integers in [-2, 1]; its tolerances."""
    m, n, k, groups = sum(sizes), 128, 96, len(sizes)
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(m, k, generator=generator) * 4 - 2
    w = torch.rand(groups, n, k, generator=generator) * 4 - 2
    a = quantize(x, MXFP8, scale_layout="blocked")
    b = quantize(w, MXFP8, kind="weight", scale_layout="blocked")
    alpha = torch.randint(-2, 2, (groups,), generator=generator).float()
    prob = torch.randint(-2, 2, (m, 1, 1), generator=generator).float()
    offs = group_offsets(sizes)
    outputs = grouped_gemm_quant(
        **as_cudnn(a, b),
        padded_offsets=offs,
        alpha_tensor=alpha,
        norm_const_tensor=torch.tensor([0.01]),
        prob_tensor=prob,
        acc_dtype=torch.float32,
        c_dtype=torch.bfloat16,
        d_dtype=torch.bfloat16,
        cd_major="n",
        mma_tiler_mn=(256, 256),
        cluster_shape_mn=(2, 1),
        sf_vec_size=32,
        vector_f32=False,
        discrete_col_sfd=False,
        current_stream=None,
    )
    d, d_col, amax, sfd_row, sfd_col = outputs
    assert d is outputs["d_tensor"] is outputs[0]
    assert d.shape == (m, n, 1)
    assert d.stride() == (n, 1, m * n)
    assert d_col is sfd_row is sfd_col is None
    assert amax.shape == (groups, 1)
    wanted = exact_d(a, b, offs, alpha, prob)
    check_groups(d[:, :, 0], wanted, offs, 0.1, 0.01)
    for g, (start, end) in enumerate(group_rows(offs, m)):
        own = wanted[start:end].abs().max().item() if end > start else -math.inf
        assert amax[g, 0].item() == pytest.approx(own, rel=1e-5, abs=1e-5)


def test_alpha_zero_makes_d_and_amax_zero() -> None:
    a, b, offs = operands(MXFP8)
    outputs = grouped_gemm_quant(
        **as_cudnn(a, b), padded_offsets=offs, alpha_tensor=torch.zeros(4), prob_tensor=torch.ones(233, 1, 1)
    )
    assert (outputs["d_tensor"] == 0).all()
    assert outputs["amax_tensor"].flatten().tolist() == [0, -math.inf, 0, 0]


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_output_decodes_with_cudnns_formula(dtype: torch.dtype, discrete: bool) -> None:
    """D ~ code * SFD / norm_const, along rows and along columns; shapes are cuDNN's for aligned groups."""
    sizes, n = [256, 512], 160
    a, b, offs = operands(MXFP8, sizes, n=n)
    m, alpha, prob = sum(sizes), torch.tensor([1.5, -0.5]), torch.rand(sum(sizes), 1, 1)
    outputs = grouped_gemm_quant(
        **as_cudnn(a, b),
        padded_offsets=offs,
        alpha_tensor=alpha,
        prob_tensor=prob,
        norm_const_tensor=torch.tensor([0.01]),
        d_dtype=dtype,
        sf_vec_size=32,
        m_aligned=256,
        discrete_col_sfd=discrete,
    )
    d, d_col, amax, sfd_row, sfd_col = outputs
    assert amax is None
    assert sfd_row.shape == (32, 4, 6, 4, 2, 1)
    assert sfd_col.shape == (32, 4, 2, 4, 6, 1)
    assert d.dtype == d_col.dtype == dtype
    wanted = exact_d(a, b, offs, alpha, prob)
    row_bytes = torch.empty(m, 5, dtype=torch.uint8)
    for r in range(m):  # by the documented index of the 6-D view
        for c in range(5):
            row_bytes[r, c] = sfd_row.view(torch.uint8)[r % 32, r % 128 // 32, r // 128, c % 4, c // 4, 0]
    flat = layouts.from_cudnn_view(sfd_col)[0]
    if discrete:
        own = [(0, 256), (256, 768)]
        col_bytes = torch.cat(
            [layouts.from_blocked(flat[s // 128 * 1024 : e // 128 * 1024], n, (e - s) // 32) for s, e in own], dim=1
        )
    else:
        col_bytes = layouts.from_blocked(flat, n, m // 32)
    half_spacing = 2.0**-4 if dtype == torch.float8_e4m3fn else 2.0**-3
    for codes, scale_bytes in (
        (d, row_bytes.repeat_interleave(32, 1)),
        (d_col, col_bytes.view(torch.uint8).t().repeat_interleave(32, 0)),
    ):
        scale = torch.exp2(scale_bytes.double() - 127) / 0.01
        decoded = codes[:, :, 0].double() * scale[:, :n]
        check_groups(decoded, wanted, offs, 1e-3, half_spacing * 1.001)


def test_without_norm_const_the_output_is_quantize_of_d() -> None:
    """So a caller may take the fused call for grouped_gemm(out_dtype=float32) and quantize; ties aside on a GPU."""
    for format, output in ((MXFP8, MXFP8), (MXFP8, MXFP4), (FP8_BLOCK, FP8_BLOCK), (MXFP8, MXFP8_E5M2)):
        a, b, offs = operands(format, n=256)
        outputs = grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs, d_format=output)
        d = grouped_gemm(a, b, offs, out_dtype=torch.float32)
        q = quantize(d, output)
        assert torch.equal(bits(outputs["d_tensor"]), bits(q.data))
        scale = layouts.plain_scale(outputs.row)
        assert torch.equal(
            scale.contiguous().flatten().view(torch.uint8), q.scale.contiguous().flatten().view(torch.uint8)
        )


def test_nvfp4_output() -> None:
    a, b, offs = operands(NVFP4, n=256)
    d = grouped_gemm(a, b, offs, out_dtype=torch.float32)
    scale = d.abs().max() / 2688
    outputs = grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs, d_format=NVFP4, global_scale_tensor=scale)
    q = quantize(d, NVFP4, global_scale=scale)
    assert torch.equal(bits(outputs["d_tensor"]), bits(q.data))
    assert torch.equal(bits(layouts.plain_scale(outputs.row)), bits(q.scale))
    assert outputs["d_col_tensor"] is None


def test_both_ways_to_give_operands_give_the_same_bytes() -> None:
    for format in (MXFP8, MXFP4, NVFP4):
        a, b, offs = operands(format, n=256)
        bias = torch.randn(4, 256, dtype=torch.bfloat16)
        if format == NVFP4:  # alpha and a bias are rounded together, a global scale and a bias one by one
            bias.zero_()
        one = grouped_gemm_quant(
            a_tensor=a, b_tensor=b, padded_offsets=offs, bias_tensor=bias, prob_tensor=torch.arange(233.0)
        )
        if format == NVFP4:  # its tensors have no global scale: that is what alpha is for
            scale = {"alpha_tensor": (a.global_scale * b.global_scale).expand(4).contiguous()}
        else:
            scale = {}
        tensors = as_cudnn(a, b)
        if format == MXFP4:
            tensors |= {name: tensors[name].view(torch.uint8) for name in ("a_tensor", "b_tensor")}
        two = grouped_gemm_quant(
            **tensors,
            **scale,
            padded_offsets=offs,
            bias_tensor=bias.t(),
            prob_tensor=torch.arange(233.0).view(-1, 1, 1),
        )
        assert one["d_tensor"].shape == two["d_tensor"].shape[:2]
        assert torch.equal(bits(one["d_tensor"]), bits(two["d_tensor"][:, :, 0])), format.name


@pytest.mark.parametrize("semantics", ["implementation", "documented"])
def test_where_documentation_and_implementation_disagree(semantics: str) -> None:
    a, b, offs = operands(MXFP8)
    bias, prob = torch.randn(4, 192), torch.rand(233)
    options: dict[str, Any] = {"a_tensor": a, "b_tensor": b, "padded_offsets": offs, "semantics": semantics}
    d = grouped_gemm_quant(**options, bias_tensor=bias, prob_tensor=prob, d_dtype=torch.float32)["d_tensor"]
    check_groups(d, exact_d(a, b, offs, None, prob, bias, semantics == "implementation"), offs, 1e-4, 1e-5)
    e5m2 = grouped_gemm_quant(**options, d_dtype=torch.float8_e5m2, norm_const_tensor=torch.ones(1))
    largest = e5m2["d_tensor"].float().abs().max()
    assert 64 < largest <= 128 if semantics == "implementation" else 28672 < largest <= 57344


# --- layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP8, MXFP4], ids=lambda f: f.name)
@pytest.mark.parametrize("gate_up", ["concatenated", "interleaved"])
def test_an_experts_two_projections_chain_without_a_quantization(format, gate_up: str) -> None:  # type: ignore[no-untyped-def]
    hidden = 128
    a, b, offs = operands(format, n=2 * hidden, extra=5)
    prob = torch.rand(238)
    outputs = grouped_gemm_swiglu_quant(
        a_tensor=a, b_tensor=b, padded_offsets=offs, gate_up=gate_up, prob_tensor=prob, d_format=format
    )
    assert outputs.row.logical_shape == (238, hidden)
    raw = exact_d(a, b, offs)
    gate, up = raw[:, :hidden], raw[:, hidden:]
    if gate_up == "interleaved":
        split = raw.view(-1, hidden // 32, 2, 32)
        gate, up = (split[:, :, i].reshape(-1, hidden) for i in range(2))
    wanted = prob[:, None].double() * up * gate * torch.sigmoid(gate)
    got = dequantize(outputs.row)
    spacing = 2.0**-1 if format == MXFP4 else 2.0**-4
    blocks = wanted.nan_to_num().abs()
    per_block = blocks.view(238, -1, format.block_k).amax(2).repeat_interleave(format.block_k, 1)
    error = (got.double() - wanted).abs()[:233]
    assert (error <= spacing * 1.01 * blocks[:233] + per_block[:233] * (0.17 if format == MXFP4 else 2.0**-10)).all()

    down = quantize(torch.randn(4, 64, hidden), format, kind="weight")
    y = grouped_gemm(outputs.row, down, offs, out_dtype=torch.float32)
    z = torch.full((238, 64), float("nan"), dtype=torch.float64)
    for g, (start, end) in enumerate(group_rows(offs, 238)):
        z[start:end] = got[start:end].double() @ dequantize(down)[g].double().t()
    check_groups(y, z, offs, 1e-3, 1e-5)


def test_swiglu_bias_is_added_before_the_activation_whatever_the_semantics() -> None:
    a, b, offs = operands(MXFP8, n=128)
    bias, prob = torch.randn(4, 128), torch.rand(233)
    raw = exact_d(a, b, offs)
    for g, (start, end) in enumerate(group_rows(offs, 233)):
        raw[start:end] += bias[g].double()
    gate, up = raw.chunk(2, dim=1)
    wanted = prob[:, None].double() * up * gate * torch.sigmoid(gate)
    for semantics in ("implementation", "documented"):
        d = grouped_gemm_swiglu_quant(
            gate_up="concatenated",
            a_tensor=a,
            b_tensor=b,
            padded_offsets=offs,
            bias_tensor=bias,
            prob_tensor=prob,
            d_dtype=torch.float32,
            semantics=semantics,
        )["d_tensor"]
        check_groups(d, wanted, offs, 1e-3, 1e-4)


def test_the_two_ways_of_laying_gate_and_up_are_permutations_of_the_weights() -> None:
    a, b, offs = operands(MXFP8, n=256)
    order = torch.cat([torch.cat([torch.arange(c, c + 32), torch.arange(c + 128, c + 160)]) for c in range(0, 128, 32)])
    plain = layouts.plain_scale(b).view(torch.uint8)[:, order].view(b.scale.dtype)
    woven = padless.BlockScaledTensor(b.data.view(torch.uint8)[:, order].view(b.data.dtype), plain, MXFP8)
    common: dict[str, Any] = {"a_tensor": a, "padded_offsets": offs, "d_format": MXFP8}
    one = grouped_gemm_swiglu_quant(gate_up="concatenated", b_tensor=b, **common)
    two = grouped_gemm_swiglu_quant(gate_up="interleaved", b_tensor=woven, **common)
    for key in ("d_tensor", "d_col_tensor", "sfd_row_tensor", "sfd_col_tensor"):
        assert torch.equal(bits(one[key]), bits(two[key])), key


# --- shapes that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[0, 0], [0, 0, 0, 1]], ids=str)
def test_no_rows_and_hardly_any(sizes: list[int]) -> None:
    a, b, offs = operands(MXFP8, sizes)
    outputs = grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs, d_dtype=torch.float8_e4m3fn)
    assert outputs["d_tensor"].shape == (sum(sizes), 192)
    plain = grouped_gemm_quant(a_tensor=a, b_tensor=b, padded_offsets=offs)
    assert (plain["amax_tensor"][:-1] == -math.inf).all()


def test_outputs_that_are_not_wanted() -> None:
    a, b, offs = operands(MXFP8)
    common: dict[str, Any] = {"a_tensor": a, "b_tensor": b, "padded_offsets": offs, "d_dtype": torch.float8_e4m3fn}
    both = grouped_gemm_quant(**common)
    rows = grouped_gemm_quant(**common, column_output=False)
    columns = grouped_gemm_quant(**common, row_output=False, return_amax=True)
    assert list(both.keys()) == list(KEYS)
    assert [v is None for v in rows] == [False, True, True, False, True]
    assert [v is None for v in columns] == [True, False, False, True, False]
    assert columns.row is None
    assert torch.equal(bits(rows["d_tensor"]), bits(both["d_tensor"]))
    assert torch.equal(bits(columns["sfd_col_tensor"]), bits(both["sfd_col_tensor"]))
