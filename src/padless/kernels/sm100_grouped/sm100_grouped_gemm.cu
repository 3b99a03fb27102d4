// Grouped GEMM on Blackwell with block scales: D[rows of g] = factor_g * A[rows of g] * B[g]^T for every group g, with the
// groups' rows one after the other in A and D and no padding between them.
//
//   A    (M, K), B (G, N, K): e4m3 or e5m2, or two e2m1 to a byte; or e2m1 in B alone
//   sfa, sfb: one scale per 32 of K (UE8M0; MXFP8, MXFP4) or per 16 of K (UE4M3; NVFP4), see sm100_grouped/scale_gather.cuh;
//        or FP8_BLOCK's float32 ones per 128 of K, see sm100_grouped/promote.cuh
//   offs (G) int32, cumulative end rows
//   D    (M, N) bf16, fp16 or float32, row-major or column-major
//   factor_g = global scale of A * global scale of B * alpha, each one for all groups, one a group, or absent (1)
//
// Arithmetic, per output element: the tensor core adds the scaled products, 32 of K (FP8) or 64 (FP4) at a time, to a
// float32 accumulator in tensor memory; the sum is multiplied by factor_g in float32 and rounded once.
//
// With PROBLEM_LIST every group is a problem of its own, with its own M, N, K and tensors, of which the host leaves a table
// in global memory; the groups below are then the problems of the list.
//
// A product has a left operand, whose rows are lanes of tensor memory (128 a CTA), and a right one, whose rows are
// columns (MMA_N). The tokens (A) are on the left, or on the right where groups are small. With CTA_GROUP = 2 a pair of
// CTAs multiplies as one: 256 rows on the left, half of them each; the right operand is shared, half of it loaded by each.
//
// A cluster is MULTICAST workers (CTAs, or pairs) side by side along N, which multiply the same tokens at the same time:
// each loads a share of the tokens and multicasts it to all of them.
//
// Roles, by warp. Clusters are persistent. * marks what only the even CTA of a pair does, ** the cluster's first CTA.
//
//   0-3  store D        4  load A        5  load B        6  multiply *        7  hand out tiles **    8-11  gather scales;
//                                                              for FP8_BLOCK, which gathers none, 8-11 promote and store as 0-3
//
//      4, 5, 8-11                                    6                                     0-3
//      ----------                                    -                                     ---
//      wait empty[s] <---------- commits ----------  ... after the products of s
//      load --> full[s] (bytes, arrivals) -------->  wait full[s]; cp scales; mma
//                                                    wait drained[a]  <------ arrive ----- ... after the last read
//                                                    mma of the tile; commit --> done[a] -> wait done[a]; ld; store
//
// With EPILOGUE_IS_QUANT the store is the one of sm100_grouped/quant_store.cuh, which quantises the tile; a SwiGLU whose gate and
// up are apart takes half of a tile's columns from either.
//
// full, drained: in the even CTA of a pair, signalled by both; done: one in each CTA, committed to both. empty: one in each
// CTA, committed to the whole cluster, by every worker of it: the next fill of a stage goes to all of them. Every role
// reads the tiles from the queue (device/tile_queue.cuh).
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M read as
// zero); the stores alone are bounded, row by row. No row of another group and no row past offs[G - 1] is ever written.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

#include "device/ptx/griddepcontrol.cuh"
#include "device/ptx/mbarrier.cuh"
#include "device/ptx/memory.cuh"
#include "device/ptx/tcgen05.cuh"
#include "device/ptx/tma.cuh"
#include "device/ptx/tma_sm100.cuh"
#include "sm100_grouped/tma_hint.cuh"

// In this order: later ones use earlier ones.
#include "device/sm100/descriptors.cuh"
#include "device/pipeline.cuh"
#include "device/scheduler.cuh"
#include "device/sorted_groups.cuh"
#include "device/group_table.cuh"
#include "device/tile_queue.cuh"
#include "sm100_grouped/list_scheduler.cuh"
#include "sm100_grouped/scale_gather.cuh"
#include "sm100_grouped/store.cuh"
#if EPILOGUE_IS_QUANT
#include "device/ptx/conversion.cuh"
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/quant_outputs.cuh"
#endif
#include "sm100_grouped/storage.cuh"

#if PROBLEM_LIST
using Order = ListOrder<TILE_M, CLUSTER_N, RASTER_M>;
#else
using Order = TileOrder<TILE_M, CLUSTER_N, RASTER_M>;
#endif

// A float32 for all groups, one a group, or none: 1.
struct Factor {
    const float* values;
    long long stride;

    __device__ __forceinline__ float of(int group) const {
        return values == nullptr ? 1.0f : __ldg(values + group * stride);
    }
};

// What is multiplied: all groups of a ragged problem, or one problem of a list.
struct alignas(64) Operands {
    TensorMap map_a, map_b, map_sfa, map_sfb;  // the maps of gathered scales are not used
    ScaleSource sfa, sfb;
    Output d;
    Factor global_a, global_b, alpha;
    int m, n, row_bytes;  // row_bytes: of K

    __device__ __forceinline__ int k_blocks() const { return (row_bytes + BLOCK_K - 1) / BLOCK_K; }

    // First byte of a row of A in stage `kb`: with FP4 weights, where a window of them begins.
    __device__ __forceinline__ int first_of_stage(int kb) const {
        const int last = (row_bytes + WINDOW_STEP - 1) / WINDOW_STEP * WINDOW_STEP - BLOCK_K;
        return PADDED_B && kb > 0 && kb * BLOCK_K > last ? last : kb * BLOCK_K;
    }
};

#if EPILOGUE_IS_QUANT
// Where the quantising store writes; null where nothing is wanted.
struct QuantTargets {
    QuantOutputs outputs;  // its tensor maps are not used
    Output plain;
    uint8_t *row_codes, *column_codes;
    long long row_pitch, column_pitch;  // bytes from one row to the next
};
#endif

struct Problem {
    Operands operands;
    const Operands* list;     // instead, one for each problem of a list
    const ListEntry* order;   // of the list
    const int* offs;          // of a ragged problem
    int num_groups, counter;  // num_groups: or problems of the list
#if EPILOGUE_IS_QUANT
    QuantTargets targets;
#endif

    __device__ __forceinline__ const Operands& of(int group) const {
        return PROBLEM_LIST ? list[group] : operands;
    }
};

__device__ __forceinline__ int cluster_rank() {
    return CLUSTER == 1 ? 0 : static_cast<int>(cluster_cta_rank());
}
__device__ __forceinline__ int pair_rank() {
    return cluster_rank() % CTA_GROUP;
}
// This CTA's, or its pair's, place in the cluster, and the first CTA of it.
__device__ __forceinline__ int worker_rank() {
    return cluster_rank() / CTA_GROUP;
}
__device__ __forceinline__ int even_rank() {
    return cluster_rank() - pair_rank();
}

// What the queue hands out is the cluster's; a worker's own part of it begins TILE_N columns after the worker's before.
struct Reader : TileReader<CLUSTER> {
    using TileReader<CLUSTER>::TileReader;

    __device__ __forceinline__ bool next(Tile& tile) {
        const bool found = TileReader<CLUSTER>::next(tile);
        tile.column += worker_rank() * TILE_N;
        return found;
    }
    __device__ __forceinline__ bool next(Tile& tile, int lane) {
        const bool found = TileReader<CLUSTER>::next(tile, lane);
        tile.column += worker_rank() * TILE_N;
        return found;
    }
};

// The number of a group among the operands' groups: each problem of a list is alone.
__device__ __forceinline__ int group_in_operands(const Tile& tile) {
    return PROBLEM_LIST ? 0 : tile.group;
}

#include "sm100_grouped/load.cuh"

// One arrival, after all products so far, on the barrier of every CTA of the cluster: a stage is free.
__device__ __forceinline__ void commit_stage(uint32_t barrier) {
    if constexpr (CLUSTER == 1)
        tcgen05_commit(barrier);
    else
        tcgen05_commit_multicast<CTA_GROUP>(barrier, (1 << CLUSTER) - 1);
}

// The same on those of the CTA, or the pair: a tile is done.
__device__ __forceinline__ void commit_tile(uint32_t barrier) {
    if constexpr (CTA_GROUP == 1)
        tcgen05_commit(barrier);
    else
        tcgen05_commit_multicast<CTA_GROUP>(barrier, 3 << even_rank());
}

// The instruction descriptor of a product of `columns` columns.
__device__ __forceinline__ uint32_t product_shape(int columns) {
    if constexpr (KIND == KIND_MXFP8)
        return mxf8f6f4_shape(LEFT_ROWS, columns, TOKENS_ON_N ? B_CODE : A_CODE,
                              TOKENS_ON_N ? A_CODE : B_CODE);
    else
        return mxf4nvf4_shape(LEFT_ROWS, columns, KIND != KIND_NVFP4);
}

// d += the products of step `step` of a stage, 32 bytes of every row; `left`, `right`: descriptor low words of the stage.
__device__ __forceinline__ void multiply_step(uint32_t d, uint32_t left, uint32_t right, uint32_t scales,
                                              uint32_t shape, int step, bool accumulate) {
    const uint64_t a = tcgen05_operand_descriptor(left + step * (MMA_K / 16));
    const uint64_t b = tcgen05_operand_descriptor(right + step * (MMA_K / 16));
    const uint32_t sfa = scales + LEFT_SCALES_AT, sfb = scales + RIGHT_SCALES_AT;
    constexpr uint32_t LEFT_ATOM = SCALE_ATOM_COLUMNS, RIGHT_ATOM = SCALE_ATOM_COLUMNS * RIGHT_ATOMS;
    if constexpr (KIND == KIND_MXFP8) {  // an atom serves four steps, a byte each
        tcgen05_mma_mxf8f6f4_block32<CTA_GROUP>(d, a, b, shape | scale_ids(step), sfa, sfb, accumulate);
    } else if constexpr (KIND == KIND_NVFP4) {  // an atom serves one step
        tcgen05_mma_mxf4nvf4_block16<CTA_GROUP>(d, a, b, shape, sfa + step * LEFT_ATOM,
                                                sfb + step * RIGHT_ATOM, accumulate);
    } else {  // an atom serves two steps, two bytes each
        tcgen05_mma_mxf4nvf4_block32<CTA_GROUP>(d, a, b, shape | scale_ids(step % 2 * 2),
                                                sfa + step / 2 * LEFT_ATOM, sfb + step / 2 * RIGHT_ATOM,
                                                accumulate);
    }
}

// One thread, of the even CTA.
__device__ __forceinline__ void multiply_tiles(SharedStorage& shared, const Problem& problem,
                                               uint32_t tensor_memory) {
    const uint32_t left_0 = tcgen05_descriptor_low(shared_address(shared.left[0]));
    const uint32_t right_0 = tcgen05_descriptor_low(shared_address(shared.right[0]));
    const uint32_t left_scales_0 = tcgen05_descriptor_low(shared_address(shared.left_scales[0]));
    const uint32_t right_scales_0 = tcgen05_descriptor_low(shared_address(shared.right_scales[0]));
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<2> accumulator;
    Tile tile;
    while (reader.next(tile)) {
        const Operands& operands = problem.of(tile.group);
        const int row_bytes = operands.row_bytes, k_blocks = operands.k_blocks(), columns = columns_of(tile);
        const uint32_t shape = product_shape(columns);
        const uint32_t d = tensor_memory + accumulator.stage * SECOND_ACCUMULATOR;
        // With shared columns this accumulator is free once those of the tile before have been read, which comes after
        // all of the tile before that.
        const int drained = SHARED_COLUMNS > 0 ? 0 : accumulator.stage;
        const uint32_t drained_phase = SHARED_COLUMNS > 0 ? accumulator.stage : accumulator.phase;
        if constexpr (CTA_GROUP == 1)
            mbarrier_wait(shared_address(&shared.drained[drained]), drained_phase ^ 1);
        else
            mbarrier_wait_cluster(shared_address(&shared.drained[drained]), drained_phase ^ 1);
        tcgen05_fence_after_thread_sync();
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            if constexpr (CTA_GROUP == 2 && NUM_GATHER_WARPS > 0)
                mbarrier_wait_cluster(shared_address(&shared.full[stage]), pipeline.phase);
            else
                mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
            tcgen05_fence_after_thread_sync();
            const int bytes_left = row_bytes - kb * BLOCK_K;
            const int steps = bytes_left < BLOCK_K ? (bytes_left + MMA_K - 1) / MMA_K : BLOCK_K / MMA_K;
            // What a last window has of the stage before.
            const uint32_t skipped = PADDED_B ? (kb * BLOCK_K - operands.first_of_stage(kb)) / 16 : 0;
            constexpr int STEPS_AN_ATOM = BLOCK_K / MMA_K / ATOMS;
#pragma unroll
            for (int atom = 0; atom < ATOMS; ++atom) {
                if (atom * STEPS_AN_ATOM >= steps) break;
                const uint32_t left_at = left_scales_0 + (stage * LEFT_SCALE_BYTES + atom * 512) / 16;
                tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                    tensor_memory + LEFT_SCALES_AT + atom * SCALE_ATOM_COLUMNS,
                    scale_atom_descriptor(left_at));
#pragma unroll
                for (int part = 0; part < RIGHT_ATOMS; ++part) {
                    if (part * 128 >= columns) break;
                    const uint32_t right_at =
                        right_scales_0 +
                        (stage * RIGHT_SCALE_BYTES + part * LEFT_SCALE_BYTES + atom * 512) / 16;
                    tcgen05_cp_32x128b_warpx4<CTA_GROUP>(
                        tensor_memory + RIGHT_SCALES_AT + (atom * RIGHT_ATOMS + part) * SCALE_ATOM_COLUMNS,
                        scale_atom_descriptor(right_at));
                }
            }
#pragma unroll
            for (int step = 0; step < BLOCK_K / MMA_K; ++step)
                if (step < steps)
                    multiply_step(d, left_0 + stage * (LEFT_BYTES / 16) + skipped,
                                  right_0 + stage * (RIGHT_BYTES / 16) + skipped, tensor_memory, shape, step,
                                  kb + step > 0);
            commit_stage(shared_address(&shared.empty[stage]));
            pipeline.advance();
        }
        commit_tile(shared_address(&shared.done[accumulator.stage]));
        accumulator.advance();
        reader.release();
        reader.advance();
    }
}

// A store warp has read the last of the columns that the next products need.
__device__ __forceinline__ void give_back(SharedStorage& shared, int stage, int lane) {
    tcgen05_fence_before_thread_sync();
    __syncwarp();
    if (lane == 0) {
        const uint32_t drained = shared_address(&shared.drained[SHARED_COLUMNS > 0 ? 0 : stage]);
        if constexpr (CTA_GROUP == 1)
            mbarrier_arrive(drained);
        else
            mbarrier_arrive_release_cluster(drained, even_rank());
    }
}

#include "sm100_grouped/promote.cuh"

// The same for a tile's sums, of which the first unit is in accumulator `stage`.
__device__ __forceinline__ void give_back_sums(SharedStorage& shared, int stage, int lane) {
    if constexpr (PROMOTES)
        give_back_promoted(shared, stage, lane);
    else
        give_back(shared, stage, lane);
}

// A store warp: the accumulator of its tile's sums, with PROMOTES of their first unit.
__device__ __forceinline__ int sums_stage(const Pipeline<ACCUMULATORS>& accumulator) {
    return PROMOTES ? (accumulator.stage + ACCUMULATORS - UNITS) % ACCUMULATORS : accumulator.stage;
}

__device__ __forceinline__ void await_sums(SharedStorage& shared, const Pipeline<ACCUMULATORS>& accumulator) {
    if constexpr (PROMOTES) return;  // promote_next has
    mbarrier_wait(shared_address(&shared.done[accumulator.stage]), accumulator.phase);
    tcgen05_fence_after_thread_sync();
}

#if EPILOGUE_IS_QUANT
#include "sm100_grouped/quant_store.cuh"
#else
// A store warp: its 32 lanes of every tile.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            uint32_t tensor_memory, int promoter, int warp, int lane) {
    Reader reader(shared.queue);
    Pipeline<ACCUMULATORS> accumulator;
    Tile tile{};
    while (reader.next(tile, lane)) {
        if constexpr (PROMOTES)
            promote_next(shared, problem, reader, tile, tensor_memory, promoter, warp, lane, accumulator);
        const Operands& operands = problem.of(tile.group);
        const int group = group_in_operands(tile);
        const float factor =
            operands.global_a.of(group) * operands.global_b.of(group) * operands.alpha.of(group);
        // How much of the tile exists, along the lanes and along the columns of tensor memory.
        const int columns_left = operands.n - tile.column;
        const int lane_limit = TOKENS_ON_N ? columns_left : tile.rows;
        const int column_limit = TOKENS_ON_N ? tile.rows : columns_left;
        const int first = pair_rank() * LANE_ROWS + warp * 32;
        const int at = first + lane;
        const int sums = sums_stage(accumulator);
        const uint32_t d = tensor_memory + (PROMOTES ? 0 : sums * SECOND_ACCUMULATOR) + (warp * 32 << 16);

        await_sums(shared, accumulator);
        for (int i = 0; i < OWN_CHUNKS; ++i) {
            // The columns that the accumulators share come first: the first one's last, the second one's first.
            const int chunk = SHARED_COLUMNS > 0 && sums == 0 ? NUM_CHUNKS - 1 - i : i;
            const int column = PROMOTES ? own_column(promoter, i) : chunk * CHUNK;
            const bool exists = first < lane_limit && column < column_limit;
            uint32_t r[CHUNK];
            __syncwarp();  // the stores before may have parted the lanes
            if (exists) {
                tcgen05_ld_32x32b<CHUNK>(r, d + (PROMOTES ? sums_column(sums, column) : column));
                tcgen05_wait_ld();
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) pin_loaded(r[j]);
            }
            if (i == CHUNKS_BEFORE_DRAINED - 1) give_back_sums(shared, sums, lane);
            if (exists && at < lane_limit) {
                const int m = tile.row + (TOKENS_ON_N ? column : at);
                const int n = tile.column + (TOKENS_ON_N ? at : column);
                store_run<OUT, TOKENS_ON_N, COLUMN_MAJOR, WIDE_STORES>(operands.d, m, n,
                                                                       column_limit - column, r, factor);
            }
        }
        if constexpr (!PROMOTES) accumulator.advance();
        if (lane == 0) reader.release();
        reader.advance();
    }
}
#endif

extern "C" __global__ void
    __launch_bounds__(NUM_THREADS, 1) padless_sm100_grouped_gemm(const __grid_constant__ Problem problem) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    // Of few groups one warp builds the table, and knows this worker's first tile before anyone could look it up.
    const int num_groups = problem.num_groups;
    [[maybe_unused]] const int m = problem.operands.m;  // a list's problems have their own
    const int worker = blockIdx.x / CLUSTER, workers = gridDim.x / CLUSTER;
    const bool has_small_table = !PROBLEM_LIST && num_groups <= SMALL_TABLE;
    // This kernel may begin before the kernels ahead have ended (LaunchShape.programmatic). They may still be writing global memory, so
    // nothing of it is touched before the wait: barriers, tensor memory and tensor maps are ready by then.
    if (warp == 0) {
        if (elect_one()) {
            griddepcontrol_launch_dependents();
            for (int s = 0; s < QUEUE_SLOTS; ++s) {
                mbarrier_init(shared_address(&shared.queue.full[s]), 1);
                mbarrier_init(shared_address(&shared.queue.empty[s]), QUEUE_ARRIVALS);
            }
            fence_mbarrier_init();
        }
        __syncwarp();
        griddepcontrol_wait();
#if !PROBLEM_LIST
        if (has_small_table) {
            const int end = load_group_end(problem.offs, num_groups, m, lane);
            const PlacedGroup group = place_group<TILE_M>(end, num_groups, m, lane);
            const int n_tiles = (problem.operands.n + CLUSTER_N - 1) / CLUSTER_N;
            queue_first_tile<Order>(shared.queue, group, n_tiles, worker, workers, lane);
            store_group(shared.groups, group, num_groups, lane);
        }
#endif
    } else if (warp == 1) {
        if (elect_one()) {
            if constexpr (!PROBLEM_LIST) {
                prefetch_tensormap(problem.operands.map_a);
                prefetch_tensormap(problem.operands.map_b);
            }
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), FULL_ARRIVALS);
                mbarrier_init(shared_address(&shared.empty[s]), EMPTY_ARRIVALS);
            }
            for (int a = 0; a < ACCUMULATORS; ++a) {
                mbarrier_init(shared_address(&shared.done[a]), 1);
                mbarrier_init(shared_address(&shared.drained[a]), DRAINED_ARRIVALS);
            }
            fence_mbarrier_init();
        }
        __syncwarp();
    } else if (warp == MULTIPLY_WARP) {
        tcgen05_alloc<CTA_GROUP, TMEM_COLUMNS>(shared_address(&shared.tensor_memory));
        tcgen05_relinquish_alloc_permit<CTA_GROUP>();
    }
    griddepcontrol_wait();
#if PROBLEM_LIST
    const Order order(problem.order, num_groups);
#else
    if (has_small_table)
        __syncthreads();
    else
        build_large_table<TILE_M, NUM_THREADS>(shared.groups, problem.offs, num_groups, m, lane);
    const Order order(shared.groups.table(), problem.operands.n);
#endif
    if constexpr (NEEDS_OWN_TILES) {
        if (warp == 1) shift_to_own_tiles(shared.groups.sorted.ends, num_groups, shared.scale_shifts, lane);
    }
    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if constexpr (CLUSTER > 1) {  // nobody may signal a barrier of a CTA that has not made it yet
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    tcgen05_fence_after_thread_sync();
    const uint32_t tensor_memory = shared.tensor_memory;

    const bool stores = warp < NUM_STORE_WARPS || (PROMOTES && warp > SCHEDULE_WARP);
    // In either branch of its own: where they met, the compiler would have to do with the fewer registers.
    if constexpr (MOVES_REGISTERS) {
        if (!stores) setmaxnreg_dec<OTHER_REGISTERS>();
    }
    if (stores) {
        if constexpr (MOVES_REGISTERS) setmaxnreg_inc<PROMOTER_REGISTERS>();
        store_tiles(shared, problem, tensor_memory, PROMOTES && warp > SCHEDULE_WARP ? warp / 4 - 1 : 0,
                    PROMOTES ? warp % 4 : warp, lane);
    } else if (warp == LOAD_A_WARP) {
        if (elect_one()) load_operand<true>(shared, problem);
    } else if (warp == LOAD_B_WARP) {
        if (elect_one()) load_operand<false>(shared, problem);
    } else if (warp == MULTIPLY_WARP) {
        if (pair_rank() == 0 && elect_one()) {
            if constexpr (PROMOTES)
                multiply_units(shared, problem, tensor_memory);
            else
                multiply_tiles(shared, problem, tensor_memory);
        }
    } else if (warp == SCHEDULE_WARP) {
        if (cluster_rank() == 0 && elect_one())
            schedule_tiles<CLUSTER>(shared.queue, order, problem.counter, worker, workers, nullptr,
                                    has_small_table);
    } else {
        gather_tiles(shared, problem, warp - GATHER_WARP, lane);
    }
    __syncwarp();

    tcgen05_fence_before_thread_sync();
    __syncthreads();
    if constexpr (CLUSTER > 1) {  // nor leave while another may still signal it or use its memories
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    tcgen05_fence_after_thread_sync();
    if (warp == MULTIPLY_WARP) tcgen05_dealloc<CTA_GROUP, TMEM_COLUMNS>(tensor_memory);
}
