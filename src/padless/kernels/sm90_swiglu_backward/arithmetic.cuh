// SwiGLU's backward in float32, rounding by rounding as in quantization/swiglu_rules.py.
#pragma once

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
