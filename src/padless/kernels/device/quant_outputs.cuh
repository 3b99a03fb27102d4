// What a quantising epilogue is given and where its scales go: the kernel argument QuantOutputs and the addresses of the
// scales of a row or a column. Nothing here knows which thread holds what. See epilogue.py for the arithmetic.
#pragma once

#include "device/scale_layouts.cuh"

// The host defines, from the Epilogue: HAS_PLAIN, HAS_ALPHA, HAS_BIAS, HAS_PROB, HAS_AMAX, BIAS_IS_GATED, GLU, ROW_QUANT, COLUMN_QUANT,
// MX_RULE, ROW_SCALES, COLUMN_SCALES.
constexpr int GLU_NONE = 0;
constexpr int GLU_INTERLEAVED = 1;   // 32 columns of gate, 32 of up, 32 of gate, ..
constexpr int GLU_CONCATENATED = 2;  // gate in the first N / 2 columns, up in the others
constexpr int GLU_ALTERNATING = 3;   // a column of gate, one of up, ..

constexpr bool BIAS_GATED_BY_PROB = BIAS_IS_GATED && HAS_BIAS && HAS_PROB;
constexpr bool GATES_SUM = HAS_PROB && !BIAS_GATED_BY_PROB;

// The sum of an element behind steps 1 and 2 of epilogue.py.
__device__ __forceinline__ float with_alpha_and_bias(float sum, float alpha, float bias, float prob) {
    if constexpr (!HAS_BIAS) return HAS_ALPHA ? __fmul_rn(sum, alpha) : sum;
    const float addend = BIAS_GATED_BY_PROB ? __fmul_rn(bias, prob) : bias;
    return HAS_ALPHA ? __fmaf_rn(sum, alpha, addend) : __fadd_rn(sum, addend);
}

constexpr int SCALES_STRIDED = 0;  // element (row, block) at row * row_stride + block * block_stride

// Whether scales of rows or columns lie on 128-row tiles of their group, so that a group's first one has to be known.
constexpr bool HAS_GROUP_TILES = COLUMN_QUANT != QUANT_NONE || ROW_SCALES == SCALES_BLOCKED_GROUPS;

// A kernel argument: tensor maps of the outputs that were asked for, and pointers, null where not.
struct QuantOutputs {
    TensorMap plain, row_codes, column_codes;
    const float* alpha;     // (G)
    const float* bias;      // (G, N)
    const float* prob;      // (M)
    float* amax;            // (G)
    const float* constant;  // norm_const (1), or NVFP4's global scales, (1) or (G)
    void* row_scales;
    void* column_scales;
    long long row_scales_row;  // elements, for SCALES_STRIDED
    long long row_scales_block;
    int n_out;            // columns of the output
    int column_tiles;     // tiles of 128 rows that the column scales have room for
    int constant_stride;  // from one group's constant to the next, 0 when there is one
};

// First 128-row tile of every group, if each group starts on a tile of its own: tiles[g] = sum over h < g of
// ceil(rows of h / 128). One warp; `ends` are cleaned cumulative ends by group number.
__device__ __forceinline__ void count_row_tiles(const int* ends, int num_groups, int* tiles, int lane) {
    int before = 0;
    for (int base = 0; base < num_groups; base += 32) {
        const int g = base + lane;
        const int own = g < num_groups ? (ends[g] - (g == 0 ? 0 : ends[g - 1]) + 127) / 128 : 0;
        int sum = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffff, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (g < num_groups) tiles[g] = before + sum - own;
        before += __shfl_sync(0xffffffff, sum, 31);
    }
}

// Offset of scale (row, column) in 32x4x4 tiles, `tile_columns` tiles wide. Example: (129, 5) with two tiles a row:
// (1 * 2 + 1) * 512 + 1 * 16 + 0 * 4 + 1 = 1553.
__device__ __forceinline__ long long blocked_offset(int row, int column, int tile_columns) {
    const long long tile = static_cast<long long>(row / 128) * tile_columns + column / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}

// Where a tile lies in its group.
struct Placement {
    int group;
    int group_start, group_rows;
    int group_tile;  // first 128-row tile of the group
};

// Writes the scales of one row: COUNT neighbours, from block `first` (a multiple of COUNT) on, of `blocks` that exist.
// The four lanes that share the row call it together, `part` 0 .. 3 each. Scales past the last block are stored as zero
// where the layout has room for them.
template <int LAYOUT, int COUNT, class Scale>
__device__ __forceinline__ void store_row_scales(const QuantOutputs& outputs, const Placement& place, int row,
                                                 int first, int blocks, const Scale (&scales)[COUNT],
                                                 int part) {
    if constexpr (LAYOUT == SCALES_STRIDED) {
#pragma unroll
        for (int b = 0; b < COUNT; ++b) {
            const long long at = row * outputs.row_scales_row + (first + b) * outputs.row_scales_block;
            if (part == b % 4 && first + b < blocks) static_cast<Scale*>(outputs.row_scales)[at] = scales[b];
        }
    } else {
        static_assert(sizeof(Scale) == 1, "the 32x4x4 layout is of bytes");
        constexpr int TOGETHER = COUNT < 4 ? COUNT : 4;  // neighbours inside one tile
        const int tiled_row =
            LAYOUT == SCALES_BLOCKED ? row : place.group_tile * 128 + row - place.group_start;
        const int tile_columns = (blocks + 3) / 4;
        uint8_t* const base = static_cast<uint8_t*>(outputs.row_scales);
#pragma unroll
        for (int b = 0; b < COUNT; b += TOGETHER) {
            uint32_t word = 0;
#pragma unroll
            for (int i = 0; i < TOGETHER; ++i)
                word |= first + b + i < blocks ? static_cast<uint32_t>(scales[b + i]) << 8 * i : 0;
            if (part != b / TOGETHER % 4 || (first + b) / 4 >= tile_columns) continue;
            uint8_t* const at = base + blocked_offset(tiled_row, first + b, tile_columns);
            if constexpr (TOGETHER == 4)
                *reinterpret_cast<uint32_t*>(at) = word;
            else if constexpr (TOGETHER == 2)
                *reinterpret_cast<uint16_t*>(at) = static_cast<uint16_t>(word);
            else
                *at = static_cast<uint8_t>(word);
        }
    }
}

// Writes the scale of one column of the output over a run of BLOCK rows that starts at `row`, a multiple of BLOCK from
// the start of the group. Every group starts on a tile of 128 rows of its own.
template <int LAYOUT, int BLOCK, class Scale>
__device__ __forceinline__ void store_column_scale(const QuantOutputs& outputs, const Placement& place,
                                                   int row, int column, Scale scale) {
    const int in_group = (row - place.group_start) / BLOCK;
    const int block = place.group_tile * (128 / BLOCK) + in_group;
    Scale* const base = static_cast<Scale*>(outputs.column_scales);
    if constexpr (LAYOUT == SCALES_STRIDED) {
        if (block < outputs.column_tiles * (128 / BLOCK))
            base[static_cast<long long>(block) * outputs.n_out + column] = scale;
    } else {  // scales of the transposed output: a row of them to a column of it
        static_assert(sizeof(Scale) == 1 && BLOCK == 32, "the 32x4x4 layout is of bytes");
        const long long row_tiles = (outputs.n_out + 127) / 128;
        const bool by_group = LAYOUT == SCALES_BLOCKED_GROUPS;
        const long long at = by_group ? place.group_tile * row_tiles * 512 +
                                            blocked_offset(column, in_group, (place.group_rows + 127) / 128)
                                      : blocked_offset(column, block, outputs.column_tiles);
        if (block < outputs.column_tiles * 4 && at < outputs.column_tiles * row_tiles * 512) base[at] = scale;
    }
}
