// What the roles of a weight gradient's kernel know of its groups and tiles. Included behind the kernel's SharedStorage, which has
// `groups` (SortedGroups) and `queue`, its Reader, Problem, OUT_TYPE, D_EVICTS_FIRST (whether operands may push the result out of
// L2) and NUM_THREADS.
#pragma once

// A consumer's walk through the queue, of which it needs to know no more than how many tokens a tile's group has.
struct TokenReader {
    SharedStorage& shared;
    Reader reader;
    int lane, tokens;  // of the tile at hand; -1: there are no more

    __device__ __forceinline__ TokenReader(SharedStorage& shared, int lane)
        : shared(shared), reader(shared.queue), lane(lane) {
        read();
    }

    // Gives the slot back and goes on to the next tile.
    __device__ __forceinline__ void next() {
        if (lane == 0) reader.release();
        reader.advance();
        read();
    }

  private:
    __device__ __forceinline__ void read() {
        Tile tile;
        tokens = -1;
        if (lane == 0 && reader.next(tile)) tokens = shared.groups.rows(tile.group);
        tokens = __shfl_sync(0xffffffff, tokens, 0);
    }
};

// For device/sm90/piece_store.cuh. The map clips.
__device__ __forceinline__ bool is_in_result(const Problem& problem, const Tile& /*tile*/, int row,
                                             int column) {
    return row < problem.n_rows && column < problem.n_columns;
}
__device__ __forceinline__ void write_slab(const Problem& /*problem*/, const TensorMap& map_d, uint32_t slab,
                                           const Tile& tile, int row, int column) {
    if constexpr (D_EVICTS_FIRST)
        tma_store_3d_evict_first(map_d, slab, column, row, tile.group);
    else
        tma_store_3d(map_d, slab, column, row, tile.group);
}
