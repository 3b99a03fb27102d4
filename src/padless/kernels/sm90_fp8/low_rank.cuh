// The low-rank product of sm90_fp8_grouped_gemm.cu: t and the factor are in the stage behind a tile's last K block.
#pragma once

// Consumer: d = fma(t factor^T, scaling, d), of the stage behind the last K block, 16 columns of t at a time.
template <int NUM_WAVES>
__device__ __forceinline__ void add_low_rank(float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                             const Problem& problem, int first, int lane,
                                             Pipeline<STAGES>& pipeline) {
    const int stage = pipeline.stage;
    // The shuffles tell the compiler that all lanes agree, as in multiply.cuh.
    const uint32_t a_stage =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[stage] + first * M64_BYTES)), 0);
    const uint32_t b = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[stage])), 0);
    mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
    pipeline.advance();
#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
        const uint32_t a = a_stage + w * (M64_STEP * M64_BYTES / 16);
        float p[BLOCK_N / 2];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < LOW_RANK_STEPS; ++step)
            wgmma_m64k16_shared<BLOCK_N, false, false>(p, k_major_128b_descriptor(a + step * 2),
                                                       k_major_128b_descriptor(b + step * 2), step != 0);
        wgmma_commit_group();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
        wgmma_wait_group<0>();
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
        if (w == NUM_WAVES - 1) release_stage(shared, stage, lane);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) d[w][i] = fmaf(p[i], problem.scaling, d[w][i]);
    }
}
