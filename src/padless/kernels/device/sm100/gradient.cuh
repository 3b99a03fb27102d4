// Stores of a weight gradient of Blackwell. Included behind OUT_TYPE, OUT_F32 and ACCUMULATE.
#pragma once

// The result. Strides in elements.
struct Gradient {
    void* data;
    long long group_stride, row_stride;
    int n_rows, n_columns;
};

// 32 columns of one row of a group; what is not in the gradient is left out, 16 bytes at a time.
__device__ __forceinline__ void store_sums(const Gradient& d, const uint32_t (&sums)[32], int group, int row,
                                           int column) {
    if (row >= d.n_rows) return;
    const long long at = group * d.group_stride + row * d.row_stride + column;
    if constexpr (OUT_TYPE == OUT_F32) {
        float4* const to = reinterpret_cast<float4*>(static_cast<float*>(d.data) + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (column + 4 * i >= d.n_columns) break;
            float4 four = make_float4(__uint_as_float(sums[4 * i]), __uint_as_float(sums[4 * i + 1]),
                                      __uint_as_float(sums[4 * i + 2]), __uint_as_float(sums[4 * i + 3]));
            if constexpr (ACCUMULATE) {
                const float4 old = to[i];
                four = make_float4(old.x + four.x, old.y + four.y, old.z + four.z, old.w + four.w);
            }
            to[i] = four;
        }
    } else {
        uint4* const to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(d.data) + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (column + 8 * i >= d.n_columns) break;
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                words[j] = cvt_bf16x2(__uint_as_float(sums[8 * i + 2 * j]),
                                      __uint_as_float(sums[8 * i + 2 * j + 1]));
            to[i] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}
