// SwiGLU's backward and the quantization of all that it makes, on Hopper: 6 I bytes read and 5 I written a row of bf16.
//
//   dh  (M, I) bf16, z (M, 2 I) bf16 with gate and up concatenated, or interleaved by 32 columns; I a multiple of 128
//   ->  dZ as rows: codes (M, 2 I) e4m3, scales (2 I / 128, ld) float32, one per row and 128 columns
//       dZ and H as columns: codes (2 I, T') and (I, T'), scales (S, 2 I) and (S, I), one per feature and 128 tokens of a group
//       sums (I / 128, M): dprob of every 128 columns
//
// An item of work is a tile of 128 tokens of one group x 128 columns of dH (device/token_tiles.cuh). CTAs are persistent: one of
// 16 warps a multiprocessor takes every so manieth item.
//
//      each warp                                                   all warps
//      ---------                                                   ---------
//      wait for the copies of two rows; read them;
//      start copying the same two rows of the next item;
//      differentiate: dZ and H in 96 registers, until the end
//      scales and codes of dZ's rows
//      largest magnitude of its columns -> shared memory     -->   barrier
//                                                                  scales of columns (12 warps); the item after the next (1)
//                                                                  barrier
//      codes of columns, transposed -> shared memory         -->   barrier
//      whole lines of transposed codes -> global memory
//
// A row of shared memory is free for the next item as soon as its warp has read it, and nobody else reads it: copies are under way
// all the time, and no barrier waits for them.
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
#include "device/ptx/special_registers.cuh"

// In this order: later ones use earlier ones.
#include "device/activation.cuh"
#include "device/quant_rules.cuh"
#include "device/token_tiles.cuh"
#include "sm90_swiglu_backward/arithmetic.cuh"
#include "sm90_swiglu_backward/storage.cuh"

#include "sm90_swiglu_backward/columns.cuh"
#include "sm90_swiglu_backward/rows.cuh"

// Rows from M on of MN-major scales are padding.
__device__ __forceinline__ void zero_padding(const Problem& problem, const Item& item) {
    const int thread = read_tid_x(), row = problem.num_rows + thread % 4, which = thread / 4;
    if (item.tile != 0 || which >= 2 || row >= problem.row_scale_ld) return;
    const int block = INTERLEAVED ? 2 * item.block + which : item.block + which * problem.num_blocks();
    problem.row_scale[int64_t(block) * problem.row_scale_ld + row] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS, 1) padless_sm90_swiglu_backward(
    const uint8_t* dh, const uint8_t* z, const float* prob, const int* offs, uint8_t* row_codes,
    float* row_scale, uint8_t* dz_codes, float* dz_scale, uint8_t* hidden_codes, float* hidden_scale,
    float* sums, int* starts, int* block_starts, int num_rows, int hidden, int dh_stride, int z_stride,
    int row_scale_ld, int num_groups, int alignment, int tokens, int num_scale_rows, int num_tiles) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const Groups groups{offs,           num_groups, num_rows, alignment,   tokens,
                        num_scale_rows, num_tiles,  starts,   block_starts};
    const Problem problem{dh,       z,         prob,         groups,       row_codes, row_scale,
                          dz_codes, dz_scale,  hidden_codes, hidden_scale, sums,      num_rows,
                          hidden,   dh_stride, z_stride,     row_scale_ld};
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0);  // known to be the same in all lanes

    if (warp == NUM_WARPS - 1) {
        shared.schedule.begin(groups, problem.num_blocks(), lane);
#pragma unroll 1
        for (int first = 0; first < 2; ++first)
            shared.schedule.take(groups, problem.num_blocks(), first, lane);
    }
    __syncthreads();
    {
        copy_probs(shared, problem, shared.schedule.items[0], 0, warp,
                   lane);  // part of the first pair's group
        RowCopies copies(shared, problem, shared.schedule.items[0], warp, lane);
#pragma unroll
        for (int pair = 0; pair < ROWS / 2; ++pair) copies.start(problem, pair);
    }

    int number = 0;
#pragma unroll 1
    for (;; ++number) {
        const Item& item = shared.schedule.items[number % 4];
        const Item& next = shared.schedule.items[(number + 1) % 4];
        if (item.tile >= num_tiles) break;
        RowCopies copies(shared, problem, next, warp, lane);
        copy_probs(shared, problem, next, number + 1, warp, lane);
        float values[NUM_OUTPUTS][ROWS][COLUMNS] = {};
        if (ROWS * warp < item.rows) {
            float sum[ROWS / 2];
#pragma unroll
            for (int pair = 0; pair < ROWS / 2; ++pair) {
                cp_async_wait<ROWS / 2 - 1>();  // this pair's copies were the first of as many
                __syncwarp();
                uint32_t words[2][3][2];
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int operand = 0; operand < 3; ++operand) {
                        const int row = ROWS * warp + pair + ROWS / 2 * half;
                        ld_shared_v2_b32(shared_address(&shared.values[operand][row].words[2 * lane]),
                                         words[half][operand][0], words[half][operand][1]);
                    }
                __syncwarp();
                copies.start(problem, pair);
                float sums_of_rows[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = pair + ROWS / 2 * half;
                    const float by =
                        HAS_PROB ? ld_shared_f32(shared_address(&shared.probs[number % 2][ROWS * warp + row]))
                                 : 1.0f;
                    sums_of_rows[half] = differentiate(words[half][GATE], words[half][UP],
                                                       words[half][HIDDEN], by, values, row);
                }
                if (HAS_PROB) sum[pair] = halved(sums_of_rows[0], sums_of_rows[1], lane, 1, sum_of);
            }
            if (HAS_PROB) {  // neighbours have been added, and now sums of neighbours
                sum[0] = halved(sum[0], sum[2], lane, 2, sum_of);
                sum[1] = halved(sum[1], sum[3], lane, 2, sum_of);
                float total = halved(sum[0], sum[1], lane, 4, sum_of);
                total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, 8));
                total = __fadd_rn(total, __shfl_xor_sync(0xffffffff, total, 16));
                const int row = ROWS * warp + 4 * (lane & 1) + (lane & 2) + (lane >> 2 & 1);
                if (lane < ROWS && row < item.rows)
                    sums[int64_t(item.block) * num_rows + item.first_row + row] =
                        item.tokens > 0 ? total : 0.0f;
            }
        } else {  // a warp without rows has nothing to compute: zeros
            cp_async_wait<0>();
            __syncwarp();
#pragma unroll
            for (int pair = 0; pair < ROWS / 2; ++pair) copies.start(problem, pair);
        }
#pragma unroll
        for (int output = 0; output < NUM_OUTPUTS; ++output) {
            float largest[COLUMNS];
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                largest[i] = max_nan_abs(values[output][0][i], values[output][1][i]);
#pragma unroll
                for (int row = 2; row < ROWS; ++row)
                    largest[i] = max_nan_abs(largest[i], values[output][row][i]);
            }
            st_shared_v4_f32(shared_address(&shared.largest[warp][output][lane * COLUMNS]), largest);
        }
        __syncthreads();
        if (warp == NUM_WARPS - 1) shared.schedule.take(groups, problem.num_blocks(), number + 2, lane);
        scale_columns(shared, problem, item, item.tokens);
        if (number > 0) store_columns(shared, problem, shared.schedule.items[(number + 3) % 4], warp, lane);
        if (ROWS * warp < item.rows) store_rows(problem, item, values, warp, lane);
        zero_padding(problem, item);
        __syncthreads();
        const int kept = item.tokens - ROWS * warp;
        if (kept >= ROWS)
            stage_columns<true>(shared, values, kept, warp, lane);
        else
            stage_columns<false>(shared, values, kept, warp, lane);
    }
    __syncthreads();
    if (number > 0) store_columns(shared, problem, shared.schedule.items[(number + 3) % 4], warp, lane);
    cp_async_wait<0>();
}
