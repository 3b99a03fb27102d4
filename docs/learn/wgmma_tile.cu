// Lesson 2, for sm_90a: one tile of a matrix product by the tensor core of a warpgroup. D (64 x 16) = A (64 x 64) times
// B (16 x 64) transposed: bf16 operands in swizzled shared memory, float32 sums in registers. The text is wgmma_tile.md.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"

constexpr int M = 64, N = 16, K = 64, THREADS = 128;
constexpr int ROW_BYTES = K * 2;  // one row of a tile is one row of the 128-byte swizzle

struct alignas(1024) Shared {  // the swizzle pattern repeats every 1024 bytes of address
    uint8_t a[M * ROW_BYTES], b[N * ROW_BYTES];
    uint64_t full;
};

__device__ uint32_t address_of(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// How the tensor core finds a tile: start / 16 in bits 0-13, distance from 8 rows to the next 8 rows / 16 in bits 32-45,
// 1 in bits 62-63 for the 128-byte swizzle.
__device__ uint64_t descriptor(uint32_t tile) {
    // break no-swizzle: constexpr uint64_t LAYOUT = uint64_t(8 * ROW_BYTES >> 4) << 32;
    constexpr uint64_t LAYOUT = uint64_t(1) << 62 | uint64_t(8 * ROW_BYTES >> 4) << 32;
    return LAYOUT | (tile & 0x3FFFF) >> 4;
}

// d += A B^T for 16 of K, by all 128 threads together.
__device__ void wgmma_m64n16k16(float (&d)[8], uint64_t a, uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, 0, 0;"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b));
}

extern "C" __global__ void __launch_bounds__(THREADS) lesson(const __grid_constant__ TensorMap map_a,
                                                             const __grid_constant__ TensorMap map_b,
                                                             float* out) {
    __shared__ Shared shared;
    const uint32_t full = address_of(&shared.full);
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, sizeof(shared.a) + sizeof(shared.b));
        tma_load_2d(map_a, address_of(shared.a), full, 0, 0);
        tma_load_2d(map_b, address_of(shared.b), full, 0, 0);
    }
    // break no-wait:
    mbarrier_wait(full, 0);

    float d[8] = {};  // written by ordinary instructions
    // break no-pin:
    for (float& value : d) pin_register(value);  // the compiler may not move those below the fence
    // break no-fence:
    wgmma_fence();  // those writes come before what the tensor core does with the registers
    for (int k = 0; k < K / 16; ++k) {
        // break long-step: const uint64_t step = k * (48 >> 4);
        const uint64_t step = k * (32 >> 4);  // 16 bf16 are 32 bytes, inside the swizzled row
        wgmma_m64n16k16(d, descriptor(address_of(shared.a)) + step, descriptor(address_of(shared.b)) + step);
    }
    // break no-commit:
    wgmma_commit_group();  // the products so far are one group
    // break no-group-wait:
    wgmma_wait_group<0>();  // no group is pending: the sums are in the registers

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = 0; i < 8; ++i) {
        const int row = 16 * warp + lane / 4 + 8 * (i % 4 / 2);
        const int column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        out[row * N + column] = d[i];
    }
}
