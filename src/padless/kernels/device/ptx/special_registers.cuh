// Special registers, read where they are used: what follows from them need not be kept in registers until then.
#pragma once

__device__ __forceinline__ uint32_t read_tid_x() {
    uint32_t tid;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(tid));
    return tid;
}
