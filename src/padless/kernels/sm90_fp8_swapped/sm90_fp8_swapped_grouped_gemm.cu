// Grouped GEMM on Hopper, FP8 (e4m3) with block scales, operands swapped: D[rows of g] = A[rows of g] * B[g]^T as in
// sm90_fp8_grouped_gemm.cu and with the same bits, computed as B[g] * A^T. Weights are the rows of the tensor core's products,
// which come in 64s, and tokens are their columns, which come in 8s: a group's rows are rounded up to 8 and not to 64.
//
//   A    (M, K) e4m3, sfa (M, ceil(K / 128)) float32, MN-major, one decode scale per 1 x 128
//   B    (G, N, K) e4m3, sfb (G, ceil(N / 128), ceil(K / 128)) float32, one decode scale per 128 x 128
//   offs (G) int32, cumulative end rows
//   D    (M, N) bf16 or fp16
//
// Arithmetic, per output element and in this order: for each 128 of K, four wgmma of 32 into fresh registers (the sum is
// symmetric in the operands), then d = fma(sum, sfa * sfb, d) in float32.
//
// A tile is 256 weights x at most BLOCK_M tokens. A consumer warpgroup has two m64s of weights, which share their 128 x 128 scale.
//
//      load warp                  scale warp                         consumer warpgroup
//      ---------                  ----------                         ------------------
//      wait empty[s]  <--------------------------------------------  arrive empty[s] after its products of s
//      load; full[s] (bytes) -->  wait full[s]; sfa * sfb
//                                 arrive scaled[s]  -------------->  wait scaled[s]; wgmma; promote
//
// The scale warp has seen full[s] before it arrives, so consumers do not wait for full[s] too. One warp schedules
// (device/tile_queue.cuh). CTAs are persistent. Padding-free rule as in sm90_fp8_grouped_gemm.cu: the store alone is bounded.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "sm90_fp8_swapped/wgmma_columns.cuh"

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/queue_start.cuh"
#include "sm90_fp8_swapped/order.cuh"
#include "sm90_fp8_swapped/storage.cuh"

#include "sm90_fp8_swapped/load.cuh"
#include "sm90_fp8_swapped/scales.cuh"
#include "sm90_fp8_swapped/multiply.cuh"
#include "sm90_fp8_swapped/store.cuh"

// Consumer: one tile, with the least instance of COLUMNS that holds its tokens.
template <int COLUMNS>
__device__ __forceinline__ void consume_tile(SharedStorage& shared, const Problem& problem,
                                             const StoreMaps& maps, const Tile& tile, int m64s, int warpgroup,
                                             int warp, int lane, Pipeline<STAGES>& pipeline, Reader& reader) {
    if constexpr (COLUMNS < BLOCK_M) {
        if (tile.rows > COLUMNS) {
            consume_tile<COLUMNS + STEP_M>(shared, problem, maps, tile, m64s, warpgroup, warp, lane, pipeline,
                                           reader);
            return;
        }
    }
    float d[WAVES][COLUMNS / 2];
    multiply_tile<COLUMNS>(d, shared, problem, m64s, warpgroup, lane, pipeline);
    if (lane == 0) reader.release();
    store_tile<COLUMNS>(d, shared, maps, tile, m64s, warpgroup, warp, lane);
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem,
                                              const StoreMaps& maps, int warpgroup, int warp, int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile{};
    while (reader.next(tile, lane)) {
        const int left = problem.m64s(tile) - warpgroup * WAVES, m64s = left < WAVES ? left : WAVES;
        if (m64s > 0) {
            consume_tile<STEP_M>(shared, problem, maps, tile, m64s, warpgroup, warp, lane, pipeline, reader);
        } else {
            skip_tile(shared, problem, lane, pipeline);
            if (lane == 0) reader.release();
        }
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_fp8_swapped_grouped_gemm(
    const __grid_constant__ TensorMap map_tokens, const __grid_constant__ TensorMap map_last_tokens,
    const __grid_constant__ TensorMap map_weights, const __grid_constant__ TensorMap map_sfa,
    const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_last_d, const float* sfb,
    const int* offs, int m, int n, int k, int num_groups, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{sfb, m, n, k, num_groups};
    constexpr int LOAD_WARP = NUM_CONSUMER_WARPS;  // first of the producer warpgroup
    const int end = load_ends_early<LOAD_WARP>(offs, num_groups, m);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            griddepcontrol_launch_dependents();
            prefetch_tensormap(map_tokens);
            prefetch_tensormap(map_last_tokens);
            prefetch_tensormap(map_weights);
            prefetch_tensormap(map_sfa);
            prefetch_tensormap(map_d);
            prefetch_tensormap(map_last_d);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.scaled[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS);
            }
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    const bool has_first_tile = start_queue<Order, LOAD_WARP, BLOCK_M, NUM_THREADS>(
        shared.queue, shared.groups, NUM_TILE_READERS, end, offs, num_groups, m, n, warp, lane);

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == LOAD_WARP) {
            if (elect_one())
                load_tiles(shared, problem, LoadMaps{map_tokens, map_last_tokens, map_weights, map_sfa});
        } else if (warp == LOAD_WARP + 1) {
            if (elect_one())
                schedule_tiles<1>(shared.queue, Order(shared.groups.table(num_groups), n), counter,
                                  blockIdx.x, gridDim.x, nullptr, has_first_tile);
        } else if (warp == LOAD_WARP + 2) {
            write_scales(shared, problem, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, StoreMaps{map_d, map_last_d}, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
