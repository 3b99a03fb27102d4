// Tensor copies of what is read once: L2 drops it before all else (PTX ISA, "cp.async.bulk.tensor", ".L2::cache_hint").
#pragma once

constexpr uint64_t EVICT_FIRST = 0x12F0000000000000;

__device__ __forceinline__ void tma_load_2d_evict_first(const TensorMap& map, uint32_t destination,
                                                        uint32_t barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "l"(EVICT_FIRST)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d_evict_first(const TensorMap& map, uint32_t destination,
                                                        uint32_t barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(EVICT_FIRST)
        : "memory");
}

__device__ __forceinline__ void tma_load_5d_evict_first(const TensorMap& map, uint32_t destination,
                                                        uint32_t barrier, int c0, int c1, int c2, int c3,
                                                        int c4) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
        "[%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(EVICT_FIRST)
        : "memory");
}
