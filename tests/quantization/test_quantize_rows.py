"""quantize(x, format, rows=...): the bits of quantize(x[rows], format), on any rows, and errors in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from padless import FP8_BLOCK, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, quantize
from support.triton_cases import assert_same, awkward

FORMATS = (FP8_BLOCK, MXFP8, MXFP8_E5M2, MXFP4, NVFP4)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_gathered_rows(format: Any, dtype: torch.dtype) -> None:
    x = awkward((13, 290), dtype, 1)
    options: dict[str, Any] = {"global_scale": 0.01} if format == NVFP4 else {}
    for rows in (torch.tensor([12, 0, 3, 3, 7]), torch.randint(13, (64,), dtype=torch.int32), torch.arange(0)):
        assert_same(quantize(x, format, rows=rows, **options), quantize(x[rows.long()], format, **options))
    outside = quantize(x, format, rows=torch.tensor([-5, 99]), **options)
    assert_same(outside, quantize(x[[0, 12]], format, **options))


def test_layouts_and_groups() -> None:
    x, rows = awkward((13, 160), torch.bfloat16, 2), torch.randint(13, (40,))
    offs = torch.tensor([7, 7, 33], dtype=torch.int32)
    assert_same(quantize(x, FP8_BLOCK, rows=rows, scale_major="k"), quantize(x[rows], FP8_BLOCK, scale_major="k"))
    for format, layout in ((MXFP8, "blocked"), (MXFP4, "blocked_groups"), (NVFP4, "plain")):
        options: dict[str, Any] = {"scale_layout": layout}
        if layout != "blocked":
            options["offs"] = offs
        if format == NVFP4:
            options["global_scale"] = torch.tensor([0.1, 1.0, 0.003])
        assert_same(quantize(x, format, rows=rows, **options), quantize(x[rows], format, **options))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rows": [1, 2]}, "rows must be 1-D"),
        ({"rows": torch.zeros(3)}, "rows must be 1-D int32 or int64"),
        ({"rows": torch.zeros((3, 1), dtype=torch.int64)}, "rows must be 1-D"),
        ({"rows": torch.zeros(3, dtype=torch.int64), "kind": "weight"}, "rows must be None for kind='weight'"),
        ({"rows": torch.zeros(3, dtype=torch.int64), "format": NVFP4}, "with rows NVFP4 must be given it"),
        ({"rows": torch.zeros(3, dtype=torch.int64), "x": torch.zeros(0, 64)}, "x no rows"),
    ],
)
def test_errors(options: dict[str, Any], named: str) -> None:
    given = {"x": torch.zeros(4, 64), "format": MXFP8, **options}
    with pytest.raises(ValueError, match=named):
        quantize(given.pop("x"), given.pop("format"), **given)
