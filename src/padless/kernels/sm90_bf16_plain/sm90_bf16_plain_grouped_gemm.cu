// Grouped GEMM on Hopper, plain bf16: D[rows of g] = A[rows of g] * B[g]^T for every group g, with the groups' rows one after
// the other in A and D and no padding between them.
//
//   A    (M, K) bf16
//   B    (G, N, K) bf16, K contiguous; or N contiguous, as the transposed weights of an input gradient are
//   offs (G) int32, cumulative end rows, or null: one group of all rows
//   D    (M, N) bf16, fp16 or float32
//
// Arithmetic, per output element: the tensor core adds the products to a float32 sum, 16 of K at a time in order, with 25
// fractional bits of the largest term; the last ones are filled up with zeros. The sum is rounded to nearest even.
//
// Roles. One producer warpgroup, in which one thread drives the copy engine, one the scheduler (device/tile_queue.cuh), and two warps
// store finished tiles; two consumer warpgroups with 64 rows of the tile each in registers. CTAs are persistent.
//
//      producer                                     consumer warpgroup
//      --------                                     ------------------
//      wait queue full[q]                           wait queue full[q]       (the scheduler thread fills the queue)
//      wait empty[s]  <------- arrive empty[s] ---  ... after the products of stage s are done
//      load A, B ---------> full[s] (bytes) ----->  wait full[s]; wgmma      (device/sm90/bf16_multiply.cuh)
//      arrive queue empty[q]                        arrive queue empty[q] at the end of the tile
//
//      A finished tile is staged for the store warps (device/sm90/piece_store.cuh) while the other warpgroup multiplies.
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M read as
// zero); the store alone is bounded, by the ragged map of device/sm90/output.cuh.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/conversion.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/special_registers.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"
#include "device/ptx/wgmma_m64k16_shared.cuh"

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/longest_first.cuh"
#include "device/ranked_rows.cuh"

#include "sm90_bf16_plain/storage.cuh"

#include "sm90_bf16_plain/load.cuh"
#include "device/sm90/piece_store.cuh"
#include "device/sm90/bf16_multiply.cuh"

// Consumer: a tile that has no row of this warpgroup.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, int blocks, int lane,
                                          Pipeline<STAGES>& pipeline) {
    for (int block = 0; block < blocks; ++block) {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage, lane);
        pipeline.advance();
    }
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem, int warpgroup,
                                              int lane) {
    const OperandView view(shared, warpgroup);
    const int blocks = problem.k_blocks(), last_steps = problem.last_steps();
    Pipeline<STAGES> pipeline;
    float d[BLOCK_N / 2] = {};
    uint32_t parity = 0;
    Reader reader(shared.queue);
    Tile tile{};
    const auto next = [&] {
        if (lane == 0) reader.release();
        reader.advance();
        reader.next(tile, lane);
    };
    reader.next(tile, lane);
    stage_part<NUM_PIECES>(d, shared, warpgroup, 0, parity);  // no tile, which is not stored
    while (tile.rows > 0) {
        if (warpgroup * WGMMA_M < tile.rows) {
            multiply_tile(d, shared, view, blocks, last_steps, lane, pipeline, next);
        } else {
            skip_tile(shared, blocks, lane, pipeline);
            next();
        }
        stage_part<NUM_PIECES>(d, shared, warpgroup, 0, parity);  // a skipped one's too, which is not stored
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_bf16_plain_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_d, const int* offs, int m, int n, int k, int num_groups,
    int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{n, k};
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == NUM_CONSUMER_WARPS && elect_one()) {
        griddepcontrol_launch_dependents();
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_d);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), 1);
            mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS);
        }
        mbarrier_init(shared_address(&shared.next_tile_wanted), 1);
        for (int s = 0; s < QUEUE_SLOTS; ++s) {
            mbarrier_init(shared_address(&shared.queue.full[s]), 1);
            mbarrier_init(shared_address(&shared.queue.empty[s]), NUM_TILE_READERS);
        }
        fence_mbarrier_init();
    }
    // Nothing of global memory is touched before the kernels ahead have ended, which may still be writing it: this kernel may
    // begin before (LaunchShape.programmatic).
    griddepcontrol_wait();
    shared.groups.build<NUM_THREADS>(reinterpret_cast<int*>(shared.d), offs, num_groups, m);

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int role = warp - NUM_CONSUMER_WARPS;
        if (role == 0) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b);
        } else if (role == 1) {
            if (elect_one())
                schedule_tiles<1, false, true>(shared.queue, Order(shared.groups, n), counter, blockIdx.x,
                                               gridDim.x, &shared.next_tile_wanted);
        } else {
            store_tiles(shared, problem, map_d, role - 2, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, warp / 4, lane);
        __syncwarp();
    }
}
