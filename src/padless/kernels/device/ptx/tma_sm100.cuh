// TMA on Blackwell (PTX ISA, "cp.async.bulk.tensor"): loads by a pair of CTAs that signal the barrier of one of them
// (.cta_group::2).
#pragma once

// All forms take a barrier of either CTA of the pair, as a shared::cluster address: pair_even_address gives the even one's.

// The address in the even CTA of the pair of what lies at `address` in this one: bits 24 and up of a shared::cluster
// address are the CTA's rank.
__device__ __forceinline__ uint32_t pair_even_address(uint32_t address) {
    return address & 0xFEFFFFFF;
}

__device__ __forceinline__ void tma_load_2d_pair(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                 int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], "
        "[%1, {%3, %4}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d_pair(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                 int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], "
        "[%1, {%3, %4, %5}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d_pair(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                                 int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// Writes the box to the same offset of every CTA in `cta_mask`; for each of them its bytes complete on the barrier at
// the same offset in the CTA of its pair that has the parity of `barrier`'s.
__device__ __forceinline__ void tma_load_3d_pair_multicast(const TensorMap& map, uint32_t destination,
                                                           uint32_t barrier, int c0, int c1, int c2,
                                                           uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".cta_group::2 [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(cta_mask)
        : "memory");
}

__device__ __forceinline__ void tma_load_2d_pair_multicast(const TensorMap& map, uint32_t destination,
                                                           uint32_t barrier, int c0, int c1,
                                                           uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".cta_group::2 [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "h"(cta_mask)
        : "memory");
}
