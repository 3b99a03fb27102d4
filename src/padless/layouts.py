"""Where scales and packed codes lie in memory, in plain torch."""

from __future__ import annotations

import torch

from padless.formats import MN_MAJOR_ALIGNMENT, is_mn_major, round_up


def empty_mn_major(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Uninitialised float32 (rows, columns) with strides (1, ld), ld = rows rounded up to 4 and at least 4.

    Example: rows 5, columns 3 -> strides (1, 8); element (4, 2) is float 2 * 8 + 4 = 20 of the storage.
    """
    ld = max(round_up(rows, MN_MAJOR_ALIGNMENT), MN_MAJOR_ALIGNMENT)
    return torch.empty((columns, ld), dtype=torch.float32, device=device).t()[:rows]


def to_mn_major(scale: torch.Tensor) -> torch.Tensor:
    """The (rows, columns) float32 scales in MN-major layout, padding zero; as they are if they already have
    it.
    """
    if is_mn_major(scale):
        return scale
    rows, columns = scale.shape
    out = empty_mn_major(rows, columns, scale.device)
    ld = out.stride(1)
    torch.as_strided(out, (ld - rows, columns), (1, ld), rows).zero_()
    out.copy_(scale)
    return out
