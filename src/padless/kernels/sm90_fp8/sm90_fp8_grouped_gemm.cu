// Grouped GEMM on Hopper, FP8 (e4m3) with block scales: D[rows of g] = A[rows of g] * B[g]^T for every group g, with
// the groups' rows one after the other in A and D and no padding between them.
//
//   A    (M, K) e4m3, sfa (M, ceil(K / 128)) float32, one decode scale per 1 x 128
//   B    (G, N, K) e4m3, sfb (G, ceil(N / 128), ceil(K / 128)) float32, one decode scale per 128 x 128
//   offs (G) int32, cumulative end rows
//   D    (M, N) bf16, fp16 or float32
//
// Arithmetic, per output element and in this order: for each 128 of K, the tensor core sums the products (its FP8
// path keeps 13 fractional bits of the largest term), then d = fma(sum, sfa * sfb, d) in float32.
//
// Roles. One producer warpgroup, in which one thread drives TMA, one the scheduler (device/tile_queue.cuh), and a
// warp or two store finished tiles (sm90_fp8/store.cuh); NUM_MMA_WARPGROUPS consumer warpgroups with the tile in
// registers, 64 rows to a wave. CTAs are persistent.
//
//      producer                                     consumer warpgroup
//      --------                                     ------------------
//      wait queue full[q]                           wait queue full[q]       (the scheduler thread fills the queue)
//      wait empty[s]  <------- arrive empty[s] ---  ... after the products of stage s are done
//      load A, B, sfa --> full[s] (bytes) ------->  wait full[s]; wgmma; promote
//      arrive queue empty[q]                        arrive queue empty[q] at the end of the tile
//      wait window_empty <---- arrive ------------  ... after the last scale of the tile is read   } row-major
//      load scale window --> window_full --------->  wait window_full                             } scales only
//
// With `is_ready` the groups' table, the queue's first tile and its weights do not wait for the kernels ahead (device/ahead.cuh).
// Who touches anything else does first, or comes behind one who has: the producer ahead of the rows, the scheduler ahead of
// its counter, the consumers.
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M
// read as zero); the store alone is bounded, by one of the two ways of device/sm90/output.cuh. No row of another group and no
// row past offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of device/sm90/quant_store.cuh, which quantises the tile; a GLU epilogue has the
// gate's and the up projection's columns in the same tile (product_column).
//
// With LOW_RANK_STEPS, 16 columns each, and such a store, the tensor core sums t[row] * factor[g]^T of bf16 values behind the last 128 of K, and
// d = fma(sum, scaling, d): t (M, rank) and factor (G, N, rank), one more stage of the ring.

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif
#ifndef LOW_RANK_STEPS
#define LOW_RANK_STEPS 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/strong_memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#if LOW_RANK_STEPS > 0
#include "device/ptx/wgmma_m64k16_shared.cuh"
#endif

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/sm90/row_box.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/weights_prefetch.cuh"
#if EPILOGUE_IS_QUANT
#include "device/ptx/conversion.cuh"
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/quant_outputs.cuh"
#include "device/sm90/wgmma_fragment.cuh"
constexpr bool GATE_AND_UP_APART = GLU == GLU_CONCATENATED;
constexpr bool COLUMNS_ARE_INTERLEAVED = true;
#else
constexpr bool GATE_AND_UP_APART = false;
constexpr bool COLUMNS_ARE_INTERLEAVED = false;
#endif

#include "sm90_fp8/storage.cuh"

#include "device/ahead.cuh"
#include "sm90_fp8/load.cuh"
#include "sm90_fp8/multiply.cuh"
#if LOW_RANK_STEPS > 0
#include "sm90_fp8/low_rank.cuh"
#endif
#if EPILOGUE_IS_QUANT
using StoreMaps = QuantOutputs;
#include "device/sm90/quant_store.cuh"
#else
#include "sm90_fp8/store.cuh"
#endif

constexpr uint32_t START_BARRIER = 7;  // the store has the first ones

// Consumer: one tile of which NUM_WAVES m64s belong to this warpgroup.
template <int NUM_WAVES>
__device__ __forceinline__ void consume_tile(SharedStorage& shared, const Problem& problem,
                                             const StoreMaps& store_maps, const Tile& tile, int warpgroup,
                                             int warp, int lane, Pipeline<STAGES>& pipeline, Reader& reader) {
    const int column = cta_column(tile);
    const int first = WAVES == 1 ? warpgroup : first_m64(warpgroup, tile.rows);
    const int row = first * WGMMA_M + warp * 16 + lane / 4;
    float d[WAVES][BLOCK_N / 2];
    multiply_tile<NUM_WAVES>(d, shared, problem, tile, column, first, row, lane, pipeline);
#if LOW_RANK_STEPS > 0
    add_low_rank<NUM_WAVES>(d, shared, problem, first, lane, pipeline);
#endif
    if (lane == 0) reader.release();
    store_tile<NUM_WAVES>(d, shared, problem, store_maps, tile, column, warpgroup, warp, lane);
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem,
                                              const StoreMaps& store_maps, int warpgroup, int warp,
                                              int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    uint32_t window_phase = 0;
    Tile tile{};
    while (reader.next(tile, lane)) {
        if constexpr (SCALES_K_MAJOR) mbarrier_wait(shared_address(&shared.window_full), window_phase);
        const int m64s = m64s_of(tile.rows);
        if (WAVES == 2 && warpgroup + NUM_MMA_WARPGROUPS < m64s)
            consume_tile<WAVES>(shared, problem, store_maps, tile, warpgroup, warp, lane, pipeline, reader);
        else if (warpgroup < m64s)
            consume_tile<1>(shared, problem, store_maps, tile, warpgroup, warp, lane, pipeline, reader);
        else
            skip_tile(shared, problem, lane, pipeline, reader);
        reader.advance();
        if constexpr (SCALES_K_MAJOR) {
            if (lane == 0) mbarrier_arrive(shared_address(&shared.window_empty));
            window_phase ^= 1;
        }
    }
    if (CONSUMERS_STORE && warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_fp8_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ StoreMaps store_maps, const float* sfb,
    const int* offs, int m, int n, int k, int num_groups, int counter, int is_ready
#if !EPILOGUE_IS_QUANT
    ,
    const uint8_t* b, long long b_row_bytes, long long b_group_bytes
#endif
#if LOW_RANK_STEPS > 0
    ,
    const __grid_constant__ TensorMap map_t, const __grid_constant__ TensorMap map_factor, float scaling
#endif
) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
#if LOW_RANK_STEPS > 0
    const Problem problem{sfb, m, n, k, num_groups, &map_t, &map_factor, scaling};
#else
    const Problem problem{sfb, m, n, k, num_groups};
#endif
    const int lane = threadIdx.x % 32;
    constexpr int LOAD_WARP = NUM_CONSUMER_WARPS;  // first of the producer warpgroup

    // Nothing can be loaded before offs are here. So they are asked for first of all, by the warp that loads, and what it
    // does not need them for is done meanwhile, here and in the other warps. Nothing of global memory is touched before the
    // kernels ahead have ended, which may still be writing it: this kernel may begin before (LaunchShape.programmatic).
    const bool has_small_table = num_groups <= SMALL_TABLE;
    const int load_lane = threadIdx.x - LOAD_WARP * 32;  // lane apart from `lane`, which the main loop keeps
    int end = 0;
    if (threadIdx.x / 32 == LOAD_WARP && has_small_table) {
        if (!is_ready) griddepcontrol_wait();
        if (load_lane < num_groups) end = load_end_ahead(offs, m, load_lane);
    }
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == LOAD_WARP) {
        uint32_t n_tiles = Order::tiles_along(n), worker = blockIdx.x / CLUSTER_N;
        pin_register(n_tiles);  // known before offs are here
        pin_register(worker);
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            prefetch_tensormap(map_sfa);
#if LOW_RANK_STEPS > 0
            prefetch_tensormap(map_t);
            prefetch_tensormap(map_factor);
#endif
#if !EPILOGUE_IS_QUANT
            prefetch_store_maps(store_maps);
#endif
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), CLUSTER_N * NUM_CONSUMER_WARPS);
            }
            mbarrier_init(shared_address(&shared.window_full), 1);
            mbarrier_init(shared_address(&shared.window_empty), NUM_CONSUMER_WARPS);
            if (TAKES_LATE) mbarrier_init(shared_address(&shared.next_tile_wanted), 1);
            for (int s = 0; s < QUEUE_SLOTS; ++s) {
                mbarrier_init(shared_address(&shared.queue.full[s]), 1);
                mbarrier_init(shared_address(&shared.queue.empty[s]), CLUSTER_N * NUM_TILE_READERS);
            }
#if EPILOGUE_IS_QUANT
            shared.quant.init();
#endif
            fence_mbarrier_init();
        }
        __syncwarp();
        if (has_small_table) {
            const PlacedGroup group = place_group<BLOCK_M>(end, num_groups, m, load_lane);
            queue_first_tile<Order>(shared.queue, group, n_tiles, worker, gridDim.x / CLUSTER_N, load_lane);
            store_group(shared.groups, group, num_groups, load_lane);  // for the scheduler
        }
    } else if (warp < NUM_CONSUMER_WARPS) {
#if !EPILOGUE_IS_QUANT
        if (!is_ready)
            prefetch_weights_lines<BLOCK_N, NUM_CONSUMER_WARPS * 32>(Weights{b, b_row_bytes, b_group_bytes},
                                                                     n, k, num_groups);
#endif
        clear_missing_rows<STAGES, BLOCK_M, NUM_CONSUMER_WARPS * 32>(shared.a[0], problem.row_box(), m);
    }
    if (!is_ready && (warp != LOAD_WARP || !has_small_table)) griddepcontrol_wait();
    bool has_first_tile = has_small_table;
    if (!has_small_table) {
        const int* const ends = ends_in_shared<NUM_THREADS>(shared.groups, offs, IdsAhead{}, m, num_groups);
        has_first_tile = build_large_table<BLOCK_M, NUM_THREADS>(shared.groups, ends, num_groups, m, lane);
        if (has_first_tile && warp == LOAD_WARP && elect_one())
            queue_first_tile(shared.queue, Order(shared.groups.table(), n, gridDim.x / CLUSTER_N),
                             blockIdx.x / CLUSTER_N);
    } else if (EPILOGUE_IS_QUANT) {
        __syncthreads();
    } else if (CLUSTER_N == 1) {
        if (warp == LOAD_WARP && !problem.boxes_vary())  // waits for nobody: its loads begin at once
            bar_arrive(START_BARRIER, NUM_THREADS);
        else
            bar_sync(START_BARRIER, NUM_THREADS);
    }
#if EPILOGUE_IS_QUANT
    if constexpr (HAS_GROUP_TILES) {
        if (warp == 1) count_row_tiles(shared.groups.sorted.ends, num_groups, shared.quant.group_tiles, lane);
        if (CLUSTER_N == 1) __syncthreads();
    }
#endif
    if constexpr (CLUSTER_N > 1) {  // nobody may signal a barrier of a CTA that has not made it yet
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    int ahead = 0;  // K blocks of the first tile that are on their way
    if (LOADS_AHEAD && warp == LOAD_WARP && has_first_tile && elect_one())
        ahead = load_first_stages(shared, problem, map_a, map_b, map_sfa, shared.queue.tiles[0], is_ready);

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == NUM_CONSUMER_WARPS) {
            if (elect_one()) {
                if (SCALES_K_MAJOR || !problem.boxes_vary())
                    load_tiles<true>(shared, problem, map_a, map_b, map_sfa, ahead);
                else
                    load_tiles<false>(shared, problem, map_a, map_b, map_sfa, ahead);
                if (RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        } else if (warp == NUM_CONSUMER_WARPS + 1 && (CLUSTER_N == 1 || cluster_cta_rank() == 0)) {
            if (elect_one()) {
                griddepcontrol_wait();
                schedule_tiles<CLUSTER_N, HALF_TILES, TAKES_LATE>(
                    shared.queue, Order(shared.groups.table(), n, gridDim.x / CLUSTER_N), counter,
                    blockIdx.x / CLUSTER_N, gridDim.x / CLUSTER_N, &shared.next_tile_wanted, has_first_tile);
                if (!RELEASES_LATE) griddepcontrol_launch_dependents();
            }
        }
#if !EPILOGUE_IS_QUANT
        const int storing = warp - (NUM_CONSUMER_WARPS + 2);  // the consumer warpgroup that it stores for
        if (storing >= 0 && storing < NUM_STORE_WARPS)
            store_tiles(shared, problem, store_maps, storing, lane);
#endif
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        griddepcontrol_wait();
        consume_tiles(uniform_in_warp(shared, lane), problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
    if constexpr (CLUSTER_N > 1) {  // nor leave while the other may still signal or fill it
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}
