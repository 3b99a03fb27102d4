// The main loop of sm90_fp8_wgrad.cu: wgmma over a block of tokens into fresh registers, then the promotion, in which they are
// multiplied by their scales and added to the tile.
#pragma once

// What a consumer thread reads of stage 0; other stages are at constant distances.
struct ConsumerView {
    uint32_t a, b;  // low words of descriptors: the warpgroup's first wave of A, all of B
    uint32_t sfa,
        sfb;  // addresses of its first row's scale, and of its first column's (or the one of all columns)

    __device__ __forceinline__ ConsumerView(const SharedStorage& shared, int warpgroup, int warp, int lane) {
        a = __shfl_sync(0xffffffff,
                        descriptor_low(shared_address(shared.a[0] + warpgroup * WGMMA_M * BLOCK_T)), 0);
        b = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);
        sfa = shared_address(&shared.sfa[0][warpgroup * WGMMA_M + warp * 16 + lane / 4]);
        sfb = shared_address(&shared.sfb[0][X_SCALES_ARE_BLOCKS ? 0 : lane % 4 * 2]);
    }
};

constexpr int SFA_STAGE_BYTES = BLOCK_M * 4;
constexpr int SFB_STAGE_BYTES = SFB_STAGE_FLOATS * 4;

// 1 where `before` is, whatever x and y are, by an instruction that needs them. Neither |x| < -|y| nor anything of a NaN holds.
__device__ __forceinline__ uint32_t needed(uint32_t before, float x, float y) {
    uint32_t after;
    asm("{\n"
        ".reg .pred is_before, is_after;\n"
        ".reg .f32 x, y;\n"
        "setp.ne.u32 is_before, %1, 0;\n"
        "abs.f32 x, %2;\n"
        "abs.f32 y, %3;\n"
        "neg.f32 y, y;\n"
        "setp.geu.and.f32 is_after, x, y, is_before;\n"
        "selp.u32 %0, 1, 0, is_after;\n"
        "}"
        : "=r"(after)
        : "r"(before), "f"(x), "f"(y));
    return after;
}

// One arrival a warp at every CTA of the cluster, after all its lanes have what they loaded from the stage. arrives: of this
// lane, `is_releaser` by way of `needed` with a value of each load. ptxas puts arrivals in front of multiplications that are
// ahead of them in the source, and an arrival does not wait for loads; it does for its predicate.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane, uint32_t arrives) {
    __syncwarp();
    const uint32_t empty = shared_address(&shared.empty[stage]);
    if constexpr (CLUSTER_N == 1) {
        if (arrives) mbarrier_arrive(empty);
    } else {
        if (arrives) mbarrier_arrive_cluster(empty, lane);
    }
}

// d += p * scales (d = p * scales in a tile's FIRST block) of one wave. Registers as in wgmma.cuh: d[4 i + j] is this thread's row
// 8 * (j / 2) and column 8 * i + j % 2, counted from its first ones. sfa: of the two rows; sfb: address of the first scale of X.
template <bool FIRST>
__device__ __forceinline__ void promote(float (&d)[BLOCK_N / 2], const float (&p)[BLOCK_N / 2],
                                        const float (&sfa)[2], uint32_t sfb, uint32_t& arrives) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 8; ++i) {
        float of_column[2];
        ld_shared_v2_f32(sfb + i * 32, of_column[0], of_column[1]);
        arrives = needed(arrives, of_column[0], of_column[1]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float scale = __fmul_rn(sfa[j / 2], of_column[j % 2]);
            d[4 * i + j] = fmaf(p[4 * i + j], scale, FIRST ? 0.0f : d[4 * i + j]);
        }
    }
}

// The same where all columns have one scale: scale[r] is row r's times that.
template <bool FIRST>
__device__ __forceinline__ void promote(float (&d)[BLOCK_N / 2], const float (&p)[BLOCK_N / 2],
                                        const float (&scale)[2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = fmaf(p[i], scale[i / 2 % 2], FIRST ? 0.0f : d[i]);
}

// p = the products of `steps` times 32 tokens. WHOLE: all four.
template <bool WHOLE>
__device__ __forceinline__ void multiply_steps(float (&p)[BLOCK_N / 2], uint32_t a, uint32_t b, int steps) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
    wgmma_fence();
    const auto multiply = [&](int step) {
        if (!WHOLE && step > 0) wgmma_fence();  // the compiler puts one in where the flow of control has met
        wgmma_m64k32_e4m3<BLOCK_N>(p, k_major_128b_descriptor(a + step * (WGMMA_K / 16)),
                                   k_major_128b_descriptor(b + step * (WGMMA_K / 16)), step != 0);
    };
    multiply(0);
    if (WHOLE || steps > 1) multiply(1);
    if (WHOLE || steps > 2) multiply(2);
    if (WHOLE || steps > 3) multiply(3);
    if (!WHOLE) wgmma_fence();
    wgmma_commit_group();
}

// Consumer: one block of the tile. WHOLE: all 128 tokens are the group's; else the first `steps` times 32 are, of which the last
// few may be zeros. `meanwhile(wave)` is done while the wave's products are under way; it may read d[wave].
template <bool FIRST, bool WHOLE, class Meanwhile>
__device__ __forceinline__ void multiply_block(float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                               const ConsumerView& view, int steps, int lane,
                                               Pipeline<STAGES>& pipeline, Meanwhile meanwhile) {
    const int stage = pipeline.stage;
    const uint32_t sfb = view.sfb + stage * SFB_STAGE_BYTES;
    mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
    const float of_block = X_SCALES_ARE_BLOCKS ? ld_shared_f32(sfb) : 1.0f;
#pragma unroll
    for (int w = 0; w < WAVES; ++w) {
        float scale[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            scale[r] = __fmul_rn(
                ld_shared_f32(view.sfa + stage * SFA_STAGE_BYTES + (w * WAVE_ROWS + r * 8) * 4), of_block);
        float p[BLOCK_N / 2];
        multiply_steps<WHOLE>(p, view.a + stage * (A_BYTES / 16) + w * (WAVE_ROWS * BLOCK_T / 16),
                              view.b + stage * (B_BYTES / 16), steps);
        meanwhile(w);
        if (w == WAVES - 1) pipeline.advance();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
        wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
        if constexpr (X_SCALES_ARE_BLOCKS) {
            if (w == WAVES - 1) release_stage(shared, stage, lane, lane < CLUSTER_N);
            promote<FIRST>(d[w], p, scale);
        } else {
            uint32_t arrives = needed(lane < CLUSTER_N, scale[0], scale[1]);
            promote<FIRST>(d[w], p, scale, sfb, arrives);
            if (w == WAVES - 1) release_stage(shared, stage, lane, arrives);
        }
    }
}

// Consumer: d = this warpgroup's waves of a tile of a group with tokens. What d holds is handed out by `stage(wave)` while the
// first products run, and `next()` looks for the next tile while the last ones do, so that the tensor core waits for neither.
template <class Stage, class Next>
__device__ __forceinline__ void multiply_tile(float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                              const ConsumerView& view, int tokens, int lane,
                                              Pipeline<STAGES>& pipeline, Stage stage, Next next) {
    const auto nothing = [](int) {};
    const int blocks = token_blocks(tokens);
    const int last_steps = (tokens - (blocks - 1) * BLOCK_T + WGMMA_K - 1) / WGMMA_K;
    multiply_block<true, false>(d, shared, view, blocks == 1 ? last_steps : BLOCK_T / WGMMA_K, lane, pipeline,
                                stage);
#pragma unroll 4
    for (int block = 1; block < blocks - 1; ++block)
        multiply_block<false, true>(d, shared, view, 0, lane, pipeline, nothing);
    const auto next_in_last_wave = [&](int wave) {
        if (wave == WAVES - 1) next();
    };
    if (blocks > 1)
        multiply_block<false, false>(d, shared, view, last_steps, lane, pipeline, next_in_last_wave);
    else
        next();
}
