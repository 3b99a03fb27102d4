"""Wrong arguments of the quantising grouped GEMMs are refused by name before anything runs; no kernel, no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK, MXFP4, MXFP8, NVFP4, grouped_gemm_quant, grouped_gemm_swiglu_quant
from padless.kernels import table as paths
from support.quant_calls import as_cudnn, operands, refused


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
        (r"alpha_tensor must be .*got \(4,\) torch.int32", {"alpha_tensor": torch.ones(4, dtype=torch.int32)}),
        (r"prob_tensor must be \(233, 1, 1\) or \(233,\)", {"prob_tensor": torch.ones(232)}),
        (r"bias_tensor must be \(4, 192\)", {"bias_tensor": torch.ones(192, 4)}),
        (r"norm_const_tensor must be", {"norm_const_tensor": 0.01, "d_dtype": torch.float8_e4m3fn}),
        (r"norm_const_tensor must be None for FP8_BLOCK", {"norm_const_tensor": torch.ones(1), "d_format": FP8_BLOCK}),
        (r"scale_rule is 'te'; allowed", {"scale_rule": "te", "d_format": MXFP8}),
        (
            r"scale_rule is 'floor'; with norm_const",
            {"scale_rule": "floor", "d_format": MXFP8, "norm_const_tensor": torch.ones(1)},
        ),
        (r"scale_rule is 'floor'; it must be None", {"scale_rule": "floor"}),
        (r"global_scale_tensor is None; NVFP4", {"d_format": NVFP4}),
        (r"global_scale_tensor must be None for MXFP8", {"d_format": MXFP8, "global_scale_tensor": torch.ones(1)}),
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
        (r"padded_offsets\[0\] is 70, which is no multiple of m_aligned = 128", {"check_offs": True, "m_aligned": 128}),
        (r"offs\[3\] is 400", {"check_offs": True, "padded_offsets": torch.tensor([1, 2, 3, 400], dtype=torch.int32)}),
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
        (r"a_tensor must be a \(M, K\) or \(M, K, 1\)", {"a_tensor": good["a_tensor"][:, 0, 0]}),
        (r"a_tensor must be a \(M, K\) or \(M, K, 1\)", {"a_tensor": good["b_tensor"]}),
        (r"a_tensor is a BlockScaledTensor, so b_tensor", {"a_tensor": a}),
        (r"sfa_tensor must be a tensor of scales, got NoneType", {"sfa_tensor": None}),
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
        grouped_gemm_quant, r"N of the output is 72; it must be a multiple of 16 for MXFP8", **common, d_format=MXFP8
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
    monkeypatch.setattr(paths, "ROUTES", tuple(p for p in paths.ROUTES if p.operation != "grouped_gemm_quant"))
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
