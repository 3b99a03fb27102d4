// tcgen05: Blackwell's tensor core and tensor memory (PTX ISA, "Tensor Core 5th Generation"). One function is one
// instruction, named by its mnemonic; CTA_GROUP is its .cta_group, the same for all of a kernel.
//
// A tensor-memory address has the lane in bits 16-31 and the column in bits 0-15. A CTA has 128 lanes of 512 columns of
// 32 bits. alloc, dealloc, relinquish, ld and wait are executed by whole warps; cp, mma and commit by one thread, in
// whose order they run. With CTA_GROUP = 2 that thread is one of the even CTA and both CTAs' memories are used, each at
// the same addresses.
#pragma once

// Writes the address of COLUMNS columns (a power of two, 32 to 512) to shared memory; waits until so many are free. With
// CTA_GROUP = 2 a warp of each of the two CTAs.
template <int CTA_GROUP, int COLUMNS>
__device__ __forceinline__ void tcgen05_alloc(uint32_t shared_destination) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_destination),
            "n"(COLUMNS)
            : "memory");
    else
        asm volatile(
            "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared_destination),
            "n"(COLUMNS)
            : "memory");
}

// No further alloc by this CTA.
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
    if constexpr (CTA_GROUP == 1)
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    else
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
}

template <int CTA_GROUP, int COLUMNS>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address) {
    if constexpr (CTA_GROUP == 1)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
    else
        asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address), "n"(COLUMNS));
}

// One 512-byte atom of scales, 32 rows of 16 bytes, to four columns of all four quarters of the lanes: row i to lanes i,
// i + 32, i + 64 and i + 96. `descriptor`: scale_atom_descriptor (device/sm100/descriptors.cuh).
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_cp_32x128b_warpx4(uint32_t address, uint64_t descriptor) {
    if constexpr (CTA_GROUP == 1)
        asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor)
                     : "memory");
    else
        asm volatile("tcgen05.cp.cta_group::2.32x128b.warpx4 [%0], %1;" ::"r"(address), "l"(descriptor)
                     : "memory");
}

// D = A * B, or D += A * B where `accumulate`: 8-bit elements with one UE8M0 scale to 32 of K; K = 32.
// `shape`: mxf8f6f4_shape (device/sm100/descriptors.cuh).
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_mma_mxf8f6f4_block32(uint32_t d, uint64_t a, uint64_t b,
                                                             uint32_t shape, uint32_t sfa, uint32_t sfb,
                                                             bool accumulate) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
    else
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
}

// The same for E2M1 elements, two to a byte, with one UE4M3 scale to 16 of K (block16) or one UE8M0 scale to 32
// (block32); K = 64. `shape`: mxf4nvf4_shape (device/sm100/descriptors.cuh).
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_block16(uint32_t d, uint64_t a, uint64_t b,
                                                             uint32_t shape, uint32_t sfa, uint32_t sfb,
                                                             bool accumulate) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
    else
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
}

template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_mma_mxf4nvf4_block32(uint32_t d, uint64_t a, uint64_t b,
                                                             uint32_t shape, uint32_t sfa, uint32_t sfb,
                                                             bool accumulate) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
    else
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %6, 0;\n"
            "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
}

// 8-bit elements without scales; K = 32. `shape`: f8f6f4_shape (device/sm100/descriptors.cuh).
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_mma_f8f6f4(uint32_t d, uint64_t a, uint64_t b, uint32_t shape,
                                                   bool accumulate) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %4, 0;\n"
            "tcgen05.mma.cta_group::1.kind::f8f6f4 [%0], %1, %2, %3, p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
    else
        asm volatile(
            "{\n"
            ".reg .pred p;\n"
            "setp.ne.b32 p, %4, 0;\n"
            "tcgen05.mma.cta_group::2.kind::f8f6f4 [%0], %1, %2, %3, p;\n"
            "}" ::"r"(d),
            "l"(a), "l"(b), "r"(shape), "r"(static_cast<uint32_t>(accumulate))
            : "memory");
}

// One arrival on the barrier when every cp and mma that this thread has issued is complete.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
                 : "memory");
}

// The same, on the barrier at the same shared-memory offset of every CTA in `cta_mask`.
template <int CTA_GROUP>
__device__ __forceinline__ void tcgen05_commit_multicast(uint32_t barrier, uint16_t cta_mask) {
    if constexpr (CTA_GROUP == 1)
        asm volatile(
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], "
            "%1;" ::"r"(barrier),
            "h"(cta_mask)
            : "memory");
    else
        asm volatile(
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], "
            "%1;" ::"r"(barrier),
            "h"(cta_mask)
            : "memory");
}

// Orders this thread's tcgen05 accesses before whatever thread synchronisation follows, and those that follow after the
// synchronisation before it. Neither waits for anything.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}

__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// Waits for this warp's tcgen05_ld; their registers may not be touched before.
__device__ __forceinline__ void tcgen05_wait_ld() {
    asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

// The same for this warp's tcgen05_st.
__device__ __forceinline__ void tcgen05_wait_st() {
    asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

// COLUMNS columns of the warp's own 32 lanes, one lane to a thread: r[i] is column i. A warp reaches the lanes of its
// quarter, 32 * (warp % 4) and up, alone; the lane of `address` is the first of them.
// clang-format off
#define PADLESS_OUT_8(r, i) "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3]), "=r"(r[i + 4]), "=r"(r[i + 5]), "=r"(r[i + 6]), "=r"(r[i + 7])
#define PADLESS_OUT_32(r, i) PADLESS_OUT_8(r, i), PADLESS_OUT_8(r, i + 8), PADLESS_OUT_8(r, i + 16), PADLESS_OUT_8(r, i + 24)
#define PADLESS_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PADLESS_NAMES_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PADLESS_NAMES_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PADLESS_NAMES_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

template <int COLUMNS>
__device__ __forceinline__ void tcgen05_ld_32x32b(uint32_t (&r)[COLUMNS], uint32_t address);

template <>
__device__ __forceinline__ void tcgen05_ld_32x32b<8>(uint32_t (&r)[8], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];" : PADLESS_OUT_8(r, 0) : "r"(address));
}

template <>
__device__ __forceinline__ void tcgen05_ld_32x32b<32>(uint32_t (&r)[32], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" PADLESS_NAMES_0 "}, [%32];" : PADLESS_OUT_32(r, 0) : "r"(address));
}

template <>
__device__ __forceinline__ void tcgen05_ld_32x32b<64>(uint32_t (&r)[64], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x64.b32 {" PADLESS_NAMES_0 ", " PADLESS_NAMES_1 "}, [%64];" : PADLESS_OUT_32(r, 0), PADLESS_OUT_32(r, 32) : "r"(address));
}

template <>
__device__ __forceinline__ void tcgen05_ld_32x32b<128>(uint32_t (&r)[128], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x128.b32 {" PADLESS_NAMES_0 ", " PADLESS_NAMES_1 ", " PADLESS_NAMES_2 ", " PADLESS_NAMES_3 "}, [%128];"
                 : PADLESS_OUT_32(r, 0), PADLESS_OUT_32(r, 32), PADLESS_OUT_32(r, 64), PADLESS_OUT_32(r, 96) : "r"(address));
}

// The same 32 columns as floats.
#define PADLESS_OUT_FLOATS_8(r, i) "=f"(r[i]), "=f"(r[i + 1]), "=f"(r[i + 2]), "=f"(r[i + 3]), "=f"(r[i + 4]), "=f"(r[i + 5]), "=f"(r[i + 6]), "=f"(r[i + 7])
__device__ __forceinline__ void tcgen05_ld_32x32b(float (&r)[32], uint32_t address) {
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x32.b32 {" PADLESS_NAMES_0 "}, [%32];" : PADLESS_OUT_FLOATS_8(r, 0), PADLESS_OUT_FLOATS_8(r, 8), PADLESS_OUT_FLOATS_8(r, 16), PADLESS_OUT_FLOATS_8(r, 24) : "r"(address));
}

// The other way: 32 columns.
#define PADLESS_IN_8(r, i) "f"(r[i]), "f"(r[i + 1]), "f"(r[i + 2]), "f"(r[i + 3]), "f"(r[i + 4]), "f"(r[i + 5]), "f"(r[i + 6]), "f"(r[i + 7])
__device__ __forceinline__ void tcgen05_st_32x32b(uint32_t address, const float (&r)[32]) {
    asm volatile("tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], {" PADLESS_NAMES_0 "};" ::PADLESS_IN_8(r, 0), PADLESS_IN_8(r, 8), PADLESS_IN_8(r, 16), PADLESS_IN_8(r, 24), "r"(address) : "memory");
}

#undef PADLESS_IN_8
#undef PADLESS_OUT_32
#undef PADLESS_OUT_FLOATS_8
#undef PADLESS_OUT_8
#undef PADLESS_NAMES_0
#undef PADLESS_NAMES_1
#undef PADLESS_NAMES_2
#undef PADLESS_NAMES_3
// clang-format on

// Keeps the compiler from using what tcgen05_ld left in `value` before the wait that this follows.
__device__ __forceinline__ void pin_loaded(uint32_t& value) {
    asm volatile("" : "+r"(value)::"memory");
}

__device__ __forceinline__ void pin_loaded(float& value) {
    asm volatile("" : "+f"(value)::"memory");
}
