// The store of sm90_fp8_grouped_gemm.cu for plain values: a tile's registers are converted into staging memory, from
// which TMA writes the rows that exist.
//
//      consumer warpgroup                                  store warp, one for each of them
//      ------------------                                  --------------------------------
//      wait d_free  <------------------- arrive ---------  ... after the last tile's stores have read
//      stage the rows; proxy fence; arrive ---- d_full ->  wait d_full; store; wait until they have read
//
// So a consumer goes on to its next tile at once. Where CONSUMERS_STORE, its first thread issues the stores itself.
#pragma once

#if STORE_IS_POOL
using StoreMaps = DescriptorPool;
#else
using StoreMaps = TensorMap;
#endif

// One thread, when the kernel begins: else a CTA's first store would wait for its map from memory, which in a call of one
// tile a CTA is at the very end.
__device__ __forceinline__ void prefetch_store_maps(const StoreMaps& maps) {
#if STORE_IS_POOL
#pragma unroll
    for (int i = 0; i < 7; ++i) prefetch_tensormap((&maps.box_1)[i]);
#else
    prefetch_tensormap(maps);
#endif
}

constexpr int STORE_THREADS = 128 + (CONSUMERS_STORE ? 0 : 32);  // that meet at a warpgroup's barriers
__device__ __forceinline__ uint32_t d_free(int warpgroup) {
    return 1 + warpgroup;
}
__device__ __forceinline__ uint32_t d_full(int warpgroup) {
    return CONSUMERS_STORE ? d_free(warpgroup) : 1 + NUM_MMA_WARPGROUPS + warpgroup;
}

// One thread: stores the rows that exist of a warpgroup's NUM_WAVES m64s.
template <int NUM_WAVES>
__device__ __forceinline__ void store_m64s(SharedStorage& shared, const Problem& problem,
                                           const StoreMaps& maps, const Tile& tile, int column,
                                           int warpgroup) {
#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
        const int m64 = w * NUM_MMA_WARPGROUPS + warpgroup;
        const int left = tile.rows - m64 * WGMMA_M;
        const int rows = left < WGMMA_M ? left : WGMMA_M;
        const int row = tile.row + m64 * WGMMA_M;
        for (int s = 0; s < NUM_SLABS && column + s * SLAB_COLUMNS < problem.n; ++s) {
            const uint32_t slab = shared_address(shared.d[m64] + s * SLAB_BYTES);
#if STORE_IS_POOL
            store_slab_pool(maps, slab, column + s * SLAB_COLUMNS, row, rows);
#else
            store_slab_ragged(maps, slab, column + s * SLAB_COLUMNS, row, row + rows);
#endif
        }
    }
    cp_async_bulk_commit_group();
}

// Consumer: converts its m64s of d, and writes the rows that exist or has them written.
template <int NUM_WAVES>
__device__ __forceinline__ void store_tile(const float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                           const Problem& problem, const StoreMaps& maps, const Tile& tile,
                                           int column, int warpgroup, int warp, int lane) {
    const bool issuer = CONSUMERS_STORE && warp == 0 && lane == 0;
    if (issuer) cp_async_bulk_wait_group_read_all();  // the last tile's store has left this memory
    bar_sync(d_free(warpgroup), STORE_THREADS);
#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w)
        stage_tile<BLOCK_N, OUT_TYPE>(d[w], shared_address(shared.d[w * NUM_MMA_WARPGROUPS + warpgroup]),
                                      warp, lane);
    fence_proxy_async_shared();
    if constexpr (CONSUMERS_STORE)
        bar_sync(d_full(warpgroup), STORE_THREADS);
    else
        bar_arrive(d_full(warpgroup), STORE_THREADS);
    if (issuer) store_m64s<NUM_WAVES>(shared, problem, maps, tile, column, warpgroup);
}

// Store warp of a consumer warpgroup.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            const StoreMaps& maps, int warpgroup, int lane) {
    Reader reader(shared.queue);
    Tile tile{};
    while (reader.next(tile, lane)) {
        if (lane == 0) reader.release();
        reader.advance();
        if (warpgroup * WGMMA_M >= tile.rows) continue;  // its warpgroup skips the tile too
        bar_arrive(d_free(warpgroup), STORE_THREADS);
        bar_sync(d_full(warpgroup), STORE_THREADS);
        if (lane == 0) {
            if (WAVES == 2 && (NUM_MMA_WARPGROUPS + warpgroup) * WGMMA_M < tile.rows)
                store_m64s<WAVES>(shared, problem, maps, tile, cta_column(tile), warpgroup);
            else
                store_m64s<1>(shared, problem, maps, tile, cta_column(tile), warpgroup);
            cp_async_bulk_wait_group_read_all();
        }
        __syncwarp();
    }
}
