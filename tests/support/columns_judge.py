"""Judge of token-contiguous copies: what the class says of them, block by block."""

from __future__ import annotations

import torch

from padless import FP8_BLOCK, GroupedColumns
from padless.formats import round_up
from padless.reference.epilogue import nearest_code
from padless.reference.gemm import group_rows
from support.triton_cases import bits


def judge(columns: GroupedColumns, x: torch.Tensor, offs: torch.Tensor) -> None:
    """Raise AssertionError unless columns is what the class says of x, group by group, block by block, byte by byte."""
    m, features = x.shape
    groups = group_rows(offs, m)
    assert columns.data.shape == (features, round_up(m + (columns.alignment - 1) * len(groups), 128))
    assert columns.data.is_contiguous()
    per_block = columns.block[0]
    assert columns.scale.shape == (m // 128 + len(groups), -(-features // per_block))
    codes = columns.data.view(torch.uint8)
    want_codes, want_scale = torch.zeros_like(codes), torch.zeros_like(columns.scale)
    start, first_block = 0, 0
    for g, (row, end) in enumerate(groups):
        assert columns.starts[g] == start, f"start of group {g}"
        assert columns.block_starts[g] == first_block, f"first block of group {g}"
        for i, token in enumerate(range(row, end, 128)):
            values = x[token : min(token + 128, end)].float()
            for j, feature in enumerate(range(0, features, per_block)):
                part = values[:, feature : feature + per_block]
                largest = part.abs().max()  # NaN if there is one
                scale = torch.maximum(largest, torch.tensor(1e-4)) / torch.tensor(448.0)
                want_scale[first_block + i, j] = scale if scale == scale else float("nan")
                column = start + 128 * i
                want_codes[feature : feature + per_block, column : column + len(part)] = nearest_code(
                    part * (1.0 / scale), FP8_BLOCK
                ).t()
        start += round_up(end - row, columns.alignment)
        first_block += -(-(end - row) // 128)
    wrong = torch.nonzero(bits(want_scale) != bits(columns.scale))
    assert len(wrong) == 0, f"{len(wrong)} bytes of scales differ, the first at {wrong[0].tolist()}"
    wrong = torch.nonzero(want_codes != codes)
    assert len(wrong) == 0, f"{len(wrong)} codes differ, the first at {wrong[0].tolist()}"
