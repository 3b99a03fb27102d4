// Shared-memory loads and stores of four floats. `memory`: what other threads wrote before a barrier may not be read
// before it.
#pragma once

__device__ __forceinline__ void ld_shared_v4_f32(uint32_t address, float (&v)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}
