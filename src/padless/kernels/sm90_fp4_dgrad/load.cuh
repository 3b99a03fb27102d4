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

// A lane's scales of a step: of two neighbouring rows of the weights, the first of them even.
constexpr int LANE_WORDS = ROUND_N / 2 * SCALE_COLUMNS / 32;
constexpr int PAIR_STEP = 32 / SCALE_COLUMNS;  // pairs of rows from one word of a lane to its next
using ScaleBytes = uint32_t[LANE_WORDS][2];

// Those of weights that do not exist count as 0.
__device__ __forceinline__ void load_scales(ScaleBytes& bytes, const Problem& problem, const uint8_t* scales,
                                            int first_row, int column) {
    const bool exists = column < problem.scale_columns();
#pragma unroll
    for (int i = 0; i < LANE_WORDS; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int n = first_row + 2 * PAIR_STEP * i + h;
            bytes[i][h] = exists && n < problem.n ? __ldg(scales + scale_offset(problem, n, column)) : 0;
        }
    }
}

// As factors to shared memory. A word has the factors of two rows, as a word of the A operand has their values. Pair 4 j + q,
// of rows 8 j + 2 q and the next, is word 4 q + j.
__device__ __forceinline__ void store_factors(SharedStorage& shared, const ScaleBytes& bytes, int stage,
                                              int round, int first_pair, int column, int lane) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < LANE_WORDS; ++i) {
        const int pair = first_pair + i * PAIR_STEP;
        const int at = round * (ROUND_N / 2) + pair % 4 * 4 + pair / 4;
        const uint32_t low = bytes[i][0], high = bytes[i][1];
        uint32_t factors;
        if constexpr (FORMAT == FORMAT_NVFP4) {
            factors = nvfp4_factors<false>((low | high << 8) & 0x7F7F);  // the sign bits mean nothing
        } else {
            factors = prmt(mxfp4_factor(low), mxfp4_factor(high), 0x5410);
            any |= low | high;
            st_shared_u32(shared_address(&shared.second_factors[stage][column][at]),
                          prmt(mxfp4_second_factor(low), mxfp4_second_factor(high), 0x5410));
        }
        st_shared_u32(shared_address(&shared.factors[stage][column][at]), factors);
    }
    if constexpr (MAY_BE_LARGE) {
        const bool is_large = __any_sync(0xffffffff, mxfp4_is_large(any));
        if (lane == 0) st_shared_u32(shared_address(&shared.is_large[stage][round]), is_large);
    }
}

constexpr int STEPS_AHEAD = 4;  // by which scales are fetched into L2, a row to a lane

// A scale warp: the factors of round `round` of every stage. It has less than a stage's time for them, of which loads that L2
// answers take a part, and others would take all.
__device__ __forceinline__ void write_factors(SharedStorage& shared, const Problem& problem, int round,
                                              int lane) {
    const int column = lane % SCALE_COLUMNS, first_pair = lane / SCALE_COLUMNS;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int stages = problem.n_stages();
    Tile tile;
    while (reader.next(tile, lane)) {
        const uint8_t* const scales = problem.scales + tile.group * problem.scales_group_stride;
        const int first_column = tile.column / SCALE_BLOCK;
        for (int step = 0; step < stages; ++step) {
            const int stage = pipeline.stage, first_row = step * BLOCK_N + round * ROUND_N;
            const int later = first_row + STEPS_AHEAD * BLOCK_N + lane;
            if (later < problem.n) prefetch_global_l2(scales + scale_offset(problem, later, first_column));
            ScaleBytes bytes;
            load_scales(bytes, problem, scales, first_row + 2 * first_pair, first_column + column);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            store_factors(shared, bytes, stage, round, first_pair, column, lane);
            mbarrier_arrive(shared_address(&shared.full[stage]));
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
