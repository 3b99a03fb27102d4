// Weight gradients of grouped layers on Hopper, bf16: D[g] = A_g^T * B_g, summed over the tokens of group g, from the rows as they
// are.
//
//   A    (M, N) bf16, dY
//   B    (M, K) bf16, X
//   D    (G, N, K) bf16 or float32, stored; or float32, added to
//
// In the code rows are features of dY, columns are features of X. Group g has the tokens offs[g - 1] .. offs[g] - 1, any of them.
// Features are contiguous in both operands, so the tensor core reads both MN-major: nothing is transposed or copied.
//
// Arithmetic, per output element: the tensor core adds the products to a float32 sum, 16 tokens at a time from the group's first
// token on, with 25 fractional bits of the largest term; the last ones are filled up with zeros. The sum is stored rounded to
// nearest even, or added to what was there, in float32.
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
// Padding-free rule: no byte of another group is multiplied. A group's last block of tokens is read through a map that ends at
// the group's last token, behind which the copy engine writes zeros. Nothing of another group has an influence on a group's
// result, and the order of a group's sum depends on nothing but its tokens.

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

#include "sm90_bf16_wgrad/storage.cuh"

#include "device/gradient_tiles.cuh"
#include "sm90_bf16_wgrad/load.cuh"
#include "device/sm90/piece_store.cuh"
#include "device/sm90/bf16_multiply.cuh"

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, int warpgroup, int lane) {
    const OperandView view(shared, warpgroup);
    Pipeline<STAGES> pipeline;
    float d[BLOCK_N / 2] = {};
    uint32_t parity = 0;
    TokenReader reader(shared, lane);
    stage_part<NUM_PIECES>(d, shared, warpgroup, 0, parity);  // no tile, which is not stored
    while (reader.tokens >= 0) {
        if (reader.tokens > 0) {
            const int blocks = token_blocks(reader.tokens), steps = last_block_steps(reader.tokens, blocks);
            multiply_tile(d, shared, view, blocks, steps, lane, pipeline, [&] { reader.next(); });
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = 0.0f;
            reader.next();
        }
        stage_part<NUM_PIECES>(d, shared, warpgroup, 0, parity);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_bf16_wgrad(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_a_ragged,
    const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_b_ragged,
    const __grid_constant__ TensorMap map_d, const int* offs, int n_rows, int n_columns, int num_groups,
    int tokens, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{n_rows, n_columns, num_groups};
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == NUM_CONSUMER_WARPS && elect_one()) {
        griddepcontrol_launch_dependents();
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_a_ragged);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_b_ragged);
        prefetch_tensormap(map_d);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), 1);
            mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS);
        }
        mbarrier_init(shared_address(&shared.next_tile_wanted), 1);
        for (int i = 0; i < NUM_MMA_WARPGROUPS * NUM_D; ++i)
            mbarrier_init(d_loaded(shared, i / NUM_D, i % NUM_D), 1);
        for (int s = 0; s < QUEUE_SLOTS; ++s) {
            mbarrier_init(shared_address(&shared.queue.full[s]), 1);
            mbarrier_init(shared_address(&shared.queue.empty[s]), NUM_TILE_READERS);
        }
        fence_mbarrier_init();
    }
    // Nothing of global memory is touched before the kernels ahead have ended, which may still be writing it: this kernel may
    // begin before (LaunchShape.programmatic).
    griddepcontrol_wait();
    shared.groups.build<NUM_THREADS>(reinterpret_cast<int*>(shared.d), offs, num_groups, tokens);

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int role = warp - NUM_CONSUMER_WARPS;
        if (role == 0) {
            if (elect_one()) load_tiles(shared, Rows{map_a, map_a_ragged}, Rows{map_b, map_b_ragged});
        } else if (role == 1) {
            const Order order{shared.groups, num_groups, n_rows, n_columns, ACCUMULATE};
            if (elect_one())
                schedule_tiles<1, false, true>(shared.queue, order, counter, blockIdx.x, gridDim.x,
                                               &shared.next_tile_wanted);
        } else {
            store_tiles(shared, problem, map_d, role - 2, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, warp / 4, lane);
        __syncwarp();
    }
}
