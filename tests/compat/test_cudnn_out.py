"""A given output of the quantizing calls: the bits of a new one, in the memory that was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import padless
from padless.formats import FP8_BLOCK, MXFP4, MXFP8, NVFP4, BlockScaledFormat, BlockScaledTensor

SIZES, M, N, K = (1, 0, 127, 129), 260, 128, 160  # three rows past the last group
OFFS, END = padless.group_offsets(SIZES), sum(SIZES)
CASES = [(FP8_BLOCK, "plain_mn"), (FP8_BLOCK, "plain"), (NVFP4, "plain")]
CASES += [(format, layout) for format in (MXFP8, MXFP4) for layout in ("plain", "blocked", "blocked_groups")]


def given(format: BlockScaledFormat) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    source = FP8_BLOCK if format == FP8_BLOCK else MXFP8
    a = padless.quantize(torch.randn(M, K, generator=generator), source)
    b = padless.quantize(torch.randn(len(SIZES), N, K, generator=generator), source, kind="weight")
    prob = torch.rand(M, generator=generator) + 0.1
    return {"a_tensor": a, "b_tensor": b, "padded_offsets": OFFS, "prob_tensor": prob}


def poisoned(t: BlockScaledTensor) -> tuple[BlockScaledTensor, list[torch.Tensor]]:
    """A tensor like t that holds 0x5A, and the bytes around and between its rows."""
    stored = t.data.shape[1]
    around = torch.full((M + 2, stored + 32), 0x5A, dtype=torch.uint8)
    data = around[1:-1, 16:-16].view(t.data.dtype)
    scale = torch.empty_strided(t.scale.shape, t.scale.stride(), dtype=t.scale.dtype)
    torch.as_strided(scale.view(torch.uint8) if scale.element_size() == 1 else scale.view(torch.int32), scale.shape,
                     scale.stride()).fill_(0x5A)  # fmt: skip
    return BlockScaledTensor(data, scale, t.format, t.global_scale, t.scale_layout, t.offs), [around]


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.parametrize("gate_up", [None, "concatenated"])
@pytest.mark.parametrize(("format", "layout"), CASES, ids=lambda value: getattr(value, "name", value))
def test_a_given_output_has_the_bits_of_a_new_one(format: BlockScaledFormat, layout: str, gate_up: str | None) -> None:
    glu = {} if gate_up is None else {"gate_up": gate_up}
    call: Any = padless.grouped_gemm_quant if gate_up is None else padless.grouped_gemm_swiglu_quant
    decode = torch.tensor([0.02]) if format == NVFP4 else None
    options: dict[str, Any] = {**given(format), **glu}
    new = call(**options, d_format=format, row_layout=layout, global_scale_tensor=decode)
    out, (around,) = poisoned(new.row)
    done = call(**options, out=out)
    assert done.row.data.data_ptr() == out.data.data_ptr()
    assert done.row.scale.data_ptr() == out.scale.data_ptr()
    assert done.row.scale_layout == out.scale_layout
    assert torch.equal(bits(out.data)[:END], bits(new.row.data)[:END])
    values = [padless.dequantize(t, offs=OFFS)[:END] for t in (out, new.row)]
    assert torch.equal(*values)
    assert values[0].count_nonzero() > values[0].numel() // 4
    inside = around[1:-1, 16:-16]
    assert (inside[END:] == 0x5A).all()
    inside.fill_(0x5A)
    assert (around == 0x5A).all()
    if layout == "plain" and format != FP8_BLOCK:
        assert torch.equal(bits(out.scale)[:END], bits(new.row.scale)[:END])
    if format == MXFP8:
        assert torch.equal(bits(done["d_col_tensor"])[:END], bits(new["d_col_tensor"])[:END])


def test_columns_alone_and_other_formats_are_not_written_into() -> None:
    options = given(MXFP8)
    row = padless.grouped_gemm_quant(**options, d_format=MXFP8).row
    nvfp4 = padless.grouped_gemm_quant(**options, d_format=NVFP4, global_scale_tensor=torch.tensor([0.02])).row
    narrow = padless.quantize(torch.randn(M, N - 32), MXFP8, scale_layout="blocked")
    apart = BlockScaledTensor(row.data.t().contiguous().t(), row.scale, MXFP8, scale_layout="blocked")
    bad: list[tuple[dict[str, Any], str]] = [
        ({"out": torch.zeros(M, N)}, r"out must be a BlockScaledTensor .* got \(260, 128\) torch.float32"),
        (
            {"out": row, "d_format": MXFP4},
            "out is MXFP8 with 'blocked' scales; this call computes MXFP4 with 'blocked'",
        ),
        ({"out": row, "row_layout": "plain"}, "this call computes MXFP8 with 'plain' scales"),
        ({"out": row, "row_output": False}, "this call computes no row output"),
        ({"out": narrow}, "out.data"),
        ({"out": apart}, "out.data has strides"),
        ({"out": nvfp4, "global_scale_tensor": torch.tensor([0.02])}, "out has a global scale that is not"),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            padless.grouped_gemm_quant(**options, **changes)
