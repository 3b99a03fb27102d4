// The store of sm90_fp8_wgrad.cu: a tile's registers are converted into staging memory piece by piece, from which TMA
// writes them, or adds them to what is there.
//
//      consumer warpgroup                                  store warp, one for each of them
//      ------------------                                  --------------------------------
//      wait d_free[b]  <---------------- arrive ---------  ... after the piece before the last has been read
//      stage; proxy fence; arrive ---- d_full[b] ------->  wait d_full[b]; store
//
// A wave is staged when the products of the next tile's first block are already under way (multiply.cuh). The first time a
// consumer stages registers that hold no tile, and the store warp stores nothing: a branch there, while products are under
// way, takes registers that the largest kernels do not have.
#pragma once

constexpr int STORE_THREADS = 128 + 32;  // that meet at a barrier: a warpgroup and its store warp

__device__ __forceinline__ uint32_t d_free(int warpgroup, int piece) {
    return 1 + warpgroup * NUM_D + piece % NUM_D;
}
__device__ __forceinline__ uint32_t d_full(int warpgroup, int piece) {
    return 1 + NUM_MMA_WARPGROUPS * NUM_D + warpgroup * NUM_D + piece % NUM_D;
}

// Consumer: hands a wave of its tile to its store warp.
__device__ __forceinline__ void stage_wave(const float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                           int warpgroup, int wave) {
    using Piece = const float (&)[PIECE_COLUMNS / 2];
    const uint32_t tid = read_tid_x();
    const int warp = tid / 32 % 4, lane = tid % 32;
#pragma unroll
    for (int part = 0; part < PIECES_PER_WAVE; ++part) {
        const int piece = wave * PIECES_PER_WAVE + part;
        bar_sync(d_free(warpgroup, piece), STORE_THREADS);
        stage_tile<PIECE_COLUMNS, OUT_TYPE>(reinterpret_cast<Piece>(d[part * (PIECE_COLUMNS / 2)]),
                                            shared_address(shared.d[warpgroup][piece % NUM_D]), warp, lane);
        fence_proxy_async_shared();
        bar_arrive(d_full(warpgroup, piece), STORE_THREADS);
    }
}

// One thread: stores or adds a piece, clipped to the rows and columns that exist.
__device__ __forceinline__ void store_piece(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, const Tile& tile, int warpgroup,
                                            int piece) {
    const int row = tile.row + piece / PIECES_PER_WAVE * WAVE_ROWS + warpgroup * WGMMA_M;
    for (int s = 0; s < PIECE_SLABS; ++s) {
        const int column = tile.column + piece % PIECES_PER_WAVE * PIECE_COLUMNS + s * SLAB_COLUMNS;
        if (row >= problem.n_rows || column >= problem.n_columns) break;
        const uint32_t slab = shared_address(shared.d[warpgroup][piece % NUM_D] + s * SLAB_BYTES);
        if (OUT_TYPE == OUT_F32 && problem.accumulate)
            tma_reduce_add_3d(map_d, slab, column, row, tile.group);
        else
            tma_store_3d(map_d, slab, column, row, tile.group);
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
