// wgmma of e4m3 with any multiple of 8 up to 152 as N (device/ptx/wgmma.cuh has those of the other kernels). Accumulators as there.
#pragma once

// clang-format off
#define PADLESS_NAMES_0 "%0, %1, %2, %3"
#define PADLESS_NAMES_1 PADLESS_NAMES_0 ", %4, %5, %6, %7"
#define PADLESS_NAMES_2 PADLESS_NAMES_1 ", %8, %9, %10, %11"
#define PADLESS_NAMES_3 PADLESS_NAMES_2 ", %12, %13, %14, %15"
#define PADLESS_NAMES_4 PADLESS_NAMES_3 ", %16, %17, %18, %19"
#define PADLESS_NAMES_5 PADLESS_NAMES_4 ", %20, %21, %22, %23"
#define PADLESS_NAMES_6 PADLESS_NAMES_5 ", %24, %25, %26, %27"
#define PADLESS_NAMES_7 PADLESS_NAMES_6 ", %28, %29, %30, %31"
#define PADLESS_NAMES_8 PADLESS_NAMES_7 ", %32, %33, %34, %35"
#define PADLESS_NAMES_9 PADLESS_NAMES_8 ", %36, %37, %38, %39"
#define PADLESS_NAMES_10 PADLESS_NAMES_9 ", %40, %41, %42, %43"
#define PADLESS_NAMES_11 PADLESS_NAMES_10 ", %44, %45, %46, %47"
#define PADLESS_NAMES_12 PADLESS_NAMES_11 ", %48, %49, %50, %51"
#define PADLESS_NAMES_13 PADLESS_NAMES_12 ", %52, %53, %54, %55"
#define PADLESS_NAMES_14 PADLESS_NAMES_13 ", %56, %57, %58, %59"
#define PADLESS_NAMES_15 PADLESS_NAMES_14 ", %60, %61, %62, %63"
#define PADLESS_NAMES_16 PADLESS_NAMES_15 ", %64, %65, %66, %67"
#define PADLESS_NAMES_17 PADLESS_NAMES_16 ", %68, %69, %70, %71"
#define PADLESS_NAMES_18 PADLESS_NAMES_17 ", %72, %73, %74, %75"
#define PADLESS_INOUT_0 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define PADLESS_INOUT_1 PADLESS_INOUT_0, "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define PADLESS_INOUT_2 PADLESS_INOUT_1, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define PADLESS_INOUT_3 PADLESS_INOUT_2, "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define PADLESS_INOUT_4 PADLESS_INOUT_3, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19])
#define PADLESS_INOUT_5 PADLESS_INOUT_4, "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
#define PADLESS_INOUT_6 PADLESS_INOUT_5, "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27])
#define PADLESS_INOUT_7 PADLESS_INOUT_6, "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define PADLESS_INOUT_8 PADLESS_INOUT_7, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35])
#define PADLESS_INOUT_9 PADLESS_INOUT_8, "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39])
#define PADLESS_INOUT_10 PADLESS_INOUT_9, "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43])
#define PADLESS_INOUT_11 PADLESS_INOUT_10, "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
#define PADLESS_INOUT_12 PADLESS_INOUT_11, "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51])
#define PADLESS_INOUT_13 PADLESS_INOUT_12, "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55])
#define PADLESS_INOUT_14 PADLESS_INOUT_13, "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59])
#define PADLESS_INOUT_15 PADLESS_INOUT_14, "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define PADLESS_INOUT_16 PADLESS_INOUT_15, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67])
#define PADLESS_INOUT_17 PADLESS_INOUT_16, "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71])
#define PADLESS_INOUT_18 PADLESS_INOUT_17, "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75])
#define PADLESS_WGMMA(COLUMNS, I, A, B, P)                                                                         \
    template <>                                                                                                    \
    __device__ __forceinline__ void wgmma_m64k32_e4m3_of<COLUMNS>(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int accumulate) { \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " P ", 0;\n"                                               \
                     "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k32.f32.e4m3.e4m3 {" PADLESS_NAMES_##I "}, " A ", " B ", p, 1, 1;\n}" \
                     : PADLESS_INOUT_##I : "l"(a), "l"(b), "r"(accumulate));                                       \
    }

template <int COLUMNS>
__device__ __forceinline__ void wgmma_m64k32_e4m3_of(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int accumulate);

PADLESS_WGMMA(8, 0, "%4", "%5", "%6")
PADLESS_WGMMA(16, 1, "%8", "%9", "%10")
PADLESS_WGMMA(24, 2, "%12", "%13", "%14")
PADLESS_WGMMA(32, 3, "%16", "%17", "%18")
PADLESS_WGMMA(40, 4, "%20", "%21", "%22")
PADLESS_WGMMA(48, 5, "%24", "%25", "%26")
PADLESS_WGMMA(56, 6, "%28", "%29", "%30")
PADLESS_WGMMA(64, 7, "%32", "%33", "%34")
PADLESS_WGMMA(72, 8, "%36", "%37", "%38")
PADLESS_WGMMA(80, 9, "%40", "%41", "%42")
PADLESS_WGMMA(88, 10, "%44", "%45", "%46")
PADLESS_WGMMA(96, 11, "%48", "%49", "%50")
PADLESS_WGMMA(104, 12, "%52", "%53", "%54")
PADLESS_WGMMA(112, 13, "%56", "%57", "%58")
PADLESS_WGMMA(120, 14, "%60", "%61", "%62")
PADLESS_WGMMA(128, 15, "%64", "%65", "%66")
PADLESS_WGMMA(136, 16, "%68", "%69", "%70")
PADLESS_WGMMA(144, 17, "%72", "%73", "%74")
PADLESS_WGMMA(152, 18, "%76", "%77", "%78")

#undef PADLESS_WGMMA
#undef PADLESS_INOUT_18
#undef PADLESS_NAMES_18
#undef PADLESS_INOUT_17
#undef PADLESS_NAMES_17
#undef PADLESS_INOUT_16
#undef PADLESS_NAMES_16
#undef PADLESS_INOUT_15
#undef PADLESS_NAMES_15
#undef PADLESS_INOUT_14
#undef PADLESS_NAMES_14
#undef PADLESS_INOUT_13
#undef PADLESS_NAMES_13
#undef PADLESS_INOUT_12
#undef PADLESS_NAMES_12
#undef PADLESS_INOUT_11
#undef PADLESS_NAMES_11
#undef PADLESS_INOUT_10
#undef PADLESS_NAMES_10
#undef PADLESS_INOUT_9
#undef PADLESS_NAMES_9
#undef PADLESS_INOUT_8
#undef PADLESS_NAMES_8
#undef PADLESS_INOUT_7
#undef PADLESS_NAMES_7
#undef PADLESS_INOUT_6
#undef PADLESS_NAMES_6
#undef PADLESS_INOUT_5
#undef PADLESS_NAMES_5
#undef PADLESS_INOUT_4
#undef PADLESS_NAMES_4
#undef PADLESS_INOUT_3
#undef PADLESS_NAMES_3
#undef PADLESS_INOUT_2
#undef PADLESS_NAMES_2
#undef PADLESS_INOUT_1
#undef PADLESS_NAMES_1
#undef PADLESS_INOUT_0
#undef PADLESS_NAMES_0
// clang-format on
