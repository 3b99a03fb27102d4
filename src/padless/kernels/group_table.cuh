// Builds the scheduler's table of groups in shared memory from `offs`, once per CTA, by one warp.
#pragma once

// offs[num_groups] are cumulative end rows. Whatever they hold, the result is ascending and inside [0, m], so that no
// wrong value can lead outside the tensors: group_ends[g] = min(max(0, offs[0 .. g]), m).
// A null `offs` is a dense problem: one group of m rows.
// tile_ends[g] = sum over i <= g of ceil(rows_i / BLOCK_M).
template <int BLOCK_M>
__device__ __forceinline__ void build_group_table(const int* offs, int num_groups, int m, int* group_ends,
                                                  int* tile_ends, int lane) {
    int previous_end = 0;
    int previous_tiles = 0;
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        int end = g >= num_groups ? 0 : offs == nullptr ? m : offs[g];
        end = end < previous_end ? previous_end : end;
        end = end > m ? m : end;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running maximum
            const int other = __shfl_up_sync(0xffffffff, end, distance);
            if (lane >= distance && other > end) end = other;
        }
        int start = __shfl_up_sync(0xffffffff, end, 1);
        if (lane == 0) start = previous_end;
        int tiles = (end - start + BLOCK_M - 1) / BLOCK_M;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, tiles, distance);
            if (lane >= distance) tiles += other;
        }
        tiles += previous_tiles;
        if (g < num_groups) {
            group_ends[g] = end;
            tile_ends[g] = tiles;
        }
        previous_end = __shfl_sync(0xffffffff, end, 31);
        previous_tiles = __shfl_sync(0xffffffff, tiles, 31);
    }
}
