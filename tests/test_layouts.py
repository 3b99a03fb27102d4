"""Where scales lie in memory, element by element."""

from __future__ import annotations

import pytest
import torch

from padless import layouts


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 129])
@pytest.mark.parametrize("columns", [1, 3])
def test_mn_major_places_every_scale(rows: int, columns: int) -> None:
    scale = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    moved = layouts.to_mn_major(scale)
    ld = max(4, (rows + 3) // 4 * 4)
    assert torch.equal(moved, scale)
    flat = torch.as_strided(moved, (columns * ld,), (1,)).tolist()
    for c in range(columns):
        for r in range(ld):
            assert flat[c * ld + r] == (scale[r, c].item() if r < rows else 0.0)


def test_mn_major_scales_are_not_copied_again() -> None:
    moved = layouts.to_mn_major(torch.rand(5, 2))
    assert layouts.to_mn_major(moved) is moved
