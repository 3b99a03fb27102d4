// The products of the MXFP8 kernel of Hopper (sm90_mxfp8_grouped_gemm.cu, which has the constants and the shared memory):
// the order in which a consumer warpgroup begins them, waits for them and promotes them.
//
// A step is 32 of K. For each piece of a warpgroup's part of the tile it takes a product of values and one of scales, in a
// group of their own, and a multiply-add for each element.
#pragma once

// A consumer thread's registers beside d, and what it has to find its operands. `sums` and `scales` belong to the tensor
// core from their wgmma to its wait.
struct Step {
    float sums[IN_FLIGHT][PIECE_N / 2];    // of pieces of the warpgroup's part
    float scales[IN_FLIGHT][PIECE_N / 2];  // of the same elements
    uint32_t u[IN_FLIGHT][4];       // of even and odd steps: a new one is made while the last is in use
    uint32_t pairs[PART_UNITS][2];  // scales of the thread's two rows of a unit in this stage
    uint32_t of_steps[2];  // all ones in the lanes whose pairs are of steps 0 and 1, of steps 2 and 3
    uint32_t a_stage_0, b_stage_0, v_stage_0;
    uint32_t a, b, v;  // of this stage
    uint32_t pairs_stage_0;

    __device__ __forceinline__ void read_pairs(int stage) {
        constexpr int ROW_BYTES = sizeof(SharedStorage::sfa[0][0]);
#pragma unroll
        for (int unit = 0; unit < PART_UNITS; ++unit)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                pairs[unit][r] =
                    ld_shared_b32(pairs_stage_0 + stage * static_cast<int>(sizeof(SharedStorage::sfa[0])) +
                                  (unit * WGMMA_M + r * 8) * ROW_BYTES);
    }

    // U of a step, made here and not behind the fence of the product that takes it.
    template <int PIECE = 0>
    __device__ __forceinline__ void make_u(int step) {
        ::make_u(u[step % IN_FLIGHT], pairs[PIECE / PIECES_TO_A_UNIT], of_steps, step);
        pin_register(u[step % IN_FLIGHT][0]);
        pin_register(u[step % IN_FLIGHT][1]);
    }

    // Descriptors of a stage, for all that begin() begins from here on; made once, not for every product.
    __device__ __forceinline__ void enter(int stage) {
        a = a_stage_0 + stage * (A_BYTES / 16);
        b = b_stage_0 + stage * (B_BYTES / 16);
        v = v_stage_0 + stage * (V_BYTES / 16);
        pin_register(a);
        pin_register(b);
        pin_register(v);
    }

    // One group: values and scales of a piece.
    template <int PIECE>
    __device__ __forceinline__ void begin(int step) {
        constexpr int UNIT = PIECE / PIECES_TO_A_UNIT, COLUMN = PIECE % PIECES_TO_A_UNIT * PIECE_N;
        wgmma_fence();
        wgmma_m64k32_fp8<PIECE_N, A_E5M2, B_E5M2>(
            sums[PIECE % IN_FLIGHT], k_major_128b_descriptor(a + UNIT * (UNIT_BYTES / 16) + step * 2),
            k_major_128b_descriptor(b + COLUMN * (BLOCK_K / 16) + step * 2));
        wgmma_m64k16<PIECE_N, false>(scales[PIECE % IN_FLIGHT], u[step % IN_FLIGHT],
                                     v_descriptor(v + COLUMN / 8 * (V_BRICKS / 16)), 0);
        wgmma_commit_group();
    }

    template <int PIECE, int PENDING>
    __device__ __forceinline__ void wait() {
        pin<PIECE>();
        wgmma_wait_group<PENDING>();
        pin<PIECE>();
    }

    template <int PIECE>
    __device__ __forceinline__ void pin() {
#pragma unroll
        for (int i = 0; i < PIECE_N / 2; ++i) {
            pin_register(sums[PIECE % IN_FLIGHT][i]);
            pin_register(scales[PIECE % IN_FLIGHT][i]);
        }
    }

    template <int PIECE>
    __device__ __forceinline__ void promote(Sums& d) {
#pragma unroll
        for (int i = 0; i < PIECE_N / 2; ++i) {
            float& sum = d[PIECE / PIECES_TO_A_UNIT][PIECE % PIECES_TO_A_UNIT * (PIECE_N / 2) + i];
            sum = fmaf(sums[PIECE % IN_FLIGHT][i], scales[PIECE % IN_FLIGHT][i], sum);
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
__device__ __forceinline__ void multiply_stage(Sums& d, Step& step, SharedStorage& shared,
                                               Pipeline<STAGES>& pipeline) {
    const int stage = pipeline.stage;
    if constexpr (!LAST) {
        pipeline.advance();
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int next = (k + 1) % STEPS;
        const bool more = !LAST || next != 0;
        if (k == 0) {
            step.wait<0, 0>();
            step.begin<1>(0);
        } else {
            step.wait<0, 1>();  // all but the second half
        }
        if (more) step.make_u(next);
        if (next == STEPS - 1 && !LAST) step.read_pairs(pipeline.stage);  // these are done with
        step.promote<0>(d);
        if (next == 0 && !LAST) step.enter(pipeline.stage);
        if (more) step.begin<0>(next);

        if (more)
            step.wait<1, 1>();  // all but what was just begun
        else
            step.wait<1, 0>();
        if (next == 0) release_stage(shared, stage);
        step.promote<1>(d);
        if (next != 0) step.begin<1>(next);
    }
}

// All stages with one piece in flight: each is waited for, promoted and followed by the next. What a stage begins with is
// read while the last piece of the stage before is in the tensor core; all waits are for everything, so that ptxas does
// not mind the basic block that the wait for the barrier ends. COUNT: pieces of the part that are wanted.
template <int COUNT>
__device__ __forceinline__ void multiply_by_pieces(Sums& d, Step& step, SharedStorage& shared, int k_blocks,
                                                   Pipeline<STAGES>& pipeline) {
    do {
        const int stage = pipeline.stage;
        step.enter(stage);
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const int next = (k + 1) % STEPS;
            step.begin<0>(k);
            if constexpr (COUNT == 2) {
                step.wait<0, 0>();
                if constexpr (PIECES_TO_A_UNIT == 1) step.make_u<1>(k);
                step.promote<0>(d);
                step.begin<1>(k);
            }
            if (next == 0) {
                pipeline.advance();
                if (--k_blocks > 0) {
                    mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
                    step.read_pairs(pipeline.stage);
                }
            }
            step.wait<COUNT - 1, 0>();
            step.make_u<0>(next);
            if (next == 0) release_stage(shared, stage);
            step.promote<COUNT - 1>(d);
        }
    } while (k_blocks > 0);
}

// Consumer: d = this warpgroup's part of the tile, or the first COUNT pieces of it. `unit` and `column` are where the part
// starts.
template <int COUNT>
__device__ __forceinline__ void multiply_tile(Sums& d, SharedStorage& shared, const Problem& problem,
                                              int unit, int column, int warp, int lane,
                                              Pipeline<STAGES>& pipeline) {
    // This thread's first row inside the tile; it also has the eighth after it, and the same of a second unit.
    const int row = unit * WGMMA_M + warp * 16 + lane / 4;
    Step step;
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    step.a_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0] + unit * UNIT_BYTES)), 0);
    step.b_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0] + column * BLOCK_K)), 0);
    step.v_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.v[0]) + v_offset(column)), 0);
    step.pairs_stage_0 = shared_address(&shared.sfa[0][row][lane % 2]);
#pragma unroll
    for (int u = 0; u < PART_UNITS; ++u)
#pragma unroll
        for (int i = 0; i < PART_N / 2; ++i) d[u][i] = 0.0f;

    const int k_blocks = problem.k_blocks();
    mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    step.read_pairs(pipeline.stage);
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i) {
#pragma unroll
        for (int j = 2; j < 4; ++j) {
            step.u[i][j] = 0;
            pin_register(step.u[i][j]);  // a zero of its own, that no other instruction touches
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        step.of_steps[i] = lane % 4 == i ? ~0u : 0;
        pin_register(step.of_steps[i]);  // and not a mask for each step
    }
    step.make_u(0);
    if constexpr (IN_FLIGHT == 1) {
        multiply_by_pieces<COUNT>(d, step, shared, k_blocks, pipeline);
    } else {
        step.enter(pipeline.stage);
        step.begin<0>(0);
        for (int kb = 1; kb < k_blocks; ++kb) multiply_stage<false>(d, step, shared, pipeline);
        multiply_stage<true>(d, step, shared, pipeline);
        pipeline.advance();
    }
}
