"""An output that shows what was written to it: poison inside, guard rows around it, all in one allocation.

For tests, ``padless verify`` and ``padless fuzz``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

# NaNs that no arithmetic makes, by element size: a computed NaN stored where nothing belongs has other bits. Bytes have
# no NaN to spare.
POISON = {
    1: (torch.uint8, 0xA5),
    2: (torch.int16, 0x7FD5),
    4: (torch.int32, 0x7FC0DEAD),
    8: (torch.int64, 0x7FF8DEADDEADDEAD),
}
# More than the tallest tile, so that a whole tile stored at a wrong row still hits the fence.
GUARD_ROWS = 256
GUARD_BYTES = 1 << 20


@contextmanager
def guarded_memory() -> Iterator[Callable[[], torch.Tensor]]:
    """Puts what torch.empty and torch.zeros make in this block between `GUARD_BYTES` random bytes on either side.

    What torch.empty makes holds random bytes too. Yields a function: whether any of those around changed, () bool.
    """
    original = torch.empty
    made: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        t = original(*args, **options | {"device": "meta"})
        end = GUARD_BYTES + t.numel() * t.element_size()
        whole = torch.randint(256, (end + GUARD_BYTES,), dtype=torch.uint8, device=options.get("device"))
        made.append((whole, whole.clone(), end))
        return whole[GUARD_BYTES:end].view(t.dtype).view(t.shape)

    def changed() -> torch.Tensor:
        differ = [(whole != before, end) for whole, before, end in made]
        return torch.stack([d[:GUARD_BYTES].any() | d[end:].any() for d, end in differ]).any()

    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        return empty(*args, **options).zero_()

    with mock.patch.object(torch, "empty", empty), mock.patch.object(torch, "zeros", zeros):
        yield changed


class GuardedOutput:
    """An (M, N) output of poison inside of more poison: guard rows before and behind, and a gap after each row.

    Pass `.out` to the operation, then call `check(valid_rows)`, or ask for `findings`, which wait for no GPU.

    Args:
        M: rows; a tuple for an output of more dimensions, whose last one is N.
        gap: bytes between the rows.
        guard: guard rows before the output, and behind it.
    """

    def __init__(
        self,
        M: int | tuple[int, ...],
        N: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        gap: int = 0,
        guard: int = GUARD_ROWS,
    ) -> None:
        leading = (M,) if isinstance(M, int) else M
        self.rows, self._columns, self._guard = math.prod(leading), N, guard
        kind, self._poison = POISON[dtype.itemsize]
        shape = (guard + self.rows + guard, N + gap // dtype.itemsize)
        self._whole = torch.full(shape, self._poison, dtype=kind, device=device)
        inside = self._whole.view(dtype)[guard : guard + self.rows, :N]
        self.out = inside if isinstance(M, int) else inside.unflatten(0, leading)

    def findings(self, valid_rows: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Sentences, each with a () bool tensor that says whether it is so.

        Rows [0, valid_rows), None for all of them, have to be written, every element, and nothing else. Bytes may be
        left as they were.
        """
        left = self._whole == self._poison
        valid = self.rows if valid_rows is None else valid_rows
        region = left[self._guard : self._guard + valid, : self._columns]
        if self._whole.element_size() > 1:
            yield "elements of valid rows were not written", region.any()
        region.fill_(True)
        yield "something was written outside of the valid rows", ~left.all()

    def check(self, valid_rows: int | torch.Tensor | None = None, *, expect_finite: bool = True) -> None:
        """Raise AssertionError unless exactly rows [0, valid_rows) were written, None for all of them.

        With expect_finite they hold finite numbers alone.
        """
        valid = self.rows if valid_rows is None else int(valid_rows)
        left, first, end = self._whole == self._poison, self._guard, self._guard + self.rows
        assert left[:first].all(), "the guard rows before the output were written"
        assert left[end:].all(), "the guard rows behind the output were written"
        assert left[first:end, self._columns :].all(), "the gaps between rows were written"
        inside = left[first:end, : self._columns]
        late = torch.nonzero(~inside[valid:].all(dim=1)).flatten() + valid
        assert late.numel() == 0, f"rows {late.tolist()[:8]} past the {valid} valid ones were written"
        unwritten = inside[:valid] & (self._whole.element_size() > 1)
        if expect_finite:
            unwritten = unwritten | ~self.out.reshape(self.rows, self._columns)[:valid].isfinite()
        bad = torch.nonzero(unwritten.any(dim=1)).flatten().tolist()
        assert not bad, (
            f"rows {bad[:8]} of {valid} were not written, or not with numbers: {int(unwritten.sum())} elements"
        )
