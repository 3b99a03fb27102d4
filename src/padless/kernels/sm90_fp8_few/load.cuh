// The producer of sm90_fp8_few_grouped_gemm.cu: one thread keeps the ring of stages full.
#pragma once

// A K block of a tile's weights, into a stage that is empty.
__device__ __forceinline__ void load_weights(SharedStorage& shared, const TensorMap& map_b, const Tile& tile,
                                             int kb, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]), b = shared_address(shared.b[stage]);
    mbarrier_arrive_expect_tx(full, STAGE_BYTES);
    if constexpr (GATE_AND_UP_APART)  // runs of 32 rows, of gate and of up in turn
        tma_load_5d(map_b, b, full, kb * BLOCK_K, 0, 0, tile.column / 64, tile.group);
    else
        tma_load_3d(map_b, b, full, kb * BLOCK_K, tile.column, tile.group);
}

// The same K block of its tokens, and their scales.
__device__ __forceinline__ void load_tokens(SharedStorage& shared, const TensorMap& map_a,
                                            const TensorMap& map_sfa, const Tile& tile, int kb, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]);
    tma_load_2d(map_a, shared_address(shared.a[stage]), full, kb * BLOCK_K, tile.row);
    tma_load_2d(map_sfa, shared_address(shared.sfa[stage]), full, tile.row & ~3, kb);
}

// K blocks of a first tile that are loaded before the groups' table is there: as many as the ring holds.
__device__ __forceinline__ int first_blocks(const Problem& problem) {
    return problem.k_blocks() < STAGES ? problem.k_blocks() : STAGES;
}

// Loads them; with `is_ready` the weights alone, since the kernels ahead may still be writing the tokens.
__device__ __forceinline__ void load_first_stages(SharedStorage& shared, const Problem& problem,
                                                  const TensorMap& map_a, const TensorMap& map_b,
                                                  const TensorMap& map_sfa, const Tile& tile, bool is_ready) {
    if (tile.rows == 0) return;
#pragma unroll 1
    for (int kb = 0; kb < first_blocks(problem); ++kb) {
        load_weights(shared, map_b, tile, kb, kb);
        if (!is_ready) load_tokens(shared, map_a, map_sfa, tile, kb, kb);
    }
}

// `has_first_stages`: load_first_stages has been called.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, bool has_first_stages, bool is_ready) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    griddepcontrol_wait();
    bool is_tile = reader.next(tile);
    int ahead = has_first_stages ? first_blocks(problem) : 0;
    if (is_ready && is_tile) {
#pragma unroll 1
        for (int kb = 0; kb < ahead; ++kb) load_tokens(shared, map_a, map_sfa, tile, kb, kb);
    }
    pipeline = {ahead == STAGES ? 0 : ahead, ahead == STAGES};
    for (; is_tile; is_tile = reader.next(tile)) {
        for (int kb = ahead; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            load_weights(shared, map_b, tile, kb, stage);
            load_tokens(shared, map_a, map_sfa, tile, kb, stage);
            pipeline.advance();
        }
        ahead = 0;
        reader.release();
        reader.advance();
    }
}
