// A small MXFP8 GEMM for the emulator's tests: D[tile * 128 + row, n] = sum_k A * B with one UE8M0 scale per 32 of K.
// One CTA of six warps walks `tiles` tiles of 128 rows. Warp 4 loads, warp 5 multiplies, warps 0 to 3 store.
//   full[s]  copies -> products        empty[s]  products (commit) -> copies
//   done     products (commit) -> stores        free  stores -> products
constexpr int STAGES = 2, K_BYTES = 128;
constexpr int A_BYTES = 128 * K_BYTES, B_BYTES = N * K_BYTES, ATOM = 512;
struct alignas(1024) Shared {
    uint8_t a[STAGES][A_BYTES], b[STAGES][B_BYTES];
    uint8_t sfa[STAGES][ATOM], sfb[STAGES][ATOM];
    uint64_t full[STAGES], empty[STAGES], done, free;
    uint32_t tensor_memory;
};
constexpr uint32_t SFA_COLUMN = N, SFB_COLUMN = N + 4, COLUMNS = 128;

DEVICE uint64_t matrix(uint32_t address) { return 0x4000404000000000ull | (address & 0x3FFFF) >> 4; }
DEVICE uint64_t atom(uint32_t address) { return 0x0000400800000000ull | (address & 0x3FFFF) >> 4; }
DEVICE void copy_scales(uint32_t column, uint64_t source) {
    asm volatile("tcgen05.cp.cta_group::1.32x128b.warpx4 [%0], %1;" ::"r"(column), "l"(source) : "memory");
}
DEVICE void multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t shape, uint32_t sfa, uint32_t sfb, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%0], %1, %2, %3, [%4], [%5], p;\n}" ::"r"(d),
        "l"(a), "l"(b), "r"(shape), "r"(sfa), "r"(sfb), "r"(accumulate)
        : "memory");
}
DEVICE void commit(uint32_t barrier) {
    asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void fence_before() { asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory"); }
DEVICE void fence_after() { asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory"); }
DEVICE void wait_loads() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
DEVICE void load_16(uint32_t (&r)[16], uint32_t address) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, [%16];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7]), "=r"(r[8]),
          "=r"(r[9]), "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]), "=r"(r[14]), "=r"(r[15])
        : "r"(address));
}

extern "C" __global__ void __launch_bounds__(192)
    k(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, const uint8_t* sfa,
      const uint8_t* sfb, float* d, int tiles, int k_blocks) {
    extern __shared__ __align__(1024) uint8_t bytes[];
    Shared& s = *reinterpret_cast<Shared*>(bytes);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            init(smem(&s.full[i]), 1);
            init(smem(&s.empty[i]), 1);
        }
        init(smem(&s.done), 1);
        init(smem(&s.free), 4);
        fence_init();
    }
    if (warp == 5) {
        asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem(&s.tensor_memory)),
                     "r"(COLUMNS)
                     : "memory");
        asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    }
    fence_before();
    __syncthreads();
    fence_after();
    const uint32_t base = s.tensor_memory;

    if (warp == 4) {
        if (lane == 0)
            for (int i = 0; i < tiles * k_blocks; ++i) {
                const int stage = i % STAGES, tile = i / k_blocks, kb = i % k_blocks;
                const uint32_t full = smem(&s.full[stage]);
                wait(smem(&s.empty[stage]), (i / STAGES & 1) ^ 1);
                expect(full, A_BYTES + B_BYTES + 2 * ATOM);
                tma_load(map_a, smem(s.a[stage]), full, kb * K_BYTES, tile * 128);
                tma_load(map_b, smem(s.b[stage]), full, kb * K_BYTES, 0);
                bulk_load(smem(s.sfa[stage]), sfa + (tile * k_blocks + kb) * ATOM, ATOM, full);
                bulk_load(smem(s.sfb[stage]), sfb + kb * ATOM, ATOM, full);
            }
        __syncwarp();
    } else if (warp == 5) {
        if (lane == 0) {
            const uint32_t shape = 1u << 23 | 1u << 27 | (N >> 3) << 17;
            for (int i = 0; i < tiles * k_blocks; ++i) {
                const int stage = i % STAGES, tile = i / k_blocks, kb = i % k_blocks;
                if (kb == 0) {
                    wait(smem(&s.free), (tile & 1) ^ 1);
                    fence_after();
                }
                wait(smem(&s.full[stage]), i / STAGES & 1);
                fence_after();
                copy_scales(base + SFA_COLUMN, atom(smem(s.sfa[stage])));
                copy_scales(base + SFB_COLUMN, atom(smem(s.sfb[stage])));
                for (int j = 0; j < 4; ++j)
                    multiply(base, matrix(smem(s.a[stage])) + 2 * j, matrix(smem(s.b[stage])) + 2 * j,
                             shape | j << 29 | j << 4, base + SFA_COLUMN, base + SFB_COLUMN, kb + j > 0);
                commit(smem(&s.empty[stage]));
                if (kb == k_blocks - 1) commit(smem(&s.done));
            }
        }
        __syncwarp();
    } else {
        for (int tile = 0; tile < tiles; ++tile) {
            wait(smem(&s.done), tile & 1);
            fence_after();
            float* row = d + (tile * 128 + threadIdx.x) * N;
            for (int c = 0; c < N; c += 16) {
                uint32_t r[16];
                load_16(r, base + (warp * 32 << 16) + c);
                wait_loads();
#pragma unroll
                for (int i = 0; i < 16; ++i) row[c + i] = __uint_as_float(r[i]);
            }
            fence_before();
            __syncwarp();
            if (lane == 0) arrive(smem(&s.free));
        }
    }
    __syncthreads();
    if (warp == 5)
        asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(base), "r"(COLUMNS));
}
