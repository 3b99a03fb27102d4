// Schedules tiles: a scheduler thread takes tickets and leaves the tiles in a short queue in shared memory, from
// which the producer and the consumers read. In a cluster the first CTA's scheduler serves all of them.
//
// A worker's first tile is the one with its own number: where groups are few or the table is flat a warp of every CTA queues it
// (queue_first_tile), else the scheduler. After that the scheduler draws from a counter in global memory, when there is a
// slot for the tile or when it is asked for the next one (`wanted`): the later, the better it is known who is free first.
// Which worker multiplies a tile changes nothing in the result. The counter is zero between launches: the last worker to
// find no more tiles sets it back. Launches that may run at the same time need counters of their own; without one
// (counter < 0) worker w of W takes tiles w, w + W, w + 2 W, ...
#pragma once

constexpr int QUEUE_SLOTS = 2;
constexpr int NUM_COUNTERS = 1 << 15;

struct TileCounter {
    int drawn, finished;
};

__device__ TileCounter padless_counters[NUM_COUNTERS];

struct TileQueueStorage {
    alignas(16) Tile tiles[QUEUE_SLOTS];
    uint64_t full[QUEUE_SLOTS];
    uint64_t empty[QUEUE_SLOTS];  // of the first CTA: every reader of every CTA arrives here
};

// A first tile is a half only where there are fewer tiles than workers. No number comes after the first tiles' then, so that in
// place of a half without a row the end is queued (rows 0).
template <class Order>
__device__ __forceinline__ void put_first_tile(TileQueueStorage& queue, Tile tile) {
    if (Order::HAS_HALF_TILES && tile.rows < 0) tile.rows = 0;
    queue.tiles[0] = tile;
}

// One warp of each CTA, with a group of place_group in each lane: queues the worker's first tile (schedule_tiles has to be
// told). It is known here as soon as offs are, while a scheduler would have to search the table for it.
template <class Order>
__device__ __forceinline__ void queue_first_tile(TileQueueStorage& queue, const PlacedGroup& group,
                                                 int n_tiles, int worker, int workers, int lane) {
    if (lane == 0) queue.tiles[0] = Tile{0, 0, 0, 0};
    __syncwarp();
    int number = worker, half = -1;
    if constexpr (Order::HAS_HALF_TILES) {
        const int all = group.all_tiles * n_tiles;
        const int past = all < workers ? worker - Order::whole_tiles(all, workers) : -1;
        if (past >= 0) number = worker - past + past / 2, half = past % 2;
    }
    const int in_group = number - (group.tile_end - group.tiles) * n_tiles;
    if (in_group >= 0 && in_group < group.tiles * n_tiles) {
        Tile tile = Order::tile_in_group(in_group, lane, group.start, group.end, group.tiles, n_tiles);
        if constexpr (Order::HAS_HALF_TILES) {
            if (half >= 0) tile = Order::half_tile_of(tile, half);
        }
        put_first_tile<Order>(queue, tile);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&queue.full[0]));
}

// One thread of each CTA: the same with a flat table, in which no search is needed.
template <class Order>
__device__ __forceinline__ void queue_first_tile(TileQueueStorage& queue, Order order, int worker) {
    put_first_tile<Order>(queue, order.tile_at(worker));
    mbarrier_arrive(shared_address(&queue.full[0]));
}

// One warp: the same before there is a table, where that will be flat. `ends`: of all groups, in shared memory, with something readable up
// to a multiple of four. Result: whether the table will be flat, as build_large_table says too.
template <class Order, int BLOCK_M>
__device__ __forceinline__ bool queue_first_tile(TileQueueStorage& queue, const int* ends, int num_groups,
                                                 int m, int n_tiles, int worker, int lane) {
    static_assert(!Order::HAS_HALF_TILES, "whose numbers depend on all tiles");
    const int wanted = worker / n_tiles;  // which of the groups with rows
    int found = -1, start = 0, end = 0, active = 0, before = 0;
    bool is_flat = true;
#pragma unroll 1
    for (int first = 4 * lane; first - 4 * lane < num_groups; first += 128) {  // four groups to a lane
        int4 four{};
        if (first < num_groups) four = *reinterpret_cast<const int4*>(&ends[first]);
        const int of_group[4] = {four.x, four.y, four.z, four.w};
        int last = __shfl_up_sync(0xffffffff, four.w, 1);
        if (lane == 0) last = before;
        uint32_t with_rows[4];
        int earlier = active;  // groups with rows before this lane's
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int rows = first + i < num_groups ? of_group[i] - (i == 0 ? last : of_group[i - 1]) : 0;
            is_flat = is_flat && rows >= 0 && rows <= flat_rows(BLOCK_M) && (rows == 0 || of_group[i] <= m);
            with_rows[i] = __ballot_sync(0xffffffff, rows > 0);
            earlier += __popc(with_rows[i] & ((1u << lane) - 1));
            active += __popc(with_rows[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (!(with_rows[i] >> lane & 1)) continue;
            if (earlier == wanted)
                found = first + i, start = i == 0 ? last : of_group[i - 1], end = of_group[i];
            ++earlier;
        }
        before = __shfl_sync(0xffffffff, four.w, 31);
    }
    if (!__all_sync(0xffffffff, is_flat)) return false;
    if (lane == 0) queue.tiles[0] = Tile{0, 0, 0, 0};
    __syncwarp();
    if (found >= 0)
        queue.tiles[0] = Order::tile_in_group(worker - wanted * n_tiles, found, start, end, 1, n_tiles);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&queue.full[0]));
    return true;
}

// The scheduler: waits until the slot at hand is free.
template <int CLUSTER>
__device__ __forceinline__ void wait_for_slot(TileQueueStorage& queue,
                                              const Pipeline<QUEUE_SLOTS>& pipeline) {
    const uint32_t empty = shared_address(&queue.empty[pipeline.stage]);
    if constexpr (CLUSTER == 1)
        mbarrier_wait(empty, pipeline.phase ^ 1);
    else
        mbarrier_wait_cluster(empty, pipeline.phase ^ 1);
}

// The scheduler: leaves `tile` in a slot of every CTA of the worker, when it is free.
template <int CLUSTER>
__device__ __forceinline__ void queue_tile(TileQueueStorage& queue, const Pipeline<QUEUE_SLOTS>& pipeline,
                                           const Tile& tile) {
    const int slot = pipeline.stage;
    wait_for_slot<CLUSTER>(queue, pipeline);
    if constexpr (CLUSTER == 1) {
        queue.tiles[slot] = tile;
        mbarrier_arrive(shared_address(&queue.full[slot]));
    } else {
        for (int cta = 0; cta < CLUSTER; ++cta) {
            st_cluster_v4(shared_address(&queue.tiles[slot]), cta, tile.group, tile.row, tile.rows,
                          tile.column);
            mbarrier_arrive_release_cluster(shared_address(&queue.full[slot]), cta);
        }
    }
}

// One thread of each worker. HALF_TILES: the order has tiles without a row, which are passed over. ASKED: the number of the next
// tile is taken after an arrival at the barrier `wanted`, of which every tile that is scheduled must bring one.
// `first_is_queued`: queue_first_tile has been called.
template <int CLUSTER, bool HALF_TILES = false, bool ASKED = false, class Order>
__device__ __forceinline__ void schedule_tiles(TileQueueStorage& queue, Order order, int counter, int worker,
                                               int workers, uint64_t* wanted = nullptr,
                                               bool first_is_queued = false) {
    Pipeline<QUEUE_SLOTS> pipeline;
    uint32_t wanted_phase = 0;
    Tile tile;
    int number = worker;
    do {
        if (first_is_queued) {
            mbarrier_wait(shared_address(&queue.full[0]), 0);
            tile.rows = queue.tiles[0].rows;
        } else {
            tile = order.tile_at(number);
        }
        if (!HALF_TILES || tile.rows >= 0) {
            if (!first_is_queued) queue_tile<CLUSTER>(queue, pipeline, tile);
            pipeline.advance();
            if (ASKED && tile.rows != 0) {
                mbarrier_wait(shared_address(wanted), wanted_phase);
                wanted_phase ^= 1;
            } else if (tile.rows != 0) {  // the next number is drawn when its tile can be queued, not before
                wait_for_slot<CLUSTER>(queue, pipeline);
            }
        }
        first_is_queued = false;
        number = counter < 0      ? number + workers
                 : tile.rows == 0 ? 0
                                  : workers + atomicAdd(&padless_counters[counter].drawn, 1);
    } while (tile.rows != 0);

    if (counter >= 0) {
        __threadfence();  // our last draw comes before our being counted as finished
        if (atomicAdd(&padless_counters[counter].finished, 1) == workers - 1) {
            padless_counters[counter].drawn = 0;
            padless_counters[counter].finished = 0;
        }
    }
}

// A reader's walk through the queue: a warp, or one thread (the producer). In a warp lane 0 alone reads the slot and
// gives it back, so that one thread's own order is all there is to keep.
template <int CLUSTER>
struct TileReader {
    TileQueueStorage& queue;
    Pipeline<QUEUE_SLOTS> pipeline;

    __device__ __forceinline__ explicit TileReader(TileQueueStorage& queue) : queue(queue) {}

    // One thread: the next tile; false when there is none. Its slot stays ours until release().
    __device__ __forceinline__ bool next(Tile& tile) {
        wait();
        tile = queue.tiles[pipeline.stage];
        return tile.rows != 0;
    }

    // The same for all lanes of a warp.
    __device__ __forceinline__ bool next(Tile& tile, int lane) {
        wait();
        if (lane == 0) tile = queue.tiles[pipeline.stage];
        tile.group = __shfl_sync(0xffffffff, tile.group, 0);
        tile.row = __shfl_sync(0xffffffff, tile.row, 0);
        tile.rows = __shfl_sync(0xffffffff, tile.rows, 0);
        tile.column = __shfl_sync(0xffffffff, tile.column, 0);
        return tile.rows != 0;
    }

    // The thread that read it: gives the slot back. Producer and consumers do when the tile is nearly done, so that the
    // scheduler does not draw further ahead than it must.
    __device__ __forceinline__ void release() {
        const uint32_t empty = shared_address(&queue.empty[pipeline.stage]);
        if constexpr (CLUSTER == 1)
            mbarrier_arrive(empty);
        else
            mbarrier_arrive_cluster(empty, 0);
    }

    __device__ __forceinline__ void advance() { pipeline.advance(); }

  private:
    __device__ __forceinline__ void wait() {
        const uint32_t full = shared_address(&queue.full[pipeline.stage]);
        if constexpr (CLUSTER == 1)
            mbarrier_wait(full, pipeline.phase);
        else
            mbarrier_wait_cluster(full, pipeline.phase);
    }
};
