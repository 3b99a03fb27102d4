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
// is exchanged but the columns' maxima. Codes leave from the registers, 32 bytes of a row at a time. FP8_BLOCK's blocks are
// wider than that: sm100_grouped/quant_wide.cuh.
#pragma once

#include "sm100_grouped/quant_values.cuh"

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

__device__ __forceinline__ void store_plain(const QuantTargets& targets, const float (&v)[CHUNK], int row,
                                            int column) {
    uint32_t bits[CHUNK];
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) bits[j] = __float_as_uint(v[j]);
    store_run<OUT, false, false, WIDE_STORES>(targets.plain, row, column, targets.outputs.n_out - column,
                                              bits, 1.0f);
}

// WORD_SCALES neighbouring scales of one row from block `first` on, of `blocks` that exist; those past the last are zero.
template <int WORD_SCALES>
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

// Column codes of 32 columns of the warp's 32 rows; `scale`: of column `lane` of them.
__device__ __forceinline__ void store_column_codes(const QuantTargets& targets, const ColumnFormat& format,
                                                   const float (&v)[CHUNK], ColumnFormat::Scale scale,
                                                   float (&multipliers)[CHUNK], const WarpTile& t,
                                                   int column) {
    multipliers[t.lane] = format.multiplier(scale);
    __syncwarp();
    float multiplier[CHUNK];
#pragma unroll
    for (int i = 0; i < CHUNK; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(&multipliers[i]);
        multiplier[i] = four.x, multiplier[i + 1] = four.y;
        multiplier[i + 2] = four.z, multiplier[i + 3] = four.w;
    }
    if (t.has_row())
        store_codes<ColumnFormat>(targets.column_codes + (t.row + t.lane) * targets.column_pitch + column, v,
                                  targets.outputs.n_out - column, [&](int i) { return multiplier[i]; });
}

#include "sm100_grouped/quant_wide.cuh"

// Scales of a row that one lane makes of a chunk, and that it stores together: four, or as many as a tile has.
constexpr int CHUNK_SCALES = CHUNK < RowFormat::BLOCK ? 1 : CHUNK / RowFormat::BLOCK;
constexpr int WORD_SCALES = OUT_COLUMNS / RowFormat::BLOCK < 4 ? OUT_COLUMNS / RowFormat::BLOCK : 4;
constexpr int WORD_CHUNKS = WORD_SCALES / CHUNK_SCALES;

// A tile whose blocks are inside 32 x 32, chunk after chunk.
template <class Row>
__device__ __forceinline__ void store_chunks(SharedStorage& shared, const Problem& problem, const WarpTile& t,
                                             float& highest, int warp) {
    const QuantTargets& targets = problem.targets;
    const QuantOutputs& outputs = targets.outputs;
    const int blocks = (outputs.n_out + Row::BLOCK - 1) / Row::BLOCK;
    const float* const constant = outputs.constant + t.place.group * outputs.constant_stride;
    const Row row_format = Row::make(constant);
    const ColumnFormat column_format = ColumnFormat::make(constant);
    const int row = t.row + t.lane;
    uint32_t word = 0;
    for (int i = 0; i < OUT_CHUNKS; ++i) {
        const int chunk = t.chunk(i);
        const int column = t.out_column + chunk * CHUNK;
        const bool exists = t.rows > 0 && column < outputs.n_out;
        float v[CHUNK];
        take_chunk(v, shared, problem, t, i, exists, true);
        if (exists) {
            const int limit = outputs.n_out - column;
            if constexpr (HAS_PLAIN) {
                if (t.has_row()) store_plain(targets, v, row, column);
            }
            if constexpr (ROW_QUANT != QUANT_NONE || HAS_AMAX) {
                float amax[CHUNK_SCALES];
                row_amax(v, amax);
                float multiplier[CHUNK_SCALES];
#pragma unroll
                for (int b = 0; b < CHUNK_SCALES; ++b) {
                    highest = max_nan_abs(highest, amax[b]);
                    const typename Row::Scale scale = row_format.scale(amax[b]);
                    multiplier[b] = row_format.multiplier(scale);
                    if (b * Row::BLOCK < limit)
                        word |= static_cast<uint32_t>(scale) << 8 * (chunk % WORD_CHUNKS * CHUNK_SCALES + b);
                }
                if (ROW_QUANT != QUANT_NONE && t.has_row())
                    store_codes<Row>(
                        targets.row_codes + row * targets.row_pitch + column * Row::CODE_BITS / 8, v, limit,
                        [&](int j) { return multiplier[j / Row::BLOCK]; });
            }
            if constexpr (COLUMN_QUANT != QUANT_NONE) {
                const ColumnFormat::Scale scale = column_format.scale(column_amax(v, t.lane));
                if (column + t.lane < outputs.n_out)
                    store_column_scale<COLUMN_SCALES, ColumnFormat::BLOCK>(outputs, t.place, t.row,
                                                                           column + t.lane, scale);
                __syncwarp();
                store_column_codes(targets, column_format, v, scale, shared.column_multipliers[warp], t,
                                   column);
            }
        }
        if constexpr (ROW_QUANT != QUANT_NONE) {
            if (i % WORD_CHUNKS == WORD_CHUNKS - 1) {
                const int of_word = t.out_column + chunk / WORD_CHUNKS * WORD_CHUNKS * CHUNK;
                if (t.has_row() && of_word < outputs.n_out)
                    store_row_word<WORD_SCALES>(outputs, t.place, row, of_word / Row::BLOCK, blocks, word);
                word = 0;
            }
        }
    }
}

template <bool WIDE>
__device__ __forceinline__ void store_tile(SharedStorage& shared, const Problem& problem, const WarpTile& t,
                                           float& highest, uint32_t& turn, int warp) {
    if constexpr (WIDE)
        store_wide_blocks<RowFormat>(shared, problem, t, highest, turn, warp);
    else
        store_chunks<RowFormat>(shared, problem, t, highest, warp);
}

// A store warp: its 32 lanes of every tile.
__device__ __forceinline__ void store_tiles(SharedStorage& shared, const Problem& problem,
                                            uint32_t tensor_memory, int promoter, int warp, int lane) {
    const Operands& operands = problem.operands;
    const QuantOutputs& outputs = problem.targets.outputs;
    Reader reader(shared.queue);
    Pipeline<ACCUMULATORS> accumulator;
    uint32_t turn = 0;
    Tile tile{};
    while (reader.next(tile, lane)) {
        if constexpr (PROMOTES) {
            promote_next(shared, problem, reader, tile, tensor_memory, promoter, warp, lane, accumulator);
            if (PROMOTERS > 1 && meet_promoters(promoter)) {  // the first warpgroup stores the sums of both
                if (lane == 0) reader.release();
                reader.advance();
                continue;
            }
        }
        const int group = tile.group;
        const int start = group == 0 ? 0 : shared.groups.sorted.ends[group - 1];
        const int first = pair_rank() * LANE_ROWS + warp * 32;
        const int row = tile.row + first;
        const Placement place{group, start, shared.groups.sorted.ends[group] - start,
                              (shared.scale_shifts[group] + start) / 128};
        const int sums = sums_stage(accumulator);
        const RowFactors factors{
            operands.global_a.of(group) * operands.global_b.of(group),
            HAS_ALPHA ? __ldg(outputs.alpha + group) : 1.0f,
            HAS_PROB && first + lane < tile.rows ? __ldg(outputs.prob + row + lane) : 1.0f};
        const WarpTile t{place,
                         factors,
                         outputs.bias + static_cast<long long>(group) * operands.n,
                         tensor_memory + sums * SECOND_ACCUMULATOR + (warp * 32 << 16),
                         row,
                         tile.rows - first,
                         GLU == GLU_NONE ? tile.column : tile.column / 2,
                         sums,
                         lane};
        float highest = 0.0f;

        await_sums(shared, accumulator);
        store_tile<WIDE_BLOCKS>(shared, problem, t, highest, turn, warp);
        __syncwarp();
        if constexpr (HAS_AMAX) {
            const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(highest));
            const uint32_t canonical = bits > 0x7F800000 ? 0x7FC00000 : bits;  // one NaN, above everything
            if (lane == 0 && t.rows > 0) red_max_float(outputs.amax + group, __uint_as_float(canonical));
        }
        if constexpr (!PROMOTES) accumulator.advance();
        if (lane == 0) reader.release();
        reader.advance();
    }
}
