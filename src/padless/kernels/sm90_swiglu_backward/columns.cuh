// Transposed codes: scales of columns over all tokens of a tile, codes through shared memory, whole lines to global memory.
#pragma once

// Threads of the first 12 warps: scale of an output's column.
__device__ __forceinline__ void scale_columns(SharedStorage& shared, const Problem& problem, const Item& item,
                                              int tokens) {
    const int thread = read_tid_x(), output = thread / TILE,
              column = thread % TILE;  // read anew: registers are full
    if (output >= NUM_OUTPUTS) return;
    float largest = shared.largest[0][output][column];
#pragma unroll
    for (int w = 1; w < NUM_WARPS; ++w) largest = max_nan(largest, shared.largest[w][output][column]);
    const bool square = SQUARE && output == HIDDEN;
    if (square) {
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2)
            largest = max_nan(largest, __shfl_xor_sync(0xffffffff, largest, distance));
        if (thread % 32 == 0) shared.largest_of_warps[column / 32] = largest;
        bar_sync(1, TILE);
        largest = max_nan(max_nan(shared.largest_of_warps[0], shared.largest_of_warps[1]),
                          max_nan(shared.largest_of_warps[2], shared.largest_of_warps[3]));
    }
    const Fp8Block rule{};
    const float scale = rule.scale(largest);
    shared.inverse[output][column] = rule.multiplier(scale);
    if (item.tile >= problem.groups.num_scale_rows) return;
    const int64_t row = item.tile;
    const float stored = tokens > 0 ? scale : 0.0f;
    const int of_dh = item.block * TILE + column;
    if (output != HIDDEN) {
        const int feature = gate_column(of_dh) + (output == UP ? up_offset(problem) : 0);
        problem.dz_scale[row * (2 * problem.hidden) + feature] = stored;
    } else if (!square) {
        problem.hidden_scale[row * problem.hidden + of_dh] = stored;
    } else if (column == 0) {
        problem.hidden_scale[row * problem.num_blocks() + item.block] = stored;
    }
}

// Codes of a warp's tokens into shared memory, transposed; ALL: all of the warp's are kept, else the first `kept`.
template <bool ALL>
__device__ __forceinline__ void stage_columns(SharedStorage& shared,
                                              const float (&values)[NUM_OUTPUTS][ROWS][COLUMNS], int kept,
                                              int warp, int lane) {
    const KeptCodes mask(kept);
    const uint32_t target = shared_address(&shared.codes[0].columns[lane * COLUMNS][slot_of(warp, lane)]);
#pragma unroll
    for (int output = 0; output < NUM_OUTPUTS; ++output) {
        float inverse[COLUMNS];
        ld_shared_v4_f32(shared_address(&shared.inverse[output][lane * COLUMNS]), inverse);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
            const auto code = [&](int row) { return __fmul_rn(values[output][row][i], inverse[i]); };
            const uint32_t low = four_codes(code(0), code(1), code(2), code(3));
            const uint32_t high = four_codes(code(4), code(5), code(6), code(7));
            st_shared_v2_b32(target + (output * TILE + i) * TILE, ALL ? low : low & mask.low,
                             ALL ? high : high & mask.high);
        }
    }
}

// A tile's transposed codes to global memory.
__device__ __forceinline__ void store_columns(SharedStorage& shared, const Problem& problem, const Item& item,
                                              int warp, int lane) {
    const Lines lines(shared.codes[0], warp, lane);
    if (!lines.is_inside(item.units)) return;
    const int64_t first_token = UNIT * item.first_unit + Lines::TOKENS * lines.chunk;
    const int of_dh = item.block * TILE + lines.column;
    const int64_t line = problem.groups.tokens;
    uint8_t* dz = problem.dz_codes + gate_column(of_dh) * line + first_token;
    uint8_t* hidden = problem.hidden_codes + of_dh * line + first_token;
#pragma unroll
    for (int output = 0; output < NUM_OUTPUTS; ++output) {
        uint8_t* target = output == HIDDEN ? hidden : output == UP ? dz + up_offset(problem) * line : dz;
#pragma unroll
        for (int step = 0; step < Lines::STEPS; ++step) {
            lines.store(output, step, target);
            target += (output == HIDDEN ? Lines::STEP : gate_column(Lines::STEP)) * line;
        }
    }
}
