// Lesson 4, for sm_100a: one tile of a matrix product by Blackwell's tensor core. D (128 x 32) = A (128 x 64) times
// B (32 x 64) transposed: bf16 operands in swizzled shared memory, float32 sums in tensor memory. The text is
// tcgen05_tile.md.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long long;
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/tcgen05.cuh"
#include "device/ptx/tma.cuh"

constexpr int M = 128, N = 32, K = 64, THREADS = 128;
constexpr int ROW_BYTES = K * 2;
constexpr int TMEM_COLUMNS = 32;  // of 128 lanes x 32 bits: one column for each column of D

struct alignas(1024) Shared {
    uint8_t a[M * ROW_BYTES], b[N * ROW_BYTES];
    uint64_t full, done;
    uint32_t tmem;
};

__device__ uint32_t address_of(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// As in lesson 2, with other codes: 1 in bits 46-48, 2 in bits 61-63 for the 128-byte swizzle.
__device__ uint64_t descriptor(uint32_t tile) {
    // break hopper-descriptor: constexpr uint64_t LAYOUT = uint64_t(1) << 62 | uint64_t(8 * ROW_BYTES >> 4) << 32;
    constexpr uint64_t LAYOUT = uint64_t(2) << 61 | uint64_t(1) << 46 | uint64_t(8 * ROW_BYTES >> 4) << 32;
    return LAYOUT | (tile & 0x3FFFF) >> 4;
}

// D = A B^T for 16 of K, or D += with `accumulate`; one thread issues it for the whole CTA.
__device__ void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b, uint32_t accumulate) {
    constexpr uint32_t FLOAT32_SUMS = 1u << 4, BF16_A = 1u << 7, BF16_B = 1u << 10;
    constexpr uint32_t SHAPE = FLOAT32_SUMS | BF16_A | BF16_B | (N >> 3) << 17 | (M >> 4) << 24;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %4, 0;\n"
        "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p;\n"
        "}" ::"r"(d),
        "l"(a), "l"(b), "r"(SHAPE), "r"(accumulate)
        : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS) lesson(const __grid_constant__ TensorMap map_a,
                                                             const __grid_constant__ TensorMap map_b,
                                                             float* out) {
    __shared__ Shared shared;
    const uint32_t full = address_of(&shared.full), done = address_of(&shared.done);
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(done, 1);
        fence_mbarrier_init();
    }
    if (warp == 0) {  // tensor memory is allocated, by a whole warp; its address comes in shared memory
        tcgen05_alloc<1, TMEM_COLUMNS>(address_of(&shared.tmem));
        tcgen05_relinquish_alloc_permit<1>();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    const uint32_t tmem = shared.tmem;

    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(full, sizeof(shared.a) + sizeof(shared.b));
        tma_load_2d(map_a, address_of(shared.a), full, 0, 0);
        tma_load_2d(map_b, address_of(shared.b), full, 0, 0);
        // break no-full-wait:
        mbarrier_wait(full, 0);
        for (int k = 0; k < K / 16; ++k) {
            const uint64_t step = k * (32 >> 4);
            // break no-overwrite: const uint32_t accumulate = 1;
            const uint32_t accumulate = k > 0;  // the first product overwrites what tensor memory held before
            tcgen05_mma_f16(tmem, descriptor(address_of(shared.a)) + step,
                            descriptor(address_of(shared.b)) + step, accumulate);
        }
        // break no-commit:
        tcgen05_commit(done);  // an arrival when all products so far are complete
    }
    __syncwarp();
    // break no-done-wait:
    mbarrier_wait(done, 0);
    // break no-fence:
    tcgen05_fence_after_thread_sync();  // what follows in tensor memory comes after the barrier

    uint32_t row[N];
    // break wrong-lanes: tcgen05_ld_32x32b<N>(row, tmem + (32 * (warp ^ 1) << 16));
    tcgen05_ld_32x32b<N>(row, tmem + (32 * warp << 16));  // a warp reads its own quarter of the 128 lanes
    // break no-load-wait:
    tcgen05_wait_ld();
    for (int i = 0; i < N; ++i) {
        pin_loaded(row[i]);
        out[threadIdx.x * N + i] = __uint_as_float(row[i]);
    }

    tcgen05_fence_before_thread_sync();
    // break no-last-sync:
    __syncthreads();
    tcgen05_fence_after_thread_sync();
    // break no-dealloc: ;
    if (warp == 0) tcgen05_dealloc<1, TMEM_COLUMNS>(tmem);
}
