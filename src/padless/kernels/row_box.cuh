// How many rows of A one copy brings. Rows past the last one of all cost the copy engine more than rows that exist: it
// writes zeros for them, and with 8 rows in all a call took 27% longer than with 64. So where there are fewer than 64,
// the box is no taller than they need, in steps of 8 (1024 bytes, a group of the swizzle), and the rest of a stage's
// first 64 rows, the only ones that tiles then have, is zero from the start. `row_box` of tensor_map.py is the host's side.
#pragma once

__device__ __forceinline__ int row_box(int m) {
    return m < 64 ? (m + 7) / 8 * 8 : 64;
}

// The first THREADS threads of the CTA, before a barrier of them all and before anything is loaded: clears the rows that no
// copy will bring. `a`: of all stages, STAGE_BYTES each, rows of 128 bytes.
template <int STAGES, int STAGE_BYTES, int THREADS>
__device__ __forceinline__ void clear_missing_rows(uint8_t* a, int m) {
    if (m >= 64) return;
    const int first = row_box(m) * 128;
#pragma unroll 1  // unrolled, it is 4 KB of instructions between the kernel's beginning and the rest
    for (int stage = 0; stage < STAGES; ++stage) {
        for (int at = first + threadIdx.x * 16; at < 64 * 128; at += THREADS * 16)
            *reinterpret_cast<uint4*>(a + stage * STAGE_BYTES + at) = uint4{0, 0, 0, 0};
    }
    fence_proxy_async_shared();  // the tensor core reads them
}
