// The quantising store of sm90_fp8_grouped_gemm.cu and sm90_mxfp8_grouped_gemm.cu: included by them, after their shared
// memory and constants, in place of their plain stores. From a tile of float32 sums in registers to everything an Epilogue
// asks for:
//
//   sums -> alpha, bias, SwiGLU, prob -> values --+-> amax of the group
//                                                 +-> bf16 / fp16 / float32, staged and copied out
//                                                 +-> row scales, row codes
//                                                 +-> column scales, column codes
//
// Rows and columns that do not exist are in no maximum: a tile's last rows are computed from the next group's.

// Column 16 i of the tile is column product_column(..) of A B^T.
__device__ __forceinline__ int product_column(const Problem& problem, int column, int i) {
    if constexpr (GLU != GLU_CONCATENATED) return column + 16 * i;
    return column / 2 + 16 * (i % 4) + (i / 4) * (problem.n / 2);
}

// Where wgmma leaves the thread's value of row lane / 4 + 8 h, column 16 i + 4 (lane % 4) + e: the first copy of B's rows
// brought the first two of every four, the second the others; gate and up apart by two copies each.
__device__ __forceinline__ constexpr int accumulator(int i, int h, int e) {
    const int group = GATE_AND_UP_APART ? i / 4 * 8 + e / 2 * 4 + i % 4 : e / 2 * 8 + i;
    return group * 4 + h * 2 + e % 2;
}

// The values of one m64: float32, operation by operation as in epilogue.py.
__device__ __forceinline__ void finish_values(float (&v)[OUT_COLUMNS / 2], const float (&d)[BLOCK_N / 2],
                                              const Problem& problem, const QuantOutputs& outputs, int group,
                                              int row, int rows_left, int column, int lane) {
    const float alpha = HAS_ALPHA ? __ldg(outputs.alpha + group) : 1.0f;
    float prob[2] = {1.0f, 1.0f};
    if constexpr (HAS_PROB) {
#pragma unroll
        for (int h = 0; h < 2; ++h) prob[h] = 8 * h < rows_left ? __ldg(outputs.prob + row + 8 * h) : 0.0f;
    }
    uint32_t opaque = column;  // not to keep one m64's biases in registers for the next: that spills
    if constexpr (HAS_BIAS && WAVES == 2) pin_register(opaque);
    column = static_cast<int>(opaque);
    float x[BLOCK_N / 2];
#pragma unroll
    for (int i = 0; i < BLOCK_N / 16; ++i) {
        float bias[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if constexpr (HAS_BIAS) {
            const int at = product_column(problem, column, i) + lane % 4 * 4;
            if (at < problem.n) {
                const float2* const pairs = reinterpret_cast<const float2*>(
                    outputs.bias + static_cast<long long>(group) * problem.n + at);
                const float2 low = __ldg(pairs), high = __ldg(pairs + 1);
                bias[0] = low.x;
                bias[1] = low.y;
                bias[2] = high.x;
                bias[3] = high.y;
            }
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float& value = x[8 * i + 4 * h + e];
                value = d[accumulator(i, h, e)];
                if constexpr (GLU != GLU_NONE && !HAS_ALPHA && !HAS_BIAS)
                    pin_register(value);  // else the second m64's are copied once more
                value = with_alpha_and_bias(value, alpha, bias[e], prob[h]);
            }
        }
    }
    constexpr int TOGETHER = 8;  // of the sigmoids: more spill
#pragma unroll
    for (int first = 0; first < OUT_COLUMNS / 2; first += TOGETHER) {
        float value[TOGETHER];
        if constexpr (GLU == GLU_NONE) {
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) value[e] = x[first + e];
            if constexpr (ACTIVATES_SUMS) activate(value, value);
        } else {
            constexpr int RUN =
                GLU == GLU_INTERLEAVED ? 16 : 32;  // of gate, then of up, in values of a thread
            const int gate = first / RUN * 2 * RUN + first % RUN;
            float up[TOGETHER];
#pragma unroll
            for (int e = 0; e < TOGETHER; ++e) {
                value[e] = x[gate + e];
                up[e] = x[gate + RUN + e];
            }
            activate(value, up);
        }
#pragma unroll
        for (int e = 0; e < TOGETHER; ++e)
            v[first + e] = GATES_SUM ? __fmul_rn(value[e], prob[e / 4 % 2]) : value[e];
    }
    if constexpr (HAS_BIAS && WAVES == 2) {
#pragma unroll
        for (int i = 0; i < OUT_COLUMNS / 2; ++i) pin_register(v[i]);
    }
}

// FP8_BLOCK scales of a SwiGLU output cover the columns of both CTAs of a cluster: the two warps that hold the same rows
// swap their rows' maxima, 64 bytes an m64, each m64's as soon as they are known; the answers are awaited when the m64's
// row scales are made. The stores carry their own completion, as a copy does (st.async): a release and an acquire at cluster
// scope would cost a membar and an emptied L1 cache. Two buffers in turn, with a barrier to each m64: with its answer a
// warp says that it has read the one before, so that the other may write that buffer again.
struct RowSwap {
    uint32_t turn, rows, full;  // rows: two floats of this quad's rows to an m64
    int lane;

    RowSwap() = default;
    __device__ __forceinline__ RowSwap(QuantStorage& quant, int m64s, int warp_of_cta, int lane)
        : lane(lane) {
        turn = quant.swaps[warp_of_cta];
        rows = shared_address(&quant.peer_amax[turn % 2][warp_of_cta][lane / 4 * 2]);
        full = shared_address(&quant.peer_full[turn % 2][warp_of_cta][0]);
        __syncwarp();
        if (lane == 0) {
            quant.swaps[warp_of_cta] = turn + 1;
#pragma unroll
            for (int w = 0; w < WAVES; ++w) {  // the barrier of an m64 that is not there keeps step
                if (w < m64s)
                    mbarrier_arrive_expect_tx(full + w * 8, 64);
                else
                    mbarrier_arrive(full + w * 8);
                // What the other sent last has been read.
                mbarrier_arrive_cluster(full + w * 8, cluster_cta_rank() ^ 1);
            }
        }
    }
    __device__ __forceinline__ void send(int w, const float (&amax)[2][ROW_BLOCKS]) const {
        if (lane % 4 == 0)
            st_async_v2_f32(rows + w * 64, full + w * 8, cluster_cta_rank() ^ 1, amax[0][0], amax[1][0]);
    }
    __device__ __forceinline__ void wait(int w) const { mbarrier_wait(full + w * 8, turn / 2 % 2); }
    __device__ __forceinline__ void receive(int w, float (&amax)[2][ROW_BLOCKS]) const {
        float other[2];
        ld_shared_v2_f32(rows + w * 64, other[0], other[1]);
#pragma unroll
        for (int h = 0; h < 2; ++h) amax[h][0] = max_nan_abs(amax[h][0], other[h]);
    }
};

// Where a warpgroup stages its m64 w. Not by the rows that it has: these change from tile to tile, and the other warpgroup
// may still be writing out what lay there.
__device__ __forceinline__ int slot_of(int warpgroup, int w) {
    return w * NUM_MMA_WARPGROUPS + warpgroup;
}

// From the slabs of a warpgroup's first m64 to those of m64 w.
constexpr int m64_further(int w) {
    return w * NUM_MMA_WARPGROUPS * M64_D_BYTES;
}

// How much of an m64 exists, counted from the thread's first row and first column.
struct Extent {
    int rows, columns;

    __device__ __forceinline__ Extent(const QuantOutputs& outputs, const Tile& tile, int m64, int out_column,
                                      int warp, int lane) {
        rows = tile.rows - (m64 * WGMMA_M + warp * 16 + lane / 4);
        columns = outputs.n_out - out_column - lane % 4 * 4;
    }
};

// The maxima of the blocks of M64S m64s, and with them the largest magnitude of the thread's own that exist.
// `extent`: of the first of them.
template <int M64S>
__device__ __forceinline__ void find_row_amax(const float (*v)[OUT_COLUMNS / 2], const Extent& extent,
                                              float (*amax)[2][ROW_BLOCKS], float& highest) {
    row_block_amax<OUT_COLUMNS, ROW_BLOCK, M64S>(v, amax, extent.columns);
#pragma unroll
    for (int u = 0; u < M64S; ++u) {
        if constexpr (ROW_QUANT != QUANT_NONE) quad_amax(amax[u]);
#pragma unroll
        for (int i = 0; i < 2 * ROW_BLOCKS; ++i) {
            const int h = i / ROW_BLOCKS;
            if (u * M64_STEP * WGMMA_M + 8 * h < extent.rows)
                highest = max_nan_abs(highest, amax[u][h][i % ROW_BLOCKS]);
        }
    }
}

// Where the row scales of a thread's rows go. FP8_BLOCK has one to a row of the tile, a float at a stride: the address is
// found once, and the other rows' are a multiple of the stride away.
struct RowScales {
    const QuantOutputs& outputs;
    const Placement& place;
    int row, first, blocks,
        part;            // the thread's first row in the tile; first block of the tile, and all there are
    int tile_row, rows;  // rows from the thread's first on that this thread stores scales of
    float* at;

    __device__ __forceinline__ RowScales(const QuantOutputs& outputs, const Placement& place,
                                         const Tile& tile, int out_column, int first_m64, int warp, int lane)
        : outputs(outputs), place(place) {
        row = first_m64 * WGMMA_M + warp * 16 + lane / 4;
        first = out_column / RowFormat::BLOCK;
        blocks = (outputs.n_out + RowFormat::BLOCK - 1) / RowFormat::BLOCK;
        part = lane % 4;
        tile_row = tile.row;
        rows = SWAPS_ROW_AMAX && cluster_cta_rank() != 0 ? 0 : tile.rows - row;
        if constexpr (ROW_QUANT == QUANT_FP8_BLOCK) {
            const bool is_stored = part == 0 & out_column < outputs.n_out;
            rows = is_stored ? rows : 0;  // no branch: loads are not moved across one
            at = static_cast<float*>(outputs.row_scales) + (tile_row + row) * outputs.row_scales_row +
                 first * outputs.row_scales_block;
        }
    }
    // `below`: rows below the thread's first.
    __device__ __forceinline__ void store(int below, const RowFormat::Scale (&scales)[ROW_BLOCKS]) const {
        if (below >= rows) return;
        if constexpr (ROW_QUANT == QUANT_FP8_BLOCK)
            at[below * outputs.row_scales_row] = scales[0];
        else
            store_row_scales<ROW_SCALES>(outputs, place, tile_row + row + below, first, blocks, scales, part);
    }
};

// Row maxima are found while the lanes' column maxima are on their way to shared memory: of all m64s at once.
constexpr bool ROW_AMAX_EARLY =
    LANES_LEAVE_MAXIMA && ROW_QUANT != QUANT_NONE && !SWAPS_ROW_AMAX && ROW_BLOCKS == 1;

// Row scales and row codes of m64s FIRST .. LAST - 1 of the warp. The maxima are there already where they had to be
// swapped, or ROW_AMAX_EARLY; else they are found here, m64 by m64: those of narrow blocks are too many to be kept.
template <int FIRST, int LAST>
__device__ __forceinline__ void quantize_rows(const float (&v)[WAVES][OUT_COLUMNS / 2],
                                              float (&amax)[WAVES][2][ROW_BLOCKS], float& highest,
                                              const QuantOutputs& outputs, const RowScales& scales,
                                              const RowSwap& swap, const Tile& tile, int out_column,
                                              int first, uint32_t place_of_code, int warp, int lane) {
    const Placement& place = scales.place;
    const RowFormat format = RowFormat::make(outputs.constant + place.group * outputs.constant_stride);
#pragma unroll
    for (int w = FIRST; w < LAST; ++w) {
        const int m64 = w * M64_STEP + first;
        if constexpr (SWAPS_ROW_AMAX) {
            swap.wait(w);
            swap.receive(w, amax[w]);
        } else if (!ROW_AMAX_EARLY) {
            find_row_amax<1>(v + w, Extent(outputs, tile, m64, out_column, warp, lane), amax + w, highest);
        }
        float multiplier[2][ROW_BLOCKS];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            RowFormat::Scale scale[ROW_BLOCKS];
#pragma unroll
            for (int b = 0; b < ROW_BLOCKS; ++b) {
                scale[b] = format.scale(amax[w][h][b]);
                multiplier[h][b] = format.multiplier(scale[b]);
            }
            scales.store(w * M64_STEP * WGMMA_M + h * 8, scale);
        }
        stage_codes<OUT_COLUMNS, RowFormat>(
            v[w], place_of_code, m64_further(w) + PLAIN_BYTES,
            [&](int h, int i, int) { return multiplier[h][i * 16 / ROW_BLOCK]; });
    }
}

// A run of 128 rows that lies in both warpgroups, an m64 in each: the first makes the scales, and the two meet twice, when
// maxima are written and when multipliers are; then maxima may be written again. They meet in the same two places of the
// code where a warpgroup otherwise meets alone: one barrier.sync at different instructions would be an error to synccheck,
// and where the second only arrived (bar.arrive), racecheck lost the order of what came next. Any other run lies in one
// warpgroup, whose own barrier is enough: the other may be in another tile.
constexpr int BOTH_BARRIER = 4;

// The columns whose scales a thread of a warpgroup makes. The compiler knows how many they are: it mixes the straight line
// that they become with the codes of rows, which hides the latency of a scale.
constexpr int COLUMN_TURNS = (RUNS * OUT_COLUMNS + 127) / 128;
template <int NUM_WAVES, class Use>
__device__ __forceinline__ void for_columns(Use use) {  // use(turn, run, column)
    constexpr int EXISTING = (RUNS_EXCEED_M64S ? 1 : RUNS / WAVES * NUM_WAVES) * OUT_COLUMNS;
#pragma unroll
    for (int turn = 0; turn < (EXISTING + 127) / 128; ++turn) {
        const uint32_t at = turn * 128 + threadIdx.x % 128;
        if (EXISTING % 128 == 0 || at < EXISTING) use(turn, at / OUT_COLUMNS, at % OUT_COLUMNS);
    }
}

// Where the lanes of a warp leave their column maxima: see LANES_LEAVE_MAXIMA.
__device__ __forceinline__ uint8_t* maxima_of_warp(SharedStorage& shared, int warpgroup, int warp) {
    return shared.d[slot_of(warpgroup, warp / 2)] + PLAIN_BYTES + ROW_CODE_BYTES +
           warp % 2 * WARP_MAXIMA_BYTES;
}

// Column maxima of a warpgroup's warps, raising `highest`: as integers, where NaN is above every number.
template <int NUM_WAVES>
__device__ __forceinline__ void read_column_maxima(int (&highest)[COLUMN_TURNS], SharedStorage& shared,
                                                   int warpgroup) {
    for_columns<NUM_WAVES>([&](int turn, int run, int column) {
        if constexpr (LANES_LEAVE_MAXIMA) {
#pragma unroll
            for (int i = 0; i < 4 * 8; ++i) {
                const uint8_t* const at =
                    maxima_of_warp(shared, warpgroup, i / 8) + maximum_of_quad<OUT_COLUMNS>(i % 8, column);
                highest[turn] = max(highest[turn], *reinterpret_cast<const int*>(at));
            }
        } else {
#pragma unroll
            for (int i = 0; i < MAXIMA_OF_RUN; ++i) {
                const float amax = shared.quant.columns[warpgroup].amax[run * MAXIMA_OF_RUN + i][column];
                highest[turn] = max(highest[turn], __float_as_int(amax));
            }
        }
    });
}

// From column maxima to scales and, in shared memory, multipliers: with `spans` for both warpgroups.
template <int NUM_WAVES>
__device__ __forceinline__ void scale_columns(const int (&highest)[COLUMN_TURNS], QuantStorage& quant,
                                              const QuantOutputs& outputs, const Placement& place,
                                              const Tile& tile, int out_column, int first, bool spans,
                                              int warpgroup) {
    const ColumnFormat format = ColumnFormat::make(outputs.constant + place.group * outputs.constant_stride);
    for_columns<NUM_WAVES>([&](int turn, int run, int column) {
        const ColumnFormat::Scale scale = format.scale(__int_as_float(highest[turn]));
        const float multiplier = format.multiplier(scale);
        quant.columns[warpgroup].multiplier[run][column] = multiplier;
        if (spans) quant.columns[1].multiplier[run][column] = multiplier;
        const int row = first * WGMMA_M + run * ColumnFormat::BLOCK;
        if ((RUNS_EXCEED_M64S || row < tile.rows) && out_column + column < outputs.n_out)
            store_column_scale<COLUMN_SCALES, ColumnFormat::BLOCK>(outputs, place, tile.row + row,
                                                                   out_column + column, scale);
    });
}

// Consumer: quantises and writes the rows of d that exist.
template <int NUM_WAVES>
__device__ __forceinline__ void store_tile(const float (&d)[WAVES][BLOCK_N / 2], SharedStorage& shared,
                                           const Problem& problem, const StoreMaps& outputs, const Tile& tile,
                                           int column, int warpgroup, int warp, int lane) {
    // Not to keep addresses in registers through the products: the MXFP8 kernel would spill them.
    uint32_t opaque_lane = lane, opaque_column = column;
    pin_register(opaque_lane);
    pin_register(opaque_column);
    lane = opaque_lane;
    column = opaque_column;
    const bool issuer = warp == 0 && lane == 0;
    const int first = WAVES == 1 ? warpgroup : first_m64(warpgroup, tile.rows);
    const bool spans = RUNS_EXCEED_M64S && NUM_WAVES == 1 && m64s_of(tile.rows) == 2;
    const bool is_second = spans && warpgroup == 1;
    const int out_column = GLU == GLU_NONE ? column : column / 2;
    const Placement place = shared.quant.placement(shared.groups.sorted.ends, tile.group);
    float v[WAVES][OUT_COLUMNS / 2], row_amax[WAVES][2][ROW_BLOCKS];
    const RowSwap swap =
        SWAPS_ROW_AMAX ? RowSwap(shared.quant, NUM_WAVES, warpgroup * 4 + warp, lane) : RowSwap();
    // The last tile's store has left the slabs long ago. Asked here, before values are finished: it is a branch, and between
    // values the compiler would spill some. Others may write to the slabs behind the next barrier.
    if (issuer) cp_async_bulk_wait_group_read_all();
    float highest = 0.0f;
#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
        const Extent extent(outputs, tile, w * M64_STEP + first, out_column, warp, lane);
        finish_values(v[w], d[w], problem, outputs, tile.group, tile.row + tile.rows - extent.rows,
                      extent.rows, column, lane);
        if constexpr (SWAPS_ROW_AMAX || (HAS_AMAX && ROW_QUANT == QUANT_NONE))
            find_row_amax<1>(v + w, extent, row_amax + w, highest);
        if constexpr (SWAPS_ROW_AMAX) swap.send(w, row_amax[w]);
    }
    const uint32_t barrier = spans ? BOTH_BARRIER : 1 + warpgroup, threads = spans ? 256 : 128;
    if constexpr (LANES_LEAVE_MAXIMA) {
        bar_sync(1 + warpgroup, 128);  // the slabs are free
        const Extent last(outputs, tile, first + NUM_WAVES - 1, out_column, warp, lane);
        leave_column_amax<OUT_COLUMNS, NUM_WAVES>(v, shared_address(maxima_of_warp(shared, warpgroup, warp)),
                                                  last.rows, lane);
    } else {
        if constexpr (COLUMN_QUANT != QUANT_NONE) {
#pragma unroll
            for (int w = 0; w < NUM_WAVES; ++w) {
                const Extent extent(outputs, tile, first + w, out_column, warp, lane);
                float* const amax = shared.quant.columns[warpgroup].amax[w * 4 + warp];
                column_amax<OUT_COLUMNS>(v[w], shared_address(amax), extent.rows, lane);
            }
        }
    }
    if constexpr (ROW_AMAX_EARLY)
        find_row_amax<NUM_WAVES>(v, Extent(outputs, tile, first, out_column, warp, lane), row_amax, highest);
    const RowScales row_scales(outputs, place, tile, out_column, first, warp, lane);
    bar_sync(barrier, threads);  // the slabs are free, and column maxima are there
#pragma unroll
    for (int w = 0; w < NUM_WAVES; ++w) {
        if constexpr (HAS_PLAIN)
            stage_values<OUT_COLUMNS, OUT_TYPE>(v[w], shared_address(shared.d[slot_of(warpgroup, w)]), warp,
                                                lane);
    }
    int column_highest[COLUMN_TURNS] = {};
    if constexpr (COLUMN_QUANT != QUANT_NONE) {  // here: loads are not moved before the stores of codes
        if (!is_second) read_column_maxima<NUM_WAVES>(column_highest, shared, warpgroup);
        if (spans && !is_second) read_column_maxima<NUM_WAVES>(column_highest, shared, 1);
    }
    // In registers: four addresses serve every slab.
    const uint32_t slabs = shared_address(shared.d[slot_of(warpgroup, 0)]);
    uint32_t column_place = place_of_codes<OUT_COLUMNS, ColumnFormat>(slabs, warp, lane);
    pin_register(column_place);
    const uint32_t row_place =
        RowFormat::CODE_BITS == 8 ? column_place : place_of_codes<OUT_COLUMNS, RowFormat>(slabs, warp, lane);
    if constexpr (ROW_QUANT != QUANT_NONE)
        quantize_rows<0, 1>(v, row_amax, highest, outputs, row_scales, swap, tile, out_column, first,
                            row_place, warp, lane);
    if constexpr (COLUMN_QUANT != QUANT_NONE) {
        if (!is_second)
            scale_columns<NUM_WAVES>(column_highest, shared.quant, outputs, place, tile, out_column, first,
                                     spans, warpgroup);
    }
    if constexpr (ROW_QUANT != QUANT_NONE)
        quantize_rows<1, NUM_WAVES>(v, row_amax, highest, outputs, row_scales, swap, tile, out_column, first,
                                    row_place, warp, lane);
    if constexpr (SWAPS_ROW_AMAX) {
#pragma unroll
        for (int w = NUM_WAVES; w < WAVES; ++w) swap.wait(w);
    }
    if constexpr (HAS_AMAX) {
        const uint32_t bits = __reduce_max_sync(0xffffffff, __float_as_uint(highest));
        const uint32_t canonical = bits > 0x7F800000 ? 0x7FC00000 : bits;  // one NaN, above everything
        if (lane == 0) red_max_float(outputs.amax + tile.group, __uint_as_float(canonical));
    }
    if constexpr (COLUMN_QUANT != QUANT_NONE) {
        bar_sync(barrier, threads);
        float multiplier[OUT_COLUMNS / 16][4];  // of the thread's columns in the m64's run
#pragma unroll
        for (int w = 0; w < NUM_WAVES; ++w) {
            if (w % M64S_OF_RUN == 0) {
                const int run = (w * WGMMA_M + warp * 16) / ColumnFormat::BLOCK;
                const uint32_t at = shared_address(shared.quant.columns[warpgroup].multiplier[run]);
#pragma unroll
                for (int i = 0; i < OUT_COLUMNS / 16; ++i)
                    ld_shared_v4_f32(at + (16 * i + lane % 4 * 4) * 4, multiplier[i]);
            }
            stage_codes<OUT_COLUMNS, ColumnFormat>(v[w], column_place,
                                                   m64_further(w) + PLAIN_BYTES + ROW_CODE_BYTES,
                                                   [&](int, int i, int e) { return multiplier[i][e]; });
        }
    }
    fence_proxy_async_shared();
    bar_sync(1 + warpgroup, 128);
    if (issuer && out_column < outputs.n_out) {
#pragma unroll
        for (int w = 0; w < NUM_WAVES; ++w) {
            const int m64 = w * M64_STEP + first;
            const int left = tile.rows - m64 * WGMMA_M;
            const int row = tile.row + m64 * WGMMA_M;
            const int end = row + (left < WGMMA_M ? left : WGMMA_M);
            const uint32_t slabs = shared_address(shared.d[slot_of(warpgroup, w)]);
            if constexpr (HAS_PLAIN) {
                for (int c = 0; c < OUT_COLUMNS && out_column + c < outputs.n_out; c += SLAB_COLUMNS)
                    store_slab_ragged(outputs.plain, slabs + c / SLAB_COLUMNS * SLAB_BYTES, out_column + c,
                                      row, end);
            }
            if constexpr (ROW_QUANT != QUANT_NONE)
                store_slab_ragged(outputs.row_codes, slabs + PLAIN_BYTES,
                                  out_column * RowFormat::CODE_BITS / 8, row, end);
            if constexpr (COLUMN_QUANT != QUANT_NONE)
                store_slab_ragged(outputs.column_codes, slabs + PLAIN_BYTES + ROW_CODE_BYTES, out_column, row,
                                  end);
        }
        cp_async_bulk_commit_group();
    }
}
