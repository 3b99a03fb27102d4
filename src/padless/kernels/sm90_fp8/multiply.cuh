// The main loop of sm90_fp8_grouped_gemm.cu: wgmma over 128 of K into fresh registers, then the promotion, in which they are
// multiplied by their scales and added to the tile.
#pragma once

// Lane l holds the scales of K block `first + l` of the tile's NUM_SFB column blocks.
__device__ __forceinline__ void load_sfb(float (&sfb)[NUM_SFB], const float* const (&rows)[NUM_SFB], int kb,
                                         int k_blocks) {
#pragma unroll
    for (int j = 0; j < NUM_SFB; ++j) sfb[j] = kb < k_blocks ? __ldg(rows[j] + kb) : 0.0f;
}

// One arrival a warp, after all its lanes have read the stage, in every CTA that loads into this one's stage.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane) {
    __syncwarp();
    const uint32_t empty = shared_address(&shared.empty[stage]);
    if constexpr (CLUSTER_N == 1) {
        if (lane == 0) mbarrier_arrive(empty);
    } else {
        if (lane < CLUSTER_N) mbarrier_arrive_cluster(empty, lane);
    }
}

// Consumer with no row in this tile: keeps step with the pipeline. A tail of up to 64 rows so costs half the products.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, const Problem& problem, int lane,
                                          Pipeline<STAGES>& pipeline, Reader& reader) {
#if LOW_RANK_STEPS > 0
    for (int kb = 0; kb < problem.k_blocks() + 1; ++kb) {  // t and the factor are behind the last one
#else
    for (int kb = 0; kb < problem.k_blocks(); ++kb) {
#endif
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage, lane);
        pipeline.advance();
    }
    if (lane == 0) reader.release();
}

// Address of the scale of row `row` of the tile: in stage 0, or of K block 0 in the window.
__device__ __forceinline__ uint32_t sfa_address(const SharedStorage& shared, const Tile& tile, int row,
                                                int k_blocks) {
    if constexpr (SCALES_K_MAJOR) {  // a row past the end has no scales in the window
        const int existing = row < tile.rows ? row : tile.rows - 1;
        return shared_address(&shared.sfa_window[(tile.row * k_blocks & 3) + existing * k_blocks]);
    } else {
        return shared_address(&shared.sfa[0][(tile.row & 3) + row]);
    }
}

// Consumer: d = this warpgroup's NUM_WAVES m64s of the tile, from m64 `first` on. Registers as in wgmma.cuh. `row` is
// this thread's first row inside the tile; it also has row + 8, and both again in the next m64 of the warpgroup.
template <int NUM_WAVES>
__device__ __forceinline__ void multiply_tile(float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                              const Problem& problem, const Tile& tile, int column, int first,
                                              int row, int lane, Pipeline<STAGES>& pipeline) {
    const int k_blocks = problem.k_blocks();
    const float* sfb_rows[NUM_SFB];
#pragma unroll
    for (int j = 0; j < NUM_SFB; ++j) {
        const int last = problem.sfb_rows() - 1;
        const int wanted = GATE_AND_UP_APART ? (column + j * problem.n) / 256 : column / 128 + j;
        const int block = wanted < last ? wanted : last;
        sfb_rows[j] = problem.sfb + (static_cast<long long>(tile.group) * (last + 1) + block) * k_blocks;
    }
    float sfb[NUM_SFB], sfb_ahead[NUM_SFB];
    load_sfb(sfb, sfb_rows, lane, k_blocks);
    load_sfb(sfb_ahead, sfb_rows, lane + 32, k_blocks);

    constexpr int WAVE_ROWS = M64_STEP * WGMMA_M;  // from one m64 of a warpgroup to its next
    constexpr int NUM_SFA_AT =
        SCALES_K_MAJOR ? 2 * NUM_WAVES : 1;  // in a stage, all rows are at constant distances
    uint32_t sfa_at[NUM_SFA_AT];
#pragma unroll
    for (int i = 0; i < NUM_SFA_AT; ++i) {
        sfa_at[i] = sfa_address(shared, tile, row + (i / 2) * WAVE_ROWS + (i % 2) * 8, k_blocks);
        pin_register(sfa_at[i]);
    }
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t a_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0] + first * M64_BYTES)), 0);
    const uint32_t b_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);

#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) d[w][i] = 0.0f;
    }
    const bool odd_half = CAN_START_ODD && column % 128 != 0;

    // The scales of m64 `w` for the K block at hand: rows of A by columns of B, 64 at a time.
    float of_block[NUM_SFB], scale[2][BLOCK_N / 64];
    const auto load_scales = [&](int w, int kb, int stage) {
        if (w == 0) {
#pragma unroll
            for (int j = 0; j < NUM_SFB; ++j) of_block[j] = __shfl_sync(0xffffffff, sfb[j], kb & 31);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t at =
                SCALES_K_MAJOR ? sfa_at[SCALES_K_MAJOR ? 2 * w + r : 0] + kb * 4
                               : sfa_at[0] + stage * (SFA_STAGE_FLOATS * 4) + (w * WAVE_ROWS + r * 8) * 4;
            const float sfa = ld_shared_f32(at);
#pragma unroll
            for (int c = 0; c < BLOCK_N / 64; ++c) {
                scale[r][c] = sfa * (GATE_AND_UP_APART ? of_block[c % NUM_SFB]
                                     : odd_half        ? of_block[(c + 1) / 2]
                                                       : of_block[c / 2]);
                pin_register(scale[r][c]);  // multiplied here: the stage is given back before these are used
            }
        }
    };

    // A stage is waited for when it is reached, between two promotions, and not ahead of that: a wait while products are
    // under way would keep their stage from the producer until the next has come. In a tile that is shorter than it might
    // be the loads set the pace: its products begin before their scales are fetched, in a loop of few instructions.
    constexpr bool IS_SHORT = NUM_WAVES < WAVES;
    constexpr int UNROLL = IS_SHORT ? 1 : WAVES == 1 || EPILOGUE_IS_QUANT ? 4 : 8;
    for (int chunk = 0; chunk < k_blocks; chunk += 32) {
        const int chunk_end = chunk + 32 < k_blocks ? chunk + 32 : k_blocks;
        if (chunk != 0) {
#pragma unroll
            for (int j = 0; j < NUM_SFB; ++j) sfb[j] = sfb_ahead[j];
            load_sfb(sfb_ahead, sfb_rows, chunk + 32 + lane, k_blocks);
        }
#pragma unroll UNROLL
        for (int kb = chunk; kb < chunk_end; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t b = b_stage_0 + stage * (B_BYTES / 16);
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
#pragma unroll
            for (int w = 0; w < NUM_WAVES; ++w) {
                const uint32_t a = a_stage_0 + stage * (A_BYTES / 16) + w * (WAVE_ROWS * BLOCK_K / 16);
                if (!IS_SHORT) load_scales(w, kb, stage);
                float p[BLOCK_N / 2];
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BLOCK_K; k += WGMMA_K)
                    wgmma_m64k32_e4m3<BLOCK_N>(p, k_major_128b_descriptor(a + k / 16),
                                               k_major_128b_descriptor(b + k / 16), k != 0);
                wgmma_commit_group();

                if (IS_SHORT) load_scales(w, kb, stage);
                if (w == NUM_WAVES - 1) pipeline.advance();
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                wgmma_wait_group<0>();
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                if (w == NUM_WAVES - 1) release_stage(shared, stage, lane);

#pragma unroll
                for (int i = 0; i < BLOCK_N / 8; ++i) {
                    d[w][4 * i + 0] = fmaf(p[4 * i + 0], scale[0][i / 8], d[w][4 * i + 0]);
                    d[w][4 * i + 1] = fmaf(p[4 * i + 1], scale[0][i / 8], d[w][4 * i + 1]);
                    d[w][4 * i + 2] = fmaf(p[4 * i + 2], scale[1][i / 8], d[w][4 * i + 2]);
                    d[w][4 * i + 3] = fmaf(p[4 * i + 3], scale[1][i / 8], d[w][4 * i + 3]);
                }
            }
        }
    }
}
