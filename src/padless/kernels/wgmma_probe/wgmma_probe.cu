// One wgmma a CTA, on operands given as they are to lie in shared memory: what the tensor core computes, bit for bit,
// for `padless verify` to compare with the emulator's model of it.
//
//   a  (problems, 64 x 32 bytes), b (problems, 8 x 32 bytes): K-major without swizzle, in core matrices of 8 rows x 16
//      bytes, the two along K first: [rows / 8][2][8][16]
//   c, d  (problems, 128 threads, 4) float32 accumulators, in the instruction's own order
//
// The host defines KINDS ("e4m3.e4m3" ..) and WGMMA_K, 32 bytes of elements.
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/memory.cuh"
#include "device/ptx/tma.cuh"

struct alignas(16) Row16 {
    uint32_t words[4];
};

constexpr int A_ROWS16 = 64 * 2, B_ROWS16 = 8 * 2;

struct alignas(1024) SharedStorage {
    Row16 a[A_ROWS16], b[B_ROWS16];
};

extern "C" __device__ const int padless_shared_bytes = sizeof(SharedStorage);
extern "C" __device__ const int padless_num_threads = 128;
extern "C" __device__ const int padless_num_stages = 1;

// Bytes between core matrices: 128 along K (leading), 256 along rows (stride); PTX ISA, "Matrix descriptor".
__device__ __forceinline__ uint64_t descriptor(const void* start) {
    return (shared_address(start) >> 4) | static_cast<uint64_t>(128 >> 4) << 16 |
           static_cast<uint64_t>(256 >> 4) << 32;
}

extern "C" __global__ void __launch_bounds__(128, 1) padless_wgmma_probe(const Row16* a, const Row16* b,
                                                                         const float* c, float* d) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int problem = blockIdx.x, thread = threadIdx.x;
    shared.a[thread] = a[problem * A_ROWS16 + thread];
    if (thread < B_ROWS16) shared.b[thread] = b[problem * B_ROWS16 + thread];
    fence_proxy_async_shared();
    __syncthreads();

    const float* from = c + (problem * 128 + thread) * 4;
    float d0 = from[0], d1 = from[1], d2 = from[2], d3 = from[3];
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k" WGMMA_K ".f32." KINDS
                 " {%0, %1, %2, %3}, %4, %5, 1, 1, 1" TRANSPOSES ";"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                 : "l"(descriptor(shared.a)), "l"(descriptor(shared.b)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    float* to = d + (problem * 128 + thread) * 4;
    to[0] = d0, to[1] = d1, to[2] = d2, to[3] = d3;
}
