// Accesses of global memory by which the CTAs of a launch tell each other something, at the scope of the device (PTX ISA,
// "Memory consistency model"). A relaxed access says nothing about any other word.
#pragma once

__device__ __forceinline__ uint32_t ld_relaxed_gpu(const uint32_t* address) {
    uint32_t word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
    return word;
}

// Four words, each of them an access of its own.
__device__ __forceinline__ void ld_relaxed_gpu_v4(const uint32_t* address, uint32_t (&words)[4]) {
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(address)
                 : "memory");
}

__device__ __forceinline__ void st_relaxed_gpu(uint32_t* address, uint32_t word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
}

__device__ __forceinline__ uint32_t atom_add_relaxed_gpu(uint32_t* address, uint32_t value) {
    uint32_t before;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(address), "r"(value)
                 : "memory");
    return before;
}

__device__ __forceinline__ void fence_acq_rel_gpu() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
