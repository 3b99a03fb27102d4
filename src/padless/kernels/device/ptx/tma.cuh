// The bulk copy engine (TMA): tiled tensor copies (PTX ISA, "cp.async.bulk.tensor").
// Coordinates are innermost first. Elements outside the tensor are read as zero and are not written.
#pragma once

// The 128 bytes made by cuTensorMapEncodeTiled; a kernel takes it as `const __grid_constant__`.
struct alignas(64) TensorMap {
    uint64_t opaque[16];
};

__device__ __forceinline__ void prefetch_tensormap(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void tma_load_1d(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                            int c0) {
    asm volatile(
        "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];" ::
            "r"(destination),
        "l"(&map), "r"(barrier), "r"(c0)
        : "memory");
}

__device__ __forceinline__ void tma_load_2d(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                            int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], "
        "[%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_load_3d(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                            int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
        "[%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void tma_load_4d(const TensorMap& map, uint32_t destination, uint32_t barrier,
                                            int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
        "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// Fetches a box into L2 only. Nothing waits for it.
__device__ __forceinline__ void tma_prefetch_2d(const TensorMap& map, int c0, int c1) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(c0),
                 "r"(c1)
                 : "memory");
}

__device__ __forceinline__ void tma_prefetch_3d(const TensorMap& map, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];" ::"l"(&map), "r"(c0),
                 "r"(c1), "r"(c2)
                 : "memory");
}

// Writes the box to the same shared-memory offset of every CTA in `cta_mask`, and completes its bytes on the
// barrier at the same offset in each of them.
__device__ __forceinline__ void tma_load_2d_multicast(const TensorMap& map, uint32_t destination,
                                                      uint32_t barrier, int c0, int c1, uint16_t cta_mask) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%3, %4}], [%2], %5;" ::"r"(destination),
        "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "h"(cta_mask)
        : "memory");
}

__device__ __forceinline__ void tma_store_2d(const TensorMap& map, uint32_t source, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1)
        : "memory");
}

__device__ __forceinline__ void tma_store_3d(const TensorMap& map, uint32_t source, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

// The same, of what is not read again soon: L2 drops it before all else.
__device__ __forceinline__ void tma_store_3d_evict_first(const TensorMap& map, uint32_t source, int c0,
                                                         int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], [%1], %5;" ::
            "l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "l"(0x12F0000000000000)
        : "memory");
}

// Adds the box to what is in global memory, in the element type of the map.
__device__ __forceinline__ void tma_reduce_add_3d(const TensorMap& map, uint32_t source, int c0, int c1,
                                                  int c2) {
    asm volatile(
        "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::
            "l"(&map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap& map, uint32_t source, int c0, int c1, int c2,
                                             int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
            &map),
        "r"(source), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// Closes the bulk group of the stores this thread has issued.
__device__ __forceinline__ void cp_async_bulk_commit_group() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until this thread's stores have read their shared memory (it may be overwritten then).
__device__ __forceinline__ void cp_async_bulk_wait_group_read_all() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// The same, but for the PENDING last groups.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until this thread's stores are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's ordinary shared-memory writes before later accesses by the copy engine and the tensor core.
__device__ __forceinline__ void fence_proxy_async_shared() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
