// The main loop of sm90_fp8_swapped_grouped_gemm.cu: wgmma over 128 of K into fresh registers, then the promotion, in which they
// are multiplied by their scales and added to the tile.
#pragma once

// One arrival a warp, after all its lanes have read the stage.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[stage]));
}

// Consumer without an m64 in this tile: keeps step with the pipeline.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, const Problem& problem, int lane,
                                          Pipeline<STAGES>& pipeline) {
    for (int kb = 0; kb < problem.k_blocks(); ++kb) {
        mbarrier_wait(shared_address(&shared.scaled[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage, lane);
        pipeline.advance();
    }
}

// The scales of a thread's tokens, four to a load: s[4 j + 2 i + e] is that of token 8 (2 j + i) + 2 (lane % 4) + e. As many as
// there are registers for are loaded while products run, and kept for both m64s of the warpgroup; the others in the promotion.
template <int COLUMNS>
struct ColumnScales {
    static constexpr int LOADS = (COLUMNS + 15) / 16;
    static constexpr int LEFT = CONSUMER_REGISTERS - COLUMNS / 2 * (WAVES + 1);  // beside sums
    static constexpr int SOME = (LEFT - OTHER_REGISTERS_OF_SOME) / 4;  // one of which the others take
    static constexpr int KEPT = LEFT - OTHER_REGISTERS >= 4 * LOADS ? LOADS : SOME < 2 ? 0 : SOME - 1;
    float s[LOADS][4];
    uint32_t at;

    __device__ __forceinline__ void load(int j) { ld_shared_v4_f32(at + j * 64, s[j]); }
    __device__ __forceinline__ void load_kept() {
#pragma unroll
        for (int j = 0; j < KEPT; ++j) load(j);
    }
};

// Consumer: d = this warpgroup's `m64s` m64s of the tile, 64 weights x COLUMNS tokens each. d[w][4 i + 2 r + e] of a thread is
// weight 16 warp + lane / 4 + 8 r of m64 w, token 8 i + 2 (lane % 4) + e.
template <int COLUMNS>
__device__ __forceinline__ void multiply_tile(float (&d)[WAVES][COLUMNS / 2], SharedStorage& shared,
                                              const Problem& problem, int m64s, int warpgroup, int lane,
                                              Pipeline<STAGES>& pipeline) {
    const int k_blocks = problem.k_blocks();
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t weights_0 = __shfl_sync(
        0xffffffff, descriptor_low(shared_address(shared.weights[0] + m64_of(warpgroup, 0) * M64_BYTES)), 0);
    const uint32_t tokens_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.tokens[0])), 0);
    uint32_t scales_0 = shared_address(shared.scales[0][0]) + lane % 4 * 16;
    pin_register(scales_0);

#pragma unroll
    for (int w = 0; w < WAVES; ++w) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; ++i) d[w][i] = 0.0f;
    }
#pragma unroll UNROLL
    for (int kb = 0; kb < k_blocks; ++kb) {
        const int stage = pipeline.stage;
        const uint32_t b = tokens_0 + stage * (TOKEN_BYTES / 16);
        const uint32_t of_stage = scales_0 + stage * (SCALE_BLOCKS * SCALE_FLOATS * 4);
        const uint32_t phase = pipeline.phase;
        mbarrier_wait(shared_address(PRODUCTS_FIRST ? &shared.full[stage] : &shared.scaled[stage]), phase);
        pipeline.advance();
        ColumnScales<COLUMNS> scales;
#pragma unroll
        for (int w = 0; w < WAVES; ++w) {
            if (w < m64s) {
                const uint32_t a = weights_0 + stage * (WEIGHT_BYTES / 16) + (m64_of(0, w) * M64_BYTES / 16);
                float p[COLUMNS / 2];
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) pin_register(p[i]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BLOCK_K; k += WGMMA_K)
                    wgmma_m64k32_e4m3_of<COLUMNS>(p, k_major_128b_descriptor(a + k / 16),
                                                  k_major_128b_descriptor(b + k / 16), k != 0);
                wgmma_commit_group();
                if (PRODUCTS_FIRST && w == 0) mbarrier_wait(shared_address(&shared.scaled[stage]), phase);
                if (w == 0 || !KEEP_SCALES) {
                    scales.at = of_stage + scale_block_of(warpgroup, w) * (SCALE_FLOATS * 4);
                    scales.load_kept();
                }
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) pin_register(p[i]);
                wgmma_wait_group<0>();
#pragma unroll
                for (int i = 0; i < COLUMNS / 2; ++i) pin_register(p[i]);
                constexpr bool ARE_KEPT = ColumnScales<COLUMNS>::KEPT == ColumnScales<COLUMNS>::LOADS;
                if (ARE_KEPT && w == m64s - 1) release_stage(shared, stage, lane);
#pragma unroll
                for (int i = 0; i < COLUMNS / 8; ++i) {
                    if (i % 2 == 0 && i / 2 >= ColumnScales<COLUMNS>::KEPT) scales.load(i / 2);
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float scale = scales.s[i / 2][i % 2 * 2 + e];
#pragma unroll
                        for (int r = 0; r < 2; ++r)
                            d[w][4 * i + 2 * r + e] =
                                fmaf(p[4 * i + 2 * r + e], scale, d[w][4 * i + 2 * r + e]);
                    }
                }
                if (!ARE_KEPT && w == m64s - 1) release_stage(shared, stage, lane);
            }
        }
    }
}
