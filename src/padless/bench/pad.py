"""Padding every group to a multiple of 128 rows, and back: for tests and benchmarks, padless needs none.

"Pad, then the same GEMM" is the baseline that the padding-free GEMM is compared with, so the padding must be good: one
launch, no host synchronisation (offsets stay on the device), rows copied in 16-byte words with several loads in flight.
A launch writes the padded codes and scales, where the padded groups end, and the group of every padded row (-1 for
padding), which is what implementations with an aligned contiguous layout ask for.

Group g of `sizes[g]` rows occupies padded rows [start, start + 128 * ceil(sizes[g] / 128)); its padding rows are zeros.
Example: sizes (3, 0, 130) end at offs (3, 3, 133); padded they end at (128, 128, 384), and row 3 becomes row 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from padless.bench.group_sizes import PADDED_GROUP_MULTIPLE
from padless.formats import BlockScaledTensor, ceil_div
from padless.layouts import empty_mn_major

BACKENDS = ("triton", "torch")


@dataclass(frozen=True)
class PaddedGroups:
    """Activations with every group padded to a multiple of 128 rows.

    a: (rows, K) codes with their scales, in the scale layout of what was padded.
    offs: (groups,) int32 cumulative ends of the padded groups. Rows at or past offs[-1] are whatever they were.
    group_index: (rows,) int32 group of each row, -1 for padding rows; rows past offs[-1] are -1 too.
    """

    a: BlockScaledTensor
    offs: torch.Tensor
    group_index: torch.Tensor


def empty_padded(a: BlockScaledTensor, offs: torch.Tensor, rows: int) -> PaddedGroups:
    """Buffers for `pad_groups(a, offs, rows=rows)`, uninitialised."""
    data = torch.empty(rows, a.shape[1], dtype=a.dtype, device=a.device)
    shape = (rows, a.scale.shape[1])
    scale = empty_mn_major(*shape, a.device) if a.scale_major == "mn" else torch.empty(shape, device=a.device)
    index = torch.empty(rows, dtype=torch.int32, device=a.device)
    return PaddedGroups(BlockScaledTensor(data, scale, a.format), torch.empty_like(offs), index)


def pad_groups(
    a: BlockScaledTensor, offs: torch.Tensor, *, rows: int, out: PaddedGroups | None = None, backend: str | None = None
) -> PaddedGroups:
    """Every group of a padded with zero rows (and zero scales) to a multiple of 128.

    a: (M, K) activations, one-byte codes, scales row-major or MN-major; the result keeps the layout.
    offs: (groups,) int32 cumulative ends on a's device, ascending and within M; not read by the host.
    rows: rows of the result, a multiple of 128. Groups that would end past it are cut.
    out: buffers from `empty_padded` to write into instead of new ones.
    backend: "triton" (default on a GPU) or "torch" (default elsewhere; synchronises).
    """
    _check(a, offs, rows, backend)
    if out is None:
        out = empty_padded(a, offs, rows)
    if _use_triton(a, backend):
        _pad_triton(a, offs, out)
    else:
        _pad_torch(a, offs, out)
    return out


def unpad_rows(
    padded: torch.Tensor, offs: torch.Tensor, out: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """The valid rows of a padded (rows, N) result, in `out` (M, N); rows of out at or past offs[-1] are untouched.

    offs: cumulative ends of the groups before padding. Both tensors contiguous, of one dtype.
    """
    if not padded.is_contiguous() or not out.is_contiguous():
        raise ValueError("padded and out must be contiguous")
    if padded.dtype != out.dtype or padded.dim() != 2 or out.dim() != 2 or padded.shape[1] != out.shape[1]:
        raise ValueError(
            f"out must be (M, {padded.shape[-1]}) of {padded.dtype}, got {tuple(out.shape)} of {out.dtype}"
        )
    if _use_triton(padded, backend):
        _unpad_triton(padded, offs, out)
    else:
        source, destination, _ = _row_map(offs, min(int(offs[-1]), out.shape[0]) if offs.numel() else 0)
        out[source] = padded[destination]
    return out


def pad_bytes(rows: int, padded_rows: int, K: int) -> int:
    """Bytes a padding must move: codes and scales of the valid rows read, of all padded rows written."""
    return (rows + padded_rows) * (K + 4 * ceil_div(K, 128))


def _check(a: BlockScaledTensor, offs: torch.Tensor, rows: int, backend: str | None) -> None:
    if not a.is_activation or a.dtype.itemsize != 1:
        raise ValueError(f"a must be (M, K) activations with one-byte codes, got {a.format.name} {tuple(a.shape)}")
    if not a.data.is_contiguous():
        raise ValueError(f"a.data must be contiguous, got strides {a.data.stride()}")
    if offs.dtype != torch.int32 or offs.dim() != 1 or offs.device != a.device or offs.numel() == 0:
        raise ValueError(
            f"offs must be a non-empty 1-D int32 tensor on {a.device}, got {tuple(offs.shape)} "
            f"{offs.dtype} on {offs.device}"
        )
    if rows < 0 or rows % PADDED_GROUP_MULTIPLE:
        raise ValueError(f"rows must be a multiple of {PADDED_GROUP_MULTIPLE}, got {rows}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS} or None, got {backend!r}")


def _use_triton(t: BlockScaledTensor | torch.Tensor, backend: str | None) -> bool:
    return backend == "triton" or (backend is None and t.device.type == "cuda")


# --- torch -----------------------------------------------------------------------------------------------


def _row_map(offs: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of the first `valid` rows: their row before padding, their row after, and the padded ends of the groups."""
    ends = offs.to(torch.int64)
    sizes = ends.diff(prepend=ends.new_zeros(1))
    padded_sizes = -(-sizes // PADDED_GROUP_MULTIPLE) * PADDED_GROUP_MULTIPLE
    padded_ends = padded_sizes.cumsum(0)
    shift = (padded_ends - padded_sizes) - (ends - sizes)
    source = torch.arange(valid, device=offs.device)
    return source, source + shift.repeat_interleave(sizes)[:valid], padded_ends


def _pad_torch(a: BlockScaledTensor, offs: torch.Tensor, out: PaddedGroups) -> None:
    rows = out.a.shape[0]
    source, destination, padded_ends = _row_map(offs, int(offs[-1]))
    keep = destination < rows
    source, destination = source[keep], destination[keep]
    written = min(int(padded_ends[-1]), rows)
    out.a.data.view(torch.uint8)[:written] = 0
    out.a.scale[:written] = 0
    out.a.data.view(torch.uint8)[destination] = a.data.view(torch.uint8)[source]
    out.a.scale[destination] = a.scale[source]
    out.offs.copy_(padded_ends.clamp(max=rows))
    out.group_index.fill_(-1)
    out.group_index[destination] = torch.bucketize(source, offs.to(torch.int64), right=True).to(torch.int32)


# --- Triton ----------------------------------------------------------------------------------------------

# A data program moves 8 rows of up to 4 KiB with 256 threads: eight independent 16-byte loads per thread.
_DATA_ROWS = 8
_DATA_ROW_BYTES = 4096
_NUM_WARPS = 8


def _words(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """(rows, columns) tensors of one width as (rows, words): int32 where rows are whole 16-byte units, else bytes."""
    row_bytes = tensors[0].shape[1] * tensors[0].element_size()
    aligned = row_bytes % 16 == 0 and all(t.data_ptr() % 16 == 0 for t in tensors)
    return [t.view(torch.uint8).view(torch.int32 if aligned else torch.uint8) for t in tensors]


def _data_blocks(words: torch.Tensor) -> dict[str, int]:
    """Constants of a kernel that moves rows of words."""
    width = words.shape[1]
    block = min(_next_power_of_two(width), _DATA_ROW_BYTES // words.element_size())
    return {"WORDS": width, "BLOCK_WORDS": block, "BLOCK_ROWS": _DATA_ROWS, "MULTIPLE": PADDED_GROUP_MULTIPLE}


def _next_power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()


def _pad_triton(a: BlockScaledTensor, offs: torch.Tensor, out: PaddedGroups) -> None:
    from padless.bench.pad_kernels import pad_kernel  # Triton only where it is used

    rows = out.a.shape[0]
    if rows == 0:
        out.offs.zero_()
        return
    source, target = _words(a.data, out.a.data)
    blocks = _data_blocks(source)
    columns = a.scale.shape[1]
    row_major = a.scale_major == "k"
    scale_programs = rows // PADDED_GROUP_MULTIPLE
    data_programs = (rows // _DATA_ROWS) * ceil_div(blocks["WORDS"], blocks["BLOCK_WORDS"])
    pad_kernel[(scale_programs + data_programs,)](
        source,
        target,
        a.scale,
        out.a.scale,
        offs,
        out.offs,
        out.group_index,
        offs.numel(),
        rows,
        a.scale.stride(0) if row_major else a.scale.stride(1),
        out.a.scale.stride(0) if row_major else out.a.scale.stride(1),
        scale_programs,
        **blocks,
        SCALE_COLUMNS=columns,
        BLOCK_COLUMNS=min(_next_power_of_two(columns), 32),
        BLOCK_GROUPS=_next_power_of_two(offs.numel()),
        ROW_MAJOR=row_major,
        num_warps=_NUM_WARPS,
    )


def _unpad_triton(padded: torch.Tensor, offs: torch.Tensor, out: torch.Tensor) -> None:
    from padless.bench.pad_kernels import unpad_kernel

    rows = padded.shape[0]
    if rows == 0 or out.numel() == 0:
        return
    source, target = _words(padded, out)
    blocks = _data_blocks(source)
    programs = ceil_div(rows, _DATA_ROWS) * ceil_div(blocks["WORDS"], blocks["BLOCK_WORDS"])
    unpad_kernel[(programs,)](
        source,
        target,
        offs,
        offs.numel(),
        rows,
        out.shape[0],
        **blocks,
        BLOCK_GROUPS=_next_power_of_two(offs.numel()),
        num_warps=_NUM_WARPS,
    )
