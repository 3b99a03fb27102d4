// Block-scaled codes to bf16, exactly, in the order of K that the operands of sm90_bf16_grouped_gemm.cu have.
//
// The unit of work is an octet: 8 codes that follow one another along K, which become four words of two bf16. FP4 keeps
// an octet in one word, FP8 in two, bf16 in four. Which codes share a word is the same for both operands of a product:
//
//   word i = codes (i, i + 4) of the octet, where an operand is FP4: one shift puts nibbles i and i + 4 at the tops of
//            the two halves. Example: 0x76543210 gives the words (0, 4), (1, 5), (2, 6), (3, 7).
//   word i = codes (2 i, 2 i + 1) where both operands are FP8 (PAIRS_ARE_ADJACENT).
//
// The lower code is in the low half. An exact conversion needs the value to be a bf16 number: below 2^128, and a
// multiple of 2^-133. MX scales can leave that range: there a value becomes infinite or is rounded, as documented in
// docs/kernels/sm90_bf16_grouped_gemm.md.
#pragma once

// Formats of an operand, in the host's order (paths/sm90_bf16.py).
constexpr int FORMAT_BF16 = 0;
constexpr int FORMAT_FP8_BLOCK = 1;
constexpr int FORMAT_MXFP8 = 2;
constexpr int FORMAT_MXFP8_E5M2 = 3;
constexpr int FORMAT_MXFP4 = 4;
constexpr int FORMAT_NVFP4 = 5;

constexpr bool is_fp4(int format) {
    return format == FORMAT_MXFP4 || format == FORMAT_NVFP4;
}

// Bytes of 128 codes.
constexpr int row_bytes(int format) {
    return format == FORMAT_BF16 ? 256 : is_fp4(format) ? 64 : 128;
}

// One-byte scales for 128 codes; FP8_BLOCK's float32 scale is applied outside the tensor core.
constexpr int scales_of_128(int format) {
    return format <= FORMAT_FP8_BLOCK ? 0 : format == FORMAT_NVFP4 ? 8 : 4;
}

// NVFP4 values are made 2^-8 times too small, so that the factor below is a bf16 number; the epilogue makes up for it.
constexpr int NVFP4_SHIFT = 8;
constexpr int shift_of(int format) {
    return format == FORMAT_NVFP4 ? NVFP4_SHIFT : 0;
}

constexpr uint32_t BF16X2_TWO_TO_126 = 0x7E807E80;

// The words of an octet before scaling. For FP4 they are 2^-126 times the value: sign at bit 15 and the three magnitude
// bits at bits 8 .. 6 of a bf16, where they mean the same as in E2M1 (subnormals included) but for the bias, 127 and 1.
template <int FORMAT, bool PAIRS_ARE_ADJACENT, int NUM_WORDS>
__device__ __forceinline__ void expand_octet(uint32_t (&to)[4], const uint32_t (&from)[NUM_WORDS]) {
    if constexpr (is_fp4(FORMAT)) {
        static_assert(NUM_WORDS == 1 && !PAIRS_ARE_ADJACENT, "8 nibbles");
        constexpr uint32_t SIGNS = 0x80008000, MAGNITUDES = 0x01C001C0;
        const uint32_t w = from[0];
        to[0] = ((w << 6) & MAGNITUDES) | ((w << 12) & SIGNS);
        to[1] = ((w << 2) & MAGNITUDES) | ((w << 8) & SIGNS);
        to[2] = ((w >> 2) & MAGNITUDES) | ((w << 4) & SIGNS);
        to[3] = ((w >> 6) & MAGNITUDES) | (w & SIGNS);
    } else if constexpr (FORMAT == FORMAT_BF16) {
        static_assert(NUM_WORDS == 4 && !PAIRS_ARE_ADJACENT, "8 bf16");
        to[0] = prmt(from[0], from[2], 0x5410);
        to[1] = prmt(from[0], from[2], 0x7632);
        to[2] = prmt(from[1], from[3], 0x5410);
        to[3] = prmt(from[1], from[3], 0x7632);
    } else {
        static_assert(NUM_WORDS == 2, "8 bytes");
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = PAIRS_ARE_ADJACENT ? from[i / 2] >> (16 * (i % 2))
                                                     : prmt(from[0], from[1], 0x0040 + 0x11 * i);
            const uint32_t halves =
                FORMAT == FORMAT_MXFP8_E5M2 ? cvt_f16x2_e5m2x2(pair) : cvt_f16x2_e4m3x2(pair);
            to[i] = cvt_bf16x2(cvt_f32_f16_low(halves), cvt_f32_f16_high(halves));
        }
    }
}

// What the words of expand_octet are multiplied with, twice the same bf16 in a word.
//
// MX: the power of two itself. Byte b is exponent field b: 0 is 2^-127, a subnormal, and 255 NaN, so both have bit 6.
__device__ __forceinline__ uint32_t mx_factor(uint32_t byte) {
    const uint32_t half = byte << 7 | (((byte + 1) & 0xFE) == 0 ? 0x40 : 0);
    return prmt(half, half, 0x1010);
}

// NVFP4: two scales, in the low two bytes, to scale * 2^(126 - NVFP4_SHIFT) each: at most 448 * 2^118 < 2^127. The sign
// bit means nothing. NaN stays NaN.
__device__ __forceinline__ void nvfp4_factors(uint32_t (&to)[2], uint32_t bytes) {
    constexpr float FACTOR = 3.3230699894622897e35f;  // 2^118
    static_assert(NVFP4_SHIFT == 8, "FACTOR is 2^(126 - NVFP4_SHIFT)");
    const uint32_t halves = cvt_f16x2_e4m3x2(bytes & 0x7F7F);
    const float low = cvt_f32_f16_low(halves) * FACTOR, high = cvt_f32_f16_high(halves) * FACTOR;
    to[0] = cvt_bf16x2(low, low);
    to[1] = cvt_bf16x2(high, high);
}

template <int FORMAT>
__device__ __forceinline__ void scale_octet(uint32_t (&words)[4], uint32_t factor) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        // Two exact steps for MXFP4: 2^126 times the largest scale is no bf16 number.
        if constexpr (FORMAT == FORMAT_MXFP4) words[i] = mul_bf16x2(words[i], BF16X2_TWO_TO_126);
        if constexpr (scales_of_128(FORMAT) != 0) words[i] = mul_bf16x2(words[i], factor);
    }
}

// A lane's scales of its 32 codes of a row, from shared memory: one MX scale or two of NVFP4. `columns` is how many of
// the row's scales, counted from this lane's first, exist: those past the end of K may hold anything and count as 0.
template <int FORMAT>
struct SectionScales {
    uint32_t factors[FORMAT == FORMAT_NVFP4 ? 2 : 1];

    __device__ __forceinline__ void load(uint32_t address, int columns) {
        if constexpr (FORMAT == FORMAT_NVFP4) {
            uint32_t bytes = ld_shared_u16(address);
            if (columns < 2) bytes = columns < 1 ? 0 : bytes & 0xFF;
            nvfp4_factors(factors, bytes);
        } else if constexpr (scales_of_128(FORMAT) != 0) {
            const uint32_t byte = ld_shared_u8(address);
            factors[0] = mx_factor(columns < 1 ? 0 : byte);
        }
    }

    // The factor of octet `octet` of the section.
    __device__ __forceinline__ uint32_t of_octet(int octet) const {
        return FORMAT == FORMAT_NVFP4 ? factors[FORMAT == FORMAT_NVFP4 ? octet / 2 : 0] : factors[0];
    }
};
