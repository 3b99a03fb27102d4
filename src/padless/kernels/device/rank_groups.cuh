// Ranks the groups in shared memory from `offs`, once per CTA. Included behind the kernel's SharedStorage, which has `groups`
// (RankedGroups of device/longest_first.cuh), and NUM_THREADS.
#pragma once

// All threads of the CTA: cleans offs, of which none may be above `most`, and ranks the groups. Ends with both visible to all of
// them.
__device__ __forceinline__ void rank_groups(SharedStorage& shared, const int* offs, int num_groups, int most,
                                            int warp, int lane) {
    if (warp == 0) clean_offs(offs, num_groups, most, shared.groups.ends, lane);
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g < num_groups; g += NUM_THREADS)
        shared.groups.order[place_of_group(shared.groups.ends, num_groups, g)] = g;
    __syncthreads();
}
