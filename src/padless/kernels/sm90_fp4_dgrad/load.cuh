// The producers of sm90_fp4_dgrad.cu: a thread that drives the copies of codes and rows, and warps that turn scales into factors.
#pragma once

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_rows, const TensorMap& map_codes) {
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
            mbarrier_arrive_expect_tx(full, boxes * BOX_BYTES + CODE_BYTES);
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

// Where the scale of row n of a group's weights and block `column` of it lies.
__device__ __forceinline__ long long scale_offset(const Problem& problem, int n, int column) {
    if constexpr (SCALES_ARE_BLOCKED)
        return n / 128 * problem.scales_row_stride + column / 4 * 512 + n % 32 * 16 + n % 128 / 32 * 4 +
               column % 4;
    else
        return n * problem.scales_row_stride + column;
}

// A warp turns every NUM_SCALE_WARPS-th stage's scales into factors, number `turn` first. A word is the factors of rows n and
// n + 1 of the weights, n even, which a product has in a word too. Scales of weights that do not exist count as 0.
__device__ __forceinline__ void write_factors(SharedStorage& shared, const Problem& problem, int turn,
                                              int lane) {
    constexpr int WORDS = BLOCK_N / 2 * SCALE_COLUMNS / 32;  // to a lane
    constexpr int STEP = 32 / SCALE_COLUMNS;                 // pairs of rows from one word of a lane to its next
    const int column = lane % SCALE_COLUMNS, first_pair = lane / SCALE_COLUMNS;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int stages = problem.n_stages();
    Tile tile;
    while (reader.next(tile, lane)) {
        const uint8_t* const scales = problem.scales + tile.group * problem.scales_group_stride;
        const int of_row = tile.column / SCALE_BLOCK + column;
        const bool exists = of_row < problem.scale_columns();
        for (int step = 0; step < stages; ++step, pipeline.advance()) {
            turn = turn == 0 ? NUM_SCALE_WARPS - 1 : turn - 1;
            if (turn != NUM_SCALE_WARPS - 1) continue;
            const int stage = pipeline.stage;
            uint32_t bytes[WORDS][2];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int n = step * BLOCK_N + 2 * (first_pair + i * STEP) + h;
                    bytes[i][h] =
                        exists && n < problem.n ? __ldg(scales + scale_offset(problem, n, of_row)) : 0;
                }
            }
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            uint32_t any = 0;
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                // Pair 16 r + 4 j + q, of rows 32 r + 8 j + 2 q and the next, is word 16 r + 4 q + j.
                const int pair = first_pair + i * STEP;
                const int at = pair / 16 * 16 + pair % 4 * 4 + pair / 4 % 4;
                const uint32_t low = bytes[i][0], high = bytes[i][1];
                uint32_t factors;
                if constexpr (FORMAT == FORMAT_NVFP4) {
                    factors = nvfp4_factors<false>((low | high << 8) & 0x7F7F);  // the sign bits mean nothing
                } else {
                    factors = prmt(mxfp4_factor(low), mxfp4_factor(high), 0x5410);
                    any |= low | high;
                    st_shared_u32(
                        shared_address(&shared.second_factors[stage][column][at]),
                        prmt(mxfp4_second_factor(low), mxfp4_second_factor(high), 0x5410));
                }
                st_shared_u32(shared_address(&shared.factors[stage][column][at]), factors);
            }
            if constexpr (MAY_BE_LARGE) {
                const bool is_large = __any_sync(0xffffffff, mxfp4_is_large(any));
                if (lane == 0) st_shared_u32(shared_address(&shared.is_large[stage]), is_large);
            }
            mbarrier_arrive(shared_address(&shared.full[stage]));
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
