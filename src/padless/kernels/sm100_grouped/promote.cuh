// FP8_BLOCK in sm100_grouped_gemm.cu: float32 scales, one for 128 of K, which no kind of tcgen05.mma takes. The products of
// 128 of K are added up in tensor memory alone, a stage at a time; the store warps multiply these sums by the scales of a
// row of A and of 128 rows of B and add them, in float32, to the tile's:
//
//   sum = fma(products of 128 of K, scale of A * scale of B, sum)
//
// A tile is UNITS units of columns, multiplied one after the other, each into the next of ACCUMULATORS; `done` and `drained`
// are a unit's. PROMOTERS warpgroups share the columns of every unit, 32 in turn, keep the tile's sums in registers and, when
// it is done, leave them where its last products were, for what stores the tile. Those columns are given back after that.
#pragma once

constexpr int UNIT_CHUNKS = OWN_CHUNKS / UNITS;  // of a unit, that a warp promotes
constexpr int UNIT_PART = UNIT_N / CTA_GROUP;    // columns of a unit that come from one CTA's rows
static_assert(!PROMOTES || (OWN_CHUNKS % UNITS == 0 && UNIT_CHUNKS <= 2),
              "parts of units, of which loads and sums fit in registers");
static_assert(!PROMOTES || ACCUMULATORS >= 3, "a unit is waited for while the two before are not given back");

// Column, of the tile or of a unit, where chunk number `i` of a warpgroup begins.
__device__ __forceinline__ int own_column(int promoter, int i) {
    return i / UNIT_CHUNKS * UNIT_N + (i % UNIT_CHUNKS * PROMOTERS + promoter) * CHUNK;
}

// Column of tensor memory with column `column` of a tile's sums, whose first unit is in accumulator `first`.
__device__ __forceinline__ int sums_column(int first, int column) {
    const int stage = first + column / UNIT_N;
    return (stage < ACCUMULATORS ? stage : stage - ACCUMULATORS) * UNIT_N + column % UNIT_N;
}

// In place of multiply_tiles: one thread, of the even CTA.
__device__ __forceinline__ void multiply_units(SharedStorage& shared, const Problem& problem,
                                               uint32_t tensor_memory) {
    constexpr uint32_t SHAPE = f8f6f4_shape(LEFT_ROWS, UNIT_N);
    const uint32_t left_0 = tcgen05_descriptor_low(shared_address(shared.left[0]));
    const uint32_t right_0 = tcgen05_descriptor_low(shared_address(shared.right[0]));
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<ACCUMULATORS> accumulator;
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

// Scales of one K block that a lane needs: of its token and the weights of its warp's columns, which are of one 128 in a unit,
// but for the rows of an up that begins anywhere; or, where tokens are columns, of token number `lane` of every chunk and the
// weights of its CTA's lanes.
struct Promotion {
    static constexpr int TOKENS = TOKENS_ON_N ? OWN_CHUNKS : 1;
    static constexpr int WEIGHTS = TOKENS_ON_N ? 1 : GATE_AND_UP_APART ? OWN_CHUNKS : UNITS;
    const float *token[TOKENS], *weights;
    int token_step, weights_at[WEIGHTS];  // token_step: from one K block to the next

    __device__ __forceinline__ Promotion(const Operands& operands, const Tile& tile, int promoter,
                                         int lane_row, int lane) {
        const int k_blocks = operands.k_blocks();
        token_step = operands.sfa.columns;
        const long long token_row = token_step == 1 ? k_blocks : 1;
        const float* sfa = reinterpret_cast<const float*>(operands.sfa.bytes);
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int wanted = tile.row + (TOKENS_ON_N ? own_column(promoter, i) + lane : lane_row);
            token[i] = sfa + (wanted < operands.sfa.last_row ? wanted : operands.sfa.last_row) * token_row;
        }
        const int blocks = operands.sfb.columns;
        weights = reinterpret_cast<const float*>(operands.sfb.bytes) +
                  static_cast<long long>(group_in_operands(tile)) * blocks * k_blocks;
#pragma unroll
        for (int i = 0; i < WEIGHTS; ++i) {
            const int in_tile =
                TOKENS_ON_N ? pair_rank() * LANE_ROWS : own_column(promoter, i * (OWN_CHUNKS / WEIGHTS));
            const bool is_up = GATE_AND_UP_APART && in_tile >= MMA_N / 2;
            const int row = first_weight(tile) + (is_up ? operands.n / 2 + in_tile - MMA_N / 2 : in_tile);
            weights_at[i] = (row / 128 < blocks ? row / 128 : blocks - 1) * k_blocks;
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
        for (int i = 0; i < Promotion::WEIGHTS; ++i) weights[i] = __ldg(p.weights + p.weights_at[i] + kb);
    }
};

// The barrier of an accumulator in the even CTA, and an arrival there.
__device__ __forceinline__ uint32_t drained_address(SharedStorage& shared, int stage) {
    const uint32_t own = shared_address(&shared.drained[stage]);
    return CTA_GROUP == 1 ? own : cluster_address(own, even_rank());
}
__device__ __forceinline__ void arrive_drained(uint32_t address) {
    if constexpr (CTA_GROUP == 1)
        mbarrier_arrive(address);
    else
        mbarrier_arrive_release_at(address);
}

// A store warp: its columns of its 32 lanes' sums of one tile.
struct Promoter {
    SharedStorage& shared;
    // Loads begin behind each chunk's additions, or all behind a wait that the compiler moves nothing across: with the sums of
    // two units it would run out of registers.
    static constexpr bool INTERLEAVES = UNITS == 1;
    static constexpr bool LOADS_AHEAD = UNITS == 1;  // a block takes less than a load of its scales
    const Promotion promotion;
    const uint32_t units;          // address of the accumulators in its lanes
    const uint32_t done, drained;  // addresses of the first barriers of each
    const int promoter, warp, lane, k_blocks;
    Pipeline<ACCUMULATORS> accumulator;
    BlockScales now, after;  // of the K block that is promoted, and, with LOADS_AHEAD, of the next one
    float sums[OWN_CHUNKS][CHUNK];
    float products[UNIT_CHUNKS][CHUNK];

    // Where tokens are columns: scale of the token times that of the weights, of each of its columns.
    __device__ __forceinline__ float* column_scales(int kb) const {
        return shared.column_scales[promoter * NUM_STORE_WARPS + warp][kb & 1];
    }

    // Makes `now` the scales of block `kb`, and asks for those after. Where tokens are columns, their products go to all lanes.
    __device__ __forceinline__ void take_scales(int kb) {
        if constexpr (LOADS_AHEAD) {
            now = after;
            if (kb + 1 < k_blocks) after.load(promotion, kb + 1);
        } else {
            now.load(promotion, kb);
        }
        if constexpr (TOKENS_ON_N) {
            __syncwarp();  // all lanes have read those of two blocks before
#pragma unroll
            for (int i = 0; i < Promotion::TOKENS; ++i)
                column_scales(kb)[i * CHUNK + lane] = now.token[i] * now.weights[0];
            __syncwarp();
        }
    }

    // The products of a unit are done.
    __device__ __forceinline__ void await_unit(const Pipeline<ACCUMULATORS>& at) const {
        mbarrier_wait(done + at.stage * 8, at.phase);
        tcgen05_fence_after_thread_sync();
    }
    __device__ __forceinline__ void await_next_unit() const {
        Pipeline<ACCUMULATORS> at = accumulator;
        at.advance();
        await_unit(at);
    }

    __device__ __forceinline__ void give_back_unit(int stage) const {
        tcgen05_fence_before_thread_sync();
        __syncwarp();
        if (lane == 0) arrive_drained(drained + stage * 8);
    }

    // Chunk `c` of the warp's unit, on its way to registers.
    __device__ __forceinline__ void load_chunk(int c) {
        tcgen05_ld_32x32b(products[c], units + accumulator.stage * UNIT_N + own_column(promoter, c));
    }

    __device__ __forceinline__ void await_chunks() {
        tcgen05_wait_ld();
#pragma unroll
        for (int c = 0; c < UNIT_CHUNKS; ++c)
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) pin_loaded(products[c][j]);
    }

    __device__ __forceinline__ void promote_chunk(int i, int kb) {
        float (&sum)[CHUNK] = sums[i];
        const float (&p)[CHUNK] = products[i % UNIT_CHUNKS];
        if constexpr (TOKENS_ON_N) {
            const float* columns = column_scales(kb) + i * CHUNK;
#pragma unroll
            for (int j = 0; j < CHUNK; j += 4) {
                const float4 scale = *reinterpret_cast<const float4*>(columns + j);
                sum[j] = fmaf(p[j], scale.x, sum[j]);
                sum[j + 1] = fmaf(p[j + 1], scale.y, sum[j + 1]);
                sum[j + 2] = fmaf(p[j + 2], scale.z, sum[j + 2]);
                sum[j + 3] = fmaf(p[j + 3], scale.w, sum[j + 3]);
            }
        } else {
            const float scale = now.token[0] * now.weights[i / (OWN_CHUNKS / Promotion::WEIGHTS)];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) sum[j] = fmaf(p[j], scale, sum[j]);
        }
    }

    // One K block, whose first unit is in registers; of all but the last the next one's first is loaded meanwhile.
    __device__ __forceinline__ void promote_block(int kb) {
        const bool is_last = kb + 1 == k_blocks;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const bool loads = unit + 1 < UNITS || !is_last;
            const int read = accumulator.stage;
            accumulator.advance();
#pragma unroll
            for (int c = 0; c < UNIT_CHUNKS; ++c) {
                promote_chunk(unit * UNIT_CHUNKS + c, kb);
                if (INTERLEAVES && loads) load_chunk(c);
            }
            if (!LOADS_AHEAD && unit + 1 == UNITS && !is_last) take_scales(kb + 1);
            if (!INTERLEAVES && loads) {
                await_unit(accumulator);
#pragma unroll
                for (int c = 0; c < UNIT_CHUNKS; ++c) load_chunk(c);
            }
            // While those are under way: what has been read is given back, but for the last K block's, the next block's scales
            // are taken, and the products of the unit after are waited for.
            if (!is_last) {
                give_back_unit(read);
                if (LOADS_AHEAD) take_scales(kb + 1);
            }
            if (INTERLEAVES && kb + (unit + 2) / UNITS < k_blocks) await_next_unit();
            if (loads) await_chunks();
        }
    }

    // Leaves the sums in the accumulators of the last K block.
    __device__ __forceinline__ void promote_tile() {
        if constexpr (LOADS_AHEAD) after.load(promotion, 0);
        take_scales(0);
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; ++i)
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) sums[i][j] = 0.0f;
        await_unit(accumulator);
#pragma unroll
        for (int c = 0; c < UNIT_CHUNKS; ++c) load_chunk(c);
        if (INTERLEAVES && k_blocks > 1) await_next_unit();
        await_chunks();
        for (int kb = 0; kb < k_blocks; ++kb) promote_block(kb);
        const int first = (accumulator.stage + ACCUMULATORS - UNITS) % ACCUMULATORS;
#pragma unroll
        for (int i = 0; i < OWN_CHUNKS; ++i)
            tcgen05_st_32x32b(units + sums_column(first, own_column(promoter, i)), sums[i]);
        tcgen05_wait_st();
    }
};

// A store warp: its columns of its lanes' sums of the tile that it has read, left where the last products were. The tile is read
// again behind that, so that meanwhile its registers are free. `warp`: in its warpgroup.
__device__ __forceinline__ void promote_next(SharedStorage& shared, const Problem& problem, Reader& reader,
                                             Tile& tile, uint32_t tensor_memory, int promoter, int warp,
                                             int lane, Pipeline<ACCUMULATORS>& accumulator) {
    const Operands& operands = problem.of(tile.group);
    const int k_blocks = operands.k_blocks(), first = pair_rank() * LANE_ROWS + warp * 32;
    if ((TOKENS_ON_N ? operands.n - tile.column : tile.rows) > first) {
        Promoter promoting{shared,
                           Promotion(operands, tile, promoter, first + lane, lane),
                           tensor_memory + (warp * 32 << 16),
                           shared_address(&shared.done[0]),
                           drained_address(shared, 0),
                           promoter,
                           warp,
                           lane,
                           k_blocks,
                           accumulator};
        promoting.promote_tile();
        accumulator = promoting.accumulator;
        reader.next(tile, lane);
        return;
    }
    for (int unit = 0; unit < k_blocks * UNITS; ++unit, accumulator.advance()) {  // no lane exists
        mbarrier_wait(shared_address(&shared.done[accumulator.stage]), accumulator.phase);
        if (unit < (k_blocks - 1) * UNITS) give_back(shared, accumulator.stage, lane);
    }
}

// All warps that promote have left their sums of a tile. Whether this one is not of the first warpgroup.
__device__ __forceinline__ bool meet_promoters(int promoter) {
    tcgen05_fence_before_thread_sync();
    bar_sync(2, 32 * NUM_STORE_WARPS * PROMOTERS);
    tcgen05_fence_after_thread_sync();
    return promoter > 0;
}

// A tile's sums have been stored, by this warp's warpgroup its own or, by a quantizing epilogue, all of them.
__device__ __forceinline__ void give_back_promoted(SharedStorage& shared, int first, int lane) {
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int promoter = 0; promoter < (EPILOGUE_IS_QUANT ? PROMOTERS : 1); ++promoter)
            give_back(shared, sums_column(first, unit * UNIT_N) / UNIT_N, lane);
}
