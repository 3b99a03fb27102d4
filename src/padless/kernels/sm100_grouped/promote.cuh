// FP8_BLOCK in sm100_grouped_gemm.cu: float32 scales, one for 128 of K, which no kind of tcgen05.mma takes. The products of
// 128 of K are added up in tensor memory alone, a stage at a time; the store warps multiply these sums by the scales of a
// row of A and of 128 rows of B and add them, in float32, to the tile's:
//
//   sum = fma(products of 128 of K, scale of A * scale of B, sum)
//
// A tile is one unit or, where it has 256 columns, two of 128. Units alternate between two accumulators, so the products
// of one are under way while those of the other are read; `done` and `drained` are a unit's. What stores a tile finds its
// sums where this leaves them.
#pragma once

constexpr int UNIT_CHUNKS = UNIT_N / CHUNK;
constexpr int UNIT_PART = UNIT_N / CTA_GROUP;  // columns of a unit that come from one CTA's rows

// Column of the tile that column `c` of unit `unit` is: each CTA brings neighbouring rows of its part of the right operand.
__device__ constexpr int tile_column(int unit, int c) {
    return c / UNIT_PART * RIGHT_ROWS + unit * UNIT_PART + c % UNIT_PART;
}

// In place of multiply_tiles: one thread, of the even CTA.
__device__ __forceinline__ void multiply_units(SharedStorage& shared, const Problem& problem,
                                               uint32_t tensor_memory) {
    constexpr uint32_t SHAPE = f8f6f4_shape(LEFT_ROWS, UNIT_N);
    const uint32_t left_0 = tcgen05_descriptor_low(shared_address(shared.left[0]));
    const uint32_t right_0 = tcgen05_descriptor_low(shared_address(shared.right[0]));
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<2> accumulator;
    Tile tile;
    while (reader.next(tile)) {
        const Operands& operands = problem.of(tile.group);
        const int k_blocks = operands.k_blocks();
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            const int bytes_left = operands.row_bytes - kb * BLOCK_K;
            const int steps = bytes_left < BLOCK_K ? (bytes_left + MMA_K - 1) / MMA_K : BLOCK_K / MMA_K;
            const uint32_t left = left_0 + stage * (LEFT_BYTES / 16);
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const uint32_t right =
                    right_0 + stage * (RIGHT_BYTES / 16) + unit * (UNIT_PART * BLOCK_K / 16);
                const uint32_t drained = shared_address(&shared.drained[accumulator.stage]);
                if constexpr (CTA_GROUP == 1)
                    mbarrier_wait(drained, accumulator.phase ^ 1);
                else
                    mbarrier_wait_cluster(drained, accumulator.phase ^ 1);
                tcgen05_fence_after_thread_sync();
#pragma unroll
                for (int step = 0; step < BLOCK_K / MMA_K; ++step)
                    if (step < steps)
                        tcgen05_mma_f8f6f4<CTA_GROUP>(tensor_memory + accumulator.stage * SECOND_ACCUMULATOR,
                                                      tcgen05_operand_descriptor(left + step * (MMA_K / 16)),
                                                      tcgen05_operand_descriptor(right + step * (MMA_K / 16)),
                                                      SHAPE, step > 0);
                if (unit == UNITS - 1) commit_stage(shared_address(&shared.empty[stage]));
                commit_tile(shared_address(&shared.done[accumulator.stage]));
                accumulator.advance();
            }
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}

// Scales of one K block that a lane needs: of its token and the weights of every chunk of columns; or, where tokens are
// columns, of token number `lane` of every chunk and the weights of its CTA's lanes.
struct Promotion {
    static constexpr int TOKENS = TOKENS_ON_N ? NUM_CHUNKS : 1, WEIGHTS = TOKENS_ON_N ? 1 : NUM_CHUNKS;
    const float *token[TOKENS], *weights[WEIGHTS];
    int token_step;  // from one K block to the next

    __device__ __forceinline__ Promotion(const Operands& operands, const Tile& tile, int lane_row, int lane) {
        const int k_blocks = operands.k_blocks();
        token_step = operands.sfa.columns;
        const long long token_row = token_step == 1 ? k_blocks : 1;
        const float* sfa = reinterpret_cast<const float*>(operands.sfa.bytes);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int wanted = tile.row + (TOKENS_ON_N ? i * CHUNK + lane : lane_row);
            token[i] = sfa + (wanted < operands.sfa.last_row ? wanted : operands.sfa.last_row) * token_row;
        }
        const int blocks = operands.sfb.columns;
        const float* sfb = reinterpret_cast<const float*>(operands.sfb.bytes) +
                           static_cast<long long>(group_in_operands(tile)) * blocks * k_blocks;
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
            const int in_tile = TOKENS_ON_N ? pair_rank() * LANE_ROWS : i * CHUNK;
            const bool is_up = GATE_AND_UP_APART && in_tile >= MMA_N / 2;
            const int row = first_weight(tile) + (is_up ? operands.n / 2 + in_tile - MMA_N / 2 : in_tile);
            weights[i] = sfb + (row / 128 < blocks ? row / 128 : blocks - 1) * k_blocks;
        }
    }
};

// One K block's scales.
struct BlockScales {
    float token[Promotion::TOKENS], weights[Promotion::WEIGHTS];

    __device__ __forceinline__ void load(const Promotion& p, int kb) {
#pragma unroll
        for (int i = 0; i < Promotion::TOKENS; ++i) token[i] = __ldg(p.token[i] + kb * p.token_step);
#pragma unroll
        for (int i = 0; i < Promotion::WEIGHTS; ++i) weights[i] = __ldg(p.weights[i] + kb);
    }
};

// A store warp: the sums of its 32 lanes of a tile, left behind the accumulators. `units`: address of these in its lanes;
// `lanes`: of the tile that exist from its first one on. Sums of one unit are kept in registers until the tile is done.
__device__ __forceinline__ void promote_tile(SharedStorage& shared, const Operands& operands,
                                             const Tile& tile, uint32_t units, int warp, int lane, int lanes,
                                             Pipeline<2>& accumulator) {
    constexpr bool IN_REGISTERS = UNITS == 1;
    const int k_blocks = operands.k_blocks();
    const uint32_t sums = units + SUMS_AT;
    const Promotion promotion(operands, tile, pair_rank() * LANE_ROWS + warp * 32 + lane, lane);
    BlockScales next;
    next.load(promotion, 0);
    float s[IN_REGISTERS ? NUM_CHUNKS : 1][CHUNK] = {};
    for (int kb = 0; kb < k_blocks; ++kb) {
        const BlockScales scales = next;
        if (kb + 1 < k_blocks) next.load(promotion, kb + 1);
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            mbarrier_wait(shared_address(&shared.done[accumulator.stage]), accumulator.phase);
            tcgen05_fence_after_thread_sync();
            const uint32_t products = units + accumulator.stage * SECOND_ACCUMULATOR;
#pragma unroll
            for (int i = 0; i < UNIT_CHUNKS; ++i) {
                const int column = tile_column(unit, i * CHUNK), chunk = column / CHUNK;
                const bool exists = lanes > 0 && (!TOKENS_ON_N || column < tile.rows);
                float (&sum)[CHUNK] = s[IN_REGISTERS ? chunk : 0];
                uint32_t p[CHUNK], before[CHUNK];
                __syncwarp();
                if (exists) {
                    if (!IN_REGISTERS) tcgen05_wait_st();  // the registers of the store before
                    tcgen05_ld_32x32b<CHUNK>(p, products + i * CHUNK);
                    if (!IN_REGISTERS && kb > 0) tcgen05_ld_32x32b<CHUNK>(before, sums + column);
                    tcgen05_wait_ld();
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) {
                        pin_loaded(p[j]);
                        if (!IN_REGISTERS && kb > 0) pin_loaded(before[j]);
                    }
                }
                if (i == UNIT_CHUNKS - 1) give_back(shared, accumulator.stage, lane);
                if (!exists) continue;
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    const float token =
                        TOKENS_ON_N ? __shfl_sync(0xffffffff, scales.token[TOKENS_ON_N ? chunk : 0], j)
                                    : scales.token[0];
                    const float scale = token * scales.weights[TOKENS_ON_N ? 0 : chunk];
                    if (!IN_REGISTERS) sum[j] = kb > 0 ? __uint_as_float(before[j]) : 0.0f;
                    sum[j] = fmaf(__uint_as_float(p[j]), scale, sum[j]);
                }
                if (!IN_REGISTERS) tcgen05_st_32x32b(sums + column, sum);
            }
            accumulator.advance();
        }
    }
    if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int i = 0; i < NUM_CHUNKS; ++i)
            if (lanes > 0 && (!TOKENS_ON_N || i * CHUNK < tile.rows))
                tcgen05_st_32x32b(sums + i * CHUNK, s[i]);
    }
    tcgen05_wait_st();
}
