// What tcgen05.mma and tcgen05.cp are told about their operands (PTX ISA, "Shared memory descriptor" and "Instruction
// descriptor" of tcgen05).
#pragma once

// Shared-memory descriptor, sm_100:
//   bits  0-13  start address / 16
//   bits 16-29  leading byte offset / 16: not used by the two layouts here
//   bits 32-45  stride byte offset / 16: from one group of 8 rows to the next
//   bits 46-48  1
//   bits 49-51  base offset: 0, every tile starts where its swizzle pattern does
//   bits 61-63  0 = no swizzle, 2 = 128-byte swizzle
//
// As for wgmma only the low word moves; a step of 32 bytes along K inside the 128-byte rows is + 2.
__device__ __forceinline__ uint32_t tcgen05_descriptor_low(uint32_t address) {
    return (address & 0x3FFFF) >> 4;
}

// K-major operand with rows of 128 bytes and the 128-byte swizzle: 8 rows are 1024 bytes.
// Example: a tile at 0x2400 has the descriptor 0x4000'4040'0000'0240.
__device__ __forceinline__ uint64_t tcgen05_operand_descriptor(uint32_t low) {
    constexpr uint64_t LAYOUT = (uint64_t(2) << 61) | (uint64_t(1) << 46) | (uint64_t(1024 >> 4) << 32);
    return LAYOUT | low;
}

// One atom of scales, 128 rows x 4 in 512 contiguous bytes: 32 rows of 16 bytes, 8 of them are 128.
// Example: an atom at 0x800 has the descriptor 0x0000'4008'0000'0080.
__device__ __forceinline__ uint64_t scale_atom_descriptor(uint32_t low) {
    constexpr uint64_t LAYOUT = (uint64_t(1) << 46) | (uint64_t(128 >> 4) << 32);
    return LAYOUT | low;
}

constexpr int SCALE_ATOM_BYTES = 512;
constexpr int SCALE_ATOM_COLUMNS = 4;  // of tensor memory

// Instruction descriptors. m counts the rows of both CTAs where two work as one.
//   bits  4-5   SFB id: which byte of the scale words
//   bits  7-9   format of A, bits 10-12 of B
//   bits 17-22  N / 8
//   bit  23     scales are UE8M0
//   bits 27-28  M / 128
//   bits 29-30  SFA id
constexpr uint32_t MMA_E4M3 = 0, MMA_E5M2 = 1, MMA_E2M1 = 5;

// kind::mxf8f6f4; a, b: MMA_*, in any mix. e2m1 is 5 here and 1 in the kinds below. Example: m = 256, n = 256, e4m3 both ->
// 0x10C0'0000.
constexpr uint32_t mxf8f6f4_shape(uint32_t m, uint32_t n, uint32_t a, uint32_t b) {
    return a << 7 | b << 10 | (n >> 3) << 17 | 1u << 23 | (m >> 7) << 27;
}

// kind::f8f6f4, e4m3 both, to float32: M / 16 in bits 24-28, 1 in bits 4-5. Example: m = 256, n = 128 -> 0x1020'0010.
constexpr uint32_t f8f6f4_shape(uint32_t m, uint32_t n) {
    return 1u << 4 | (n >> 3) << 17 | (m >> 4) << 24;
}

// kind::mxf4nvf4 with UE4M3 (block16) or UE8M0 scales. Example: m = 128, n = 128, UE4M3 -> 0x0820'0480.
constexpr uint32_t mxf4nvf4_shape(uint32_t m, uint32_t n, bool ue8m0) {
    return 1u << 7 | 1u << 10 | (n >> 3) << 17 | static_cast<uint32_t>(ue8m0) << 23 | (m >> 7) << 27;
}

// Added to a shape: both operands take their scales from byte `id`.
__host__ __device__ constexpr uint32_t scale_ids(uint32_t id) {
    return id << 29 | id << 4;
}

static_assert(mxf8f6f4_shape(256, 256, MMA_E4M3, MMA_E4M3) == 0x10C00000);
static_assert(mxf8f6f4_shape(128, 128, MMA_E4M3, MMA_E4M3) == 0x08A00000);
static_assert(mxf8f6f4_shape(256, 128, MMA_E2M1, MMA_E2M1) == 0x10A01680);
static_assert(f8f6f4_shape(256, 128) == 0x10200010);
static_assert(mxf4nvf4_shape(128, 128, false) == 0x08200480);
static_assert(mxf4nvf4_shape(256, 256, true) == 0x10C00480);
