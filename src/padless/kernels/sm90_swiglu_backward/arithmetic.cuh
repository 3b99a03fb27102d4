// SwiGLU's backward in float32, rounding by rounding as in quantization/swiglu_rules.py.
#pragma once

// fl(1 / fl(1 + exp(-y))) for y of at least -87.25, the exponential by a polynomial that torch can compute too.
__device__ __forceinline__ float sigmoid(float y) {
    constexpr float LOG2E = 0x1.715476p+0f, LN2 = 0x1.62e430p-1f, LN2_LOW = -0x1.05c610p-29f;
    constexpr float C2 = 0x1.fffdfcp-2f, C3 = 0x1.5557b0p-3f, C4 = 0x1.572a64p-5f, C5 = 0x1.106250p-7f;
    constexpr float ROUNDING = 12582912.0f;  // 1.5 * 2^23: float32 steps are 1 there
    const float x = fminf(y, 87.0f);
    const float t = __fmaf_rn(x, -LOG2E, ROUNDING);
    const float n = __fadd_rn(t, -ROUNDING);
    const float r = __fmaf_rn(n, LN2_LOW, __fmaf_rn(n, LN2, x));
    float p = __fmaf_rn(-C5, r, C4);
    p = __fmaf_rn(p, r, -C3);
    p = __fmaf_rn(p, r, C2);
    p = __fmaf_rn(p, r, -1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    // n is in the last bits of t: moved into the exponent.
    const float e = __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
    const float d = __fadd_rn(e, 1.0f);
    const float rough = rcp_approx(d);
    return __fmaf_rn(rough, __fmaf_rn(-d, rough, 1.0f), rough);
}

struct Gradients {
    float gate, up, hidden;  // dZ of gate and up, H
    float product;           // of which dprob is the sum
};

template <bool HAS_PROB>
__device__ __forceinline__ Gradients gradients_of(float dh, float gate, float up, float prob) {
    const float y = max_nan(gate, -87.25f);
    const float s = sigmoid(y);
    const float silu = __fmul_rn(y, s);
    const float h0 = __fmul_rn(silu, up);
    const float slope = __fmaf_rn(silu, __fadd_rn(1.0f, -s), s);
    const float dh0 = HAS_PROB ? __fmul_rn(dh, prob) : dh;
    Gradients found;
    found.gate = __fmul_rn(__fmul_rn(dh0, up), slope);
    found.up = __fmul_rn(dh0, silu);
    found.hidden = HAS_PROB ? __fmul_rn(h0, prob) : h0;
    found.product = __fmul_rn(h0, dh);
    return found;
}
