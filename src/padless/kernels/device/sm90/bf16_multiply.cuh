// The main loop of the kernels that multiply plain bf16 operands out of shared memory: 64 rows and BLOCK_N columns to a warpgroup,
// STEPS products of 16 of K to a stage of the ring.
//
// A warpgroup has no registers for a second tile, so it multiplies nothing while it hands out a finished one. The other warpgroup
// does then, if it is not at the same point: with LEAD > 0 the second warpgroup begins a tile when the first one is LEAD stages
// ahead, and while one of them stores, the tensor core is the other's.
//
// Included behind SharedStorage and these constants: BLOCK_N, STEPS, STAGES, LEAD; A_BYTES, B_BYTES of a stage;
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

// The second warpgroup begins no tile before the first one has multiplied LEAD stages of it, or all. Two barriers in turn: a
// warpgroup is at most one tile ahead of the other, which still reads its slot of the queue.
struct Stagger {
    Pipeline<2> tile;
    int left = LEAD;  // stages of the tile until the other one may begin

    // Before a tile of `blocks` stages.
    __device__ __forceinline__ void begin(SharedStorage& shared, int warpgroup, int blocks) {
        if constexpr (LEAD > 0) {
            left = blocks < LEAD ? blocks : LEAD;
            if (warpgroup == 1) mbarrier_wait(shared_address(&shared.ahead[tile.stage]), tile.phase);
        }
    }

    // In place of a tile, by the second warpgroup.
    __device__ __forceinline__ void skip(SharedStorage& shared) {
        if constexpr (LEAD > 0) {
            mbarrier_wait(shared_address(&shared.ahead[tile.stage]), tile.phase);
            tile.advance();
        }
    }

    // After the products of a stage have been issued. leader: one thread of the first warpgroup.
    __device__ __forceinline__ void issued(SharedStorage& shared, bool leader) {
        if constexpr (LEAD > 0) {
            if (--left == 0) {
                if (leader) mbarrier_arrive(shared_address(&shared.ahead[tile.stage]));
                tile.advance();
            }
        }
    }
};

// Consumer: d = a tile of `blocks` > 0 stages, of whose last one `last_steps` products are issued. `next()` looks for the next tile
// while the last products run.
template <class Next>
__device__ __forceinline__ void multiply_tile(float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                              const OperandView& view, int blocks, int last_steps,
                                              int warpgroup, int lane, bool leader,
                                              Pipeline<STAGES>& pipeline, Stagger& stagger, Next next) {
    uint32_t a, b;
    const auto wait = [&] {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        a = view.a + pipeline.stage * (A_BYTES / 16);
        b = view.b + pipeline.stage * (B_BYTES / 16);
    };
    stagger.begin(shared, warpgroup, blocks);
    pin_registers(d);
    int before = -1;  // the stage before, whose products may still run
#pragma unroll 1
    for (int block = 0; block < blocks - 1; ++block) {
        wait();
        multiply_stage<true>(d, a, b, STEPS, block != 0);
        stagger.issued(shared, leader);
        wgmma_wait_group<1>();
        if (block != 0) release_stage(shared, before, lane);
        before = pipeline.stage;
        pipeline.advance();
    }
    wait();
    multiply_stage<false>(d, a, b, last_steps, blocks != 1);
    stagger.issued(shared, leader);
    wgmma_wait_group<1>();
    if (blocks != 1) release_stage(shared, before, lane);
    next();
    wgmma_wait_group<0>();
    pin_registers(d);
    release_stage(shared, pipeline.stage, lane);
    pipeline.advance();
}
