// The producer of sm90_bf16_grouped_gemm.cu: one thread makes the copies of the tiles' stages.
#pragma once

// Boxes of a tile's tokens.
__device__ __forceinline__ int boxes_of(const Tile& tile) {
    return BOX_ROWS == BLOCK_M ? 1 : (tile.rows + BOX_ROWS - 1) / BOX_ROWS;
}

// Stage `ks` of a tile's weights and their scales, into one that is empty.
__device__ __forceinline__ void load_weights(SharedStorage& shared, const Problem& problem,
                                             const TensorMap& map_b, const TensorMap& map_sfb,
                                             const Tile& tile, int ks, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]);
    const int kb = ks * STAGE_BLOCKS;
    mbarrier_arrive_expect_tx(full, boxes_of(tile) * STAGE_BYTES_OF_BOX + STAGE_BYTES_OF_WEIGHTS);
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j) {
        const int column = (kb + j) * row_bytes(B_FORMAT);
        if constexpr (B_IS_REPACKED) {
            constexpr int RUN = GATE_AND_UP_APART ? 32 : BLOCK_N;
            for (int run = 0; run < BLOCK_N / RUN; ++run) {
                const int row = GATE_AND_UP_APART ? run_of_weights(problem, tile.column, run) : tile.column;
                tma_load_5d(map_b, shared_address(shared.b[stage][j] + run * (RUN * row_bytes(B_FORMAT))),
                            full, 0, 0, (kb + j) * (BLOCK_K / TILE_K), row / TILE_CODE_ROWS, tile.group);
            }
        } else if constexpr (GATE_AND_UP_APART) {
            for (int run = 0; run < BLOCK_N / 32; ++run)
                tma_load_3d(map_b, shared_address(shared.b[stage][j] + run * (32 * row_bytes(B_FORMAT))),
                            full, column, run_of_weights(problem, tile.column, run), tile.group);
        } else {
            tma_load_3d(map_b, shared_address(shared.b[stage][j]), full, column, tile.column, tile.group);
        }
    }
    const uint32_t sfb = shared_address(shared.sfb[stage]);
    if constexpr (SFB_IS_BLOCKED) {
        // The map's rows are half tiles, 256 bytes, in the order they lie in.
        const int row_tiles = (problem.n + 127) / 128;
        const int column_tiles = (problem.sfb_columns() + 3) / 4;
#pragma unroll
        for (int i = 0; i < STAGE_BLOCKS * (BLOCK_N / 128); ++i) {
            const int row_tile = tile.group * row_tiles + tile.column / 128 + i % (BLOCK_N / 128);
            const int column_tile = (kb + i / (BLOCK_N / 128)) * SCALE_TILES;
            tma_load_2d(map_sfb, sfb + i * SCALE_BLOCK_BYTES, full, 0,
                        2 * (row_tile * column_tiles + column_tile));
        }
    } else if constexpr (SFB_BYTES != 0) {
        const int first = kb * scales_of_128(B_FORMAT) - scale_offset<B_FORMAT>(kb);
        if constexpr (GATE_AND_UP_APART) {
            for (int run = 0; run < BLOCK_N / 32; ++run)
                tma_load_3d(map_sfb, sfb + run * (32 * SCALE_ROW_BYTES), full, first,
                            run_of_weights(problem, tile.column, run), tile.group);
        } else {
            tma_load_3d(map_sfb, sfb, full, first, tile.column, tile.group);
        }
    }
}

// The same stage of its tokens, and their scales.
__device__ __forceinline__ void load_tokens(SharedStorage& shared, const TensorMap& map_a,
                                            const TensorMap& map_sfa, const Tile& tile, int ks, int stage) {
    const uint32_t full = shared_address(&shared.full[stage]);
    const int kb = ks * STAGE_BLOCKS, boxes = boxes_of(tile);
#pragma unroll 1
    for (int first = 0; first < boxes * BOX_ROWS; first += BOX_ROWS) {
        const int row = tile.row + first;
#pragma unroll
        for (int j = 0; j < STAGE_BLOCKS; ++j) {
            if constexpr (A_FORMAT == FORMAT_BF16) {
                const uint32_t a = shared_address(shared.a[stage][j]) + first * 128;
                tma_load_2d(map_a, a, full, (kb + j) * BLOCK_K, row);
                tma_load_2d(map_a, a + TOKEN_HALF_BYTES, full, (kb + j) * BLOCK_K + 64, row);
            } else {
                constexpr int ROW_BYTES = row_bytes(A_FORMAT);
                tma_load_2d(map_a, shared_address(shared.a[stage][j]) + first * ROW_BYTES, full,
                            (kb + j) * ROW_BYTES, row);
            }
        }
        if constexpr (SFA_BYTES != 0)
            tma_load_2d(map_sfa, shared_address(shared.sfa[stage]) + first * SCALE_ROW_BYTES, full,
                        kb * scales_of_128(A_FORMAT) - scale_offset<A_FORMAT>(kb), row);
    }
}

// Stages of a first tile that are loaded before the groups' table is there: as many as the ring has.
__device__ __forceinline__ int first_stages(const Problem& problem) {
    return problem.k_stages() < STAGES ? problem.k_stages() : STAGES;
}

// Loads them; with `is_ready` the weights alone, since the kernels ahead may still be writing the tokens.
__device__ __forceinline__ void load_first_stages(SharedStorage& shared, const Problem& problem,
                                                  const TensorMap& map_a, const TensorMap& map_b,
                                                  const TensorMap& map_sfa, const TensorMap& map_sfb,
                                                  const Tile& tile, bool is_ready) {
    if (tile.rows == 0) return;
#pragma unroll 1
    for (int ks = 0; ks < first_stages(problem); ++ks) {
        load_weights(shared, problem, map_b, map_sfb, tile, ks, ks);
        if (!is_ready) load_tokens(shared, map_a, map_sfa, tile, ks, ks);
    }
}

// `has_first_stages`: load_first_stages has been called.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const TensorMap& map_sfb,
                                           bool has_first_stages, bool is_ready) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_stages = problem.k_stages();
    Tile tile;
    griddepcontrol_wait();
    bool is_tile = reader.next(tile);
    int ahead = has_first_stages ? first_stages(problem) : 0;
    if (is_ready && is_tile) {
#pragma unroll 1
        for (int ks = 0; ks < ahead; ++ks) load_tokens(shared, map_a, map_sfa, tile, ks, ks);
    }
    pipeline = {ahead == STAGES ? 0 : ahead, ahead == STAGES};
    for (; is_tile; is_tile = reader.next(tile)) {
#pragma unroll 1
        for (int ks = ahead; ks < k_stages; ++ks) {
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            load_weights(shared, problem, map_b, map_sfb, tile, ks, stage);
            load_tokens(shared, map_a, map_sfa, tile, ks, stage);
            pipeline.advance();
        }
        ahead = 0;
        reader.release();
        reader.advance();
    }
}
