"""An output that shows what was written to it: poison inside, guard rows around it, all in one allocation.

For tests and for ``padless verify``.
"""

from __future__ import annotations

import torch

# NaNs that no arithmetic makes, by element size: a computed NaN stored where nothing belongs has other bits.
POISON = {2: (torch.int16, 0x7FD5), 4: (torch.int32, 0x7FC0DEAD), 8: (torch.int64, 0x7FF8DEADDEADDEAD)}
# More than the tallest tile, so that a whole tile stored at a wrong row still hits the fence.
GUARD_ROWS = 256


class GuardedOutput:
    """An (M, N) output full of NaN between two fences of random bytes, all in one allocation.

    Pass `.out` to the operation, then call `check(valid_rows)`.
    """

    def __init__(self, M: int, N: int, dtype: torch.dtype, device: str | torch.device = "cpu") -> None:
        self._rows = M
        row_bytes = N * dtype.itemsize
        total = (GUARD_ROWS + M + GUARD_ROWS) * row_bytes
        self._fence = GUARD_ROWS * row_bytes
        noise = torch.Generator(device).manual_seed(M * 8191 + N)
        self._bytes = torch.randint(0, 256, (total,), dtype=torch.uint8, device=device, generator=noise)
        inside = self._bytes[self._fence : total - self._fence]
        self.out = inside.view(dtype).view(M, N)
        bits_dtype, poison = POISON[dtype.itemsize]
        inside.view(bits_dtype).fill_(poison)
        self._before = self._bytes.clone()

    def check(self, valid_rows: int | torch.Tensor, *, expect_finite: bool = True) -> None:
        """Raise AssertionError unless exactly rows [0, valid_rows) were written.

        The fences and the rows past valid_rows must hold the bits they held before; with expect_finite no NaN
        may be left in the valid rows.
        """
        valid = int(valid_rows)
        changed = self._bytes != self._before
        assert not changed[: self._fence].any(), "the guard rows before the output were written"
        end = self._bytes.numel() - self._fence
        assert not changed[end:].any(), "the guard rows behind the output were written"
        inside = changed[self._fence : end].view(self._rows, self._fence // GUARD_ROWS)
        late = torch.nonzero(inside[valid:].any(dim=1)).flatten() + valid
        assert late.numel() == 0, f"rows {late.tolist()[:8]} past the {valid} valid ones were written"
        if expect_finite:
            bad = torch.nonzero(~self.out[:valid].isfinite().all(dim=1)).flatten()
            assert bad.numel() == 0, f"rows {bad.tolist()[:8]} of {valid} were not written, or not with numbers"
