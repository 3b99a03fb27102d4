// Tensor copies of five dimensions (PTX ISA, "cp.async.bulk.tensor" and "cp.async.bulk.prefetch.tensor").
#pragma once

__device__ __forceinline__ void tma_load_5d(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                            int c0, int c1, int c2, int c3, int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

// Fetches a box into L2 only. Nothing waits for it.
__device__ __forceinline__ void tma_prefetch_5d(const TensorMap& map, int c0, int c1, int c2, int c3,
                                                int c4) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(&map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
