// Weight gradients of grouped layers on Blackwell, MXFP8: D[g] = A_g^T * B_g, summed over the tokens of group g.
//
//   A    (M, N) e4m3, dY, and sfa (4 * T, N) UE8M0: a scale per feature and 32 tokens
//   B    (M, K) e4m3, X, and sfb (4 * T, K)
//   D    (G, N, K) bf16 or float32, stored; or float32, added to
//
// which are the outputs along M of a quantizing epilogue ("plain"): codes lie as the rows do, and blocks of 32 tokens count from
// a group's first one; block i of group g has row 4 * t(g) + i of the scales, t(g) being the sum of ceil(M_h / 128) over h < g.
// In the code rows are features of dY, columns are features of X. The tensor core reads both operands MN-major: nothing is
// transposed or copied, and a group may start at any token.
//
// Arithmetic, per output element: the tensor core adds the scaled products of 32 tokens to a float32 accumulator, from the group's
// first token on. The sum is stored rounded to nearest even, or added to what was there, in float32.
//
// With CTA_GROUP = 2 a pair of CTAs multiplies as one, 256 x 256: each has 128 rows of the tile, and loads its rows' features of
// A, half of the columns' of B, and the scales of its rows and of all columns.
//
// Roles, by warp. A CTA, or a pair, has one tile of one group. * marks what only the even CTA of a pair does.
//
//   0-3  store        4  load A and B        5  multiply *        6  scales of A        7, of a pair 8  scales of B, 128 columns each
//
//      4, 6, 7, 8                               5                                0-3
//      ----------                               -                                ---
//      wait empty[s] <---------- commits -----  ... after the products of s
//      load --> full[s] (bytes, arrivals) --->  wait full[s]; cp scales; mma
//                                               mma of the tile; commit --> done  -> wait done; ld; store
//
// full: in the even CTA of a pair, signalled by both; empty, done: one in each CTA, committed to both.
//
// Padding-free rule: no byte of another group is multiplied. A group's last block of tokens is read through a map that ends at the
// group's last token, behind which the copy engine writes zeros (device/sm90/output.cuh has the method); steps of 32 tokens
// that have none of the group are not issued.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tcgen05.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_sm100.cuh"

#include "device/sm100/descriptors.cuh"
#include "device/pipeline.cuh"
#include "sm100_mxfp8_wgrad/storage.cuh"

__device__ __forceinline__ int pair_rank() {
    return CTA_GROUP == 1 ? 0 : static_cast<int>(cluster_cta_rank());
}

// Codes of a stage, one thread: this CTA's part.
__device__ __forceinline__ void load_codes(SharedStorage& shared, const Rows& a, const Rows& b,
                                           const Tile& tile) {
    Pipeline<STAGES> pipeline;
    for (int block = 0; block < tile.blocks(); ++block) {
        const int stage = pipeline.stage;
        uint32_t full = shared_address(&shared.full[stage]);
        mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
        if (pair_rank() == 0) mbarrier_arrive_expect_tx(full, CTA_GROUP * 2 * OPERAND_BYTES);
        if constexpr (CTA_GROUP == 2) full = pair_even_address(full);
        const int token = tile.end - tile.tokens + block * BLOCK_T;
        load_block(a, shared.a[stage], full, tile.row + pair_rank() * PART, token, tile.end);
        load_block(b, shared.b[stage], full, tile.column + pair_rank() * PART, token, tile.end);
        pipeline.advance();
    }
    for (int s = 0; CTA_GROUP == 2 && s < STAGES; ++s) {  // no commit may arrive here once the CTA is gone
        mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);
        pipeline.advance();
    }
}

// A byte to a step of each of a lane's rows of an atom: l, l + 32, l + 64 and l + 96.
using LaneScales = uint32_t[4][STEPS];

// A lane's scales of a block. All loads together, with no branch between them, so that they are under way at the same time. What does
// not exist is read as a neighbour: features behind the last are not stored, and steps behind the last are not issued.
__device__ __forceinline__ void fetch_scales(LaneScales& scales, const uint8_t* first, int features,
                                             int feature, int block, int exist) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int number = block * STEPS + step < exist ? block * STEPS + step : exist - 1;
        const uint8_t* const of_step = first + static_cast<long long>(number) * features;
#pragma unroll
        for (int j = 0; j < 4; ++j) scales[j][step] = __ldg(of_step + min(feature + 32 * j, features - 1));
    }
}

// Scales of 128 features of an operand, one warp. Those of the next block are on their way while a stage is waited for.
__device__ __forceinline__ void load_scales(SharedStorage& shared, uint8_t (*atoms)[SCALE_ATOM_BYTES],
                                            const uint8_t* scales, int features, int feature,
                                            const Tile& tile, int lane) {
    Pipeline<STAGES> pipeline;
    const int exist = (tile.tokens + MMA_T - 1) / MMA_T;
    const uint8_t* const first = scales + static_cast<long long>(tile.first_scales) * features;
    LaneScales next;
    if (tile.tokens > 0) fetch_scales(next, first, features, feature + lane, 0, exist);
    for (int block = 0; block < tile.blocks(); ++block) {
        uint32_t words[4] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int step = 0; step < STEPS; ++step) words[j] |= next[j][step] << 8 * step;
        fetch_scales(next, first, features, feature + lane, block + 1, exist);
        mbarrier_wait(shared_address(&shared.empty[pipeline.stage]), pipeline.phase ^ 1);
        st_shared_v4_b32(shared_address(atoms[pipeline.stage]) + lane * 16, words[0], words[1], words[2],
                         words[3]);
        fence_proxy_async_shared();
        __syncwarp();
        if (lane == 0) {
            const uint32_t full = shared_address(&shared.full[pipeline.stage]);
            if constexpr (CTA_GROUP == 1)
                mbarrier_arrive(full);
            else
                mbarrier_arrive_release_cluster(full, 0);
        }
        pipeline.advance();
    }
}

// One arrival, after all products so far, on the barrier of every CTA that takes part.
__device__ __forceinline__ void commit(uint32_t barrier) {
    if constexpr (CTA_GROUP == 1)
        tcgen05_commit(barrier);
    else
        tcgen05_commit_multicast<CTA_GROUP>(barrier, 3);
}

// Products, one thread, of the even CTA. `tmem`: first column of the allocation.
__device__ __forceinline__ void issue_mma(SharedStorage& shared, const Tile& tile, uint32_t tmem) {
    Pipeline<STAGES> pipeline;
    for (int block = 0; block < tile.blocks(); ++block) {
        const int stage = pipeline.stage;
        const uint32_t full = shared_address(&shared.full[stage]);
        if constexpr (CTA_GROUP == 1)
            mbarrier_wait(full, pipeline.phase);
        else
            mbarrier_wait_cluster(full, pipeline.phase);
        tcgen05_fence_after_thread_sync();
        const uint32_t a = tcgen05_descriptor_low(shared_address(shared.a[stage]));
        const uint32_t b = tcgen05_descriptor_low(shared_address(shared.b[stage]));
        tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
            tmem + SFA_COLUMN,
            scale_atom_descriptor(tcgen05_descriptor_low(shared_address(shared.sfa[stage]))));
#pragma unroll
        for (int part = 0; part < CTA_GROUP; ++part)
            tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                tmem + SFB_COLUMN + part * SCALE_ATOM_COLUMNS,
                scale_atom_descriptor(tcgen05_descriptor_low(shared_address(shared.sfb[part][stage]))));
        const int steps = tile.steps(block);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            if (step >= steps) break;
            tcgen05_mma_mxf8f6f4_block32<CTA_GROUP>(
                tmem, tcgen05_operand_descriptor(a + step * (STEP_BYTES / 16)),
                tcgen05_operand_descriptor(b + step * (STEP_BYTES / 16)), SHAPE | scale_ids(step),
                tmem + SFA_COLUMN, tmem + SFB_COLUMN, block != 0 || step != 0);
        }
        commit(shared_address(&shared.empty[stage]));
        pipeline.advance();
    }
    if (tile.tokens > 0) commit(shared_address(&shared.done));
}

// One warp: 32 rows of the tile, one to a lane.
__device__ __forceinline__ void store_tile(SharedStorage& shared, const Gradient& d, const Tile& tile,
                                           uint32_t tmem, int warp, int lane) {
    if (tile.tokens > 0) {
        mbarrier_wait(shared_address(&shared.done), 0);
        tcgen05_fence_after_thread_sync();
    } else if (ACCUMULATE) {
        return;
    }
    const int row = tile.row + pair_rank() * PART + warp * 32 + lane;
#pragma unroll 1
    for (int column = 0; column < TILE; column += 32) {
        uint32_t sums[32] = {};
        if (tile.tokens > 0) {
            __syncwarp();
            tcgen05_ld_32x32b(sums, tmem + (warp * 32 << 16) + column);
            tcgen05_wait_ld();
#pragma unroll
            for (int i = 0; i < 32; ++i) pin_loaded(sums[i]);
        }
        store_sums(d, sums, tile.group, row, tile.column + column);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm100_mxfp8_wgrad(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_a_ragged,
    const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_b_ragged,
    const uint8_t* sfa, const uint8_t* sfb, const int* offs, void* out, long long group_stride,
    long long row_stride, int n_rows, int n_columns, int tokens, int scale_rows) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);
    const int lane = threadIdx.x % 32;
    const Tile tile = tile_of(blockIdx.x / CTA_GROUP, offs, n_rows, n_columns, tokens, scale_rows, lane);
    const Gradient d{out, group_stride, row_stride, n_rows, n_columns};

    if (warp == 0 && elect_one()) {
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), FULL_ARRIVALS);
            mbarrier_init(shared_address(&shared.empty[s]), 1);
        }
        mbarrier_init(shared_address(&shared.done), 1);
        fence_mbarrier_init();
    }
    if (warp == LOAD_WARP && elect_one()) {
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_a_ragged);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_b_ragged);
    }
    __syncwarp();
    if (warp == MMA_WARP) {
        tcgen05_alloc<CTA_GROUP, TMEM_COLUMNS>(shared_address(&shared.tensor_memory));
        tcgen05_relinquish_alloc_permit<CTA_GROUP>();
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if constexpr (CTA_GROUP == 2) {  // no signal may reach a barrier that its CTA has not made yet
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    tcgen05_fence_after_thread_sync();
    const uint32_t tmem = shared.tensor_memory;

    if (warp == LOAD_WARP) {
        if (elect_one()) load_codes(shared, Rows{map_a, map_a_ragged}, Rows{map_b, map_b_ragged}, tile);
    } else if (warp == MMA_WARP) {
        if (pair_rank() == 0 && elect_one()) issue_mma(shared, tile, tmem);
    } else if (warp == SFA_WARP) {
        load_scales(shared, shared.sfa, sfa, n_rows, tile.row + pair_rank() * PART, tile, lane);
    } else if (warp >= SFB_WARP) {
        const int part = warp - SFB_WARP;
        load_scales(shared, shared.sfb[part], sfb, n_columns, tile.column + part * PART, tile, lane);
    } else {
        store_tile(shared, d, tile, tmem, warp, lane);
    }

    // No warp may free tensor memory while another reads it, nor leave while its peer may still signal it or use its memories.
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
