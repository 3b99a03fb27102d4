// cp.async: copies of a few bytes from global to shared memory that no register waits for (PTX ISA, "cp.async").
#pragma once

// Copies 4 bytes. `from`: in global memory, a multiple of 4.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// One arrival at the barrier, of those it counts, when this thread's copies so far are complete.
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
