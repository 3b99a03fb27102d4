// Arithmetic on the two 16-bit halves of a word (PTX ISA, "max", "fma").
#pragma once

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
