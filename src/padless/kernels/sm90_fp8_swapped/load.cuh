// The producer of sm90_fp8_swapped_grouped_gemm.cu: one thread keeps the ring of stages full.
#pragma once

struct LoadMaps {
    const TensorMap &tokens, &last_tokens, &weights, &sfa;  // boxes of 64 tokens, of STEP_M, of 64 weights
};

__device__ __forceinline__ void load_tiles(SharedStorage& shared, const Problem& problem,
                                           const LoadMaps& maps) {
    Reader reader(shared.queue);
    Pipeline<STAGES> pipeline;
    const int k_blocks = problem.k_blocks();
    Tile tile;
    while (reader.next(tile)) {
        const int m64s = problem.m64s(tile), columns = columns_of(tile);
        const uint32_t bytes = m64s * M64_BYTES + columns * BLOCK_K + SFA_COPY_FLOATS * 4;
        for (int kb = 0; kb < k_blocks; ++kb) {
            const int stage = pipeline.stage, k = kb * BLOCK_K;
            const uint32_t full = shared_address(&shared.full[stage]);
            mbarrier_wait(shared_address(&shared.empty[stage]), pipeline.phase ^ 1);
            mbarrier_arrive_expect_tx(full, bytes);
#pragma unroll
            for (int i = 0; i < TILE_M64S; ++i)
                if (i < m64s)
                    tma_load_3d(maps.weights, shared_address(shared.weights[stage] + i * M64_BYTES), full, k,
                                tile.column + i * WGMMA_M, tile.group);
            int row = 0;
            for (; row + 64 <= columns; row += 64)
                tma_load_2d(maps.tokens, shared_address(shared.tokens[stage] + row * BLOCK_K), full, k,
                            tile.row + row);
            for (; row < columns; row += STEP_M)
                tma_load_2d(maps.last_tokens, shared_address(shared.tokens[stage] + row * BLOCK_K), full, k,
                            tile.row + row);
            tma_load_2d(maps.sfa, shared_address(shared.sfa[stage]), full, tile.row & ~3, kb);
            pipeline.advance();
        }
        reader.release();
        reader.advance();
    }
}
