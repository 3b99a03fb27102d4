// Block-scaled codes to 16-bit floats, exactly, in the order of K that the operands of sm90_bf16_grouped_gemm.cu have.
//
// The unit of work is an octet: 8 codes that follow one another along K, which become four words of two halves. FP4 keeps
// an octet in one word, FP8 in two, bf16 in four. Which codes share a word is the same for both operands of a product:
//
//   word i = codes (i, i + 4) of the octet, where an operand is FP4. Example: the nibbles 0x76543210 give the words (0, 4),
//            (1, 5), (2, 6), (3, 7).
//   word i = codes (2 i, 2 i + 1) where none is (PAIRS_ARE_ADJACENT).
//
// The lower code is in the low half. The halves are bf16, whose exponent has room for MX scales, or f16 (IS_F16), in which
// NVFP4 takes fewer instructions. A conversion is exact if the value is a number of that type: for bf16 one below 2^128 and a
// multiple of 2^-133. MX scales can leave that range: there a value becomes infinite or is rounded, as documented in
// docs/kernels/sm90_bf16/index.md. NVFP4 values and e4m3 codes are always exact.
#pragma once

// Formats of an operand, in the host's order (sm90_bf16/config.py).
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

// NVFP4 values are made 2^-8 times too small, so that the factors below are numbers; the epilogue makes up for it.
constexpr int NVFP4_SHIFT = 8;
constexpr int shift_of(int format) {
    return format == FORMAT_NVFP4 ? NVFP4_SHIFT : 0;
}

// The words of an octet before scaling. FP4: with E2M1's three magnitude bits where the exponent and the mantissa of a half
// meet they mean the same as in E2M1, subnormals included, but for the bias of 1: a bf16 is 2^-126 times the value, an f16
// 2^-14 times.
//
// REPACKED: the bits of the 8 codes lie where four rotations of the word have all of them in place, but for one of the first
// (padless.layouts.to_repacked): 9 instructions in place of 13.
template <int FORMAT, bool IS_F16, bool PAIRS_ARE_ADJACENT, bool REPACKED = false, int NUM_WORDS>
__device__ __forceinline__ void expand_octet(uint32_t (&to)[4], const uint32_t (&from)[NUM_WORDS]) {
    static_assert(!REPACKED || (FORMAT == FORMAT_MXFP4 && !IS_F16), "MXFP4 to bf16");
    if constexpr (is_fp4(FORMAT) && IS_F16) {
        // All of it fits in the upper byte of an f16: bytes first, of the even and of the odd codes, then the halves.
        static_assert(NUM_WORDS == 1 && !PAIRS_ARE_ADJACENT, "8 nibbles");
        // Of the signs of all 8, those that are not meant lie where a byte's magnitude comes: one selection does both.
        constexpr uint32_t MAGNITUDES = 0x0E0E0E0E;
        const uint32_t w = from[0], signs = and_b32(w, 0x88888888);
        const uint32_t even = lop3_select(w << 1, signs << 4, MAGNITUDES);
        const uint32_t odd = lop3_select(w >> 3, signs, MAGNITUDES);
        to[0] = prmt(even, 0, 0x2404);
        to[1] = prmt(odd, 0, 0x2404);
        to[2] = prmt(even, 0, 0x3414);
        to[3] = prmt(odd, 0, 0x3414);
    } else if constexpr (REPACKED) {
        static_assert(NUM_WORDS == 1 && !PAIRS_ARE_ADJACENT, "8 nibbles");
        constexpr uint32_t BITS = 0x81C081C0, FIRST_MANTISSAS = 0x00400040;
        const uint32_t w = from[0];
        to[0] = (w & (BITS ^ FIRST_MANTISSAS)) | (w >> 8 & FIRST_MANTISSAS);
        to[1] = w << 2 & BITS;
        to[2] = w << 6 & BITS;
        to[3] = __funnelshift_l(w, w, 12) & BITS;
    } else if constexpr (is_fp4(FORMAT)) {
        static_assert(NUM_WORDS == 1 && !PAIRS_ARE_ADJACENT, "8 nibbles");
        // Signs are wanted at bit 15 of a half. Those at bit 7, of other codes, lie where the magnitude comes.
        constexpr uint32_t SIGNS = 0x80808080, MAGNITUDES = 0x01C001C0;
        const uint32_t w = from[0], even = and_b32(w << 4, SIGNS), odd = and_b32(w, SIGNS);
        to[0] = lop3_select(w << 6, even << 8, MAGNITUDES);
        to[1] = lop3_select(w << 2, odd << 8, MAGNITUDES);
        to[2] = lop3_select(w >> 2, even, MAGNITUDES);
        to[3] = lop3_select(w >> 6, odd, MAGNITUDES);
    } else if constexpr (FORMAT == FORMAT_BF16) {
        static_assert(NUM_WORDS == 4, "8 bf16");
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[i] =
                PAIRS_ARE_ADJACENT ? from[i] : prmt(from[i / 2], from[i / 2 + 2], i % 2 ? 0x7632 : 0x5410);
    } else {
        static_assert(NUM_WORDS == 2, "8 bytes");
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t pair = PAIRS_ARE_ADJACENT ? from[i / 2] >> (16 * (i % 2))
                                                     : prmt(from[0], from[1], 0x0040 + 0x11 * i);
            const uint32_t halves =
                FORMAT == FORMAT_MXFP8_E5M2 ? cvt_f16x2_e5m2x2(pair) : cvt_f16x2_e4m3x2(pair);
            to[i] = IS_F16 ? halves : cvt_bf16x2(cvt_f32_f16_low(halves), cvt_f32_f16_high(halves));
        }
    }
}

// What the words of expand_octet are multiplied with: a factor is twice the same half in a word.
__device__ __forceinline__ uint32_t both_halves(uint32_t half) {
    return prmt(half, half, 0x1010);
}

// MXFP8: the power of two itself. Byte b is exponent field b: 0 is 2^-127, a subnormal, and 255 NaN, so both have bit 6.
__device__ __forceinline__ uint32_t mxfp8_factor(uint32_t byte) {
    return both_halves(byte << 7 | (((byte + 1) & 0xFE) == 0 ? 0x40 : 0));
}

// MXFP4: 2^126 times the scale 2^(b - 127) in both halves, which is a bf16 number up to 2^1, b = 128. For larger scales, and
// NaN, 255, the rest is in a second factor, which is 1 for others. That is rare: callers branch over it.
__device__ __forceinline__ uint32_t mxfp4_factor(uint32_t byte) {
    return (byte < 128 ? byte : 128) * 0x00800080 + 0x3F003F00;
}

__device__ __forceinline__ uint32_t mxfp4_second_factor(uint32_t byte) {
    return both_halves(byte == 255 ? 0x7FC0 : ((byte > 128 ? byte : 128) - 1) << 7);
}

// MXFP4 in f16, where all scales of a stage allow it: 2^(14 - MXFP4_F16_SHIFT) times the scale 2^(b - 127) in both halves, in
// f16's exponent field b - 98 - MXFP4_F16_SHIFT. Values and factor are exact for scales from 2^(-22 + MXFP4_F16_SHIFT), whose
// smallest value is twice f16's smallest, to 2^(1 + MXFP4_F16_SHIFT), whose factor is f16's largest power of two. The factor
// of 0 is finite, whatever it is: it meets zero codes past the end of K.
constexpr int MXFP4_F16_SHIFT = 4;
__device__ __forceinline__ uint32_t mxfp4_factor_f16(uint32_t byte) {
    return (byte - (98 + MXFP4_F16_SHIFT)) * 0x04000400;
}

// Not 0 in the upper four bits of a byte, where one of four scales is not among those.
__device__ __forceinline__ uint32_t mxfp4_beyond_f16(uint32_t bytes) {
    // Allowed are 8 .. 31. A borrow reaches another byte from one that is not allowed itself.
    const uint32_t from_8 = bytes - (97 + MXFP4_F16_SHIFT) * 0x01010101u;
    return (from_8 & 0xE0E0E0E0) | (~(from_8 | from_8 << 1) & 0x10101010);
}

// Whether any of four bytes may be larger than 128.
__device__ __forceinline__ bool mxfp4_is_large(uint32_t bytes) {
    return (bytes & 0x80808080) != 0;
}

// NVFP4: two scales, in the low two bytes, to scale * 2^(126 or 14 - NVFP4_SHIFT): at most 448 * 2^118 < 2^127, or 448 *
// 2^6 < 2^15. NaN stays NaN. The first is in the low half.
template <bool IS_F16>
__device__ __forceinline__ uint32_t nvfp4_factors(uint32_t bytes) {
    static_assert(NVFP4_SHIFT == 8, "the two constants");
    const uint32_t halves = cvt_f16x2_e4m3x2(bytes);
    if constexpr (IS_F16) return mul_f16x2(halves, 0x54005400);  // 2^6
    constexpr float FACTOR = 3.3230699894622897e35f;             // 2^118
    return cvt_bf16x2(cvt_f32_f16_low(halves) * FACTOR, cvt_f32_f16_high(halves) * FACTOR);
}

// A lane's scales of its 32 codes of a row: one MX scale or two of NVFP4.
template <int FORMAT, bool IS_F16>
struct SectionScales {
    static_assert(!IS_F16 || scales_of_128(FORMAT) == 0 || is_fp4(FORMAT), "MX scales of FP8 want bf16");
    uint32_t factors;  // NVFP4: one in each half; MX: one in both

    // The bytes of scales, from shared memory.
    static __device__ __forceinline__ uint32_t read(uint32_t address) {
        if constexpr (FORMAT == FORMAT_NVFP4)
            return ld_shared_u16(address);
        else if constexpr (scales_of_128(FORMAT) != 0)
            return ld_shared_u8(address);
        else
            return 0;
    }

    // Which bits of them count where the row has `columns` more, from this lane's first: those past the end of K may hold
    // anything and count as 0. NVFP4: without the sign bits, which mean nothing.
    static __device__ __forceinline__ uint32_t mask(int columns) {
        if constexpr (FORMAT == FORMAT_NVFP4)
            return columns >= 2 ? 0x7F7F : columns == 1 ? 0x7F : 0;
        else
            return columns >= 1 ? 0xFF : 0;
    }

    // But for MXFP4's second factor.
    __device__ __forceinline__ void set(uint32_t bytes) {
        if constexpr (FORMAT == FORMAT_NVFP4)
            factors = nvfp4_factors<IS_F16>(bytes);
        else if constexpr (scales_of_128(FORMAT) != 0)
            factors = FORMAT != FORMAT_MXFP4 ? mxfp8_factor(bytes)
                      : IS_F16               ? mxfp4_factor_f16(bytes)
                                             : mxfp4_factor(bytes);
    }

    // Scales octet `octet` of the section, but for MXFP4's second factor.
    __device__ __forceinline__ void apply(uint32_t (&words)[4], int octet) const {
        if constexpr (scales_of_128(FORMAT) != 0) {
            const uint32_t factor = FORMAT != FORMAT_NVFP4 ? factors
                                    : octet < 2            ? low_half_twice(factors)
                                                           : high_half_twice(factors);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                words[i] = IS_F16 ? mul_f16x2(words[i], factor) : mul_bf16x2(words[i], factor);
        }
    }
};
