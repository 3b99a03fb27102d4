// Values of a tile from shared memory, dprob's sums, and dZ's rows: codes and scales.
#pragma once

__device__ __forceinline__ float sum_of(float x, float y) {
    return __fadd_rn(x, y);
}

// A warp's prob of an item's rows, into the buffer of item `number`.
__device__ __forceinline__ void copy_probs(SharedStorage& shared, const Problem& problem, const Item& item,
                                           int number, int warp, int lane) {
    const int row = ROWS * warp + lane;
    if (!HAS_PROB || lane >= ROWS) return;
    const bool there = row < item.rows;
    cp_async_4_or_zeros(shared_address(&shared.probs[number % 2][row]),
                        problem.prob + (there ? item.first_row + row : 0), there ? 4 : 0);
}

// Copies of an item's rows into shared memory, 16 bytes of each operand a lane: of rows `pair` and pair + 4 of the warp's at once,
// where pair is 0, 1, 2, 3 in turn. Rows that are not there are zeros.
struct RowCopies {
    const uint8_t *gate, *dh;
    int rows;  // of the item, from this lane's first one on
    uint32_t target;

    __device__ __forceinline__ RowCopies(SharedStorage& shared, const Problem& problem, const Item& item,
                                         int warp, int lane) {
        const int row = ROWS * warp + ROWS / 2 * (lane / 16), chunk = lane % 16;
        rows = item.rows - row;
        const int64_t source = rows > 0 ? item.first_row + row : 0;
        const int column = item.block * TILE + 8 * chunk;
        gate = problem.z + 2 * (source * problem.z_stride + gate_column(column));
        dh = problem.dh + 2 * (source * problem.dh_stride + column);
        target = shared_address(&shared.values[0][row].words[4 * chunk]);
    }

    __device__ __forceinline__ void start(const Problem& problem, int pair) {
        constexpr int OPERAND = sizeof(SharedStorage::values[0]), ROW = sizeof(Row);
        const int bytes = pair < rows ? 16 : 0;
        const uint32_t to = target + pair * ROW;
        cp_async_16_or_zeros(to + GATE * OPERAND, gate, bytes);
        cp_async_16_or_zeros(to + UP * OPERAND, gate + 2 * up_offset(problem), bytes);
        cp_async_16_or_zeros(to + HIDDEN * OPERAND, dh, bytes);
        cp_async_commit();
        if (pair + 1 < rows) {
            gate += 2 * problem.z_stride;
            dh += 2 * problem.dh_stride;
        }
    }
};

// Gradients of a row's columns of this lane; the sum of their products with dH.
__device__ __forceinline__ float differentiate(const uint32_t (&gate)[2], const uint32_t (&up)[2],
                                               const uint32_t (&dh)[2], float prob,
                                               float (&values)[NUM_OUTPUTS][ROWS][COLUMNS], int row) {
    float products[COLUMNS];
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
        const auto value = [&](const uint32_t (&words)[2]) {
            return i % 2 == 0 ? low_bf16(words[i / 2]) : high_bf16(words[i / 2]);
        };
        const Gradients found = gradients_of<HAS_PROB>(value(dh), value(gate), value(up), prob);
        values[GATE][row][i] = found.gate;
        values[UP][row][i] = found.up;
        values[HIDDEN][row][i] = found.hidden;
        products[i] = found.product;
    }
    return __fadd_rn(__fadd_rn(products[0], products[1]), __fadd_rn(products[2], products[3]));
}

__device__ __forceinline__ float largest_of(const float (&values)[COLUMNS]) {
    return max_nan(max_nan_abs(values[0], values[1]), max_nan_abs(values[2], values[3]));
}

// Codes and scales of dZ's rows of a warp. Half a warp has one block of 128 columns' scale of every row: gate's and up's, or of
// interleaved ones the first 64 columns of both and the second.
__device__ __forceinline__ void store_rows(const Problem& problem, const Item& item,
                                           const float (&values)[NUM_OUTPUTS][ROWS][COLUMNS], int warp,
                                           int lane) {
    float largest[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float gate = largest_of(values[GATE][row]), up = largest_of(values[UP][row]);
        largest[row] = INTERLEAVED ? max_nan(gate, up) : halved(gate, up, lane, 16, max_nan);
    }
#pragma unroll
    for (int row = 0; row < 4; ++row) largest[row] = halved(largest[row], largest[row + 4], lane, 8, max_nan);
#pragma unroll
    for (int row = 0; row < 2; ++row) largest[row] = halved(largest[row], largest[row + 2], lane, 4, max_nan);
    float mine = halved(largest[0], largest[1], lane, 2, max_nan);
    mine = max_nan(mine, __shfl_xor_sync(0xffffffff, mine, 1));
    // Of row lane / 2 % 8.
    const Fp8Block rule{};
    const float scale = rule.scale(mine), inverse = rule.multiplier(scale);
    const int first = ROWS * warp, rows = item.rows - first;
    const int scale_block =
        INTERLEAVED ? 2 * item.block + lane / 16 : item.block + lane / 16 * problem.num_blocks();
    const int of_lane = lane / 2 % ROWS;
    if (lane % 2 == 0 && of_lane < rows)
        problem.row_scale[int64_t(scale_block) * problem.row_scale_ld + item.first_row + first + of_lane] =
            scale;

    const int column = gate_column(item.block * TILE + lane * COLUMNS);
    uint8_t* codes = problem.row_codes + int64_t(item.first_row + first) * (2 * problem.hidden) + column;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
        const float of_gate = __shfl_sync(0xffffffff, inverse, INTERLEAVED ? (lane & 16) + 2 * row : 2 * row);
        const float of_up = INTERLEAVED ? of_gate : __shfl_sync(0xffffffff, inverse, 16 + 2 * row);
        const auto code = [&](int output, float by) {
            const float (&v)[COLUMNS] = values[output][row];
            return four_codes(__fmul_rn(v[0], by), __fmul_rn(v[1], by), __fmul_rn(v[2], by),
                              __fmul_rn(v[3], by));
        };
        const uint32_t gate = code(GATE, of_gate), up = code(UP, of_up);
        if (row < rows) {
            st_global_b32(codes, gate);
            st_global_b32(codes + up_offset(problem), up);
        }
        codes += 2 * problem.hidden;
    }
}
