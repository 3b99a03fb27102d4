// From accumulators to global memory, clipped to the rows of the group.
//
// A consumer warpgroup owns 64 rows of D. It converts them, lays them in shared memory as slabs of 128 bytes x 64 rows
// with the 128-byte swizzle, and has TMA write them out. The engine never writes a row of another group:
// either (a) a descriptor pool, boxes of 1, 2, 4 .. 64 rows, where a tail is written by two boxes that overlap; or
// (b) one ragged descriptor whose bounds check drops the rows past the end of the group. See docs/kernels/.
#pragma once

constexpr int OUT_BF16 = 0;
constexpr int OUT_F16 = 1;
constexpr int OUT_F32 = 2;

// d: this thread's accumulators of a 64 x BLOCK_N tile; `slabs`: the warpgroup's shared memory. ADDS, of float32: to what is there.
template <int BLOCK_N, int OUT, bool ADDS = false>
__device__ __forceinline__ void stage_tile(const float (&d)[BLOCK_N / 2], uint32_t slabs, int warp,
                                           int lane) {
    if constexpr (OUT == OUT_F32) {
        // 32 columns to a slab; a thread writes two columns of two rows at a time.
        const uint32_t row = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            const uint32_t slab = slabs + (i / 4) * (64 * 128);
            const uint32_t chunk = (i % 4) * 2 + (lane % 4) / 2;
            const uint32_t within = (lane % 2) * 8;
            const uint32_t upper = slab + swizzle_128b(row, chunk) + within;
            const uint32_t lower = slab + swizzle_128b(row + 8, chunk) + within;
            float old[4] = {};
            if constexpr (ADDS) {
                ld_shared_v2_f32(upper, old[0], old[1]);
                ld_shared_v2_f32(lower, old[2], old[3]);
            }
            const auto value = [&](int j) { return ADDS ? __fadd_rn(old[j], d[4 * i + j]) : d[4 * i + j]; };
            st_shared_v2_f32(upper, value(0), value(1));
            st_shared_v2_f32(lower, value(2), value(3));
        }
    } else {
        // 64 columns to a slab; stmatrix writes two groups of 8 columns of 16 rows at a time.
        const uint32_t row = warp * 16 + lane % 16;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; i += 2) {
            const uint32_t slab = slabs + (i / 8) * (64 * 128);
            const uint32_t chunk = i % 8 + lane / 16;
            uint32_t r[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float low = d[4 * i + 2 * j], high = d[4 * i + 2 * j + 1];
                r[j] = OUT == OUT_BF16 ? cvt_bf16x2(low, high) : cvt_f16x2(low, high);
            }
            stmatrix_x4(slab + swizzle_128b(row, chunk), r[0], r[1], r[2], r[3]);
        }
    }
}

// (a) The descriptor pool: box_2^i has 2^i rows. With p = 2^floor(log2 rows), two stores of p rows, at rows 0 and
// rows - p, cover all the rows; where they overlap they write the same bytes. The second starts at any row: the swizzle
// takes its phase from the absolute address, so a slab may be entered at each of its 128-byte rows.
// Example: 61 rows -> p = 32, stores of rows 0..31 and 29..60.
struct DescriptorPool {
    TensorMap box_1, box_2, box_4, box_8, box_16, box_32, box_64;
};

__device__ __forceinline__ void store_slab_pool(const DescriptorPool& pool, uint32_t slab, int column,
                                                int row, int rows) {
    const int log2_rows = 31 - __clz(rows);
    const int box_rows = 1 << log2_rows;
    const TensorMap& map = (&pool.box_1)[log2_rows];
    tma_store_2d(map, slab, column, row);
    if (box_rows != rows) {
        const int second = rows - box_rows;
        tma_store_2d(map, slab + second * 128, column, row + second);
    }
}

// (b) The ragged descriptor, a 4-D view of D with base b and row stride s: dimensions (innermost first) N, B = 2^30,
// 2^31 - 2^16, 2^31 - 2^16 with strides 1, s, s, 2^34 - s elements. Coordinates (c, B - left, end, B) with
// left = end - row address b + (B - left) s + end s + B (2^34 - s) = b + row s (mod 2^64), and the second coordinate
// leaves its dimension exactly at row `end`, where TMA stops writing.
constexpr int RAGGED_B = 1 << 30;

__device__ __forceinline__ void store_slab_ragged(const TensorMap& map, uint32_t slab, int column, int row,
                                                  int group_end) {
    tma_store_4d(map, slab, column, RAGGED_B - (group_end - row), group_end, RAGGED_B);
}
