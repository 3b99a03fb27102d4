// The producers of sm90_fp4_dgrad.cu: a thread that drives the copies, and warps that turn scales into factors.
#pragma once

// A stage's scales, row-major or as the tiles of its 128 rows that lie one after the other.
__device__ __forceinline__ void load_scales(const TensorMap& map_scales, uint32_t to, uint32_t full,
                                            const Problem& problem, const Tile& tile, int step) {
    const int column = tile.column / SCALE_BLOCK;
    if constexpr (SCALES_ARE_BLOCKED) {
        const int row_tiles = (problem.n + 127) / 128;
        const int column_tiles = (problem.k + SCALE_BLOCK * TILE_COLUMNS - 1) / (SCALE_BLOCK * TILE_COLUMNS);
        const int row_tile = tile.group * row_tiles + step * BLOCK_N / 128;
        // The map's rows are half tiles.
        tma_load_2d(map_scales, to, full, 0, 2 * (row_tile * column_tiles + column / TILE_COLUMNS));
    } else {
        tma_load_3d(map_scales, to, full, column / SCALE_ROW_BYTES * SCALE_ROW_BYTES, step * BLOCK_N,
                    tile.group);
    }
}

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_rows, const TensorMap& map_codes,
                                           const TensorMap& map_scales) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int stages = problem.n_stages();
    Tile tile;
    while (reader.next(tile)) {
        const int boxes = (tile.rows + BOX_ROWS - 1) / BOX_ROWS;
        for (int step = 0; step < stages; ++step) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, boxes * BOX_BYTES + CODE_BYTES + SCALE_BYTES);
            load_scales(map_scales, shared_address(shared.scales[stage]), full, problem, tile, step);
            tma_load_3d(map_codes, shared_address(shared.codes[stage]), full, tile.column / 2, step * BLOCK_N,
                        tile.group);
            for (int box = 0; box < boxes; ++box)
                tma_load_2d(map_rows, shared_address(shared.rows[stage] + box * BOX_BYTES), full,
                            step * BLOCK_N, tile.row + box * BOX_ROWS);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}

// The word of a block's factors of a round's pair 4 j + q, which is of rows 8 j + 2 q and the next.
__device__ __forceinline__ int word_of_pair(int round, int pair) {
    return round * (ROUND_N / 2) + pair % 4 * 4 + pair / 4;
}

// A scale warp: the factors of round `round` of every stage, from scales in shared memory and back to it. A word has the factors
// of two neighbouring rows of the weights, as a word of the A operand has their values. Scales of rows that do not exist count
// as 0; those of columns that do not exist are of values that are not stored.
__device__ __forceinline__ void write_factors(SharedStorage& shared, const Problem& problem, int round,
                                              int lane) {
    constexpr int LANE_WORDS = ROUND_N / 2 * SCALE_COLUMNS / 32;
    constexpr int PAIR_STEP = 32 / SCALE_COLUMNS;  // pairs of rows from one word of a lane to its next
    const int column = lane % SCALE_COLUMNS, first_pair = lane / SCALE_COLUMNS;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int stages = problem.n_stages();
    Tile tile;
    while (reader.next(tile, lane)) {
        const int first_column = SCALES_ARE_BLOCKED ? 0 : tile.column / SCALE_BLOCK % SCALE_ROW_BYTES;
        for (int step = 0; step < stages; ++step) {
            const int stage = pipeline.stage;
            const int rows_left = problem.n - (step * BLOCK_N + round * ROUND_N + 2 * first_pair);
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            const uint32_t scales = first_scale(shared, stage, step, round, first_column + column) +
                                    2 * first_pair * SCALE_ROW_BYTES;
            uint32_t bytes[LANE_WORDS][2], any = 0;
#pragma unroll
            for (int i = 0; i < LANE_WORDS; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    bytes[i][h] = ld_shared_u8(scales + (2 * PAIR_STEP * i + h) * SCALE_ROW_BYTES);
            }
            if (rows_left < BLOCK_N) {  // the last step
#pragma unroll
                for (int i = 0; i < LANE_WORDS; ++i) {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
                        if (2 * PAIR_STEP * i + h >= rows_left) bytes[i][h] = 0;
                }
            }
#pragma unroll
            for (int i = 0; i < LANE_WORDS; ++i) {
                const int at = word_of_pair(round, first_pair + i * PAIR_STEP);
                const uint32_t low = bytes[i][0], high = bytes[i][1];
                uint32_t factors;
                if constexpr (FORMAT == FORMAT_NVFP4) {
                    factors = nvfp4_factors<false>((low | high << 8) & 0x7F7F);  // the sign bits mean nothing
                } else {
                    factors = prmt(mxfp4_factor(low), mxfp4_factor(high), 0x5410);
                    any |= low | high;
                }
                st_shared_u32(shared_address(&shared.factors[stage][column][at]), factors);
            }
            if constexpr (MAY_BE_LARGE) {
                const bool is_large = __any_sync(0xffffffff, mxfp4_is_large(any));
                if (is_large) {  // hardly ever
#pragma unroll
                    for (int i = 0; i < LANE_WORDS; ++i)
                        st_shared_u32(
                            shared_address(&shared.second_factors[stage][column][word_of_pair(
                                round, first_pair + i * PAIR_STEP)]),
                            prmt(mxfp4_second_factor(bytes[i][0]), mxfp4_second_factor(bytes[i][1]), 0x5410));
                }
                if (lane == 0) st_shared_u32(shared_address(&shared.is_large[stage][round]), is_large);
            }
            mbarrier_arrive(shared_address(&shared.has_factors[stage]));
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
