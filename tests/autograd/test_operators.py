"""The operators of training hold what torch requires of operators; codes are bytes in their schemas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import padless
from padless import FP8_BLOCK, quantize, quantize_weight_both
from padless.nn import operators
from padless.nn.operators import bytes_of

M, N, K = 14, 32, 48
OFFS = padless.group_offsets([5, 0, 9])  # of all rows: those of no group hold anything


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def arguments() -> dict[str, tuple[Any, ...]]:
    a = bytes_of(quantize(normal(M, K), FP8_BLOCK))
    b = bytes_of(quantize(normal(3, N, K), FP8_BLOCK, kind="weight"))
    plain, w = normal(M, K).bfloat16(), normal(3, N, K).bfloat16()
    inverse = padless.moe.route(torch.tensor([[0, 2], [1, 5], [2, 2]]), 3).inverse
    both = [bytes_of(t) for t in quantize_weight_both(normal(3, N, K))]
    assert torch.equal(both[0][0], b[0])
    return {
        "bf16_grouped_gemm": (plain, w, OFFS, False, True),
        "bf16_grouped_gemm_wgrad": (normal(M, N).bfloat16(), plain, OFFS, torch.float32),
        "bf16_grouped_gemm_wgrad_": (torch.zeros(3, N, K), normal(M, N).bfloat16(), plain, OFFS, True),
        "zero_tail_": (normal(M, K), padless.group_offsets([5, 0, 6])),
        "quantize_rows": (normal(M, K), "MXFP8"),
        "nvfp4_rows": (normal(M, K), OFFS, True),
        "nvfp4_columns": (normal(M, K).bfloat16(), OFFS, True),
        "nvfp4_weight": (normal(3, N, K), True),
        "dequantize_rows": a,
        "slots_to_rows": (normal(3, 2), inverse),
        "rows_to_slots": (normal(6), inverse, torch.bfloat16),
        "swiglu_backward": (normal(M, K), normal(M, 2 * K), OFFS, normal(M), "concatenated"),
        "quantize_rows_columns": (normal(M, K), OFFS, [1, 128], 32, True, torch.arange(M - 1, -1, -1)),
        "quantize_weight_both": (normal(3, N, K),),
        "swiglu_backward_quantize": (normal(M, K), normal(M, 2 * K), OFFS, None, "concatenated", [1, 128], 32),
    }


@pytest.mark.parametrize("name", arguments())
def test_operator(name: str) -> None:
    """Schema, fake tensors, functionalization."""
    with torch.no_grad():
        torch.library.opcheck(getattr(torch.ops.padless, name).default, arguments()[name])


def test_a_result_of_another_shape_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = torch.library.Library("padless_test", "FRAGMENT")
    wrong.define("rows(Tensor x) -> (Tensor, Tensor)")
    wrong.impl("rows", operators._quantize_rows, "CPU")
    torch.library.register_fake("padless_test::rows", lambda x: (x.new_empty(x.shape), x.new_empty(1)), lib=wrong)
    with pytest.raises(Exception, match=r"(?i)mismatch|not equal|match"):
        torch.library.opcheck(torch.ops.padless_test.rows.default, (normal(M, K),))
