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

// What a block's sums are multiplied by, and added up.
template <int N>
struct BlockScales {
    float of_sum[N / 2];

    __device__ __forceinline__ void load(uint32_t row_scales, float upper, float lower) {
#pragma unroll
        for (int i = 0; i < N / 8; ++i) {
            float of_row[2];
            ld_shared_v2_f32(row_scales + i * 32, of_row[0], of_row[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                of_sum[4 * i + j] = __fmul_rn(of_row[j], upper);
                of_sum[4 * i + 2 + j] = __fmul_rn(of_row[j], lower);
            }
        }
    }
    __device__ __forceinline__ void add(float (&d)[N / 2], const float (&p)[N / 2]) const {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) d[i] = fmaf(p[i], of_sum[i], d[i]);
    }
};

template <int N>
__device__ __forceinline__ void pin(float (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) pin_register(p[i]);
}

// COUNT K blocks from `kb` on: all of them are multiplied, then waited for, given back and added.
template <int N, int COUNT>
__device__ __forceinline__ void multiply_blocks(float (&d)[N / 2], SharedStorage& shared, uint32_t ring,
                                                int pipeline, int kb, int stages, const CodeRows& rows,
                                                const WeightScales& weight_scales, int lane,
                                                RingPosition& position) {
    float p[COUNT][N / 2];
    RingPosition at[COUNT];
    uint32_t a[COUNT], b[COUNT];  // shuffles tell the compiler that lanes have the same
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        at[n] = position;
        a[n] = __shfl_sync(0xffffffff, descriptor_low(ring + position.stage * STAGE_BYTES), 0);
        b[n] = __shfl_sync(0xffffffff, descriptor_low(rows.codes + (kb + n) * rows.block_bytes), 0);
        position.advance(stages);
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) pin(p[n]);
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        mbarrier_wait(shared_address(&shared.full[pipeline][at[n].stage]), at[n].phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 32)
            wgmma_m64k32_e4m3<N>(p[n], k_major_128b_descriptor(a[n] + k / 16),
                                 k_major_128b_descriptor(b[n] + k / 16), k != 0);
        wgmma_commit_group();
    }
    BlockScales<N> of[COUNT];  // while products run
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
        const int of_lane = (kb + n) % 32;
        const bool is_far = kb + n >= 32;
        const float upper =
            __shfl_sync(0xffffffff, is_far ? weight_scales.upper[1] : weight_scales.upper[0], of_lane);
        const float lower =
            __shfl_sync(0xffffffff, is_far ? weight_scales.lower[1] : weight_scales.lower[0], of_lane);
        of[n].load(rows.scales + lane % 4 * 8 + (kb + n) * rows.scale_block_bytes, upper, lower);
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) pin(p[n]);
    wgmma_wait_group<0>();
#pragma unroll
    for (int n = 0; n < COUNT; ++n) pin(p[n]);
    __syncwarp();
    if (lane < COUNT) {
        const int stage = at[0].stage + lane;
        mbarrier_arrive(shared_address(&shared.empty[pipeline][stage < stages ? stage : stage - stages]));
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n) of[n].add(d, p[n]);
}

// Consumer warpgroup: d = the tile whose stages come next. As many K blocks are multiplied at a time as registers allow: each time
// costs the latency of the products and of what waits for them.
template <int N>
__device__ __forceinline__ void multiply(float (&d)[N / 2], SharedStorage& shared, const Problem& problem,
                                         uint32_t ring, int pipeline, int k_blocks, const CodeRows& rows,
                                         const WeightScales& weight_scales, int lane,
                                         RingPosition& position) {
    constexpr int AT_ONCE = N <= 16 ? 4 : N <= 32 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
    int kb = 0;
#pragma unroll 1
    for (; kb + AT_ONCE <= k_blocks; kb += AT_ONCE)
        multiply_blocks<N, AT_ONCE>(d, shared, ring, pipeline, kb, problem.stages, rows, weight_scales, lane,
                                    position);
    if constexpr (AT_ONCE == 4) {
        if (kb + 2 <= k_blocks) {
            multiply_blocks<N, 2>(d, shared, ring, pipeline, kb, problem.stages, rows, weight_scales, lane,
                                  position);
            kb += 2;
        }
    }
    if constexpr (AT_ONCE > 1) {
        if (kb < k_blocks)
            multiply_blocks<N, 1>(d, shared, ring, pipeline, kb, problem.stages, rows, weight_scales, lane,
                                  position);
    }
}
