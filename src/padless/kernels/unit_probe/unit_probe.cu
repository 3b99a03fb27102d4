// How fast a multiprocessor's units are, in its own cycles: the tensor cores, the copy engine, both at once, and a ring in
// which one feeds the other. For `padless bench units`.
//
//   map      of a (rows, 128) byte matrix, boxes of `box_rows` rows, 128-byte swizzle
//   out      (CTAs, OUT_WORDS) int64; see the constants below
//   batches  of PRODUCTS products each, every one waited for; 0 multiplies nothing
//   loads    boxes that the copy engine brings; 0 loads nothing
//   in_flight  of them at a time, at most SLOTS
//   cta_rows   rows from where one CTA begins to read to where the next does; 0: all read the same
//
// The host defines BLOCK_N (columns of a product), WARPGROUPS (1 or 2, each with 64 rows of its own), PRODUCTS,
// A_IN_REGISTERS (BLOCK_N is 64 then), COUPLED: the products wait for the loads, a box a batch, in a ring of in_flight stages;
// STAMPS: a coupled run stores times of its stages, which costs some.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"

#include "device/sm90/descriptors.cuh"

constexpr int SLOTS = 5, SLOT_BYTES = 32 * 1024;
constexpr int A_BYTES = 64 * 128, OPERAND_BYTES = WARPGROUPS * A_BYTES + BLOCK_N * 128;
// Words of a CTA's output: cycles of each warpgroup's products, of the loads, and then pairs of a coupled run: when a
// stage was seen full and when its products were done, of warpgroup 0, from the kernel's begin.
constexpr int OUT_LOADS = 2, OUT_STAMPS = 4, OUT_WORDS = 256;
constexpr int NUM_THREADS = WARPGROUPS * 128 + 32;

struct alignas(1024) SharedStorage {
    uint8_t slots[SLOTS][SLOT_BYTES];
    uint8_t operands[COUPLED ? 1024 : OPERAND_BYTES];
    alignas(8) uint64_t full[SLOTS], empty[SLOTS];
};
static_assert(sizeof(SharedStorage) <= 227 * 1024, "does not fit in shared memory");
static_assert(!COUPLED || OPERAND_BYTES <= SLOT_BYTES, "a stage holds the operands");

extern "C" __device__ const int padless_shared_bytes = sizeof(SharedStorage);
extern "C" __device__ const int padless_num_threads = NUM_THREADS;
extern "C" __device__ const int padless_num_stages = 1;

__device__ __forceinline__ long long cycles() {
    long long now;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(now)::"memory");
    return now;
}

#if A_IN_REGISTERS
#define INOUT_8(i)                                                                              \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
__device__ __forceinline__ void multiply(float (&d)[32], const uint32_t (&a)[4], uint64_t descriptor_b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, "
        "%36, 1, 1, 1;"
        : INOUT_8(0), INOUT_8(8), INOUT_8(16), INOUT_8(24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b));
}
#endif

// A batch of products on the operands at these addresses, done when it returns.
__device__ __forceinline__ void multiply_batch(float (&d)[BLOCK_N / 2], uint32_t a_at, uint32_t b_at) {
    const uint32_t a = __shfl_sync(0xffffffff, descriptor_low(a_at), 0);
    const uint32_t b = __shfl_sync(0xffffffff, descriptor_low(b_at), 0);
#if A_IN_REGISTERS
    uint32_t fragment[4] = {0x38383838u + threadIdx.x, 0x30383038u, 0x38303830u, 0x28383038u};
#pragma unroll
    for (int i = 0; i < 4; ++i) pin_register(fragment[i]);
#endif
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(d[i]);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PRODUCTS; ++p) {
#if A_IN_REGISTERS
        multiply(d, fragment, k_major_128b_descriptor(b + p % 4 * 2));
#else
        wgmma_m64k32_e4m3<BLOCK_N>(d, k_major_128b_descriptor(a + p % 4 * 2),
                                   k_major_128b_descriptor(b + p % 4 * 2), 1);
#endif
    }
    wgmma_commit_group();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(d[i]);
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(d[i]);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_unit_probe(
    const __grid_constant__ TensorMap map, long long* out, int batches, int loads, int in_flight,
    int box_rows, int rows, int cta_rows) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    long long* const mine = out + static_cast<long long>(blockIdx.x) * OUT_WORDS;

    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), 1);
            mbarrier_init(shared_address(&shared.empty[s]), WARPGROUPS);
        }
        fence_mbarrier_init();
    }
    if (!COUPLED) {  // e4m3 numbers of a few binades, other ones in every place
        for (int at = threadIdx.x * 4; at < OPERAND_BYTES; at += NUM_THREADS * 4) {
            const uint32_t mixed = (at * 2654435761u) >> 7;
            *reinterpret_cast<uint32_t*>(&shared.operands[at]) = 0x28282828u + (mixed & 0x17171717u);
        }
        fence_proxy_async_shared();
    }
    __syncthreads();
    const long long begin = cycles();

    if (warp == WARPGROUPS * 4) {
        if (lane == 0 && loads > 0) {
            int slot = 0, row = blockIdx.x * cta_rows % rows;
            uint32_t phase = 0;
            const long long start = cycles();
            for (int i = 0; i < loads; ++i) {
                const uint32_t full = shared_address(&shared.full[slot]);
                if (COUPLED)
                    mbarrier_wait(shared_address(&shared.empty[slot]), phase ^ 1);
                else if (i >= in_flight)
                    mbarrier_wait(full, phase ^ 1);
                mbarrier_arrive_expect_tx(full, box_rows * 128);
                tma_load_2d(map, shared_address(shared.slots[slot]), full, 0, row);
                row += box_rows;
                if (row + box_rows > rows) row = 0;
                if (++slot == in_flight) slot = 0, phase ^= 1;
            }
            // What is still on its way: the last round of every slot.
            for (int i = loads < in_flight ? 0 : loads - in_flight; !COUPLED && i < loads; ++i)
                mbarrier_wait(shared_address(&shared.full[i % in_flight]), i / in_flight & 1);
            mine[OUT_LOADS] = cycles() - start;
        }
    } else if (batches > 0) {
        const int warpgroup = warp / 4;
        float d[BLOCK_N / 2];
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = 0.0f;
        int slot = 0;
        uint32_t phase = 0;
        const long long start = cycles();
        for (int i = 0; i < batches; ++i) {
            const uint32_t at =
                COUPLED ? shared_address(shared.slots[slot]) : shared_address(shared.operands);
            if (COUPLED) mbarrier_wait(shared_address(&shared.full[slot]), phase);
            const long long seen = STAMPS ? cycles() : 0;
            multiply_batch(d, at + warpgroup * A_BYTES, at + WARPGROUPS * A_BYTES);
            if (COUPLED) {
                if (STAMPS && threadIdx.x == 0 && OUT_STAMPS + 2 * i + 1 < OUT_WORDS) {
                    mine[OUT_STAMPS + 2 * i] = seen - begin;
                    mine[OUT_STAMPS + 2 * i + 1] = cycles() - begin;
                }
                asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
                if (threadIdx.x % 128 == 0) mbarrier_arrive(shared_address(&shared.empty[slot]));
                if (++slot == in_flight) slot = 0, phase ^= 1;
            }
        }
        if (threadIdx.x % 128 == 0) mine[warpgroup] = cycles() - start;
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) sum += d[i];
        if (sum == 12345.678f) mine[OUT_WORDS - 1] = 1;  // keeps the sums alive
    }
}
