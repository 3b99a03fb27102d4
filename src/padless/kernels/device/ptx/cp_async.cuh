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

// Copies 4 bytes, or zeros where `count` is 0.
__device__ __forceinline__ void cp_async_4_or_zeros(uint32_t to, const void* from, int count) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}

// Copies 16 bytes, of which the first `count` are read (0 or 16 here) and the others are zeros. `from`: a multiple of 16.
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t to, const void* from, int count) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(count) : "memory");
}

// This thread's copies since the last such call are a group, also where there are none.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when all of this thread's groups but the last PENDING are complete.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
