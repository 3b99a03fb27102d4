"""grouped_gemm_quant, grouped_gemm_swiglu_quant and GroupedGemmQuant as a caller meets them, on the reference.

What would convince a sceptic: the documented call runs as it is printed; D against float64 with cuDNN's own tolerances,
group by group, and the quantised outputs decoded with cuDNN's formula; a quantised output that is quantize(D) to the
bit; a layer of two products chained without a quantisation between; every wrong argument refused by name before
anything runs; no kernel, no answer.
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
    GroupedGemmQuant,
    dequantize,
    group_offsets,
    grouped_gemm,
    grouped_gemm_quant,
    grouped_gemm_swiglu_quant,
    layouts,
    paths,
    quantize,
)
from padless.quant_outputs import KEYS
from padless.reference import group_rows

SIZES = [70, 0, 130, 33]


def operands(format, sizes=SIZES, n=192, k=160, extra=0, seed=0, a_format=None):  # type: ignore[no-untyped-def]
    """(a, b, offs) as BlockScaledTensors; `extra` rows belong to nobody."""
    generator = torch.Generator().manual_seed(seed)
    m, groups = sum(sizes) + extra, len(sizes)
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(groups, n, k, generator=generator)
    tiled = {} if format == FP8_BLOCK else {"scale_layout": "blocked"}
    a = quantize(x, a_format or format, **tiled)
    return a, quantize(w, format, kind="weight", **tiled), group_offsets(sizes)


def as_cudnn(a, b) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    """The same bytes as cuDNN's tensors."""
    m, k = a.data.shape
    return {
        "a_tensor": a.data.as_strided((m, k, 1), (k, 1, m * k)),
        "b_tensor": b.data.permute(1, 2, 0),
        "sfa_tensor": layouts.cudnn_view(a.scale, m, a.scale_columns),
        "sfb_tensor": layouts.cudnn_view(b.scale, b.data.shape[1], b.scale_columns),
    }


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def exact_d(a, b, offs, alpha=None, prob=None, bias=None, prob_on_bias=True):  # type: ignore[no-untyped-def]
    """float64 D; rows of no group are NaN."""
    x, w = dequantize(a).double(), dequantize(b).double()
    d = torch.full((x.shape[0], w.shape[1]), float("nan"), dtype=torch.float64)
    for g, (start, end) in enumerate(group_rows(offs, x.shape[0])):
        own = x[start:end] @ w[g].t()
        own = own if alpha is None else own * alpha[g].double()
        p = 1.0 if prob is None else prob.flatten()[start:end, None].double()
        if bias is None:
            d[start:end] = own * p
        else:
            d[start:end] = own + bias[g].double() * p if prob_on_bias else (own + bias[g].double()) * p
    return d


def check_groups(
    got: torch.Tensor, wanted: torch.Tensor, offs: torch.Tensor, atol: float, rtol: float
) -> None:
    """Every element of every group within atol + rtol * |wanted|; the message says which group."""
    for g, (start, end) in enumerate(group_rows(offs, got.shape[0])):
        error = (got[start:end].double() - wanted[start:end]).abs()
        allowed = atol + rtol * wanted[start:end].abs()
        assert (error <= allowed).all(), f"group {g}: {(error - allowed).max()} too much"


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
            [layouts.from_blocked(flat[s // 128 * 1024 : e // 128 * 1024], n, (e - s) // 32) for s, e in own],
            dim=1,
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
    outputs = grouped_gemm_quant(
        a_tensor=a, b_tensor=b, padded_offsets=offs, d_format=NVFP4, global_scale_tensor=scale
    )
    q = quantize(d, NVFP4, global_scale=scale)
    assert torch.equal(bits(outputs["d_tensor"]), bits(q.data))
    assert torch.equal(bits(layouts.plain_scale(outputs.row)), bits(q.scale))
    assert outputs["d_col_tensor"] is None


def test_both_ways_to_give_operands_give_the_same_bytes() -> None:
    for format in (MXFP8, MXFP4, NVFP4):
        a, b, offs = operands(format, n=256)
        bias = torch.randn(4, 256, dtype=torch.bfloat16)
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
def test_an_experts_two_projections_chain_without_a_quantisation(format, gate_up: str) -> None:  # type: ignore[no-untyped-def]
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
    assert (
        error <= spacing * 1.01 * blocks[:233] + per_block[:233] * (0.17 if format == MXFP4 else 2.0**-10)
    ).all()

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
    order = torch.cat(
        [torch.cat([torch.arange(c, c + 32), torch.arange(c + 128, c + 160)]) for c in range(0, 128, 32)]
    )
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
    common: dict[str, Any] = {
        "a_tensor": a,
        "b_tensor": b,
        "padded_offsets": offs,
        "d_dtype": torch.float8_e4m3fn,
    }
    both = grouped_gemm_quant(**common)
    rows = grouped_gemm_quant(**common, column_output=False)
    columns = grouped_gemm_quant(**common, row_output=False, return_amax=True)
    assert list(both.keys()) == list(KEYS)
    assert [v is None for v in rows] == [False, True, True, False, True]
    assert [v is None for v in columns] == [True, False, False, True, False]
    assert columns.row is None
    assert torch.equal(bits(rows["d_tensor"]), bits(both["d_tensor"]))
    assert torch.equal(bits(columns["sfd_col_tensor"]), bits(both["sfd_col_tensor"]))


# --- refusals --------------------------------------------------------------------------------------------


def refused(call, match: str, **change: Any) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=match):
        call(**change)


@pytest.mark.parametrize(
    ("match", "change"),
    [
        (r"acc_dtype is torch.float16; it must be torch.float32", {"acc_dtype": torch.float16}),
        (r"cd_major is 'm'; only 'n'", {"cd_major": "m"}),
        (r"semantics is 'both'; allowed: 'implementation', 'documented'", {"semantics": "both"}),
        (r"m_aligned is 0; it must be an integer of 1", {"m_aligned": 0}),
        (r"sf_vec_size is 16; MXFP8 has a scale for 32", {"sf_vec_size": 16}),
        (r"d_dtype is torch.float64; allowed", {"d_dtype": torch.float64}),
        (r"d_format is 'E3M4'; allowed: FP8_BLOCK", {"d_format": "E3M4"}),
        (r"alpha_tensor must be \(4,\).*got \(3,\)", {"alpha_tensor": torch.ones(3)}),
        (
            r"alpha_tensor must be .*got \(4,\) torch.int32",
            {"alpha_tensor": torch.ones(4, dtype=torch.int32)},
        ),
        (r"prob_tensor must be \(233, 1, 1\) or \(233,\)", {"prob_tensor": torch.ones(232)}),
        (r"bias_tensor must be \(4, 192\)", {"bias_tensor": torch.ones(192, 4)}),
        (r"norm_const_tensor must be", {"norm_const_tensor": 0.01, "d_dtype": torch.float8_e4m3fn}),
        (
            r"norm_const_tensor must be None for FP8_BLOCK",
            {"norm_const_tensor": torch.ones(1), "d_format": FP8_BLOCK},
        ),
        (r"scale_rule is 'te'; allowed", {"scale_rule": "te", "d_format": MXFP8}),
        (
            r"scale_rule is 'floor'; with norm_const",
            {"scale_rule": "floor", "d_format": MXFP8, "norm_const_tensor": torch.ones(1)},
        ),
        (r"scale_rule is 'floor'; it must be None", {"scale_rule": "floor"}),
        (r"global_scale_tensor is None; NVFP4", {"d_format": NVFP4}),
        (
            r"global_scale_tensor must be None for MXFP8",
            {"d_format": MXFP8, "global_scale_tensor": torch.ones(1)},
        ),
        (r"column_output is True for MXFP4", {"d_format": MXFP4, "column_output": True}),
        (r"column_output is True and d_dtype", {"column_output": True}),
        (
            r"row_output and column_output are both off",
            {"d_format": MXFP8, "row_output": False, "column_output": False},
        ),
        (r"row_output and column_output are both off", {"d_format": MXFP4, "row_output": False}),
        (r"Epilogue.row_layout is 'tiled'", {"d_format": MXFP8, "row_layout": "tiled"}),
        (r"sfa_tensor must be None with a BlockScaledTensor", {"sfa_tensor": torch.ones(1)}),
        (r"padded_offsets is None", {"padded_offsets": None}),
        (r"offs has 3 entries", {"padded_offsets": torch.tensor([1, 2, 3], dtype=torch.int32)}),
        (r"current_stream must be a stream", {"current_stream": "main"}),
        (r"backend is 'tpu'; allowed", {"backend": "tpu"}),
        (
            r"padded_offsets\[0\] is 70, which is no multiple of m_aligned = 128",
            {"check_offs": True, "m_aligned": 128},
        ),
        (
            r"offs\[3\] is 400",
            {"check_offs": True, "padded_offsets": torch.tensor([1, 2, 3, 400], dtype=torch.int32)},
        ),
    ],
)
def test_wrong_arguments_are_refused_by_name(match: str, change: dict[str, Any]) -> None:
    a, b, offs = operands(MXFP8)
    good: dict[str, Any] = {"a_tensor": a, "b_tensor": b, "padded_offsets": offs}
    grouped_gemm_quant(**good)
    refused(grouped_gemm_quant, match, **(good | change))


def test_cudnns_tensors_are_refused_by_name() -> None:
    a, b, offs = operands(MXFP8)
    good: dict[str, Any] = as_cudnn(a, b) | {"padded_offsets": offs}
    for match, change in (
        (r"a_tensor must be a \(M, K, 1\)", {"a_tensor": good["a_tensor"][:, :, 0]}),
        (r"a_tensor must be \(M, K, 1\)", {"a_tensor": good["b_tensor"]}),
        (r"a_tensor is a BlockScaledTensor, so b_tensor", {"a_tensor": a}),
        (r"sfa_tensor must be a 6-D tensor of scales, got NoneType", {"sfa_tensor": None}),
        (r"sfa_tensor must be \(32, 4, 2, 4, 2, 1\)", {"sfa_tensor": good["sfb_tensor"]}),
        (
            r"b_tensor has torch.float8_e4m3fn and sfb_tensor torch.uint8",
            {"sfb_tensor": good["sfb_tensor"].view(torch.uint8)},
        ),
        (
            r"b_tensor has strides .* K must be contiguous",
            {"b_tensor": b.data.permute(0, 2, 1).contiguous().permute(2, 1, 0)},
        ),
        (r"bias_tensor must be \(192, 4\)", {"bias_tensor": torch.ones(4, 192)}),
    ):
        refused(grouped_gemm_quant, match, **(good | change))


def test_sizes_that_cannot_be_stored() -> None:
    a, b, offs = operands(MXFP8, n=72)
    common: dict[str, Any] = {"a_tensor": a, "b_tensor": b, "padded_offsets": offs}
    grouped_gemm_quant(**common)
    refused(
        grouped_gemm_quant,
        r"N of the output is 72; it must be a multiple of 16 for MXFP8",
        **common,
        d_format=MXFP8,
    )
    refused(grouped_gemm_quant, r"multiple of 32 for MXFP4", **common, d_format=MXFP4)
    refused(grouped_gemm_swiglu_quant, r"multiple of 64", **common, gate_up="interleaved")
    refused(grouped_gemm_swiglu_quant, r"N of the output is 36", **common, gate_up="concatenated")
    refused(
        grouped_gemm_swiglu_quant,
        r"gate_up is 'split'; allowed: 'interleaved', 'concatenated'",
        **common,
        gate_up="split",
    )


def test_no_kernel_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel does it in one launch nothing is put together from several."""
    monkeypatch.setattr(paths, "PATHS", tuple(p for p in paths.PATHS if p.operation != "grouped_gemm_quant"))
    a, b, offs = operands(MXFP8)
    for backend in ("emulator", "emulator:sm_100a"):
        refused(
            grouped_gemm_quant,
            r"grouped_gemm_quant of MXFP8 x MXFP8 has no kernel for sm_\w+; supported there: nothing yet",
            a_tensor=a,
            b_tensor=b,
            padded_offsets=offs,
            backend=backend,
        )


# --- the class -------------------------------------------------------------------------------------------


def class_case(dtype: torch.dtype, m_aligned: int = 1) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(arguments of execute, options, what the function returns for them)."""
    a, b, offs = operands(MXFP8)
    given = as_cudnn(a, b) | {
        "padded_offsets": offs,
        "alpha_tensor": torch.tensor([1.0, 2.0, -1.0, 0.5]),
        "prob_tensor": torch.rand(233, 1, 1),
        "norm_const_tensor": torch.tensor([0.5]) if dtype == torch.float8_e4m3fn else None,
    }
    wanted = grouped_gemm_quant(**given, d_dtype=dtype, m_aligned=m_aligned)
    own = {
        key: None if t is None else torch.empty_like(t, memory_format=torch.preserve_format)
        for key, t in wanted.items()
    }
    if own["amax_tensor"] is not None:
        own["amax_tensor"].fill_(-math.inf)
    return given | own, {"m_aligned": m_aligned}, wanted


def samples_of(given: dict[str, Any]) -> dict[str, Any]:
    return {"sample_" + name.removesuffix("_tensor"): t for name, t in given.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_class_computes_what_the_function_does(dtype: torch.dtype) -> None:
    given, options, wanted = class_case(dtype)
    api = GroupedGemmQuant(**samples_of(given), **options)
    assert api.check_support()
    with pytest.raises(RuntimeError, match="compile"):
        api.execute(**given)
    api.compile()
    api.execute(**given)
    for key, t in wanted.items():
        if t is not None and not key.startswith("sfd"):
            assert torch.equal(bits(given[key]), bits(t)), key
    if dtype == torch.float8_e4m3fn:
        got = layouts.from_blocked(layouts.from_cudnn_view(given["sfd_row_tensor"])[0], 233, 6)
        assert torch.equal(bits(got), bits(layouts.plain_scale(wanted.row)))
        # Blocks that exist: 70 rows are 3 in tile 0, 130 are 5 in tiles 1 and 2, 33 are 2 in tile 3.
        exist = [0, 1, 2, 4, 5, 6, 7, 8, 12, 13]
        one, two = (
            layouts.from_blocked(layouts.from_cudnn_view(t)[0], 192, 4 * wanted.column_tiles).view(
                torch.uint8
            )
            for t in (given["sfd_col_tensor"], wanted["sfd_col_tensor"])
        )
        assert torch.equal(one[:, exist], two[:, exist])


def test_the_class_refuses_by_name() -> None:
    given, options, _ = class_case(torch.float8_e4m3fn)
    for match, change in (
        (r"norm_const_tensor is None; sfd_row and norm_const are needed", {"norm_const_tensor": None}),
        (r"sfd_row_tensor is None", {"sfd_row_tensor": None}),
        (r"d_col_tensor and sfd_col_tensor must be given both or neither", {"sfd_col_tensor": None}),
        (r"which has no scales", {"d_tensor": torch.empty(233, 192, 1, dtype=torch.bfloat16)}),
        (
            r"d_tensor must be \(233, 192, 1\)",
            {"d_tensor": torch.empty(233, 96, 1, dtype=torch.float8_e4m3fn)},
        ),
        (r"sfd_row_tensor has strides", {"sfd_row_tensor": given["sfd_row_tensor"].contiguous()}),
        (
            r"sfd_col_tensor has 2 column tiles; 4 groups of 233 rows .* m_aligned=256",
            {"sfd_col_tensor": given["sfd_col_tensor"][:, :, :, :, :2]},
        ),
        (r"amax_tensor must be \(4, 1\)", {"amax_tensor": torch.empty(4)}),
        (r"alpha_tensor must be \(4,\)", {"alpha_tensor": torch.ones(5)}),
    ):
        refused(GroupedGemmQuant(**samples_of(given | change), **options).check_support, match)


def test_the_class_takes_other_rows_and_no_other_kind_of_call() -> None:
    given, options, _ = class_case(torch.bfloat16)
    api = GroupedGemmQuant(**samples_of(given), **options)
    api.compile()
    a, b, offs = operands(MXFP8, [5, 6, 7, 8], seed=9)
    other = (
        given
        | as_cudnn(a, b)
        | {
            "padded_offsets": offs,
            "prob_tensor": torch.rand(26, 1, 1),
            "d_tensor": torch.empty(26, 192, 1, dtype=torch.bfloat16),
        }
    )
    api.execute(**other)
    wanted = exact_d(a, b, offs, given["alpha_tensor"], other["prob_tensor"])
    check_groups(other["d_tensor"][:, :, 0], wanted, offs, 0.1, 0.01)
    refused(
        api.execute,
        r"alpha_tensor is NoneType; the samples came with one",
        **(given | {"alpha_tensor": None}),
    )
    halves = torch.empty(233, 192, 1, dtype=torch.float16)
    refused(api.execute, r"the tensors differ from the samples", **(given | {"d_tensor": halves}))


def test_a_layout_of_columns_that_are_not_asked_for_is_refused(generator: torch.Generator) -> None:
    a = padless.quantize(torch.randn(8, 128, generator=generator), padless.FP8_BLOCK, kind="activation")
    b = padless.quantize(torch.randn(1, 128, 128, generator=generator), padless.FP8_BLOCK, kind="weight")
    with pytest.raises(ValueError, match="column_layout is 'blocked' and there is no column output"):
        grouped_gemm_quant(
            a_tensor=a,
            b_tensor=b,
            padded_offsets=padless.group_offsets([8]),
            d_format=padless.MXFP8,
            column_output=False,
            column_layout="blocked",
        )
