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
// Roles. One producer warpgroup, in which one thread drives the copy engine, one the scheduler (tile_queue.cuh), and a
// warp or two store finished tiles (sm90_fp8_store.cuh); NUM_MMA_WARPGROUPS consumer warpgroups with the tile in
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
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M
// read as zero); the store alone is bounded, by one of the two ways of epilogue.cuh. No row of another group and no
// row past offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of sm90_quant_store.cuh, which quantises the tile; a GLU epilogue has the
// gate's and the up projection's columns in the same tile (product_column).

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

// In this order: later ones use earlier ones.
#include "descriptors.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "row_box.cuh"
#include "scheduler.cuh"
#include "group_table.cuh"
#include "tile_queue.cuh"
#include "weights_prefetch.cuh"
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

// The host defines, from GemmConfig: BLOCK_M, BLOCK_N, NUM_STAGES (0 = as many as fit), CLUSTER_N, RASTER_M,
// MAX_GROUPS, SCALE_WINDOW_K_BLOCKS, STORE_IS_POOL, SCALES_ARE_K_MAJOR, OUT_TYPE.
constexpr bool SCALES_K_MAJOR = SCALES_ARE_K_MAJOR;

constexpr int BLOCK_K = 128;  // bytes, elements, and the length of a scale block
constexpr int WGMMA_M = 64, WGMMA_K = 32;
constexpr int NUM_MMA_WARPGROUPS = BLOCK_M == 64 ? 1 : 2;
constexpr int WAVES = BLOCK_M / WGMMA_M / NUM_MMA_WARPGROUPS;  // of 64 rows that a consumer warpgroup holds
constexpr int NUM_THREADS = 128 * (1 + NUM_MMA_WARPGROUPS);
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 1 ? 248 : 232;
constexpr int PRODUCER_REGISTERS = 40;

constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int SLAB_BYTES = WGMMA_M * 128;
// A tile may start in the second half of a 128-column scale block unless its width is a multiple of 128.
constexpr bool CAN_START_ODD = BLOCK_N % 128 != 0;
constexpr int NUM_SFB = GATE_AND_UP_APART ? 2
                        : CAN_START_ODD   ? (BLOCK_N + 64 + 127) / 128
                                          : BLOCK_N / 128;  // scale blocks a tile can touch
static_assert(BLOCK_M == 64 || BLOCK_M == 128 || BLOCK_M == 256, "one or two warpgroups of one or two waves");
static_assert(BLOCK_N % 64 == 0, "scales are selected by 64 columns");

// Rows come in units of 64: unit u belongs to warpgroup u % NUM_MMA_WARPGROUPS as its wave u / NUM_MMA_WARPGROUPS. A
// tile with fewer rows than BLOCK_M has fewer units, and no other unit is loaded or multiplied. Where columns are quantised
// the units of a warpgroup are neighbours instead (first_unit of quant_storage.cuh).
__device__ __forceinline__ int units_of(int rows) {
    return (rows + WGMMA_M - 1) / WGMMA_M;
}

// MN-major scales travel with the stage: the tile's rows and up to 3 before them, since a copy must start at a multiple
// of 4. A box has at most 256 elements and lands on a 128-byte boundary: 256 rows take three copies, end to end.
// Row-major scales travel once per tile, as the contiguous window of all K blocks of the tile's rows, in copies of 256
// floats that start at a multiple of 4.
constexpr int SFA_COPY_FLOATS = BLOCK_M == 256 ? 96 : BLOCK_M + 4;
constexpr int SFA_STAGE_FLOATS = SCALES_K_MAJOR ? 0 : BLOCK_M == 256 ? 3 * 96 : (BLOCK_M + 4 + 31) / 32 * 32;
constexpr int WINDOW_COPY_FLOATS = 256;
constexpr int WINDOW_FLOATS = SCALES_K_MAJOR
                                  ? (BLOCK_M * SCALE_WINDOW_K_BLOCKS + 3 + WINDOW_COPY_FLOATS - 1) /
                                        WINDOW_COPY_FLOATS * WINDOW_COPY_FLOATS
                                  : 0;

constexpr int UNIT_BYTES = WGMMA_M * BLOCK_K;
constexpr int A_BYTES = BLOCK_M * BLOCK_K;
constexpr int B_BYTES = BLOCK_N * BLOCK_K;

constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
// Else a warp for each consumer warpgroup stores, beside the producer. It does not pay with 192 columns (measured).
constexpr bool CONSUMERS_STORE = EPILOGUE_IS_QUANT || BLOCK_N == 192;
constexpr int NUM_STORE_WARPS = CONSUMERS_STORE ? 0 : NUM_MMA_WARPGROUPS;
constexpr int NUM_TILE_READERS = NUM_CONSUMER_WARPS + 1 + NUM_STORE_WARPS;  // of a CTA
#if EPILOGUE_IS_QUANT
#include "quant_storage.cuh"
constexpr int UNIT_D_BYTES = QUANT_UNIT_BYTES;
#else
constexpr int UNIT_STEP = NUM_MMA_WARPGROUPS;  // from a warpgroup's unit to its next
__device__ __forceinline__ int first_unit(int warpgroup, int) {
    return warpgroup;
}
constexpr int NUM_SLABS = BLOCK_N / SLAB_COLUMNS;
constexpr int UNIT_D_BYTES = NUM_SLABS * SLAB_BYTES;
#endif

template <int STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t a[STAGES][A_BYTES];
    uint8_t b[STAGES][B_BYTES];
    uint8_t d[BLOCK_M / WGMMA_M][UNIT_D_BYTES];
    alignas(128) float sfa[STAGES][SFA_STAGE_FLOATS == 0 ? 32 : SFA_STAGE_FLOATS];
    alignas(128) float sfa_window[WINDOW_FLOATS == 0 ? 32 : WINDOW_FLOATS];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t window_full, window_empty;
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
#if EPILOGUE_IS_QUANT
    QuantStorage quant;
#endif
};

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageOf, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageOf<STAGES>;
#include "read_back.cuh"
// How many multiply-adds of the promotion in a row read their common scale once (operand_reuse.py): as measured.
extern "C" __device__ const int padless_reuse_run = WAVES == 2 ? 12 : 4;

using Order = TileOrder<BLOCK_M, BLOCK_N * CLUSTER_N, RASTER_M>;
using Reader = TileReader<CLUSTER_N>;

struct Problem {
    const float* sfb;
    int m, n, k, num_groups;

    __device__ __forceinline__ int k_blocks() const { return (k + BLOCK_K - 1) / BLOCK_K; }
    __device__ __forceinline__ int sfb_rows() const { return (n + 127) / 128; }
};

// First column of this CTA's part of the tile.
__device__ __forceinline__ int cta_column(const Tile& tile) {
    return CLUSTER_N == 1 ? tile.column : tile.column + static_cast<int>(cluster_cta_rank()) * BLOCK_N;
}

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    uint32_t window_phase = 0;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    while (reader.next(tile)) {
        const int column = cta_column(tile);
        const int units = units_of(tile.rows);
        const int sfa_copies =
            SCALES_K_MAJOR ? 0 : (units * WGMMA_M + 3 + SFA_COPY_FLOATS - 1) / SFA_COPY_FLOATS;
        const uint32_t stage_bytes =
            units * row_box(problem.m) * BLOCK_K + B_BYTES + sfa_copies * SFA_COPY_FLOATS * 4;
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, stage_bytes);
            if constexpr (COLUMNS_ARE_DEALT) {  // see wgmma_fragment.cuh
                constexpr int COPIES = GATE_AND_UP_APART ? 4 : 2;
#pragma unroll
                for (int c = 0; c < COPIES; ++c) {
                    const int first = GATE_AND_UP_APART ? (column + c / 2 * problem.n) / 2 : column;
                    tma_load_4d(map_b, shared_address(shared.b[stage] + c * (B_BYTES / COPIES)), full,
                                kb * BLOCK_K, c % 2 * 2, first / 4, tile.group);
                }
            } else {
                tma_load_3d(map_b, shared_address(shared.b[stage]), full, kb * BLOCK_K, column, tile.group);
            }
            if constexpr (CLUSTER_N == 1) {
                for (int u = 0; u < units; ++u)
                    tma_load_2d(map_a, shared_address(shared.a[stage] + u * UNIT_BYTES), full, kb * BLOCK_K,
                                tile.row + u * WGMMA_M);
            } else {  // the CTAs of the cluster take turns at fetching a unit and give it to both
                for (int u = cluster_cta_rank(); u < units; u += CLUSTER_N)
                    tma_load_2d_multicast(map_a, shared_address(shared.a[stage] + u * UNIT_BYTES), full,
                                          kb * BLOCK_K, tile.row + u * WGMMA_M, (1 << CLUSTER_N) - 1);
            }
            for (int i = 0; i < sfa_copies; ++i)
                tma_load_2d(map_sfa, shared_address(shared.sfa[stage] + i * SFA_COPY_FLOATS), full,
                            (tile.row & ~3) + i * SFA_COPY_FLOATS, kb);
            pipeline.advance();

            // The window of this tile may be fetched once the last tile's has been read: not before this tile's first
            // stages are on their way, or they would wait for it too.
            if constexpr (SCALES_K_MAJOR) {
                const int after = STAGES - 1 < k_blocks ? STAGES - 2 : k_blocks - 1;
                if (kb == after) {
                    const uint32_t window_full = shared_address(&shared.window_full);
                    const int first = tile.row * k_blocks & ~3;
                    const int last = (tile.row + tile.rows) * k_blocks;  // one past
                    const int copies = (last - first + WINDOW_COPY_FLOATS - 1) / WINDOW_COPY_FLOATS;
                    mbarrier_wait(shared_address(&shared.window_empty), window_phase ^ 1);
                    mbarrier_arrive_expect_tx(window_full, copies * WINDOW_COPY_FLOATS * 4);
                    for (int i = 0; i < copies; ++i)
                        tma_load_1d(map_sfa, shared_address(shared.sfa_window + i * WINDOW_COPY_FLOATS),
                                    window_full, first + i * WINDOW_COPY_FLOATS);
                    window_phase ^= 1;
                }
            }
        }
        reader.release();
        reader.advance();
    }
}

// Lane l holds the scales of K block `first + l` of the tile's NUM_SFB column blocks.
__device__ __forceinline__ void load_sfb(float (&sfb)[NUM_SFB], const float* const (&rows)[NUM_SFB], int kb,
                                         int k_blocks) {
#pragma unroll
    for (int j = 0; j < NUM_SFB; ++j) sfb[j] = kb < k_blocks ? __ldg(rows[j] + kb) : 0.0f;
}

// One arrival a warp, after all its lanes have read the stage, in every CTA that loads into this one's stage.
__device__ __forceinline__ void release_stage(SharedStorage& shared, int stage, int lane) {
    __syncwarp();
    const uint32_t empty = shared_address(&shared.empty[stage]);
    if constexpr (CLUSTER_N == 1) {
        if (lane == 0) mbarrier_arrive(empty);
    } else {
        if (lane < CLUSTER_N) mbarrier_arrive_cluster(empty, lane);
    }
}

// Consumer with no row in this tile: keeps step with the pipeline. A tail of up to 64 rows so costs half the products.
__device__ __forceinline__ void skip_tile(SharedStorage& shared, const Problem& problem, int lane,
                                          Pipeline<STAGES>& pipeline, Reader& reader) {
    for (int kb = 0; kb < problem.k_blocks(); ++kb) {
        mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
        release_stage(shared, pipeline.stage, lane);
        pipeline.advance();
    }
    if (lane == 0) reader.release();
}

// Address of the scale of row `row` of the tile: in stage 0, or of K block 0 in the window.
__device__ __forceinline__ uint32_t sfa_address(const SharedStorage& shared, const Tile& tile, int row,
                                                int k_blocks) {
    if constexpr (SCALES_K_MAJOR) {  // a row past the end has no scales in the window
        const int existing = row < tile.rows ? row : tile.rows - 1;
        return shared_address(&shared.sfa_window[(tile.row * k_blocks & 3) + existing * k_blocks]);
    } else {
        return shared_address(&shared.sfa[0][(tile.row & 3) + row]);
    }
}

// Consumer: d = this warpgroup's NUM_WAVES units of the tile, from unit `first` on. Registers as in wgmma.cuh. `row` is
// this thread's first row inside the tile; it also has row + 8, and both again in the next unit of the warpgroup.
template <int NUM_WAVES>
__device__ __forceinline__ void multiply_tile(float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                              const Problem& problem, const Tile& tile, int column, int first,
                                              int row, int lane, Pipeline<STAGES>& pipeline) {
    const int k_blocks = problem.k_blocks();
    const float* sfb_rows[NUM_SFB];
#pragma unroll
    for (int j = 0; j < NUM_SFB; ++j) {
        const int last = problem.sfb_rows() - 1;
        const int wanted = GATE_AND_UP_APART ? (column + j * problem.n) / 256 : column / 128 + j;
        const int block = wanted < last ? wanted : last;
        sfb_rows[j] = problem.sfb + (static_cast<long long>(tile.group) * (last + 1) + block) * k_blocks;
    }
    float sfb[NUM_SFB], sfb_ahead[NUM_SFB];
    load_sfb(sfb, sfb_rows, lane, k_blocks);
    load_sfb(sfb_ahead, sfb_rows, lane + 32, k_blocks);

    constexpr int WAVE_ROWS = UNIT_STEP * WGMMA_M;  // from one unit of a warpgroup to its next
    constexpr int NUM_SFA_AT =
        SCALES_K_MAJOR ? 2 * NUM_WAVES : 1;  // in a stage, all rows are at constant distances
    uint32_t sfa_at[NUM_SFA_AT];
#pragma unroll
    for (int i = 0; i < NUM_SFA_AT; ++i) {
        sfa_at[i] = sfa_address(shared, tile, row + (i / 2) * WAVE_ROWS + (i % 2) * 8, k_blocks);
        pin_register(sfa_at[i]);
    }
    // The shuffles tell the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t a_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.a[0] + first * UNIT_BYTES)), 0);
    const uint32_t b_stage_0 = __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.b[0])), 0);

#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) d[w][i] = 0.0f;
    }
    const bool odd_half = CAN_START_ODD && column % 128 != 0;

    // The scales of unit `w` for the K block at hand: rows of A by columns of B, 64 at a time.
    float of_block[NUM_SFB], scale[2][BLOCK_N / 64];
    const auto load_scales = [&](int w, int kb, int stage) {
        if (w == 0) {
#pragma unroll
            for (int j = 0; j < NUM_SFB; ++j) of_block[j] = __shfl_sync(0xffffffff, sfb[j], kb & 31);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint32_t at =
                SCALES_K_MAJOR ? sfa_at[SCALES_K_MAJOR ? 2 * w + r : 0] + kb * 4
                               : sfa_at[0] + stage * (SFA_STAGE_FLOATS * 4) + (w * WAVE_ROWS + r * 8) * 4;
            const float sfa = ld_shared_f32(at);
#pragma unroll
            for (int c = 0; c < BLOCK_N / 64; ++c)
                scale[r][c] = sfa * (GATE_AND_UP_APART ? of_block[c % NUM_SFB]
                                     : odd_half        ? of_block[(c + 1) / 2]
                                                       : of_block[c / 2]);
        }
    };

    // Where a warpgroup has one unit it waits for the next stage while the products of this one are under way. With two
    // units the ring is three stages deep, and waiting ahead would keep this stage's memory from the producer for longer:
    // there it waits when it gets there, in an unrolled loop, so that the barrier is asked between the promotions. Beside a
    // long epilogue the loop is kept shorter: instructions of both are fetched again and again.
    constexpr bool WAIT_AHEAD = NUM_WAVES == 1;
    constexpr int UNROLL = WAIT_AHEAD ? 1 : EPILOGUE_IS_QUANT ? 4 : 8;
    if (WAIT_AHEAD) mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);
    for (int chunk = 0; chunk < k_blocks; chunk += 32) {
        const int chunk_end = chunk + 32 < k_blocks ? chunk + 32 : k_blocks;
        if (chunk != 0) {
#pragma unroll
            for (int j = 0; j < NUM_SFB; ++j) sfb[j] = sfb_ahead[j];
            load_sfb(sfb_ahead, sfb_rows, chunk + 32 + lane, k_blocks);
        }
#pragma unroll UNROLL
        for (int kb = chunk; kb < chunk_end; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t b = b_stage_0 + stage * (B_BYTES / 16);
            if (!WAIT_AHEAD) mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
#pragma unroll
            for (int w = 0; w < NUM_WAVES; ++w) {
                const uint32_t a = a_stage_0 + stage * (A_BYTES / 16) + w * (WAVE_ROWS * BLOCK_K / 16);
                if (!WAIT_AHEAD) load_scales(w, kb, stage);
                float p[BLOCK_N / 2];
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < BLOCK_K; k += WGMMA_K)
                    wgmma_m64k32_e4m3<BLOCK_N>(p, k_major_128b_descriptor(a + k / 16),
                                               k_major_128b_descriptor(b + k / 16), k != 0);
                wgmma_commit_group();

                if (WAIT_AHEAD) load_scales(w, kb, stage);
                if (w == NUM_WAVES - 1) pipeline.advance();
                if (WAIT_AHEAD && kb + 1 < k_blocks)
                    mbarrier_wait(shared_address(&shared.full[pipeline.stage]), pipeline.phase);

#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                wgmma_wait_group<0>();
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) pin_register(p[i]);
                if (w == NUM_WAVES - 1) release_stage(shared, stage, lane);

#pragma unroll
                for (int i = 0; i < BLOCK_N / 8; ++i) {
                    d[w][4 * i + 0] = fmaf(p[4 * i + 0], scale[0][i / 8], d[w][4 * i + 0]);
                    d[w][4 * i + 1] = fmaf(p[4 * i + 1], scale[0][i / 8], d[w][4 * i + 1]);
                    d[w][4 * i + 2] = fmaf(p[4 * i + 2], scale[1][i / 8], d[w][4 * i + 2]);
                    d[w][4 * i + 3] = fmaf(p[4 * i + 3], scale[1][i / 8], d[w][4 * i + 3]);
                }
            }
        }
    }
}

#if EPILOGUE_IS_QUANT
using StoreMaps = QuantOutputs;
#include "sm90_quant_store.cuh"
#else
#include "sm90_fp8_store.cuh"
#endif

// Consumer: one tile of which NUM_WAVES units belong to this warpgroup.
template <int NUM_WAVES>
__device__ __forceinline__ void consume_tile(SharedStorage& shared, const Problem& problem,
                                             const StoreMaps& store_maps, const Tile& tile, int warpgroup,
                                             int warp, int lane, Pipeline<STAGES>& pipeline, Reader& reader) {
    const int column = cta_column(tile);
    const int first = WAVES == 1 ? warpgroup : first_unit(warpgroup, tile.rows);
    const int row = first * WGMMA_M + warp * 16 + lane / 4;
    float d[WAVES][BLOCK_N / 2];
    multiply_tile<NUM_WAVES>(d, shared, problem, tile, column, first, row, lane, pipeline);
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
        const int units = units_of(tile.rows);
        if (WAVES == 2 && warpgroup + NUM_MMA_WARPGROUPS < units)
            consume_tile<WAVES>(shared, problem, store_maps, tile, warpgroup, warp, lane, pipeline, reader);
        else if (warpgroup < units)
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

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ StoreMaps store_maps, const float* sfb,
    const int* offs, int m, int n, int k, int num_groups, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{sfb, m, n, k, num_groups};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            prefetch_tensormap(map_sfa);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), CLUSTER_N * NUM_CONSUMER_WARPS);
            }
            mbarrier_init(shared_address(&shared.window_full), 1);
            mbarrier_init(shared_address(&shared.window_empty), NUM_CONSUMER_WARPS);
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
    }
    if constexpr (!COLUMNS_ARE_DEALT) {  // else map_b is another
        if (warp == 2 && elect_one())
            prefetch_weights<BLOCK_N, BLOCK_K>(map_b, n, problem.k_blocks(), num_groups);
    }
    clear_missing_rows<STAGES, A_BYTES, NUM_THREADS>(shared.a[0], m);
    build_group_table<BLOCK_M, NUM_THREADS>(shared.groups, offs, num_groups, m, warp, lane);
#if EPILOGUE_IS_QUANT
    if (warp == 1) count_row_tiles(shared.groups.group_ends, num_groups, shared.quant.group_tiles, lane);
    __syncthreads();
#endif
    if constexpr (CLUSTER_N > 1) {  // nobody may signal a barrier of a CTA that has not made it yet
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }

    if (warp >= NUM_CONSUMER_WARPS) {
        setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == NUM_CONSUMER_WARPS) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b, map_sfa);
        } else if (warp == NUM_CONSUMER_WARPS + 1 && (CLUSTER_N == 1 || cluster_cta_rank() == 0)) {
            if (elect_one())
                hand_out_tiles<CLUSTER_N>(shared.queue, Order(shared.groups.table(num_groups), n), counter,
                                          blockIdx.x / CLUSTER_N, gridDim.x / CLUSTER_N);
        }
#if !EPILOGUE_IS_QUANT
        const int storing = warp - (NUM_CONSUMER_WARPS + 2);  // the consumer warpgroup that it stores for
        if (storing >= 0 && storing < NUM_STORE_WARPS)
            store_tiles(shared, problem, store_maps, storing, lane);
#endif
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
    if constexpr (CLUSTER_N > 1) {  // nor leave while the other may still signal or fill it
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}
