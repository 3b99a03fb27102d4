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
// (scale_products.cuh names its limits) and comes out of the tensor core as well.
//
// Roles. A producer warpgroup, in which one thread drives the copy engine, one the scheduler (tile_queue.cuh), and two
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
// read as zero); the store alone is bounded, by the ragged descriptor of epilogue.cuh. No row of another group and no
// row past offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of sm90_quant_store.cuh, which quantises the tile; a GLU epilogue has the
// gate's and the up projection's columns in the same tile, and the tile's columns are dealt out (dealt_weight_row).

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/packed_halves.cuh"
#include "ptx/shared_words.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_m64k16.cuh"
#include "ptx/wgmma_fp8.cuh"

// In this order: later ones use earlier ones.
#include "descriptors.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "row_box.cuh"
#include "scheduler.cuh"
#include "group_table.cuh"
#include "tile_queue.cuh"
#include "scale_products.cuh"
#if EPILOGUE_IS_QUANT
#include "ptx/conversion.cuh"
#include "ptx/shared_vectors.cuh"
#include "quant_rules.cuh"
#include "quant_outputs.cuh"
#include "wgmma_fragment.cuh"
constexpr bool GATE_AND_UP_APART = GLU == GLU_CONCATENATED;
constexpr bool COLUMNS_ARE_DEALT = true;
#else
constexpr bool GATE_AND_UP_APART = false;
constexpr bool COLUMNS_ARE_DEALT = false;
#endif

// The host defines, from Sm90Mxfp8Config: BLOCK_M, BLOCK_N, NUM_STAGES (0 = as many as fit), RASTER_M, MAX_GROUPS,
// A_E5M2, B_E5M2, OUT_TYPE.
constexpr int BLOCK_K = 128;  // bytes and elements: STEPS blocks of 32
constexpr int WGMMA_M = 64;
constexpr int HALF_N = BLOCK_N / 2;  // products are begun and promoted in halves
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M / WGMMA_M;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
constexpr int NUM_SCALE_WARPS = 2;
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 1 ? 248 : 232;
constexpr int PRODUCER_REGISTERS = 40;
static_assert(BLOCK_M == 64 || BLOCK_M == 128, "one or two warpgroups");
static_assert(BLOCK_N == 64 || BLOCK_N == 128, "a thread holds 3 / 2 BLOCK_N sums and scales");

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;

// Rows come in units of 64, one to a consumer warpgroup.
__device__ __forceinline__ int units_of(int rows) {
    return (rows + WGMMA_M - 1) / WGMMA_M;
}

constexpr int UNIT_BYTES = WGMMA_M * BLOCK_K;
constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;
constexpr int V_BYTES = BLOCK_N / 8 * V_BRICKS;

#if EPILOGUE_IS_QUANT
constexpr int WAVES = 1;  // of 64 rows that a consumer warpgroup holds
constexpr int CLUSTER_N = 1;
#include "quant_storage.cuh"
constexpr int UNIT_D_BYTES = QUANT_UNIT_BYTES;
#else
constexpr int NUM_SLABS = BLOCK_N / SLAB_COLUMNS;
constexpr int UNIT_D_BYTES = NUM_SLABS * SLAB_BYTES;
#endif

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[NUM_MMA_WARPGROUPS][UNIT_D_BYTES];
    alignas(128) uint8_t v[STAGES][V_BYTES];        // scales of B, as an operand
    alignas(128) uint32_t sfa[STAGES][BLOCK_M][2];  // scales of A: bf16, STEPS to a row
    uint64_t full[STAGES], empty[STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
#if EPILOGUE_IS_QUANT
    QuantStorage quant;
#endif
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "read_back.cuh"

using Order = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    ScaleSource sfa, sfb;
    int m, n, k, num_groups;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
};

// Where the columns of a tile are dealt out (wgmma_fragment.cuh), B comes in copies of two of every four rows; of gate and
// of up, if they are apart.
constexpr int B_COPIES = GATE_AND_UP_APART ? 4 : 2;

// The row of the group's weights from which copy `copy` of the tile at `column` takes its fours.
__device__ __forceinline__ int first_weight_row(const Problem& problem, int column, int copy) {
    return GATE_AND_UP_APART ? (column + copy / 2 * problem.n) / 2 : column;
}

// The row of the group's weights that row `row` of the tile's part of B is.
__device__ __forceinline__ int dealt_weight_row(const Problem& problem, int column, int row) {
    constexpr int COPY_ROWS = BLOCK_N / B_COPIES;
    const int copy = row / COPY_ROWS, in_copy = row % COPY_ROWS;
    return first_weight_row(problem, column, copy) + in_copy / 2 * 4 + copy % 2 * 2 + in_copy % 2;
}

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    while (reader.next(tile)) {
        const int units = units_of(tile.rows);
        const uint32_t stage_bytes = units * row_box(problem.m) * BLOCK_K + B_BYTES;
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, stage_bytes);
            const uint32_t b = shared_address(shared.b[stage]);
            if constexpr (COLUMNS_ARE_DEALT) {
#pragma unroll
                for (int c = 0; c < B_COPIES; ++c)
                    tma_load_4d(map_b, b + c * (B_BYTES / B_COPIES), full, kb * BLOCK_K, c % 2 * 2,
                                first_weight_row(problem, tile.column, c) / 4, tile.group);
            } else {
                tma_load_3d(map_b, b, full, kb * BLOCK_K, tile.column, tile.group);
            }
            for (int u = 0; u < units; ++u)
                tma_load_2d(map_a, shared_address(shared.a[stage] + u * UNIT_BYTES), full, kb * BLOCK_K,
                            tile.row + u * WGMMA_M);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}

// Scale warp: fills its part of every stage, with the four scales of rows lane, lane + 32 .. of the tile (OF_A) or of
// columns lane, lane + 32 .. of it. Those of the next stage are on their way while these are written.
template <bool OF_A>
__device__ __forceinline__ void write_scales(SharedStorage& shared, const Problem& problem, int lane) {
    constexpr int ROWS = OF_A ? BLOCK_M : BLOCK_N;
    const ScaleSource source = OF_A ? problem.sfa : problem.sfb;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile{};
    while (reader.next(tile, lane)) {
        ScaleSource of_tile = source;
        long long first;
        if constexpr (OF_A) {
            first = tile.row;
            if (source.layout == SCALES_BLOCKED_GROUPS) {
                const int start = tile.group == 0 ? 0 : shared.groups.group_ends[tile.group - 1];
                first += tiles_before_group(shared.groups.group_ends, tile.group, lane) * 128LL - start;
            }
        } else if (source.layout == SCALES_PLAIN) {
            first = static_cast<long long>(tile.group) * problem.n + tile.column;
        } else {  // every group is a matrix of tiles of its own
            first = tile.column;
            of_tile.bytes += tile.group * ((problem.n + 127) / 128 * 512LL) * source.column_tiles();
        }
        // Rows and columns that do not exist take the scales of the last one: they are dropped with the sums.
        const int last = OF_A ? tile.rows - 1 : problem.n - 1 - tile.column;
        const uint8_t* at[ROWS / 32];
        uint32_t words[ROWS / 32];
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i) {
            int row = lane + 32 * i;
            if constexpr (!OF_A && COLUMNS_ARE_DEALT)
                row = dealt_weight_row(problem, tile.column, row) - tile.column;
            at[i] = of_tile.of_row(first + (row < last ? row : last));
            words[i] = of_tile.word(at[i], 0);
        }
        for (int kb = 0; kb < k_blocks; ++kb) {
            uint32_t pairs[ROWS / 32][2];
#pragma unroll
            for (int i = 0; i < ROWS / 32; ++i) {
                pairs[i][0] = scale_pair<BYTES_0_1>(words[i]);
                pairs[i][1] = scale_pair<BYTES_2_3>(words[i]);
            }
            const int existing = source.columns - kb * STEPS;
            if (existing < STEPS) {  // past K: zero, whatever was read
#pragma unroll
                for (int i = 0; i < ROWS / 32; ++i) {
                    pairs[i][0] &= existing < 2 ? 0xFFFF : ~0u;
                    pairs[i][1] &= existing < 3 ? 0 : 0xFFFF;
                }
            }
            if (kb + 1 < k_blocks) {
                if (source.are_words()) {
#pragma unroll
                    for (int i = 0; i < ROWS / 32; ++i) {
                        at[i] += source.to_next_stage();
                        words[i] = __ldg(reinterpret_cast<const uint32_t*>(at[i]));
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < ROWS / 32; ++i) words[i] = of_tile.word(at[i], kb + 1);
                }
            }
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            const uint32_t to = OF_A ? shared_address(shared.sfa[stage][lane])
                                     : shared_address(shared.v[stage]) + v_offset(lane);
#pragma unroll
            for (int i = 0; i < ROWS / 32; ++i)  // V's offsets are linear in steps of 8 columns
                st_shared_v2_b32(
                    to + i * (OF_A ? 32 * static_cast<int>(sizeof(shared.sfa[0][0])) : v_offset(32)),
                    pairs[i][0], pairs[i][1]);
            if constexpr (!OF_A) fence_proxy_async_shared();  // the tensor core reads V itself
            mbarrier_arrive(shared_address(&shared.full[stage]));
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}

// Every lane has read scales of its own and says so itself, as every lane of the scale warps does of what it wrote:
// racecheck follows a thread's arrival, not what __syncwarp adds to lane 0's.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage) {
    mbarrier_arrive(shared_address(&shared.empty[stage]));
}

// Consumer with no row in this tile: keeps step with the pipeline. A tail of up to 64 rows so costs half the products.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, const Problem& problem, int lane,
                                          Pipeline<STAGES>& pipeline, Reader& reader) {
    for (int kb = 0; kb < problem.k_blocks(); ++kb) {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage);
        pipeline.advance();
    }
    if (lane == 0) reader.release();
}

// A consumer thread's registers beside d, and what it has to find its operands. `sums` and `scales` belong to the tensor
// core from their wgmma to its wait.
struct Step {
    float sums[2][HALF_N / 2];    // of the two halves of the columns
    float scales[2][HALF_N / 2];  // of the same elements
    uint32_t u[2][4];             // of even and odd steps: a new one is made while the last is in use
    uint32_t pairs[2];            // scales of the thread's two rows in this stage
    uint32_t a_stage_0, b_stage_0, v_stage_0;
    uint32_t pairs_stage_0;

    __device__ __forceinline__ void read_pairs(int stage) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
            pairs[r] = ld_shared_b32(pairs_stage_0 + stage * static_cast<int>(sizeof(SharedStorage::sfa[0])) +
                                     r * 8 * static_cast<int>(sizeof(SharedStorage::sfa[0][0])));
    }

    // U of a step, made here and not behind the fence of the product that takes it.
    __device__ __forceinline__ void make_u(int step, int lane) {
        ::make_u(u[step % 2], pairs, step, lane);
        pin_register(u[step % 2][0]);
        pin_register(u[step % 2][1]);
    }

    // One group: values and scales of half the columns.
    template <int HALF>
    __device__ __forceinline__ void begin(int stage, int step) {
        const uint32_t a = a_stage_0 + stage * (A_BYTES / 16) + step * 2;
        const uint32_t b = b_stage_0 + stage * (B_BYTES / 16) + HALF * (HALF_N * BLOCK_K / 16) + step * 2;
        const uint32_t v = v_stage_0 + stage * (V_BYTES / 16) + HALF * (HALF_N / 8 * V_BRICKS / 16);
        wgmma_fence();
        wgmma_m64k32_fp8<HALF_N, A_E5M2, B_E5M2>(sums[HALF], k_major_128b_descriptor(a),
                                                 k_major_128b_descriptor(b));
        wgmma_m64k16<HALF_N, false>(scales[HALF], u[step % 2], v_descriptor(v), 0);
        wgmma_commit_group();
    }

    template <int HALF, int PENDING>
    __device__ __forceinline__ void wait() {
        pin<HALF>();
        wgmma_wait_group<PENDING>();
        pin<HALF>();
    }

    template <int HALF>
    __device__ __forceinline__ void pin() {
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            pin_register(sums[HALF][i]);
            pin_register(scales[HALF][i]);
        }
    }

    template <int HALF>
    __device__ __forceinline__ void promote(float (&d)[BLOCK_N / 2]) {
#pragma unroll
        for (int i = 0; i < HALF_N / 2; ++i) {
            const int j = HALF * (HALF_N / 2) + i;
            d[j] = fmaf(sums[HALF][i], scales[HALF][i], d[j]);
        }
    }
};

// The four steps of a stage. On entry the first half of its first step is under way; on leaving that of the next stage is,
// unless this is the LAST one.
//
// While one half is promoted the other is being multiplied: with the other warpgroup's halves, the tensor core always has
// work. Only the step between stages has a gap, of the time that a half takes less the 32 multiply-adds before it: where
// groups are left pending across basic blocks, ptxas (13.0) serialises all products (its message C7514), and the wait for
// the next stage's barrier ends one. It is therefore at the start of a stage, and a wait for everything follows.
template <bool LAST>
__device__ __forceinline__ void multiply_stage(float (&d)[BLOCK_N / 2], Step& step, SharedStorage& shared,
                                               int lane, Pipeline<STAGES>& pipeline) {
    const int stage = pipeline.stage;
    if constexpr (!LAST) {
        pipeline.advance();
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        const int next = (k + 1) % STEPS, next_stage = next == 0 ? pipeline.stage : stage;
        const bool more = !LAST || next != 0;
        if (k == 0) {
            step.wait<0, 0>();
            step.begin<1>(stage, 0);
        } else {
            step.wait<0, 1>();  // all but the second half
        }
        if (more) step.make_u(next, lane);
        if (next == STEPS - 1 && !LAST) step.read_pairs(pipeline.stage);  // these are done with
        step.promote<0>(d);
        if (more) step.begin<0>(next_stage, next);

        if (more)
            step.wait<1, 1>();  // all but what was just begun
        else
            step.wait<1, 0>();
        if (next == 0) release_stage(shared, stage);
        step.promote<1>(d);
        if (next != 0) step.begin<1>(stage, next);
    }
}

// Consumer: d = this warpgroup's 64 rows of the tile. Registers as in wgmma.cuh. `row` is this thread's first row inside
// the tile; it also has row + 8.
__device__ __forceinline__ void multiply_tile(float (&d)[BLOCK_N / 2], SharedStorage& shared,
                                              const Problem& problem, int warpgroup, int row, int lane,
                                              Pipeline<STAGES>& pipeline) {
    Step step;
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    step.a_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0] + warpgroup * UNIT_BYTES)), 0);
    step.b_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);
    step.v_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.v[0])), 0);
    step.pairs_stage_0 = shared_address(&shared.sfa[0][row][lane % 2]);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = 0.0f;

    const int k_blocks = problem.k_blocks();
    mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    step.read_pairs(pipeline.stage);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 2; j < 4; ++j) {
            step.u[i][j] = 0;
            pin_register(step.u[i][j]);  // a zero of its own, that no other instruction touches
        }
    }
    step.make_u(0, lane);
    step.begin<0>(pipeline.stage, 0);
    for (int kb = 1; kb < k_blocks; ++kb) multiply_stage<false>(d, step, shared, lane, pipeline);
    multiply_stage<true>(d, step, shared, lane, pipeline);
    pipeline.advance();
}

#if EPILOGUE_IS_QUANT
using StoreMaps = QuantOutputs;
#include "sm90_quant_store.cuh"
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

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ StoreMaps store_maps, const uint8_t* sfa, const uint8_t* sfb, const int* offs,
    int sfa_layout, int sfb_layout, int m, int n, int k, int num_groups, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const int columns = k / 32;
    const Problem problem{{sfa, columns, sfa_layout}, {sfb, columns, sfb_layout}, m, n, k, num_groups};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1 + NUM_SCALE_WARPS * 32);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS * 32);
            }
            for (int s = 0; s < QUEUE_SLOTS; ++s) {
                mbarrier_init(shared_address(&shared.queue.full[s]), 1);
                mbarrier_init(shared_address(&shared.queue.empty[s]),
                              NUM_CONSUMER_WARPS + NUM_SCALE_WARPS + 1);
            }
#if EPILOGUE_IS_QUANT
            shared.quant.init();
#endif
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    for (int i = threadIdx.x; i < STAGES * V_BYTES / 16; i += NUM_THREADS)  // k 4-15 of V stay zero
        st_shared_v4_b32(shared_address(shared.v[0]) + i * 16, 0, 0, 0, 0);
    fence_proxy_async_shared();
    clear_missing_rows<STAGES, A_BYTES, NUM_THREADS>(shared.a[0], m);
    build_group_table<BLOCK_M, NUM_THREADS>(shared.groups, offs, num_groups, m, warp, lane);
#if EPILOGUE_IS_QUANT
    if (warp == 1) count_row_tiles(shared.groups.group_ends, num_groups, shared.quant.group_tiles, lane);
    __syncthreads();
#endif

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == NUM_CONSUMER_WARPS) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b);
        } else if (warp == NUM_CONSUMER_WARPS + 1) {
            if (elect_one())
                hand_out_tiles<1>(shared.queue, Order(shared.groups.table(num_groups), n), counter,
                                  blockIdx.x, gridDim.x);
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
