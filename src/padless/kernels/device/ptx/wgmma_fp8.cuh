// wgmma: warpgroup matrix multiply, either FP8 type on either side -> float32, m64nNk32, operands in shared memory (PTX
// ISA, "wgmma.mma_async"). Accumulators as in wgmma.cuh; the products replace what was in them.
#pragma once

// clang-format off
#define PADLESS_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PADLESS_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PADLESS_NAMES_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PADLESS_INOUT_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PADLESS_INOUT_16(d, i) PADLESS_INOUT_8(d, i), PADLESS_INOUT_8(d, i + 8)
#define PADLESS_INOUT_32(d, i) PADLESS_INOUT_16(d, i), PADLESS_INOUT_16(d, i + 16)
#define PADLESS_WGMMA_32(TYPES)                                                                                    \
    asm volatile(                                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                                                \
        "wgmma.mma_async.sync.aligned.m64n32k32.f32." TYPES " {" PADLESS_NAMES_16 "}, %16, %17, p, 1, 1;\n}"       \
        : PADLESS_INOUT_16(d, 0)                                                                                   \
        : "l"(descriptor_a), "l"(descriptor_b))
#define PADLESS_WGMMA_64(TYPES)                                                                                    \
    asm volatile(                                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                                                \
        "wgmma.mma_async.sync.aligned.m64n64k32.f32." TYPES " {" PADLESS_NAMES_0 "}, %32, %33, p, 1, 1;\n}"        \
        : PADLESS_INOUT_32(d, 0)                                                                                   \
        : "l"(descriptor_a), "l"(descriptor_b))
#define PADLESS_WGMMA_128(TYPES)                                                                                   \
    asm volatile(                                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\n"                                                                \
        "wgmma.mma_async.sync.aligned.m64n128k32.f32." TYPES " {" PADLESS_NAMES_0 ", " PADLESS_NAMES_1             \
        "}, %64, %65, p, 1, 1;\n}"                                                                                 \
        : PADLESS_INOUT_32(d, 0), PADLESS_INOUT_32(d, 32)                                                          \
        : "l"(descriptor_a), "l"(descriptor_b))
// clang-format on

template <int N, bool A_E5M2, bool B_E5M2>
__device__ __forceinline__ void wgmma_m64k32_fp8(float (&d)[N / 2], uint64_t descriptor_a,
                                                 uint64_t descriptor_b) {
    static_assert(N == 32 || N == 64 || N == 128, "columns");
    if constexpr (N == 32) {
        if constexpr (A_E5M2 && B_E5M2)
            PADLESS_WGMMA_32("e5m2.e5m2");
        else if constexpr (A_E5M2)
            PADLESS_WGMMA_32("e5m2.e4m3");
        else if constexpr (B_E5M2)
            PADLESS_WGMMA_32("e4m3.e5m2");
        else
            PADLESS_WGMMA_32("e4m3.e4m3");
    } else if constexpr (N == 64) {
        if constexpr (A_E5M2 && B_E5M2)
            PADLESS_WGMMA_64("e5m2.e5m2");
        else if constexpr (A_E5M2)
            PADLESS_WGMMA_64("e5m2.e4m3");
        else if constexpr (B_E5M2)
            PADLESS_WGMMA_64("e4m3.e5m2");
        else
            PADLESS_WGMMA_64("e4m3.e4m3");
    } else {
        if constexpr (A_E5M2 && B_E5M2)
            PADLESS_WGMMA_128("e5m2.e5m2");
        else if constexpr (A_E5M2)
            PADLESS_WGMMA_128("e5m2.e4m3");
        else if constexpr (B_E5M2)
            PADLESS_WGMMA_128("e4m3.e5m2");
        else
            PADLESS_WGMMA_128("e4m3.e4m3");
    }
}

#undef PADLESS_WGMMA_128
#undef PADLESS_WGMMA_64
#undef PADLESS_WGMMA_32
#undef PADLESS_INOUT_32
#undef PADLESS_INOUT_16
#undef PADLESS_INOUT_8
#undef PADLESS_NAMES_1
#undef PADLESS_NAMES_0
#undef PADLESS_NAMES_16
