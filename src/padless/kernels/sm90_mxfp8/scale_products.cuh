// One-byte power-of-two scales (E8M0), applied with the tensor core's help: one small bf16 product makes, in every
// thread's registers, the scale sfa[row] * sfb[column] of each of its accumulators, in the accumulators' own layout.
//
//   S (64 x N) = U (64 x 16) * V (16 x N),   U[row][j] = sfa[row] of step j, V[j][column] = sfb[column] of step j
//
// with U zero but for the column of the step at hand, so that S has a single product and is exact: a power of two from
// 2^-149 to 2^127, infinite above, zero below. Reading the scales of the columns from shared memory would take 1 / 4 of
// a register of every thread for each accumulator of 64 rows, more than shared memory can deliver beside the products.
//
// U is made in registers from four neighbouring scales of a row. V is shared by the warpgroup and lies in shared memory.
//
// A zero of U times another step's sfb[column] enters the sum with the exponent of that scale minus 126, and a term
// 25 or more binades below it is lost: a scale product below 2^-151 times the largest of the column's four scales counts
// as zero. It would meet the limits of float32 beside that scale in any case.
#pragma once

#include "device/scale_layouts.cuh"

constexpr int STEPS = 4;  // blocks of 32 along K in a stage

// Two neighbouring scales of a word, the bytes that SELECTOR names, as a pair of bf16. A byte is the exponent field, but 0
// is 2^-127, a subnormal number, and 255 is NaN: as a field it is infinity, which 0 * x + x makes NaN of.
// Example: 127 (one) -> 0x3F80, 0 -> 0x0040, 255 -> NaN.
constexpr uint32_t BYTES_0_1 = 0x4140, BYTES_2_3 = 0x4342;

template <uint32_t SELECTOR>
__device__ __forceinline__ uint32_t scale_pair(uint32_t word) {
    const uint32_t fields = __byte_perm(word, 0, SELECTOR) << 7;
    const uint32_t numbers = max_u16x2(fields, 0x00400040);
    return fma_bf16x2(numbers, 0, numbers);
}

// --- scales in global memory

constexpr int SCALES_PLAIN = 0;  // (rows, columns) bytes

struct ScaleSource {
    const uint8_t* bytes;
    int columns;  // blocks of 32 along K
    int layout;

    __device__ __forceinline__ int column_tiles() const { return (columns + STEPS - 1) / STEPS; }

    // Where the scales of `row` start.
    __device__ __forceinline__ const uint8_t* of_row(long long row) const {
        if (layout == SCALES_PLAIN) return bytes + row * columns;
        return bytes + row / 128 * column_tiles() * 512 + row % 32 * 16 + row % 128 / 32 * 4;
    }

    // Whether the scales of a stage are a word, `to_next_stage` bytes after those of the last one.
    __device__ __forceinline__ bool are_words() const {
        return layout != SCALES_PLAIN || columns % STEPS == 0;
    }

    __device__ __forceinline__ int to_next_stage() const { return layout == SCALES_PLAIN ? STEPS : 512; }

    // Four scales of a row, K block `kb`, in a word; bytes past the last column are undefined.
    __device__ __forceinline__ uint32_t word(const uint8_t* of_row, int kb) const {
        const uint8_t* at = of_row + kb * static_cast<long long>(to_next_stage());
        if (are_words()) return __ldg(reinterpret_cast<const uint32_t*>(at));
        uint32_t word = 0;
#pragma unroll
        for (int j = 0; j < STEPS; ++j)
            if (kb * STEPS + j < columns) word |= static_cast<uint32_t>(__ldg(at + j)) << 8 * j;
        return word;
    }
};

// Rows of tiles before those of group g, all lanes of a warp: sum over h < g of ceil(rows of h / 128).
__device__ __forceinline__ int tiles_before_group(const int* group_ends, int g, int lane) {
    int tiles = 0;
    for (int h = lane; h < g; h += 32)
        tiles += (group_ends[h] - (h == 0 ? 0 : group_ends[h - 1]) + 127) / 128;
    return sum_of_lanes(tiles);
}

// --- scales in shared memory

// V of a stage, as the tensor core reads an operand without swizzle (PTX ISA, "Shared memory matrix layout"): 8 columns of
// D are a brick of 8 x 16 bytes for k 0-7 and a second one for k 8-15. k 0-3 are the steps; the others are zeroed once and
// never written again. Example: column 13 is at byte 256 + 5 * 16 = 336.
constexpr int V_BRICKS = 2 * 128;  // bytes of 8 columns

__device__ __forceinline__ uint32_t v_offset(int column) {
    return column / 8 * V_BRICKS + column % 8 * 16;
}

__device__ __forceinline__ uint64_t v_descriptor(uint32_t low) {
    constexpr uint64_t TO_K_8 = uint64_t(128 >> 4) << 16, TO_NEXT_8_COLUMNS = uint64_t(V_BRICKS >> 4) << 32;
    return TO_K_8 | TO_NEXT_8_COLUMNS | low;
}

// U for step `step`: registers as in wgmma_m64k16.cuh, where lane quad q = lane % 4 has k 2 q and 2 q + 1; k 8-15 are left
// alone. `pairs` are the scales of k 2 q, 2 q + 1 (q < 2) of the thread's two rows.
__device__ __forceinline__ void make_u(uint32_t (&u)[4], const uint32_t (&pairs)[2], int step, int lane) {
    const uint32_t mine = lane % 4 != step / 2 ? 0 : step % 2 == 0 ? 0xFFFF : 0xFFFF0000;
    u[0] = pairs[0] & mine;
    u[1] = pairs[1] & mine;
}
