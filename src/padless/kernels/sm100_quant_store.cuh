// The quantising store of sm100_grouped_gemm.cu: included by it, after its shared memory and its constants, in place of
// its plain store. From sums in tensor memory to everything an Epilogue asks for:
//
//   sums -> alpha, bias, SwiGLU, prob -> values --+-> amax of the group
//                                                 +-> bf16 / fp16 / float32
//                                                 +-> row scales, row codes
//                                                 +-> column scales, column codes
//
// The tokens are lanes of tensor memory: a lane holds 32 neighbours of one row, a warp 32 rows. So a row's block is inside
// one lane, and a column's block is the 32 lanes of one warp, whose first row is a multiple of 32 from the group's. Nothing
// is exchanged but the columns' maxima. Codes leave from the registers, 32 bytes of a row at a time.
//
// Rows and columns that do not exist become zeros before a maximum is taken over them: a tile's last rows are computed
// from the next group's.
#pragma once

static_assert(!TOKENS_ON_N && !COLUMN_MAJOR && !PROBLEM_LIST, "rows are lanes of one ragged problem");
static_assert(MMA_N >= 128, "a tile has whole words of scales");
static_assert(!GATE_AND_UP_APART || MMA_N == 256, "half of the columns are gate, in one atom of scales");
static_assert(ROW_QUANT != QUANT_FP8_BLOCK && COLUMN_QUANT != QUANT_FP8_BLOCK, "a block is inside 32 x 32");

using RowFormat = FormatOf<ROW_QUANT == QUANT_NONE ? QUANT_MXFP8 : ROW_QUANT, MX_RULE>::Type;
using ColumnFormat = FormatOf<COLUMN_QUANT == QUANT_NONE ? QUANT_MXFP8 : COLUMN_QUANT, MX_RULE>::Type;

constexpr int OUT_COLUMNS = GLU == GLU_NONE ? MMA_N : MMA_N / 2;  // of the output, that a tile makes
constexpr int OUT_CHUNKS = OUT_COLUMNS / CHUNK;
// Chunks of the output after which the columns that the accumulators share have been read. Gate and up 32 by 32 take two
// chunks of sums, neighbours; with gate and up apart each takes one from either half, and the shared ones are in one half.
constexpr int OUT_CHUNKS_BEFORE_DRAINED = SHARED_COLUMNS == 0      ? OUT_CHUNKS
                                          : GLU == GLU_INTERLEAVED ? (SHARED_COLUMNS / CHUNK + 1) / 2
                                                                   : SHARED_COLUMNS / CHUNK;

// Scales of a row that one lane makes of a chunk, and that it stores together: four, or as many as a tile has.
constexpr int CHUNK_SCALES = CHUNK / RowFormat::BLOCK;
constexpr int WORD_SCALES = OUT_COLUMNS / RowFormat::BLOCK < 4 ? OUT_COLUMNS / RowFormat::BLOCK : 4;
constexpr int WORD_CHUNKS = WORD_SCALES / CHUNK_SCALES;

constexpr bool BIAS_GATED_BY_PROB = BIAS_IS_GATED && HAS_BIAS && HAS_PROB;
constexpr bool GATES_SUM = HAS_PROB && !BIAS_GATED_BY_PROB;
constexpr bool MASKS_ROWS = HAS_AMAX || COLUMN_QUANT != QUANT_NONE;

// What every sum of a lane's row is multiplied by: the operands' global scales, alpha, prob.
struct RowFactors {
    float global, alpha, prob;
};

// x = acc * alpha + bias; acc is what the plain store stores as float32. `bias`: of the first column, `left`: columns
// that B has from there on, a multiple of 4.
__device__ __forceinline__ void finish_sums(float (&x)[CHUNK], const uint32_t (&sums)[CHUNK],
                                            const RowFactors& row, const float* bias, int left) {
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        float four[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (HAS_BIAS && i < left) {
            const float4 given = __ldg(reinterpret_cast<const float4*>(bias + i));
            four[0] = given.x, four[1] = given.y, four[2] = given.z, four[3] = given.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float value = __fmul_rn(__uint_as_float(sums[i + e]), row.global);
            if constexpr (HAS_ALPHA) value = __fmul_rn(value, row.alpha);
            if constexpr (HAS_BIAS)
                value = __fadd_rn(value, BIAS_GATED_BY_PROB ? __fmul_rn(four[e], row.prob) : four[e]);
            x[i + e] = value;
        }
    }
}

// The sums of one chunk of the output: of it, or of its gate and its up. `d`: address of the tile's sums.
__device__ __forceinline__ void load_sums(uint32_t (&sums)[CHUNK], uint32_t (&up)[CHUNK], uint32_t d,
                                          int chunk) {
    const int at = GLU == GLU_INTERLEAVED ? 2 * chunk : chunk;
    tcgen05_ld_32x32b<CHUNK>(sums, d + at * CHUNK);
    if constexpr (GLU != GLU_NONE)
        tcgen05_ld_32x32b<CHUNK>(up, d + (GATE_AND_UP_APART ? chunk + OUT_CHUNKS : at + 1) * CHUNK);
    tcgen05_wait_ld();
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        pin_loaded(sums[i]);
        if constexpr (GLU != GLU_NONE) pin_loaded(up[i]);
    }
}

// The values of 32 columns of the lane's row from `column` of the output on: float32, operation by operation as in
// epilogue.py, and zeros where the row or the column does not exist.
__device__ __forceinline__ void finish_values(float (&v)[CHUNK], const uint32_t (&sums)[CHUNK],
                                              const uint32_t (&up_sums)[CHUNK], const RowFactors& row,
                                              const float* bias, int n, int column, int n_out, bool has_row) {
    // The column of A B^T that the first of `sums` is, and how much further its up is.
    const int first = GLU == GLU_INTERLEAVED ? 2 * column : column;
    const int to_up = GLU == GLU_INTERLEAVED ? CHUNK : n / 2;
    finish_sums(v, sums, row, bias + first, (GLU == GLU_NONE ? n : GATE_AND_UP_APART ? n / 2 : n) - first);
    if constexpr (GLU != GLU_NONE) {
        float up[CHUNK];
        finish_sums(up, up_sums, row, bias + first + to_up, n - first - to_up);
#pragma unroll
        for (int i = 0; i < CHUNK; i += 4) {
            float gate[4] = {v[i], v[i + 1], v[i + 2], v[i + 3]};
            const float four[4] = {up[i], up[i + 1], up[i + 2], up[i + 3]};
            swiglu(gate, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[i + e] = gate[e];
        }
    }
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        if constexpr (GATES_SUM) v[i] = __fmul_rn(v[i], row.prob);
    }
    if (MASKS_ROWS && !has_row) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) v[i] = 0.0f;
    }
    if (column + CHUNK > n_out) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i)
            if (column + i >= n_out) v[i] = 0.0f;
    }
}

// amax[b]: the largest magnitude of block b of the lane's row, NaN where it has one.
template <int BLOCKS>
__device__ __forceinline__ void row_amax(const float (&v)[CHUNK], float (&amax)[BLOCKS]) {
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) {
        const int b = i / (CHUNK / BLOCKS);
        amax[b] = i % (CHUNK / BLOCKS) == 0 ? fabsf(v[i]) : max_nan_abs(amax[b], v[i]);
    }
}

// The largest magnitude in the warp's 32 rows of column `lane`. Each exchange halves the columns a lane looks after:
// 31 shuffles for 32 columns, where reducing each alone takes 160.
__device__ __forceinline__ float column_amax(const float (&v)[CHUNK], int lane) {
    float m[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; ++i) m[i] = v[i];
#pragma unroll
    for (int half = CHUNK / 2; half >= 1; half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < half; ++i) {
            const float kept = upper ? m[i + half] : m[i];
            const float given = upper ? m[i] : m[i + half];
            m[i] = max_nan_abs(kept, __shfl_xor_sync(0xffffffff, given, half));
        }
    }
    return m[0];
}

// Codes of 32 values, `limit` of which exist: a multiple of what 16 bytes hold.
template <class Format, class Multiplier>
__device__ __forceinline__ void store_codes(uint8_t* at, const float (&v)[CHUNK], int limit,
                                            Multiplier multiplier) {
    constexpr int PER_WORD = 32 / Format::CODE_BITS, WORDS = CHUNK / PER_WORD;
    uint32_t words[WORDS];
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
        words[w] = 0;
#pragma unroll
        for (int e = 0; e < PER_WORD; e += 2) {
            const int i = w * PER_WORD + e;
            const float x = __fmul_rn(v[i], multiplier(i)), y = __fmul_rn(v[i + 1], multiplier(i + 1));
            words[w] |= static_cast<uint32_t>(Format::codes(x, y)) << Format::CODE_BITS * e;
        }
    }
    if constexpr (WORDS == 8) {
        if (limit >= CHUNK && reinterpret_cast<uint64_t>(at) % 32 == 0) {
            st_global_no_allocate_v8(at, words);
            return;
        }
    }
#pragma unroll
    for (int w = 0; w < WORDS; w += 4) {
        if (w * PER_WORD < limit)
            *reinterpret_cast<uint4*>(at + w * 4) =
                make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
    }
}

// WORD_SCALES neighbouring scales of one row from block `first` on, of `blocks` that exist; those past the last are zero.
__device__ __forceinline__ void store_row_word(const QuantOutputs& outputs, const Placement& place, int row,
                                               int first, int blocks, uint32_t word) {
    uint8_t* at = static_cast<uint8_t*>(outputs.row_scales);
    if constexpr (ROW_SCALES == SCALES_STRIDED) {
        at += row * outputs.row_scales_row + first * outputs.row_scales_block;
#pragma unroll
        for (int b = 0; b < WORD_SCALES; ++b)
            if (first + b < blocks) at[b * outputs.row_scales_block] = static_cast<uint8_t>(word >> 8 * b);
    } else {
        const int tiled_row =
            ROW_SCALES == SCALES_BLOCKED ? row : place.group_tile * 128 + row - place.group_start;
        at += blocked_offset(tiled_row, first, (blocks + 3) / 4);
        if constexpr (WORD_SCALES == 4)
            *reinterpret_cast<uint32_t*>(at) = word;
        else
            *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(word);
        static_assert(WORD_SCALES == 4 || WORD_SCALES == 2, "128 columns or more, or 64 of a SwiGLU");
    }
}

// Column scales and column codes of the warp's 32 rows, from `row` on, of 32 columns.
__device__ __forceinline__ void store_columns(const QuantTargets& targets, const Placement& place,
                                              const ColumnFormat& format, const float (&v)[CHUNK],
                                              float (&multipliers)[CHUNK], int row, int column, bool has_row,
                                              int lane) {
    const QuantOutputs& outputs = targets.outputs;
    const ColumnFormat::Scale scale = format.scale(column_amax(v, lane));
    if (column + lane < outputs.n_out)
        store_column_scale<COLUMN_SCALES, ColumnFormat::BLOCK>(outputs, place, row, column + lane, scale);
    multipliers[lane] = format.multiplier(scale);
    __syncwarp();
    float multiplier[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&multipliers[i]);
        multiplier[i] = four.x, multiplier[i + 1] = four.y;
        multiplier[i + 2] = four.z, multiplier[i + 3] = four.w;
    }
    if (has_row)
        store_codes<ColumnFormat>(targets.column_codes + (row + lane) * targets.column_pitch + column, v,
                                  outputs.n_out - column, [&](int i) { return multiplier[i]; });
}

// A store warp: its 32 lanes of every tile.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            uint32_t tensor_memory, int warp, int lane) {
    const Operands& operands = problem.operands;
    const QuantTargets& targets = problem.targets;
    const QuantOutputs& outputs = targets.outputs;
    const int blocks = (outputs.n_out + RowFormat::BLOCK - 1) / RowFormat::BLOCK;
    Reader reader(shared.queue);
    Pipeline<2> accumulator;
    Tile tile{};
    while (reader.next(tile, lane)) {
        const int group = tile.group;
        const int start = group == 0 ? 0 : shared.groups.group_ends[group - 1];
        const Placement place{group, start, shared.groups.group_ends[group] - start,
                              (shared.scale_shifts[group] + start) / 128};
        const int first = pair_rank() * LANE_ROWS + warp * 32;
        const bool has_row = first + lane < tile.rows;
        const int row = tile.row + first;
        const int out_column = GLU == GLU_NONE ? tile.column : tile.column / 2;
        const float* const bias = outputs.bias + static_cast<long long>(group) * operands.n;
        const float* const constant = outputs.constant + group * outputs.constant_stride;
        const RowFormat row_format = RowFormat::make(constant);
        const ColumnFormat column_format = ColumnFormat::make(constant);
        const RowFactors factors{operands.global_a.of(group) * operands.global_b.of(group),
                                 HAS_ALPHA ? __ldg(outputs.alpha + group) : 1.0f,
                                 HAS_PROB && has_row ? __ldg(outputs.prob + row + lane) : 1.0f};
        const uint32_t d = tensor_memory + accumulator.stage * SECOND_ACCUMULATOR + (warp * 32 << 16);
        float highest = 0.0f;
        uint32_t word = 0;

        mbarrier_wait(shared_address(&shared.done[accumulator.stage]), accumulator.phase);
        tcgen05_fence_after_thread_sync();
        for (int i = 0; i < OUT_CHUNKS; ++i) {
            // The columns that the accumulators share come first: the first one's last, the second one's first.
            const int chunk = SHARED_COLUMNS > 0 && accumulator.stage == 0 ? OUT_CHUNKS - 1 - i : i;
            const int column = out_column + chunk * CHUNK;
            const bool exists = first < tile.rows && column < outputs.n_out;
            uint32_t sums[CHUNK], up[CHUNK];
            __syncwarp();  // the stores before may have parted the lanes
            if (exists) load_sums(sums, up, d, chunk);
            if (i == OUT_CHUNKS_BEFORE_DRAINED - 1) give_back_sums(shared, accumulator.stage, lane);
            if (exists) {
                const int limit = outputs.n_out - column;
                float v[CHUNK];
                finish_values(v, sums, up, factors, bias, operands.n, column, outputs.n_out, has_row);
                if constexpr (HAS_PLAIN) {
                    uint32_t bits[CHUNK];
#pragma unroll
                    for (int j = 0; j < CHUNK; ++j) bits[j] = __float_as_uint(v[j]);
                    if (has_row)
                        store_run<OUT, false, false, WIDE_STORES>(targets.plain, row + lane, column, limit,
                                                                  bits, 1.0f);
                }
                if constexpr (ROW_QUANT != QUANT_NONE || HAS_AMAX) {
                    float amax[CHUNK_SCALES];
                    row_amax(v, amax);
                    float multiplier[CHUNK_SCALES];
#pragma unroll
                    for (int b = 0; b < CHUNK_SCALES; ++b) {
                        highest = max_nan_abs(highest, amax[b]);
                        const RowFormat::Scale scale = row_format.scale(amax[b]);
                        multiplier[b] = row_format.multiplier(scale);
                        if (b * RowFormat::BLOCK < limit)
                            word |= static_cast<uint32_t>(scale)
                                    << 8 * (chunk % WORD_CHUNKS * CHUNK_SCALES + b);
                    }
                    if (ROW_QUANT != QUANT_NONE && has_row)
                        store_codes<RowFormat>(targets.row_codes + (row + lane) * targets.row_pitch +
                                                   column * RowFormat::CODE_BITS / 8,
                                               v, limit,
                                               [&](int j) { return multiplier[j / RowFormat::BLOCK]; });
                }
                if constexpr (COLUMN_QUANT != QUANT_NONE) {
                    __syncwarp();
                    store_columns(targets, place, column_format, v, shared.column_multipliers[warp], row,
                                  column, has_row, lane);
                }
            }
            if constexpr (ROW_QUANT != QUANT_NONE) {
                if (i % WORD_CHUNKS == WORD_CHUNKS - 1) {
                    const int of_word = out_column + chunk / WORD_CHUNKS * WORD_CHUNKS * CHUNK;
                    if (has_row && of_word < outputs.n_out)
                        store_row_word(outputs, place, row + lane, of_word / RowFormat::BLOCK, blocks, word);
                    word = 0;
                }
            }
        }
        __syncwarp();
        if constexpr (HAS_AMAX) {
            const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(highest));
            const uint32_t canonical = bits > 0x7F800000 ? 0x7FC00000 : bits;  // one NaN, above everything
            if (lane == 0 && first < tile.rows)
                red_max_float(outputs.amax + group, __uint_as_float(canonical));
        }
        accumulator.advance();
        if (lane == 0) reader.release();
        reader.advance();
    }
}
