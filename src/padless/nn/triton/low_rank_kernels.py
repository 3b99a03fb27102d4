"""The two products of low-rank adapters as Triton kernels: bound by the rows that they read or write. The second one may
activate and quantize what it adds to, or add up the rows of a token.

A program takes a tile of rows of one group (expert, adapter), or a slot, which looks its adapter up. Every row is
multiplied by tensor-core instructions of the same shape whatever rows are around it, so that its bits depend on the row
and the factors alone.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from padless.moe.triton import arithmetic
from padless.moe.triton.arithmetic import rounded
from padless.quantization.triton import casts, fp8_block
from padless.quantization.triton.launches import begin, release, wait


@triton.jit(do_not_specialize=["slots", "num_adapters"])
def pairs(
    ids_ptr, adapter_ids_ptr, out_ptr, slots, top_k, num_experts, num_adapters,
    SLOTS: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    begin(PROGRAMMATIC)
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    expert = tl.load(ids_ptr + slot, mask=slot < slots, other=0)
    adapter = tl.load(adapter_ids_ptr + slot // top_k, mask=slot < slots, other=0).to(expert.dtype)
    adapter = tl.where((adapter >= 0) & (adapter < num_adapters), adapter, num_adapters)
    pair = tl.where((expert >= 0) & (expert < num_experts), expert * (num_adapters + 1) + adapter, -1)
    tl.store(out_ptr + slot, pair, mask=slot < slots)


@triton.jit
def _tile_of(offs_ptr, tile, M, num_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """(group, first row, end): ROWS rows of a group at most; groups one after the other, and behind them the rows of
    none, whose group is num_groups. Tiles behind these have no rows.
    """
    place = tl.arange(0, GROUPS)
    ends = tl.minimum(tl.load(offs_ptr + place, mask=place < num_groups, other=0), M)
    starts = tl.minimum(tl.load(offs_ptr + place - 1, mask=(place > 0) & (place < num_groups), other=0), M)
    last = tl.cumsum((ends - starts + ROWS - 1) // ROWS, axis=0)  # in each place, of the groups so far
    group = tl.minimum(tl.sum((last <= tile).to(tl.int32)), num_groups)
    before = tl.max(tl.where(last <= tile, last, 0))
    start = tl.minimum(tl.load(offs_ptr + group - 1, mask=group > 0, other=0), M)
    end = tl.minimum(tl.load(offs_ptr + group, mask=group < num_groups, other=M), M)
    first = start + (tile - before) * ROWS
    return group, first, tl.minimum(end, first + ROWS)


@triton.jit
def _of_group(group, num_groups, per_expert, first_factor, num_factors):
    """(expert, adapter, whether it has a factor)."""
    adapter = group % per_expert - first_factor
    return group // per_expert, adapter, (group < num_groups) & (adapter >= 0) & (adapter < num_factors)


@triton.jit
def of_slot(ids_ptr, chosen_ptr, slot, num_experts, num_factors, TOP_K: tl.constexpr):
    """The same."""
    expert = tl.load(ids_ptr + slot)
    adapter = tl.load(chosen_ptr + slot // TOP_K)
    return expert, adapter, (expert >= 0) & (expert < num_experts) & (adapter >= 0) & (adapter < num_factors)


@triton.jit
def row_of(inverse_ptr, slot):
    """The row of a slot, (1,); slots of no expert have one too."""
    row = tl.load(inverse_ptr + slot + tl.arange(0, 1)).to(tl.int64)
    return tl.where(row < 0, -1 - row, row)


@triton.jit
def factor_of(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED: tl.constexpr):
    """The pointer of an adapter's factor of an expert."""
    found = f0
    if adapter == 1:
        found = f1
    if adapter == 2:
        found = f2
    if adapter == 3:
        found = f3
    if adapter == 4:
        found = f4
    if adapter == 5:
        found = f5
    if adapter == 6:
        found = f6
    if adapter == 7:
        found = f7
    found += of_expert
    return tl.multiple_of(found, 16) if ALIGNED else found


@triton.jit
def _prefetch(factor, rank_stride, k_stride, RANK: tl.constexpr, K: tl.constexpr, BLOCK_R: tl.constexpr):
    """Has a factor (RANK, K), whose columns are beside each other, brought to L2."""
    LINE: tl.constexpr = 1024 // factor.dtype.element_ty.primitive_bitwidth
    j = tl.minimum(tl.arange(0, BLOCK_R), RANK - 1)
    k = tl.minimum(tl.arange(0, triton.next_power_of_2((K + LINE - 1) // LINE)) * LINE, K - 1)
    places = (factor + j[:, None] * rank_stride + k[None, :] * k_stride).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _bfloat16(x, HARDWARE: tl.constexpr):
    return x.to(tl.bfloat16) if HARDWARE else rounded(x, tl.bfloat16)


@triton.jit
def product(x, factor, total, HARDWARE: tl.constexpr):
    """total + x @ factor, of bfloat16 x and factor rounded to it. The interpreter's product of bfloat16 is wrong."""
    if HARDWARE:
        return tl.dot(x, factor.to(tl.bfloat16), total)
    return tl.dot(casts.to_float32(x), casts.to_float32(rounded(casts.to_float32(factor), tl.bfloat16)), total)


@triton.jit
def _sums(
    t, b, added, has_factor, scaling, IS_SLOT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """added + scaling * t @ b in float32, (ROWS, COLUMNS), or (1, COLUMNS) of the first row of t."""
    result = product(t, b, tl.zeros((ROWS, COLUMNS), tl.float32), HARDWARE)
    if IS_SLOT:
        result = tl.gather(result, tl.zeros((1, COLUMNS), tl.int32), axis=0)
    # A row without an adapter keeps its bits, the sign of zero too.
    return tl.where(has_factor, result * scaling, -0.0) + casts.to_float32(added)


@triton.jit
def stored(x, HARDWARE: tl.constexpr):
    """float32 of what is stored of x."""
    return casts.to_float32(_bfloat16(x, HARDWARE))


@triton.jit(do_not_specialize=["M", "num_rows", "num_groups", "per_expert", "first_factor", "num_factors"])
def down(
    rows_ptr,  # (num_rows, K) bfloat16, strides (row_stride, 1)
    tokens_ptr,  # (M,) int32, the row of each row of t; None for its own
    t_ptr,  # (M, WIDTH) bfloat16, of slots in their order
    offs_ptr,  # (num_groups,) int32, ends of the groups; None for slots
    ids_ptr,  # (M,) of `Slots`, or None
    chosen_ptr,  # (M / TOP_K,), or None
    inverse_ptr,  # (M,), None where rows are those of tokens
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, RANK, K), strides (expert_stride, rank_stride, k_stride)
    M,
    num_rows,
    row_stride,
    expert_stride,
    rank_stride,
    k_stride,
    num_groups,  # of slots: experts
    per_expert,
    first_factor,
    num_factors,
    scaling,
    TOP_K: tl.constexpr,  # 0 for groups
    K: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    IS_SLOT: tl.constexpr = TOP_K > 0
    READS_TOKENS: tl.constexpr = IS_SLOT and inverse_ptr is None
    if IS_SLOT:
        release(PROGRAMMATIC)
        first = tl.program_id(0)
        end = first + 1
        expert, adapter, has_factor = of_slot(ids_ptr, chosen_ptr, first, num_groups, num_factors, TOP_K)
    else:
        begin(PROGRAMMATIC)
        group, first, end = _tile_of(offs_ptr, tl.program_id(0), M, num_groups, ROWS, GROUPS)
        expert, adapter, has_factor = _of_group(group, num_groups, per_expert, first_factor, num_factors)
    of_expert = tl.where(has_factor, expert, 0).to(tl.int64) * expert_stride
    factor = factor_of(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED)
    live = tl.arange(0, ROWS)
    mine = first + live < end
    exists = mine
    of_row = live * row_stride
    if READS_TOKENS:
        rows_ptr += (first // TOP_K).to(tl.int64) * row_stride
    elif IS_SLOT:
        if PROGRAMMATIC > 0:
            _prefetch(factor, rank_stride, k_stride, RANK, K, BLOCK_R)
        wait(PROGRAMMATIC)
        row = tl.sum(row_of(inverse_ptr, first))
        exists = mine & (row < num_rows)
        rows_ptr += row * row_stride
    elif tokens_ptr is None:
        rows_ptr += first.to(tl.int64) * row_stride
    else:
        token = tl.load(tokens_ptr + first + live, mask=mine, other=0).to(tl.int64)
        exists = mine & (token >= 0) & (token < num_rows)
        of_row = token * row_stride
    j = tl.arange(0, BLOCK_R)
    total = tl.zeros((ROWS, BLOCK_R), tl.float32)
    if has_factor:
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < K)[None, :]
            x = tl.load(rows_ptr + of_row[:, None] + k[None, :], mask=exists[:, None] & inside, other=0.0)
            a = tl.load(
                factor + j[:, None] * rank_stride + k[None, :] * k_stride, mask=(j < RANK)[:, None] & inside, other=0.0
            )
            total = product(x, tl.trans(a), total, HARDWARE)
    if READS_TOKENS:
        wait(PROGRAMMATIC)
    tl.store(
        t_ptr + first.to(tl.int64) * WIDTH + live[:, None] * WIDTH + j[None, :], _bfloat16(total * scaling, HARDWARE),
        mask=mine[:, None] & (j < WIDTH)[None, :] & has_factor,
    )  # fmt: skip


@triton.jit(do_not_specialize=["M", "blocks", "num_groups", "per_expert", "first_factor", "num_factors"])
def up(
    t_ptr,  # (M, WIDTH) bfloat16
    out_ptr,  # (M, N) bfloat16
    offs_ptr,  # (num_groups,) int32, ends of the groups
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, N, RANK), strides (expert_stride, n_stride, rank_stride)
    added_ptr,  # (M, N) bfloat16, which may be out; None for zeros
    M,
    N,
    blocks,  # programs for the columns of a row
    expert_stride,
    n_stride,
    rank_stride,
    num_groups,
    per_expert,
    first_factor,
    num_factors,
    scaling,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two
    ALIGNED: tl.constexpr,  # whether every expert's factor begins at a multiple of 16 bytes
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """Rows of no group and of groups without a factor are `added`."""
    begin(PROGRAMMATIC)
    group, first, end = _tile_of(offs_ptr, tl.program_id(0) // blocks, M, num_groups, ROWS, GROUPS)
    expert, adapter, has_factor = _of_group(group, num_groups, per_expert, first_factor, num_factors)
    of_expert = tl.where(has_factor, expert, 0).to(tl.int64) * expert_stride
    factor = factor_of(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED)
    n = tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.arange(0, BLOCK_R)
    in_rank = (j < RANK) & has_factor
    row = first + tl.arange(0, ROWS)
    mine = (row < end)[:, None]
    inside = mine & (n < N)[None, :]
    place = row.to(tl.int64)[:, None] * N + n[None, :]
    added = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if added_ptr is not None:
        added = casts.to_float32(tl.load(added_ptr + place, mask=inside, other=0.0))
    t = tl.load(t_ptr + row.to(tl.int64)[:, None] * WIDTH + j[None, :], mask=mine & in_rank[None, :], other=0.0)
    b = tl.load(
        factor + n[None, :] * n_stride + j[:, None] * rank_stride,
        mask=in_rank[:, None] & (n < N)[None, :], other=0.0,
    )  # fmt: skip
    result = _sums(t, b, added, has_factor, scaling, False, ROWS, BLOCK_N, HARDWARE)
    tl.store(out_ptr + place, _bfloat16(result, HARDWARE), mask=inside)


@triton.jit(do_not_specialize=["M", "blocks", "num_groups", "per_expert", "first_factor", "num_factors", "scale_ld"])
def up_activated(
    t_ptr,  # (M, WIDTH) bfloat16, of slots in their order
    added_ptr,  # (M, 2 I) bfloat16
    values_ptr,  # (M, I) bfloat16
    codes_ptr,  # (M, I) uint8, None for values alone
    scale_ptr,  # (M, blocks) float32, strides (1, scale_ld)
    offs_ptr,  # (num_groups,) int32, ends of the groups; None for slots
    ids_ptr,  # (M,) of `Slots`, or None
    chosen_ptr,  # (M / TOP_K,), or None
    inverse_ptr,  # (M,), or None
    f0, f1, f2, f3, f4, f5, f6, f7,  # (E, 2 I, RANK), strides (expert_stride, n_stride, rank_stride)
    M,
    I,  # noqa: E741
    blocks,
    expert_stride,
    n_stride,
    rank_stride,
    num_groups,  # of slots: experts
    per_expert,
    first_factor,
    num_factors,
    scaling,
    scale_ld,
    alpha,
    up_offset,
    limit,
    KIND: tl.constexpr,
    ARRANGEMENT: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    TOP_K: tl.constexpr,  # 0 for groups
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,  # columns of values, and of a block of scales
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    """The activation of what `_up` stores, bit for bit."""
    IS_SLOT: tl.constexpr = TOP_K > 0
    block, tile = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    if IS_SLOT:
        release(PROGRAMMATIC)
        expert, adapter, has_factor = of_slot(ids_ptr, chosen_ptr, tile, num_groups, num_factors, TOP_K)
    else:
        begin(PROGRAMMATIC)
        group, first, end = _tile_of(offs_ptr, tile, M, num_groups, ROWS, GROUPS)
        expert, adapter, has_factor = _of_group(group, num_groups, per_expert, first_factor, num_factors)
    of_expert = tl.where(has_factor, expert, 0).to(tl.int64) * expert_stride
    j = tl.arange(0, BLOCK_R)
    in_rank = (j < RANK) & has_factor
    factor = factor_of(f0, f1, f2, f3, f4, f5, f6, f7, adapter, of_expert, ALIGNED) + j[:, None] * rank_stride
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if ARRANGEMENT == 2:
        of_both = block * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        b = tl.load(factor + of_both[None, :] * n_stride, mask=in_rank[:, None] & (of_both < 2 * I)[None, :], other=0.0)
    else:
        of_gate, of_up = arithmetic.gate_up_columns(column, I, ARRANGEMENT)
        in_factor = in_rank[:, None] & (column < I)[None, :]
        b = tl.load(factor + of_gate[None, :] * n_stride, mask=in_factor, other=0.0)
        b_up = tl.load(factor + of_up[None, :] * n_stride, mask=in_factor, other=0.0)
    if IS_SLOT:  # whose factors are on their way meanwhile
        wait(PROGRAMMATIC)
        first = tile
        end = tile + 1
        row = row_of(inverse_ptr, tile)
        is_mine = row < M
    else:
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        is_mine = row < end
    if scale_ptr is not None:  # the padding below the scales
        padded = M + tl.arange(0, 4)
        is_padding = (padded < scale_ld) & (tl.program_id(0) < blocks)
        tl.store(scale_ptr + block.to(tl.int64) * scale_ld + padded, tl.zeros((4,), tl.float32), mask=is_padding)
    t_row = first + tl.arange(0, ROWS)
    t_ptrs = t_ptr + t_row.to(tl.int64)[:, None] * WIDTH + j[None, :]
    t = tl.load(t_ptrs, mask=(t_row < end)[:, None] & in_rank[None, :], other=0.0)
    added_ptrs = added_ptr + row[:, None] * (2 * I)
    inside = is_mine[:, None] & (column < I)[None, :]
    if ARRANGEMENT == 2:
        in_added = is_mine[:, None] & (of_both < 2 * I)[None, :]
        added = tl.load(added_ptrs + of_both[None, :], mask=in_added, other=0.0)
        both = stored(_sums(t, b, added, has_factor, scaling, IS_SLOT, ROWS, 2 * BLOCK_N, HARDWARE), HARDWARE)
        gate, up = tl.split(tl.reshape(both, (both.shape[0], BLOCK_N, 2)))
    else:
        added = tl.load(added_ptrs + of_gate[None, :], mask=inside, other=0.0)
        added_up = tl.load(added_ptrs + of_up[None, :], mask=inside, other=0.0)
        gate = stored(_sums(t, b, added, has_factor, scaling, IS_SLOT, ROWS, BLOCK_N, HARDWARE), HARDWARE)
        up = stored(_sums(t, b_up, added_up, has_factor, scaling, IS_SLOT, ROWS, BLOCK_N, HARDWARE), HARDWARE)
    x = arithmetic.activated(gate, up, KIND, alpha, up_offset, limit, HAS_LIMIT, HARDWARE)
    x = tl.where(inside, x, 0.0)
    place = row[:, None] * I + column[None, :]
    tl.store(values_ptr + place, _bfloat16(x, HARDWARE), mask=inside)
    if codes_ptr is not None:
        scale, multiplier = fp8_block._fp8_block_scale(tl.max(casts.magnitude_bits(x), axis=1))
        tl.store(codes_ptr + place, casts.to_e4m3(x * multiplier[:, None], HARDWARE), mask=inside)
        tl.store(scale_ptr + block.to(tl.int64) * scale_ld + row, scale, mask=is_mine)
