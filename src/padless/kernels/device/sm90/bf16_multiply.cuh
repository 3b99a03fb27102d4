// The main loop of the kernels that multiply plain bf16 operands out of shared memory: 64 rows and BLOCK_N columns to a warpgroup,
// STEPS products of 16 of K to a stage of the ring.
//
// A warpgroup has no registers for a second tile, so it multiplies nothing while it hands out a finished one. The other warpgroup
// does meanwhile: nothing keeps the two at the same point but the ring.
//
// Included behind SharedStorage and these constants: BLOCK_N, STEPS, STAGES; A_BYTES, B_BYTES of a stage;
// A_IS_MN_MAJOR, B_IS_MN_MAJOR, CHUNK_BYTES (descriptors.cuh); A_WARPGROUP_BYTES from one warpgroup's rows to the next's.
#pragma once

constexpr uint32_t A_STEP = (A_IS_MN_MAJOR ? 16 * 128 : 32) / 16,
                   B_STEP = (B_IS_MN_MAJOR ? 16 * 128 : 32) / 16;

template <bool IS_MN_MAJOR>
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t low) {
    if constexpr (IS_MN_MAJOR)
        return mn_major_128b_descriptor<CHUNK_BYTES>(low);
    else
        return k_major_128b_descriptor(low);
}

// What a warpgroup reads of stage 0, as low words of descriptors; other stages are at constant distances.
struct OperandView {
    uint32_t a, b;

    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    __device__ __forceinline__ OperandView(const SharedStorage& shared, int warpgroup) {
        const uint32_t rows = shared_address(shared.a[0] + warpgroup * A_WARPGROUP_BYTES);
        a = __shfl_sync(0xffffffff, descriptor_low(rows), 0);
        b = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);
    }
};

// One arrival a warp, after its products of the stage.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane) {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(shared_address(&shared.empty[stage]));
}

__device__ __forceinline__ void pin_registers(float (&d)[BLOCK_N / 2]) {
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(d[i]);
}

// d (+)= the products of a stage, of which there are STEPS, or `steps`, unless WHOLE. `accumulate`: not the tile's first stage.
template <bool WHOLE>
__device__ __forceinline__ void multiply_stage(float (&d)[BLOCK_N / 2], uint32_t a, uint32_t b, int steps,
                                               bool accumulate) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (WHOLE || step == 0 || steps > step) {
            if (!WHOLE && step > 0)
                wgmma_fence();  // the compiler puts one in where the flow of control has met
            wgmma_m64k16_shared<BLOCK_N, A_IS_MN_MAJOR, B_IS_MN_MAJOR>(
                d, operand_descriptor<A_IS_MN_MAJOR>(a + step * A_STEP),
                operand_descriptor<B_IS_MN_MAJOR>(b + step * B_STEP), step != 0 || accumulate);
        }
    }
    if (!WHOLE) wgmma_fence();
    wgmma_commit_group();
}

// Consumer: d = a tile of `blocks` > 0 stages, of whose last one `last_steps` products are issued. `next()` looks for the next tile
// while the last products run.
template <class Next>
__device__ __forceinline__ void multiply_tile(float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                              const OperandView& view, int blocks, int last_steps, int lane,
                                              Pipeline<STAGES>& pipeline, Next next) {
    uint32_t a, b;
    const auto wait = [&] {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        a = view.a + pipeline.stage * (A_BYTES / 16);
        b = view.b + pipeline.stage * (B_BYTES / 16);
    };
    pin_registers(d);
    int before = -1;  // the stage before, whose products may still run
#pragma unroll 1
    for (int block = 0; block < blocks - 1; ++block) {
        wait();
        multiply_stage<true>(d, a, b, STEPS, block != 0);
        wgmma_wait_group<1>();
        if (block != 0) release_stage(shared, before, lane);
        before = pipeline.stage;
        pipeline.advance();
    }
    wait();
    multiply_stage<false>(d, a, b, last_steps, blocks != 1);
    wgmma_wait_group<1>();
    if (blocks != 1) release_stage(shared, before, lane);
    next();
    wgmma_wait_group<0>();
    pin_registers(d);
    release_stage(shared, pipeline.stage, lane);
    pipeline.advance();
}
