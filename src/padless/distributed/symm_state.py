"""Memory of the "symm" backend: a buffer on every rank that all ranks can address, and what a rank keeps to itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from padless.distributed.settings import Settings
from padless.formats import round_up

CELL = 8  # bytes: an epoch
HEADER_ALIGNMENT = 256
MAX_RANKS = 64
FEW_SLOTS = 4096  # of all ranks: up to here each program of a dispatch sorts them, in one launch that moves rows
FEW_TOKENS = 1024  # of all ranks, of which each has a program
HALVED_BYTES = 32 << 20  # of a combine's sums: up to here there are two halves, and none waits for others to be read

# Words of `State.counters`, int32, device memory.
# 0: rows published. 1: combines. 2 to 5: tickets of publish, fan_in, finish, publish_ids. 6: ids published.
# 8 + one of 0, 1 and 6: whether all ranks have come to it, as `await_ranks` found it.
NUM_COUNTERS = 16
ROWS, SUMS, IDS = 0, 1, 6

# Words of `State.status`, int64, host memory that the device writes.
LATE, OVERFLOW, WRONG_ID = 0, 1, 2
NUM_STATUS = 4


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes of the buffer's regions, each from 256-byte boundaries.

    listed: 2 x R cells: ids and weights of a dispatch are there. By parity of the epoch, as a fast rank may be one
        ahead. With few slots nothing is told before the rows.
    published: 2 x R cells: rows of a dispatch are there. A dispatch by an earlier plan has rows and no ids, so that
        each has separate epochs.
    summed: 2 x R cells: a rank's partial sums of a combine are there. finished: R cells: a rank has read its partial
        sums, so that the next may be stored where there are no two halves of them. aborted: one cell, 1 + the rank that
        did not answer.
    ids, weights: 2 x R x Tmax x k int32 and float32, by parity and source rank; ids past a rank's tokens are -1.
    scales: 2 x R x Tmax x scales of a token, by parity and source rank, where they are MN-major: else none.
    slots: Tmax x k float32: what a combine brings back by slot (gradients of weights).
    x: 2 x Tmax records, by parity. part: R x Tmax x H partial sums, by the rank that summed, or where sums are of slots
        Tmax x k x H rows. halves: of `slots` and `part`. With two, by parity, none waits until the last was read: a
        rank is at most one combine ahead.
    """

    listed: int
    published: int
    summed: int
    finished: int
    aborted: int
    ids: int
    weights: int
    scales: int
    slots: int
    x: int
    part: int
    size: int
    record_bytes: int
    halves: int


def layout_of(s: Settings, halved_bytes: int = HALVED_BYTES) -> Layout:
    """The layout for settings; records have room for rows as they are, too, which the backward pass sends."""
    record = max(s.row_format.record_bytes, s.hidden * s.partial.itemsize)
    table = s.max_tokens * s.top_k * 4
    part = s.max_tokens * s.hidden * s.partial.itemsize * (s.top_k if s.sums == "slots" else s.num_ranks)
    halves = 2 if part <= halved_bytes else 1
    sizes = {
        "listed": 2 * s.num_ranks * CELL,
        "published": 2 * s.num_ranks * CELL,
        "summed": 2 * s.num_ranks * CELL,
        "finished": s.num_ranks * CELL,
        "aborted": CELL,
        "ids": 2 * s.num_ranks * table,
        "weights": 2 * s.num_ranks * table,
        "scales": 2 * s.num_ranks * s.max_tokens * s.row_format.placed_columns * 4,
        "slots": halves * table,
        "x": 2 * s.max_tokens * record,
        "part": halves * part,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end = round_up(end + size, HEADER_ALIGNMENT)
    return Layout(**offsets, size=end, record_bytes=record, halves=halves)


def is_few(tokens: int, top_k: int, few_slots: int = FEW_SLOTS) -> bool:
    """Whether a dispatch of so many tokens of all ranks, each with k slots, is two launches."""
    return tokens <= FEW_TOKENS and tokens * top_k <= few_slots


@dataclass(frozen=True, eq=False)
class State:
    """The memory that a rank's kernels work on.

    buffer: this rank's, uint8. pointers: (R,) int64 addresses of all ranks' buffers. counters: int32 on the device.
    status: int64, host memory pinned for the device. owner: keeps the mapping alive.
    """

    layout: Layout
    buffer: torch.Tensor
    pointers: torch.Tensor
    counters: torch.Tensor
    status: torch.Tensor
    owner: object = None


def allocate(group: dist.ProcessGroup, device: torch.device, s: Settings) -> State:
    """The state of a group of GPUs on one NVLink host, by torch's symmetric memory. Collective. Raises ValueError."""
    # Read when a buffer is first shared. Multicast is of no use here, and a rank that dies can leave some behind.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    import torch.distributed._symmetric_memory as symmetric_memory

    if s.num_ranks > MAX_RANKS:
        raise ValueError(f"the group has {s.num_ranks} ranks; 'symm' takes up to {MAX_RANKS}, use 'collective'")
    layout = layout_of(s)
    if s.num_ranks == 1:  # such as a mesh's dimension of one; nothing is shared
        alone = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        return _state(layout, alone, [alone.data_ptr()], None)
    with torch.cuda.device(device):
        buffer = symmetric_memory.empty(layout.size, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(buffer, group=group)
        buffer.zero_()
        bases = [int(p) for p in handle.buffer_ptrs]
        offset = buffer.data_ptr() - bases[s.rank]  # a buffer may lie inside of a shared allocation
        state = _state(layout, buffer, [base + offset for base in bases], handle)
        torch.cuda.synchronize(device)
        dist.barrier(group)
    return state


def allocate_virtual(settings: list[Settings], device: torch.device, halved_bytes: int = HALVED_BYTES) -> list[State]:
    """The states of R ranks that share a device: for running the kernels phase by phase, for all ranks in turn."""
    layouts = [layout_of(s, halved_bytes) for s in settings]
    buffers = [torch.zeros(layout.size, dtype=torch.uint8, device=device) for layout in layouts]
    pointers = [b.data_ptr() for b in buffers]
    return [_state(layout, buffer, pointers, buffers) for layout, buffer in zip(layouts, buffers, strict=True)]


def _state(layout: Layout, buffer: torch.Tensor, pointers: list[int], owner: object) -> State:
    device = buffer.device
    status = torch.zeros(NUM_STATUS, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    counters = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
    return State(layout, buffer, torch.tensor(pointers, device=device), counters, status, owner)
