// Grouped GEMM on Hopper, MXFP8 by FP8 tensor cores: D[rows of g] = A[rows of g] * B[g]^T for every group g, with the
// groups' rows one after the other in A and D and no padding between them.
//
//   A    (M, K) e4m3 or e5m2, sfa E8M0, one decode scale per 1 x 32: row-major, in 32x4x4 tiles, or in such tiles with
//        every group's rows starting on a tile
//   B    (G, N, K) e4m3 or e5m2, sfb E8M0, one per 1 x 32: row-major or in 32x4x4 tiles
//   offs (G) int32, cumulative end rows
//   D    (M, N) bf16, fp16 or float32
//
// Arithmetic, per output element and in this order: for each 32 of K, the tensor core sums the products (one FP8
// instruction, 13 fractional bits of the largest term), then d = fma(sum, sfa * sfb, d) in float32. sfa * sfb is exact
// (sm90_mxfp8/scale_products.cuh names its limits) and comes out of the tensor core as well.
//
// Roles. A producer warpgroup, in which one thread drives TMA, one the scheduler (device/tile_queue.cuh), and two
// warps turn scales into bf16, those of A and those of B; one or two consumer warpgroups with 64 rows of the tile each,
// in registers. CTAs are persistent.
//
//      producer, scale warps                        consumer warpgroup
//      ---------------------                        ------------------
//      wait queue full[q]                           wait queue full[q]       (the scheduler thread fills the queue)
//      wait empty[s]  <------- arrive empty[s] ---  ... after the products of stage s are done
//      load A, B -----> full[s] (bytes) --------->  wait full[s]; wgmma of values and of scales; promote
//      write scales --> full[s] (two arrivals) -->
//      arrive queue empty[q]                        arrive queue empty[q] at the end of the tile
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M
// read as zero); the store alone is bounded, by the ragged descriptor of device/sm90/output.cuh. No row of another group and no
// row past offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of device/sm90/quant_store.cuh, which quantises the tile; a GLU epilogue has the
// gate's and the up projection's columns in the same tile, and the tile's columns are interleaved (interleaved_weight_row).

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/conversion.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_m64k16.cuh"
#include "device/ptx/wgmma_fp8.cuh"

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/sm90/row_box.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/queue_start.cuh"
#include "sm90_mxfp8/scale_products.cuh"
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

#include "sm90_mxfp8/storage.cuh"

#include "sm90_mxfp8/load.cuh"
#include "sm90_mxfp8/multiply.cuh"
#if EPILOGUE_IS_QUANT
using StoreMaps = QuantOutputs;
#include "device/sm90/quant_store.cuh"
#else
using StoreMaps = TensorMap;

// Consumer: converts and writes the rows of d that exist.
__device__ __forceinline__ void store_tile(const float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                           const Problem& problem, const TensorMap& map_d, const Tile& tile,
                                           int warpgroup, int warp, int lane) {
    const bool issuer = warp == 0 && lane == 0;
    const uint32_t slabs = shared_address(shared.d[warpgroup]);
    if (issuer) cp_async_bulk_wait_group_read_all();  // the last tile's store has left this memory
    bar_sync(1 + warpgroup, 128);
    stage_tile<BLOCK_N, OUT_TYPE>(d, slabs, warp, lane);
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);
    if (issuer) {
        const int row = tile.row + warpgroup * WGMMA_M;
        const int left = tile.rows - warpgroup * WGMMA_M;
        const int end = row + (left < WGMMA_M ? left : WGMMA_M);
        for (int s = 0; s < NUM_SLABS && tile.column + s * SLAB_COLUMNS < problem.n; ++s)
            store_slab_ragged(map_d, slabs + s * SLAB_BYTES, tile.column + s * SLAB_COLUMNS, row, end);
        cp_async_bulk_commit_group();
    }
}
#endif

__device__
__forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem, const StoreMaps& store_maps,
                                   int warpgroup, int warp, int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Tile tile{};
    while (reader.next(tile, lane)) {
        if (warpgroup * WGMMA_M < tile.rows) {
            float d[1][BLOCK_N / 2];
            multiply_tile(d[0], shared, problem, warpgroup, warpgroup * WGMMA_M + warp * 16 + lane / 4, lane,
                          pipeline);
            if (lane == 0) reader.release();
#if EPILOGUE_IS_QUANT
            store_tile<WAVES>(d, shared, problem, store_maps, tile, tile.column, warpgroup, warp, lane);
#else
            store_tile(d[0], shared, problem, store_maps, tile, warpgroup, warp, lane);
#endif
        } else {
            skip_tile(shared, problem, lane, pipeline, reader);
        }
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_mxfp8_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ StoreMaps store_maps, const uint8_t* sfa, const uint8_t* sfb, const int* offs,
    int sfa_layout, int sfb_layout, int m, int n, int k, int num_groups, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int columns = k / 32;
    const Problem problem{{sfa, columns, sfa_layout}, {sfb, columns, sfb_layout}, m, n, k, num_groups};
    constexpr int LOAD_WARP = NUM_CONSUMER_WARPS;  // first of the producer warpgroup
    const int end = load_ends_early<LOAD_WARP>(offs, num_groups, m);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            griddepcontrol_launch_dependents();
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1 + NUM_SCALE_WARPS * 32);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS * 32);
            }
#if EPILOGUE_IS_QUANT
            shared.quant.init();
#endif
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    if (warp < NUM_CONSUMER_WARPS) {
        for (int i = threadIdx.x; i < STAGES * V_BYTES / 16;
             i += NUM_CONSUMER_WARPS * 32)  // k 4-15 of V stay zero
            st_shared_v4_b32(shared_address(shared.v[0]) + i * 16, 0, 0, 0, 0);
        fence_proxy_async_shared();
        clear_missing_rows<STAGES, BLOCK_M, NUM_CONSUMER_WARPS * 32>(shared.a[0], row_box(m), m);
    }
    const bool has_first_tile = start_queue<Order, LOAD_WARP, BLOCK_M, NUM_THREADS>(
        shared.queue, shared.groups, NUM_CONSUMER_WARPS + NUM_SCALE_WARPS + 1, end, offs, num_groups, m, n,
        warp, lane);
#if EPILOGUE_IS_QUANT
    if constexpr (HAS_GROUP_TILES) {
        if (warp == 1) count_row_tiles(shared.groups.sorted.ends, num_groups, shared.quant.group_tiles, lane);
        __syncthreads();
    }
#endif

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == LOAD_WARP) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b);
        } else if (warp == NUM_CONSUMER_WARPS + 1) {
            if (elect_one())
                schedule_tiles<1>(shared.queue, Order(shared.groups.table(), n), counter, blockIdx.x,
                                  gridDim.x, nullptr, has_first_tile);
        } else if (warp == NUM_CONSUMER_WARPS + 2) {
            write_scales<true>(shared, problem, lane);
        } else {
            write_scales<false>(shared, problem, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
