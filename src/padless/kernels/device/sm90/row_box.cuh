// How many rows of A one copy, a box, brings. A tile is multiplied in m64s, but rows that are not its group's need
// not be loaded: they take bandwidth, and those past the last row of all take TMA longer than rows that exist,
// since it writes zeros for them (with 8 rows in all a call took 27% longer by boxes of 64 than by boxes of 8). So a box is no
// taller than all rows need, in steps of 8 (1024 bytes, a group of the swizzle), and where groups are small a tile of the
// FP8_BLOCK kernel takes as many boxes of 16 as its rows need. `row_box` of maps.py is the host's side.
#pragma once

constexpr int FEW_ROWS = 48;  // a group, on average, at most
constexpr int FEW_ROWS_BOX = 16;

__device__ __forceinline__ int row_box(int m) {
    return m < 64 ? (m + 7) / 8 * 8 : 64;
}

__device__ __forceinline__ int row_box(int m, int num_groups) {
    const int box = row_box(m);
    return box > FEW_ROWS_BOX && m <= FEW_ROWS * num_groups ? FEW_ROWS_BOX : box;
}

// The first THREADS threads of the CTA, before a barrier at which all who multiply wait: clears rows that a first box of `box`
// rows does not bring, of the ROWS rows of 128 bytes that a stage has, or of the first 64 if there are fewer in all. `a`: of
// all stages. Whoever loads more than one box an m64 has to wait for that, too; the first brings none that are cleared.
template <int STAGES, int ROWS, int THREADS>
__device__ __forceinline__ void clear_missing_rows(uint8_t* a, int box, int m) {
    if (box == 64) return;
    const int end = m < 64 ? 64 * 128 : ROWS * 128;
#pragma unroll 1  // unrolled, it is 4 KB of instructions between the kernel's beginning and the rest
    for (int stage = 0; stage < STAGES; ++stage) {
        for (int at = box * 128 + threadIdx.x * 16; at < end; at += THREADS * 16)
            *reinterpret_cast<uint4*>(a + stage * ROWS * 128 + at) = uint4{0, 0, 0, 0};
    }
    fence_proxy_async_shared();  // the tensor core reads them
}
