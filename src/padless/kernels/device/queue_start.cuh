// The beginning of a kernel whose tiles come from device/tile_queue.cuh: one warp asks for offs before all else, makes the queue while
// they come, and queues the CTA's first tile as soon as they are here.
#pragma once

// Every thread, first of all: the queue warp's lanes load the end of a group each, if those are few. That warp should have
// nothing else to do at the beginning, for it waits here until the kernels ahead have ended.
template <int QUEUE_WARP>
__device__ __forceinline__ int load_ends_early(const int* offs, int num_groups, int m) {
    if (threadIdx.x / 32 != QUEUE_WARP || num_groups > SMALL_TABLE) return 0;
    griddepcontrol_wait();
    return load_group_end(offs, num_groups, m, threadIdx.x % 32);
}

// One warp: makes the queue's barriers, and with `are_few` writes down the table and queues the first tile.
template <class Order, int BLOCK_M, int MAX_GROUPS>
__device__ __forceinline__ void make_queue(TileQueueStorage& queue, GroupTableStorage<MAX_GROUPS>& groups,
                                           int readers, int end, int num_groups, int m, int n, bool are_few,
                                           int lane) {
    if (elect_one()) {
        for (int s = 0; s < QUEUE_SLOTS; ++s) {
            mbarrier_init(shared_address(&queue.full[s]), 1);
            mbarrier_init(shared_address(&queue.empty[s]), readers);
        }
        fence_mbarrier_init();
    }
    __syncwarp();
    if (are_few) {
        const PlacedGroup group = place_group<BLOCK_M>(end, num_groups, m, lane);
        queue_first_tile<Order>(queue, group, Order::tiles_along(n), blockIdx.x, gridDim.x, lane);
        store_group(groups, group, num_groups, lane);
    }
}

// All threads of the CTA. `end`: of load_ends_early. `readers`: arrivals that free a slot. Ends with the table visible to all of
// them and, if groups are few or the table is flat (the result), with the first tile queued. Until then nothing of global memory may be touched: the
// kernels ahead may still be writing it.
template <class Order, int QUEUE_WARP, int BLOCK_M, int NUM_THREADS, int MAX_GROUPS>
__device__ __forceinline__ bool start_queue(TileQueueStorage& queue, GroupTableStorage<MAX_GROUPS>& groups,
                                            int readers, int end, const int* offs, int num_groups, int m,
                                            int n, int warp, int lane) {
    const bool are_few = num_groups <= SMALL_TABLE;
    if (warp == QUEUE_WARP)
        make_queue<Order, BLOCK_M>(queue, groups, readers, end, num_groups, m, n, are_few, lane);
    if (warp != QUEUE_WARP || !are_few) griddepcontrol_wait();
    if (are_few) {
        __syncthreads();
        return true;
    }
    const bool is_flat = build_large_table<BLOCK_M, NUM_THREADS>(groups, offs, num_groups, m, lane);
    if (is_flat && warp == QUEUE_WARP && lane == 0)
        queue_first_tile(queue, Order(groups.table(), n, gridDim.x), blockIdx.x);
    return is_flat;
}
