// Quantising where wgmma leaves a tile: in registers, tokens on rows. What depends on that layout is here; what a scale
// and a code are is in device/quant_rules.cuh, where they go is in device/quant_outputs.cuh.
//
// A warp has 16 rows of COLUMNS columns. v[8 i + 4 h + e] of a thread is row lane / 4 + 8 h, column
// 16 i + 4 (lane % 4) + e: a row lies in the four lanes of a quad, a column in the eight quads and two registers.
//
// wgmma itself gives a lane two neighbours of every 8 columns. It multiplies by rows of B, so which columns those are is
// decided by the order of B's rows in shared memory. They are interleaved as they are loaded: a map that counts rows in
// fours brings rows 0 and 1 of every four with one copy, and rows 2 and 3 with a second one. A lane then has four
// neighbours, which are one word of FP8 codes.
//
//   row of B    0  1  2  3 | 4  5  6  7 | 8  9 ..      lands in row   0  1 64 65 | 2  3 66 67 | 4  5 ..
#pragma once

// amax[u][h][b]: the largest magnitude among the thread's own values of row h of m64 u in columns [b BLOCK, (b + 1) BLOCK);
// NaN where there is one. Magnitudes are compared as integers after the first step, where NaN is above every number: three
// at a time. Columns from `columns` on, counted from the thread's first, are none: a predicate, since a second copy without it
// behind a branch costs more instructions to fetch than it saves. M64s together share their predicates.
template <int COLUMNS, int BLOCK, int M64S>
__device__ __forceinline__ void row_block_amax(const float (*v)[COLUMNS / 2],
                                               float (*amax)[2][COLUMNS / BLOCK], int columns) {
#pragma unroll
    for (int b = 0; b < COLUMNS / BLOCK; ++b) {
        int highest[M64S][2] = {};
#pragma unroll
        for (int i = b * BLOCK / 16; i < (b + 1) * BLOCK / 16; ++i) {
#pragma unroll
            for (int row = 0; row < 2 * M64S; ++row) {
                const int u = row / 2, h = row % 2, at = 8 * i + 4 * h;
                const int low = __float_as_int(max_nan_abs(v[u][at], v[u][at + 1]));
                const int high = __float_as_int(max_nan_abs(v[u][at + 2], v[u][at + 3]));
                highest[u][h] = 16 * i >= columns ? highest[u][h] : max(max(highest[u][h], low), high);
            }
        }
#pragma unroll
        for (int row = 0; row < 2 * M64S; ++row)
            amax[row / 2][row % 2][b] = __int_as_float(highest[row / 2][row % 2]);
    }
}

// The same in all four lanes of the quad, which share a row.
template <int BLOCKS>
__device__ __forceinline__ void quad_amax(float (&amax)[2][BLOCKS]) {
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                amax[h][b] = max_nan_abs(amax[h][b], __shfl_xor_sync(0xffffffff, amax[h][b], distance));
        }
    }
}

// m[4 i + e]: the largest magnitude among the thread's own values of column 16 i + 4 (lane % 4) + e in M64S m64s, one or
// two. `rows`: how many there are from the thread's first of the last m64 on; its second is the eighth after it.
template <int COLUMNS, int M64S>
__device__ __forceinline__ void thread_column_amax(const float (*v)[COLUMNS / 2], float (&m)[COLUMNS / 4],
                                                   int rows) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 4; ++c) {
        const int at = c / 4 * 8 + c % 4;
        m[c] = max_nan_abs(v[0][at], v[0][at + 4]);
        if constexpr (M64S == 2) {  // the first is whole; of the last, predicates are enough
            if (rows > 0) m[c] = max_nan_abs(m[c], v[1][at]);
            if (rows > 8) m[c] = max_nan_abs(m[c], v[1][at + 4]);
        }
    }
    // Pinned inside, so that tiles without an edge branch over the selections instead of making them all.
    if (M64S == 1 && rows <= 8) {
#pragma unroll
        for (int c = 0; c < COLUMNS / 4; ++c) {
            m[c] = rows > 0 ? fabsf(v[0][c / 4 * 8 + c % 4]) : 0.0f;
            pin_register(m[c]);
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

// The largest magnitude of each column in the warp's 16 rows of an m64, left in shared memory as COLUMNS floats at `at`. The
// 8 lanes that share columns end with COLUMNS / 32 each: 28 shuffles for 128 columns, where reducing each alone takes 96.
template <int COLUMNS>
__device__ __forceinline__ void column_amax(const float (&v)[COLUMNS / 2], uint32_t at, int rows,
                                            uint32_t lane) {
    constexpr int KEPT = COLUMNS / 32;  // 4 or 2
    float m[COLUMNS / 4];               // m[4 i + e]: column 16 i + 4 (lane % 4) + e
    thread_column_amax<COLUMNS, 1>(&v, m, rows);
    exchange_columns<4 * KEPT>(m, 16, lane);
    exchange_columns<2 * KEPT>(m, 8, lane);
    exchange_columns<KEPT>(m, 4, lane);
    // The lane has KEPT neighbours: its bits 2, 3 and 4 chose one half each time, so that those are in order.
    if constexpr (KEPT == 4) {
        const float four[4] = {m[0], m[1], m[2], m[3]};
        st_shared_v4_f32(at + lane * 16, four);
    } else {
        st_shared_v2_f32(at + lane / 8 * 64 + lane % 4 * 16 + lane / 4 % 2 * 8, m[0], m[1]);
    }
}

// Where lanes leave their maxima instead: for each quad a row of COLUMNS floats, those of odd quads with neighbouring runs
// of 16 columns exchanged. A store of 16 bytes is made for eight lanes at a time, two quads: these have all the banks.
template <int COLUMNS>
__device__ __forceinline__ constexpr uint32_t maximum_of_quad(uint32_t quad, uint32_t column) {
    return quad * COLUMNS * 4 + (column * 4 ^ quad % 2 * 64);
}

template <int COLUMNS, int M64S>
__device__ __forceinline__ void leave_column_amax(const float (*v)[COLUMNS / 2], uint32_t at, int rows,
                                                  uint32_t lane) {
    float m[COLUMNS / 4];
    thread_column_amax<COLUMNS, M64S>(v, m, rows);
    const uint32_t even = at + maximum_of_quad<COLUMNS>(lane / 4, lane % 4 * 4), odd = even ^ 64;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
        const float four[4] = {m[4 * i], m[4 * i + 1], m[4 * i + 2], m[4 * i + 3]};
        st_shared_v4_f32((i % 2 == 0 ? even : odd) + i / 2 * 128, four);
    }
}

// Byte offset of byte `byte` of row `row` in a slab whose rows are PITCH bytes, 128, 64 or 32, with the swizzle of that
// width: 16-byte chunks are exchanged by the address bits from 7 on. Slabs start on multiples of 1024.
template <int PITCH>
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t byte) {
    const uint32_t offset = row * PITCH + byte;
    return offset ^ ((offset >> 7) % (PITCH / 16) << 4);
}

// Where a thread begins to write its codes of an m64, whose slab (64 rows, COLUMNS codes to a row) is at `slab`: row and
// chunk of its part of the first matrices, or of its first two FP4 codes. Chunk c further is this address with 16 c in
// its bits flipped, and another slab a constant further: stage_codes adds no more than constants.
template <int COLUMNS, class Format>
__device__ __forceinline__ uint32_t place_of_codes(uint32_t slab, int warp, uint32_t lane) {
    constexpr int PITCH = COLUMNS * Format::CODE_BITS / 8;
    if constexpr (Format::CODE_BITS == 8)
        return slab + swizzled<PITCH>(warp * 16 + lane % 16, lane / 16 * 16);
    else
        return slab + swizzled<PITCH>(warp * 16 + lane / 4, 0) + lane % 4 * 2;
}

// Writes the codes of a warp's rows. `place` of some slab, `further` from there to the slab that is meant, a multiple of
// 1024 known at compile time. multiplier(h, i, e) gives what v[8 i + 4 h + e] is multiplied with; all three are known, too.
template <int COLUMNS, class Format, class Multiplier>
__device__ __forceinline__ void stage_codes(const float* v, uint32_t place, uint32_t further,
                                            Multiplier multiplier) {
    constexpr int PITCH = COLUMNS * Format::CODE_BITS / 8;
    uint32_t codes[COLUMNS / 16][2];  // of four neighbours
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float x[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) x[e] = __fmul_rn(v[8 * i + 4 * h + e], multiplier(h, i, e));
            const uint32_t low = Format::codes(x[0], x[1]), high = Format::codes(x[2], x[3]);
            codes[i][h] = low | high << 2 * Format::CODE_BITS;
        }
    }
    if constexpr (Format::CODE_BITS == 8) {  // eight rows of 16 bytes are a matrix
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; i += 2)
            stmatrix_x4((place ^ i * 16) + further, codes[i][0], codes[i][1], codes[i + 1][0],
                        codes[i + 1][1]);
    } else {
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) {
            // The thread's part of the byte offset is below 16 and never carries into the chunk.
            const uint32_t at = (place ^ i / 2 * 16) + i % 2 * 8 + further;
#pragma unroll
            for (int h = 0; h < 2; ++h) st_shared_u16(at + h * 8 * PITCH, codes[i][h]);
        }
    }
}

// Writes the values themselves, as stage_tile of device/sm90/output.cuh does those of the plain layout.
template <int COLUMNS, int OUT>
__device__ __forceinline__ void stage_values(const float* v, uint32_t slabs, int warp, int lane) {
    constexpr int SLAB_BLOCKS = OUT == OUT_F32 ? 2 : 4;  // of 16 columns in a slab
    const uint32_t quarter = lane % 4;
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; ++i) {
        const uint32_t slab = slabs + i / SLAB_BLOCKS * (64 * 128);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float four[4] = {v[8 * i + 4 * h], v[8 * i + 4 * h + 1], v[8 * i + 4 * h + 2],
                                   v[8 * i + 4 * h + 3]};
            const uint32_t row = warp * 16 + lane / 4 + h * 8;
            if constexpr (OUT == OUT_F32) {
                st_shared_v4_f32(slab + swizzle_128b(row, i % 2 * 4 + quarter), four);
            } else {
                const uint32_t low =
                    OUT == OUT_BF16 ? cvt_bf16x2(four[0], four[1]) : cvt_f16x2(four[0], four[1]);
                const uint32_t high =
                    OUT == OUT_BF16 ? cvt_bf16x2(four[2], four[3]) : cvt_f16x2(four[2], four[3]);
                st_shared_v2_f32(slab + swizzle_128b(row, i % 4 * 2 + quarter / 2) + quarter % 2 * 8,
                                 __uint_as_float(low), __uint_as_float(high));
            }
        }
    }
}
