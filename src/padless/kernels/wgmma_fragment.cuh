// Quantising where wgmma leaves a tile: in registers, tokens on rows. What depends on that layout is here; what a scale
// and a code are is in quant_rules.cuh, where they go is in quant_outputs.cuh.
//
// A warp has 16 rows of COLUMNS columns. d[4 i + 2 h + j] of a thread is row lane / 4 + 8 h, column
// 8 i + 2 (lane % 4) + j: a row lies in the four lanes of a quad, a column in the eight quads and two registers.
#pragma once

// amax[h][b]: the largest magnitude in columns [b BLOCK, (b + 1) BLOCK) of the thread's row h, the same in all four
// lanes of the quad; NaN where the block has one.
template <int COLUMNS, int BLOCK>
__device__ __forceinline__ void row_block_amax(const float* d, float (&amax)[2][COLUMNS / BLOCK]) {
#pragma unroll
    for (int b = 0; b < COLUMNS / BLOCK; ++b) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float highest = 0.0f;
#pragma unroll
            for (int i = b * BLOCK / 8; i < (b + 1) * BLOCK / 8; ++i) {
                highest = max_nan_abs(highest, d[4 * i + 2 * h]);
                highest = max_nan_abs(highest, d[4 * i + 2 * h + 1]);
            }
            amax[h][b] = highest;
        }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
        for (int b = 0; b < COLUMNS / BLOCK; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                amax[h][b] = max_nan_abs(amax[h][b], __shfl_xor_sync(0xffffffff, amax[h][b], distance));
        }
    }
}

// One exchange of column_amax: the lane hands half of its columns to the lane across and takes its half of the others.
template <int HALF, int COUNT>
__device__ __forceinline__ void exchange_columns(float (&v)[COUNT], int distance, int lane) {
    const bool upper = lane & distance;
#pragma unroll
    for (int c = 0; c < HALF; ++c) {
        const float kept = upper ? v[c + HALF] : v[c];
        const float given = upper ? v[c] : v[c + HALF];
        v[c] = max_nan_abs(kept, __shfl_xor_sync(0xffffffff, given, distance));
    }
}

// The largest magnitude of each column in the warp's 16 rows, left in shared memory as COLUMNS floats at `at`. The 8
// lanes that share columns end with COLUMNS / 32 each: 28 shuffles for 128 columns, where reducing each alone takes 96.
template <int COLUMNS>
__device__ __forceinline__ void column_amax(const float* d, uint32_t at, int lane) {
    constexpr int KEPT = COLUMNS / 32;
    float v[COLUMNS / 4];  // v[2 i + j]: column 8 i + 2 (lane % 4) + j
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        v[2 * i] = max_nan_abs(d[4 * i], d[4 * i + 2]);
        v[2 * i + 1] = max_nan_abs(d[4 * i + 1], d[4 * i + 3]);
    }
    exchange_columns<4 * KEPT>(v, 16, lane);
    exchange_columns<2 * KEPT>(v, 8, lane);
    exchange_columns<KEPT>(v, 4, lane);
    const int first = (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * KEPT;
#pragma unroll
    for (int c = 0; c < KEPT; c += 2)  // neighbours come in pairs
        st_shared_v2_f32(at + ((first + c) / 2 * 8 + lane % 4 * 2) * 4, v[c], v[c + 1]);
}

// Byte offset of byte `byte` of row `row` in a slab whose rows are PITCH bytes, 128, 64 or 32, with the swizzle of that
// width: 16-byte chunks are exchanged by the address bits from 7 on. Slabs start on multiples of 1024.
template <int PITCH>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t byte) {
    const uint32_t offset = row * PITCH + byte;
    return offset ^ ((offset >> 7) % (PITCH / 16) << 4);
}

// Writes the codes of a warp's rows into its slab (64 rows, COLUMNS codes to a row). multiplier(h, column, index) gives what row h's
// value in that column is multiplied with; `column` is 8 i + 2 (lane % 4) + j, and i is known at compile time.
template <int COLUMNS, class Format, class Multiplier>
__device__ __forceinline__ void stage_codes(const float* d, uint32_t slab, int warp, int lane,
                                            Multiplier multiplier) {
    constexpr int PITCH = COLUMNS * Format::CODE_BITS / 8;
    const uint32_t row = warp * 16 + lane / 4;
    const uint32_t within = lane % 4 * 2 * Format::CODE_BITS / 8;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i) {
        // The thread's part of the byte offset is below 16 and never carries into the chunk.
        const uint32_t chunk = swizzled<PITCH>(row, i * Format::CODE_BITS / 16 * 16);
        const uint32_t at = slab + chunk + i * Format::CODE_BITS % 16 + within;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x = __fmul_rn(d[4 * i + 2 * h], multiplier(h, i, 0));
            const float y = __fmul_rn(d[4 * i + 2 * h + 1], multiplier(h, i, 1));
            const uint32_t codes = Format::codes(x, y);
            if constexpr (Format::CODE_BITS == 8)
                st_shared_u16(at + h * 8 * PITCH, codes);
            else
                st_shared_u8(at + h * 8 * PITCH, codes);
        }
    }
}
