// mbarrier instructions. One function is one instruction, named by its mnemonic (PTX ISA, "mbarrier").
// A barrier is named by its 32-bit shared-memory address.
#pragma once

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes mbarrier_init visible to the async proxy and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives on the barrier at the same shared-memory offset in CTA `cta_rank` of the cluster. It releases at CTA scope:
// it tells the other CTA only that reads are done (the products have been waited for). Cluster scope here costs a
// membar every time and was measured at half the speed of the whole kernel.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier, uint32_t cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cta.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(cta_rank)
        : "memory");
}

// One arrival, and `bytes` more to come from TMA before the phase can end.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(bytes)
                 : "memory");
}

// Spins until the phase of the given parity has completed. A fresh barrier passes parity 1 at once.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// The two that carry ordinary shared-memory writes from one CTA of a cluster to another. They cost a membar, and an
// emptied L1 cache (CCTL.IVALL) at the waiter: once a tile, never in the main loop.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t barrier, uint32_t cta_rank) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n"
        "}" ::"r"(barrier),
        "r"(cta_rank)
        : "memory");
}

__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "WAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\n"
        "bra WAIT;\n"
        "DONE:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// The address in the cluster's window of what lies at the same shared-memory offset in CTA `cta_rank`, and an arrival there.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t cta_rank) {
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(cta_rank));
    return address;
}
__device__ __forceinline__ void mbarrier_arrive_release_at(uint32_t cluster_address) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(cluster_address)
                 : "memory");
}
