// The 64-bit shared-memory operand descriptor of wgmma (PTX ISA, "Matrix descriptor", sm_90a layout).
#pragma once

//   bits  0-13  start address / 16
//   bits 16-29  leading byte offset / 16: not used by a swizzled K-major operand; MN-major, from one 128 bytes of rows to the next
//   bits 32-45  stride byte offset / 16: from one group of 8 rows to the next; MN-major, of 8 K
//   bits 49-51  base offset: 0, every tile starts on a 1024-byte boundary
//   bits 62-63  1 = 128-byte swizzle
//
// For a K-major tile whose rows are 128 bytes (128 e4m3 values): 8 rows are 1024 bytes, so the stride is 1024.
// Example: a tile at 0x2400 has the low word 0x240 and the descriptor 0x4000'0040'0000'0240.
//
// Only the low word moves: adding bytes / 16 to it names another stage, another m64, or a step of 32 bytes
// along K inside the rows (the swizzle takes its phase from address bits that such a step leaves alone). Shared memory
// ends below 2^18, so the address field never carries out.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t tile_address) {
    return (tile_address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ uint64_t k_major_128b_descriptor(uint32_t low) {
    constexpr uint64_t LAYOUT = (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32);
    return LAYOUT | low;
}

// An MN-major tile of 16-bit elements: chunks of 64 rows or columns (128 bytes), K after K inside a chunk, CHUNK_BYTES from one
// chunk to the next. The leading offset is that distance, the stride one of 8 K (1024 bytes); 16 K further are 2048 bytes.
template <int CHUNK_BYTES>
__device__ __forceinline__ uint64_t mn_major_128b_descriptor(uint32_t low) {
    constexpr uint64_t LAYOUT =
        (uint64_t(1) << 62) | (uint64_t(1024 >> 4) << 32) | (uint64_t(CHUNK_BYTES >> 4) << 16);
    return LAYOUT | low;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a 1024-byte aligned tile with 128-byte rows and the
// 128-byte swizzle: address bits 4-6 are XORed with bits 7-9. Example: row 3, chunk 5 -> 3 * 128 + (5 ^ 3) * 16 = 480.
__device__ __forceinline__ uint32_t swizzle_128b(uint32_t row, uint32_t chunk) {
    return row * 128 + ((chunk ^ (row & 7)) << 4);
}
