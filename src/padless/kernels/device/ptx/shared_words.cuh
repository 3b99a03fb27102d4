// Shared-memory loads and stores of untyped words.
#pragma once

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

// `memory`: what other threads wrote before a barrier may not be read before it.
__device__ __forceinline__ void ld_shared_v2_b32(uint32_t address, uint32_t& x, uint32_t& y) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

__device__ __forceinline__ void st_shared_v2_b32(uint32_t address, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v4_b32(uint32_t address, uint32_t x, uint32_t y, uint32_t z,
                                                 uint32_t w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
