// The products of a tile of sm90_fp8_few_grouped_gemm.cu, with the promotion of sm90_fp8_grouped_gemm.cu: sums of 128 of K from
// zero, each multiplied by the product of its two scales and added. Weights are the instruction's first operand here; a sum does
// not depend on that, nor on how many columns there are beside it.
#pragma once

constexpr int M64S = M64S_OF_WARPGROUP;
// K blocks whose products are under way together: the promotion of one does not wait for the next one's loads.
constexpr int AT_ONCE = M64S * BLOCK_M <= 64 ? 2 : 1;

// Scales of a warp's rows of each m64: lane l holds those of K blocks `first + l`.
struct WeightScales {
    const float* rows[M64S];
    float now[M64S], ahead[M64S];

    __device__ __forceinline__ WeightScales(const Problem& problem, const Tile& tile, int warpgroup, int warp,
                                            int lane) {
        const int k_blocks = problem.k_blocks(), last = (problem.n + 127) / 128 - 1;
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
            const int row = (warpgroup * M64S + u) * WGMMA_M + warp * 16;  // of the tile
            const int weight_row =
                GATE_AND_UP_APART ? run_of_weights(problem, tile.column, row / 32) : tile.column + row;
            const int block = min(weight_row / 128, last);
            rows[u] = problem.sfb + (static_cast<long long>(tile.group) * (last + 1) + block) * k_blocks;
            now[u] = at(u, lane, k_blocks);
            ahead[u] = at(u, lane + 32, k_blocks);
        }
    }

    __device__ __forceinline__ float at(int u, int kb, int k_blocks) const {
        return kb < k_blocks ? __ldg(rows[u] + kb) : 0.0f;
    }

    // Before K block `kb`, a multiple of 32 but 0.
    __device__ __forceinline__ void advance(int kb, int k_blocks, int lane) {
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
            now[u] = ahead[u];
            ahead[u] = at(u, kb + 32 + lane, k_blocks);
        }
    }
};

__device__ __forceinline__ void pin(float (&d)[M64S][BLOCK_M / 2]) {
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) pin_register(d[u][i]);
    }
}

// Consumer: d = this warpgroup's m64s of the tile.
__device__ __forceinline__ void multiply_tile(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                              const Problem& problem, const Tile& tile, int warpgroup,
                                              int warp, int lane, Pipeline<STAGES>& pipeline) {
    const int k_blocks = problem.k_blocks();
    WeightScales weight_scales(problem, tile, warpgroup, warp, lane);
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t weights_stage_0 = __shfl_sync(
        0xffffffff, descriptor_low(shared_address(shared.b[0] + warpgroup * M64S * WGMMA_M * BLOCK_K)), 0);
    const uint32_t tokens_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0])), 0);
    const uint32_t token_scales = shared_address(&shared.sfa[0][(tile.row & 3) + lane % 4 * 2]);
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) d[u][i] = 0.0f;
    }
    float p[AT_ONCE][M64S][BLOCK_M / 2];
#pragma unroll 1
    for (int kb = 0; kb < k_blocks; kb += AT_ONCE) {
        const int blocks = k_blocks - kb < AT_ONCE ? 1 : AT_ONCE;
        int stages[AT_ONCE] = {};
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) pin(p[b]);
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            if (b == blocks) break;
            const int stage = stages[b] = pipeline.stage;
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            const uint32_t weights = weights_stage_0 + stage * (B_BYTES / 16);
            const uint32_t tokens = tokens_stage_0 + stage * (A_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int k = 0; k < BLOCK_K; k += WGMMA_K)
                    wgmma_m64k32_e4m3<BLOCK_M>(
                        p[b][u], k_major_128b_descriptor(weights + u * (WGMMA_M * BLOCK_K / 16) + k / 16),
                        k_major_128b_descriptor(tokens + k / 16), k != 0);
            }
            wgmma_commit_group();
            pipeline.advance();
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) pin(p[b]);
        wgmma_wait_group<0>();
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) pin(p[b]);
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            if (b == blocks) break;
            const int of_lane = (kb + b) % 32;
            if (kb + b != 0 && of_lane == 0) weight_scales.advance(kb + b, k_blocks, lane);
            float of_weights[M64S];
#pragma unroll
            for (int u = 0; u < M64S; ++u)
                of_weights[u] = __shfl_sync(0xffffffff, weight_scales.now[u], of_lane);
            float of_token[BLOCK_M / 4];
#pragma unroll
            for (int i = 0; i < BLOCK_M / 4; ++i)
                of_token[i] =
                    ld_shared_f32(token_scales + stages[b] * (SFA_STAGE_FLOATS * 4) + i / 2 * 32 + i % 2 * 4);
#pragma unroll
            for (int u = 0; u < M64S; ++u) {
#pragma unroll
                for (int i = 0; i < BLOCK_M / 2; ++i) {
                    const float scale = of_token[i / 4 * 2 + i % 2] * of_weights[u];
                    d[u][i] = fmaf(p[b][u][i], scale, d[u][i]);
                }
            }
        }
        __syncwarp();  // every lane has read the scales of the stages
        if (lane < blocks)
            mbarrier_arrive(shared_address(&shared.empty[lane == 0 ? stages[0] : stages[AT_ONCE - 1]]));
    }
}
