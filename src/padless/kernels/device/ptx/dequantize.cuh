// Instructions that dequantising needs: shared-memory words, byte selection, FP8 to f16 to bf16, packed multiplication,
// and the transposing matrix store.
#pragma once

__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint32_t ld_shared_u16(uint32_t address) {
    uint16_t value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void ld_shared_v4_u32(uint32_t address, uint32_t& x, uint32_t& y, uint32_t& z,
                                                 uint32_t& w) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x), "=r"(y), "=r"(z), "=r"(w)
                 : "r"(address));
}

__device__ __forceinline__ void ld_shared_f32x2(uint32_t address, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address));
}

__device__ __forceinline__ void st_shared_u32(uint32_t address, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void st_shared_float(uint32_t address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

// Byte i of the result is byte (selector >> 4 i) & 7 of x (0 .. 3) and y (4 .. 7).
__device__ __forceinline__ uint32_t prmt(uint32_t x, uint32_t y, uint32_t selector) {
    uint32_t value;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(x), "r"(y), "r"(selector));
    return value;
}

// Where a masked word is used more than once, shifted: said in C++, the compiler shifts first and masks every copy.
__device__ __forceinline__ uint32_t and_b32(uint32_t x, uint32_t mask) {
    uint32_t value;
    asm("and.b32 %0, %1, %2;" : "=r"(value) : "r"(x), "r"(mask));
    return value;
}

// The bits of x where `mask` has ones, else those of y. (Said in C++, the compiler takes it apart into two masks.)
__device__ __forceinline__ uint32_t lop3_select(uint32_t x, uint32_t y, uint32_t mask) {
    uint32_t value;
    asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(value) : "r"(x), "r"(y), "r"(mask));
    return value;
}

// The two FP8 codes in the low 16 bits, exactly, NaN and Inf included; the low byte becomes the low half.
__device__ __forceinline__ uint32_t cvt_f16x2_e4m3x2(uint32_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    return halves;
}

__device__ __forceinline__ uint32_t cvt_f16x2_e5m2x2(uint32_t codes) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
    return halves;
}

__device__ __forceinline__ float cvt_f32_f16_low(uint32_t halves) {
    float value;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
        : "=f"(value)
        : "r"(halves));
    return value;
}

__device__ __forceinline__ float cvt_f32_f16_high(uint32_t halves) {
    float value;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
        : "=f"(value)
        : "r"(halves));
    return value;
}

// Two products, rounded to nearest even. Subnormal inputs and results count (PTX ISA, "mul", half precision: they
// are supported unless .ftz says otherwise).
__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t x, uint32_t y) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

__device__ __forceinline__ uint32_t mul_f16x2(uint32_t x, uint32_t y) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

// A half of `pair` in both halves. Where the word is multiplied with, next, this is no instruction: a multiplication can take
// a half twice.
__device__ __forceinline__ uint32_t low_half_twice(uint32_t pair) {
    uint32_t both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
        : "=r"(both)
        : "r"(pair));
    return both;
}

__device__ __forceinline__ uint32_t high_half_twice(uint32_t pair) {
    uint32_t both;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {high, high};\n}"
        : "=r"(both)
        : "r"(pair));
    return both;
}

// stmatrix_x4 with the matrices transposed: lane t holds columns t / 4 of rows 2 (t % 4) and the next, of what is stored.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                                  uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

__device__ __forceinline__ void stmatrix_x2_trans(uint32_t address, uint32_t r0, uint32_t r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(r0),
                 "r"(r1)
                 : "memory");
}
