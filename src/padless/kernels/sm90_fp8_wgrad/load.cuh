// The producer of sm90_fp8_wgrad.cu: one thread keeps the ring of stages full.
#pragma once

// The number of the next tile is drawn when the producer begins with the last so many blocks of a tile: the later, the better
// it is known who is free first, and two blocks take longer than an atomic.
constexpr int BLOCKS_AHEAD = 8;

constexpr uint32_t STAGE_BYTES = A_BYTES + B_BYTES + BLOCK_M * 4 + (X_SCALES_ARE_BLOCKS ? 0 : BLOCK_N * 4);
constexpr int FULL_ARRIVALS = X_SCALES_ARE_BLOCKS ? 2 : 1;  // of TMA's bytes, and of cp.async

// A tile's scale of 128 x 128 is one number a stage, too little for TMA, whose rows start at multiples of 16 bytes.
// In the stage it is there when it is needed: a consumer that fetches it itself waits at the start of every tile.
__device__ __forceinline__ void load_block_scale(const Problem& problem, float* sfb, uint32_t full,
                                                 int column, int scale_row) {
    const int columns = (problem.n_columns + BLOCK_N - 1) / BLOCK_N;
    const int block = CLUSTER_N > 1 && column >= problem.n_columns ? 0 : column / BLOCK_N;
    scale_row = scale_row < 0 ? 0 : scale_row < problem.scale_rows ? scale_row : problem.scale_rows - 1;
    cp_async_4(shared_address(sfb), problem.sfb + static_cast<long long>(scale_row) * columns + block);
    cp_async_mbarrier_arrive_noinc(full);
}

// A's rows: the CTAs of a cluster fetch a part each and give it to both.
__device__ __forceinline__ void load_a(const TensorMap& map_a, uint8_t* a, uint32_t full, int token,
                                       int row) {
    if constexpr (CLUSTER_N == 1) {
        tma_load_2d(map_a, shared_address(a), full, token, row);
    } else {
        constexpr int ROWS = BLOCK_M / CLUSTER_N;
        const int first = static_cast<int>(cluster_cta_rank()) * ROWS;
        tma_load_2d_multicast(map_a, shared_address(a) + first * BLOCK_T, full, token, row + first,
                              (1 << CLUSTER_N) - 1);
    }
}

// Producer, one thread. A block's bytes past the group's end belong to others: they are loaded and not multiplied.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const TensorMap& map_sfb) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const bool draws = CLUSTER_N == 1 || cluster_cta_rank() == 0;  // the first CTA does for both
    Tile tile;
    while (reader.next(tile)) {
        const int blocks = token_blocks(shared.groups.rows(tile.group));
        const int draw_at = blocks > BLOCKS_AHEAD ? blocks - BLOCKS_AHEAD : 0;
        // The engine takes coordinates of bytes that are multiples of 16 alone, whatever the starts hold.
        const int a_start = problem.a.starts[tile.group] & ~31, b_start = problem.b.starts[tile.group] & ~31;
        const int block_start = problem.block_starts[tile.group];
        const int column = cta_column(tile);
        if (blocks == 0 && draws) mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        for (int block = 0; block < blocks; ++block) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
            const int t = block * BLOCK_T;
            tma_load_2d(map_b, shared_address(shared.b[stage]), full, b_start + t, column);
            load_a(map_a, shared.a[stage], full, a_start + t, tile.row);
            tma_load_2d(map_sfa, shared_address(shared.sfa[stage]), full, tile.row, block_start + block);
            if constexpr (X_SCALES_ARE_BLOCKS)
                load_block_scale(problem, shared.sfb[stage], full, column, block_start + block);
            else
                tma_load_2d(map_sfb, shared_address(shared.sfb[stage]), full, column, block_start + block);
            pipeline.advance();
            if (block == draw_at && draws) mbarrier_arrive(shared_address(&shared.next_tile_wanted));
        }
        reader.release();
        reader.advance();
    }
}
