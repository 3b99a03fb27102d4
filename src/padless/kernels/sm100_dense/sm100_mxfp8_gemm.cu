// Dense GEMM on Blackwell, MXFP8: D = A * B^T.
//
//   A (M, K) e4m3 or e5m2, sfa (M, K / 32) e8m0, one decode scale per 1 x 32
//   B (N, K) e4m3 or e5m2, sfb (N, K / 32) e8m0
//   D (M, N) bf16, fp16 or float32
//
// Scales come in atoms of 128 rows x 4, 512 bytes each (layouts.py, "blocked"). K is a multiple of 32; M and N are any.
//
// Arithmetic: the tensor core adds the 32 scaled products of an instruction and its accumulator in one step, K upwards;
// nothing but the output's rounding happens afterwards.
//
// Roles, in each CTA: warps 0 to 3 store, warp 4 loads, warp 5 multiplies. CTAs are persistent; worker w of W (a CTA, or a
// pair of CTAs that works as one) takes tiles w, w + W, .. of the order. In a pair each CTA loads its 128 rows of A, its
// half of B's and its scales of A; the scales of B go to both. The even CTA issues every product, for both.
//
//      loads (each CTA)                  products (even CTA)                         stores (each CTA)
//      ----------------                  -------------------                         -----------------
//      wait empty[s] <-- commit, both -- ... of the products of stage s
//      A, B, sfa, sfb -> full[s] ------> wait full[s] (of the even CTA)
//                                        wait free <-------------------------------- arrive, when read into registers
//                                        scales -> tensor memory; multiply
//                                        commit, both -> accumulator_full[acc] ----> wait; tensor memory -> D
//
// Tensor memory. Two accumulators of 256 columns leave no room for the scales, so they overlap by OVERLAP columns:
//
//      [ accumulator 0, its own | common | accumulator 1, its own | sfa | sfb ]
//
// The stores read the common columns of a tile first, and say so at once (free): from then on the next tile may be
// multiplied, while the rest of this one is read. No other barrier is needed: the same warps have read all of the tile
// before. Where nothing overlaps there is a barrier for each accumulator, for when all of it is read.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tcgen05.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_sm100.cuh"

#include "sm100_dense/tile_order.cuh"
#include "device/sm100/descriptors.cuh"
#include "sm100_dense/store.cuh"
#include "device/pipeline.cuh"

// The host defines, from Mxfp8GemmConfig: CTA_GROUP, BLOCK_N, BLOCK_K, NUM_STAGES (0 = as many as fit), CHUNK_COLUMNS,
// STORE_BYTES, and the macros TILE_ORDER, FORMAT_A, FORMAT_B, OUT_TYPE.
constexpr int BLOCK_M = 128;  // rows of a CTA
constexpr int MMA_K = 32;
constexpr int SLAB_K = 128;  // elements, and bytes, of a row that lie together under the 128-byte swizzle
constexpr int SLABS = BLOCK_K / SLAB_K;
constexpr int B_ROWS = BLOCK_N / CTA_GROUP;  // of B that a CTA holds
constexpr int SFB_ATOMS = BLOCK_N / 128;     // along N
constexpr uint32_t SHAPE = mxf8f6f4_shape(BLOCK_M * CTA_GROUP, BLOCK_N, FORMAT_A, FORMAT_B);
static_assert(CTA_GROUP == 1 || CTA_GROUP == 2, "a CTA or a pair");
static_assert(BLOCK_K == 128 || BLOCK_K == 256, "one or two slabs");
static_assert(BLOCK_N == 128 || BLOCK_N == 256, "whole atoms of scales");

constexpr int STORE_WARPS = 4, LOAD_WARP = 4, MMA_WARP = 5;
constexpr int NUM_THREADS = 6 * 32;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int CHUNKS = BLOCK_N / CHUNK_COLUMNS;  // that a store warp takes into registers one after the other

constexpr int TMEM_COLUMNS = 512;
constexpr int SFA_COLUMNS = SLABS * SCALE_ATOM_COLUMNS;
constexpr int SFB_COLUMNS = SLABS * SFB_ATOMS * SCALE_ATOM_COLUMNS;
constexpr int OVERLAP = 2 * BLOCK_N + SFA_COLUMNS + SFB_COLUMNS <= TMEM_COLUMNS ? 0 : CHUNK_COLUMNS;
constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP;  // its first column; accumulator 0 begins at 0
constexpr int SFA_COLUMN = ACCUMULATOR_1 + BLOCK_N;
constexpr int SFB_COLUMN = SFA_COLUMN + SFA_COLUMNS;
constexpr int USED_COLUMNS = SFB_COLUMN + SFB_COLUMNS;
static_assert(USED_COLUMNS <= TMEM_COLUMNS, "does not fit in tensor memory");

// Which chunk has to be read before `free`, and how many tiles use the barriers in turn.
constexpr int LAST_NEEDED_CHUNK = OVERLAP == 0 ? CHUNKS - 1 : 0;
constexpr int FREE_BARRIERS = OVERLAP == 0 ? 2 : 1;
constexpr int FREE_ARRIVALS = CTA_GROUP * STORE_WARPS;

// With STORE_BYTES = 0 registers go to global memory directly, otherwise through buffers in shared memory.
constexpr int STAGING_BYTES = STORE_WARPS * WARP_STAGING_BYTES<STORE_BYTES>;

constexpr int A_SLAB_BYTES = BLOCK_M * SLAB_K;
constexpr int B_SLAB_BYTES = B_ROWS * SLAB_K;
constexpr int SFA_BYTES = SLABS * SCALE_ATOM_BYTES;
constexpr int SFB_BYTES = SFB_ATOMS * SLABS * SCALE_ATOM_BYTES;

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][SLABS][A_SLAB_BYTES];
    uint8_t b[STAGES][SLABS][B_SLAB_BYTES];
    uint8_t staging[STAGING_BYTES == 0 ? 1024 : STAGING_BYTES];
    uint8_t sfa[STAGES][SFA_BYTES];  // atoms, K upwards
    uint8_t sfb[STAGES][SFB_BYTES];  // atoms, K upwards inside a row of atoms
    uint64_t full[STAGES];           // in use in the even CTA only
    uint64_t empty[STAGES];
    uint64_t accumulator_full[2];
    uint64_t free[FREE_BARRIERS];  // in use in the even CTA only
    uint32_t tensor_memory;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
// What kernel_map.py draws.
extern "C" __device__ const int padless_a_bytes = SLABS * A_SLAB_BYTES;
extern "C" __device__ const int padless_b_bytes = SLABS * B_SLAB_BYTES;
extern "C" __device__ const int padless_sfa_bytes = SFA_BYTES;
extern "C" __device__ const int padless_sfb_bytes = SFB_BYTES;
extern "C" __device__ const int padless_staging_bytes = STAGING_BYTES;
extern "C" __device__ const int padless_accumulator_1 = ACCUMULATOR_1;
extern "C" __device__ const int padless_sfa_column = SFA_COLUMN;
extern "C" __device__ const int padless_sfb_column = SFB_COLUMN;
extern "C" __device__ const int padless_used_columns = USED_COLUMNS;
extern "C" __device__ const int padless_free_barriers = FREE_BARRIERS;
extern "C" __device__ const int padless_free_arrivals = FREE_ARRIVALS;

struct Problem {
    void* d;
    long long d_stride;  // elements
    int m, n, k;
    int d_is_aligned;  // rows of D begin on 32-byte boundaries

    __device__ __forceinline__ int m_tiles() const {
        return (m + CTA_GROUP * BLOCK_M - 1) / (CTA_GROUP * BLOCK_M);
    }
    __device__ __forceinline__ int n_tiles() const { return (n + BLOCK_N - 1) / BLOCK_N; }
    __device__ __forceinline__ int tiles() const { return m_tiles() * n_tiles(); }
    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }

    // K steps of a product in this block; the last block may have fewer. What lies past K is never multiplied: the
    // scales there may be anything.
    __device__ __forceinline__ int steps(int k_block) const {
        const int left = k / MMA_K - k_block * (BLOCK_K / MMA_K);
        return left < BLOCK_K / MMA_K ? left : BLOCK_K / MMA_K;
    }
    __device__ __forceinline__ int slabs(int k_block) const {
        return (steps(k_block) + SLAB_K / MMA_K - 1) / (SLAB_K / MMA_K);
    }
};

struct TileOrigin {
    int row, column;  // of this CTA's part
};

__device__ __forceinline__ TileOrigin tile_origin(const Problem& problem, int number, int cta_rank) {
    const GridPoint at = TILE_ORDER == ORDER_HILBERT
                             ? hilbert_order(number, problem.m_tiles(), problem.n_tiles())
                             : row_order(number, problem.n_tiles());
    return TileOrigin{(at.m * CTA_GROUP + cta_rank) * BLOCK_M, at.n * BLOCK_N};
}

// The tiles of this worker.
__device__ __forceinline__ int first_tile() {
    return blockIdx.x / CTA_GROUP;
}
__device__ __forceinline__ int tile_stride() {
    return gridDim.x / CTA_GROUP;
}

// Loads, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const TensorMap& map_sfb, int cta_rank) {
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    for (int number = first_tile(); number < problem.tiles(); number += tile_stride()) {
        const TileOrigin tile = tile_origin(problem, number, cta_rank);
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage, slabs = problem.slabs(kb);
            const uint32_t own_full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            if (cta_rank == 0)  // for both CTAs
                mbarrier_arrive_expect_tx(
                    own_full, CTA_GROUP * (slabs * (A_SLAB_BYTES + B_SLAB_BYTES) + SFA_BYTES + SFB_BYTES));
            const int b_row = tile.column + cta_rank * B_ROWS;
            const int atom = kb * SLABS;
            if constexpr (CTA_GROUP == 1) {
                tma_load_3d(map_sfa, shared_address(shared.sfa[stage]), own_full, 0, atom, tile.row / 128);
                for (int j = 0; j < SFB_ATOMS; ++j)
                    tma_load_3d(map_sfb, shared_address(shared.sfb[stage] + j * SFA_BYTES), own_full, 0, atom,
                                tile.column / 128 + j);
                for (int s = 0; s < slabs; ++s) {
                    const int k = kb * BLOCK_K + s * SLAB_K;
                    tma_load_2d(map_a, shared_address(shared.a[stage][s]), own_full, k, tile.row);
                    tma_load_2d(map_b, shared_address(shared.b[stage][s]), own_full, k, b_row);
                }
            } else {
                const uint32_t full = pair_even_address(own_full);
                tma_load_3d_pair(map_sfa, shared_address(shared.sfa[stage]), full, 0, atom, tile.row / 128);
                // The CTAs take turns at fetching a row of atoms of B and give it to both.
                for (int j = cta_rank; j < SFB_ATOMS; j += 2)
                    tma_load_3d_pair_multicast(map_sfb, shared_address(shared.sfb[stage] + j * SFA_BYTES),
                                               full, 0, atom, tile.column / 128 + j, 0b11);
                for (int s = 0; s < slabs; ++s) {
                    const int k = kb * BLOCK_K + s * SLAB_K;
                    tma_load_2d_pair(map_a, shared_address(shared.a[stage][s]), full, k, tile.row);
                    tma_load_2d_pair(map_b, shared_address(shared.b[stage][s]), full, k, b_row);
                }
            }
            pipeline.advance();
        }
    }
    // The last commits arrive here from the other CTA: this one may not end before.
    for (int i = 0; i < STAGES; ++i) {
        mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);
        pipeline.advance();
    }
}

// Arrives in both CTAs of a pair when all products so far are done.
__device__ __forceinline__ void commit(uint64_t& barrier) {
    if constexpr (CTA_GROUP == 1)
        tcgen05_commit(shared_address(&barrier));
    else
        tcgen05_commit_multicast<2>(shared_address(&barrier), 0b11);
}

// Products, one thread of the even CTA. `tmem`: first column of the allocation.
__device__ __forceinline__ void issue_mma(SharedStorage& shared, const Problem& problem, uint32_t tmem) {
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    const uint32_t a_stage_0 = tcgen05_descriptor_low(shared_address(shared.a[0][0]));
    const uint32_t b_stage_0 = tcgen05_descriptor_low(shared_address(shared.b[0][0]));
    const uint32_t sfa_stage_0 = tcgen05_descriptor_low(shared_address(shared.sfa[0]));
    const uint32_t sfb_stage_0 = tcgen05_descriptor_low(shared_address(shared.sfb[0]));
    uint32_t turn = 0;  // tiles before this one
    for (int number = first_tile(); number < problem.tiles(); number += tile_stride(), ++turn) {
        const uint32_t accumulator = turn & 1;
        const uint32_t d = tmem + accumulator * ACCUMULATOR_1;
        mbarrier_wait(shared_address(&shared.free[turn % FREE_BARRIERS]), (turn / FREE_BARRIERS & 1) ^ 1);
        tcgen05_fence_after_thread_sync();
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage, steps = problem.steps(kb);
            const uint32_t a = a_stage_0 + stage * (SLABS * A_SLAB_BYTES / 16);
            const uint32_t b = b_stage_0 + stage * (SLABS * B_SLAB_BYTES / 16);
            const uint32_t sfa = sfa_stage_0 + stage * (SFA_BYTES / 16);
            const uint32_t sfb = sfb_stage_0 + stage * (SFB_BYTES / 16);
            mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            tcgen05_fence_after_thread_sync();
#pragma unroll
            for (int s = 0; s < SLABS; ++s) {
                if (s * (SLAB_K / MMA_K) >= steps) break;
                // Scales of B of one slab lie side by side: column n / 32.
                const uint32_t sfa_at = tmem + SFA_COLUMN + s * SCALE_ATOM_COLUMNS;
                const uint32_t sfb_at = tmem + SFB_COLUMN + s * SFB_ATOMS * SCALE_ATOM_COLUMNS;
                tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                    sfa_at, scale_atom_descriptor(sfa + s * (SCALE_ATOM_BYTES / 16)));
#pragma unroll
                for (int j = 0; j < SFB_ATOMS; ++j)
                    tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                        sfb_at + j * SCALE_ATOM_COLUMNS,
                        scale_atom_descriptor(sfb + (j * SLABS + s) * (SCALE_ATOM_BYTES / 16)));
#pragma unroll
                for (int j = 0; j < SLAB_K / MMA_K; ++j) {
                    if (s * (SLAB_K / MMA_K) + j >= steps) break;
                    tcgen05_mma_mxf8f6f4_block32<CTA_GROUP>(
                        d, tcgen05_operand_descriptor(a + (s * A_SLAB_BYTES + j * MMA_K) / 16),
                        tcgen05_operand_descriptor(b + (s * B_SLAB_BYTES + j * MMA_K) / 16),
                        SHAPE | scale_ids(j), sfa_at, sfb_at, kb != 0 || s != 0 || j != 0);
                }
            }
            commit(shared.empty[stage]);
            pipeline.advance();
        }
        commit(shared.accumulator_full[accumulator]);
    }
}

// Columns that this warp has read into registers may be multiplied into again: one arrival a warp, in the even CTA.
// It releases at CTA scope: nothing but the reads has to be ordered, and those are by the fence.
__device__ __forceinline__ void release_columns(uint64_t& barrier, int lane) {
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (lane != 0) return;
    if constexpr (CTA_GROUP == 1)
        mbarrier_arrive(shared_address(&barrier));
    else
        mbarrier_arrive_cluster(shared_address(&barrier), 0);
}

// Stores, four warps; warp w has rows 32 w and up.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            const TensorMap& map_d, uint32_t tmem, int cta_rank, int warp,
                                            int lane) {
    const uint32_t staging = shared_address(shared.staging) + warp * WARP_STAGING_BYTES<STORE_BYTES>;
    const uint32_t lanes = tmem + (warp * 32 << 16);
    uint32_t turn = 0, buffer_turn = 0;
    for (int number = first_tile(); number < problem.tiles(); number += tile_stride(), ++turn) {
        const TileOrigin tile = tile_origin(problem, number, cta_rank);
        const uint32_t accumulator = turn & 1;
        const int row = tile.row + warp * 32;
        mbarrier_wait(shared_address(&shared.accumulator_full[accumulator]), turn >> 1 & 1);
        tcgen05_fence_after_thread_sync();
#pragma unroll 1
        for (int i = 0; i < CHUNKS; ++i) {
            // The common columns come first: accumulator 0 has them last, accumulator 1 first.
            const int chunk = OVERLAP == 0 || accumulator == 1 ? i : i == 0 ? CHUNKS - 1 : i - 1;
            uint32_t sums[CHUNK_COLUMNS];
            __syncwarp();
            tcgen05_ld_32x32b(sums, lanes + accumulator * ACCUMULATOR_1 + chunk * CHUNK_COLUMNS);
            tcgen05_wait_ld();
#pragma unroll
            for (int j = 0; j < CHUNK_COLUMNS; ++j) pin_loaded(sums[j]);
            if (i == LAST_NEEDED_CHUNK) release_columns(shared.free[turn % FREE_BARRIERS], lane);

            const int column = tile.column + chunk * CHUNK_COLUMNS;
            uint32_t words[CHUNK_COLUMNS * OUT_BYTES / 4];
            round_sums<OUT_TYPE>(words, sums);
            if constexpr (STORE_BYTES == 0)
                store_row<OUT_BYTES>(words, problem.d, problem.d_stride, problem.d_is_aligned, row + lane,
                                     problem.m, column, problem.n);
            else
                store_by_copy<OUT_BYTES, STORE_BYTES>(words, map_d, staging, row, column, lane, buffer_turn);
        }
    }
    if (STORE_BYTES != 0 && lane == 0) cp_async_bulk_wait_group_read_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm100_mxfp8_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ TensorMap map_sfb,
    const __grid_constant__ TensorMap map_d, void* d, long long d_stride, int m, int n, int k,
    int d_is_aligned) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{d, d_stride, m, n, k, d_is_aligned};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const int cta_rank = CTA_GROUP == 1 ? 0 : static_cast<int>(cluster_cta_rank());

    if (warp == 0 && elect_one()) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), 1);
            mbarrier_init(shared_address(&shared.empty[s]), 1);
        }
        for (int i = 0; i < 2; ++i) mbarrier_init(shared_address(&shared.accumulator_full[i]), 1);
        for (int i = 0; i < FREE_BARRIERS; ++i) mbarrier_init(shared_address(&shared.free[i]), FREE_ARRIVALS);
        fence_mbarrier_init();
    }
    if (warp == LOAD_WARP && elect_one()) {
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_sfa);
        prefetch_tensormap(map_sfb);
        if (STORE_BYTES != 0) prefetch_tensormap(map_d);
    }
    __syncwarp();
    if (warp == MMA_WARP) {
        tcgen05_alloc<CTA_GROUP, TMEM_COLUMNS>(shared_address(&shared.tensor_memory));
        tcgen05_relinquish_alloc_permit<CTA_GROUP>();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if constexpr (CTA_GROUP == 2) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    tcgen05_fence_after_thread_sync();
    const uint32_t tmem = shared.tensor_memory;

    if (warp == LOAD_WARP) {
        if (elect_one()) load_tiles(shared, problem, map_a, map_b, map_sfa, map_sfb, cta_rank);
    } else if (warp == MMA_WARP) {
        if (cta_rank == 0 && elect_one()) issue_mma(shared, problem, tmem);
    } else {
        store_tiles(shared, problem, map_d, tmem, cta_rank, warp, lane);
    }

    // Nobody may free tensor memory, or end, while the other CTA still uses this one's.
    __syncwarp();
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if constexpr (CTA_GROUP == 2) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    if (warp == MMA_WARP) {
        tcgen05_fence_after_thread_sync();
        tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>(tmem);
    }
}
