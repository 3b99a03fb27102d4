// FP8_BLOCK codes and scales of bf16 rows, and of the same values transposed, on Hopper: one read, both written.
//
//   x  (M, F) bf16, F a multiple of 8, in groups that are cut into tiles of 128 tokens; where GATHERS, rows `tokens` (M) of x (T, F)
//   ->  rows: codes (M, F) e4m3, scales (F / 128, ld) float32, one per row and 128 features
//       columns: codes (F, T') e4m3, scales (S, F) float32, one per feature and 128 tokens of a group, or per 128 features
//
// An item of work is a tile of 128 tokens x 128 features (device/token_tiles.cuh). CTAs are persistent, two of 16 warps a
// multiprocessor.
//
//      each warp                                                   some warps too
//      ---------                                                   --------------
//      wait for the copies of its 8 rows; read them;
//      start copying the same rows of the next item;
//      largest magnitude of its columns -> shared memory
//                                        barrier
//      lines of the last item's transposed codes -> global         scales of columns (4); the item after the next (1)
//      scales and codes of rows
//                                        barrier
//      where the rows of the item after the next lie (GATHERS)
//      codes of columns, transposed -> shared memory
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#include "device/pipeline.cuh"
#include "device/ptx/conversion.cuh"
#include "device/ptx/cp_async.cuh"
#include "device/ptx/global_words.cuh"
#include "device/ptx/memory.cuh"

// In this order: later ones use earlier ones.
#include "device/quant_rules.cuh"
#include "device/token_tiles.cuh"
#include "sm90_rows_columns/storage.cuh"

// The row of x that is row `lane % ROWS` of a warp's of an item, -1 where there is none.
__device__ __forceinline__ int source_row(const Problem& problem, const Item& item, int warp, int lane) {
    const int row = ROWS * warp + lane % ROWS;
    return row < item.rows ? problem.tokens[item.first_row + row] : -1;
}

// Copies of a warp's rows of an item into shared memory, 16 bytes a lane, two rows at once. What is not there is zeros.
// source: where GATHERS, `source_row` of the item.
__device__ __forceinline__ void start_copies(SharedStorage& shared, const Problem& problem, const Item& item,
                                             int source, int warp, int lane) {
    const int row = ROWS * warp + lane / 16, chunk = lane % 16, column = item.block * TILE + 8 * chunk;
    if constexpr (GATHERS) {
        const uint32_t rows_of_x = column < problem.features ? problem.num_source_rows : 0;
#pragma unroll
        for (int step = 0; step < ROWS / 2; ++step) {
            const int of = __shfl_sync(0xffffffff, source, 2 * step + lane / 16);
            const bool there = uint32_t(of) < rows_of_x;
            const uint8_t* from = problem.x + (there ? 2 * (int64_t(of) * problem.stride + column) : 0);
            const uint32_t to = shared_address(&shared.values[row + 2 * step].words[4 * chunk]);
            cp_async_16_or_zeros(to, from, there ? 16 : 0);
        }
        cp_async_commit();
        return;
    }
    const int rows = column < problem.features ? item.rows - row : 0;
    const int64_t offset = rows > 0 ? int64_t(item.first_row + row) * problem.stride + column : 0;
    const uint8_t* from = problem.x + 2 * offset;
    const uint32_t to = shared_address(&shared.values[row].words[4 * chunk]);
#pragma unroll
    for (int step = 0; step < ROWS / 2; ++step) {
        cp_async_16_or_zeros(to + step * 2 * sizeof(Row), from, 2 * step < rows ? 16 : 0);
        if (2 * step + 2 < rows) from += 4 * problem.stride;
    }
    cp_async_commit();
}

// Codes and scales of a warp's rows: a word of two features at a time.
__device__ __forceinline__ void store_rows(const Problem& problem, const Item& item,
                                           const uint32_t (&words)[ROWS][2], int warp, int lane) {
    uint32_t largest[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) largest[row] = larger_of_pairs(words[row][0], words[row][1]);
#pragma unroll
    for (int row = 0; row < 4; ++row)
        largest[row] = halved(largest[row], largest[row + 4], lane, 16, larger_of_pairs);
#pragma unroll
    for (int row = 0; row < 2; ++row)
        largest[row] = halved(largest[row], largest[row + 2], lane, 8, larger_of_pairs);
    uint32_t mine = halved(largest[0], largest[1], lane, 4, larger_of_pairs);
    mine = larger_of_pairs(mine, __shfl_xor_sync(0xffffffff, mine, 2));
    mine = larger_of_pairs(mine, __shfl_xor_sync(0xffffffff, mine, 1));
    // Of row lane / 4.
    const Fp8Block rule{};
    const float scale = rule.scale(max_nan_abs(low_bf16(mine), high_bf16(mine))),
                inverse = rule.multiplier(scale);
    const int first = item.first_row + ROWS * warp, rows = item.rows - ROWS * warp;
    if (lane % 4 == 0 && lane / 4 < rows)
        problem.row_scale[int64_t(item.block) * problem.row_scale_ld + first + lane / 4] = scale;

    const int column = item.block * TILE + lane * COLUMNS;
    uint8_t* codes = problem.row_codes + int64_t(first) * problem.features + column;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float by = __shfl_sync(0xffffffff, inverse, 4 * row);
        const uint32_t code =
            four_codes(__fmul_rn(low_bf16(words[row][0]), by), __fmul_rn(high_bf16(words[row][0]), by),
                       __fmul_rn(low_bf16(words[row][1]), by), __fmul_rn(high_bf16(words[row][1]), by));
        if (row < rows && column < problem.features) st_global_b32(codes, code);
        codes += problem.features;
    }
}

// Threads of the first 4 warps: the scale of a column.
__device__ __forceinline__ void scale_columns(SharedStorage& shared, const Problem& problem, const Item& item,
                                              int tokens) {
    const int column = threadIdx.x;
    if (column >= TILE) return;
    uint32_t pair = shared.largest[0][column / 2];
#pragma unroll
    for (int w = 1; w < NUM_WARPS; ++w) pair = larger_of_pairs(pair, shared.largest[w][column / 2]);
    float largest = column % 2 == 0 ? low_bf16(pair) : high_bf16(pair);
    if (SQUARE) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            largest = max_nan_abs(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        if (column % 32 == 0) shared.largest_of_warps[column / 32] = largest;
        bar_sync(1, TILE);
        largest = max_nan(max_nan_abs(shared.largest_of_warps[0], shared.largest_of_warps[1]),
                          max_nan_abs(shared.largest_of_warps[2], shared.largest_of_warps[3]));
    }
    const Fp8Block rule{};
    const float scale = rule.scale(largest);
    shared.inverse[column] = rule.multiplier(scale);
    const int feature = item.block * TILE + column;
    const float stored = tokens > 0 ? scale : 0.0f;
    const int64_t row = item.tile;
    if (item.tile >= problem.groups.num_scale_rows) return;
    if (!SQUARE && feature < problem.features) problem.scale[row * problem.features + feature] = stored;
    if (SQUARE && column == 0) problem.scale[row * problem.num_blocks() + item.block] = stored;
}

// Codes of a warp's tokens into shared memory, transposed; those from `tokens` on are zeros.
__device__ __forceinline__ void stage_columns(SharedStorage& shared, const uint32_t (&words)[ROWS][2],
                                              int tokens, int warp, int lane) {
    const KeptCodes mask(tokens - ROWS * warp);
    const uint32_t target = shared_address(&shared.codes.columns[lane * COLUMNS][slot_of(warp, lane)]);
    float inverse[COLUMNS];
    ld_shared_v4_f32(shared_address(&shared.inverse[lane * COLUMNS]), inverse);
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const auto code = [&](int row) {
            const uint32_t word = words[row][i / 2];
            return __fmul_rn(i % 2 == 0 ? low_bf16(word) : high_bf16(word), inverse[i]);
        };
        const uint32_t low = four_codes(code(0), code(1), code(2), code(3));
        const uint32_t high = four_codes(code(4), code(5), code(6), code(7));
        st_shared_v2_b32(target + i * TILE, low & mask.low, high & mask.high);
    }
}

// A tile's transposed codes to global memory.
__device__ __forceinline__ void store_columns(SharedStorage& shared, const Problem& problem, const Item& item,
                                              int warp, int lane) {
    const Lines lines(shared.codes, warp, lane);
    if (!lines.is_inside(item.units)) return;
    int feature = item.block * TILE + lines.column;
    const int64_t first_token = UNIT * item.first_unit + Lines::TOKENS * lines.chunk;
    uint8_t* target = problem.codes + int64_t(feature) * problem.groups.tokens + first_token;
#pragma unroll
    for (int step = 0; step < Lines::STEPS; ++step) {
        if (feature < problem.features) lines.store(0, step, target);
        feature += Lines::STEP;
        target += int64_t(Lines::STEP) * problem.groups.tokens;
    }
}

// Rows from M on of MN-major scales are padding.
__device__ __forceinline__ void zero_padding(const Problem& problem, const Item& item) {
    const int row = problem.num_rows + int(threadIdx.x);
    if (item.tile == 0 && threadIdx.x < 4 && row < problem.row_scale_ld)
        problem.row_scale[int64_t(item.block) * problem.row_scale_ld + row] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, CTAS_PER_SM) padless_sm90_rows_columns(
    const uint8_t* x, const int* tokens_of_rows, const int* offs, uint8_t* row_codes, float* row_scale,
    uint8_t* codes, float* scale, int* starts, int* block_starts, int num_rows, int num_source_rows,
    int features, int stride, int row_scale_ld, int num_groups, int alignment, int tokens, int num_scale_rows,
    int num_tiles) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Groups groups{offs,           num_groups, num_rows, alignment,   tokens,
                        num_scale_rows, num_tiles,  starts,   block_starts};
    const Problem problem{x,     tokens_of_rows, groups,          row_codes, row_scale, codes,
                          scale, num_rows,       num_source_rows, features,  stride,    row_scale_ld};
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == NUM_WARPS - 1) {
        shared.schedule.begin(groups, problem.num_blocks(), lane);
#pragma unroll 1
        for (int first = 0; first < 2; ++first)
            shared.schedule.take(groups, problem.num_blocks(), first, lane);
    }
    __syncthreads();
    const auto source_of = [&](int number) {
        return GATHERS ? source_row(problem, shared.schedule.items[number % 4], warp, lane) : 0;
    };
    start_copies(shared, problem, shared.schedule.items[0], source_of(0), warp, lane);
    int number = 0, next_source = source_of(1);
#pragma unroll 1
    for (;; ++number) {
        const Item& item = shared.schedule.items[number % 4];
        if (item.tile >= num_tiles) break;
        cp_async_wait<0>();
        __syncwarp();
        uint32_t words[ROWS][2];
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
            ld_shared_v2_b32(shared_address(&shared.values[ROWS * warp + row].words[2 * lane]), words[row][0],
                             words[row][1]);
        __syncwarp();
        start_copies(shared, problem, shared.schedule.items[(number + 1) % 4], next_source, warp, lane);
        uint32_t largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = larger_of_pairs(words[0][i], words[1][i]);
#pragma unroll
            for (int row = 2; row < ROWS; ++row) largest[i] = larger_of_pairs(largest[i], words[row][i]);
        }
        st_shared_v2_b32(shared_address(&shared.largest[warp][2 * lane]), largest[0], largest[1]);
        __syncthreads();
        if (warp == NUM_WARPS - 1) shared.schedule.take(groups, problem.num_blocks(), number + 2, lane);
        scale_columns(shared, problem, item, item.tokens);
        if (number > 0) store_columns(shared, problem, shared.schedule.items[(number + 3) % 4], warp, lane);
        if (HAS_ROWS) {
            if (ROWS * warp < item.rows) store_rows(problem, item, words, warp, lane);
            zero_padding(problem, item);
        }
        __syncthreads();
        next_source = source_of(number + 2);
        stage_columns(shared, words, item.tokens, warp, lane);
    }
    __syncthreads();
    if (number > 0) store_columns(shared, problem, shared.schedule.items[(number + 3) % 4], warp, lane);
    cp_async_wait<0>();
}
