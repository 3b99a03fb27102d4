// Activations of an epilogue: what a gate and its up make, or one sum alone; float32, operation by operation as the function
// of the same name in reference/activation.py, each rounded once and none contracted. No branches: what is independent hides
// the latency of the function unit.
//
// A row of ACTIVATIONS in epilogue.py names a function of this file, which the host defines as ACTIVATION:
//   float NAME(float gate, float up)      behind the limits and the offset of a GateRule; without a gate both are the sum
#pragma once

#ifndef ACTIVATION
#define ACTIVATION swiglu
#endif
#ifndef ACTIVATES_SUMS
#define ACTIVATES_SUMS 0  // 1: it has no gate, and GLU is GLU_NONE
#endif

// 1 / x, correctly rounded, for x of 1 or more; 0 above 2^126, for Inf and for NaN. See reciprocal_of_ordinary.
__device__ __forceinline__ float reciprocal_from_one(float x) {
    const float r = rcp_approx(x);
    return fma_ftz_sat(r, -__fmaf_rn(r, x, -1.0f), r);
}

// 1 + exp(-gate), rounded once after an exp within 2^-21 of its value; above 2^126, Inf or NaN where gate is below -87.34.
//
// exp(-gate) = 2^h exp(c) with h = fl(-gate log2(e)) and c = -gate - h ln(2), which is what rounding h lost: the function
// unit's power alone would inherit 2^-17 of it for gate = -80. The product with the high part of ln(2) is exact in the
// first difference; below 2^-16, exp(c) is 1 + c.
__device__ __forceinline__ float one_plus_exp_minus(float gate) {
    constexpr float LOG2E = 1.44269502f, LN2 = 0.693147182f, LN2_LOW = -1.90465421e-9f;
    const float x = fminf(gate, 87.0f);  // above, the sum is 1
    const float h = __fmul_rn(x, -LOG2E);
    const float c = __fmaf_rn(h, -LN2_LOW, __fmaf_rn(h, -LN2, -x));
    const float power = ex2_approx(h);
    return __fadd_rn(__fmaf_rn(power, c, power), 1.0f);
}

// exp(-y) for y of at least -87.25, by a polynomial that torch can compute too; above 87 it is that of 87.
__device__ __forceinline__ float exp_minus(float y) {
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
    return __int_as_float(__float_as_int(p) + (__float_as_int(t) << 23));
}

// fl(1 / fl(1 + exp(-y))) for y of at least -87.25.
__device__ __forceinline__ float sigmoid(float y) {
    const float d = __fadd_rn(exp_minus(y), 1.0f);
    const float rough = rcp_approx(d);
    return __fmaf_rn(rough, __fmaf_rn(-d, rough, 1.0f), rough);
}

// The sigmoid of every activation: a polynomial's where sums are rounded to bfloat16 first, else the function unit's. 0 where
// it would be subnormal, and for NaN, which a product with x is again.
__device__ __forceinline__ float sigmoid_of(float x) {
#ifdef GATE_IN_BF16
    return sigmoid(fmaxf(x, -87.25f));
#else
    return reciprocal_from_one(one_plus_exp_minus(x));
#endif
}

// (gate * s) * up with s = 1 / (1 + exp(-gate)), or of alpha * gate.
__device__ __forceinline__ float swiglu(float gate, float up) {
#ifdef GATE_ALPHA
    const float s = sigmoid_of(__fmul_rn(gate, GATE_ALPHA));
#else
    const float s = sigmoid_of(gate);
#endif
    return __fmul_rn(__fmul_rn(gate, s), up);
}

// gate = ACTIVATION of gate and up, which are sums; of an activation without a gate up is the same sums.
template <int COUNT>
__device__ __forceinline__ void activate(float (&gate)[COUNT], const float (&up)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) {
#ifdef GATE_IN_BF16
        const uint32_t both = cvt_bf16x2(gate[e], up[e]);
        const float gate_sum = __uint_as_float(both << 16), up_sum = __uint_as_float(both & 0xFFFF0000);
#else
        const float gate_sum = gate[e], up_sum = up[e];
#endif
#ifdef GATE_LIMIT  // a GateRule of the epilogue: GATE_LIMIT is Inf for none; comparisons keep a NaN
        const float g = gate_sum > GATE_LIMIT ? GATE_LIMIT : gate_sum;
        const float most = up_sum > GATE_LIMIT ? GATE_LIMIT : up_sum;
        gate[e] = ACTIVATION(g, __fadd_rn(most < -GATE_LIMIT ? -GATE_LIMIT : most, UP_OFFSET));
#else
        gate[e] = ACTIVATION(gate_sum, up_sum);
#endif
    }
}
