// The values that sm100_grouped/quant_store.cuh stores: from a chunk of sums in tensor memory, 32 columns of a lane's row, to
// float32, and their largest magnitudes along rows and columns.
//
// Rows and columns that do not exist become zeros before a maximum is taken over them: a tile's last rows are computed
// from the next group's.
#pragma once

static_assert(!TOKENS_ON_N && !COLUMN_MAJOR && !PROBLEM_LIST, "rows are lanes of one ragged problem");
static_assert(MMA_N >= 128, "a tile has whole words of scales");
static_assert(!GATE_AND_UP_APART || MMA_N == 256, "half of the columns are gate, in one atom of scales");

using RowFormat = FormatOf<ROW_QUANT == QUANT_NONE ? QUANT_MXFP8 : ROW_QUANT, MX_RULE>::Type;
using ColumnFormat = FormatOf<COLUMN_QUANT == QUANT_NONE ? QUANT_MXFP8 : COLUMN_QUANT, MX_RULE>::Type;

constexpr int OUT_COLUMNS = GLU == GLU_NONE ? MMA_N : MMA_N / 2;  // of the output, that a tile makes
constexpr int OUT_CHUNKS = OUT_COLUMNS / CHUNK;
// Chunks of the output after which the columns that the accumulators share have been read. Gate and up 32 by 32 take two
// chunks of sums, neighbours; with gate and up apart each takes one from either half, and the shared ones are in one half.
constexpr int OUT_CHUNKS_BEFORE_DRAINED = SHARED_COLUMNS == 0      ? OUT_CHUNKS
                                          : GLU == GLU_INTERLEAVED ? (SHARED_COLUMNS / CHUNK + 1) / 2
                                                                   : SHARED_COLUMNS / CHUNK;

constexpr bool MASKS_ROWS = HAS_AMAX || COLUMN_QUANT != QUANT_NONE;

// What every sum of a lane's row is multiplied by: the operands' global scales, alpha, prob.
struct RowFactors {
    float global, alpha, prob;
};

// A store warp's part of a tile.
struct WarpTile {
    Placement place;
    RowFactors factors;
    const float* bias;  // of the group
    uint32_t d;         // the warp's lanes of the sums
    int row;            // its first one
    int rows;           // that exist from there on, negative past the group's end
    int out_column;     // first column of the output
    int accumulator;
    int lane;

    __device__ __forceinline__ bool has_row() const { return lane < rows; }
    // Chunk number `i` in the order in which they are read: the columns that the accumulators share come first, the
    // first one's last, the second one's first.
    __device__ __forceinline__ int chunk(int i) const {
        return SHARED_COLUMNS > 0 && accumulator == 0 ? OUT_CHUNKS - 1 - i : i;
    }
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
            value = with_alpha_and_bias(value, row.alpha, four[e], row.prob);
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
            activate(gate, four);
#pragma unroll
            for (int e = 0; e < 4; ++e) v[i + e] = gate[e];
        }
    } else if constexpr (ACTIVATES_SUMS) {
        activate(v, v);
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

// The values of chunk number `i` of a tile in the order of reading, if it exists; with `last_read`, and where no shared
// column is left to read, the sums are given back. All lanes of the warp.
__device__ __forceinline__ void take_chunk(float (&v)[CHUNK], SharedStorage& shared, const Problem& problem,
                                           const WarpTile& t, int i, bool exists, bool last_read) {
    const QuantOutputs& outputs = problem.targets.outputs;
    const int chunk = t.chunk(i);
    uint32_t sums[CHUNK], up[CHUNK];
    __syncwarp();  // the stores before may have parted the lanes
    if (exists) load_sums(sums, up, t.d, chunk);
    if (last_read && i == OUT_CHUNKS_BEFORE_DRAINED - 1) give_back_sums(shared, t.accumulator, t.lane);
    if (exists)
        finish_values(v, sums, up, t.factors, t.bias, problem.operands.n, t.out_column + chunk * CHUNK,
                      outputs.n_out, t.has_row());
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
