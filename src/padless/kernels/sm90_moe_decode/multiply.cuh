// Products of a tile, 64 weight rows by N rows of codes, with the promotion of sm90_fp8_grouped_gemm.cu: sums of 128 of K
// from zero, each multiplied by its two scales' product and added. Weights are the first operand here and tokens the second;
// a sum does not depend on it, nor on N.
#pragma once

// Scales of a warp's 16 weight rows: lane l holds those of K blocks l and l + 32, of the first and of the last 8 rows.
struct WeightScales {
    float upper[2], lower[2];
};
constexpr int MOST_K_BLOCKS = 64;

__device__ __forceinline__ float scale_of_lane(const float* scales, int kb, int k_blocks) {
    return scales != nullptr && kb < k_blocks ? __ldg(scales + kb) : 0.0f;
}

__device__ __forceinline__ WeightScales load_scales(const float* upper, const float* lower, int k_blocks,
                                                    int lane) {
    WeightScales s;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        s.upper[n] = scale_of_lane(upper, 32 * n + lane, k_blocks);
        s.lower[n] = scale_of_lane(lower, 32 * n + lane, k_blocks);
    }
    return s;
}

// Rows of codes: K block after K block, `block_bytes` apart, each N rows or more of 128 swizzled bytes; their scales, a float
// a row, `scale_block_bytes` apart.
struct CodeRows {
    uint32_t codes, block_bytes, scales, scale_block_bytes;
};

template <int N>
__device__ __forceinline__ void add_block(float (&d)[N / 2], const float (&p)[N / 2], uint32_t scales,
                                          float upper, float lower) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
        float of_row[2];
        ld_shared_v2_f32(scales + i * 32, of_row[0], of_row[1]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            d[4 * i + j] = fmaf(p[4 * i + j], __fmul_rn(of_row[j], upper), d[4 * i + j]);
            d[4 * i + 2 + j] = fmaf(p[4 * i + 2 + j], __fmul_rn(of_row[j], lower), d[4 * i + 2 + j]);
        }
    }
}

template <int N>
__device__ __forceinline__ void pin(float (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) pin_register(p[i]);
}

// Consumer warpgroup: d = the tile whose stages come next. Two K blocks are multiplied at a time where registers allow it.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], SharedStorage& shared, const Problem& problem,
                                         uint32_t ring, int pipeline, int k_blocks, const CodeRows& rows,
                                         const WeightScales& weight_scales, int lane,
                                         RingPosition& position) {
    constexpr int AT_ONCE = N <= 32 ? 2 : 1;
    float p[AT_ONCE][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
    const uint32_t scales = rows.scales + lane % 4 * 8;
    for (int kb = 0; kb < k_blocks; kb += AT_ONCE) {
        const int blocks = k_blocks - kb < AT_ONCE ? 1 : AT_ONCE;
        int stages[AT_ONCE] = {};
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) pin(p[n]);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (n == blocks) break;
            stages[n] = position.stage;
            mbarrier_wait(shared_address(&shared.full[pipeline][position.stage]), position.phase);
            const uint32_t a =
                __shfl_sync(0xffffffff, descriptor_low(ring + position.stage * STAGE_BYTES), 0);
            const uint32_t b =
                __shfl_sync(0xffffffff, descriptor_low(rows.codes + (kb + n) * rows.block_bytes), 0);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BLOCK_K; k += 32)
                wgmma_m64k32_e4m3<N>(p[n], k_major_128b_descriptor(a + k / 16),
                                     k_major_128b_descriptor(b + k / 16), k != 0);
            wgmma_commit_group();
            position.advance(problem.stages);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) pin(p[n]);
        wgmma_wait_group<0>();
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) pin(p[n]);
        __syncwarp();
        if (lane < blocks)
            mbarrier_arrive(
                shared_address(&shared.empty[pipeline][lane == 0 ? stages[0] : stages[AT_ONCE - 1]]));
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            if (n == blocks) break;
            const int of_lane = (kb + n) % 32;
            const bool is_far = kb + n >= 32;
            const float upper =
                __shfl_sync(0xffffffff, is_far ? weight_scales.upper[1] : weight_scales.upper[0], of_lane);
            const float lower =
                __shfl_sync(0xffffffff, is_far ? weight_scales.lower[1] : weight_scales.lower[0], of_lane);
            add_block<N>(d, p[n], scales + (kb + n) * rows.scale_block_bytes, upper, lower);
        }
    }
}
