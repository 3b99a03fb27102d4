// Copies with an L2 eviction priority, by one CTA or signalling a barrier of its pair (PTX ISA, "cp.async.bulk.tensor").
#pragma once

// What createpolicy.fractional makes of a whole access: how soon L2 may drop the lines.
constexpr uint64_t L2_EVICT_NORMAL = 0x1000000000000000;
constexpr uint64_t L2_EVICT_FIRST = 0x12F0000000000000;
constexpr uint64_t L2_EVICT_LAST = 0x14F0000000000000;

// CTA_GROUP = 2: `barrier` is a shared::cluster address in either CTA of the pair.
template <int CTA_GROUP>
__device__ __forceinline__ void tma_load_3d_hint(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                 int c0, int c1, int c2, uint64_t policy) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
            ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
            : "memory");
}

template <int CTA_GROUP>
__device__ __forceinline__ void tma_load_4d_hint(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                 int c0, int c1, int c2, int c3, uint64_t policy) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2"
            ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy)
            : "memory");
}

// As tma_load_3d_hint, to the same offset of every CTA in `cta_mask`; for each of them the bytes complete on the barrier at the same
// offset: its own, or with CTA_GROUP = 2 that of the CTA of its pair that has the parity of `barrier`'s.
template <int CTA_GROUP>
__device__ __forceinline__ void tma_load_3d_hint_multicast(const TensorMap& map, uint32_t destination,
                                                           uint32_t barrier, int c0, int c1, int c2,
                                                           uint64_t policy, uint16_t cta_mask) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(cta_mask), "l"(policy)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            ".multicast::cluster.cta_group::2.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(
                destination),
            "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(cta_mask), "l"(policy)
            : "memory");
}

// Before the first use of a tensor map that was written to global memory by ordinary means.
__device__ __forceinline__ void fence_tensormap_acquire(const TensorMap& map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(&map) : "memory");
}
