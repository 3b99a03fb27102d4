// Grouped GEMM on Hopper for every pair of formats whose values are exact in bf16: D[rows of g] = A[rows of g] * B[g]^T
// for every group g, with the groups' rows one after the other in A and D and no padding between them.
//
//   A    (M, K) activations ("tokens"): bf16, FP8_BLOCK, MXFP8 (e4m3, e5m2), MXFP4 or NVFP4
//   B    (G, N, K) weights: MXFP8 (e4m3, e5m2), MXFP4 or NVFP4; FP8_BLOCK beside bf16
//   sfa  one-byte scales (M, ceil(K / 32 or 16)) row-major; float32, any strides, for FP8_BLOCK; none for bf16
//   sfb  one-byte scales (G, N, ceil(K / 32 or 16)) row-major, or in the 32x4x4 layout; float32 (G, ceil(N / 128),
//        ceil(K / 128)) for FP8_BLOCK
//   offs (G) int32, cumulative end rows, or null for one group of M rows
//   D    (M, N) bf16, fp16 or float32
//
// Arithmetic, per output element: code * scale is exact in bf16 (sm90_bf16/dequantize.cuh names the limits); the tensor core adds
// 16 products to its float32 sum at a time (25 fractional bits of the largest term, truncated). FP8_BLOCK: for each 128 of
// K, d = fma(sum, sfa or sfb, d) in float32. At the end d * 2^s * (global scale of a * global scale of b), 2^s being exact.
//
// The product is made transposed: 64 weight rows are the M side of an instruction, read from registers, and the tokens its
// N side, read from shared memory. Weights go from shared memory, as they came, to bf16 fragments in the registers of the
// warpgroup that multiplies them; tokens, which all those warpgroups need, are dequantised once by converter warps.
//
// Roles. NUM_MMA_WARPGROUPS consumer warpgroups with M64S_OF_WARPGROUP m64s of 64 weight rows each, two or four converter
// warps, and two of whose threads one drives TMA and one schedules. CTAs are persistent.
//
//      producer                        converter                         consumer warpgroup
//      --------                        ---------                         ------------------
//      wait empty[s]  <-------------- arrive empty[s] <----------------- arrive empty[s], products of its last codes issued
//      load --> full[s] (bytes) -----> wait full[s] -------------------> wait full[s]; weights to bf16 fragments
//                                      wait tokens_empty[t] <----------- arrive tokens_empty[t] after the products
//                                      tokens to bf16 in shared memory
//                                      arrive tokens_full[t] ----------> wait tokens_full[t]; wgmma
//      (all three read the tile queue of device/tile_queue.cuh; where BEGINS_IN_F16 converters and consumers wait for checked[s],
//      which the checker warps arrive on when they have looked at the scales of full[s]: two warps beside the producer, or,
//      where there are none to spare, the converters)
//
// With `is_ready` the groups' table, the queue's first tile and its weights do not wait for the kernels ahead (device/ahead.cuh).
// Who touches anything else does first: the producer ahead of the tokens, the scheduler ahead of its counter, converters ahead of
// float32 scales, the consumers.
//
// K block: 128 of K. A stage s, or t, holds STAGE_BLOCKS of them.
//
// K order: inside 128 of K, lane quad q = lane % 4 has codes 32 q .. 32 q + 31 of its row, four octets of them; octet s
// feeds the instructions 2 s and 2 s + 1 of 16. The sum does not change under a permutation of K that both operands share.
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M read as
// zero); the store alone is bounded, by the ragged descriptor of device/sm90/output.cuh. No row of another group and no row past
// offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of device/sm90/transposed_quant.cuh, which quantises the tile.

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/dequantize.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/strong_memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_5d.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_m64k16.cuh"

// In this order: later ones use earlier ones.
#include "sm90_bf16/dequantize.cuh"
#include "sm90_bf16/repacked.cuh"
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/queue_start.cuh"
#include "device/weights_prefetch.cuh"
#include "sm90_bf16/storage.cuh"
#include "device/ahead.cuh"
#include "device/queue_start_ahead.cuh"
#include "sm90_bf16/load.cuh"
#include "sm90_bf16/tokens.cuh"
#include "sm90_bf16/weights.cuh"
#include "sm90_bf16/multiply.cuh"

#if EPILOGUE_IS_QUANT
using StoreMaps = DirectOutputs;
#else
#include "device/sm90/transposed_store.cuh"
using StoreMaps = TensorMap;
#endif

// The product of the global scales of a group.
__device__ __forceinline__ float global_scale(const Problem& problem, int group) {
    const float a =
        problem.global_a == nullptr ? 1.0f : __ldg(problem.global_a + group * problem.global_a_stride);
    const float b =
        problem.global_b == nullptr ? 1.0f : __ldg(problem.global_b + group * problem.global_b_stride);
    return a * b;
}

// Consumer: d = this warpgroup's m64s of a tile of at most ROWS tokens. The sums of other tokens are 0: the store is the same for
// all tiles, and drops them.
template <int ROWS>
__device__ __forceinline__ void make_sums(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                          const Problem& problem, const Tile& tile, const WeightLane& weights,
                                          int lane, Pipeline<STAGES>& pipeline,
                                          Pipeline<TOKEN_STAGES>& ring) {
    const float both = HAS_GLOBAL_SCALES ? global_scale(problem, tile.group) : 1.0f;  // on its way meanwhile
    const float rest = multiply_tile<ROWS>(d, shared, problem, tile, weights, lane, pipeline, ring);
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) {
            if (i >= ROWS / 2) d[u][i] = 0.0f;
            // With them, what NVFP4_SHIFT took away.
            if constexpr (HAS_GLOBAL_SCALES) d[u][i] = d[u][i] * static_cast<float>(1 << SHIFT) * both;
            if constexpr (BEGINS_IN_F16) d[u][i] *= rest;
            // Else the compiler does this for tiles of both sizes together, and ptxas serialises their products (C7515).
            if constexpr (BOX_ROWS < BLOCK_M) pin_register(d[u][i]);
        }
    }
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem,
                                              const StoreMaps& store_maps, int warpgroup, int warp,
                                              int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<TOKEN_STAGES> ring;
    const WeightLane weights(shared, problem, warpgroup, warp, lane);
    Tile tile{};
    while (reader.next(tile, lane)) {
        float d[M64S][BLOCK_M / 2];
        if (BOX_ROWS == BLOCK_M || tile.rows <= BOX_ROWS)
            make_sums<BOX_ROWS>(d, shared, problem, tile, weights, lane, pipeline, ring);
        else
            make_sums<BLOCK_M>(d, shared, problem, tile, weights, lane, pipeline, ring);
        if constexpr (BOX_ROWS < BLOCK_M) {  // read again: kept meanwhile it would exceed the registers
            tile = Tile{};
            reader.next(tile, lane);
        }
        if (lane == 0) reader.release();
#if EPILOGUE_IS_QUANT
        const int start = tile.group == 0 ? 0 : shared.groups.sorted.ends[tile.group - 1];
        const Placement place{tile.group, start, shared.groups.sorted.ends[tile.group] - start,
                              HAS_GROUP_TILES ? shared.group_tiles[tile.group] : 0};
        store_quantized(d, shared.d, store_maps, place, tile, problem.n, warpgroup, warp, lane);
#else
#pragma unroll
        for (int u = 0; u < M64S_OF_WARPGROUP; ++u) {
            const int column = tile.column + (warpgroup * M64S_OF_WARPGROUP + u) * WGMMA_M;
            store_m64(d[u], shared.d[warpgroup], problem.n, store_maps, tile, column, warpgroup, warp, lane);
        }
#endif
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

// One thread: what else a tile's first stage waits for, fetched into L2 like the first weights (device/weights_prefetch.cuh): the weights'
// first scales, another tile's in every CTA, and of the tokens and their scales, which all CTAs read, a K block of a tile's rows.
__device__ __forceinline__ void prefetch_rest(const Problem& problem, const TensorMap& map_a,
                                              const TensorMap& map_sfa, const TensorMap& map_sfb) {
    const int n_tiles = (problem.n + BLOCK_N - 1) / BLOCK_N;
    const int group = blockIdx.x / n_tiles;
    if (SFB_BYTES != 0 && !SFB_IS_BLOCKED && group < problem.num_groups)
        tma_prefetch_3d(map_sfb, 0, blockIdx.x % n_tiles * BLOCK_N, group);
    const int boxes = (problem.m + BOX_ROWS - 1) / BOX_ROWS;
    if (boxes == 0) return;
    const int kb = blockIdx.x / boxes, row = blockIdx.x % boxes * BOX_ROWS;
    if (kb * BLOCK_K >= problem.k) return;
    tma_prefetch_2d(map_a, A_FORMAT == FORMAT_BF16 ? kb * BLOCK_K : kb * row_bytes(A_FORMAT), row);
    if constexpr (SFA_BYTES != 0)
        tma_prefetch_2d(map_sfa, kb * scales_of_128(A_FORMAT) - scale_offset<A_FORMAT>(kb), row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_bf16_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ TensorMap map_sfb,
    const __grid_constant__ StoreMaps store_maps, const float* scales, long long scales_row_stride,
    long long scales_k_stride, const float* global_a, const float* global_b, int global_a_stride,
    int global_b_stride, const int* offs, int m, int n, int k, int num_groups, int counter, int is_ready) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{scales,
                          scales_row_stride,
                          scales_k_stride,
                          global_a,
                          global_b,
                          global_a_stride,
                          global_b_stride,
                          m,
                          n,
                          k,
                          num_groups};
    constexpr int FIRST_PRODUCER_WARP = NUM_CONSUMER_WARPS + NUM_CONVERTER_WARPS;
    const int end = load_ends_ahead<FIRST_PRODUCER_WARP>(offs, is_ready, num_groups, m);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == FIRST_PRODUCER_WARP) {
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            if constexpr (SFA_BYTES != 0) prefetch_tensormap(map_sfa);
            if constexpr (SFB_BYTES != 0) prefetch_tensormap(map_sfb);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_TILE_READERS - 1);
                if (BEGINS_IN_F16) mbarrier_init(shared_address(&shared.checked[s]), NUM_CHECKER_WARPS);
            }
            for (int s = 0; s < TOKEN_STAGES; ++s) {
                mbarrier_init(shared_address(&shared.tokens_full[s]), NUM_CONVERTER_WARPS * TOKEN_ARRIVALS);
                mbarrier_init(shared_address(&shared.tokens_empty[s]), NUM_CONSUMER_WARPS * TOKEN_ARRIVALS);
            }
        }
        __syncwarp();  // the fence is make_queue's
    }
    if constexpr (!GATE_AND_UP_APART) {  // else the boxes are others
        if (!is_ready && warp == 2 && elect_one()) {
            if constexpr (B_IS_REPACKED)
                prefetch_code_tiles<BLOCK_N>(map_b, n, k, num_groups);
            else
                prefetch_weights<BLOCK_N, row_bytes(B_FORMAT)>(map_b, n, (k + BLOCK_K - 1) / BLOCK_K,
                                                               num_groups);
        }
        if (!is_ready && warp == 3 && elect_one()) prefetch_rest(problem, map_a, map_sfa, map_sfb);
    }
    const bool has_first_tile = start_queue_ahead<Order, FIRST_PRODUCER_WARP, BLOCK_M, NUM_THREADS>(
        shared.queue, shared.groups, NUM_TILE_READERS, end, offs, IdsAhead{}, is_ready, num_groups, m, n,
        warp, lane, [&](const Tile& tile) {
            load_first_stages(shared, problem, map_a, map_b, map_sfa, map_sfb, tile, is_ready);
        });
#if EPILOGUE_IS_QUANT
    if constexpr (HAS_GROUP_TILES) {
        if (warp == 1) count_row_tiles(shared.groups.sorted.ends, num_groups, shared.group_tiles, lane);
        __syncthreads();
    }
#endif

    if (HELPERS_TOGETHER && warp >= NUM_CONSUMER_WARPS) setmaxnreg_dec<CONVERTER_REGISTERS>();
    if (warp >= FIRST_PRODUCER_WARP) {
        if constexpr (!HELPERS_TOGETHER) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == FIRST_PRODUCER_WARP) {
            if (elect_one()) {
                load_tiles(shared, problem, map_a, map_b, map_sfa, map_sfb, has_first_tile, is_ready);
                if (RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        } else if (warp == FIRST_PRODUCER_WARP + 1) {
            if (elect_one()) {
                griddepcontrol_wait();
                schedule_tiles<1>(shared.queue, Order(shared.groups.table(), n), counter, blockIdx.x,
                                  gridDim.x, nullptr, has_first_tile);
                if (!RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        } else if constexpr (CHECKERS_APART) {
            check_tiles(shared, problem, warp - (FIRST_PRODUCER_WARP + 2), lane);
        }
        __syncwarp();
    } else if (warp >= NUM_CONSUMER_WARPS) {
        if constexpr (!HELPERS_TOGETHER) setmaxnreg_dec<CONVERTER_REGISTERS>();
        if constexpr (HAS_TOKEN_SCALES) griddepcontrol_wait();
        convert_tiles(shared, problem, warp - NUM_CONSUMER_WARPS, lane);
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        consume_tiles(shared, problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
