// A store by warps of its own: a tile's registers are converted into staging memory piece by piece, from which the copy engine
// writes them.
//
//      consumer warpgroup                                  store warp, one for each of them
//      ------------------                                  --------------------------------
//      wait d_free[b]  <---------------- arrive ---------  ... after the piece before the last has been read
//      stage; proxy fence; arrive ---- d_full[b] ------->  wait d_full[b]; store
//
// A warpgroup has its tile in parts, of PIECES pieces each, which are staged in NUM_D = 2 buffers in turn. A piece is PIECE_COLUMNS
// columns of 64 rows (PIECE_SLABS slabs), a tile NUM_PIECES of them. The first time a consumer stages registers that hold no tile,
// and the store warp stores nothing: where parts are staged when other products are already under way, a branch there takes
// registers that the largest kernels do not have.
//
// Included behind the kernel's SharedStorage, Reader, Problem, these constants and these functions: piece_row and piece_column,
// where in the result a warpgroup's piece of a tile begins; is_in_result, whether the result has a row and column of a tile; and
// write_slab, which has the copy engine write 64 rows of SLAB_COLUMNS.
#pragma once

constexpr int STORE_THREADS = 128 + 32;  // that meet at a barrier: a warpgroup and its store warp

__device__ __forceinline__ uint32_t d_free(int warpgroup, int piece) {
    return 1 + warpgroup * NUM_D + piece % NUM_D;
}
__device__ __forceinline__ uint32_t d_full(int warpgroup, int piece) {
    return 1 + NUM_MMA_WARPGROUPS * NUM_D + warpgroup * NUM_D + piece % NUM_D;
}

// Consumer: hands a part of its tile to its store warp.
template <int PIECES>
__device__ __forceinline__ void stage_part(const float (&d)[PIECES * PIECE_COLUMNS / 2],
                                           SharedStorage& shared, int warpgroup, int part) {
    using Piece = const float (&)[PIECE_COLUMNS / 2];
    const uint32_t tid = read_tid_x();
    const int warp = tid / 32 % 4, lane = tid % 32;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int piece = part * PIECES + i;
        bar_sync(d_free(warpgroup, piece), STORE_THREADS);
        stage_tile<PIECE_COLUMNS, OUT_TYPE>(reinterpret_cast<Piece>(d[i * (PIECE_COLUMNS / 2)]),
                                            shared_address(shared.d[warpgroup][piece % NUM_D]), warp, lane);
        fence_proxy_async_shared();
        bar_arrive(d_full(warpgroup, piece), STORE_THREADS);
    }
}

// One thread: writes a piece, clipped to the rows and columns that exist.
__device__ __forceinline__ void store_piece(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, const Tile& tile, int warpgroup,
                                            int piece) {
    const int row = piece_row(tile, warpgroup, piece);
    for (int s = 0; s < PIECE_SLABS; ++s) {
        const int column = piece_column(tile, piece) + s * SLAB_COLUMNS;
        if (!is_in_result(problem, tile, row, column)) break;
        const uint32_t slab = shared_address(shared.d[warpgroup][piece % NUM_D] + s * SLAB_BYTES);
        write_slab(problem, map_d, slab, tile, row, column);
    }
    cp_async_bulk_commit_group();
}

// Store warp of a consumer warpgroup. While a piece is staged the buffer of the next one is emptied.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, int warpgroup, int lane) {
    Reader reader(shared.queue);
    Tile tile{}, next{};
    bar_arrive(d_free(warpgroup, 0), STORE_THREADS);
    do {
        tile = next;
#pragma unroll
        for (int piece = 0; piece < NUM_PIECES; ++piece) {
            if (piece == NUM_PIECES - 1) {  // the tile behind is being multiplied, so it is known
                reader.next(next, lane);
                if (next.rows > 0 && lane == 0) reader.release();
                reader.advance();
            }
            if (piece < NUM_PIECES - 1 || next.rows > 0) {
                if (lane == 0) cp_async_bulk_wait_group_read_all();
                __syncwarp();
                bar_arrive(d_free(warpgroup, piece + 1), STORE_THREADS);
            }
            bar_sync(d_full(warpgroup, piece), STORE_THREADS);
            if (lane == 0 && tile.rows > 0) store_piece(shared, problem, map_d, tile, warpgroup, piece);
            __syncwarp();
        }
    } while (next.rows > 0);
    if (lane == 0) cp_async_bulk_wait_group_read_all();  // shared memory must outlive the reads
}
