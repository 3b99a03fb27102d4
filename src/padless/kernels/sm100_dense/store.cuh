// From sums in registers, one row to a thread, to D: the two ways out of tensor memory.
#pragma once

constexpr int OUT_BF16 = 0, OUT_F16 = 1, OUT_F32 = 2;

// WORDS 32-bit words of D from their sums, the lower column in the low half.
template <int OUT, int WORDS, int COLUMNS>
__device__ __forceinline__ void round_sums(uint32_t (&words)[WORDS], const uint32_t (&sums)[COLUMNS]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        if constexpr (OUT == OUT_F32) {
            words[i] = sums[i];
        } else {
            const float low = __uint_as_float(sums[2 * i]), high = __uint_as_float(sums[2 * i + 1]);
            words[i] = OUT == OUT_BF16 ? cvt_bf16x2(low, high) : cvt_f16x2(low, high);
        }
    }
}

// Direct: `words` are row `row` from column `column` on; rows from `rows` and columns from `columns` on are not written.
// 32 bytes at a time where they are all in D and the rows of D begin on 32-byte boundaries.
template <int OUT_BYTES, int WORDS>
__device__ __forceinline__ void store_row(const uint32_t (&words)[WORDS], void* d, long long d_stride,
                                          bool d_is_aligned, int row, int rows, int column, int columns) {
    constexpr int PIECE = 32 / OUT_BYTES;  // columns
    if (row >= rows) return;
    uint8_t* const at = static_cast<uint8_t*>(d) + (row * d_stride + column) * OUT_BYTES;
#pragma unroll
    for (int i = 0; i < WORDS / 8; ++i) {
        const int left = columns - column - i * PIECE;
        uint32_t eight[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) eight[j] = words[8 * i + j];
        if (d_is_aligned && left >= PIECE) {
            st_global_no_allocate_v8(at + i * 32, eight);
        } else {
#pragma unroll
            for (int j = 0; j < PIECE; ++j) {
                if (j >= left) break;
                if constexpr (OUT_BYTES == 4)
                    reinterpret_cast<uint32_t*>(at)[i * PIECE + j] = eight[j];
                else
                    reinterpret_cast<uint16_t*>(at)[i * PIECE + j] = eight[j / 2] >> (j % 2 * 16) & 0xFFFF;
            }
        }
    }
}

// Staged: a warp has two buffers of 32 rows of BYTES, written in turn while TMA stores the other. They begin
// on a 1024-byte boundary.
constexpr int STORE_BUFFERS = 2;
template <int BYTES>
constexpr int WARP_STAGING_BYTES = STORE_BUFFERS * 32 * BYTES;

// `words` of 32 rows from `row` on, by TMA, which leaves out what is not in D. `map_d` has boxes of 32 rows
// x BYTES and the swizzle of that width. `turn` counts the warp's buffers. When it is done lane 0 waits for the reads.
template <int OUT_BYTES, int BYTES, int WORDS>
__device__ __forceinline__ void store_by_copy(const uint32_t (&words)[WORDS], const TensorMap& map_d,
                                              uint32_t staging, int row, int column, int lane,
                                              uint32_t& turn) {
    static_assert(BYTES == 64 || BYTES == 128, "a swizzle");
    static_assert(WORDS * 4 % BYTES == 0, "whole buffers");
#pragma unroll
    for (int i = 0; i < WORDS * 4 / BYTES; ++i) {
        const uint32_t buffer = staging + (turn & 1) * (32 * BYTES);
        // Bulk groups belong to a thread: lane 0 issues every store of the warp and waits for its last but one.
        if (lane == 0) cp_async_bulk_wait_group_read<STORE_BUFFERS - 1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < BYTES / 16; ++j) {
            // The swizzle exchanges 16-byte pieces by address bits 7 and up; eight lanes meet all 32 banks.
            const uint32_t at = buffer + lane * BYTES + j * 16;
            const int w = i * (BYTES / 4) + j * 4;
            st_shared_v4_b32(at ^ (at >> 7 & (BYTES / 16 - 1)) << 4, words[w], words[w + 1], words[w + 2],
                             words[w + 3]);
        }
        fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) {
            tma_store_2d(map_d, buffer, column + i * (BYTES / OUT_BYTES), row);
            cp_async_bulk_commit_group();
        }
        ++turn;
    }
}
