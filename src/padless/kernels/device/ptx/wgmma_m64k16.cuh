// wgmma: warpgroup matrix multiply, bf16 x bf16 or f16 x f16 -> float32, m64nNk16, A from registers (PTX ISA, "wgmma.mma_async").
// Accumulators as in wgmma.cuh: d[4 i + j] is row 16 * warp + lane / 4 + 8 * (j / 2), column 8 * i + 2 * (lane % 4) +
// j % 2. Register a[r] holds two neighbouring columns of A, the lower one in its low half: of row 16 * warp + lane / 4 +
// 8 * (r % 2), columns 2 * (lane % 4) + 8 * (r / 2) and the next. Neither may be touched between the instruction and
// wgmma_wait_group.
#pragma once

// clang-format off
#define PADLESS_NAMES_8 "%0, %1, %2, %3"
#define PADLESS_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PADLESS_NAMES_32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PADLESS_NAMES_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PADLESS_NAMES_128 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PADLESS_INOUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PADLESS_INOUT_8(d, i) PADLESS_INOUT_4(d, i), PADLESS_INOUT_4(d, i + 4)
#define PADLESS_INOUT_16(d, i) PADLESS_INOUT_8(d, i), PADLESS_INOUT_8(d, i + 8)
#define PADLESS_INOUT_32(d, i) PADLESS_INOUT_16(d, i), PADLESS_INOUT_16(d, i + 16)
#define PADLESS_INOUT_64(d, i) PADLESS_INOUT_32(d, i), PADLESS_INOUT_32(d, i + 32)
#define PADLESS_WGMMA(N, TYPE, NAMES, A, B, P, INOUT)                                                                   \
    asm volatile(                                                                                                 \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                            \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" NAMES "}, {" A "}, " B ", p, 1, 1, 0;\n}"      \
        : INOUT                                                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b), "r"(accumulate))

template <int N, bool IS_F16>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate);

template <>
__device__ __forceinline__ void wgmma_m64k16<8, false>(float (&d)[4], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("8", "bf16", PADLESS_NAMES_8, "%4, %5, %6, %7", "%8", "%9", PADLESS_INOUT_4(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<8, true>(float (&d)[4], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("8", "f16", PADLESS_NAMES_8, "%4, %5, %6, %7", "%8", "%9", PADLESS_INOUT_4(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<16, false>(float (&d)[8], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("16", "bf16", PADLESS_NAMES_16, "%8, %9, %10, %11", "%12", "%13", PADLESS_INOUT_8(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<16, true>(float (&d)[8], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("16", "f16", PADLESS_NAMES_16, "%8, %9, %10, %11", "%12", "%13", PADLESS_INOUT_8(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<32, false>(float (&d)[16], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("32", "bf16", PADLESS_NAMES_32, "%16, %17, %18, %19", "%20", "%21", PADLESS_INOUT_16(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<32, true>(float (&d)[16], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("32", "f16", PADLESS_NAMES_32, "%16, %17, %18, %19", "%20", "%21", PADLESS_INOUT_16(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<64, false>(float (&d)[32], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("64", "bf16", PADLESS_NAMES_64, "%32, %33, %34, %35", "%36", "%37", PADLESS_INOUT_32(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<64, true>(float (&d)[32], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("64", "f16", PADLESS_NAMES_64, "%32, %33, %34, %35", "%36", "%37", PADLESS_INOUT_32(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<128, false>(float (&d)[64], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("128", "bf16", PADLESS_NAMES_128, "%64, %65, %66, %67", "%68", "%69", PADLESS_INOUT_64(d, 0));
}

template <>
__device__ __forceinline__ void wgmma_m64k16<128, true>(float (&d)[64], const uint32_t (&a)[4], uint64_t descriptor_b, int accumulate) {
    PADLESS_WGMMA("128", "f16", PADLESS_NAMES_128, "%64, %65, %66, %67", "%68", "%69", PADLESS_INOUT_64(d, 0));
}

#undef PADLESS_WGMMA
#undef PADLESS_INOUT_64
#undef PADLESS_INOUT_32
#undef PADLESS_INOUT_16
#undef PADLESS_INOUT_8
#undef PADLESS_INOUT_4
#undef PADLESS_NAMES_128
#undef PADLESS_NAMES_64
#undef PADLESS_NAMES_32
#undef PADLESS_NAMES_16
#undef PADLESS_NAMES_8
// clang-format on
