// The store of sm90_fp8_wgrad.cu: a wave (64 rows) of a tile's registers is converted into staging memory, from which the copy
// engine writes it, or adds it to what is there.
//
//      consumer warpgroup                                  store warp, one for each of them
//      ------------------                                  --------------------------------
//      wait d_free  <------------------- arrive ---------  ... after the last store out of the wave's buffer has read
//      stage; proxy fence; arrive ---- d_full ---------->  wait d_full; store
//
// A wave is staged when the products of the next tile's first block are already under way (multiply.cuh). The first time a
// consumer stages registers that hold no tile, and the store warp stores nothing: a branch there, while products are under
// way, takes registers that the largest kernels do not have.
#pragma once

constexpr int STORE_THREADS = 128 + 32;  // that meet at a barrier: a warpgroup and its store warp

__device__ __forceinline__ uint32_t d_free(int warpgroup) {
    return 1 + warpgroup;
}
__device__ __forceinline__ uint32_t d_full(int warpgroup) {
    return 1 + NUM_MMA_WARPGROUPS + warpgroup;
}

// Consumer: hands a wave of its tile to its store warp.
__device__ __forceinline__ void stage_wave(const float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                           int warpgroup, int wave, int warp, int lane) {
    bar_sync(d_free(warpgroup), STORE_THREADS);
    stage_tile<BLOCK_N, OUT_TYPE>(d, shared_address(shared.d[warpgroup][wave % NUM_D]), warp, lane);
    fence_proxy_async_shared();
    bar_arrive(d_full(warpgroup), STORE_THREADS);
}

// One thread: stores or adds a wave, clipped to the rows and columns that exist.
__device__ __forceinline__ void store_wave(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_d, const Tile& tile, int warpgroup,
                                           int wave) {
    const int row = tile.row + wave * WAVE_ROWS + warpgroup * WGMMA_M;
    for (int s = 0; s < NUM_SLABS; ++s) {
        const int column = tile.column + s * SLAB_COLUMNS;
        if (row >= problem.n_rows || column >= problem.n_columns) break;
        const uint32_t slab = shared_address(shared.d[warpgroup][wave % NUM_D] + s * SLAB_BYTES);
        if (OUT_TYPE == OUT_F32 && problem.accumulate)
            tma_reduce_add_3d(map_d, slab, column, row, tile.group);
        else
            tma_store_3d(map_d, slab, column, row, tile.group);
    }
    cp_async_bulk_commit_group();
}

// Store warp: meets its warpgroup at a wave, which is stored if tile.rows is not 0.
__device__ __forceinline__ void meet_wave(SharedStorage& shared, const Problem& problem,
                                          const TensorMap& map_d, const Tile& tile, int warpgroup, int wave,
                                          int lane) {
    if (lane == 0) cp_async_bulk_wait_group_read<NUM_D - 1>();
    __syncwarp();
    bar_arrive(d_free(warpgroup), STORE_THREADS);
    bar_sync(d_full(warpgroup), STORE_THREADS);
    if (lane == 0 && tile.rows > 0) store_wave(shared, problem, map_d, tile, warpgroup, wave);
    __syncwarp();
}

// Store warp of a consumer warpgroup.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, int warpgroup, int lane) {
    Reader reader(shared.queue);
    Tile tile{};
    do {
#pragma unroll
        for (int w = 0; w < WAVES; ++w) meet_wave(shared, problem, map_d, tile, warpgroup, w, lane);
        reader.next(tile, lane);
        if (tile.rows > 0 && lane == 0) reader.release();
        reader.advance();
    } while (tile.rows > 0);
    if (lane == 0) cp_async_bulk_wait_group_read_all();  // shared memory must outlive the reads
}
