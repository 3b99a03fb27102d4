// What a scale and a code are, given a block's largest magnitude: the arithmetic of quantize_rules.py, operation for
// operation, each rounded once and none contracted. Nothing here knows where a value lies.
//
// A format is a struct with
//   BLOCK                     values that share a scale
//   Scale                     what is stored for a block
//   scale(amax)               -> Scale
//   multiplier(scale, amax)   -> the float32 that values are multiplied with before they are rounded to a code
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
constexpr int MX_NORM_CONST = 2;

constexpr float FLOAT32_MAX = 3.402823466e+38f;

__device__ __forceinline__ float quiet_nan() {
    return __int_as_float(0x7FC00000);
}

// silu(gate) * up with silu(x) = x * (1 / (1 + 2^(-log2(e) x))), each operation rounded once; 2^y is the GPU's approximate
// one. Below about -88 the power overflows, the reciprocal is 0 and so is the product.
__device__ __forceinline__ float swiglu(float gate, float up) {
    const float power = ex2_approx(__fmul_rn(gate, -1.4426950408889634f));
    return __fmul_rn(__fmul_rn(gate, __frcp_rn(__fadd_rn(power, 1.0f))), up);
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

__device__ __forceinline__ uint32_t e2m1_pair(float x, float y) {
    const uint32_t low = e2m1_magnitude(x) | (__float_as_uint(x) >> 31 << 3);
    const uint32_t high = e2m1_magnitude(y) | (__float_as_uint(y) >> 31 << 3);
    return low | high << 4;
}

// scale = max(amax, 1e-4) / 448, code = e4m3(x * (1 / scale)).
struct Fp8Block {
    static constexpr int BLOCK = 128;
    static constexpr int CODE_BITS = 8;
    using Scale = float;

    __device__ __forceinline__ static Fp8Block make(const float*) { return Fp8Block{}; }
    __device__ __forceinline__ float scale(float amax) const {
        const float quotient = __fdiv_rn(amax < 1e-4f ? 1e-4f : amax, 448.0f);
        return quotient == quotient ? quotient : quiet_nan();
    }
    __device__ __forceinline__ float multiplier(float scale, float) const { return __frcp_rn(scale); }
    __device__ __forceinline__ static uint32_t codes(float x, float y) { return cvt_e4m3x2(x, y); }
};

// 2^(scale - 127), the biased exponent of amax / (largest code) rounded up, or with `floor` that of amax less the one of
// the largest code; 255 for Inf and NaN. code = element(x * 2^(127 - scale)).
template <int FORMAT, int RULE>
struct Mx {
    static constexpr int BLOCK = 32;
    static constexpr int CODE_BITS = FORMAT == QUANT_MXFP4 ? 4 : 8;
    static constexpr float MAX = FORMAT == QUANT_MXFP8 ? 448.0f : FORMAT == QUANT_MXFP4 ? 6.0f : 57344.0f;
    static constexpr int EMAX = FORMAT == QUANT_MXFP8 ? 8 : FORMAT == QUANT_MXFP4 ? 2 : 15;
    using Scale = uint8_t;

    __device__ __forceinline__ static Mx make(const float*) { return Mx{}; }
    __device__ __forceinline__ uint8_t scale(float amax) const {
        const int bits = __float_as_int(amax);
        int byte;
        if constexpr (RULE == MX_FLOOR) {
            byte = (bits >> 23) - EMAX;
            byte = byte < 0 ? 0 : byte;
        } else {
            const int quotient = __float_as_int(__fdiv_rn(amax, MAX));
            const int mantissa = quotient & 0x7FFFFF;
            byte = (quotient >> 23) + (quotient >> 23 == 0 ? mantissa > 0x400000 : mantissa != 0);
        }
        return bits >= 0x7F800000 ? 0xFF : byte;
    }
    __device__ __forceinline__ float multiplier(uint8_t scale, float) const {
        return scale == 0xFF ? quiet_nan() : __uint_as_float((0xFE - scale) << 23);
    }
    __device__ __forceinline__ static uint32_t codes(float x, float y) {
        if constexpr (FORMAT == QUANT_MXFP8) return cvt_e4m3x2(x, y);
        if constexpr (FORMAT == QUANT_MXFP8_E5M2) return cvt_e5m2x2(x, y);
        if constexpr (FORMAT == QUANT_MXFP4) {  // e2m1 has no NaN: 0, the scale says it
            return e2m1_pair(x == x ? x : 0.0f, y == y ? y : 0.0f);
        }
    }
};

// Two numbers are derived from the global scale on the host, factors[0] and factors[1] (quantize_rules.nvfp4_factors):
// scale = e4m3(amax * factors[0]), code = e2m1(x * (1 / (scale * factors[1]))). A block with an Inf or a NaN has scale NaN.
struct Nvfp4 {
    static constexpr int BLOCK = 16;
    static constexpr int CODE_BITS = 4;
    using Scale = uint8_t;
    float encode, decode;

    __device__ __forceinline__ static Nvfp4 make(const float* factors) {
        return Nvfp4{__ldg(factors), __ldg(factors + 1)};
    }
    __device__ __forceinline__ uint8_t scale(float amax) const {
        if (!(amax < __int_as_float(0x7F800000))) return 0x7F;
        return static_cast<uint8_t>(cvt_e4m3x2(fminf(__fmul_rn(amax, encode), FLOAT32_MAX), 0.0f));
    }
    // A broken block has NaN here and codes 0: e2m1 has no NaN, the scale says it.
    __device__ __forceinline__ float multiplier(uint8_t scale, float) const {
        if (scale == 0x7F) return quiet_nan();
        return fminf(__frcp_rn(__fmul_rn(cvt_f32_e4m3(scale), decode)), FLOAT32_MAX);
    }
    __device__ __forceinline__ static uint32_t codes(float x, float y) {
        return e2m1_pair(x == x ? x : 0.0f, y == y ? y : 0.0f);
    }
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
