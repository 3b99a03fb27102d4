// Grouped GEMM on Hopper for every pair of formats whose values are exact in bf16: D[rows of g] = A[rows of g] * B[g]^T
// for every group g, with the groups' rows one after the other in A and D and no padding between them.
//
//   A    (M, K) activations ("tokens"): bf16, FP8_BLOCK, MXFP8 (e4m3, e5m2), MXFP4 or NVFP4
//   B    (G, N, K) weights: MXFP8 (e4m3, e5m2), MXFP4 or NVFP4
//   sfa  one-byte scales (M, ceil(K / 32 or 16)) row-major; float32, any strides, for FP8_BLOCK; none for bf16
//   sfb  one-byte scales (G, N, ceil(K / 32 or 16)) row-major, or in the 32x4x4 layout
//   offs (G) int32, cumulative end rows, or null for one group of M rows
//   D    (M, N) bf16, fp16 or float32
//
// Arithmetic, per output element: code * scale is exact in bf16 (dequantize.cuh names the limits); the tensor core adds
// 16 products to its float32 sum at a time (25 fractional bits of the largest term, truncated). FP8_BLOCK: for each 128 of
// K, d = fma(sum, sfa, d) in float32. At the end d * 2^s * (global scale of a * global scale of b), 2^s being exact.
//
// The product is made transposed: 64 weight rows are the M side of an instruction, read from registers, and the tokens its
// N side, read from shared memory. Weights go from shared memory, as they came, to bf16 fragments in the registers of the
// warpgroup that multiplies them; tokens, which all those warpgroups need, are dequantised once by converter warps.
//
// Roles. NUM_MMA_WARPGROUPS consumer warpgroups with UNITS_OF_WARPGROUP units of 64 weight rows each, two or four converter
// warps, and two of whose threads one drives the copy engine and one schedules. CTAs are persistent.
//
//      producer                        converter                         consumer warpgroup
//      --------                        ---------                         ------------------
//      wait empty[s]  <-------------- arrive empty[s] <----------------- arrive empty[s], its weights being in registers
//      load --> full[s] (bytes) -----> wait full[s] -------------------> wait full[s]; weights to bf16 fragments
//                                      wait tokens_empty[t] <----------- arrive tokens_empty[t] after the products
//                                      tokens to bf16 in shared memory
//                                      arrive tokens_full[t] ----------> wait tokens_full[t]; wgmma
//      (all three read the tile queue of tile_queue.cuh; where BEGINS_IN_F16 converters and consumers wait for checked[s],
//      which the converters arrive on when they have looked at the scales of full[s])
//
// K block: 128 of K. A stage s, or t, holds STAGE_BLOCKS of them.
//
// K order: inside 128 of K, lane quad q = lane % 4 has codes 32 q .. 32 q + 31 of its row, four octets of them; octet s
// feeds the instructions 2 s and 2 s + 1 of 16. The sum does not change under a permutation of K that both operands share.
//
// Padding-free rule: loads may run past the end of a group (those rows are computed and dropped, and rows past M read as
// zero); the store alone is bounded, by the ragged descriptor of epilogue.cuh. No row of another group and no row past
// offs[G - 1] is ever written.
//
// With EPILOGUE_IS_QUANT the store is the one of sm90_transposed_quant.cuh, which quantises the tile.

#ifndef EPILOGUE_IS_QUANT
#define EPILOGUE_IS_QUANT 0
#endif

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

#include "ptx/dequantize.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_m64k16.cuh"

// In this order: later ones use earlier ones.
#include "dequantize.cuh"
#include "descriptors.cuh"
#include "epilogue.cuh"
#include "pipeline.cuh"
#include "scheduler.cuh"
#include "group_table.cuh"
#include "tile_queue.cuh"
#include "weights_prefetch.cuh"

// The host defines, from Bf16GemmConfig: BLOCK_M (tokens), BLOCK_N (weight rows), NUM_MMA_WARPGROUPS, NUM_STAGES (0 = as
// many as fit), STAGE_BLOCKS (K blocks to a stage), RASTER_M, MAX_GROUPS, A_FORMAT, B_FORMAT, SFB_IS_BLOCKED, OUT_TYPE.
constexpr int BLOCK_K = 128;
constexpr int WGMMA_M = 64;
constexpr int UNITS_OF_WARPGROUP = BLOCK_N / WGMMA_M / NUM_MMA_WARPGROUPS;
constexpr int NUM_CONSUMER_WARPS = NUM_MMA_WARPGROUPS * 4;
// Few tokens are converted by two warps, in the producer's warpgroup, so that four consumer warpgroups get the registers.
constexpr bool HELPERS_TOGETHER = NUM_MMA_WARPGROUPS == 4 && BLOCK_M <= 32;
constexpr int NUM_CONVERTER_WARPS = HELPERS_TOGETHER ? 2 : 4;
constexpr int NUM_THREADS = 128 * (NUM_MMA_WARPGROUPS + (HELPERS_TOGETHER ? 1 : 2));
constexpr int CONSUMER_REGISTERS = NUM_MMA_WARPGROUPS == 2 ? 208 : HELPERS_TOGETHER ? 104 : 96;
constexpr int CONVERTER_REGISTERS = HELPERS_TOGETHER ? 64 : 56;
constexpr int PRODUCER_REGISTERS = HELPERS_TOGETHER ? CONVERTER_REGISTERS : 40;
static_assert(BLOCK_M == 8 || BLOCK_M == 16 || BLOCK_M == 32 || BLOCK_M == 64 || BLOCK_M == 128, "tokens");
static_assert(NUM_MMA_WARPGROUPS == 2 || NUM_MMA_WARPGROUPS == 4, "warpgroups");
#if EPILOGUE_IS_QUANT
#include "ptx/conversion.cuh"
#include "ptx/shared_vectors.cuh"
#include "quant_rules.cuh"
#include "quant_outputs.cuh"
#include "sm90_transposed_quant.cuh"
static_assert(!(GATE_AND_UP_APART && SFB_IS_BLOCKED), "a copy of blocked scales has 128 rows together");
#else
constexpr bool GATE_AND_UP_APART = false;
#endif
static_assert(BLOCK_N % (WGMMA_M * NUM_MMA_WARPGROUPS) == 0 && BLOCK_N % 128 == 0 && BLOCK_N <= 256, "rows");

// FP8_BLOCK scales of A change every 128 of K and are no powers of two: sums of 128 are promoted to other registers.
constexpr bool PROMOTE = A_FORMAT == FORMAT_FP8_BLOCK;
constexpr bool PAIRS_ARE_ADJACENT = !is_fp4(A_FORMAT) && !is_fp4(B_FORMAT) && A_FORMAT != FORMAT_BF16;
// NVFP4 values and e4m3 codes are exact in f16 too, which takes fewer instructions to make and multiplies the same way.
constexpr bool IS_F16 = B_FORMAT == FORMAT_NVFP4 && A_FORMAT != FORMAT_BF16;
// MXFP4 values are exact in f16 if their scales lie in a window of 24 powers of two, as nearly all do. So a tile begins in f16
// and changes over to bf16, to its end, at the first stage that has another scale. The converters look for those.
constexpr bool BEGINS_IN_F16 = A_FORMAT == FORMAT_MXFP4 && B_FORMAT == FORMAT_MXFP4;
constexpr float F16_UNSHIFT = 1 << (2 * MXFP4_F16_SHIFT);
constexpr bool HAS_GLOBAL_SCALES = A_FORMAT == FORMAT_NVFP4 || B_FORMAT == FORMAT_NVFP4;
constexpr int SHIFT = shift_of(A_FORMAT) + shift_of(B_FORMAT);
static_assert(STAGE_BLOCKS == 1 || (STAGE_BLOCKS == 2 && is_fp4(B_FORMAT) && !PROMOTE),
              "K blocks of a stage");

// An FP8 or bf16 tile has rows of 128 bytes with the 128-byte swizzle (bf16: two tiles, of 64 values of K each); FP4 rows
// are 64 bytes and not swizzled: eight lanes that read 16 bytes each of two rows touch all banks either way.
constexpr int A_BYTES = BLOCK_M * row_bytes(A_FORMAT);  // of a K block
constexpr int B_BYTES = BLOCK_N * row_bytes(B_FORMAT);
constexpr int TOKEN_HALF_BYTES = BLOCK_M * 128;  // 64 of K in bf16

// Row-major scales come as 16 bytes a row, the least that a copy can have: the scales of 256 of K (NVFP4) or of 512 (MX).
// That is enough for all K blocks of a stage. Blocked ones come as tiles, those of a K block one after the other.
constexpr int SCALE_ROW_BYTES = 16;
constexpr int SFA_BYTES = scales_of_128(A_FORMAT) == 0 ? 0 : BLOCK_M * SCALE_ROW_BYTES;
constexpr int SCALE_TILES =
    scales_of_128(B_FORMAT) / 4;  // 32x4x4 tiles of 512 bytes for 128 rows and 128 of K
constexpr int SCALE_BLOCK_BYTES = SCALE_TILES * 512;
constexpr int SFB_BLOCK_BYTES =
    SFB_IS_BLOCKED ? BLOCK_N / 128 * SCALE_BLOCK_BYTES : 0;  // from a K block to the next
constexpr int SFB_BYTES = SFB_IS_BLOCKED ? STAGE_BLOCKS * SFB_BLOCK_BYTES : BLOCK_N * SCALE_ROW_BYTES;
constexpr int STAGE_BYTES = STAGE_BLOCKS * (A_BYTES + B_BYTES) + SFA_BYTES + SFB_BYTES;

#if !EPILOGUE_IS_QUANT
// A slab is 128 bytes of D's columns of BLOCK_M tokens. A warpgroup stages one unit, 64 columns, at a time.
constexpr int OUT_BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
constexpr int SLAB_COLUMNS = 128 / OUT_BYTES;
constexpr int NUM_SLABS = WGMMA_M / SLAB_COLUMNS;
constexpr int SLAB_BYTES = BLOCK_M * 128;
#endif

template <int STAGES, int TOKEN_STAGES>
struct alignas(1024) SharedStorageOf {
    uint8_t b[STAGES][STAGE_BLOCKS][B_BYTES];
    uint8_t tokens[TOKEN_STAGES][STAGE_BLOCKS][2][TOKEN_HALF_BYTES];
#if EPILOGUE_IS_QUANT
    uint8_t d[NUM_TEAMS][PIECE_BYTES];
#else
    uint8_t d[NUM_MMA_WARPGROUPS][NUM_SLABS * SLAB_BYTES];
#endif
    alignas(1024) uint8_t a[STAGES][STAGE_BLOCKS][A_BYTES];  // the swizzle repeats every 1024 bytes
    alignas(128) uint8_t sfb[STAGES][SFB_BYTES];
    alignas(128) uint8_t sfa[STAGES][SFA_BYTES == 0 ? 128 : SFA_BYTES];
    float token_scales[TOKEN_STAGES][PROMOTE ? BLOCK_M : 2];
    uint64_t full[STAGES], empty[STAGES];
    uint64_t tokens_full[TOKEN_STAGES], tokens_empty[TOKEN_STAGES];
    TileQueueStorage queue;
    GroupTableStorage<MAX_GROUPS> groups;
    uint64_t checked[BEGINS_IN_F16 ? STAGES : 1];
    // A byte to each of four converter warps, or two to each of two.
    alignas(4) uint8_t beyond_f16[BEGINS_IN_F16 ? STAGES : 1][4];
#if EPILOGUE_IS_QUANT
    int group_tiles[MAX_GROUPS];  // first 128-row tile of each group, every group starting on one
#endif
};

// With two token stages the converters have only what is left of a K block, after the first octet of its products, for the
// whole of the next one. A third lets them run ahead; it is worth one of four stages of codes, not one of two.
constexpr int FEW_STAGES = NUM_STAGES == 0 ? 3 : NUM_STAGES;
template <int STAGES>
using WithThreeTokenStages = SharedStorageOf<STAGES, 3>;
template <int STAGES>
using WithFourTokenStages = SharedStorageOf<STAGES, 4>;

constexpr int token_stages() {
    if (BLOCK_M == 128) return sizeof(SharedStorageOf<FEW_STAGES, 3>) <= SHARED_LIMIT ? 3 : 2;
    // The fourth is worth less than one of four stages of codes.
    return stages_that_fit<WithFourTokenStages, 4>() < stages_that_fit<WithThreeTokenStages, 4>() ? 3 : 4;
}
constexpr int TOKEN_STAGES = token_stages();

template <int STAGES>
using SharedStorageWithTokens = SharedStorageOf<STAGES, TOKEN_STAGES>;

constexpr int STAGES = NUM_STAGES == 0 ? stages_that_fit<SharedStorageWithTokens, 12>() : NUM_STAGES;
using SharedStorage = SharedStorageWithTokens<STAGES>;
static_assert(STAGES >= 2 && sizeof(SharedStorage) <= SHARED_LIMIT, "does not fit in shared memory");

// The host reads these back from the compiled module.
extern "C" __device__ const int padless_shared_bytes = sizeof(SharedStorage);
extern "C" __device__ const int padless_num_threads = NUM_THREADS;
extern "C" __device__ const int padless_num_stages = STAGES;

using Order = TileOrder<BLOCK_M, BLOCK_N, RASTER_M>;
using Reader = TileReader<1>;

struct Problem {
    const float* sfa;  // FP8_BLOCK
    long long sfa_row_stride, sfa_k_stride;
    const float* global_a;  // null: 1
    const float* global_b;
    int global_a_stride, global_b_stride;  // 0: one for all groups, 1: one a group
    int m, n, k, num_groups;

    // K in stages. The last one's second K block may lie past K: its codes and scales count as 0.
    __device__ __forceinline__ int k_stages() const {
        return (k + STAGE_BLOCKS * BLOCK_K - 1) / (STAGE_BLOCKS * BLOCK_K);
    }
    __device__ __forceinline__ int sfb_columns() const {
        constexpr int BLOCK = B_FORMAT == FORMAT_NVFP4 ? 16 : 32;
        return (k + BLOCK - 1) / BLOCK;
    }
};

// Where the scales of K block `kb` begin in a row-major row of SCALE_ROW_BYTES.
template <int FORMAT>
__device__ __forceinline__ int scale_offset(int kb) {
    return kb * scales_of_128(FORMAT) % SCALE_ROW_BYTES;
}

// One arrival a warp, after all its lanes have read what is given back; or one a lane.
template <int ARRIVALS = 1>
__device__ __forceinline__ void arrive_warp(uint64_t& barrier, int lane) {
    static_assert(ARRIVALS == 1 || ARRIVALS == 32, "of a warp");
    if constexpr (ARRIVALS == 1) __syncwarp();
    if (ARRIVALS == 32 || lane == 0) mbarrier_arrive(shared_address(&barrier));
}

// Lanes pass the float32 scales of the tokens on by stores and loads of their own, and each says so itself: racecheck
// follows a thread's arrival, not what __syncwarp adds to lane 0's.
constexpr int TOKEN_ARRIVALS = PROMOTE ? 32 : 1;

// With gate and up apart, the weights of a tile come in runs of 32 rows, of gate and of up in turn: the row of the group's
// weights that run `run` of the tile at `column` starts at.
__device__ __forceinline__ int run_of_weights(const Problem& problem, int column, int run) {
    return column / 2 + run / 2 * 32 + run % 2 * (problem.n / 2);
}

// Whether row `row` of the tile at `column` is one of the weights'.
__device__ __forceinline__ bool weights_exist(const Problem& problem, int column, int row) {
    if constexpr (GATE_AND_UP_APART) return column / 2 + row / 64 * 32 + row % 32 < problem.n / 2;
    return column + row < problem.n;
}

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b,
                                           const TensorMap& map_sfa, const TensorMap& map_sfb) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_stages = problem.k_stages();
    Tile tile;
    while (reader.next(tile)) {
        for (int ks = 0; ks < k_stages; ++ks) {
            const int kb = ks * STAGE_BLOCKS;
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
            for (int j = 0; j < STAGE_BLOCKS; ++j) {
                const int column = (kb + j) * row_bytes(B_FORMAT);
                if constexpr (GATE_AND_UP_APART) {
                    for (int run = 0; run < BLOCK_N / 32; ++run)
                        tma_load_3d(map_b,
                                    shared_address(shared.b[stage][j] + run * (32 * row_bytes(B_FORMAT))),
                                    full, column, run_of_weights(problem, tile.column, run), tile.group);
                } else {
                    tma_load_3d(map_b, shared_address(shared.b[stage][j]), full, column, tile.column,
                                tile.group);
                }
            }
            const uint32_t sfb = shared_address(shared.sfb[stage]);
            if constexpr (
                SFB_IS_BLOCKED) {  // the map's rows are half tiles, 256 bytes, in the order they lie in
                const int row_tiles = (problem.n + 127) / 128;
                const int column_tiles = (problem.sfb_columns() + 3) / 4;
#pragma unroll
                for (int i = 0; i < STAGE_BLOCKS * (BLOCK_N / 128); ++i) {
                    const int row_tile = tile.group * row_tiles + tile.column / 128 + i % (BLOCK_N / 128);
                    const int column_tile = (kb + i / (BLOCK_N / 128)) * SCALE_TILES;
                    tma_load_2d(map_sfb, sfb + i * SCALE_BLOCK_BYTES, full, 0,
                                2 * (row_tile * column_tiles + column_tile));
                }
            } else {
                const int first = kb * scales_of_128(B_FORMAT) - scale_offset<B_FORMAT>(kb);
                if constexpr (GATE_AND_UP_APART) {
                    for (int run = 0; run < BLOCK_N / 32; ++run)
                        tma_load_3d(map_sfb, sfb + run * (32 * SCALE_ROW_BYTES), full, first,
                                    run_of_weights(problem, tile.column, run), tile.group);
                } else {
                    tma_load_3d(map_sfb, sfb, full, first, tile.column, tile.group);
                }
            }
#pragma unroll
            for (int j = 0; j < STAGE_BLOCKS; ++j) {
                const uint32_t a = shared_address(shared.a[stage][j]);
                if constexpr (A_FORMAT == FORMAT_BF16) {
                    tma_load_2d(map_a, a, full, (kb + j) * BLOCK_K, tile.row);
                    tma_load_2d(map_a, a + TOKEN_HALF_BYTES, full, (kb + j) * BLOCK_K + 64, tile.row);
                } else {
                    tma_load_2d(map_a, a, full, (kb + j) * row_bytes(A_FORMAT), tile.row);
                }
            }
            if constexpr (SFA_BYTES != 0)
                tma_load_2d(map_sfa, shared_address(shared.sfa[stage]), full,
                            kb * scales_of_128(A_FORMAT) - scale_offset<A_FORMAT>(kb), tile.row);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}

// The scales of quad `quad` of weight row `row` of the tile, in bytes from the stage's first.
__device__ __forceinline__ uint32_t scales_of_row(int row, int quad) {
    if constexpr (SFB_IS_BLOCKED) {
        const uint32_t in_tile = (row % 32) * 16 + (row % 128) / 32 * 4;
        const uint32_t tile = (row / 128) * SCALE_BLOCK_BYTES;
        return B_FORMAT == FORMAT_NVFP4 ? tile + quad / 2 * 512 + in_tile + quad % 2 * 2
                                        : tile + in_tile + quad;
    } else {
        return row * SCALE_ROW_BYTES + quad * (scales_of_128(B_FORMAT) / 4);
    }
}

// What a converter lane holds of 128 of K of its token: one of 8 tokens from `row`, a multiple of 8. Lane l has quad l % 4
// of token l / 4, in chunks of 16 bytes.
//
// Of a token's place in swizzled rows only row * 128 differs between eights: a constant distance where they are unrolled.
template <bool F16>
struct TokenSection {
    static constexpr int WORDS = A_FORMAT == FORMAT_BF16 ? 4 : is_fp4(A_FORMAT) ? 1 : 2;  // of an octet
    static constexpr int OCTETS = 4 / WORDS;                                              // in 16 bytes
    static constexpr int CHUNKS = 4 / OCTETS;

    SectionScales<A_FORMAT, F16> scales;
    uint32_t scale_bytes;
    uint32_t codes[4];  // of one chunk

    // The first octet of chunk i. Of bf16, quads 0, 1 and 2, 3 read different tiles: the latter take their octets in
    // another order, for the banks.
    static __device__ __forceinline__ int first_octet(int i, int quad) {
        return A_FORMAT == FORMAT_BF16 ? i ^ (quad & 2) : i * OCTETS;
    }

    __device__ __forceinline__ void load_scales(uint32_t sfa, int row, int lane) {
        scale_bytes =
            scales.read(sfa + (row + lane / 4) * SCALE_ROW_BYTES + lane % 4 * (scales_of_128(A_FORMAT) / 4));
    }

    __device__ __forceinline__ void load_chunk(uint32_t a, int i, int row, int lane) {
        const int in_eight = lane / 4, quad = lane % 4;
        uint32_t at;
        if constexpr (is_fp4(A_FORMAT))
            at = a + row * 64 + in_eight * 64 + quad * 16;
        else if constexpr (A_FORMAT == FORMAT_BF16)
            at = a + row * 128 + (quad / 2) * TOKEN_HALF_BYTES +
                 swizzle_128b(in_eight, quad % 2 * 4 + first_octet(i, quad));
        else
            at = a + row * 128 + swizzle_128b(in_eight, quad * 2 + i);
        ld_shared_v4_u32(at, codes[0], codes[1], codes[2], codes[3]);
    }

    // The words of octet s land in 16-byte chunks 4 s .. 4 s + 3 of the token, quad q's at word q: where instruction
    // 2 s + i / 2 looks for the operand of quad q that goes with the weights' registers i % 2. Example: octet 1 of quad 2,
    // word 3, is at byte (4 * 1 + 3) * 16 + 2 * 4 = 120 of the token's first 128, before the swizzle.
    __device__ __forceinline__ void store_chunk(uint32_t tokens, int i, int row, int lane) {
        const int in_eight = lane / 4, quad = lane % 4;
        if (i == 0) scales.set(A_FORMAT == FORMAT_NVFP4 ? scale_bytes & 0x7F7F : scale_bytes);
        const bool second =
            A_FORMAT == FORMAT_MXFP4 && !F16 && __any_sync(0xffffffff, mxfp4_is_large(scale_bytes));
#pragma unroll
        for (int o = 0; o < OCTETS; ++o) {
            uint32_t from[WORDS], to[4];
#pragma unroll
            for (int w = 0; w < WORDS; ++w) from[w] = codes[o * WORDS + w];
            expand_octet<A_FORMAT, F16, PAIRS_ARE_ADJACENT>(to, from);
            scales.apply(to, i * OCTETS + o);
            if (A_FORMAT == FORMAT_MXFP4 && !F16 && second) {
#pragma unroll
                for (int w = 0; w < 4; ++w) to[w] = mul_bf16x2(to[w], mxfp4_second_factor(scale_bytes));
            }
            const int octet = first_octet(i, quad) + o;
            const uint32_t half = tokens + row * 128 + (octet / 2) * TOKEN_HALF_BYTES + quad * 4;
#pragma unroll
            for (int w = 0; w < 4; ++w)
                st_shared_u32(half + swizzle_128b(in_eight, octet % 2 * 4 + w), to[w]);
        }
    }
};

// Converter, a warp: its eights of the tile's tokens. Codes of FP4 are read while those of the eight before are converted;
// others would need more registers than there are.
template <bool F16>
__device__ __forceinline__ void convert_tokens(uint32_t tokens, uint32_t a, uint32_t sfa, int warp,
                                               int lane) {
    constexpr int STEP = NUM_CONVERTER_WARPS * 8;
    constexpr bool AHEAD = is_fp4(A_FORMAT);
    if (BLOCK_M < STEP && warp * 8 >= BLOCK_M) return;
    using Section = TokenSection<F16>;
    Section sections[2];
    if (AHEAD) {
        sections[0].load_scales(sfa, warp * 8, lane);
        sections[0].load_chunk(a, 0, warp * 8, lane);
    }
#pragma unroll
    for (int first = 0; first < BLOCK_M; first += STEP) {
        const int row = first + warp * 8;
        Section& section = sections[first / STEP % 2];
        if constexpr (AHEAD) {
            if (first + STEP < BLOCK_M) {
                Section& next = sections[(first / STEP + 1) % 2];
                next.load_scales(sfa, row + STEP, lane);
                next.load_chunk(a, 0, row + STEP, lane);
            }
            section.store_chunk(tokens, 0, row, lane);
        } else {
            section.load_scales(sfa, row, lane);
#pragma unroll
            for (int i = 0; i < Section::CHUNKS; ++i) {
                section.load_chunk(a, i, row, lane);
                section.store_chunk(tokens, i, row, lane);
            }
        }
    }
}

template <bool F16>
__device__ __forceinline__ void convert_stage(SharedStorage& shared, int ks, int stage, int to, int warp,
                                              int lane) {
    const uint32_t sfa = shared_address(shared.sfa[stage]) + scale_offset<A_FORMAT>(ks * STAGE_BLOCKS);
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j)
        convert_tokens<F16>(shared_address(shared.tokens[to][j]), shared_address(shared.a[stage][j]),
                            sfa + j * scales_of_128(A_FORMAT), warp, lane);
}

// Converter, a warp: whether its share of the scales of stage `ks` has one that is beyond f16. Scales that do not exist, past
// the ends of K, N or the group, do not count: what is made of them is dropped or meets zero codes.
__device__ __forceinline__ bool scales_beyond_f16(const SharedStorage& shared, const Problem& problem,
                                                  const Tile& tile, int ks, int stage, int warp, int lane) {
    const uint32_t sfb =
        shared_address(shared.sfb[stage]) + (SFB_IS_BLOCKED ? 0 : scale_offset<B_FORMAT>(ks * STAGE_BLOCKS));
    const uint32_t sfa = shared_address(shared.sfa[stage]) + scale_offset<A_FORMAT>(ks * STAGE_BLOCKS);
    uint32_t beyond = 0;
#pragma unroll
    for (int j = 0; j < STAGE_BLOCKS; ++j) {
        const int columns = problem.sfb_columns() - (ks * STAGE_BLOCKS + j) * 4;
        const uint32_t counting = columns >= 4 ? 0xffffffff : columns <= 0 ? 0 : (1u << 8 * columns) - 1;
        uint32_t of_block = 0;
#pragma unroll
        for (int first = 0; first < BLOCK_N; first += NUM_CONVERTER_WARPS * 32) {
            const int row = first + warp * 32 + lane;
            const uint32_t block = j * (SFB_IS_BLOCKED ? SFB_BLOCK_BYTES : scales_of_128(B_FORMAT));
            const uint32_t word = ld_shared_u32(sfb + block + scales_of_row(row, 0));
            if (row < BLOCK_N && weights_exist(problem, tile.column, row)) of_block |= mxfp4_beyond_f16(word);
        }
#pragma unroll
        for (int first = 0; first < BLOCK_M; first += NUM_CONVERTER_WARPS * 32) {
            const int row = first + warp * 32 + lane;
            if (row < tile.rows)
                of_block |= mxfp4_beyond_f16(
                    ld_shared_u32(sfa + j * scales_of_128(A_FORMAT) + row * SCALE_ROW_BYTES));
        }
        beyond |= of_block & counting;
    }
    return __any_sync(0xffffffff, (beyond & 0xF0F0F0F0) != 0);
}

// What the converters found in a stage, the same for all lanes.
__device__ __forceinline__ bool wants_bf16(const SharedStorage& shared, int stage) {
    return ld_shared_u32(shared_address(shared.beyond_f16[stage])) != 0;
}

// Converters.
__device__ __forceinline__ void convert_tiles(SharedStorage& shared, const Problem& problem, int warp,
                                              int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<TOKEN_STAGES> ring;
    const int k_stages = problem.k_stages();
    const int token = warp * 32 + lane;  // whose float32 scale this thread passes on
    Tile tile{};
    while (reader.next(tile, lane)) {
        const float* sfa = problem.sfa;
        bool exists = false, in_f16 = BEGINS_IN_F16;
        float scale = 0.0f;
        if constexpr (PROMOTE) {
            exists = token < BLOCK_M && tile.row + token < problem.m;
            sfa += (tile.row + token) * problem.sfa_row_stride;
            scale = exists ? __ldg(sfa) : 0.0f;
        }
        for (int ks = 0; ks < k_stages; ++ks) {
            float ahead = 0.0f;
            if constexpr (PROMOTE) {
                sfa += problem.sfa_k_stride;
                ahead = exists && ks + 1 < k_stages ? __ldg(sfa) : 0.0f;
            }
            const int stage = pipeline.stage, to = ring.stage;
            if constexpr (BEGINS_IN_F16) {
                mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
                const bool beyond = scales_beyond_f16(shared, problem, tile, ks, stage, warp, lane);
                if (lane == 0) {
#pragma unroll
                    for (int i = 0; i < 4; i += NUM_CONVERTER_WARPS)
                        shared.beyond_f16[stage][warp + i] = beyond;
                }
                arrive_warp(shared.checked[stage], lane);
                mbarrier_wait(shared_address(&shared.tokens_empty[to]), ring.phase ^ 1);
                mbarrier_wait(shared_address(&shared.checked[stage]), pipeline.phase);
                in_f16 = in_f16 && !wants_bf16(shared, stage);
                if (in_f16)
                    convert_stage<true>(shared, ks, stage, to, warp, lane);
                else
                    convert_stage<false>(shared, ks, stage, to, warp, lane);
            } else {
                mbarrier_wait(shared_address(&shared.tokens_empty[to]), ring.phase ^ 1);
                mbarrier_wait(shared_address(&shared.full[stage]), pipeline.phase);
                convert_stage<IS_F16>(shared, ks, stage, to, warp, lane);
            }
            if constexpr (PROMOTE) {
                if (token < BLOCK_M) shared.token_scales[to][token] = scale;
                scale = ahead;
            }
            fence_proxy_async_shared();  // the tensor core reads what was written here
            arrive_warp<TOKEN_ARRIVALS>(shared.tokens_full[to], lane);
            arrive_warp(shared.empty[stage], lane);
            pipeline.advance();
            ring.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}

constexpr int UNITS = UNITS_OF_WARPGROUP;
constexpr int CODE_WORDS = is_fp4(B_FORMAT) ? 1 : 2;  // of an octet
constexpr int OCTETS = 4 / CODE_WORDS;                // in 16 bytes

// Octets whose products are issued together. The first product of a round waits until all four warps of the warpgroup have
// got there, so few rounds are better; with many tokens the sums leave no registers for more fragments.
constexpr int ROUND_OCTETS = BLOCK_M <= 64 ? 2 : 1;
constexpr int ROUNDS = 4 / ROUND_OCTETS;  // to a K block

using Fragments = uint32_t[ROUND_OCTETS][UNITS][2][4];

// What a consumer lane's rows are in every stage: rows `first_row` and + 8 of each of its units (+ 64).
struct WeightLane {
    int first_row, quad;
    uint32_t codes;     // address in stage 0 of the first row's codes; FP8: of the row
    uint32_t scales;    // and of its scales
    uint32_t counting;  // which bits of scales count in the last stage: 16 for each K block

    __device__ __forceinline__ WeightLane(const SharedStorage& shared, const Problem& problem, int warpgroup,
                                          int warp, int lane)
        : first_row(warpgroup * UNITS * WGMMA_M + warp * 16 + lane / 4), quad(lane % 4) {
        static_assert(UNITS <= 2, "the units of a warpgroup lie in 128 rows");
        codes =
            shared_address(shared.b) + first_row * row_bytes(B_FORMAT) + (is_fp4(B_FORMAT) ? quad * 16 : 0);
        scales = shared_address(shared.sfb) + scales_of_row(first_row, quad);
        counting = ALL_COUNT;
        if constexpr (SFB_IS_BLOCKED) {
            constexpr int OF_BLOCK = scales_of_128(B_FORMAT);
            const int left = problem.sfb_columns() - (problem.k_stages() - 1) * STAGE_BLOCKS * OF_BLOCK -
                             quad * (OF_BLOCK / 4);
            // The shuffle changes nothing. Without it the compiler works the masks out again for every block.
            counting =
                __shfl_sync(0xffffffff, Scales::mask(left) | Scales::mask(left - OF_BLOCK) << 16, lane);
        }
    }

    using Scales = SectionScales<B_FORMAT, IS_F16>;
    static constexpr uint32_t ALL_COUNT = B_FORMAT == FORMAT_NVFP4 ? 0x7F7F7F7F : 0x00FF00FF;
};

// A consumer lane's codes and scales of 128 of K.
template <bool F16>
struct WeightSection {
    static constexpr bool MAY_BE_LARGE = B_FORMAT == FORMAT_MXFP4 && !F16;

    SectionScales<B_FORMAT, F16> scales[UNITS][2];
    uint32_t scale_bytes;  // MXFP4: of all rows,
    bool second;           // and whether any lane of the warp has one with a second factor: hardly ever
    uint32_t codes[UNITS][2][4];

    // Of block `block` of the stage, which is number `ks` of the tile.
    __device__ __forceinline__ void load_scales(const WeightLane& lane, int stage, int block, int ks,
                                                int k_stages) {
        uint32_t first = lane.scales + stage * SFB_BYTES;
        if constexpr (SFB_IS_BLOCKED)
            first += block * SFB_BLOCK_BYTES;
        else
            first += scale_offset<B_FORMAT>(ks * STAGE_BLOCKS) + block * scales_of_128(B_FORMAT);
        uint32_t bytes[UNITS][2];
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                // 8 rows on are another of the 32 rows of a 32x4x4 tile, 64 rows on another of its four columns of 32.
                const int at = SFB_IS_BLOCKED ? h * 128 + u * 8 : (u * WGMMA_M + h * 8) * SCALE_ROW_BYTES;
                bytes[u][h] = scales[u][h].read(first + at);
            }
        }
        if constexpr (SFB_IS_BLOCKED || B_FORMAT == FORMAT_NVFP4) {
            const uint32_t counting =
                SFB_IS_BLOCKED && ks + 1 == k_stages ? lane.counting : WeightLane::ALL_COUNT;
            const uint32_t mask = counting >> (16 * block);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int h = 0; h < 2; ++h) bytes[u][h] &= mask;
            }
        }
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) scales[u][h].set(bytes[u][h]);
        }
        if constexpr (MAY_BE_LARGE) {
            scale_bytes = 0;
#pragma unroll
            for (int u = 0; u < UNITS; ++u) scale_bytes |= (bytes[u][0] | bytes[u][1] << 8) << (16 * u);
            // A branch more in the loop of what is rarely left for bf16 would exceed the registers.
            second = BEGINS_IN_F16 || __any_sync(0xffffffff, mxfp4_is_large(scale_bytes));
        }
    }

    // 16 bytes of codes a row, of block `block` of the stage: the octets from OCTETS * part.
    __device__ __forceinline__ void load_codes(const WeightLane& lane, int stage, int block, int part) {
        uint32_t first = lane.codes + (stage * STAGE_BLOCKS + block) * B_BYTES;
        if constexpr (!is_fp4(B_FORMAT))
            first += swizzle_128b(lane.first_row % 8, lane.quad * 2 + part) - lane.first_row % 8 * 128;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t at = first + (u * WGMMA_M + h * 8) * row_bytes(B_FORMAT);
                ld_shared_v4_u32(at, codes[u][h][0], codes[u][h][1], codes[u][h][2], codes[u][h][3]);
            }
        }
    }

    // FP4: one octet of each row instead, number `octet` of the stage, to make_fragments of octet 0.
    __device__ __forceinline__ void load_octet(const WeightLane& lane, int stage, int octet) {
        const uint32_t first = lane.codes + (stage * STAGE_BLOCKS + octet / 4) * B_BYTES + octet % 4 * 4;
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                codes[u][h][0] = ld_shared_u32(first + (u * WGMMA_M + h * 8) * row_bytes(B_FORMAT));
        }
    }

    // The A operands of a round's instructions.
    __device__ __forceinline__ void make_fragments(Fragments& fragments, int round) const {
#pragma unroll
        for (int o = 0; o < ROUND_OCTETS; ++o) make_fragments(fragments[o], round * ROUND_OCTETS + o);
    }

    // The A operands of the two instructions of an octet.
    __device__ __forceinline__ void make_fragments(uint32_t (&fragments)[UNITS][2][4], int octet) const {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t raw[CODE_WORDS], words[4];
#pragma unroll
                for (int w = 0; w < CODE_WORDS; ++w) raw[w] = codes[u][h][octet % OCTETS * CODE_WORDS + w];
                expand_octet<B_FORMAT, F16, PAIRS_ARE_ADJACENT>(words, raw);
                scales[u][h].apply(words, octet);
#pragma unroll
                for (int w = 0; w < 4; ++w) fragments[u][w / 2][w % 2 * 2 + h] = words[w];
            }
        }
        if (MAY_BE_LARGE && second) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    const uint32_t factor = mxfp4_second_factor(scale_bytes >> (16 * u + i % 2 * 8) & 0xFF);
                    fragments[u][i / 4][i % 4] = mul_bf16x2(fragments[u][i / 4][i % 4], factor);
                }
            }
        }
    }
};

// Consumer: until the weights of a stage have come, and the converters have looked at its scales.
__device__ __forceinline__ void await_weights(SharedStorage& shared, const Pipeline<STAGES>& pipeline) {
    mbarrier_wait(
        shared_address(BEGINS_IN_F16 ? &shared.checked[pipeline.stage] : &shared.full[pipeline.stage]),
        pipeline.phase);
}

// Consumer: d = this warpgroup's units of the tile, before global scales, to the last stage of K, or, where a tile begins in f16,
// to one that wants bf16: returns which. Registers as in wgmma_m64k16.cuh.
//
// The products of one round run while the fragments of the next are made: two sets of fragments, by the round's parity.
// The set for round 0 of the next K block is carried round the loop. (Making it at the top of the loop, with products of
// the last round under way, has ptxas serialise all of them: C7513.)
__device__ __forceinline__ int multiply_stages(float (&d)[UNITS][BLOCK_M / 2], SharedStorage& shared,
                                               int k_stages, const WeightLane& weights, int lane,
                                               Pipeline<STAGES>& pipeline, Pipeline<TOKEN_STAGES>& ring) {
    constexpr bool F16 = IS_F16 || BEGINS_IN_F16;
    // A stage has one load of codes, or two, before the octets 0 and LAST_PART: FP4's two K blocks or FP8's half K blocks.
    constexpr int STAGE_OCTETS = 4 * STAGE_BLOCKS;
    constexpr int LAST_PART = STAGE_OCTETS - OCTETS;
    static_assert(LAST_PART == 0 || LAST_PART == OCTETS, "no more than two loads");
    // The shuffle tells the compiler that all lanes agree, so that the descriptors live in uniform registers.
    const uint32_t tokens_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.tokens[0])), 0);
    float sums[UNITS][BLOCK_M / 2];  // of 128 of K, where they are promoted
    if constexpr (PROMOTE || BEGINS_IN_F16) {
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i) d[u][i] = 0.0f;
        }
    }

    WeightSection<F16> section;
    Fragments fragments[2];
    int used = 0;  // stage of the tokens before
    await_weights(shared, pipeline);
    section.load_scales(weights, pipeline.stage, 0, 0, k_stages);
    section.load_codes(weights, pipeline.stage, 0, 0);
    bool ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage);  // before this stage
    if (LAST_PART == 0 && !ends) arrive_warp(shared.empty[pipeline.stage], lane);
    section.make_fragments(fragments[0], 0);

    int ks = 0;
    for (; ks < k_stages && !ends; ++ks) {
        const int stage = pipeline.stage, from = ring.stage;
        const uint32_t tokens = tokens_stage_0 + from * (STAGE_BLOCKS * 2 * TOKEN_HALF_BYTES / 16);
        mbarrier_wait(shared_address(&shared.tokens_full[from]), ring.phase);
#pragma unroll
        for (int round = 0; round < STAGE_BLOCKS * ROUNDS; ++round) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2 * ROUND_OCTETS; ++i) {
                const int step = round * 2 * ROUND_OCTETS + i;
                const uint64_t descriptor = k_major_128b_descriptor(
                    tokens + step / 4 * (TOKEN_HALF_BYTES / 16) + step % 4 * (32 / 16));
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
                    float (&target)[BLOCK_M / 2] = PROMOTE ? sums[u] : d[u];
                    wgmma_m64k16<BLOCK_M, F16>(target, fragments[round % 2][i / 2][u][i % 2], descriptor,
                                               step != 0 || BEGINS_IN_F16 || (!PROMOTE && ks != 0));
                }
            }
            wgmma_commit_group();

            const int next_octet = (round + 1) * ROUND_OCTETS;
            if (next_octet == STAGE_OCTETS) {
                pipeline.advance();
                if (ks + 1 < k_stages) {  // else the last fragments are of old codes, and not used
                    await_weights(shared, pipeline);
                    section.load_scales(weights, pipeline.stage, 0, ks + 1, k_stages);
                    section.load_codes(weights, pipeline.stage, 0, 0);
                    ends = BEGINS_IN_F16 && wants_bf16(shared, pipeline.stage);
                    if (LAST_PART == 0 && !ends) arrive_warp(shared.empty[pipeline.stage], lane);
                }
            } else if (next_octet == LAST_PART) {
                if (STAGE_BLOCKS == 2) section.load_scales(weights, stage, 1, ks, k_stages);
                section.load_codes(weights, stage, STAGE_BLOCKS - 1, LAST_PART % 4 / OCTETS);
                arrive_warp(shared.empty[stage], lane);
            }
            wgmma_wait_group<1>();                  // the last round's fragments have been read
            if (!PROMOTE && round == 0 && ks != 0)  // and with it, all tokens of the last stage
                arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[used], lane);
            section.make_fragments(fragments[(round + 1) % 2], (round + 1) % ROUNDS);
        }

        if constexpr (PROMOTE) {
            wgmma_wait_group<0>();
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int i = 0; i < BLOCK_M / 2; ++i) pin_register(sums[u][i]);
            }
#pragma unroll
            for (int i = 0; i < BLOCK_M / 8; ++i) {  // tokens 8 i + 2 quad and the next
                float scale[2];
                ld_shared_f32x2(shared_address(&shared.token_scales[from][8 * i + 2 * (lane % 4)]), scale[0],
                                scale[1]);
#pragma unroll
                for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        d[u][4 * i + j] = fmaf(sums[u][4 * i + j], scale[j % 2], d[u][4 * i + j]);
                }
            }
            arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[from], lane);
        }
        used = from;
        ring.advance();
    }

    if constexpr (!PROMOTE) {
        wgmma_wait_group<0>();
#pragma unroll
        for (int u = 0; u < UNITS; ++u) {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 2; ++i) pin_register(d[u][i]);
        }
        if (!BEGINS_IN_F16 || ks != 0) arrive_warp<TOKEN_ARRIVALS>(shared.tokens_empty[used], lane);
    }
    return ks;
}

// Consumer: what multiply_stages left, the stages from `begin` on, in bf16. That is rare, and so each round's products are waited
// for: a second loop like the other would exceed the registers.
__device__ __forceinline__ void multiply_rest_in_bf16(float (&d)[UNITS][BLOCK_M / 2], SharedStorage& shared,
                                                      int begin, int k_stages, const WeightLane& weights,
                                                      int lane, Pipeline<STAGES>& pipeline,
                                                      Pipeline<TOKEN_STAGES>& ring) {
    const uint32_t tokens_stage_0 =
        __shfl_sync(0xffffffff, descriptor_low(shared_address(shared.tokens[0])), 0);
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) d[u][i] *= F16_UNSHIFT;
    }
    for (int ks = begin; ks < k_stages; ++ks) {
        const uint32_t tokens = tokens_stage_0 + ring.stage * (STAGE_BLOCKS * 2 * TOKEN_HALF_BYTES / 16);
        await_weights(shared, pipeline);
        mbarrier_wait(shared_address(&shared.tokens_full[ring.stage]), ring.phase);
#pragma unroll 1
        for (int octet = 0; octet < 4 * STAGE_BLOCKS; ++octet) {
            WeightSection<false> section;
            section.load_scales(weights, pipeline.stage, octet / 4, ks, k_stages);
            section.load_octet(weights, pipeline.stage, octet);
            uint32_t fragments[UNITS][2][4];
            section.make_fragments(fragments, 0);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint64_t descriptor = k_major_128b_descriptor(
                    tokens + octet / 2 * (TOKEN_HALF_BYTES / 16) + (octet % 2 * 2 + i) * (32 / 16));
#pragma unroll
                for (int u = 0; u < UNITS; ++u)
                    wgmma_m64k16<BLOCK_M, false>(d[u], fragments[u][i], descriptor, true);
            }
            wgmma_commit_group();
            wgmma_wait_group<0>();
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int i = 0; i < BLOCK_M / 2; ++i) pin_register(d[u][i]);
            }
        }
        arrive_warp(shared.empty[pipeline.stage], lane);
        arrive_warp(shared.tokens_empty[ring.stage], lane);
        pipeline.advance();
        ring.advance();
    }
}

// Consumer: d = this warpgroup's units of the tile, before global scales, over a factor that is returned.
__device__ __forceinline__ float multiply_tile(float (&d)[UNITS][BLOCK_M / 2], SharedStorage& shared,
                                               int k_stages, const WeightLane& weights, int lane,
                                               Pipeline<STAGES>& pipeline, Pipeline<TOKEN_STAGES>& ring) {
    const int done = multiply_stages(d, shared, k_stages, weights, lane, pipeline, ring);
    if constexpr (BEGINS_IN_F16) {
        if (done < k_stages) multiply_rest_in_bf16(d, shared, done, k_stages, weights, lane, pipeline, ring);
        return done == k_stages ? F16_UNSHIFT : 1.0f;
    }
    return 1.0f;
}

#if EPILOGUE_IS_QUANT
using StoreMaps = DirectOutputs;
#else
using StoreMaps = TensorMap;

// Consumer: a unit's accumulators, 64 columns of D by BLOCK_M tokens, transposed into slabs of token rows x 128 bytes with
// the 128-byte swizzle. d[4 i + j] is column 16 * warp + lane / 4 + 8 * (j / 2), token 8 i + 2 * (lane % 4) + j % 2.
__device__ __forceinline__ void stage_transposed(const float (&d)[BLOCK_M / 2], uint32_t slabs, int warp,
                                                 int lane) {
    if constexpr (OUT_TYPE == OUT_F32) {
        // 32 columns to a slab. The lanes of one store have 8 columns of 4 tokens: all banks once.
        const int column = warp * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 8; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int token = 8 * i + lane % 4 * 2 + j % 2, c = column + j / 2 * 8;
                const uint32_t slab = slabs + c / 32 * SLAB_BYTES;
                st_shared_float(slab + swizzle_128b(token, c % 32 / 4) + c % 4 * 4, d[4 * i + j]);
            }
        }
    } else {
        // 64 columns to a slab. Matrices of 8 columns x 8 tokens, stored with a row for every token.
        uint32_t words[BLOCK_M / 4];
#pragma unroll
        for (int i = 0; i < BLOCK_M / 4; ++i)
            words[i] =
                OUT_TYPE == OUT_BF16 ? cvt_bf16x2(d[2 * i], d[2 * i + 1]) : cvt_f16x2(d[2 * i], d[2 * i + 1]);
        const uint32_t chunk = warp * 2 + lane / 8 % 2;
        if constexpr (BLOCK_M == 8) {
            stmatrix_x2_trans(slabs + swizzle_128b(lane % 8, chunk), words[0], words[1]);
        } else {
#pragma unroll
            for (int i = 0; i < BLOCK_M / 8; i += 2)
                stmatrix_x4_trans(slabs + swizzle_128b(8 * (i + lane / 16) + lane % 8, chunk), words[2 * i],
                                  words[2 * i + 1], words[2 * i + 2], words[2 * i + 3]);
        }
    }
}

// Consumer: what becomes of a unit of D in float32, 64 columns from `column` of the tile's tokens. This is the place for
// another epilogue: it is called by a whole warpgroup, has `staging` to itself, and must write rows of the tile alone.
__device__ __forceinline__ void store_unit(const float (&d)[BLOCK_M / 2], uint8_t* staging,
                                           const Problem& problem, const TensorMap& map_d, const Tile& tile,
                                           int column, int warpgroup, int warp, int lane) {
    const bool issuer = warp == 0 && lane == 0;
    if (issuer) cp_async_bulk_wait_group_read_all();  // the last unit's store has left this memory
    bar_sync(1 + warpgroup, 128);
    stage_transposed(d, shared_address(staging), warp, lane);
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);
    if (issuer) {
        for (int s = 0; s < NUM_SLABS && column + s * SLAB_COLUMNS < problem.n; ++s)
            store_slab_ragged(map_d, shared_address(staging) + s * SLAB_BYTES, column + s * SLAB_COLUMNS,
                              tile.row, tile.row + tile.rows);
        cp_async_bulk_commit_group();
    }
}
#endif

// The product of the global scales of a group.
__device__ __forceinline__ float global_scale(const Problem& problem, int group) {
    const float a =
        problem.global_a == nullptr ? 1.0f : __ldg(problem.global_a + group * problem.global_a_stride);
    const float b =
        problem.global_b == nullptr ? 1.0f : __ldg(problem.global_b + group * problem.global_b_stride);
    return a * b;
}

// That, and what NVFP4_SHIFT took away.
__device__ __forceinline__ void apply_global_scales(float (&d)[UNITS_OF_WARPGROUP][BLOCK_M / 2], float both) {
#pragma unroll
    for (int u = 0; u < UNITS_OF_WARPGROUP; ++u) {
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i) d[u][i] = d[u][i] * static_cast<float>(1 << SHIFT) * both;
    }
}

__device__ __forceinline__ void consume_tiles(SharedStorage& shared, const Problem& problem,
                                              const StoreMaps& store_maps, int warpgroup, int warp,
                                              int lane) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    Pipeline<TOKEN_STAGES> ring;
    const WeightLane weights(shared, problem, warpgroup, warp, lane);
    Tile tile{};
    while (reader.next(tile, lane)) {
        float d[UNITS_OF_WARPGROUP][BLOCK_M / 2];
        const float both =
            HAS_GLOBAL_SCALES ? global_scale(problem, tile.group) : 1.0f;  // on its way meanwhile
        const float rest = multiply_tile(d, shared, problem.k_stages(), weights, lane, pipeline, ring);
        if (lane == 0) reader.release();
        if constexpr (HAS_GLOBAL_SCALES) apply_global_scales(d, both);
        if constexpr (BEGINS_IN_F16) {
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
#pragma unroll
                for (int i = 0; i < BLOCK_M / 2; ++i) d[u][i] *= rest;
            }
        }
#if EPILOGUE_IS_QUANT
        const int start = tile.group == 0 ? 0 : shared.groups.group_ends[tile.group - 1];
        const Placement place{tile.group, start, shared.groups.group_ends[tile.group] - start,
                              shared.group_tiles[tile.group]};
        store_quantised(d, shared.d, store_maps, place, tile, problem.n, warpgroup, warp, lane);
#else
#pragma unroll
        for (int u = 0; u < UNITS_OF_WARPGROUP; ++u) {
            const int column = tile.column + (warpgroup * UNITS_OF_WARPGROUP + u) * WGMMA_M;
            store_unit(d[u], shared.d[warpgroup], problem, store_maps, tile, column, warpgroup, warp, lane);
        }
#endif
        reader.advance();
    }
    if (warp == 0 && lane == 0) cp_async_bulk_wait_group_all();
}

// One thread: what else a tile's first stage waits for, fetched into L2 like the first weights (weights_prefetch.cuh): the weights'
// first scales, another tile's in every CTA, and of the tokens and their scales, which all CTAs read, a K block of a tile's rows.
__device__ __forceinline__ void prefetch_rest(const Problem& problem, const TensorMap& map_a,
                                              const TensorMap& map_sfa, const TensorMap& map_sfb) {
    const int n_tiles = (problem.n + BLOCK_N - 1) / BLOCK_N;
    const int group = blockIdx.x / n_tiles;
    if (!SFB_IS_BLOCKED && group < problem.num_groups)
        tma_prefetch_3d(map_sfb, 0, blockIdx.x % n_tiles * BLOCK_N, group);
    const int m_tiles = (problem.m + BLOCK_M - 1) / BLOCK_M;
    if (m_tiles == 0) return;
    const int kb = blockIdx.x / m_tiles, row = blockIdx.x % m_tiles * BLOCK_M;
    if (kb * BLOCK_K >= problem.k) return;
    tma_prefetch_2d(map_a, A_FORMAT == FORMAT_BF16 ? kb * BLOCK_K : kb * row_bytes(A_FORMAT), row);
    if constexpr (SFA_BYTES != 0)
        tma_prefetch_2d(map_sfa, kb * scales_of_128(A_FORMAT) - scale_offset<A_FORMAT>(kb), row);
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_grouped_gemm(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_sfa, const __grid_constant__ TensorMap map_sfb,
    const __grid_constant__ StoreMaps store_maps, const float* sfa, long long sfa_row_stride,
    long long sfa_k_stride, const float* global_a, const float* global_b, int global_a_stride,
    int global_b_stride, const int* offs, int m, int n, int k, int num_groups, int counter) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Problem problem{
        sfa, sfa_row_stride, sfa_k_stride, global_a, global_b, global_a_stride, global_b_stride, m, n,
        k,   num_groups};
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes
    const int lane = threadIdx.x % 32;

    if (warp == 0) {
        if (elect_one()) {
            prefetch_tensormap(map_a);
            prefetch_tensormap(map_b);
            if constexpr (SFA_BYTES != 0) prefetch_tensormap(map_sfa);
            prefetch_tensormap(map_sfb);
            for (int s = 0; s < STAGES; ++s) {
                mbarrier_init(shared_address(&shared.full[s]), 1);
                mbarrier_init(shared_address(&shared.empty[s]), NUM_CONSUMER_WARPS + NUM_CONVERTER_WARPS);
                if (BEGINS_IN_F16) mbarrier_init(shared_address(&shared.checked[s]), NUM_CONVERTER_WARPS);
            }
            for (int s = 0; s < TOKEN_STAGES; ++s) {
                mbarrier_init(shared_address(&shared.tokens_full[s]), NUM_CONVERTER_WARPS * TOKEN_ARRIVALS);
                mbarrier_init(shared_address(&shared.tokens_empty[s]), NUM_CONSUMER_WARPS * TOKEN_ARRIVALS);
            }
            for (int s = 0; s < QUEUE_SLOTS; ++s) {
                mbarrier_init(shared_address(&shared.queue.full[s]), 1);
                mbarrier_init(shared_address(&shared.queue.empty[s]),
                              NUM_CONSUMER_WARPS + NUM_CONVERTER_WARPS + 1);
            }
            fence_mbarrier_init();
        }
        __syncwarp();
    }
    if constexpr (!GATE_AND_UP_APART) {  // else the boxes are others
        if (warp == 2 && elect_one())
            prefetch_weights<BLOCK_N, row_bytes(B_FORMAT)>(map_b, n, (k + BLOCK_K - 1) / BLOCK_K, num_groups);
        if (warp == 3 && elect_one()) prefetch_rest(problem, map_a, map_sfa, map_sfb);
    }
    build_group_table<BLOCK_M, NUM_THREADS>(shared.groups, offs, num_groups, m, warp, lane);
#if EPILOGUE_IS_QUANT
    if (warp == 1) count_row_tiles(shared.groups.group_ends, num_groups, shared.group_tiles, lane);
    __syncthreads();
#endif

    constexpr int FIRST_PRODUCER_WARP = NUM_CONSUMER_WARPS + NUM_CONVERTER_WARPS;
    if (HELPERS_TOGETHER && warp >= NUM_CONSUMER_WARPS) setmaxnreg_dec<CONVERTER_REGISTERS>();
    if (warp >= FIRST_PRODUCER_WARP) {
        if constexpr (!HELPERS_TOGETHER) setmaxnreg_dec<PRODUCER_REGISTERS>();
        if (warp == FIRST_PRODUCER_WARP) {
            if (elect_one()) load_tiles(shared, problem, map_a, map_b, map_sfa, map_sfb);
        } else if (warp == FIRST_PRODUCER_WARP + 1) {
            if (elect_one())
                hand_out_tiles<1>(shared.queue, Order(shared.groups.table(num_groups), n), counter,
                                  blockIdx.x, gridDim.x);
        }
        __syncwarp();
    } else if (warp >= NUM_CONSUMER_WARPS) {
        if constexpr (!HELPERS_TOGETHER) setmaxnreg_dec<CONVERTER_REGISTERS>();
        convert_tiles(shared, problem, warp - NUM_CONSUMER_WARPS, lane);
        __syncwarp();
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume_tiles(shared, problem, store_maps, warp / 4, warp % 4, lane);
        __syncwarp();
    }
}
