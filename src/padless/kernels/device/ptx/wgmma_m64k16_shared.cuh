// wgmma: warpgroup matrix multiply, bf16 x bf16 -> float32, m64nNk16, both operands in shared memory (PTX ISA, "wgmma.mma_async").
// Accumulators as in wgmma.cuh. An operand is K-major, or MN-major where its flag says so (the instruction's imm-trans). They may
// not be touched between the instruction and wgmma_wait_group.
#pragma once

// clang-format off
#define PADLESS_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PADLESS_NAMES_1 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PADLESS_NAMES_2 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PADLESS_NAMES_3 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PADLESS_INOUT_8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define PADLESS_INOUT_32(d, i) PADLESS_INOUT_8(d, i), PADLESS_INOUT_8(d, i + 8), PADLESS_INOUT_8(d, i + 16), PADLESS_INOUT_8(d, i + 24)
#define PADLESS_INOUT_64(d, i) PADLESS_INOUT_32(d, i), PADLESS_INOUT_32(d, i + 32)
#define PADLESS_WGMMA(N, NAMES, A, B, P, A_MN, B_MN, ...)                                                           \
    asm volatile(                                                                                                  \
        "{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                                             \
        "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" NAMES "}, " A ", " B ", p, 1, 1, " A_MN ", " B_MN ";\n}" \
        : __VA_ARGS__                                                                                              \
        : "l"(descriptor_a), "l"(descriptor_b), "r"(accumulate), "n"(int(A_IS_MN)), "n"(int(B_IS_MN)))

template <int N, bool A_IS_MN, bool B_IS_MN>
__device__ __forceinline__ void wgmma_m64k16_shared(float (&d)[N / 2], uint64_t descriptor_a, uint64_t descriptor_b, int accumulate) {
    static_assert(N == 128 || N == 256, "columns");
    if constexpr (N == 128)
        PADLESS_WGMMA("128", PADLESS_NAMES_0 ", " PADLESS_NAMES_1, "%64", "%65", "%66", "%67", "%68", PADLESS_INOUT_64(d, 0));
    else
        PADLESS_WGMMA("256", PADLESS_NAMES_0 ", " PADLESS_NAMES_1 ", " PADLESS_NAMES_2 ", " PADLESS_NAMES_3, "%128", "%129", "%130", "%131", "%132", PADLESS_INOUT_64(d, 0), PADLESS_INOUT_64(d, 64));
}

#undef PADLESS_WGMMA
#undef PADLESS_INOUT_64
#undef PADLESS_INOUT_32
#undef PADLESS_INOUT_8
#undef PADLESS_NAMES_0
#undef PADLESS_NAMES_1
#undef PADLESS_NAMES_2
#undef PADLESS_NAMES_3
// clang-format on
