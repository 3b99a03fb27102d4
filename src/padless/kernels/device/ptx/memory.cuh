// Shared-memory, register-file, synchronisation and conversion instructions.
#pragma once

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// One warp, all lanes: `shared` by an address that the compiler cannot trace to where it came from and knows to be the same in
// all lanes. So everything derived from it lives in uniform registers. Where the same address was already used on diverging
// paths, such as those that build a table of groups, ptxas merges it in a vector register instead and moves each descriptor
// from there (R2UR), four moves a wgmma. `lane` keeps the shuffle: ptxas removes one of a value that it knows to be uniform.
template <class Storage>
__device__ __forceinline__ Storage& uniform_in_warp(Storage& shared, int lane) {
    const uint32_t address = __shfl_sync(0xffffffff, shared_address(&shared) + lane, 0);
    return *static_cast<Storage*>(__cvta_shared_to_generic(address));
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void st_shared_v2_f32(uint32_t address, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

// `memory` in the loads: what other threads wrote before a barrier may not be read before it.
__device__ __forceinline__ void ld_shared_v2_f32(uint32_t address, float& x, float& y) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}

__device__ __forceinline__ void ld_shared_v4_f32(uint32_t address, float (&v)[4]) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void st_shared_v4_f32(uint32_t address, const float (&v)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}

__device__ __forceinline__ uint32_t ld_shared_b32(uint32_t address) {
    uint32_t value;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

__device__ __forceinline__ void ld_shared_v2_b32(uint32_t address, uint32_t& x, uint32_t& y) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}

__device__ __forceinline__ void st_shared_v2_b32(uint32_t address, uint32_t x, uint32_t y) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void st_shared_v4_b32(uint32_t address, uint32_t x, uint32_t y, uint32_t z,
                                                 uint32_t w) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// Eight words to a 32-byte boundary (Blackwell), keeping no copy in L1: the output is not read again.
__device__ __forceinline__ void st_global_no_allocate_v8(void* address, const uint32_t (&r)[8]) {
    asm volatile("st.global.L1::no_allocate.v8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"l"(address),
                 "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
                 : "memory");
}

// Writes four words at the same shared-memory offset in CTA `cta_rank` of the cluster.
__device__ __forceinline__ void st_cluster_v4(uint32_t address, uint32_t cta_rank, int x, int y, int z,
                                              int w) {
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v4.b32 [remote], {%2, %3, %4, %5};\n"
        "}" ::"r"(address),
        "r"(cta_rank), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}

// `low` lands in the low half: the first of the two columns.
__device__ __forceinline__ uint32_t cvt_bf16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ uint32_t cvt_f16x2(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// Asks for the line at `address` to be brought into L2. Nothing waits for it.
__device__ __forceinline__ void prefetch_global_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// A barrier among `threads` threads of the CTA (id 0 is __syncthreads).
__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp at a barrier of `threads` threads, at which others wait.
__device__ __forceinline__ void bar_arrive(uint32_t id, uint32_t threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_cta_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// True in exactly one lane of a converged warp.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "elect.sync _|p, 0xffffffff;\n"
        "selp.b32 %0, 1, 0, p;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
