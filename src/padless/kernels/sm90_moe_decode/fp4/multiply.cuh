// Product of a unit, 16 weight rows, with eight rows: by a warp alone. Codes go from shared memory to registers, become bf16 and
// are the first operand; sums stay in the tensor core over all K. Sets of 16 products and their order are those of
// sm90_bf16_grouped_gemm.cu, and so are the bits.
#pragma once

// What a lane reads: row_of_lane(lane) of a unit and the eighth after it, 32 codes of a K block.
struct UnitLane {
    uint32_t codes[STAGE_BLOCKS];  // from a stage's first
    uint32_t scales[2];            // of either row

    // Of the unit of the 16 rows number `place` of the weights. A row's scales are four words away from those of the row 32 before,
    // in tiles of 32x4x4. The other two: which of the 16 rows the lane's are.
    __device__ __forceinline__ UnitLane(int lane, int place, int first_scale_row, int second_scale_row) {
        const int word = place / 2 % 4;
        const int row = row_of_lane(lane), quad = lane % 4;
#pragma unroll
        for (int b = 0; b < STAGE_BLOCKS; ++b) codes[b] = swizzle_128b(row, 4 * b + quad);
        scales[0] = first_scale_row * 16 + word * 4 + quad;
        scales[1] = second_scale_row * 16 + word * 4 + quad;
    }
};

// A lane's part of a K block.
struct BlockOfLane {
    uint32_t words[2][4];  // of either row: octets
    uint32_t bytes[2];     // scales

    // Block `b` of the stage at `codes` and `scales`. `columns`: scales of a row from the stage's first on; those past them may
    // be anything and count as 0.
    __device__ __forceinline__ void read(uint32_t codes, uint32_t scales, const UnitLane& unit, int b,
                                         int columns, int lane) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            uint32_t (&w)[4] = words[h];
            ld_shared_v4_u32(codes + unit.codes[b] + h * 1024, w[0], w[1], w[2], w[3]);
            const uint32_t byte = ld_shared_u8(scales + b * (UNIT_ROWS * 16) + unit.scales[h]);
            bytes[h] = 4 * b + lane % 4 < columns ? byte : 0;
        }
    }
};

using Factors = SectionScales<FORMAT_MXFP4, false>[2];

// d += octets of either row, `from`, times eight rows.
template <bool HAS_LARGE>
__device__ __forceinline__ void multiply_octet(float (&d)[4], uint32_t first, uint32_t second,
                                               const uint32_t (&bytes)[2], const Factors& factors,
                                               const uint32_t (&x)[4]) {
    uint32_t a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t from[1] = {h == 0 ? first : second};
        uint32_t to[4];
        expand_octet<FORMAT_MXFP4, false, false>(to, from);
        factors[h].apply(to, 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (HAS_LARGE) to[i] = mul_bf16x2(to[i], mxfp4_second_factor(bytes[h]));
            a[i / 2][i % 2 * 2 + h] = to[i];
        }
    }
    mma_m16n8k16_bf16(d, a[0], x[0], x[1]);
    mma_m16n8k16_bf16(d, a[1], x[2], x[3]);
}

// d += a K block times eight rows, of which an octet is read while the one before is multiplied. begin() multiplies the first
// octets, and so needs a value of every load of the block; finish() the others. Scales with a second factor (dequantize.cuh) are
// rare, and so their loop is short: a branch at every word would take as long as the rest.
struct BlockProduct {
    Factors factors;
    uint32_t x[2][4];
    bool has_large;

    __device__ __forceinline__ void begin(float (&d)[4], const BlockOfLane& block, uint32_t rows,
                                          uint32_t step_bytes) {
        ld_shared_v4_u32(rows, x[0][0], x[0][1], x[0][2], x[0][3]);
        ld_shared_v4_u32(rows + step_bytes, x[1][0], x[1][1], x[1][2], x[1][3]);
#pragma unroll
        for (int h = 0; h < 2; ++h) factors[h].set(block.bytes[h]);
        has_large = __any_sync(0xffffffff, mxfp4_is_large(block.bytes[0] | block.bytes[1]));
        if (has_large)
            multiply_octet<true>(d, block.words[0][0], block.words[1][0], block.bytes, factors, x[0]);
        else
            multiply_octet<false>(d, block.words[0][0], block.words[1][0], block.bytes, factors, x[0]);
    }

    __device__ __forceinline__ void finish(float (&d)[4], const BlockOfLane& block, uint32_t rows,
                                           uint32_t step_bytes) {
        if (has_large) {
#pragma unroll 1
            for (int octet = 1; octet < 4; ++octet) {
                uint32_t from[2] = {};
#pragma unroll
                for (int n = 1; n < 4; ++n) {
                    from[0] = n == octet ? block.words[0][n] : from[0];
                    from[1] = n == octet ? block.words[1][n] : from[1];
                }
                ld_shared_v4_u32(rows + octet * step_bytes, x[0][0], x[0][1], x[0][2], x[0][3]);
                multiply_octet<true>(d, from[0], from[1], block.bytes, factors, x[0]);
            }
            return;
        }
#pragma unroll
        for (int octet = 1; octet < 4; ++octet) {
            uint32_t (&next)[4] = x[(octet + 1) % 2];
            if (octet < 3)
                ld_shared_v4_u32(rows + (octet + 1) * step_bytes, next[0], next[1], next[2], next[3]);
            multiply_octet<false>(d, block.words[0][octet], block.words[1][octet], block.bytes, factors,
                                  x[octet % 2]);
        }
    }
};

// d = the unit whose stages come next, times eight rows. `rows`: address of what the lane reads at step 0; steps are
// `step_bytes` apart. `columns`: scales of a row, K / 32. A block is read half a stage before it is multiplied.
__device__ __forceinline__ void multiply(float (&d)[4], SharedStorage& shared, const Problem& p,
                                         const Layout& layout, WeightLoader& loader, const UnitLane& unit,
                                         int k_stages, int columns, uint32_t rows, uint32_t step_bytes,
                                         int warp, int lane, RingPosition& position) {
    static_assert(STAGE_BLOCKS == 2, "below");
    BlockOfLane first, second;
    uint32_t codes, scales;
    const auto await_stage = [&] {
        const int slot = warp * p.stages + position.stage;
        codes = layout.codes + slot * CODE_BYTES, scales = layout.scales + slot * SCALE_BYTES;
        mbarrier_wait(shared_address(&shared.full[warp][position.stage]), position.phase);
        position.advance(p.stages);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    await_stage();
    first.read(codes, scales, unit, 0, columns, lane);
    second.read(codes, scales, unit, 1, columns, lane);
    for (int left = k_stages;;) {
        BlockProduct product;
        product.begin(d, first, rows, step_bytes);
        product.finish(d, first, rows, step_bytes);
        product.begin(d, second, rows + 4 * step_bytes, step_bytes);
        __syncwarp();  // all lanes have what they loaded from the stage
        loader.load_stage();
        columns -= STAGE_K / 32;
        const bool is_last = --left == 0;
        if (!is_last) {
            await_stage();
            first.read(codes, scales, unit, 0, columns, lane);
        }
        product.finish(d, second, rows + 4 * step_bytes, step_bytes);
        if (is_last) break;
        second.read(codes, scales, unit, 1, columns, lane);
        rows += STEPS_OF_STAGE * step_bytes;
    }
}
