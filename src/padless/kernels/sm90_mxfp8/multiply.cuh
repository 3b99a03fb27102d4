// The main loop of sm90_mxfp8_grouped_gemm.cu: wgmma over 32 of K, of values and of scales, then the promotion.
#pragma once

// Every lane has read scales of its own and says so itself, as every lane of the scale warps does of what it wrote:
// racecheck follows a thread's arrival, not what __syncwarp adds to lane 0's.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage) {
    mbarrier_arrive(shared_address(&shared.empty[stage]));
}

// Consumer with no row in this tile: keeps step with the pipeline. A tail of up to 64 rows so costs half the products.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, const Problem& problem, int lane,
                                          Pipeline<STAGES>& pipeline, Reader& reader) {
    for (int kb = 0; kb < problem.k_blocks(); ++kb) {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage);
        pipeline.advance();
    }
    if (lane == 0) reader.release();
}

// A consumer thread's registers beside d, and what it has to find its operands. `sums` and `scales` belong to the tensor
// core from their wgmma to its wait.
struct Step {
    float sums[2][HALF_N / 2];    // of the two halves of the columns
    float scales[2][HALF_N / 2];  // of the same elements
    uint32_t u[2][4];             // of even and odd steps: a new one is made while the last is in use
    uint32_t pairs[2];            // scales of the thread's two rows in this stage
    uint32_t a_stage_0, b_stage_0, v_stage_0;
    uint32_t pairs_stage_0;

    __device__ __forceinline__ void read_pairs(int stage) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            pairs[r] = ld_shared_b32(pairs_stage_0 + stage * static_cast<int>(sizeof(SharedStorage::sfa[0])) +
                                     r * 8 * static_cast<int>(sizeof(SharedStorage::sfa[0][0])));
    }

    // U of a step, made here and not behind the fence of the product that takes it.
    __device__ __forceinline__ void make_u(int step, int lane) {
        ::make_u(u[step % 2], pairs, step, lane);
        pin_register(u[step % 2][0]);
        pin_register(u[step % 2][1]);
    }

    // One group: values and scales of half the columns.
    template <int HALF>
    __device__ __forceinline__ void begin(int stage, int step) {
        const uint32_t a = a_stage_0 + stage * (A_BYTES / 16) + step * 2;
        const uint32_t b = b_stage_0 + stage * (B_BYTES / 16) + HALF * (HALF_N * BLOCK_K / 16) + step * 2;
        const uint32_t v = v_stage_0 + stage * (V_BYTES / 16) + HALF * (HALF_N / 8 * V_BRICKS / 16);
        wgmma_fence();
        wgmma_m64k32_fp8<HALF_N, A_E5M2, B_E5M2>(sums[HALF], k_major_128b_descriptor(a),
                                                 k_major_128b_descriptor(b));
        wgmma_m64k16<HALF_N, false>(scales[HALF], u[step % 2], v_descriptor(v), 0);
        wgmma_commit_group();
    }

    template <int HALF, int PENDING>
    __device__ __forceinline__ void wait() {
        pin<HALF>();
        wgmma_wait_group<PENDING>();
        pin<HALF>();
    }

    template <int HALF>
    __device__ __forceinline__ void pin() {
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            pin_register(sums[HALF][i]);
            pin_register(scales[HALF][i]);
        }
    }

    template <int HALF>
    __device__ __forceinline__ void promote(float (&d)[BLOCK_N / 2]) {
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            const int j = HALF * (HALF_N / 2) + i;
            d[j] = fmaf(sums[HALF][i], scales[HALF][i], d[j]);
        }
    }
};

// The four steps of a stage. On entry the first half of its first step is under way; on leaving that of the next stage is,
// unless this is the LAST one.
//
// While one half is promoted the other is being multiplied: with the other warpgroup's halves, the tensor core always has
// work. Only the step between stages has a gap, of the time that a half takes less the 32 multiply-adds before it: where
// groups are left pending across basic blocks, ptxas (13.0) serialises all products (its message C7514), and the wait for
// the next stage's barrier ends one. It is therefore at the start of a stage, and a wait for everything follows.
template <bool LAST>
__device__ __forceinline__ void multiply_stage(float (&d)[BLOCK_N / 2], Step& step, SharedStorage& shared,
                                               int lane, Pipeline<STAGES>& pipeline) {
    const int stage = pipeline.stage;
    if constexpr (!LAST) {
        pipeline.advance();
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int next = (k + 1) % STEPS, next_stage = next == 0 ? pipeline.stage : stage;
        const bool more = !LAST || next != 0;
        if (k == 0) {
            step.wait<0, 0>();
            step.begin<1>(stage, 0);
        } else {
            step.wait<0, 1>();  // all but the second half
        }
        if (more) step.make_u(next, lane);
        if (next == STEPS - 1 && !LAST) step.read_pairs(pipeline.stage);  // these are done with
        step.promote<0>(d);
        if (more) step.begin<0>(next_stage, next);

        if (more)
            step.wait<1, 1>();  // all but what was just begun
        else
            step.wait<1, 0>();
        if (next == 0) release_stage(shared, stage);
        step.promote<1>(d);
        if (next != 0) step.begin<1>(stage, next);
    }
}

// Consumer: d = this warpgroup's 64 rows of the tile. Registers as in wgmma.cuh. `row` is this thread's first row inside
// the tile; it also has row + 8.
__device__ __forceinline__ void multiply_tile(float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                              const Problem& problem, int warpgroup, int row, int lane,
                                              Pipeline<STAGES>& pipeline) {
    Step step;
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    step.a_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0] + warpgroup * M64_BYTES)), 0);
    step.b_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);
    step.v_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.v[0])), 0);
    step.pairs_stage_0 = shared_address(&shared.sfa[0][row][lane % 2]);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = 0.0f;

    const int k_blocks = problem.k_blocks();
    mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    step.read_pairs(pipeline.stage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 2; j < 4; ++j) {
            step.u[i][j] = 0;
            pin_register(step.u[i][j]);  // a zero of its own, that no other instruction touches
        }
    }
    step.make_u(0, lane);
    step.begin<0>(pipeline.stage, 0);
    for (int kb = 1; kb < k_blocks; ++kb) multiply_stage<false>(d, step, shared, lane, pipeline);
    multiply_stage<true>(d, step, shared, lane, pipeline);
    pipeline.advance();
}
