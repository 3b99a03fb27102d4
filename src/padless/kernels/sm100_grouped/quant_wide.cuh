// A tile whose output has FP8_BLOCK's blocks: 128 columns of a row, which are four chunks of a lane, or 128 rows of a
// column, which are the lanes of all four store warps. A block is known only when all of it has been seen, and 128 values
// a lane are more than its registers hold, so the sums are read twice, and made into values twice: for the maxima, and for
// the codes. The warps leave the maxima of their columns to each other in shared memory. Included by sm100_grouped/quant_store.cuh.
#pragma once

constexpr int WIDE_CHUNKS = WIDE / CHUNK;
static_assert(!WIDE_BLOCKS || OUT_COLUMNS % WIDE == 0, "a tile has whole blocks of a row");

// `turn` counts the blocks: the maxima have two buffers, so that one barrier a block is enough. Who writes one again has
// passed the barrier between, at which the others had read it.
template <class Row>
__device__ __forceinline__ void store_wide_blocks(SharedStorage& shared, const Problem& problem,
                                                  const WarpTile& t, float& highest, uint32_t& turn,
                                                  int warp) {
    const QuantTargets& targets = problem.targets;
    const QuantOutputs& outputs = targets.outputs;
    const Row row_format = Row::make(nullptr);
    const ColumnFormat column_format = ColumnFormat::make(nullptr);
    const int row = t.row + t.lane;
    for (int first = 0; first < OUT_CHUNKS; first += WIDE_CHUNKS, ++turn) {
        auto& maxima = shared.column_maxima[turn & 1];
        float amax = 0.0f, row_multiplier = 0.0f;
        // The chunks of a block twice: their maxima, then their codes.
#pragma unroll 1
        for (int step = 0; step < 2 * WIDE_CHUNKS; ++step) {
            const bool is_known = step >= WIDE_CHUNKS;
            const int of_block = step % WIDE_CHUNKS, i = first + of_block;
            const int column = t.out_column + t.chunk(i) * CHUNK;
            const bool exists = t.rows > 0 && column < outputs.n_out;
            if (step == WIDE_CHUNKS) {
                if constexpr (COLUMN_QUANT != QUANT_NONE) bar_sync(1, 32 * NUM_STORE_WARPS);
                highest = max_nan_abs(highest, amax);
                const typename Row::Scale scale = row_format.scale(amax);
                row_multiplier = row_format.multiplier(scale);
                const int block = (t.out_column + t.chunk(first) * CHUNK) / WIDE;
                if (ROW_QUANT != QUANT_NONE && t.has_row() && block * WIDE < outputs.n_out)
                    static_cast<typename Row::Scale*>(
                        outputs.row_scales)[row * outputs.row_scales_row + block * outputs.row_scales_block] =
                        scale;
            }
            float v[CHUNK];
            take_chunk(v, shared, problem, t, i, exists, is_known);
            if (!is_known) {
                if (exists) {
                    float of_chunk[1];
                    row_amax(v, of_chunk);
                    amax = max_nan_abs(amax, of_chunk[0]);
                }
                if constexpr (COLUMN_QUANT != QUANT_NONE)
                    maxima[warp][of_block][t.lane] = exists ? column_amax(v, t.lane) : 0.0f;
                continue;
            }
            if (!exists) continue;
            if constexpr (HAS_PLAIN) {
                if (t.has_row()) store_plain(targets, v, row, column);
            }
            if (ROW_QUANT != QUANT_NONE && t.has_row())
                store_codes<Row>(targets.row_codes + row * targets.row_pitch + column, v,
                                 outputs.n_out - column, [&](int) { return row_multiplier; });
            if constexpr (COLUMN_QUANT != QUANT_NONE) {
                float largest = 0.0f;
#pragma unroll
                for (int w = 0; w < NUM_STORE_WARPS; ++w)
                    largest = max_nan_abs(largest, maxima[w][of_block][t.lane]);
                const ColumnFormat::Scale scale = column_format.scale(largest);
                if (warp == 0 && column + t.lane < outputs.n_out)
                    store_column_scale<COLUMN_SCALES, ColumnFormat::BLOCK>(outputs, t.place, t.row,
                                                                           column + t.lane, scale);
                __syncwarp();
                store_column_codes(targets, column_format, v, scale, shared.column_multipliers[warp], t,
                                   column);
            }
        }
    }
}
