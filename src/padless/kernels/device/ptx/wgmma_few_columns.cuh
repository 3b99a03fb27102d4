// wgmma of few columns: e4m3 x e4m3 -> float32, m64nNk32, N from 8 to 72 (PTX ISA, "wgmma.mma_async"). Accumulators and the
// template are those of wgmma.cuh, which has 64 columns.
#pragma once

// clang-format off
#define PADLESS_INOUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PADLESS_INOUT_8(d, i) PADLESS_INOUT_4(d, i), PADLESS_INOUT_4(d, i + 4)
#define PADLESS_INOUT_16(d, i) PADLESS_INOUT_8(d, i), PADLESS_INOUT_8(d, i + 8)
#define PADLESS_INOUT_32(d, i) PADLESS_INOUT_16(d, i), PADLESS_INOUT_16(d, i + 16)
#define PADLESS_WGMMA(N, NAMES, A, B, P, ...)                                                                      \
    template <>                                                                                                    \
    __device__ __forceinline__ void wgmma_m64k32_e4m3<N>(float (&d)[N / 2], uint64_t descriptor_a,                 \
                                                         uint64_t descriptor_b, int accumulate) {                  \
        asm volatile(                                                                                              \
            "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                         \
            "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" NAMES "}, " A ", " B ", p, 1, 1;\n}"      \
            : __VA_ARGS__                                                                                          \
            : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate));                                              \
    }
#define PADLESS_NAMES_4 "%0, %1, %2, %3"
#define PADLESS_NAMES_8 PADLESS_NAMES_4 ", %4, %5, %6, %7"
#define PADLESS_NAMES_12 PADLESS_NAMES_8 ", %8, %9, %10, %11"
#define PADLESS_NAMES_16 PADLESS_NAMES_12 ", %12, %13, %14, %15"
#define PADLESS_NAMES_20 PADLESS_NAMES_16 ", %16, %17, %18, %19"
#define PADLESS_NAMES_24 PADLESS_NAMES_20 ", %20, %21, %22, %23"
#define PADLESS_NAMES_28 PADLESS_NAMES_24 ", %24, %25, %26, %27"
#define PADLESS_NAMES_36 PADLESS_NAMES_28 ", %28, %29, %30, %31, %32, %33, %34, %35"
PADLESS_WGMMA(8, PADLESS_NAMES_4, "%4", "%5", "%6", PADLESS_INOUT_4(d, 0))
PADLESS_WGMMA(16, PADLESS_NAMES_8, "%8", "%9", "%10", PADLESS_INOUT_8(d, 0))
PADLESS_WGMMA(24, PADLESS_NAMES_12, "%12", "%13", "%14", PADLESS_INOUT_8(d, 0), PADLESS_INOUT_4(d, 8))
PADLESS_WGMMA(32, PADLESS_NAMES_16, "%16", "%17", "%18", PADLESS_INOUT_16(d, 0))
PADLESS_WGMMA(40, PADLESS_NAMES_20, "%20", "%21", "%22", PADLESS_INOUT_16(d, 0), PADLESS_INOUT_4(d, 16))
PADLESS_WGMMA(48, PADLESS_NAMES_24, "%24", "%25", "%26", PADLESS_INOUT_16(d, 0), PADLESS_INOUT_8(d, 16))
PADLESS_WGMMA(56, PADLESS_NAMES_28, "%28", "%29", "%30", PADLESS_INOUT_16(d, 0), PADLESS_INOUT_8(d, 16), PADLESS_INOUT_4(d, 24))
PADLESS_WGMMA(72, PADLESS_NAMES_36, "%36", "%37", "%38", PADLESS_INOUT_32(d, 0), PADLESS_INOUT_4(d, 32))
#undef PADLESS_WGMMA
#undef PADLESS_NAMES_4
#undef PADLESS_NAMES_8
#undef PADLESS_NAMES_12
#undef PADLESS_NAMES_16
#undef PADLESS_NAMES_20
#undef PADLESS_NAMES_24
#undef PADLESS_NAMES_28
#undef PADLESS_NAMES_36
#undef PADLESS_INOUT_32
#undef PADLESS_INOUT_16
#undef PADLESS_INOUT_8
#undef PADLESS_INOUT_4
// clang-format on
