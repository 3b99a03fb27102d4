// What a launch reads while the one ahead of it still runs (griddepcontrol.cuh): what was there before that one began. The host
// says so (padless.kernels.ahead): the weights, and either offs, or the ids of the experts by which that launch sorts the
// rows. The groups are known then, and the first weights on their way, when the rows are written.
#pragma once

// When the next launch may begin. Behind a layer's first product comes its second, which has no room on a multiprocessor before the
// CTA there has ended, and fetches its weights then: as soon as this CTA can draw no more tiles. Behind others come small
// programs, which would lie next to the CTAs and slow them: when all loads have been issued.
#if EPILOGUE_IS_QUANT
constexpr bool RELEASES_LATE = GLU == GLU_NONE;
#else
constexpr bool RELEASES_LATE = true;
#endif

// What is read ahead is read past L1: before the wait a line of an earlier launch may still be there.

struct IdsAhead {
    const uint32_t* ids;  // [M] int32 or int64, those that are no group's among them; null: offs are ready
    int id_bytes;
};

// Where group g ends.
__device__ __forceinline__ int load_end_ahead(const int* offs, int m, int g) {
    return offs == nullptr ? m
                           : static_cast<int>(ld_relaxed_gpu(reinterpret_cast<const uint32_t*>(offs) + g));
}

// All threads of the CTA: ends[g] = how many ids are those of groups 0 .. g; 0 up to a multiple of four. `of_chunk`: room for a
// number for 32 groups. There is no early return: behind one the compiler no longer knew what all lanes of a warp agree on, in all
// of the kernel, and the producer's copies took twice as long.
template <int NUM_THREADS>
__device__ __forceinline__ void count_ids(int* ends, uint32_t* of_chunk, const IdsAhead& ahead, int m,
                                          int num_groups) {
    const int lane = threadIdx.x % 32, chunks = (num_groups + 31) / 32;
    for (int g = threadIdx.x; g < (num_groups + 3) / 4 * 4; g += NUM_THREADS) ends[g] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < m; i += NUM_THREADS) {
        const uint32_t* const word = ahead.ids + i * (ahead.id_bytes / 4);
        const uint32_t id = ld_relaxed_gpu(word), high = ahead.id_bytes == 8 ? ld_relaxed_gpu(word + 1) : 0;
        if (id < num_groups && high == 0) atomicAdd(&ends[id], 1);
    }
    __syncthreads();
#pragma unroll 1
    for (int g = threadIdx.x; g - lane < num_groups; g += NUM_THREADS) {
        int end = g < num_groups ? ends[g] : 0;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {  // running sum
            const int other = __shfl_up_sync(0xffffffff, end, distance);
            if (lane >= distance) end += other;
        }
        if (g < num_groups) ends[g] = end;
        if (lane == 31) of_chunk[g / 32] = end;
    }
    __syncthreads();
    if (chunks > 1) {
#pragma unroll 1
        for (int g = threadIdx.x; g - lane < num_groups; g += NUM_THREADS) {
            int before = 0;
            for (int c = lane; c < g / 32; c += 32) before += of_chunk[c];
            before = sum_of_lanes(before);
            if (g < num_groups) ends[g] += before;
        }
        __syncthreads();
    }
}

// All threads of the CTA: the ends of the groups in shared memory, from which the table is built; zeros up to a multiple of four.
template <int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ const int* ends_in_shared(GroupTableStorage<MAX_GROUPS>& groups, const int* offs,
                                                     const IdsAhead& ahead, int m, int num_groups) {
    int* const ends = groups.tile_ends;  // nothing yet
    if (ahead.ids != nullptr) {
        count_ids<NUM_THREADS>(ends, groups.sorted.of_chunk, ahead, m, num_groups);
    } else {
        for (int g = threadIdx.x; g < (num_groups + 3) / 4 * 4; g += NUM_THREADS)
            ends[g] = g < num_groups ? load_end_ahead(offs, m, g) : 0;
        __syncthreads();
    }
    return ends;
}
