"""Signals between ranks: 64-bit cells that hold an epoch, released by the writer and acquired by the reader.

A cell is written by one rank and never cleared: the reader waits for the epoch that it is at. A wait ends with the
clock, or, in the interpreter and the emulator, with a number of polls; then the rank that is late is written to the
`aborted` cell of all ranks and every wait ends immediately.

A kernel of few programs waits itself. More would fill the GPU, on which another stream's kernel may have to run before
the awaited rank goes on: for these a launch of one program, `await_ranks`, waits ahead of them.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from padless.quantization.triton import launches

AWAITED: tl.constexpr = tl.constexpr(8)  # the word of counters behind counter 0's that says what `await_ranks` found


@triton.jit
def buffer_of(pointers_ptr, rank, offset):
    """Address of a region of a rank's buffer as int64."""
    return tl.load(pointers_ptr + rank) + offset


@triton.jit
def region(pointers_ptr, rank, offset, DTYPE: tl.constexpr):
    """Pointer to a 16-byte boundary in a rank's buffer."""
    return tl.multiple_of((tl.load(pointers_ptr + rank) + offset).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def wait(
    counters_ptr,
    COUNTER: tl.constexpr,
    pointers_ptr,
    rank,
    cells,  # offset in bytes of R cells in the own buffer
    aborted,  # offset in bytes of the `aborted` cell
    epoch,
    status_ptr,
    limit,  # nanoseconds, or polls without a clock
    R: tl.constexpr,
    CLOCK: tl.constexpr,
    POLLS: tl.constexpr,
):
    """1 when all R cells have the epoch, 0 after a timeout or an abort. All threads see what was released.

    POLLS: whether this program waits; otherwise `await_ranks` has waited for the epoch of this counter.
    """
    if POLLS:
        there = _poll(pointers_ptr, rank, cells, aborted, epoch, status_ptr, limit, R, CLOCK)
    else:
        there = tl.load(counters_ptr + AWAITED + COUNTER)
    return there


@triton.jit(do_not_specialize=["rank", "limit"])
def await_ranks(
    pointers_ptr,
    counters_ptr,
    status_ptr,  # int64, host memory
    rank,
    cells,
    aborted,
    limit,
    R: tl.constexpr,
    COUNTER: tl.constexpr,
    HALVES: tl.constexpr,  # of cells
    CLOCK: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):
    """Waits until all ranks are where this rank's counter is, and leaves what `wait` is to say."""
    launches.wait(PROGRAMMATIC)
    epoch = tl.load(counters_ptr + COUNTER)
    half = (epoch % HALVES).to(tl.int64)
    there = _poll(pointers_ptr, rank, cells + half * R * 8, aborted, epoch, status_ptr, limit, R, CLOCK)
    launches.release(PROGRAMMATIC)
    tl.store(counters_ptr + AWAITED + COUNTER, there)


@triton.jit
def _poll(
    pointers_ptr,
    rank,
    cells,  # offset in bytes of R cells in the own buffer
    aborted,  # offset in bytes of the `aborted` cell
    epoch,
    status_ptr,
    limit,  # nanoseconds, or polls without a clock
    R: tl.constexpr,
    CLOCK: tl.constexpr,
):
    LANES: tl.constexpr = triton.next_power_of_2(R + 1)
    own = tl.load(pointers_ptr + rank)
    lane = tl.arange(0, LANES)
    address = own + tl.where(lane < R, cells + lane * 8, aborted)
    cell = address.to(tl.pointer_type(tl.int64))
    zero = tl.zeros((LANES,), tl.int64)
    start = tl.full((), 0, tl.int64)
    if CLOCK:
        start = globaltimer().to(tl.int64)
    polls = tl.full((), 0, tl.int64)
    state = tl.full((), 0, tl.int32)
    while state == 0:
        value = tl.atomic_add(cell, zero, mask=lane <= R, sem="acquire", scope="sys")
        abort = tl.sum(tl.where(lane == R, value, zero), axis=0)
        is_missing = (lane < R) & (value != epoch)
        missing = tl.sum(is_missing.to(tl.int32), axis=0)
        polls += 1
        waited = polls
        if CLOCK:
            waited = globaltimer().to(tl.int64) - start
        if abort != 0:
            tl.store(status_ptr, abort)
            state = 2
        elif missing == 0:
            state = 1
        elif waited > limit:
            late = tl.min(tl.where(is_missing, lane, LANES), axis=0).to(tl.int64) + 1
            tl.store(status_ptr, late)
            for peer in range(R):
                there = (tl.load(pointers_ptr + peer) + aborted).to(tl.pointer_type(tl.int64))
                tl.atomic_xchg(there, late, sem="release", scope="sys")
            state = 2
    tl.debug_barrier()
    return (state == 1).to(tl.int32)


@triton.jit
def is_last(ticket_ptr):
    """Whether this program is the last of the grid to come here; all that the others did is then visible to it.

    The counter is 0 again afterwards.
    """
    tl.debug_barrier()  # all threads' stores, before the one thread's release
    programs = tl.num_programs(0)
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(ticket_ptr, 0)
    return last


@triton.jit
def signal(pointers_ptr, rank, cells, epoch, R: tl.constexpr):
    """Releases the epoch in cell `rank` of the cells at every rank; a thread for each, which all wait together."""
    LANES: tl.constexpr = triton.next_power_of_2(R)
    peer = tl.arange(0, LANES)
    there = tl.load(pointers_ptr + peer, mask=peer < R, other=0) + cells + rank * 8
    values = tl.zeros((LANES,), tl.int64) + epoch
    tl.atomic_xchg(there.to(tl.pointer_type(tl.int64)), values, mask=peer < R, sem="release", scope="sys")
