// The producer of sm90_bf16_plain_grouped_gemm.cu: one thread keeps the ring of stages full.
#pragma once

// The number of the next tile is drawn when the producer begins with the last so many blocks of a tile: the later, the better
// it is known who is free first, and two blocks take longer than an atomic.
constexpr int BLOCKS_AHEAD = 8;

// One stage of weights: BLOCK_N rows of 64 of K.
__device__ __forceinline__ void load_weights(const TensorMap& map_b, uint8_t* stage, uint32_t full,
                                             const Tile& tile, int k) {
    const uint32_t destination = shared_address(stage);
    if constexpr (B_IS_N_MAJOR) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / CHUNK_ROWS; ++i)
            tma_load_3d(map_b, destination + i * CHUNK_BYTES, full, tile.column + i * CHUNK_ROWS, k,
                        tile.group);
    } else {
        tma_load_3d(map_b, destination, full, k, tile.column, tile.group);
    }
}

// Producer, one thread. Of a tile of no more than 64 rows the second warpgroup's are not loaded.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile;
    const int blocks = problem.k_blocks(), draw_at = blocks > BLOCKS_AHEAD ? blocks - BLOCKS_AHEAD : 0;
    while (reader.next(tile)) {
        const int m64s = tile.rows > WGMMA_M ? 2 : 1;
        for (int block = 0; block < blocks; ++block) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, m64s * M64_BYTES + B_BYTES);
            load_weights(map_b, shared.b[stage], full, tile, block * BLOCK_K);
            for (int u = 0; u < m64s; ++u)
                tma_load_2d(map_a, shared_address(shared.a[stage] + u * M64_BYTES), full, block * BLOCK_K,
                            tile.row + u * WGMMA_M);
            pipeline.advance();
            if (block == draw_at) mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        }
        reader.release();
        reader.advance();
    }
}
