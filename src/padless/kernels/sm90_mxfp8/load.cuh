// The producer of sm90_mxfp8_grouped_gemm.cu: one thread loads A and B, and two warps write the scales of a stage.
#pragma once

// Producer, one thread.
__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const TensorMap& map_a, const TensorMap& map_b) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    while (reader.next(tile)) {
        const int m64s = m64s_of(tile.rows);
        const uint32_t stage_bytes = m64s * row_box(problem.m) * BLOCK_K + B_BYTES;
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, stage_bytes);
            const uint32_t b = shared_address(shared.b[stage]);
            if constexpr (COLUMNS_ARE_INTERLEAVED) {
#pragma unroll
                for (int c = 0; c < B_COPIES; ++c)
                    tma_load_4d(map_b, b + c * (B_BYTES / B_COPIES), full, kb * BLOCK_K, c % 2 * 2,
                                first_weight_row(problem, tile.column, c) / 4, tile.group);
            } else {
                tma_load_3d(map_b, b, full, kb * BLOCK_K, tile.column, tile.group);
            }
            for (int u = 0; u < m64s; ++u)
                tma_load_2d(map_a, shared_address(shared.a[stage] + u * M64_BYTES), full, kb * BLOCK_K,
                            tile.row + u * WGMMA_M);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}

// Scale warp: fills its part of every stage, with the four scales of rows lane, lane + 32 .. of the tile (OF_A) or of
// columns lane, lane + 32 .. of it. Those of the next stage are on their way while these are written.
template <bool OF_A>
__device__ __forceinline__ void write_scales(SharedStorage& shared, const Problem& problem, int lane) {
    constexpr int ROWS = OF_A ? BLOCK_M : BLOCK_N;
    const ScaleSource source = OF_A ? problem.sfa : problem.sfb;
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile{};
    while (reader.next(tile, lane)) {
        ScaleSource of_tile = source;
        long long first;
        if constexpr (OF_A) {
            first = tile.row;
            if (source.layout == SCALES_BLOCKED_GROUPS) {
                const int start = tile.group == 0 ? 0 : shared.groups.sorted.ends[tile.group - 1];
                first += tiles_before_group(shared.groups.sorted.ends, tile.group, lane) * 128LL - start;
            }
        } else if (source.layout == SCALES_PLAIN) {
            first = static_cast<long long>(tile.group) * problem.n + tile.column;
        } else {  // every group is a matrix of tiles of its own
            first = tile.column;
            of_tile.bytes += tile.group * ((problem.n + 127) / 128 * 512LL) * source.column_tiles();
        }
        // Rows and columns that do not exist take the scales of the last one: they are dropped with the sums.
        const int last = OF_A ? tile.rows - 1 : problem.n - 1 - tile.column;
        const uint8_t* at[ROWS / 32];
        uint32_t words[ROWS / 32];
#pragma unroll
        for (int i = 0; i < ROWS / 32; ++i) {
            int row = lane + 32 * i;
            if constexpr (!OF_A && COLUMNS_ARE_INTERLEAVED)
                row = interleaved_weight_row(problem, tile.column, row) - tile.column;
            at[i] = of_tile.of_row(first + (row < last ? row : last));
            words[i] = of_tile.word(at[i], 0);
        }
        for (int kb = 0; kb < k_blocks; ++kb) {
            uint32_t pairs[ROWS / 32][2];
#pragma unroll
            for (int i = 0; i < ROWS / 32; ++i) {
                pairs[i][0] = scale_pair<BYTES_0_1>(words[i]);
                pairs[i][1] = scale_pair<BYTES_2_3>(words[i]);
            }
            const int existing = source.columns - kb * STEPS;
            if (existing < STEPS) {  // past K: zero, whatever was read
#pragma unroll
                for (int i = 0; i < ROWS / 32; ++i) {
                    pairs[i][0] &= existing < 2 ? 0xFFFF : ~0u;
                    pairs[i][1] &= existing < 3 ? 0 : 0xFFFF;
                }
            }
            if (kb + 1 < k_blocks) {
                if (source.are_words()) {
#pragma unroll
                    for (int i = 0; i < ROWS / 32; ++i) {
                        at[i] += source.to_next_stage();
                        words[i] = __ldg(reinterpret_cast<const uint32_t*>(at[i]));
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < ROWS / 32; ++i) words[i] = of_tile.word(at[i], kb + 1);
                }
            }
            const int stage = pipeline.stage;
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            const uint32_t to = OF_A ? shared_address(shared.sfa[stage][lane])
                                     : shared_address(shared.v[stage]) + v_offset(lane);
#pragma unroll
            for (int i = 0; i < ROWS / 32; ++i)  // V's offsets are linear in steps of 8 columns
                st_shared_v2_b32(
                    to + i * (OF_A ? 32 * static_cast<int>(sizeof(shared.sfa[0][0])) : v_offset(32)),
                    pairs[i][0], pairs[i][1]);
            if constexpr (!OF_A) fence_proxy_async_shared();  // the tensor core reads V itself
            mbarrier_arrive(shared_address(&shared.full[stage]));
            pipeline.advance();
        }
        if (lane == 0) reader.release();
        reader.advance();
    }
}
