// The quantising store of a kernel that makes its product transposed, weight rows on the rows of an accumulator and tokens
// on its columns: included by it before its shared memory, in place of its plain store.
//
// A block of a row of D lies across the lanes and warps there. So the sums go through shared memory once, a piece at a
// time, and come back in rows:
//
//   sums -> staged: token rows x PIECE_COLUMNS floats -- barrier --> rows: alpha, bias, SwiGLU, prob -> values
//           values -+-> amax of the group
//                   +-> bf16 / fp16 / float32
//                   +-> row scales, row codes
//                   +-> staged again, in place -- barrier --> columns: column scales, column codes
//
// A piece is as wide as the widest block of a row, and no narrower than the 64 columns that a warpgroup has at once. The
// warpgroups whose columns make a piece are a team and meet at its barrier; teams do not wait for each other. Codes,
// values and scales are written straight to global memory, those of rows that exist: a warp writes rows, or parts of
// rows, of 32 bytes and more.
//
// A GLU epilogue needs 32 columns of gate and then 32 of up in every 64 of a tile. The producer sees to it where weights
// have them apart (weight_row). Where they alternate the rows of a piece are read in pairs.
#pragma once

constexpr bool GATE_AND_UP_APART = GLU == GLU_CONCATENATED;
constexpr int GLU_RUN = 32;

using RowFormat = FormatOf<ROW_QUANT, MX_RULE>::Type;
using ColumnFormat = FormatOf<COLUMN_QUANT, MX_RULE>::Type;

// A kernel argument. The tensor maps of `quant` are not used.
struct DirectOutputs {
    QuantOutputs quant;
    uint8_t* plain;
    uint8_t* row_codes;
    uint8_t* column_codes;
    long long plain_row, row_codes_row, column_codes_row;  // bytes from a row to the next
};

constexpr int OUT_PER_PRODUCT =
    GLU == GLU_NONE ? 1 : 2;  // columns of the product that make one of the output
constexpr int PIECE_COLUMNS = ROW_QUANT == QUANT_FP8_BLOCK ? 128 * OUT_PER_PRODUCT : 64;
constexpr int PIECE_OUT = PIECE_COLUMNS / OUT_PER_PRODUCT;
constexpr int PIECE_M64S = PIECE_COLUMNS / WGMMA_M < M64S_OF_WARPGROUP ? PIECE_COLUMNS / WGMMA_M
                                                                       : M64S_OF_WARPGROUP;  // of a warpgroup
constexpr int TEAM_WARPGROUPS = PIECE_COLUMNS / WGMMA_M / PIECE_M64S;
constexpr int TEAM_WARPS = TEAM_WARPGROUPS * 4;
constexpr int NUM_TEAMS = NUM_MMA_WARPGROUPS / TEAM_WARPGROUPS;
static_assert(NUM_TEAMS * TEAM_WARPGROUPS == NUM_MMA_WARPGROUPS, "a row's block of scales lies in one tile");
static_assert(COLUMN_QUANT == QUANT_NONE || BLOCK_M % ColumnFormat::BLOCK == 0,
              "a run of rows that shares a scale lies in one tile");
static_assert(COLUMN_QUANT == QUANT_NONE || ColumnFormat::CODE_BITS == 8, "columns are quantised to FP8");

// Floats from a staged row to the next. With 4 more than a multiple of 16, the 8 columns of 4 tokens that a warp stores
// together, and the rows that it reads, take all banks.
constexpr int PITCH = PIECE_COLUMNS + 4;
constexpr int PIECE_BYTES = BLOCK_M * PITCH * 4;

// Where a column of the output, counted from the piece's first, has its sum, or its gate's sum, in a staged row.
__device__ __forceinline__ int staged_column(int column) {
    if constexpr (GLU == GLU_ALTERNATING) return column / 4 * 8 + column % 4;  // four pairs a lane
    return GLU == GLU_NONE ? column : column / GLU_RUN * (2 * GLU_RUN) + column % GLU_RUN;
}

// An m64's accumulators: d[4 i + j] is column 16 * warp + lane / 4 + 8 * (j / 2) of 64, token 8 i + 2 * (lane % 4) + j % 2.
__device__ __forceinline__ void stage_sums(const float (&d)[BLOCK_M / 2], uint32_t staging, int first_column,
                                           int warp, int lane) {
    const uint32_t at = staging + (lane % 4 * 2 * PITCH + first_column + warp * 16 + lane / 4) * 4;
#pragma unroll
    for (int i = 0; i < BLOCK_M / 8; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
            st_shared_f32(at + ((8 * i + j % 2) * PITCH + j / 2 * 8) * 4, d[4 * i + j]);
    }
}

// Four columns of biases, from weight row `row`.
__device__ __forceinline__ void load_biases(float (&bias)[4], const float* of_group, int row, bool exist) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
        const float2 pair =
            exist ? __ldg(reinterpret_cast<const float2*>(of_group + row + e)) : float2{0.0f, 0.0f};
        bias[e] = pair.x;
        bias[e + 1] = pair.y;
    }
}

// Four pairs of gate and up, two in either, to four gates and four ups.
__device__ __forceinline__ void split_pairs(float (&low)[4], float (&high)[4]) {
    const float gate[4] = {low[0], low[2], high[0], high[2]}, up[4] = {low[1], low[3], high[1], high[3]};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        low[e] = gate[e];
        high[e] = up[e];
    }
}

__device__ __forceinline__ void store_plain(uint8_t* at, const float (&v)[4]) {
    if constexpr (OUT_TYPE == OUT_F32)
        *reinterpret_cast<float4*>(at) = float4{v[0], v[1], v[2], v[3]};
    else if constexpr (OUT_TYPE == OUT_BF16)
        *reinterpret_cast<uint2*>(at) = uint2{cvt_bf16x2(v[0], v[1]), cvt_bf16x2(v[2], v[3])};
    else
        *reinterpret_cast<uint2*>(at) = uint2{cvt_f16x2(v[0], v[1]), cvt_f16x2(v[2], v[3])};
}

// The rows of a piece, shared out among the team's warps; a lane has four neighbouring columns of a row. Operation by
// operation as in epilogue.py. `column` is the piece's first of the output.
__device__ __forceinline__ void finish_rows(uint32_t staging, const DirectOutputs& outputs,
                                            const Placement& place, const Tile& tile, int n, int column,
                                            int team_warp, int lane) {
    constexpr int ROW_LANES = PIECE_OUT / 4;
    constexpr int ROWS = 32 / ROW_LANES;  // that a warp has at once
    const QuantOutputs& quant = outputs.quant;
    const int in_piece = lane % ROW_LANES * 4;
    const int out = column + in_piece;
    const bool column_exists = out < quant.n_out;  // of all four: there are a multiple of 4
    const float alpha = HAS_ALPHA ? __ldg(quant.alpha + tile.group) : 1.0f;
    float bias[4] = {}, bias_up[4] = {};
    if constexpr (HAS_BIAS) {
        const float* const of_group = quant.bias + static_cast<long long>(tile.group) * n;
        if constexpr (GLU == GLU_ALTERNATING) {
            load_biases(bias, of_group, 2 * out, column_exists);
            load_biases(bias_up, of_group, 2 * out + 4, column_exists);
        } else {
            const int row = GLU == GLU_INTERLEAVED ? out / GLU_RUN * (2 * GLU_RUN) + out % GLU_RUN : out;
            load_biases(bias, of_group, row, column_exists);
            if constexpr (GLU != GLU_NONE)
                load_biases(bias_up, of_group, row + (GLU == GLU_INTERLEAVED ? GLU_RUN : n / 2),
                            column_exists);
        }
    }
    const RowFormat format = RowFormat::make(quant.constant + place.group * quant.constant_stride);
    const int blocks = (quant.n_out + RowFormat::BLOCK - 1) / RowFormat::BLOCK;
    float highest = 0.0f;
    for (int first = team_warp * ROWS; first < tile.rows; first += TEAM_WARPS * ROWS) {
        const int row = first + lane / ROW_LANES;
        const bool exists = row < tile.rows;
        const uint32_t at = staging + (row * PITCH + staged_column(in_piece)) * 4;
        const float prob = HAS_PROB && exists ? __ldg(quant.prob + tile.row + row) : 0.0f;
        const auto sum = [&](uint32_t from, const float (&of_columns)[4], float (&x)[4]) {
            ld_shared_v4_f32(from, x);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[e] = with_alpha_and_bias(x[e], alpha, of_columns[e], prob);
            }
        };
        float v[4];
        sum(at, bias, v);
        if constexpr (GLU != GLU_NONE) {
            float up[4];
            sum(at + (GLU == GLU_ALTERNATING ? 4 : GLU_RUN) * 4, bias_up, up);
            if constexpr (GLU == GLU_ALTERNATING) split_pairs(v, up);
            activate(v, up);
        } else if constexpr (ACTIVATES_SUMS) {
            activate(v, v);
        }
        float amax = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if constexpr (GATES_SUM) v[e] = __fmul_rn(v[e], prob);
            v[e] = column_exists ? v[e] : 0.0f;
            amax = max_nan_abs(amax, v[e]);
        }
        if (exists) highest = max_nan_abs(highest, amax);
        const bool stores = exists && column_exists;
        const long long out_row = tile.row + row;
        if constexpr (HAS_PLAIN) {
            constexpr int BYTES = OUT_TYPE == OUT_F32 ? 4 : 2;
            if (stores) store_plain(outputs.plain + out_row * outputs.plain_row + out * BYTES, v);
        }
        if constexpr (ROW_QUANT != QUANT_NONE) {
            constexpr int BLOCK_LANES = RowFormat::BLOCK / 4;
#pragma unroll
            for (int distance = 1; distance < BLOCK_LANES; distance *= 2)
                amax = max_nan_abs(amax, __shfl_xor_sync(0xffffffff, amax, distance));
            const RowFormat::Scale scale[1] = {format.scale(amax)};
            const float multiplier = format.multiplier(scale[0]);
            if (exists && lane % BLOCK_LANES == 0)
                store_row_scales<ROW_SCALES>(quant, place, tile.row + row, out / RowFormat::BLOCK, blocks,
                                             scale, 0);
            const uint32_t low = RowFormat::codes(__fmul_rn(v[0], multiplier), __fmul_rn(v[1], multiplier));
            const uint32_t high = RowFormat::codes(__fmul_rn(v[2], multiplier), __fmul_rn(v[3], multiplier));
            uint8_t* const codes =
                outputs.row_codes + out_row * outputs.row_codes_row + out * RowFormat::CODE_BITS / 8;
            if constexpr (RowFormat::CODE_BITS == 8) {
                if (stores) *reinterpret_cast<uint32_t*>(codes) = low | high << 16;
            } else {
                if (stores) *reinterpret_cast<uint16_t*>(codes) = static_cast<uint16_t>(low | high << 8);
            }
        }
        if constexpr (COLUMN_QUANT != QUANT_NONE) st_shared_v4_f32(at, v);
    }
    if constexpr (HAS_AMAX) {
        const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(highest));
        const uint32_t canonical = bits > 0x7F800000 ? 0x7FC00000 : bits;  // one NaN, above everything
        if (lane == 0) red_max_float(quant.amax + tile.group, __uint_as_float(canonical));
    }
}

// The columns of a piece, from its values: a warp has 32 of them and the rows that share a scale, a lane two columns and
// every other row.
__device__ __forceinline__ void quantize_columns(uint32_t staging, const DirectOutputs& outputs,
                                                 const Placement& place, const Tile& tile, int column,
                                                 int team_warp, int lane) {
    constexpr int BLOCK = ColumnFormat::BLOCK;
    constexpr int PARTS = PIECE_OUT / 32;
    const QuantOutputs& quant = outputs.quant;
    const ColumnFormat format = ColumnFormat::make(quant.constant + place.group * quant.constant_stride);
    const int half = lane / 16;
    for (int task = team_warp; task / PARTS * BLOCK < tile.rows; task += TEAM_WARPS) {
        const int first = task / PARTS * BLOCK;
        const int end = first + BLOCK < tile.rows ? first + BLOCK : tile.rows;
        const int in_piece = task % PARTS * 32 + lane % 16 * 2;
        const uint32_t at = staging + staged_column(in_piece) * 4;
        float amax[2] = {0.0f, 0.0f};
        for (int row = first + half; row < end; row += 2) {
            float v[2];
            ld_shared_v2_f32(at + row * (PITCH * 4), v[0], v[1]);
#pragma unroll
            for (int j = 0; j < 2; ++j) amax[j] = max_nan_abs(amax[j], v[j]);
        }
        ColumnFormat::Scale scale[2];
        float multiplier[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            amax[j] = max_nan_abs(amax[j], __shfl_xor_sync(0xffffffff, amax[j], 16));
            scale[j] = format.scale(amax[j]);
            multiplier[j] = format.multiplier(scale[j]);
        }
        const int out = column + in_piece;
        if (out >= quant.n_out) continue;  // a multiple of 2
        store_column_scale<COLUMN_SCALES, BLOCK>(quant, place, tile.row + first, out + half,
                                                 half == 0 ? scale[0] : scale[1]);
        for (int row = first + half; row < end; row += 2) {
            float v[2];
            ld_shared_v2_f32(at + row * (PITCH * 4), v[0], v[1]);
            uint8_t* const codes = outputs.column_codes + (tile.row + row) * outputs.column_codes_row + out;
            *reinterpret_cast<uint16_t*>(codes) = static_cast<uint16_t>(
                ColumnFormat::codes(__fmul_rn(v[0], multiplier[0]), __fmul_rn(v[1], multiplier[1])));
        }
    }
}

// Consumer warpgroup: everything that is asked for of its part of a tile. `staging` has PIECE_BYTES for every team.
__device__ __forceinline__ void store_quantized(const float (&d)[M64S_OF_WARPGROUP][BLOCK_M / 2],
                                                uint8_t (&staging)[NUM_TEAMS][PIECE_BYTES],
                                                const DirectOutputs& outputs, const Placement& place,
                                                const Tile& tile, int n, int warpgroup, int warp, int lane) {
    const int team = warpgroup / TEAM_WARPGROUPS, member = warpgroup % TEAM_WARPGROUPS;
    const int team_warp = member * 4 + warp;
    const uint32_t staged = shared_address(staging[team]);
#pragma unroll
    for (int u = 0; u < M64S_OF_WARPGROUP; u += PIECE_M64S) {
        const int first = (team * TEAM_WARPGROUPS * M64S_OF_WARPGROUP + u) * WGMMA_M;
        const int column = (tile.column + first) / OUT_PER_PRODUCT;
        if (column >= outputs.quant.n_out) continue;  // the same for the whole team
        bar_sync(1 + team, 32 * TEAM_WARPS);          // the last piece has been read
#pragma unroll
        for (int i = 0; i < PIECE_M64S; ++i)
            stage_sums(d[u + i], staged, (member * PIECE_M64S + i) * WGMMA_M, warp, lane);
        bar_sync(1 + team, 32 * TEAM_WARPS);
        finish_rows(staged, outputs, place, tile, n, column, team_warp, lane);
        if constexpr (COLUMN_QUANT != QUANT_NONE) {
            bar_sync(1 + team, 32 * TEAM_WARPS);
            quantize_columns(staged, outputs, place, tile, column, team_warp, lane);
        }
    }
}
