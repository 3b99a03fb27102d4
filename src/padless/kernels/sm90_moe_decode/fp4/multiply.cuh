// Product of a unit, 16 weight rows, with eight rows: by a warp alone. Codes go from shared memory to registers, become bf16 and
// are the first operand; sums stay in the tensor core over all K. Sets of 16 products and their order are those of
// sm90_bf16_grouped_gemm.cu, and so are the bits.
#pragma once

// What a lane reads: row_of_lane(lane) of a unit and the eighth after it, 32 codes of a K block.
struct UnitLane {
    uint32_t codes[STAGE_BLOCKS];  // from a stage's first
    uint32_t scales[2];            // of either row

    // `scale_rows`: the rows' numbers among the 16 of half a tile of scales; `word`: of ScaleRows.
    __device__ __forceinline__ UnitLane(int lane, int first_scale_row, int second_scale_row, int word) {
        const int row = row_of_lane(lane), quad = lane % 4;
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) codes[b] = swizzle_128b(row, 4 * b + quad);
        scales[0] = first_scale_row * 16 + word * 4 + quad;
        scales[1] = second_scale_row * 16 + word * 4 + quad;
    }
};

// A lane's part of a stage.
struct StageOfLane {
    uint32_t words[STAGE_BLOCKS][2][4];  // of a K block, either row: octets
    uint32_t bytes[STAGE_BLOCKS][2];     // scales
};

// d += a stage times eight rows. HAS_LARGE: some scale of the warp has a second factor (dequantize.cuh), as hardly ever: a
// function apart, since a branch at every word costs more than the rest.
template <bool HAS_LARGE>
__device__ __forceinline__ void multiply_stage(float (&d)[4], const StageOfLane& stage, uint32_t rows,
                                               uint32_t step_bytes) {
#pragma unroll
    for (int b = 0; b < STAGE_BLOCKS; ++b) {
        SectionScales<FORMAT_MXFP4, false> factors[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) factors[h].set(stage.bytes[b][h]);
#pragma unroll
        for (int octet = 0; octet < 4; ++octet) {
            uint32_t a[2][4], x[4];
            ld_shared_v4_u32(rows + (b * 4 + octet) * step_bytes, x[0], x[1], x[2], x[3]);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t from[1] = {stage.words[b][h][octet]};
                uint32_t to[4];
                expand_octet<FORMAT_MXFP4, false, false>(to, from);
                factors[h].apply(to, octet);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (HAS_LARGE) to[i] = mul_bf16x2(to[i], mxfp4_second_factor(stage.bytes[b][h]));
                    a[i / 2][i % 2 * 2 + h] = to[i];
                }
            }
            mma_m16n8k16_bf16(d, a[0], x[0], x[1]);
            mma_m16n8k16_bf16(d, a[1], x[2], x[3]);
        }
    }
}

// d = the unit whose stages come next, times eight rows. `rows`: address of what the lane reads at step 0; steps are
// `step_bytes` apart. `scale_columns`: K / 32; scales past them may be anything and count as 0.
__device__ __forceinline__ void multiply(float (&d)[4], SharedStorage& shared, const Problem& p,
                                         const Layout& layout, WeightLoader& loader, const UnitLane& unit,
                                         int k_stages, int scale_columns, uint32_t rows, uint32_t step_bytes,
                                         int warp, int lane, RingPosition& position) {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    for (int ks = 0; ks < k_stages; ++ks) {
        const int slot = warp * p.stages + position.stage;
        const uint32_t codes = layout.codes + slot * CODE_BYTES, scales = layout.scales + slot * SCALE_BYTES;
        mbarrier_wait(shared_address(&shared.full[warp][position.stage]), position.phase);
        StageOfLane stage;
        uint32_t any = 0;
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) {
            const bool counts = (ks * STAGE_BLOCKS + b) * 4 + lane % 4 < scale_columns;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t (&w)[4] = stage.words[b][h];
                ld_shared_v4_u32(codes + unit.codes[b] + h * 1024, w[0], w[1], w[2], w[3]);
                const uint32_t byte = ld_shared_u8(scales + b * (UNIT_ROWS * 16) + unit.scales[h]);
                stage.bytes[b][h] = counts ? byte : 0;
                any |= stage.bytes[b][h];
            }
        }
        position.advance(p.stages);
        const bool has_large = __any_sync(0xffffffff, mxfp4_is_large(any));
        __syncwarp();  // all lanes have read the stage
        loader.load_stage();
        if (has_large)
            multiply_stage<true>(d, stage, rows, step_bytes);
        else
            multiply_stage<false>(d, stage, rows, step_bytes);
        rows += STEPS_OF_STAGE * step_bytes;
    }
}
