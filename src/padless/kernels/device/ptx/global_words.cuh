// Stores of untyped words to global memory.
#pragma once

__device__ __forceinline__ void st_global_b32(void* address, uint32_t word) {
    asm volatile("st.global.b32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void st_global_v4_b32(void* address, const uint32_t (&words)[4]) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
}
