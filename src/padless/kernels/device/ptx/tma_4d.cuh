// Tensor copies of four dimensions (PTX ISA, "cp.async.bulk.tensor" and "cp.async.bulk.prefetch.tensor").
#pragma once

__device__ __forceinline__ void tma_prefetch_4d(const TensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
                 "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

// What is read once: L2 drops it before all else.
__device__ __forceinline__ void tma_load_4d_evict_first(const TensorMap& map, uint32_t destination,
                                                        uint32_t barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(EVICT_FIRST)
        : "memory");
}
