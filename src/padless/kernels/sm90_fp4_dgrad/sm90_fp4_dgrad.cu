// The gradient of the rows of a grouped product with FP4 weights, on Hopper: D[rows of g] = dY[rows of g] * W[g] for every group g,
// with the groups' rows one after the other in dY and D and no padding between them.
//
//   dY      (M, N) bf16
//   W       (G, N, K) MXFP4 or NVFP4: two codes a byte along K, as the product itself reads them
//   scales  one byte (G, N, ceil(K / 32 or 16)) row-major, or in the 32x4x4 layout
//   global  NVFP4: float32, one or one a group
//   offs    (G) int32, cumulative end rows, or null for one group of M rows
//   D       (M, K) bf16
//
// Arithmetic, per output element: code * scale is exact in bf16 (sm90_bf16/dequantize.cuh names the limits); the tensor core adds
// 16 products of N, in order, to its float32 sum at a time (25 fractional bits of the largest term, truncated). At the end
// the sum is multiplied by 2^8 * global scale for NVFP4, and rounded.
//
// The product is made transposed: 64 columns of W are the M side of an instruction, read from registers, and rows of dY its N
// side, read from shared memory. A register of the M side holds one column's values of two neighbouring rows of W. ldmatrix
// transposes 16-bit elements, and four codes are such an element: so a word that it delivers holds four columns' codes of two
// neighbouring rows, which become four registers, and all are used. The four columns are rows of the instructions in any
// order that the store takes back.
//
// Roles. Two consumer warpgroups, with 128 columns of the tile each; in a third one thread drives TMA, one schedules, and two warps
// turn scales into factors. CTAs are persistent.
//
//      producer                    scale warps                 consumer warpgroup
//      --------                    -----------                 ------------------
//      wait empty[s]  <--------------------------------------- arrive empty[s] after the products of stage s
//      load --> full[s] (bytes) -> wait full[s]
//                                  scales to factors
//                                  arrive has_factors[s] ----> wait has_factors[s]; codes to fragments; wgmma
//      (all read the tile queue of device/tile_queue.cuh)
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M read as
// zero); the store alone is bounded, by the ragged descriptor of device/sm90/output.cuh.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/dequantize.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/ldmatrix.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_m64k16.cuh"

// In this order: later ones use earlier ones.
#include "sm90_bf16/dequantize.cuh"
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/queue_start.cuh"
#include "sm90_fp4_dgrad/storage.cuh"
#include "sm90_fp4_dgrad/load.cuh"
#include "sm90_fp4_dgrad/multiply.cuh"

// Consumer: a tile of at most ROWS rows, from its products to its store.
template <int ROWS, class Release>
__device__ __forceinline__ void make_tile(float (&d)[M64S][BLOCK_M / 2], SharedStorage& shared,
                                          const Problem& problem, const TensorMap& map_d, const Tile& tile,
                                          const CodeLane& code_lane, int warpgroup, int warp, int lane,
                                          Pipeline<STAGES>& pipeline, Release release) {
    float factor = 1.0f;  // on its way meanwhile
    if constexpr (FORMAT == FORMAT_NVFP4)
        factor = __ldg(problem.global_scales + tile.group * problem.global_stride);
    multiply_tile<ROWS>(d, shared, code_lane, problem.n_stages(), pipeline);
    release();
    if constexpr (FORMAT == FORMAT_NVFP4) {
#pragma unroll
        for (int u = 0; u < M64S; ++u) {
#pragma unroll
            for (int i = 0; i < ROWS / 2; ++i)
                d[u][i] = d[u][i] * static_cast<float>(1 << NVFP4_SHIFT) * factor;
        }
    }
    store_tile<ROWS>(d, shared.d[warpgroup], problem.k, map_d, tile, warpgroup, warp, lane);
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem,
                                              const TensorMap& map_d, int warpgroup, int warp, int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const CodeLane code_lane(shared, warpgroup, warp, lane);
    Tile tile{};
    float d[M64S][BLOCK_M / 2];
    const auto release = [&] {
        if (lane == 0) reader.release();
    };
    while (reader.next(tile, lane)) {
        if (tile.column + warpgroup * WARPGROUP_COLUMNS >= problem.k) {
            skip_tile(shared, problem.n_stages(), pipeline);
            release();
        } else if (BOX_ROWS == BLOCK_M || tile.rows <= BOX_ROWS) {
            make_tile<BOX_ROWS>(d, shared, problem, map_d, tile, code_lane, warpgroup, warp, lane, pipeline,
                                release);
        } else {
            make_tile<BLOCK_M>(d, shared, problem, map_d, tile, code_lane, warpgroup, warp, lane, pipeline,
                               release);
        }
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_fp4_dgrad(
    const __grid_constant__ TensorMap map_rows, const __grid_constant__ TensorMap map_codes,
    const __grid_constant__ TensorMap map_scales, const __grid_constant__ TensorMap map_d,
    const float* global_scales, int global_stride, const int* offs, int m, int n, int k, int num_groups,
    int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{global_scales, global_stride, n, k};
    const int end = load_ends_early<1>(offs, num_groups, m);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            griddepcontrol_launch_dependents();
            prefetch_tensormap(map_rows);
            prefetch_tensormap(map_codes);
            prefetch_tensormap(map_scales);
            prefetch_tensormap(map_d);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS * 32);
                mbarrier_init(shared_address(&shared.has_factors[s]), NUM_SCALE_WARPS * 32);
            }
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    const bool has_first_tile = start_queue<Order, 1, BLOCK_M, NUM_THREADS>(
        shared.queue, shared.groups, NUM_TILE_READERS, end, offs, num_groups, m, k, warp, lane);

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int role = warp - NUM_CONSUMER_WARPS;
        if (role == 0) {
            if (elect_one()) load_tiles(shared, problem, map_rows, map_codes, map_scales);
        } else if (role == 1) {
            if (elect_one())
                schedule_tiles<1>(shared.queue, Order(shared.groups.table(), k), counter, blockIdx.x,
                                  gridDim.x, nullptr, has_first_tile);
        } else {
            write_factors(shared, problem, role - 2, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, map_d, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
