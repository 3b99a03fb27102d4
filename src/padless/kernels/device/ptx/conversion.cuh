// Instructions that quantizing needs: conversions to FP8, maxima, arithmetic on the halves of a word (PTX ISA, "max",
// "fma"), the approximate exponential, and the small stores.
#pragma once

// Two float32 to two e4m3 codes, nearest even, magnitudes above 448 to 448, NaN to 0x7F. `low` lands in the low byte.
__device__ __forceinline__ uint16_t cvt_e4m3x2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint16_t cvt_e5m2x2(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}

// The value of the e4m3 code in the low byte, as an exact float32 (by way of f16, which holds every e4m3 value).
__device__ __forceinline__ float cvt_f32_e4m3(uint16_t code) {
    float value;
    asm("{\n"
        ".reg .b32 pair;\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.f16x2.e4m3x2 pair, %1;\n"
        "mov.b32 {low, high}, pair;\n"
        "cvt.f32.f16 %0, low;\n"
        "}"
        : "=f"(value)
        : "h"(code));
    return value;
}

// max(|x|, |y|), NaN where either is NaN.
__device__ __forceinline__ float max_nan_abs(float x, float y) {
    float value;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(fabsf(x)), "f"(fabsf(y)));
    return value;
}

__device__ __forceinline__ uint32_t max_u16x2(uint32_t x, uint32_t y) {
    uint32_t value;
    asm("max.u16x2 %0, %1, %2;" : "=r"(value) : "r"(x), "r"(y));
    return value;
}

__device__ __forceinline__ uint32_t fma_bf16x2(uint32_t x, uint32_t y, uint32_t z) {
    uint32_t value;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(value) : "r"(x), "r"(y), "r"(z));
    return value;
}

// 2^x within 2^-22 relative error (PTX ISA, "ex2"); subnormal x and results become 0.
__device__ __forceinline__ float ex2_approx(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// 1 / x within 1 unit in the last place.
__device__ __forceinline__ float rcp_approx(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// x y + z, rounded once; subnormal operands and results become 0.
__device__ __forceinline__ float fma_ftz(float x, float y, float z) {
    float value;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(x), "f"(y), "f"(z));
    return value;
}

// The same, clamped to 0 .. 1; NaN becomes 0.
__device__ __forceinline__ float fma_ftz_sat(float x, float y, float z) {
    float value;
    asm("fma.rn.ftz.sat.f32 %0, %1, %2, %3;" : "=f"(value) : "f"(x), "f"(y), "f"(z));
    return value;
}

__device__ __forceinline__ void st_shared_u16(uint32_t address, uint16_t value) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(value) : "memory");
}

__device__ __forceinline__ void st_shared_u8(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_f32(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Writes two floats at the same shared-memory offset in CTA `cta_rank` of the cluster, and then completes 8 bytes on the
// barrier at the offset of `barrier` there. Nothing waits for it here: no membar.
__device__ __forceinline__ void st_async_v2_f32(uint32_t address, uint32_t barrier, uint32_t cta_rank,
                                                float x, float y) {
    asm volatile(
        "{\n"
        ".reg .b32 remote, signal;\n"
        "mapa.shared::cluster.u32 remote, %0, %2;\n"
        "mapa.shared::cluster.u32 signal, %1, %2;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [signal];\n"
        "}" ::"r"(address),
        "r"(barrier), "r"(cta_rank), "f"(x), "f"(y)
        : "memory");
}

// Raises a float32 in global memory to `value`, by integer comparison: right for anything not negative, with any NaN
// above every number, over whatever the memory held that was negative or -inf.
__device__ __forceinline__ void red_max_float(float* address, float value) {
    asm volatile("red.relaxed.gpu.global.max.s32 [%0], %1;" ::"l"(address), "r"(__float_as_int(value))
                 : "memory");
}
