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
//                                        wait free[acc] <--------------------------- arrive, when all is read
//                                        scales -> tensor memory; multiply
//                                        wait common_free <------------------------- arrive, when the common are read
//                                        commit, both -> accumulator_full[acc][half] wait; tensor memory -> D
//
// Tensor memory. Two accumulators of 256 columns leave no room for the scales, so they overlap by OVERLAP columns:
//
//      [ accumulator 0, its own | common | accumulator 1, its own | sfa | sfb ]
//
// The products of such a tile are those of its two halves of 128 columns, of which one has the common columns. That half
// is finished first and, in the next tile, begun last, by a round of 256 of K each. So between the two lie the products of
// two other halves, during which the stores read the common columns and say so (common_free): the tensor core does not
// wait. An instruction of 128 columns takes half as long as one of 256.
//
// Where what is left for the last round of tiles are at most half as many tiles as workers, each is cut into its halves,
// which go to a worker each (``TileList``).

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
constexpr int ROUND_STAGES = 256 / BLOCK_K;  // stages whose scales are in tensor memory at a time
constexpr int HALF_N = 128;                  // columns of a product
constexpr int HALVES = BLOCK_N / HALF_N;
constexpr int B_ROWS = HALF_N / CTA_GROUP;  // of a half of B that a CTA holds
constexpr uint32_t SHAPE = mxf8f6f4_shape(BLOCK_M * CTA_GROUP, HALF_N, FORMAT_A, FORMAT_B);
static_assert(CTA_GROUP == 1 || CTA_GROUP == 2, "a CTA or a pair");
static_assert(BLOCK_K == 128 || BLOCK_K == 256, "one or two slabs");
static_assert(BLOCK_N == 128 || BLOCK_N == 256, "whole atoms of scales");

constexpr int STORE_WARPS = 4, LOAD_WARP = 4, MMA_WARP = 5;
constexpr int NUM_THREADS = 6 * 32;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int CHUNKS = BLOCK_N / CHUNK_COLUMNS;  // that a store warp takes into registers one after the other

constexpr int TMEM_COLUMNS = 512;
constexpr int SCALE_COLUMNS = SLABS * SCALE_ATOM_COLUMNS;  // of 128 rows in a stage
constexpr int SFA_COLUMNS = ROUND_STAGES * SCALE_COLUMNS;
constexpr int SFB_COLUMNS = ROUND_STAGES * HALVES * SCALE_COLUMNS;
constexpr int OVERLAP = 2 * BLOCK_N + SFA_COLUMNS + SFB_COLUMNS <= TMEM_COLUMNS ? 0 : CHUNK_COLUMNS;
constexpr int ACCUMULATOR_1 = BLOCK_N - OVERLAP;  // its first column; accumulator 0 begins at 0
constexpr int SFA_COLUMN = ACCUMULATOR_1 + BLOCK_N;
constexpr int SFB_COLUMN = SFA_COLUMN + SFA_COLUMNS;
constexpr int USED_COLUMNS = SFB_COLUMN + SFB_COLUMNS;
static_assert(USED_COLUMNS <= TMEM_COLUMNS, "does not fit in tensor memory");
static_assert((OVERLAP > 0) == (HALVES == 2), "the common columns lie in one of two halves");

constexpr int FREE_ARRIVALS = CTA_GROUP * STORE_WARPS;

// With STORE_BYTES = 0 registers go to global memory directly, otherwise through buffers in shared memory.
constexpr int STAGING_BYTES = STORE_WARPS * WARP_STAGING_BYTES<STORE_BYTES>;

constexpr int A_SLAB_BYTES = BLOCK_M * SLAB_K;
constexpr int B_SLAB_BYTES = B_ROWS * SLAB_K;
constexpr int SFA_BYTES = SLABS * SCALE_ATOM_BYTES;
constexpr int SFB_BYTES = SFA_BYTES;  // of a half

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][SLABS][A_SLAB_BYTES];
    uint8_t b[STAGES][HALVES][SLABS][B_SLAB_BYTES];
    uint8_t staging[STAGING_BYTES == 0 ? 1024 : STAGING_BYTES];
    uint8_t sfa[STAGES][SFA_BYTES];  // atoms, K upwards
    uint8_t sfb[STAGES][HALVES][SFB_BYTES];
    uint64_t full[STAGES];  // in use in the even CTA only
    uint64_t empty[STAGES];
    uint64_t accumulator_full[2][HALVES];
    uint64_t free[2], common_free;  // in use in the even CTA only
    uint32_t tensor_memory;
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "device/read_back.cuh"
// What kernel_map.py draws.
extern "C" __device__ const int padless_a_bytes = SLABS * A_SLAB_BYTES;
extern "C" __device__ const int padless_b_bytes = HALVES * SLABS * B_SLAB_BYTES;
extern "C" __device__ const int padless_sfa_bytes = SFA_BYTES;
extern "C" __device__ const int padless_sfb_bytes = HALVES * SFB_BYTES;
extern "C" __device__ const int padless_staging_bytes = STAGING_BYTES;
extern "C" __device__ const int padless_accumulator_1 = ACCUMULATOR_1;
extern "C" __device__ const int padless_sfa_column = SFA_COLUMN;
extern "C" __device__ const int padless_sfb_column = SFB_COLUMN;
extern "C" __device__ const int padless_used_columns = USED_COLUMNS;
extern "C" __device__ const int padless_halves = HALVES;
extern "C" __device__ const int padless_free_arrivals = FREE_ARRIVALS;

#include "sm100_dense/tile_list.cuh"

// Loads, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const TensorMap& map_sfb, int cta_rank) {
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    const TileList list(problem);
    for (int number = first_tile(); number < list.total; number += workers()) {
        const Tile tile = list.tile(problem, number, cta_rank);
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage, slabs = problem.slabs(kb);
            const uint32_t own_full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            if (cta_rank == 0)  // for both CTAs
                mbarrier_arrive_expect_tx(
                    own_full, CTA_GROUP * (slabs * (A_SLAB_BYTES + tile.halves * B_SLAB_BYTES) + SFA_BYTES +
                                           tile.halves * SFB_BYTES));
            const int b_row = tile.column + cta_rank * B_ROWS;
            const int atom = kb * SLABS;
            if constexpr (CTA_GROUP == 1) {
                tma_load_3d(map_sfa, shared_address(shared.sfa[stage]), own_full, 0, atom, tile.row / 128);
                for (int h = 0; h < tile.halves; ++h)
                    tma_load_3d(map_sfb, shared_address(shared.sfb[stage][h]), own_full, 0, atom,
                                tile.column / HALF_N + h);
                for (int s = 0; s < slabs; ++s) {
                    const int k = kb * BLOCK_K + s * SLAB_K;
                    tma_load_2d(map_a, shared_address(shared.a[stage][s]), own_full, k, tile.row);
                    for (int h = 0; h < tile.halves; ++h)
                        tma_load_2d(map_b, shared_address(shared.b[stage][h][s]), own_full, k,
                                    b_row + h * HALF_N);
                }
            } else {
                const uint32_t full = pair_even_address(own_full);
                tma_load_3d_pair(map_sfa, shared_address(shared.sfa[stage]), full, 0, atom, tile.row / 128);
                // The CTAs take turns at fetching a half's scales of B and give them to both.
                for (int h = cta_rank; h < tile.halves; h += 2)
                    tma_load_3d_pair_multicast(map_sfb, shared_address(shared.sfb[stage][h]), full, 0, atom,
                                               tile.column / HALF_N + h, 0b11);
                for (int s = 0; s < slabs; ++s) {
                    const int k = kb * BLOCK_K + s * SLAB_K;
                    tma_load_2d_pair(map_a, shared_address(shared.a[stage][s]), full, k, tile.row);
                    for (int h = 0; h < tile.halves; ++h)
                        tma_load_2d_pair(map_b, shared_address(shared.b[stage][h][s]), full, k,
                                         b_row + h * HALF_N);
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

// The scales of a stage to tensor memory.
__device__ __forceinline__ void copy_scales(SharedStorage& shared, int stage, int steps, int halves,
                                            uint32_t sfa_at, uint32_t sfb_at) {
    const uint32_t sfa = tcgen05_descriptor_low(shared_address(shared.sfa[stage]));
    const uint32_t sfb = tcgen05_descriptor_low(shared_address(shared.sfb[stage][0]));
#pragma unroll
    for (int s = 0; s < SLABS; ++s) {
        if (s * (SLAB_K / MMA_K) >= steps) break;
        tcgen05_cp_32x128b_warpx4<CTA_GROUP>(sfa_at + s * SCALE_ATOM_COLUMNS,
                                             scale_atom_descriptor(sfa + s * (SCALE_ATOM_BYTES / 16)));
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            if (h >= halves) break;
            tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                sfb_at + (h * SLABS + s) * SCALE_ATOM_COLUMNS,
                scale_atom_descriptor(sfb + (h * SLABS + s) * (SCALE_ATOM_BYTES / 16)));
        }
    }
}

// The products of one half of a stage, `steps` of them; `a`, `b`: descriptor low words.
__device__ __forceinline__ void multiply_half(uint32_t d, uint32_t a, uint32_t b, uint32_t sfa, uint32_t sfb,
                                              int steps, bool accumulate) {
#pragma unroll
    for (int i = 0; i < BLOCK_K / MMA_K; ++i) {
        if (i >= steps) break;
        const int slab = i / (SLAB_K / MMA_K), step = i % (SLAB_K / MMA_K);
        tcgen05_mma_mxf8f6f4_block32<CTA_GROUP>(
            d, tcgen05_operand_descriptor(a + (slab * A_SLAB_BYTES + step * MMA_K) / 16),
            tcgen05_operand_descriptor(b + (slab * B_SLAB_BYTES + step * MMA_K) / 16),
            SHAPE | scale_ids(step), sfa + slab * SCALE_ATOM_COLUMNS, sfb + slab * SCALE_ATOM_COLUMNS,
            accumulate || i != 0);
    }
}

// Products, one thread of the even CTA. `tmem`: first column of the allocation.
__device__ __forceinline__ void issue_mma(SharedStorage& shared, const Problem& problem, uint32_t tmem) {
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    const uint32_t a_stage_0 = tcgen05_descriptor_low(shared_address(shared.a[0][0]));
    const uint32_t b_stage_0 = tcgen05_descriptor_low(shared_address(shared.b[0][0][0]));
    const TileList list(problem);
    uint32_t turn = 0;  // tiles before this one
    for (int number = first_tile(); number < list.total; number += workers(), ++turn) {
        const uint32_t accumulator = turn & 1;
        const int halves = list.halves(number);
        const uint32_t d = tmem + accumulator * ACCUMULATOR_1;
        mbarrier_wait(shared_address(&shared.free[accumulator]), (turn >> 1 & 1) ^ 1);
        tcgen05_fence_after_thread_sync();
        for (int first = 0; first < k_blocks; first += ROUND_STAGES) {
            const bool is_last = first + ROUND_STAGES >= k_blocks;
            const int stages = is_last ? k_blocks - first : ROUND_STAGES;
            // Half after half in a tile's first and last round, stage after stage in others, which frees stages sooner.
            const bool by_halves = first == 0 || is_last;
            Pipeline<STAGES> at[ROUND_STAGES];
#pragma unroll
            for (int s = 0; s < ROUND_STAGES; ++s) {
                at[s] = pipeline;
                if (s < stages) pipeline.advance();
            }
#pragma unroll
            for (int part = 0; part < HALVES * ROUND_STAGES; ++part) {
                const int s = by_halves ? part % ROUND_STAGES : part / HALVES;
                const int i = by_halves ? part / ROUND_STAGES : part % HALVES;
                if (s >= stages || i >= halves) continue;
                const Pipeline<STAGES> here = ROUND_STAGES == 1 || s == 0 ? at[0] : at[ROUND_STAGES - 1];
                const int stage = here.stage, steps = problem.steps(first + s);
                const uint32_t sfa_at = tmem + SFA_COLUMN + s * SCALE_COLUMNS;
                const uint32_t sfb_at = tmem + SFB_COLUMN + s * (HALVES * SCALE_COLUMNS);
                if (i == 0) {
                    mbarrier_wait(shared_address(&shared.full[stage]), here.phase);
                    tcgen05_fence_after_thread_sync();
                    copy_scales(shared, stage, steps, halves, sfa_at, sfb_at);
                } else if (first == 0 && s == 0) {
                    mbarrier_wait(shared_address(&shared.common_free), (turn & 1) ^ 1);
                    tcgen05_fence_after_thread_sync();
                }
                // The half without common columns has the accumulator's number. It comes first, but last at the end. A
                // cut tile has no other, and its operands lie where a whole tile has those of half 0.
                const bool is_common = halves == 2 && (i == 1) != (is_last && first > 0);
                const int half = HALVES == 1 ? 0 : accumulator ^ is_common;
                const int source = halves == 1 ? 0 : half;
                multiply_half(d + half * HALF_N, a_stage_0 + stage * (SLABS * A_SLAB_BYTES / 16),
                              b_stage_0 + (stage * HALVES + source) * (SLABS * B_SLAB_BYTES / 16), sfa_at,
                              sfb_at + source * SCALE_COLUMNS, steps, first + s != 0);
                if (i == halves - 1) commit(shared.empty[stage]);
                if (is_last && s == stages - 1) commit(shared.accumulator_full[accumulator][half]);
            }
        }
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
    const TileList list(problem);
    for (int number = first_tile(); number < list.total; number += workers(), ++turn) {
        const Tile tile = list.tile(problem, number, cta_rank);
        const uint32_t accumulator = turn & 1;
        const int row = tile.row + warp * 32;
        // From the common columns to the other end: accumulator 0 has them last, accumulator 1 first. Of a cut tile there
        // is but the half without them, which is read last.
        constexpr int CHUNKS_A_HALF = CHUNKS / HALVES;
        const bool is_whole = tile.halves == HALVES;
#pragma unroll 1
        for (int i = is_whole ? 0 : CHUNKS_A_HALF; i < CHUNKS; ++i) {
            const int chunk = OVERLAP == 0 || accumulator == 1 ? i : CHUNKS - 1 - i;
            if (i % CHUNKS_A_HALF == 0) {
                const int half = chunk / CHUNKS_A_HALF;
                mbarrier_wait(shared_address(&shared.accumulator_full[accumulator][half]), turn >> 1 & 1);
                tcgen05_fence_after_thread_sync();
            }
            uint32_t sums[CHUNK_COLUMNS];
            __syncwarp();
            tcgen05_ld_32x32b(sums, lanes + accumulator * ACCUMULATOR_1 + chunk * CHUNK_COLUMNS);
            tcgen05_wait_ld();
#pragma unroll
            for (int j = 0; j < CHUNK_COLUMNS; ++j) pin_loaded(sums[j]);
            if (OVERLAP > 0 && i == 0) release_columns(shared.common_free, lane);
            if (i == CHUNKS - 1) release_columns(shared.free[accumulator], lane);

            const int column = tile.column + (is_whole ? chunk : chunk % CHUNKS_A_HALF) * CHUNK_COLUMNS;
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
        for (int i = 0; i < 2; ++i) {
            for (int h = 0; h < HALVES; ++h) mbarrier_init(shared_address(&shared.accumulator_full[i][h]), 1);
            mbarrier_init(shared_address(&shared.free[i]), FREE_ARRIVALS);
        }
        mbarrier_init(shared_address(&shared.common_free), FREE_ARRIVALS);
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
