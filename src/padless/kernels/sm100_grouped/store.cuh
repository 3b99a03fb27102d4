// From 32 accumulators of one thread, neighbours along a row or a column of D, to global memory.
#pragma once

constexpr int OUT_BF16 = 0;
constexpr int OUT_F16 = 1;
constexpr int OUT_F32 = 2;

// (M, N), with `ld` elements from one row to the next, or from one column to the next where it is column-major.
struct Output {
    void* data;
    long long ld;
};

template <int OUT>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
    return OUT == OUT_BF16 ? cvt_bf16x2(low, high) : cvt_f16x2(low, high);
}

// r[i] * factor is element (m, n + i) of D, or (m + i, n) where ALONG_M; those with i >= `limit` are not stored.
//
// Where D is contiguous along the run, it goes out in pieces of 32 bytes (WIDE: D and its rows start on 32-byte
// boundaries) or 16; row-major rows always start on a 16-byte boundary, and N ends on one. Elsewhere the lanes of the
// warp hold what is contiguous, and every element is stored by itself.
template <int OUT, bool ALONG_M, bool COLUMN_MAJOR, bool WIDE>
__device__ __forceinline__ void store_run(const Output& d, int m, int n, int limit, const uint32_t (&r)[32],
                                          float factor) {
    constexpr bool CONTIGUOUS = ALONG_M == COLUMN_MAJOR;
    constexpr int BYTES = OUT == OUT_F32 ? 4 : 2;
    constexpr int WORDS = 32 * BYTES / 4;
    const long long at = COLUMN_MAJOR ? n * d.ld + m : m * d.ld + n;
    uint8_t* address = static_cast<uint8_t*>(d.data) + at * BYTES;
    uint32_t words[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        if constexpr (OUT == OUT_F32)
            words[i] = __float_as_uint(__uint_as_float(r[i]) * factor);
        else
            words[i] =
                pack_pair<OUT>(__uint_as_float(r[2 * i]) * factor, __uint_as_float(r[2 * i + 1]) * factor);
    }
    // The rows of a group start anywhere, so a column of it may as well.
    const bool aligned = CONTIGUOUS && (!ALONG_M || reinterpret_cast<uint64_t>(address) % 16 == 0);
    if (WIDE && aligned && limit >= 32 && (!ALONG_M || reinterpret_cast<uint64_t>(address) % 32 == 0)) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 8) {
            const uint32_t eight[8] = {words[i],     words[i + 1], words[i + 2], words[i + 3],
                                       words[i + 4], words[i + 5], words[i + 6], words[i + 7]};
            st_global_no_allocate_v8(address + i * 4, eight);
        }
        return;
    }
    const auto store_element = [&](uint8_t* to, int e) {
        if constexpr (OUT == OUT_F32)
            *reinterpret_cast<uint32_t*>(to) = words[e];
        else
            *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(words[e / 2] >> 16 * (e % 2));
    };
    const long long step = CONTIGUOUS ? BYTES : d.ld * BYTES;
    if (!CONTIGUOUS && limit >= 32) {  // a branch an element costs as much as its store
#pragma unroll
        for (int e = 0; e < 32; ++e, address += step) store_element(address, e);
        return;
    }
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
        const int first = i * 4 / BYTES;  // element
        if (aligned && first + 16 / BYTES <= limit) {
            *reinterpret_cast<uint4*>(address + i * 4) =
                make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
            continue;
        }
        if constexpr (!CONTIGUOUS || ALONG_M) {  // else N ends on a piece: nothing of it exists
#pragma unroll
            for (int e = first; e < first + 16 / BYTES; ++e) {
                if (e >= limit) break;
                store_element(address + e * step, e);
            }
        }
    }
}
