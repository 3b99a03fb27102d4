// A CTA pair multiplies D (256 x N) = A (256 x 64) * B (N x 64)^T in f16 with float32 accumulators: each CTA loads its
// half of A and of B and signals the even CTA, whose warp 0 issues for both and commits to both.
struct alignas(1024) Shared {
    uint8_t a[128 * 128], b[N / 2 * 128];
    uint64_t full, done, spare;
    uint32_t tensor_memory;
};
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128)
    k(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, float* d) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared& s = *reinterpret_cast<Shared*>(bytes);
    const int warp = threadIdx.x / 32;
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        init(smem(&s.full), 1);
        init(smem(&s.done), 1);
        init(smem(&s.spare), 1);
        fence_init();
    }
    if (warp == 0) {
        asm volatile("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem(&s.tensor_memory)), "r"(128) : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;");
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    __syncthreads();
    cluster_sync();
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    const uint32_t base = s.tensor_memory;
    if (threadIdx.x == 0) {
        const uint32_t full = smem(&s.full) & 0xFEFFFFFF;  // of the even CTA
        if (rank == 0) expect(smem(&s.full), 2 * (128 * 128 + N / 2 * 128));
        asm volatile("cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(smem(s.a)), "l"(&map_a), "r"(full), "r"(0), "r"(128 * rank) : "memory");
        asm volatile("cp.async.bulk.tensor.2d.cta_group::2.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(smem(s.b)), "l"(&map_b), "r"(full), "r"(0), "r"(N / 2 * rank) : "memory");
        if (rank == 0) {
            WAIT_FULL
            asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
            const uint32_t shape = 1u << 4 | (N >> 3) << 17 | (256 >> 4) << 24;
            for (int j = 0; j < 4; ++j) {
                const uint64_t a = (0x4000404000000000ull | (smem(s.a) & 0x3FFFF) >> 4) + 2 * j, b = (0x4000404000000000ull | (smem(s.b) & 0x3FFFF) >> 4) + 2 * j;
                asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %4, 0;\ntcgen05.mma.cta_group::2.kind::f16 [%0], %1, %2, %3, p;\n}" ::"r"(base), "l"(a), "l"(b), "r"(shape), "r"(j) : "memory");
            }
            COMMIT_BEFORE
            asm volatile("tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%0], %1;" ::"r"(smem(&s.done)), "h"((uint16_t)COMMIT_MASK) : "memory");
            COMMIT_AFTER
        }
    }
    __syncwarp();
    WAIT_DONE
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (int c = 0; c < N; ++c) {
        uint32_t r;
        asm volatile("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%0}, [%1];" : "=r"(r) : "r"(base + (warp * 32 << 16) + c));
        asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
        d[(128 * rank + threadIdx.x) * N + c] = __uint_as_float(r);
    }
    asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
    END
    if (warp == 0) asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(128));
}
