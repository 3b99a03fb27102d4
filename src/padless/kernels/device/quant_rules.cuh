// What a scale and a code are, given a block's largest magnitude: the arithmetic of quantize_rules.py, operation for
// operation, each rounded once and none contracted. Nothing here knows where a value lies.
//
// A format is a struct with
//   BLOCK                     values that share a scale
//   Scale                     what is stored for a block
//   scale(amax)               -> Scale
//   multiplier(scale)         -> the float32 that values are multiplied with before they are rounded to a code
//   CODE_BITS, codes(x, y)    -> two codes, x in the low bits
#pragma once

constexpr int QUANT_NONE = 0;
constexpr int QUANT_FP8_BLOCK = 1;
constexpr int QUANT_MXFP8 = 2;
constexpr int QUANT_MXFP8_E5M2 = 3;
constexpr int QUANT_MXFP4 = 4;
constexpr int QUANT_NVFP4 = 5;

constexpr int MX_RCEIL = 0;
constexpr int MX_FLOOR = 1;
constexpr int MX_NORM_CONST = 2;        // cuDNN: (amax / q) norm_const rounded up
constexpr int MX_NORM_CONST_FIRST = 3;  // (amax norm_const) / q rounded up

#ifndef SCALED_MAX
#define SCALED_MAX 1.0f  // q of the two
#endif

constexpr float FLOAT32_MAX = 3.402823466e+38f;

__device__ __forceinline__ float quiet_nan() {
    return __int_as_float(0x7FC00000);
}

// 1 / x, correctly rounded, for x in 2^-126 .. 2^126; 0 above, also for Inf; NaN for NaN. The reciprocal of the function
// unit and one Newton step are what the compiler makes of rcp.rn itself, there behind a branch.
__device__ __forceinline__ float reciprocal_of_ordinary(float x) {
    const float r = rcp_approx(x);
    const float residual = fminf(-__fmaf_rn(r, x, -1.0f), 1.0f);  // 1 where x is Inf: 0 Inf is no number
    return fma_ftz(r, residual, r);
}

// float32 to the e2m1 code of its magnitude, nearest even, above 5 to 6. x may not be NaN.
//
// Adding 2^22 to a magnitude below 2 rounds it to multiples of 0.5, adding 2^23 to one in 2 .. 4 to multiples of 1, 2^24
// in 4 .. 6 to multiples of 2, and leaves the number of multiples in the low bits. Example: 2.5 + 2^23 has low bits 2
// (a tie, to even), and 2 more because codes of 2 .. 4 start at 4: code 4, which is 2.0.
__device__ __forceinline__ uint32_t e2m1_magnitude(float x) {
    const float y = fminf(fabsf(x), 6.0f);
    const int exponent = __float_as_int(y) & 0x7F800000;
    const int binade = exponent > 0x3F800000 ? exponent : 0x3F800000;
    const int magic = binade + (22 << 23);
    const int sum = __float_as_int(__fadd_rn(y, __int_as_float(magic)));
    return static_cast<uint32_t>(sum - magic + (binade >> 22) - 2 * 127);
}

__device__ __forceinline__ uint32_t e2m1_code(float x) {  // NaN to 0: e2m1 has none, the scale says it
    return x == x ? e2m1_magnitude(x) | (__float_as_uint(x) >> 31 << 3) : 0;
}

__device__ __forceinline__ uint32_t e2m1_pair(float x, float y) {
    return e2m1_code(x) | e2m1_code(y) << 4;
}

// x / 448, correctly rounded, for x in 1e-4 .. FLT_MAX: the product with the rounded reciprocal, and what it left over.
__device__ __forceinline__ float divided_by_448(float x) {
    constexpr float INVERSE = 1.0f / 448.0f;
    const float quotient = __fmul_rn(x, INVERSE);
    return __fmaf_rn(__fmaf_rn(quotient, -448.0f, x), INVERSE, quotient);
}

// scale = max(amax, 1e-4) / 448, code = e4m3(x * (1 / scale)).
struct Fp8Block {
    static constexpr int BLOCK = 128;
    static constexpr int CODE_BITS = 8;
    using Scale = float;

    __device__ __forceinline__ static Fp8Block make(const float*) { return Fp8Block{}; }
    __device__ __forceinline__ float scale(float amax) const {
        const float x = max_nan_abs(amax, 1e-4f);
        const float quotient = divided_by_448(x);
        const int bits = __float_as_int(x);  // Inf stays, NaN is 0x7FFFFFFF here
        return bits < 0x7F800000 ? quotient : __int_as_float(bits & 0x7FC00000);
    }
    __device__ __forceinline__ float multiplier(float scale) const { return reciprocal_of_ordinary(scale); }
    __device__ __forceinline__ static uint32_t codes(float x, float y) { return cvt_e4m3x2(x, y); }
};

// The biased exponent of a power of two not below x >= 0. Field 0 with mantissa 0x400000 is 2^-127, which is byte 0.
__device__ __forceinline__ int round_up_to_exponent(float x) {
    const int exponent = __float_as_int(x) >> 23, mantissa = __float_as_int(x) & 0x7FFFFF;
    return exponent + (exponent == 0 ? mantissa > 0x400000 : mantissa != 0);
}

// 2^(scale - 127): amax / (largest code) rounded up to a power of two; or with MX_FLOOR amax rounded down to one, less
// the one of the largest code; or cuDNN's. 255 for Inf and NaN. code = element(x * 2^(127 - scale)), times norm_const.
template <int FORMAT, int RULE>
struct Mx {
    static constexpr int BLOCK = 32;
    static constexpr int CODE_BITS = FORMAT == QUANT_MXFP4 ? 4 : 8;
    static constexpr float MAX = FORMAT == QUANT_MXFP8 ? 448.0f : FORMAT == QUANT_MXFP4 ? 6.0f : 57344.0f;
    static constexpr int EMAX = FORMAT == QUANT_MXFP8 ? 8 : FORMAT == QUANT_MXFP4 ? 2 : 15;
    static constexpr bool HAS_NORM_CONST = RULE == MX_NORM_CONST || RULE == MX_NORM_CONST_FIRST;
    using Scale = uint8_t;
    float norm_const;

    __device__ __forceinline__ static Mx make(const float* norm_const) {
        return Mx{HAS_NORM_CONST ? __ldg(norm_const) : 1.0f};
    }
    __device__ __forceinline__ uint8_t scale(float amax) const {
        constexpr int INFINITE = 0x7F800000;
        int byte;
        if constexpr (HAS_NORM_CONST) {
            constexpr float INVERSE = 1.0f / SCALED_MAX;
            const float t = RULE == MX_NORM_CONST ? __fmul_rn(__fmul_rn(amax, INVERSE), norm_const)
                                                  : __fmul_rn(__fmul_rn(amax, norm_const), INVERSE);
            if (!(t < __int_as_float(INFINITE))) return 0xFF;
            byte = round_up_to_exponent(t);
            return byte < 0xFE ? byte : 0xFE;
        } else if constexpr (RULE == MX_FLOOR) {
            byte = (__float_as_int(amax) >> 23) - EMAX;
            byte = byte < 0 ? 0 : byte;
        } else {
            byte = round_up_to_exponent(__fdiv_rn(amax, MAX));
        }
        return __float_as_int(amax) >= INFINITE ? 0xFF : byte;
    }
    __device__ __forceinline__ float multiplier(uint8_t scale) const {
        if (scale == 0xFF) return quiet_nan();
        const float inverse = __uint_as_float(scale == 0xFE ? 0x400000 : (0xFE - scale) << 23);
        return HAS_NORM_CONST ? fminf(__fmul_rn(norm_const, inverse), FLOAT32_MAX) : inverse;
    }
    __device__ __forceinline__ static uint32_t codes(float x, float y) {
        if constexpr (FORMAT == QUANT_MXFP8) return cvt_e4m3x2(x, y);
        if constexpr (FORMAT == QUANT_MXFP8_E5M2) return cvt_e5m2x2(x, y);
        if constexpr (FORMAT == QUANT_MXFP4) return e2m1_pair(x, y);
    }
};

// In TransformerEngine's order. With S = 1 / (global scale): scale = e4m3(amax * (S * fl(1 / 6))), code = e2m1(x * (1 /
// (scale * (1 / S)))), and no infinities on the way. A block with an Inf or a NaN has scale NaN.
struct Nvfp4 {
    static constexpr int BLOCK = 16;
    static constexpr int CODE_BITS = 4;
    using Scale = uint8_t;
    float encode, decode;

    __device__ __forceinline__ static float reciprocal(float x) { return fminf(__frcp_rn(x), FLOAT32_MAX); }
    __device__ __forceinline__ static Nvfp4 make(const float* global_scale) {
        const float encode = reciprocal(__ldg(global_scale));
        return Nvfp4{__fmul_rn(encode, 1.0f / 6.0f), reciprocal(encode)};
    }
    __device__ __forceinline__ uint8_t scale(float amax) const {
        if (!(amax < __int_as_float(0x7F800000))) return 0x7F;
        return static_cast<uint8_t>(cvt_e4m3x2(fminf(__fmul_rn(amax, encode), FLOAT32_MAX), 0.0f));
    }
    // A broken block has NaN here and codes 0: e2m1 has no NaN, the scale says it.
    __device__ __forceinline__ float multiplier(uint8_t scale) const {
        if (scale == 0x7F) return quiet_nan();
        return reciprocal(__fmul_rn(cvt_f32_e4m3(scale), decode));
    }
    __device__ __forceinline__ static uint32_t codes(float x, float y) { return e2m1_pair(x, y); }
};

template <int KIND, int RULE>
struct FormatOf {
    using Type = Mx<KIND, RULE>;
};
template <int RULE>
struct FormatOf<QUANT_NONE, RULE> {
    using Type = Fp8Block;  // never used
};
template <int RULE>
struct FormatOf<QUANT_FP8_BLOCK, RULE> {
    using Type = Fp8Block;
};
template <int RULE>
struct FormatOf<QUANT_NVFP4, RULE> {
    using Type = Nvfp4;
};
