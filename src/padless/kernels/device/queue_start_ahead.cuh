// The beginning of device/queue_start.cuh for kernels that may know their groups ahead of the wait (device/ahead.cuh).
#pragma once

// Every thread, first of all: as load_ends_early, but with `is_ready` ahead of the wait.
template <int QUEUE_WARP>
__device__ __forceinline__ int load_ends_ahead(const int* offs, bool is_ready, int num_groups, int m) {
    const int lane = threadIdx.x % 32;
    int end = 0;
    if (threadIdx.x / 32 == QUEUE_WARP && num_groups <= SMALL_TABLE) {
        if (!is_ready) griddepcontrol_wait();
        if (lane < num_groups) end = load_end_ahead(offs, m, lane);
    }
    return end;
}

// The same where the ids are there: counts, with every thread, if groups are few.
template <int QUEUE_WARP, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ int count_ends_early(GroupTableStorage<MAX_GROUPS>& groups, const IdsAhead& ahead,
                                                int m, int num_groups) {
    const int lane = threadIdx.x % 32;
    count_ids<NUM_THREADS>(groups.tile_ends, groups.sorted.of_chunk, ahead, m, num_groups);
    return threadIdx.x / 32 == QUEUE_WARP && lane < num_groups ? groups.tile_ends[lane] : 0;
}

// All threads of the CTA: as start_queue, but with `is_ready` nobody has waited for the kernels ahead, and the queue's warp finds the first
// tile, and a thread of it calls `load` with that, before the table of many groups is there. `end`: of the functions above.
template <class Order, int QUEUE_WARP, int BLOCK_M, int NUM_THREADS, int MAX_GROUPS, class Load>
__device__ __forceinline__ bool start_queue_ahead(TileQueueStorage& queue,
                                                  GroupTableStorage<MAX_GROUPS>& groups, int readers, int end,
                                                  const int* offs, const IdsAhead& ahead, int is_ready,
                                                  int num_groups, int m, int n, int warp, int lane,
                                                  const Load& load) {
    const bool are_few = num_groups <= SMALL_TABLE;
    if (warp == QUEUE_WARP)
        make_queue<Order, BLOCK_M>(queue, groups, readers, end, num_groups, m, n, are_few, lane);
    if (!is_ready && (warp != QUEUE_WARP || !are_few)) griddepcontrol_wait();
    const int* ends = nullptr;
    if (!are_few) ends = ends_in_shared<NUM_THREADS>(groups, offs, ahead, m, num_groups);
    if (warp == QUEUE_WARP) {
        const bool is_queued =
            are_few || queue_first_tile<Order, BLOCK_M>(queue, ends, num_groups, m, Order::tiles_along(n),
                                                        blockIdx.x, lane);
        if (is_queued && elect_one()) load(queue.tiles[0]);
    }
    bool has_first_tile = are_few;
    if (are_few)
        __syncthreads();
    else
        has_first_tile = build_large_table<BLOCK_M, NUM_THREADS>(groups, ends, num_groups, m, lane);
    // The compiler does not know that all lanes agree.
    return __shfl_sync(0xffffffff, has_first_tile, 0);
}
