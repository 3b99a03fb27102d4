"""Groups of rows: their END offsets from other forms, those that scales were made for, and their transposed copy.

`RowGroups` is what an operand holds against the groups of a call. `GroupedColumns` is the token-contiguous copy of
grouped rows, the operand of a product along the tokens (a weight gradient): wgmma reads FP8 operands along the summed
dimension. A group starts at a multiple of ``alignment`` tokens; the slack between a group's last token and the next
start, and everything past the last group, holds zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch

from padless.arguments import check_integer, check_readable, check_tensor_type, refuse_kinds

ALIGNMENTS = (32, 128)  # tokens: one wgmma K step, or one line of shared memory
SCALE_BLOCK = 128  # tokens that share a scale, counted from the group's start


class RowGroups:
    """The groups that (G,) cumulative END offsets gave when this was made.

    offs: the tensor itself. Its memory is held too, so that no other tensor can take it where ``offs.data`` is assigned.

    On a CPU the values are remembered and compared. On a GPU nothing waits for them: there the tensor counts, by its
    memory and by the number of times that torch wrote to it.
    """

    __slots__ = ("_ends", "_memory", "_version", "offs")

    def __init__(self, offs: torch.Tensor) -> None:
        self.offs = offs
        self._memory = offs.detach()
        self._version = version_of(offs)
        self._ends: list[int] | None = offs.tolist() if offs.is_cpu else None

    def is_of(self, offs: torch.Tensor | None) -> bool:
        """Whether ``offs`` is the same tensor, or another one over the same memory, unchanged as far as torch knows."""
        mine = self._memory
        if not isinstance(offs, torch.Tensor):  # nor None
            return False
        if offs.data_ptr() != mine.data_ptr() or offs.shape != mine.shape or offs.dtype != mine.dtype:
            return False
        return (offs.stride() == mine.stride() or offs.numel() < 2) and version_of(offs) == self._version

    def given(self) -> torch.Tensor:
        """The ends that this was made of, for a copy: ``offs``, or another tensor where it was written to since.

        Raises ValueError on a GPU, where nothing else has them.
        """
        if self._ends is None and not self.is_of(self.offs):
            raise ValueError(
                "offs was written to since t was quantized with it, and a copy would be for other groups; copy t "
                "before, or quantize again"
            )
        if self._ends is None or self.offs.tolist() == self._ends:
            return self.offs
        return torch.tensor(self._ends, dtype=self.offs.dtype, device=self.offs.device)

    def check(self, name: str, offs: torch.Tensor | None, rows: int, num_groups: int, whose: str) -> None:
        """Raises ValueError unless the groups of ``offs`` are these; None stands for one group of all rows.

        name: the operand in the message. whose: the argument with num_groups groups.
        """
        again = f"quantize {name} with the offs of this call"
        if len(self.offs) != num_groups:
            groups = "1 group" if num_groups == 1 else f"{num_groups} groups"
            raise ValueError(f"{name} has scales for {len(self.offs)} groups of rows and {whose} has {groups}; {again}")
        if is_traced(self.offs):
            return  # what is traced compares when the program runs
        if offs is None:
            if self._ends is not None and (end := clamped_ends(self._ends, rows)[-1]) != rows:
                raise ValueError(
                    f"{name} has scales for a group that ends at row {end} and M is {rows}; {again}, or without any"
                )
        elif self._ends is None or not offs.is_cpu:
            if not self.is_of(offs):
                raise ValueError(
                    f"offs is another tensor than the one that {name} was quantized with, or was written to since; "
                    f"pass that one, or {again}"
                )
        else:
            ends = zip(clamped_ends(offs.tolist(), rows), clamped_ends(self._ends, rows), strict=True)
            for group, (end, mine) in enumerate(ends):
                if end != mine:
                    raise ValueError(
                        f"offs[{group}] is {end} and {name} has scales for groups of which that one ends at {mine}; "
                        f"{again}"
                    )


def row_groups_of(t: Any) -> RowGroups | None:
    """The groups of a BlockScaledTensor, remembered now where a compiled program made it; None while traced."""
    if t.row_groups is None and t.offs is not None and not is_traced(t.offs):
        object.__setattr__(t, "row_groups", RowGroups(t.offs))
    return t.row_groups  # type: ignore[no-any-return]


def check_offs(offs: object, data: torch.Tensor, num_global_scales: int) -> None:
    """Raises ValueError unless ``offs`` can be the ends of groups of rows of ``data`` with so many global scales."""
    refuse_kinds(offs=offs)
    if data.dim() != 2:
        raise ValueError(f"offs must be None for data of shape {tuple(data.shape)}: it is of groups of rows")
    if not is_integers(offs):
        got = f"{tuple(offs.shape)} {offs.dtype}" if isinstance(offs, torch.Tensor) else type(offs).__name__
        raise ValueError(f"offs must be a 1-D tensor of integers (padless.group_offsets), got {got}")
    if offs.device != data.device:
        raise ValueError(f"offs must be on data's device {data.device}, got {offs.device}")
    if num_global_scales not in (1, len(offs)):
        raise ValueError(
            f"global_scale has {num_global_scales} values and offs {len(offs)} groups; it must have one value, "
            "or one for each group"
        )


def clamped_ends(offs: Iterable[int], rows: int) -> list[int]:
    """The ends that count: the running maximum, within [0, rows]."""
    return [min(end, rows) for end in accumulate(offs, max, initial=0)][1:]


def version_of(offs: torch.Tensor) -> int | None:
    """The number of times torch wrote to the tensor; unknown for one that was made in inference mode."""
    return None if offs.is_inference() else offs._version


# --- what can be known of values --------------------------------------------------------------------------

PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


def is_traced(t: torch.Tensor) -> bool:
    """Whether a call with t, and with other tensors made as t was, is being compiled or exported, or t has no values: it
    is fake, or on the meta device."""
    return torch.compiler.is_compiling() or is_dispatched(t) or t.is_meta


def is_dispatched(t: torch.Tensor) -> bool:
    """Whether t's class sees operators itself, as a fake tensor's does: other subclasses are tensors with values."""
    return type(t) not in PLAIN_TENSORS and type(t).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def is_readable(t: torch.Tensor) -> bool:
    """Whether the values of t can be looked at without a wait: it is on the CPU, and nothing is being traced."""
    return t.is_cpu and not is_traced(t)


def checked_equal(t: torch.Tensor, other: torch.Tensor, otherwise: str) -> torch.Tensor:
    """``t``, where ``other`` has the same values, else a ValueError; NaN where a traced program finds others."""
    if is_traced(t):
        return torch.where((t == other).all(), t, torch.nan)
    if not torch.equal(t, other):
        raise ValueError(otherwise)
    return t


# --- grouped columns --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GroupedColumns:
    """Codes (features, T') with tokens innermost, and a scale per 128 tokens of a group.

    data: (features, T') float8_e4m3fn, row-major. Tokens of group g are columns starts[g] .. starts[g] + M_g; all other
        columns are zero. T' is round_up(M + (alignment - 1) * G, 128): known on the host, whatever the sizes are.
    scale: float32 decode scales. For ``block`` (1, 128): (S, features), features contiguous, a scale per feature and 128
        tokens. For (128, 128): (S, ceil(features / 128)), a scale per 128 features and 128 tokens. Row
        block_starts[g] + i belongs to tokens 128 i .. of group g. S is M // 128 + G.
    offs: (G,) int32 cumulative END rows of the groups in the source.
    starts: (G,) int32, starts[0] = 0, starts[g + 1] = starts[g] + round_up(M_g, alignment).
    block_starts: (G,) int32, the sum of ceil(M_h / 128) over h < g.
    block: (features, tokens) that share a scale: (1, 128) or (128, 128).
    alignment: 32 or 128 tokens.

    Raises ValueError for what is no tensor, and a tensor that requires grad; products look at the rest.
    """

    data: torch.Tensor
    scale: torch.Tensor
    offs: torch.Tensor
    starts: torch.Tensor
    block_starts: torch.Tensor
    block: tuple[int, int]
    alignment: int

    def __post_init__(self) -> None:
        check_readable(data=self.data, scale=self.scale)
        for name in ("data", "scale", "offs", "starts", "block_starts"):
            check_tensor_type(name, getattr(self, name))

    def __reduce__(self) -> tuple[object, ...]:
        parts = (self.scale, self.offs, self.starts, self.block_starts, self.block, self.alignment)
        return _columns_from, (self.data.view(torch.uint8), *parts)  # pickle takes no float8

    @property
    def features(self) -> int:
        return self.data.shape[0]

    @property
    def num_groups(self) -> int:
        return self.offs.shape[0]


def _columns_from(data: torch.Tensor, *others: Any) -> GroupedColumns:
    """Columns of what ``GroupedColumns.__reduce__`` took apart."""
    return GroupedColumns(data.view(torch.float8_e4m3fn), *others)


torch.serialization.add_safe_globals([_columns_from])


# --- END offsets from the forms of other packages --------------------------------------------------------


def offs_from_indptr(m_indptr: torch.Tensor) -> torch.Tensor:
    """(G,) int32 END offsets of groups given by their (G + 1,) starts and the end of the last, as FlashInfer has them.

    m_indptr: int32 or int64, its first entry 0. Raises ValueError; the first entry is looked at on a CPU alone.
    """
    _check_integers("m_indptr", m_indptr)
    if len(m_indptr) == 0 or (is_readable(m_indptr) and int(m_indptr[0]) != 0):
        raise ValueError(f"m_indptr must start with 0 and have an entry for each end, got {_shown(m_indptr)}")
    return m_indptr[1:].to(torch.int32).contiguous()


def offs_from_indices(m_indices: torch.Tensor, num_groups: int) -> torch.Tensor:
    """(G,) int32 END offsets of groups given by the group of every row, as DeepGEMM's contiguous layout has them.

    m_indices: (M,) int32 or int64, ascending; a negative entry is a row of padding, which joins the group ahead of it,
        or no group behind the last: what it holds is multiplied and its result means nothing.
    Example: indices [0, 0, -1, 2, -1] of 3 groups give [3, 3, 4].

    Raises ValueError; descending entries, and groups that do not exist, are looked for on a CPU alone. On a GPU an entry
    that descends counts as the largest one before it.
    """
    _check_integers("m_indices", m_indices)
    check_integer("num_groups", num_groups, 0)
    if is_readable(m_indices):
        kept = m_indices[m_indices >= 0]
        if bool((kept.diff() < 0).any()) or bool((kept >= num_groups).any()):
            raise ValueError(f"m_indices must ascend and be below num_groups = {num_groups}, got {_shown(m_indices)}")
    if len(m_indices) == 0:
        return torch.zeros(num_groups, dtype=torch.int32, device=m_indices.device)
    filled = m_indices.to(torch.int64).cummax(0).values
    used = (m_indices >= 0).to(torch.int32).flip(0).cumsum(0).flip(0) > 0
    filled = torch.where(used, filled, num_groups)
    groups = torch.arange(num_groups, device=m_indices.device)
    return torch.searchsorted(filled, groups, right=True).to(torch.int32)


class MaskedRows(NamedTuple):
    """Numbers of the rows of a masked layout (G, max_m, K) when they are put one after the other.

    rows: (G * max_m,) int64: row i of the sorted ones is row rows[i] of x.view(G * max_m, K); 0 past the last group.
    offs: (G,) int32 END offsets.
    inverse: (G, max_m) int64: the sorted row of slot (g, i); -1 past masked_m[g].
    """

    rows: torch.Tensor
    offs: torch.Tensor
    inverse: torch.Tensor


def from_masked(masked_m: torch.Tensor, max_m: int) -> MaskedRows:
    """Rows of DeepGEMM's masked layout, x (G, max_m, K) with masked_m[g] rows of group g, as groups without gaps.

    masked_m: (G,) int32 or int64; values outside of 0 .. max_m count as the nearest. Then
    ``quantize(x.view(G * max_m, K), format, rows=m.rows)`` quantizes the rows where they go, without a copy of x, and
    ``out[m.inverse.clamp(min=0)]`` is the result (G, max_m, N), whose rows past masked_m[g] mean nothing.

    Nothing waits for the device. Raises ValueError.
    """
    _check_integers("masked_m", masked_m)
    check_integer("max_m", max_m, 0)
    sizes = masked_m.to(torch.int64).clamp(0, max_m)
    ends = sizes.cumsum(0)
    slot = torch.arange(max_m, device=masked_m.device)
    inverse = torch.where(slot < sizes[:, None], (ends - sizes)[:, None] + slot, -1)
    total = masked_m.shape[0] * max_m
    flat = inverse.reshape(-1)
    rows = torch.zeros(total + 1, dtype=torch.int64, device=masked_m.device)
    rows[torch.where(flat < 0, total, flat)] = torch.arange(total, device=masked_m.device)
    return MaskedRows(rows[:total], ends.to(torch.int32), inverse)


def is_integers(t: object, rank: int = 1) -> TypeGuard[torch.Tensor]:
    """Whether ``t`` is an int32 or int64 tensor of so many dimensions."""
    return isinstance(t, torch.Tensor) and t.dtype in (torch.int32, torch.int64) and t.dim() == rank


def _check_integers(name: str, t: object) -> None:
    check_tensor_type(name, t)
    if not is_integers(t):
        got = f"{tuple(t.shape)} {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
        raise ValueError(f"{name} must be a 1-D int32 or int64 tensor, got {got}")


def _shown(t: torch.Tensor) -> str:
    """Values of a tensor on a CPU, its shape elsewhere."""
    return str(t.tolist()[:16]) if is_readable(t) else str(tuple(t.shape))
