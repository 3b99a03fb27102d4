// Weight gradients of grouped layers on Hopper, FP8 (e4m3) with block scales: D[g] = A_g * B_g^T, summed over the tokens of
// group g, from copies of the rows in which tokens are innermost.
//
//   A    (N, T_a) e4m3, dY transposed; sfa (S, N) float32, one decode scale per feature and 128 tokens
//   B    (K, T_b) e4m3, X transposed; sfb (S, ceil(K / 128)) float32, one per 128 features and 128 tokens (1d2d), or
//        (S, K), one per feature and 128 tokens (1d1d)
//   D    (G, N, K) bf16 or float32, stored; or float32, added to
//
// In the code rows are features of dY, columns are features of X. Group g has its tokens in columns starts[g] .. of A and B, a
// multiple of 32, with zeros up to the next multiple of 32, and its scales in rows block_starts[g] .. of sfa and sfb: a block of
// 128 tokens is counted from the group's start and never holds tokens of two groups.
//
// Arithmetic, per output element and in this order: for each block of 128 tokens, the tensor core sums the products 32 tokens at
// a time (its FP8 path keeps 13 fractional bits of the largest term), then d = fma(sum, sfa * sfb, d) in float32, sfa * sfb rounded
// to float32. It is stored rounded to nearest even, or added to what was there, in float32.
//
// Roles. One producer warpgroup, in which one thread drives TMA, one the scheduler (device/tile_queue.cuh), and two warps
// store finished tiles; two consumer warpgroups with the tile in registers, 64 rows to a wave. CTAs are persistent.
//
//      producer                                     consumer warpgroup
//      --------                                     ------------------
//      wait queue full[q]                           wait queue full[q]       (the scheduler thread fills the queue)
//      wait empty[s]  <------- arrive empty[s] ---  ... after the products of stage s are done
//      load A, B, scales --> full[s] (bytes) ---->  wait full[s]; wgmma; promote
//      arrive queue empty[q]                        arrive queue empty[q] at the end of the tile
//
//      A tile stays in registers until the next tile's first products run; then it is staged for the store warps (piece_store.cuh).
//
// Padding-free rule: a load may bring tokens of other groups behind the group's last block; no K step multiplies them. Nothing
// of another group has an influence on a group's result, and the order of a group's sum depends on nothing but its tokens.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "device/ptx/conversion.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/special_registers.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/wgmma.cuh"

// In this order: later ones use earlier ones.
#include "device/sm90/descriptors.cuh"
#include "device/sm90/output.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "device/longest_first.cuh"

#include "sm90_fp8_wgrad/storage.cuh"

#include "device/gradient_tiles.cuh"
#include "sm90_fp8_wgrad/load.cuh"
#include "device/sm90/piece_store.cuh"
#include "sm90_fp8_wgrad/multiply.cuh"

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, int warpgroup, int warp, int lane) {
    const ConsumerView view(shared, warpgroup, warp, lane);
    Pipeline<STAGES> pipeline;
    float d[WAVES][BLOCK_N / 2] = {};  // the last tile, until the next one's products are under way
    uint32_t parity = 0;
    const auto stage = [&](int wave) {
        stage_part<PIECES_PER_WAVE>(d[wave], shared, warpgroup, wave, parity);
    };
    TokenReader reader(shared, lane);
    while (reader.tokens >= 0) {
        if (reader.tokens > 0) {
            multiply_tile(d, shared, view, reader.tokens, lane, pipeline, stage, [&] { reader.next(); });
        } else {
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {
                stage(w);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) d[w][i] = 0.0f;
            }
            reader.next();
        }
    }
#pragma unroll
    for (int w = 0; w < WAVES; ++w) stage(w);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_fp8_wgrad(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ TensorMap map_sfb,
    const __grid_constant__ TensorMap map_d, const float* sfb, const int* offs, const int* a_starts,
    const int* b_starts, const int* block_starts, int n_rows, int n_columns, int num_groups, int a_tokens,
    int b_tokens, int scale_rows, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{{a_starts, a_tokens},
                          {b_starts, b_tokens},
                          block_starts,
                          sfb,
                          n_rows,
                          n_columns,
                          num_groups,
                          scale_rows};
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == NUM_CONSUMER_WARPS && elect_one()) {
        griddepcontrol_launch_dependents();
        prefetch_tensormap(map_a);
        prefetch_tensormap(map_b);
        prefetch_tensormap(map_sfa);
        if (!X_SCALES_ARE_BLOCKS) prefetch_tensormap(map_sfb);
        prefetch_tensormap(map_d);
        for (int s = 0; s < STAGES; ++s) {
            mbarrier_init(shared_address(&shared.full[s]), FULL_ARRIVALS);
            mbarrier_init(shared_address(&shared.empty[s]), CLUSTER_N * NUM_CONSUMER_WARPS);
        }
        mbarrier_init(shared_address(&shared.next_tile_wanted), 1);
        for (int i = 0; i < NUM_MMA_WARPGROUPS * NUM_D; ++i)
            mbarrier_init(d_loaded(shared, i / NUM_D, i % NUM_D), 1);
        for (int s = 0; s < QUEUE_SLOTS; ++s) {
            mbarrier_init(shared_address(&shared.queue.full[s]), 1);
            mbarrier_init(shared_address(&shared.queue.empty[s]), CLUSTER_N * NUM_TILE_READERS);
        }
        fence_mbarrier_init();
    }
    // Nothing of global memory is touched before the kernels ahead have ended, which may still be writing it: this kernel may
    // begin before (LaunchShape.programmatic).
    griddepcontrol_wait();
    shared.groups.build<NUM_THREADS>(reinterpret_cast<int*>(shared.d), offs, num_groups,
                                     a_tokens < b_tokens ? a_tokens : b_tokens);
    if constexpr (CLUSTER_N > 1) {  // nobody may signal a barrier of a CTA that has not made it yet
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        const int role = warp - NUM_CONSUMER_WARPS;
        if (role == 0) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b, map_sfa, map_sfb);
        } else if (role == 1 && (CLUSTER_N == 1 || cluster_cta_rank() == 0)) {
            const Order order{shared.groups, num_groups, n_rows, n_columns, ACCUMULATE};
            if (elect_one())
                schedule_tiles<CLUSTER_N, false, true>(shared.queue, order, counter, blockIdx.x / CLUSTER_N,
                                                       gridDim.x / CLUSTER_N, &shared.next_tile_wanted);
        } else if (role > 1) {
            store_tiles(shared, problem, map_d, role - 2, lane);
        }
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, warp / 4, warp % 4, lane);
        __syncwarp();
    }
    if constexpr (CLUSTER_N > 1) {  // nor leave while the other may still signal or fill it
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}
