// Builds the scheduler's table of groups in shared memory from `offs`, once per CTA.
#pragma once

template <int MAX_GROUPS>
struct GroupTableStorage {
    int group_ends[MAX_GROUPS];  // by group number: cleaned offs
    int groups[MAX_GROUPS], starts[MAX_GROUPS], ends[MAX_GROUPS], tile_ends[MAX_GROUPS];

    __device__ __forceinline__ GroupTable table(int num_groups) const {
        return GroupTable{groups, starts, ends, tile_ends, num_groups};
    }
};

// One warp: group_ends[g] = min(max(0, offs[0 .. g]), m). Whatever offs hold, the result is ascending and inside [0, m],
// so that no wrong value can lead outside the tensors. A null `offs` is a dense problem: one group of m rows.
__device__ __forceinline__ void clean_offs(const int* offs, int num_groups, int m, int* group_ends,
                                           int lane) {
    int highest = 0;
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        int end = g >= num_groups ? 0 : offs == nullptr ? m : offs[g];
        end = end < highest ? highest : end;
        end = end > m ? m : end;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running maximum
            const int other = __shfl_up_sync(0xffffffff, end, distance);
            if (lane >= distance && other > end) end = other;
        }
        if (g < num_groups) group_ends[g] = end;
        highest = __shfl_sync(0xffffffff, end, 31);
    }
}

// One warp: tile_ends[i] = sum over j <= i of ceil(rows of the j-th group in the walk / BLOCK_M).
template <int BLOCK_M>
__device__ __forceinline__ void count_tiles(const int* starts, const int* ends, int num_groups,
                                            int* tile_ends, int lane) {
    int before = 0;
    for (int base = 0; base < num_groups; base += 32) {
        const int i = base + lane;
        int tiles = i < num_groups ? (ends[i] - starts[i] + BLOCK_M - 1) / BLOCK_M : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, tiles, distance);
            if (lane >= distance) tiles += other;
        }
        tiles += before;
        if (i < num_groups) tile_ends[i] = tiles;
        before = __shfl_sync(0xffffffff, tiles, 31);
    }
}

// All threads of the CTA. Ends with the table visible to all of them.
template <int BLOCK_M, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ void build_group_table(GroupTableStorage<MAX_GROUPS>& storage, const int* offs,
                                                  int num_groups, int m, int warp, int lane) {
    if (warp == 1) clean_offs(offs, num_groups, m, storage.group_ends, lane);
    __syncthreads();
    for (int g = threadIdx.x; g < num_groups; g += NUM_THREADS) {
        const int place = place_of_group(storage.group_ends, num_groups, g);
        storage.groups[place] = g;
        storage.starts[place] = g == 0 ? 0 : storage.group_ends[g - 1];
        storage.ends[place] = storage.group_ends[g];
    }
    __syncthreads();
    if (warp == 1) count_tiles<BLOCK_M>(storage.starts, storage.ends, num_groups, storage.tile_ends, lane);
    __syncthreads();
}
