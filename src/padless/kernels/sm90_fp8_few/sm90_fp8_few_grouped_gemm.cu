// Grouped GEMM on Hopper, FP8_BLOCK, for groups of few rows: D[rows of g] = A[rows of g] * B[g]^T for every group g, with the
// groups' rows one after the other in A and D and no padding between them. Operands, arithmetic and bits are those of
// sm90_fp8_grouped_gemm.cu; what differs is which operand is on which side of the tensor core.
//
// An instruction has 64 rows on one side, and 8 to 64 columns on the other. Here the weights are its rows and the tokens its
// columns, so that a group of 3 tokens costs 8 columns and not 64 rows: a K block takes a quarter of the time, and the loads set
// the pace.
//
// Roles. A producer warpgroup, in which one thread drives TMA and one schedules (device/tile_queue.cuh); two consumer
// warpgroups with M64S_OF_WARPGROUP m64s of 64 weight rows each. CTAs are persistent.
//
//      producer                                     consumer warpgroup
//      --------                                     ------------------
//      wait empty[s]  <------- arrive empty[s] ---  ... after the products of stage s, and the promotion
//      load A, B, sfa --> full[s] (bytes) ------->  wait full[s]; wgmma; promote
//
// With `is_ready` the groups' table, the queue's first tile and its weights do not wait for the kernels ahead (device/ahead.cuh).
// Who touches anything else does first: the producer ahead of the tokens, the scheduler ahead of its counter, the consumers.
//
// Padding-free rule: as in sm90_fp8_grouped_gemm.cu. The store alone is bounded, by the ragged descriptor of
// device/sm90/output.cuh, or by the rows that exist.
//
// With EPILOGUE_IS_QUANT the store is that of device/sm90/transposed_quant.cuh, which quantizes the tile: 256 weight rows of gate
// and up hold a whole block of 128 outputs, so no cluster is needed.

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
#include "device/ptx/wgmma_few_columns.cuh"

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/queue_start.cuh"
#include "device/weights_prefetch.cuh"
#include "sm90_fp8_few/storage.cuh"
#include "device/ahead.cuh"
#include "device/queue_start_ahead.cuh"
#include "sm90_fp8_few/load.cuh"
#include "sm90_fp8_few/multiply.cuh"
#if EPILOGUE_IS_QUANT
using StoreMaps = DirectOutputs;
#else
#include "device/sm90/transposed_store.cuh"
using StoreMaps = TensorMap;
#endif

__device__
__forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem, const StoreMaps& store_maps,
                                   int warpgroup, int warp, int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile{};
    while (reader.next(tile, lane)) {
        float d[M64S][BLOCK_M / 2];
        multiply_tile(d, shared, problem, tile, warpgroup, warp, lane, pipeline);
        if (lane == 0) reader.release();
#if EPILOGUE_IS_QUANT
        const int start = tile.group == 0 ? 0 : shared.groups.sorted.ends[tile.group - 1];
        const Placement place{tile.group, start, shared.groups.sorted.ends[tile.group] - start,
                              HAS_GROUP_TILES ? shared.group_tiles[tile.group] : 0};
        store_quantized(d, shared.d, store_maps, place, tile, problem.n, warpgroup, warp, lane);
#else
#pragma unroll
        for (int u = 0; u < M64S; ++u)
            store_m64(d[u], shared.d[warpgroup], problem.n, store_maps, tile,
                      tile.column + (warpgroup * M64S + u) * WGMMA_M, warpgroup, warp, lane);
#endif
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_fp8_few_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ StoreMaps store_maps, const float* sfb,
    const int* offs, int m, int n, int k, int num_groups, int counter, int is_ready, const uint32_t* ids,
    int id_bytes) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{sfb, m, n, k, num_groups};
    constexpr int LOAD_WARP = NUM_CONSUMER_WARPS, SCHEDULE_WARP = LOAD_WARP + 1;
    const IdsAhead ahead{ids, id_bytes};
    const bool are_few = num_groups <= SMALL_TABLE;
    int end = 0;
    if (are_few && ids != nullptr)
        end = count_ends_early<LOAD_WARP, NUM_THREADS>(shared.groups, ahead, m, num_groups);
    else if (are_few && threadIdx.x / 32 == LOAD_WARP) {  // not by load_ends_ahead: that makes 70 R2UR more
        if (!is_ready) griddepcontrol_wait();
        if (threadIdx.x % 32 < num_groups) end = load_end_ahead(offs, m, threadIdx.x % 32);
    }
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == LOAD_WARP) {
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            prefetch_tensormap(map_sfa);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS);
            }
        }
        __syncwarp();  // the fence is make_queue's
    }
    if constexpr (!GATE_AND_UP_APART) {  // else the boxes are others
        if (!is_ready && warp == LOAD_WARP + 2 && elect_one())
            prefetch_weights<BLOCK_N, BLOCK_K>(map_b, n, problem.k_blocks(), num_groups);
    }
    const bool has_first_tile = start_queue_ahead<Order, LOAD_WARP, BLOCK_M, NUM_THREADS>(
        shared.queue, shared.groups, NUM_TILE_READERS, end, offs, ahead, is_ready, num_groups, m, n, warp,
        lane,
        [&](const Tile& tile) { load_first_stages(shared, problem, map_a, map_b, map_sfa, tile, is_ready); });
#if EPILOGUE_IS_QUANT
    if constexpr (HAS_GROUP_TILES) {
        if (warp == 1) count_row_tiles(shared.groups.sorted.ends, num_groups, shared.group_tiles, lane);
        __syncthreads();
    }
#endif

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == LOAD_WARP) {
            if (elect_one()) {
                load_tiles(shared, problem, map_a, map_b, map_sfa, has_first_tile, is_ready);
                if (RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        } else if (warp == SCHEDULE_WARP) {
            if (elect_one()) {
                griddepcontrol_wait();
                schedule_tiles<1>(shared.queue, Order(shared.groups.table(), n), counter, blockIdx.x,
                                  gridDim.x, nullptr, has_first_tile);
                if (!RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        consume_tiles(shared, problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
